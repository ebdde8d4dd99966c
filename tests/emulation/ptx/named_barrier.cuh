// In place of kernels/ptx/named_barrier.cuh.
#pragma once

namespace ptx {

inline void named_barrier_sync(int barrier, int threads) { machine::named_barrier(barrier, threads, true); }
inline bool named_barrier_any(int barrier, int threads, bool x) {
  return machine::named_barrier(barrier, threads, true, x);
}
inline void named_barrier_arrive(int barrier, int threads) { machine::named_barrier(barrier, threads, false); }

}  // namespace ptx
