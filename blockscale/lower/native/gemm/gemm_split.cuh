// Split-K of a tcgen05 GEMM: the CTAs of a cluster each multiply a part of K of one tile, keep the
// float32 sums in shared memory, and add up those of all CTAs, each a share of the columns.
//
// Sums lie in pieces of 4 columns: 128 lanes of 16 bytes each.  They are added in the order of the
// CTAs, so that results do not depend on time.
#pragma once
#include "gemm_store.cuh"

template <class P>
struct BsSplit {
  using L = BsGemm<P>;
  using E = BsEpilogue<P>;
  static constexpr int PIECES = P::MMA_N / 4, SHARE = bs_ceil(PIECES, P::SPLIT);

  // The accumulator of this CTA to its shared memory.
  static BS_INLINE void keep(const BsCta<P> &cta, const E &epilogue, uint32_t tmem, int valid) {
    uint32_t to = cta.smem + L::OUT + threadIdx.x * 16;
#pragma unroll 1
    for (int c = 0; c < valid; c += P::EPI) {
      uint32_t v[P::EPI];
      epilogue.read(v, tmem + (epilogue.warp << 21) + c, valid - c);
#pragma unroll
      for (int i = 0; i < P::EPI; i += 4)
        bs_store16_shared(to + (c + i) * 512, make_uint4(v[i], v[i + 1], v[i + 2], v[i + 3]));
    }
  }

  // Sums of one piece over all CTAs.
  static BS_INLINE void add(float (&sum)[4], uint32_t piece) {
#pragma unroll
    for (int s = 0; s < P::SPLIT; ++s) {
      uint4 v = bs_load16_cluster(bs_map_rank(piece, s));
      const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sum[i] = s == 0 ? __uint_as_float(word[i]) : __fadd_rn(sum[i], __uint_as_float(word[i]));
    }
  }

  // The share of this CTA, from all CTAs, to d.
  static BS_INLINE void finish(const BsCta<P> &cta, const E &epilogue, const BsTile &tile) {
    constexpr int OUT = E::OUT_BYTES, WIDE = E::WIDE < 4 * OUT ? E::WIDE : 4 * OUT;
    int lane = threadIdx.x;  // of tensor memory
    float alpha = epilogue.alpha(tile.expert);
    float own = P::SWAP ? epilogue.bias(tile.col + lane) : 0.0f;
    int end = min(PIECES, (cta.split + 1) * SHARE);
#pragma unroll 1
    for (int piece = cta.split * SHARE; piece < end; ++piece) {
      int c = 4 * piece;
      int col = tile.col + (P::SWAP ? lane : c), row = tile.row + (P::SWAP ? c : lane);
      int rows = tile.rows - (P::SWAP ? c : lane);
      if (rows <= 0 || col >= P::N) continue;
      float sum[4];
      uint32_t code[4];
      add(sum, cta.smem + L::OUT + piece * 2048 + lane * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float bias = P::SWAP ? own : epilogue.bias(col + i);
        code[i] = bs_out_code<P::OUT>(__fmaf_rn(sum[i], alpha, bias));
        if (P::SWAP && i < rows) bs_store_code<OUT>(epilogue.at(row + i, col), code[i]);
      }
      if constexpr (!P::SWAP) {
        uint32_t w[4] = {code[0] | code[1] << 16, code[2] | code[3] << 16, 0, 0};
        const uint32_t *from = OUT == 4 ? code : w;
#pragma unroll
        for (int i = 0; i < 4 * OUT; i += WIDE) {
          if (col * OUT + i >= E::ROW) continue;
          if constexpr (WIDE >= 4) bs_store<WIDE, BS_KEEP>(epilogue.at(row, col) + i, from + i / 4);
          else bs_store_code<2>(epilogue.at(row, col) + i, code[i / 2]);
        }
      }
    }
  }
};

// The end of a split tile, by all threads of the cluster; the four epilogue warps work.
template <class P>
BS_INLINE void bs_store_split(const BsCta<P> &cta, const BsTiles<P> &tiles, const BsOutput &to,
                              uint32_t tmem) {
  using L = BsGemm<P>;
  using S = BsSplit<P>;
  int t = blockIdx.x / L::CLUSTER;
  bool works = t < tiles.total && threadIdx.x < 128;
  BsEpilogue<P> epilogue(cta, to);
  BsTile tile;
  if (works) {
    tile = tiles.at(t);
    bs_mbar_wait(cta.smem + L::DONE, 0);
    bs_tcgen05_fence_after();
    S::keep(cta, epilogue, tmem, tiles.columns(tile));
    bs_tcgen05_fence_before();
  }
  __syncwarp();
  bs_cluster_sync();
  if (works) S::finish(cta, epilogue, tile);
}
