// Tiles of rows of x that experts have, and copies of such rows.
//
// native/moe/moe_sort.cuh writes the table: blocks of an expert's rows, (expert << 16 | rows, first
// sorted row, the expert's first block, its number of blocks).
#pragma once
#include "mma.cuh"

// `left` rows of x from sorted row `first` on, times tile `col` of rows of the weight of `expert`.
struct BsGroupTile {
  int expert, col, first, left;
};

// Tiles of an expert follow each other, its blocks of rows fastest: weights come once from memory.
BS_INLINE BsGroupTile bs_group_tile(const int4 *blocks, int tile, int col_tiles) {
  int4 any = __ldg(blocks + tile / col_tiles);  // of the right expert
  int local = tile - any.z * col_tiles;
  int4 mine = __ldg(blocks + any.z + local % any.w);
  return {mine.x >> 16, local / any.w, mine.y, mine.x & 0xFFFF};
}

// `mine` of COUNT rows, STEP apart: of each 16 bytes of BLOCKS blocks of 64 positions, a block to
// PITCH bytes behind the one before.  `source`: where the rows begin, in 16 bytes.  Rows are swizzled:
// each STEP, an odd multiple of 4, flips bit 2 of what is added to the number of a piece.
template <int COUNT, int STEP, int BLOCKS, int PITCH>
BS_INLINE void bs_async_pieces(uint32_t to, const uint4 *from, const uint32_t (&source)[COUNT], int mine) {
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      if (i >= mine) break;
      bs_cp_async16_whole((i % 2 ? to ^ 64 : to) + b * PITCH + i * STEP * 128,
                          from + (source[i] + b * 8));
    }
  }
}

// The same of rows of bytes, 64 positions of which take 64 bytes: `piece` 0 to 7 of each two blocks,
// PITCH bytes apart; of the last one of an odd number half of the lanes.  Each STEP flips bit 1 of the
// number of a piece.
template <int COUNT, int STEP, int BLOCKS, int PITCH>
BS_INLINE void bs_async_halves(uint32_t to, const uint4 *from, const uint32_t (&source)[COUNT], int mine,
                               int piece) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    if (i >= mine) break;
    const uint4 *row = from + source[i];
#pragma unroll
    for (int b = 0; b < BLOCKS; b += 2)
      if (b + 1 < BLOCKS || piece < 4)
        bs_cp_async16_whole((i % 2 ? to ^ 32 : to) + b * PITCH + i * STEP * 64, row + b * 4);
  }
}

// What a table has for the rows of a tile: lane l has those of rows l, l + 32, ...
template <int COUNT>
BS_INLINE void bs_load_slots(int (&slots)[COUNT], const int *table, int rows, int lane) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) slots[i] = 32 * i + lane < rows ? __ldg(table + 32 * i + lane) : 0;
}

// A row that lies anywhere, also in another GPU's memory.
BS_INLINE char *bs_row_at(const int64_t *table, int row) {
  return reinterpret_cast<char *>(__ldg(reinterpret_cast<const long long *>(table) + row));
}

// All lanes: that of `row`, of the 8 from 8 n on.
template <int COUNT>
BS_INLINE int bs_slot(const int (&slots)[COUNT], int n, int row) {
  return __shfl_sync(0xFFFFFFFFu, slots[n / 4], row % 32);
}
