// What the backward kernels share: who does what, what a step reads, and in which order dq is summed.
#pragma once
#include "../common/tile.cuh"
#include "../params.h"

// The piece of work of this block. Key tiles from the first on: with a causal mask those are seen by the
// most rows. `heads_together` pieces of the same tile at a time, so that their q, dout and dq stay in L2.
template <int TILE_N>
struct BackwardWork {
  int batch, kv_head, part, n_tile;

  __device__ explicit BackwardWork(const BwdParams& params) {
    const AttnProblem& p = params.problem;
    const unsigned n_tiles = (p.seqlen_k + TILE_N - 1) / TILE_N;
    const unsigned kv_heads = p.num_heads / p.group_size;
    const unsigned section = blockIdx.x / (n_tiles * p.heads_together);
    const unsigned rest = blockIdx.x - section * n_tiles * p.heads_together;
    const unsigned first = section * p.heads_together;
    const unsigned pieces =
        min(p.batch * kv_heads * params.group_parts - first, static_cast<unsigned>(p.heads_together));
    const unsigned piece = first + rest % pieces;
    part = piece % params.group_parts;
    kv_head = piece / params.group_parts % kv_heads;
    batch = piece / params.group_parts / kv_heads;
    n_tile = rest / pieces;
  }
};

// The order of additions to dq, where their sum has to be the same bits on every run: the key tiles take
// turns at each tile of dq. Blocks start in the order of their index and a tile waits only for tiles
// before it, so the first of those that wait is always running.

// Waits until it is the turn of key tile `turn` to add to a tile of dq.
__device__ __forceinline__ void wait_for_turn(const int32_t* counter, int turn) {
  if (threadIdx.x == 0) {
    int now;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    } while (now != turn);
  }
  __syncthreads();  // no thread adds before its turn
}

__device__ __forceinline__ void pass_turn(int32_t* counter, int turn) {
  __threadfence();
  __syncthreads();  // all additions of this block are made
  if (threadIdx.x == 0) asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(counter), "r"(turn + 1) : "memory");
}

// What a step reads of the query rows, but for lse and delta.
template <class LayoutQ>
struct QueryStage {
  SmemTile<LayoutQ> q;
  SmemTile<LayoutQ> dout;
};

// Begins to copy the query rows of a step: q, dout, lse and delta.
template <int THREADS, class LayoutQ>
__device__ __forceinline__ void load_query_rows(QueryStage<LayoutQ>& to, float* smem_lse_log2, float* smem_delta,
                                                const BwdParams& params, int batch, int head, int first_row,
                                                int thread) {
  const AttnProblem& p = params.problem;
  load_tile<LayoutQ, THREADS>(to.q, rows_of_head(p.q, p.q_strides, batch, head), first_row, p.seqlen_q, p.head_dim,
                              thread);
  load_tile<LayoutQ, THREADS>(to.dout, rows_of_head(params.dout, params.dout_strides, batch, head), first_row,
                              p.seqlen_q, p.head_dim, thread);
  const int quad = ptx::recomputed(thread) * 4;
  if (quad < LayoutQ::ROWS) {
    const int64_t offset = (static_cast<int64_t>(batch) * p.num_heads + head) * padded_rows(p.seqlen_q) + first_row + quad;
    ptx::cp_async_16(smem_address(smem_lse_log2 + quad), params.lse_log2 + offset, true);
    ptx::cp_async_16(smem_address(smem_delta + quad), params.delta + offset, true);
  }
  ptx::cp_async_commit();
}

// How many blocks a launch takes: one for each piece of work.
template <int TILE_N>
inline int64_t backward_blocks(const BwdParams& params) {
  const AttnProblem& p = params.problem;
  const int64_t n_tiles = (p.seqlen_k + TILE_N - 1) / TILE_N;
  return n_tiles * p.batch * (p.num_heads / p.group_size) * params.group_parts;
}
