// In place of kernels/ptx/reduce.cuh.
#pragma once

namespace ptx {

inline void red_add_v4(float* gmem, const float (&x)[4]) {
  if (reinterpret_cast<uintptr_t>(gmem) % 16) machine::fault("red.v4: misaligned");
  machine::note_addition(true);
  for (int i = 0; i < 4; ++i) gmem[i] += x[i];
}
inline void red_add(float* gmem, float x) {
  machine::note_addition(true);
  *gmem += x;
}

}  // namespace ptx
