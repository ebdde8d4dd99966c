// SwiGLU: out = silu(gate) * up with silu(x) = x * sigmoid(x), and its gradients
//   dgate = dout * up * sigmoid(gate) * (1 + gate * (1 - sigmoid(gate))),   dup = dout * silu(gate).
//
// grid   a thread for 16 bytes of each tensor
//
// Bound by memory. At 8192 x 5504 bf16 on an H200 (4.3 TB/s): forward 271 MB, 63 us; backward 451 MB, 105 us.
#include "../launch.cuh"
#include "numbers.cuh"

namespace {

constexpr int THREADS = 256;

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

template <class N>
__global__ void __launch_bounds__(THREADS) forward_kernel(const __grid_constant__ SwigluParams p) {
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x) * N::LENGTH;
  if (first >= p.len) return;
  float gate[N::LENGTH], up[N::LENGTH];
  N::load(p.gate, first, gate);
  N::load(p.up, first, up);
#pragma unroll
  for (int i = 0; i < N::LENGTH; ++i) up[i] *= gate[i] * sigmoid(gate[i]);
  N::store(p.out, first, up);
}

template <class N>
__global__ void __launch_bounds__(THREADS) backward_kernel(const __grid_constant__ SwigluParams p) {
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x) * N::LENGTH;
  if (first >= p.len) return;
  float gate[N::LENGTH], up[N::LENGTH], dout[N::LENGTH];
  N::load(p.gate, first, gate);
  N::load(p.up, first, up);
  N::load(p.dout, first, dout);
#pragma unroll
  for (int i = 0; i < N::LENGTH; ++i) {
    const float x = gate[i], s = sigmoid(x);
    gate[i] = dout[i] * up[i] * s * (1.f + x * (1.f - s));
    up[i] = dout[i] * x * s;
  }
  N::store(p.out, first, gate);
  N::store(p.out, p.len + first, up);
}

template <class N>
int64_t blocks(const SwigluParams& p) {
  constexpr int64_t of_block = THREADS * N::LENGTH;
  return (p.len + of_block - 1) / of_block;
}

bool is_aligned(const SwigluParams& p) {
  return Aligned(p.element).pointer(p.gate).pointer(p.up).pointer(p.dout).pointer(p.out).step(p.len);
}

}  // namespace

extern "C" cudaError_t flash_swiglu_fwd(const SwigluParams* params, cudaStream_t stream) {
  return with_numbers(params->element, is_aligned(*params), [&](auto numbers) {
    using N = decltype(numbers);
    return launch(forward_kernel<N>, blocks<N>(*params), THREADS, 0, *params, stream);
  });
}

extern "C" cudaError_t flash_swiglu_bwd(const SwigluParams* params, cudaStream_t stream) {
  return with_numbers(params->element, is_aligned(*params), [&](auto numbers) {
    using N = decltype(numbers);
    return launch(backward_kernel<N>, blocks<N>(*params), THREADS, 0, *params, stream);
  });
}
