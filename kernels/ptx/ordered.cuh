// Loads and stores of device memory that order others, sm_70.
// PTX ISA, "Data Movement and Conversion Instructions: ld, st".
#pragma once
#include <cstdint>

namespace ptx {

// What was written before the store of the number that it reads is there for this thread.
__device__ __forceinline__ int32_t load_acquire(const int32_t* gmem) {
  int32_t x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(gmem) : "memory");
  return x;
}

__device__ __forceinline__ void store_release(int32_t* gmem, int32_t x) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(gmem), "r"(x) : "memory");
}

}  // namespace ptx
