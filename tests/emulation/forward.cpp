// Runs a forward kernel on the emulated machine.
#include "kernels/launch.cuh"
#include "problem.h"

extern "C" const Kernel<FwdParams> SYMBOL;

struct Forward {
  Result out;
  std::vector<float> lse;

  Forward(const Problem& problem, uint32_t* next_piece) : out(problem.out.size()), lse(problem.lse.size(), NAN) {
    const FwdParams params = {problem.params(), out.bits.data(), lse.data(), next_piece};
    const cudaError_t status = SYMBOL.launch(&params, nullptr);
    if (status != cudaSuccess) machine::fault("status %d", static_cast<int>(status));
  }

  void compare(const Problem& problem) const {
    out.compare("out", problem.out, {2.5, 0.01}, problem.shape);
    for (size_t i = 0; i < lse.size(); ++i) {
      const double expected = problem.lse[i];
      if (lse[i] != expected && !(std::abs(lse[i] - expected) < 1e-4 + 1e-6 * std::abs(expected)))
        return machine::fault("lse of row %zu: %g where %g was expected", i, lse[i], expected);
    }
  }
};

// Lets the scores of one row rise twice as far: not a bit of the other rows may change.
static void change_a_row(Problem problem, const Forward& before) {
  const Shape& shape = problem.shape;
  problem.q.set(0, 5, 0, shape.head_dim - 1, 2 * Problem::LARGE, shape.is_bf16);
  const Forward after(problem, nullptr);
  for (int i = 0; i < shape.seqlen_q; ++i)
    for (int head = 0; head < shape.num_heads; ++head) {
      const size_t row = problem.q.row(0, i, head), at = static_cast<size_t>(head) * shape.seqlen_q + i;
      const bool is_same = std::equal(&before.out.bits[row], &before.out.bits[row + shape.head_dim], &after.out.bits[row]) &&
                           before.lse[at] == after.lse[at];
      const bool is_changed = i == 5 && head == 0;
      if (is_same == is_changed) machine::fault("row %d of head %d, where row 5 of head 0 changed", i, head);
    }
}

int main() {
  const int all = MAX_WINDOW;
  std::vector<Shape> problems = shapes(HEAD_DIM, TAKES_PLAIN_ONLY);
  // The first row sees nothing of the last key tile, and all of the one before: of 128 or 80 keys, of 112 or 80.
  problems.push_back({1, 64, 703, 1, 1, HEAD_DIM, all, 0});
  problems.push_back({1, 64, 623, 1, 1, HEAD_DIM, all, 0});
  // A maximum that moves in every tile: by less than 16 bits hold, by more, and by more than 32 bits hold.
  for (const auto& [rise, seqlen_k] : {std::pair{9.f, 400}, {9.f, 500}, {20.f, 500}, {200.f, 500}, {1e4f, 500}}) {
    Shape shape{1, 140, seqlen_k, 2, 1, HEAD_DIM, all, 100, rise > 200.f};
    shape.rise = rise;
    problems.push_back(shape);
  }
  // A maximum that moves for one key, in a tile without a mask.
  for (float peak : {20.f, 40.f}) {
    Shape shape{1, 40, 400, 4, 1, HEAD_DIM, all, all, peak > 20.f};
    shape.peak = peak;
    problems.push_back(shape);
  }
  // Warpgroups without rows, in many pieces of work.
  if (EMULATED_ARCH >= 900) problems.push_back({8, 20, 130, 3, 1, HEAD_DIM});
  return run_all(problems, [](const Shape& shape, int) {
    const Problem problem(shape);
    const Forward forward(problem, nullptr);
    forward.compare(problem);
    // Every second rise lets no reference move but that of the changed row: with one of the lengths the last one.
    if (shape.rise == 9.f) change_a_row(problem, forward);
    if (EMULATED_ARCH < 900) return;
    uint32_t next_piece = 0;
    Forward(problem, &next_piece).compare(problem);
  });
}
