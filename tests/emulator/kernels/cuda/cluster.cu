// A cluster of 2 or 4 CTAs: TMA multicast with a mask of its own a CTA, remote mbarrier arrivals
// and reads of distributed shared memory.
//
// CTA r loads rows 8 r.. (32 floats each) of its cluster's block and multicasts them to every CTA
// but r + 1 (and to itself). Every CTA adds what it received, column by column; then it tells all
// CTAs of the cluster that its sums are ready, reads theirs, and writes the running total up to
// itself.
#include "ptx.cuh"

constexpr int MAX = 4, ROWS = 8, WIDTH = 32;

struct Shared {
  float box[MAX][ROWS][WIDTH];
  float sum[WIDTH];
  uint64_t full, ready;
};

DEV bool sends(uint32_t from, uint32_t to, uint32_t size) {
  return to != (from + 1) % size || from == to;
}

extern "C" __global__ void __launch_bounds__(64) cluster_sums(
    const __grid_constant__ CUtensorMap x, float* own, float* running, int size) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  uint32_t rank = cluster_rank(), full = shared(&s.full), ready = shared(&s.ready);
  if (threadIdx.x == 0) {
    mbar_init(full, 1);
    mbar_init(ready, size);
    if (ok(INIT_FENCE)) mbar_init_fence();
    uint32_t boxes = 0;
    for (uint32_t from = 0; from < size; ++from) boxes += sends(from, rank, size);
    mbar_expect(full, boxes * sizeof(s.box[0]) - (ok(TX_SMALL) ? 0 : 128));
  }
  cluster_sync();
  if (threadIdx.x == 0) {
    uint16_t mask = 0;
    for (uint32_t to = 0; to < size; ++to) mask |= sends(rank, to, size) << to;
    if (!ok(COMMIT_MASK)) mask ^= 1 << rank;
    tma_load_2d_multicast(shared(s.box[rank]), &x, 0, blockIdx.x * ROWS, full, mask);
  }
  if (ok(FULL_WAIT)) mbar_wait(full, 0);
  if (threadIdx.x >= WIDTH) {  // warp 1 adds, warp 0 tells
    int column = threadIdx.x - WIDTH;
    float sum = 0;
    for (uint32_t from = 0; from < size; ++from)
      if (sends(from, rank, size))
        for (int row = 0; row < ROWS; ++row) sum += s.box[from][row][column];
    s.sum[column] = sum;
    own[blockIdx.x * WIDTH + column] = sum;
  }
  if (ok(CTA_BARRIER)) __syncthreads();
  if (threadIdx.x < size) mbar_arrive_cluster(map_rank(ready, threadIdx.x));
  if (ok(READY_WAIT)) mbar_wait_cluster(ready, 0);
  if (threadIdx.x < WIDTH) {
    float total = 0;
    for (uint32_t from = 0; from <= rank; ++from) {
      float value;
      asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value)
          : "r"(map_rank(shared(&s.sum[threadIdx.x]), from)) : "memory");
      total += value;
    }
    running[blockIdx.x * WIDTH + threadIdx.x] = total;
  }
  if (ok(EXIT_BARRIER)) cluster_sync();  // the others may still read this CTA's sums
}
