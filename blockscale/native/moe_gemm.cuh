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
// P holds the constants of a MoePlan (lower/moe_source.py).  Weights of GEMM 2 are loaded before the
// preceding kernel has ended: blocks and order were written by the kernel before that.
#pragma once
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
  int rows, k, x_pitch, out_pitch, out_cols, top_k;
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
  int4 any = __ldg(a.blocks + tile / row_tiles);  // of the right expert
  int local = tile - any.z * row_tiles;
  int4 mine = __ldg(a.blocks + any.z + local % any.w);
  return {mine.x >> 16, local / any.w * P::ROWS, mine.y, mine.x & 0xFFFF};
}

BS_INLINE void bs_bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t bar,
                            uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(bar), "l"(policy)
      : "memory");
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
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    BsMoeTile at = bs_moe_tile<P>(a, tile, row_tiles);
    int source[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      int token = begin + i * STEP;
      source[i] = at.first + token;
      if (P::GATHER && token < at.tokens) source[i] = __ldg(a.order + source[i]) / a.top_k;
    }
    for (int kb = 0; kb < k_blocks; kb += P::BLOCKS_K) {
      int n = min(P::BLOCKS_K, k_blocks - kb);
      uint32_t to = ring.memory() + R::X_AT;
      bs_mbar_wait(ring.empty(), ring.phase ^ 1);
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        int token = begin + i * STEP;
        if (token >= at.tokens) continue;
        uint32_t there = to + token * 128 + ((chunk ^ (token & 7)) << 4);
        const uint16_t *from = a.x + static_cast<int64_t>(source[i]) * a.x_pitch + kb * 64 + chunk * 8;
        for (int b = 0; b < n; ++b)
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(there + b * R::X_BLOCK),
                       "l"(from + b * 64)
                       : "memory");
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

BS_INLINE float bs_moe_sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

template <class P>
BS_INLINE float bs_moe_activate(float gate, float up, float alpha, float limit) {
  if constexpr (P::ACTIVATION == BS_MOE_SWIGLU || P::ACTIVATION == BS_MOE_SWIGLU_OAI) {
    gate = fminf(gate, limit);
    up = fminf(fmaxf(up, -limit), limit) + (P::ACTIVATION == BS_MOE_SWIGLU_OAI ? 1.f : 0.f);
    return gate * bs_moe_sigmoid(alpha * gate) * up;
  }
  float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
  return gate * bs_moe_sigmoid(2.f * inner) * up;  // gelu_tanh: (1 + tanh(z)) / 2 = sigmoid(2 z)
}

template <class P>
BS_INLINE uint32_t bs_moe_pack(float low, float high) {
  uint32_t d;
  if (P::BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

// Rows and columns of an 8x8 matrix of 16-bit numbers change places.
BS_INLINE uint32_t bs_transpose8(uint32_t a) {
  uint32_t d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

// What an m16 tile's rows g and g + 8 are multiplied by and added to.
template <class P>
struct BsMoeRows {
  float scale[2], bias[2];

  BS_INLINE BsMoeRows(const BsMoe &a, const BsMoeTile &at, int row, int lane) {
    bool pair = P::GATED;
    float first = __ldg(a.global + (P::GATHER ? 2 * at.expert : at.expert)) * BsDecode<P>::FACTOR;
    scale[0] = first;
    scale[1] = pair ? __ldg(a.global + 2 * at.expert + 1) * BsDecode<P>::FACTOR : first;
    const float *b = a.bias + static_cast<int64_t>(at.expert) * a.rows + row + lane / 4;
    bias[0] = a.bias ? __ldg(b) : 0.f;
    bias[1] = a.bias ? __ldg(b + 8) : 0.f;
  }
};

// Stores what a warp has of 16 rows from `row` on: c holds N tokens, 4 numbers each 8 (mma.m16n8k16).
template <class P, int N>
BS_INLINE void bs_moe_store(const BsMoe &a, const BsMoeTile &at, int row, const float *c, int lane) {
  if (row >= a.rows) return;
  BsMoeRows<P> rows(a, at, row, lane);
  int g = lane / 4, t = lane % 4;
  int col = (P::GATED ? row / 2 : row) + 2 * t;
#pragma unroll
  for (int n = 0; n < N / 8; ++n) {
    if (8 * n >= at.tokens) break;
    float factor[2] = {1.f, 1.f};
    if (a.row_scale) {
      for (int i = 0; i < 2; ++i) {
        int token = 8 * n + 2 * t + i, slot = at.first + token;
        if (token < at.tokens)
          factor[i] = a.row_scale[P::GATHER ? __ldg(a.order + slot) / a.top_k : slot];
      }
    }
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      v[i] = fmaf(c[4 * n + i], rows.scale[i / 2] * factor[i % 2], rows.bias[i / 2]);
    uint32_t first, second = 0;
    if constexpr (P::GATED) {
      first = bs_moe_pack<P>(bs_moe_activate<P>(v[0], v[2], a.alpha, a.limit),
                             bs_moe_activate<P>(v[1], v[3], a.alpha, a.limit));
    } else {
      if (P::ACTIVATION == BS_MOE_RELU2)
        for (float &each : v) each = fmaxf(each, 0.f) * fmaxf(each, 0.f);
      first = bs_moe_pack<P>(v[0], v[1]), second = bs_moe_pack<P>(v[2], v[3]);
    }
    first = bs_transpose8(first);
    if (!P::GATED) second = bs_transpose8(second);
    int token = 8 * n + g, slot = at.first + token;
    if (token < at.tokens) {
      int64_t to = P::GATHER ? slot : __ldg(a.order + slot);
      uint16_t *out = a.out + to * a.out_pitch + col;
      if (col < a.out_cols) *reinterpret_cast<uint32_t *>(out) = first;
      if (!P::GATED && col + 8 < a.out_cols) *reinterpret_cast<uint32_t *>(out + 8) = second;
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

template <int REGISTERS>
BS_INLINE void bs_more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
BS_INLINE void bs_fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// `consume(ring, tiles, row_tiles, warp, lane)` is run by the consumers.
template <class P, class C>
BS_INLINE void bs_moe_run(const BsMoe &a, C consume) {
  using R = BsMoeRoom<P>;
  extern __shared__ __align__(1024) char bs_smem[];
  int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  BsMoeRing<P> ring = bs_moe_begin<P>(bs_smem);
  if (P::GATHER) bs_grid_wait();  // GEMM 2 reads blocks that were complete before GEMM 1 began
  bs_grid_launch();
  int row_tiles = (a.rows + P::ROWS - 1) / P::ROWS, tiles = __ldg(a.n_blocks) * row_tiles;
  if (warp < R::CONSUMERS) {
    if constexpr (P::MORE_REGISTERS > 0) bs_more_registers<P::MORE_REGISTERS>();
    if (!P::GATHER) bs_grid_wait();
    consume(ring, tiles, row_tiles, warp, lane);
  } else {
    if constexpr (P::MORE_REGISTERS > 0) bs_fewer_registers<P::FEWER_REGISTERS>();
    if (warp == R::CONSUMERS) {
      if (lane == 0) bs_moe_load_weights<P>(a, ring, tiles, row_tiles);
    } else {
      if (!P::GATHER) bs_grid_wait();
      bs_moe_load_tokens<P>(a, ring, tiles, row_tiles, warp - R::CONSUMERS - 1, lane);
    }
  }
}
