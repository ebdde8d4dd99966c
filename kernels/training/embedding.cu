// Embedding: row `id` of weight for each token, and the gradient: for each row of weight the sum in f32 of dout over
// the tokens that read it, in their order.
//
// forward   one block a token
// backward  one block for a row of weight and a strip of its columns. It compares every id with its own: ids are few
//           and stay in L1, and nothing has to be sorted or added atomically.
//
// An id that is no row of weight gives NaN, and no gradient.
//
// At 8192 tokens of 2048 bf16 and 50304 rows on an H200: forward 67 MB, 16 us at 4.3 TB/s; backward 206 MB written,
// 48 us, and 412 M comparisons, of which 130 M instructions are left in warps, 0.15 to 0.3 ms.
#include <cmath>

#include "../launch.cuh"
#include "numbers.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int COPY_THREADS = 128;
// Ids that a thread compares before the block asks whether any of them was its own.
constexpr int IDS = 4;

template <class N>
__global__ void __launch_bounds__(COPY_THREADS) forward_kernel(const __grid_constant__ EmbeddingParams p) {
  const int64_t token = blockIdx.x, id = p.ids[token];
  for (int64_t col = threadIdx.x * N::LENGTH; col < p.cols; col += COPY_THREADS * N::LENGTH) {
    float x[N::LENGTH];
    if (id < p.vocab_size) {
      N::load(p.weight, id * p.cols + col, x);
    } else {
#pragma unroll
      for (int i = 0; i < N::LENGTH; ++i) x[i] = NAN;
    }
    N::store(p.out, token * p.cols + col, x);
  }
}

template <class N>
__host__ __device__ int64_t strips(const EmbeddingParams& p) {
  constexpr int64_t cols = THREADS * N::LENGTH;
  return (p.cols + cols - 1) / cols;
}

template <class N>
__global__ void __launch_bounds__(THREADS) backward_kernel(const __grid_constant__ EmbeddingParams p) {
  __shared__ uint32_t smem_hits[IDS * WARPS];  // a bit for each id of the chunk
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t row = blockIdx.x / strips<N>(p), strip = blockIdx.x % strips<N>(p);
  const int64_t col = (strip * THREADS + threadIdx.x) * N::LENGTH;

  float sum[N::LENGTH] = {};
  for (int64_t chunk = 0; chunk < p.tokens; chunk += IDS * THREADS) {
    bool hits[IDS];
    bool any = false;
#pragma unroll
    for (int i = 0; i < IDS; ++i) {
      const int64_t token = chunk + i * THREADS + threadIdx.x;
      hits[i] = token < p.tokens && p.ids[token] == row;
      any |= hits[i];
    }
    // Also: the last chunk's hits have been read before they are written over.
    if (!__syncthreads_or(any)) continue;
#pragma unroll
    for (int i = 0; i < IDS; ++i) {
      const uint32_t word = __ballot_sync(~0u, hits[i]);
      if (lane == 0) smem_hits[i * WARPS + warp] = word;
    }
    // All hits are there before any is read.
    __syncthreads();
    if (col >= p.cols) continue;
    for (int word = 0; word < IDS * WARPS; ++word) {
      for (uint32_t left = smem_hits[word]; left != 0; left &= left - 1) {
        const int64_t token = chunk + word * 32 + __ffs(left) - 1;
        float dout[N::LENGTH];
        N::load(p.dout, token * p.cols + col, dout);
#pragma unroll
        for (int i = 0; i < N::LENGTH; ++i) sum[i] += dout[i];
      }
    }
  }
  if (col < p.cols) N::store(p.out, row * p.cols + col, sum);
}

bool is_aligned(const EmbeddingParams& p) {
  return Aligned(p.element).pointer(p.weight).pointer(p.dout).pointer(p.out).step(p.cols);
}

}  // namespace

extern "C" cudaError_t flash_embedding_fwd(const EmbeddingParams* params, cudaStream_t stream) {
  return with_numbers(params->element, is_aligned(*params), [&](auto numbers) {
    return launch(forward_kernel<decltype(numbers)>, params->tokens, COPY_THREADS, 0, *params, stream);
  });
}

extern "C" cudaError_t flash_embedding_bwd(const EmbeddingParams* params, cudaStream_t stream) {
  return with_numbers(params->element, is_aligned(*params), [&](auto numbers) {
    using N = decltype(numbers);
    return launch(backward_kernel<N>, params->vocab_size * strips<N>(*params), THREADS, 0, *params, stream);
  });
}
