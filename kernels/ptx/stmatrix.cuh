// Stores of 8x8 matrices of 16-bit elements to shared memory from accumulator fragments, sm_90.
// PTX ISA, "Warp Level Matrix Instructions: stmatrix". All lanes take part.
#pragma once
#include <cstdint>

namespace ptx {

// Four matrices; lane 8 i + r gives the shared-memory address of row r (16 bytes) of matrix i.
__device__ __forceinline__ void stmatrix_x4(uint32_t smem, const uint32_t (&frag)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(frag[0]),
               "r"(frag[1]), "r"(frag[2]), "r"(frag[3])
               : "memory");
}

}  // namespace ptx
