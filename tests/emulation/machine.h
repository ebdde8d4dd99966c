// A multiprocessor on the CPU: the threads of a block are fibers, blocks run one after the other. What several threads
// do together, and what is done beside them, is emulated; what a kernel must not do is reported as a fault.
//
// Asynchronous work may take place at any moment that the machine allows: at once, as late as can be, or at random
// (`Timing`); and warps rest at random. So a wait that is missing shows in the results, or as a fault:
//   - shared memory that an asynchronous copy is about to write holds NaN until then;
//   - a read and a write of the same 16 bytes by two warps need a barrier between them (accesses by ptx/ alone);
//   - additions are made in a turn, and have to be there before it is passed on;
//   - a block in which nothing can go on hangs, and the fault says who waits for what.
#pragma once
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace machine {

// ---- faults -----------------------------------------------------------------------------------------

inline int faults = 0;

template <class... Args>
inline void fault(const char* format, Args... args) {
  if (++faults > 20) return;
  std::printf("fault: ");
  if constexpr (sizeof...(args) == 0) {
    std::printf("%s", format);
  } else {
    std::printf(format, args...);
  }
  std::printf("\n");
}

// ---- threads ----------------------------------------------------------------------------------------

enum class Timing { AT_ONCE, LATE, RANDOM };
inline Timing timing = Timing::RANDOM;
inline std::mt19937 chance(1);
// Whether something asynchronous takes place now.
inline bool now() { return timing == Timing::AT_ONCE || (timing == Timing::RANDOM && chance() % 2 == 0); }

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

// For each thread of the block, how much of what it has done is known to have happened.
using Known = std::vector<uint32_t>;
inline void learn(Known& known, const Known& more) {
  known.resize(std::max(known.size(), more.size()));
  for (size_t i = 0; i < more.size(); ++i) known[i] = std::max(known[i], more[i]);
}

struct Thread {
  ucontext_t context;  // to begin with
  jmp_buf place;       // to go on: without the system calls of swapcontext
  bool has_begun = false;
  int index = 0;
  bool is_done = false;
  const char* waits_for = nullptr;
  std::function<bool()> is_over;  // what it waits for
  int lingers = 0;                // rounds that it does not run
  Known known;                    // of itself: what it is about to do
  std::map<const int32_t*, int32_t> loaded;  // counters of turns, when it last looked
};

inline std::vector<Thread> threads;
inline Thread* current;
inline jmp_buf scheduler;
inline Index block, grid;
inline std::function<void()> body;

inline int warp() { return current->index / 32; }

inline void run_on(Thread& thread) {
  current = &thread;
  if (_setjmp(scheduler)) return;
  if (thread.has_begun) _longjmp(thread.place, 1);
  thread.has_begun = true;
  setcontext(&thread.context);
}
inline void pause() {
  if (!_setjmp(current->place)) _longjmp(scheduler, 1);
}

// After what lets others go on: sometimes they go on for long before this thread does.
inline void linger() {
  if (timing == Timing::AT_ONCE || chance() % 16 != 0) return;
  current->lingers = chance() % 512;
  pause();
}

template <class IsOver>
inline void wait(const char* what, IsOver is_over) {
  if (is_over() && chance() % 4 != 0) return;
  current->waits_for = what;
  current->is_over = is_over;
  pause();
  current->waits_for = nullptr;
}

// Groups of `size` threads that do something together: the last to come runs `act` on what all have brought.
struct Meeting {
  int here = 0;
  uint64_t number = 0;
  const char* what = nullptr;
  std::vector<void*> brought;
};
inline std::map<std::pair<int, int>, Meeting> meetings;

template <class Brought, class Act>
inline void together(int size, const char* what, Brought& brought, Act act) {
  Meeting& meeting = meetings[{size, current->index / size}];
  meeting.brought.resize(size);
  if (meeting.here == 0) meeting.what = what;
  if (std::strcmp(meeting.what, what) != 0)
    fault("thread %d does %s where others of its group do %s", current->index, what, meeting.what);
  meeting.brought[current->index % size] = &brought;
  const uint64_t number = meeting.number;
  if (++meeting.here < size) {
    wait(what, [&meeting, number] { return meeting.number != number; });
    return;
  }
  std::vector<Brought*> all;
  for (void* one : meeting.brought) all.push_back(static_cast<Brought*>(one));
  act(all);
  meeting.here = 0;
  ++meeting.number;
}

// ---- shared memory ----------------------------------------------------------------------------------

constexpr uint32_t SHARED_BASE = 0x400;  // of its addresses; nothing should count on 0
constexpr size_t SHARED_SIZE = 227 << 10;
inline unsigned char* shared;  // of the kernel that runs
inline size_t shared_bytes;    // of a block

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - shared) + SHARED_BASE;
}
inline unsigned char* at(uint32_t address, size_t bytes) {
  static unsigned char nowhere[1 << 16];
  if (address >= SHARED_BASE && address - SHARED_BASE + bytes <= shared_bytes) return shared + (address - SHARED_BASE);
  fault("%zu bytes at %#x of shared memory: a block has %#zx", bytes, address, shared_bytes);
  return nowhere;
}

// Who has used 16 bytes since which barrier. Warps run in step, so only others count.
struct Chunk {
  static constexpr int NOBODY = -1, SEVERAL = -2;
  uint32_t written = 0, read = 0;  // since the barrier of this number
  int writer = NOBODY, reader = NOBODY;
  int copies = 0;  // under way
};
inline Chunk chunks[SHARED_SIZE / 16];
inline uint32_t barriers;  // of all threads of the block, so far

inline Chunk& chunk_of(uint32_t address) { return chunks[(address - SHARED_BASE) / 16 % (SHARED_SIZE / 16)]; }

inline void note_read(uint32_t address) {
  Chunk& chunk = chunk_of(address);
  if (chunk.copies > 0) fault("warp %d reads %#x, to which a copy is under way", warp(), address);
  if (chunk.writer != Chunk::NOBODY && chunk.writer != warp() && chunk.written == barriers)
    fault("warp %d reads %#x, which warp %d has written since the last barrier", warp(), address, chunk.writer);
  const bool is_first = chunk.reader == Chunk::NOBODY || chunk.read != barriers;
  chunk.reader = is_first || chunk.reader == warp() ? warp() : Chunk::SEVERAL;
  chunk.read = barriers;
}
inline void note_write(uint32_t address) {
  Chunk& chunk = chunk_of(address);
  if (chunk.reader != Chunk::NOBODY && chunk.reader != warp() && chunk.read == barriers)
    fault("warp %d writes %#x, which another has read since the last barrier", warp(), address);
  if (chunk.writer != Chunk::NOBODY && chunk.writer != warp() && chunk.written == barriers)
    fault("warp %d writes %#x, as warp %d has since the last barrier", warp(), address, chunk.writer);
  chunk.writer = warp();
  chunk.written = barriers;
}

// What is done beside the threads: now, or at any later time, in any order.
struct Work {
  std::function<void()> act;
  bool outlasts_block;
};
inline std::vector<Work> under_way;
inline void start(std::function<void()> act, bool outlasts_block = false) {
  now() ? act() : under_way.push_back({std::move(act), outlasts_block});
}
inline bool finish_one() {
  if (under_way.empty()) return false;
  std::swap(under_way[chance() % under_way.size()], under_way.back());
  const Work work = std::move(under_way.back());
  under_way.pop_back();
  work.act();
  return true;
}

// What a block leaves behind that the next one must not find.
inline std::vector<std::function<void()>> resets;

// ---- what is known to have happened -----------------------------------------------------------------

// At a barrier a thread tells what it knows, and learns what the others have told. Nothing else orders what two threads do
// to device memory.
inline void tell(Known& told) {
  learn(told, current->known);
  ++current->known[current->index];
}
inline void meet(int size, const char* what, const std::function<void()>& act = [] {}) {
  Thread* self = current;
  together(size, what, self, [&](const std::vector<Thread**>& all) {
    act();
    Known joint;
    for (Thread** one : all) learn(joint, (*one)->known);
    for (Thread** one : all) {
      (*one)->known = joint;
      ++(*one)->known[(*one)->index];
    }
  });
}
inline void sync_warp() { meet(32, "__syncwarp"); }
inline void barrier() {
  meet(static_cast<int>(threads.size()), "__syncthreads", [] { ++barriers; });
}

// ---- additions in turn ------------------------------------------------------------------------------

// Whether they have to be: a thread adds when it knows that somebody has waited for the turn, and who passes the turn on
// knows of that, and of all additions in it that they are made.
inline bool adds_in_turn = false;

struct Addition {
  int thread;
  uint32_t when;  // it was made, by the thread's own count
  bool is_made;
};
struct Turn {
  const int32_t* counter;
  int taker;
  uint32_t when;
  std::vector<Addition> additions;
};
inline std::vector<Turn> turns;  // in the order in which they were taken, until they are passed on
inline bool knows(int thread, uint32_t when) { return current->known[thread] >= when; }

inline void take_turn(const int32_t* counter) {
  std::erase_if(turns, [&](const Turn& turn) { return turn.counter == counter && turn.additions.empty(); });
  turns.push_back({counter, current->index, current->known[current->index], {}});
}
inline void note_addition(bool is_made) {
  if (!adds_in_turn) return;
  for (size_t i = turns.size(); i-- > 0;) {
    if (!knows(turns[i].taker, turns[i].when)) continue;
    std::vector<Addition>& additions = turns[i].additions;
    const Addition addition = {current->index, current->known[current->index], is_made};
    const bool is_like_last = !additions.empty() && additions.back().thread == addition.thread &&
                              additions.back().when == addition.when && additions.back().is_made == is_made;
    if (!is_like_last) additions.push_back(addition);
    return;
  }
  fault("thread %d adds, and knows of no turn", current->index);
}
// All of this thread.
inline void additions_are_made() {
  for (Turn& turn : turns)
    for (Addition& addition : turn.additions)
      if (addition.thread == current->index) addition = {addition.thread, current->known[addition.thread], true};
}
inline void pass_turn(const int32_t* counter) {
  const auto turn = std::find_if(turns.begin(), turns.end(), [&](const Turn& one) { return one.counter == counter; });
  if (turn == turns.end() || !knows(turn->taker, turn->when))
    return fault("thread %d passes a turn on that it knows nobody to have waited for", current->index);
  for (const Addition& addition : turn->additions)
    if (!addition.is_made || !knows(addition.thread, addition.when))
      fault("thread %d passes a turn on, and does not know an addition of thread %d to be made", current->index,
            addition.thread);
  turns.erase(turn);
}

// ---- running ----------------------------------------------------------------------------------------

inline void begin_thread() {
  body();
  current->is_done = true;
  pause();
}

[[noreturn]] inline void hang() {
  std::map<std::string, int> waiting;
  for (const Thread& thread : threads)
    if (!thread.is_done) ++waiting["of warp " + std::to_string(thread.index / 32) + " wait for " + thread.waits_for];
  fault("block %u hangs", block.x);
  for (const auto& [what, count] : waiting) std::printf("  %d threads %s\n", count, what.c_str());
  std::exit(1);
}

inline void run_block(int block_threads) {
  constexpr size_t STACK_BYTES = 256 << 10;
  static std::vector<void*> stacks;
  while (stacks.size() < static_cast<size_t>(block_threads))
    stacks.push_back(mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  threads.assign(block_threads, Thread());
  for (int i = 0; i < block_threads; ++i) {
    Thread& thread = threads[i];
    thread.index = i;
    thread.known.resize(block_threads);
    thread.known[i] = 1;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = stacks[i];
    thread.context.uc_stack.ss_size = STACK_BYTES;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, begin_thread, 0);
  }
  meetings.clear();
  for (const auto& reset : resets) reset();
  std::memset(shared, 0xff, SHARED_SIZE);  // NaN
  for (Chunk& chunk : chunks) chunk = Chunk();

  int rest[32] = {};  // rounds that a warp does not run
  for (bool is_over = false; !is_over;) {
    is_over = true;
    bool any_ran = false, any_rests = false;
    for (int& rounds : rest) rounds -= rounds > 0;
    if (timing != Timing::AT_ONCE && chance() % 8 == 0) rest[chance() % (block_threads / 32)] = chance() % 64;
    const int first = chance() % block_threads;
    for (int i = 0; i < block_threads; ++i) {
      Thread& thread = threads[(first + i) % block_threads];
      if (thread.is_done) continue;
      is_over = false;
      if (rest[thread.index / 32] > 0 || thread.lingers > 0) {
        thread.lingers -= thread.lingers > 0;
        any_rests = true;
      } else if (!thread.waits_for || thread.is_over()) {
        any_ran = true;
        run_on(thread);
      }
    }
    if (timing == Timing::RANDOM && chance() % 3 == 0) any_ran |= finish_one();
    if (!is_over && !any_ran && !any_rests && !finish_one()) hang();
  }
  for (const Turn& turn : turns) fault("thread %d waited for a turn that is not passed on", turn.taker);
  turns.clear();
  for (const Work& work : under_way)
    work.outlasts_block ? work.act() : fault("block %u ends with a copy under way", block.x);
  under_way.clear();
}

template <class Params>
inline void run(void (*kernel)(Params), unsigned blocks, int block_threads, size_t bytes, const Params& params,
                unsigned char* memory) {
  shared = memory;
  shared_bytes = bytes;
  grid = {blocks, 1, 1};
  body = [&] { kernel(params); };
  for (block = {}; block.x < blocks; ++block.x) run_block(block_threads);
}

// ---- 16-bit elements --------------------------------------------------------------------------------

inline float to_float(uint16_t bits, bool is_bf16) {
  if (!is_bf16) {
    _Float16 half;
    std::memcpy(&half, &bits, 2);
    return static_cast<float>(half);
  }
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}
inline uint16_t to_bits(float x, bool is_bf16) {
  uint16_t bits;
  if (!is_bf16) {
    const _Float16 half = static_cast<_Float16>(x);
    std::memcpy(&bits, &half, 2);
    return bits;
  }
  uint32_t wide;
  std::memcpy(&wide, &x, 4);
  if (x != x) return 0x7fff;
  return static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}

}  // namespace machine
