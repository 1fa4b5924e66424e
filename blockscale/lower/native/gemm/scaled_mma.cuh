// Block-scaled mma.sync of sm_120a and sm_121a, and what brings operands to it and sums from it.
//
// One function an instruction, but for rows of sums.  Section numbers are those of the PTX ISA 9.0.
// blockscale/lower/sync prints the kernels that call these functions.
#pragma once
#include "gemm_tiles.cuh"
#include "mma.cuh"

// ---- Operands -----------------------------------------------------------------------------------

// 9.7.14.5.15 ldmatrix: rows of 16 codes of 4 bits, each in 8 of 16 bytes, to codes in bytes; the
// MMA takes them from bits 2 to 5 (9.7.14.5.14).
BS_INLINE void bs_ldmatrix4_of_8(uint32_t *to, uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n16.x4.shared.b8x16.b4x16_p64 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] <<= 2;
}

template <int COUNT>
struct BsWords {
  uint32_t w[COUNT];
};

// A lane's 1, 2 or 4 words of scales.
template <int COUNT>
BS_INLINE BsWords<COUNT> bs_load_word(uint32_t from) {
  BsWords<COUNT> v;
  if constexpr (COUNT == 1) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v.w[0]) : "r"(from) : "memory");
  } else if constexpr (COUNT == 2) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.w[0]), "=r"(v.w[1]) : "r"(from) : "memory");
  } else {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
                 : "r"(from)
                 : "memory");
  }
  return v;
}

// ---- Products -----------------------------------------------------------------------------------

// 9.7.14.5.14 mma with .block_scale: c += (a * sa) (b * sb)^T, 16 x 8.  a_byte, a_thread (b_...):
// byte-id and thread-id, of which bytes of which lanes' words are the scales (9.7.14.3).
#define BS_SCALED_MMA(shape_kind, types)                                                          \
  asm("mma.sync.aligned." shape_kind types                                                        \
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {%11, %12}, "      \
      "{%13}, {%14, %15};"                                                                        \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                            \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(sa),                \
        "h"(static_cast<uint16_t>(a_byte)), "h"(static_cast<uint16_t>(a_thread)), "r"(sb),        \
        "h"(static_cast<uint16_t>(b_byte)), "h"(static_cast<uint16_t>(b_thread)))

// NVFP4: a scale of UE4M3 for 16 codes of 4 bits.
template <int A_FORMAT, int B_FORMAT, int UE8M0>
BS_INLINE void bs_sync_mma_mxf4nvf4(float *c, const uint32_t *a, const uint32_t *b, uint32_t sa,
                                    int a_byte, int a_thread, uint32_t sb, int b_byte, int b_thread) {
  BS_SCALED_MMA("m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X",
                ".f32.e2m1.e2m1.f32.ue4m3");
}

// MXFP4: one of UE8M0 for 32.
template <int A_FORMAT, int B_FORMAT, int UE8M0>
BS_INLINE void bs_sync_mma_mxf4(float *c, const uint32_t *a, const uint32_t *b, uint32_t sa,
                                int a_byte, int a_thread, uint32_t sb, int b_byte, int b_thread) {
  BS_SCALED_MMA("m16n8k64.row.col.kind::mxf4.block_scale.scale_vec::2X",
                ".f32.e2m1.e2m1.f32.ue8m0");
}

// MXFP8, and with MXFP4: elements in bytes, of which those of 4 bits are BS_E2M1_OF_8.
template <int A_FORMAT, int B_FORMAT, int UE8M0>
BS_INLINE void bs_sync_mma_mxf8f6f4(float *c, const uint32_t *a, const uint32_t *b, uint32_t sa,
                                    int a_byte, int a_thread, uint32_t sb, int b_byte, int b_thread) {
  if constexpr (A_FORMAT == BS_E4M3 && B_FORMAT == BS_E4M3)
    BS_SCALED_MMA("m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X",
                  ".f32.e4m3.e4m3.f32.ue8m0");
  else if constexpr (A_FORMAT == BS_E4M3)
    BS_SCALED_MMA("m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X",
                  ".f32.e4m3.e2m1.f32.ue8m0");
  else
    BS_SCALED_MMA("m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X",
                  ".f32.e2m1.e4m3.f32.ue8m0");
}

// ---- Sums ---------------------------------------------------------------------------------------

// COLUMNS of a warp's 32 rows of sums to rows in shared memory, from the registers of tiles of 8
// columns, each of 2 tiles of 16 rows: lane 4 g + t has rows g and g + 8, columns 2 t and 2 t + 1.
template <int COLUMNS>
BS_INLINE void bs_sync_stage(uint32_t rows, const float *sums, int lane) {
  constexpr int PITCH = 4 * (COLUMNS + 4);
  uint32_t to = rows + lane / 4 * PITCH + lane % 4 * 8;
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; ++i) {
    uint32_t at = to + i % 4 * 8 * PITCH + i / 4 * 32;
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(sums[2 * i]), "f"(sums[2 * i + 1])
                 : "memory");
  }
}

// A lane's row of these.
template <int COLUMNS>
BS_INLINE void bs_sync_row(uint32_t *to, uint32_t rows, int lane) {
#pragma unroll
  for (int i = 0; i < COLUMNS; i += 4) {
    uint4 v = bs_load16_shared(rows + lane * (4 * (COLUMNS + 4)) + 4 * i);
    to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
  }
}
