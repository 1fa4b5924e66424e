// tcgen05: descriptors, tensor memory and matrix instructions as inline PTX.
#pragma once
#include "ptx.cuh"

enum Swizzle : uint64_t { PLAIN = 0, SW128 = 2, SW64 = 4, SW32 = 6 };

// Shared memory matrix descriptor: bits 0-13 address, 16-29 LBO, 32-45 SBO (all in 16 bytes),
// 46-48 the constant 1, 61-63 swizzle.
DEV uint64_t matrix(uint32_t address, uint32_t lbo, uint32_t sbo, Swizzle swizzle) {
  return uint64_t((address & 0x3FFFF) >> 4) | uint64_t(lbo >> 4) << 16 | uint64_t(sbo >> 4) << 32 |
         uint64_t(1) << 46 | uint64_t(swizzle) << 61;
}

template <int G> DEV void tmem_alloc(uint32_t to, uint32_t columns) {
  if (G == 1) asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;"
      :: "r"(to), "r"(columns) : "memory");
  else asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;"
      :: "r"(to), "r"(columns) : "memory");
}

template <int G> DEV void tmem_dealloc(uint32_t at, uint32_t columns) {
  if (G == 1) asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;"
      :: "r"(at), "r"(columns) : "memory");
  else asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;"
      :: "r"(at), "r"(columns) : "memory");
}

template <int G> DEV void tmem_relinquish() {
  if (G == 1) asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
  else asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;");
}

DEV void fence_before() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
DEV void fence_after() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }
DEV void wait_ld() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }
DEV void wait_st() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }

DEV void mma_commit(uint32_t bar) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
      :: "r"(bar) : "memory");
}

DEV void mma_commit_pair(uint32_t bar, uint16_t mask) {
  asm volatile(
      "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64"
      " [%0], %1;"
      :: "r"(bar), "h"(mask) : "memory");
}

// 32 rows of 16 bytes, to the same lanes of all four sub-partitions: a scale atom of 128 x 4.
template <int G> DEV void copy_scales(uint32_t to, uint32_t from) {
  uint64_t desc = matrix(from, 0, 128, PLAIN);
  if (G == 1) asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;"
      :: "r"(to), "l"(desc) : "memory");
  else asm volatile("tcgen05.cp.cta_group::2.32x128b.warpx4 [%0], %1;" :: "r"(to), "l"(desc)
      : "memory");
}

#define TILE_MMA(group, kind)                                                                     \
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %4, 0;\n"                                       \
               " tcgen05.mma.cta_group::" group ".kind::" kind " [%0], %1, %2, %3, p;\n}"          \
               :: "r"(d), "l"(a), "l"(b), "r"(idesc), "r"(more) : "memory")
#define SCALED_MMA(group, kind)                                                                   \
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %6, 0;\n"                                       \
               " tcgen05.mma.cta_group::" group ".kind::" kind                                    \
               " [%0], %1, %2, %3, [%4], [%5], p;\n}"                                             \
               :: "r"(d), "l"(a), "l"(b), "r"(idesc), "r"(sfa), "r"(sfb), "r"(more) : "memory")

template <int G>
DEV void mma_nvfp4(uint32_t d, uint64_t a, uint64_t b, uint32_t idesc, uint32_t sfa,
    uint32_t sfb, uint32_t more) {
  if (G == 1) SCALED_MMA("1", "mxf4nvf4.block_scale.block16");
  else SCALED_MMA("2", "mxf4nvf4.block_scale.block16");
}

DEV void mma_mxf8f6f4(uint32_t d, uint64_t a, uint64_t b, uint32_t idesc, uint32_t sfa,
    uint32_t sfb, uint32_t more) {
  SCALED_MMA("1", "mxf8f6f4.block_scale.block32");
}

DEV void mma_f16(uint32_t d, uint64_t a, uint64_t b, uint32_t idesc, uint32_t more) {
  TILE_MMA("1", "f16");
}

DEV void mma_tf32(uint32_t d, uint64_t a, uint64_t b, uint32_t idesc, uint32_t more) {
  TILE_MMA("1", "tf32");
}

DEV void mma_f8(uint32_t d, uint64_t a, uint64_t b, uint32_t idesc, uint32_t more) {
  TILE_MMA("1", "f8f6f4");
}

DEV void mma_i8(uint32_t d, uint64_t a, uint64_t b, uint32_t idesc, uint32_t more) {
  TILE_MMA("1", "i8");
}

// A from tensor memory: two f16 neighbours of K a cell, row = lane.
DEV void mma_f16_tmem(uint32_t d, uint32_t a, uint64_t b, uint32_t idesc, uint32_t more) {
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %4, 0;\n"
               " tcgen05.mma.cta_group::1.kind::f16 [%0], [%1], %2, %3, p;\n}"
               :: "r"(d), "r"(a), "l"(b), "r"(idesc), "r"(more) : "memory");
}

#define FOUR(v, i) "=r"(v[i]), "=r"(v[i + 1]), "=r"(v[i + 2]), "=r"(v[i + 3])

// 32 columns of the lane of each thread, from column `at`.
DEV void tmem_load(uint32_t (&v)[32], uint32_t at) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x32.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11,"
      " %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29,"
      " %30, %31}, [%32];"
      : FOUR(v, 0), FOUR(v, 4), FOUR(v, 8), FOUR(v, 12), FOUR(v, 16), FOUR(v, 20), FOUR(v, 24),
        FOUR(v, 28)
      : "r"(at) : "memory");
}

DEV void tmem_store(uint32_t at, const uint32_t (&v)[8]) {
  asm volatile("tcgen05.st.sync.aligned.32x32b.x8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8};"
               :: "r"(at), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"(v[4]), "r"(v[5]),
                  "r"(v[6]), "r"(v[7])
               : "memory");
}
