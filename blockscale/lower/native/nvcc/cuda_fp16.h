// float16 as TVM's sources need it: a type of two bytes, conversions, and comparisons; what
// computes does so in float32 or by instructions of its own.
#pragma once

#define BS_HERE static __host__ __device__ __forceinline__

struct __align__(2) __half {
  unsigned short __x;
  __half() = default;
  __host__ __device__ __forceinline__ __half(float value) {
#ifdef __CUDA_ARCH__
    asm("{  cvt.rn.f16.f32 %0, %1;}\n" : "=h"(__x) : "f"(value));
#endif
  }
  __host__ __device__ __forceinline__ operator float() const {
    float value = 0.0f;
#ifdef __CUDA_ARCH__
    asm("{  cvt.f32.f16 %0, %1;}\n" : "=f"(value) : "h"(__x));
#endif
    return value;
  }
};
using half = __half;

struct __align__(4) __half2 {
  __half x, y;
  __half2() = default;
  __host__ __device__ __forceinline__ __half2(__half a, __half b) : x(a), y(b) {}
};
using half2 = __half2;

BS_HERE float __half2float(__half a) { return a; }
BS_HERE __half __float2half(float a) { return a; }
BS_HERE __half __float2half_rn(float a) { return a; }
BS_HERE float2 __half22float2(__half2 a) {
  float low = 0.0f, high = 0.0f;
#ifdef __CUDA_ARCH__
  unsigned bits = reinterpret_cast<unsigned &>(a);
  asm("{.reg .f16 low,high;\n  mov.b32 {low,high},%1;\n  cvt.f32.f16 %0, low;}\n"
      : "=f"(low) : "r"(bits));
  asm("{.reg .f16 low,high;\n  mov.b32 {low,high},%1;\n  cvt.f32.f16 %0, high;}\n"
      : "=f"(high) : "r"(bits));
#endif
  return make_float2(low, high);
}
BS_HERE bool __hgt(__half a, __half b) { return float(a) > float(b); }
BS_HERE bool __hlt(__half a, __half b) { return float(a) < float(b); }
#undef BS_HERE
