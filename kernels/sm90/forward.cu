// out and lse, FlashAttention-3, Algorithms 1 and 2, for wgmma and the copy engine (sm_90a).
//
// grid       one block for each multiprocessor, which takes one piece of work (tile of 64 * WARPGROUPS query rows,
//            head) after the other: the next that nobody has, or, in full attention, where all are of one size, one of
//            each round
// block      a warpgroup that loads (one warp of it) and WARPGROUPS that compute, 64 rows each, from q to out
// shared     q tile; STAGES k tiles and v tiles: 121 (head_dim 64), 163 (96), 225 (128, 256), 217 KiB (192)
// registers  given 32 + 3 x 160 (64, 96), 24 + 2 x 240 (others); used by those that compute 152 (64), 158 (96),
//            214 (128), 222 (192), 236 (256); none spilled
//
// A warpgroup's steps overlap: the softmax of a tile runs beside the product of the last one's probabilities with v.
// K and V have barriers of their own. Key tiles that a warpgroup's rows do not see it leaves out.
//
// A step without a mask looks for no maxima: its exponentials are relative to those that the rows have. Only where one
// becomes too large are the scores computed again, and the maxima moved; so k's stage is free after the softmax alone.
// The maxima took 440 of the 2690 cycles of a step at head_dim 128, and with them it paid that warpgroups issued their
// products in turn; without them that costs 2 to 7 % there. A third stage lets warpgroups be further apart, so that one
// begins or ends a piece of work beside products of the others: 3 to 6 % at 1024 keys, 1 at 16384. A second q tile
// brings no more than that, and costs registers.
//
// Cycles of a multiprocessor for a tile of rows x keys, from the sizes (MMA 4 M N d / 4096, MUFU M N / 16, shared
// memory operand reads + fills at 128 bytes), and what was measured: H200, bf16, TFLOP/s full / causal at 16384 keys,
// at 4096 for 96 and 192; benches/record/2026-11-30-hopper.md.
//   head_dim   rows x keys   MMA    MUFU   shared        expected                measured
//   64         192 x 128     1536   1536   960 + 256     500 to 560 / 480 to 530   564 / 559
//   96         192 x 112     2016   1344   1296 + 336    560 to 620                593 / 560
//   128        128 x 128     2048   1024   1280 + 512    620 to 660 / 590 to 630   704 / 715
//   192        128 x 112     2688   896    1728 + 672    640 to 680                682 / 592
//   256        128 x 80      2560   640    1792 + 640    680 to 730 / 620 to 660   723 / 732
#include <type_traits>

#include "../common/forward_work.cuh"
#include "../common/softmax.cuh"
#include "../common/tile.cuh"
#include "../launch.cuh"
#include "../ptx/named_barrier.cuh"
#include "../ptx/setmaxnreg.cuh"
#include "../ptx/wgmma.cuh"
#include "pipeline.cuh"
#include "store.cuh"
#include "tile.cuh"

namespace {

// ---- constants --------------------------------------------------------------------------------------

using Tile = ForwardTile<HEAD_DIM>;
constexpr int TILE_N = Tile::TILE_N, WARPGROUPS = Tile::WARPGROUPS, STAGES = Tile::STAGES;
constexpr int TILE_M = 64 * WARPGROUPS;
constexpr int WARPGROUP_THREADS = 128;
constexpr int THREADS = WARPGROUP_THREADS * (1 + WARPGROUPS);
constexpr int N_TILES = TILE_N / 8;       // accumulators of scores, beside each other
constexpr int OUT_TILES = HEAD_DIM / 8;   // of out
// Whether a diagonal hides whole key tiles from some of a block's warpgroups. Where it does not, what leaves them out
// costs 2 to 3 %, by other registers in the main loop.
constexpr bool MAY_LEAVE_OUT = TILE_M > TILE_N;
// Whether a block takes its next piece of work not before the last loads of this one: until then others may have
// nothing to do. At head_dim 192 the assembler spills for it.
constexpr bool TAKE_LATE = HEAD_DIM != 192;
static_assert(TILE_N % 16 == 0 && HEAD_DIM % 32 == 0 && TILE_M <= 256 && TILE_N <= 256);

using LayoutQ = PanelLayout<TILE_M, HEAD_DIM>;
using LayoutKV = PanelLayout<TILE_N, HEAD_DIM>;
using Work = ForwardWork<TILE_M, TILE_N>;

struct Arguments {
  FwdParams params;
  TensorMap q, k, v;
  uint32_t pieces;  // of work
};

struct SharedStorage {
  SwizzledTile<LayoutQ> q;
  SwizzledTile<LayoutKV> k[STAGES];
  SwizzledTile<LayoutKV> v[STAGES];
  uint32_t piece;  // of work: the warp that loads tells the others
  Handover piece_handover, q_handover, k_handover[STAGES], v_handover[STAGES];
};
static_assert(sizeof(SharedStorage) <= SHARED_KIB << 10);

using Place = RingPlace<STAGES>;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The piece of work that a block does after `piece`, the first being blockIdx.x; one past the last: there are no more.
// `counter` is of those that blocks have taken after their first. Without it, one of each round of gridDim.x.
__device__ __forceinline__ uint32_t piece_after(uint32_t piece, uint32_t* counter) {
  return gridDim.x + (counter != nullptr ? atomicAdd(counter, 1u) : piece);
}

// ---- device steps: loading --------------------------------------------------------------------------

// Begins to fill a tile, once all products with its last content have ended.
template <class Layout>
__device__ __forceinline__ void refill(SwizzledTile<Layout>& tile, Handover& handover, uint32_t phase,
                                       const TensorMap& tensor, int row, int head, int batch) {
  handover.wait_empty(phase);
  __syncwarp();  // all lanes have seen that phase end, before the next one can
  if (threadIdx.x == 0) {
    handover.expect(Layout::BYTES);
    load_tile(tile, handover, tensor, row, head, batch);
  }
}

// What the loading warpgroup does: one warp of it, whose first lane loads. (With one thread alone the assembler spills
// where LOAD_REGISTERS is 24.)
__device__ __forceinline__ void load_all(const Arguments& arguments, SharedStorage& shared) {
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&arguments.q.map);
    ptx::prefetch_tensor_map(&arguments.k.map);
    ptx::prefetch_tensor_map(&arguments.v.map);
  }
  Place place;  // of the next v; in a piece of work, k is one further
  uint32_t piece_phase = 0, q_phase = 0;
  for (uint32_t piece = blockIdx.x, next = 0;; piece = ptx::uniform(next)) {
    shared.piece_handover.wait_empty(piece_phase);  // all have read the last one
    __syncwarp();                                   // as in `refill`
    if (threadIdx.x == 0) {
      shared.piece = piece;
      shared.piece_handover.publish();
    }
    piece_phase ^= 1;
    if (piece >= arguments.pieces) break;
    const auto take_next = [&] {
      if (threadIdx.x == 0) next = piece_after(piece, arguments.params.next_piece);
    };
    if (!TAKE_LATE) take_next();
    const Work work(arguments.params.problem, piece);
    if (work.n_tiles.begin >= work.n_tiles.end) {
      if (TAKE_LATE) take_next();
      continue;
    }
    const auto load_k = [&](int n_tile, Place to) {
      refill(shared.k[to.stage], shared.k_handover[to.stage], to.phase, arguments.k, n_tile * TILE_N, work.kv_head,
             work.batch);
    };
    const auto load_v = [&](int n_tile, Place to) {
      refill(shared.v[to.stage], shared.v_handover[to.stage], to.phase, arguments.v, n_tile * TILE_N, work.kv_head,
             work.batch);
    };
    // In the order in which they are used.
    int n_tile = work.n_tiles.end - 1;
    load_k(n_tile, place);
    refill(shared.q, shared.q_handover, q_phase, arguments.q, work.first_row, work.head, work.batch);
    q_phase ^= 1;
#pragma unroll 1  // few registers
    for (; n_tile > work.n_tiles.begin; --n_tile) {
      const Place v_place = place;
      place.advance();
      load_k(n_tile - 1, place);
      load_v(n_tile, v_place);
    }
    if (TAKE_LATE) take_next();  // on its way while the last tile is waited for
    load_v(n_tile, place);
    place.advance();
  }
}

// ---- device steps: computing ------------------------------------------------------------------------

// Begins scores = q k^T.
template <class Element>
__device__ __forceinline__ void begin_scores(float (&scores)[1][N_TILES][4], MatrixDescriptor<LayoutQ> q,
                                             MatrixDescriptor<LayoutKV> k) {
#pragma unroll
  for (int block = 0; block < HEAD_DIM / 16; ++block)
    ptx::Wgmma<Element, TILE_N>::template ss<false, false>(scores[0], q.after(k_major_step<LayoutQ>(block)),
                                    k.after(k_major_step<LayoutKV>(block)), block > 0);
  ptx::wgmma_commit();
}

// Begins acc_out += probs v.
template <class Element>
__device__ __forceinline__ void begin_out(float (&acc_out)[1][OUT_TILES][4], const PackedA<Element, 1, N_TILES>& probs,
                                          MatrixDescriptor<LayoutKV> v) {
#pragma unroll
  for (int block = 0; block < TILE_N / 16; ++block)
    ptx::Wgmma<Element, HEAD_DIM>::template rs<true>(acc_out[0], probs.frag[0][block],
                                                              v.after(n_major_step<LayoutKV>(block)), true);
  ptx::wgmma_commit();
}

// What computing warpgroup `warpgroup` does.
template <class Element>
__device__ __forceinline__ void compute(const Arguments& arguments, SharedStorage& shared, int warpgroup) {
  const AttnProblem& p = arguments.params.problem;
  const Mask mask(p);
  const float softmax_scale_log2 = p.softmax_scale * LOG2_E;
  const int lane = threadIdx.x % 32, warp = ptx::uniform(threadIdx.x / 32 % 4);
  const bool is_speaker = lane == 0;  // gives tiles back for its warp
  const MatrixDescriptor<LayoutQ> q =
      k_major<LayoutQ>(smem_address(&shared.q) + warpgroup * 64 * LayoutQ::ROW_BYTES);

  Place place;  // of the next v; in a piece of work, k is one further
  uint32_t piece_phase = 0, q_phase = 0;

  for (;;) {
    shared.piece_handover.wait_full(piece_phase);
    const uint32_t piece = ptx::uniform(shared.piece);
    __syncwarp();  // all lanes have read it
    shared.piece_handover.release(is_speaker);
    piece_phase ^= 1;
    if (piece >= arguments.pieces) break;
    const Work work(p, piece);
    const int first_row = work.first_row + 64 * warpgroup, warp_row = first_row + 16 * warp;
    float acc_out[1][OUT_TILES][4];
    clear(acc_out);
    OnlineSoftmax<1> softmax;

    // Of the tiles that the block visits, those that this warpgroup's rows see; it leaves out the others.
    const TileRange own = !MAY_LEAVE_OUT ? work.n_tiles
                          : first_row < p.seqlen_q
                              ? key_tiles<TILE_N>(mask, first_row, min(first_row + 64, p.seqlen_q))
                              : TileRange{0, 0};
    const bool is_idle = own.begin >= own.end;
    const auto leave_out = [&](int tiles) {
      if constexpr (!MAY_LEAVE_OUT) tiles = 0;
      for (; tiles > 0; --tiles) {
        shared.k_handover[place.stage].wait_full(place.phase);
        shared.v_handover[place.stage].wait_full(place.phase);
        __syncwarp();  // all lanes have seen these phases end, before the next ones can
        shared.k_handover[place.stage].release(is_speaker);
        shared.v_handover[place.stage].release(is_speaker);
        place.advance();
      }
    };
    leave_out(work.n_tiles.end - (is_idle ? work.n_tiles.begin : own.end));

    if (!is_idle) {
      const int end_row = max(min(first_row + 64, p.seqlen_q), first_row + 1);
      const TileRange free = free_key_tiles<TILE_N>(mask, first_row, end_row, own);
      float scores[1][N_TILES][4];
      float rescale[2];  // what out is to be multiplied by, where a reference moved
      const auto keep_rescale = [&](int, int half, float by) { rescale[half] = by; };
      int n_tile = own.end - 1;

      shared.q_handover.wait_full(q_phase);
      shared.k_handover[place.stage].wait_full(place.phase);
      ptx::wgmma_fence();
      begin_scores<Element>(scores, q, k_major<LayoutKV>(smem_address(&shared.k[place.stage])));
      ptx::wgmma_wait<0>();
      ptx::hold(scores);
      shared.k_handover[place.stage].release(is_speaker);
      mask_scores(scores, mask, warp_row, n_tile * TILE_N, lane);
      softmax.move_references(scores, softmax_scale_log2, keep_rescale);  // out is zero yet
      softmax.exponentiate(scores, softmax_scale_log2);
      PackedA<Element, 1, N_TILES> probs(scores);

      // Scores of tile n_tile - 1, beside the product of tile n_tile's probabilities.
      const auto step = [&](auto is_masked) {
        const Place v_place = place;
        place.advance();
        shared.k_handover[place.stage].wait_full(place.phase);
        ptx::hold(acc_out);
        ptx::wgmma_fence();
        begin_scores<Element>(scores, q, k_major<LayoutKV>(smem_address(&shared.k[place.stage])));
        shared.v_handover[v_place.stage].wait_full(v_place.phase);
        ptx::wgmma_fence();
        begin_out(acc_out, probs, n_major<LayoutKV>(smem_address(&shared.v[v_place.stage])));
        ptx::wgmma_wait<1>();
        ptx::hold(scores);
        --n_tile;
        // The softmax, beside the product with v.
        const auto finish_out = [&] {
          ptx::wgmma_wait<0>();
          ptx::hold(acc_out);
          ptx::hold(scores);
          shared.v_handover[v_place.stage].release(is_speaker);
        };
        if constexpr (decltype(is_masked)::value) {
          shared.k_handover[place.stage].release(is_speaker);
          mask_scores(scores, mask, warp_row, n_tile * TILE_N, lane);
          const bool moved = softmax.move_references(scores, softmax_scale_log2, keep_rescale);
          softmax.exponentiate(scores, softmax_scale_log2);
          ptx::finish_before(softmax.row_sum[0][0]);
          ptx::finish_before(softmax.row_sum[0][1]);
          finish_out();
          if (moved) {
            OnlineSoftmax<1>::rescale_row(acc_out, 0, 0, rescale[0]);
            OnlineSoftmax<1>::rescale_row(acc_out, 0, 1, rescale[1]);
          }
        } else {
          float tile_sum[1][2];
          const bool fits = softmax.exponentiate_as_is(scores, tile_sum, softmax_scale_log2);
          // No hazard: the four warps have to agree, since a product is of all of them.
          const bool again = ptx::named_barrier_any(1 + warpgroup, WARPGROUP_THREADS, !fits);
          finish_out();
          if (again) {  // rare
            ptx::wgmma_fence();
            begin_scores<Element>(scores, q, k_major<LayoutKV>(smem_address(&shared.k[place.stage])));
            ptx::wgmma_wait<0>();
            ptx::hold(scores);
            softmax.exponentiate_again(scores, acc_out, tile_sum, softmax_scale_log2);
          }
          shared.k_handover[place.stage].release(is_speaker);
          softmax.row_sum[0][0] += tile_sum[0][0];
          softmax.row_sum[0][1] += tile_sum[0][1];
        }
        probs = PackedA<Element, 1, N_TILES>(scores);
      };
      while (n_tile > free.end) step(std::true_type());
      while (n_tile > free.begin) step(std::false_type());
      while (n_tile > own.begin) step(std::true_type());
      shared.q_handover.release(is_speaker);  // the last product with q has ended

      shared.v_handover[place.stage].wait_full(place.phase);
      ptx::hold(acc_out);
      ptx::wgmma_fence();
      begin_out(acc_out, probs, n_major<LayoutKV>(smem_address(&shared.v[place.stage])));
      ptx::wgmma_wait<0>();
      ptx::hold(acc_out);
      shared.v_handover[place.stage].release(is_speaker);
      place.advance();
      leave_out(own.begin - work.n_tiles.begin);
    } else if (MAY_LEAVE_OUT && work.n_tiles.begin < work.n_tiles.end) {
      shared.q_handover.wait_full(q_phase);
      __syncwarp();  // as above
      shared.q_handover.release(is_speaker);
    }
    if (work.n_tiles.begin < work.n_tiles.end) q_phase ^= 1;

    softmax.finish();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + 8 * half + lane / 4;
      // Not by the sum: it is also 0, and out NaN, where all that a row sees are scores of -inf. And a select, since
      // NaN in hidden rows of v may have come in.
      const bool is_blind = mask.sees_nothing(row);
      const float sum = softmax.row_sum[0][half], inverse = 1.f / sum;
#pragma unroll
      for (int j = 0; j < OUT_TILES; ++j)
#pragma unroll
        for (int c = 2 * half; c < 2 * half + 2; ++c) acc_out[0][j][c] = is_blind ? 0.f : acc_out[0][j][c] * inverse;
      const float lse_log2 = softmax.reference[0][half] * softmax_scale_log2 + log2f(sum);
      // Where all that a row sees are scores of -inf, lse is NaN as out is.
      const float lse = is_blind ? -INFINITY : sum == 0.f ? NAN : lse_log2 * LN_2;
      if (lane % 4 == 0 && row < p.seqlen_q)
        arguments.params.lse[(static_cast<int64_t>(work.batch) * p.num_heads + work.head) * p.seqlen_q + row] = lse;
    }
    uint16_t* head_out = static_cast<uint16_t*>(arguments.params.out) +
                         contiguous_offset(work.batch, p.seqlen_q, p.num_heads, p.head_dim, 0, work.head);
    store_rows<Element>(acc_out, head_out, static_cast<int64_t>(p.num_heads) * p.head_dim, warp_row, p.seqlen_q,
                        p.head_dim, lane);
  }
}

#endif

// ---- kernel -----------------------------------------------------------------------------------------

template <class Element, ScoreMode MODE>
__global__ void __launch_bounds__(THREADS, 1) forward_kernel(const __grid_constant__ Arguments arguments) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static_assert(MODE == ScoreMode::PLAIN);
  extern __shared__ __align__(1024) char smem[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(smem);

  if (threadIdx.x == 0) {
    constexpr int WARPS = 4 * WARPGROUPS;
    shared.piece_handover.init(WARPS);
    shared.q_handover.init(WARPS);
    for (int stage = 0; stage < STAGES; ++stage) {
      shared.k_handover[stage].init(WARPS);
      shared.v_handover[stage].init(WARPS);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();  // the barriers are there for all

  const int warpgroup = ptx::uniform(threadIdx.x / WARPGROUP_THREADS);
  if (warpgroup == 0) {
    ptx::release_registers<Tile::LOAD_REGISTERS>();
    if (threadIdx.x < 32) load_all(arguments, shared);
  } else {
    ptx::acquire_registers<Tile::REGISTERS>();
    compute<Element>(arguments, shared, warpgroup - 1);
  }
#else
  __trap();  // the code for other targets is never launched
#endif
}

// ---- launcher ---------------------------------------------------------------------------------------

cudaError_t launch_kernel(const FwdParams* params, cudaStream_t stream) {
  const AttnProblem& p = params->problem;
  const int64_t pieces = static_cast<int64_t>((p.seqlen_q + TILE_M - 1) / TILE_M) * p.num_heads * p.batch;
  if (pieces == 0) return cudaSuccess;
  if (pieces > INT32_MAX) return cudaErrorInvalidConfiguration;
  Arguments arguments = {*params, {}, {}, {}, static_cast<uint32_t>(pieces)};
  const int kv_heads = p.num_heads / p.group_size;
  // A map needs an address, also of no keys.
  const void* k = p.seqlen_k > 0 ? p.k : p.q;
  const void* v = p.seqlen_k > 0 ? p.v : p.q;
  cudaError_t status = encode_tensor_map<LayoutQ>(&arguments.q, p.element, p.q, p.q_strides, p.batch, p.seqlen_q,
                                                  p.num_heads, p.head_dim);
  if (status != cudaSuccess) return status;
  status = encode_tensor_map<LayoutKV>(&arguments.k, p.element, k, p.k_strides, p.batch, p.seqlen_k, kv_heads,
                                       p.head_dim);
  if (status != cudaSuccess) return status;
  status = encode_tensor_map<LayoutKV>(&arguments.v, p.element, v, p.v_strides, p.batch, p.seqlen_k, kv_heads,
                                       p.head_dim);
  if (status != cudaSuccess) return status;
  int64_t blocks;
  status = blocks_for(pieces, &blocks);
  if (status != cudaSuccess) return status;
  return launch(KERNEL_FOR(forward_kernel, p), blocks, THREADS, sizeof(SharedStorage), arguments, stream);
}

}  // namespace

extern "C" {
extern const Kernel<FwdParams> KERNEL_SYMBOL(flash_fwd_sm90);
const Kernel<FwdParams> KERNEL_SYMBOL(flash_fwd_sm90) = {
    launch_kernel, sizeof(SharedStorage), THREADS, 1, TILE_M, TILE_N};
}
