// C[M, N] = A @ B^T in NVFP4: two CTAs (a cluster of 2 along x) a 256 x 256 tile, 128 of K a stage.
//
// Each CTA of the pair holds 128 rows of A and of B, all in 64-byte rows (SWIZZLE_64B); the MMA of
// the leader (the even CTA) reads both shared memories and writes both tensor memories: CTA r gets
// rows 128 r.. of the tile, 256 columns.  The TMA of both CTAs completes on the leader's barrier:
// clearing bit 24 of a shared address gives the even CTA.  The scales of all 256 rows of B are
// needed in both CTAs; tcgen05.cp.cta_group::2 copies in each from its own shared memory.
// Warps 0-3: epilogue through shared memory and TMA stores, 32 columns at a time (SWIZZLE_128B, two
// buffers).  4: TMA.  5: tensor memory and MMA (leader only).
#include "tcgen05.cuh"

constexpr int STAGES = 2, TILE = 128 * 64, SFA_BYTES = 1024, SFB_BYTES = 2048;
constexpr int ROUND = 2 * TILE + SFA_BYTES + SFB_BYTES, OUT = 128 * 128;
constexpr uint32_t D = 0, SFA = 256, SFB = 264, COLUMNS = 512;
constexpr uint32_t LEADER_MASK = ok(LEADER) ? 0xFEFFFFFF : ~0u;
constexpr uint32_t N_FIELD = ok(IDESC_N) ? 256 / 8 : 128 / 8;
// E2M1 x E2M1, UE4M3 scales, M = 256.
constexpr uint32_t IDESC = 1 << 7 | 1 << 10 | N_FIELD << 17 | 2 << 27;

struct Shared {
  uint8_t out[2][OUT];
  uint8_t stage[STAGES][ROUND];
  uint64_t full[STAGES], empty[STAGES], done;
  uint32_t tmem;
};

DEV void load(Shared& s, const CUtensorMap* a, const CUtensorMap* b, const CUtensorMap* sfa,
              const CUtensorMap* sfb, int m_block, int n_block, uint32_t rank, int tiles) {
  constexpr int bytes = 2 * ROUND + (ok(TX_SMALL) ? 0 : -512) + (ok(TX_LARGE) ? 0 : 512);
  for (int t = 0; t < tiles; ++t) {
    uint32_t at = shared(s.stage[t % STAGES]);
    uint32_t own = shared(&s.full[t % STAGES]), bar = own & LEADER_MASK;
    if (ok(EMPTY_WAIT)) mbar_wait(shared(&s.empty[t % STAGES]), t / STAGES % 2 ^ 1);
    if (rank == 0) mbar_expect(own, bytes);  // of both CTAs; the peer's bytes may come earlier
    tma_load_2d_pair(at, a, t * 64, m_block * 128, bar);
    tma_load_2d_pair(at + TILE, b, t * 64, n_block * 256 + rank * 128, bar);
    tma_load_4d_pair(at + 2 * TILE, sfa, 0, 0, 2 * t, m_block, bar);
    tma_load_4d_pair(at + 2 * TILE + SFA_BYTES, sfb, 0, 0, 2 * t, 2 * n_block, bar);
  }
}

DEV void multiply(Shared& s, uint32_t tmem, int tiles) {
  constexpr Swizzle swizzle = ok(SWIZZLE) ? SW64 : SW128;
  constexpr uint32_t sbo = ok(SBO_STRIDE) ? 512 : 1024;
  constexpr uint16_t both = ok(COMMIT_MASK) ? 3 : 1;
  for (int t = 0; t < tiles; ++t) {
    uint32_t at = shared(s.stage[t % STAGES]), scales = at + 2 * TILE;
    if (ok(FULL_WAIT)) mbar_wait_cluster(shared(&s.full[t % STAGES]), t / STAGES % 2);
    fence_after();
    for (int k = 0; k < 2; ++k) {  // 64 of K
      uint32_t sfa = tmem + SFA + 4 * k, sfb = tmem + SFB + 8 * k;
      copy_scales<2>(sfa, scales + 512 * k);
      copy_scales<2>(sfb, scales + SFA_BYTES + 512 * k);  // rows 0-127 of B, then 128-255
      copy_scales<2>(sfb + (ok(SCALE_COLUMN) ? 4 : 3), scales + SFA_BYTES + 1024 + 512 * k);
      uint64_t a = matrix(at + 32 * k, 0, sbo, swizzle);
      uint64_t b = matrix(at + TILE + 32 * k, 0, sbo, swizzle);
      mma_nvfp4<2>(tmem + D, a, b, IDESC, sfa, sfb, t + k > 0);
    }
    mma_commit_pair(shared(&s.empty[t % STAGES]), 3);
  }
  if (ok(COMMIT)) mma_commit_pair(shared(&s.done), both);
}

DEV void epilogue(Shared& s, uint32_t tmem, const CUtensorMap* c, int x, int y, int warp,
    int lane) {
  int row = warp * 32 + lane;
  if (ok(DONE_WAIT)) mbar_wait_cluster(shared(&s.done), 0);
  fence_after();
  for (int part = 0; part < 8; ++part) {
    uint8_t* out = s.out[part % 2];
    uint32_t v[32];
    tmem_load(v, tmem + D + (warp << 21) + 32 * part);
    if (ok(LOAD_WAIT)) wait_ld();
    // this buffer's last store has read it
    if (ok(STORE_GROUP) && threadIdx.x == 0) bulk_wait_read<1>();
    named_barrier(1, 128);
    // SWIZZLE_128B: the 16-byte column is xored with the row in its group of 8
    for (int i = 0; i < 8; ++i)
      *reinterpret_cast<uint4*>(out + row * 128 + 16 * (i ^ row % 8)) =
          make_uint4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
    if (ok(STORE_FENCE)) fence_async();
    if (ok(CTA_BARRIER)) named_barrier(1, 128);
    if (threadIdx.x == 0) {
      tma_store_2d(c, x + 32 * part, y, shared(out));
      bulk_commit();
    }
  }
  if (threadIdx.x == 0) bulk_wait<0>();
}

extern "C" __global__ void __launch_bounds__(192) nvfp4_pair(
    const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
    const __grid_constant__ CUtensorMap sfa, const __grid_constant__ CUtensorMap sfb,
    const __grid_constant__ CUtensorMap c, int tiles) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbar_init(shared(&s.full[i]), 1);
      mbar_init(shared(&s.empty[i]), 1);
    }
    mbar_init(shared(&s.done), 1);
    if (ok(INIT_FENCE)) mbar_init_fence();
  }
  if (warp == 5) {
    tmem_alloc<2>(shared(&s.tmem), COLUMNS);
    tmem_relinquish<2>();
    fence_before();
  }
  __syncthreads();
  cluster_sync();  // the peer's barriers and tensor memory are ready
  fence_after();
  uint32_t tmem = s.tmem;
  if (warp == 4 && elect()) load(s, &a, &b, &sfa, &sfb, blockIdx.x, blockIdx.y, rank, tiles);
  if (warp == 5 && rank == 0 && elect()) multiply(s, tmem, tiles);
  if (warp < 4) epilogue(s, tmem, &c, blockIdx.y * 256, blockIdx.x * 128, warp, lane);
  fence_before();
  __syncthreads();
  cluster_sync();  // nobody leaves before the peer's MMA and barriers are done with this CTA
  fence_after();
  if (ok(DEALLOC) && warp == 5) tmem_dealloc<2>(tmem, COLUMNS);
}
