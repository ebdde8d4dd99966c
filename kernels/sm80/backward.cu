// dk, dv and the sums of dq, FlashAttention-2, Algorithm 2, for tensor cores with mma.sync (sm_80 and
// later). Step 2 of the backward: common/delta.cu comes before, common/convert.cu after.
//
// grid       one block for each (batch, kv head), part of the head's group, and tile of TILE_N keys
// block      WARPS warps, laid over each product as WARPS_M x WARPS_N
// shared     k and v tile; q and dout tile of STAGES steps; probs and dscores between products: 48 to 209 KiB
// registers  172 to 255, none spilled
//
// A block visits, for each query head of its part of the group in turn, the query tiles that see its
// keys. dk and dv stay in registers over all of them; dq is added to sums in device memory.
//
// What limits it on an H200 at head_dim 128 is shared memory, 240 bytes a product of 16 x 8 x 16, and the
// additions to dq. With 64 x 64 tiles and two blocks an SM, 292 TFLOP/s (2 x 8192, 16 heads, full), leaving out
// the additions gave 339, the loads of q and dout 322, the second barrier 320, the exponentials 308. 64 x 128
// halves additions and loads: 331, with barriers of only those warps that exchange tiles 320. Starting each
// block at another query tile changed nothing.
#include <cstddef>

#include "../common/accumulator.cuh"
#include "../common/softmax.cuh"
#include "../common/tile.cuh"
#include "../launch.cuh"
#include "backward_work.cuh"
#include "tile.cuh"

namespace {

// ---- constants --------------------------------------------------------------------------------------

using Tile = BackwardTile<HEAD_DIM, SHARED_KIB>;
constexpr int TILE_M = Tile::TILE_M, TILE_N = Tile::TILE_N, WARPS = Tile::WARPS, STAGES = Tile::STAGES;
constexpr int THREADS = 32 * WARPS;
constexpr int HEAD_BLOCKS = HEAD_DIM / 16;
static_assert(ROW_PADDING % TILE_M == 0 && ROW_PADDING % TILE_N == 0);

// The part of a product of M x N that a warp computes.
template <int M, int N, int WARPS_M>
struct WarpTile {
  static constexpr int WARPS_N = WARPS / WARPS_M;
  static constexpr int ROWS = M / WARPS_M, COLS = N / WARPS_N;
  static constexpr int M_TILES = ROWS / 16, N_TILES = COLS / 8;
  static_assert(ROWS % 16 == 0 && COLS % 16 == 0 && WARPS_M * WARPS_N == WARPS);
  const int first_row, first_col;
  __device__ explicit WarpTile(int warp) : first_row(warp / WARPS_N * ROWS), first_col(warp % WARPS_N * COLS) {}
};
using ScoresTile = WarpTile<TILE_M, TILE_N, Tile::SCORES_WARPS_M>;
using DkvTile = WarpTile<TILE_N, HEAD_DIM, Tile::DKV_WARPS_M>;
using DqTile = WarpTile<TILE_M, HEAD_DIM, Tile::DQ_WARPS_M>;

using LayoutQ = TileLayout<TILE_M, HEAD_DIM>;
using LayoutKV = TileLayout<TILE_N, HEAD_DIM>;
using LayoutS = TileLayout<TILE_M, TILE_N>;

using Stage = QueryStage<LayoutQ>;

using Work = BackwardWork<TILE_M, TILE_N>;

struct SharedStorage {
  SmemTile<LayoutKV> k;  // dk, at the end
  SmemTile<LayoutKV> v;  // dv, at the end
  Stage stages[STAGES];
  SmemTile<LayoutS> probs;
  SmemTile<LayoutS> dscores;
  alignas(16) float lse_log2[STAGES][TILE_M];
  alignas(16) float delta[STAGES][TILE_M];
  Work work;
};

// From a tile to the one that is read in the same pattern.
constexpr int V_FROM_K = offsetof(SharedStorage, v) - offsetof(SharedStorage, k);
constexpr int DOUT_FROM_Q = offsetof(Stage, dout) - offsetof(Stage, q);
constexpr int DSCORES_FROM_PROBS = offsetof(SharedStorage, dscores) - offsetof(SharedStorage, probs);

// ---- kernel -----------------------------------------------------------------------------------------

template <class Element, ScoreMode MODE>
__global__ void __launch_bounds__(THREADS, Tile::BLOCKS_PER_SM)
    backward_kernel(const __grid_constant__ BwdParams params) {
  extern __shared__ __align__(1024) char smem[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(smem);

  // Where scores are transformed, registers are so short that the work is read and addresses are computed anew in each
  // step; for the largest heads, only some. Found by trial: with less some instance spills, with more of it 3 to 7 %
  // are lost.
  constexpr bool IS_PLAIN = MODE == ScoreMode::PLAIN, ANEW = !IS_PLAIN, ANEW_256 = ANEW || HEAD_DIM == 256;

  const AttnProblem& p = params.problem;
  const int thread = threadIdx.x;
  const auto& work = block_work<IS_PLAIN>(shared.work, params, thread);
  const Mask mask(p);

  float acc_dk[DkvTile::M_TILES][DkvTile::N_TILES][4], acc_dv[DkvTile::M_TILES][DkvTile::N_TILES][4];
  clear(acc_dk);
  clear(acc_dv);

  const auto load_rows = [&](BackwardStep step, int stage) {
    load_query_rows<THREADS>(shared.stages[stage], shared.lse_log2[stage], shared.delta[stage], params, work.batch,
                             step.head, step.m_tile * TILE_M, thread);
  };

  BackwardStep step = first_step(work);
  if (step.head < work.end_head) {
    load_key_rows<THREADS>(shared.k, shared.v, p, work, thread);
    load_rows(step, 0);
  }

  int stage = 0;
  while (step.head < work.end_head) {
    const int first_row = step.m_tile * TILE_M;
    ptx::cp_async_wait<0>();
    __syncthreads();  // q and dout (k and v) are there for all; all have finished with the last step
    const BackwardStep next = step_after<ANEW>(step, work);
    if (STAGES == 2 && next.head < work.end_head) load_rows(next, stage ^ 1);

    // scores = q k^T
    const ThreadPlace<ANEW> scores_place(thread);
    const ScoresTile scores_part(scores_place.warp);
    const RowsOfA<LayoutQ, HEAD_BLOCKS> rows_q(shared.stages[stage].q, scores_part.first_row, 0, scores_place.lane);
    const ColumnsOfB<LayoutKV, HEAD_BLOCKS> columns_k(shared.k, scores_part.first_col, 0, scores_place.lane);
    float scores[ScoresTile::M_TILES][ScoresTile::N_TILES][4];
    clear(scores);
    multiply<Element, HEAD_BLOCKS>(scores, rows_q, columns_k);

    const ThreadPlace<ANEW_256> place(thread);
    const int lane = place.lane;
    const ScoresTile scores_tile(place.warp);
    const int first_key = work.n_tile * TILE_N;
    const int warp_row = scores_tile.first_row + lane / 4, warp_key = first_key + scores_tile.first_col;
    const bool masked =
        !mask.all_visible(first_row, min(first_row + TILE_M, p.seqlen_q), first_key, first_key + TILE_N);
    const ScoreTransform<MODE> transform(p, work.batch, step.head);
    if (IS_PLAIN && masked) mask_scores(scores, mask, first_row + scores_tile.first_row, warp_key, lane);

    // dprobs, and probs beside it. Then `scores` are the weights of dprobs in dscores: probs times the
    // derivative of what was done to the scores.
    float row_lse[ScoresTile::M_TILES][2], row_delta[ScoresTile::M_TILES][2];
#pragma unroll
    for (int i = 0; i < ScoresTile::M_TILES; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_lse[i][half] = shared.lse_log2[stage][warp_row + 16 * i + 8 * half];
        if (!ANEW) row_delta[i][half] = shared.delta[stage][warp_row + 16 * i + 8 * half];
      }
    const AccPlaces<LayoutS, ScoresTile::N_TILES> probs_places(shared.probs, scores_tile.first_row,
                                                               scores_tile.first_col, lane);
    // Of this thread's first key from the key that its first row is aligned with.
    const int thread_key = warp_key + lane % 4 * 2;
    const int first_distance = thread_key - (first_row + warp_row + p.seqlen_k - p.seqlen_q);
    const auto finish_probs = [&](int tile) {
      const int i = tile / ScoresTile::N_TILES, j = tile % ScoresTile::N_TILES;
      float(&probs)[4] = scores[i][j];
      float derivative[4];
      if constexpr (MODE != ScoreMode::PLAIN) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          // Of this key from the one that the row is aligned with.
          const int distance = ptx::recomputed(first_distance) + 8 * j + r % 2 - 16 * i - 8 * (r / 2);
          probs[r] = transform.apply(probs[r], distance, derivative[r]);
          if (masked && !mask.is_visible(distance, thread_key + 8 * j + r % 2)) probs[r] = -INFINITY;
        }
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) probs[r] = ptx::exp2(probs[r] * transform.factor - row_lse[i][r / 2]);
      probs_places.template store_acc<Element>(i, j, probs);
      if constexpr (MODE == ScoreMode::SOFTCAP) {
#pragma unroll
        for (int r = 0; r < 4; ++r) probs[r] *= derivative[r];
      }
    };
    constexpr int TILES = ScoresTile::M_TILES * ScoresTile::N_TILES;
    if constexpr (MODE != ScoreMode::PLAIN) {
      // Beside the product this would not fit the registers.
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) finish_probs(tile);
    }
    float dscores[ScoresTile::M_TILES][ScoresTile::N_TILES][4];
    clear(dscores);
    multiply<Element, HEAD_BLOCKS>(dscores, further<DOUT_FROM_Q>(rows_q), further<V_FROM_K>(columns_k), [&](int k) {
      if constexpr (MODE == ScoreMode::PLAIN) {
#pragma unroll
        for (int tile = TILES * k / HEAD_BLOCKS; tile < TILES * (k + 1) / HEAD_BLOCKS; ++tile) finish_probs(tile);
      }
    });
    for_each_score(dscores, [&](float& dscore, int i, int half, int j, int c) {
      const float delta = ANEW ? shared.delta[stage][warp_row + 16 * i + 8 * half] : row_delta[i][half];
      dscore = scores[i][j][2 * half + c] * (dscore - delta);
    });
    store_accs<Element>(shared.dscores, dscores, scores_tile.first_row, scores_tile.first_col, lane);
    __syncthreads();  // probs and dscores are complete

    // dv = probs^T dout, dk = dscores^T q
    const ThreadPlace<ANEW> dkv_place(thread);
    const DkvTile dkv_tile(dkv_place.warp);
    const RowsOfB<LayoutQ, DkvTile::COLS / 16> b_q(shared.stages[stage].q, 0, dkv_tile.first_col, dkv_place.lane);
    const ColumnsOfA<LayoutS, DkvTile::M_TILES> columns_probs(shared.probs, 0, dkv_tile.first_row, dkv_place.lane);
    multiply<Element, TILE_M / 16>(acc_dv, columns_probs, further<DOUT_FROM_Q>(b_q));
    multiply<Element, TILE_M / 16>(acc_dk, further<DSCORES_FROM_PROBS>(columns_probs), b_q);
    if (const BackwardStep again = step_after<ANEW>(step, work); STAGES == 1 && again.head < work.end_head) {
      __syncthreads();  // all have finished with q and dout
      load_rows(again, 0);
    }

    // dq = dscores k
    const ThreadPlace<ANEW> dq_place(thread);
    const DqTile dq_tile(dq_place.warp);
    const RowsOfA<LayoutS, TILE_N / 16> rows_dscores(shared.dscores, dq_tile.first_row, 0, dq_place.lane);
    const RowsOfB<LayoutKV, DqTile::COLS / 16> b_k(shared.k, 0, dq_tile.first_col, dq_place.lane);
    float acc_dq[DqTile::M_TILES][DqTile::N_TILES][4];
    clear(acc_dq);
    multiply<Element, TILE_N / 16>(acc_dq, rows_dscores, b_k);

    const ThreadPlace<ANEW_256> add_place(thread);
    const DqTile to(add_place.warp);
    add_dq<TILE_M, TILE_N>(params, mask, work.batch, step.head, work.n_tile, ANEW_256 ? ptx::recomputed(step.m_tile) * TILE_M : first_row,
                           to.first_row, to.first_col, acc_dq, add_place.lane);
    if (STAGES == 2) stage ^= 1;
    step = STAGES == 2 && !ANEW ? next : step_after<ANEW>(step, work);
  }

  const DkvTile end_tile(ThreadPlace<>(thread).warp);
  store_dk_dv<Element, THREADS>(params, work, shared.k, shared.v, end_tile.first_row, end_tile.first_col, acc_dk, acc_dv,
                                ptx::recomputed(thread));
}

// ---- launcher ---------------------------------------------------------------------------------------

cudaError_t launch_kernel(const BwdParams* params, cudaStream_t stream) {
  return launch(KERNEL_FOR(backward_kernel, params->problem), backward_pieces<TILE_N>(*params), THREADS,
                sizeof(SharedStorage), *params, stream);
}

}  // namespace

extern "C" {
extern const Kernel<BwdParams> KERNEL_SYMBOL(flash_bwd_sm80);
const Kernel<BwdParams> KERNEL_SYMBOL(flash_bwd_sm80) = {
    launch_kernel, sizeof(SharedStorage), THREADS, Tile::BLOCKS_PER_SM, TILE_M, TILE_N};
}
