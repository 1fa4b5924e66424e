/* Tables of the MoE functions, as blockscale/lower/moe/host.py writes them. */
#ifndef BLOCKSCALE_CUDA_MOE_H
#define BLOCKSCALE_CUDA_MOE_H

#include "cuda_gemm.h"
#include "cuda_launches.h"
#include "cuda_library.h"

/* A compiled GEMM: tiles of `rows` rows of weights and at most `tokens` tokens. */
typedef struct {
  const char *name;
  int32_t rows, tokens, threads, shared;
} BsMoeGemm;

/* A part of the workspace: bytes for each token, slot and tile, as specs/plans/launches.py says. */
typedef struct {
  int64_t token, slot, tile, fixed;
} BsPart;

/* The GEMMs for up to `limit` tokens; of the last one without meaning. */
typedef struct {
  int64_t limit;
  BsMoeGemm gemm1, gemm2;
  int32_t by_bytes; /* rows are codes of 8 bits */
} BsMoeBucket;

/* Which parameter of the function is what; -1: it has none. */
typedef struct {
  int8_t hidden, topk_ids, topk_weights, w13, w13_scale, w13_global, w13_bias, w2, w2_scale, w2_global, w2_bias,
      a1_scale, a2_scale, alpha, limit, share, out, to, workspace;
} BsMoePlaces;

/* A function fused_moe whose GEMMs multiply codes by codes (layout 128x4). */
typedef struct {
  const char *gather;
  BsGemms gemm1, gemm2;
  BsGemms both; /* in one launch, for numbers of slots for which that was chosen; of no kernels: for none */
} BsMoeCodes;

/* A function fused_moe. */
typedef struct {
  const BsMoeCodes *codes; /* NULL: GEMMs decode weights, and those of `buckets` run */
  const BsMoeBucket *buckets;
  const BsPart *parts; /* of the workspace */
  int (*lookup)(void *context, const char *name, TVMFFIObjectHandle *out);
  const char *prepare, *prepare_many;         /* for up to BS_SORT_SLOTS, for more; `codes`: that sort alone */
  const char *requantize, *combine;           /* NULL: activations stay what they are; rows of slots are the output */
  const char *prepare_bytes, *prepare_many_bytes, *requantize_bytes; /* of buckets of bytes */
  int32_t count;                              /* of buckets */
  int32_t experts, top_k, hidden;
  int32_t padded_rows, padded_hidden, padded_intermediate; /* of w13, of both */
  int32_t row_bytes;                          /* of hidden */
  int32_t sm_shared;                          /* bytes of shared memory of an SM */
  BsMoePlaces at;
} BsMoe;

/* A function moe_route. */
typedef struct {
  int (*lookup)(void *context, const char *name, TVMFFIObjectHandle *out);
  const char *kernel;
  struct {
    int8_t logits, correction_bias, scale, topk_ids, topk_weights;
  } at;
} BsMoeRouting;

/* The bodies of host functions; 0, or -1 with an error raised. */
BS_HIDDEN int blockscale_moe(const BsCall *call, const BsMoe *moe, TVMFFIAny *args);
BS_HIDDEN int blockscale_moe_route(const BsCall *call, const BsMoeRouting *routing, TVMFFIAny *args);

#endif
