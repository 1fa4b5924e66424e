// Rows of an MoE layer before GEMMs of two quantised operands: in the experts' order, codes and scales.
//
// An expert's rows follow each other; its scales begin at a 128x4 tile of their own.  Rows that fill
// its last tile have scales that nobody wrote: they make sums that nobody stores.
#pragma once
#include "fp4.cuh"
#include "moe_sort.cuh"

template <int CTAS>
BS_INLINE void bs_moe_sort_fp4(const BsMoeSort &s) {
  extern __shared__ __align__(16) char bs_sort_shared[];
  bs_grid_wait();
  bs_grid_launch();
  bs_moe_sort<CTAS>(s, bs_sort_shared);
}

struct BsMoeGather {
  const void *hidden;    // [tokens, cols]
  const float *scale;    // null: 1
  BsMoeIds ids;
  const int *order, *offsets, *atoms;  // as BsMoeSort has them
  int *place;            // [slots]: the row of a slot
  void *codes;           // [rows, cols / 2]
  uint8_t *scales;       // [tiles of 128 rows, cols / 64, 512]
  int top_k, cols;
};

// A thread for a block of 16 columns; four neighbours make a word of scales.
template <class F, int FORMAT>
BS_INLINE void bs_moe_gather(const BsMoeGather &p) {
  constexpr int BLOCK = 16;
  bs_grid_wait();
  bs_grid_launch();
  int blocks = p.cols / BLOCK, lane = threadIdx.x % 32, step = gridDim.x * BS_TEAM;
  int all = static_cast<int>(bs_load4<BS_KEEP>(p.offsets + p.ids.experts)) * blocks;
  float g = p.scale == nullptr ? 1.0f : __uint_as_float(bs_load4<BS_KEEP>(p.scale));
  for (int i = blockIdx.x * BS_TEAM + threadIdx.x; i - lane < all; i += step) {  // whole warps
    bool there = i < all;
    int row = there ? i / blocks : 0, block = i - row * blocks;
    int slot = static_cast<int>(bs_load4<BS_KEEP>(p.order + row)), expert = p.ids.at(slot);
    uint32_t w[BLOCK / 2] = {};
    size_t from = static_cast<size_t>(slot / p.top_k) * blocks + block;
    const uint4 *x = static_cast<const uint4 *>(p.hidden) + 2 * from;
    if (there) bs_load<16, BS_KEEP>(w, x), bs_load<16, BS_KEEP>(w + 4, x + 1);
    int byte = bs_scale_nvfp4<true>(bs_amax<F, BLOCK>(w, 0), g);
    uint32_t packed[BLOCK / 8];
    bs_encode<F, BLOCK, FORMAT, BS_OWN>(packed, w, bs_divisor_nvfp4(byte, g), byte);
    uint32_t word = static_cast<uint32_t>(byte) << (lane % 4 * 8);
    word |= __shfl_xor_sync(~0u, word, 1);
    word |= __shfl_xor_sync(~0u, word, 2);
    if (!there) continue;
    size_t to = static_cast<size_t>(row) * blocks + block;
    bs_store<8, BS_KEEP>(static_cast<uint2 *>(p.codes) + to, packed);
    if (block % 4 == 0) {
      int own = row - static_cast<int>(bs_load4<BS_KEEP>(p.offsets + expert));
      int tile = static_cast<int>(bs_load4<BS_KEEP>(p.atoms + expert)) + own / 128;
      size_t at = (static_cast<size_t>(tile) * (blocks / 4) + block / 4) * 512;
      at += own % 32 * 16 + own % 128 / 32 * 4;
      bs_store<4, BS_KEEP>(p.scales + at, &word);
    }
    if (block == 0) p.place[slot] = row;
  }
}
