// The work of backward.cu for small heads, where a warp has registers for dk and dv of 32 keys; only for
// ScoreMode::PLAIN.
//
// grid       one block for each (batch, kv head), part of the head's group, and tile of TILE_N keys
// block      WARPS warps of 32 keys each
// shared     k and v tile; q and dout tile of two steps; dscores on their way to dq: 81 KiB
// registers  255, none spilled: what can be is computed or read again in each step
//
// All products but dq are transposed, keys by rows: a warp computes scores^T and dprobs^T of its own keys,
// and their accumulators, packed, are the left operands of dv and dk. So probs never leave the registers
// and every fragment of q and dout that is read meets two blocks of keys. That is 190 bytes of shared memory a
// product where backward.cu reads 300: 312 TFLOP/s on an H200 (2 x 8192, 32 heads, full) where that had 280, in one run.
#include <cstddef>

#include "../common/accumulator.cuh"
#include "../common/softmax.cuh"
#include "../common/tile.cuh"
#include "../launch.cuh"
#include "backward_work.cuh"
#include "tile.cuh"

namespace {

// ---- constants --------------------------------------------------------------------------------------

using Tile = BackwardKeysTile<HEAD_DIM, SHARED_KIB>;
constexpr int TILE_M = Tile::TILE_M, WARPS = Tile::WARPS, STAGES = Tile::STAGES;
constexpr int WARP_KEYS = 32, TILE_N = WARPS * WARP_KEYS;
constexpr int THREADS = 32 * WARPS;
constexpr int HEAD_BLOCKS = HEAD_DIM / 16, HEAD_TILES = HEAD_DIM / 8;
constexpr int KEY_TILES = WARP_KEYS / 16;                        // accumulators below each other
constexpr int ROW_TILES = TILE_M / 8, ROW_BLOCKS = TILE_M / 16;  // and beside each other
// Scores and dprobs are computed for a part of the rows at a time, to fit the registers.
constexpr int PARTS = 2, PART_TILES = ROW_TILES / PARTS, PART_BLOCKS = ROW_BLOCKS / PARTS;
static_assert(ROW_PADDING % TILE_M == 0 && ROW_PADDING % TILE_N == 0);

using LayoutQ = TileLayout<TILE_M, HEAD_DIM>;
using LayoutKV = TileLayout<TILE_N, HEAD_DIM>;
using LayoutS = TileLayout<TILE_N, TILE_M>;

// The part of dq (TILE_M x HEAD_DIM) that this warp computes.
struct DqTile {
  static constexpr int WARPS_M = 2, WARPS_N = WARPS / WARPS_M, ROWS = TILE_M / WARPS_M, COLS = HEAD_DIM / WARPS_N;
  const int first_row, first_col;
  __device__ explicit DqTile(int warp) : first_row(warp / WARPS_N * ROWS), first_col(warp % WARPS_N * COLS) {}
};

using Stage = QueryStage<LayoutQ>;

using Work = BackwardWork<TILE_M, TILE_N>;

struct SharedStorage {
  SmemTile<LayoutKV> k;  // dk, at the end
  SmemTile<LayoutKV> v;  // dv, at the end
  Stage stages[STAGES];
  SmemTile<LayoutS> dscores;  // transposed
  alignas(16) float lse_log2[STAGES][TILE_M];
  alignas(16) float delta[STAGES][TILE_M];
  Work work;
};

// From a tile to the one that is read in the same pattern.
constexpr int V_FROM_K = offsetof(SharedStorage, v) - offsetof(SharedStorage, k);
constexpr int DOUT_FROM_Q = offsetof(Stage, dout) - offsetof(Stage, q);

// ---- kernel -----------------------------------------------------------------------------------------

template <class Element>
__global__ void __launch_bounds__(THREADS, Tile::BLOCKS_PER_SM)
    backward_keys_kernel(const __grid_constant__ BwdParams params) {
  extern __shared__ __align__(1024) char smem[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(smem);

  const AttnProblem& p = params.problem;
  const int thread = threadIdx.x;
  const auto& work = block_work<false>(shared.work, params, thread);
  const auto warp_and_lane = [] { return ThreadPlace<false>(ptx::thread_index()); };
  const Mask mask(p);

  float acc_dk[KEY_TILES][HEAD_TILES][4], acc_dv[KEY_TILES][HEAD_TILES][4];
  clear(acc_dk);
  clear(acc_dv);

  // scores^T = k q^T, dprobs^T = v dout^T
  ColumnsOfB<LayoutQ, HEAD_BLOCKS> columns_q(shared.stages[0].q, 0, 0, warp_and_lane().lane);

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
  for (; step.head < work.end_head; step = step_after<true>(step, work)) {
    const int first_row = step.m_tile * TILE_M;
    ptx::cp_async_wait<0>();
    __syncthreads();  // q and dout (k and v) are there for all; all have finished with the last step
    if (const BackwardStep next = step_after<true>(step, work); next.head < work.end_head) load_rows(next, stage ^ 1);

    const auto place = warp_and_lane();
    const int lane = place.lane, warp_key = place.warp * WARP_KEYS, first_key = work.n_tile * TILE_N;
    const RowsOfA<LayoutKV, HEAD_BLOCKS> rows_k(shared.k, warp_key, 0, lane);
    const bool masked =
        !mask.all_visible(first_row, min(first_row + TILE_M, p.seqlen_q), first_key, first_key + TILE_N);
    const float scale_log2 = p.softmax_scale * LOG2_E;

    uint32_t probs[KEY_TILES][ROW_BLOCKS][4];  // packed, with the rows as K
    const auto score_part = [&](float(&scores)[KEY_TILES][PART_TILES][4], int part, const auto& beside) {
      clear(scores);
      multiply<Element, HEAD_BLOCKS>(
          scores, rows_k, [&](uint32_t(&b)[4], int j, int k) { columns_q(b, part * PART_TILES / 2 + j, k); }, beside);
    };
    const auto pack_part = [&](float(&scores)[KEY_TILES][PART_TILES][4], int part, int begin, int end) {
#pragma unroll
      for (int j = begin; j < end; ++j) {
        const int row_tile = part * PART_TILES + j;
        const float2 lse = *reinterpret_cast<const float2*>(&shared.lse_log2[stage][8 * row_tile + lane % 4 * 2]);
#pragma unroll
        for (int i = 0; i < KEY_TILES; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float(&score)[4] = scores[i][j];
            probs[i][row_tile / 2][row_tile % 2 * 2 + half] =
                pack<Element>(ptx::exp2(score[2 * half] * scale_log2 - lse.x),
                              ptx::exp2(score[2 * half + 1] * scale_log2 - lse.y));
          }
      }
    };
    const auto mask_part = [&](float(&scores)[KEY_TILES][PART_TILES][4], int part) {
      if (masked) {
        const auto mask_place = warp_and_lane();
        mask_scores_transposed(scores, mask, first_row + part * TILE_M / PARTS,
                               work.n_tile * TILE_N + mask_place.warp * WARP_KEYS, mask_place.lane);
      }
    };
    const auto a_of = [](uint32_t(&packed)[KEY_TILES][ROW_BLOCKS][4]) {
      return [&packed](uint32_t(&a)[4], int i, int k) {
#pragma unroll
        for (int r = 0; r < 4; ++r) a[r] = packed[i][k][r];
      };
    };
    float scores[2][KEY_TILES][PART_TILES][4];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      score_part(scores[part % 2], part, [&](int k) {
        if (part > 0) pack_part(scores[(part - 1) % 2], part - 1, PART_TILES * k / HEAD_BLOCKS, PART_TILES * (k + 1) / HEAD_BLOCKS);
      });
      mask_part(scores[part % 2], part);
    }
    // dv = probs^T dout, dk = dscores^T q
#if __CUDA_ARCH__ >= 900
    const int b_lane = lane;
#else
    const int b_lane = warp_and_lane().lane;  // the compiler for 8.0 spills with the one, that for 9.0 with the other
#endif
    const RowsOfB<LayoutQ, HEAD_BLOCKS> b_q(shared.stages[stage].q, 0, 0, b_lane);
    multiply<Element, ROW_BLOCKS>(acc_dv, a_of(probs), further<DOUT_FROM_Q>(b_q), [&](int k) {
      constexpr int BLOCKS_BEFORE = ROW_BLOCKS - PART_BLOCKS;
      if (k < BLOCKS_BEFORE) {
        pack_part(scores[(PARTS - 1) % 2], PARTS - 1, PART_TILES * k / BLOCKS_BEFORE, PART_TILES * (k + 1) / BLOCKS_BEFORE);
      }
    });

    ptx::schedule_fence();
    uint32_t(&dscores)[KEY_TILES][ROW_BLOCKS][4] = probs;
    const auto dscores_place = warp_and_lane();
    const AccPlaces<LayoutS, ROW_TILES> dscores_places(shared.dscores, dscores_place.warp * WARP_KEYS, 0,
                                                       dscores_place.lane);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      float dprobs[KEY_TILES][PART_TILES][4];
      clear(dprobs);
      multiply<Element, HEAD_BLOCKS>(dprobs, further<V_FROM_K>(rows_k), [&](uint32_t(&b)[4], int j, int k) {
        columns_q(b, part * PART_TILES / 2 + j, k, DOUT_FROM_Q);
      });
      ptx::schedule_fence();
#pragma unroll
      for (int j = 0; j < PART_TILES; ++j) {
        const int row_tile = part * PART_TILES + j;
        const float2 delta =
            *reinterpret_cast<const float2*>(&shared.delta[stage][8 * row_tile + dscores_place.lane % 4 * 2]);
#pragma unroll
        for (int i = 0; i < KEY_TILES; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t& dscore = dscores[i][row_tile / 2][row_tile % 2 * 2 + half];
            const float2 weight = unpack<Element>(ptx::recomputed(dscore));
            dscore = pack<Element>(weight.x * (dprobs[i][j][2 * half] - delta.x),
                                   weight.y * (dprobs[i][j][2 * half + 1] - delta.y));
            dscores_places.store(16 * i + 8 * half, row_tile, dscore);
          }
      }
    }
    multiply<Element, ROW_BLOCKS>(acc_dk, a_of(dscores), b_q);
    __syncthreads();  // dscores are complete

    // dq = dscores k
    const auto dq_place = warp_and_lane();
    const DqTile dq_tile(dq_place.warp);
    const ColumnsOfA<LayoutS, DqTile::ROWS / 16> columns_dscores(shared.dscores, 0, dq_tile.first_row, dq_place.lane);
    const RowsOfB<LayoutKV, DqTile::COLS / 16> b_k(shared.k, 0, dq_tile.first_col, dq_place.lane);
    float acc_dq[DqTile::ROWS / 16][DqTile::COLS / 8][4];
    clear(acc_dq);
    multiply<Element, TILE_N / 16>(acc_dq, columns_dscores, b_k);

    const auto add_place = warp_and_lane();
    const DqTile to(add_place.warp);
    add_dq<TILE_M, TILE_N>(params, mask, work.batch, step.head, work.n_tile, ptx::recomputed(step.m_tile) * TILE_M,
                           to.first_row, to.first_col, acc_dq, add_place.lane);
    columns_q.to_other_stage(stage, sizeof(Stage));
    stage ^= 1;
  }

  store_dk_dv<Element, THREADS>(params, work, shared.k, shared.v, warp_and_lane().warp * WARP_KEYS, 0, acc_dk, acc_dv,
                                ptx::recomputed(thread));
}

// ---- launcher ---------------------------------------------------------------------------------------

cudaError_t launch_kernel(const BwdParams* params, cudaStream_t stream) {
  if (score_mode(params->problem) != ScoreMode::PLAIN) return cudaErrorInvalidValue;
  const auto kernel =
      params->problem.element == ELEMENT_F16 ? backward_keys_kernel<F16> : backward_keys_kernel<Bf16>;
  return launch(kernel, backward_pieces<TILE_N>(*params), THREADS, sizeof(SharedStorage), *params, stream);
}

}  // namespace

extern "C" {
extern const Kernel<BwdParams> KERNEL_SYMBOL(flash_bwd_keys_sm80);
const Kernel<BwdParams> KERNEL_SYMBOL(flash_bwd_keys_sm80) = {
    launch_kernel, sizeof(SharedStorage), THREADS, Tile::BLOCKS_PER_SM, TILE_M, TILE_N};
}
