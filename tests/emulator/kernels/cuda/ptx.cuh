// One function an instruction: inline PTX that the kernels of this folder share.
//
// Shared addresses are 32-bit (shared::cta, which is also a shared::cluster address of the own
// CTA). A kernel is broken on purpose with -DBROKEN=<name>: see ok().
#pragma once
#include <cuda.h>
#include <stdint.h>

#define DEV __device__ __forceinline__

#ifndef BROKEN
#define BROKEN 0
#endif
// Whether the kernel is to be right in this respect; each name is one mutation of broken.py.
#define ok(name) (BROKEN != name)
enum Mutation {
  FULL_WAIT = 1, EMPTY_WAIT, DONE_WAIT, LOAD_WAIT, STORE_WAIT, COMMIT, PROXY_FENCE, STORE_FENCE,
  CTA_BARRIER, SCALE_COLUMN, SWIZZLE, SBO_STRIDE, IDESC_N, SCALE_FORMAT, DEALLOC, USE_AFTER_DEALLOC,
  TX_SMALL, TX_LARGE, ARRIVALS, PARITY, EXIT_BARRIER, READY_WAIT, OUT_OF_BOUNDS, MISALIGNED,
  OTHER_LANES, STORE_GROUP, LEADER, COMMIT_MASK, INIT_FENCE
};

DEV uint32_t shared(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

DEV bool elect() {
  uint32_t yes;
  asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}"
      : "=r"(yes));
  return yes;
}

DEV uint32_t cluster_rank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}

DEV void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" :
      :: "memory");
}

DEV void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

// The address of the same variable in CTA `rank` of the cluster.
DEV uint32_t map_rank(uint32_t address, uint32_t rank) {
  uint32_t r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}

// ------------------------------------------------------------------------------------- mbarrier
DEV void mbar_init(uint32_t bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(bar), "r"(count) : "memory");
}

DEV void mbar_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEV void mbar_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory");
}

DEV void mbar_arrive_cluster(uint32_t bar) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(bar)
      : "memory");
}

DEV void mbar_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes)
      : "memory");
}

DEV void mbar_wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n .reg .pred p;\n"
      "again:\n mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n @!p bra again;\n}"
      :: "r"(bar), "r"(parity) : "memory");
}

DEV void mbar_wait_cluster(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n .reg .pred p;\n"
      "again:\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n @!p bra"
      " again;\n}"
      :: "r"(bar), "r"(parity) : "memory");
}

// --------------------------------------------------------------------------------- bulk copies
DEV void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEV void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :: "r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}

DEV void tma_load_2d(uint32_t to, const CUtensorMap* map, int x, int y, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];"
      :: "r"(to), "l"(map), "r"(x), "r"(y), "r"(bar) : "memory");
}

DEV void tma_load_2d_multicast(uint32_t to, const CUtensorMap* map, int x, int y, uint32_t bar,
    uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
      :: "r"(to), "l"(map), "r"(x), "r"(y), "r"(bar), "h"(mask) : "memory");
}

// cta_group::2: the barrier may lie in either CTA of the pair.
DEV void tma_load_2d_pair(uint32_t to, const CUtensorMap* map, int x, int y, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];"
      :: "r"(to), "l"(map), "r"(x), "r"(y), "r"(bar) : "memory");
}

DEV void tma_load_4d_pair(uint32_t to, const CUtensorMap* map, int x, int y, int z, int w,
    uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.4d.cta_group::2.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5}], [%6];"
      :: "r"(to), "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(bar) : "memory");
}

DEV void tma_store_2d(const CUtensorMap* map, int x, int y, uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
      :: "l"(map), "r"(x), "r"(y), "r"(from) : "memory");
}

DEV void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

template <int N> DEV void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;"
    :: "n"(N) : "memory"); }
template <int N> DEV void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" :: "n"(N)
    : "memory"); }
