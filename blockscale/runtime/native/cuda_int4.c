/* The host side of products of INT4 weights: checks shapes, divides the workspace, and launches, in one stream,
 *
 *   prepare   cuts each expert's rows into tiles; copies rows of x, multiplied, rounded or permuted
 *   GEMM      may begin before prepare has ended
 *
 * and the GEMM alone where x is read as it is and there is one weight. How many rows an expert has is known on
 * the device alone: grids are what the device holds, or an upper bound of the tiles.
 * blockscale/lower/int4/kernel.py writes the tables; native/int4_rows.cuh and native/moe_gemm.cuh are the kernels.
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
  char *blocks, *count, *x; /* the workspace */
} Product;

/* Bytes of the workspace, which Int4Mm.workspace_bytes tells callers. */
static int64_t divide(Product *p, char *workspace) {
  const BsInt4 *mm = p->mm;
  int64_t blocks = mm->experts ? least(p->rows, mm->experts + p->rows / BS_MOE_MIN_TOKENS) : 0;
  int64_t table = up(16 * blocks, BS_MOE_PART), copy = mm->copies ? 2 * p->rows * mm->padded_k : 0;
  p->blocks = workspace;
  p->count = workspace + table;
  p->x = p->count + BS_MOE_PART;
  return table + BS_MOE_PART + up(copy, BS_MOE_PART);
}

static int prepare(const Product *p) {
  const BsInt4 *mm = p->mm;
  TVMFFIObjectHandle kernel = NULL;
  if (mm->lookup(NULL, mm->prepare, &kernel) != 0) return -1;
  int8_t scale = mm->at.pre_quant_scale;
  Values v = {.count = 0};
  add_tensor(&v, p->args, mm->at.offsets);
  add_pointer(&v, p->blocks);
  add_pointer(&v, p->count);
  add_tensor(&v, p->args, mm->at.x);
  add_tensor(&v, p->args, scale);
  add_pointer(&v, p->x);
  add_integer(&v, p->gemm->tokens);
  add_integer(&v, mm->experts);
  add_integer(&v, p->rows);
  add_integer(&v, mm->k);
  add_integer(&v, mm->padded_k);
  add_integer(&v, scale < 0 ? 0 : tensor(p->args, scale)->shape[0]);
  int64_t chunks = mm->copies ? ceil_div(p->rows * mm->padded_k / 8, BS_MOE_SORT_THREADS) : 0;
  int64_t others = least(chunks, p->call->device->multiprocessors);
  return launch(p->call, kernel, &v, (mm->experts ? 1 : 0) + others, BS_MOE_SORT_THREADS);
}

static int gemm(const Product *p) {
  const BsInt4 *mm = p->mm;
  const BsMoeGemm *g = p->gemm;
  TVMFFIObjectHandle kernel = NULL;
  if (mm->lookup(NULL, g->name, &kernel) != 0) return -1;
  Values v = {.count = 0};
  if (mm->copies) add_pointer(&v, p->x);
  else add_tensor(&v, p->args, mm->at.x);
  add_tensor(&v, p->args, mm->at.packed);
  add_tensor(&v, p->args, mm->at.scale);
  add_tensor(&v, p->args, mm->at.alpha);
  add_tensor(&v, p->args, mm->at.bias);
  add_pointer(&v, NULL); /* factors of rows */
  add_pointer(&v, NULL); /* their order */
  add_pointer(&v, p->blocks);
  add_pointer(&v, p->count);
  add_tensor(&v, p->args, mm->at.out);
  add_integer(&v, mm->padded_n);
  add_integer(&v, mm->padded_k);
  add_integer(&v, mm->padded_k); /* pitch of x, which is k where x is no copy */
  add_integer(&v, mm->n);
  add_integer(&v, mm->n);
  add_integer(&v, p->rows);
  TVMFFIAny none = {.type_index = kTVMFFIFloat, .v_float64 = 0};
  v.values[v.count++] = none;
  v.values[v.count++] = none;
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
  int64_t needed = divide(&p, workspace->data);
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
