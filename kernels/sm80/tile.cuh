// Tile shapes of the sm_80 kernels, by head_dim and by the shared memory that a block may have in KiB. They
// change speed, never results beyond rounding.
#pragma once

// Set for each compiled instance (src/cuda/instances.rs); the defaults are for editors.
#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef SHARED_KIB
#define SHARED_KIB 227
#endif

// A warp holds 32 rows of heads up to 128 (two blocks of 16 that share every fragment of K and V), 16 of the
// larger ones, whose accumulators would not fit the registers otherwise. With two stages the next k and v are
// loaded during a tile, with one between its products.
template <int HEAD_DIM_, int SHARED_KIB_>
struct ForwardTile;
template <>
struct ForwardTile<64, 99> {
  static constexpr int TILE_M = 128, TILE_N = 64, WARPS = 4, BLOCKS_PER_SM = 2, STAGES = 1;
};
template <>
struct ForwardTile<96, 99> {
  static constexpr int TILE_M = 128, TILE_N = 64, WARPS = 4, BLOCKS_PER_SM = 2, STAGES = 1;
};
template <>
struct ForwardTile<128, 227> {
  static constexpr int TILE_M = 128, TILE_N = 64, WARPS = 4, BLOCKS_PER_SM = 2, STAGES = 2;
};
template <>
struct ForwardTile<128, 99> {
  static constexpr int TILE_M = 128, TILE_N = 64, WARPS = 4, BLOCKS_PER_SM = 2, STAGES = 1;
};
template <>
struct ForwardTile<192, 99> {
  static constexpr int TILE_M = 64, TILE_N = 64, WARPS = 4, BLOCKS_PER_SM = 2, STAGES = 1;
};
template <>
struct ForwardTile<256, 99> {
  static constexpr int TILE_M = 64, TILE_N = 64, WARPS = 4, BLOCKS_PER_SM = 2, STAGES = 1;
};

// Query rows x keys. The warps are laid over each product as WARPS_M x (WARPS / WARPS_M): scores and
// dprobs (TILE_M x TILE_N), dk and dv (TILE_N x HEAD_DIM), dq (TILE_M x HEAD_DIM). Stages are of q and dout.
template <int HEAD_DIM_, int SHARED_KIB_>
struct BackwardTile;
template <>
struct BackwardTile<64, 99> {
  static constexpr int TILE_M = 64, TILE_N = 64, WARPS = 4, BLOCKS_PER_SM = 2, STAGES = 1;
  static constexpr int SCORES_WARPS_M = 2, DKV_WARPS_M = 2, DQ_WARPS_M = 2;
};
template <>
struct BackwardTile<96, 163> {
  static constexpr int TILE_M = 64, TILE_N = 128, WARPS = 8, BLOCKS_PER_SM = 1, STAGES = 2;
  static constexpr int SCORES_WARPS_M = 2, DKV_WARPS_M = 4, DQ_WARPS_M = 4;
};
template <>
struct BackwardTile<96, 99> {
  static constexpr int TILE_M = 64, TILE_N = 64, WARPS = 4, BLOCKS_PER_SM = 1, STAGES = 1;
  static constexpr int SCORES_WARPS_M = 2, DKV_WARPS_M = 2, DQ_WARPS_M = 2;
};
template <>
struct BackwardTile<128, 163> {
  static constexpr int TILE_M = 64, TILE_N = 128, WARPS = 8, BLOCKS_PER_SM = 1, STAGES = 2;
  static constexpr int SCORES_WARPS_M = 2, DKV_WARPS_M = 4, DQ_WARPS_M = 2;
};
template <>
struct BackwardTile<128, 99> {
  static constexpr int TILE_M = 64, TILE_N = 64, WARPS = 4, BLOCKS_PER_SM = 1, STAGES = 1;
  static constexpr int SCORES_WARPS_M = 2, DKV_WARPS_M = 2, DQ_WARPS_M = 2;
};
template <>
struct BackwardTile<192, 163> {
  static constexpr int TILE_M = 64, TILE_N = 64, WARPS = 8, BLOCKS_PER_SM = 1, STAGES = 2;
  static constexpr int SCORES_WARPS_M = 2, DKV_WARPS_M = 2, DQ_WARPS_M = 2;
};
template <>
struct BackwardTile<192, 99> {
  static constexpr int TILE_M = 32, TILE_N = 64, WARPS = 8, BLOCKS_PER_SM = 1, STAGES = 1;
  static constexpr int SCORES_WARPS_M = 2, DKV_WARPS_M = 2, DQ_WARPS_M = 2;
};
template <>
struct BackwardTile<256, 227> {
  static constexpr int TILE_M = 64, TILE_N = 64, WARPS = 8, BLOCKS_PER_SM = 1, STAGES = 2;
  static constexpr int SCORES_WARPS_M = 2, DKV_WARPS_M = 2, DQ_WARPS_M = 2;
};
template <>
struct BackwardTile<256, 163> {
  static constexpr int TILE_M = 64, TILE_N = 64, WARPS = 8, BLOCKS_PER_SM = 1, STAGES = 1;
  static constexpr int SCORES_WARPS_M = 2, DKV_WARPS_M = 2, DQ_WARPS_M = 2;
};
template <>
struct BackwardTile<256, 99> {
  static constexpr int TILE_M = 32, TILE_N = 32, WARPS = 4, BLOCKS_PER_SM = 1, STAGES = 1;
  static constexpr int SCORES_WARPS_M = 2, DKV_WARPS_M = 2, DQ_WARPS_M = 2;
};

// For backward_keys.cu: 32 keys a warp.
template <int HEAD_DIM_, int SHARED_KIB_>
struct BackwardKeysTile;
template <>
struct BackwardKeysTile<64, 99> {
  static constexpr int TILE_M = 64, WARPS = 4, BLOCKS_PER_SM = 2, STAGES = 2;
};
