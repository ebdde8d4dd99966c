// The gradients of a whole model: sum += grad, and the norm of all of them as one vector.
//
// add       a thread for 16 bytes of grad
// squares   one block for NUMBERS_TOGETHER numbers of one gradient; a launch for each gradient, all into one array
// norm      one block for the array; no atomics
//
// Bound by memory. With 1.3 G numbers in bf16 on an H200 (4.3 TB/s): add 13 GB, 3.1 ms; squares 2.6 GB, 0.6 ms.
#include "../launch.cuh"
#include "numbers.cuh"
#include "reduce.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int NORM_THREADS = 1024;

template <class N>
__global__ void __launch_bounds__(THREADS) add_kernel(const __grid_constant__ AddGradParams p) {
  using Wide = Numbers<F32, N::LENGTH>;
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x) * N::LENGTH;
  if (at >= p.len) return;
  float sum[N::LENGTH], grad[N::LENGTH];
  Wide::load(p.sum, at, sum);
  N::load(p.grad, at, grad);
#pragma unroll
  for (int i = 0; i < N::LENGTH; ++i) sum[i] += grad[i];
  Wide::store(p.sum, at, sum);
}

template <class N>
__global__ void __launch_bounds__(THREADS) squares_kernel(const __grid_constant__ GradNormParams p) {
  const int64_t start = static_cast<int64_t>(blockIdx.x) * NUMBERS_TOGETHER;
  const int64_t end = min(start + NUMBERS_TOGETHER, p.len);
  float sum = 0.f;
#pragma unroll 4
  for (int64_t at = start + threadIdx.x * N::LENGTH; at < end; at += THREADS * N::LENGTH) {
    float grad[N::LENGTH];
    N::load(p.grad, at, grad);
#pragma unroll
    for (int i = 0; i < N::LENGTH; ++i) sum += grad[i] * grad[i];
  }
  sum = block_sum<THREADS>(sum);
  if (threadIdx.x == 0) p.squares[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(NORM_THREADS) norm_kernel(const __grid_constant__ GradNormParams p) {
  float sum = 0.f;
  for (int64_t i = threadIdx.x; i < p.len; i += NORM_THREADS) sum += p.squares[i];
  sum = block_sum<NORM_THREADS>(sum);
  if (threadIdx.x == 0) *p.norm = sqrtf(sum);
}

int64_t pieces(int64_t len, int64_t of_piece) { return (len + of_piece - 1) / of_piece; }

}  // namespace

extern "C" cudaError_t flash_add_grad(const AddGradParams* params, cudaStream_t stream) {
  const AddGradParams& p = *params;
  const bool aligned = Aligned(p.element).pointer(p.grad).pointer(p.sum).step(p.len);
  return with_numbers(p.element, aligned, [&](auto numbers) {
    using N = decltype(numbers);
    return launch(add_kernel<N>, pieces(p.len, THREADS * N::LENGTH), THREADS, 0, p, stream);
  });
}

extern "C" cudaError_t flash_grad_squares(const GradNormParams* params, cudaStream_t stream) {
  const GradNormParams& p = *params;
  return with_numbers(p.element, Aligned(p.element).pointer(p.grad).step(p.len), [&](auto numbers) {
    return launch(squares_kernel<decltype(numbers)>, pieces(p.len, NUMBERS_TOGETHER), THREADS, 0, p, stream);
  });
}

extern "C" cudaError_t flash_grad_norm(const GradNormParams* params, cudaStream_t stream) {
  return launch(norm_kernel, 1, NORM_THREADS, 0, *params, stream);
}
