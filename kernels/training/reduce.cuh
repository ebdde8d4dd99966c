// Sums over the threads of a block, in an order that is always the same.
#pragma once

namespace {

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}

// The larger number; the other if one is NaN.
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
  return x;
}

// Combines one number of each warp, which all its lanes hold; every thread gets the result.
template <int THREADS, class Combine>
__device__ __forceinline__ float across_warps(float x, Combine combine) {
  __shared__ float smem[THREADS / 32];
  // The last call's results have been read before they are written over.
  __syncthreads();
  if (threadIdx.x % 32 == 0) smem[threadIdx.x / 32] = x;
  // Every warp's number is there before any is read.
  __syncthreads();
  float all = smem[0];
#pragma unroll
  for (int warp = 1; warp < THREADS / 32; ++warp) all = combine(all, smem[warp]);
  return all;
}

template <int THREADS>
__device__ __forceinline__ float block_sum(float x) {
  return across_warps<THREADS>(warp_sum(x), [](float a, float b) { return a + b; });
}

template <int THREADS>
__device__ __forceinline__ float block_max(float x) {
  return across_warps<THREADS>(warp_max(x), [](float a, float b) { return fmaxf(a, b); });
}

}  // namespace
