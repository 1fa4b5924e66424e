// Arithmetic of CUDA C++, one result an index: integers, floats with rounding modes, half and
// bfloat16, and the conversions of cuda_fp4.h and cuda_fp8.h, which are hardware instructions here.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#include <stdint.h>

#define AT(j) out[(j) * n + i]

extern "C" __global__ void integers(const int* x, const int* y, long long* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  int a = x[i], b = y[i];
  unsigned ua = a, ub = b;
  long long wide = (long long)a << 20 ^ b;
  unsigned long long uwide = wide;
  AT(0) = b ? a / b : 0;
  AT(1) = b ? a % b : 0;
  AT(2) = ub ? ua / ub : 0;
  AT(3) = b ? wide / b : 0;
  AT(4) = ub ? uwide % ub : 0;
  AT(5) = __mulhi(a, b);
  AT(6) = __umulhi(ua, ub);
  AT(7) = __mul64hi(wide, (long long)b << 13);
  AT(8) = __clz(a);
  AT(9) = __popc(a);
  AT(10) = __brev(ua);
  AT(11) = __ffs(a);
  AT(12) = __byte_perm(ua, ub, 0x5F24);
  AT(13) = __funnelshift_l(ua, ub, b & 63);
  AT(14) = __funnelshift_rc(ua, ub, b & 63);
  AT(15) = __dp4a(a, b, 77);
  AT(16) = __usad(ua, ub, 5);
  AT(17) = a >> (b & 31);
  AT(18) = ua >> (b & 31);
  AT(19) = __clzll(wide) * 100 + __popcll(wide);
  AT(20) = max(min(a, b), -1000) + abs(a >> 1);
  AT(21) = (a & b) | (~a & 0x5555) ^ b;
  AT(22) = (int8_t)a * (uint16_t)b + (int16_t)b;
  AT(23) = __mul24(a, b) + (long long)a * b;
  unsigned field;
  asm("bfe.s32 %0, %1, %2, 7;" : "=r"(field) : "r"(a), "r"(b & 31));
  AT(24) = (int)field;
  asm("bfi.b32 %0, %1, %2, 9, 11;" : "=r"(field) : "r"(a), "r"(b));
  AT(25) = field;
  AT(26) = __vadd4(ua, ub);
  AT(27) = __rhadd(a, b) + __uhadd(ua, ub);
}

extern "C" __global__ void floats(const float* x, const float* y, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float a = x[i], b = y[i];
  AT(0) = a + b;
  AT(1) = a / b;
  AT(2) = sqrtf(fabsf(a));
  AT(3) = fmaf(a, b, -a);
  AT(4) = __fadd_rz(a, b);
  AT(5) = __fmul_ru(a, b);
  AT(6) = __fmaf_rd(a, b, 1.0f);
  AT(7) = __fdiv_rz(a, b);
  AT(8) = fminf(a, b) * fmaxf(a, 0.5f);
  AT(9) = (float)__float2int_rn(a);
  AT(10) = (float)__float2int_rd(a * 3);
  AT(11) = (float)__float2uint_rz(a);
  AT(12) = truncf(a) + ceilf(b) * 1024;
  AT(13) = copysignf(rintf(a), b);
  AT(14) = __int_as_float(__float_as_int(a) & ~0xFFFF) - a;
  AT(15) = (float)((double)a * b + 1e-3);
  AT(16) = (float)sqrt((double)fabsf(b)) / 3;
  AT(17) = isnan(a) ? 1.f : isinf(b) ? 2.f : signbit(a) ? 3.f : 4.f;
  AT(18) = __double2float_ru((double)a * b);
  AT(19) = (float)(long long)(a * 65536.f);
  AT(20) = __saturatef(a);
  AT(21) = expf(fminf(a, 20.f));
  AT(22) = logf(fabsf(a) + 1e-3f);
  AT(23) = rsqrtf(fabsf(b));
  AT(24) = tanhf(b);
  AT(25) = sinf(a);
  AT(26) = exp2f(b);
  AT(27) = __expf(fminf(b, 10.f));
  AT(28) = __fdividef(a, b);
}

extern "C" __global__ void halves(const uint16_t* x, const uint16_t* y, uint16_t* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  __half a = __ushort_as_half(x[i]), b = __ushort_as_half(y[i]);
  __nv_bfloat16 c = __ushort_as_bfloat16(x[i]), d = __ushort_as_bfloat16(y[i]);
  __half2 pair = __hfma2(__halves2half2(a, b), __halves2half2(b, b), __halves2half2(b, a));
  __nv_bfloat162 bpair = __hmul2(__halves2bfloat162(c, d), __halves2bfloat162(d, d));
  AT(0) = __half_as_ushort(a + b);
  AT(1) = __half_as_ushort(a * b);
  AT(2) = __half_as_ushort(__hfma(a, b, a));
  AT(3) = __half_as_ushort(__low2half(pair));
  AT(4) = __half_as_ushort(__high2half(pair));
  AT(5) = __half_as_ushort(__hmax(a, b));
  AT(6) = __half_as_ushort(__float2half_rn(__half2float(a) * 1.7f));
  AT(7) = __half_as_ushort(__float2half_rz(__half2float(b) * 1.7f));
  AT(8) = __half_as_ushort(__int2half_rn(__half2int_rz(a)));
  AT(9) = __bfloat16_as_ushort(c + d);
  AT(10) = __bfloat16_as_ushort(__hfma(c, d, c));
  AT(11) = __bfloat16_as_ushort(__low2bfloat16(bpair));
  AT(12) = __bfloat16_as_ushort(__float2bfloat16_rn(__bfloat162float(c) * 1.7f));
  AT(13) = __bfloat16_as_ushort(__hmin(c, d));
  AT(14) = __heq(a, b) | __hlt(a, b) << 1 | __hisnan(a) << 2 | __hge(c, d) << 3 | __hneu(c, d) << 4;
  AT(15) = __half_as_ushort(__habs(__hneg(a)) - b);
}

// Narrow formats: two floats to a pair of codes, and back.
extern "C" __global__ void narrow(const float2* x, uint16_t* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float2 v = x[i];
  __nv_fp4x2_storage_t e2m1 = __nv_cvt_float2_to_fp4x2(v, __NV_E2M1, cudaRoundNearest);
  __nv_fp8x2_storage_t e4m3 = __nv_cvt_float2_to_fp8x2(v, __NV_SATFINITE, __NV_E4M3);
  __nv_fp8x2_storage_t e5m2 = __nv_cvt_float2_to_fp8x2(v, __NV_SATFINITE, __NV_E5M2);
  float2 magnitude = make_float2(fabsf(v.x), fabsf(v.y));
  AT(0) = e2m1;
  AT(1) = e4m3;
  AT(2) = e5m2;
  AT(3) = __nv_cvt_float2_to_e8m0x2(magnitude, __NV_SATFINITE, cudaRoundPosInf);
  AT(4) = __nv_cvt_float2_to_e8m0x2(magnitude, __NV_SATFINITE, cudaRoundZero);
  __half2_raw back = __nv_cvt_fp4x2_to_halfraw2(e2m1, __NV_E2M1);
  AT(5) = back.x;
  AT(6) = back.y;
  back = __nv_cvt_fp8x2_to_halfraw2(e4m3, __NV_E4M3);
  AT(7) = back.x;
  AT(8) = back.y;
  back = __nv_cvt_fp8x2_to_halfraw2(e5m2, __NV_E5M2);
  AT(9) = back.x;
  AT(10) = back.y;
  AT(11) = __nv_cvt_e8m0_to_bf16raw(i & 0xFF).x;
}
