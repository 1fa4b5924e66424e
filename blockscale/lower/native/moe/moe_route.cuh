// Routing of an MoE layer: the top_k experts of each token and their weights, a warp for a token.
//
// Lane l holds the choices of experts l, l + 32, ... as unsigned keys in their order; 0 is no choice.
// The largest of all lanes, and of equal ones the lowest expert, are two REDUX away.
#pragma once
#include "cuda_launches.h"
#include "fp4_fused.cuh"
#include "tma.cuh"


// Keys are in the order of the numbers; no number is 0.
BS_INLINE uint32_t bs_route_key(float x) {
  uint32_t bits = __float_as_uint(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

BS_INLINE float bs_route_value(uint32_t key) {
  return __uint_as_float(key >> 31 ? key & 0x7FFFFFFFu : ~key);
}

// P has EXPERTS, TOP_K, SIGMOID, NORM, BIAS, GROUPS, KEPT (groups), and Logit: BsF32, BsBf16, BsF16.
template <class P>
struct BsRoute {
  static constexpr int N = (P::EXPERTS + 31) / 32;
  static constexpr int CHOICES = (P::TOP_K + 31) / 32, WORDS = (P::GROUPS + 31) / 32;  // of a lane
  static constexpr int GROUP = P::EXPERTS / P::GROUPS;
  static constexpr bool BY_LOGIT = !P::BIAS;  // scores rise with logits, and do not round to equals
  static constexpr int NONE = 0x7FFFFFFF;
  static constexpr float MOST = 0x1.fffffep127f;  // of finite numbers

  const void *logits;  // of this token
  const float *bias;
  int lane;
  float most = 0, sum = 1;  // of the softmax
  uint32_t key[N];

  // One that is not a number is the lowest.
  BS_INLINE float logit(int e) const {
    float x;
    if constexpr (P::Logit::IS_16) {
      uint16_t code;
      asm volatile("ld.global.nc.u16 %0, [%1];"
                   : "=h"(code)
                   : "l"(static_cast<const uint16_t *>(logits) + e));
      x = P::Logit::lo(code);
    } else {
      x = __uint_as_float(bs_load4<BS_KEEP>(static_cast<const float *>(logits) + e));
    }
    return fminf(fmaxf(x, -MOST), MOST);
  }

  BS_INLINE float score(float x) const {
    if (P::SIGMOID) return __frcp_rn(1.0f + expf(-x));
    return __fdiv_rn(expf(x - most), sum);
  }

  BS_INLINE void reduce(const float (&x)[N]) {
    most = x[0];
#pragma unroll
    for (int i = 1; i < N; ++i) most = fmaxf(most, x[i]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    sum = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) sum += expf(x[i] - most);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  }

  BS_INLINE void load() {
    constexpr float LEAST = -__builtin_huge_valf();
    float x[N], shift[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      int e = 32 * i + lane;
      x[i] = e < P::EXPERTS ? logit(e) : LEAST;
      shift[i] = P::BIAS && e < P::EXPERTS ? __uint_as_float(bs_load4<BS_KEEP>(bias + e)) : 0.0f;
    }
    if (!P::SIGMOID) reduce(x);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float choice = BY_LOGIT ? x[i] : fmaxf(score(x[i]) + shift[i], -MOST);
      key[i] = 32 * i + lane < P::EXPERTS ? bs_route_key(choice) : 0;
    }
  }

  // The best key among experts from .. to - 1, and its expert.
  BS_INLINE uint32_t best(int from, int to, int &expert) const {
    uint32_t own = 0;
    int at = NONE;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      int e = 32 * i + lane;
      if (e >= from && e < to && key[i] > own) own = key[i], at = e;
    }
    uint32_t all = __reduce_max_sync(~0u, own);
    expert = __reduce_min_sync(~0u, own == all ? at : NONE);
    return all;
  }

  BS_INLINE void drop(int expert) {
#pragma unroll
    for (int i = 0; i < N; ++i) key[i] = 32 * i + lane == expert ? 0 : key[i];
  }

  // How good a group is: the sum of its two best if there is a bias, else its best.
  BS_INLINE uint32_t strength(int group) {
    int from = group * GROUP, to = from + GROUP, first, second;
    uint32_t most = best(from, to, first);
    if (!P::BIAS || GROUP == 1) return most;
    drop(first);
    uint32_t next = best(from, to, second);
#pragma unroll
    for (int i = 0; i < N; ++i) key[i] = 32 * i + lane == first ? most : key[i];
    return bs_route_key(bs_route_value(most) + bs_route_value(next));
  }

  // Leaves the experts of the KEPT best groups; lane l knows groups l, l + 32, ...
  BS_INLINE void keep_groups() {
    uint32_t own[WORDS] = {}, kept[WORDS] = {};
    for (int g = 0; g < P::GROUPS; ++g) {
      uint32_t found = strength(g);
#pragma unroll
      for (int w = 0; w < WORDS; ++w) own[w] = g == 32 * w + lane ? found : own[w];
    }
    for (int i = 0; i < P::KEPT; ++i) {
      uint32_t most = 0;
      int at = NONE;
#pragma unroll
      for (int w = 0; w < WORDS; ++w) {
        if (own[w] > most) most = own[w], at = 32 * w + lane;
      }
      uint32_t all = __reduce_max_sync(~0u, most);
      int group = __reduce_min_sync(~0u, most == all ? at : NONE);
#pragma unroll
      for (int w = 0; w < WORDS; ++w) {
        kept[w] |= group / 32 == w ? 1u << group % 32 : 0;
        own[w] = group == 32 * w + lane ? 0 : own[w];
      }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      int group = min(32 * i + lane, P::EXPERTS - 1) / GROUP;
      bool stays = false;
#pragma unroll
      for (int w = 0; w < WORDS; ++w) stays |= group / 32 == w && (kept[w] >> group % 32 & 1);
      key[i] = stays ? key[i] : 0;
    }
  }

  // Lane l gets the l-th best expert, the one after 32 more, ...
  BS_INLINE void choose(int (&own)[CHOICES]) {
    for (int j = 0; j < P::TOP_K; ++j) {
      int expert;
      best(0, P::EXPERTS, expert);
      drop(expert);
#pragma unroll
      for (int c = 0; c < CHOICES; ++c) own[c] = j == 32 * c + lane ? expert : own[c];
    }
  }

  // Weights of the chosen; sums in their order.
  BS_INLINE void weigh(float (&own)[CHOICES], const int (&expert)[CHOICES], float scale) const {
    float all = 0;
#pragma unroll
    for (int c = 0; c < CHOICES; ++c) {
      own[c] = score(logit(expert[c]));
      for (int j = 0; P::NORM && j < min(32, P::TOP_K - 32 * c); ++j) {
        all += __shfl_sync(~0u, own[c], j);
      }
    }
#pragma unroll
    for (int c = 0; c < CHOICES; ++c) {
      own[c] = (P::NORM ? __fdiv_rn(own[c], all + 1e-20f) : own[c]) * scale;
    }
  }
};

template <class P>
BS_INLINE void bs_moe_route(const void *logits, const float *bias, float scale, int *ids,
                            float *weights, int rows) {
  using R = BsRoute<P>;
  bs_grid_wait();
  bs_grid_launch();
  int row = blockIdx.x * BS_ROUTE_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  constexpr int BYTES = P::Logit::IS_16 ? 2 : 4;
  const char *own = static_cast<const char *>(logits) + static_cast<size_t>(row) * P::EXPERTS * BYTES;
  R route = {own, bias, lane};
  route.load();
  if (P::GROUPS > 1) route.keep_groups();
  int expert[R::CHOICES] = {};
  float weight[R::CHOICES];
  route.choose(expert);
  route.weigh(weight, expert, scale);
#pragma unroll
  for (int c = 0; c < R::CHOICES; ++c) {
    size_t to = static_cast<size_t>(row) * P::TOP_K + 32 * c + lane;
    if (32 * c + lane < P::TOP_K) ids[to] = expert[c], weights[to] = weight[c];
  }
}
