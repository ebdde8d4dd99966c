// In place of kernels/ptx/wgmma.cuh.
#pragma once
#include <type_traits>

#include "../common/element.cuh"

namespace ptx {

inline void wgmma_fence() { machine::fence_products(); }
inline void wgmma_commit() { machine::commit_products(); }
template <int PENDING>
inline void wgmma_wait() {
  machine::wait_for_products(PENDING);
}

// The compiler has to leave accumulators in memory, where products write them.
template <int M_TILES, int N_TILES>
inline void hold(float (&)[M_TILES][N_TILES][4]) {
  asm volatile("" ::: "memory");
}

template <class Element, int N>
struct Wgmma {
  static constexpr bool IS_BF16 = std::is_same_v<Element, Bf16>;

  template <bool A_ACROSS, bool B_ACROSS>
  static void ss(float (&acc)[N / 8][4], uint64_t a, uint64_t b, bool accumulate) {
    machine::WarpProduct product{N, IS_BF16, accumulate, A_ACROSS, B_ACROSS, nullptr, a, b, &acc[0][0]};
    machine::begin_product(product);
  }
  template <bool B_ACROSS>
  static void rs(float (&acc)[N / 8][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    machine::WarpProduct product{N, IS_BF16, accumulate, false, B_ACROSS, a, 0, b, &acc[0][0]};
    machine::begin_product(product);
  }
};

}  // namespace ptx
