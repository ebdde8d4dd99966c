// Backward, step 3: accumulators to the output type, parts summed in order.
//
// grid   one block for each 256 chunks of 8 numbers of the output, over all rows of a (batch, head)
// Bound by memory: the accumulators are read once.
#include "../launch.cuh"
#include "accumulator.cuh"
#include "element.cuh"
#include "sequence.cuh"

namespace {

constexpr int THREADS = 256;

template <class Element>
__global__ void __launch_bounds__(THREADS) convert_kernel(const __grid_constant__ ConvertParams p) {
  const int row_chunks = p.head_dim / 8;
  const int64_t chunk = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  const int64_t row_of_all = chunk / row_chunks;
  const int col = chunk % row_chunks * 8;
  const int64_t batch_head = row_of_all / p.seqlen;
  const int row = row_of_all % p.seqlen;
  if (batch_head >= static_cast<int64_t>(p.batch) * p.num_heads) return;

  const int64_t acc_size = static_cast<int64_t>(padded_rows(p.seqlen)) * p.acc_cols;
  const int first_lane = row % 8 * 4, first_number = row % 16 / 8 * 2;
  float sum[8] = {};
  for (int part = 0; part < p.parts; ++part) {
    const float* acc = p.acc + (static_cast<int64_t>(part) * p.batch * p.num_heads + batch_head) * acc_size +
                       AccLayout::piece(row, col, p.acc_cols);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sum[i] += acc[(first_lane + i / 2) * AccLayout::LANE_STRIDE + (first_number + i % 2) * AccLayout::NUMBER_STRIDE];
    }
  }
  uint4 packed;
  packed.x = pack<Element>(sum[0] * p.scale, sum[1] * p.scale);
  packed.y = pack<Element>(sum[2] * p.scale, sum[3] * p.scale);
  packed.z = pack<Element>(sum[4] * p.scale, sum[5] * p.scale);
  packed.w = pack<Element>(sum[6] * p.scale, sum[7] * p.scale);
  uint16_t* out = static_cast<uint16_t*>(p.out) + contiguous_offset(batch_head / p.num_heads, p.seqlen, p.num_heads,
                                                                   p.head_dim, row, batch_head % p.num_heads);
  *reinterpret_cast<uint4*>(out + col) = packed;
}

}  // namespace

extern "C" cudaError_t flash_bwd_convert(const ConvertParams* params, cudaStream_t stream) {
  const ConvertParams& p = *params;
  const int64_t chunks = static_cast<int64_t>(p.batch) * p.num_heads * p.seqlen * (p.head_dim / 8);
  return launch(p.element == ELEMENT_F16 ? convert_kernel<F16> : convert_kernel<Bf16>,
                (chunks + THREADS - 1) / THREADS, THREADS, 0, p, stream);
}
