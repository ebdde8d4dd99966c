// The pieces of work of a forward kernel: tiles of query rows, each with one head.
#pragma once
#include "mask.cuh"

// Piece `index`. Tiles with the most keys come first, so that no long one is left for the end; but
// `heads_together` heads at a time, so that their K and V stay in L2.
template <int TILE_M, int TILE_N>
struct ForwardWork {
  int batch, head, kv_head;
  int first_row, end_row;
  TileRange n_tiles;  // the key tiles that the rows see

  __device__ ForwardWork(const AttnProblem& p, unsigned index) {
    const unsigned m_tiles = (p.seqlen_q + TILE_M - 1) / TILE_M;
    const unsigned section = index / (m_tiles * p.heads_together);
    const unsigned rest = index - section * m_tiles * p.heads_together;
    const unsigned first = section * p.heads_together;
    const unsigned heads = min(static_cast<unsigned>(p.batch) * p.num_heads - first,
                               static_cast<unsigned>(p.heads_together));
    const unsigned batch_head = first + rest % heads;
    batch = batch_head / p.num_heads;
    head = batch_head % p.num_heads;
    kv_head = head / p.group_size;
    first_row = (m_tiles - 1 - rest / heads) * TILE_M;
    end_row = min(first_row + TILE_M, p.seqlen_q);
    n_tiles = key_tiles<TILE_N>(Mask(p), first_row, end_row);
  }
};
