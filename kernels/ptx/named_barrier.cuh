// The barriers of a block by number, 1 to 15 (0 is __syncthreads), sm_70.
// PTX ISA, "Parallel Synchronization and Communication Instructions: bar". All lanes take part; `threads` counts
// both who waits and who only arrives.
#pragma once

namespace ptx {

// Arrives, and waits until `threads` have.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Arrives without waiting.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace ptx
