// Tile shapes of the sm_90a kernels, by head_dim. They change speed, never results beyond rounding.
#pragma once

// Set for each compiled instance (src/cuda/instances.rs); the defaults are for editors.
#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef SHARED_KIB
#define SHARED_KIB 227
#endif

// Each of WARPGROUPS holds 64 query rows; one more loads. The registers are of a thread of the warpgroup that
// loads and of those that compute: with 2 of these at most 504 in all, with 3 at most 512.
template <int HEAD_DIM_>
struct ForwardTile;
template <>
struct ForwardTile<64> {
  static constexpr int TILE_N = 128, WARPGROUPS = 3, STAGES = 3, LOAD_REGISTERS = 32, REGISTERS = 160;
};
template <>
struct ForwardTile<96> {
  static constexpr int TILE_N = 112, WARPGROUPS = 3, STAGES = 3, LOAD_REGISTERS = 32, REGISTERS = 160;
};
template <>
struct ForwardTile<128> {
  static constexpr int TILE_N = 128, WARPGROUPS = 2, STAGES = 3, LOAD_REGISTERS = 24, REGISTERS = 240;
};
template <>
struct ForwardTile<192> {
  static constexpr int TILE_N = 112, WARPGROUPS = 2, STAGES = 2, LOAD_REGISTERS = 24, REGISTERS = 240;
};
template <>
struct ForwardTile<256> {
  static constexpr int TILE_N = 80, WARPGROUPS = 2, STAGES = 2, LOAD_REGISTERS = 24, REGISTERS = 240;
};

// Of backward.cu: 64 keys each for two warpgroups, TILE_M query rows a step.
template <int HEAD_DIM_>
struct BackwardTile {
  static constexpr int TILE_M = HEAD_DIM_ == 64 ? 128 : 64;
};
