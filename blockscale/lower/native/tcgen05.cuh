// Instructions of Blackwell GEMM kernels: tcgen05 and its descriptors, one function an instruction.
//
// Arguments are plain integers: shared addresses as in tma.cuh, tensor memory addresses
// lane << 16 | column, matrix descriptors 64-bit.  G is the CTA group, 1 or 2.  Section numbers are
// those of the PTX ISA 9.0.
#pragma once
#include "tma.cuh"

// ---- Descriptors --------------------------------------------------------------------------------

// 9.7.16.4.1 matrix descriptor of K-major rows of ROW_BYTES (32, 64 or 128), swizzled over their
// width: bits 0-13 address, 32-45 stride of 8 rows (both in 16 bytes), 46-48 the constant 1, 61-63
// swizzle.  Shared memory ends below 2^18, so offsets may be added to the lowest bits.
template <int ROW_BYTES>
BS_INLINE uint64_t bs_matrix_desc(uint32_t address) {
  constexpr uint64_t swizzle = ROW_BYTES == 128 ? 2 : ROW_BYTES == 64 ? 4 : 6;
  constexpr uint64_t fixed =
      uint64_t(8 * ROW_BYTES >> 4) << 32 | uint64_t(1) << 46 | swizzle << 61;
  return fixed | (address >> 4);
}

// 9.7.16.4.1: a 128x4 tile of scales, 32 rows of 16 bytes without swizzle, for bs_tcgen05_cp.
BS_INLINE uint64_t bs_scale_desc(uint32_t address) {
  constexpr uint64_t fixed = uint64_t(128 >> 4) << 32 | uint64_t(1) << 46;
  return fixed | (address >> 4);
}

// The descriptor `of_zero` of address 0 for address low * 16.
BS_INLINE uint64_t bs_desc_at(uint64_t of_zero, uint32_t low) {
  uint64_t desc;
  asm("mov.b64 %0, {%1, %2};" : "=l"(desc) : "r"(low), "r"(static_cast<uint32_t>(of_zero >> 32)));
  return desc;
}

enum BsElement { BS_E4M3 = 0, BS_E2M1 = 1, BS_E2M1_OF_8 = 5 };  // BS_E2M1_OF_8: of mxf8f6f4

// 9.7.16.4.2, Tables 43 and 44: instruction descriptor of K-major operands.  ue8m0: 1 for scales of
// E8M0, 0 for UE4M3; sfa_id, sfb_id: byte (pair of bytes) of the scales in tensor memory.
__host__ __device__ constexpr uint32_t bs_instruction_desc(int m, int n, int a_format, int b_format,
                                                           int ue8m0, int sfa_id, int sfb_id) {
  return uint32_t(sfb_id) << 4 | uint32_t(a_format) << 7 | uint32_t(b_format) << 10 |
         uint32_t(n >> 3) << 17 | uint32_t(ue8m0) << 23 | uint32_t(m >> 7) << 27 |
         uint32_t(sfa_id) << 29;
}

// ---- Tensor memory ------------------------------------------------------------------------------

#define BS_GROUP(G, head, tail, ...)                                        \
  if constexpr (G == 1) asm volatile(head ".cta_group::1" tail __VA_ARGS__); \
  else asm volatile(head ".cta_group::2" tail __VA_ARGS__)

// 9.7.16.7.1 tcgen05.alloc: a whole warp (of both CTAs); the address is written to shared `to`.
template <int G>
BS_INLINE void bs_tcgen05_alloc(uint32_t to, uint32_t columns) {
  BS_GROUP(G, "tcgen05.alloc", ".sync.aligned.shared::cta.b32 [%0], %1;", ::"r"(to),
           "r"(columns) : "memory");
}

// 9.7.16.7.1 tcgen05.dealloc: a whole warp (of both CTAs).
template <int G>
BS_INLINE void bs_tcgen05_dealloc(uint32_t at, uint32_t columns) {
  BS_GROUP(G, "tcgen05.dealloc", ".sync.aligned.b32 %0, %1;", ::"r"(at), "r"(columns) : "memory");
}

// 9.7.16.7.1: this CTA allocates no more.
template <int G>
BS_INLINE void bs_tcgen05_relinquish() {
  BS_GROUP(G, "tcgen05.relinquish_alloc_permit", ".sync.aligned;", ::: "memory");
}

// 9.7.16.11.1 tcgen05.fence.
BS_INLINE void bs_tcgen05_fence_before() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
BS_INLINE void bs_tcgen05_fence_after() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// 9.7.16.9.1 tcgen05.cp: a 128x4 tile of scales to 4 columns of tensor memory, the same in the four
// sub-partitions; with G = 2 in both CTAs, each from its own shared memory.
template <int G>
BS_INLINE void bs_tcgen05_cp(uint32_t to, uint64_t scale_desc) {
  BS_GROUP(G, "tcgen05.cp", ".32x128b.warpx4 [%0], %1;", ::"r"(to), "l"(scale_desc) : "memory");
}

#define BS_MMA_OF(group, kind)                                                                  \
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %6, 0;\n"                                     \
               " tcgen05.mma.cta_group::" group ".kind::" kind                                  \
               " [%0], %1, %2, %3, [%4], [%5], p;\n}" ::"r"(d), "l"(x), "l"(y), "r"(idesc),     \
               "r"(sfx), "r"(sfy), "r"(more)                                                    \
               : "memory")
#define BS_MMA(G, kind)                       \
  if constexpr (G == 1) BS_MMA_OF("1", kind); \
  else BS_MMA_OF("2", kind)

// 9.7.16.10.9 tcgen05.mma, E2M1 with UE4M3 scales of 16: d = x y^T + (more ? d : 0), K = 64.
template <int G>
BS_INLINE void bs_tcgen05_mma_mxf4nvf4(uint32_t d, uint64_t x, uint64_t y, uint32_t idesc,
                                       uint32_t sfx, uint32_t sfy, uint32_t more) {
  BS_MMA(G, "mxf4nvf4.block_scale.block16");
}

// 9.7.16.10.9 tcgen05.mma, E2M1 with E8M0 scales of 32, K = 64.
template <int G>
BS_INLINE void bs_tcgen05_mma_mxf4(uint32_t d, uint64_t x, uint64_t y, uint32_t idesc, uint32_t sfx,
                                   uint32_t sfy, uint32_t more) {
  BS_MMA(G, "mxf4.block_scale.block32");
}

// 9.7.16.10.9 tcgen05.mma, 8-bit and padded 4-bit numbers with E8M0 scales of 32, K = 32.
template <int G>
BS_INLINE void bs_tcgen05_mma_mxf8f6f4(uint32_t d, uint64_t x, uint64_t y, uint32_t idesc,
                                       uint32_t sfx, uint32_t sfy, uint32_t more) {
  BS_MMA(G, "mxf8f6f4.block_scale.block32");
}

// 9.7.16.12.1 tcgen05.commit: an arrival when all MMAs and copies issued before are done.
template <int G>
BS_INLINE void bs_tcgen05_commit(uint32_t bar) {
  BS_GROUP(G, "tcgen05.commit", ".mbarrier::arrive::one.shared::cluster.b64 [%0];", ::"r"(bar)
           : "memory");
}

// 9.7.16.12.1 .multicast::cluster: an arrival in every CTA of `mask`.
template <int G>
BS_INLINE void bs_tcgen05_commit_multicast(uint32_t bar, uint32_t mask) {
  BS_GROUP(G, "tcgen05.commit",
           ".mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;", ::"r"(bar),
           "h"(static_cast<uint16_t>(mask)) : "memory");
}

#define BS_R4(i) "=r"(v[i]), "=r"(v[i + 1]), "=r"(v[i + 2]), "=r"(v[i + 3])
#define BS_R16(i) BS_R4(i), BS_R4(i + 4), BS_R4(i + 8), BS_R4(i + 12)
#define BS_P16 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define BS_P32                                                                           \
  BS_P16                                                                                 \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"

// 9.7.16.8.3 tcgen05.ld.32x32b: N columns (16 or 32) from column `at` of the lane of each thread of
// a warp; `at` names the warp's first lane.  Then bs_tcgen05_wait_ld.
template <int N>
BS_INLINE void bs_tcgen05_ld(uint32_t *v, uint32_t at) {
  static_assert(N == 16 || N == 32);
  if constexpr (N == 16) {
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x16.b32 " BS_P16 "}, [%16];" : BS_R16(0)
                 : "r"(at) : "memory");
  } else {
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x32.b32 " BS_P32 "}, [%32];"
                 : BS_R16(0), BS_R16(16) : "r"(at) : "memory");
  }
}

// 9.7.16.8.5 tcgen05.wait::ld: the registers of earlier loads are there.
BS_INLINE void bs_tcgen05_wait_ld() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }
