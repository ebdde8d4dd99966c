// In place of kernels/ptx/tma.cuh.
#pragma once

namespace ptx {

inline void tma_load_4d(uint32_t smem, const void* tensor_map, uint32_t barrier, int c0, int c1, int c2, int c3) {
  machine::copy_box(smem, tensor_map, barrier, {c0, c1, c2, c3});
}
inline void bulk_load(uint32_t smem, const void* gmem, uint32_t bytes, uint32_t barrier) {
  machine::copy_bytes(smem, gmem, bytes, barrier);
}
inline void bulk_add(float* gmem, uint32_t smem, uint32_t bytes) { machine::add_bytes(gmem, smem, bytes); }
inline void bulk_wait_read() { machine::wait_until_read(); }
inline void bulk_wait() { machine::wait_until_added(); }
inline void prefetch_tensor_map(const void*) {}

}  // namespace ptx
