// dk, dv and the sums of dq, FlashAttention-2, Algorithm 2, for wgmma and the copy engine (sm_90a). Step 2 of the
// backward: common/delta.cu comes before, common/convert.cu after.
//
// grid       one block for each multiprocessor, which takes one piece of work (tile of TILE_N keys, kv head, part of
//            its group) after the other, the next that nobody has: its first tiles come while the last one's dk and dv
//            are written
// block      two warpgroups that compute, of 64 keys each, and one of which a thread loads, two add dq, each for one
//            that computes, and one takes the pieces of work
// shared     k and v tile; q tiles of three steps, with lse; dout tiles, with delta, and dscores of two; dq on its way:
//            211 (head_dim 64), 210 KiB (96, 128)
// registers  given 24 + 2 x 240; used by those that compute 238 (64, 128), 218 (96); none spilled
//
// A piece of work visits, for each query head of its part of the group in turn, the query tiles that see its keys. dk
// and dv stay in registers over all of them; dq is added to sums in device memory.
//
// Scores and dprobs are transposed, keys by rows: their accumulators, packed, are the left operands of dv and dk, and
// only dscores go through shared memory, for dq. The products of a step that nothing waits for are left to the next
// one, so that the exponentials and what makes dscores of dprobs have products beside them. A warpgroup issues
//   scores, dprobs | exponentials | dv, dq of the last step | dscores | dk | dq of the last step to shared memory
// and waits, at each bar, only for what it needs next. 64 query rows a step; at head_dim 64, where the products of such
// a step are too short, 128.
//
// A warp's own chain of instructions is longer than the products: what is not in it counts.
// - Shared memory answers after 400 cycles while products read it. So lse and delta are read long before they are
//   needed, and what a step is to work on is told by who loads.
// - The copy engine takes loads after additions, which are slow. So q and dout have barriers of their own, and q three
//   tiles: where the loads of a step wait for the last step's end they come too late.
// - A proxy fence waits for what its thread has stored. So dq is handed on beside the next step, and added by a warp
//   that has nothing else to do. (Added by red from the accumulators it held up the next step: registers are free only
//   when the addition has read them.)
// - Warpgroups at the same place at the same time compete for the same units. So dscores are handed on at once, and
//   neither has to be closer to the other than three quarters of a step.
//
// Cycles of a multiprocessor for a step, from the sizes (MMA 10 M N d / 4096, MUFU M N / 16, shared memory: operands +
// dscores, dq and fills at 128 bytes), and what was measured: H200, bf16, TFLOP/s full / causal at 16384 keys, at
// 4096 for 96; benches/record/2026-11-30-hopper.md.
//   head_dim   rows x keys   MMA    MUFU   shared        expected                measured
//   64         128 x 128     2560   1024   1792 + 1024   520 to 570 / 500 to 550   541 / 523
//   96         64 x 128      1920   512    1536 + 704                              498 / 463
//   128        64 x 128      2560   512    2048 + 896    600 to 650 / 560 to 620   609 / 596
// At 128 shared memory is busy for 81 % of the time: there is not much left.
#include <type_traits>

#include "../common/softmax.cuh"
#include "../ptx/proxy_fence.cuh"
#include "../ptx/stmatrix.cuh"
#include "../ptx/wgmma.cuh"
#include "backward_steps.cuh"

namespace {

// ---- constants --------------------------------------------------------------------------------------

using Tile = BackwardTile<HEAD_DIM>;
constexpr int WARPGROUPS = BACKWARD_WARPGROUPS, WARPGROUP_KEYS = 64;
constexpr int TILE_M = Tile::TILE_M, TILE_N = WARPGROUPS * WARPGROUP_KEYS;
constexpr int HEAD_BLOCKS = HEAD_DIM / 16, HEAD_TILES = HEAD_DIM / 8;
constexpr int ROW_BLOCKS = TILE_M / 16, ROW_TILES = TILE_M / 8;
constexpr int DQ_COLS = 64, DQ_TILES = DQ_COLS / 8;  // a warpgroup computes 64 x 64 of a step's dq:
constexpr bool SHARE_ROWS = TILE_M == 128;            // of 128 rows, or of 128 columns
// So much of lse and delta, in accumulators of scores, is read long before it is needed: as far as registers go.
constexpr int EARLY_LSE = 8, EARLY_DELTA = 7;
static_assert((TILE_M == 64 || TILE_M == 128) && ROW_PADDING % TILE_M == 0 && ROW_PADDING % TILE_N == 0);
static_assert(HEAD_DIM <= (SHARE_ROWS ? DQ_COLS : WARPGROUPS * DQ_COLS));

using LayoutQ = PanelLayout<TILE_M, HEAD_DIM>;
using LayoutKV = PanelLayout<TILE_N, HEAD_DIM>;
using LayoutS = PanelLayout<TILE_N, TILE_M>;
using Work = BackwardWork<TILE_M, TILE_N, true>;

struct SharedStorage {
  static constexpr int Q_STAGES = 3, DOUT_STAGES = 2;
  SwizzledTile<LayoutKV> k, v;
  SwizzledTile<LayoutS> dscores[2];  // transposed
  SwizzledTile<LayoutQ> q[Q_STAGES], dout[DOUT_STAGES];
  alignas(16) float lse_log2[Q_STAGES][TILE_M], delta[DOUT_STAGES][TILE_M];
  alignas(128) float dq[WARPGROUPS][4][16 * DQ_COLS];  // of each warp, on its way
  // k comes with the q of a piece's first step, v with its dout.
  Handover q_handover[Q_STAGES], dout_handover[DOUT_STAGES];
  uint64_t k_empty, v_empty;  // all products with them have ended
  StepNote notes[NOTES];
  Handover dscores_handover[2], dq_handover[WARPGROUPS];
  WorkRing<Work> ring;
};
static_assert(sizeof(SharedStorage) <= SHARED_KIB << 10);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// ---- device steps: computing ------------------------------------------------------------------------

// Begins acc = keys rows^T, of a warpgroup's keys.
template <class Element>
__device__ __forceinline__ void begin_scores(float (&acc)[1][ROW_TILES][4], const SwizzledTile<LayoutKV>& keys,
                                             int first_key, const SwizzledTile<LayoutQ>& rows) {
  const MatrixDescriptor<LayoutKV> a = k_major<LayoutKV>(smem_address(&keys) + first_key * LayoutKV::ROW_BYTES);
  const MatrixDescriptor<LayoutQ> b = k_major<LayoutQ>(smem_address(&rows));
#pragma unroll
  for (int block = 0; block < HEAD_BLOCKS; ++block)
    ptx::Wgmma<Element, TILE_M>::template ss<false, false>(acc[0], a.after(k_major_step<LayoutKV>(block)),
                                                           b.after(k_major_step<LayoutQ>(block)), block > 0);
  ptx::wgmma_commit();
}

// Begins acc += weights^T rows, with `weights` a warpgroup's keys by rows.
template <class Element>
__device__ __forceinline__ void begin_sum(float (&acc)[1][HEAD_TILES][4], const uint32_t (&weights)[ROW_BLOCKS][4],
                                          const SwizzledTile<LayoutQ>& rows) {
  const MatrixDescriptor<LayoutQ> b = n_major<LayoutQ>(smem_address(&rows));
#pragma unroll
  for (int block = 0; block < ROW_BLOCKS; ++block)
    ptx::Wgmma<Element, HEAD_DIM>::template rs<true>(acc[0], weights[block], b.after(n_major_step<LayoutQ>(block)),
                                                     true);
  ptx::wgmma_commit();
}

// Begins acc = dscores k, of 64 rows from `first_row` and 64 columns from `first_col` on.
template <class Element>
__device__ __forceinline__ void begin_dq(float (&acc)[1][DQ_TILES][4], const SwizzledTile<LayoutS>& dscores,
                                         int first_row, const SwizzledTile<LayoutKV>& k, int first_col) {
  const MatrixDescriptor<LayoutS> a =
      n_major<LayoutS>(smem_address(&dscores) + first_row / LayoutS::PANEL_COLS * LayoutS::PANEL_BYTES);
  const MatrixDescriptor<LayoutKV> b =
      n_major<LayoutKV>(smem_address(&k) + first_col / LayoutKV::PANEL_COLS * LayoutKV::PANEL_BYTES);
#pragma unroll
  for (int block = 0; block < TILE_N / 16; ++block)
    ptx::Wgmma<Element, DQ_COLS>::template ss<true, true>(acc[0], a.after(n_major_step<LayoutS>(block)),
                                                          b.after(n_major_step<LayoutKV>(block)), block > 0);
  ptx::wgmma_commit();
}

// Where a warpgroup's part of dq begins.
__device__ __forceinline__ int dq_row(int warpgroup) { return SHARE_ROWS ? warpgroup * 64 : 0; }
__device__ __forceinline__ int dq_col(int warpgroup) { return SHARE_ROWS ? 0 : warpgroup * DQ_COLS; }

// What computing warpgroup `warpgroup` does.
template <class Element>
__device__ __forceinline__ void compute(const BackwardArguments& arguments, SharedStorage& shared, int warpgroup) {
  const BwdParams& params = arguments.params;
  const AttnProblem& p = params.problem;
  const Mask mask(p);
  // Of the keys of the tile, and of a warpgroup's rows of dq.
  const auto warp_row = [] { return ptx::thread_index() / 32 % 4 * 16; };
  const auto lane_index = [] { return ptx::thread_index() % 32; };
  const int warpgroup_key = warpgroup * WARPGROUP_KEYS;

  uint32_t number = 0;  // of the step; two dout and dscores are there, and are used in turn
  RingPlace<SharedStorage::Q_STAGES> q_place;
  int last_q = 0;  // the stage of the last step
  const auto stage = [&](uint32_t number) { return number % 2; };
  const auto phase = [&](uint32_t number) { return number / 2 % 2; };

#pragma unroll 1  // few registers
  for (uint32_t piece = 0; ptx::uniform(shared.ring.wait(piece)); ++piece) {
    const volatile Work& work = shared.ring[piece];  // read at each use: registers are short
    float acc_dk[1][HEAD_TILES][4], acc_dv[1][HEAD_TILES][4];
    clear(acc_dk);
    clear(acc_dv);
    ptx::hold(acc_dk);
    ptx::hold(acc_dv);

    const uint32_t first = number, end = number + ptx::uniform(step_count(work));
    if (number < end) {
      const int first_key = work.n_tile * TILE_N;

      // The product of dq of step `of`, which has its dscores.
      const auto begin_dq_of = [&](uint32_t of, float(&acc_dq)[1][DQ_TILES][4]) {
        shared.dscores_handover[stage(of)].wait_full(phase(of));  // dscores of both warpgroups are there
        ptx::wgmma_fence();
        begin_dq<Element>(acc_dq, shared.dscores[stage(of)], dq_row(warpgroup), shared.k, dq_col(warpgroup));
      };
      // For the copy engine to add. In registers it would hold up the next step: they are read one by one.
      Handover& dq_handover = shared.dq_handover[warpgroup];
      const auto stage_dq_of = [&](uint32_t of, float(&acc_dq)[1][DQ_TILES][4]) {
        ptx::hold(acc_dq);
        stage_dq(shared.dq[warpgroup], dq_handover, of % 2, acc_dq);
      };
      // What all lanes have stored.
      const auto hand_on = [&](Handover& handover) {
        ptx::proxy_fence();
        __syncwarp();  // all lanes' part is there
        if (lane_index() == 0) handover.publish();
      };

      // What the next step reads first.
      float2 lse[ROW_TILES];
      int is_masked;
      const auto read_ahead = [&] {
        // After the last step what lies there, or comes there just now, and used nowhere.
        if (number < end) shared.q_handover[q_place.stage].wait_full(q_place.phase);
        read_statistic<0, EARLY_LSE>(lse, shared.lse_log2[q_place.stage], lane_index());
        is_masked = shared.notes[number % NOTES].is_masked;
      };

      // A step, and dq of the last one.
      uint32_t weights[ROW_BLOCKS][4];  // probs, then dscores: packed, with the rows as K
      const auto run_step = [&] {
        const uint32_t now = stage(number);
        const int q_stage = q_place.stage;
        const SwizzledTile<LayoutQ>&q = shared.q[q_stage], &dout = shared.dout[now];
        float scores[1][ROW_TILES][4], dprobs[1][ROW_TILES][4], acc_dq[1][DQ_TILES][4];
        float2 delta[ROW_TILES];

        ptx::wgmma_fence();
        begin_scores<Element>(scores, shared.k, warpgroup_key, q);
        ptx::wgmma_wait<1>();  // dk of the last step
        ptx::hold(acc_dk);
        // Products have read it, and lanes lse, before dk.
        if (number > first) shared.q_handover[last_q].release(lane_index() == 0);
        shared.dout_handover[now].wait_full(phase(number));
        ptx::wgmma_fence();
        begin_scores<Element>(dprobs, shared.v, warpgroup_key, dout);

        const float softmax_scale_log2 = p.softmax_scale * LOG2_E;
        ptx::wgmma_wait<1>();  // scores
        ptx::hold(scores);
        read_statistic<EARLY_LSE, ROW_TILES>(lse, shared.lse_log2[q_stage], lane_index());
        if (is_masked)
          mask_scores_transposed(scores, mask, shared.notes[number % NOTES].first_row,
                                 first_key + warpgroup_key + warp_row(), lane_index());
#pragma unroll
        for (int j = 0; j < ROW_TILES; ++j)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            weights[j / 2][j % 2 * 2 + half] =
                pack<Element>(ptx::exp2(scores[0][j][2 * half] * softmax_scale_log2 - lse[j].x),
                              ptx::exp2(scores[0][j][2 * half + 1] * softmax_scale_log2 - lse[j].y));

        read_statistic<0, EARLY_DELTA>(delta, shared.delta[now], lane_index());
        ptx::hold(acc_dv);
        ptx::wgmma_fence();
        begin_sum<Element>(acc_dv, weights, dout);
        if (number > first + 1) hand_on(dq_handover);  // what the last step has stored
        begin_dq_of(number - 1, acc_dq);  // in the first step of what lies there, and added nowhere
        ptx::wgmma_wait<1>();  // dprobs, dv
        ptx::hold(dprobs);
        ptx::hold(acc_dv);
        read_statistic<EARLY_DELTA, ROW_TILES>(delta, shared.delta[now], lane_index());
#pragma unroll
        for (int j = 0; j < ROW_TILES; ++j)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t& weight = weights[j / 2][j % 2 * 2 + half];
            const float2 prob = unpack<Element>(weight);
            weight = pack<Element>(prob.x * (dprobs[0][j][2 * half] - delta[j].x),
                                   prob.y * (dprobs[0][j][2 * half + 1] - delta[j].y));
          }
        const int lane = lane_index();
        const uint32_t dscores = smem_address(&shared.dscores[now]);
        // [1] has been read once more, in the very first step.
        shared.dscores_handover[now].wait_empty(phase(number) ^ now);
#pragma unroll
        for (int block = 0; block < ROW_BLOCKS; ++block)
          ptx::stmatrix_x4(
              dscores + LayoutS::chunk_offset(warpgroup_key + warp_row() + lane % 16, 2 * block + lane / 16),
              weights[block]);

        ptx::hold(acc_dk);
        ptx::wgmma_fence();
        begin_sum<Element>(acc_dk, weights, q);
        hand_on(shared.dscores_handover[now]);
        ptx::wgmma_wait<1>();  // dq of the last step
        shared.dout_handover[now].release(lane_index() == 0);  // products have read it; lanes delta, before handing on
        shared.dscores_handover[now ^ 1].release(lane_index() == 0);
        if (number > first) stage_dq_of(number - 1, acc_dq);
        ++number;
        last_q = q_stage;
        q_place.advance();
        read_ahead();
      };

      read_ahead();
      do run_step();
      while (number < end);

      if (lane_index() == 0) ptx::mbarrier_arrive(smem_address(&shared.v_empty));
      if (number > first + 1) hand_on(dq_handover);
      float acc_dq[1][DQ_TILES][4];
      begin_dq_of(number - 1, acc_dq);
      ptx::wgmma_wait<0>();
      ptx::hold(acc_dk);
      ptx::hold(acc_dv);
      // All products with them have ended. dscores of the last step the next one reads once more.
      shared.q_handover[last_q].release(lane_index() == 0);
      if (lane_index() == 0) ptx::mbarrier_arrive(smem_address(&shared.k_empty));
      stage_dq_of(number - 1, acc_dq);
      hand_on(dq_handover);
    }

    store_dk_dv<Element>(params, work, warpgroup_key + warp_row(), 0, acc_dk, acc_dv, lane_index());
    __syncwarp();  // all lanes have read the work
    shared.ring.release(piece, lane_index() == 0);
  }
}

#endif

// ---- kernel -----------------------------------------------------------------------------------------

template <class Element, bool IN_ORDER>
__global__ void __launch_bounds__(BACKWARD_THREADS, 1)
    backward_kernel(const __grid_constant__ BackwardArguments arguments) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(smem);

  run_roles<LayoutQ, LayoutKV, IN_ORDER, WARPGROUPS>(
      arguments, shared,
      [&] {
        // The warps of a warpgroup write it, one warp reads it.
        for (Handover& handover : shared.dq_handover) handover.init(1, 4);
      },
      [&](int warpgroup) {
        // Of the last columns there may be fewer.
        const int col = dq_col(warpgroup), cols = min(DQ_COLS, HEAD_DIM - col);
        if (threadIdx.x % 32 == 0)
          add_dq<IN_ORDER>(arguments.params, shared, shared.dq[warpgroup], warpgroup, dq_row(warpgroup), col, cols);
      },
      [&](int warpgroup) { compute<Element>(arguments, shared, warpgroup); });
#else
  __trap();  // the code for other targets is never launched
#endif
}

// ---- launcher ---------------------------------------------------------------------------------------

cudaError_t launch_kernel(const BwdParams* params, cudaStream_t stream) {
  return launch_backward<LayoutQ, LayoutKV>(BACKWARD_KERNEL_FOR(backward_kernel, *params), *params,
                                            sizeof(SharedStorage), stream);
}

}  // namespace

extern "C" {
extern const Kernel<BwdParams> KERNEL_SYMBOL(flash_bwd_sm90);
const Kernel<BwdParams> KERNEL_SYMBOL(flash_bwd_sm90) = {
    launch_kernel, sizeof(SharedStorage), BACKWARD_THREADS, 1, TILE_M, TILE_N};
}
