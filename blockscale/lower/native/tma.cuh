// Instructions that Blackwell GEMM kernels share with others: threads of a cluster, mbarrier, TMA.
//
// One function an instruction.  Arguments are plain integers: shared addresses are 32-bit
// (shared::cta, which is also the shared::cluster address of the own CTA).  G is the CTA group, 1
// or 2.  Section numbers are those of the PTX ISA 9.0.
#pragma once
#include <cstdint>

#include "memory.cuh"

// A CUtensorMap, without its header; as a parameter of a kernel `const __grid_constant__`.
struct alignas(64) BsTensorMap {
  uint64_t opaque[16];
};

// ---- Threads ------------------------------------------------------------------------------------

// 9.7.9.20 cvta: the shared::cta address of a pointer to shared memory.
BS_INLINE uint32_t bs_shared(const void *p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 9.7.13.15 elect.sync: true in one thread of a converged warp.
BS_INLINE bool bs_elect() {
  uint32_t yes;
  asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}"
               : "=r"(yes));
  return yes;
}

// 10.12 %cluster_ctarank.
BS_INLINE uint32_t bs_cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// 9.7.13.4 barrier.cluster: all threads of the cluster; writes before it are seen after it.
BS_INLINE void bs_cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;"
               ::: "memory");
}

// 9.7.13.4 barrier.cluster, its two halves: what is before the one is done when the other returns.
BS_INLINE void bs_cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
BS_INLINE void bs_cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// 9.7.13.1 bar.sync: `threads` threads of whole warps.
BS_INLINE void bs_named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// 9.7.9.23 mapa: the address of the same variable in CTA `rank` of the cluster.
BS_INLINE uint32_t bs_map_rank(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// 9.7.13.13 griddepcontrol: nothing before may read what the preceding kernel writes.
BS_INLINE void bs_grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// 9.7.13.13: the following kernel may start.
BS_INLINE void bs_grid_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// 9.7.9.8 ld.shared::cluster: 16 bytes of any CTA of the cluster.
BS_INLINE uint4 bs_load16_cluster(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

// 9.7.9.8 ld.shared::cluster: 4 bytes of any CTA of the cluster.
BS_INLINE uint32_t bs_load4_cluster(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}

// 9.7.9.8 ld.shared: 16 bytes.
BS_INLINE uint4 bs_load16_shared(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

// 9.7.9.11 st.shared: 16 bytes.
BS_INLINE void bs_store16_shared(uint32_t to, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// ---- mbarrier -----------------------------------------------------------------------------------

// 9.7.13.16.9 mbarrier.init.
BS_INLINE void bs_mbar_init(uint32_t bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

// 9.7.13.5 fence.mbarrier_init: once after all mbar_init, before the cluster barrier.
BS_INLINE void bs_mbar_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// 9.7.13.16.13 mbarrier.arrive of the own CTA.
BS_INLINE void bs_mbar_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// 9.7.13.16.13: `bar` is a shared::cluster address (bs_map_rank).
BS_INLINE void bs_mbar_arrive_cluster(uint32_t bar) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(bar)
               : "memory");
}

// The same of a thread that has read what TMA may then overwrite, and has written nothing that others read:
// a release at cluster scope waits for all memory.
BS_INLINE void bs_mbar_arrive_read(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}

// 9.7.13.16.13 mbarrier.arrive.expect_tx: arrive, and the phase also waits for `bytes`.
BS_INLINE void bs_mbar_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}

// 9.7.13.16.16 mbarrier.try_wait.parity, until the phase of this parity has completed; test_wait,
// which does not suspend the thread, before sm_90.
BS_INLINE void bs_mbar_wait(uint32_t bar, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n .reg .pred p;\n"
      "again:\n mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n @!p bra again;\n}" ::"r"(
          bar),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n .reg .pred p;\n"
      "again:\n mbarrier.test_wait.parity.shared::cta.b64 p, [%0], %1;\n @!p bra again;\n}" ::"r"(
          bar),
      "r"(parity)
      : "memory");
#endif
}

// The same where threads of other CTAs arrive, or their st.async.  Not for TMA and tcgen05.commit, which need no
// acquire at cluster scope: it invalidates the L1 cache at every wait.
BS_INLINE void bs_mbar_wait_cluster(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n .reg .pred p;\n"
      "again:\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
      " @!p bra again;\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}

template <bool CLUSTER>
BS_INLINE void bs_mbar_wait_from(uint32_t bar, uint32_t parity) {
  if constexpr (CLUSTER) bs_mbar_wait_cluster(bar, parity);
  else bs_mbar_wait(bar, parity);
}

// ---- TMA ----------------------------------------------------------------------------------------

// 9.7.9.16 prefetch.tensormap: of a map among the kernel's parameters.
BS_INLINE void bs_tma_prefetch_map(const void *map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// 9.7.9.18 createpolicy, for the *_hint loads: what is read once leaves the L2 cache first.
BS_INLINE uint64_t bs_policy(bool once) {
  uint64_t first, normal;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
  return once ? first : normal;
}

#define BS_TMA_LOAD(dims, group, more) \
  "cp.async.bulk.tensor." dims group  \
  ".shared::cluster.global.tile.mbarrier::complete_tx::bytes" more " "

// 9.7.9.25.5.2 cp.async.bulk.tensor, global to shared; x is the innermost coordinate.  With G = 2
// the barrier may lie in either CTA of the pair.
template <int G>
BS_INLINE void bs_tma_load_2d(uint32_t to, const void *map, int x, int y, uint32_t bar) {
  if constexpr (G == 1) {
    asm volatile(BS_TMA_LOAD("2d", "", "") "[%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(map),
                 "r"(x), "r"(y), "r"(bar)
                 : "memory");
  } else {
    asm volatile(BS_TMA_LOAD("2d", ".cta_group::2", "") "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(map), "r"(x), "r"(y), "r"(bar)
                 : "memory");
  }
}

// 9.7.9.25.5.2 with an L2 cache policy.
template <int G>
BS_INLINE void bs_tma_load_2d_hint(uint32_t to, const void *map, int x, int y, uint32_t bar,
                                   uint64_t policy) {
  if constexpr (G == 1) {
    asm volatile(BS_TMA_LOAD("2d", "", ".L2::cache_hint") "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(
                     to),
                 "l"(map), "r"(x), "r"(y), "r"(bar), "l"(policy)
                 : "memory");
  } else {
    asm volatile(BS_TMA_LOAD("2d", ".cta_group::2", ".L2::cache_hint")
                 "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(map), "r"(x), "r"(y), "r"(bar), "l"(policy)
                 : "memory");
  }
}

// 9.7.9.25.5.2 .multicast::cluster: to the same place in every CTA of `mask`, whose own barrier
// (with G = 2: the barrier of its pair's CTA that `bar` lies in) counts the bytes.
template <int G>
BS_INLINE void bs_tma_load_2d_multicast(uint32_t to, const void *map, int x, int y, uint32_t bar,
                                        uint32_t mask) {
  uint16_t ctas = static_cast<uint16_t>(mask);
  if constexpr (G == 1) {
    asm volatile(BS_TMA_LOAD("2d", "", ".multicast::cluster") "[%0], [%1, {%2, %3}], [%4], %5;" ::
                     "r"(to),
                 "l"(map), "r"(x), "r"(y), "r"(bar), "h"(ctas)
                 : "memory");
  } else {
    asm volatile(BS_TMA_LOAD("2d", ".cta_group::2", ".multicast::cluster")
                 "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(map), "r"(x), "r"(y), "r"(bar), "h"(ctas)
                 : "memory");
  }
}

// 9.7.9.25.5.2, three dimensions.
template <int G>
BS_INLINE void bs_tma_load_3d(uint32_t to, const void *map, int x, int y, int z, uint32_t bar) {
  if constexpr (G == 1) {
    asm volatile(BS_TMA_LOAD("3d", "", "") "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to), "l"(map),
                 "r"(x), "r"(y), "r"(z), "r"(bar)
                 : "memory");
  } else {
    asm volatile(BS_TMA_LOAD("3d", ".cta_group::2", "") "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(bar)
                 : "memory");
  }
}

// 9.7.9.25.5.2 .multicast::cluster, three dimensions.
template <int G>
BS_INLINE void bs_tma_load_3d_multicast(uint32_t to, const void *map, int x, int y, int z,
                                        uint32_t bar, uint32_t mask) {
  uint16_t ctas = static_cast<uint16_t>(mask);
  if constexpr (G == 1) {
    asm volatile(BS_TMA_LOAD("3d", "", ".multicast::cluster")
                 "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(bar), "h"(ctas)
                 : "memory");
  } else {
    asm volatile(BS_TMA_LOAD("3d", ".cta_group::2", ".multicast::cluster")
                 "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(bar), "h"(ctas)
                 : "memory");
  }
}

// 9.7.9.25.5.2 cp.async.bulk.tensor, shared to global, in the thread's bulk group.
BS_INLINE void bs_tma_store_2d(const void *map, int x, int y, uint32_t from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::
                   "l"(map),
               "r"(x), "r"(y), "r"(from)
               : "memory");
}

// 9.7.9.25.4.1 cp.async.bulk, shared to global, in the thread's bulk group; `bytes` are a multiple of 16.
BS_INLINE void bs_bulk_store(void *to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}

// 9.7.9.25.3.1 cp.async.bulk.commit_group.
BS_INLINE void bs_bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// 9.7.9.25.3.2 cp.async.bulk.wait_group.read: all but N groups have read their shared memory.
template <int N>
BS_INLINE void bs_bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// 9.7.9.25.3.2 cp.async.bulk.wait_group: all but N groups have written global memory.
template <int N>
BS_INLINE void bs_bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// 9.7.13.5 fence.proxy.async: this thread's stores come before later TMA stores and MMAs.
BS_INLINE void bs_fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
