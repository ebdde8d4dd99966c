// Backward, step 3: accumulators to the output type, parts summed in order.
//
// grid   a warp for each 16 rows x 32 columns of a (batch, head)
// Bound by memory: the accumulators are read once, each lane its own numbers as they lie. Four lanes then exchange what
// they have of four pieces, so that each writes 16 bytes of a row.
#include "../launch.cuh"
#include "accumulator.cuh"
#include "element.cuh"
#include "sequence.cuh"

namespace {

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int ROWS = 16, PIECES = 4, COLS = 8 * PIECES;  // of a warp

__host__ __device__ unsigned row_tiles(const ConvertParams& p) { return (p.seqlen + ROWS - 1) / ROWS; }
__host__ __device__ unsigned col_tiles(const ConvertParams& p) { return (p.head_dim + COLS - 1) / COLS; }

template <class Element>
__global__ void __launch_bounds__(THREADS) convert_kernel(const __grid_constant__ ConvertParams p) {
  // 32 bits: there is no memory for so many tiles.
  const unsigned tile = blockIdx.x * WARPS + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const unsigned rows = row_tiles(p), cols = col_tiles(p);
  const int first_col = tile % cols * COLS, first_row = tile / cols % rows * ROWS;
  const int batch_head = tile / cols / rows;
  if (batch_head >= p.batch * p.num_heads) return;

  const int64_t acc_size = static_cast<int64_t>(padded_rows(p.seqlen)) * p.acc_cols;
  float sum[PIECES][4] = {};
  for (int part = 0; part < p.parts; ++part) {
    const float* piece = p.acc + (static_cast<int64_t>(part) * p.batch * p.num_heads + batch_head) * acc_size +
                         AccLayout::piece(first_row, first_col, p.acc_cols);
    float x[PIECES][4];
#pragma unroll
    for (int j = 0; j < PIECES; ++j) load_piece(x[j], piece + j * AccLayout::PIECE, lane);
#pragma unroll
    for (int j = 0; j < PIECES; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r) sum[j][r] += x[j][r];
  }
  const int col = first_col + lane % 4 * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t words[PIECES];
#pragma unroll
    for (int j = 0; j < PIECES; ++j)
      words[j] = pack<Element>(sum[j][2 * half] * p.scale, sum[j][2 * half + 1] * p.scale);
    transpose_in_quad(words, lane);
    const int row = first_row + 8 * half + lane / 4;
    if (row >= p.seqlen || col >= p.head_dim) continue;
    uint16_t* out = static_cast<uint16_t*>(p.out) + contiguous_offset(batch_head / p.num_heads, p.seqlen, p.num_heads,
                                                                     p.head_dim, row, batch_head % p.num_heads);
    *reinterpret_cast<uint4*>(out + col) = {words[0], words[1], words[2], words[3]};
  }
}

}  // namespace

extern "C" cudaError_t flash_bwd_convert(const ConvertParams* params, cudaStream_t stream) {
  const ConvertParams& p = *params;
  const int64_t tiles = static_cast<int64_t>(p.batch) * p.num_heads * row_tiles(p) * col_tiles(p);
  return launch(p.element == ELEMENT_F16 ? convert_kernel<F16> : convert_kernel<Bf16>, (tiles + WARPS - 1) / WARPS,
                THREADS, 0, p, stream);
}
