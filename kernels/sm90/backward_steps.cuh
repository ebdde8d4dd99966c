// What the backward kernels share: what is read, the order of additions to dq, and the launch.
#pragma once
#include "../common/accumulator.cuh"
#include "../common/backward_work.cuh"
#include "../common/sequence.cuh"
#include "../launch.cuh"
#include "../ptx/named_barrier.cuh"
#include "../ptx/ordered.cuh"
#include "pipeline.cuh"

constexpr int WARPGROUP_THREADS = 128;

struct BackwardArguments {
  BwdParams params;
  TensorMap q, k, v, dout;
};

// The query rows of a step.
template <class LayoutQ>
struct QueryStage {
  SwizzledTile<LayoutQ> q, dout;
  alignas(16) float lse_log2[LayoutQ::ROWS], delta[LayoutQ::ROWS];
  Handover handover;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// What the loading warpgroup does, one thread of it: the keys, then the query rows of each step.
template <class LayoutQ, class LayoutKV, class SharedStorage>
__device__ __forceinline__ void load_steps(const BackwardArguments& arguments, SharedStorage& shared) {
  const BwdParams& params = arguments.params;
  const AttnProblem& p = params.problem;
  const auto& work = shared.work;
  BackwardStep step = first_step(work);
  if (step.head >= work.end_head) return;
  shared.keys.expect(2 * LayoutKV::BYTES);
  load_tile(shared.k, shared.keys, arguments.k, work.n_tile * LayoutKV::ROWS, work.kv_head, work.batch);
  load_tile(shared.v, shared.keys, arguments.v, work.n_tile * LayoutKV::ROWS, work.kv_head, work.batch);

  RingPlace<2> place;
#pragma unroll 1  // few registers
  for (; step.head < work.end_head; step = step_after<false>(step, work)) {
    const int first_row = step.m_tile * LayoutQ::ROWS;
    const int64_t statistics =
        (static_cast<int64_t>(work.batch) * p.num_heads + step.head) * padded_rows(p.seqlen_q) + first_row;
    QueryStage<LayoutQ>& stage = shared.stages[place.stage];
    constexpr uint32_t STATISTICS_BYTES = sizeof(stage.delta);
    stage.handover.wait_empty(place.phase);
    stage.handover.expect(2 * (LayoutQ::BYTES + STATISTICS_BYTES));
    load_tile(stage.q, stage.handover, arguments.q, first_row, step.head, work.batch);
    load_tile(stage.dout, stage.handover, arguments.dout, first_row, step.head, work.batch);
    const uint32_t full = smem_address(&stage.handover.full);
    ptx::bulk_load(smem_address(stage.lse_log2), params.lse_log2 + statistics, STATISTICS_BYTES, full);
    ptx::bulk_load(smem_address(stage.delta), params.delta + statistics, STATISTICS_BYTES, full);
    place.advance();
  }
}

// The order of additions to dq, where their sum has to be the same bits on every run: the key tiles take turns at
// each tile of dq, each warpgroup with its own counter. Blocks start in the order of their index and a tile waits
// only for tiles before it, so the first of those that wait is always running.

// Waits until it is the turn of key tile `turn` to add to a tile of dq.
__device__ __forceinline__ void wait_for_turn(const int32_t* counter, int turn, int warpgroup) {
  if (threadIdx.x % WARPGROUP_THREADS == 0) {
    while (ptx::load_acquire(counter) != turn) {
    }
  }
  ptx::named_barrier_sync(1 + warpgroup, WARPGROUP_THREADS);  // no thread adds before its turn
}

__device__ __forceinline__ void pass_turn(int32_t* counter, int turn, int warpgroup) {
  __threadfence();
  ptx::named_barrier_sync(1 + warpgroup, WARPGROUP_THREADS);  // all additions of the warpgroup are made
  if (threadIdx.x % WARPGROUP_THREADS == 0) ptx::store_release(counter, turn + 1);
}

#endif

// Encodes the tensor maps.
template <class LayoutQ, class LayoutKV>
inline cudaError_t backward_arguments(const BwdParams& params, BackwardArguments* arguments) {
  const AttnProblem& p = params.problem;
  *arguments = {params, {}, {}, {}, {}};
  const int kv_heads = p.num_heads / p.group_size;
  // A map needs an address, also of no rows.
  const void* q = p.seqlen_q > 0 ? p.q : p.k;
  const void* dout = p.seqlen_q > 0 ? params.dout : p.k;
  cudaError_t status = encode_tensor_map<LayoutQ>(&arguments->q, p.element, q, p.q_strides, p.batch, p.seqlen_q, p.num_heads,
                                         p.head_dim);
  if (status != cudaSuccess) return status;
  status = encode_tensor_map<LayoutQ>(&arguments->dout, p.element, dout, params.dout_strides, p.batch, p.seqlen_q, p.num_heads,
                             p.head_dim);
  if (status != cudaSuccess) return status;
  status = encode_tensor_map<LayoutKV>(&arguments->k, p.element, p.k, p.k_strides, p.batch, p.seqlen_k, kv_heads, p.head_dim);
  if (status != cudaSuccess) return status;
  return encode_tensor_map<LayoutKV>(&arguments->v, p.element, p.v, p.v_strides, p.batch, p.seqlen_k, kv_heads, p.head_dim);
}

// The instance of a kernel template for the element type, and for additions to dq in order or in any.
#define BACKWARD_KERNEL_FOR(kernel, params)                                                                        \
  ((params).problem.element == ELEMENT_F16 ? ((params).dq_turn ? kernel<F16, true> : kernel<F16, false>)           \
                                           : ((params).dq_turn ? kernel<Bf16, true> : kernel<Bf16, false>))
