// Between ordinary accesses to shared memory and those of wgmma and the copy engine, sm_90.
// PTX ISA, "Parallel Synchronization and Communication Instructions: membar, fence".
#pragma once

namespace ptx {

// What this thread has written to shared memory is there for wgmma and the copy engine; other threads' products need
// a barrier besides.
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace ptx
