/* The host side of MoE layers: checks shapes, divides the workspace, and launches, in one stream,
 *
 *   prepare     sorts the slots by expert; permutes (and quantises) rows of hidden
 *   GEMM 1      and the activation, in sorted order
 *   requantize  in place, if activations are quantised
 *   GEMM 2      back to the slots' own order
 *   combine     adds up the slots of each token
 *
 * All but the first may begin before their predecessor has ended. Which experts have how many rows is
 * known on the device alone: grids are what the device holds, or an upper bound of the tiles.
 * blockscale/lower/moe/host.py writes the tables; native/moe_*.cuh are the kernels.
 */
#include "cuda_gemm.h"
#include "cuda_moe.h"
#include "cuda_values.h"

/* ---- A pass over at most BS_MOE_CHUNK tokens --------------------------------------------------- */

typedef struct {
  const BsCall *call;
  const BsMoe *moe;
  const TVMFFIAny *args;
  const BsMoeBucket *bucket;
  int64_t tokens, slots;
  const char *hidden, *ids, *weights;
  char *out;
  char *blocks[2], *counts[2], *order, *x, *row_scale1, *y1, *row_scale2, *y2; /* the workspace */
} Pass;

/* Bytes of the workspace of so many tokens, which FusedMoe.workspace_bytes tells callers. */
static int64_t divide(Pass *p, char *workspace) {
  const BsMoe *moe = p->moe;
  int64_t slots = p->slots, blocks = least(slots, moe->experts + slots / BS_MOE_MIN_TOKENS), used = 0;
  struct {
    char **at;
    int64_t bytes;
  } parts[] = {
      {&p->blocks[0], 16 * blocks}, {&p->counts[0], BS_MOE_PART},
      {&p->blocks[1], 16 * blocks}, {&p->counts[1], BS_MOE_PART},
      {&p->order, 4 * slots},       {&p->x, 2 * p->tokens * moe->padded_hidden},
      {&p->row_scale1, 4 * p->tokens}, {&p->y1, 2 * slots * moe->padded_intermediate},
      {&p->row_scale2, 4 * slots},  {&p->y2, 2 * slots * moe->hidden},
  };
  for (uint64_t i = 0; i < sizeof parts / sizeof *parts; ++i) {
    *parts[i].at = workspace + used;
    used += up(parts[i].bytes, BS_MOE_PART);
  }
  return used;
}

/* The table of GEMM 2, which is that of GEMM 1 if their tiles hold as many tokens. */
static int second_table(const Pass *p) { return p->bucket->gemm1.tokens != p->bucket->gemm2.tokens; }

static int prepare(const Pass *p) {
  const BsMoe *moe = p->moe;
  const BsMoeBucket *bucket = p->bucket;
  TVMFFIObjectHandle kernel = NULL;
  int many = p->slots > BS_MOE_SORT_SLOTS;
  int64_t ctas = many ? BS_MOE_SORT_CLUSTER : 1; /* that sort, and of a cluster */
  if (moe->lookup(NULL, many ? moe->prepare_many : moe->prepare, &kernel) != 0) return -1;
  Values v = {.count = 0};
  add_pointer(&v, p->ids);
  add_pointer(&v, p->hidden);
  add_tensor(&v, p->args, moe->at.a1_scale);
  add_pointer(&v, p->order);
  add_pointer(&v, p->blocks[0]);
  add_pointer(&v, p->counts[0]);
  add_pointer(&v, second_table(p) ? p->blocks[1] : NULL);
  add_pointer(&v, p->counts[1]);
  add_pointer(&v, p->x);
  add_pointer(&v, p->row_scale1);
  add_integer(&v, 0); /* ids of 32 bits */
  add_integer(&v, moe->experts);
  add_integer(&v, moe->top_k);
  add_integer(&v, p->tokens);
  add_integer(&v, moe->hidden);
  add_integer(&v, moe->padded_hidden);
  add_integer(&v, bucket->gemm1.tokens);
  add_integer(&v, bucket->gemm2.tokens);
  int64_t threads = p->tokens * (moe->requantize ? BS_MOE_TEAM : moe->padded_hidden / 8);
  int64_t others = least(ceil_div(threads, BS_MOE_SORT_THREADS), p->call->device->multiprocessors - ctas);
  int64_t grid = ctas + up(others < 1 ? 1 : others, ctas);
  int64_t warps = BS_MOE_SORT_THREADS / 32, shared = warps * 8 + (warps + (many ? 1 : 0)) * 4 * moe->experts;
  return launch_shared(p->call, kernel, &v, grid, BS_MOE_SORT_THREADS, shared);
}

/* Most blocks of `tokens` of all rows: of experts that have rows, each may have one that is not full. */
static int64_t most_blocks(const Pass *p, int64_t tokens) {
  int64_t used = least(p->slots, p->moe->experts);
  return (p->slots + used * (tokens - 1)) / tokens;
}

static int gemm(const Pass *p, int second) {
  const BsMoe *moe = p->moe;
  const BsMoePlaces *at = &moe->at;
  const BsMoeGemm *g = second ? &p->bucket->gemm2 : &p->bucket->gemm1;
  const char *factor = second ? p->row_scale2 : p->row_scale1;
  int table = second && second_table(p);
  TVMFFIObjectHandle kernel = NULL;
  if (moe->lookup(NULL, g->name, &kernel) != 0) return -1;
  int64_t rows = second ? moe->padded_hidden : moe->padded_rows;
  int64_t pitch = second ? moe->padded_intermediate : moe->padded_hidden;
  int64_t cols = second ? moe->hidden : moe->padded_intermediate;
  Values v = {.count = 0};
  add_pointer(&v, second ? p->y1 : p->x);
  add_tensor(&v, p->args, second ? at->w2 : at->w13);
  add_tensor(&v, p->args, second ? at->w2_scale : at->w13_scale);
  add_tensor(&v, p->args, second ? at->w2_global : at->w13_global);
  add_tensor(&v, p->args, second ? at->w2_bias : at->w13_bias);
  add_pointer(&v, moe->requantize ? factor : NULL);
  add_pointer(&v, p->order);
  add_pointer(&v, p->blocks[table]);
  add_pointer(&v, p->counts[table]);
  add_pointer(&v, second ? p->y2 : p->y1);
  add_integer(&v, rows);
  add_integer(&v, pitch); /* K, padded */
  add_integer(&v, pitch);
  add_integer(&v, cols);
  add_integer(&v, cols);
  add_integer(&v, moe->top_k);
  v.values[v.count++] = p->args[at->alpha];
  v.values[v.count++] = p->args[at->limit];
  int64_t tiles = most_blocks(p, g->tokens) * ceil_div(rows, g->rows);
  int resident = blockscale_active_clusters(p->call, kernel, 1, g->threads, g->shared);
  if (resident < 0) return -1;
  int64_t each = least(ceil_div(tiles, p->call->device->multiprocessors), resident / p->call->device->multiprocessors);
  return launch_shared(p->call, kernel, &v, least(tiles, resident), g->threads, spread(moe->sm_shared, g->shared, each));
}

static int requantize(const Pass *p) {
  TVMFFIObjectHandle kernel = NULL;
  if (p->moe->lookup(NULL, p->moe->requantize, &kernel) != 0) return -1;
  Values v = {.count = 0};
  add_pointer(&v, p->y1);
  add_tensor(&v, p->args, p->moe->at.a2_scale);
  add_pointer(&v, p->row_scale2);
  add_pointer(&v, p->counts[0]);
  add_integer(&v, p->moe->padded_intermediate);
  int64_t resident = 8 * (int64_t)p->call->device->multiprocessors;
  return launch(p->call, kernel, &v, least(p->slots, resident), BS_MOE_TEAM);
}

static int combine(const Pass *p) {
  TVMFFIObjectHandle kernel = NULL;
  if (p->moe->lookup(NULL, p->moe->combine, &kernel) != 0) return -1;
  Values v = {.count = 0};
  add_pointer(&v, p->y2);
  add_pointer(&v, p->ids);
  add_pointer(&v, p->weights);
  add_pointer(&v, p->out);
  add_integer(&v, 0); /* ids of 32 bits */
  add_integer(&v, p->moe->experts);
  add_integer(&v, p->moe->top_k);
  add_integer(&v, p->tokens);
  add_integer(&v, p->moe->hidden);
  return launch(p->call, kernel, &v, ceil_div(p->tokens * (p->moe->hidden / 8), BS_MOE_TEAM), BS_MOE_TEAM);
}

static int run(const Pass *p) {
  if (prepare(p) != 0 || gemm(p, 0) != 0) return -1;
  if (p->moe->requantize != NULL && requantize(p) != 0) return -1;
  return gemm(p, 1) != 0 || combine(p) != 0 ? -1 : 0;
}

/* ---- Functions --------------------------------------------------------------------------------- */

int blockscale_moe(const BsCall *call, const BsMoe *moe, TVMFFIAny *args) {
  if (blockscale_check_shapes(call, args, 0) != 0) return -1;
  const BsMoePlaces *at = &moe->at;
  int64_t rows = tensor(args, at->hidden)->shape[0], row_bytes = 2 * (int64_t)moe->hidden;
  Pass p = {.call = call, .moe = moe, .args = args, .tokens = least(rows, BS_MOE_CHUNK)};
  const DLTensor *workspace = tensor(args, at->workspace);
  if (rows == 0) return 0;
  p.slots = p.tokens * moe->top_k;
  int64_t needed = divide(&p, workspace->data);
  if (workspace->shape[0] < needed) {
    return blockscale_raise("ValueError",
                            "%s: workspace has %lld bytes, but %lld are needed for %lld rows; allocate what the spec's "
                            "workspace_bytes tells",
                            call->function->name, (long long)workspace->shape[0], (long long)needed, (long long)rows);
  }
  for (int64_t done = 0; done < rows; done += BS_MOE_CHUNK) {
    int chosen = 0;
    p.tokens = least(rows - done, BS_MOE_CHUNK);
    p.slots = p.tokens * moe->top_k;
    divide(&p, workspace->data);
    p.hidden = (const char *)tensor(args, at->hidden)->data + done * row_bytes;
    p.ids = (const char *)tensor(args, at->topk_ids)->data + done * moe->top_k * 4;
    p.weights = (const char *)tensor(args, at->topk_weights)->data + done * moe->top_k * 4;
    p.out = (char *)tensor(args, at->out)->data + done * row_bytes;
    while (chosen + 1 < moe->count && p.tokens > moe->buckets[chosen].limit) ++chosen;
    p.bucket = &moe->buckets[chosen];
    if (run(&p) != 0) return -1;
  }
  return 0;
}

int blockscale_moe_route(const BsCall *call, const BsMoeRouting *routing, TVMFFIAny *args) {
  if (blockscale_check_shapes(call, args, 0) != 0) return -1;
  int64_t rows = tensor(args, routing->at.logits)->shape[0];
  if (rows > INT32_MAX) {
    return blockscale_raise("ValueError", "%s: %lld rows are more than a kernel counts; pass fewer at a time",
                            call->function->name, (long long)rows);
  }
  TVMFFIObjectHandle kernel = NULL;
  if (routing->lookup(NULL, routing->kernel, &kernel) != 0) return -1;
  Values v = {.count = 0};
  add_tensor(&v, args, routing->at.logits);
  add_tensor(&v, args, routing->at.correction_bias);
  v.values[v.count++] = args[routing->at.scale];
  add_tensor(&v, args, routing->at.topk_ids);
  add_tensor(&v, args, routing->at.topk_weights);
  add_integer(&v, rows);
  return launch(call, kernel, &v, ceil_div(rows, BS_MOE_ROUTE_WARPS), 32 * BS_MOE_ROUTE_WARPS);
}
