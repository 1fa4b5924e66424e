// Device functions of the fused ops (RMS norm and activations that end in FP4 codes), one thread's
// part of each: see fp4.cuh, whose rules on arrays and rounding hold here too.
#pragma once
#include "fp4.cuh"

// ---- RMS norm -----------------------------------------------------------------------------------

// The factor of the values, from the global scale.  BS_INPLACE: ptxas sinks loads that it may
// reorder to their use, below the reduction, which would then wait for memory a second time.
BS_INLINE float bs_factor_flashinfer(const float *global_scale) {
  return __uint_as_float(bs_load4<BS_INPLACE>(global_scale));
}
BS_INLINE float bs_factor_divide(const float *global_scale) {
  return __frcp_rn(bs_factor_flashinfer(global_scale));
}

template <class F, int N>
BS_INLINE void bs_widen(float *h, const void *x) {
  const uint32_t *a = static_cast<const uint32_t *>(x);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) h[2 * i] = F::lo(a[i]), h[2 * i + 1] = F::hi(a[i]);
}

template <class F, int N>
BS_INLINE void bs_add(float *h, const void *x, const void *residual) {
  const uint32_t *a = static_cast<const uint32_t *>(x);
  const uint32_t *b = static_cast<const uint32_t *>(residual);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    h[2 * i] = F::lo(a[i]) + F::lo(b[i]);
    h[2 * i + 1] = F::hi(a[i]) + F::hi(b[i]);
  }
}

// sum[i]: sum of the squares of h[16 i] .. h[16 i + 15], in the order of tir/fused/norm_quantize.py.
template <int N>
BS_INLINE void bs_square_sum(float *sum, const float *h) {
#pragma unroll
  for (int i = 0; i < N / 16; ++i) {
    float p[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      p[j] = h[16 * i + j] * h[16 * i + j] + h[16 * i + 8 + j] * h[16 * i + 8 + j];
    }
    sum[i] = ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]));
  }
}

enum BsNorm {
  BS_PLAIN = 0,         // (h * rstd) * weight
  BS_ROUND_FIRST = 1,   // (h rounded to 16 bits * rstd) * weight
  BS_WEIGHT_FIRST = 2,  // (h * weight rounded to 16 bits) * rstd
};

template <class F, int N, int MODE>
BS_INLINE void bs_norm(float *y, const float *h, float rstd, const void *weight) {
  const uint32_t *w = static_cast<const uint32_t *>(weight);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    float a = h[2 * i], b = h[2 * i + 1];
    if (MODE == BS_WEIGHT_FIRST) a *= F::lo(w[i]), b *= F::hi(w[i]);
    if (MODE != BS_PLAIN) {
      uint32_t pair = F::pack(a, b);
      a = F::lo(pair), b = F::hi(pair);
    }
    a *= rstd, b *= rstd;
    if (MODE != BS_WEIGHT_FIRST) a *= F::lo(w[i]), b *= F::hi(w[i]);
    y[2 * i] = a, y[2 * i + 1] = b;
  }
}

// ---- Codes and scales by reciprocals: tir/encode.py ---------------------------------------------

// Bits of the largest |values[i]|, NaNs ignored; `least` (-1, itself a NaN) if none is left.
template <int N>
BS_INLINE int bs_most(const float *values, int least) {
  float most = __int_as_float(least);  // fmaxf drops a NaN
#pragma unroll
  for (int i = 0; i < N; ++i) most = fmaxf(most, fabsf(values[i]));
  return most == most ? __float_as_int(most) : -1;
}

BS_INLINE float bs_a_sixth(int amax, float gs) {
  return __fmul_rn(__fmul_rn(gs, __int_as_float(amax)), 0x1.555556p-3f);
}

BS_INLINE int bs_scale_e4m3(float gs, int amax) {
  return bs_e4m3(fminf(bs_a_sixth(amax, gs), 448.0f));
}

// 1 / value * gs: a Newton step from the approximation rounds 1 / value right for all E4M3 values.
BS_INLINE float bs_inverse_e4m3(int byte, float gs) {
  float value = bs_e4m3_value(byte), r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(value));
  r = __fmaf_rn(__fmaf_rn(-value, r, 1.0f), r, r);
  return ((byte & 0x7F) != 0 ? r : 0.0f) * gs;
}

// Least power of two that is not less than s, as an E8M0 byte; 0 for s <= 0, 127 for a NaN.
BS_INLINE int bs_power_of(float s) {
  uint32_t bits = __float_as_uint(s);
  int byte = min((bits + 0x007FFFFFu) >> 23, 254u);
  if (static_cast<int>(bits) <= 0x00400000) byte = 0;  // up to 2^-127, and negative ones
  return s == s ? byte : 127;
}

BS_INLINE int bs_scale_ue8m0(float gs, int amax) { return bs_power_of(bs_a_sixth(amax, gs)); }
BS_INLINE int bs_scale_ue8m0(int amax) {
  return bs_power_of(__fmul_rn(__int_as_float(amax), 0x1.555556p-3f));
}

BS_INLINE float bs_inverse_ue8m0(int byte) {
  return byte == 0 ? 0.0f : __int_as_float(byte == 254 ? 0x00400000 : (254 - byte) << 23);
}
BS_INLINE float bs_inverse_ue8m0(int byte, float gs) { return bs_inverse_ue8m0(byte) * gs; }

// a * b, and the positive NaN that the hardware makes, also where PTX is run by the emulator.
BS_INLINE float bs_product(float a, float b) {
  float c;
  asm("fma.rn.f32 %0, %1, %2, 0f80000000;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

// Codes of values[i] * inverse, in `packed`.
template <int N>
BS_INLINE void bs_codes_of(void *packed, const float *values, float inverse) {
  uint32_t *out = static_cast<uint32_t *>(packed);
#pragma unroll
  for (int i = 0; i < N / 8; ++i) {
    float q[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) q[j] = bs_product(values[8 * i + j], inverse);
    out[i] = bs_e2m1x8(q);
  }
}

// ---- Activations: tir/activations.py, by approximations of 2^x and 1 / x ------------------------
//
// They flush to zero: what a gate below -87 leaves of `up` may be lost.

enum BsActivation { BS_SILU = 0, BS_GELU_TANH = 1, BS_SWIGLU = 2 };

constexpr float BS_LOG2E = 1.4426950408889634f;

// 1 / (1 + 2^x)
BS_INLINE float bs_logistic(float x) {
  float power, one;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(one) : "f"(1.0f + power));
  return one;
}

BS_INLINE float bs_min_nan(float a, float b) {  // a NaN stays
  float c;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

BS_INLINE float bs_max_nan(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

// numbers: of BS_SWIGLU alpha, beta, limit.
template <int ACTIVATION>
BS_INLINE float bs_gated(float gate, float up, const float *numbers) {
  if (ACTIVATION == BS_SILU) return gate * bs_logistic(gate * -BS_LOG2E) * up;
  if (ACTIVATION == BS_GELU_TANH) {
    constexpr float FIRST = -1.5957691216f * BS_LOG2E, THIRD = -0.0713548162726f * BS_LOG2E;
    return gate * bs_logistic(gate * __fmaf_rn(gate * gate, THIRD, FIRST)) * up;
  }
  gate = bs_min_nan(gate, numbers[2]);
  up = bs_min_nan(bs_max_nan(up, -numbers[2]), numbers[2]) + numbers[1];
  return gate * bs_logistic(gate * (numbers[0] * -BS_LOG2E)) * up;
}

template <class F, int N, int ACTIVATION>
BS_INLINE void bs_activate(void *a, const void *gate, const void *up,
                           const float *numbers = nullptr) {
  const uint32_t *g = static_cast<const uint32_t *>(gate), *u = static_cast<const uint32_t *>(up);
  uint32_t *out = static_cast<uint32_t *>(a);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    out[i] = F::pack(bs_gated<ACTIVATION>(F::lo(g[i]), F::lo(u[i]), numbers),
                     bs_gated<ACTIVATION>(F::hi(g[i]), F::hi(u[i]), numbers));
  }
}

// ---- FlashInfer's exact mode: tir/fused/act_quantize.py -----------------------------------------------

BS_INLINE int bs_exact_scale_e4m3(int amax, float gs) {
  return amax > 0 ? bs_e4m3(__int_as_float(amax) * (gs * 0x1.555556p-3f)) : 0;
}

BS_INLINE float bs_exact_factor_e4m3(int amax, int byte, float gs) {
  float inverse = __frcp_rn(bs_e4m3_value(byte) * __frcp_rn(gs));
  inverse = inverse > 0x1.fffffep127f ? 0x1.fffffep127f : inverse;
  return amax > 0 ? inverse : 0.0f;
}

// Least power of two that is not less than amax / 6; a NaN gives 255.
BS_INLINE int bs_exact_scale_ue8m0(int amax) {
  uint32_t bits = __float_as_uint(__int_as_float(amax) * 0x1.555556p-3f);
  int byte = min((bits + 0x007FFFFFu) >> 23, 254u);
  if (bits <= 0x00400000u) byte = 0;
  return bits > 0x7F800000u ? 255 : byte;
}

BS_INLINE float bs_exact_factor_ue8m0(int byte) {
  return byte == 255 ? __int_as_float(0x7FC00000) : bs_inverse_ue8m0(byte);
}

// Codes of 16-bit a[i] * factor, in `packed`.
template <class F, int N>
BS_INLINE void bs_codes_of_16(void *packed, const void *a, float factor) {
  const uint32_t *w = static_cast<const uint32_t *>(a);
  uint32_t *out = static_cast<uint32_t *>(packed);
#pragma unroll
  for (int i = 0; i < N / 8; ++i) {
    float q[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) q[j] = bs_product(F::at(w + 4 * i, j), factor);
    out[i] = bs_e2m1x8(q);
  }
}
