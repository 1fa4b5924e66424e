// One tile D[M, N] of every tcgen05.mma kind, 128 bytes of K, in the shared memory layout that the
// caller describes: each operand is `boxes` TMA boxes one after the other, and MMA k (32 bytes of
// K) starts at k / per_box * outer + k % per_box * inner. A box of 4- or 6-bit numbers, spread to
// 16 bytes for each 16, counts with its bytes in global memory (tx_bytes). D is written as it lies
// in tensor memory, 32 bits a value; M = 64 uses lanes 0-15 of each sub-partition.
#include "tcgen05.cuh"

struct Operand {
  // box i lies at i * box_bytes, from (i dx, i dy)
  int boxes, box_bytes, tx_bytes, dx, dy;           
  uint32_t lbo, sbo, per_box, outer, inner, swizzle;  // the descriptors
};

struct Shared {
  uint8_t a[16384], b[16384], sfa[512], sfb[512];
  uint64_t loaded, done;
  uint32_t tmem;
};

enum Kind { F16, TF32, F8F6F4, I8, MXF8F6F4 };
constexpr uint32_t COLUMNS = 256, SFA = 128, SFB = 132;

DEV void load(uint32_t at, const CUtensorMap* map, const Operand& o, uint32_t bar) {
  for (int i = 0; i < o.boxes; ++i) tma_load_2d(at + i * o.box_bytes, map, i * o.dx, i * o.dy, bar);
}

DEV uint64_t descriptor(uint32_t at, const Operand& o, int k) {
  return matrix(at + k / o.per_box * o.outer + k % o.per_box * o.inner, o.lbo, o.sbo,
      Swizzle(o.swizzle));
}

template <Kind KIND>
DEV void tile(const CUtensorMap* a, const CUtensorMap* b, const uint8_t* sfa, const uint8_t* sfb,
              uint32_t* d, int m, int n, uint32_t idesc, Operand oa, Operand ob) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t loaded = shared(&s.loaded), done = shared(&s.done);
  if (threadIdx.x == 0) {
    mbar_init(loaded, 1);
    mbar_init(done, 1);
    mbar_init_fence();
  }
  if (warp == 0) {
    tmem_alloc<1>(shared(&s.tmem), COLUMNS);
    tmem_relinquish<1>();
    fence_before();
  }
  __syncthreads();
  fence_after();
  uint32_t tmem = s.tmem;
  if (threadIdx.x == 0) {
    mbar_expect(loaded, oa.boxes * oa.tx_bytes + ob.boxes * ob.tx_bytes + (KIND == MXF8F6F4 ?
        1024 : 0));
    load(shared(s.a), a, oa, loaded);
    load(shared(s.b), b, ob, loaded);
    if (KIND == MXF8F6F4) {
      bulk_load(shared(s.sfa), sfa, 512, loaded);
      bulk_load(shared(s.sfb), sfb, 512, loaded);
    }
    mbar_wait(loaded, 0);
    if (KIND == MXF8F6F4) {
      copy_scales<1>(tmem + SFA, shared(s.sfa));
      copy_scales<1>(tmem + SFB, shared(s.sfb));
    }
    for (int k = 0; k < 4; ++k) {
      uint64_t left = descriptor(shared(s.a), oa, k), right = descriptor(shared(s.b), ob, k);
      if (KIND == F16) mma_f16(tmem, left, right, idesc, k > 0);
      if (KIND == TF32) mma_tf32(tmem, left, right, idesc, k > 0);
      if (KIND == F8F6F4) mma_f8(tmem, left, right, idesc, k > 0);
      if (KIND == I8) mma_i8(tmem, left, right, idesc, k > 0);
      if (KIND == MXF8F6F4)  // byte k of a scale cell: the block of 32 that MMA k multiplies
        mma_mxf8f6f4(tmem, left, right, idesc | k << 29 | k << 4, tmem + SFA, tmem + SFB, k > 0);
    }
    mma_commit(done);
  }
  mbar_wait(done, 0);
  fence_after();
  int row = m == 64 ? 16 * warp + lane : threadIdx.x;
  for (int first = 0; first < n; first += 32) {
    uint32_t v[32];
    tmem_load(v, tmem + (warp << 21) + first);
    wait_ld();
    if (m == 128 || lane < 16)
      for (int i = 0; i < 32; ++i) d[row * n + first + i] = v[i];
  }
  fence_before();
  __syncthreads();
  fence_after();
  if (warp == 0) tmem_dealloc<1>(tmem, COLUMNS);
}

#define KERNEL(name, KIND)                                                                         \
  extern "C" __global__ void __launch_bounds__(128) name(                                          \
      const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,               \
      const uint8_t* sfa,                                                                         \
      const uint8_t* sfb, uint32_t* d, int m, int n, uint32_t idesc,                              \
      const __grid_constant__ Operand oa,                                                         \
      const __grid_constant__ Operand ob) {                                                        \
    tile<KIND>(&a, &b, sfa, sfb, d, m, n, idesc, oa, ob);                                          \
  }
KERNEL(kind_f16, F16)
KERNEL(kind_tf32, TF32)
KERNEL(kind_f8f6f4, F8F6F4)
KERNEL(kind_i8, I8)
KERNEL(kind_mxf8f6f4, MXF8F6F4)
