// A random attention problem with its solution in double precision.
#pragma once
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "kernels/params.h"
#include "machine.h"

struct Shape {
  int batch, seqlen_q, seqlen_k, num_heads, group_size, head_dim;
  int window_left = MAX_WINDOW, window_right = MAX_WINDOW;
  bool is_bf16 = true;
  float softcap = 0.f;
  bool has_alibi = false;
  float rise = 0.f;      // of the scores, as exponents of 2, with each hundred keys from the last to the first
  float peak = 0.f;      // the same of one key of each head above all others; with four heads, one for each lane of a row
  bool repeats = false;  // sequences, heads or both are the same rows, by a stride of 0
};

// (batch, seqlen, heads, head_dim) in 16 bits, with a gap after each row, and the same in double without.
struct Tensor {
  static constexpr int GAP = 8;
  int batch, seqlen, heads, head_dim;
  int own_batch, own_heads;  // that have rows of their own: all or one
  std::vector<uint16_t> bits;
  std::vector<double> values;

  Tensor(const Shape& shape, int seqlen, int heads, bool repeats_batch, bool repeats_heads, std::mt19937& random)
      : batch(shape.batch), seqlen(seqlen), heads(heads), head_dim(shape.head_dim),
        own_batch(shape.repeats && repeats_batch ? 1 : batch), own_heads(shape.repeats && repeats_heads ? 1 : heads) {
    bits.assign(static_cast<size_t>(own_batch) * seqlen * own_heads * (head_dim + GAP), 0x7fff);  // NaN in the gaps
    values.resize(static_cast<size_t>(batch) * seqlen * heads * head_dim);
    std::normal_distribution<float> normal;
    for (int batch = 0; batch < own_batch; ++batch)
      for (int i = 0; i < seqlen; ++i)
        for (int head = 0; head < own_heads; ++head)
          for (int col = 0; col < head_dim; ++col) set(batch, i, head, col, normal(random), shape.is_bf16);
  }
  // As src/cuda/mod.rs has them: 0 where there is one index.
  Strides strides() const {
    const int64_t row = head_dim + GAP;
    return {own_batch > 1 ? seqlen * own_heads * row : 0, seqlen > 1 ? own_heads * row : 0, own_heads > 1 ? row : 0};
  }
  void set(int batch, int i, int head, int col, float x, bool is_bf16) {
    const uint16_t rounded = machine::to_bits(x, is_bf16);
    bits[((static_cast<size_t>(batch) * seqlen + i) * own_heads + head) * (head_dim + GAP) + col] = rounded;
    for (int b = batch; b < (own_batch > 1 ? batch + 1 : this->batch); ++b)
      for (int h = head; h < (own_heads > 1 ? head + 1 : heads); ++h)
        values[row(b, i, h) + col] = machine::to_float(rounded, is_bf16);
  }
  size_t row(int batch, int i, int head) const { return ((static_cast<size_t>(batch) * seqlen + i) * heads + head) * head_dim; }
};

struct Problem {
  static constexpr float LARGE = 64.f;  // the last column of q, where scores rise

  Shape shape;
  std::mt19937 random{7};
  Tensor q, k, v, dout;
  std::vector<float> slopes;
  double scale;
  std::vector<double> out, lse, dq, dk, dv;

  // Of q, k, v and dout different dimensions repeat.
  explicit Problem(const Shape& shape)
      : shape(shape),
        q(shape, shape.seqlen_q, shape.num_heads, true, false, random),
        k(shape, shape.seqlen_k, shape.num_heads / shape.group_size, false, true, random),
        v(shape, shape.seqlen_k, shape.num_heads / shape.group_size, true, true, random),
        dout(shape, shape.seqlen_q, shape.num_heads, false, true, random),
        scale(static_cast<float>(1 / std::sqrt(shape.head_dim))) {
    for (int i = 0; i < shape.batch * shape.num_heads; ++i) slopes.push_back(0.01f * (i + 1));
    if (shape.rise != 0.f || shape.peak != 0.f) raise_scores();
    solve();
  }

  AttnProblem params() const {
    AttnProblem p{};
    p.q = q.bits.data();
    p.k = k.bits.data();
    p.v = v.bits.data();
    p.alibi_slopes = shape.has_alibi ? slopes.data() : nullptr;
    p.q_strides = q.strides();
    p.k_strides = k.strides();
    p.v_strides = v.strides();
    p.batch = shape.batch;
    p.seqlen_q = shape.seqlen_q;
    p.seqlen_k = shape.seqlen_k;
    p.num_heads = shape.num_heads;
    p.group_size = shape.group_size;
    p.head_dim = shape.head_dim;
    p.window_left = shape.window_left;
    p.window_right = shape.window_right;
    p.softmax_scale = static_cast<float>(scale);
    p.softcap = shape.softcap;
    p.tanh_scale = shape.softcap != 0.f ? p.softmax_scale / shape.softcap : 0.f;
    p.heads_together = 2;
    p.element = shape.is_bf16 ? ELEMENT_BF16 : ELEMENT_F16;
    return p;
  }

 private:
  // By the last column, which is the last to be added up.
  void raise_scores() {
    const auto exponent = [&](int key, int head) {
      return (shape.seqlen_k - 1 - key) / 100 * shape.rise + (key == 100 + 42 * head ? shape.peak : 0.f);
    };
    for (Tensor* tensor : {&q, &k})
      for (int batch = 0; batch < shape.batch; ++batch)
        for (int i = 0; i < tensor->seqlen; ++i)
          for (int head = 0; head < tensor->heads; ++head)
            tensor->set(batch, i, head, shape.head_dim - 1,
                        tensor == &q ? LARGE : exponent(i, head) / (scale * 1.4426950408889634 * LARGE), shape.is_bf16);
  }

  void solve() {
    const Shape& s = shape;
    out.assign(q.values.size(), 0);
    dq.assign(q.values.size(), 0);
    dk.assign(k.values.size(), 0);
    dv.assign(k.values.size(), 0);
    lse.assign(static_cast<size_t>(s.batch) * s.num_heads * s.seqlen_q, -INFINITY);
    for (int batch = 0; batch < s.batch; ++batch)
      for (int head = 0; head < s.num_heads; ++head)
        for (int i = 0; i < s.seqlen_q; ++i) solve_row(batch, head, i);
  }

  void solve_row(int batch, int head, int i) {
    const Shape& s = shape;
    const int batch_head = batch * s.num_heads + head, d = s.head_dim;
    const auto dot = [d](const double* x, const double* y) {
      double sum = 0;
      for (int c = 0; c < d; ++c) sum += x[c] * y[c];
      return sum;
    };
    const size_t q_row = q.row(batch, i, head);
    std::vector<int> keys;
    std::vector<double> probs, derivatives;
    double largest = -INFINITY, sum = 0;
    for (int j = 0; j < s.seqlen_k; ++j) {
      const int distance = j - i - s.seqlen_k + s.seqlen_q;
      if (s.window_left != MAX_WINDOW && distance < -s.window_left) continue;
      if (s.window_right != MAX_WINDOW && distance > s.window_right) continue;
      double score = scale * dot(&q.values[q_row], &k.values[k.row(batch, j, head / s.group_size)]), derivative = 1;
      if (s.softcap != 0.f) {
        const double capped = std::tanh(score / s.softcap);
        derivative = 1 - capped * capped;
        score = s.softcap * capped;
      }
      if (s.has_alibi) score -= slopes[batch_head] * std::abs(distance);
      keys.push_back(j);
      probs.push_back(score);
      derivatives.push_back(derivative);
      largest = std::max(largest, score);
    }
    if (keys.empty()) return;
    for (double& x : probs) sum += x = std::exp(x - largest);
    lse[static_cast<size_t>(batch_head) * s.seqlen_q + i] = largest + std::log(sum);
    double* out_row = &out[q_row];
    for (size_t n = 0; n < keys.size(); ++n) {
      probs[n] /= sum;
      const double* value = &v.values[v.row(batch, keys[n], head / s.group_size)];
      for (int c = 0; c < d; ++c) out_row[c] += probs[n] * value[c];
    }
    const double* dout_row = &dout.values[q_row];
    const double delta = dot(dout_row, out_row);
    for (size_t n = 0; n < keys.size(); ++n) {
      const size_t row = k.row(batch, keys[n], head / s.group_size);
      const double dscore = probs[n] * (dot(dout_row, &v.values[row]) - delta) * derivatives[n] * scale;
      for (int c = 0; c < d; ++c) {
        dv[row + c] += probs[n] * dout_row[c];
        dk[row + c] += dscore * q.values[q_row + c];
        dq[q_row + c] += dscore * k.values[row + c];
      }
    }
  }
};

// A contiguous result of a kernel, and room behind it that has to stay as it was.
struct Result {
  static constexpr size_t ROOM = 64;
  std::vector<uint16_t> bits;
  explicit Result(size_t size) : bits(size + ROOM, 0x7fff) {}

  // A row may be off by so many roundings of its largest number, and by some more where larger numbers cancelled each
  // other: 1.5 times what correct kernels need, or more.
  struct Bound {
    double of_largest, more;
  };
  void compare(const char* name, const std::vector<double>& expected, Bound bound, const Shape& shape) const {
    const double rounding = shape.is_bf16 ? 1. / 256 : 1. / 2048;
    const auto result = [&](size_t i) { return machine::to_float(bits[i], shape.is_bf16); };
    for (size_t row = 0; row < expected.size(); row += shape.head_dim) {
      double largest = 0;
      for (int col = 0; col < shape.head_dim; ++col) largest = std::max(largest, std::abs(expected[row + col]));
      const double allowed = rounding * (bound.of_largest * largest + bound.more);
      for (size_t i = row; i < row + shape.head_dim; ++i)
        if (!(std::abs(result(i) - expected[i]) <= allowed))
          return machine::fault("%s at row %zu, column %zu: %g where %g was expected (bound %g)", name, row / shape.head_dim,
                                i - row, result(i), expected[i], allowed);
    }
    for (size_t i = expected.size(); i < bits.size(); ++i)
      if (bits[i] != 0x7fff) return machine::fault("%s: written past its end", name);
  }
};

// Shapes on and off the edges of every tile, with each mask; `is_plain`: no softcap, no alibi.
inline std::vector<Shape> shapes(int head_dim, bool is_plain) {
  const int all = MAX_WINDOW;
  std::vector<Shape> shapes = {
      {1, 64, 64, 1, 1, head_dim},
      {1, 128, 193, 1, 1, head_dim, all, all, false},
      {2, 100, 150, 2, 1, head_dim - 8, all, 0},
      {1, 130, 130, 4, 2, head_dim, all, 0},
      {1, 65, 300, 3, 3, head_dim - 24, 100, 50},
      {1, 150, 60, 1, 1, 40, all, 0},
      {1, 1, 257, 2, 2, head_dim},
      {2, 140, 129, 2, 2, head_dim, 30, 0, false},
      {1, 17, 0, 1, 1, head_dim},
      {1, 0, 17, 1, 1, head_dim},
      {1, 300, 400, 1, 1, head_dim, 40, 20},
      {1, 70, 900, 1, 1, head_dim},
      {3, 140, 300, 2, 1, head_dim},  // more pieces of work than multiprocessors
      {1, 200, 330, 1, 1, head_dim, 60, all},
      {1, 150, 200, 1, 1, head_dim - 8, all, 30, false},
  };
  Shape repeated{2, 70, 140, 4, 2, head_dim};
  repeated.repeats = true;
  shapes.push_back(repeated);
  if (!is_plain) {
    shapes.push_back({1, 70, 150, 2, 1, head_dim, all, all, true, 3.f});
    shapes.push_back({1, 100, 100, 2, 2, head_dim, all, 0, false, 0.f, true});
    shapes.push_back({2, 90, 140, 1, 1, head_dim - 16, 60, 10, true, 2.f, true});
  }
  return shapes;
}

// Calls `solve` for each of `shapes`, and its number, with each timing; the exit status of the program.
template <class Solve>
inline int run_all(const std::vector<Shape>& shapes, Solve solve) {
  using machine::Timing;
  for (Timing timing : {Timing::AT_ONCE, Timing::LATE, Timing::RANDOM}) {
    machine::timing = timing;
    for (size_t number = 0; number < shapes.size(); ++number) {
      const Shape& s = shapes[number];
      const int before = machine::faults;
      solve(s, static_cast<int>(number));
      if (machine::faults != before)
        std::printf("with batch %d, lengths %d and %d, heads %d / %d, head_dim %d, window %d %d, %s, softcap %g, alibi %d, rise %g, peak %g, repeats %d, timing %d\n",
                    s.batch, s.seqlen_q, s.seqlen_k, s.num_heads, s.group_size, s.head_dim, s.window_left,
                    s.window_right, s.is_bf16 ? "bf16" : "f16", s.softcap, s.has_alibi, s.rise, s.peak,
                    s.repeats, static_cast<int>(timing));
    }
  }
  std::printf("%d faults\n", machine::faults);
  return machine::faults != 0;
}
