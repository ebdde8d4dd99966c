// In place of kernels/ptx/shared.cuh.
#pragma once

namespace ptx {

inline void store_shared(uint32_t smem, uint32_t x) {
  machine::note_write(smem);
  std::memcpy(machine::at(smem, 4), &x, 4);
}

}  // namespace ptx
