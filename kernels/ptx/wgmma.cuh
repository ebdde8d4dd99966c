// The matrix product of a warpgroup, asynchronous, with 32-bit accumulators, sm_90a.
// PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions". All threads of an aligned warpgroup take part.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../common/element.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
namespace ptx {

// Before the first product, and after ordinary code has written accumulators or operand registers.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Makes one group of the products since the last commit.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING of the latest groups are under way. Until then their registers belong to them, and
// the compiler doesn't know: `hold` those that are used next.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// No instruction: what reads or writes these registers stays on its side of it.
template <int M_TILES, int N_TILES>
__device__ __forceinline__ void hold(float (&acc)[M_TILES][N_TILES][4]) {
#pragma unroll
  for (int i = 0; i < M_TILES; ++i)
#pragma unroll
    for (int j = 0; j < N_TILES; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r) asm volatile("" : "+f"(acc[i][j][r])::"memory");
}

// m64nNk16. Number r of accumulator j of a thread is as of m16n8k16, in the 16 rows of its warp and 8 columns from
// 8 j on; the registers of A are as there too.
//
// ss: acc = A B, or acc += A B: A (64 x 16) and B (16 x N) in shared memory, contiguous along K, or ACROSS it.
// rs: the same with A in registers.
template <class Element, int N>
struct Wgmma;

#define WGMMA_TEXT_8(a, b, c, d, e, f, g, h) "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h
#define WGMMA_TEXT_32 WGMMA_TEXT_8(0, 1, 2, 3, 4, 5, 6, 7) ", " WGMMA_TEXT_8(8, 9, 10, 11, 12, 13, 14, 15)
#define WGMMA_TEXT_64 WGMMA_TEXT_32 ", "                                                     \
  WGMMA_TEXT_8(16, 17, 18, 19, 20, 21, 22, 23) ", " WGMMA_TEXT_8(24, 25, 26, 27, 28, 29, 30, 31)
#define WGMMA_TEXT_80 WGMMA_TEXT_64 ", " WGMMA_TEXT_8(32, 33, 34, 35, 36, 37, 38, 39)
#define WGMMA_TEXT_96 WGMMA_TEXT_80 ", " WGMMA_TEXT_8(40, 41, 42, 43, 44, 45, 46, 47)
#define WGMMA_TEXT_112 WGMMA_TEXT_96 ", " WGMMA_TEXT_8(48, 49, 50, 51, 52, 53, 54, 55)
#define WGMMA_TEXT_128 WGMMA_TEXT_112 ", " WGMMA_TEXT_8(56, 57, 58, 59, 60, 61, 62, 63)
#define WGMMA_TEXT_144 WGMMA_TEXT_128 ", " WGMMA_TEXT_8(64, 65, 66, 67, 68, 69, 70, 71)
#define WGMMA_TEXT_160 WGMMA_TEXT_144 ", " WGMMA_TEXT_8(72, 73, 74, 75, 76, 77, 78, 79)
#define WGMMA_TEXT_176 WGMMA_TEXT_160 ", " WGMMA_TEXT_8(80, 81, 82, 83, 84, 85, 86, 87)
#define WGMMA_TEXT_192 WGMMA_TEXT_176 ", " WGMMA_TEXT_8(88, 89, 90, 91, 92, 93, 94, 95)
#define WGMMA_TEXT_256                                                                       \
  WGMMA_TEXT_192 ", " WGMMA_TEXT_8(96, 97, 98, 99, 100, 101, 102, 103) ", "                  \
  WGMMA_TEXT_8(104, 105, 106, 107, 108, 109, 110, 111) ", "                                  \
  WGMMA_TEXT_8(112, 113, 114, 115, 116, 117, 118, 119) ", " WGMMA_TEXT_8(120, 121, 122, 123, 124, 125, 126, 127)

#define WGMMA_ACC_4(j) "+f"(acc[j][0]), "+f"(acc[j][1]), "+f"(acc[j][2]), "+f"(acc[j][3])
#define WGMMA_ACC_16(j) WGMMA_ACC_4(j), WGMMA_ACC_4(j + 1), WGMMA_ACC_4(j + 2), WGMMA_ACC_4(j + 3)
#define WGMMA_ACC_32 WGMMA_ACC_16(0)
#define WGMMA_ACC_64 WGMMA_ACC_32, WGMMA_ACC_16(4)
#define WGMMA_ACC_80 WGMMA_ACC_64, WGMMA_ACC_4(8), WGMMA_ACC_4(9)
#define WGMMA_ACC_96 WGMMA_ACC_80, WGMMA_ACC_4(10), WGMMA_ACC_4(11)
#define WGMMA_ACC_112 WGMMA_ACC_96, WGMMA_ACC_4(12), WGMMA_ACC_4(13)
#define WGMMA_ACC_128 WGMMA_ACC_112, WGMMA_ACC_4(14), WGMMA_ACC_4(15)
#define WGMMA_ACC_144 WGMMA_ACC_128, WGMMA_ACC_4(16), WGMMA_ACC_4(17)
#define WGMMA_ACC_160 WGMMA_ACC_144, WGMMA_ACC_4(18), WGMMA_ACC_4(19)
#define WGMMA_ACC_176 WGMMA_ACC_160, WGMMA_ACC_4(20), WGMMA_ACC_4(21)
#define WGMMA_ACC_192 WGMMA_ACC_176, WGMMA_ACC_4(22), WGMMA_ACC_4(23)
#define WGMMA_ACC_256 WGMMA_ACC_192, WGMMA_ACC_16(24), WGMMA_ACC_16(28)

// p to v are the numbers of the operands after the N / 2 accumulators.
#define WGMMA(n, type, p, q, r, s, t, u, v)                                                                           \
  template <>                                                                                                         \
  struct Wgmma<WGMMA_ELEMENT_##type, n> {                                                                             \
    template <bool A_ACROSS, bool B_ACROSS>                                                                           \
    __device__ static __forceinline__ void ss(float (&acc)[n / 8][4], uint64_t a, uint64_t b, bool accumulate) {      \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #r ", 0;\n"                                               \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #type "." #type " {" WGMMA_TEXT_##n "}, %" #p    \
                   ", %" #q ", add, 1, 1, %" #s ", %" #t ";\n}"                                                       \
                   : WGMMA_ACC_##n                                                                                    \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(A_ACROSS), "n"(B_ACROSS));                \
    }                                                                                                                 \
    template <bool B_ACROSS>                                                                                          \
    __device__ static __forceinline__ void rs(float (&acc)[n / 8][4], const uint32_t (&a)[4], uint64_t b,             \
                                              bool accumulate) {                                                      \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #u ", 0;\n"                                               \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #type "." #type " {" WGMMA_TEXT_##n "}, {%" #p   \
                   ", %" #q ", %" #r ", %" #s "}, %" #t ", add, 1, 1, %" #v ";\n}"                                    \
                   : WGMMA_ACC_##n                                                                                    \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),           \
                     "n"(B_ACROSS));                                                                                  \
    }                                                                                                                 \
  };
#define WGMMA_ELEMENT_f16 F16
#define WGMMA_ELEMENT_bf16 Bf16
#define WGMMA_BOTH(n, ...) WGMMA(n, f16, __VA_ARGS__) WGMMA(n, bf16, __VA_ARGS__)
WGMMA_BOTH(32, 16, 17, 18, 19, 20, 21, 22)
WGMMA_BOTH(64, 32, 33, 34, 35, 36, 37, 38)
WGMMA_BOTH(80, 40, 41, 42, 43, 44, 45, 46)
WGMMA_BOTH(96, 48, 49, 50, 51, 52, 53, 54)
WGMMA_BOTH(112, 56, 57, 58, 59, 60, 61, 62)
WGMMA_BOTH(128, 64, 65, 66, 67, 68, 69, 70)
WGMMA_BOTH(192, 96, 97, 98, 99, 100, 101, 102)
WGMMA_BOTH(256, 128, 129, 130, 131, 132, 133, 134)

}  // namespace ptx
#endif
