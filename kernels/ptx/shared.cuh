// Stores to shared memory by its own addresses.
// PTX ISA, "Data Movement and Conversion Instructions: st".
#pragma once
#include <cstdint>

namespace ptx {

__device__ __forceinline__ void store_shared(uint32_t smem, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem), "r"(x) : "memory");
}

}  // namespace ptx
