// The work of backward.cu for large heads, whose dk and dv of 64 keys do not fit one warpgroup's registers.
//
// grid       as there
// block      two warpgroups that compute, and one of which a thread loads, one takes the pieces of work, and two add
//            dq, each for one that computes; where dq is added in turn, one waits for turns and one passes them on
// shared     k and v tile; q and dout tiles of two steps, with lse and delta; probs and dscores of two steps; at 192 dq
//            on its way: 226 KiB
// registers  given 24 + 2 x 240; used by those that compute 200 (192; 184 in order), 216 (256); none spilled
//
// The two warpgroups share the rows of scores^T and dprobs^T, keys by rows, and the columns of dk, dv and dq. So probs
// and dscores go through shared memory, and are waited for by the other warpgroup. A warpgroup issues
//   dq, dv, dk, scores and dprobs of the next step | the addition to dq | probs, dscores of the next step
// and waits, at each bar, only for what it needs next: the additions, or dq's way to shared memory, have four products
// beside them.
//
// Cycles as in backward.cu, of a step of 64 rows x 64 keys; additions to dq at 17 bytes a cycle, what red reaches (at
// 192 the copy engine adds):
//   head_dim   MMA    MUFU   shared        dq     expected                measured (192: 4096 keys)
//   192        1920   256    2016 + 512    2891   470 to 550                411 / 389
//   256        2560   256    2688 + 640    3855   480 to 560 / 460 to 540   450 / 446
// The additions to dq are what limits it: with 64 keys there are twice as many for each product as with 128; at 256
// the L2 cache is busy for 84 % of the time. There is no shared memory left there for the copy engine to take dq from,
// so it is added by red.
#include "../common/softmax.cuh"
#include "../ptx/proxy_fence.cuh"
#include "../ptx/stmatrix.cuh"
#include "../ptx/wgmma.cuh"
#include "backward_steps.cuh"

namespace {

// ---- constants --------------------------------------------------------------------------------------

constexpr int WARPGROUPS = BACKWARD_WARPGROUPS;
constexpr int TILE_M = 64, TILE_N = 64;
constexpr int ROWS = TILE_M / WARPGROUPS, COLS = HEAD_DIM / WARPGROUPS;  // of a warpgroup
constexpr int HEAD_BLOCKS = HEAD_DIM / 16, COL_TILES = COLS / 8;
constexpr int ROW_BLOCKS = ROWS / 16, ROW_TILES = ROWS / 8;
static_assert(ROW_PADDING % TILE_M == 0 && ROW_PADDING % TILE_N == 0);

constexpr int PANEL_COLS = COLS % 64 == 0 ? 64 : 32;  // a warpgroup's columns are whole panels
static_assert(COLS % PANEL_COLS == 0);
using LayoutQ = PanelLayout<TILE_M, HEAD_DIM, PANEL_COLS>;
using LayoutKV = PanelLayout<TILE_N, HEAD_DIM, PANEL_COLS>;
using LayoutS = PanelLayout<TILE_N, TILE_M>;
using Work = BackwardWork<TILE_M, TILE_N, true>;

// Whether the copy engine adds dq, where shared memory has room for it; else red, from the accumulators. In order
// always red: a turn can be passed on only by who has waited for the copy engine, which is then late for the next
// addition.
constexpr bool HAS_ROOM_FOR_DQ = HEAD_DIM == 192;
template <bool IN_ORDER>
constexpr bool STAGE_DQ = HAS_ROOM_FOR_DQ && !IN_ORDER;

struct SharedStorage {
  static constexpr int Q_STAGES = 2, DOUT_STAGES = 2;
  SwizzledTile<LayoutKV> k, v;
  SwizzledTile<LayoutS> probs[2], dscores[2];  // transposed
  SwizzledTile<LayoutQ> q[Q_STAGES], dout[DOUT_STAGES];
  alignas(16) float lse_log2[Q_STAGES][TILE_M], delta[DOUT_STAGES][TILE_M];
  // k comes with the q of a piece's first step, v with its dout.
  Handover q_handover[Q_STAGES], dout_handover[DOUT_STAGES];
  uint64_t k_empty, v_empty;  // all products with them have ended
  StepNote notes[NOTES];
  Handover dscores_handover[2];  // and of probs
  alignas(128) float dq[WARPGROUPS][4][HAS_ROOM_FOR_DQ ? 16 * COLS : 4];  // of each warp, on its way
  Handover dq_handover[WARPGROUPS];
  // In order, of two steps: `full` at the step's turn, `empty` when all warps are known to have added.
  Handover turns[2];
  uint64_t added[2];  // of the warps
  WorkRing<Work> ring;
};
static_assert(sizeof(SharedStorage) <= SHARED_KIB << 10);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// ---- device steps -----------------------------------------------------------------------------------

// Begins acc = keys rows^T, of a warpgroup's rows. `offset` is 0.
template <class Element>
__device__ __forceinline__ void begin_scores(float (&acc)[1][ROW_TILES][4], const SwizzledTile<LayoutKV>& keys,
                                             const SwizzledTile<LayoutQ>& rows, int first_row, int offset) {
  const auto a = k_major<LayoutKV>(smem_address(&keys) + offset);
  const auto b = k_major<LayoutQ>(smem_address(&rows) + offset + first_row * LayoutQ::ROW_BYTES);
#pragma unroll
  for (int block = 0; block < HEAD_BLOCKS; ++block)
    ptx::Wgmma<Element, ROWS>::template ss<false, false>(acc[0], a.after(k_major_step<LayoutKV>(block)),
                                                         b.after(k_major_step<LayoutQ>(block)), block > 0);
  ptx::wgmma_commit();
}

// The panels of a warpgroup's columns as operand B.
template <class Layout>
__device__ __forceinline__ MatrixDescriptor<Layout> columns(const SwizzledTile<Layout>& tile, int warpgroup) {
  return n_major<Layout>(smem_address(&tile) + warpgroup * (COLS / PANEL_COLS) * Layout::PANEL_BYTES);
}

// Begins acc += weights^T rows, of a warpgroup's columns.
template <class Element>
__device__ __forceinline__ void begin_sum(float (&acc)[1][COL_TILES][4], const SwizzledTile<LayoutS>& weights,
                                          const SwizzledTile<LayoutQ>& rows, int warpgroup) {
  const auto a = k_major<LayoutS>(smem_address(&weights));
  const auto b = columns(rows, warpgroup);
#pragma unroll
  for (int block = 0; block < TILE_M / 16; ++block)
    ptx::Wgmma<Element, COLS>::template ss<false, true>(acc[0], a.after(k_major_step<LayoutS>(block)),
                                                        b.after(n_major_step<LayoutQ>(block)), true);
  ptx::wgmma_commit();
}

// Begins acc = dscores k, of a warpgroup's columns.
template <class Element>
__device__ __forceinline__ void begin_dq(float (&acc)[1][COL_TILES][4], const SwizzledTile<LayoutS>& dscores,
                                         const SwizzledTile<LayoutKV>& k, int warpgroup) {
  const auto a = n_major<LayoutS>(smem_address(&dscores));
  const auto b = columns(k, warpgroup);
#pragma unroll
  for (int block = 0; block < TILE_N / 16; ++block)
    ptx::Wgmma<Element, COLS>::template ss<true, true>(acc[0], a.after(n_major_step<LayoutS>(block)),
                                                       b.after(n_major_step<LayoutKV>(block)), block > 0);
  ptx::wgmma_commit();
}

// Adds accumulators [BEGIN, END) of a warp to the pieces of dq from `piece` on.
template <int BEGIN, int END>
__device__ __forceinline__ void add_tiles(float* piece, const float (&acc)[1][COL_TILES][4], int lane) {
#pragma unroll
  for (int j = BEGIN; j < END; ++j)
    ptx::red_add_v4(piece + j * AccLayout::PIECE + lane * AccLayout::LANE_STRIDE, acc[0][j]);
}

// In order one thread waits for turns, and another passes them on: the fence of that waits until the additions are
// there, half a step, in which the next turn is waited for and begun. With one thread for both, 256 at 4096 keys was at
// 336 where 388, causal at 325 where 359.
__device__ __forceinline__ void await_turns(const BwdParams& params, SharedStorage& shared) {
  for_each_step(shared, [&](uint32_t number, const StepNote& note, bool) {
    // The note is there. Not missed: before this turn nobody finishes with q.
    shared.q_handover[number % 2].wait_full(number / 2 % 2);
    shared.turns[number % 2].wait_empty(number / 2 % 2);
    wait_for_turn(params.dq_turn + note.counter, note.turn);
    shared.turns[number % 2].publish();
  });
}

__device__ __forceinline__ void pass_turns(const BwdParams& params, SharedStorage& shared) {
  for_each_step(shared, [&](uint32_t number, const StepNote& note, bool) {
    // Not missed: the turn after the next one begins when this one is known to be over.
    ptx::mbarrier_wait(smem_address(&shared.added[number % 2]), number / 2 % 2);
    shared.turns[number % 2].release(true);
    ptx::store_release(params.dq_turn + note.counter, note.turn + 1);
  });
}

// What computing warpgroup `warpgroup` does.
template <class Element, bool IN_ORDER>
__device__ __forceinline__ void compute(const BackwardArguments& arguments, SharedStorage& shared, int warpgroup) {
  const BwdParams& params = arguments.params;
  const AttnProblem& p = params.problem;
  const Mask mask(p);
  // Of the keys of the tile, and of the rows of dq.
  const auto warp_row = [] { return ptx::thread_index() / 32 % 4 * 16; };
  const auto lane_index = [] { return ptx::thread_index() % 32; };

  uint32_t number = 0;  // of the step; two of each tile are there, and are used in turn
  const auto stage = [](uint32_t number) { return number % 2; };
  const auto phase = [](uint32_t number) { return number / 2 % 2; };

#pragma unroll 1  // few registers
  for (uint32_t piece = 0; ptx::uniform(shared.ring.wait(piece)); ++piece) {
    const volatile Work& work = shared.ring[piece];  // read at each use: registers are short
    float acc_dk[1][COL_TILES][4], acc_dv[1][COL_TILES][4];
    clear(acc_dk);
    clear(acc_dv);
    ptx::hold(acc_dk);
    ptx::hold(acc_dv);

    const uint32_t end = number + ptx::uniform(step_count(work));
    if (number < end) {
      Handover& dq_handover = shared.dq_handover[warpgroup];
      // Runs `between` as soon as half of the registers of acc_dq are free for it.
      const auto add_dq_of = [&](int64_t dq, float(&acc_dq)[1][COL_TILES][4], const auto& between) {
        ptx::hold(acc_dq);
        if (IN_ORDER) shared.turns[stage(number)].wait_full(phase(number));
        float* const piece = params.dq_acc + dq + AccLayout::piece(warp_row(), warpgroup * COLS, HEAD_DIM);
        add_tiles<0, COL_TILES / 2>(piece, acc_dq, lane_index());
        between();
        add_tiles<COL_TILES / 2, COL_TILES>(piece, acc_dq, lane_index());
        if (IN_ORDER) {
          __syncwarp();  // all lanes have added
          if (lane_index() == 0) ptx::mbarrier_arrive(smem_address(&shared.added[stage(number)]));
        }
      };
      const auto hand_on = [&](Handover& first, Handover* second) {
        ptx::proxy_fence();
        __syncwarp();  // all lanes' part is there
        if (lane_index() != 0) return;
        first.publish();
        if (second != nullptr) second->publish();
      };
      // Writes this warp's part of probs or dscores, for the products of both warpgroups.
      const auto store = [&](SwizzledTile<LayoutS>& tile, const uint32_t(&packed)[ROW_BLOCKS][4]) {
        const int lane = lane_index();
        const uint32_t row = smem_address(&tile) + (warp_row() + lane % 16) * LayoutS::ROW_BYTES;
#pragma unroll
        for (int block = 0; block < ROW_BLOCKS; ++block)
          ptx::stmatrix_x4(row + LayoutS::permuted(lane, warpgroup * (ROWS / 8) + 2 * block + lane / 16) * 16,
                           packed[block]);
      };

      // Begins scores and dprobs of step `number`, whose rows are there. `offset` is 0, not known to the compiler for
      // the first step: it would keep the descriptors of both places that call this, and has no registers for them.
      const auto begin_both = [&](uint32_t number, float(&scores)[1][ROW_TILES][4], float(&dprobs)[1][ROW_TILES][4],
                                  int offset) {
        const int now = stage(number);
        ptx::wgmma_fence();
        begin_scores<Element>(scores, shared.k, shared.q[now], warpgroup * ROWS, offset);
        begin_scores<Element>(dprobs, shared.v, shared.dout[now], warpgroup * ROWS, offset);
      };
      // Makes probs and dscores of them. Of two stages of both one is written while the other warpgroup may still read
      // the other; that it has finished with the one before that, it says with those of the last step.
      // `dq` is handed on with them: what the last step has stored, or null.
      const auto share = [&](uint32_t number, Handover* dq, float(&scores)[1][ROW_TILES][4],
                             float(&dprobs)[1][ROW_TILES][4]) {
        ptx::hold(scores);
        ptx::hold(dprobs);
        const StepNote& note = shared.notes[number % NOTES];
        if (note.is_masked)
          mask_scores_transposed(scores, mask, note.first_row + warpgroup * ROWS, work.n_tile * TILE_N + warp_row(),
                                 lane_index());
        const float softmax_scale_log2 = p.softmax_scale * LOG2_E;
        float2 lse[ROW_TILES], delta[ROW_TILES];
        read_statistic<0, ROW_TILES>(lse, shared.lse_log2[stage(number)] + warpgroup * ROWS, lane_index());
        read_statistic<0, ROW_TILES>(delta, shared.delta[stage(number)] + warpgroup * ROWS, lane_index());
        uint32_t probs[ROW_BLOCKS][4], dscores[ROW_BLOCKS][4];
#pragma unroll
        for (int j = 0; j < ROW_TILES; ++j)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t& packed = probs[j / 2][j % 2 * 2 + half];
            packed = pack<Element>(ptx::exp2(scores[0][j][2 * half] * softmax_scale_log2 - lse[j].x),
                                   ptx::exp2(scores[0][j][2 * half + 1] * softmax_scale_log2 - lse[j].y));
            const float2 prob = unpack<Element>(packed);
            dscores[j / 2][j % 2 * 2 + half] = pack<Element>(prob.x * (dprobs[0][j][2 * half] - delta[j].x),
                                                             prob.y * (dprobs[0][j][2 * half + 1] - delta[j].y));
          }
        store(shared.probs[stage(number)], probs);
        store(shared.dscores[stage(number)], dscores);
        hand_on(shared.dscores_handover[stage(number)], dq);
      };

      {
        float scores[1][ROW_TILES][4], dprobs[1][ROW_TILES][4];
        shared.q_handover[stage(number)].wait_full(phase(number));
        shared.dout_handover[stage(number)].wait_full(phase(number));
        begin_both(number, scores, dprobs, ptx::recomputed(0));
        ptx::wgmma_wait<0>();
        share(number, nullptr, scores, dprobs);
      }
      // The rest of a step, and the beginning of the next.
      const auto run_step = [&] {
        const uint32_t now = stage(number);
        float scores[1][ROW_TILES][4], dprobs[1][ROW_TILES][4], acc_dq[1][COL_TILES][4];

        shared.dscores_handover[now].wait_full(phase(number));
        ptx::hold(acc_dv);
        ptx::hold(acc_dk);
        ptx::wgmma_fence();
        begin_dq<Element>(acc_dq, shared.dscores[now], shared.k, warpgroup);
        begin_sum<Element>(acc_dv, shared.probs[now], shared.dout[now], warpgroup);
        begin_sum<Element>(acc_dk, shared.dscores[now], shared.q[now], warpgroup);
        const int64_t dq = shared.notes[number % NOTES].dq;
        ptx::wgmma_wait<2>();  // dq
        const bool is_last = number + 1 == end;
        const auto begin_next = [&] {
          // After the last step of that one once more, and used nowhere.
          if (!is_last) {
            shared.q_handover[now ^ 1].wait_full(phase(number + 1));
            shared.dout_handover[now ^ 1].wait_full(phase(number + 1));
          }
          begin_both(is_last ? number : number + 1, scores, dprobs, 0);
        };
        if constexpr (STAGE_DQ<IN_ORDER>) {
          begin_next();
          // For the copy engine to add, once this is handed on.
          ptx::hold(acc_dq);
          stage_dq(shared.dq[warpgroup], dq_handover, number % 2, acc_dq);
        } else {
          add_dq_of(dq, acc_dq, begin_next);
        }
        ptx::wgmma_wait<2>();  // dv, dk
        if (is_last) ptx::wgmma_wait<0>();  // all that read q and dout
        ptx::hold(acc_dv);
        ptx::hold(acc_dk);
        // Of q and dout, which products read; lse and delta have been read before these products.
        shared.q_handover[now].release(lane_index() == 0);
        shared.dout_handover[now].release(lane_index() == 0);
        ptx::wgmma_wait<0>();
        ++number;
        if (!is_last) share(number, STAGE_DQ<IN_ORDER> ? &dq_handover : nullptr, scores, dprobs);
      };

      do run_step();
      while (number < end);
      if (lane_index() == 0) {
        ptx::mbarrier_arrive(smem_address(&shared.v_empty));
        ptx::mbarrier_arrive(smem_address(&shared.k_empty));
      }
      if (STAGE_DQ<IN_ORDER>) hand_on(dq_handover, nullptr);
    }

    store_dk_dv<Element>(params, work, warp_row(), warpgroup * COLS, acc_dk, acc_dv, lane_index());
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

  run_roles<LayoutQ, LayoutKV, IN_ORDER, STAGE_DQ<IN_ORDER> || IN_ORDER ? 2 : 0>(
      arguments, shared,
      [&] {
        for (Handover& handover : shared.dq_handover) handover.init(1, 4);
        for (Handover& turn : shared.turns) turn.init(1);
        for (uint64_t& added : shared.added) ptx::mbarrier_init(smem_address(&added), 4 * WARPGROUPS);
      },
      [&](int helper) {
        if (threadIdx.x % 32 != 0) return;
        if constexpr (STAGE_DQ<IN_ORDER>)
          add_dq<false>(arguments.params, shared, shared.dq[helper], helper, 0, helper * COLS, COLS);
        else if (helper == 0)
          await_turns(arguments.params, shared);
        else
          pass_turns(arguments.params, shared);
      },
      [&](int warpgroup) { compute<Element, IN_ORDER>(arguments, shared, warpgroup); });
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
extern const Kernel<BwdParams> KERNEL_SYMBOL(flash_bwd_wide_sm90);
const Kernel<BwdParams> KERNEL_SYMBOL(flash_bwd_wide_sm90) = {
    launch_kernel, sizeof(SharedStorage), BACKWARD_THREADS, 1, TILE_M, TILE_N};
}
