// Where the rows of a batch's heads lie in device memory. The only place that knows.
#pragma once
#include "../params.h"

// The rows of one head.
struct Rows {
  const uint16_t* base;
  int64_t stride;

  __device__ const uint16_t* row(int i) const { return base + i * stride; }
};

__device__ __forceinline__ Rows rows_of_head(const void* tensor, const Strides& strides, int batch, int head) {
  return {static_cast<const uint16_t*>(tensor) + batch * strides.batch + head * strides.head, strides.seq};
}

// Element offset of a row in a contiguous (batch, seqlen, num_heads, head_dim) tensor.
__device__ __forceinline__ int64_t contiguous_offset(int batch, int seqlen, int num_heads, int head_dim, int row,
                                                     int head) {
  return ((static_cast<int64_t>(batch) * seqlen + row) * num_heads + head) * head_dim;
}
