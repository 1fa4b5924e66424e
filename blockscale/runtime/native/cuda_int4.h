/* Tables of the products of INT4 weights, as blockscale/lower/int4/kernel.py writes them. */
#ifndef BLOCKSCALE_CUDA_INT4_H
#define BLOCKSCALE_CUDA_INT4_H

#include "cuda_moe.h"

/* The GEMM for up to `limit` rows; of the last one without meaning. */
typedef struct {
  int64_t limit;
  BsMoeGemm gemm;
} BsInt4Bucket;

/* Which parameter of the function is what; -1: it has none. */
typedef struct {
  int8_t x, offsets, packed, scale, pre_quant_scale, alpha, bias, out, workspace;
} BsInt4Places;

/* A function int4_mm. */
typedef struct {
  const BsInt4Bucket *buckets;
  const BsPart *parts; /* of the workspace */
  int (*lookup)(void *context, const char *name, TVMFFIObjectHandle *out);
  const char *prepare; /* NULL: there is nothing to do before the product */
  int32_t count;       /* of buckets */
  int32_t experts;     /* 0: dense */
  int32_t n, k, padded_n, padded_k;
  int32_t copies;      /* whether prepare writes rows of x */
  int32_t sm_shared;   /* bytes of shared memory of an SM */
  BsInt4Places at;
} BsInt4;

/* The body of host functions; 0, or -1 with an error raised. */
BS_HIDDEN int blockscale_int4(const BsCall *call, const BsInt4 *mm, TVMFFIAny *args);

#endif
