// Additions to global memory that return nothing, sm_80; of four numbers at once from sm_90 on.
// PTX ISA, "Parallel Synchronization and Communication Instructions: red".
#pragma once

namespace ptx {

#if __CUDA_ARCH__ >= 900
// Adds four numbers to 16 aligned bytes.
__device__ __forceinline__ void red_add_v4(float* gmem, const float (&x)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(gmem), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}
#endif

// Adds one number.
__device__ __forceinline__ void red_add(float* gmem, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(gmem), "f"(x) : "memory");
}

}  // namespace ptx
