// How tiles in shared memory are handed over from who loads to those that compute, and back.
#pragma once
#include "../common/tile.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/tma.cuh"
#include "swizzled.cuh"
#include "tensor_map.cuh"

// `full`: the tile is there; an arrival of each writer, and the bytes of the copy engine. `empty`: all readers,
// warps, have finished with it.
struct Handover {
  uint64_t full, empty;

  __device__ void init(int readers, int writers = 1) {
    ptx::mbarrier_init(smem_address(&full), writers);
    ptx::mbarrier_init(smem_address(&empty), readers);
  }
  // `phase` is 0 in the first round of the ring, 1 in the second, 0 in the third: the same on both sides.
  __device__ void wait_full(uint32_t phase) { ptx::mbarrier_wait(smem_address(&full), phase); }
  __device__ void wait_empty(uint32_t phase) { ptx::mbarrier_wait(smem_address(&empty), phase ^ 1); }
  __device__ void expect(uint32_t bytes) { ptx::mbarrier_arrive_expect(smem_address(&full), bytes); }
  // Of what ordinary stores have written.
  __device__ void publish() { ptx::mbarrier_arrive(smem_address(&full)); }
  // This reader has finished with the tile, all of its threads. Of those that have had products with it each warp says so
  // for itself: warps of a warpgroup need not be at the same place, and one that lags must not miss a phase.
  __device__ void release(bool is_speaker) {
    if (is_speaker) ptx::mbarrier_arrive(smem_address(&empty));
  }
};

// Where a warpgroup is in a ring of stages.
template <int STAGES>
struct RingPlace {
  int stage = 0;
  uint32_t phase = 0;

  __device__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Begins to fill a tile with the rows of a head from `row` on. One thread.
template <class Layout>
__device__ __forceinline__ void load_tile(SwizzledTile<Layout>& tile, Handover& handover, const TensorMap& tensor,
                                          int row, int head, int batch) {
  const uint32_t full = smem_address(&handover.full), smem = smem_address(&tile);
#pragma unroll
  for (int panel = 0; panel < Layout::PANELS; ++panel)
    ptx::tma_load_4d(smem + panel * Layout::PANEL_BYTES, &tensor.map, full, panel * Layout::PANEL_COLS, row,
                     head * tensor.head_step, batch * tensor.batch_step);
}
