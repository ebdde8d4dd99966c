// What crosses the border between Rust and the kernels; the twin of src/cuda/ffi.rs.
//
// Strides are in elements. `batch` strides and per-sequence lengths are read only by common/sequence.cuh
// and key/value rows are addressed only by its `Rows`, so that packed batches, page tables and split
// keys change that file and this one.
#pragma once
#include <cstdint>

// F32 is for the kernels of training/ alone.
enum ElementType : int32_t { ELEMENT_F16 = 0, ELEMENT_BF16 = 1, ELEMENT_F32 = 2 };

struct Strides {
  int64_t batch;
  int64_t seq;
  int64_t head;
};

// One attention problem.
struct AttnProblem {
  const void* q;              // (batch, seqlen_q, num_heads, head_dim)
  const void* k;              // (batch, seqlen_k, num_kv_heads, head_dim)
  const void* v;              // (batch, seqlen_k, num_kv_heads, head_dim)
  const float* alibi_slopes;  // (batch, num_heads); null: off
  Strides q_strides;
  Strides k_strides;
  Strides v_strides;
  int32_t batch;
  int32_t seqlen_q;
  int32_t seqlen_k;
  int32_t num_heads;
  int32_t group_size;    // query heads that share a key/value head
  int32_t head_dim;      // at most HEAD_DIM of the kernel; a multiple of 8
  int32_t window_left;   // keys visible left of the diagonal; MAX_WINDOW: all
  int32_t window_right;  // keys visible right of the diagonal; MAX_WINDOW: all
  float softmax_scale;
  float softcap;           // 0: off
  float tanh_scale;        // softmax_scale / softcap
  // Pairs (batch, head), in the backward triples (batch, key/value head, part of its group), whose tiles are worked on
  // at the same time, for L2.
  int32_t heads_together;
  ElementType element;
};

struct FwdParams {
  AttnProblem problem;
  void* out;   // (batch, seqlen_q, num_heads, head_dim), contiguous
  float* lse;  // (batch, num_heads, seqlen_q)
  // One number, zero: blocks take their pieces of work but the first from it. Null: each knows its own from the start;
  // so always on sm_80.
  uint32_t* next_piece;
};

struct BwdParams {
  AttnProblem problem;
  const void* out;   // (batch, seqlen_q, num_heads, head_dim), contiguous
  const void* dout;  // (batch, seqlen_q, num_heads, head_dim)
  Strides dout_strides;
  const float* lse;  // (batch, num_heads, seqlen_q)
  void* dq;          // (batch, seqlen_q, num_heads, head_dim), contiguous
  void* dk;          // (batch, seqlen_k, num_kv_heads, head_dim), contiguous
  void* dv;          // (batch, seqlen_k, num_kv_heads, head_dim), contiguous
  // The workspace. Rows are padded to a multiple of ROW_PADDING.
  float* lse_log2;   // (batch, num_heads, padded seqlen_q)
  float* delta;      // (batch, num_heads, padded seqlen_q)
  float* dq_acc;     // (batch, num_heads) accumulators of padded seqlen_q rows; zero
  float* dk_acc;     // (group_parts, batch, num_kv_heads) accumulators of padded seqlen_k rows; null: one part
  float* dv_acc;     // the same
  int32_t* dq_turn;  // (batch, num_heads, padded rows / ROWS_PER_TURN), zero; null: dq in any order
  // One number, zero: blocks take their pieces of work from it. Null on sm_80 alone, where each has one.
  uint32_t* next_piece;
  int32_t group_parts;  // the heads of a group are shared out to this many pieces of work
};

// One step of the backward: accumulators to the output type.
struct ConvertParams {
  const float* acc;  // (parts, batch, num_heads) accumulators of padded seqlen rows; the parts are summed
  void* out;         // (batch, seqlen, num_heads, head_dim), contiguous
  int32_t parts;
  int32_t batch;
  int32_t seqlen;
  int32_t num_heads;
  int32_t head_dim;
  int32_t acc_cols;  // HEAD_DIM of the kernel that wrote them
  float scale;
  ElementType element;
};

// Below, the factor could vanish in 32 bits; 0 * -inf is NaN.
constexpr float MIN_PLAIN_SCALE = 1e-30f;

// What is done to q·k: only multiplied with a positive factor; also alibi, or a factor that is not positive;
// also softcap.
enum class ScoreMode { PLAIN, LINEAR, SOFTCAP };

inline ScoreMode score_mode(const AttnProblem& p) {
  if (p.softcap != 0.f) return ScoreMode::SOFTCAP;
  return p.softmax_scale >= MIN_PLAIN_SCALE && p.alibi_slopes == nullptr ? ScoreMode::PLAIN : ScoreMode::LINEAR;
}

// Lengths and windows stay below, so that sums of two of them fit 32 bits.
constexpr int32_t MAX_WINDOW = 1 << 30;
// A multiple of every TILE_M and TILE_N of the backward kernels.
constexpr int32_t ROW_PADDING = 128;

// There is a counter of turns for so many padded query rows; kernels use as many as they like.
constexpr int32_t ROWS_PER_TURN = 32;

__host__ __device__ inline int32_t padded_rows(int32_t seqlen) {
  return (seqlen + ROW_PADDING - 1) / ROW_PADDING * ROW_PADDING;
}
