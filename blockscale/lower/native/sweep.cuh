// Scale sweep of one block of 16 weights by one thread: the index of the best default candidate.
//
// The definition (bs_sweep_plain) evaluates every candidate scale s_k, k = 0..125, in ascending k,
//     L_k = sum of fma(d, d, .),  d = fma(-q, s_k, |w|),  q = E2M1(RN(|w| / s_k))
// and keeps the first k with the least L_k.  bs_sweep_filtered returns the same k, bit for bit, for
// the default candidates (E4M3 values / 448: from k = 7 on they double every 8) and
// 2^-40 <= g <= 2^62, where all s_k and 1 / s_k are normal numbers:
//
//  1. Octaves.  Let k0 be the least k >= 7 with 7 s_k >= amax.  For k >= k0, s_(k+8) = 2 s_k
//     exactly, so the quotient t halves exactly.  Going through the intervals of t in [0, 7], ties
//     included: either both scales round |w| to the same value, or that of s_k is not farther from
//     |w|.  Roundings are monotone, hence L_k <= L_(k+8): only k < k0 + 8 can win.
//  2. Clipping.  Below k0 the largest weight loses at least d = max(fma(-6, s_k, amax), 0), and
//     L_k >= RN(d d), monotone again.  d grows as k falls: once RN(d d) is above the least loss so
//     far, no lower k can win.
//  3. Near ties.  The quick loss rounds |w| * RN(1 / s_k), unrounded.  Its q differs from the
//     definition's only within 2^-23 |w| of a midpoint, where that changes d by 14 * 2^-23 of it at
//     most.  With the sums' roundings, the losses differ by a factor below 1 + 2^-16.  Twice that
//     is BS_NEAR: if no other candidate is within it, the winner is the definition's; else the
//     block is done again with exact losses.
#pragma once
#include "fp4.cuh"

constexpr int BS_CANDIDATES = 126;
constexpr int BS_COLUMNS = 136;  // of the table: s_k and 1 / s_k; 1 and 0 beyond; last: a flag
constexpr float BS_NEAR = 1.0f + 0x1p-15f;
constexpr float BS_INFINITY = __builtin_huge_valf();

struct BsScale {
  float s, r;  // r = RN(1 / s)
};

struct BsTable {
  const float *row;
  BS_INLINE BsScale operator[](int k) const { return {row[k], row[BS_COLUMNS + k]}; }
  // The candidates are the default ones, and g is in the range above.
  BS_INLINE bool known() const { return row[BS_COLUMNS - 1] != 0.0f; }
};

struct BsBest {
  float loss;
  int index;
};

// ---- Weights ------------------------------------------------------------------------------------

// Magnitudes of a block of 16.  SHORT: at most 11 significant bits.
template <class F>
struct BsWeights {
  static constexpr bool SHORT = true;
  float w[16];
  BS_INLINE explicit BsWeights(const void *block) {
    const uint32_t *word = static_cast<const uint32_t *>(block);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t both = word[i] & 0x7FFF7FFFu;
      w[2 * i] = F::lo(both), w[2 * i + 1] = F::hi(both);
    }
  }
};

template <>
struct BsWeights<BsF32> {
  static constexpr bool SHORT = false;
  float w[16];
  BS_INLINE explicit BsWeights(const void *block) {
    const float *value = static_cast<const float *>(block);
#pragma unroll
    for (int i = 0; i < 16; ++i) w[i] = fabsf(value[i]);
  }
};

// ---- The definition -----------------------------------------------------------------------------

// E2M1 of t >= 0, ties to even; beyond 6, and for NaN, 6.
BS_INLINE float bs_e2m1_round(float t) {
  float x = t < 6.0f ? t : 6.0f;
  float magic = x < 2.0f ? 0x1p22f : x < 4.0f ? 0x1p23f : 0x1p24f;
  return __fadd_rn(__fadd_rn(x, magic), -magic);
}

BS_INLINE BsBest bs_sweep_plain(const float *w, BsTable table) {
  BsBest best = {BS_INFINITY, 0};
#pragma unroll 1
  for (int k = 0; k < BS_CANDIDATES; ++k) {
    float s = table.row[k], loss = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float d = __fmaf_rn(-bs_e2m1_round(__fdiv_rn(w[i], s)), s, w[i]);
      loss = __fmaf_rn(d, d, loss);
    }
    if (loss < best.loss) best = {loss, k};
  }
  return best;
}

// ---- Losses without a division, for normal s and r ----------------------------------------------

BS_INLINE float bs_upper_bits(float x, uint32_t mask) {
  return __uint_as_float(__float_as_uint(x) & mask);
}

// The definition's loss, bit for bit: a Newton step makes w * r the rounded quotient.
// CLAMP false: amax * r < 7.
template <bool CLAMP>
BS_INLINE float bs_loss_exact(const float *w, BsScale c) {
  float loss = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float t = __fmul_rn(w[i], c.r);
    t = __fmaf_rn(__fmaf_rn(-t, c.s, w[i]), c.r, t);
    if (CLAMP) t = fminf(t, 6.0f);
    float power = fmaxf(bs_upper_bits(t, 0xFF800000u), 1.0f);
    float q = __fmaf_rn(power, -0x1p22f, __fmaf_rn(power, 0x1p22f, t));
    float d = __fmaf_rn(-q, c.s, w[i]);
    loss = __fmaf_rn(d, d, loss);
  }
  return loss;
}

// The loss with q = E2M1(w * r, unrounded): adding a coarse product of the same binade rounds it.
// (Near 2 and 4 the coarse product may be in the next binade, where both steps round alike.)
template <bool CLAMP, bool SHORT>
BS_INLINE float bs_loss_quick(const float *w, BsScale c) {
  float loss = 0.0f;
  const float coarse = __fmul_rn(bs_upper_bits(c.r, 0xFFFF0000u), 0x1p22f);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float magic = __fmul_rn(SHORT ? w[i] : bs_upper_bits(w[i], 0xFFFF0000u), coarse);
    magic = fmaxf(magic, 0x1p22f);
    float q = __fadd_rn(__fmaf_rn(w[i], c.r, magic), -magic);
    if (CLAMP) q = fminf(q, 6.0f);
    float d = __fmaf_rn(-q, c.s, w[i]);
    loss = __fmaf_rn(d, d, loss);
  }
  return loss;
}

template <bool EXACT, bool CLAMP, bool SHORT>
BS_INLINE float bs_loss(const float *w, BsScale c) {
  return EXACT ? bs_loss_exact<CLAMP>(w, c) : bs_loss_quick<CLAMP, SHORT>(w, c);
}

// ---- Bounds -------------------------------------------------------------------------------------

// k0 of the header, or one above; 126 if there is none.  A NaN gives 7.
BS_INLINE int bs_first_unclipped(float amax, float r_last) {
  // s_125 = g / 6 up to rounding; the margin of 2^-18 covers all roundings, some 2^-21.
  float per_amax = __fmul_rn(r_last, 64.0f * (1.0f + 0x1p-18f));
  float value = fminf(fmaxf(__fmul_rn(amax, per_amax), 0x1p-6f), 0x1p20f);
  int byte = static_cast<int>((__float_as_uint(value) + 0xFFFFFu) >> 20) - 960;
  return min(byte - 1, BS_CANDIDATES);
}

struct BsRace {
  BsBest best;
  float second;  // the next loss
};

// The candidates that the bounds leave: the octave at `first`, then downwards.
template <bool EXACT, bool SHORT, int UNROLL>
BS_INLINE BsRace bs_race(const float *w, float amax, BsTable table, int first) {
  BsRace race = {{BS_INFINITY, 0}, BS_INFINITY};
  if (first < BS_CANDIDATES) {
#pragma unroll UNROLL
    for (int j = 0; j < 8; ++j) {
      float loss = bs_loss<EXACT, false, SHORT>(w, table[first + j]);
      race.second = fminf(race.second, fmaxf(loss, race.best.loss));
      if (loss < race.best.loss) race.best = {loss, first + j};
    }
  }
#pragma unroll 1
  for (int k = first - 1; k >= 0; --k) {
    BsScale c = table[k];
    float d = fmaxf(__fmaf_rn(-6.0f, c.s, amax), 0.0f);
    if (__fmul_rn(d, d) > __fmul_rn(race.best.loss, EXACT ? 1.0f : BS_NEAR)) break;
    float loss = bs_loss<EXACT, true, SHORT>(w, c);
    race.second = fminf(race.second, fmaxf(loss, race.best.loss));
    if (loss <= race.best.loss) race.best = {loss, k};
  }
  return race;
}

// The definition's winner; mostly from the quick losses alone.
template <bool SHORT, int UNROLL>
BS_INLINE BsBest bs_sweep_filtered(const float *w, BsTable table) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) amax = fmaxf(amax, w[i]);
  int first = bs_first_unclipped(amax, table.row[BS_COLUMNS + BS_CANDIDATES - 1]);
  BsRace race = bs_race<false, SHORT, UNROLL>(w, amax, table, first);
  // A quick loss of 0 is an exact one: near a midpoint d d does not vanish.
  bool clear = race.best.loss == 0.0f || race.second > __fmul_rn(race.best.loss, BS_NEAR);
  return clear ? race.best : bs_race<true, SHORT, 1>(w, amax, table, first).best;
}

// Index and loss of the best of 126 candidates.  The loss may be a quick one if these are the
// default candidates (nobody reads it: there are none beyond 126); else it is the definition's.
template <class F, int UNROLL>
BS_INLINE void bs_sweep_pick(int *index, float *least, const void *block, const float *rows) {
  BsWeights<F> block_weights(block);
  BsTable table = {rows};
  const float *w = block_weights.w;
  BsBest best = table.known() ? bs_sweep_filtered<BsWeights<F>::SHORT, UNROLL>(w, table)
                              : bs_sweep_plain(w, table);
  *index = best.index, *least = best.loss;
}
