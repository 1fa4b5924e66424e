/* Tables of the GEMMs of a function, as blockscale/lower/pipe/host.py and lower/warp/host.py write them. */
#ifndef BLOCKSCALE_CUDA_GEMM_H
#define BLOCKSCALE_CUDA_GEMM_H

#include "cuda_library.h"

enum { BS_GEMM_MAPS = 12, BS_GEMM_POINTERS = 24, BS_GEMM_NUMBERS = 4 };
enum { BS_SCALE_ROWS = 128, BS_MAX_ROW_TILE = 8 * 256 /* of a cluster */ };

enum { BS_OF_ROWS = -1, BS_OF_SCALES = -2 }; /* sizes known when called: rows of a, row tiles of a_scale */

/* How the TMA unit sees a tensor. */
typedef struct {
  int8_t param; /* whose memory it is */
  uint8_t dtype, rank, swizzle;
  int64_t dims[3], strides[2]; /* elements, bytes */
  int32_t box[3];
} BsGemmMap;

/* One kernel. */
typedef struct {
  const char *name;
  int64_t limit;        /* the most rows that it is for; of the last one without meaning */
  BsGemmMap maps[BS_GEMM_MAPS];
  int8_t map_count, pointer_count, number_count;
  int8_t pointers[BS_GEMM_POINTERS]; /* parameters that the kernel takes after the maps; -1: null */
  int8_t numbers[BS_GEMM_NUMBERS];   /* and those that it takes by value after these */
  int32_t cluster_rows; /* rows of a of the tiles of a cluster */
  int32_t cluster_cols; /* clusters along the columns of d */
  int32_t ragged;       /* groups of rows, each of which may begin a tile */
  int32_t cluster, threads, shared;
  int32_t persistent;   /* a cluster takes tile after tile */
  int32_t sm_shared;    /* shared memory of an SM, which several CTAs may share; 0: each has one to itself */
} BsGemm;

/* The kernels of a function, and which of its parameters are a and its scales (-1: it has none). */
typedef struct {
  const BsGemm *gemms;
  int (*lookup)(void *context, const char *name, TVMFFIObjectHandle *out);
  int32_t count;
  int8_t a, a_scale;
} BsGemms;

/* Checks sizes of all tensors against the function's parameters; an expression is `rows` rounded up to tiles of
 * scales. 0, or -1 with an error raised. */
BS_HIDDEN int blockscale_check_shapes(const BsCall *call, const TVMFFIAny *args, int64_t rows);

/* The kernel for so many rows; its name is NULL where there is none. */
BS_HIDDEN const BsGemm *blockscale_gemm_choose(const BsGemms *known, int64_t rows);

/* Launches the kernel for so many rows of a, whose scales have `scale_rows`; of tensors, memory is all that is
 * asked of. 0, or -1 with an error raised. */
BS_HIDDEN int blockscale_gemm_launch(const BsCall *call, const BsGemms *known, const TVMFFIAny *args, int64_t rows,
                                     int64_t scale_rows);

/* The body of a GEMM's host function; 0, or -1 with an error raised. */
BS_HIDDEN int blockscale_gemm(const BsCall *call, const BsGemms *known, TVMFFIAny *args);

#endif
