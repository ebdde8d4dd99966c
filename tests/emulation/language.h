// What a kernel's source needs of CUDA C++, on machine.h. Compiled in front of each file of kernels/.
#pragma once
#include <cuda_runtime.h>

#include <cmath>

#include "hopper.h"
#include "machine.h"

#undef __global__
#define __global__
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __forceinline__
#define __forceinline__ inline

#define __CUDA_ARCH__ EMULATED_ARCH
#if EMULATED_ARCH == 900
#define __CUDA_ARCH_FEAT_SM90_ALL
#endif

#define threadIdx (machine::Index{static_cast<unsigned>(machine::current->index), 0, 0})
#define blockIdx machine::block
#define gridDim machine::grid

namespace {
// What kernels declare as `extern __shared__`.
alignas(1024) char smem[machine::SHARED_SIZE];
}  // namespace

// What `kernel<<<blocks, threads, bytes, stream>>>(params)` becomes.
template <class Params>
inline void emulate(void (*kernel)(Params), unsigned blocks, int threads, size_t bytes, const Params& params) {
  machine::run(kernel, blocks, threads, bytes, params, reinterpret_cast<unsigned char*>(smem));
}

template <class Params>
inline cudaError_t cudaFuncSetAttribute(void (*)(Params), cudaFuncAttribute, int bytes) {
  return static_cast<size_t>(bytes) <= machine::SHARED_SIZE ? cudaSuccess : cudaErrorInvalidValue;
}
extern "C" {
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
// Of multiprocessors: few, so that blocks take several pieces of work.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 3;
  return cudaSuccess;
}
inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* found) {
  *function = reinterpret_cast<void*>(&machine::encode_map);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
}

inline void __syncthreads() { machine::barrier(); }
inline void __syncwarp() { machine::sync_warp(); }
inline void __threadfence() {}
inline size_t __cvta_generic_to_shared(const void* pointer) { return machine::shared_address(pointer); }

template <class T>
inline T shuffle(T x, int from) {
  struct Brought {
    T x, result;
    int from;
  } brought{x, x, from};
  machine::together(32, "a shuffle", brought, [](auto& lanes) {
    for (Brought* lane : lanes) lane->result = lanes[lane->from]->x;
  });
  return brought.result;
}
template <class T>
inline T __shfl_sync(unsigned, T x, int lane) {
  return shuffle(x, lane);
}
template <class T>
inline T __shfl_xor_sync(unsigned, T x, int mask) {
  return shuffle(x, machine::current->index % 32 ^ mask);
}
inline bool __any_sync(unsigned, bool x) {
  struct Brought {
    bool x, result;
  } brought{x, false};
  machine::together(32, "a vote", brought, [](auto& lanes) {
    bool any = false;
    for (Brought* lane : lanes) any |= lane->x;
    for (Brought* lane : lanes) lane->result = any;
  });
  return brought.result;
}

// Blocks run one after the other: the first takes what all would share.
inline unsigned atomicAdd(unsigned* counter, unsigned x) {
  const unsigned before = *counter;
  *counter += x;
  return before;
}

inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline float __fdividef(float x, float y) { return x / y; }

template <class A, class B>
inline auto min(A a, B b) {
  return b < a ? b : a;
}
template <class A, class B>
inline auto max(A a, B b) {
  return a < b ? b : a;
}
