// Consumers of moe_gemm.cuh for many tokens: wgmma with decoded weights in registers.
//
// A warpgroup multiplies TILES_M times 64 rows with all tokens.  A unit is one m64 tile and one
// block of 64 k: four wgmma, a group.  While a group runs, the next unit is decoded into the other
// bank of registers.  lower/moe_source.py writes bs_wgmma<BF16, N>, m64nNk16 with A in registers.
#pragma once
#include "moe_gemm.cuh"

// c += what `codes` and `bytes` of scales say, times the tokens that `x` describes; a group.
template <class P>
BS_INLINE void bs_moe_wgmma_unit(uint4 codes, uint2 bytes, uint64_t x, float *c, uint32_t *a) {
  BsDecode<P> scales(bytes);
  scales.decode(codes.x, a), scales.decode(codes.y, a + 4);
  scales.decode(codes.z, a + 8), scales.decode(codes.w, a + 12);
  bs_wgmma_fence();
#pragma unroll
  for (int j = 0; j < 4; ++j) BsWgmma<P::BF16, P::TOKENS>::run(c, a + 4 * j, x + 2 * j);
  bs_wgmma_commit();
}

// One stage of B blocks of 64 k.  Gives the stage with the barrier `before` (0: none) back once its
// last group has ended, if this one has two units.
template <class P, int B>
BS_INLINE void bs_moe_wgmma_stage(const BsMoeRing<P> &ring, uint32_t before, int m0, float (*c)[P::TOKENS / 2],
                                  uint32_t (*banks)[16], int lane) {
  using R = BsMoeRoom<P>;
  constexpr int M = P::TILES_M;
  constexpr bool EARLY = P::TOKENS <= 96;  // with few tokens the loads' latency counts, with many registers do
  uint32_t stage = ring.memory();
  uint4 codes[B * M];
  uint2 bytes[B * M];
  bs_mbar_wait(ring.full(), ring.phase);
  bs_fence_async();  // cp.async wrote what wgmma reads
  auto load = [&](int unit) {
    codes[unit] = bs_load16_shared(bs_moe_codes<P>(stage, m0 + unit % M, unit / M) + lane * 16);
    bytes[unit] = BsDecode<P>::load(bs_moe_scales<P>(stage, m0 + unit % M, unit / M), lane);
  };
#pragma unroll
  for (int unit = 0; unit < B * M; ++unit)
    if (EARLY) load(unit);
#pragma unroll
  for (int unit = 0; unit < B * M; ++unit) {
    uint32_t *bank = banks[unit % 2];
    bs_wgmma_wait<1>();
#pragma unroll
    for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(bank[i]));  // not free before the wait
    if (unit == 1 && before && lane == 0) bs_mbar_arrive(before);
    if (!EARLY) load(unit);
    uint64_t x = bs_wgmma_rows128(stage + R::X_AT + unit / M * R::X_BLOCK);
    bs_moe_wgmma_unit<P>(codes[unit], bytes[unit], x, c[unit % M], bank);
  }
}

template <class P>
BS_INLINE void bs_moe_wgmma_tile(const BsMoe &a, const BsMoeTile &at, BsMoeRing<P> &ring, int warp,
                                 int lane, float (*c)[P::TOKENS / 2], uint32_t (*banks)[16]) {
  static_assert(P::BLOCKS_K * P::TILES_M % 2 == 0, "banks alternate");
  int m0 = warp * P::TILES_M, k_blocks = a.k / 64, kb = 0;
  uint32_t before = 0;
#pragma unroll
  for (int m = 0; m < P::TILES_M; ++m)
#pragma unroll
    for (int i = 0; i < P::TOKENS / 2; ++i) c[m][i] = 0.f;
  for (; kb + P::BLOCKS_K <= k_blocks; kb += P::BLOCKS_K) {
    bs_moe_wgmma_stage<P, P::BLOCKS_K>(ring, before, m0, c, banks, lane);
    before = ring.empty();
    ring.next();
  }
  if (P::BLOCKS_K == 2 && kb < k_blocks) {
    bs_wgmma_wait<0>();
    if (before && lane == 0) bs_mbar_arrive(before);
    bs_moe_wgmma_stage<P, 1>(ring, 0, m0, c, banks, lane);
    before = ring.empty();
    ring.next();
  }
  bs_wgmma_wait<0>();
  if (lane == 0) bs_mbar_arrive(before);
  bs_moe_store<P>(a, at, at.row + 16 * m0, c, lane);
}

template <class P>
BS_INLINE void bs_moe_consume_wgmma(const BsMoe &a, BsMoeRing<P> ring, int tiles, int row_tiles, int warp,
                                    int lane) {
  // One N: with several to choose from for each tile, ptxas finds too few registers and serialises.
  float c[P::TILES_M][P::TOKENS / 2];
  uint32_t banks[2][16] = {};
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    BsMoeTile at = bs_moe_tile<P>(a, tile, row_tiles);
    bs_moe_wgmma_tile<P>(a, at, ring, warp, lane, c, banks);
  }
}
