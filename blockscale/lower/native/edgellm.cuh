// Device functions of Edge-LLM's GEMVs: one thread, 16 rows of its columns.
#pragma once
#include <cuda_fp16.h>

#include "memory.cuh"

// Codes 3 and 7 of a word as halves, times 2^-14: their bits are a half's exponent and mantissa in
// miniature, subnormals included.
BS_INLINE float2 bs_edge_pair(uint32_t word) {
  uint32_t bits = (word & 0x80008000u) | ((word >> 3) & 0x0E000E00u);
  return __half22float2(*reinterpret_cast<__half2 *>(&bits));
}

// sums[c] += sum over the rows k, ascending, of a[k] * e2m1(code c of row k).
template <int COLUMNS>
BS_INLINE void bs_edge_dot(float *sums, const void *codes, const float *a) {
  const uint32_t *word = static_cast<const uint32_t *>(codes);
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    float factor = __fmul_rn(a[k], 16384.0f);
#pragma unroll
    for (int c = 0; c < COLUMNS; c += 8) {
      uint32_t w = word[(k * COLUMNS + c) / 8];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float2 pair = bs_edge_pair(w << (12 - 4 * i));
        sums[c + i] = __fmaf_rn(factor, pair.x, sums[c + i]);
        sums[c + i + 4] = __fmaf_rn(factor, pair.y, sums[c + i + 4]);
      }
    }
  }
}
