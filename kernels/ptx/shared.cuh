// Stores to shared memory by its own addresses.
// PTX ISA, "Data Movement and Conversion Instructions: st".
#pragma once
#include <cstdint>

namespace ptx {

__device__ __forceinline__ void store_shared(uint32_t smem, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem), "r"(x) : "memory");
}

// Four numbers to 16 aligned bytes.
__device__ __forceinline__ void store_v4(uint32_t smem, const float (&x)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

}  // namespace ptx
