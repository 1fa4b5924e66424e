// What comes before a product of INT4 weights: the table of its tiles, and rows of x as it wants them.
//
// offsets [experts + 1]: rows of expert e are offsets[e] to offsets[e + 1]; those that fall or lie
// outside of x are taken as the nearest that do not.  CTA 0 cuts each expert's rows into blocks, as
// native/moe_sort.cuh does; all other CTAs multiply rows by pre_quant_scale, rounding once, round them
// to E4M3, and permute each 64 of K as native/moe_rows.cuh says: what of it the template says.
#pragma once
#include "moe_rows.cuh"

struct BsInt4Prepare {
  const int *offsets;  // null: one expert, and no table
  BsMoeTable table;
  const void *x;       // [rows, cols]
  const void *scale;   // [1 or experts, cols]
  void *to;            // [rows, pitch]; null: rows stay what they are
  int experts, rows, cols, pitch, scales;
};

BS_INLINE int bs_int4_offset(const BsInt4Prepare &p, int e, int least) {
  return max(min(static_cast<int>(bs_load4<BS_KEEP>(p.offsets + e)), p.rows), least);
}

// The last expert that begins at or before `row`; rows of none may get any.
BS_INLINE int bs_int4_expert(const BsInt4Prepare &p, int row) {
  int low = 0, high = p.experts;
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (static_cast<int>(bs_load4<BS_KEEP>(p.offsets + middle)) <= row) low = middle;
    else high = middle;
  }
  return low;
}

// A CTA of 1024 threads, one for each expert.
BS_INLINE void bs_int4_table(const BsInt4Prepare &p, int *totals) {
  int e = threadIdx.x, lane = e % 32, warp = e / 32, rows = 0, start = 0;
  if (e < p.experts) {
    start = bs_int4_offset(p, e, 0);
    rows = bs_int4_offset(p, e + 1, start) - start;
  }
  int made = p.table.blocks_of(rows);
  int before = static_cast<int>(bs_sort_scan(made));
  if (lane == 31) totals[warp] = before;
  __syncthreads();
  int first = before - made, all = 0;
  for (int i = 0; i < BS_SORT_WARPS; ++i) {
    if (i < warp) first += totals[i];
    all += totals[i];
  }
  p.table.write(e, rows, start, first, 0, 1);
  if (e == 0) p.table.end(all, p.rows);
}

template <class F, bool SCALE, bool FP8>
BS_INLINE uint32_t bs_int4_word(uint32_t w, uint32_t s) {
  if (SCALE) w = F::pack(__fmul_rn(F::lo(w), F::lo(s)), __fmul_rn(F::hi(w), F::hi(s)));
  if (FP8) w = F::pack(bs_e4m3_value(bs_e4m3(F::lo(w))), bs_e4m3_value(bs_e4m3(F::hi(w))));
  return w;
}

template <class F, bool SCALE, bool FP8, bool PERMUTE>
BS_INLINE void bs_int4_rows(const BsInt4Prepare &p, int cta, int ctas) {
  int chunks = p.pitch / 8, words = p.cols / 2;
  for (int i = cta * BS_SORT_THREADS + threadIdx.x; i < p.rows * chunks; i += ctas * BS_SORT_THREADS) {
    int row = i / chunks, chunk = i - row * chunks;
    const uint32_t *from = static_cast<const uint32_t *>(p.x) + static_cast<size_t>(row) * words;
    const uint32_t *scale = static_cast<const uint32_t *>(p.scale);
    if (SCALE && p.scales > 1) scale += static_cast<size_t>(bs_int4_expert(p, row)) * words;
    uint32_t w[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      int at = PERMUTE ? (chunk & ~7) * 4 + (chunk & 7) + 8 * q : 4 * chunk + q;
      bool there = at < words;
      uint32_t value = there ? bs_load4<BS_KEEP>(from + at) : 0;
      uint32_t factor = SCALE && there ? bs_load4<BS_KEEP>(scale + at) : 0;
      w[q] = there ? bs_int4_word<F, SCALE, FP8>(value, factor) : 0;
    }
    bs_store<16, BS_KEEP>(static_cast<uint4 *>(p.to) + i, w);
  }
}

template <class F, bool SCALE, bool FP8, bool PERMUTE>
BS_INLINE void bs_int4_prepare(const BsInt4Prepare &p) {
  __shared__ int totals[BS_SORT_WARPS];
  bs_grid_wait();
  bs_grid_launch();
  int tables = p.offsets == nullptr ? 0 : 1, cta = static_cast<int>(blockIdx.x) - tables;
  if (cta < 0) bs_int4_table(p, totals);
  else bs_int4_rows<F, SCALE, FP8, PERMUTE>(p, cta, gridDim.x - tables);
}
