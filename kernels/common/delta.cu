// Backward, step 1: delta = rowsum(dout * out) (FlashAttention-2, Algorithm 2, line 4) and lse in base 2.
//
// grid   one block for each (batch, head) and 32 padded rows
// block  8 lanes a row, 16 bytes each at a time
// Bound by memory: out and dout are read once.
#include <cmath>

#include "../launch.cuh"
#include "element.cuh"
#include "sequence.cuh"

namespace {

constexpr int LANES = 8, ROWS = 32, THREADS = LANES * ROWS;

template <class Element>
__device__ float dot(const uint4& a, const uint4& b) {
  const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 u = unpack<Element>(x[i]), w = unpack<Element>(y[i]);
    sum += u.x * w.x + u.y * w.y;
  }
  return sum;
}

template <class Element>
__global__ void __launch_bounds__(THREADS) delta_kernel(const __grid_constant__ BwdParams params) {
  const AttnProblem& p = params.problem;
  const int padded = padded_rows(p.seqlen_q);
  const int row_blocks = padded / ROWS;
  const int batch_head = blockIdx.x / row_blocks;
  const int batch = batch_head / p.num_heads, head = batch_head % p.num_heads;
  const int row = blockIdx.x % row_blocks * ROWS + threadIdx.x / LANES, lane = threadIdx.x % LANES;

  // A row of the padding: its probabilities become 2^(0 - inf) = 0.
  float delta = 0.f, lse_log2 = INFINITY;
  if (row < p.seqlen_q) {
    const uint16_t* out = static_cast<const uint16_t*>(params.out) +
                          contiguous_offset(batch, p.seqlen_q, p.num_heads, p.head_dim, row, head);
    const uint16_t* dout = rows_of_head(params.dout, params.dout_strides, batch, head).row(row);
    for (int d = lane * 8; d < p.head_dim; d += LANES * 8) {
      delta += dot<Element>(*reinterpret_cast<const uint4*>(out + d), *reinterpret_cast<const uint4*>(dout + d));
    }
    const float lse = params.lse[static_cast<int64_t>(batch_head) * p.seqlen_q + row];
    // A row that sees nothing has only scores of -inf: 2^(-inf - 0) is 0 where 2^(-inf + inf) is NaN.
    lse_log2 = lse == -INFINITY ? 0.f : lse * 1.4426950408889634f;
  }
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2) delta += __shfl_xor_sync(~0u, delta, mask);
  if (lane == 0) {
    params.delta[static_cast<int64_t>(batch_head) * padded + row] = delta;
    params.lse_log2[static_cast<int64_t>(batch_head) * padded + row] = lse_log2;
  }
}

}  // namespace

extern "C" cudaError_t flash_bwd_delta(const BwdParams* params, cudaStream_t stream) {
  const AttnProblem& p = params->problem;
  const int64_t blocks = static_cast<int64_t>(padded_rows(p.seqlen_q) / ROWS) * p.num_heads * p.batch;
  return launch(p.element == ELEMENT_F16 ? delta_kernel<F16> : delta_kernel<Bf16>, blocks, THREADS, 0, *params,
                stream);
}
