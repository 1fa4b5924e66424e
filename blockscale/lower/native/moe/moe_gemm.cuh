// Grouped GEMM of an MoE layer for sm_90 and later: out[token, row] = f(x[token, k] * w[expert, row, k]).
//
// Weights are 4-bit codes in the tiles64 layout (moe_decode.cuh), the rows of the MMA; tokens are
// its columns.  A CTA is persistent and takes tile blockIdx.x, then every gridDim.x-th: ROWS rows
// of an expert times a block of at most TOKENS of its tokens (native/moe_sort.cuh makes the blocks).
// Warp roles: consumers multiply (moe_mma.cuh, moe_wgmma.cuh); then come a warp that loads weights
// and scales by bulk copies, and TOKEN_WARPS warps that gather rows of x by cp.async into rows of
// 128 bytes, swizzled as wgmma and ldmatrix want.  They meet in a ring of STAGES stages, which runs
// on from tile to tile.
//
// By themselves (lower/int4.py) tokens and rows of out keep their order; ONE expert needs no table.
//
// P holds the constants of a MoePlan (lower/moe_source.py).  Weights of GEMM 2 are loaded before the
// preceding kernel has ended: blocks and order were written by the kernel before that.
#pragma once
#include "mma.cuh"
#include "moe_decode.cuh"

enum BsMoeActivation { BS_MOE_NONE, BS_MOE_SWIGLU, BS_MOE_SWIGLU_OAI, BS_MOE_GELU_TANH, BS_MOE_RELU2 };

// The kernel's arguments; pitches and columns in elements.
struct BsMoe {
  const uint16_t *x;
  const uint8_t *w, *ws;
  const float *global, *bias, *row_scale;
  const int *order;
  const int4 *blocks;
  const int *n_blocks;
  uint16_t *out;
  int rows, k, x_pitch, out_pitch, out_cols, top_k;  // ONE: top_k is the number of tokens
  float alpha, limit;
};

// Where things lie in shared memory, and who counts on which barrier.
template <class P>
struct BsMoeRoom {
  static constexpr int CODES = P::ROWS * 32 * P::BLOCKS_K;
  static constexpr int SCALE_BLOCKS = P::GROUP == 128 ? (P::BLOCKS_K + 1) / 2 : P::BLOCKS_K;
  static constexpr int SCALES = P::ROWS * P::SCALE_BYTES / 64 * SCALE_BLOCKS;
  static constexpr int SCALES_AT = CODES;
  static constexpr int X_AT = (CODES + SCALES + 1023) / 1024 * 1024;
  static constexpr int X_BLOCK = P::TOKENS * 128;
  static constexpr int STAGE = X_AT + X_BLOCK * P::BLOCKS_K;
  static constexpr int REDUCE_AT = STAGE * P::STAGES;
  static constexpr int CONSUMERS = P::CONSUMERS;
  static constexpr int TOKEN_WARPS = P::TOKEN_WARPS;
  static constexpr int PIECE = P::ROWS < 64 ? P::ROWS : 64;  // rows of a bulk copy
};

// A CTA's shared memory and the ring's position.
template <class P>
struct BsMoeRing {
  uint32_t base, bars;
  int stage = 0;
  uint32_t phase = 0;

  BS_INLINE uint32_t full() const { return bars + 8 * stage; }
  BS_INLINE uint32_t empty() const { return bars + 8 * (P::STAGES + stage); }
  BS_INLINE uint32_t memory() const { return base + BsMoeRoom<P>::STAGE * stage; }
  BS_INLINE void next() {
    if (++stage == P::STAGES) stage = 0, phase ^= 1;
  }
};

// A tile: rows from `row` on of an expert, `tokens` tokens from sorted slot `first` on.
struct BsMoeTile {
  int expert, row, first, tokens;
};

// Tiles of an expert follow each other, its blocks of tokens fastest: weights come once from memory.
template <class P>
BS_INLINE BsMoeTile bs_moe_tile(const BsMoe &a, int tile, int row_tiles) {
  if constexpr (P::ONE) {
    int made = (a.top_k + P::TOKENS - 1) / P::TOKENS, size = ((a.top_k + made - 1) / made + 7) & ~7;
    int first = tile % made * size;
    return {0, tile / made * P::ROWS, first, min(size, a.top_k - first)};
  }
  int4 any = __ldg(a.blocks + tile / row_tiles);  // of the right expert
  int local = tile - any.z * row_tiles;
  int4 mine = __ldg(a.blocks + any.z + local % any.w);
  return {mine.x >> 16, local / any.w * P::ROWS, mine.y, mine.x & 0xFFFF};
}

// One thread: weights and scales of all tiles.
template <class P>
BS_INLINE void bs_moe_load_weights(const BsMoe &a, BsMoeRing<P> ring, int tiles, int row_tiles) {
  using R = BsMoeRoom<P>;
  constexpr bool TALL = P::ROWS >= 64;
  int k_blocks = a.k / 64, scale_blocks = P::GROUP == 128 ? (k_blocks + 1) / 2 : k_blocks;
  uint64_t once = bs_policy(true);
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    BsMoeTile at = bs_moe_tile<P>(a, tile, row_tiles);
    int pieces = min(P::ROWS, a.rows - at.row) / R::PIECE;
    int64_t band = static_cast<int64_t>(at.expert) * (a.rows / 64) + at.row / 64;
    const uint8_t *w = a.w + band * k_blocks * 2048 + at.row % 64 * 32;
    const uint8_t *ws = a.ws + band * scale_blocks * P::SCALE_BYTES + at.row % 64 * P::SCALE_BYTES / 64;
    for (int kb = 0; kb < k_blocks; kb += P::BLOCKS_K) {
      int n = min(P::BLOCKS_K, k_blocks - kb);
      int sn = P::GROUP == 128 ? (n + 1) / 2 : n, skb = P::GROUP == 128 ? kb / 2 : kb;
      uint32_t to = ring.memory(), bar = ring.full();
      bs_mbar_wait(ring.empty(), ring.phase ^ 1);
      bs_mbar_expect(bar, pieces * R::PIECE * (n * 32 + sn * P::SCALE_BYTES / 64));
      for (int i = 0; i < pieces; ++i) {
        if constexpr (TALL) {
          bs_bulk_load(to + i * P::BLOCKS_K * 2048, w + (static_cast<int64_t>(i) * k_blocks + kb) * 2048,
                       n * 2048, bar, once);
          bs_bulk_load(to + R::SCALES_AT + i * R::SCALE_BLOCKS * P::SCALE_BYTES,
                       ws + (static_cast<int64_t>(i) * scale_blocks + skb) * P::SCALE_BYTES,
                       sn * P::SCALE_BYTES, bar, once);
        } else {
          for (int b = 0; b < n; ++b)
            bs_bulk_load(to + b * P::ROWS * 32, w + static_cast<int64_t>(kb + b) * 2048, P::ROWS * 32,
                         bar, once);
          constexpr int BYTES = P::ROWS * P::SCALE_BYTES / 64;
          for (int b = 0; b < sn; ++b)
            bs_bulk_load(to + R::SCALES_AT + b * BYTES,
                         ws + static_cast<int64_t>(skb + b) * P::SCALE_BYTES, BYTES, bar, once);
        }
      }
      ring.next();
    }
  }
}

// TOKEN_WARPS warps: rows of x of all tiles; `warp` is one of them.  Rows that a block does not have
// are not loaded: they make columns that nobody stores.
template <class P>
BS_INLINE void bs_moe_load_tokens(const BsMoe &a, BsMoeRing<P> ring, int tiles, int row_tiles, int warp,
                                  int lane) {
  using R = BsMoeRoom<P>;
  constexpr int STEP = 4 * R::TOKEN_WARPS, COUNT = (P::TOKENS + STEP - 1) / STEP;
  int k_blocks = a.k / 64, begin = 4 * warp + lane / 8, chunk = lane % 8;
  // Row begin + STEP * i of a block: each STEP flips bit 2 of what the swizzle adds to the chunk.
  uint32_t place = R::X_AT + begin * 128 + ((chunk ^ (begin & 7)) << 4);
  const uint4 *x = reinterpret_cast<const uint4 *>(a.x) + chunk;
  uint32_t pitch = a.x_pitch / 8;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    BsMoeTile at = bs_moe_tile<P>(a, tile, row_tiles);
    int mine = (at.tokens - begin + STEP - 1) / STEP;
    uint32_t source[COUNT];  // in 16 bytes
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      int slot = at.first + begin + i * STEP;
      source[i] = i < mine ? (P::GATHER ? __ldg(a.order + slot) / a.top_k : slot) * pitch : 0;
    }
    for (int kb = 0; kb < k_blocks; kb += P::BLOCKS_K) {
      uint32_t to = ring.memory() + place;
      bs_mbar_wait(ring.empty(), ring.phase ^ 1);
#pragma unroll
      for (int b = 0; b < P::BLOCKS_K; ++b) {
        if (kb + b >= k_blocks) break;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
          if (i >= mine) break;
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                           (i % 2 ? to ^ 64 : to) + b * R::X_BLOCK + i * STEP * 128),
                       "l"(x + (source[i] + (kb + b) * 8))
                       : "memory");
        }
      }
      asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(ring.full()) : "memory");
      ring.next();
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Shared address of the codes (SCALES: scales) of m16 tile `m` of the CTA's tile and k block b of a stage.
template <class P>
BS_INLINE uint32_t bs_moe_codes(uint32_t stage, int m, int b) {
  if (P::ROWS < 64) return stage + (b * (P::ROWS / 16) + m) * 512;
  return stage + (m / 4 * P::BLOCKS_K + b) * 2048 + m % 4 * 512;
}

template <class P>
BS_INLINE uint32_t bs_moe_scales(uint32_t stage, int m, int b) {
  using R = BsMoeRoom<P>;
  constexpr int BYTES = P::SCALE_BYTES / 4;
  if (P::GROUP == 128) b /= 2;
  uint32_t at = stage + R::SCALES_AT;
  if (P::ROWS < 64) return at + (b * (P::ROWS / 16) + m) * BYTES;
  return at + (m / 4 * R::SCALE_BLOCKS + b) * P::SCALE_BYTES + m % 4 * BYTES;
}

// ---- Epilogue -----------------------------------------------------------------------------------

template <class P>
BS_INLINE float bs_moe_activate(float gate, float up, float alpha, float limit) {
  if constexpr (P::ACTIVATION == BS_MOE_SWIGLU || P::ACTIVATION == BS_MOE_SWIGLU_OAI) {
    gate = fminf(gate, limit);
    up = fminf(fmaxf(up, -limit), limit) + (P::ACTIVATION == BS_MOE_SWIGLU_OAI ? 1.f : 0.f);
    return gate * bs_sigmoid(alpha * gate) * up;
  }
  float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
  return gate * bs_sigmoid(2.f * inner) * up;  // gelu_tanh: (1 + tanh(z)) / 2 = sigmoid(2 z)
}

template <class P>
BS_INLINE uint32_t bs_moe_pack(float low, float high) {
  uint32_t d;
  if (P::BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

// What an m16 tile's rows g and g + 8 are multiplied by and added to.
template <class P>
struct BsMoeRows {
  float scale[2], bias[2];

  BS_INLINE void load(const BsMoe &a, const BsMoeTile &at, int row, int lane) {
    bool pair = P::GATED;
    float first = __ldg(a.global + (P::GATHER ? 2 * at.expert : at.expert)) * BsDecode<P>::FACTOR;
    scale[0] = first;
    scale[1] = pair ? __ldg(a.global + 2 * at.expert + 1) * BsDecode<P>::FACTOR : first;
    if constexpr (P::DIRECT) {  // biases are in the order of out: row 16 u + 8 b + 2 t + i is
      int g = lane / 4, col = row / 32 * 32 + g / 2 * 8 + row % 32 / 8 * 2 + g % 2;  // 8 t + 4 u + 2 b + i
      const float *b = a.bias + static_cast<int64_t>(at.expert) * a.out_cols;
      bias[0] = a.bias && col < a.out_cols ? __ldg(b + col) : 0.f;
      bias[1] = a.bias && col + 2 < a.out_cols ? __ldg(b + col + 2) : 0.f;
      return;
    }
    const float *b = a.bias + static_cast<int64_t>(at.expert) * a.rows + row + lane / 4;
    bias[0] = a.bias ? __ldg(b) : 0.f;
    bias[1] = a.bias ? __ldg(b + 8) : 0.f;
  }
};

// Stores 2 * WORDS columns from `col` on; the last row of a matrix may end within them.
template <int WORDS>
BS_INLINE void bs_moe_put(const BsMoe &a, int64_t row, int col, const uint32_t *words) {
  uint16_t *out = a.out + row * a.out_pitch + col;
  if (WORDS == 4 && col + 8 <= a.out_cols && a.out_pitch % 8 == 0) {
    *reinterpret_cast<uint4 *>(out) = make_uint4(words[0], words[1], words[2], words[3]);
  } else if (WORDS == 2 && col + 4 <= a.out_cols && a.out_pitch % 4 == 0) {
    *reinterpret_cast<uint2 *>(out) = make_uint2(words[0], words[1]);
  } else {
#pragma unroll
    for (int i = 0; i < WORDS; ++i)
      if (col + 2 * i < a.out_cols) reinterpret_cast<uint32_t *>(out)[i] = words[i];
  }
}

// Slots of `order` of a tile's tokens: lane l has those of tokens l, l + 32, ...
template <class P>
struct BsMoeSlots {
  static constexpr int COUNT = (P::TOKENS + 31) / 32;
  int flat[COUNT];

  BS_INLINE BsMoeSlots(const BsMoe &a, const BsMoeTile &at, int lane) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      flat[i] = !P::DIRECT && 32 * i + lane < at.tokens ? __ldg(a.order + at.first + 32 * i + lane) : 0;
  }
  // All lanes: that of `token`, of the 8 from 8 n on.
  BS_INLINE int of(int n, int token) const { return __shfl_sync(0xFFFFFFFFu, flat[n / 4], token % 32); }
};

// The numbers that a token's row of x was divided by; 1 without.
template <class P>
BS_INLINE float bs_moe_row_scale(const BsMoe &a, const BsMoeTile &at, int token, int flat) {
  if (token >= at.tokens) return 1.f;
  return a.row_scale[P::GATHER ? flat / a.top_k : at.first + token];
}

// Stores what a warp has of TILES_M * 16 rows from `row` on: c[m] holds 4 numbers for each 8 tokens
// (mma.m16n8k16).  The order of rows (blockscale/ops/moe/tiles.py) makes a thread's columns neighbours.
template <class P>
BS_INLINE void bs_moe_store(const BsMoe &a, const BsMoeTile &at, int row, float (*c)[P::TOKENS / 2],
                            int lane) {
  constexpr int M = P::TILES_M, PAIR = P::GATED ? 1 : 2;  // words of 2 columns that an m16 tile makes
  constexpr int TOGETHER = M % 2 == 0 ? 2 : 1;            // m16 tiles stored at once
  int g = lane / 4, t = lane % 4;
  BsMoeSlots<P> slots(a, at, lane);
#pragma unroll
  for (int m0 = 0; m0 < M; m0 += TOGETHER) {
    int first = row + 16 * m0;
    if (first >= a.rows) return;
    BsMoeRows<P> rows[TOGETHER];
#pragma unroll
    for (int u = 0; u < TOGETHER; ++u) rows[u].load(a, at, first + 16 * u, lane);
    int group = first / 32, tile = first / 16 % 2;  // of 32 rows: 16 or 32 columns
    int col = P::GATED ? 16 * group + 4 * t + 2 * tile : 32 * group + 8 * t + 4 * tile;
#pragma unroll
    for (int n = 0; n < P::TOKENS / 8; ++n) {
      if (8 * n >= at.tokens) break;
      float factor[2] = {1.f, 1.f};
      if (a.row_scale) {
        for (int i = 0; i < 2; ++i) {
          int token = 8 * n + 2 * t + i;
          factor[i] = bs_moe_row_scale<P>(a, at, token, slots.of(n, token));
        }
      }
      uint32_t words[TOGETHER * PAIR];
#pragma unroll
      for (int u = 0; u < TOGETHER; ++u) {
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          v[i] = fmaf(c[m0 + u][4 * n + i], rows[u].scale[i / 2] * factor[i % 2], rows[u].bias[i / 2]);
        if constexpr (P::GATED) {
          words[u] = bs_transpose8(bs_moe_pack<P>(bs_moe_activate<P>(v[0], v[2], a.alpha, a.limit),
                                                  bs_moe_activate<P>(v[1], v[3], a.alpha, a.limit)));
        } else {
          if (P::ACTIVATION == BS_MOE_RELU2)
            for (float &each : v) each = fmaxf(each, 0.f) * fmaxf(each, 0.f);
          words[2 * u] = bs_transpose8(bs_moe_pack<P>(v[0], v[1]));
          words[2 * u + 1] = bs_transpose8(bs_moe_pack<P>(v[2], v[3]));
        }
      }
      int token = 8 * n + g;
      int64_t to = P::GATHER || P::DIRECT ? at.first + token : slots.of(n, token);
      if (token < at.tokens) bs_moe_put<TOGETHER * PAIR>(a, to, col, words);
    }
  }
}

// ---- The kernel ---------------------------------------------------------------------------------

// Barriers and the ring; all threads.
template <class P>
BS_INLINE BsMoeRing<P> bs_moe_begin(char *smem) {
  using R = BsMoeRoom<P>;
  uint32_t bars = (bs_shared(smem) + 1023) / 1024 * 1024;
  BsMoeRing<P> ring{bars + 1024, bars};
  if (threadIdx.x == 0) {
    for (int i = 0; i < P::STAGES; ++i) {
      bs_mbar_init(bars + 8 * i, 1 + 32 * R::TOKEN_WARPS);
      bs_mbar_init(bars + 8 * (P::STAGES + i), R::CONSUMERS);
    }
    bs_mbar_init_fence();
  }
  __syncthreads();
  return ring;
}

// `consume(ring, tiles, row_tiles, warp, lane)` is run by the consumers.
template <class P, class C>
BS_INLINE void bs_moe_run(const BsMoe &a, C consume) {
  using R = BsMoeRoom<P>;
  extern __shared__ __align__(1024) char bs_smem[];
  int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  BsMoeRing<P> ring = bs_moe_begin<P>(bs_smem);
  // GEMM 2 reads blocks that were complete before GEMM 1 began.
  constexpr bool FIRST = P::GATHER || (P::DIRECT && !P::ONE);
  if (FIRST) bs_grid_wait();
  bs_grid_launch();
  int row_tiles = (a.rows + P::ROWS - 1) / P::ROWS;
  int tiles = (P::ONE ? (a.top_k + P::TOKENS - 1) / P::TOKENS : __ldg(a.n_blocks)) * row_tiles;
  if (warp < R::CONSUMERS) {
    if constexpr (P::MORE_REGISTERS > 0) bs_more_registers<P::MORE_REGISTERS>();
    if (!FIRST) bs_grid_wait();
    consume(ring, tiles, row_tiles, warp, lane);
  } else {
    if constexpr (P::MORE_REGISTERS > 0) bs_fewer_registers<P::FEWER_REGISTERS>();
    if (warp == R::CONSUMERS) {
      if (lane == 0) bs_moe_load_weights<P>(a, ring, tiles, row_tiles);
    } else {
      if (!FIRST) bs_grid_wait();
      bs_moe_load_tokens<P>(a, ring, tiles, row_tiles, warp - R::CONSUMERS - 1, lane);
    }
  }
}
