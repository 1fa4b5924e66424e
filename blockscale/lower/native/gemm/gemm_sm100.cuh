// Block-scaled GEMM for sm_100: d[m, n] = alpha * a[m, k] x b[n, k]^T + bias, plain or grouped.
//
// Six warps: 0-3 store (gemm_store.cuh), 4 loads (gemm_load.cuh), 5 multiplies (gemm_mma.cuh).
// CTAs are persistent: cluster c of C takes the tiles c, c + C, ... (gemm_tiles.cuh); with split-K
// it takes one, so that the grid has at least as many clusters as there are tiles (gemm_split.cuh).
// P holds the constants of a GemmPlan, and lower/gemm_maps.py describes the tensor maps:
//   x, y    rows of X and Y, bytes [rows, BLOCK_K of one stage], swizzled over the row
//   sx, sy  scales, 32-bit words [row atoms, atoms along K, 128]
//   d       [32, EPI] of d a warp, swizzled over the row; SWAP: [EPI, 32], not swizzled
// out (and d) must be aligned to 16 bytes.  A NaN in scales matters to the row that it belongs to,
// and only there, except in one case: K a multiple of 32 but not of 64, in kinds of 4-bit numbers.
// There the last MMA covers 32 elements beyond K, whose codes are zero (TMA fills them) and whose
// scales lie in the padding of their atom: these bytes must not be NaN, and blockscale writes 0.
// No test fails if the tcgen05 fences, the fence after mbarrier.init or the waits for the kernel
// before (PDL) are left out, since the emulator does not see that: leave them in.
#pragma once
#include "gemm_mma.cuh"
#include "gemm_split.cuh"

template <class P>
BS_INLINE void bs_init_barriers(uint32_t smem) {
  using L = BsGemm<P>;
  constexpr int SENDS = P::CX / P::G + P::CY - 1;  // pairs that read what a CTA loads
  for (int i = 0; i < P::STAGES; ++i) {
    bs_mbar_init(smem + L::FULL + 8 * i, L::UNPACK ? P::G : 1);
    bs_mbar_init(smem + L::EMPTY + 8 * i, SENDS);
    if (L::UNPACK) bs_mbar_init(smem + L::PACKED + 8 * i, 1);
  }
  for (int i = 0; i < P::ACC; ++i) bs_mbar_init(smem + L::DONE + 8 * i, 1);
  for (int i = 0; i < L::FREES; ++i) bs_mbar_init(smem + L::FREE + 8 * i, BS_EPILOGUE_WARPS * P::G);
  bs_mbar_init_fence();
}

// All threads of the CTA; of the cluster, where other CTAs use this one's shared or tensor memory.
template <class P>
BS_INLINE void bs_meet() {
  if constexpr (BsGemm<P>::CLUSTER > 1) bs_cluster_sync();
  else __syncthreads();
}

template <class P>
BS_INLINE void bs_gemm_sm100(const BsTensorMap *x, const BsTensorMap *y, const BsTensorMap *sx,
                             const BsTensorMap *sy, const BsTensorMap *d, const float *alpha,
                             const float *bias, const int *offsets, void *out, int m) {
  using L = BsGemm<P>;
  extern __shared__ __align__(1024) char bs_smem[];
  int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);  // uniform for ptxas
  BsCta<P> cta(bs_shared(bs_smem));
  if (warp == BS_LOAD_WARP && bs_elect()) {
    bs_init_barriers<P>(cta.smem);
    for (const BsTensorMap *map : {x, y, sx, sy}) bs_tma_prefetch_map(map);
    if (P::TMA_STORE) bs_tma_prefetch_map(d);
  }
  if constexpr (P::G == 2) {
    __syncwarp();
    bs_cluster_sync();  // tcgen05.alloc of a pair: both CTAs must have started (9.7.16.7.1)
  }
  if (warp == BS_MMA_WARP) {
    bs_tcgen05_alloc<P::G>(cta.smem + L::TMEM, P::TMEM_COLUMNS);
    bs_tcgen05_relinquish<P::G>();
    bs_tcgen05_fence_before();
  }
  __syncwarp();
  bs_meet<P>();
  bs_tcgen05_fence_after();
  uint32_t tmem = *reinterpret_cast<const uint32_t *>(bs_smem + L::TMEM);
  bs_grid_wait();
  if constexpr (P::EXPERTS > 0) bs_build_table<P>(bs_smem, offsets, m);
  BsTiles<P> tiles(cta, m);
  BsMaps maps{x, y, sx, sy};
  BsOutput to{d, alpha, bias, out};
  if (warp == BS_LOAD_WARP) {
    if constexpr (L::UNPACK) bs_load_and_spread<P>(cta, tiles, maps);
    else if (bs_elect()) bs_load_tiles<P>(cta, tiles, maps);
  } else if (warp == BS_MMA_WARP) {
    if (cta.leads()) bs_multiply_tiles<P>(cta, tiles, tmem);
  } else if (P::SPLIT == 1) {
    bs_store_tiles<P>(cta, tiles, to, tmem);
  }
  __syncwarp();
  if constexpr (P::SPLIT > 1) bs_store_split<P>(cta, tiles, to, tmem);
  bs_tcgen05_fence_before();
  bs_meet<P>();  // the pair's MMA is done with this CTA, other CTAs with its shared memory
  bs_tcgen05_fence_after();
  if (warp == BS_MMA_WARP) bs_tcgen05_dealloc<P::G>(tmem, P::TMEM_COLUMNS);
}
