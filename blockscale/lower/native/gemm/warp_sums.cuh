// Sums of parts of K that several warps, or several CTAs of a cluster, have in registers.
//
// VALUES of a thread, a multiple of 4; WARPS hold a tile.  Parts are added in their order, so that
// results do not differ from run to run.
#pragma once
#include "fp4.cuh"
#include "mma.cuh"

BS_INLINE uint4 bs_word4(const float *c) {
  return make_uint4(__float_as_uint(c[0]), __float_as_uint(c[1]), __float_as_uint(c[2]),
                    __float_as_uint(c[3]));
}

BS_INLINE void bs_add4(float *c, uint4 v) {
  c[0] += __uint_as_float(v.x), c[1] += __uint_as_float(v.y);
  c[2] += __uint_as_float(v.z), c[3] += __uint_as_float(v.w);
}

// Slices of K of a CTA, through shared memory at `at`: those of slice 0 become the sums.
template <int SLICES, int WARPS, int VALUES>
BS_INLINE void bs_add_slices(uint32_t at, int slice, int warp, float *c, int lane) {
  constexpr uint32_t PART = WARPS * VALUES * 128;
  uint32_t mine = at + warp * VALUES * 128 + lane * 16;
  if (slice > 0) {
#pragma unroll
    for (int i = 0; i < VALUES; i += 4)
      bs_store16_shared(mine + (slice - 1) * PART + i * 128, bs_word4(c + i));
  }
  bs_named_barrier(1, SLICES * WARPS * 32);
  if (slice == 0) {
    for (int s = 0; s < SLICES - 1; ++s) {
#pragma unroll
      for (int i = 0; i < VALUES; i += 4) bs_add4(c + i, bs_load16_shared(mine + s * PART + i * 128));
    }
  }
  bs_named_barrier(2, SLICES * WARPS * 32);  // the sums may be overwritten
}

// Parts of K of the CTAs of a cluster: those of CTA 0 become the sums.  The others write into its
// shared memory, at `at`; a cluster has one tile.  All threads of the cluster have arrived at its
// barrier when the kernel began, and those that hold no sums call `bs_no_sums` instead.
template <int CTAS, int WARPS, int VALUES>
BS_INLINE void bs_add_ctas(uint32_t at, int cta, int warp, float *c, int lane) {
  constexpr uint32_t PART = WARPS * VALUES * 128;
  uint32_t mine = at + warp * VALUES * 128 + lane * 16;
  bs_cluster_wait();  // CTA 0 has begun
  if (cta > 0) {
    uint32_t there = bs_map_rank(mine + (cta - 1) * PART, 0);
#pragma unroll
    for (int i = 0; i < VALUES; i += 4) bs_store16_cluster(there + i * 128, bs_word4(c + i));
  }
  bs_cluster_arrive();
  if (cta > 0) return;
  bs_cluster_wait();
  for (int s = 0; s < CTAS - 1; ++s) {
#pragma unroll
    for (int i = 0; i < VALUES; i += 4) bs_add4(c + i, bs_load16_shared(mine + s * PART + i * 128));
  }
}

BS_INLINE void bs_no_sums() {
  bs_cluster_wait();
  bs_cluster_arrive();
}

// BYTES neighbours of a row to words in registers, WIDE at a time; from byte `left` on none.
template <int BYTES, int WIDE>
BS_INLINE void bs_load_words(uint32_t *to, const void *from, int left) {
  const char *at = static_cast<const char *>(from);
#pragma unroll
  for (int i = 0; i < BYTES; i += WIDE) {
    if (i >= left) continue;
    if constexpr (WIDE >= 4) {
      bs_load<WIDE, BS_KEEP>(to + i / 4, at + i);
    } else {
      uint32_t half = *reinterpret_cast<const uint16_t *>(at + i);
      to[i / 4] |= i % 4 ? half << 16 : half;
    }
  }
}
