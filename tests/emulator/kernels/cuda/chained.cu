// O[M, 128] = relu(Q K^T) V in f16: two chained MMAs as in attention, one CTA 128 rows of Q.
//
// S = Q K^T (both operands K-major, SWIZZLE_128B) goes through registers to P = f16(relu(S)) in
// tensor memory, the A operand of the second MMA. V[L, 128] is its B operand as it lies: N runs
// along the rows (MN-major), two boxes of 64 columns: LBO steps between the boxes, SBO between 8
// rows of V. The data are small integers, so that P is exact.
#include <cuda_fp16.h>

#include "tcgen05.cuh"

constexpr int BLOCK = 128, HEAD = 64, OUT = 128;
constexpr uint32_t S = 0, P = 128, O = 256, COLUMNS = 512;
// f16 x f16 -> f32, 128 x 128
constexpr uint32_t IDESC = 1 << 4 | (128 / 8) << 17 | (128 / 16) << 24;
constexpr uint32_t B_MN_MAJOR = 1 << 16;

struct Shared {
  __half q[BLOCK][HEAD], k[BLOCK][HEAD], v[OUT / 64][BLOCK][64];
  uint64_t loaded, scored, added;
  uint32_t tmem;
};

DEV void load(Shared& s, const CUtensorMap* q, const CUtensorMap* k, const CUtensorMap* v,
    int step) {
  uint32_t bar = shared(&s.loaded);
  mbar_expect(bar, sizeof(s.k) + sizeof(s.v) + (step ? 0 : sizeof(s.q)));
  if (step == 0) tma_load_2d(shared(s.q), q, 0, blockIdx.x * BLOCK, bar);
  tma_load_2d(shared(s.k), k, 0, step * BLOCK, bar);
  for (int i = 0; i < OUT / 64; ++i) tma_load_2d(shared(s.v[i]), v, 64 * i, step * BLOCK, bar);
}

extern "C" __global__ void __launch_bounds__(128) chained(
    const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
    const __grid_constant__ CUtensorMap v, float* o, int steps) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  int warp = threadIdx.x / 32;
  uint32_t loaded = shared(&s.loaded), scored = shared(&s.scored), added = shared(&s.added);
  if (threadIdx.x == 0) {
    for (uint32_t bar : {loaded, scored, added}) mbar_init(bar, 1);
    mbar_init_fence();
  }
  if (warp == 0) {
    tmem_alloc<1>(shared(&s.tmem), COLUMNS);
    tmem_relinquish<1>();
    fence_before();
  }
  __syncthreads();
  fence_after();
  uint32_t tmem = s.tmem, lanes = warp << 21;
  for (int step = 0; step < steps; ++step) {
    if (threadIdx.x == 0) {
      load(s, &q, &k, &v, step);
      mbar_wait(loaded, step % 2);
      for (int i = 0; i < HEAD / 16; ++i)
        mma_f16(tmem + S, matrix(shared(s.q) + 32 * i, 0, 1024, SW128),
                matrix(shared(s.k) + 32 * i, 0, 1024, SW128), IDESC, i > 0);
      mma_commit(scored);
    }
    mbar_wait(scored, step % 2);
    fence_after();
    for (int first = 0; first < BLOCK; first += 32) {
      uint32_t score[32], pairs[2][8];
      tmem_load(score, tmem + S + lanes + first);
      wait_ld();
      for (int i = 0; i < 16; ++i) {
        float low = __uint_as_float(score[2 * i]), high = __uint_as_float(score[2 * i + 1]);
        __half2 pair = __floats2half2_rn(fmaxf(low, 0.f), fmaxf(high, 0.f));
        pairs[i / 8][i % 8] = *reinterpret_cast<uint32_t*>(&pair);
      }
      tmem_store(tmem + P + lanes + first / 2, pairs[0]);
      tmem_store(tmem + P + lanes + first / 2 + 8, pairs[1]);
    }
    if (ok(STORE_WAIT)) wait_st();
    fence_before();
    if (ok(CTA_BARRIER)) __syncthreads();
    fence_after();
    if (threadIdx.x == 0) {
      constexpr uint32_t lbo = sizeof(s.v[0]), sbo = ok(SBO_STRIDE) ? 1024 : 2048;
      for (int i = 0; i < BLOCK / 16; ++i)
        mma_f16_tmem(tmem + O, tmem + P + 8 * i, matrix(shared(s.v) + 2048 * i, lbo, sbo, SW128),
                     IDESC | B_MN_MAJOR, step + i > 0);
      mma_commit(added);
    }
    mbar_wait(added, step % 2);
    fence_after();
  }
  float* row = o + size_t(blockIdx.x * BLOCK + threadIdx.x) * OUT;
  for (int first = 0; first < OUT; first += 32) {
    uint32_t v32[32];
    tmem_load(v32, tmem + O + lanes + first);
    wait_ld();
    for (int i = 0; i < 32; ++i) row[first + i] = __uint_as_float(v32[i]);
  }
  fence_before();
  __syncthreads();
  fence_after();
  if (warp == 0) tmem_dealloc<1>(tmem, COLUMNS);
}
