// Sums of parts of K that several warps, or several CTAs of a cluster, have in registers.
#pragma once
#include "fp4.cuh"
#include "mma.cuh"

BS_INLINE uint4 bs_word4(const float *c) {
  return make_uint4(__float_as_uint(c[0]), __float_as_uint(c[1]), __float_as_uint(c[2]),
                    __float_as_uint(c[3]));
}

BS_INLINE void bs_set4(float *c, uint4 v) {
  c[0] = __uint_as_float(v.x), c[1] = __uint_as_float(v.y);
  c[2] = __uint_as_float(v.z), c[3] = __uint_as_float(v.w);
}

BS_INLINE void bs_add4(float *c, uint4 v) {
  c[0] += __uint_as_float(v.x), c[1] += __uint_as_float(v.y);
  c[2] += __uint_as_float(v.z), c[3] += __uint_as_float(v.w);
}

// PARTS of four sums, in their order: one of them is in `sum`, the others lie in shared memory from
// `at` on, `pitch` bytes apart.
template <int PARTS>
BS_INLINE void bs_add_parts(float *sum, uint32_t at, uint32_t pitch, int own) {
  const uint4 held = bs_word4(sum);
#pragma unroll
  for (int s = 0; s < PARTS; ++s) {
    uint4 part = held;
    if (s != own) part = bs_load16_shared(at + (s - (s > own)) * pitch);
    if (s) bs_add4(sum, part);
    else bs_set4(sum, part);
  }
}

// WARPS hold a tile's rows of w, TILES of 16 each, with TOKENS rows of x; SLICES of such warps, and
// CTAs of a cluster, have parts of K.  A unit is PER tiles with 8 rows of x: what is stored together.
// Units are divided among slices and CTAs, as far as there are enough: each adds up and stores its
// own.  Parts are added in their order, those of a CTA first: results do not differ from run to run.
template <int CTAS, int SLICES, int WARPS, int TILES, int TOKENS, int PER>
struct BsSums {
  static constexpr int EIGHTS = TOKENS / 8, UNITS = TILES / PER * EIGHTS;
  static constexpr int OWN = (UNITS + CTAS - 1) / CTAS;  // of a CTA, at most
  static constexpr uint32_t CHUNK = 512;                 // bytes of a tile of 16 x 8

  // The slice whose warp adds up what slices have of a unit; the CTA is `unit % CTAS`.
  static BS_INLINE int adder(int unit) { return (unit + (CTAS > 1 ? unit / CTAS : 0)) % SLICES; }

  static BS_INLINE bool adds(int unit, int slice) { return SLICES == 1 || adder(unit) == slice; }

  // Whether a warp has all of a unit, once parts are added up.
  static BS_INLINE bool mine(int unit, int cta, int slice) {
    return unit % CTAS == cta && adds(unit, slice);
  }

  // Bytes that other CTAs send to this one.
  static BS_INLINE uint32_t bytes(int cta) {
    return (UNITS - cta + CTAS - 1) / CTAS * (CTAS - 1) * WARPS * PER * CHUNK;
  }

  static BS_INLINE float *chunk(float (&c)[TILES][TOKENS / 2], int unit, int tile) {
    return c[unit / EIGHTS * PER + tile] + unit % EIGHTS * 4;
  }

  // Slices of K of a CTA, through shared memory at `at`.
  static BS_INLINE void add_slices(uint32_t at, int slice, int warp, float (&c)[TILES][TOKENS / 2],
                                   int lane) {
    const uint32_t own = at + warp * UNITS * PER * CHUNK + lane * 16;
    constexpr uint32_t PART = WARPS * UNITS * PER * CHUNK;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      const int to = adder(u);
      if (slice == to) continue;
      const uint32_t part = own + (slice - (slice > to)) * PART;
#pragma unroll
      for (int i = 0; i < PER; ++i)
        bs_store16_shared(part + (u * PER + i) * CHUNK, bs_word4(chunk(c, u, i)));
    }
    bs_named_barrier(1, SLICES * WARPS * 32);
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      const int to = adder(u);
      if (slice != to) continue;
#pragma unroll
      for (int i = 0; i < PER; ++i)
        bs_add_parts<SLICES>(chunk(c, u, i), own + (u * PER + i) * CHUNK, PART, to);
    }
    if constexpr (CTAS == 1) bs_named_barrier(2, SLICES * WARPS * 32);  // they may be overwritten
  }

  // Parts of K of the CTAs of a cluster, which has one tile: sent to shared memory at `at` of the
  // CTA that adds up, whose `bar` waits for its `bytes`.  The warp knows that all CTAs have begun.
  static BS_INLINE void add_ctas(uint32_t at, uint32_t bar, int cta, int slice, int warp,
                                 float (&c)[TILES][TOKENS / 2], int lane) {
    const uint32_t own = at + warp * OWN * PER * CHUNK + lane * 16;
    constexpr uint32_t PART = WARPS * OWN * PER * CHUNK;
    bool waits = false;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      const int to = u % CTAS;
      waits = waits || mine(u, cta, slice);
      if (cta == to || !adds(u, slice)) continue;
      const uint32_t there = bs_map_rank(own + (cta - (cta > to)) * PART, to);
#pragma unroll
      for (int i = 0; i < PER; ++i)
        bs_store16_async(there + (u / CTAS * PER + i) * CHUNK, bs_word4(chunk(c, u, i)),
                         bs_map_rank(bar, to));
    }
    if (!waits) return;
    bs_mbar_wait_cluster(bar, 0);
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      if (!mine(u, cta, slice)) continue;
#pragma unroll
      for (int i = 0; i < PER; ++i)
        bs_add_parts<CTAS>(chunk(c, u, i), own + (u / CTAS * PER + i) * CHUNK, PART, cta);
    }
  }
};

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
