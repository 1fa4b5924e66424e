// Weights of the layout tiles64e to A fragments of bytes (E4M3) or of bfloat16, in registers.
//
// MXFP4, NVFP4: word j of a thread holds the same codes as in tiles64 (moe_decode.cuh): rows g and g + 8,
// k_i = 16 t + 4 j + i.  In each half, the low one of k_0 and k_2, the high one of k_1 and k_3, four nibbles have
// the magnitudes e e m of
//
//   2..0: row g, k_0 (k_1)   6..4: row g, k_2 (k_3)   10..8: row g + 8, k_0 (k_1)   14..12: .., k_2 (k_3)
//
// and the signs of row g are bits 7 and 15, those of row g + 8 bits 3 and 11.  So two bytes of a word
// select four of a table's eight, and signs are in place, or four bits below it.  A register of bytes
// is k_0, k_2, k_1, k_3.  Scales are relative to the row's largest.
//
// MXFP4's largest byte is 237, the least 226: code * 2^(byte - 231) is a normal number of E4M3, 0.5 *
// 2^-5 to 6 * 2^6.
//
// NVFP4 (ops/moe/rounded.py): the low seven bits are the scale's own byte A of E4M3, 16 to 105.  So
// bytes of 0.5, 1, 2, 4 times it are A - 8, A, A + 8, A + 16, and of 1.5, 3, 6 times it, rounded to
// E4M3, B, B + 8, B + 16; B is A + 5, but A + 4 where bit 7 is set.
#pragma once
#include "moe_decode.cuh"

// Bits of a where the mask has them, else of b.
BS_INLINE uint32_t bs_select(uint32_t a, uint32_t mask, uint32_t b) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xE2;" : "=r"(d) : "r"(a), "r"(mask), "r"(b));
  return d;
}

// a & mask, which nvcc does not exchange with a shift that follows: it would mask once more.
BS_INLINE uint32_t bs_mask(uint32_t a, uint32_t mask) {
  uint32_t d;
  asm("and.b32 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(mask));
  return d;
}

// MXFP4 and NVFP4, and INT4 to bfloat16, whose words are those of tiles64.
template <class P, bool INT4_BYTES = P::FORMAT == BS_MOE_INT4 && P::E4M3, bool INT4 = P::FORMAT == BS_MOE_INT4>
struct BsDecodeBytes {
  static constexpr bool E4M3 = P::E4M3, NVFP4 = P::FORMAT == BS_MOE_NVFP4;
  // Of rows g and g + 8: E4M3 of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6 times the scale, of NVFP4 with
  // anything in sign bits; or scales in pairs, of NVFP4 17 and -16 times them.
  uint32_t low[2], high[2];

  static BS_INLINE uint2 load(uint32_t at, int lane) {
    if constexpr (NVFP4) return {bs_load_scales<2>(at + 2 * lane), 0};
    return {bs_load_scales<2>(at + 4 * (lane / 4) + 2 * (lane % 4 / 2)), 0};
  }

  BS_INLINE explicit BsDecodeBytes(uint2 bytes) {
    if constexpr (NVFP4) rounded(bytes.x, 0, 0), rounded(bytes.x, 1, 0x1111);
    else of_row(bytes.x & 0xFF, 0), of_row(bytes.x >> 8, 1);
  }

  // 0x30, .. are E4M3 of 0.5, 1, 1.5, .. at byte 231; each more adds one to exponents, 8 to a byte.
  BS_INLINE void of_row(uint32_t byte, int row) {
    if constexpr (E4M3) {
      low[row] = byte * 0x08080800u + (0x3C383000u - 231u * 0x08080800u);
      high[row] = byte * 0x08080808u + (0x4C484440u - 231u * 0x08080808u);
    } else {
      low[row] = byte * 0x00800080u;
    }
  }

  // Bit 7 of a byte, s, is subtracted from bytes of the tables: prmt copies it to eight bits, and s *
  // -(2^16) and s * -(2^8 - 2^16 + 2^24), times 1 in each byte, are -(2^16 + 2^24) and -(2^8 + 2^24).
  BS_INLINE void rounded(uint32_t pair, int row, uint32_t second) {
    if constexpr (E4M3) {
      low[row] = bs_prmt(pair, 0x8840 + (second & 0x1101)) * 0x01010100u + 0x04FFF800u;
      high[row] = bs_prmt(pair, 0x8480 + (second & 0x1011)) * 0x01010101u + 0x15100D08u;
    } else {
      uint32_t scale = bs_prmt(pair & 0x7F7Fu, 0x4040 + (second & 0x0101)) * 16u + 0x70007000u;
      low[row] = bs_mul2<true>(scale, 0x41884188u);
      high[row] = scale + 0x82008200u;
    }
  }

  // E4M3: registers a[0] of row g, a[1] of row g + 8; bfloat16: those of a k16 step.
  BS_INLINE void decode(uint32_t w, uint32_t *a) const {
    if constexpr (E4M3) {
      constexpr uint32_t SIGNS = 0x80808080u;
      uint32_t magnitudes = w & 0x77777777u;
      a[0] = bs_select(w, SIGNS, bs_prmt2(low[0], high[0], bs_prmt(magnitudes, 0x4420)));
      a[1] = bs_select(w * 16, SIGNS, bs_prmt2(low[1], high[1], bs_prmt(magnitudes, 0x4431)));
    } else {
      // Of two signs of a row one moves to bit 15, the other to bit 7, where magnitudes are.
      constexpr uint32_t REST = 0x01C001C0u;
      uint32_t even = bs_mask(w, 0x80808080u), odd = bs_mask(w, 0x08080808u);
      a[0] = bs_select(w * 64, REST, even * 256);
      a[1] = bs_select(w >> 2, REST, odd * 4096);
      a[2] = bs_select(w * 4, REST, even);
      a[3] = bs_select(w >> 6, REST, odd * 16);
      // p = code * scale has up to 6 bits of significand, 17 p rounded to 8 less 16 p four, to nearest
      // even: 17 p < 32 where p is from 1 to 2, as it is 1.875 at most (15 / 8, or 45 / 32, ..).
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t code = a[i];
        a[i] = bs_mul2<true>(code, low[i % 2]);
        if constexpr (NVFP4) a[i] = bs_fma2<true>(code, high[i % 2], a[i]);
      }
    }
  }
};

// (~a & mask) | b
BS_INLINE uint32_t bs_not_and_or(uint32_t a, uint32_t mask, uint32_t b) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xAE;" : "=r"(d) : "r"(a), "r"(mask), "r"(b));
  return d;
}

template <class P>
struct BsDecodeBytes<P, false, true> : BsDecode<P> {
  using BsDecode<P>::BsDecode;
};

// |a - b| of four bytes (9.7.17.9 vabsdiff4); one instruction of sm_90 (VABSDIFF4).
BS_INLINE uint32_t bs_absdiff4(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("vabsdiff4.u32.u32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0));
  return d;
}

// INT4 to E4M3: code - zero, from -16 to 15, times 2^-9.  A byte n from 0 to 16 is n * 2^-9 as E4M3: up
// to 7 they are its subnormal numbers, and 8 to 15 have the least exponent.  So a byte is |code - zero|
// and the sign.  In a word (tiles64) the low nibbles are row g's, the high ones row g + 8's, bytes k_0,
// k_2, k_1, k_3.
template <class P>
struct BsDecodeBytes<P, true, true> {
  static constexpr uint32_t NIBBLES = 0x0F0F0F0Fu, SIGNS = 0x80808080u;
  uint32_t zero[2];  // of rows g and g + 8, in four bytes

  // `at`: where the zero of a tile's first row is, in [g 8][row 2][scale, zero].
  static BS_INLINE uint2 load(uint32_t at, int lane) {
    uint32_t mine = at + 8 * (lane / 4);
    return {bs_load_scales<2>(mine), bs_load_scales<2>(mine + 4)};
  }

  // 128 + zero as bfloat16 has zero in its low bits.
  BS_INLINE explicit BsDecodeBytes(uint2 zeros) {
    if constexpr (P::ZEROS) {
      zero[0] = bs_prmt(bs_add2<true>(zeros.x, 0x4300u) & 0x1F, 0);
      zero[1] = bs_prmt(bs_add2<true>(zeros.y, 0x4300u) & 0x1F, 0);
    } else {
      zero[0] = zero[1] = 0x08080808u;
    }
  }

  // Registers a[0] of row g, a[1] of row g + 8.
  BS_INLINE void decode(uint32_t w, uint32_t *a) const {
    uint32_t low = w & NIBBLES, high = (w >> 4) & NIBBLES;
    if constexpr (P::ZEROS) {  // bit 7 of 128 + zero - code; 0 becomes -0
      a[0] = bs_and_or(zero[0] + SIGNS - low, SIGNS, bs_absdiff4(low, zero[0]));
      a[1] = bs_and_or(zero[1] + SIGNS - high, SIGNS, bs_absdiff4(high, zero[1]));
    } else {  // bit 3 says that it is not negative
      a[0] = bs_not_and_or(w << 4, SIGNS, bs_absdiff4(low, zero[0]));
      a[1] = bs_not_and_or(w, SIGNS, bs_absdiff4(high, zero[1]));
    }
  }
};

// What is before it decodes such bytes, not what follows: ptxas would decode after the next wait for
// products.  `smem`: where that is never stored whose condition needs them; bits 5 and 6 are never set.
template <int COUNT>
BS_INLINE void bs_decoded(const uint32_t (&a)[COUNT], uint32_t smem) {
  uint32_t any = 0;
#pragma unroll
  for (int q = 0; q < COUNT; ++q) any |= a[q];
  asm volatile("{.reg .pred p; setp.ne.u32 p, %0, 0; @p st.shared.b32 [%1], %0;}"
               :: "r"(any & 0x60606060u), "r"(smem) : "memory");
}

BS_INLINE float bs_load_bf16(uint32_t from) {
  return __uint_as_float(bs_load_scales<2>(from) << 16);
}

// Two numbers of a word.
BS_INLINE void bs_bf16_pair(uint32_t pair, float (&to)[2]) {
  to[0] = __uint_as_float(pair << 16), to[1] = __uint_as_float(pair & 0xFFFF0000u);
}
