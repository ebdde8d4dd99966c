// Functions of the special function unit, one instruction each.
// PTX ISA, "Floating Point Instructions: ex2".
#pragma once

namespace ptx {

// 2^x, relative error about 2^-22; results under 2^-126 become zero. The form without .ftz costs three
// more instructions.
__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace ptx
