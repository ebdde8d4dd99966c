// Copies by the copy engine, sm_90.
// PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk, cp.async.bulk.tensor, cp.reduce.async.bulk,
// prefetch". One thread.
#pragma once
#include <cstdint>

namespace ptx {

// Begins to copy the box at `coordinates` (innermost first) to shared memory. Its bytes count for the phase of
// `barrier`, also those outside the tensor, which become zero.
__device__ __forceinline__ void tma_load_4d(uint32_t smem, const void* tensor_map, uint32_t barrier, int c0, int c1,
                                            int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(smem),
      "l"(tensor_map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// Begins to copy `bytes` in a row, a multiple of 16; both addresses are aligned to 16 bytes. They count for the phase
// of `barrier`.
__device__ __forceinline__ void bulk_load(uint32_t smem, const void* gmem, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem),
               "l"(gmem), "r"(bytes), "r"(barrier)
               : "memory");
}

// Begins to add `bytes` in a row, of 32-bit numbers and a multiple of 16, to device memory; both addresses are aligned
// to 16 bytes. What ordinary stores have written there needs a proxy fence.
__device__ __forceinline__ void bulk_add(float* gmem, uint32_t smem, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(gmem),
      "r"(smem), "r"(bytes)
      : "memory");
}
// Until all that this thread has begun to add is read from shared memory.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Until it is added.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Begins to fetch a tensor map that is a parameter of the kernel.
__device__ __forceinline__ void prefetch_tensor_map(const void* tensor_map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(tensor_map) : "memory");
}

}  // namespace ptx
