// In place of kernels/ptx/stmatrix.cuh.
#pragma once

namespace ptx {

struct StoredMatrices {
  uint32_t smem;
  const uint32_t* frag;
};

inline void stmatrix_x4(uint32_t smem, const uint32_t (&frag)[4]) {
  StoredMatrices brought{smem, frag};
  machine::together(32, "stmatrix", brought, [](auto& lanes) {
    for (int lane = 0; lane < 32; ++lane) {
      if (lanes[lane]->smem % 16) machine::fault("stmatrix: %#x is misaligned", lanes[lane]->smem);
      for (int matrix = 0; matrix < 4; ++matrix) {
        const uint32_t to = lanes[8 * matrix + lane / 4]->smem + lane % 4 * 4;
        machine::store(machine::warp() * 32 + lane, to, &lanes[lane]->frag[matrix], 4);
      }
    }
  });
}

}  // namespace ptx
