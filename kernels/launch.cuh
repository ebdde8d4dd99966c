// Host side of a launch.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

// The name of what a file exports for one instance, such as flash_fwd_sm80_hd128_smem227.
#define KERNEL_SYMBOL_(prefix, head_dim, shared_kib) prefix##_hd##head_dim##_smem##shared_kib
#define KERNEL_SYMBOL__(prefix, head_dim, shared_kib) KERNEL_SYMBOL_(prefix, head_dim, shared_kib)
#define KERNEL_SYMBOL(prefix) KERNEL_SYMBOL__(prefix, HEAD_DIM, SHARED_KIB)

// A compiled kernel as the host sees it; the twin of `Kernel` in src/cuda/ffi.rs.
template <class Params>
struct Kernel {
  cudaError_t (*launch)(const Params*, cudaStream_t);
  int32_t shared_bytes;  // of a block
  int32_t threads;       // of a block
  int32_t blocks_per_sm;
  int32_t tile_m;
  int32_t tile_n;
};

// The blocks that take `pieces` of work one after the other: one for each multiprocessor of the current device, if
// there are enough.
inline cudaError_t blocks_for(int64_t pieces, int64_t* blocks) {
  int device, multiprocessors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess)
    status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  *blocks = multiprocessors < pieces ? multiprocessors : pieces;
  return status;
}

// Launches `blocks` blocks. Returns the status of the first call that failed.
template <class Params>
inline cudaError_t launch(void (*kernel)(Params), int64_t blocks, int threads, int shared_bytes,
                          const Params& params, cudaStream_t stream) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  cudaGetLastError();  // what others have left is not this launch's
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (status != cudaSuccess) {
    cudaGetLastError();
    return status;
  }
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream>>>(params);
  return cudaGetLastError();
}

// The instance of a kernel template for a problem's element type and score mode. PLAIN_ONLY: an instance that is
// chosen for ScoreMode::PLAIN alone (src/cuda/instances.rs).
#ifdef PLAIN_ONLY
constexpr bool TAKES_PLAIN_ONLY = true;
#define KERNEL_FOR_MODE_(kernel, Element, mode) kernel<Element, ScoreMode::PLAIN>
#else
constexpr bool TAKES_PLAIN_ONLY = false;
#define KERNEL_FOR_MODE_(kernel, Element, mode)                   \
  ((mode) == ScoreMode::PLAIN    ? kernel<Element, ScoreMode::PLAIN>  \
   : (mode) == ScoreMode::LINEAR ? kernel<Element, ScoreMode::LINEAR> \
                                 : kernel<Element, ScoreMode::SOFTCAP>)
#endif
#define KERNEL_FOR(kernel, problem)                                                               \
  ((problem).element == ELEMENT_F16 ? KERNEL_FOR_MODE_(kernel, F16, score_mode(problem)) \
                                    : KERNEL_FOR_MODE_(kernel, Bf16, score_mode(problem)))
