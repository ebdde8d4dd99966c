// Sums of 32-bit numbers in device memory that several blocks add to, in the order in which the
// accumulators of m16n8k16 lie in registers, so that a warp adds whole lines. Only the kernels that
// write them and common/convert.cu know it.
//
// Rows x cols numbers are cut into pieces of 16 x 8, row-major; a piece is the accumulator of one warp.
#pragma once
#include <cstdint>

#include "../ptx/reduce.cuh"

struct AccLayout {
  // Where number r of a lane lies in its piece: together where one instruction adds all four, else such
  // that each instruction adds 128 bytes in a row.
#if __CUDA_ARCH__ >= 900
  static constexpr int LANE_STRIDE = 4, NUMBER_STRIDE = 1;
#else
  static constexpr int LANE_STRIDE = 1, NUMBER_STRIDE = 32;
#endif
  static constexpr int PIECE = 128;
  // Where the piece at (row, col) begins. From there the next to the right is PIECE further, the next below
  // PIECE * cols / 8.
  __device__ static int64_t piece(int row, int col, int cols) {
    return static_cast<int64_t>(row / 16) * (cols * 16) + col / 8 * PIECE;
  }
};

// The numbers of a lane in the piece from `piece` on.
__device__ __forceinline__ void load_piece(float (&x)[4], const float* piece, int lane) {
  const float* at = piece + lane * AccLayout::LANE_STRIDE;
#if __CUDA_ARCH__ >= 900
  const float4 all = *reinterpret_cast<const float4*>(at);
  x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
#else
#pragma unroll
  for (int r = 0; r < 4; ++r) x[r] = at[r * AccLayout::NUMBER_STRIDE];
#endif
}

// Turns four numbers of each of four lanes, a matrix of 4 x 4 in rows, into the rows of its transpose.
__device__ __forceinline__ void transpose_in_quad(uint32_t (&x)[4], int lane) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = lane & step;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int low = step == 1 ? 2 * pair : pair, high = low + step;
      const uint32_t received = __shfl_xor_sync(~0u, upper ? x[low] : x[high], step);
      x[low] = upper ? received : x[low];
      x[high] = upper ? x[high] : received;
    }
  }
}

// Adds the accumulators of a warp to the pieces from `piece` on, of a sum with COLS columns.
template <int COLS, int M_TILES, int N_TILES>
__device__ __forceinline__ void add_to_pieces(float* piece, const float (&acc)[M_TILES][N_TILES][4],
                                              int lane) {
  float* at = piece + lane * AccLayout::LANE_STRIDE;
#pragma unroll
  for (int i = 0; i < M_TILES; ++i)
#pragma unroll
    for (int j = 0; j < N_TILES; ++j) {
      float* to = at + i * COLS * 16 + j * AccLayout::PIECE;
#if __CUDA_ARCH__ >= 900
      ptx::red_add_v4(to, acc[i][j]);
#else
#pragma unroll
      for (int r = 0; r < 4; ++r) ptx::red_add(to + r * AccLayout::NUMBER_STRIDE, acc[i][j][r]);
#endif
    }
}

// Writes them.
template <int COLS, int M_TILES, int N_TILES>
__device__ __forceinline__ void store_pieces(float* piece, const float (&acc)[M_TILES][N_TILES][4],
                                              int lane) {
  float* at = piece + lane * AccLayout::LANE_STRIDE;
#pragma unroll
  for (int i = 0; i < M_TILES; ++i)
#pragma unroll
    for (int j = 0; j < N_TILES; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r)
        at[i * COLS * 16 + j * AccLayout::PIECE + r * AccLayout::NUMBER_STRIDE] = acc[i][j][r];
}
