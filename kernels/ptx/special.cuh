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

// The same number, for which all lanes have the same: the compiler then knows, and keeps what follows from it in the
// registers that a warp shares.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// Nothing, for an x that is not negative; but a wait that follows comes after what x was computed from. The assembler
// moves arithmetic behind waits, where it hides nothing.
__device__ __forceinline__ void finish_before(float x) {
  asm volatile("{.reg .pred negative; setp.lt.f32 negative, %0, 0f00000000; @negative nanosleep.u32 0;}" ::"f"(x)
               : "memory");
}

// What follows is not begun before. For where the compiler would load the next product's fragments so early
// that they have no registers.
__device__ __forceinline__ void schedule_fence() { __syncwarp(); }

}  // namespace ptx
