// Block-scaled mma.sync of sm_120a: C[M, N] = A @ B^T, a warp one tile of 16 x 8, operands from
// global memory straight into fragments.
//
// m16n8k64 (E2M1): lane 4 g + t holds codes 8 t .. 8 t + 7 of rows g and g + 8, and those 32
// further. Scales of A: lane t = 0 of a quad gives row g, lane 1 row g + 8 (thread-id 0); of B:
// lane t = 0 gives column g. All scales of a row lie in one register: four UE4M3 for 16 codes each.
// m16n8k32 (E4M3 x E2M1 in byte containers, code << 2): UE8M0, one a row.
#include "ptx.cuh"

DEV uint32_t word(const uint8_t* at) { return *reinterpret_cast<const uint32_t*>(at); }

extern "C" __global__ void mma_nvfp4(const uint8_t* a, const uint8_t* b, const uint8_t* sa,
    const uint8_t* sb,
                                     float* c, int n, int k) {
  int g = threadIdx.x / 4, t = threadIdx.x % 4, row = blockIdx.x * 16, column = blockIdx.y * 8;
  float d[4] = {};
  for (int k0 = 0; k0 < k; k0 += 64) {
    uint32_t x[4], y[2];
    for (int i = 0; i < 4; ++i)
      x[i] = word(a + ((row + g + i % 2 * 8) * k + k0 + 8 * t + i / 2 * 32) / 2);
    for (int i = 0; i < 2; ++i)
      y[i] = word(b + ((column + g) * k + k0 + 8 * t + i * 32) / 2);
    uint32_t xs = word(sa + ((row + g + t % 2 * 8) * k + k0) / 16);
    uint32_t ys = word(sb + ((column + g) * k + k0) / 16);
    asm volatile("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X"
                 ".f32.e2m1.e2m1.f32.ue4m3"
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {%11,"
                 " %12}, {%13}, {%14, %15};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]),
                   "r"(xs), "h"((uint16_t)0),
                   "h"((uint16_t)0), "r"(ys), "h"((uint16_t)0), "h"((uint16_t)0));
  }
  for (int i = 0; i < 4; ++i) c[(row + g + i / 2 * 8) * n + column + 2 * t + i % 2] = d[i];
}

extern "C" __global__ void mma_mxfp8_fp4(const uint8_t* a, const uint8_t* b, const uint8_t* sa,
    const uint8_t* sb,
                                         float* c, int n, int k) {
  int g = threadIdx.x / 4, t = threadIdx.x % 4, row = blockIdx.x * 16, column = blockIdx.y * 8;
  float d[4] = {};
  for (int k0 = 0; k0 < k; k0 += 32) {
    uint32_t x[4], y[2];
    for (int i = 0; i < 4; ++i)
      x[i] = word(a + (row + g + i % 2 * 8) * k + k0 + 4 * t + i / 2 * 16);
    for (int i = 0; i < 2; ++i) {  // four codes of 4 bits into bits 2-5 of four bytes
      uint32_t four =
          *reinterpret_cast<const uint16_t*>(b + ((column + g) * k + k0 + 4 * t + i * 16) / 2);
      y[i] = (four & 0xF) << 2 | (four & 0xF0) << 6 | (four & 0xF00) << 10 | (four & 0xF000) << 14;
    }
    uint32_t xs = sa[(row + g + t % 2 * 8) * k / 32 + k0 / 32],
        ys = sb[(column + g) * k / 32 + k0 / 32];
    asm volatile("mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X"
                 ".f32.e4m3.e2m1.f32.ue8m0"
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {%11,"
                 " %12}, {%13}, {%14, %15};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]),
                   "r"(xs), "h"((uint16_t)0),
                   "h"((uint16_t)0), "r"(ys), "h"((uint16_t)0), "h"((uint16_t)0));
  }
  for (int i = 0; i < 4; ++i) c[(row + g + i / 2 * 8) * n + column + 2 * t + i % 2] = d[i];
}
