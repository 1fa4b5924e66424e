// Rows of activations as codes and scales, laid out as specs/plans/coded.py says: of who sends them,
// and of who multiplies them.  The codes are those of moe_rows.cuh and of the quantise op.
#pragma once
#include "fp4.cuh"

enum BsMoeAct {
  BS_ACT_NONE,
  BS_ACT_FP8,
  BS_ACT_FP8_TENSOR,
  BS_ACT_NVFP4,
  BS_ACT_MXFP4,  // of bfloat16, as the next one: powers of two are not all numbers of float16
  BS_ACT_MXFP8,
};

// Larger magnitude of a word's two numbers, as the bits of a 16-bit float.
BS_INLINE uint32_t bs_word_most(uint32_t w) { return max(w & 0x7FFFu, w >> 16 & 0x7FFFu); }

// x over the factor of its row; zeros where that is 0.
BS_INLINE float bs_over(float x, float factor) { return factor == 0.0f ? 0.0f : __fdiv_rn(x, factor); }

// The factor of a CTA's row, of which each thread has WORDS, zeros where there are none.
template <class F, int WORDS>
BS_INLINE float bs_coded_factor(const uint32_t *words) {
  __shared__ uint32_t most[32];
  uint32_t own = 0;
#pragma unroll
  for (int i = 0; i < WORDS; ++i) own = max(own, bs_word_most(words[i]));
  own = __reduce_max_sync(~0u, own);
  if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = own;
  __syncthreads();
  for (int i = 0; i < static_cast<int>(blockDim.x) / 32; ++i) own = max(own, most[i]);
  return __fdiv_rn(F::lo(own), 448.0f);
}

// E4M3 codes of 16 elements.
template <class F>
BS_INLINE void bs_coded_fp8(uint32_t *codes, const uint32_t *w, float factor) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t low = w[2 * i], high = w[2 * i + 1];
    codes[i] = bs_e4m3x2(bs_over(F::lo(low), factor), bs_over(F::hi(low), factor)) |
               bs_e4m3x2(bs_over(F::lo(high), factor), bs_over(F::hi(high), factor)) << 16;
  }
}

// E2M1 codes of two blocks of 16 elements; returns the bytes of their scales, the first one low.
template <class F>
BS_INLINE int bs_coded_nvfp4(uint32_t *codes, const uint32_t *w, float g) {
  int bytes = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int byte = bs_scale_nvfp4<true>(bs_amax<F, 16>(w + 8 * i, 0), g);
    bs_encode<F, 16, BS_NVFP4, BS_OWN>(codes + 2 * i, w + 8 * i, bs_divisor_nvfp4(byte, g), byte);
    bytes |= byte << 8 * i;
  }
  return bytes;
}

// Two E2M1 codes in the low byte of `codes`, times a block scale: exact in 16 bits.
template <class F>
BS_INLINE uint32_t bs_coded_pair(uint32_t codes, float scale) {
  uint32_t bytes = bs_prmt(0x3E3C3800u, 0x46444240u, (codes & 7) | (codes & 0x70));  // 0 .5 1 1.5, 2 3 4 6
  float low = BsF16::lo(bytes << 8 & 0xFF00u), high = BsF16::lo(bytes & 0xFF00u);
  return F::pack(copysignf(__fmul_rn(low, scale), codes & 8 ? -1.0f : 1.0f),
                 copysignf(__fmul_rn(high, scale), codes & 0x80 ? -1.0f : 1.0f));
}

// A row that is read as chunk `chunk` of moe_rows.cuh, 16-bit numbers without the row's factor.
template <class F, int ACT>
struct BsCodedRow {
  const char *row;
  int cols;

  static BS_INLINE size_t bytes(int cols) {
    return ACT == BS_ACT_FP8 ? cols + 16 : (cols / 2 + cols / 16 + 15) & ~15;
  }
  BS_INLINE void load(uint32_t (&w)[4], int chunk) const {
    int first = (chunk & ~7) * 4 + (chunk & 7);
    uint32_t scales = 0;
    if (ACT == BS_ACT_NVFP4 && (chunk & ~7) * 8 < cols) scales = bs_load4<BS_KEEP>(row + cols / 2 + (chunk & ~7) / 2);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      int pair = first + 8 * q;
      if (2 * pair >= cols) {
        w[q] = 0;
      } else if (ACT == BS_ACT_FP8) {
        uint32_t codes = bs_load4<BS_KEEP>(row + (2 * pair & ~3)) >> (pair & 1) * 16;
        w[q] = F::pack(bs_e4m3_value(codes & 0xFF), bs_e4m3_value(codes >> 8 & 0xFF));
      } else {
        uint32_t codes = bs_load4<BS_KEEP>(row + (pair & ~3)) >> (pair & 3) * 8;
        w[q] = bs_coded_pair<F>(codes, bs_e4m3_value(scales >> 8 * q & 0xFF));
      }
    }
  }
  BS_INLINE float factor(float given) const {
    return ACT == BS_ACT_FP8 ? __uint_as_float(bs_load4<BS_KEEP>(row + cols)) : given;
  }
};

// A row of E4M3 codes that is read as chunk `chunk` of 16 codes of moe_rows.cuh.
BS_INLINE void bs_coded_bytes(uint32_t (&codes)[4], const char *row, int cols, int chunk) {
  int first = chunk / 4 * 64 + chunk % 4 * 4;
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    uint32_t word = first + 16 * t < cols ? bs_load4<BS_KEEP>(row + first + 16 * t) : 0;
    codes[t] = bs_prmt(word, 0, 0x3120);
  }
}
