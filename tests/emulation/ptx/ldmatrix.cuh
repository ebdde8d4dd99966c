// In place of kernels/ptx/ldmatrix.cuh.
#pragma once

namespace ptx {

struct LoadedMatrices {
  uint32_t smem;
  uint32_t* frag;
};

inline void ldmatrix_x4(uint32_t (&frag)[4], uint32_t smem, bool trans) {
  LoadedMatrices brought{smem, frag};
  machine::together(32, "ldmatrix", brought, [trans](auto& lanes) {
    for (LoadedMatrices* lane : lanes) {
      if (lane->smem % 16) machine::fault("ldmatrix: %#x is misaligned", lane->smem);
      machine::note_read(lane->smem);
    }
    for (int lane = 0; lane < 32; ++lane)
      for (int matrix = 0; matrix < 4; ++matrix) {
        uint16_t pair[2];
        for (int i = 0; i < 2; ++i) {
          const int along = lane % 4 * 2 + i, across = lane / 4;
          const int row = trans ? along : across, col = trans ? across : along;
          std::memcpy(&pair[i], machine::at(lanes[8 * matrix + row]->smem + 2 * col, 2), 2);
        }
        std::memcpy(&lanes[lane]->frag[matrix], pair, 4);
      }
  });
}

inline void ldmatrix_x4(uint32_t (&frag)[4], uint32_t smem) { ldmatrix_x4(frag, smem, false); }
inline void ldmatrix_x4_trans(uint32_t (&frag)[4], uint32_t smem) { ldmatrix_x4(frag, smem, true); }

}  // namespace ptx
