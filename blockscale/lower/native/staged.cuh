// Device functions of rows that a CTA stages in shared memory, to store each by one bulk copy.
#pragma once
#include "fp4.cuh"
#include "tma.cuh"

// `values` (N float32) rounded and staged: a bulk copy may read them after a barrier of the CTA.
template <class F, int N>
BS_INLINE void bs_stage_rounded(void *to, const float *values) {
  bs_store_rounded<F, N, BS_KEEP>(to, values);
  bs_fence_async();
}

// BYTES (a multiple of 16) that the CTA has staged, to global memory.  Thread 0 alone does it; it waits
// (bs_bulk_wait_read) before it ends.
template <int BYTES>
BS_INLINE void bs_store_row(void *to, const void *from) {
  if (threadIdx.x == 0) {
    bs_bulk_store(to, bs_shared(from), BYTES);
    bs_bulk_commit();
  }
}
