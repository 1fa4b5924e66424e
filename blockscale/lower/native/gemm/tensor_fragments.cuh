// tcgen05.mma of decoded weights: fragments of warps to tensor memory, products, sums back.
//
// Lanes of tensor memory are rows of the weight.  A 32-bit column holds two numbers of 16 bits that are
// neighbours along K, or a sum in float32, whose columns are rows of x.  A warp reaches 32 lanes.
#pragma once
#include "tcgen05.cuh"

// 9.7.16.4.2, Table 43: instruction descriptor of kind::f16, K-major operands, sums in float32.
__host__ __device__ constexpr uint32_t bs_half_desc(bool bf16, int m, int n) {
  return 1u << 4 | uint32_t(bf16) << 7 | uint32_t(bf16) << 10 | uint32_t(n >> 3) << 17 |
         uint32_t(m >> 4) << 24;
}

// 9.7.16.8.4 tcgen05.st.16x128b.x8: the A fragments of four MMAs, 16 rows x 64 k, 32 columns from `at`
// on.  Registers of a thread (g, t), four for each MMA: rows g and g + 8 of k 2 t and 2 t + 1, then both
// of k 2 t + 8 and 2 t + 9: what mma.sync and wgmma take.  Then bs_tcgen05_wait_st.
BS_INLINE void bs_tcgen05_st_fragments(uint32_t at, const uint32_t *v) {
  asm volatile("tcgen05.st.sync.aligned.16x128b.x8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, "
               "%11, %12, %13, %14, %15, %16};" ::"r"(at),
               "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"(v[4]), "r"(v[5]), "r"(v[6]), "r"(v[7]),
               "r"(v[8]), "r"(v[9]), "r"(v[10]), "r"(v[11]), "r"(v[12]), "r"(v[13]), "r"(v[14]),
               "r"(v[15])
               : "memory");
}

// 9.7.16.8.5 tcgen05.wait::st: what earlier stores of the warp wrote is there.
BS_INLINE void bs_tcgen05_wait_st() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }

// 9.7.16.10.9.1 tcgen05.mma: d = a y^T + (more ? d : 0), K = 16; d and a in tensor memory.
BS_INLINE void bs_tcgen05_mma_f16(uint32_t d, uint32_t a, uint64_t y, uint32_t idesc, uint32_t more) {
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %4, 0;\n"
               " tcgen05.mma.cta_group::1.kind::f16 [%0], [%1], %2, %3, p;\n}" ::"r"(d), "r"(a), "l"(y),
               "r"(idesc), "r"(more)
               : "memory");
}

#define BS_F4(i) "=f"(c[i]), "=f"(c[i + 1]), "=f"(c[i + 2]), "=f"(c[i + 3])
#define BS_F8(i) BS_F4(i), BS_F4(i + 4)

// 9.7.16.8.3 tcgen05.ld.16x256b: sums of 16 rows of the weight and ROWS rows of x (16, 32, 64) from
// column `at` on, as mma.sync leaves them: of each 8 rows of x four.  Then bs_tcgen05_wait_ld.
template <int ROWS>
BS_INLINE void bs_tcgen05_ld_sums(float *c, uint32_t at) {
  static_assert(ROWS == 16 || ROWS == 32 || ROWS == 64);
  if constexpr (ROWS == 16) {
    asm volatile("tcgen05.ld.sync.aligned.16x256b.x2.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
                 : BS_F8(0) : "r"(at) : "memory");
  } else if constexpr (ROWS == 32) {
    asm volatile("tcgen05.ld.sync.aligned.16x256b.x4.b32 " BS_P16 "}, [%16];"
                 : BS_F8(0), BS_F8(8) : "r"(at) : "memory");
  } else {
    asm volatile("tcgen05.ld.sync.aligned.16x256b.x8.b32 " BS_P32 "}, [%32];"
                 : BS_F8(0), BS_F8(8), BS_F8(16), BS_F8(24) : "r"(at) : "memory");
  }
}
