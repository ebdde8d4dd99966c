// How many registers a thread may use, sm_90a.
// PTX ISA, "Miscellaneous Instructions: setmaxnreg". All warps of a warpgroup; needs __launch_bounds__(threads, 1).
#pragma once

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
namespace ptx {

// Gives registers back. REGISTERS is a multiple of 8.
template <int REGISTERS>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Takes registers, once others have given them back.
template <int REGISTERS>
__device__ __forceinline__ void acquire_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

}  // namespace ptx
#endif
