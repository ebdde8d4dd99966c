// Asynchronous copies from global to shared memory, sm_80.
// PTX ISA, "Data Movement and Conversion Instructions: cp.async".
#pragma once
#include <cstdint>

namespace ptx {

// Copies 16 bytes, past L1. Both addresses are aligned to 16 bytes. Where `valid` is false nothing is
// read and the 16 bytes in shared memory become zero.
__device__ __forceinline__ void cp_async_16(uint32_t smem, const void* gmem, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem), "l"(gmem), "r"(bytes));
}

// Makes one group of this thread's copies since the last commit.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;"); }

// Waits until at most PENDING of this thread's latest groups are under way. What the other threads
// copied is visible only after a barrier.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

}  // namespace ptx
