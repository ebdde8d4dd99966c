// The pieces of work of a backward kernel: tiles of keys, each with one key/value head and a part of its group.
#pragma once
#include "mask.cuh"

// What a step works on: a query tile of one head.
struct BackwardStep {
  int head, m_tile;
};

// A piece of work, for a block. Key tiles from the first on: with a causal mask those are seen by the most rows. But
// FROM_LAST the other way round where there is a diagonal and dq is added in turn. `heads_together` pieces of the same
// tile at a time, so that their q, dout and dq stay in L2.
template <int TILE_M_, int TILE_N_, bool FROM_LAST = false>
struct BackwardWork {
  static constexpr int TILE_M = TILE_M_, TILE_N = TILE_N_;
  int batch, kv_head, part, n_tile;
  int first_head, end_head;  // of the part; none, if no row sees a key of the tile
  TileRange m_tiles;         // the query tiles that see one

  BackwardWork() = default;
  // Number `index`.
  __device__ BackwardWork(const BwdParams& params, unsigned index) {
    const AttnProblem& p = params.problem;
    const unsigned n_tiles = (p.seqlen_k + TILE_N - 1) / TILE_N;
    const unsigned kv_heads = p.num_heads / p.group_size;
    const unsigned section = index / (n_tiles * p.heads_together);
    const unsigned rest = index - section * n_tiles * p.heads_together;
    const unsigned first = section * p.heads_together;
    const unsigned pieces =
        min(p.batch * kv_heads * params.group_parts - first, static_cast<unsigned>(p.heads_together));
    const unsigned piece = first + rest % pieces;
    part = piece % params.group_parts;
    kv_head = piece / params.group_parts % kv_heads;
    batch = piece / params.group_parts / kv_heads;
    n_tile = rest / pieces;
    if (FROM_LAST && params.dq_turn && p.window_right != MAX_WINDOW) n_tile = n_tiles - 1 - n_tile;
    m_tiles = query_tiles<TILE_M>(Mask(p), n_tile * TILE_N, min((n_tile + 1) * TILE_N, p.seqlen_k));
    first_head = kv_head * p.group_size + part * p.group_size / params.group_parts;
    end_head = kv_head * p.group_size + (part + 1) * p.group_size / params.group_parts;
    if (m_tiles.begin == m_tiles.end) end_head = first_head;
  }
};

// The steps of a piece of work: for each head in turn, its query tiles.
template <class Work>
__device__ __forceinline__ BackwardStep first_step(const Work& work) {
  return {work.first_head, work.m_tiles.begin};
}
template <class Work>
__device__ __forceinline__ int step_count(const Work& work) {
  return (work.end_head - work.first_head) * (work.m_tiles.end - work.m_tiles.begin);
}
// ANEW: for use in two places of a step. Without a select, whose sums would be kept between them.
template <bool ANEW, class Work>
__device__ __forceinline__ BackwardStep step_after(BackwardStep step, const Work& work) {
  const int left = work.m_tiles.end - step.m_tile;
  const int head = ANEW ? step.head + 2 - min(left, 2) : left == 1 ? step.head + 1 : step.head;
  return {head, left == 1 ? work.m_tiles.begin : step.m_tile + 1};
}

// How many there are.
template <int TILE_N>
inline int64_t backward_pieces(const BwdParams& params) {
  const AttnProblem& p = params.problem;
  const int64_t n_tiles = (p.seqlen_k + TILE_N - 1) / TILE_N;
  return n_tiles * p.batch * (p.num_heads / p.group_size) * params.group_parts;
}
