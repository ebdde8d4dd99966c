// Runs a forward kernel on the emulated machine.
#include "kernels/launch.cuh"
#include "problem.h"

extern "C" const Kernel<FwdParams> SYMBOL;

static void solve(const Shape& shape) {
  const Problem problem(shape);
  Result out(problem.out.size());
  std::vector<float> lse(problem.lse.size(), NAN);
  const FwdParams params = {problem.params(), out.bits.data(), lse.data()};
  const cudaError_t status = SYMBOL.launch(&params, nullptr);
  if (status != cudaSuccess) machine::fault("status %d", static_cast<int>(status));

  out.compare("out", problem.out, shape);
  for (size_t i = 0; i < lse.size(); ++i) {
    const double expected = problem.lse[i];
    if (lse[i] != expected && !(std::abs(lse[i] - expected) < 1e-4))
      return machine::fault("lse of row %zu: %g where %g was expected", i, lse[i], expected);
  }
}

int main() { return run_all(TAKES_PLAIN_ONLY, solve); }
