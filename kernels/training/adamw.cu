// AdamW: moments, f32 master and its rounded copy in one pass; src/training/adamw.rs has the formula.
//
// grid   a thread for 8 neighbours of each tensor, or for one where not everything is aligned
//
// Bound by memory: 28 bytes a weight with a bf16 gradient and a bf16 copy, 30 with an f32 gradient. The 1.3 G weights
// of GPT3-1.3B on an H200 (4.3 TB/s): 36 GB, 9 ms.
#include "../launch.cuh"
#include "numbers.cuh"

namespace {

constexpr int THREADS = 256;

template <class Grad, class Rounded>
__global__ void __launch_bounds__(THREADS) adamw_kernel(const __grid_constant__ AdamWParams p) {
  constexpr int LENGTH = Grad::LENGTH;
  using Wide = Numbers<F32, LENGTH>;
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x) * LENGTH;
  if (at >= p.len) return;
  float grad[LENGTH], master[LENGTH], first[LENGTH], second[LENGTH];
  Grad::load(p.grad, at, grad);
  Wide::load(p.master, at, master);
  Wide::load(p.first_moment, at, first);
  Wide::load(p.second_moment, at, second);
#pragma unroll
  for (int i = 0; i < LENGTH; ++i) {
    const float g = grad[i] * p.grad_scale;
    first[i] = p.beta1 * first[i] + p.new1 * g;
    second[i] = p.beta2 * second[i] + p.new2 * g * g;
    const float direction = first[i] / (sqrtf(second[i] * p.second_scale) + p.eps);
    master[i] = p.kept * master[i] - p.step_size * direction;
  }
  Wide::store(p.master, at, master);
  Wide::store(p.first_moment, at, first);
  Wide::store(p.second_moment, at, second);
  if (p.rounded != nullptr) Rounded::store(p.rounded, at, master);
}

template <class Grad, class Rounded>
cudaError_t launch_adamw(const AdamWParams& p, cudaStream_t stream) {
  constexpr int64_t of_block = THREADS * Grad::LENGTH;
  return launch(adamw_kernel<Grad, Rounded>, (p.len + of_block - 1) / of_block, THREADS, 0, p, stream);
}

template <class Grad>
cudaError_t launch_rounded(const AdamWParams& p, cudaStream_t stream) {
  return p.rounded_element == ELEMENT_F16 ? launch_adamw<Grad, Numbers<F16, Grad::LENGTH>>(p, stream)
                                          : launch_adamw<Grad, Numbers<Bf16, Grad::LENGTH>>(p, stream);
}

template <int LENGTH>
cudaError_t launch_grad(const AdamWParams& p, cudaStream_t stream) {
  switch (p.grad_element) {
    case ELEMENT_F16: return launch_rounded<Numbers<F16, LENGTH>>(p, stream);
    case ELEMENT_BF16: return launch_rounded<Numbers<Bf16, LENGTH>>(p, stream);
    case ELEMENT_F32: return launch_rounded<Numbers<F32, LENGTH>>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

extern "C" cudaError_t flash_adamw(const AdamWParams* params, cudaStream_t stream) {
  const AdamWParams& p = *params;
  // A length that suits the narrowest type suits all.
  const bool aligned = Aligned(ELEMENT_BF16)
                           .pointer(p.grad)
                           .pointer(p.rounded)
                           .pointer(p.master)
                           .pointer(p.first_moment)
                           .pointer(p.second_moment)
                           .step(p.len);
  return aligned ? launch_grad<8>(p, stream) : launch_grad<1>(p, stream);
}
