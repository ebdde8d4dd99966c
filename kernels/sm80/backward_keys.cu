// The work of backward.cu for small heads, where a warp has registers for dk and dv of 32 keys; only for
// ScoreMode::PLAIN.
//
// grid       one block for each (batch, kv head), part of the head's group, and tile of TILE_N keys
// block      WARPS warps of 32 keys each
// shared     k and v tile; q and dout tile of two steps; dscores on their way to dq: 81 KiB
// registers  255, and up to 64 bytes of addresses on the stack, read once a step
//
// All products but dq are transposed, keys by rows: a warp computes scores^T and dprobs^T of its own keys,
// and their accumulators, packed, are the left operands of dv and dk. So probs never leave the registers
// and every fragment of q and dout that is read meets two blocks of keys. That is 190 bytes of shared memory a
// product where backward.cu reads 300: 312 TFLOP/s on an H200 (2 x 8192, 32 heads, full) against 280.
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

struct SharedStorage {
  SmemTile<LayoutKV> k;  // dk, at the end
  SmemTile<LayoutKV> v;  // dv, at the end
  Stage stages[STAGES];
  SmemTile<LayoutS> dscores;  // transposed
  alignas(16) float lse_log2[STAGES][TILE_M];
  alignas(16) float delta[STAGES][TILE_M];
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
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, warp_key = warp * WARP_KEYS;
  const BackwardWork<TILE_N> work(params);
  const int first_key = work.n_tile * TILE_N, end_key = min(first_key + TILE_N, p.seqlen_k);
  const Mask mask(p);
  const TileRange m_tiles = query_tiles<TILE_M>(mask, first_key, end_key);
  const int first_head = work.kv_head * p.group_size + work.part * p.group_size / params.group_parts;
  const int end_head = work.kv_head * p.group_size + (work.part + 1) * p.group_size / params.group_parts;

  float acc_dk[KEY_TILES][HEAD_TILES][4], acc_dv[KEY_TILES][HEAD_TILES][4];
  clear(acc_dk);
  clear(acc_dv);

  // scores^T = k q^T, dprobs^T = v dout^T
  const RowsOfA<LayoutKV, HEAD_BLOCKS> rows_k(shared.k, warp_key, 0, lane);
  ColumnsOfB<LayoutQ, HEAD_BLOCKS> columns_q(shared.stages[0].q, 0, 0, lane);
  // dv = probs^T dout, dk = dscores^T q
  RowsOfB<LayoutQ, HEAD_BLOCKS> b_q(shared.stages[0].q, 0, 0, lane);
  // dq = dscores k
  const ColumnsOfA<LayoutS, DqTile::ROWS / 16> columns_dscores(shared.dscores, 0, DqTile(warp).first_row, lane);
  const RowsOfB<LayoutKV, DqTile::COLS / 16> b_k(shared.k, 0, DqTile(warp).first_col, lane);

  const auto load_rows = [&](int head, int m_tile, int stage) {
    load_query_rows<THREADS>(shared.stages[stage], shared.lse_log2[stage], shared.delta[stage], params, work.batch, head,
                             m_tile * TILE_M, thread);
  };

  int head = first_head, m_tile = m_tiles.begin;
  if (m_tiles.begin < m_tiles.end) {
    load_tile<LayoutKV, THREADS>(shared.k, rows_of_head(p.k, p.k_strides, work.batch, work.kv_head), first_key,
                                 p.seqlen_k, p.head_dim, thread);
    load_tile<LayoutKV, THREADS>(shared.v, rows_of_head(p.v, p.v_strides, work.batch, work.kv_head), first_key,
                                 p.seqlen_k, p.head_dim, thread);
    load_rows(head, m_tile, 0);
  } else {
    head = end_head;
  }

  int stage = 0;
  while (head < end_head) {
    const int first_row = m_tile * TILE_M;
    if (++m_tile == m_tiles.end) {
      m_tile = m_tiles.begin;
      ++head;
    }
    ptx::cp_async_wait<0>();
    __syncthreads();  // q and dout (k and v) are there for all; all have finished with the last step
    if (head < end_head) load_rows(head, m_tile, stage ^ 1);

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
        mask_scores_transposed(scores, mask, first_row + part * TILE_M / PARTS, first_key + warp_key, lane);
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
    multiply<Element, ROW_BLOCKS>(acc_dv, a_of(probs), further<DOUT_FROM_Q>(b_q), [&](int k) {
      constexpr int BLOCKS_BEFORE = ROW_BLOCKS - PART_BLOCKS;
      if (k < BLOCKS_BEFORE) {
        pack_part(scores[(PARTS - 1) % 2], PARTS - 1, PART_TILES * k / BLOCKS_BEFORE, PART_TILES * (k + 1) / BLOCKS_BEFORE);
      }
    });

    uint32_t(&dscores)[KEY_TILES][ROW_BLOCKS][4] = probs;
    const AccPlaces<LayoutS, ROW_TILES> dscores_places(shared.dscores, warp_key, 0, lane);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      float dprobs[KEY_TILES][PART_TILES][4];
      clear(dprobs);
      multiply<Element, HEAD_BLOCKS>(dprobs, further<V_FROM_K>(rows_k), [&](uint32_t(&b)[4], int j, int k) {
        columns_q(b, part * PART_TILES / 2 + j, k, DOUT_FROM_Q);
      });
#pragma unroll
      for (int j = 0; j < PART_TILES; ++j) {
        const int row_tile = part * PART_TILES + j;
        const float2 delta = *reinterpret_cast<const float2*>(&shared.delta[stage][8 * row_tile + lane % 4 * 2]);
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

    float acc_dq[DqTile::ROWS / 16][DqTile::COLS / 8][4];
    clear(acc_dq);
    multiply<Element, TILE_N / 16>(acc_dq, columns_dscores, b_k);

    const int this_head = m_tile == m_tiles.begin ? head - 1 : head;
    const int64_t batch_head = static_cast<int64_t>(work.batch) * p.num_heads + this_head;
    const int padded_q = padded_rows(p.seqlen_q);
    int32_t* turn = params.dq_turn ? params.dq_turn + batch_head * (padded_q / TILE_M) + first_row / TILE_M : nullptr;
    const int first_n_tile =
        turn ? key_tiles<TILE_N>(mask, first_row, min(first_row + TILE_M, p.seqlen_q)).begin : 0;
    if (turn) wait_for_turn(turn, work.n_tile - first_n_tile);
    const DqTile to(warp);
    add_to_pieces<HEAD_DIM>(params.dq_acc + batch_head * padded_q * HEAD_DIM +
                                AccLayout::piece(first_row + to.first_row, to.first_col, HEAD_DIM),
                            acc_dq, lane);
    if (turn) pass_turn(turn, work.n_tile - first_n_tile);

    columns_q.to_other_stage(stage, sizeof(Stage));
    b_q.to_other_stage(stage, sizeof(Stage));
    stage ^= 1;
  }

  // Epilogue.
  if (params.group_parts > 1) {
    const int64_t head_of_part =
        (static_cast<int64_t>(work.part) * p.batch + work.batch) * (p.num_heads / p.group_size) + work.kv_head;
    const int64_t piece = head_of_part * padded_rows(p.seqlen_k) * HEAD_DIM +
                          AccLayout::piece(first_key + warp_key, 0, HEAD_DIM);
    store_pieces<HEAD_DIM>(params.dk_acc + piece, acc_dk, lane);
    store_pieces<HEAD_DIM>(params.dv_acc + piece, acc_dv, lane);
    return;
  }
  __syncthreads();  // all have finished with k and v
  scale(acc_dk, p.softmax_scale);
  store_accs<Element>(shared.k, acc_dk, warp_key, 0, lane);
  store_accs<Element>(shared.v, acc_dv, warp_key, 0, lane);
  __syncthreads();  // dk and dv are complete
  const int num_kv_heads = p.num_heads / p.group_size;
  const int64_t offset = contiguous_offset(work.batch, p.seqlen_k, num_kv_heads, p.head_dim, 0, work.kv_head);
  const int64_t row_stride = static_cast<int64_t>(num_kv_heads) * p.head_dim;
  store_tile<LayoutKV, TILE_N, THREADS>(shared.k, 0, static_cast<uint16_t*>(params.dk) + offset, row_stride, first_key,
                                        p.seqlen_k, p.head_dim, thread);
  store_tile<LayoutKV, TILE_N, THREADS>(shared.v, 0, static_cast<uint16_t*>(params.dv) + offset, row_stride, first_key,
                                        p.seqlen_k, p.head_dim, thread);
}

// ---- launcher ---------------------------------------------------------------------------------------

cudaError_t launch_kernel(const BwdParams* params, cudaStream_t stream) {
  const auto kernel =
      params->problem.element == ELEMENT_F16 ? backward_keys_kernel<F16> : backward_keys_kernel<Bf16>;
  return launch(kernel, backward_blocks<TILE_N>(*params), THREADS, sizeof(SharedStorage), *params, stream);
}

}  // namespace

extern "C" {
extern const Kernel<BwdParams> KERNEL_SYMBOL(flash_bwd_keys_sm80);
const Kernel<BwdParams> KERNEL_SYMBOL(flash_bwd_keys_sm80) = {
    launch_kernel, sizeof(SharedStorage), THREADS, Tile::BLOCKS_PER_SM, TILE_M, TILE_N};
}
