// What the backward kernels share: who does what, what is read, where dq is added and how dk and dv end.
#pragma once
#include "../common/accumulator.cuh"
#include "../common/backward_work.cuh"
#include "../common/tile.cuh"
#include "../params.h"
#include "../ptx/ordered.cuh"
#include "tile.cuh"

// The work of this block: in registers, or in shared memory, to be read at each use.
template <bool IN_REGISTERS, class Work>
__device__ __forceinline__ decltype(auto) block_work(Work& shared_work, const BwdParams& params, int thread) {
  if constexpr (IN_REGISTERS) {
    return Work(params, blockIdx.x);
  } else {
    if (thread == 0) shared_work = Work(params, blockIdx.x);
    __syncthreads();  // the work is there for all
    return static_cast<const volatile Work&>(shared_work);
  }
}

// The order of additions to dq, where their sum has to be the same bits on every run: the key tiles take
// turns at each tile of dq. Blocks start in the order of their index and a tile waits only for tiles
// before it, so the first of those that wait is always running.

// Waits until it is the turn of key tile `turn` to add to a tile of dq.
__device__ __forceinline__ void wait_for_turn(const int32_t* counter, int turn) {
  if (threadIdx.x == 0) {
    while (ptx::load_acquire(counter) != turn) {
    }
  }
  __syncthreads();  // no thread adds before its turn
}

__device__ __forceinline__ void pass_turn(int32_t* counter, int turn) {
  __threadfence();
  __syncthreads();  // all additions of this block are made
  if (threadIdx.x == 0) ptx::store_release(counter, turn + 1);
}

// Begins to copy the keys of a block: k and v. Not committed: the first query rows are copied with them.
template <int THREADS, class Work, class LayoutKV>
__device__ __forceinline__ void load_key_rows(SmemTile<LayoutKV>& smem_k, SmemTile<LayoutKV>& smem_v,
                                              const AttnProblem& p, const Work& work, int thread) {
  const int batch = work.batch, kv_head = work.kv_head, first_key = work.n_tile * LayoutKV::ROWS;
  load_tile<LayoutKV, THREADS>(smem_k, rows_of_head(p.k, p.k_strides, batch, kv_head), first_key, p.seqlen_k,
                               p.head_dim, thread);
  load_tile<LayoutKV, THREADS>(smem_v, rows_of_head(p.v, p.v_strides, batch, kv_head), first_key, p.seqlen_k,
                               p.head_dim, thread);
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

// Adds a warp's part of a tile of dq, from (first_row + warp_row, warp_col) on; in turn if that is asked for.
template <int TILE_M, int TILE_N, int M_TILES, int N_TILES>
__device__ __forceinline__ void add_dq(const BwdParams& params, const Mask& mask, int batch, int head, int n_tile,
                                       int first_row, int warp_row, int warp_col,
                                       const float (&acc_dq)[M_TILES][N_TILES][4], int lane) {
  const AttnProblem& p = params.problem;
  const int64_t batch_head = static_cast<int64_t>(batch) * p.num_heads + head;
  const int padded_q = padded_rows(p.seqlen_q);
  static_assert(TILE_M >= ROWS_PER_TURN);
  int32_t* turn = params.dq_turn ? params.dq_turn + batch_head * (padded_q / TILE_M) + first_row / TILE_M : nullptr;
  const int first_n_tile = max(mask.first_key(first_row), 0) / TILE_N;  // that these rows see
  if (turn) wait_for_turn(turn, n_tile - first_n_tile);
  add_to_pieces<HEAD_DIM>(
      params.dq_acc + batch_head * padded_q * HEAD_DIM + AccLayout::piece(first_row + warp_row, warp_col, HEAD_DIM),
      acc_dq, lane);
  if (turn) pass_turn(turn, n_tile - first_n_tile);
}

// Writes a warp's part of dk and dv, from (warp_row, warp_col) of the tile on: sums of a part of the group, or
// the results, by way of the tiles of k and v.
template <class Element, int THREADS, class Work, class LayoutKV, int M_TILES, int N_TILES>
__device__ __forceinline__ void store_dk_dv(const BwdParams& params, const Work& work,
                                            SmemTile<LayoutKV>& smem_dk, SmemTile<LayoutKV>& smem_dv, int warp_row,
                                            int warp_col, float (&acc_dk)[M_TILES][N_TILES][4],
                                            const float (&acc_dv)[M_TILES][N_TILES][4], int thread) {
  const AttnProblem& p = params.problem;
  const int num_kv_heads = p.num_heads / p.group_size, lane = thread % 32;
  const int batch = work.batch, kv_head = work.kv_head, first_key = work.n_tile * LayoutKV::ROWS;
  if (params.group_parts > 1) {
    const int64_t head_of_part =
        (static_cast<int64_t>(work.part) * p.batch + batch) * num_kv_heads + kv_head;
    const int64_t piece = head_of_part * padded_rows(p.seqlen_k) * HEAD_DIM +
                          AccLayout::piece(first_key + warp_row, warp_col, HEAD_DIM);
    store_pieces<HEAD_DIM>(params.dk_acc + piece, acc_dk, lane);
    store_pieces<HEAD_DIM>(params.dv_acc + piece, acc_dv, lane);
    return;
  }
  __syncthreads();  // all have finished with k and v
  scale(acc_dk, p.softmax_scale);
  store_accs<Element>(smem_dk, acc_dk, warp_row, warp_col, lane);
  store_accs<Element>(smem_dv, acc_dv, warp_row, warp_col, lane);
  __syncthreads();  // dk and dv are complete
  const int64_t offset = contiguous_offset(batch, p.seqlen_k, num_kv_heads, p.head_dim, 0, kv_head);
  const int64_t row_stride = static_cast<int64_t>(num_kv_heads) * p.head_dim;
  store_tile<LayoutKV, LayoutKV::ROWS, THREADS>(smem_dk, 0, static_cast<uint16_t*>(params.dk) + offset, row_stride,
                                                first_key, p.seqlen_k, p.head_dim, thread);
  store_tile<LayoutKV, LayoutKV::ROWS, THREADS>(smem_dv, 0, static_cast<uint16_t*>(params.dv) + offset, row_stride,
                                                first_key, p.seqlen_k, p.head_dim, thread);
}
