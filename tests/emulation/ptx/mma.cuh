// In place of kernels/ptx/mma.cuh.
#pragma once
#include "../common/element.cuh"

namespace ptx {

struct Product {
  float* acc;
  const uint32_t* a;
  uint32_t b[2];
};

template <class Element>
inline void mma_m16n8k16(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Product brought{acc, a, {b0, b1}};
  machine::together(32, "mma", brought, [](auto& lanes) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4 * 2;
      for (int r = 0; r < 4; ++r) {
        const float2 pair = unpack<Element>(lanes[lane]->a[r]);
        a[g + r % 2 * 8][t + r / 2 * 8] = pair.x;
        a[g + r % 2 * 8][t + r / 2 * 8 + 1] = pair.y;
      }
      for (int r = 0; r < 2; ++r) {
        const float2 pair = unpack<Element>(lanes[lane]->b[r]);
        b[t + r * 8][g] = pair.x;
        b[t + r * 8 + 1][g] = pair.y;
      }
    }
    float sums[16][8] = {};
    for (int k = 0; k < 16; ++k)
      for (int row = 0; row < 16; ++row)
        for (int col = 0; col < 8; ++col) sums[row][col] += a[row][k] * b[k][col];
    for (int lane = 0; lane < 32; ++lane)
      for (int r = 0; r < 4; ++r) lanes[lane]->acc[r] += sums[lane / 4 + r / 2 * 8][lane % 4 * 2 + r % 2];
  });
}

}  // namespace ptx
