// Results from accumulators to device memory.
#pragma once
#include "../common/accumulator.cuh"
#include "../common/element.cuh"

// Writes the 16 rows of a warp, rounded, to the rows from `first_row` on of a head, as far as `end_row` and
// `head_dim` go: of each row a lane writes 16 bytes of every 64.
template <class Element, int N_TILES>
__device__ __forceinline__ void store_rows(const float (&acc)[1][N_TILES][4], uint16_t* head, int64_t row_stride,
                                           int first_row, int end_row, int head_dim, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + 8 * half + lane / 4;
    uint16_t* out = head + row * row_stride;
#pragma unroll
    for (int j = 0; j < N_TILES; j += 4) {
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = pack<Element>(acc[0][j + i][2 * half], acc[0][j + i][2 * half + 1]);
      transpose_in_quad(x, lane);
      const int col = 8 * (j + lane % 4);
      if (row < end_row && col < head_dim) *reinterpret_cast<uint4*>(out + col) = {x[0], x[1], x[2], x[3]};
    }
  }
}
