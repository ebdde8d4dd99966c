// The barriers of a block by number, 1 to 15 (0 is __syncthreads), sm_70.
// PTX ISA, "Parallel Synchronization and Communication Instructions: bar". All lanes take part.
#pragma once
#include <cstdint>

namespace ptx {

// Arrives, and waits until `threads` have; whether `x` is true in any of them. The vote tells the compiler that all
// lanes get the same.
__device__ __forceinline__ bool named_barrier_any(int barrier, int threads, bool x) {
  uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred one, all;\n"
      "setp.ne.u32 one, %3, 0;\n"
      "bar.red.or.pred all, %1, %2, one;\n"
      "selp.u32 %0, 1, 0, all;\n"
      "}"
      : "=r"(any)
      : "r"(barrier), "r"(threads), "r"(static_cast<uint32_t>(x))
      : "memory");
  return __any_sync(~0u, any != 0);
}

}  // namespace ptx
