// C[M, N] = A @ B^T in NVFP4: one CTA a 128 x 128 tile, 256 of K a stage, six or more warps a role.
//
// Warps 0-3: epilogue (TMEM lanes 32 w..).  4: TMA of A and B (128-byte rows, SWIZZLE_128B) and the
// scales of A (1D bulk copy).  5: tensor memory, tcgen05.cp of the scales, MMA.  6: the scales of B
// through registers, which needs a proxy fence before tcgen05.cp may read them.
// Scales lie in atoms of 128 rows x 4 (512 bytes: row r, scale j at 16 (r % 32) + 4 (r / 32) + j),
// the atoms of one row block along K.
#include "tcgen05.cuh"

constexpr int STAGES = 2, TILE = 128 * 128, SCALES = 2048, ROUND = 2 * TILE + 2 * SCALES;
constexpr uint32_t D = 0, SFA = 128, SFB = 144, COLUMNS = 256;
constexpr uint32_t N_FIELD = ok(IDESC_N) ? 128 / 8 : 64 / 8;
// E2M1 x E2M1, UE4M3 scales (bit 23 = 0), M = 128.
constexpr uint32_t UE8M0 = ok(SCALE_FORMAT) ? 0 : 1 << 23;
constexpr uint32_t IDESC = 1 << 7 | 1 << 10 | N_FIELD << 17 | UE8M0 | 1 << 27;

struct Shared {
  uint8_t stage[STAGES][ROUND];
  uint64_t full[STAGES], empty[STAGES], done;
  uint32_t tmem;
};

DEV void load_tiles(Shared& s, const CUtensorMap* a, const CUtensorMap* b, const uint8_t* sfa,
    int tiles) {
  constexpr int bytes = 2 * TILE + SCALES + (ok(TX_SMALL) ? 0 : -1024) + (ok(TX_LARGE) ? 0 : 1024);
  for (int t = 0; t < tiles; ++t) {
    uint32_t at = shared(s.stage[t % STAGES]), bar = shared(&s.full[t % STAGES]);
    if (ok(EMPTY_WAIT)) mbar_wait(shared(&s.empty[t % STAGES]), t / STAGES % 2 ^ 1);
    mbar_expect(bar, bytes);
    tma_load_2d(at, a, t * 128, blockIdx.x * 128, bar);
    tma_load_2d(at + TILE, b, t * 128, blockIdx.y * 128, bar);
    bulk_load(at + 2 * TILE, sfa + (blockIdx.x * tiles + t) * SCALES, SCALES, bar);
  }
}

DEV void load_scales(Shared& s, const uint8_t* sfb, int tiles, int lane) {
  for (int t = 0; t < tiles; ++t) {
    mbar_wait(shared(&s.empty[t % STAGES]), t / STAGES % 2 ^ 1);
    auto* from = reinterpret_cast<const uint4*>(sfb + (blockIdx.y * tiles + t) * SCALES);
    auto* to = reinterpret_cast<uint4*>(s.stage[t % STAGES] + 2 * TILE + SCALES);
    for (int i = lane; i < SCALES / 16; i += 32) to[i] = from[i];
    if (ok(PROXY_FENCE)) fence_async();
    mbar_arrive(shared(&s.full[t % STAGES]));
  }
}

DEV void multiply(Shared& s, uint32_t tmem, int tiles) {
  constexpr Swizzle swizzle = ok(SWIZZLE) ? SW128 : SW64;
  constexpr uint32_t sbo = ok(SBO_STRIDE) ? 1024 : 512;
  for (int t = 0; t < tiles; ++t) {
    uint32_t at = shared(s.stage[t % STAGES]);
    if (ok(FULL_WAIT)) mbar_wait(shared(&s.full[t % STAGES]), (t / STAGES + !ok(PARITY)) % 2);
    fence_after();
    for (int k = 0; k < 4; ++k) {  // 64 of K: 32 bytes of a row, one atom of scales
      uint32_t sfa = tmem + SFA + 4 * k, sfb = tmem + SFB + 4 * k;
      copy_scales<1>(sfa, at + 2 * TILE + 512 * k);
      copy_scales<1>(sfb, at + 2 * TILE + SCALES + 512 * k);
      uint64_t a = matrix(at + 32 * k, 0, sbo, swizzle);
      uint64_t b = matrix(at + TILE + 32 * k, 0, sbo, swizzle);
      mma_nvfp4<1>(tmem + D, a, b, IDESC, sfa, sfb + (ok(SCALE_COLUMN) ? 0 : 1), t + k > 0);
    }
    mma_commit(shared(&s.empty[t % STAGES]));
  }
  if (ok(COMMIT)) mma_commit(shared(&s.done));
}

DEV void epilogue(Shared& s, uint32_t tmem, float* c, int n, int warp, int lane) {
  if (ok(DONE_WAIT)) mbar_wait(shared(&s.done), 0);
  fence_after();
  int lanes = ok(OTHER_LANES) ? warp : warp ^ 1;
  float* row = c + size_t(blockIdx.x * 128 + warp * 32 + lane) * n + blockIdx.y * 128;
  if (!ok(OUT_OF_BOUNDS)) row += n;
  if (!ok(MISALIGNED)) row += 1;
  for (int first = 0; first < 128; first += 32) {
    uint32_t v[32];
    tmem_load(v, tmem + D + (lanes << 21) + first);
    if (ok(LOAD_WAIT)) wait_ld();
    for (int i = 0; i < 32; i += 4)
      *reinterpret_cast<uint4*>(row + first + i) = make_uint4(v[i], v[i + 1], v[i + 2], v[i + 3]);
  }
}

extern "C" __global__ void __launch_bounds__(224) nvfp4_tile(
    const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
    const uint8_t* sfa, const uint8_t* sfb, float* c, int n, int tiles) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbar_init(shared(&s.full[i]), 1 + 32 + (ok(ARRIVALS) ? 0 : 1));
      mbar_init(shared(&s.empty[i]), 1);
    }
    mbar_init(shared(&s.done), 1);
    mbar_init_fence();
  }
  if (warp == 5) {
    tmem_alloc<1>(shared(&s.tmem), COLUMNS);
    tmem_relinquish<1>();
    fence_before();
  }
  if (ok(CTA_BARRIER)) __syncthreads();
  fence_after();
  uint32_t tmem = s.tmem;
  if (warp == 4 && elect()) load_tiles(s, &a, &b, sfa, tiles);
  if (warp == 5 && elect()) multiply(s, tmem, tiles);
  if (warp == 6) load_scales(s, sfb, tiles, lane);
  if (!ok(USE_AFTER_DEALLOC) && warp == 5) {
    mbar_wait(shared(&s.done), 0);
    tmem_dealloc<1>(tmem, COLUMNS);
  }
  if (!ok(USE_AFTER_DEALLOC)) __syncthreads();
  if (warp < 4) epilogue(s, tmem, c, n, warp, lane);
  fence_before();
  __syncthreads();
  fence_after();
  if (ok(DEALLOC) && ok(USE_AFTER_DEALLOC) && warp == 5) tmem_dealloc<1>(tmem, COLUMNS);
}
