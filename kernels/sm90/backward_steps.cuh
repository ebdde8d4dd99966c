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
  uint32_t pieces;  // of work
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

// The pieces of work that a block knows of: the one that is computed, and the next.
template <class Work_>
struct WorkRing {
  using Work = Work_;
  static constexpr int SIZE = 2;
  Work works[SIZE];
  bool is_there[SIZE];  // else: there are no more
  Handover handover[SIZE];
  uint64_t loaded;  // a barrier: all loads of a piece have begun

  __device__ void init(int readers) {
    for (Handover& one : handover) one.init(readers);
    ptx::mbarrier_init(smem_address(&loaded), 1);
  }
  // For a reader: waits for piece `number` of the block; whether there is one.
  __device__ __forceinline__ bool wait(uint32_t number) {
    handover[number % SIZE].wait_full(number / SIZE % 2);
    return is_there[number % SIZE];
  }
  // Until the reader releases it.
  __device__ __forceinline__ const volatile Work& operator[](uint32_t number) const { return works[number % SIZE]; }
  __device__ __forceinline__ void release(uint32_t number, bool is_speaker) {
    handover[number % SIZE].release(is_speaker);
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Reads lse or delta of the columns of scores^T that a thread holds, in accumulators [BEGIN, END).
template <int BEGIN, int END, int ROW_TILES>
__device__ __forceinline__ void read_statistic(float2 (&statistic)[ROW_TILES], const float* rows, int lane) {
#pragma unroll
  for (int j = BEGIN; j < END; ++j) statistic[j] = *reinterpret_cast<const float2*>(&rows[8 * j + lane % 4 * 2]);
}

// The order of additions to dq, where their sum has to be the same bits on every run: the key tiles take turns at
// each tile of dq. Pieces of work are taken in the order of their numbers and a tile waits only for tiles before it, so
// the first of those that wait is always running.
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
// finished with what is there. `more_bytes` are handed over with them.
template <class LayoutQ>
__device__ __forceinline__ void refill(SwizzledTile<LayoutQ>& tile, float (&smem_statistic)[LayoutQ::ROWS],
                                       Handover& handover, uint32_t phase, const TensorMap& tensor,
                                       const float* statistic, int first_row, int head, int batch,
                                       uint32_t more_bytes) {
  handover.wait_empty(phase);
  handover.expect(LayoutQ::BYTES + sizeof(smem_statistic) + more_bytes);
  load_tile(tile, handover, tensor, first_row, head, batch);
  ptx::bulk_load(smem_address(smem_statistic), statistic, sizeof(smem_statistic), smem_address(&handover.full));
}

// What one thread of the first warpgroup does: takes pieces of work, in the order of their numbers. Each when all loads
// of the last one have begun: whoever takes one sooner has it wait while others have nothing to do, which cost up to
// 18 %.
template <class Work>
__device__ __forceinline__ void take_pieces(const BackwardArguments& arguments, WorkRing<Work>& ring) {
  for (uint32_t piece = 0, is_there = true; is_there; ++piece) {
    const uint32_t place = piece % ring.SIZE;
    ring.handover[place].wait_empty(piece / ring.SIZE % 2);
    if (piece > 0) ptx::mbarrier_wait(smem_address(&ring.loaded), (piece - 1) % 2);
    // Whoever has taken a piece before this one has it under way, or next.
    const uint32_t index = atomicAdd(arguments.params.next_piece, 1u);
    is_there = index < arguments.pieces;
    ring.is_there[place] = is_there;
    if (is_there) ring.works[place] = Work(arguments.params, index);
    ring.handover[place].publish();
  }
}

// What one thread of the first warpgroup does: loads the keys of each piece of work, and the query rows of each step.
template <class LayoutQ, class LayoutKV, bool IN_ORDER, class SharedStorage>
__device__ __forceinline__ void load_steps(const BackwardArguments& arguments, SharedStorage& shared) {
  const BwdParams& params = arguments.params;
  const AttnProblem& p = params.problem;
  constexpr int TILE_M = LayoutQ::ROWS, TILE_N = LayoutKV::ROWS;
  const Mask mask(p);
  RingPlace<SharedStorage::Q_STAGES> q_place;
  RingPlace<SharedStorage::DOUT_STAGES> dout_place;
  uint32_t number = 0, keys_phase = 1;
#pragma unroll 1  // few registers
  for (uint32_t piece = 0; shared.ring.wait(piece); ++piece) {
    // A copy: shared memory is slow to answer while products read it.
    const auto work = shared.ring.works[piece % shared.ring.SIZE];
    shared.ring.release(piece, true);
    const int first_key = work.n_tile * TILE_N;
    uint32_t key_bytes = LayoutKV::BYTES;  // to come: of k, and of v
#pragma unroll 1  // few registers
    for (BackwardStep step = first_step(work); step.head < work.end_head;
         ++number, step = step_after<false>(step, work)) {
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
             arguments.q, params.lse_log2 + statistics, first_row, step.head, work.batch, key_bytes);
      const int to = dout_place.stage;
      refill(shared.dout[to], shared.delta[to], shared.dout_handover[to], dout_place.phase, arguments.dout,
             params.delta + statistics, first_row, step.head, work.batch, key_bytes);
      if (key_bytes > 0) {
        // v first: products of the last piece finish with it before they do with k.
        key_bytes = 0;
        ptx::mbarrier_wait(smem_address(&shared.v_empty), keys_phase);
        load_tile(shared.v, shared.dout_handover[to], arguments.v, first_key, work.kv_head, work.batch);
        ptx::mbarrier_wait(smem_address(&shared.k_empty), keys_phase);
        load_tile(shared.k, shared.q_handover[q_place.stage], arguments.k, first_key, work.kv_head, work.batch);
        keys_phase ^= 1;
      }
      q_place.advance();
      dout_place.advance();
    }
    ptx::mbarrier_arrive(smem_address(&shared.ring.loaded));
  }
}

// Runs `step`(number, note, whether it is the last of its piece of work) for each step of all pieces. One thread.
template <class SharedStorage, class Step>
__device__ __forceinline__ void for_each_step(SharedStorage& shared, const Step& step) {
  uint32_t number = 0;
#pragma unroll 1  // few registers
  for (uint32_t piece = 0; shared.ring.wait(piece); ++piece) {
    const uint32_t end = number + step_count(shared.ring[piece]);
    shared.ring.release(piece, true);
#pragma unroll 1  // few registers
    for (; number < end; ++number) step(number, shared.notes[number % NOTES], number + 1 == end);
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

// What one thread does for warpgroup `warpgroup`, which computes: adds its part of dq, of 64 rows and `cols` columns
// from (row, col) on. `staged` is where the four warps store it.
template <bool IN_ORDER, class SharedStorage, int SIZE>
__device__ __forceinline__ void add_dq(const BwdParams& params, SharedStorage& shared, const float (&staged)[4][SIZE],
                                       int warpgroup, int row, int col, int cols) {
  Handover& handover = shared.dq_handover[warpgroup];
  const auto await = [&](const StepNote& note) {
    wait_for_turn(params.dq_turn + note.counter + warpgroup, note.turn);
  };
  bool has_turn = false;
  for_each_step(shared, [&](uint32_t number, const StepNote& note, bool is_last) {
    handover.wait_full(number % 2);
    if (IN_ORDER && !has_turn) await(note);
    float* const to = params.dq_acc + note.dq;
    for (int warp = 0; warp < 4; ++warp)
      ptx::bulk_add(to + AccLayout::piece(row + 16 * warp, col, HEAD_DIM), smem_address(&staged[warp]),
                    16 * cols * sizeof(float));
    ptx::bulk_wait_read();
    handover.release(true);
    if (IN_ORDER) {
      // Additions of the copy engine are complete in L2 when they have been waited for: ordinary release and acquire
      // suffice.
      ptx::bulk_wait();
      ptx::store_release(params.dq_turn + note.counter + warpgroup, note.turn + 1);
      // The next step's turn before its dq is there: memory is slow to answer. Its note is there, since dq is handed
      // on in the step after it or later.
      has_turn = !is_last;
      if (has_turn) await(shared.notes[(number + 1) % NOTES]);
    }
  });
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

// The roles of a block: of the first warpgroup a thread of warp 0 loads, HELPERS of the next warps each do
// `help(helper)` for those that `compute(warpgroup)`, and a thread of the last takes the pieces of work.
// `init` is for the barriers of that.
template <class LayoutQ, class LayoutKV, bool IN_ORDER, int HELPERS, class SharedStorage, class Init, class Help,
          class Compute>
__device__ __forceinline__ void run_roles(const BackwardArguments& arguments, SharedStorage& shared, const Init& init,
                                          const Help& help, const Compute& compute) {
  if (threadIdx.x == 0) {
    // Tiles are handed back by each warp, and dscores handed on too, of which each warp writes a part.
    constexpr int WARPS = BACKWARD_WARPGROUPS * 4;
    shared.ring.init(WARPS + HELPERS + 1);
    ptx::mbarrier_init(smem_address(&shared.k_empty), WARPS);
    ptx::mbarrier_init(smem_address(&shared.v_empty), WARPS);
    for (Handover& handover : shared.q_handover) handover.init(WARPS);
    for (Handover& handover : shared.dout_handover) handover.init(WARPS);
    for (Handover& handover : shared.dscores_handover) handover.init(WARPS, WARPS);
    init();
    ptx::mbarrier_init_fence();
  }
  __syncthreads();  // the barriers are there for all

  const int warpgroup = ptx::uniform(threadIdx.x / WARPGROUP_THREADS);
  if (warpgroup == 0) {
    ptx::release_registers<24>();
    const int warp = ptx::uniform(threadIdx.x / 32);
    if (warp == 0) {
      if (threadIdx.x == 0) load_steps<LayoutQ, LayoutKV, IN_ORDER>(arguments, shared);
    } else if (warp <= HELPERS) {
      help(warp - 1);
    } else if (threadIdx.x == WARPGROUP_THREADS - 1) {
      take_pieces(arguments, shared.ring);
    }
  } else {
    ptx::acquire_registers<240>();
    compute(warpgroup - 1);
  }
}

#endif

// Encodes the tensor maps, and launches a block for each multiprocessor.
template <class LayoutQ, class LayoutKV>
inline cudaError_t launch_backward(void (*kernel)(BackwardArguments), const BwdParams& params, int shared_bytes,
                                   cudaStream_t stream) {
  const int64_t pieces = backward_pieces<LayoutKV::ROWS>(params);
  if (pieces == 0) return cudaSuccess;
  if (pieces > INT32_MAX) return cudaErrorInvalidConfiguration;
  if (params.next_piece == nullptr) return cudaErrorInvalidValue;
  const AttnProblem& p = params.problem;
  BackwardArguments arguments = {params, {}, {}, {}, {}, static_cast<uint32_t>(pieces)};
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
  int64_t blocks;
  status = blocks_for(pieces, &blocks);
  if (status != cudaSuccess) return status;
  return launch(kernel, blocks, BACKWARD_THREADS, shared_bytes, arguments, stream);
}

// The instance of a kernel template for the element type, and for additions to dq in order or in any.
#define BACKWARD_KERNEL_FOR(kernel, params)                                                                        \
  ((params).problem.element == ELEMENT_F16 ? ((params).dq_turn ? kernel<F16, true> : kernel<F16, false>)           \
                                           : ((params).dq_turn ? kernel<Bf16, true> : kernel<Bf16, false>))
