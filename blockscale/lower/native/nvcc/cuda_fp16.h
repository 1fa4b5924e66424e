// float16, see float16s.h.
#pragma once
#include "float16s.h"

BS_FLOAT16(__half, __half2, "{  cvt.rn.f16.f32 %0, %1;}\n", "{  cvt.f32.f16 %0, %1;}\n")
using half = __half;
using half2 = __half2;

BS_HERE float __half2float(__half a) { return a; }
BS_HERE __half __float2half(float a) { return a; }
BS_HERE __half __float2half_rn(float a) { return a; }
BS_HERE float2 __half22float2(__half2 a) {
  float low = 0.0f, high = 0.0f;
  BS_ON_DEVICE(unsigned bits = reinterpret_cast<unsigned &>(a);
               asm("{.reg .f16 low,high;\n  mov.b32 {low,high},%1;\n  cvt.f32.f16 %0, low;}\n"
                   : "=f"(low) : "r"(bits));
               asm("{.reg .f16 low,high;\n  mov.b32 {low,high},%1;\n  cvt.f32.f16 %0, high;}\n"
                   : "=f"(high) : "r"(bits));)
  return make_float2(low, high);
}
