// bfloat16 as TVM's sources need it: a type of two bytes, conversions, and comparisons; what
// computes does so in float32 or by instructions of its own.
#pragma once

#define BS_HERE static __host__ __device__ __forceinline__

struct __align__(2) __nv_bfloat16 {
  unsigned short __x;
  __nv_bfloat16() = default;
  __host__ __device__ __forceinline__ __nv_bfloat16(float value) {
#ifdef __CUDA_ARCH__
    asm("{  cvt.rn.bf16.f32 %0, %1;}\n" : "=h"(__x) : "f"(value));
#endif
  }
  __host__ __device__ __forceinline__ operator float() const {
    float value = 0.0f;
#if __CUDA_ARCH__ >= 900
    asm("{ cvt.f32.bf16 %0, %1;}\n" : "=f"(value) : "h"(__x));
#elif defined(__CUDA_ARCH__)
    asm("{ mov.b32 %0, {0,%1};}\n" : "=f"(value) : "h"(__x));
#endif
    return value;
  }
};
using nv_bfloat16 = __nv_bfloat16;

struct __align__(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
  __nv_bfloat162() = default;
  __host__ __device__ __forceinline__ __nv_bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) : x(a), y(b) {}
};
using nv_bfloat162 = __nv_bfloat162;

BS_HERE float __bfloat162float(__nv_bfloat16 a) { return a; }
BS_HERE __nv_bfloat16 __float2bfloat16(float a) { return a; }
BS_HERE __nv_bfloat16 __float2bfloat16_rn(float a) { return a; }
BS_HERE bool __hgt(__nv_bfloat16 a, __nv_bfloat16 b) { return float(a) > float(b); }
BS_HERE bool __hlt(__nv_bfloat16 a, __nv_bfloat16 b) { return float(a) < float(b); }
#undef BS_HERE
