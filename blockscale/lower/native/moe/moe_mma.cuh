// Consumers of moe_gemm.cuh for few tokens: mma.sync, warps share the rows and, in SLICES, K.
//
// Each warp decodes its TILES_M m16 tiles and multiplies all tokens.  Slices of K add up through
// shared memory when a tile ends; the first slice's warps store.
#pragma once
#include "moe_gemm.cuh"

// One block of 64 k: c[m][n] += codes of m16 tiles `m0`... times the tokens at `x`.
template <class P>
BS_INLINE void bs_moe_mma_block(uint32_t stage, uint32_t x, int m0, int b, float (*c)[P::TOKENS / 2],
                                int lane) {
  constexpr int M = P::TILES_M, N8 = P::TOKENS / 8;
  uint4 codes[M];
  uint2 bytes[M];
#pragma unroll
  for (int m = 0; m < M; ++m) {
    codes[m] = bs_load16_shared(bs_moe_codes<P>(stage, m0 + m, b) + lane * 16);
    bytes[m] = BsDecode<P>::load(bs_moe_scales<P>(stage, m0 + m, b), lane);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // of 32 k
    uint32_t tokens[N8][4];
#pragma unroll
    for (int n = 0; n < N8; ++n) {
      int row = 8 * n + lane % 8, chunk = 4 * half + lane / 8;
      bs_ldmatrix4(tokens[n], x + row * 128 + ((chunk ^ (row & 7)) << 4));
    }
#pragma unroll
    for (int m = 0; m < M; ++m) {
      BsDecode<P> scales(bytes[m]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t a[4];
        uint32_t word = half == 0 ? (j == 0 ? codes[m].x : codes[m].y) : (j == 0 ? codes[m].z : codes[m].w);
        scales.decode(word, a);
#pragma unroll
        for (int n = 0; n < N8; ++n)
          bs_mma16816<P::BF16>(c[m] + 4 * n, a, tokens[n][2 * j], tokens[n][2 * j + 1]);
      }
    }
  }
}

// Adds up the slices' sums in shared memory at `at`; true for the warps that hold the result.
template <class P>
BS_INLINE bool bs_moe_add_slices(uint32_t at, int slice, int wm, float (*c)[P::TOKENS / 2], int lane) {
  constexpr int VALUES = P::TILES_M * P::TOKENS / 2, WARPS_M = P::CONSUMERS / P::SLICES;
  float *flat = &c[0][0];
  uint32_t mine = at + (wm * VALUES * 32 + lane * 4) * 4;
  constexpr uint32_t SLICE = WARPS_M * VALUES * 32 * 4;
  if (slice > 0) {
#pragma unroll
    for (int i = 0; i < VALUES; i += 4)
      bs_store16_shared(mine + (slice - 1) * SLICE + i * 128,
                        make_uint4(__float_as_uint(flat[i]), __float_as_uint(flat[i + 1]),
                                   __float_as_uint(flat[i + 2]), __float_as_uint(flat[i + 3])));
  }
  bs_named_barrier(1, P::CONSUMERS * 32);
  if (slice == 0) {
    for (int s = 0; s < P::SLICES - 1; ++s) {
#pragma unroll
      for (int i = 0; i < VALUES; i += 4) {
        uint4 v = bs_load16_shared(mine + s * SLICE + i * 128);
        flat[i] += __uint_as_float(v.x), flat[i + 1] += __uint_as_float(v.y);
        flat[i + 2] += __uint_as_float(v.z), flat[i + 3] += __uint_as_float(v.w);
      }
    }
  }
  bs_named_barrier(2, P::CONSUMERS * 32);  // the sums may be overwritten
  return slice == 0;
}

template <class P>
BS_INLINE void bs_moe_consume_mma(const BsMoe &a, BsMoeRing<P> ring, int tiles, int row_tiles, int warp,
                                  int lane) {
  using R = BsMoeRoom<P>;
  constexpr int WARPS_M = P::CONSUMERS / P::SLICES;
  int wm = warp % WARPS_M, slice = warp / WARPS_M, m0 = wm * P::TILES_M, k_blocks = a.k / 64;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    BsMoeTile at = bs_moe_tile<P>(a, tile, row_tiles);
    float c[P::TILES_M][P::TOKENS / 2] = {};
    for (int kb = 0; kb < k_blocks; kb += P::BLOCKS_K) {
      bs_mbar_wait(ring.full(), ring.phase);
#pragma unroll
      for (int b = 0; b < P::BLOCKS_K; b += P::SLICES)
        if (kb + b + slice < k_blocks)
          bs_moe_mma_block<P>(ring.memory(), ring.memory() + R::X_AT + (b + slice) * R::X_BLOCK, m0,
                              b + slice, c, lane);
      __syncwarp();
      if (lane == 0) bs_mbar_arrive(ring.empty());
      ring.next();
    }
    bool holds = true;
    if constexpr (P::SLICES > 1)
      holds = bs_moe_add_slices<P>(ring.base + R::REDUCE_AT, slice, wm, c, lane);
    if (holds) bs_moe_store<P>(a, at, at.row + 16 * m0, c, lane);
  }
}
