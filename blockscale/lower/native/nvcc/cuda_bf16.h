// bfloat16, see float16s.h.
#pragma once
#include "float16s.h"

#if __CUDA_ARCH__ >= 900
#define BS_FROM_BF16 "{ cvt.f32.bf16 %0, %1;}\n"
#else
#define BS_FROM_BF16 "{ mov.b32 %0, {0,%1};}\n"
#endif
BS_FLOAT16(__nv_bfloat16, __nv_bfloat162, "{  cvt.rn.bf16.f32 %0, %1;}\n", BS_FROM_BF16)
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

BS_HERE float __bfloat162float(__nv_bfloat16 a) { return a; }
BS_HERE __nv_bfloat16 __float2bfloat16(float a) { return a; }
BS_HERE __nv_bfloat16 __float2bfloat16_rn(float a) { return a; }
