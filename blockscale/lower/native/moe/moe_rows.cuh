// Rows of activations around the GEMMs of an MoE layer: permuted, quantised, added up.
//
// The GEMMs want K permuted within each 64: position 16 j + r holds channel
//   16 (r / 2) + 4 j + r % 2          for r < 8,
//   16 (r / 2 - 4) + 4 j + 2 + r % 2  else,
// so that the pair of channels 16 q + 4 j + 2 h, + 1 is word q of the 16 bytes 2 j + h: a transposition
// of 4 x 8 words.  Each thread makes such a chunk of 16 bytes.  Block q of 16 channels are the words
// q of 8 chunks, those of 8 neighbouring lanes.
//
// Quantised activations stay numbers of 16 bits: code times block scale is exact in bfloat16 and
// float16; the row's (or tensor's) factor goes to `row_scale`, with which the GEMM multiplies.
#pragma once
#include "fp4.cuh"
#include "moe_coded.cuh"
#include "moe_sort.cuh"

constexpr int BS_TEAM_WARPS = BS_TEAM / 32;  // threads that share a row

// A row of channels in their order, `words` pairs of them; zeros follow.
struct BsNaturalRow {
  const uint32_t *row;
  int words;
  BS_INLINE void load(uint32_t (&w)[4], int chunk) const {
    int first = (chunk & ~7) * 4 + (chunk & 7);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      w[q] = first + 8 * q < words ? bs_load4<BS_KEEP>(row + first + 8 * q) : 0;
    }
  }
};

// A row that is permuted already, and will be written.
struct BsPermutedRow {
  const uint32_t *row;
  BS_INLINE void load(uint32_t (&w)[4], int chunk) const {
    uint4 v = bs_load16<BS_INPLACE>(row + 4 * chunk);
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
  }
};

BS_INLINE float bs_e4m3_nearest(float x, float scale) {
  return scale == 0.0f ? 0.0f : bs_e4m3_value(bs_e4m3(__fdiv_rn(x, scale)));
}

// Numbers F become numbers To.
template <class F, class To>
BS_INLINE void bs_qdq_fp8(uint32_t (&w)[4], float scale) {
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    w[q] = To::pack(bs_e4m3_nearest(F::lo(w[q]), scale), bs_e4m3_nearest(F::hi(w[q]), scale));
  }
}

// x rounded to E2M1 times d, and taken back times s.
BS_INLINE float bs_e2m1_nearest(float x, float d, float s) {
  uint32_t code = bs_e2m1_biased(fminf(__fdiv_rn(fabsf(x), d), 6.0f)) & 7;
  float value = BsF16::lo(bs_prmt(0x3E3C3800u, 0x46444240u, code) << 8);  // 0 .5 1 1.5, 2 3 4 6
  return copysignf(d == 0.0f ? 0.0f : value * s, x);
}

// Lanes of a chunk group hold 4 blocks of 16, of which each has word q of all 8 lanes.
template <class F>
BS_INLINE void bs_qdq_nvfp4(uint32_t (&w)[4], float scale) {
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    uint32_t most = bs_word_most(w[q]);
#pragma unroll
    for (int lane = 1; lane < 8; lane *= 2) most = max(most, __shfl_xor_sync(~0u, most, lane));
    int byte = bs_scale_nvfp4<true>(__float_as_int(F::lo(most)), scale);
    float s = bs_e4m3_value(byte), d = __fmul_rn(s, scale);
    w[q] = F::pack(bs_e2m1_nearest(F::lo(w[q]), d, s), bs_e2m1_nearest(F::hi(w[q]), d, s));
  }
}

// The same in blocks of 32: words q and q + 1 of all 8 lanes.
template <class F, int ACT>
BS_INLINE void bs_qdq_mx(uint32_t (&w)[4]) {
#pragma unroll
  for (int q = 0; q < 4; q += 2) {
    uint32_t most = max(bs_word_most(w[q]), bs_word_most(w[q + 1]));
#pragma unroll
    for (int lane = 1; lane < 8; lane *= 2) most = max(most, __shfl_xor_sync(~0u, most, lane));
    int amax = __float_as_int(F::lo(most));
    float s = bs_ue8m0_value(ACT == BS_ACT_MXFP8 ? bs_scale_mxfp8(amax) : bs_scale_mxfp4_ceil(amax, 1.0f));
#pragma unroll
    for (int i = q; i < q + 2; ++i) {
      float low = F::lo(w[i]), high = F::hi(w[i]);
      if (ACT == BS_ACT_MXFP4) w[i] = F::pack(bs_e2m1_nearest(low, s, s), bs_e2m1_nearest(high, s, s));
      else w[i] = F::pack(__fmul_rn(bs_e4m3_nearest(low, s), s), __fmul_rn(bs_e4m3_nearest(high, s), s));
    }
  }
}

// Largest number of a team's threads.  `most` [warps of the team]; another one for the next row.
BS_INLINE uint32_t bs_team_most(uint32_t own, int team, uint32_t *most) {
  own = __reduce_max_sync(~0u, own);
  if (threadIdx.x % 32 == 0) most[threadIdx.x % BS_TEAM / 32] = own;
  bs_named_barrier(1 + team, BS_TEAM);
#pragma unroll
  for (int i = 0; i < BS_TEAM_WARPS; ++i) own = max(own, most[i]);
  return own;
}

// Largest magnitude of the row of a team, as bits of a 16-bit float.
template <class R>
BS_INLINE uint32_t bs_row_most(const R &from, int chunks, int team, uint32_t *most) {
  uint32_t own = 0;
  for (int c = threadIdx.x % BS_TEAM; c < chunks; c += BS_TEAM) {
    uint32_t w[4];
    from.load(w, c);
#pragma unroll
    for (int q = 0; q < 4; ++q) own = max(own, bs_word_most(w[q]));
  }
  return bs_team_most(own, team, most);
}

// One row of a team, quantised to `to`; returns its factor.
template <class F, int ACT, class To = F, class R>
BS_INLINE float bs_quantize_row(const R &from, uint32_t *to, int chunks, float given, int team,
                                uint32_t *most) {
  float factor = given;
  if constexpr (ACT == BS_ACT_FP8) {
    factor = __fdiv_rn(F::lo(bs_row_most(from, chunks, team, most)), 448.0f);
  }
  int lane = threadIdx.x % 32;
  for (int c = threadIdx.x % BS_TEAM; c - lane < chunks; c += BS_TEAM) {  // whole warps
    uint32_t w[4] = {0, 0, 0, 0};
    if (c < chunks) from.load(w, c);
    if constexpr (ACT == BS_ACT_NVFP4) bs_qdq_nvfp4<F>(w, factor);
    else if constexpr (ACT == BS_ACT_MXFP4 || ACT == BS_ACT_MXFP8) bs_qdq_mx<F, ACT>(w);
    else bs_qdq_fp8<F, To>(w, factor);
    if (c < chunks) bs_store<16, BS_KEEP>(to + 4 * c, w);
  }
  return factor;
}

BS_INLINE float bs_given_scale(const float *scale) {
  return scale == nullptr ? 1.0f : __uint_as_float(bs_load4<BS_KEEP>(scale));
}

// ---- Before GEMM 1 --------------------------------------------------------------------------------

struct BsMoePrepare {
  BsMoeSort sort;
  const void *hidden;   // [rows, cols], or coded rows
  const float *scale;   // of the whole tensor, for BS_ACT_FP8_TENSOR and BS_ACT_NVFP4
  void *x;              // [rows, pitch]
  float *row_scale;     // [rows]
  int rows, cols, pitch;
};

// Each thread has two chunks under way: one CTA of 1024 threads fills an SM's registers.
BS_INLINE void bs_permute_rows(const BsMoePrepare &p, int cta, int ctas) {
  constexpr int AHEAD = 2;
  int chunks = p.pitch / 8, all = p.rows * chunks, step = ctas * BS_SORT_THREADS;
  for (int i = cta * BS_SORT_THREADS + threadIdx.x; i < all; i += AHEAD * step) {
    uint32_t w[AHEAD][4];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      if (i + a * step >= all) continue;
      int row = (i + a * step) / chunks, chunk = i + a * step - row * chunks;
      size_t at = static_cast<size_t>(row) * (p.cols / 2);
      BsNaturalRow from = {static_cast<const uint32_t *>(p.hidden) + at, p.cols / 2};
      from.load(w[a], chunk);
    }
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      if (i + a * step < all) bs_store<16, BS_KEEP>(static_cast<uint4 *>(p.x) + i + a * step, w[a]);
    }
  }
}

template <class F, int ACT>
BS_INLINE void bs_quantize_rows(const BsMoePrepare &p, int cta, int ctas, uint32_t *most) {
  constexpr int TEAMS = BS_SORT_THREADS / BS_TEAM;
  int team = threadIdx.x / BS_TEAM, parity = 0;
  float given = bs_given_scale(p.scale);
  for (int row = cta * TEAMS + team; row < p.rows; row += ctas * TEAMS, parity ^= 1) {
    size_t at = static_cast<size_t>(row) * (p.cols / 2);
    BsNaturalRow from = {static_cast<const uint32_t *>(p.hidden) + at, p.cols / 2};
    uint32_t *to = static_cast<uint32_t *>(p.x) + static_cast<size_t>(row) * (p.pitch / 2);
    uint32_t *own = most + (parity * TEAMS + team) * BS_TEAM_WARPS;
    float factor = bs_quantize_row<F, ACT>(from, to, p.pitch / 8, given, team, own);
    if (threadIdx.x % BS_TEAM == 0) p.row_scale[row] = factor;
  }
}

// Rows that are codes and scales already.
template <class F, int ACT>
BS_INLINE void bs_decode_rows(const BsMoePrepare &p, int cta, int ctas) {
  using Row = BsCodedRow<F, ACT>;
  int chunks = p.pitch / 8, all = p.rows * chunks;
  float given = bs_given_scale(p.scale);
  for (int i = cta * BS_SORT_THREADS + threadIdx.x; i < all; i += ctas * BS_SORT_THREADS) {
    int row = i / chunks, chunk = i - row * chunks;
    Row from = {static_cast<const char *>(p.hidden) + row * Row::bytes(p.cols), p.cols};
    uint32_t w[4];
    from.load(w, chunk);
    bs_store<16, BS_KEEP>(static_cast<uint4 *>(p.x) + i, w);
    if (chunk == 0) p.row_scale[row] = from.factor(given);
  }
}

// The first CTAS sort, all others permute; of a kernel whose clusters have so many.  CODED: hidden are
// coded rows.
template <class F, int ACT, int CTAS, bool CODED = false>
BS_INLINE void bs_moe_prepare(const BsMoePrepare &p) {
  extern __shared__ __align__(16) char bs_prepare_shared[];
  __shared__ uint32_t most[2 * BS_SORT_WARPS];
  bs_grid_wait();
  bs_grid_launch();
  int cta = blockIdx.x - CTAS, ctas = gridDim.x - CTAS;
  if (cta < 0) bs_moe_sort<CTAS>(p.sort, bs_prepare_shared);
  else if constexpr (CODED) bs_decode_rows<F, ACT>(p, cta, ctas);
  else if constexpr (ACT == BS_ACT_NONE) bs_permute_rows(p, cta, ctas);
  else bs_quantize_rows<F, ACT>(p, cta, ctas, most);
}

// ---- Between the GEMMs ----------------------------------------------------------------------------

// Rows of y [.., pitch], as many as `count` [2] says, are quantised in place.  Its successor may read
// the block table before it waits, so it may only start when what made the table has ended.
template <class F, int ACT>
BS_INLINE void bs_moe_requantize(void *y, const float *scale, float *row_scale, const int *count,
                                 int pitch) {
  __shared__ uint32_t most[2 * BS_TEAM_WARPS];
  bs_grid_wait();
  bs_grid_launch();
  float given = bs_given_scale(scale);
  int rows = static_cast<int>(bs_load4<BS_KEEP>(count + 1)), parity = 0;
  for (int row = blockIdx.x; row < rows; row += gridDim.x, parity ^= 1) {
    uint32_t *at = static_cast<uint32_t *>(y) + static_cast<size_t>(row) * (pitch / 2);
    BsPermutedRow from = {at};
    uint32_t *own = most + parity * BS_TEAM_WARPS;
    float factor = bs_quantize_row<F, ACT>(from, at, pitch / 8, given, 0, own);
    if (threadIdx.x == 0) row_scale[row] = factor;
  }
}

// ---- Codes of bytes -------------------------------------------------------------------------------
//
// GEMMs in 8 bits (moe_bytes.cuh) want the E4M3 codes themselves: position 16 j + 4 t + b holds channel
// 16 t + 4 j + i, i = 0, 2, 1, 3 for b = 0, 1, 2, 3.  A lane makes 16 positions of a row, a warp the row;
// of few wide rows a team: a warp took 20 us for 14,336 channels on an H200.

constexpr int BS_HELD_CHUNKS = 4;  // of a lane, which are read once

// Whether teams have fewer turns of rows, times turns of a row's chunks, than warps.
BS_INLINE bool bs_teams_pay(int rows, int chunks, int warps) {
  int teams = warps / BS_TEAM_WARPS;
  int of_warps = (rows + warps - 1) / warps * ((chunks + 31) / 32);
  int of_teams = (rows + teams - 1) / teams * ((chunks + BS_TEAM - 1) / BS_TEAM);
  return of_teams < of_warps;
}

// Words 2 t and 2 t + 1 of a chunk: channels 16 t + 4 j, + 1 and + 2, + 3.
struct BsNaturalBytes {
  const uint32_t *row;
  int words;  // pairs of channels; zeros follow
  BS_INLINE void load(uint32_t (&w)[8], int chunk) const {
    int first = chunk / 4 * 32 + chunk % 4 * 2;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      w[2 * t] = w[2 * t + 1] = 0;
      if (first + 8 * t < words) bs_load<8, BS_KEEP>(w + 2 * t, row + first + 8 * t);
    }
  }
};

// Of a row that is permuted for GEMMs of 16 bits.
struct BsPermutedBytes {
  const uint32_t *row;
  BS_INLINE void load(uint32_t (&w)[8], int chunk) const {
    uint4 low = bs_load16<BS_STREAM>(row + 8 * chunk), high = bs_load16<BS_STREAM>(row + 8 * chunk + 4);
    w[0] = low.x, w[2] = low.y, w[4] = low.z, w[6] = low.w;
    w[1] = high.x, w[3] = high.y, w[5] = high.z, w[7] = high.w;
  }
};

template <class F>
BS_INLINE void bs_store_codes(uint4 *to, const uint32_t (&w)[8], float scale) {
  uint32_t codes[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    uint32_t low = bs_e4m3x2(bs_over(F::lo(w[2 * t]), scale), bs_over(F::lo(w[2 * t + 1]), scale));
    codes[t] = low | bs_e4m3x2(bs_over(F::hi(w[2 * t]), scale), bs_over(F::hi(w[2 * t + 1]), scale)) << 16;
  }
  bs_store<16, BS_KEEP>(to, codes);
}

// One row of a warp, or of a team (LANES), to `to`, `chunks` of 16 positions; returns its factor.
template <class F, int ACT, int LANES = 32, class R>
BS_INLINE float bs_quantize_bytes(const R &from, uint4 *to, int chunks, float given, int team = 0,
                                  uint32_t *most = nullptr) {
  int lane = threadIdx.x % LANES;
  uint32_t held[BS_HELD_CHUNKS][8], other[8], own = 0;
#pragma unroll
  for (int a = 0; a < BS_HELD_CHUNKS; ++a) {
    int c = lane + LANES * a;
    if (c < chunks) from.load(held[a], c);
  }
  float factor = given;
  if constexpr (ACT == BS_ACT_FP8) {
#pragma unroll
    for (int a = 0; a < BS_HELD_CHUNKS; ++a) {
#pragma unroll
      for (int q = 0; q < 8; ++q) {
        if (lane + LANES * a < chunks) own = max(own, bs_word_most(held[a][q]));
      }
    }
#pragma unroll 2
    for (int c = lane + LANES * BS_HELD_CHUNKS; c < chunks; c += LANES) {
      from.load(other, c);
#pragma unroll
      for (int q = 0; q < 8; ++q) own = max(own, bs_word_most(other[q]));
    }
    if constexpr (LANES == 32) own = __reduce_max_sync(~0u, own);
    else own = bs_team_most(own, team, most);
    factor = __fdiv_rn(F::lo(own), 448.0f);
  }
#pragma unroll
  for (int a = 0; a < BS_HELD_CHUNKS; ++a) {
    if (lane + LANES * a < chunks) bs_store_codes<F>(to + lane + LANES * a, held[a], factor);
  }
#pragma unroll 2
  for (int c = lane + LANES * BS_HELD_CHUNKS; c < chunks; c += LANES) {
    from.load(other, c);
    bs_store_codes<F>(to + c, other, factor);
  }
  return factor;
}

// Rows that are E4M3 codes and scales already.
template <class F>
BS_INLINE void bs_permute_codes(const BsMoePrepare &p, int cta, int ctas) {
  using Row = BsCodedRow<F, BS_ACT_FP8>;
  int chunks = p.pitch / 16, all = p.rows * chunks;
  for (int i = cta * BS_SORT_THREADS + threadIdx.x; i < all; i += ctas * BS_SORT_THREADS) {
    int row = i / chunks, chunk = i - row * chunks;
    Row from = {static_cast<const char *>(p.hidden) + row * Row::bytes(p.cols), p.cols};
    uint32_t codes[4];
    bs_coded_bytes(codes, from.row, p.cols, chunk);
    bs_store<16, BS_KEEP>(static_cast<uint4 *>(p.x) + i, codes);
    if (chunk == 0) p.row_scale[row] = from.factor(0.0f);
  }
}

// All rows of hidden, by CTAs of BS_SORT_THREADS; LANES as above.
template <class F, int ACT, int LANES>
BS_INLINE void bs_quantize_hidden(const BsMoePrepare &p, int cta, int ctas, uint32_t *most) {
  constexpr int TEAMS = BS_SORT_THREADS / LANES;
  int team = threadIdx.x / LANES, parity = 0;
  float given = bs_given_scale(p.scale);
  for (int row = cta * TEAMS + team; row < p.rows; row += ctas * TEAMS, parity ^= 1) {
    size_t at = static_cast<size_t>(row) * (p.cols / 2);
    BsNaturalBytes from = {static_cast<const uint32_t *>(p.hidden) + at, p.cols / 2};
    uint4 *to = static_cast<uint4 *>(p.x) + static_cast<size_t>(row) * (p.pitch / 16);
    uint32_t *own = LANES == 32 ? nullptr : most + (parity * TEAMS + team) * BS_TEAM_WARPS;
    float factor = bs_quantize_bytes<F, ACT, LANES>(from, to, p.pitch / 16, given, team, own);
    if (threadIdx.x % LANES == 0) p.row_scale[row] = factor;
  }
}

// As bs_moe_prepare, to codes [rows, pitch] of a byte.
template <class F, int ACT, int CTAS, bool CODED = false>
BS_INLINE void bs_moe_prepare_bytes(const BsMoePrepare &p) {
  extern __shared__ __align__(16) char bs_prepare_shared[];
  __shared__ uint32_t most[2 * BS_SORT_WARPS];
  bs_grid_wait();
  bs_grid_launch();
  int cta = blockIdx.x - CTAS, ctas = gridDim.x - CTAS;
  bool teams = bs_teams_pay(p.rows, p.pitch / 16, ctas * BS_SORT_WARPS);
  if (cta < 0) bs_moe_sort<CTAS>(p.sort, bs_prepare_shared);
  else if constexpr (CODED) bs_permute_codes<F>(p, cta, ctas);
  else if (teams) bs_quantize_hidden<F, ACT, BS_TEAM>(p, cta, ctas, most);
  else bs_quantize_hidden<F, ACT, 32>(p, cta, ctas, most);
}

// Rows that were permuted for GEMMs of 16 bits, by CTAs of BS_TEAM threads; LANES as above.
template <class F, int ACT, int LANES>
BS_INLINE void bs_requantize_rows(const void *y, float given, float *row_scale, int rows, void *codes,
                                  int pitch, uint32_t *most) {
  constexpr int TEAMS = BS_TEAM / LANES;
  int parity = 0;
  for (int row = blockIdx.x * TEAMS + threadIdx.x / LANES; row < rows;
       row += gridDim.x * TEAMS, parity ^= 1) {
    BsPermutedBytes from = {static_cast<const uint32_t *>(y) + static_cast<size_t>(row) * (pitch / 2)};
    uint4 *to = static_cast<uint4 *>(codes) + static_cast<size_t>(row) * (pitch / 16);
    uint32_t *own = most + parity * BS_TEAM_WARPS;
    float factor = bs_quantize_bytes<F, ACT, LANES>(from, to, pitch / 16, given, 0, own);
    if (threadIdx.x % LANES == 0) row_scale[row] = factor;
  }
}

// As bs_moe_requantize, to `codes` [.., pitch] of a byte.
template <class F, int ACT>
BS_INLINE void bs_moe_requantize_bytes(const void *y, const float *scale, float *row_scale,
                                       const int *count, void *codes, int pitch) {
  __shared__ uint32_t most[2 * BS_TEAM_WARPS];
  bs_grid_wait();
  bs_grid_launch();
  float given = bs_given_scale(scale);
  int rows = static_cast<int>(bs_load4<BS_KEEP>(count + 1));
  if (bs_teams_pay(rows, pitch / 16, static_cast<int>(gridDim.x) * BS_TEAM_WARPS)) {
    bs_requantize_rows<F, ACT, BS_TEAM>(y, given, row_scale, rows, codes, pitch, most);
  } else {
    bs_requantize_rows<F, ACT, 32>(y, given, row_scale, rows, codes, pitch, most);
  }
}

// ---- After GEMM 2 ---------------------------------------------------------------------------------

constexpr int BS_COMBINE_AHEAD = 8;

struct BsMoeCombine {
  const void *y;         // [rows * top_k, cols], of dropped slots anything
  BsMoeIds ids;
  const float *weights;  // [rows * top_k]
  const int *place;      // of a slot, its row of y; without PLACED they are the slots
  void *out;             // [rows, cols]
  int rows, cols, top_k;
};

// out[t] = sum over j, ascending, of weights[t, j] * y[t, j], in float32; a thread for 8 columns.
template <class F, bool PLACED>
BS_INLINE void bs_moe_combine(const BsMoeCombine &p) {
  constexpr int AHEAD = BS_COMBINE_AHEAD;
  int chunks = p.cols / 8, i = blockIdx.x * BS_TEAM + threadIdx.x;
  int token = i / chunks, slot = token * p.top_k;
  bool works = token < p.rows;
  float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  bool valid[AHEAD];
  float weight[AHEAD];
  for (int j = 0; j < p.top_k; j += AHEAD) {
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      bool there = works && j + a < p.top_k;
      valid[a] = there && p.ids.at(slot + j + a) >= 0;
      weight[a] = there ? __uint_as_float(bs_load4<BS_KEEP>(p.weights + slot + j + a)) : 0.0f;
    }
    // Ids and weights were there before GEMM 1 let its successors start; only y is new.
    if (j == 0) bs_grid_wait(), bs_grid_launch();
    uint4 v[AHEAD];
    const uint4 *from = static_cast<const uint4 *>(p.y) + (i - token * chunks);
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      v[a] = make_uint4(0, 0, 0, 0);
      int row = slot + j + a;
      if (PLACED && valid[a]) row = static_cast<int>(bs_load4<BS_KEEP>(p.place + row));
      if (valid[a]) v[a] = bs_load16<BS_STREAM>(from + static_cast<size_t>(row) * chunks);
    }
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      const uint32_t w[4] = {v[a].x, v[a].y, v[a].z, v[a].w};
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        sum[2 * q] = valid[a] ? __fmaf_rn(weight[a], F::lo(w[q]), sum[2 * q]) : sum[2 * q];
        sum[2 * q + 1] = valid[a] ? __fmaf_rn(weight[a], F::hi(w[q]), sum[2 * q + 1]) : sum[2 * q + 1];
      }
    }
  }
  if (works) bs_store_rounded<F, 8, BS_KEEP>(static_cast<uint4 *>(p.out) + i, sum);
}
