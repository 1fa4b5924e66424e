// The warp of a tcgen05 GEMM that loads: TMA of operands and scales into a ring of stages.
//
// A tile that several CTAs of the cluster need is loaded in slices, one by each, and multicast;
// scales are loaded by the first CTA of those.  A stage is full when the bytes of the CTA (of both
// CTAs of a pair, at the leader's barrier) are there.
#pragma once
#include "gemm_tiles.cuh"

struct BsMaps {
  const void *x, *y, *sx, *sy;
};

// Operand rows: to all CTAs of `mask`, where that is more than this one.
template <int G, bool MULTICAST, bool HINT>
BS_INLINE void bs_load_rows(uint32_t to, const void *map, int k, int row, uint32_t bar,
                            uint32_t mask, uint64_t policy) {
  if constexpr (MULTICAST) bs_tma_load_2d_multicast<G>(to, map, k, row, bar, mask);
  else if constexpr (HINT) bs_tma_load_2d_hint<G>(to, map, k, row, bar, policy);
  else bs_tma_load_2d<G>(to, map, k, row, bar);
}

template <int G, bool MULTICAST>
BS_INLINE void bs_load_scales(uint32_t to, const void *map, int k, int atom, uint32_t bar,
                              uint32_t mask) {
  if constexpr (MULTICAST) bs_tma_load_3d_multicast<G>(to, map, 0, k, atom, bar, mask);
  else bs_tma_load_3d<G>(to, map, 0, k, atom, bar);
}

template <class P>
struct BsLoader {
  using L = BsGemm<P>;
  static constexpr int X_SLICE = 128 / P::CY, Y_SLICE = P::MMA_N / P::CX;
  static constexpr bool X_MANY = P::CY > 1, Y_MANY = P::CX > P::G, SY_MANY = P::CX > 1;
  static constexpr int X_BITS = P::SWAP ? P::B_BITS : P::A_BITS;
  static constexpr int Y_BITS = P::SWAP ? P::A_BITS : P::B_BITS;
  // Coordinates along K: bytes, or elements of a map that spreads 4 bits.
  static constexpr int X_K = P::BLOCK_K / (X_BITS == 4 && (P::KIND != BS_MXF8F6F4 || L::UNPACK)
                                               ? 2 : 1);
  static constexpr int Y_K = P::BLOCK_K / (Y_BITS == 4 && (P::KIND != BS_MXF8F6F4 || L::UNPACK)
                                               ? 2 : 1);
  // What TMA counts: numbers that it spreads to a byte count with their bytes in global memory.
  static constexpr bool SPREAD = P::KIND == BS_MXF8F6F4;
  static constexpr int X_COUNT = P::X_BYTES / (SPREAD && X_BITS == 4 ? 2 : 1);
  static constexpr int Y_COUNT = P::Y_BYTES / (SPREAD && Y_BITS == 4 ? 2 : 1);
  static constexpr int COUNT = X_COUNT + Y_COUNT + L::SX_BYTES + L::SY_BYTES;
  // Packed rows wait behind the place of the rows that they become.
  static constexpr int X_SHIFT = L::UNPACK && X_BITS == 4 ? P::X_BYTES / 2 : 0;
  static constexpr int Y_SHIFT = L::UNPACK && Y_BITS == 4 ? P::Y_BYTES / 2 : 0;
  static constexpr int X_ROW = P::ROW_BYTES / (X_SHIFT ? 2 : 1);
  static constexpr int Y_ROW = P::ROW_BYTES / (Y_SHIFT ? 2 : 1);
  static constexpr int G = L::UNPACK ? 1 : P::G;  // of the barrier that TMA completes

  const BsCta<P> &cta;
  BsMaps maps;
  uint32_t x_mask, y_mask, sy_mask;

  BS_INLINE BsLoader(const BsCta<P> &cta_, const BsMaps &maps_) : cta(cta_), maps(maps_) {
    x_mask = y_mask = sy_mask = 0;
#pragma unroll
    for (int y = 0; y < P::CY; ++y) x_mask |= 1u << (y * P::CX);
#pragma unroll
    for (int x = 0; x < P::CX; x += P::G) y_mask |= 1u << x;
    x_mask <<= cta.x, y_mask <<= cta.y * P::CX + cta.x % P::G;
    sy_mask = ((1u << P::CX) - 1) << (cta.y * P::CX);
  }

  // First row of Y that this CTA loads.
  BS_INLINE int y_row(const BsTile &tile, int columns) const {
    return tile.y_row + cta.x % P::G * (columns / P::G) + cta.x / P::G * Y_SLICE;
  }

  // All that this CTA contributes to stage number k of a tile.  With few rows the weights (X) are
  // read once.
  BS_INLINE void load(uint32_t stage, const BsTile &tile, int y_first, int k,
                      uint64_t policy) const {
    uint32_t bar = cta.smem + (L::UNPACK ? L::PACKED : L::FULL) + 8 * stage;
    if (L::UNPACK || cta.leads()) bs_mbar_expect(bar, G * COUNT);
    if constexpr (G == 2) bar &= 0xFEFFFFFF;  // of the leader, the even CTA
    uint32_t x = cta.smem + L::X + X_SHIFT + stage * P::X_BYTES + cta.y * (X_SLICE * X_ROW);
    uint32_t y = cta.smem + L::Y + Y_SHIFT + stage * P::Y_BYTES + cta.x / P::G * (Y_SLICE * Y_ROW);
    int x_first = tile.x_row + cta.y * X_SLICE;
    bs_load_rows<G, X_MANY, P::SWAP>(x, maps.x, k * X_K, x_first, bar, x_mask, policy);
    bs_load_rows<G, Y_MANY, false>(y, maps.y, k * Y_K, y_first, bar, y_mask, policy);
    uint32_t sx = cta.smem + L::SX + stage * L::SX_BYTES;
    uint32_t sy = cta.smem + L::SY + stage * L::SY_BYTES;
    if (!X_MANY || cta.y == 0)
      bs_load_scales<G, X_MANY>(sx, maps.sx, k * P::ATOMS_K, tile.x_atom, bar, x_mask);
    if (!SY_MANY || cta.x == 0)
      bs_load_scales<G, SY_MANY>(sy, maps.sy, k * P::ATOMS_K, tile.y_atom, bar, sy_mask);
  }
};

// Bytes of 16 codes, one code in 4 bits, to 8 bytes of each 16 in rows of 128 bytes, swizzled.
// The packed rows lie in the second half of `rows`; group after group of 8 rows takes no more room
// than what has been read.  By a warp.
template <int ROWS>
BS_INLINE void bs_spread_rows(uint32_t rows, int lane) {
  uint32_t packed = rows + ROWS * 64 + lane * 16;
#pragma unroll 4
  for (int r = 0; r < ROWS; r += 8, packed += 512) {
    uint4 v = bs_load16_shared(packed);
    __syncwarp();
    int row = lane / 4, chunk = lane % 4 * 2;
    uint32_t to = rows + (r + row) * 128;
    bs_store16_shared(to + 16 * (chunk ^ row), make_uint4(v.x, v.y, 0, 0));
    bs_store16_shared(to + 16 * (chunk + 1 ^ row), make_uint4(v.z, v.w, 0, 0));
    __syncwarp();
  }
}

// The 4-bit operand of a stage whose bytes are there, by the whole warp; then the stage is full.
template <class P>
BS_INLINE void bs_spread_stage(const BsCta<P> &cta, const BsRing<P::STAGES> &ring, int lane) {
  using L = BsGemm<P>;
  uint32_t at = cta.smem + 8 * ring.stage;
  bs_mbar_wait(at + L::PACKED, ring.parity);
  if constexpr (P::SWAP) bs_spread_rows<128>(cta.smem + L::X + ring.stage * P::X_BYTES, lane);
  else bs_spread_rows<P::MMA_N / P::G>(cta.smem + L::Y + ring.stage * P::Y_BYTES, lane);
  bs_fence_async();
  __syncwarp();
  if (lane == 0) bs_mbar_arrive_cluster(bs_map_rank(at + L::FULL, cta.rank / P::G * P::G));
}

// First and last stage along K of this CTA.
template <class P>
BS_INLINE int bs_k_bound(int split) {
  return split * BsGemm<P>::K_STAGES / P::SPLIT;
}

// The loads of all tiles, by one thread.
template <class P>
BS_INLINE void bs_load_tiles(const BsCta<P> &cta, const BsTiles<P> &tiles, const BsMaps &maps) {
  using L = BsGemm<P>;
  BsLoader<P> loader(cta, maps);
  BsRing<P::STAGES> ring;
  for (int t = blockIdx.x / L::CLUSTER; t < tiles.total; t += gridDim.x / L::CLUSTER) {
    BsTile tile = tiles.at(t);
    int y_first = loader.y_row(tile, tiles.columns(tile));
    uint64_t policy = P::SWAP ? bs_policy(tile.once) : 0;
    for (int k = bs_k_bound<P>(cta.split); k < bs_k_bound<P>(cta.split + 1); ++k, ring.next()) {
      bs_mbar_wait(cta.smem + L::EMPTY + 8 * ring.stage, ring.parity ^ 1);
      loader.load(ring.stage, tile, y_first, k, policy);
    }
  }
  bs_grid_launch();
  if constexpr (L::CLUSTER > 1)  // MMAs of other CTAs still report to this CTA's barriers
    for (int i = 0; i < P::STAGES; ++i, ring.next())
      bs_mbar_wait(cta.smem + L::EMPTY + 8 * ring.stage, ring.parity ^ 1);
}

// The same where a 4-bit operand has to be spread out: by a whole warp, which spreads a stage
// AHEAD - 1 loads after its own.
template <class P>
BS_INLINE void bs_load_and_spread(const BsCta<P> &cta, const BsTiles<P> &tiles,
                                  const BsMaps &maps) {
  using L = BsGemm<P>;
  BsLoader<P> loader(cta, maps);
  BsRing<P::STAGES> ring, late;
  // Loads before the first stage is spread.  STAGES of them would wait for the MMAs of the stage
  // before that one, so that the warp and MMAs took turns: 15 % slower (modelled, 6 stages).
  constexpr int AHEAD = P::STAGES > 3 ? P::STAGES - 1 : P::STAGES;
  int lane = threadIdx.x % 32, behind = 0;
  for (int t = blockIdx.x / L::CLUSTER; t < tiles.total; t += gridDim.x / L::CLUSTER) {
    BsTile tile = tiles.at(t);
    int y_first = loader.y_row(tile, tiles.columns(tile));
    uint64_t policy = P::SWAP ? bs_policy(tile.once) : 0;
    for (int k = bs_k_bound<P>(cta.split); k < bs_k_bound<P>(cta.split + 1); ++k, ring.next()) {
      bs_mbar_wait(cta.smem + L::EMPTY + 8 * ring.stage, ring.parity ^ 1);
      if (lane == 0) loader.load(ring.stage, tile, y_first, k, policy);
      __syncwarp();
      if (++behind < AHEAD) continue;
      bs_spread_stage<P>(cta, late, lane);
      late.next(), --behind;
    }
  }
  bs_grid_launch();
  for (; behind > 0; --behind, late.next()) bs_spread_stage<P>(cta, late, lane);
  if constexpr (L::CLUSTER > 1)
    for (int i = 0; i < P::STAGES; ++i, ring.next())
      bs_mbar_wait(cta.smem + L::EMPTY + 8 * ring.stage, ring.parity ^ 1);
}
