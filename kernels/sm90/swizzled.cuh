// Tiles of 16-bit elements in shared memory as the copy engine writes and wgmma reads them.
//
// A tile is cut into panels of 64 columns; a row of a panel is 128 bytes, whose 16-byte chunks are permuted by the
// row number modulo 8 (the 128-byte swizzle). Or of 32 columns, whose 4 chunks are permuted by half of the row number
// (the 64-byte swizzle), where 64 would be cut in two. One copy fills one panel.
#pragma once
#include <cstdint>

template <int ROWS_, int COLS_, int PANEL_COLS_ = 64>
struct PanelLayout {
  static constexpr int ROWS = ROWS_;
  static constexpr int PANEL_COLS = PANEL_COLS_;
  static constexpr int ROW_BYTES = PANEL_COLS * 2, ROW_CHUNKS = PANEL_COLS / 8;
  static constexpr int PANELS = (COLS_ + PANEL_COLS - 1) / PANEL_COLS;
  static constexpr int PANEL_BYTES = ROWS * ROW_BYTES;
  static constexpr int BYTES = PANELS * PANEL_BYTES;
  static_assert(ROWS % 8 == 0 && (PANEL_COLS == 64 || PANEL_COLS == 32));

  // Where in its row of a panel a 16-byte chunk lies.
  __device__ static int permuted(int row, int chunk) {
    return PANEL_COLS == 64 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3);
  }
  // In bytes from the beginning of the tile; chunks count over all panels.
  __device__ static uint32_t chunk_offset(int row, int chunk) {
    return chunk / ROW_CHUNKS * PANEL_BYTES + row * ROW_BYTES + permuted(row, chunk % ROW_CHUNKS) * 16;
  }
};

template <class Layout>
struct alignas(1024) SwizzledTile {
  uint16_t elements[Layout::BYTES / 2];
};

// A matrix descriptor of wgmma (PTX ISA, "Matrix Descriptor Format"): from bit 0 on the address, from bit 16 on the
// leading and from bit 32 on the stride offset, all in units of 16 bytes; from bit 62 on the swizzle, 1 for 128
// bytes, 2 for 64. A step within the tile is an addition to the address, which never carries.
template <class Layout>
struct MatrixDescriptor {
  uint32_t low;

  // 8 rows further in a panel, in bytes: both the stride offset along M or N of an operand that is contiguous
  // along K, and that along K of one that is contiguous along N.
  static constexpr uint32_t EIGHT_ROWS = 8 * Layout::ROW_BYTES;
  static constexpr uint32_t HIGH = EIGHT_ROWS >> 4 | (Layout::PANEL_COLS == 64 ? 1u : 2u) << 30;

  __device__ uint64_t after(uint32_t bytes) const {
    return static_cast<uint64_t>(HIGH) << 32 | (low + (bytes >> 4));
  }
};

// What lies at `smem` in a tile as an operand whose rows are contiguous along K. The leading offset is not used.
template <class Layout>
__device__ __forceinline__ MatrixDescriptor<Layout> k_major(uint32_t smem) {
  return {smem >> 4 | 1u << 16};
}

// As an operand whose rows are K and contiguous along M or N; the leading offset is that to the next panel.
template <class Layout>
__device__ __forceinline__ MatrixDescriptor<Layout> n_major(uint32_t smem) {
  return {smem >> 4 | static_cast<uint32_t>(Layout::PANEL_BYTES >> 4) << 16};
}

// From one block of 16 along K to the next, in bytes.
template <class Layout>
__device__ constexpr uint32_t k_major_step(int block) {
  constexpr int BLOCKS = Layout::PANEL_COLS / 16;
  return block / BLOCKS * Layout::PANEL_BYTES + block % BLOCKS * 32;
}
template <class Layout>
__device__ constexpr uint32_t n_major_step(int block) {
  return block * 16 * Layout::ROW_BYTES;
}
