// Scores of accumulators: their transformations, their mask, and the online softmax.
//
// A thread holds, of each 16 x 8 accumulator, the numbers at columns 2 t and 2 t + 1 of rows g and
// g + 8, where g = lane / 4 and t = lane % 4: four lanes share a row.
#pragma once
#include <cmath>

#include "../ptx/math.cuh"
#include "mask.cuh"

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

// Runs `f(score, i, half, j, c)`: row first_row + 16 i + 8 half + g, column first_col + 8 j + 2 t + c.
template <int M_TILES, int N_TILES, class F>
__device__ __forceinline__ void for_each_score(float (&scores)[M_TILES][N_TILES][4], F f) {
#pragma unroll
  for (int i = 0; i < M_TILES; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < N_TILES; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) f(scores[i][j][2 * half + c], i, half, j, c);
}

// tanh: two instructions of the special function unit, and below 1/32, where their absolute error of 1e-7 would
// show once multiplied with a large softcap, the first terms of its series. tanh.approx is off by 5e-4.
__device__ __forceinline__ float fast_tanh(float x) {
  const float far = 1.f - __fdividef(2.f, 1.f + ptx::exp2(x * (2.f * LOG2_E)));
  const float square = x * x;
  const float near = x * (1.f + square * (-1.f / 3.f + square * (2.f / 15.f)));
  return square < 1.f / 1024.f ? near : far;
}

// What happens to q·k before the softmax, which computes 2^(score * factor - max * factor).
//
// In the plain case the scores stay as the product left them and `factor` is all: one multiply-add a score.
// That needs a factor above zero, so that the largest score stays the largest and that -inf * factor is -inf.
// The numbers of the other cases are read from the parameters at each use: they cost no registers there.
template <ScoreMode MODE>
struct ScoreTransform {
  const AttnProblem& p;
  float factor;
  float slope;  // of alibi

  __device__ ScoreTransform(const AttnProblem& p, int batch, int head) : p(p) {
    factor = MODE == ScoreMode::PLAIN ? p.softmax_scale * LOG2_E : LOG2_E;
    if constexpr (MODE != ScoreMode::PLAIN) {
      slope = p.alibi_slopes ? p.alibi_slopes[static_cast<int64_t>(batch) * p.num_heads + head] : 0.f;
    }
  }

  // `distance` of a key from the key that the row is aligned with; exact to 2^24. `derivative` is that of
  // softcap.
  __device__ float apply(float score, float distance, float& derivative) const {
    if constexpr (MODE == ScoreMode::SOFTCAP) {
      const float capped = fast_tanh(score * p.tanh_scale);
      derivative = 1.f - capped * capped;
      score = p.softcap * capped;
    } else {
      derivative = 1.f;
      score *= p.softmax_scale;
    }
    return score - slope * fabsf(distance);
  }
};

// Hides the scores outside of the mask. By a select: the sum of a NaN and -inf would be NaN.
template <int M_TILES, int N_TILES>
__device__ __forceinline__ void mask_scores(float (&scores)[M_TILES][N_TILES][4], const Mask& mask, int first_row,
                                            int first_col, int lane) {
  const int row = first_row + lane / 4, col = first_col + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < M_TILES; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int begin = mask.first_key(row + 16 * i + 8 * half) - col;
      const int end = mask.end_key(row + 16 * i + 8 * half) - col;
#pragma unroll
      for (int j = 0; j < N_TILES; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int key = 8 * j + c;
          float& score = scores[i][j][2 * half + c];
          score = begin <= key && key < end ? score : -INFINITY;
        }
    }
}

// The same for scores^T, of keys by rows.
template <int M_TILES, int N_TILES>
__device__ __forceinline__ void mask_scores_transposed(float (&scores)[M_TILES][N_TILES][4], const Mask& mask,
                                                       int first_row, int first_key, int lane) {
  const int key = first_key + lane / 4, row = first_row + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < M_TILES; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int begin = mask.first_row(key + 16 * i + 8 * half) - row;
      const int end = mask.end_row(key + 16 * i + 8 * half) - row;
#pragma unroll
      for (int j = 0; j < N_TILES; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& score = scores[i][j][2 * half + c];
          score = begin <= 8 * j + c && 8 * j + c < end ? score : -INFINITY;
        }
    }
}

// The running maximum and sum of the rows that a thread has a part in (FlashAttention-2, Algorithm 1,
// lines 8 to 10).
template <int M_TILES>
struct OnlineSoftmax {
  // The score that the row's exponentials are relative to: its maximum, or less by at most
  // 2^MAX_EXPONENT in the exponential; by at most MAX_TILE_SUM after steps without maxima.
  float reference[M_TILES][2];
  // Of this thread's columns only; the four lanes of a row are summed at the end.
  float row_sum[M_TILES][2];

  // Exponentials up to 2^8 lose nothing in 16 bits, nor their sums in 32.
  static constexpr float MAX_EXPONENT = 8.f;
  // Of a thread's exponentials of a row in a step without maxima: none of them overflows f16. Where the sum is larger,
  // one exponential at least is above 2^MAX_EXPONENT, so that the reference moves.
  static constexpr float MAX_TILE_SUM = 32768.f;

  __device__ OnlineSoftmax() {
#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        reference[i][half] = -INFINITY;
        row_sum[i][half] = 0.f;
      }
  }

  // Turns scores into exponentials and adds them to the sums. `out` is rescaled where a row's reference
  // had to move; a warp with no such row skips the multiplications.
  template <int N_TILES, int OUT_TILES>
  __device__ __forceinline__ void step(float (&scores)[M_TILES][N_TILES][4], float (&out)[M_TILES][OUT_TILES][4],
                                       float factor) {
    move_references(scores, factor, [&](int i, int half, float rescale) { rescale_row(out, i, half, rescale); });
    exponentiate(scores, factor);
  }

  // The parts of a step, for where `out` can't be touched during it.

  // Moves the references that have to, and the sums with them. Whether a row of this warp had to; then
  // `rescaled(i, half, rescale)` is called for each row, whose part of `out` is to be multiplied by `rescale`.
  template <int N_TILES, class Rescaled>
  __device__ __forceinline__ bool move_references(const float (&scores)[M_TILES][N_TILES][4], float factor,
                                                  const Rescaled& rescaled) {
    float row_max[M_TILES][2];
    bool moves = false;
#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float max = fmaxf(scores[i][0][2 * half], scores[i][0][2 * half + 1]);
#pragma unroll
        for (int j = 1; j < N_TILES; ++j) max = fmaxf(max, fmaxf(scores[i][j][2 * half], scores[i][j][2 * half + 1]));
        max = fmaxf(max, __shfl_xor_sync(~0u, max, 1));
        max = fmaxf(max, __shfl_xor_sync(~0u, max, 2));
        row_max[i][half] = max;
        // Also true at the first finite maximum, when the reference is -inf.
        moves |= (max - reference[i][half]) * factor > MAX_EXPONENT;
      }
    moves = __any_sync(~0u, moves);
    if (moves) {
#pragma unroll
      for (int i = 0; i < M_TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // Row by row, so that a row's result does not depend on its neighbours.
          float& old = reference[i][half];
          const bool row_moves = (row_max[i][half] - old) * factor > MAX_EXPONENT;
          const float rescale = row_moves ? ptx::exp2((old - row_max[i][half]) * factor) : 1.f;
          old = row_moves ? row_max[i][half] : old;
          row_sum[i][half] *= rescale;
          rescaled(i, half, rescale);
        }
    }
    return moves;
  }

  template <int OUT_TILES>
  __device__ static __forceinline__ void rescale_row(float (&out)[M_TILES][OUT_TILES][4], int i, int half,
                                                     float rescale) {
#pragma unroll
    for (int j = 0; j < OUT_TILES; ++j) {
      out[i][j][2 * half] *= rescale;
      out[i][j][2 * half + 1] *= rescale;
    }
  }

  template <int N_TILES>
  __device__ __forceinline__ void exponentiate(float (&scores)[M_TILES][N_TILES][4], float factor) {
#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // A row that has seen nothing yet: 2^(-inf - 0) is 0 where 2^(-inf + inf) would be NaN.
        const float subtrahend = reference[i][half] == -INFINITY ? 0.f : reference[i][half] * factor;
#pragma unroll
        for (int j = 0; j < N_TILES; ++j)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& score = scores[i][j][2 * half + c];
            score = ptx::exp2(score * factor - subtrahend);
            row_sum[i][half] += score;
          }
      }
  }

  // A step without maxima, for where the scores can be computed again.

  // Turns scores into exponentials relative to the references as they are, and leaves their sums in `tile_sum`. Whether
  // they can be used: not where the sum of a row is too large or NaN, nor where a row has seen nothing yet; then the
  // scores, which are lost, are to be computed again for `exponentiate_again`.
  template <int N_TILES>
  __device__ __forceinline__ bool exponentiate_as_is(float (&scores)[M_TILES][N_TILES][4],
                                                     float (&tile_sum)[M_TILES][2], float factor) const {
    static_assert(MAX_TILE_SUM / (2 * N_TILES) >= (1 << static_cast<int>(MAX_EXPONENT)));
    bool fits = true;
#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Without a reference the exponentials are infinite or NaN, and so is their sum.
        tile_sum[i][half] = exponentiate_row(scores, i, half, factor, reference[i][half] * factor);
        fits = fits && tile_sum[i][half] <= MAX_TILE_SUM;
      }
    return fits;
  }

  // The same with references that have moved where they have to, and `out` with them. `tile_sum` says where: only in
  // rows that did not fit, so that a row's result does not depend on its neighbours.
  template <int N_TILES, int OUT_TILES>
  __device__ __forceinline__ void exponentiate_again(float (&scores)[M_TILES][N_TILES][4],
                                                     float (&out)[M_TILES][OUT_TILES][4],
                                                     float (&tile_sum)[M_TILES][2], float factor) {
#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float max = -INFINITY;
#pragma unroll
        for (int j = 0; j < N_TILES; ++j) max = fmaxf(max, fmaxf(scores[i][j][2 * half], scores[i][j][2 * half + 1]));
        bool fits = tile_sum[i][half] <= MAX_TILE_SUM;
#pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2) {
          max = fmaxf(max, __shfl_xor_sync(~0u, max, lanes));
          fits = fits & __shfl_xor_sync(~0u, fits, lanes);
        }
        float& old = reference[i][half];
        const bool row_moves = !fits && (max - old) * factor > MAX_EXPONENT;
        const float rescale = row_moves ? ptx::exp2((old - max) * factor) : 1.f;
        old = row_moves ? max : old;
        row_sum[i][half] *= rescale;
        rescale_row(out, i, half, rescale);
        const float subtrahend = old == -INFINITY ? 0.f : old * factor;
        tile_sum[i][half] = exponentiate_row(scores, i, half, factor, subtrahend);
      }
  }

  // Turns the scores of a row into exponentials, and returns their sum: of even and odd columns, two chains of additions
  // that do not wait for each other.
  template <int N_TILES>
  __device__ static __forceinline__ float exponentiate_row(float (&scores)[M_TILES][N_TILES][4], int i, int half,
                                                           float factor, float subtrahend) {
    float sum[2] = {0.f, 0.f};
#pragma unroll
    for (int j = 0; j < N_TILES; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& score = scores[i][j][2 * half + c];
        score = ptx::exp2(score * factor - subtrahend);
        sum[c] += score;
      }
    return sum[0] + sum[1];
  }

  // Adds up the sums of the four lanes of a row.
  __device__ void finish() {
#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& sum = row_sum[i][half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
      }
  }
};
