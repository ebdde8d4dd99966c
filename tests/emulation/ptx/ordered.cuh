// In place of kernels/ptx/ordered.cuh.
#pragma once

namespace ptx {

// Blocks run one after the other: what a thread waits for must be there already.
inline int32_t load_acquire(const int32_t* gmem) {
  machine::take_turn(gmem);
  static int loads_in_vain = 0;
  static const int32_t* last = nullptr;
  loads_in_vain = gmem == last ? loads_in_vain + 1 : 0;
  last = gmem;
  if (loads_in_vain == 1000) {
    machine::current->waits_for = "a block that comes later";
    machine::hang();
  }
  return *gmem;
}
inline void store_release(int32_t* gmem, int32_t x) {
  machine::pass_turn(gmem);
  *gmem = x;
}

}  // namespace ptx
