// The warp-wide matrix product m16n8k16 with 32-bit accumulators, sm_80.
// PTX ISA, "Warp Level Matrix Instructions: mma". All lanes take part.
#pragma once
#include <cstdint>

#include "../common/element.cuh"

namespace ptx {

// acc (16x8) += a (16x16) * b (16x8). With g = lane / 4 and t = lane % 4, registers hold
//   acc: (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1)
//   a:   row g and g+8 at columns 2t, 2t+1; then both at columns 2t+8, 2t+9
//   b:   rows 2t, 2t+1 of column g; then rows 2t+8, 2t+9
template <class Element>
__device__ __forceinline__ void mma_m16n8k16(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<F16>(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<Bf16>(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0,
                                                   uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace ptx
