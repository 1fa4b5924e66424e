// 4-bit weights of the tiles64 layout to the A fragment of mma.m16n8k16 and wgmma, in registers.
//
// Word j of a thread (g = lane / 4, t = lane % 4) holds the 8 codes of its A fragment of k16-step
// j: a0 (row g; k0, k1), a1 (row g + 8; k0, k1), a2 (row g; k2, k3), a3 (row g + 8; k2, k3) with
// k_i = 16 t + 4 j + i; the first k of a pair in the low half.  In each half (blockscale/ops/moe/weights.py)
//
//   e2m1 (s e e m)   a0: s 15, eem 8..6   a1: s 12, eem 5..3   a2: s 9, eem 2..0
//                    a3: m 14, s 13, ee 11..10
//   int4 (unsigned)  a0: 3..0   a1: 7..4   a2: 11..8   a3: 15..12
//
// e2m1 as bfloat16: s at 15 and eem at 8..6 are the exponent's low bits and the mantissa's high bit,
// that is value * 2^-126, also for the subnormal 0.5; times the scale * 2^110 it is exact (6 bits).
// Three codes are a shift and an AND away, that of a3 a product more (`decode_e2m1`).  int4 as bfloat16: an integer in bits 7..0 is the (sub-)
// normal number of value * 2^-133, so one FMA subtracts 8 and scales, with a single rounding.
// What is left of the powers of two (BsDecode::FACTOR) is multiplied after the sum over k.
#pragma once
#include "formats.h"
#include "tma.cuh"

// fma, mul and add of two 16-bit numbers, rounded once each; BF16 or float16.  Before sm_90 bfloat16
// has no add and mul (9.7.4.1, 9.7.4.3): a b + -0 and a 1 + b are the same numbers, zeros included.
template <bool BF16>
BS_INLINE uint32_t bs_fma2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  if (BF16) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  else asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

template <bool BF16>
BS_INLINE uint32_t bs_mul2(uint32_t a, uint32_t b) {
  uint32_t d;
#if __CUDA_ARCH__ < 900
  if (BF16) return bs_fma2<true>(a, b, 0x80008000u);
#endif
  if (BF16) asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  else asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

template <bool BF16>
BS_INLINE uint32_t bs_add2(uint32_t a, uint32_t b) {
  uint32_t d;
#if __CUDA_ARCH__ < 900
  if (BF16) return bs_fma2<true>(a, 0x3F803F80u, b);
#endif
  if (BF16) asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  else asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

BS_INLINE uint32_t bs_prmt2(uint32_t a, uint32_t b, uint32_t select) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(select));
  return d;
}

BS_INLINE uint32_t bs_prmt(uint32_t a, uint32_t select) { return bs_prmt2(a, 0, select); }

// One of two numbers of 16 bits, twice.  Moved so, and not by prmt, it is what ptxas makes a modifier of
// the instruction that takes it (.H0_H0, .H1_H1).
BS_INLINE uint32_t bs_twice(uint32_t pair, int high) {
  uint32_t d;
  if (high) asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %1; mov.b32 %0, {hi, hi};}" : "=r"(d) : "r"(pair));
  else asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %1; mov.b32 %0, {lo, lo};}" : "=r"(d) : "r"(pair));
  return d;
}

template <int I>
struct BsIndex {};

// (a & mask) | b
BS_INLINE uint32_t bs_and_or(uint32_t a, uint32_t mask, uint32_t b) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(a), "r"(mask), "r"(b));
  return d;
}

// Bytes of scales at `from` (shared), zero-extended.
template <int BYTES>
BS_INLINE uint32_t bs_load_scales(uint32_t from) {
  if (BYTES == 2) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from) : "memory");
    return v;
  }
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}

// Constants of a format.
template <class P>
struct BsDecode {
  static constexpr bool BF16 = P::BF16, INT4 = P::FORMAT == BS_MOE_INT4;
  static constexpr bool NVFP4 = P::FORMAT == BS_MOE_NVFP4;
  static constexpr bool TERM = P::ZEROS == 2;  // zeros are added to (code - 8) * scale
  // What an accumulator is multiplied by.
  static constexpr float FACTOR = INT4 ? (BF16 && !P::ZEROS ? 2097152.f : 1.f)
                                  : BF16 ? 65536.f
                                  : NVFP4 ? 128.f : 1.f;

  // Scales of rows g (low half) and g + 8 for the thread's 16 k; int4 needs three numbers of each.
  uint32_t s, s16, c, c16;

  // The bytes of a thread's scales, of an m16 tile and a block of 64 k at shared address `at`.
  static BS_INLINE uint2 load(uint32_t at, int lane) {
    int g = lane / 4, t = lane % 4;
    if constexpr (NVFP4) {
      return {bs_load_scales<2>(at + 2 * lane), 0};
    } else if constexpr (!INT4) {
      return {bs_load_scales<2>(at + 4 * g + 2 * (t / 2)), 0};
    } else if constexpr (P::ZEROS) {
      uint32_t mine = at + (P::GROUP == 32 ? 16 * g + 8 * (t / 2) : 8 * g);
      return {bs_load_scales<4>(mine), bs_load_scales<4>(mine + 4)};
    } else {
      return {bs_load_scales<4>(at + (P::GROUP == 32 ? 8 * g + 4 * (t / 2) : 4 * g)), 0};
    }
  }

  // Of e2m1 `bytes.x` has the scales of rows g and g + 8 in bytes 0 and 1, or with SECOND in 2 and 3.
  template <int SECOND = 0>
  BS_INLINE explicit BsDecode(uint2 bytes, BsIndex<SECOND> = {}) {
    if constexpr (!INT4) {
      uint32_t pair = bs_prmt(bytes.x, SECOND ? 0x4342 : 0x4140);
      // Byte 5 bits of exponent, 3 of mantissa: bits 11..4 of bfloat16 below 0x7000, 14..7 of float16.
      if constexpr (NVFP4) s = pair * (BF16 ? 16u : 128u) + (BF16 ? 0x70007000u : 0x24002400u);
      else if constexpr (BF16) s = pair * 128u;  // 2^(byte - 127)
      else s = power(pair & 0xFFFFu) | power(pair >> 16) << 16;
    } else if constexpr (P::ZEROS) {
      with_zero(bs_prmt2(bytes.x, bytes.y, 0x5410), bs_prmt2(bytes.x, bytes.y, 0x7632));
    } else {
      symmetric(bytes.x);
    }
  }

  // 2^(byte - 223) as float16, or 0 below its exponents.
  static BS_INLINE uint32_t power(uint32_t byte) { return max(static_cast<int>(byte) - 208, 0) << 10; }

  BS_INLINE void symmetric(uint32_t scale) {
    s = scale;
    if (BF16) {
      s = bs_mul2<true>(scale, 0x77807780u);    // 2^112
      s16 = bs_mul2<true>(scale, 0x75807580u);  // 2^108
      c = bs_mul2<true>(scale, 0xB680B680u);    // -2^-18
    }
  }

  BS_INLINE void with_zero(uint32_t scale, uint32_t zero) {
    s = scale;
    if (TERM) {
      c = zero;
    } else if (BF16) {
      c = bs_add2<true>(zero ^ 0x80008000u, 0xC300C300u);  // -(128 + zero)
    } else {
      c = bs_add2<false>(zero ^ 0x80008000u, 0xE400E400u);    // -(1024 + zero)
      c16 = bs_add2<false>(zero ^ 0x80008000u, 0xD400D400u);  // -(64 + zero)
    }
  }

  BS_INLINE void decode(uint32_t w, uint32_t *a) const {
    if constexpr (!INT4) decode_e2m1(w, a);
    else if constexpr (BF16 && !P::ZEROS) decode_int4(w, a);
    else decode_int4_offset(w, a);
  }

  BS_INLINE void decode_e2m1(uint32_t w, uint32_t *a) const {
    if constexpr (BF16) {
      constexpr uint32_t M = 0x81C081C0u;
      a[0] = w & M, a[1] = (w * 8) & M, a[2] = (w * 64) & M;
      // Bits 0, 1, 4 and 3 go to 7, 8, 6 and 15; no two other summands have the same bit.
      a[3] = ((w >> 10) & 0x001B001Bu) * (1 << 7 | 1 << 2 | 1 << 12) & M;
    } else {
      constexpr uint32_t S = 0x80008000u, M = 0x0E000E00u;
      a[0] = bs_and_or(w * 8, M, w & S);
      a[1] = bs_and_or(w * 64, M, (w * 8) & S);
      a[2] = bs_and_or(w * 512, M, (w * 64) & S);
      a[3] = bs_and_or(w >> 5, 0x02000200u, bs_and_or(w, 0x0C000C00u, (w * 4) & S));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = bs_mul2<BF16>(a[i], bs_twice(s, i % 2));
  }

  // Integers in bits 3..0 or 7..4 are subnormal numbers.
  BS_INLINE void decode_int4(uint32_t w, uint32_t *a) const {
    uint32_t v = w >> 8;
    a[0] = bs_fma2<true>(w & 0x000F000Fu, bs_twice(s, 0), bs_twice(c, 0));
    a[1] = bs_fma2<true>(w & 0x00F000F0u, bs_twice(s16, 1), bs_twice(c, 1));
    a[2] = bs_fma2<true>(v & 0x000F000Fu, bs_twice(s, 0), bs_twice(c, 0));
    a[3] = bs_fma2<true>(v & 0x00F000F0u, bs_twice(s16, 1), bs_twice(c, 1));
  }

  // Integers below the leading bit of 128 (bfloat16) or 1024 (float16); zero is subtracted exactly.
  BS_INLINE void decode_int4_offset(uint32_t w, uint32_t *a) const {
    constexpr uint32_t LOW = 0x000F000Fu, HIGH = 0x00F000F0u;
    uint32_t v = w >> 8;
    if constexpr (BF16) {
      constexpr uint32_t LEAD = 0x43004300u, EIGHT = 0xC308C308u;  // 128, -(128 + 8)
      uint32_t even = TERM ? EIGHT : bs_twice(c, 0), odd = TERM ? EIGHT : bs_twice(c, 1);
      a[0] = bs_add2<true>(bs_and_or(w, LOW, LEAD), even);
      a[1] = bs_add2<true>(bs_and_or(w >> 4, LOW, LEAD), odd);
      a[2] = bs_add2<true>(bs_and_or(v, LOW, LEAD), even);
      a[3] = bs_add2<true>(bs_and_or(w >> 12, LOW, LEAD), odd);
    } else {
      constexpr uint32_t LEAD = 0x64006400u, SIXTEENTH = 0x2C002C00u;
      constexpr bool POINT = P::ZEROS == 1;
      uint32_t low = POINT ? bs_twice(c, 0) : 0xE408E408u, high = POINT ? bs_twice(c16, 1) : 0xD480D480u;
      a[0] = bs_add2<false>(bs_and_or(w, LOW, LEAD), low);
      a[1] = bs_fma2<false>(bs_and_or(w, HIGH, LEAD), SIXTEENTH, high);
      a[2] = bs_add2<false>(bs_and_or(v, LOW, LEAD), low);
      a[3] = bs_fma2<false>(bs_and_or(v, HIGH, LEAD), SIXTEENTH, high);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      a[i] = TERM ? bs_fma2<BF16>(a[i], bs_twice(s, i % 2), bs_twice(c, i % 2))
                  : bs_mul2<BF16>(a[i], bs_twice(s, i % 2));
  }
};
