// In place of kernels/ptx/setmaxnreg.cuh.
#pragma once

namespace ptx {

template <int REGISTERS>
inline void release_registers() {
  machine::change_registers(REGISTERS);
}
template <int REGISTERS>
inline void acquire_registers() {
  machine::change_registers(REGISTERS);
}

}  // namespace ptx
