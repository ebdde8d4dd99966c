// What the backward kernels share: who does what, and in which order dq is summed.
#pragma once
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
