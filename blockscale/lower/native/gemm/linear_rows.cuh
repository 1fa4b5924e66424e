// Rows of x before a linear layer that multiplies them in FP8: E4M3 of x / s, and s = max |x| / 448 of
// each row.  Codes become numbers of 16 bits, exactly, or stay bytes.
//
//   BS_ROWS_NATURAL    16 bits, channels in their order, cols of them        (layout tiles64)
//   BS_ROWS_PERMUTED   16 bits, as moe_rows.cuh says, zeros up to the pitch  (layout tiles64e)
//   BS_ROWS_BYTES      bytes, as moe_rows.cuh says, zeros up to the pitch    (layout tiles64e)
#pragma once
#include "moe_rows.cuh"

enum BsRowsForm { BS_ROWS_NATURAL, BS_ROWS_PERMUTED, BS_ROWS_BYTES };

struct BsLinearRows {
  const void *x;     // [rows, cols]
  void *to;          // [rows, pitch]
  float *row_scale;  // [rows]
  int rows, cols, pitch;
};

struct BsPlainRow {
  const uint32_t *row;
  BS_INLINE void load(uint32_t (&w)[4], int chunk) const {
    uint4 v = bs_load16<BS_KEEP>(row + 4 * chunk);
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
  }
};

// A CTA of BS_TEAM threads for each row of numbers F, to numbers To; a warp for each row of bytes.
template <class F, class To, BsRowsForm FORM>
BS_INLINE void bs_linear_quantize(const BsLinearRows &p) {
  bs_grid_wait();
  bs_grid_launch();
  auto source = [&p](int row) {
    return static_cast<const uint32_t *>(p.x) + static_cast<size_t>(row) * (p.cols / 2);
  };
  if constexpr (FORM == BS_ROWS_BYTES) {
    constexpr int WARPS = BS_TEAM / 32;
    for (int row = blockIdx.x * WARPS + threadIdx.x / 32; row < p.rows; row += gridDim.x * WARPS) {
      BsNaturalBytes from = {source(row), p.cols / 2};
      uint4 *to = static_cast<uint4 *>(p.to) + static_cast<size_t>(row) * (p.pitch / 16);
      float factor = bs_quantize_bytes<F, BS_ACT_FP8>(from, to, p.pitch / 16, 1.0f);
      if (threadIdx.x % 32 == 0) p.row_scale[row] = factor;
    }
  } else {
    __shared__ uint32_t most[2 * BS_TEAM_WARPS];
    int parity = 0;
    for (int row = blockIdx.x; row < p.rows; row += gridDim.x, parity ^= 1) {
      uint32_t *to = static_cast<uint32_t *>(p.to) + static_cast<size_t>(row) * (p.pitch / 2);
      uint32_t *own = most + parity * BS_TEAM_WARPS;
      float factor;
      if constexpr (FORM == BS_ROWS_NATURAL) {
        BsPlainRow from = {source(row)};
        factor = bs_quantize_row<F, BS_ACT_FP8, To>(from, to, p.pitch / 8, 1.0f, 0, own);
      } else {
        BsNaturalRow from = {source(row), p.cols / 2};
        factor = bs_quantize_row<F, BS_ACT_FP8, To>(from, to, p.pitch / 8, 1.0f, 0, own);
      }
      if (threadIdx.x == 0) p.row_scale[row] = factor;
    }
  }
}
