// Which keys a query row sees, and which tiles that makes; the twin of src/mask.rs.
#pragma once
#include "../params.h"

// Row i is aligned with key i + seqlen_k - seqlen_q.
struct Mask {
  int seqlen_q, seqlen_k, left, right;

  __device__ explicit Mask(const AttnProblem& p)
      : seqlen_q(p.seqlen_q), seqlen_k(p.seqlen_k), left(p.window_left), right(p.window_right) {}

  // The first key that row i sees, and one past its last; not clamped to the keys that there are.
  __device__ int first_key(int row) const {
    return left == MAX_WINDOW ? -MAX_WINDOW : row + seqlen_k - seqlen_q - left;
  }
  __device__ int end_key(int row) const {
    return right == MAX_WINDOW ? seqlen_k : min(seqlen_k, row + seqlen_k - seqlen_q + right + 1);
  }

  // Of a key that is `distance` to the right of the key that the row is aligned with.
  __device__ bool is_visible(int distance, int key) const {
    return -left <= distance && distance <= right && key < seqlen_k;
  }

  // The first row that sees a key, and one past the last; not clamped to the rows that there are. A key
  // past the last is seen by none.
  __device__ int first_row(int key) const {
    return right == MAX_WINDOW ? -MAX_WINDOW : key + seqlen_q - seqlen_k - right;
  }
  __device__ int end_row(int key) const {
    return key >= seqlen_k ? -MAX_WINDOW : left == MAX_WINDOW ? MAX_WINDOW : key + seqlen_q - seqlen_k + left + 1;
  }

  __device__ bool sees_nothing(int row) const { return max(first_key(row), 0) >= end_key(row); }

  // Whether all rows in [row_begin, row_end) see all keys in [key_begin, key_end).
  __device__ bool all_visible(int row_begin, int row_end, int key_begin, int key_end) const {
    return first_key(row_end - 1) <= key_begin && key_end <= end_key(row_begin);
  }
};

// Tiles [begin, end).
struct TileRange {
  int begin, end;
};

// The key tiles that the query rows [row_begin, row_end) visit; row_end is at most seqlen_q.
template <int TILE_N>
__device__ TileRange key_tiles(const Mask& mask, int row_begin, int row_end) {
  const int first_key = max(mask.first_key(row_begin), 0), end_key = mask.end_key(row_end - 1);
  if (first_key >= end_key) return {0, 0};
  return {first_key / TILE_N, (end_key + TILE_N - 1) / TILE_N};
}

// The key tiles that the query rows [row_begin, row_end) see all keys of, cut to `range`; where there are none,
// begin may be past end.
template <int TILE_N>
__device__ TileRange free_key_tiles(const Mask& mask, int row_begin, int row_end, TileRange range) {
  const int first_key = max(mask.first_key(row_end - 1), 0), end_key = max(mask.end_key(row_begin), 0);
  return {max((first_key + TILE_N - 1) / TILE_N, range.begin), max(min(end_key / TILE_N, range.end), range.begin)};
}

// The query tiles that see at least one of the keys [key_begin, key_end); key_end is at most seqlen_k.
template <int TILE_M>
__device__ TileRange query_tiles(const Mask& mask, int key_begin, int key_end) {
  const int first_row = max(mask.first_row(key_begin), 0), end_row = min(mask.end_row(key_end - 1), mask.seqlen_q);
  if (first_row >= end_row) return {0, 0};
  return {first_row / TILE_M, (end_row + TILE_M - 1) / TILE_M};
}
