// What compute capability 9.0 adds to the machine: barriers that count, the copy engine, products of warpgroups.
//
// A product reads its operands at any time between its commit and its wait, and its accumulators hold NaN until then.
// Each warp's part of it is a product of its own.
// Faults: a write to operands or accumulators meanwhile; operands from ordinary stores without a proxy fence; a product
// without a fence before it; barriers and descriptors that are not as the manual wants them.
#pragma once
#include <cuda.h>

#include "machine.h"

namespace machine {

constexpr int WARPGROUP = 128;

// ---- barriers in shared memory ----------------------------------------------------------------------

struct CountingBarrier {
  int arrivals = 0, missing = 0;
  int64_t bytes = 0;  // missing
  uint32_t phase = 0;
  Known told, known;  // in this phase, and in the last one

  void settle() {
    if (missing == 0 && bytes == 0) {
      phase ^= 1;
      missing = arrivals;
      known = std::move(told);
      told.clear();
    }
  }
};
inline std::map<uint32_t, CountingBarrier> counting_barriers;
inline CountingBarrier& counting_barrier(uint32_t address) {
  if (!counting_barriers.count(address)) fault("mbarrier %#x was never made", address);
  return counting_barriers[address];
}
inline void make_barrier(uint32_t address, int arrivals) {
  if (address % 8 != 0) fault("mbarrier %#x is misaligned", address);
  at(address, 8);
  counting_barriers[address] = {arrivals, arrivals};
}
inline void arrive(uint32_t address, int64_t bytes) {
  CountingBarrier& barrier = counting_barrier(address);
  if (barrier.missing == 0) fault("mbarrier %#x: more than %d arrivals", address, barrier.arrivals);
  tell(barrier.told);
  --barrier.missing;
  barrier.bytes += bytes;
  barrier.settle();
}
inline void complete(uint32_t address, int64_t bytes) {
  CountingBarrier& barrier = counting_barrier(address);
  barrier.bytes -= bytes;
  barrier.settle();
}
inline void wait_for_phase(uint32_t address, uint32_t parity) {
  counting_barrier(address);
  wait("an mbarrier", [address, parity] { return counting_barriers[address].phase != parity % 2; });
  learn(current->known, counting_barriers[address].known);
}

// ---- barriers by number -----------------------------------------------------------------------------

struct NamedBarrier {
  int here = 0, expected = 0;
  uint64_t number = 0;
  bool any = false, result = false;  // of what the threads bring
  Known told, known;
};
inline std::map<int, NamedBarrier> named_barriers;
inline bool named_barrier(int id, int expected, bool brought) {
  if (id < 1 || id > 15 || expected % 32 != 0) fault("barrier %d of %d threads", id, expected);
  NamedBarrier& barrier = named_barriers[id];
  if (barrier.here == 0) barrier.expected = expected;
  if (barrier.expected != expected) fault("barrier %d: %d threads where others say %d", id, expected, barrier.expected);
  const uint64_t number = barrier.number;
  tell(barrier.told);
  barrier.any |= brought;
  if (++barrier.here == expected) {
    barrier.here = 0;
    ++barrier.number;
    barrier.result = barrier.any;
    barrier.any = false;
    barrier.known = std::move(barrier.told);
    barrier.told.clear();
  } else {
    wait("a named barrier", [&barrier, number] { return barrier.number != number; });
  }
  learn(current->known, barrier.known);
  return barrier.result;  // where all wait, there is no next one before all have it
}

// ---- registers --------------------------------------------------------------------------------------

// Of a thread of each warpgroup.
inline std::map<int, int> registers;
inline int free_registers;
inline void change_registers(int to) {
  char nothing = 0;
  const int warpgroup = current->index / WARPGROUP, warpgroups = static_cast<int>(threads.size()) / WARPGROUP;
  const int from = registers.count(warpgroup) ? registers[warpgroup] : 512 / warpgroups / 8 * 8;
  if (to % 8 != 0 || to < 24 || to > 256) fault("setmaxnreg %d", to);
  wait("registers", [=] { return registers.count(warpgroup) || to <= from + free_registers; });
  together(WARPGROUP, "setmaxnreg", nothing, [=](auto&) {
    free_registers += from - to;
    registers[warpgroup] = to;
  });
}

// ---- products of warpgroups -------------------------------------------------------------------------

// A warp's rows of a product: nobody says that the four warps of a warpgroup wait for each other.
constexpr int LANES = 32;
struct WarpProduct {
  int n;
  bool is_bf16, accumulate, a_across, b_across;
  const uint32_t* a_registers;  // null: A is in shared memory
  uint64_t a, b;                // descriptors
  float* acc;
  // Of all lanes.
  float* accs[LANES];
  const uint32_t* fragments[LANES];
  uint32_t issued[LANES][4];
  int warp = 0;  // of the products: which 16 rows
};
struct WarpProducts {
  std::vector<WarpProduct> open;
  std::vector<std::vector<WarpProduct>> groups;  // the oldest first
  size_t done = 0;                               // products of the oldest group
  bool is_fenced = false;
  // By its address in the first lane: an accumulator in flight, of all lanes, and how many products it is in.
  std::map<float*, std::vector<std::vector<float>>> sums;
  std::map<float*, int> uses;
};
inline std::map<int, WarpProducts> warps;

constexpr uint32_t IN_FLIGHT = 0x7fbadbad;  // a NaN

// Which stores have had no proxy fence since, by thread and by byte.
inline std::map<int, std::vector<std::pair<uint32_t, size_t>>> unfenced_stores;
inline bool is_unfenced[SHARED_SIZE];
inline void proxy_fence() {
  for (const auto& [address, bytes] : unfenced_stores[current->index])
    std::memset(is_unfenced + (address - SHARED_BASE), 0, bytes);
  unfenced_stores[current->index].clear();
}

// Where an element is, `mn` along M or N.
inline uint32_t element_address(uint64_t descriptor, int mn, int k, bool across) {
  const auto field = [descriptor](int bit) { return static_cast<uint32_t>(descriptor >> bit & 0x3fff) << 4; };
  const uint32_t start = field(0), leading = field(16), stride = field(32);
  const int swizzle = static_cast<int>(descriptor >> 62);
  if (swizzle != 1 && swizzle != 2) fault("descriptor with swizzle %d", swizzle);
  if (descriptor >> 49 & 7) fault("descriptor with a base offset");
  const int row_bytes = swizzle == 1 ? 128 : 64, panel = row_bytes / 2;
  const uint32_t address = across ? start + mn / panel * leading + k / 8 * stride + k % 8 * row_bytes + mn % panel * 2
                                  : start + mn / 8 * stride + mn % 8 * row_bytes + k * 2;
  return address ^ (address >> 7 & (swizzle == 1 ? 7 : 3)) << 4;
}
inline float element(uint64_t descriptor, int mn, int k, bool across, bool is_bf16) {
  const uint32_t address = element_address(descriptor, mn, k, across);
  if (is_unfenced[(address - SHARED_BASE) % SHARED_SIZE]) fault("a product reads %#x: no proxy fence", address);
  uint16_t bits;
  std::memcpy(&bits, at(address, 2), 2);
  return to_float(bits, is_bf16);
}

// A write begins: no product under way may still read there.
inline void check_products(uint32_t address, size_t bytes) {
  for (const auto& [index, products] : warps) {
    const auto reads = [&](uint64_t descriptor, int size, bool across) {
      for (int k = 0; k < 16; k += 8)
        for (int mn = 0; mn < size; mn += 8)
          if (element_address(descriptor, mn, k, across) - address < bytes) return true;
      return false;
    };
    const auto check = [&](const WarpProduct& p) {
      if (reads(p.b, p.n, p.b_across) || (!p.a_registers && reads(p.a, 64, p.a_across)))
        fault("a write to %#x: a product of warp %d reads there", address, index);
    };
    for (size_t group = 0; group < products.groups.size(); ++group)
      for (size_t i = group == 0 ? products.done : 0; i < products.groups[group].size(); ++i)
        check(products.groups[group][i]);
    for (const WarpProduct& product : products.open) check(product);
  }
}

// A store by a thread, for products to read.
inline void store(int thread, uint32_t address, const void* data, size_t bytes) {
  check_products(address, bytes);
  std::memcpy(at(address, bytes), data, bytes);
  std::memset(is_unfenced + (address - SHARED_BASE), 1, bytes);
  unfenced_stores[thread].push_back({address, bytes});
}

inline void multiply(WarpProducts& products, const WarpProduct& p) {
  float a[16][16], b[256][16];
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k) {
      if (!p.a_registers) {
        a[row][k] = element(p.a, 16 * p.warp + row, k, p.a_across, p.is_bf16);
        continue;
      }
      const int thread = row % 8 * 4 + k % 8 / 2, reg = row % 16 / 8 + k / 8 * 2;
      const uint32_t bits = p.fragments[thread][reg];
      if (bits != p.issued[thread][reg]) fault("an operand register of thread %d changed during a product", thread);
      a[row][k] = to_float(bits >> k % 2 * 16 & 0xffff, p.is_bf16);
    }
  for (int col = 0; col < p.n; ++col)
    for (int k = 0; k < 16; ++k) b[col][k] = element(p.b, col, k, p.b_across, p.is_bf16);
  auto& sums = products.sums[p.accs[0]];
  for (int thread = 0; thread < LANES; ++thread)
    for (int i = 0; i < p.n / 2; ++i) {
      const int row = thread / 4 + i / 2 % 2 * 8, col = i / 4 * 8 + thread % 4 * 2 + i % 2;
      float sum = p.accumulate ? sums[thread][i] : 0.f;
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[col][k];
      sums[thread][i] = sum;
    }
}

inline void finish_group(WarpProducts& products) {
  const std::vector<WarpProduct> group = std::move(products.groups.front());
  products.groups.erase(products.groups.begin());
  for (size_t i = products.done; i < group.size(); ++i) multiply(products, group[i]);
  products.done = 0;
  for (const WarpProduct& p : group) {
    if (--products.uses[p.accs[0]] > 0) continue;
    const auto& sums = products.sums[p.accs[0]];
    for (int thread = 0; thread < LANES; ++thread)
      for (int i = 0; i < p.n / 2; ++i) {
        if (std::memcmp(&p.accs[thread][i], &IN_FLIGHT, 4) != 0)
          fault("an accumulator of thread %d was written during a product", thread);
        p.accs[thread][i] = sums[thread][i];
      }
    products.sums.erase(p.accs[0]);
  }
}

inline void begin_product(WarpProduct& own) {
  together(LANES, "wgmma", own, [](auto& all) {
    WarpProducts& products = warps[current->index / LANES];
    WarpProduct product = *all[0];
    product.warp = current->index / LANES % 4;
    for (int thread = 0; thread < LANES; ++thread) {
      const WarpProduct& one = *all[thread];
      if (one.a != product.a || one.b != product.b || one.accumulate != product.accumulate)
        fault("thread %d has another wgmma than the first of its warp", thread);
      product.accs[thread] = one.acc;
      product.fragments[thread] = one.a_registers;
      if (one.a_registers) std::memcpy(product.issued[thread], one.a_registers, 16);
    }
    const size_t numbers = product.n / 2;
    if (auto found = products.sums.find(product.accs[0]); found == products.sums.end()) {
      if (!products.is_fenced) fault("a product without a fence before it");
      auto& sums = products.sums[product.accs[0]];
      for (int lane = 0; lane < LANES; ++lane) {
        float* acc = product.accs[lane];
        sums.emplace_back(acc, acc + numbers);
        for (size_t i = 0; i < numbers; ++i) std::memcpy(&acc[i], &IN_FLIGHT, 4);
      }
    } else if (found->second[0].size() != numbers) {
      fault("products of two shapes with the same accumulators");
    }
    ++products.uses[product.accs[0]];
    products.open.push_back(product);
  });
}
inline void fence_products() {
  char nothing = 0;
  together(LANES, "wgmma.fence", nothing, [](auto&) { warps[current->index / LANES].is_fenced = true; });
}
inline void commit_products() {
  char nothing = 0;
  together(LANES, "wgmma.commit_group", nothing, [](auto&) {
    WarpProducts& products = warps[current->index / LANES];
    products.groups.push_back(std::move(products.open));
    products.open.clear();
    // In order. The accumulators come back with the wait.
    if (products.groups.size() > 1 || !now()) return;
    for (const WarpProduct& product : products.groups[0]) multiply(products, product);
    products.done = products.groups[0].size();
  });
}
inline void wait_for_products(size_t pending) {
  char nothing = 0;
  together(LANES, "wgmma.wait_group", nothing, [pending](auto&) {
    WarpProducts& products = warps[current->index / LANES];
    while (products.groups.size() > pending) finish_group(products);
    products.is_fenced = false;
  });
}

// ---- the copy engine --------------------------------------------------------------------------------

// What a CUtensorMap holds here.
struct Map {
  const unsigned char* base;
  uint64_t sizes[4], strides[3];
  uint32_t box[2];
  bool is_128;  // the swizzle: of 128 bytes, else of 64
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap));

inline CUresult encode_map(CUtensorMap* to, CUtensorMapDataType, cuuint32_t rank, void* base, const cuuint64_t* sizes,
                           const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                           CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  Map map{static_cast<unsigned char*>(base), {}, {}, {box[0], box[1]}, swizzle == CU_TENSOR_MAP_SWIZZLE_128B};
  bool is_valid = rank == 4 && reinterpret_cast<uintptr_t>(base) % 16 == 0 && box[0] * 2 <= (map.is_128 ? 128 : 64) &&
                  box[1] <= 256 && box[2] == 1 && box[3] == 1 &&
                  (map.is_128 || swizzle == CU_TENSOR_MAP_SWIZZLE_64B);
  for (int i = 0; i < 4; ++i) {
    map.sizes[i] = sizes[i];
    is_valid &= sizes[i] > 0 && sizes[i] <= 1ull << 32 && box[i] > 0;
    if (i == 3) break;
    map.strides[i] = strides[i];
    is_valid &= strides[i] % 16 == 0 && strides[i] < 1ull << 40;
  }
  std::memcpy(to, &map, sizeof map);
  return is_valid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// Until a copy ends there is NaN where it goes.
inline void begin_copy(uint32_t smem, size_t bytes) {
  check_products(smem, bytes);
  std::memset(at(smem, bytes), 0xff, bytes);
  std::memset(is_unfenced + (smem - SHARED_BASE), 0, bytes);
}

inline void copy_box(uint32_t smem, const void* tensor_map, uint32_t barrier, const int (&coordinates)[4]) {
  Map map;
  std::memcpy(&map, tensor_map, sizeof map);
  const uint32_t row_bytes = map.is_128 ? 128 : 64;
  const size_t bytes = static_cast<size_t>(row_bytes) * map.box[1];
  if (map.box[0] * 2 != row_bytes || smem % (8 * row_bytes) != 0) fault("a box to %#x", smem);
  begin_copy(smem, bytes);
  const std::vector<int64_t> from(coordinates, coordinates + 4);
  start([=] {
    const auto is_inside = [&](int i, int64_t x) { return x >= 0 && x < static_cast<int64_t>(map.sizes[i]); };
    for (uint32_t row = 0; row < map.box[1]; ++row)
      for (uint32_t col = 0; col < map.box[0]; ++col) {
        const int64_t x = from[0] + col, y = from[1] + row;
        uint16_t value = 0;
        if (is_inside(0, x) && is_inside(1, y) && is_inside(2, from[2]) && is_inside(3, from[3]))
          std::memcpy(&value, map.base + 2 * x + y * map.strides[0] + from[2] * map.strides[1] + from[3] * map.strides[2], 2);
        const uint32_t to = smem + row * row_bytes + col * 2;
        std::memcpy(at(to ^ (to >> 7 & (map.is_128 ? 7 : 3)) << 4, 2), &value, 2);
      }
    complete(barrier, bytes);
  });
}

inline void copy_bytes(uint32_t smem, const void* gmem, uint32_t bytes, uint32_t barrier) {
  if (smem % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(gmem) % 16) fault("a copy of %u bytes to %#x", bytes, smem);
  begin_copy(smem, bytes);
  start([=] {
    std::memcpy(at(smem, bytes), gmem, bytes);
    complete(barrier, bytes);
  });
}

// How many a thread has under way: they read at any time, and add at any time after that, also when the block has ended.
struct Additions {
  int unread = 0, unmade = 0;
};
inline std::map<int, Additions> additions;
inline void add_bytes(float* gmem, uint32_t smem, uint32_t bytes) {
  if (smem % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(gmem) % 16) fault("an addition of %u bytes from %#x", bytes, smem);
  for (uint32_t i = 0; i < bytes; ++i)
    if (is_unfenced[(smem + i - SHARED_BASE) % SHARED_SIZE]) fault("an addition reads %#x: no proxy fence", smem + i);
  note_addition(false);
  Additions& own = additions[current->index];
  ++own.unread;
  ++own.unmade;
  start([=, &own] {
    std::vector<float> numbers(bytes / 4);
    std::memcpy(numbers.data(), at(smem, bytes), bytes);
    --own.unread;
    start([=, &own] {
      for (size_t i = 0; i < numbers.size(); ++i) gmem[i] += numbers[i];
      --own.unmade;
    }, true);
  });
}
inline void wait_until_read() {
  const Additions& own = additions[current->index];
  wait("an addition's reads", [&own] { return own.unread == 0; });
}
inline void wait_until_added() {
  const Additions& own = additions[current->index];
  wait("an addition", [&own] { return own.unmade == 0; });
  additions_are_made();
}

inline const bool these_end_with_the_block = (resets.push_back([] {
  counting_barriers.clear();
  named_barriers.clear();
  registers.clear();
  free_registers = 0;
  for (const auto& [index, warp] : warps)
    if (!warp.groups.empty() || !warp.open.empty()) fault("warp %d ended with products under way", index);
  warps.clear();
  additions.clear();
  unfenced_stores.clear();
  std::memset(is_unfenced, 0, sizeof is_unfenced);
}), true);

}  // namespace machine
