// Instructions of warps that multiply 16-bit numbers: loads, mma.sync, wgmma, exchange of registers.
//
// One function an instruction.  Section numbers are those of the PTX ISA 9.0.
#pragma once
#include "tma.cuh"

// ---- Loads --------------------------------------------------------------------------------------

// 9.7.9.25.4.1 cp.async.bulk: contiguous bytes to shared memory; `bar` is told of them.
BS_INLINE void bs_bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t bar,
                            uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(bar), "l"(policy)
      : "memory");
}

// 9.7.9.25.3.1 cp.async: 16 bytes, of which `bytes` are loaded and the rest is zero.
BS_INLINE void bs_cp_async16(uint32_t to, const void *from, int bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// All 16.
BS_INLINE void bs_cp_async16_whole(uint32_t to, const void *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// All 16, with an L2 cache policy.
BS_INLINE void bs_cp_async16_hint(uint32_t to, const void *from, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "l"(policy)
               : "memory");
}

// 4 bytes, of which `bytes` are loaded.
BS_INLINE void bs_cp_async4(uint32_t to, const void *from, int bytes = 4) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// 9.7.13.15.17: an arrival at `bar` once this thread's copies are there; the barrier counts it.
BS_INLINE void bs_cp_async_arrive(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

BS_INLINE void bs_cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// 9.7.9.13 st.async: 16 bytes to any CTA of the cluster, which `bar` of that CTA counts.
BS_INLINE void bs_store16_async(uint32_t to, uint4 v, uint32_t bar) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
      ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(bar)
      : "memory");
}

// ---- mma.sync -----------------------------------------------------------------------------------

BS_INLINE void bs_ldmatrix4(uint32_t *to, uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

template <bool BF16>
BS_INLINE void bs_mma16816(float *c, const uint32_t *a, uint32_t b0, uint32_t b1) {
  if (BF16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// ---- wgmma --------------------------------------------------------------------------------------

enum BsOperand { BS_OF_F16, BS_OF_BF16, BS_OF_E4M3 };

// template <int ADD = 1> static void run(float *c, const uint32_t *a, uint64_t b): c = a b + ADD c
template <BsOperand TYPE, int N>
struct BsWgmma;

BS_INLINE void bs_wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
BS_INLINE void bs_wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int N>
BS_INLINE void bs_wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Descriptor of rows of 128 bytes, swizzled: K-major, 8 rows to 1024 bytes (9.7.15.5.1.2).
BS_INLINE uint64_t bs_wgmma_rows128(uint32_t at) {
  return (static_cast<uint64_t>(1) << 62) | (static_cast<uint64_t>(64) << 32) |
         (static_cast<uint64_t>(1) << 16) | ((at & 0x3FFFF) >> 4);
}

// The same of rows of 64 bytes: 8 rows to 512 bytes.
BS_INLINE uint64_t bs_wgmma_rows64(uint32_t at) {
  return (static_cast<uint64_t>(2) << 62) | (static_cast<uint64_t>(32) << 32) |
         (static_cast<uint64_t>(1) << 16) | ((at & 0x3FFFF) >> 4);
}

// ---- Registers ----------------------------------------------------------------------------------

// Rows and columns of an 8x8 matrix of 16-bit numbers change places.
BS_INLINE uint32_t bs_transpose8(uint32_t a) {
  uint32_t d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

template <int REGISTERS>
BS_INLINE void bs_more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
BS_INLINE void bs_fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- Values -------------------------------------------------------------------------------------

// 1 / (1 + e^-x), by the approximations of the exponential and of the quotient.
BS_INLINE float bs_sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }
