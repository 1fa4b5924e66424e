// The tiles of a tcgen05 GEMM, in the order in which clusters take them, and what its roles share.
//
// blockscale/lower/pipe prints the kernels that call these functions.  Six warps: 0 to 3 store, 4
// loads, 5 multiplies.  CTAs are persistent: cluster c of C takes the tiles c, c + C, ...; with
// split-K it takes one, so that the grid has at least as many clusters as there are tiles.
// A NaN in scales matters to the row that it belongs to, and only there, except in one case: K a
// multiple of 32 but not of 64, in kinds of 4-bit numbers.  There the last MMA covers 32 elements
// beyond K, whose codes are zero (TMA fills them) and whose scales lie in the padding of their
// atom: these bytes must not be NaN, and blockscale writes 0.
#pragma once
#include "fp4.cuh"
#include "tcgen05.cuh"

__host__ __device__ constexpr int bs_ceil(int a, int b) { return (a + b - 1) / b; }

// ---- Order --------------------------------------------------------------------------------------

// Row and column tile number t of row_tiles x col_tiles: bands of BAND along one index, and in a
// band the other index runs last.
template <int BAND, bool ROWS_RUN>
BS_INLINE void bs_order(int t, int row_tiles, int col_tiles, int &row_tile, int &col_tile) {
  int run = ROWS_RUN ? row_tiles : col_tiles, other = ROWS_RUN ? col_tiles : row_tiles;
  int band = t / (BAND * run), rest = t - band * (BAND * run);
  int size = BAND == 1 ? 1 : min(BAND, other - band * BAND);
  int along = rest / size, across = band * BAND + rest % size;
  row_tile = ROWS_RUN ? along : across;
  col_tile = ROWS_RUN ? across : along;
}

// ---- Experts ------------------------------------------------------------------------------------

// An expert that has rows: its first row tile and how many it has, its first row and its rows, its
// first 128x4 tile of scales.
struct BsExpert {
  int tile, tiles, row, rows, atom, expert;
};

// {first row tile, first row, first atom of scales, expert}; the last one, {row tiles, rows, atoms,
// number of entries}, lies behind the others and at number EXPERTS.
BS_INLINE int4 bs_expert_entry(uint32_t table, int i) {
  int4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(table + 16 * i));
  return v;
}

// The expert of a row tile.
BS_INLINE BsExpert bs_expert_of(uint32_t table, int experts, int row_tile) {
  int low = 0, high = bs_expert_entry(table, experts).w;
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (bs_expert_entry(table, middle).x <= row_tile) low = middle;
    else high = middle;
  }
  int4 own = bs_expert_entry(table, low), next = bs_expert_entry(table, low + 1);
  return {own.x, next.x - own.x, own.y, next.y - own.y, own.z, own.w};
}

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
// row is taken from m on.  ROW_TILE: rows of a cluster's tile; `scan` holds sums of warps.
template <int EXPERTS, int ROW_TILE, int THREADS>
BS_INLINE void bs_build_table(char *place, char *sums, const int *offsets, int m) {
  constexpr int EACH = bs_ceil(EXPERTS, THREADS), WARPS = THREADS / 32;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = threadIdx.x * EACH;
  int bound[EACH + 1];
#pragma unroll
  for (int i = 0; i <= EACH; ++i) bound[i] = min(m, offsets[min(first + i, EXPERTS)]);
  int sum[3] = {0, 0, 0};  // row tiles, atoms, entries
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    int rows = max(0, bound[i + 1] - bound[i]);
    sum[0] += bs_ceil(rows, ROW_TILE), sum[1] += bs_ceil(rows, 128), sum[2] += rows > 0;
  }
  int before[3], (*scan)[WARPS] = reinterpret_cast<int(*)[WARPS]>(sums);
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
  int4 *table = reinterpret_cast<int4 *>(place);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    int rows = max(0, bound[i + 1] - bound[i]);
    if (rows > 0) table[before[2]] = make_int4(before[0], bound[i], before[1], first + i);
    before[0] += bs_ceil(rows, ROW_TILE), before[1] += bs_ceil(rows, 128), before[2] += rows > 0;
  }
  if (threadIdx.x == THREADS - 1) {
    int4 last = make_int4(before[0], bound[EACH], before[1], before[2]);
    table[before[2]] = last;
    table[EXPERTS] = last;
  }
  __syncthreads();
}

// ---- One GEMM after another ---------------------------------------------------------------------

// A warp has stored its part of some rows; what its other lanes stored counts too.
BS_INLINE void bs_signal_rows(int *ready) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(ready) : "memory");
}

// Until `many` warps have; what they stored may then be loaded by TMA.
BS_INLINE void bs_await_rows(const int *ready, uint32_t many) {
  uint32_t found;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(ready) : "memory");
  } while (found < many);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// ---- Packed codes -------------------------------------------------------------------------------

// Bytes of 16 codes, one code in 4 bits, to 8 bytes of each 16 in rows of 128 bytes, swizzled.
// The packed rows lie in the second half of `rows`; group after group of 8 rows takes no more room
// than what has been read.  By a warp.
template <int ROWS>
BS_INLINE void bs_spread_rows(uint32_t rows, int lane) {
  uint32_t packed = rows + ROWS * 64 + lane * 16;
#pragma unroll 4
  for (int r = 0; r < ROWS; r += 8, packed += 512) {
    uint4 v = bs_load16_shared(packed);
    __syncwarp();
    int row = lane / 4, chunk = lane % 4 * 2;
    uint32_t to = rows + (r + row) * 128;
    bs_store16_shared(to + 16 * (chunk ^ row), make_uint4(v.x, v.y, 0, 0));
    bs_store16_shared(to + 16 * (chunk + 1 ^ row), make_uint4(v.z, v.w, 0, 0));
    __syncwarp();
  }
}

// ---- Elements -----------------------------------------------------------------------------------

// COUNT neighbours of 4 bytes from `from` on, those below `left`; the others are 0.  `left` and the
// address of the first are multiples of 4 elements where ALIGNED, up to the base of the tensor.
template <int COUNT, bool ALIGNED>
BS_INLINE void bs_load_run(float *to, const float *from, int left) {
  if (ALIGNED && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
      to[i] = to[i + 1] = to[i + 2] = to[i + 3] = 0.0f;
      if (i < left) bs_load<16, BS_KEEP>(to + i, from + i);
    }
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      to[i] = i < left ? __uint_as_float(bs_load4<BS_KEEP>(from + i)) : 0.0f;
  }
}

// The same of 16-bit numbers of class F, widened; 8 of them are 16 bytes, 4 are loaded as 8.
template <class F, int COUNT, bool ALIGNED>
BS_INLINE void bs_load_run_16(float *to, const uint16_t *from, int left) {
  constexpr int STEP = COUNT % 8 == 0 ? 8 : 4;  // a piece of split K has 4
  static_assert(COUNT % STEP == 0 || !ALIGNED, "whole loads");
  if (ALIGNED && reinterpret_cast<uintptr_t>(from) % (2 * STEP) == 0) {
#pragma unroll
    for (int i = 0; i + STEP <= COUNT; i += STEP) {
      uint32_t words[4] = {0, 0, 0, 0};
      if (i < left) bs_load<2 * STEP, BS_KEEP>(words, from + i);
#pragma unroll
      for (int j = 0; j < STEP; ++j) to[i + j] = F::at(words, j);
    }
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) to[i] = i < left ? F::lo(from[i]) : 0.0f;
  }
}

BS_INLINE void bs_store_element(uint8_t *to, uint32_t code) { *to = static_cast<uint8_t>(code); }
BS_INLINE void bs_store_element(uint16_t *to, uint32_t code) { *to = static_cast<uint16_t>(code); }
BS_INLINE void bs_store_element(float *to, uint32_t code) { *to = __uint_as_float(code); }

// 2 or 4 bytes to shared memory.
template <int BYTES>
BS_INLINE void bs_store_shared(uint32_t to, uint32_t code) {
  if constexpr (BYTES == 2)
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(static_cast<uint16_t>(code)) : "memory");
  else asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(code) : "memory");
}

// BYTES neighbours of a row, from words in registers, WIDE at a time; from byte `left` on none.
template <int BYTES, int WIDE>
BS_INLINE void bs_store_run(void *to, const uint32_t *from, int left) {
  char *at = static_cast<char *>(to);
#pragma unroll
  for (int i = 0; i < BYTES; i += WIDE) {
    if (i >= left) continue;
    if constexpr (WIDE >= 4) bs_store<WIDE, BS_KEEP>(at + i, from + i / 4);
    else *reinterpret_cast<uint16_t *>(at + i) =
        static_cast<uint16_t>(i % 4 ? from[i / 4] >> 16 : from[i / 4]);
  }
}

// SPAN bytes of a lane's row to rows in shared memory, 16-byte pieces swizzled as TMA does.
template <int SPAN>
BS_INLINE void bs_stage_run(uint32_t rows, const uint32_t *w, int lane) {
  int turn = SPAN == 128 ? lane % 8 : SPAN == 64 ? lane / 2 % 4 : lane / 4 % 2;
#pragma unroll
  for (int i = 0; i < SPAN / 16; ++i)
    bs_store16_shared(rows + lane * SPAN + 16 * (i ^ turn),
                      make_uint4(w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]));
}

// The sums of one piece of 4 columns, over MANY CTAs of the cluster in their order.
template <int MANY>
BS_INLINE void bs_sum_cluster(float (&sum)[4], uint32_t piece) {
#pragma unroll
  for (int s = 0; s < MANY; ++s) {
    uint4 v = bs_load16_cluster(bs_map_rank(piece, s));
    const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      sum[i] = s == 0 ? __uint_as_float(word[i]) : __fadd_rn(sum[i], __uint_as_float(word[i]));
  }
}
