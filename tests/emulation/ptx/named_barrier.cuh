// In place of kernels/ptx/named_barrier.cuh.
#pragma once

namespace ptx {

inline bool named_barrier_any(int barrier, int threads, bool x) {
  return machine::named_barrier(barrier, threads, x);
}

}  // namespace ptx
