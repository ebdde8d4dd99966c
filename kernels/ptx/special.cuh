// Hints to the compiler.
#pragma once

namespace ptx {

// The same number, but the compiler can't tell. What is computed from it in a loop stays there; otherwise a
// dozen addresses are kept in registers over the main loops, and accumulators spilled for them. (Reading
// the special registers again, to the same end, costs their latency each time.)
__device__ __forceinline__ int recomputed(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace ptx
