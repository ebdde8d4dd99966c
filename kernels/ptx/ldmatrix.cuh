// Loads of 8x8 matrices of 16-bit elements from shared memory into operand fragments, sm_75.
// PTX ISA, "Warp Level Matrix Instructions: ldmatrix". All lanes take part.
#pragma once
#include <cstdint>

namespace ptx {

// Four matrices; lane 8 i + r gives the shared-memory address of row r (16 bytes) of matrix i.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&frag)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(frag[0]), "=r"(frag[1]), "=r"(frag[2]), "=r"(frag[3])
               : "r"(smem));
}

// The same, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&frag)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(frag[0]), "=r"(frag[1]), "=r"(frag[2]), "=r"(frag[3])
               : "r"(smem));
}

}  // namespace ptx
