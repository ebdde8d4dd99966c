// What the backward kernels share: who does what, what is read, where dq is added, how dk and dv end, and the launch.
#pragma once
#include "../common/accumulator.cuh"
#include "../common/backward_work.cuh"
#include "../common/sequence.cuh"
#include "../launch.cuh"
#include "../ptx/ordered.cuh"
#include "../ptx/setmaxnreg.cuh"
#include "../ptx/shared.cuh"
#include "pipeline.cuh"
#include "store.cuh"
#include "tile.cuh"

constexpr int WARPGROUP_THREADS = 128;
constexpr int BACKWARD_WARPGROUPS = 2;  // that compute
constexpr int BACKWARD_THREADS = WARPGROUP_THREADS * (1 + BACKWARD_WARPGROUPS);

struct BackwardArguments {
  BwdParams params;
  TensorMap q, k, v, dout;
};

// What those that compute, and add, need to know of a step. Who loads works it out: their registers are short, and so
// is the time between two steps.
struct StepNote {
  int64_t dq;             // where the sums of dq of its rows begin
  int32_t first_row;
  int32_t counter, turn;  // of additions in order: the first counter of its rows, and which turn it is
  int32_t is_masked;
};
// So many notes are kept. From the addition of dq of a step to the note that is written next there are six at most: dq
// of two more steps can be on its way, and three more q be loaded.
constexpr int NOTES = 8;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Reads lse or delta of the columns of scores^T that a thread holds, in accumulators [BEGIN, END).
template <int BEGIN, int END, int ROW_TILES>
__device__ __forceinline__ void read_statistic(float2 (&statistic)[ROW_TILES], const float* rows, int lane) {
#pragma unroll
  for (int j = BEGIN; j < END; ++j) statistic[j] = *reinterpret_cast<const float2*>(&rows[8 * j + lane % 4 * 2]);
}

// The order of additions to dq, where their sum has to be the same bits on every run: the key tiles take turns at
// each tile of dq. Blocks start in the order of their index and a tile waits only for tiles before it, so the first
// of those that wait is always running.
//
// With a diagonal the last key tile comes first: it begins where the one before it comes TILE_N / TILE_M steps later,
// so that they meet no tile of dq at the same time. In the other order each would first wait for all before it.
// The place of key tile `n_tile` among those that add to the tile of dq from `first_row` on.
template <int TILE_M, int TILE_N>
__device__ __forceinline__ int dq_turn(const Mask& mask, int n_tile, int first_row) {
  if (mask.right == MAX_WINDOW) return n_tile - max(mask.first_key(first_row), 0) / TILE_N;
  return (mask.end_key(min(first_row + TILE_M, mask.seqlen_q) - 1) - 1) / TILE_N - n_tile;
}

// Begins to fill a tile with rows of q or dout, and `smem_statistic` with lse or delta of these rows, once all have
// finished with what is there.
template <class LayoutQ>
__device__ __forceinline__ void refill(SwizzledTile<LayoutQ>& tile, float (&smem_statistic)[LayoutQ::ROWS],
                                       Handover& handover, uint32_t phase, const TensorMap& tensor,
                                       const float* statistic, int first_row, int head, int batch) {
  handover.wait_empty(phase);
  handover.expect(LayoutQ::BYTES + sizeof(smem_statistic));
  load_tile(tile, handover, tensor, first_row, head, batch);
  ptx::bulk_load(smem_address(smem_statistic), statistic, sizeof(smem_statistic), smem_address(&handover.full));
}

// What one thread of the first warpgroup does: loads the keys, then the query rows of each step.
template <class LayoutQ, class LayoutKV, bool IN_ORDER, class SharedStorage>
__device__ __forceinline__ void load_steps(const BackwardArguments& arguments, SharedStorage& shared) {
  const BwdParams& params = arguments.params;
  const AttnProblem& p = params.problem;
  constexpr int TILE_M = LayoutQ::ROWS, TILE_N = LayoutKV::ROWS;
  const Mask mask(p);
  const auto work = shared.work;  // a copy: shared memory is slow to answer while products read it
  BackwardStep step = first_step(work);
  if (step.head >= work.end_head) return;
  const int first_key = work.n_tile * TILE_N;
  shared.keys.expect(2 * LayoutKV::BYTES);
  load_tile(shared.k, shared.keys, arguments.k, first_key, work.kv_head, work.batch);
  load_tile(shared.v, shared.keys, arguments.v, first_key, work.kv_head, work.batch);

  RingPlace<SharedStorage::Q_STAGES> q_place;
  RingPlace<SharedStorage::DOUT_STAGES> dout_place;
#pragma unroll 1  // few registers
  for (uint32_t number = 0; step.head < work.end_head; ++number, step = step_after<false>(step, work)) {
    const int first_row = step.m_tile * TILE_M;
    const int64_t statistics =
        (static_cast<int64_t>(work.batch) * p.num_heads + step.head) * padded_rows(p.seqlen_q) + first_row;
    StepNote& note = shared.notes[number % NOTES];
    note.dq = statistics * HEAD_DIM;
    note.first_row = first_row;
    note.is_masked = !mask.all_visible(first_row, min(first_row + TILE_M, p.seqlen_q), first_key, first_key + TILE_N);
    if constexpr (IN_ORDER) {
      note.counter = statistics / TILE_M * BACKWARD_WARPGROUPS;
      note.turn = dq_turn<TILE_M, TILE_N>(mask, work.n_tile, first_row);
    }
    // Who sees q sees the note.
    refill(shared.q[q_place.stage], shared.lse_log2[q_place.stage], shared.q_handover[q_place.stage], q_place.phase,
           arguments.q, params.lse_log2 + statistics, first_row, step.head, work.batch);
    const int to = dout_place.stage;
    refill(shared.dout[to], shared.delta[to], shared.dout_handover[to], dout_place.phase, arguments.dout,
           params.delta + statistics, first_row, step.head, work.batch);
    q_place.advance();
    dout_place.advance();
  }
}

// Where turns are taken: until it is turn `turn`. One thread.
__device__ __forceinline__ void wait_for_turn(const int32_t* counter, int turn) {
  while (ptx::load_acquire(counter) != turn) {
  }
}

// Stores a warp's part of dq for `add_dq`, once what lies there has been read.
template <int SIZE, int N_TILES>
__device__ __forceinline__ void stage_dq(const float (&staged)[4][SIZE], Handover& handover, uint32_t phase,
                                         const float (&acc_dq)[1][N_TILES][4]) {
  static_assert(SIZE >= N_TILES * AccLayout::PIECE);
  handover.wait_empty(phase);
  const uint32_t to = smem_address(&staged[ptx::thread_index() / 32 % 4]) +
                      ptx::thread_index() % 32 * AccLayout::LANE_STRIDE * sizeof(float);
#pragma unroll
  for (int j = 0; j < N_TILES; ++j) ptx::store_v4(to + j * AccLayout::PIECE * sizeof(float), acc_dq[0][j]);
}

// What a warp does for warpgroup `warpgroup`, which computes: adds its part of dq, of 64 rows and `cols` columns from
// (row, col) on. `staged` is where the four warps store it; a lane adds for each.
template <bool IN_ORDER, class SharedStorage, int SIZE>
__device__ __forceinline__ void add_dq(const BwdParams& params, SharedStorage& shared, const float (&staged)[4][SIZE],
                                       int warpgroup, int row, int col, int cols) {
  const int lane = threadIdx.x % 32;
  const uint32_t steps = ptx::uniform(step_count(shared.work));
  Handover& handover = shared.dq_handover[warpgroup];
#pragma unroll 1  // few registers
  for (uint32_t number = 0; number < steps; ++number) {
    handover.wait_full(number % 2);
    const StepNote& note = shared.notes[number % NOTES];
    int32_t* const counter = IN_ORDER ? params.dq_turn + note.counter + warpgroup : nullptr;
    if (IN_ORDER) {
      if (lane == 0) wait_for_turn(counter, note.turn);
      __syncwarp();  // no lane adds before
    }
    if (lane < 4) {
      float* const to = params.dq_acc + note.dq + AccLayout::piece(row + 16 * lane, col, HEAD_DIM);
      ptx::bulk_add(to, smem_address(&staged[lane]), 16 * cols * sizeof(float));
      ptx::bulk_wait_read();
    }
    __syncwarp();  // all four parts have been read
    handover.release(lane == 0);
    if (IN_ORDER) {
      // Additions of the copy engine are complete in L2 when they have been waited for: ordinary release and acquire
      // suffice.
      if (lane < 4) ptx::bulk_wait();
      __syncwarp();  // all four have
      if (lane == 0) ptx::store_release(counter, note.turn + 1);
    }
  }
}

// Writes a warp's part of dk and dv, from (row, col) of the block's keys on: sums of a part of the group, or the
// results.
template <class Element, class Work, int N_TILES>
__device__ __forceinline__ void store_dk_dv(const BwdParams& params, const volatile Work& work, int row, int col,
                                            float (&acc_dk)[1][N_TILES][4], const float (&acc_dv)[1][N_TILES][4],
                                            int lane) {
  const AttnProblem& p = params.problem;
  const int kv_heads = p.num_heads / p.group_size, first_key = work.n_tile * Work::TILE_N + row;
  if (params.group_parts > 1) {
    const int64_t head_of_part = (static_cast<int64_t>(work.part) * p.batch + work.batch) * kv_heads + work.kv_head;
    const int64_t piece =
        head_of_part * padded_rows(p.seqlen_k) * HEAD_DIM + AccLayout::piece(first_key, col, HEAD_DIM);
    store_pieces<HEAD_DIM>(params.dk_acc + piece, acc_dk, lane);
    store_pieces<HEAD_DIM>(params.dv_acc + piece, acc_dv, lane);
    return;
  }
  scale(acc_dk, p.softmax_scale);
  const int64_t head = contiguous_offset(work.batch, p.seqlen_k, kv_heads, p.head_dim, 0, work.kv_head) + col;
  const int64_t row_stride = static_cast<int64_t>(kv_heads) * p.head_dim;
  store_rows<Element>(acc_dk, static_cast<uint16_t*>(params.dk) + head, row_stride, first_key, p.seqlen_k,
                      p.head_dim - col, lane);
  store_rows<Element>(acc_dv, static_cast<uint16_t*>(params.dv) + head, row_stride, first_key, p.seqlen_k,
                      p.head_dim - col, lane);
}

// The roles of a block: of the first warpgroup a thread of warp 0 loads, and one of the next warps each does
// `help(warpgroup)` for a warpgroup that does `compute(warpgroup)`. `init` is for the barriers of that.
template <class LayoutQ, class LayoutKV, bool IN_ORDER, class SharedStorage, class Init, class Help, class Compute>
__device__ __forceinline__ void run_roles(const BackwardArguments& arguments, SharedStorage& shared, const Init& init,
                                          const Help& help, const Compute& compute) {
  if (threadIdx.x == 0) {
    shared.work = decltype(shared.work)(arguments.params);
    // Tiles are handed back by each warp, and dscores handed on too, of which each warp writes a part.
    constexpr int WARPS = BACKWARD_WARPGROUPS * 4;
    shared.keys.init(WARPS);
    for (Handover& handover : shared.q_handover) handover.init(WARPS);
    for (Handover& handover : shared.dout_handover) handover.init(WARPS);
    for (Handover& handover : shared.dscores_handover) handover.init(WARPS, WARPS);
    init();
    ptx::mbarrier_init_fence();
  }
  __syncthreads();  // the work and the barriers are there for all

  const int warpgroup = ptx::uniform(threadIdx.x / WARPGROUP_THREADS);
  if (warpgroup == 0) {
    ptx::release_registers<24>();
    const int warp = ptx::uniform(threadIdx.x / 32);
    if (warp == 0) {
      if (threadIdx.x == 0) load_steps<LayoutQ, LayoutKV, IN_ORDER>(arguments, shared);
    } else if (warp <= BACKWARD_WARPGROUPS) {
      help(warp - 1);
    }
  } else {
    ptx::acquire_registers<240>();
    compute(warpgroup - 1);
  }
}

#endif

// Encodes the tensor maps, and launches a block for each piece of work.
template <class LayoutQ, class LayoutKV>
inline cudaError_t launch_backward(void (*kernel)(BackwardArguments), const BwdParams& params, int shared_bytes,
                                   cudaStream_t stream) {
  const int64_t blocks = backward_blocks<LayoutKV::ROWS>(params);
  if (blocks == 0) return cudaSuccess;
  const AttnProblem& p = params.problem;
  BackwardArguments arguments = {params, {}, {}, {}, {}};
  const int kv_heads = p.num_heads / p.group_size;
  // A map needs an address, also of no rows.
  const void* q = p.seqlen_q > 0 ? p.q : p.k;
  const void* dout = p.seqlen_q > 0 ? params.dout : p.k;
  cudaError_t status = encode_tensor_map<LayoutQ>(&arguments.q, p.element, q, p.q_strides, p.batch, p.seqlen_q,
                                                  p.num_heads, p.head_dim);
  if (status != cudaSuccess) return status;
  status = encode_tensor_map<LayoutQ>(&arguments.dout, p.element, dout, params.dout_strides, p.batch, p.seqlen_q,
                                      p.num_heads, p.head_dim);
  if (status != cudaSuccess) return status;
  status = encode_tensor_map<LayoutKV>(&arguments.k, p.element, p.k, p.k_strides, p.batch, p.seqlen_k, kv_heads,
                                       p.head_dim);
  if (status != cudaSuccess) return status;
  status = encode_tensor_map<LayoutKV>(&arguments.v, p.element, p.v, p.v_strides, p.batch, p.seqlen_k, kv_heads,
                                       p.head_dim);
  if (status != cudaSuccess) return status;
  return launch(kernel, blocks, BACKWARD_THREADS, shared_bytes, arguments, stream);
}

// The instance of a kernel template for the element type, and for additions to dq in order or in any.
#define BACKWARD_KERNEL_FOR(kernel, params)                                                                        \
  ((params).problem.element == ELEMENT_F16 ? ((params).dq_turn ? kernel<F16, true> : kernel<F16, false>)           \
                                           : ((params).dq_turn ? kernel<Bf16, true> : kernel<Bf16, false>))
