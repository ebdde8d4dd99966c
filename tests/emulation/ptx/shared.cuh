// In place of kernels/ptx/shared.cuh.
#pragma once

namespace ptx {

inline void store_shared(uint32_t smem, uint32_t x) {
  machine::note_write(smem);
  std::memcpy(machine::at(smem, 4), &x, 4);
}
#if EMULATED_ARCH >= 900
inline void store_v4(uint32_t smem, const float (&x)[4]) {
  if (smem % 16) machine::fault("store_v4: %#x is misaligned", smem);
  machine::store(machine::current->index, smem, x, 16);
}
#endif

}  // namespace ptx
