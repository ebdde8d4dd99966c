// Cross entropy: the mean over rows of lse - logits[target], lse = log(sum of exp(logits)) of the row, and its
// gradient dlogits = (exp(logits - lse) - [col == target]) * dloss / rows.
//
// forward   one block a row, one look at it with a running maximum; then the mean, one block
// backward  one block a row
//
// A target that is no column makes the loss NaN, and the gradient of its row.
//
// Bound by memory. At 8192 x 50304 bf16 on an H200 (4.3 TB/s): forward 824 MB, 192 us; backward 1648 MB, 383 us.
#include <cmath>

#include "../launch.cuh"
#include "../ptx/math.cuh"
#include "numbers.cuh"
#include "reduce.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int MEAN_THREADS = 1024;
constexpr float LOG2E = 1.4426950408889634f;

// exp(x - shift). The difference comes first: its own rounding is no larger than the result's.
__device__ __forceinline__ float exp_of_difference(float x, float shift) { return ptx::exp2((x - shift) * LOG2E); }

// Minus infinity less itself would be NaN; what has only such numbers sums to 0 from any shift.
__device__ __forceinline__ float finite_shift(float max) { return max == -INFINITY ? 0.f : max; }

template <class N>
__global__ void __launch_bounds__(THREADS) forward_kernel(const __grid_constant__ CrossEntropyParams p) {
  const int64_t row = blockIdx.x, start = row * p.cols;
  float max = -INFINITY, sum = 0.f;
  for (int64_t col = threadIdx.x * N::LENGTH; col < p.cols; col += THREADS * N::LENGTH) {
    float x[N::LENGTH];
    N::load(p.logits, start + col, x);
    float larger = max;
#pragma unroll
    for (int i = 0; i < N::LENGTH; ++i) larger = fmaxf(larger, x[i]);
    const float shift = finite_shift(larger);
    sum *= exp_of_difference(max, shift);
#pragma unroll
    for (int i = 0; i < N::LENGTH; ++i) sum += exp_of_difference(x[i], shift);
    max = larger;
  }
  const float row_max = block_max<THREADS>(max);
  const float shift = finite_shift(row_max);
  const float log_sum = logf(block_sum<THREADS>(sum * exp_of_difference(max, shift)));
  if (threadIdx.x == 0) {
    const uint32_t target = p.targets[row];
    float logit[1] = {NAN};
    if (target < p.cols) Numbers<typename N::Tag, 1>::load(p.logits, start + target, logit);
    p.lse[row] = row_max + log_sum;
    p.losses[row] = log_sum + (row_max - logit[0]);
  }
}

__global__ void __launch_bounds__(MEAN_THREADS) mean_kernel(const __grid_constant__ CrossEntropyParams p) {
  float sum = 0.f;
  for (int64_t row = threadIdx.x; row < p.rows; row += MEAN_THREADS) sum += p.losses[row];
  sum = block_sum<MEAN_THREADS>(sum);
  if (threadIdx.x == 0) *p.loss = sum / p.rows;
}

template <class N>
__global__ void __launch_bounds__(THREADS) backward_kernel(const __grid_constant__ CrossEntropyParams p) {
  const int64_t row = blockIdx.x, start = row * p.cols;
  const int64_t target = p.targets[row];
  const float lse = p.lse[row];
  const float scale = target < p.cols ? *p.dloss / p.rows : NAN;
  for (int64_t col = threadIdx.x * N::LENGTH; col < p.cols; col += THREADS * N::LENGTH) {
    float x[N::LENGTH];
    N::load(p.logits, start + col, x);
#pragma unroll
    for (int i = 0; i < N::LENGTH; ++i) {
      const float prob = exp_of_difference(x[i], lse);
      x[i] = (col + i == target ? prob - 1.f : prob) * scale;
    }
    N::store(p.dlogits, start + col, x);
  }
}

bool is_aligned(const CrossEntropyParams& p) {
  return Aligned(p.element).pointer(p.logits).pointer(p.dlogits).step(p.cols);
}

}  // namespace

extern "C" cudaError_t flash_cross_entropy_fwd(const CrossEntropyParams* params, cudaStream_t stream) {
  const cudaError_t status = with_numbers(params->element, is_aligned(*params), [&](auto numbers) {
    return launch(forward_kernel<decltype(numbers)>, params->rows, THREADS, 0, *params, stream);
  });
  if (status != cudaSuccess) return status;
  return launch(mean_kernel, 1, MEAN_THREADS, 0, *params, stream);
}

extern "C" cudaError_t flash_cross_entropy_bwd(const CrossEntropyParams* params, cudaStream_t stream) {
  return with_numbers(params->element, is_aligned(*params), [&](auto numbers) {
    return launch(backward_kernel<decltype(numbers)>, params->rows, THREADS, 0, *params, stream);
  });
}
