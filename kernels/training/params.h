// What crosses the border between Rust and the kernels of training; the twin of src/cuda/training/ffi.rs.
//
// Tensors are contiguous unless strides are given. A pointer that a pass does not use is null.
#pragma once
#include "../params.h"

// Rows whose contributions to a gradient are summed by one block before the blocks' sums are. A constant, so
// that the order of a sum does not depend on the GPU.
constexpr int32_t ROWS_TOGETHER = 128;

// Numbers of a gradient whose squares are summed by one block.
constexpr int32_t NUMBERS_TOGETHER = 1 << 14;

struct RmsNormParams {
  const void* x;       // (rows, cols)
  const void* weight;  // (cols)
  const void* dout;    // (rows, cols)
  void* out;           // (rows, cols); forward: out, backward: dx
  void* dweight;       // (cols)
  float* rstd;         // (rows); 1 / sqrt(mean(x^2) + eps)
  float* partial;      // (rows / ROWS_TOGETHER rounded up, cols); sums of a block's rows
  int64_t rows;
  int64_t cols;
  float eps;
  ElementType element;
};

struct RopeParams {
  const void* x;    // (batch, seqlen, num_heads, head_dim)
  const void* cos;  // (1 or batch, at least seqlen, head_dim / 2)
  const void* sin;  // the same
  void* out;        // (batch, seqlen, num_heads, head_dim), contiguous
  Strides x_strides;
  int64_t cos_batch_stride;  // 0: the same for each sequence
  int64_t sin_batch_stride;
  int32_t batch;
  int32_t seqlen;
  int32_t num_heads;
  int32_t head_dim;
  float direction;  // 1: by the angle; -1: back
  ElementType element;
};

struct SwigluParams {
  const void* gate;  // (len)
  const void* up;    // (len)
  const void* dout;  // (len)
  void* out;         // (len); backward: (2, len), dgate and dup
  int64_t len;
  ElementType element;
};

struct CrossEntropyParams {
  const void* logits;       // (rows, cols)
  const uint32_t* targets;  // (rows)
  float* lse;               // (rows)
  float* losses;            // (rows)
  float* loss;              // ()
  const float* dloss;       // ()
  void* dlogits;            // (rows, cols)
  int64_t rows;
  int64_t cols;
  ElementType element;
};

struct EmbeddingParams {
  const void* weight;   // (vocab_size, cols)
  const uint32_t* ids;  // (tokens)
  const void* dout;     // (tokens, cols)
  void* out;            // forward: (tokens, cols); backward: dweight (vocab_size, cols)
  int64_t tokens;
  int64_t vocab_size;
  int64_t cols;
  ElementType element;
};

struct AdamWParams {
  const void* grad;      // (len)
  void* rounded;         // (len), may be null
  float* master;         // (len)
  float* first_moment;   // (len)
  float* second_moment;  // (len)
  int64_t len;
  float grad_scale;
  float beta1;
  float beta2;
  float new1;  // 1 - beta1
  float new2;  // 1 - beta2
  float eps;
  float kept;          // 1 - learning_rate * weight_decay
  float step_size;     // learning_rate / (1 - beta1^step)
  float second_scale;  // 1 / (1 - beta2^step)
  ElementType grad_element;
  ElementType rounded_element;  // F16 or BF16
};

struct AddGradParams {
  const void* grad;  // (len)
  float* sum;        // (len)
  int64_t len;
  ElementType element;  // of grad
};

struct GradNormParams {
  const void* grad;  // squares: (len)
  float* squares;    // squares: (len / NUMBERS_TOGETHER rounded up), of one gradient; norm: (len), of all
  float* norm;       // ()
  int64_t len;
  ElementType element;  // of grad
};
