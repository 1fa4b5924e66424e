// Data movement beside the products: TMA reductions, gather4 and scatter4, bulk copies, st.async,
// stmatrix, other tcgen05.ld and .st shapes, work stealing by cluster launch control.
#include "tcgen05.cuh"

DEV void store_group_done() {
  bulk_commit();
  bulk_wait<0>();
}

// out[box] += x[z][box] for every z = blockIdx.y: a 3D load, a 2D reduction of int32, no swizzle;
// the sum of all x of the CTA goes to `total` through a 1D bulk reduction.
extern "C" __global__ void __launch_bounds__(32) reduce_maps(
    const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap out, int* total) {
  __shared__ __align__(128) int box[8][16];
  __shared__ __align__(16) int sum[4];
  __shared__ uint64_t bar;
  uint32_t at = shared(box), b = shared(&bar);
  if (threadIdx.x == 0) {
    mbar_init(b, 1);
    mbar_init_fence();
    mbar_expect(b, sizeof(box));
    asm volatile("cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3, %4}], [%5];"
                 :: "r"(at), "l"(&x), "r"(0), "r"((int)blockIdx.x * 8), "r"((int)blockIdx.y),
                    "r"(b) : "memory");
  }
  __syncwarp();
  mbar_wait(b, 0);
  int own = 0;
  for (int i = threadIdx.x; i < 128; i += 32) own += box[i / 16][i % 16];
  own = __reduce_add_sync(~0u, own);
  if (threadIdx.x < 4) sum[threadIdx.x] = own + threadIdx.x;
  fence_async();
  __syncwarp();
  if (threadIdx.x == 0) {
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1,"
        " %2}], [%3];"
                 :: "l"(&out), "r"(0), "r"((int)blockIdx.x * 8), "r"(at) : "memory");
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%0], [%1], 16;"
                 :: "l"(total), "r"(shared(sum)) : "memory");
    store_group_done();
  }
}

// Four chosen rows in (gather4, 64 bytes each, SWIZZLE_64B), doubled, to four other rows
// (scatter4).
extern "C" __global__ void __launch_bounds__(64) gather_rows(
    const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap y,
        const int4* from, const int4* to) {
  __shared__ __align__(512) float rows[4][16];
  __shared__ uint64_t bar;
  uint32_t at = shared(rows), b = shared(&bar);
  if (threadIdx.x == 0) {
    mbar_init(b, 1);
    mbar_init_fence();
    mbar_expect(b, sizeof(rows));
    int4 r = from[blockIdx.x];
    asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4"
                 ".mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3, %4, %5, %6}], [%7];"
                 :: "r"(at), "l"(&x), "r"(0), "r"(r.x), "r"(r.y), "r"(r.z), "r"(r.w), "r"(b)
                 : "memory");
  }
  __syncthreads();
  mbar_wait(b, 0);
  reinterpret_cast<float*>(rows)[threadIdx.x] *= 2;
  fence_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    int4 r = to[blockIdx.x];
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [%0, {%1,"
        " %2, %3, %4, %5}], [%6];"
                 :: "l"(&y), "r"(0), "r"(r.x), "r"(r.y), "r"(r.z), "r"(r.w), "r"(at) : "memory");
    store_group_done();
  }
}

// Around the ring of a cluster: each thread sends 16 bytes into the next CTA (st.async) and adds
// one to a counter there (red.async); both complete on the receiver's mbarrier.
extern "C" __global__ void __launch_bounds__(32) ring(const int4* x, int4* y, unsigned* counts,
    int size) {
  __shared__ __align__(16) int4 inbox[32];
  __shared__ unsigned count;
  __shared__ uint64_t bar;
  uint32_t b = shared(&bar), next = (cluster_rank() + 1) % size;
  if (threadIdx.x == 0) {
    count = 0;
    mbar_init(b, 1);
    mbar_init_fence();
    mbar_expect(b, 32 * 16 + 32 * 4);
  }
  cluster_sync();
  int4 v = x[blockIdx.x * 32 + threadIdx.x];
  uint32_t there = map_rank(shared(&inbox[threadIdx.x]), next), bar_there = map_rank(b, next);
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3,"
      " %4}, [%5];"
               :: "r"(there), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(bar_there) : "memory");
  asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32"
      " [%0], %1, [%2];"
               :: "r"(map_rank(shared(&count), next)), "r"(1), "r"(bar_there) : "memory");
  mbar_wait_cluster(b, 0);
  y[blockIdx.x * 32 + threadIdx.x] = inbox[threadIdx.x];
  if (threadIdx.x == 0) counts[blockIdx.x] = count;
  cluster_sync();
}

// Fragments of 16-bit matrices: ldmatrix, transposed by stmatrix.trans; y = x^T of one 16 x 16
// tile, out to global memory by a 1D bulk copy.
extern "C" __global__ void __launch_bounds__(32) transpose(const uint4* x, uint16_t* y) {
  __shared__ __align__(128) uint16_t in[16][16], out[16][16];
  reinterpret_cast<uint4*>(in)[threadIdx.x] = x[blockIdx.x * 32 + threadIdx.x];
  __syncwarp();
  int row = threadIdx.x % 16, half = threadIdx.x / 16 * 8;
  uint32_t r[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared(&in[row][half]))
               : "memory");
  // Matrix i came from rows 8 (i % 2).., columns 8 (i / 2)..; transposed it goes to the mirror
  // place.
  int i = threadIdx.x / 8;
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(shared(&out[i / 2 * 8 + threadIdx.x % 8][i % 2 * 8])), "r"(r[0]), "r"(r[1]),
                  "r"(r[2]), "r"(r[3]) : "memory");
  fence_async();
  __syncwarp();
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(y + blockIdx.x * 256), "r"(shared(out)), "r"((uint32_t)sizeof(out))
                 : "memory");
    store_group_done();
  }
}

// Tensor memory written in one shape and read in others; out[shape][warp][register][lane].
extern "C" __global__ void __launch_bounds__(128) tmem_shapes(uint32_t* out) {
  __shared__ uint32_t base;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 1) {
    tmem_alloc<1>(shared(&base), 32);
    tmem_relinquish<1>();
    fence_before();
  }
  __syncthreads();
  fence_after();
  uint32_t at = base + (warp << 21), v[8];
  for (int i = 0; i < 8; ++i) v[i] = threadIdx.x << 16 | i << 1 | 1;  // lane of TMEM, column
  tmem_store(at, v);
  wait_st();
  uint32_t a[4], b[2], c[4], d[4];
  asm volatile("tcgen05.ld.sync.aligned.16x256b.x1.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at + (16 << 16)) : "memory");
  asm volatile("tcgen05.ld.sync.aligned.16x128b.x1.b32 {%0, %1}, [%2];" : "=r"(b[0]), "=r"(b[1])
      : "r"(at + 4) : "memory");
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x4.pack::16b.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3]) : "r"(at) : "memory");
  wait_ld();
  asm volatile("tcgen05.st.sync.aligned.16x256b.x1.b32 [%0], {%1, %2, %3, %4};"
               :: "r"(at), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
  wait_st();
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(at) : "memory");
  wait_ld();
  uint32_t* to = out + warp * 14 * 32 + lane;
  for (int i = 0; i < 4; ++i) to[32 * i] = a[i];
  for (int i = 0; i < 2; ++i) to[32 * (4 + i)] = b[i];
  for (int i = 0; i < 4; ++i) to[32 * (6 + i)] = c[i];
  for (int i = 0; i < 4; ++i) to[32 * (10 + i)] = d[i];
  fence_before();
  __syncthreads();
  fence_after();
  if (warp == 1) tmem_dealloc<1>(base, 32);
}

// Every block of the grid is worked on once, by the CTA launched for it or by one that took it over
// (clusterlaunchcontrol). Before that the kernel waits for the grid in front (programmatic launch).
extern "C" __global__ void __launch_bounds__(64) steal(unsigned* visits, unsigned* by) {
  __shared__ __align__(16) uint4 answer;
  __shared__ uint64_t bar;
  uint32_t b = shared(&bar), at = shared(&answer);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (threadIdx.x == 0) {
    mbar_init(b, 1);
    mbar_init_fence();
  }
  __syncthreads();
  for (unsigned block = blockIdx.x, round = 0;; ++round) {
    if (threadIdx.x == 0) {
      mbar_expect(b, 16);
      asm volatile("clusterlaunchcontrol.try_cancel.async.shared::cta"
                   ".mbarrier::complete_tx::bytes.b128 [%0], [%1];"
                   :: "r"(at), "r"(b) : "memory");
    }
    if (threadIdx.x == round % 64) {
      atomicAdd(&visits[block], 1u);
      by[block] = blockIdx.x;
    }
    mbar_wait(b, round % 2);
    uint32_t more, next;
    asm volatile("{\n .reg .b128 handle;\n .reg .pred p;\n ld.shared.b128 handle, [%2];\n"
                 " clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, handle;\n selp.u32"
                 " %0, 1, 0, p;\n mov.u32 %1, 0;\n"
                 " @p clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %1, handle;\n}"
                 : "=r"(more), "=r"(next) : "r"(at) : "memory");
    fence_async();  // read before the next answer is written through the async proxy
    __syncthreads();
    if (!more) break;
    block = next;
  }
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
