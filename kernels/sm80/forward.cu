// out and lse, FlashAttention-2, Algorithm 1, for tensor cores with mma.sync (sm_80 and later).
//
// grid       one block for each (batch, head) and tile of TILE_M query rows
// block      WARPS warps; each owns TILE_M / WARPS rows of the tile, from q to out
// shared     q tile; STAGES k tiles and v tiles: 32 to 97 KiB
// registers  211 to 255, none spilled
//
// A warp with 32 rows reads each fragment of k and v once for two blocks of rows. What limits it on an H200 at
// head_dim 128: the tensor cores are busy 58 % of the time (mma.sync reaches 615 TFLOP/s there), shared memory
// 53 %, and two warps a scheduler hide the rest of the latencies only in part.
// Tried there, TFLOP/s at 2 x 8192, 16 heads, full: TILE_N 64 377, 48 350; one stage 356, two 387; the
// exponentials beside the second product 361 and 385 (the compiler overlaps them anyway). At head_dim 64,
// TILE_N 64 327, 96 325, 128 320; at 256 two stages, which leave room for one block only, 261 against 322.
#include <type_traits>

#include "../common/forward_work.cuh"
#include "../common/softmax.cuh"
#include "../common/tile.cuh"
#include "../launch.cuh"
#include "tile.cuh"

namespace {

// ---- constants --------------------------------------------------------------------------------------

using Tile = ForwardTile<HEAD_DIM, SHARED_KIB>;
constexpr int TILE_M = Tile::TILE_M, TILE_N = Tile::TILE_N, WARPS = Tile::WARPS, STAGES = Tile::STAGES;
constexpr int THREADS = 32 * WARPS;
constexpr int WARP_ROWS = TILE_M / WARPS;
constexpr int M_TILES = WARP_ROWS / 16;   // accumulators below each other in a warp
constexpr int N_TILES = TILE_N / 8;       // of scores, beside each other
constexpr int OUT_TILES = HEAD_DIM / 8;   // of out
constexpr int K_BLOCKS = HEAD_DIM / 16;

using LayoutQ = TileLayout<TILE_M, HEAD_DIM>;
using LayoutKV = TileLayout<TILE_N, HEAD_DIM>;

using Work = ForwardWork<TILE_M, TILE_N>;

struct Stage {
  SmemTile<LayoutKV> k;
  SmemTile<LayoutKV> v;
};

struct SharedStorage {
  SmemTile<LayoutQ> q;  // out, at the end
  Stage stages[STAGES];
  Work work;
};

// ---- kernel -----------------------------------------------------------------------------------------

template <class Element, ScoreMode MODE>
__global__ void __launch_bounds__(THREADS, Tile::BLOCKS_PER_SM)
    forward_kernel(const __grid_constant__ FwdParams params) {
  extern __shared__ __align__(1024) char smem[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(smem);

  // Where registers are short, the work and the thread's place are read and computed again at each use. Elsewhere
  // that would cost 6 %.
  constexpr bool LEAN = HEAD_DIM == 128;
  const AttnProblem& p = params.problem;
  const int thread = threadIdx.x, lane = thread % 32, warp_row = thread / 32 * WARP_ROWS;
  if (thread == 0) shared.work = Work(p, blockIdx.x);
  __syncthreads();  // the work is there for all
  std::conditional_t<LEAN, const volatile Work&, const Work> work = shared.work;
  const Mask mask(p);
  const ScoreTransform<MODE> transform(p, work.batch, work.head);

  float acc_out[M_TILES][OUT_TILES][4];
  clear(acc_out);
  OnlineSoftmax<M_TILES> softmax;

  const RowsOfA<LayoutQ, K_BLOCKS> frag_q(shared.q, warp_row, 0, lane);
  ColumnsOfB<LayoutKV, K_BLOCKS> frag_k(shared.stages[0].k, 0, 0, lane);
  RowsOfB<LayoutKV, K_BLOCKS> frag_v(shared.stages[0].v, 0, 0, lane);

  const auto load_k = [&](int n_tile, int stage) {
    const Rows rows = rows_of_head(p.k, p.k_strides, work.batch, work.kv_head);
    load_tile<LayoutKV, THREADS>(shared.stages[stage].k, rows, n_tile * TILE_N, p.seqlen_k, p.head_dim, thread);
  };
  const auto load_v = [&](int n_tile, int stage) {
    const Rows rows = rows_of_head(p.v, p.v_strides, work.batch, work.kv_head);
    load_tile<LayoutKV, THREADS>(shared.stages[stage].v, rows, n_tile * TILE_N, p.seqlen_k, p.head_dim, thread);
  };

  if (work.n_tiles.begin < work.n_tiles.end) {
    load_tile<LayoutQ, THREADS>(shared.q, rows_of_head(p.q, p.q_strides, work.batch, work.head), work.first_row,
                                p.seqlen_q, p.head_dim, thread);
    load_k(work.n_tiles.end - 1, 0);
    if (STAGES == 2) load_v(work.n_tiles.end - 1, 0);
    ptx::cp_async_commit();
  }

  // From the last key tile to the first.
  int stage = 0;
  for (int n_tile = work.n_tiles.end - 1; n_tile >= work.n_tiles.begin; --n_tile) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // k (and q; with two stages, v) is there for all; all have finished with the last tile
    if (STAGES == 1) {
      load_v(n_tile, 0);
      ptx::cp_async_commit();
    } else if (n_tile > work.n_tiles.begin) {
      load_k(n_tile - 1, stage ^ 1);
      load_v(n_tile - 1, stage ^ 1);
      ptx::cp_async_commit();
    }

    float scores[M_TILES][N_TILES][4];
    clear(scores);
    multiply<Element, K_BLOCKS>(scores, frag_q, frag_k);

    const int first_row = work.first_row, first_key = n_tile * TILE_N;
    if constexpr (MODE != ScoreMode::PLAIN) {
      const ThreadPlace<LEAN> score_place(thread);
      const int row = first_row + score_place.warp * WARP_ROWS + score_place.lane / 4;
      const float distance = first_key + score_place.lane % 4 * 2 - (row + p.seqlen_k - p.seqlen_q);
      for_each_score(scores, [&](float& score, int i, int half, int j, int c) {
        float derivative;
        score = transform.apply(score, distance + (8 * j + c - 16 * i - 8 * half), derivative);
      });
    }
    if (!mask.all_visible(first_row, work.end_row, first_key, first_key + TILE_N)) {
      const ThreadPlace<LEAN> mask_place(thread);
      mask_scores(scores, mask, first_row + mask_place.warp * WARP_ROWS, first_key, mask_place.lane);
    }

    if (STAGES == 1) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // v is there for all; all have finished with k
      if (n_tile > work.n_tiles.begin) {
        load_k(n_tile - 1, 0);
        ptx::cp_async_commit();
      }
    }
    softmax.step(scores, acc_out, transform.factor);
    multiply<Element, TILE_N / 16>(acc_out, PackedA<Element, M_TILES, N_TILES>(scores), frag_v);

    if (STAGES == 2) {
      frag_k.to_other_stage(stage, sizeof(Stage));
      frag_v.to_other_stage(stage, sizeof(Stage));
      stage ^= 1;
    }
  }

  // Epilogue. Each warp turns its rows of q's tile, which only it has read, into its rows of out.
  softmax.finish();
  const ThreadPlace<LEAN> end_place(thread);
  const int end_lane = end_place.lane, end_warp_row = end_place.warp * WARP_ROWS;
  __syncwarp();  // all lanes have read q
  const int first_row = work.first_row;
#pragma unroll
  for (int i = 0; i < M_TILES; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Not by the sum: it is also 0, and out NaN, where all that a row sees are scores of -inf. And a select, since
      // NaN in hidden rows of v may have come in.
      const bool is_blind = mask.sees_nothing(first_row + end_warp_row + 16 * i + 8 * half + end_lane / 4);
      const float factor = 1.f / softmax.row_sum[i][half];
#pragma unroll
      for (int j = 0; j < OUT_TILES; ++j)
#pragma unroll
        for (int c = 2 * half; c < 2 * half + 2; ++c) acc_out[i][j][c] = is_blind ? 0.f : acc_out[i][j][c] * factor;
    }
  store_accs<Element>(shared.q, acc_out, end_warp_row, 0, end_lane);
  if (end_lane % 4 == 0) {
    float* lse = params.lse + (static_cast<int64_t>(work.batch) * p.num_heads + work.head) * p.seqlen_q;
#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + end_warp_row + 16 * i + 8 * half + end_lane / 4;
        const float sum = softmax.row_sum[i][half];
        const float lse_log2 = softmax.reference[i][half] * transform.factor + log2f(sum);
        // Where all that a row sees are scores of -inf, lse is NaN as out is.
        const float value = mask.sees_nothing(row) ? -INFINITY : sum == 0.f ? NAN : lse_log2 * LN_2;
        if (row < p.seqlen_q) lse[row] = value;
      }
  }
  __syncwarp();  // the warp's rows of out are complete
  uint16_t* out = static_cast<uint16_t*>(params.out) +
                  contiguous_offset(work.batch, p.seqlen_q, p.num_heads, p.head_dim, 0, work.head);
  store_tile<LayoutQ, WARP_ROWS, 32>(shared.q, end_warp_row, out, static_cast<int64_t>(p.num_heads) * p.head_dim,
                                     first_row + end_warp_row, p.seqlen_q, p.head_dim, end_lane);
}

// ---- launcher ---------------------------------------------------------------------------------------

cudaError_t launch_kernel(const FwdParams* params, cudaStream_t stream) {
  const AttnProblem& p = params->problem;
  if (TAKES_PLAIN_ONLY && score_mode(p) != ScoreMode::PLAIN) return cudaErrorInvalidValue;
  const int64_t m_tiles = (p.seqlen_q + TILE_M - 1) / TILE_M;
  return launch(KERNEL_FOR(forward_kernel, p), m_tiles * p.num_heads * p.batch, THREADS, sizeof(SharedStorage), *params, stream);
}

}  // namespace

extern "C" {
extern const Kernel<FwdParams> KERNEL_SYMBOL(flash_fwd_sm80);
const Kernel<FwdParams> KERNEL_SYMBOL(flash_fwd_sm80) = {
    launch_kernel, sizeof(SharedStorage), THREADS, Tile::BLOCKS_PER_SM, TILE_M, TILE_N};
}
