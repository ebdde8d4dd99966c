// Hints to the compiler.
#pragma once

namespace ptx {

// The same number, but the compiler can't tell. What is computed from it in a loop stays there; otherwise a
// dozen addresses are kept in registers over the main loops, and accumulators spilled for them.
__device__ __forceinline__ int recomputed(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// threadIdx.x, read again: to the same end where `recomputed` does not suffice, but it takes dozens of cycles.
__device__ __forceinline__ int thread_index() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// What follows is not begun before. For where the compiler would load the next product's fragments so early
// that they have no registers.
__device__ __forceinline__ void schedule_fence() { __syncwarp(); }

}  // namespace ptx
