// The tiles of a tcgen05 GEMM: shared memory, a CTA's place in its cluster, which tile comes next.
//
// P is the struct of constants that lower/gemm_source.py writes of a GemmPlan; X and Y are the
// operands on the MMA's rows and columns (lower/gemm_plan.py).
#pragma once
#include "tcgen05.cuh"

enum BsKind { BS_MXF4NVF4 = 0, BS_MXF4 = 1, BS_MXF8F6F4 = 2 };
enum BsOut { BS_BF16 = 0, BS_F16 = 1, BS_F32 = 2 };
enum BsRole { BS_EPILOGUE_WARPS = 4, BS_LOAD_WARP = 4, BS_MMA_WARP = 5, BS_GEMM_THREADS = 192 };

__host__ __device__ constexpr int bs_ceil(int a, int b) { return (a + b - 1) / b; }

// What follows from a plan.
template <class P>
struct BsGemm {
  static constexpr int CLUSTER = P::CX * P::CY * P::SPLIT;
  static constexpr int STEPS = P::BLOCK_K / P::STEP;            // MMAs of a stage
  static constexpr int PER_ATOM = 4 * P::BLOCK / P::STEP;       // MMAs of a 128x4 tile of scales
  static constexpr int K_STAGES = bs_ceil(P::K, P::BLOCK_K);    // stages of a tile
  static constexpr int LAST_STEPS = bs_ceil(P::K - (K_STAGES - 1) * P::BLOCK_K, P::STEP);
  static constexpr int ROW_TILE = P::SWAP ? P::CY * P::MMA_N : P::CX * 128;  // of a cluster
  static constexpr int COL_TILE = P::SWAP ? P::CX * 128 : P::CY * P::MMA_N;
  static constexpr int COL_TILES = bs_ceil(P::N, COL_TILE);
  static constexpr int B_ATOMS = bs_ceil(P::N, 128);
  // The 4-bit operand of mxf8f6f4 is spread out by TMA; its rows must then be multiples of 128
  // elements.  Others are loaded as bytes, and spread out by the warp that loads.
  static constexpr bool UNPACK = P::KIND == BS_MXF8F6F4 && P::B_BITS == 4 && P::K % 128 != 0;
  static constexpr int SX_BYTES = 512 * P::ATOMS_K, SY_BYTES = 512 * P::ATOMS_K * P::Y_ATOMS;
  // Bytes in shared memory of each part.
  static constexpr int X = 0, Y = X + P::STAGES * P::X_BYTES, OUT = Y + P::STAGES * P::Y_BYTES;
  static constexpr int SX = OUT + P::STORE_BYTES, SY = SX + P::STAGES * SX_BYTES;
  static constexpr int TABLE = SY + P::STAGES * SY_BYTES, TOTAL = TABLE + 16 * P::EXPERTS;
  static constexpr int FULL = TOTAL + 16, EMPTY = FULL + 8 * P::STAGES;
  static constexpr int PACKED = EMPTY + 8 * P::STAGES, DONE = PACKED + 8 * P::STAGES;
  static constexpr int FREE = DONE + 16, TMEM = FREE + 16, SCAN = TMEM + 16, END = SCAN + 96;
  // Columns of tensor memory.
  static constexpr int SFX = P::ACC * P::MMA_N - P::OVERLAP, SFY = SFX + 4 * P::ATOMS_K;
  // Barriers that say that an accumulator is free: one where the accumulators share columns.
  static constexpr int FREES = P::OVERLAP > 0 ? 1 : P::ACC;
  static_assert(END <= P::SMEM_BYTES, "barriers do not fit in CTRL_BYTES");
};

// Where this CTA stands; `smem` is the address of its shared memory.
template <class P>
struct BsCta {
  uint32_t smem, rank;
  int x, y, split;  // along X, along Y, along K

  BS_INLINE BsCta(uint32_t smem_) : smem(smem_) {
    rank = BsGemm<P>::CLUSTER > 1 ? bs_cluster_rank() : 0;
    x = rank % P::CX, y = P::SPLIT > 1 ? 0 : rank / P::CX, split = P::SPLIT > 1 ? rank : 0;
  }
  BS_INLINE bool leads() const { return rank % P::G == 0; }  // issues the MMAs of its pair
};

// A position in the ring of stages.
template <int STAGES>
struct BsRing {
  uint32_t stage = 0, parity = 0;
  BS_INLINE void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// One tile of one CTA.
struct BsTile {
  int x_row, y_row;    // first rows in the maps of X and Y
  int x_atom, y_atom;  // first row of 128x4 tiles in the maps of scales
  int y_column;        // column of Y's scales in tensor memory: where in y_atom the rows start
  int row, col;        // first row and column of d
  int rows;            // rows of d from `row` on that belong to the tile's expert; may be < 0
  int expert;
  bool once;           // no other row tile reads the same rows of b
};

template <class P>
struct BsTiles {
  uint32_t smem;
  int x, y, m, total;

  BS_INLINE BsTiles(const BsCta<P> &cta, int m_) : smem(cta.smem), x(cta.x), y(cta.y), m(m_) {
    using L = BsGemm<P>;
    if constexpr (P::EXPERTS > 0) total = entry(P::EXPERTS).x * L::COL_TILES;
    else total = bs_ceil(m, L::ROW_TILE) * L::COL_TILES;
  }

  // {first row tile, first row, first atom of scales, expert}; the last one, {row tiles, rows,
  // atoms, number of entries}, lies behind the others and at number EXPERTS.
  BS_INLINE int4 entry(int i) const {
    int4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(smem + BsGemm<P>::TABLE + 16 * i));
    return v;
  }

  // Row and column tile number t of row_tiles x COL_TILES: bands of GROUP along one index, and in
  // a band the other index runs last.
  BS_INLINE void order(int t, int row_tiles, int &row_tile, int &col_tile) const {
    constexpr bool rows_run = (P::RASTER_X != 0) != (P::SWAP != 0);
    constexpr int cols = BsGemm<P>::COL_TILES;
    int run = rows_run ? row_tiles : cols, other = rows_run ? cols : row_tiles;
    int band = t / (P::GROUP * run), rest = t - band * (P::GROUP * run);
    int size = P::GROUP == 1 ? 1 : min(P::GROUP, other - band * P::GROUP);
    int along = rest / size, across = band * P::GROUP + rest % size;
    row_tile = rows_run ? along : across;
    col_tile = rows_run ? across : along;
  }

  BS_INLINE BsTile at(int t) const {
    using L = BsGemm<P>;
    int row_tile, col_tile, rows = m, first = 0, atom = 0;
    BsTile tile;
    tile.expert = 0;
    if constexpr (P::EXPERTS > 0) {
      int q = t / L::COL_TILES, low = 0, high = entry(P::EXPERTS).w;
      while (high - low > 1) {
        int middle = (low + high) / 2;
        if (entry(middle).x <= q) low = middle;
        else high = middle;
      }
      int4 own = entry(low), next = entry(low + 1);
      first = own.y, rows = next.y - own.y, atom = own.z, tile.expert = own.w;
      order(t - own.x * L::COL_TILES, next.x - own.x, row_tile, col_tile);
    } else {
      order(t, bs_ceil(m, L::ROW_TILE), row_tile, col_tile);
    }
    int x_tile = P::SWAP ? col_tile : row_tile, y_tile = P::SWAP ? row_tile : col_tile;
    int x_first = (x_tile * P::CX + x) * 128, y_first = (y_tile * P::CY + y) * P::MMA_N;
    int row = P::SWAP ? y_first : x_first;
    tile.once = rows <= L::ROW_TILE;
    tile.row = first + row, tile.rows = rows - row, tile.col = P::SWAP ? x_first : y_first;
    int b_row = tile.expert * P::N, b_atom = tile.expert * L::B_ATOMS;
    tile.x_row = x_first + (P::SWAP ? b_row : first);
    tile.y_row = y_first + (P::SWAP ? first : b_row);
    tile.x_atom = x_first / 128 + (P::SWAP ? b_atom : atom);
    tile.y_atom = y_first / 128 + (P::SWAP ? atom : b_atom);
    tile.y_column = y_first % 128 / 32;
    return tile;
  }

  // Columns of the MMA: with tokens on them, no more than there are, in steps of 16.
  BS_INLINE int columns(const BsTile &tile) const {
    if (!P::SWAP) return P::MMA_N;
    return min(P::MMA_N, max(tile.rows + 15, 16) & ~15);
  }
};

// Inclusive sum over the lanes of a warp.
BS_INLINE int bs_warp_scan(int value, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    int other = __shfl_up_sync(0xFFFFFFFFu, value, d);
    if (lane >= d) value += other;
  }
  return value;
}

// The table of experts that have rows, by all threads: offsets[EXPERTS + 1] are row ranges, and no
// row is taken from m on.
template <class P>
BS_INLINE void bs_build_table(char *smem, const int *offsets, int m) {
  using L = BsGemm<P>;
  constexpr int EACH = bs_ceil(P::EXPERTS, BS_GEMM_THREADS), WARPS = BS_GEMM_THREADS / 32;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = threadIdx.x * EACH;
  int bound[EACH + 1];
#pragma unroll
  for (int i = 0; i <= EACH; ++i) bound[i] = min(m, offsets[min(first + i, P::EXPERTS)]);
  int sum[3] = {0, 0, 0};  // row tiles, atoms, entries
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    int rows = max(0, bound[i + 1] - bound[i]);
    sum[0] += bs_ceil(rows, L::ROW_TILE), sum[1] += bs_ceil(rows, 128), sum[2] += rows > 0;
  }
  int before[3], (*scan)[WARPS] = reinterpret_cast<int(*)[WARPS]>(smem + L::SCAN);
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    int with = bs_warp_scan(sum[j], lane);
    before[j] = with - sum[j];
    if (lane == 31) scan[j][warp] = with;
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 3; ++j)
    for (int w = 0; w < warp; ++w) before[j] += scan[j][w];
  int4 *table = reinterpret_cast<int4 *>(smem + L::TABLE);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    int rows = max(0, bound[i + 1] - bound[i]);
    if (rows > 0) table[before[2]] = make_int4(before[0], bound[i], before[1], first + i);
    before[0] += bs_ceil(rows, L::ROW_TILE), before[1] += bs_ceil(rows, 128), before[2] += rows > 0;
  }
  if (threadIdx.x == BS_GEMM_THREADS - 1) {
    int4 last = make_int4(before[0], bound[EACH], before[1], before[2]);
    table[before[2]] = last;
    table[P::EXPERTS] = last;
  }
  __syncthreads();
}
