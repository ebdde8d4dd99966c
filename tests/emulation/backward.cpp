// Runs a backward kernel, with the steps before and after it, on the emulated machine.
#include "kernels/launch.cuh"
#include "problem.h"

extern "C" const Kernel<BwdParams> SYMBOL;
extern "C" cudaError_t flash_bwd_delta(const BwdParams* params, cudaStream_t stream);
extern "C" cudaError_t flash_bwd_convert(const ConvertParams* params, cudaStream_t stream);

// Numbers at an address that kernels may read 16 bytes at a time.
struct Workspace {
  std::vector<float> memory;
  float* data;
  Workspace(size_t size, float value) : memory(size + 4, value) {
    data = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 15) / 16 * 16);
  }
};

static void solve(const Shape& shape, int group_parts, bool in_order) {
  const Problem problem(shape);
  const int kv_heads = shape.num_heads / shape.group_size;
  const size_t q_rows = static_cast<size_t>(shape.batch) * shape.num_heads * padded_rows(shape.seqlen_q);
  const size_t k_rows = static_cast<size_t>(shape.batch) * kv_heads * padded_rows(shape.seqlen_k);
  Result out(problem.out.size()), dq(problem.dq.size()), dk(problem.dk.size()), dv(problem.dv.size());
  for (size_t i = 0; i < problem.out.size(); ++i) out.bits[i] = machine::to_bits(problem.out[i], shape.is_bf16);
  const std::vector<float> lse(problem.lse.begin(), problem.lse.end());
  Workspace lse_log2(q_rows, NAN), delta(q_rows, NAN), dq_acc(q_rows * HEAD_DIM, 0.f);
  Workspace dk_acc(group_parts * k_rows * HEAD_DIM, NAN), dv_acc(group_parts * k_rows * HEAD_DIM, NAN);
  std::vector<int32_t> dq_turn(q_rows / 32, 0);

  BwdParams params{};
  params.problem = problem.params();
  params.out = out.bits.data();
  params.dout = problem.dout.bits.data();
  params.dout_strides = problem.dout.strides();
  params.lse = lse.data();
  params.dq = dq.bits.data();
  params.dk = dk.bits.data();
  params.dv = dv.bits.data();
  params.lse_log2 = lse_log2.data;
  params.delta = delta.data;
  params.dq_acc = dq_acc.data;
  params.dk_acc = group_parts > 1 ? dk_acc.data : nullptr;
  params.dv_acc = group_parts > 1 ? dv_acc.data : nullptr;
  params.dq_turn = in_order ? dq_turn.data() : nullptr;
  machine::adds_in_turn = in_order;
  uint32_t next_piece = 0;
  params.next_piece = &next_piece;
  params.group_parts = group_parts;
  const auto convert = [&](const float* acc, void* to, int parts, int seqlen, int heads, double scale) {
    const ConvertParams params = {acc,   to,    parts,          shape.batch,
                                  seqlen, heads, shape.head_dim, HEAD_DIM,
                                  static_cast<float>(scale), shape.is_bf16 ? ELEMENT_BF16 : ELEMENT_F16};
    return flash_bwd_convert(&params, nullptr);
  };
  cudaError_t status = flash_bwd_delta(&params, nullptr);
  if (status == cudaSuccess) status = SYMBOL.launch(&params, nullptr);
  if (status == cudaSuccess) status = convert(dq_acc.data, params.dq, 1, shape.seqlen_q, shape.num_heads, problem.scale);
  if (status == cudaSuccess && group_parts > 1) {
    status = convert(dk_acc.data, params.dk, group_parts, shape.seqlen_k, kv_heads, problem.scale);
    if (status == cudaSuccess) status = convert(dv_acc.data, params.dv, group_parts, shape.seqlen_k, kv_heads, 1.);
  }
  if (status != cudaSuccess) machine::fault("status %d", static_cast<int>(status));

  dq.compare("dq", problem.dq, {5, 1.2}, shape);
  dk.compare("dk", problem.dk, {4, 0.05}, shape);
  dv.compare("dv", problem.dv, {2.5, 0.01}, shape);
}

int main() {
  const std::vector<Shape> problems = shapes(HEAD_DIM, TAKES_PLAIN_ONLY);
  // Each shape with dq in any order and in turn, and with the heads of a group together and shared out.
  return run_all(problems, [](const Shape& shape, int number) {
    const int way = number + static_cast<int>(machine::timing);
    solve(shape, way % 4 < 2 ? 1 : shape.group_size, way % 2 == 0);
  });
}
