// Device functions of blockscale's GPU kernels: E2M1, E4M3 and E8M0 codes of blocks.
//
// Every function works on the registers of one thread.  Arrays are local to the thread, aligned to
// 16 bytes, and always touched in the same words, so that they become registers.  Rounding is
// written out: compiled with --fmad=false, the file agrees with blockscale/tir bit for bit.
#pragma once
#include "formats.h"
#include "memory.cuh"

#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL) || \
    (defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000)
#define BS_CVT_E2M1 1  // the conversion belongs to single architectures and families, not to sm_100
#else
#define BS_CVT_E2M1 0
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define BS_CVT_E4M3 1
#else
#define BS_CVT_E4M3 0
#endif

// ---- Elements -----------------------------------------------------------------------------------

BS_INLINE uint32_t bs_prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

struct BsBf16 {
  static constexpr bool IS_16 = true;
  static BS_INLINE float lo(uint32_t w) { return __uint_as_float(w << 16); }
  static BS_INLINE float hi(uint32_t w) { return __uint_as_float(w & 0xFFFF0000u); }
  static BS_INLINE uint32_t pack(float lo, float hi) {
    uint32_t w;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo));
    return w;
  }
  static BS_INLINE float at(const uint32_t *w, int i) {
    return i % 2 ? hi(w[i / 2]) : lo(w[i / 2]);
  }
};

struct BsF16 {
  static constexpr bool IS_16 = true;
  static BS_INLINE float lo(uint32_t w) {
    float x;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(x) : "r"(w));
    return x;
  }
  static BS_INLINE float hi(uint32_t w) {
    float x;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }" : "=f"(x) : "r"(w));
    return x;
  }
  static BS_INLINE uint32_t pack(float lo, float hi) {
    uint32_t w;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo));
    return w;
  }
  static BS_INLINE float at(const uint32_t *w, int i) {
    return i % 2 ? hi(w[i / 2]) : lo(w[i / 2]);
  }
};

struct BsF32 {
  static constexpr bool IS_16 = false;
  static BS_INLINE float at(const uint32_t *w, int i) { return __uint_as_float(w[i]); }
};

// Largest magnitude of N elements as float32 bits, NaN above infinity, and not below `least`.
template <class F, int N>
BS_INLINE int bs_amax(const void *values, int least) {
  const uint32_t *word = static_cast<const uint32_t *>(values);
  if constexpr (F::IS_16) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < N / 2; i += 2) {
      most = __vimax3_u16x2(most, word[i] & 0x7FFF7FFFu, word[i + 1] & 0x7FFF7FFFu);
    }
    uint32_t one = max(most & 0xFFFFu, most >> 16);
    return max(least, __float_as_int(F::lo(one)));
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) least = max(least, static_cast<int>(word[i] & 0x7FFFFFFFu));
    return least;
  }
}

// ---- E2M1 ---------------------------------------------------------------------------------------

// E2M1 magnitude code of u in [0, 7), as the bits of 2^23 + code.  The codes are
// round(min(2 u, u + 2, u / 2 + 4)); adding 2^23 rounds to an integer, ties to even, in the same
// step, and rounding keeps the order, so that the least of the three sums is the code.
BS_INLINE uint32_t bs_e2m1_biased(float u) {
  int a = __float_as_int(__fmaf_rn(u, 2.0f, 8388608.0f));
  int b = __float_as_int(__fadd_rn(u, 8388610.0f));
  int c = __float_as_int(__fmaf_rn(u, 0.5f, 8388612.0f));
  return static_cast<uint32_t>(__vimin3_s32(a, b, c));
}

// Eight such codes as nibbles, by multiplications with powers of two, which add as well.  The
// biases, 0x4B000000 << 4 i, overflow but for those of the elements 0 and 1 of a half; what is left
// of the upper half overflows, and 0x05000000 makes the rest of the lower half overflow too.
BS_INLINE uint32_t bs_pack8(const uint32_t *v) {
  uint32_t lo = v[1] * 16u + (v[0] + 0x05000000u);
  uint32_t hi = v[5] * 16u + v[4];
  lo = v[2] * 256u + lo;
  hi = v[6] * 256u + hi;
  lo = v[3] * 4096u + lo;
  hi = v[7] * 4096u + hi;
  return hi * 65536u + lo;
}

BS_INLINE uint32_t bs_join_signs(uint32_t even, uint32_t odd) {
  return ((even & 0x0F0F0F0Fu) | (odd & 0xF0F0F0F0u)) & 0x88888888u;
}

// Signs of eight 16-bit floats (four words) in the highest bits of nibbles.  Selectors of 8 and
// more fill a byte with the sign of a byte.
BS_INLINE uint32_t bs_signs16(const uint32_t *w) {
  uint32_t p = bs_prmt(w[0], w[1], 0x7531), r = bs_prmt(w[2], w[3], 0x7531);
  return bs_join_signs(bs_prmt(p, r, 0xECA8), bs_prmt(p, r, 0xFDB9));
}

BS_INLINE uint32_t bs_signs32(const float *q) {
  uint32_t w[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) w[i] = __float_as_uint(q[i]);
  uint32_t even = bs_prmt(bs_prmt(w[0], w[2], 0xFBFB), bs_prmt(w[4], w[6], 0xFBFB), 0x5410);
  uint32_t odd = bs_prmt(bs_prmt(w[1], w[3], 0xFBFB), bs_prmt(w[5], w[7], 0xFBFB), 0x5410);
  return bs_join_signs(even, odd);
}

// Word of 8 E2M1 codes of q[0..7], q[0] in the lowest nibble.  A NaN gives code 7 if it is
// positive, as every NaN is that arithmetic makes.
BS_INLINE uint32_t bs_e2m1x8(const float *q) {
#if BS_CVT_E2M1
  uint32_t w;
  asm("{ .reg .b8 b0, b1, b2, b3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\n"
      "mov.b32 %0, {b0, b1, b2, b3}; }"
      : "=r"(w)
      : "f"(q[0]), "f"(q[1]), "f"(q[2]), "f"(q[3]), "f"(q[4]), "f"(q[5]), "f"(q[6]), "f"(q[7]));
  return w;
#else
  uint32_t v[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = bs_e2m1_biased(fminf(fabsf(q[i]), 6.0f));
  return bs_pack8(v) | bs_signs32(q);
#endif
}

// ---- Scales -------------------------------------------------------------------------------------

BS_INLINE int bs_e4m3(float x) {  // saturating; NaN gives 0x7F
#if BS_CVT_E4M3
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  return pair & 0xFF;
#else
  int bits = __float_as_int(x), most = min(bits & 0x7FFFFFFF, 0x43E00000);  // 448
  int subnormal = __float_as_int(__fadd_rn(__int_as_float(most), 16384.0f)) & 15;
  int normal = ((most + 0x7FFFF + ((most >> 20) & 1)) >> 20) - (120 << 3);
  int code = (most < 0x3C800000 ? subnormal : normal) | ((bits >> 24) & 0x80);  // 2^-6
  return x == x ? code : 0x7F;
#endif
}

// Two of them, `low` in the low byte.
BS_INLINE uint32_t bs_e4m3x2(float low, float high) {
#if BS_CVT_E4M3
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return bs_e4m3(low) | bs_e4m3(high) << 8;
#endif
}

BS_INLINE float bs_e4m3_value(int byte) {
#if BS_CVT_E4M3
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(byte)));
  return BsF16::lo(pair);
#else
  int code = byte & 0x7F, sign = (byte & 0x80) << 24;
  int normal = (code << 20) + (120 << 23);
  int bits = code < 8 ? __float_as_int(__int2float_rn(code) * 0x1p-9f) : normal;
  return __int_as_float(code < 0x7F ? bits | sign : 0x7FC00000);
#endif
}

BS_INLINE float bs_ue8m0_value(int byte) {
  int bits = byte < 1 ? 0x00400000 : byte << 23;
  return __int_as_float(byte < 255 ? bits : 0x7FC00000);
}

// 1 / d as a sum, to about 46 bits, for normal d and 1 / d; an x of at most 11 significant bits
// times it, rounded once by bs_times, is then rounded to codes as the IEEE quotient x / d is.
//  Rounded up: a d of all ones makes x / d fall so little above the middle of two floats that
// rounding down would make it a tie (brute force over all x of 8 and 11 bits and all d next to a
// tie).
struct BsReciprocal {
  float hi, lo;
};

BS_INLINE BsReciprocal bs_reciprocal(float d) {
  BsReciprocal r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r.hi) : "f"(d));
  float e = __fmaf_rn(-d, r.hi, 1.0f);
  r.lo = __fmul_ru(__fmaf_ru(e, e, e), r.hi);
  return r;
}

BS_INLINE float bs_times(float x, BsReciprocal r) { return __fmaf_rn(x, r.hi, __fmul_rn(x, r.lo)); }

// Whether 2^-100 <= d <= 2^100: nothing that matters overflows or underflows on the way.
BS_INLINE bool bs_moderate(float d) { return __float_as_uint(d) - 0x0D800000u <= 0x64000000u; }

static __device__ __noinline__ int bs_scale_e4m3_ieee(int amax, float d) {
  return amax > 0 ? bs_e4m3(__fdiv_rn(__int_as_float(amax), d)) : 0;
}

// E4M3 byte of amax / (6 g); 0 for 0.  SHORT: amax is the magnitude of a 16-bit float.
template <bool SHORT>
BS_INLINE int bs_byte_e4m3(int amax, float g) {
  float d = __fmul_rn(6.0f, g), a = __int_as_float(amax);
  if (SHORT && bs_moderate(d)) {
    int byte = bs_e4m3(bs_times(fminf(a, __fmul_rn(d, 512.0f)), bs_reciprocal(d)));
    return amax > 0x7F800000 ? 0x7F : byte;
  }
  return bs_scale_e4m3_ieee(amax, d);
}

// E8M0 byte of the least power of two >= amax / d; NaN gives 255.
BS_INLINE int bs_byte_ue8m0_over(int amax, float d) {
  int bits = __float_as_int(__fdiv_rn(__int_as_float(amax), d)) & 0x7FFFFFFF;
  int up = (min(bits, 0x7F800000) + 0x7FFFFF) >> 23;
  int byte = bits > 0x00400000 ? min(up, 254) : 0;
  return amax > 0 ? (bits > 0x7F800000 ? 255 : byte) : 0;
}

BS_INLINE int bs_byte_ue8m0_ceil(int amax, float g) {
  return bs_byte_ue8m0_over(amax, __fmul_rn(6.0f, g));
}

// E8M0 byte of 2^(floor(log2(amax / g)) - 2); NaN gives 255.
BS_INLINE int bs_byte_ue8m0_floor(int amax, float g) {
  int bits = __float_as_int(__fdiv_rn(__int_as_float(amax), g)) & 0x7FFFFFFF;
  int byte = bits < 0x7F800000 ? max((bits >> 23) - 2, 0) : 254;
  return amax > 0 ? (bits > 0x7F800000 ? 255 : byte) : 0;
}

// Of every format: its scales' bytes, as their number format has them, and their values times g.
#define BS_SCALE_e4m3(format)                        \
  template <bool SHORT>                              \
  BS_INLINE int bs_scale_##format(int amax, float g) { \
    return bs_byte_e4m3<SHORT>(amax, g);             \
  }
#define BS_SCALE_ue8m0(format)                                                                       \
  BS_INLINE int bs_scale_##format##_ceil(int amax, float g) { return bs_byte_ue8m0_ceil(amax, g); } \
  BS_INLINE int bs_scale_##format##_floor(int amax, float g) { return bs_byte_ue8m0_floor(amax, g); }
#define BS_SCALES(format, scale)                         \
  BS_SCALE_##scale(format)                               \
  BS_INLINE float bs_divisor_##format(int byte, float g) { \
    return __fmul_rn(bs_##scale##_value(byte), g);       \
  }
BS_EACH_FORMAT(BS_SCALES)

// ---- Codes of a block ---------------------------------------------------------------------------

enum BsRange {
  BS_OWN = 0,   // the scale is that of the block's own maximum: |x / d| < 7 but at the ends
  BS_CLAMP = 1, // the same, but |x / d| may reach 8
  BS_ANY = 2,   // nothing is known
};

// Word of codes of eight 16-bit floats over a moderate d; r = 1 / d.  Clamped before they are
// divided: the two products of bs_times may be infinities of different signs.
template <class F, bool CLAMP>
BS_INLINE uint32_t bs_codes8(const uint32_t *w, float d, BsReciprocal r) {
#if BS_CVT_E2M1
  if (!CLAMP) {
    float q[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // magnitudes: bs_times makes +0 of -0 where r.lo is negative
      uint32_t a = w[i] & 0x7FFF7FFFu;
      q[2 * i] = bs_times(F::lo(a), r), q[2 * i + 1] = bs_times(F::hi(a), r);
    }
    return bs_e2m1x8(q) | bs_signs16(w);
  }
#endif
  uint32_t v[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t a = w[i] & 0x7FFF7FFFu;
    float x = F::lo(a), y = F::hi(a);
    if (CLAMP) x = fminf(x, __fmul_rn(6.0f, d)), y = fminf(y, __fmul_rn(6.0f, d));
    v[2 * i] = bs_e2m1_biased(bs_times(x, r));
    v[2 * i + 1] = bs_e2m1_biased(bs_times(y, r));
  }
  return bs_pack8(v) | bs_signs16(w);
}

// The same for any floats, divisors and bytes (those of bs_encode).  Not inlined: it rarely runs,
// and in the middle of what runs it makes a kernel three times as long.
template <class F, int FORMAT>
__device__ __noinline__ uint32_t bs_codes8_rare(uint4 low, uint4 high, float d, int byte) {
  uint32_t w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  if constexpr (F::IS_16) {
    if (BS_E4M3_SCALES<FORMAT> && byte <= 0) return bs_signs16(w);
    if (bs_moderate(d) && bs_amax<F, 8>(w, 0) <= 0x7F800000) {
      return bs_codes8<F, true>(w, d, bs_reciprocal(d));
    }
  }
  float q[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float x = F::at(w, i), ratio = __fdiv_rn(x, d);
    bool zero = (BS_E4M3_SCALES<FORMAT> && byte <= 0) || (x == 0.0f && d == 0.0f);
    q[i] = zero ? copysignf(0.0f, x) : (ratio == ratio ? ratio : 6.0f);
  }
  return bs_e2m1x8(q);
}

// Codes of N elements over the divisor d, which is the scale of `byte` times the global scale, in
// `packed`.  Zeros where an E4M3 byte is 0, and where both d and the element are.
template <class F, int N, int FORMAT, int RANGE>
BS_INLINE void bs_encode(void *packed, const void *values, float d, int byte) {
  const uint32_t *word = static_cast<const uint32_t *>(values);
  uint32_t *out = static_cast<uint32_t *>(packed);
  if constexpr (F::IS_16) {
    bool plain = bs_moderate(d);
    // E4M3: below 4 / 512 rounding moves a scale by more than 1 / 8, and 448 may be saturated.
    if (BS_E4M3_SCALES<FORMAT>) plain &= RANGE == BS_OWN ? byte - 4u <= 0x79u : byte > 0;
    if (RANGE == BS_ANY) plain &= bs_amax<F, N>(values, 0) <= 0x7F800000;
    if (plain) {
      BsReciprocal r = bs_reciprocal(d);
#pragma unroll
      for (int i = 0; i < N / 8; ++i) out[i] = bs_codes8<F, RANGE != BS_OWN>(word + 4 * i, d, r);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < N / 8; ++i) {
    const uint32_t *w = word + (F::IS_16 ? 4 : 8) * i;
    uint4 low = make_uint4(w[0], w[1], w[2], w[3]), high = make_uint4(0, 0, 0, 0);
    if (!F::IS_16) high = make_uint4(w[4], w[5], w[6], w[7]);
    out[i] = bs_codes8_rare<F, FORMAT>(low, high, d, byte);
  }
}

// ---- MXFP8 --------------------------------------------------------------------------------------

BS_INLINE int bs_scale_mxfp8(int amax) { return bs_byte_ue8m0_over(amax, 448.0f); }

// E4M3 codes of N 16-bit floats over d, a power of two or NaN, in `packed`.
template <class F, int N>
BS_INLINE void bs_encode_mxfp8(void *packed, const void *values, float d) {
  const uint32_t *word = static_cast<const uint32_t *>(values);
  uint32_t *out = static_cast<uint32_t *>(packed);
  float r = __fdiv_rn(1.0f, d);  // exact
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    uint32_t low = bs_e4m3x2(__fmul_rn(F::lo(word[2 * i]), r), __fmul_rn(F::hi(word[2 * i]), r));
    uint32_t high =
        bs_e4m3x2(__fmul_rn(F::lo(word[2 * i + 1]), r), __fmul_rn(F::hi(word[2 * i + 1]), r));
    out[i] = low | high << 16;
  }
}

// ---- Dequantise ---------------------------------------------------------------------------------

// N values (float32) of N E2M1 codes in `packed` times `scale`, each product rounded once.  A PRMT
// looks up the high bytes of four magnitudes in FP16, whose low bytes are zero.
template <int N>
BS_INLINE void bs_decode(float *values, const void *packed, float scale) {
  constexpr uint32_t SMALL = 0x3E3C3800u, LARGE = 0x46444240u;  // 0 .5 1 1.5, 2 3 4 6
  const uint32_t *word = static_cast<const uint32_t *>(packed);
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    uint32_t codes = word[i / 2], shifted = codes << 4;  // signs of even nibbles to those of bytes
    uint32_t magnitude = (codes & 0x77777777u) >> (i % 2 * 16);
    uint32_t bytes = bs_prmt(SMALL, LARGE, magnitude);
    bytes |= bs_prmt(shifted, codes, i % 2 ? 0x7362 : 0x5140) & 0x80808080u;
    uint32_t first = bs_prmt(bytes, 0, 0x1404), second = bs_prmt(bytes, 0, 0x3424);
    values[4 * i] = __fmul_rn(BsF16::lo(first), scale);
    values[4 * i + 1] = __fmul_rn(BsF16::hi(first), scale);
    values[4 * i + 2] = __fmul_rn(BsF16::lo(second), scale);
    values[4 * i + 3] = __fmul_rn(BsF16::hi(second), scale);
  }
}

// `values` (N float32) rounded to 16 bits and stored.
template <class F, int N, int HINT>
BS_INLINE void bs_store_rounded(void *to, const float *values) {
  if constexpr (F::IS_16) {
    uint32_t word[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) word[i] = F::pack(values[2 * i], values[2 * i + 1]);
    bs_store<2 * N, HINT>(to, word);
  } else {
    bs_store<4 * N, HINT>(to, values);
  }
}
