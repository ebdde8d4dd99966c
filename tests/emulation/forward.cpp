// Runs a forward kernel on the emulated machine.
#include "kernels/launch.cuh"
#include "problem.h"

extern "C" const Kernel<FwdParams> SYMBOL;

static void solve(const Problem& problem, uint32_t* next_piece) {
  const Shape& shape = problem.shape;
  Result out(problem.out.size());
  std::vector<float> lse(problem.lse.size(), NAN);
  const FwdParams params = {problem.params(), out.bits.data(), lse.data(), next_piece};
  const cudaError_t status = SYMBOL.launch(&params, nullptr);
  if (status != cudaSuccess) machine::fault("status %d", static_cast<int>(status));

  out.compare("out", problem.out, shape);
  for (size_t i = 0; i < lse.size(); ++i) {
    const double expected = problem.lse[i];
    if (lse[i] != expected && !(std::abs(lse[i] - expected) < 1e-4 + 1e-6 * std::abs(expected)))
      return machine::fault("lse of row %zu: %g where %g was expected", i, lse[i], expected);
  }
}

int main() {
  const int all = MAX_WINDOW;
  std::vector<Shape> problems = shapes(HEAD_DIM, TAKES_PLAIN_ONLY);
  // The first row sees nothing of the last key tile, and all of the one before: of 128 or 80 keys, of 112 or 80.
  problems.push_back({1, 64, 703, 1, 1, HEAD_DIM, all, 0});
  problems.push_back({1, 64, 623, 1, 1, HEAD_DIM, all, 0});
  // A maximum that moves in every tile: by less than 16 bits hold, by more, and by more than 32 bits hold.
  for (float rise : {9.f, 20.f, 200.f, 1e4f}) {
    Shape shape{1, 140, 500, 2, 1, HEAD_DIM, all, 100, rise > 200.f};
    shape.rise = rise;
    problems.push_back(shape);
  }
  return run_all(problems, [](const Shape& shape) {
    const Problem problem(shape);
    solve(problem, nullptr);
    if (EMULATED_ARCH < 900) return;
    uint32_t next_piece = 0;
    solve(problem, &next_piece);
  });
}
