// The four warps of a tcgen05 GEMM that store: d = alpha * accumulator + bias, rounded to nearest.
//
// Thread i of warp w has lane 32 w + i of tensor memory: a row of X.  Its columns are taken
// P::EPI at a time.  Stores by TMA are of 32 lanes each, so that warps need not meet, and take two
// buffers in turn; what a TMA store may not write (rows of another expert) is stored directly.
#pragma once
#include "fp4.cuh"
#include "gemm_tiles.cuh"

struct BsOutput {
  const void *map;
  const float *alpha, *bias;
  void *out;
};

// 16-bit code of a value, or the value's 32 bits.
template <int OUT>
BS_INLINE uint32_t bs_out_code(float x) {
  if constexpr (OUT == BS_BF16) return BsBf16::pack(x, 0.0f);
  else if constexpr (OUT == BS_F16) return BsF16::pack(x, 0.0f);
  else return __float_as_uint(x);
}

template <int BYTES>
BS_INLINE void bs_store_code(void *to, uint32_t code) {
  if constexpr (BYTES == 2) *static_cast<uint16_t *>(to) = static_cast<uint16_t>(code);
  else *static_cast<uint32_t *>(to) = code;
}

template <int BYTES>
BS_INLINE void bs_store_code_shared(uint32_t to, uint32_t code) {
  if constexpr (BYTES == 2)
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(static_cast<uint16_t>(code)) : "memory");
  else asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(code) : "memory");
}

template <class P>
struct BsEpilogue {
  using L = BsGemm<P>;
  static constexpr int OUT_BYTES = P::OUT == BS_F32 ? 4 : 2;
  static constexpr int WORDS = P::EPI * OUT_BYTES / 4;
  static constexpr int CHUNKS = P::MMA_N / P::EPI;
  static constexpr int ROW = P::N * OUT_BYTES;  // bytes of a row of d
  // The widest store to which rows of d are aligned; a multiple of it is inside or outside.
  static constexpr int WIDE = ROW % 16 == 0 ? 16 : ROW % 8 == 0 ? 8 : ROW % 4 == 0 ? 4 : 2;
  // Staging of one warp: rows of d of 32 lanes, or (SWAP) of 32 columns.
  static constexpr int STAGING = 32 * P::EPI * OUT_BYTES;
  static constexpr int SPAN = P::EPI * OUT_BYTES;  // bytes of a staged row; also its swizzle

  const BsCta<P> &cta;
  BsOutput to;
  uint32_t staging;
  int warp, lane;
  uint32_t buffer;

  BS_INLINE BsEpilogue(const BsCta<P> &cta_, const BsOutput &to_) : cta(cta_), to(to_) {
    warp = threadIdx.x / 32, lane = threadIdx.x % 32, buffer = 0;
    staging = cta.smem + L::OUT + warp * 2 * STAGING;
  }

  BS_INLINE float alpha(int expert) const {
    return to.alpha ? __uint_as_float(bs_load4<BS_KEEP>(to.alpha + expert)) : 1.0f;
  }

  BS_INLINE float bias(int col) const {
    return to.bias && col < P::N ? __uint_as_float(bs_load4<BS_KEEP>(to.bias + col)) : 0.0f;
  }

  BS_INLINE char *at(int row, int col) const {
    return static_cast<char *>(to.out) + (int64_t(row) * P::N + col) * OUT_BYTES;
  }

  // EPI columns of the warp's lanes; with tokens on the columns only those that the MMA has written
  // (it writes multiples of 16).
  BS_INLINE void read(uint32_t *v, uint32_t from, int columns) const {
    if constexpr (P::SWAP || P::EPI == 16) {
#pragma unroll
      for (int i = 0; i < P::EPI; i += 16)
        if (i < columns) bs_tcgen05_ld<16>(v + i, from + i);
    } else {
#pragma unroll
      for (int i = 0; i < P::EPI; i += 32) bs_tcgen05_ld<32>(v + i, from + i);
    }
    bs_tcgen05_wait_ld();
  }

  // ---- Rows of d on lanes -----------------------------------------------------------------------

  // Bias of 4 columns, of which the first is a multiple of 4.
  BS_INLINE void bias4(float *b, int col) const {
    if (P::N % 4 == 0 && reinterpret_cast<uintptr_t>(to.bias) % 16 == 0) {
      if (col < P::N) bs_load<16, BS_KEEP>(b, to.bias + col);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i] = bias(col + i);
    }
  }

  // Scaled, with bias, rounded: the words of EPI neighbours in d.
  BS_INLINE void round(uint32_t *w, const uint32_t *v, float alpha, int col) const {
    float r[P::EPI];
    if (to.bias) {
#pragma unroll
      for (int i = 0; i < P::EPI; i += 4) {
        float b[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        bias4(b, col + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) r[i + j] = __fmaf_rn(__uint_as_float(v[i + j]), alpha, b[j]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < P::EPI; ++i) r[i] = __fmul_rn(__uint_as_float(v[i]), alpha);
    }
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      if constexpr (P::OUT == BS_BF16) w[i] = BsBf16::pack(r[2 * i], r[2 * i + 1]);
      else if constexpr (P::OUT == BS_F16) w[i] = BsF16::pack(r[2 * i], r[2 * i + 1]);
      else w[i] = __float_as_uint(r[i]);
    }
  }

  BS_INLINE void store_row(const uint32_t *w, int row, int col) const {
    char *out = at(row, col);
#pragma unroll
    for (int i = 0; i < SPAN; i += WIDE) {
      if (col * OUT_BYTES + i >= ROW) continue;
      const uint32_t *from = w + i / 4;
      if constexpr (WIDE >= 4) bs_store<WIDE, BS_KEEP>(out + i, from);
      else bs_store_code<2>(out + i, i % 4 ? *from >> 16 : *from);
    }
  }

  // The next buffer of the warp, when the store before the last has read it.
  BS_INLINE uint32_t next_buffer() {
    if (lane == 0) bs_bulk_wait_read<1>();
    __syncwarp();
    buffer ^= 1;
    return staging + buffer * STAGING;
  }

  BS_INLINE void send(uint32_t from, int row, int col) const {
    bs_fence_async();
    __syncwarp();
    if (lane == 0) {
      bs_tma_store_2d(to.map, col, row, from);
      bs_bulk_commit();
    }
  }

  BS_INLINE void stage_rows(const uint32_t *w, int row, int col) {
    uint32_t from = next_buffer();
    // 16-byte pieces of rows of 128, 64 or 32 bytes, swizzled as TMA does
    int turn = SPAN == 128 ? lane % 8 : SPAN == 64 ? lane / 2 % 4 : lane / 4 % 2;
#pragma unroll
    for (int i = 0; i < SPAN / 16; ++i)
      bs_store16_shared(from + lane * SPAN + 16 * (i ^ turn),
                        make_uint4(w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]));
    send(from, row, col);
  }

  // A chunk of the tile: columns `col`.. of d of 32 rows.
  BS_INLINE void rows(const uint32_t *v, const BsTile &tile, float alpha, int chunk) {
    int col = tile.col + chunk * P::EPI, rows = tile.rows - warp * 32;
    uint32_t w[WORDS];
    round(w, v, alpha, col);
    if (P::TMA_STORE && (P::EXPERTS == 0 || rows >= 32)) stage_rows(w, tile.row + warp * 32, col);
    else if (lane < rows) store_row(w, tile.row + warp * 32 + lane, col);
  }

  // ---- Columns of d on lanes --------------------------------------------------------------------

  BS_INLINE void columns(const uint32_t *v, const BsTile &tile, float alpha, float bias,
                         int chunk) {
    int col = tile.col + warp * 32, row = tile.row + chunk * P::EPI;
    int rows = tile.rows - chunk * P::EPI;
    bool whole = P::TMA_STORE && (P::EXPERTS == 0 || rows >= P::EPI);
    uint32_t from = whole ? next_buffer() + lane * OUT_BYTES : 0;
#pragma unroll
    for (int i = 0; i < P::EPI; ++i) {
      uint32_t code = bs_out_code<P::OUT>(__fmaf_rn(__uint_as_float(v[i]), alpha, bias));
      if (whole) bs_store_code_shared<OUT_BYTES>(from + i * 32 * OUT_BYTES, code);
      else if (i < rows && col + lane < P::N)
        bs_store_code<OUT_BYTES>(at(row + i, col + lane), code);
    }
    if (whole) send(from - lane * OUT_BYTES, row, col);
  }

  // ---- Tiles ------------------------------------------------------------------------------------

  // All columns of accumulator `slot`; the leader learns when the MMA may write again.
  BS_INLINE void tile(const BsTile &tile, uint32_t tmem, uint32_t slot, uint32_t free, int valid) {
    constexpr int SHARED = P::OVERLAP > 0 ? P::OVERLAP / P::EPI : CHUNKS;
    float scale = alpha(tile.expert), add = P::SWAP ? bias(tile.col + warp * 32 + lane) : 0.0f;
    uint32_t d = tmem + slot * (P::MMA_N - P::OVERLAP) + (warp << 21);
    bool some = P::SWAP ? tile.col + warp * 32 < P::N : tile.rows > warp * 32;
    int limit = P::SWAP ? min(tile.rows, P::MMA_N) : min(P::N - tile.col, P::MMA_N);
#pragma unroll 1
    for (int i = 0; i < CHUNKS; ++i) {
      // The shared columns are the last of accumulator 0 and the first of accumulator 1.
      int chunk = P::OVERLAP > 0 && slot == 0 ? CHUNKS - 1 - i : i;
      bool used = some && chunk * P::EPI < limit;
      uint32_t v[P::EPI];
      if (used) read(v, d + chunk * P::EPI, valid - chunk * P::EPI);
      if (i == SHARED - 1) {
        bs_tcgen05_fence_before();
        __syncwarp();
        if (lane == 0) bs_mbar_arrive_cluster(free);
      }
      if (!used) continue;
      if constexpr (P::SWAP) columns(v, tile, scale, add, chunk);
      else rows(v, tile, scale, chunk);
    }
  }
};

// The stores of all tiles, by the four warps.
template <class P>
BS_INLINE void bs_store_tiles(const BsCta<P> &cta, const BsTiles<P> &tiles, const BsOutput &to,
                              uint32_t tmem) {
  using L = BsGemm<P>;
  BsEpilogue<P> epilogue(cta, to);
  uint32_t free = cta.smem + L::FREE, number = 0;
  if constexpr (P::G == 2) free = bs_map_rank(free, cta.rank & ~1u);
  for (int t = blockIdx.x / L::CLUSTER; t < tiles.total; t += gridDim.x / L::CLUSTER, ++number) {
    BsTile tile = tiles.at(t);
    uint32_t slot = number % P::ACC;
    bs_mbar_wait(cta.smem + L::DONE + 8 * slot, number / P::ACC & 1);
    bs_tcgen05_fence_after();
    epilogue.tile(tile, tmem, slot, free + 8 * (number % L::FREES), tiles.columns(tile));
  }
  if (P::TMA_STORE && epilogue.lane == 0) bs_bulk_wait<0>();
}
