// The two 16-bit element types: packing to and from 32-bit numbers.
#pragma once
#include <cstdint>

// Tags; the values themselves are only ever handled packed, two to a register.
struct F16 {};
struct Bf16 {};

// Rounds to nearest even; `low` goes to the lower half of the register, the lower address.
template <class Element>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<F16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <>
__device__ __forceinline__ uint32_t pack<Bf16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <class Element>
__device__ __forceinline__ float2 unpack(uint32_t packed);

template <>
__device__ __forceinline__ float2 unpack<F16>(uint32_t packed) {
  float2 x;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(x.x), "=f"(x.y) : "r"(packed));
  return x;
}

template <>
__device__ __forceinline__ float2 unpack<Bf16>(uint32_t packed) {
  return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
}
