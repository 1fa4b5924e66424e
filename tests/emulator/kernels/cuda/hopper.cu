// Matrix products of Ampere and Hopper (sm_90a), C[M, N] float32 = A[M, K] @ B[N, K]^T.
//
// mma_sync: 64 x 64 a CTA, four warps of 32 x 32; two stages of cp.async (source size 0 beyond K),
// rows of 80 bytes so that ldmatrix meets no bank twice. wgmma_*: warp 4 loads 128-byte rows by TMA
// (SWIZZLE_128B), a warp group multiplies 64 x 64.
#include <cuda_fp16.h>

#include "ptx.cuh"

DEV void copy_16(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(bytes)
      : "memory");
}

DEV void ldmatrix_4(uint32_t (&r)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

DEV void mma_16816(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3},"
               " {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

constexpr int PITCH = 40;  // halves a row: 32 of K and 8 unused

DEV void fetch(__half (*to)[PITCH], const __half* from, int k, int columns) {
  for (int i = threadIdx.x; i < 64 * 4; i += 128) {
    int row = i / 4, at = k + i % 4 * 8, left = min(max(columns - at, 0), 8);
    copy_16(shared(&to[row][i % 4 * 8]), from + size_t(row) * columns + at, 2 * left);
  }
}

extern "C" __global__ void __launch_bounds__(128) mma_sync(const __half* a, const __half* b,
    float* c, int n, int k) {
  __shared__ __align__(16) __half tile[2][2][64][PITCH];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m0 = warp / 2 * 32, n0 = warp % 2 * 32;
  a += size_t(blockIdx.x) * 64 * k;
  b += size_t(blockIdx.y) * 64 * k;
  float acc[2][4][4] = {};
  fetch(tile[0][0], a, 0, k);
  fetch(tile[0][1], b, 0, k);
  asm volatile("cp.async.commit_group;" ::: "memory");
  for (int k0 = 0, stage = 0; k0 < k; k0 += 32, stage ^= 1) {
    if (k0 + 32 < k) {
      fetch(tile[stage ^ 1][0], a, k0 + 32, k);
      fetch(tile[stage ^ 1][1], b, k0 + 32, k);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    if (ok(LOAD_WAIT)) asm volatile("cp.async.wait_group 1;" ::: "memory");
    if (ok(CTA_BARRIER)) __syncthreads();
    for (int kk = 0; kk < 32; kk += 16) {
      uint32_t left[2][4], right[2][4];
      for (int i = 0; i < 2; ++i) {
        ldmatrix_4(left[i], shared(&tile[stage][0][m0 + 16 * i + lane % 16][kk + lane / 16 * 8]));
        ldmatrix_4(right[i],
            shared(&tile[stage][1][n0 + 16 * i + lane % 8 + lane / 16 * 8][kk + lane / 8 % 2 * 8]));
      }
      for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 4; ++j) mma_16816(acc[i][j], left[i], right[j / 2][j % 2 * 2],
            right[j / 2][j % 2 * 2 + 1]);
    }
    if (ok(EMPTY_WAIT)) __syncthreads();
  }
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 4; ++j)
      for (int h = 0; h < 2; ++h) {
        int row = blockIdx.x * 64 + m0 + 16 * i + 8 * h + lane / 4,
            column = blockIdx.y * 64 + n0 + 8 * j + lane % 4 * 2;
        *reinterpret_cast<float2*>(c + size_t(row) * n + column) = make_float2(acc[i][j][2 * h],
            acc[i][j][2 * h + 1]);
      }
}

// Shared memory matrix descriptor of wgmma: as tcgen05's, without the constant; 128B swizzle is 1.
DEV uint64_t matrix(uint32_t address) {
  return uint64_t((address & 0x3FFFF) >> 4) | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 |
      uint64_t(1) << 62;
}

#define FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA(shape, types, tail)                                                                \
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %34, 0;\n"                                     \
      " wgmma.mma_async.sync.aligned." shape "." types " {%0, %1, %2, %3, %4, %5, %6, %7, %8,"     \
      " %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26,"  \
      " %27, %28, %29, %30, %31}, %32, %33, p, 1, 1" tail ";\n}"                                  \
      : FOUR(d, 0), FOUR(d, 4), FOUR(d, 8), FOUR(d, 12), FOUR(d, 16), FOUR(d, 20), FOUR(d, 24),   \
        FOUR(d, 28)                                                                              \
      : "l"(a), "l"(b), "r"(more) : "memory")

template <bool F16> DEV void wgmma(float (&d)[32], uint64_t a, uint64_t b, int more) {
  if (F16) WGMMA("m64n64k16", "f32.f16.f16", ", 0, 0");
  else WGMMA("m64n64k32", "f32.e4m3.e4m3", "");
}

struct Shared {
  uint8_t a[2][64 * 128], b[2][64 * 128];
  uint64_t full[2], empty[2];
};

template <bool F16> DEV void warp_groups(const CUtensorMap* a, const CUtensorMap* b, float* c,
    int n, int steps) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      mbar_init(shared(&s.full[i]), 1);
      mbar_init(shared(&s.empty[i]), 128);
    }
    mbar_init_fence();
  }
  __syncthreads();
  if (warp == 4) {
    if (!elect()) return;
    for (int t = 0; t < steps; ++t) {
      int x = t * (F16 ? 64 : 128), i = t % 2;
      mbar_wait(shared(&s.empty[i]), t / 2 % 2 ^ 1);
      mbar_expect(shared(&s.full[i]), 2 * 64 * 128);
      tma_load_2d(shared(s.a[i]), a, x, blockIdx.x * 64, shared(&s.full[i]));
      tma_load_2d(shared(s.b[i]), b, x, blockIdx.y * 64, shared(&s.full[i]));
    }
    return;
  }
  float d[32] = {};
  for (int t = 0; t < steps; ++t) {
    if (ok(FULL_WAIT)) mbar_wait(shared(&s.full[t % 2]), t / 2 % 2);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    for (int k = 0; k < 4; ++k)
      wgmma<F16>(d, matrix(shared(s.a[t % 2]) + 32 * k), matrix(shared(s.b[t % 2]) + 32 * k),
          t + k > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    if (ok(DONE_WAIT)) asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    mbar_arrive(shared(&s.empty[t % 2]));
  }
  for (int i = 0; i < 32; ++i) {
    int row = blockIdx.x * 64 + 16 * warp + lane / 4 + i / 2 % 2 * 8,
        column = blockIdx.y * 64 + i / 4 * 8 + lane % 4 * 2 + i % 2;
    c[size_t(row) * n + column] = d[i];
  }
}

extern "C" __global__ void __launch_bounds__(160) wgmma_f16(
    const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, float* c,
        int n, int steps) {
  warp_groups<true>(&a, &b, c, n, steps);
}

extern "C" __global__ void __launch_bounds__(160) wgmma_e4m3(
    const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, float* c,
        int n, int steps) {
  warp_groups<false>(&a, &b, c, n, steps);
}
