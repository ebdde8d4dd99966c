// In place of kernels/ptx/cp_async.cuh.
#pragma once
#include <deque>

namespace ptx {

struct Copy {
  uint32_t smem;
  const void* gmem;
  bool valid, is_done;
  void run() {
    if (is_done) return;
    is_done = true;
    unsigned char* to = machine::at(smem, 16);
    valid ? std::memcpy(to, gmem, 16) : std::memset(to, 0, 16);
  }
};

// Of a thread: the groups that are committed, then the open one.
using Copies = std::deque<std::vector<Copy>>;
inline std::map<int, Copies> copies;
inline const bool copies_end_with_the_block = (machine::resets.push_back([] { copies.clear(); }), true);
inline Copies& copies_of_thread() {
  Copies& own = copies[machine::current->index];
  if (own.empty()) own.emplace_back();
  return own;
}

inline void cp_async_16(uint32_t smem, const void* gmem, bool valid) {
  if (smem % 16 || (valid && reinterpret_cast<uintptr_t>(gmem) % 16)) machine::fault("cp.async: misaligned");
  machine::note_write(smem);
  ++machine::chunk_of(smem).copies;
  std::memset(machine::at(smem, 16), 0xff, 16);
  Copy copy{smem, gmem, valid, false};
  if (machine::now()) copy.run();
  copies_of_thread().back().push_back(copy);
}

inline void cp_async_commit() { copies_of_thread().emplace_back(); }

template <int PENDING>
inline void cp_async_wait() {
  Copies& own = copies_of_thread();
  while (own.size() > PENDING + 1) {
    for (Copy& copy : own.front()) {
      copy.run();
      --machine::chunk_of(copy.smem).copies;
      machine::note_write(copy.smem);
    }
    own.pop_front();
  }
}

}  // namespace ptx
