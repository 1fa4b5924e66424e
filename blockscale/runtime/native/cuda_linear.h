/* Tables of the linear layers that quantise their rows, as blockscale/lower/warp/rows.py writes them. */
#ifndef BLOCKSCALE_CUDA_LINEAR_H
#define BLOCKSCALE_CUDA_LINEAR_H

#include "cuda_gemm.h"
#include "cuda_moe.h"

/* The kernel before a GEMM: `rows` of a CTA, elements of a row of codes. */
typedef struct {
  const char *name;
  int32_t rows, pitch;
} BsQuantize;

/* A function linear. */
typedef struct {
  BsGemms gemms;              /* whose tensors are those of the function, then the parts of the workspace */
  const BsQuantize *quantize; /* of each GEMM */
  const BsPart *parts;        /* of the workspace */
  int32_t k;
  int8_t x, workspace, params; /* parameters, and how many */
} BsLinear;

/* The body of host functions; 0, or -1 with an error raised. */
BS_HIDDEN int blockscale_linear(const BsCall *call, const BsLinear *layer, TVMFFIAny *args);

#endif
