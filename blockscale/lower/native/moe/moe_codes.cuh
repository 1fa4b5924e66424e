// Rows of an MoE layer before GEMMs of two quantised operands: in the experts' order, codes and scales.
//
// An expert's rows follow each other; its scales begin at a 128x4 tile of their own.  Rows that fill
// its last tile have scales that nobody wrote: they make sums that nobody stores.
#pragma once
#include "fp4.cuh"
#include "moe_sort.cuh"

template <int CTAS>
BS_INLINE void bs_moe_sort_offsets(const BsMoeSort &s) {
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
  void *codes;           // [rows, pitch] elements, zeros from cols on
  uint8_t *scales;       // [tiles of 128 rows, pitch / BLOCK / 4, 512]
  int *ready;            // [groups]: 0
  int top_k, cols, pitch, groups;
};

// A block of 16-bit elements as each kind of product has it: its scale's byte, and its codes.
template <class F>
struct BsCodesNvfp4 {
  static constexpr int BLOCK = 16, WORDS = 2;
  static BS_INLINE int encode(uint32_t *codes, const uint32_t *w, float g) {
    int byte = bs_scale_nvfp4<true>(bs_amax<F, BLOCK>(w, 0), g);
    bs_encode<F, BLOCK, BS_NVFP4, BS_OWN>(codes, w, bs_divisor_nvfp4(byte, g), byte);
    return byte;
  }
};

template <class F>
struct BsCodesMxfp4 {
  static constexpr int BLOCK = 32, WORDS = 4;
  static BS_INLINE int encode(uint32_t *codes, const uint32_t *w, float g) {
    int byte = bs_scale_mxfp4_ceil(bs_amax<F, BLOCK>(w, 0), g);
    bs_encode<F, BLOCK, BS_MXFP4, BS_CLAMP>(codes, w, bs_divisor_mxfp4(byte, g), 1);
    return byte;
  }
};

template <class F>
struct BsCodesMxfp8 {
  static constexpr int BLOCK = 32, WORDS = 8;
  static BS_INLINE int encode(uint32_t *codes, const uint32_t *w, float g) {
    int byte = bs_scale_mxfp8(bs_amax<F, BLOCK>(w, 0));
    bs_encode_mxfp8<F, BLOCK>(codes, w, bs_ue8m0_value(byte));
    return byte;
  }
};

// A thread for a block of columns; four neighbours make a word of scales.
template <class C>
BS_INLINE void bs_moe_gather(const BsMoeGather &p) {
  constexpr int BLOCK = C::BLOCK, WORDS = C::WORDS;
  bs_grid_wait();
  bs_grid_launch();
  for (int i = blockIdx.x * BS_TEAM + threadIdx.x; i < p.groups; i += gridDim.x * BS_TEAM) p.ready[i] = 0;
  int blocks = p.pitch / BLOCK, lane = threadIdx.x % 32, step = gridDim.x * BS_TEAM;
  int all = static_cast<int>(bs_load4<BS_KEEP>(p.offsets + p.ids.experts)) * blocks;
  float g = p.scale == nullptr ? 1.0f : __uint_as_float(bs_load4<BS_KEEP>(p.scale));
  for (int i = blockIdx.x * BS_TEAM + threadIdx.x; i - lane < all; i += step) {  // whole warps
    bool there = i < all;
    int row = there ? i / blocks : 0, block = i - row * blocks;
    int slot = static_cast<int>(bs_load4<BS_KEEP>(p.order + row)), expert = p.ids.at(slot);
    uint32_t w[BLOCK / 2] = {}, packed[WORDS];
    size_t from = static_cast<size_t>(slot / p.top_k) * p.cols + block * BLOCK;
    const uint16_t *x = static_cast<const uint16_t *>(p.hidden) + from;
    if (there && block * BLOCK < p.cols) bs_load<2 * BLOCK, BS_KEEP>(w, x);
    int byte = C::encode(packed, w, g);
    uint32_t word = static_cast<uint32_t>(byte) << (lane % 4 * 8);
    word |= __shfl_xor_sync(~0u, word, 1);
    word |= __shfl_xor_sync(~0u, word, 2);
    if (!there) continue;
    size_t to = static_cast<size_t>(row) * blocks + block;
    bs_store<4 * WORDS, BS_KEEP>(static_cast<uint32_t *>(p.codes) + WORDS * to, packed);
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
