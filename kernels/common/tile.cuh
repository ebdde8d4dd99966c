// Tiles of 16-bit elements in shared memory: where an element lies, and how tiles are filled, multiplied
// and written back.
//
// A tile is cut into pages of 64 columns (128-byte rows), or of 32 (64-byte rows) where 64 do not divide
// it. In a page the 16-byte chunks of a row are permuted by its row number, so that the 8 rows of an
// ldmatrix, the rows of a copy and the 4-byte stores of accumulators all spread over the 32 banks.
// The address of a chunk depends on its row only modulo 8, so a lane computes it once and steps of 8
// rows or of a page are constants added to it.
#pragma once
#include "../ptx/cp_async.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/shared.cuh"
#include "../ptx/special.cuh"
#include "element.cuh"
#include "sequence.cuh"

template <int ROWS_, int COLS_>
struct TileLayout {
  static constexpr int ROWS = ROWS_;
  static constexpr int COLS = COLS_;
  static constexpr int PAGE_COLS = COLS % 64 == 0 ? 64 : 32;
  static constexpr int PAGES = COLS / PAGE_COLS;
  static constexpr int CHUNKS = PAGE_COLS / 8;  // in a row of a page
  static constexpr int ROW_BYTES = PAGE_COLS * 2;
  static constexpr int PAGE_BYTES = ROWS * ROW_BYTES;
  static constexpr int BYTES = ROWS * COLS * 2;
  static_assert(COLS % PAGE_COLS == 0 && ROWS % 8 == 0);

  // Of a 16-byte chunk in the page, with `chunk < CHUNKS`.
  __device__ static uint32_t chunk_offset(int row, int chunk) {
    const int permuted = CHUNKS == 8 ? chunk ^ (row & 7) : chunk ^ ((row >> 1) & 3);
    return row * ROW_BYTES + permuted * 16;
  }
};

template <class Layout>
struct alignas(1024) SmemTile {
  uint16_t elements[Layout::ROWS * Layout::COLS];
};

__device__ __forceinline__ uint32_t smem_address(const void* smem) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(smem));
}

// Begins to copy rows `first_row...` of a head into a tile; rows from `end_row` on and columns from
// `head_dim` on become zero. All THREADS of the block take part.
template <class Layout, int THREADS>
__device__ __forceinline__ void load_tile(SmemTile<Layout>& tile, const Rows& rows, int first_row, int end_row,
                                          int head_dim, int thread) {
  constexpr int ROWS_AT_ONCE = THREADS / Layout::CHUNKS;
  thread = ptx::recomputed(thread);
  const int row = thread / Layout::CHUNKS, chunk = thread % Layout::CHUNKS;
  const uint32_t smem = smem_address(&tile) + Layout::chunk_offset(row, chunk);
  static_assert(ROWS_AT_ONCE % 8 == 0 && Layout::ROWS % ROWS_AT_ONCE == 0);
  // One multiplication for the first row; from there steps of a constant.
  const uint16_t* gmem = rows.row(first_row + row) + chunk * 8;
  const int64_t step = rows.stride * ROWS_AT_ONCE;
#pragma unroll
  for (int i = 0; i < Layout::ROWS / ROWS_AT_ONCE; ++i) {
    const bool has_row = first_row + row + i * ROWS_AT_ONCE < end_row;
#pragma unroll
    for (int page = 0; page < Layout::PAGES; ++page) {
      ptx::cp_async_16(smem + i * ROWS_AT_ONCE * Layout::ROW_BYTES + page * Layout::PAGE_BYTES,
                       gmem + i * step + page * Layout::PAGE_COLS,
                       has_row && page * Layout::PAGE_COLS + chunk * 8 < head_dim);
    }
  }
}

// Writes `ROWS` rows of a tile, from `tile_row` on, to rows `first_row...` of a head, as far as `end_row`
// and `head_dim` go. `THREADS` threads take part.
template <class Layout, int ROWS, int THREADS>
__device__ __forceinline__ void store_tile(const SmemTile<Layout>& tile, int tile_row, uint16_t* out,
                                           int64_t row_stride, int first_row, int end_row, int head_dim,
                                           int thread) {
  constexpr int ROW_CHUNKS = Layout::COLS / 8;
#pragma unroll
  for (int i = thread; i < ROWS * ROW_CHUNKS; i += THREADS) {
    const int row = i / ROW_CHUNKS, chunk = i % ROW_CHUNKS;
    if (first_row + row < end_row && chunk * 8 < head_dim) {
      const int page = chunk / Layout::CHUNKS;
      const char* from = reinterpret_cast<const char*>(&tile) + page * Layout::PAGE_BYTES +
                         Layout::chunk_offset(tile_row + row, chunk % Layout::CHUNKS);
      *reinterpret_cast<uint4*>(out + (first_row + row) * row_stride + chunk * 8) =
          *reinterpret_cast<const uint4*>(from);
    }
  }
}

// In which order an ldmatrix.x4 reads the four matrices of 8 x 8 of a block of 16 x 16. Each register of a
// fragment then is where mma wants it; another order would cost a move for each.
enum class Quarters {
  ROWS_FIRST,    // top left, bottom left, top right, bottom right
  COLUMNS_FIRST  // top left, top right, bottom left, bottom right
};

// A thread's warp and lane. ANEW: computed where it stands, in a step of a main loop; kept over the loop, they and
// the addresses that follow from them take the registers of accumulators.
template <bool ANEW = true>
struct ThreadPlace {
  int warp, lane;
  __device__ explicit ThreadPlace(int thread) {
    if (ANEW) thread = ptx::recomputed(thread);
    warp = thread / 32;
    lane = thread % 32;
  }
};

// A lane's view of the blocks of 16 x 16 in a tile, from `first_row` (a multiple of 8) and `first_col` on.
// PAIRS is how many blocks lie side by side in what this warp reads: first_col is a multiple of 16 * PAIRS.
template <class Layout, Quarters ORDER, int PAIRS>
struct Blocks {
  static constexpr int PAGE_PAIRS = Layout::PAGE_COLS / 16;
  // Then no step within the view carries into the page number or meets the bits of first_col.
  static constexpr bool ALIGNED = PAGE_PAIRS % PAIRS == 0 || PAIRS % PAGE_PAIRS == 0;
  uint32_t base;
  int first_pair;

  __device__ Blocks(const SmemTile<Layout>& tile, int first_row, int first_col, int lane) {
    const int half = lane / 16, quarter = (lane / 8) % 2;
    const int row = first_row + lane % 8 + 8 * (ORDER == Quarters::ROWS_FIRST ? quarter : half);
    base = smem_address(&tile) + Layout::chunk_offset(row, ORDER == Quarters::ROWS_FIRST ? half : quarter);
    first_pair = first_col / 16;
    if (ALIGNED) base = step(base, first_pair);
  }

  __device__ static uint32_t step(uint32_t base, int pair) {
    return (base ^ (pair % PAGE_PAIRS * 32)) + pair / PAGE_PAIRS * Layout::PAGE_BYTES;
  }

  // From a tile of stage `stage` (0 or 1) to the same tile of the other one, `bytes` away.
  __device__ void to_other_stage(int stage, int bytes) { base += stage == 0 ? bytes : -bytes; }

  // Of the block at `row` rows (a multiple of 8) and `pair` blocks from the first.
  __device__ uint32_t address(int row, int pair) const {
    return step(base, ALIGNED ? pair : first_pair + pair) + row * Layout::ROW_BYTES;
  }
};

// The operands of a product C (M x N) += A (M x K) B (K x N) of one warp, each read by blocks of 16 x 16.
// `a(frag, i, k)` and `b(frag, j, k)` load block row i of A, block column j of B, at block k along K; from
// the like tile `bytes` further on, if given.

// A as it is: its rows are rows of the tile.
template <class Layout, int K_BLOCKS>
struct RowsOfA : Blocks<Layout, Quarters::ROWS_FIRST, K_BLOCKS> {
  using Blocks<Layout, Quarters::ROWS_FIRST, K_BLOCKS>::Blocks;
  __device__ void operator()(uint32_t (&frag)[4], int i, int k, int bytes = 0) const {
    ptx::ldmatrix_x4(frag, this->address(16 * i, k) + bytes);
  }
};

// A is the transpose of what is in the tile.
template <class Layout, int M_BLOCKS>
struct ColumnsOfA : Blocks<Layout, Quarters::COLUMNS_FIRST, M_BLOCKS> {
  using Blocks<Layout, Quarters::COLUMNS_FIRST, M_BLOCKS>::Blocks;
  __device__ void operator()(uint32_t (&frag)[4], int i, int k, int bytes = 0) const {
    ptx::ldmatrix_x4_trans(frag, this->address(16 * k, i) + bytes);
  }
};

// B is the transpose of what is in the tile: each of its columns is a row there.
template <class Layout, int K_BLOCKS>
struct ColumnsOfB : Blocks<Layout, Quarters::COLUMNS_FIRST, K_BLOCKS> {
  using Blocks<Layout, Quarters::COLUMNS_FIRST, K_BLOCKS>::Blocks;
  __device__ void operator()(uint32_t (&frag)[4], int j, int k, int bytes = 0) const {
    ptx::ldmatrix_x4(frag, this->address(16 * j, k) + bytes);
  }
};

// B as it is.
template <class Layout, int N_BLOCKS>
struct RowsOfB : Blocks<Layout, Quarters::ROWS_FIRST, N_BLOCKS> {
  using Blocks<Layout, Quarters::ROWS_FIRST, N_BLOCKS>::Blocks;
  __device__ void operator()(uint32_t (&frag)[4], int j, int k, int bytes = 0) const {
    ptx::ldmatrix_x4_trans(frag, this->address(16 * k, j) + bytes);
  }
};

// An operand in the like tile `BYTES` further on: a constant of the load, no address of its own.
template <int BYTES, class Operand>
struct Further {
  const Operand& operand;
  __device__ void operator()(uint32_t (&frag)[4], int i, int k) const { operand(frag, i, k, BYTES); }
};

template <int BYTES, class Operand>
__device__ __forceinline__ Further<BYTES, Operand> further(const Operand& operand) {
  return {operand};
}

// acc += A B over K_BLOCKS blocks of 16. Each fragment of B meets all M_TILES rows of A at once. After each
// block `beside(k)` is called: arithmetic that has nothing to do with the product, to be done while the
// tensor cores are busy.
template <class Element, int K_BLOCKS, int M_TILES, int N_TILES, class A, class B, class Beside>
__device__ __forceinline__ void multiply(float (&acc)[M_TILES][N_TILES][4], const A& load_a, const B& load_b,
                                         const Beside& beside) {
  static_assert(N_TILES % 2 == 0);
#pragma unroll
  for (int k = 0; k < K_BLOCKS; ++k) {
    uint32_t a[M_TILES][4];
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) load_a(a[i], i, k);
#pragma unroll
    for (int j = 0; j < N_TILES / 2; ++j) {
      uint32_t b[4];
      load_b(b, j, k);
#pragma unroll
      for (int i = 0; i < M_TILES; ++i) {
        ptx::mma_m16n8k16<Element>(acc[i][2 * j], a[i], b[0], b[1]);
        ptx::mma_m16n8k16<Element>(acc[i][2 * j + 1], a[i], b[2], b[3]);
      }
    }
    beside(k);
  }
}

template <class Element, int K_BLOCKS, int M_TILES, int N_TILES, class A, class B>
__device__ __forceinline__ void multiply(float (&acc)[M_TILES][N_TILES][4], const A& load_a, const B& load_b) {
  multiply<Element, K_BLOCKS>(acc, load_a, load_b, [](int) {});
}

template <int M_TILES, int N_TILES>
__device__ __forceinline__ void clear(float (&acc)[M_TILES][N_TILES][4]) {
#pragma unroll
  for (int i = 0; i < M_TILES; ++i)
#pragma unroll
    for (int j = 0; j < N_TILES; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r) acc[i][j][r] = 0.f;
}

// The 16-bit form of accumulators as operand A of the next product: columns become K.
template <class Element, int M_TILES, int N_TILES>
struct PackedA {
  uint32_t frag[M_TILES][N_TILES / 2][4];
  __device__ explicit PackedA(const float (&acc)[M_TILES][N_TILES][4]) {
#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
      for (int j = 0; j < N_TILES / 2; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float(&c)[4] = acc[i][2 * j + r / 2];
          frag[i][j][r] = pack<Element>(c[r % 2 * 2], c[r % 2 * 2 + 1]);
        }
  }
  __device__ void operator()(uint32_t (&a)[4], int i, int k) const {
#pragma unroll
    for (int r = 0; r < 4; ++r) a[r] = frag[i][k][r];
  }
};

// A lane's places for accumulators of 16 x 8 in a tile, from (first_row, first_col) on. N_TILES is how many
// lie side by side in what this warp writes: first_col is a multiple of 8 * N_TILES.
template <class Layout, int N_TILES>
struct AccPlaces {
  // As for Blocks.
  static constexpr bool ALIGNED = Layout::CHUNKS % N_TILES == 0 || N_TILES % Layout::CHUNKS == 0;
  uint32_t base;
  int first_chunk;

  __device__ AccPlaces(const SmemTile<Layout>& tile, int first_row, int first_col, int lane) {
    base = smem_address(&tile) + Layout::chunk_offset(first_row + lane / 4, 0) + lane % 4 * 4;
    first_chunk = first_col / 8;
    if (ALIGNED) base = step(base, first_chunk);
  }

  __device__ static uint32_t step(uint32_t base, int chunk) {
    return (base ^ (chunk % Layout::CHUNKS * 16)) + chunk / Layout::CHUNKS * Layout::PAGE_BYTES;
  }

  // Writes two numbers of a row `row` rows (a multiple of 8) and `j` accumulators from the first.
  __device__ void store(int row, int j, uint32_t packed) const {
    ptx::store_shared(step(base, ALIGNED ? j : first_chunk + j) + row * Layout::ROW_BYTES, packed);
  }

  template <class Element>
  __device__ void store_acc(int i, int j, const float (&acc)[4]) const {
    store(16 * i, j, pack<Element>(acc[0], acc[1]));
    store(16 * i + 8, j, pack<Element>(acc[2], acc[3]));
  }
};

// Writes accumulators into a tile from (first_row, first_col) on, rounded.
template <class Element, class Layout, int M_TILES, int N_TILES>
__device__ __forceinline__ void store_accs(SmemTile<Layout>& tile, const float (&acc)[M_TILES][N_TILES][4],
                                           int first_row, int first_col, int lane) {
  const AccPlaces<Layout, N_TILES> places(tile, first_row, first_col, lane);
#pragma unroll
  for (int i = 0; i < M_TILES; ++i)
#pragma unroll
    for (int j = 0; j < N_TILES; ++j) places.template store_acc<Element>(i, j, acc[i][j]);
}

template <int M_TILES, int N_TILES>
__device__ __forceinline__ void scale(float (&acc)[M_TILES][N_TILES][4], float factor) {
#pragma unroll
  for (int i = 0; i < M_TILES; ++i)
#pragma unroll
    for (int j = 0; j < N_TILES; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r) acc[i][j][r] *= factor;
}
