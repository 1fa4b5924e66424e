// Quotients and roots as IEEE rounds them, without branches.  nvcc's own branch to code for the ends
// of the range, and cut in two what stands around them: of a norm, ptxas then rounds h to 16 bits on
// both sides of the reduction, and keeps it in twice the registers in between.
#pragma once
#include "memory.cuh"

// x / by, `by` a constant, an integer below 2^24.  The quotient in float64 is rounded right
// (Markstein); it is nearer than float64's error to the middle of two floats only where it is that
// middle.
BS_INLINE float bs_over(float x, double by) {
  double whole = x, part = 1.0 / by, ratio = whole * part;
  float made = static_cast<float>(__fma_rn(__fma_rn(-ratio, by, whole), part, ratio));
  return __float_as_uint(x) * 2u - 2u < 0xFEFFFFFEu ? made : x;  // 0, infinity and NaN are themselves
}

// 1 / sqrt(x), both rounded.  In the middle of the range these are the instructions that ptxas makes
// of sqrt.rn and rcp.rn; small x are scaled to it.
BS_INLINE float bs_inverse_root(float x) {
  bool small = x < 0x1p-100f;
  float scaled = x * (small ? 0x1p64f : 1.0f), guess, inverse;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(scaled));
  float root = scaled * guess;
  root = __fmaf_rn(__fmaf_rn(-root, root, scaled), guess * 0.5f, root);
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(root));
  inverse = __fmaf_rn(__fmaf_rn(-root, inverse, 1.0f), inverse, inverse);
  inverse *= small ? 0x1p32f : 1.0f;
  // 0, infinity, NaN and negative x: the guess is what IEEE says.
  return __float_as_uint(x) - 1u < 0x7F7FFFFFu ? inverse : guess;
}
