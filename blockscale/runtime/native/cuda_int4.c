/* The host side of products of INT4 weights: checks shapes, divides the workspace, and launches, in one stream,
 *
 *   prepare   cuts each expert's rows into tiles; copies rows of x, multiplied, rounded or permuted
 *   GEMM      may begin before prepare has ended
 *
 * and the GEMM alone where x is read as it is and there is one weight. How many rows an expert has is known on
 * the device alone: grids are what the device holds, or an upper bound of the tiles.
 * blockscale/lower/int4/kernel.py writes the tables.
 */
#include "cuda_gemm.h"
#include "cuda_int4.h"
#include "cuda_values.h"

typedef struct {
  const BsCall *call;
  const BsInt4 *mm;
  const TVMFFIAny *args;
  const BsMoeGemm *gemm;
  int64_t rows;
  char *at[BS_INT4_WS_PARTS]; /* the workspace */
} Product;

/* Bytes of the workspace, which Int4Mm.workspace_bytes tells callers. */
static int64_t place(Product *p, char *workspace) {
  int64_t tiles = p->mm->experts ? most_tiles(p->rows, p->mm->experts) : 0;
  return divide(p->mm->parts, BS_INT4_WS_PARTS, p->rows, p->rows, tiles, workspace, p->at);
}

static int prepare(const Product *p) {
  const BsInt4 *mm = p->mm;
  TVMFFIObjectHandle kernel = NULL;
  if (mm->lookup(NULL, mm->prepare, &kernel) != 0) return -1;
  int8_t scale = mm->at.pre_quant_scale;
  Values v = {.count = BS_INT4_PREPARE_PARAMS};
  set_tensor(&v, BS_INT4_PREPARE_OFFSETS, p->args, mm->at.offsets);
  set_pointer(&v, BS_INT4_PREPARE_BLOCKS, p->at[BS_INT4_WS_BLOCKS]);
  set_pointer(&v, BS_INT4_PREPARE_COUNT, p->at[BS_INT4_WS_COUNT]);
  set_tensor(&v, BS_INT4_PREPARE_X, p->args, mm->at.x);
  set_tensor(&v, BS_INT4_PREPARE_SCALE, p->args, scale);
  set_pointer(&v, BS_INT4_PREPARE_TO, p->at[BS_INT4_WS_X]);
  set_integer(&v, BS_INT4_PREPARE_TOKENS, p->gemm->tokens);
  set_integer(&v, BS_INT4_PREPARE_EXPERTS, mm->experts);
  set_integer(&v, BS_INT4_PREPARE_ROWS, p->rows);
  set_integer(&v, BS_INT4_PREPARE_COLS, mm->k);
  set_integer(&v, BS_INT4_PREPARE_PITCH, mm->padded_k);
  set_integer(&v, BS_INT4_PREPARE_SCALES, scale < 0 ? 0 : tensor(p->args, scale)->shape[0]);
  int64_t chunks = mm->copies ? ceil_div(p->rows * mm->padded_k / 8, BS_SORT_THREADS) : 0;
  int64_t others = least(chunks, p->call->device->multiprocessors);
  return launch(p->call, kernel, &v, (mm->experts ? 1 : 0) + others, BS_SORT_THREADS);
}

static int gemm(const Product *p) {
  const BsInt4 *mm = p->mm;
  const BsMoeGemm *g = p->gemm;
  TVMFFIObjectHandle kernel = NULL;
  if (mm->lookup(NULL, g->name, &kernel) != 0) return -1;
  Values v = {.count = mm->experts ? BS_INT4_GROUPED_PARAMS : BS_INT4_DENSE_PARAMS};
  if (mm->copies) set_pointer(&v, BS_INT4_DENSE_X, p->at[BS_INT4_WS_X]);
  else set_tensor(&v, BS_INT4_DENSE_X, p->args, mm->at.x);
  set_tensor(&v, BS_INT4_DENSE_W, p->args, mm->at.packed);
  set_tensor(&v, BS_INT4_DENSE_WS, p->args, mm->at.scale);
  set_tensor(&v, BS_INT4_DENSE_ALPHA, p->args, mm->at.alpha);
  set_tensor(&v, BS_INT4_DENSE_BIAS, p->args, mm->at.bias);
  set_tensor(&v, BS_INT4_DENSE_OUT, p->args, mm->at.out);
  if (mm->experts) {
    set_pointer(&v, BS_INT4_GROUPED_BLOCKS, p->at[BS_INT4_WS_BLOCKS]);
    set_pointer(&v, BS_INT4_GROUPED_N_BLOCKS, p->at[BS_INT4_WS_COUNT]);
  } else {
    set_integer(&v, BS_INT4_DENSE_ROWS, p->rows);
  }
  int64_t used = mm->experts ? least(p->rows, mm->experts) : 1; /* each may have a block that is not full */
  int64_t tiles = (p->rows + used * (g->tokens - 1)) / g->tokens * ceil_div(mm->padded_n, g->rows);
  int64_t sms = p->call->device->multiprocessors;
  int resident = blockscale_active_clusters(p->call, kernel, 1, g->threads, g->shared);
  if (resident < 0) return -1;
  int64_t each = least(ceil_div(tiles, sms), resident / sms);
  return launch_shared(p->call, kernel, &v, least(tiles, resident), g->threads,
                       spread(mm->sm_shared, g->shared, each));
}

int blockscale_int4(const BsCall *call, const BsInt4 *mm, TVMFFIAny *args) {
  if (blockscale_check_shapes(call, args, 0) != 0) return -1;
  const BsInt4Places *at = &mm->at;
  Product p = {.call = call, .mm = mm, .args = args, .rows = tensor(args, at->x)->shape[0]};
  const DLTensor *workspace = tensor(args, at->workspace);
  if (p.rows == 0) return 0;
  if (p.rows * (mm->padded_k / 8) > INT32_MAX) {
    return blockscale_raise("ValueError", "%s: %lld rows are more than a kernel counts; pass fewer at a time",
                            call->function->name, (long long)p.rows);
  }
  if (at->pre_quant_scale >= 0) {
    int64_t scales = tensor(args, at->pre_quant_scale)->shape[0];
    if (scales != 1 && scales != mm->experts) {
      return blockscale_raise("ValueError", "%s: pre_quant_scale has %lld rows, but must have 1, or one for each expert",
                              call->function->name, (long long)scales);
    }
  }
  int64_t needed = place(&p, workspace->data);
  if (needed > workspace->shape[0]) {
    return blockscale_raise("ValueError",
                            "%s: workspace has %lld bytes, but %lld are needed for %lld rows; allocate what the spec's "
                            "workspace_bytes tells",
                            call->function->name, (long long)workspace->shape[0], (long long)needed, (long long)p.rows);
  }
  int chosen = 0;
  while (chosen + 1 < mm->count && p.rows > mm->buckets[chosen].limit) ++chosen;
  p.gemm = &mm->buckets[chosen].gemm;
  if (mm->prepare != NULL && prepare(&p) != 0) return -1;
  return gemm(&p);
}
