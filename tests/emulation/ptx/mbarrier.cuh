// In place of kernels/ptx/mbarrier.cuh.
#pragma once

namespace ptx {

inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) { machine::make_barrier(barrier, arrivals); }
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint32_t barrier) {
  machine::arrive(barrier, 0);
  machine::linger();
}
inline void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) { machine::arrive(barrier, bytes); }
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) { machine::wait_for_phase(barrier, parity); }

}  // namespace ptx
