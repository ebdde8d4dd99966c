// In place of kernels/common/element.cuh.
#pragma once
#include <type_traits>

struct F16 {};
struct Bf16 {};

template <class Element>
inline uint32_t pack(float low, float high) {
  constexpr bool IS_BF16 = std::is_same_v<Element, Bf16>;
  return machine::to_bits(low, IS_BF16) | static_cast<uint32_t>(machine::to_bits(high, IS_BF16)) << 16;
}

template <class Element>
inline float2 unpack(uint32_t packed) {
  constexpr bool IS_BF16 = std::is_same_v<Element, Bf16>;
  return {machine::to_float(packed & 0xffff, IS_BF16), machine::to_float(packed >> 16, IS_BF16)};
}
