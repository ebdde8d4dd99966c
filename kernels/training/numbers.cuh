// Rows of numbers of any element type, read and written as f32: 16 bytes at a time where everything is aligned,
// else one by one.
#pragma once
#include "../common/element.cuh"
#include "params.h"

// The third element type, which the attention's kernels do not have.
struct F32 {};

// LENGTH neighbours of an element type.
template <class Element, int LENGTH_>
struct Numbers {
  using Tag = Element;
  using Storage = uint16_t;
  static constexpr int LENGTH = LENGTH_;
  static_assert(LENGTH == 8 || LENGTH == 1);

  // The numbers from `index` on, a multiple of LENGTH.
  static __device__ __forceinline__ void load(const void* tensor, int64_t index, float (&x)[LENGTH]) {
    const Storage* numbers = static_cast<const Storage*>(tensor) + index;
    if constexpr (LENGTH == 1) {
      x[0] = unpack<Element>(*numbers).x;
    } else {
      const uint4 packed = *reinterpret_cast<const uint4*>(numbers);
      const uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack<Element>(pairs[i]);
        x[2 * i] = pair.x;
        x[2 * i + 1] = pair.y;
      }
    }
  }

  static __device__ __forceinline__ void store(void* tensor, int64_t index, const float (&x)[LENGTH]) {
    Storage* numbers = static_cast<Storage*>(tensor) + index;
    if constexpr (LENGTH == 1) {
      *numbers = static_cast<Storage>(pack<Element>(x[0], 0.f));
    } else {
      *reinterpret_cast<uint4*>(numbers) = {pack<Element>(x[0], x[1]), pack<Element>(x[2], x[3]),
                                            pack<Element>(x[4], x[5]), pack<Element>(x[6], x[7])};
    }
  }
};

template <int LENGTH_>
struct Numbers<F32, LENGTH_> {
  using Tag = F32;
  using Storage = float;
  static constexpr int LENGTH = LENGTH_;
  static_assert(LENGTH % 4 == 0 || LENGTH == 1);

  static __device__ __forceinline__ void load(const void* tensor, int64_t index, float (&x)[LENGTH]) {
    const float* numbers = static_cast<const float*>(tensor) + index;
    if constexpr (LENGTH == 1) {
      x[0] = *numbers;
    } else {
#pragma unroll
      for (int i = 0; i < LENGTH; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(numbers + i);
        x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
      }
    }
  }

  static __device__ __forceinline__ void store(void* tensor, int64_t index, const float (&x)[LENGTH]) {
    float* numbers = static_cast<float*>(tensor) + index;
    if constexpr (LENGTH == 1) {
      *numbers = x[0];
    } else {
#pragma unroll
      for (int i = 0; i < LENGTH; i += 4) {
        *reinterpret_cast<float4*>(numbers + i) = {x[i], x[i + 1], x[i + 2], x[i + 3]};
      }
    }
  }
};

// Calls `run` with the Numbers of a problem that are read one by one.
template <class Run>
inline cudaError_t with_single_numbers(ElementType element, Run run) {
  switch (element) {
    case ELEMENT_F16: return run(Numbers<F16, 1>{});
    case ELEMENT_BF16: return run(Numbers<Bf16, 1>{});
    case ELEMENT_F32: return run(Numbers<F32, 1>{});
  }
  return cudaErrorInvalidValue;
}

// Calls `run` with the Numbers of a problem.
template <class Run>
inline cudaError_t with_numbers(ElementType element, bool aligned, Run run) {
  if (!aligned) return with_single_numbers(element, run);
  switch (element) {
    case ELEMENT_F16: return run(Numbers<F16, 8>{});
    case ELEMENT_BF16: return run(Numbers<Bf16, 8>{});
    case ELEMENT_F32: return run(Numbers<F32, 4>{});
  }
  return cudaErrorInvalidValue;
}

// Whether pointers and distances, in elements, allow 16 bytes at a time. A null pointer does.
class Aligned {
 public:
  explicit Aligned(ElementType element) : bytes_(element == ELEMENT_F32 ? 4 : 2) {}

  Aligned& pointer(const void* pointer) {
    aligned_ &= reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
    return *this;
  }
  Aligned& step(int64_t elements) {
    aligned_ &= elements * bytes_ % 16 == 0;
    return *this;
  }
  operator bool() const { return aligned_; }

 private:
  int bytes_;
  bool aligned_ = true;
};
