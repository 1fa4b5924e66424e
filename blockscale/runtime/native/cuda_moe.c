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
 * Of layers whose GEMMs multiply codes by codes (blockscale/lower/moe/codes.py)
 *
 *   prepare     sorts
 *   gather      quantises rows into the experts' order
 *   GEMM 1      and the activation, and codes and scales of that
 *   GEMM 2      in the experts' order
 *   combine     finds a token's rows
 *
 * blockscale/lower/moe/host.py writes the tables; native/moe_*.cuh are the kernels.
 */
#include "cuda_gemm.h"
#include "cuda_values.h"

/* ---- A pass over at most BS_CHUNK tokens --------------------------------------------------- */

typedef struct {
  const BsCall *call;
  const BsMoe *moe;
  const TVMFFIAny *args;
  const BsMoeBucket *bucket;
  int64_t tokens, slots;
  const char *hidden, *ids, *weights;
  char *out;
  char *at[BS_MOE_WS_PARTS]; /* the workspace; of codes, fewer parts */
} Pass;

_Static_assert((int)BS_MOE_CODES_WS_PARTS <= (int)BS_MOE_WS_PARTS, "Pass.at holds both");

/* Bytes of the workspace of so many tokens, which FusedMoe.workspace_bytes tells callers. */
static int64_t place(Pass *p, char *workspace) {
  int64_t tiles = most_tiles(p->slots, p->moe->experts);
  if (p->moe->codes != NULL) {
    int64_t used = least(p->slots, p->moe->experts);
    return divide(p->moe->parts, BS_MOE_CODES_WS_PARTS, p->tokens, p->slots, used, workspace, p->at);
  }
  return divide(p->moe->parts, BS_MOE_WS_PARTS, p->tokens, p->slots, tiles, workspace, p->at);
}

/* The table of GEMM 2, which is that of GEMM 1 if their tiles hold as many tokens. */
static int second_table(const Pass *p) { return p->bucket->gemm1.tokens != p->bucket->gemm2.tokens; }

/* Shared memory of a CTA that sorts. */
static int64_t sort_bytes(const BsMoe *moe, int many) {
  int64_t warps = BS_SORT_THREADS / 32;
  return warps * 8 + (warps + (many ? 1 : 0)) * 4 * moe->experts;
}

static int prepare(const Pass *p) {
  const BsMoe *moe = p->moe;
  const BsMoeBucket *bucket = p->bucket;
  TVMFFIObjectHandle kernel = NULL;
  int many = p->slots > BS_SORT_SLOTS;
  int64_t ctas = many ? BS_SORT_CLUSTER : 1; /* that sort, and of a cluster */
  const char *few = bucket->by_bytes ? moe->prepare_bytes : moe->prepare;
  const char *more = bucket->by_bytes ? moe->prepare_many_bytes : moe->prepare_many;
  if (moe->lookup(NULL, many ? more : few, &kernel) != 0) return -1;
  Values v = {.count = BS_PREPARE_PARAMS};
  set_pointer(&v, BS_PREPARE_IDS, p->ids);
  set_pointer(&v, BS_PREPARE_HIDDEN, p->hidden);
  set_tensor(&v, BS_PREPARE_SCALE, p->args, moe->at.a1_scale);
  set_pointer(&v, BS_PREPARE_ORDER, p->at[BS_MOE_WS_ORDER]);
  set_pointer(&v, BS_PREPARE_BLOCKS1, p->at[BS_MOE_WS_BLOCKS1]);
  set_pointer(&v, BS_PREPARE_COUNT1, p->at[BS_MOE_WS_COUNT1]);
  set_pointer(&v, BS_PREPARE_BLOCKS2, second_table(p) ? p->at[BS_MOE_WS_BLOCKS2] : NULL);
  set_pointer(&v, BS_PREPARE_COUNT2, p->at[BS_MOE_WS_COUNT2]);
  set_pointer(&v, BS_PREPARE_X, p->at[BS_MOE_WS_X]);
  set_pointer(&v, BS_PREPARE_ROW_SCALE, p->at[BS_MOE_WS_ROW_SCALE1]);
  set_integer(&v, BS_PREPARE_WIDE, 0); /* ids of 32 bits */
  set_integer(&v, BS_PREPARE_EXPERTS, moe->experts);
  set_integer(&v, BS_PREPARE_TOP_K, moe->top_k);
  set_integer(&v, BS_PREPARE_ROWS, p->tokens);
  set_integer(&v, BS_PREPARE_COLS, moe->hidden);
  set_integer(&v, BS_PREPARE_PITCH, moe->padded_hidden);
  set_integer(&v, BS_PREPARE_TOKENS1, bucket->gemm1.tokens);
  set_integer(&v, BS_PREPARE_TOKENS2, bucket->gemm2.tokens);
  int64_t threads = p->tokens * (moe->requantize ? BS_TEAM : moe->padded_hidden / 8);
  int64_t others = least(ceil_div(threads, BS_SORT_THREADS), p->call->device->multiprocessors - ctas);
  int64_t grid = ctas + up(others < 1 ? 1 : others, ctas);
  return launch_shared(p->call, kernel, &v, grid, BS_SORT_THREADS, sort_bytes(moe, many));
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
  const char *factor = p->at[second ? BS_MOE_WS_ROW_SCALE2 : BS_MOE_WS_ROW_SCALE1];
  int table = second && second_table(p);
  TVMFFIObjectHandle kernel = NULL;
  if (moe->lookup(NULL, g->name, &kernel) != 0) return -1;
  int64_t rows = second ? moe->padded_hidden : moe->padded_rows;
  Values v = {.count = second ? BS_GEMM_ALPHA : BS_GEMM_PARAMS}; /* GEMM 2 ends before alpha */
  int between = p->bucket->by_bytes ? BS_MOE_WS_Y1_CODES : BS_MOE_WS_Y1;
  set_pointer(&v, BS_GEMM_X, p->at[second ? between : BS_MOE_WS_X]);
  set_tensor(&v, BS_GEMM_W, p->args, second ? at->w2 : at->w13);
  set_tensor(&v, BS_GEMM_WS, p->args, second ? at->w2_scale : at->w13_scale);
  set_tensor(&v, BS_GEMM_GLOBAL, p->args, second ? at->w2_global : at->w13_global);
  set_tensor(&v, BS_GEMM_BIAS, p->args, second ? at->w2_bias : at->w13_bias);
  set_pointer(&v, BS_GEMM_ROW_SCALE, moe->requantize ? factor : NULL);
  set_pointer(&v, BS_GEMM_ORDER, p->at[BS_MOE_WS_ORDER]);
  set_pointer(&v, BS_GEMM_BLOCKS, p->at[table ? BS_MOE_WS_BLOCKS2 : BS_MOE_WS_BLOCKS1]);
  set_pointer(&v, BS_GEMM_N_BLOCKS, p->at[table ? BS_MOE_WS_COUNT2 : BS_MOE_WS_COUNT1]);
  set_pointer(&v, BS_GEMM_OUT, p->at[second ? BS_MOE_WS_Y2 : BS_MOE_WS_Y1]);
  v.values[BS_GEMM_ALPHA] = p->args[at->alpha];
  v.values[BS_GEMM_LIMIT] = p->args[at->limit];
  int64_t tiles = most_blocks(p, g->tokens) * ceil_div(rows, g->rows);
  int resident = blockscale_active_clusters(p->call, kernel, 1, g->threads, g->shared);
  if (resident < 0) return -1;
  int64_t each = least(ceil_div(tiles, p->call->device->multiprocessors), resident / p->call->device->multiprocessors);
  return launch_shared(p->call, kernel, &v, least(tiles, resident), g->threads, spread(moe->sm_shared, g->shared, each));
}

static int requantize(const Pass *p) {
  TVMFFIObjectHandle kernel = NULL;
  if (p->moe->lookup(NULL, p->moe->requantize, &kernel) != 0) return -1;
  Values v = {.count = BS_REQUANTIZE_PARAMS};
  set_pointer(&v, BS_REQUANTIZE_Y, p->at[BS_MOE_WS_Y1]);
  set_tensor(&v, BS_REQUANTIZE_SCALE, p->args, p->moe->at.a2_scale);
  set_pointer(&v, BS_REQUANTIZE_ROW_SCALE, p->at[BS_MOE_WS_ROW_SCALE2]);
  set_pointer(&v, BS_REQUANTIZE_COUNT, p->at[BS_MOE_WS_COUNT1]);
  set_integer(&v, BS_REQUANTIZE_PITCH, p->moe->padded_intermediate);
  int64_t resident = 8 * (int64_t)p->call->device->multiprocessors;
  return launch(p->call, kernel, &v, least(p->slots, resident), BS_TEAM);
}

static int requantize_bytes(const Pass *p) {
  TVMFFIObjectHandle kernel = NULL;
  if (p->moe->lookup(NULL, p->moe->requantize_bytes, &kernel) != 0) return -1;
  Values v = {.count = BS_REQUANTIZE_BYTES_PARAMS};
  set_pointer(&v, BS_REQUANTIZE_BYTES_Y, p->at[BS_MOE_WS_Y1]);
  set_tensor(&v, BS_REQUANTIZE_BYTES_SCALE, p->args, p->moe->at.a2_scale);
  set_pointer(&v, BS_REQUANTIZE_BYTES_ROW_SCALE, p->at[BS_MOE_WS_ROW_SCALE2]);
  set_pointer(&v, BS_REQUANTIZE_BYTES_COUNT, p->at[BS_MOE_WS_COUNT1]);
  set_pointer(&v, BS_REQUANTIZE_BYTES_CODES, p->at[BS_MOE_WS_Y1_CODES]);
  set_integer(&v, BS_REQUANTIZE_BYTES_PITCH, p->moe->padded_intermediate);
  int64_t resident = 4 * (int64_t)p->call->device->multiprocessors;
  return launch(p->call, kernel, &v, least(p->slots, resident), BS_TEAM);
}

static int combine(const Pass *p) {
  int placed = p->moe->codes != NULL;
  TVMFFIObjectHandle kernel = NULL;
  if (p->moe->lookup(NULL, p->moe->combine, &kernel) != 0) return -1;
  Values v = {.count = BS_COMBINE_PARAMS};
  set_pointer(&v, BS_COMBINE_Y, p->at[placed ? (int)BS_MOE_CODES_WS_Y2 : (int)BS_MOE_WS_Y2]);
  set_pointer(&v, BS_COMBINE_PLACE, placed ? p->at[BS_MOE_CODES_WS_PLACE] : NULL);
  set_pointer(&v, BS_COMBINE_IDS, p->ids);
  set_pointer(&v, BS_COMBINE_WEIGHTS, p->weights);
  set_pointer(&v, BS_COMBINE_OUT, p->out);
  set_integer(&v, BS_COMBINE_WIDE, 0); /* ids of 32 bits */
  set_integer(&v, BS_COMBINE_EXPERTS, p->moe->experts);
  set_integer(&v, BS_COMBINE_TOP_K, p->moe->top_k);
  set_integer(&v, BS_COMBINE_ROWS, p->tokens);
  set_integer(&v, BS_COMBINE_COLS, p->moe->hidden);
  return launch(p->call, kernel, &v, ceil_div(p->tokens * (p->moe->hidden / 8), BS_TEAM), BS_TEAM);
}

/* ---- Codes by codes --------------------------------------------------------------------------- */

static int sort(const Pass *p) {
  const BsMoe *moe = p->moe;
  TVMFFIObjectHandle kernel = NULL;
  int many = p->slots > BS_SORT_SLOTS;
  if (moe->lookup(NULL, many ? moe->prepare_many : moe->prepare, &kernel) != 0) return -1;
  Values v = {.count = BS_SORT_PARAMS};
  set_pointer(&v, BS_SORT_IDS, p->ids);
  set_pointer(&v, BS_SORT_ORDER, p->at[BS_MOE_CODES_WS_ORDER]);
  set_pointer(&v, BS_SORT_OFFSETS, p->at[BS_MOE_CODES_WS_OFFSETS]);
  set_pointer(&v, BS_SORT_ATOMS, p->at[BS_MOE_CODES_WS_ATOMS]);
  set_integer(&v, BS_SORT_EXPERTS, moe->experts);
  set_integer(&v, BS_SORT_COUNT, p->slots);
  return launch_shared(p->call, kernel, &v, many ? BS_SORT_CLUSTER : 1, BS_SORT_THREADS, sort_bytes(moe, many));
}

/* Rows of the tiles of scales: an expert's last tile may not be full. */
static int64_t rows_of_scales(const Pass *p) {
  int64_t used = least(p->slots, p->moe->experts);
  return (p->slots + used * (BS_SCALE_ROWS - 1)) / BS_SCALE_ROWS * BS_SCALE_ROWS;
}

static int gather(const Pass *p) {
  const BsMoe *moe = p->moe;
  TVMFFIObjectHandle kernel = NULL;
  if (moe->lookup(NULL, moe->codes->gather, &kernel) != 0) return -1;
  Values v = {.count = BS_GATHER_PARAMS};
  set_pointer(&v, BS_GATHER_HIDDEN, p->hidden);
  set_tensor(&v, BS_GATHER_SCALE, p->args, moe->at.a1_scale);
  set_pointer(&v, BS_GATHER_IDS, p->ids);
  set_pointer(&v, BS_GATHER_ORDER, p->at[BS_MOE_CODES_WS_ORDER]);
  set_pointer(&v, BS_GATHER_OFFSETS, p->at[BS_MOE_CODES_WS_OFFSETS]);
  set_pointer(&v, BS_GATHER_ATOMS, p->at[BS_MOE_CODES_WS_ATOMS]);
  set_pointer(&v, BS_GATHER_PLACE, p->at[BS_MOE_CODES_WS_PLACE]);
  set_pointer(&v, BS_GATHER_CODES, p->at[BS_MOE_CODES_WS_X]);
  set_pointer(&v, BS_GATHER_SCALES, p->at[BS_MOE_CODES_WS_X_SCALE]);
  set_integer(&v, BS_GATHER_EXPERTS, moe->experts);
  set_integer(&v, BS_GATHER_TOP_K, moe->top_k);
  set_integer(&v, BS_GATHER_COLS, moe->hidden);
  set_integer(&v, BS_GATHER_PITCH, moe->padded_hidden);
  set_pointer(&v, BS_GATHER_READY, p->at[BS_MOE_CODES_WS_READY]);
  set_integer(&v, BS_GATHER_GROUPS, rows_of_scales(p) / BS_SCALE_ROWS);
  int64_t ctas = ceil_div(p->slots * (moe->padded_hidden / 16), BS_TEAM), resident = 8 * (int64_t)p->call->device->multiprocessors;
  return launch(p->call, kernel, &v, least(ctas, resident), BS_TEAM);
}

/* Tensors of a GEMM: parameters of the function, and parts of the workspace. */
typedef struct {
  DLTensor tensors[BS_CODES_LAYER_PARAMS];
  TVMFFIAny args[BS_CODES_LAYER_PARAMS];
  int count;
} Operands;

static void add_part(Operands *o, int at, char *part) {
  DLTensor *own = &o->tensors[o->count++];
  own->data = part;
  o->args[at] = (TVMFFIAny){.type_index = kTVMFFIDLTensorPtr, .v_ptr = own};
}

/* A parameter, or NULL where the function has none. */
static void add_param(Operands *o, int at, const Pass *p, int param) {
  if (param < 0) add_part(o, at, NULL);
  else o->args[at] = p->args[param];
}

/* Those of GEMM 1, which come first in a launch of both. */
static void add_first(Operands *o, const Pass *p) {
  const BsMoePlaces *at = &p->moe->at;
  add_part(o, BS_CODES_GEMM1_A, p->at[BS_MOE_CODES_WS_X]);
  add_param(o, BS_CODES_GEMM1_B, p, at->w13);
  add_part(o, BS_CODES_GEMM1_A_SCALE, p->at[BS_MOE_CODES_WS_X_SCALE]);
  add_param(o, BS_CODES_GEMM1_B_SCALE, p, at->w13_scale);
  add_part(o, BS_CODES_GEMM1_OFFSETS, p->at[BS_MOE_CODES_WS_OFFSETS]);
  add_param(o, BS_CODES_GEMM1_W13_GLOBAL, p, at->w13_global);
  add_param(o, BS_CODES_GEMM1_A1_SCALE, p, at->a1_scale);
  add_param(o, BS_CODES_GEMM1_BIAS, p, at->w13_bias);
  add_param(o, BS_CODES_GEMM1_A2_SCALE, p, at->a2_scale);
  add_param(o, BS_CODES_GEMM1_ALPHA, p, at->alpha);
  add_param(o, BS_CODES_GEMM1_LIMIT, p, at->limit);
  add_part(o, BS_CODES_GEMM1_BLOCK_SCALE, p->at[BS_MOE_CODES_WS_Y1_SCALE]);
  add_part(o, BS_CODES_GEMM1_PACKED, p->at[BS_MOE_CODES_WS_Y1]);
}

static int first_product(const Pass *p, int64_t scale_rows) {
  Operands o = {.count = 0};
  add_first(&o, p);
  return blockscale_gemm_launch(p->call, &p->moe->codes->gemm1, o.args, p->slots, scale_rows);
}

static int second_product(const Pass *p, int64_t scale_rows) {
  const BsMoePlaces *at = &p->moe->at;
  Operands o = {.count = 0};
  add_part(&o, BS_CODES_GEMM2_A, p->at[BS_MOE_CODES_WS_Y1]);
  add_param(&o, BS_CODES_GEMM2_B, p, at->w2);
  add_part(&o, BS_CODES_GEMM2_A_SCALE, p->at[BS_MOE_CODES_WS_Y1_SCALE]);
  add_param(&o, BS_CODES_GEMM2_B_SCALE, p, at->w2_scale);
  add_part(&o, BS_CODES_GEMM2_OFFSETS, p->at[BS_MOE_CODES_WS_OFFSETS]);
  add_param(&o, BS_CODES_GEMM2_W2_GLOBAL, p, at->w2_global);
  add_param(&o, BS_CODES_GEMM2_A2_SCALE, p, at->a2_scale);
  add_param(&o, BS_CODES_GEMM2_BIAS, p, at->w2_bias);
  add_part(&o, BS_CODES_GEMM2_D, p->at[BS_MOE_CODES_WS_Y2]);
  return blockscale_gemm_launch(p->call, &p->moe->codes->gemm2, o.args, p->slots, scale_rows);
}

/* Both in one launch. */
static int products(const Pass *p, int64_t scale_rows) {
  const BsMoePlaces *at = &p->moe->at;
  Operands o = {.count = 0};
  add_first(&o, p);
  add_part(&o, BS_CODES_LAYER_SECOND_A, p->at[BS_MOE_CODES_WS_Y1]);
  add_param(&o, BS_CODES_LAYER_SECOND_B, p, at->w2);
  add_part(&o, BS_CODES_LAYER_SECOND_A_SCALE, p->at[BS_MOE_CODES_WS_Y1_SCALE]);
  add_param(&o, BS_CODES_LAYER_SECOND_B_SCALE, p, at->w2_scale);
  add_param(&o, BS_CODES_LAYER_SECOND_W2_GLOBAL, p, at->w2_global);
  add_param(&o, BS_CODES_LAYER_SECOND_A2_SCALE, p, at->a2_scale);
  add_param(&o, BS_CODES_LAYER_SECOND_BIAS, p, at->w2_bias);
  add_part(&o, BS_CODES_LAYER_SECOND_D, p->at[BS_MOE_CODES_WS_Y2]);
  add_part(&o, BS_CODES_LAYER_READY, p->at[BS_MOE_CODES_WS_READY]);
  return blockscale_gemm_launch(p->call, &p->moe->codes->both, o.args, p->slots, scale_rows);
}

static int run_codes(const Pass *p) {
  int64_t scale_rows = rows_of_scales(p);
  if (sort(p) != 0 || gather(p) != 0) return -1;
  const BsGemms *both = &p->moe->codes->both;
  if (both->count > 0 && blockscale_gemm_choose(both, p->slots)->name != NULL)
    return products(p, scale_rows) != 0 || combine(p) != 0 ? -1 : 0;
  return first_product(p, scale_rows) != 0 || second_product(p, scale_rows) != 0 || combine(p) != 0 ? -1 : 0;
}

static int run(const Pass *p) {
  if (p->moe->codes != NULL) return run_codes(p);
  if (prepare(p) != 0 || gemm(p, 0) != 0) return -1;
  if (p->bucket->by_bytes ? requantize_bytes(p) != 0 : p->moe->requantize != NULL && requantize(p) != 0) return -1;
  if (gemm(p, 1) != 0) return -1;
  return p->moe->combine == NULL ? 0 : combine(p); /* NULL: GEMM 2 has written the function's output */
}

/* ---- Functions --------------------------------------------------------------------------------- */

int blockscale_moe(const BsCall *call, const BsMoe *moe, TVMFFIAny *args) {
  if (blockscale_check_shapes(call, args, 0) != 0) return -1;
  const BsMoePlaces *at = &moe->at;
  int64_t rows = tensor(args, at->hidden)->shape[0], out_bytes = 2 * (int64_t)moe->hidden;
  double share = at->share < 0 ? 1.0 : args[at->share].v_float64; /* of slots that have an expert here */
  const char *out = tensor(args, at->to < 0 ? at->out : at->to)->data;
  if (moe->combine == NULL) out_bytes = moe->top_k * (at->to < 0 ? out_bytes : 8); /* addresses of rows */
  Pass p = {.call = call, .moe = moe, .args = args, .tokens = least(rows, BS_CHUNK)};
  const DLTensor *workspace = tensor(args, at->workspace);
  if (rows == 0) return 0;
  p.slots = p.tokens * moe->top_k;
  int64_t needed = place(&p, workspace->data);
  if (workspace->shape[0] < needed) {
    return blockscale_raise("ValueError",
                            "%s: workspace has %lld bytes, but %lld are needed for %lld rows; allocate what the spec's "
                            "workspace_bytes tells",
                            call->function->name, (long long)workspace->shape[0], (long long)needed, (long long)rows);
  }
  for (int64_t done = 0; done < rows; done += BS_CHUNK) {
    int chosen = 0;
    p.tokens = least(rows - done, BS_CHUNK);
    p.slots = p.tokens * moe->top_k;
    place(&p, workspace->data);
    p.hidden = (const char *)tensor(args, at->hidden)->data + done * moe->row_bytes;
    p.ids = (const char *)tensor(args, at->topk_ids)->data + done * moe->top_k * 4;
    if (at->topk_weights >= 0) p.weights = (const char *)tensor(args, at->topk_weights)->data + done * moe->top_k * 4;
    p.out = (char *)out + done * out_bytes;
    if (moe->combine == NULL) p.at[BS_MOE_WS_Y2] = p.out;
    while (chosen + 1 < moe->count && (double)p.tokens * share > (double)moe->buckets[chosen].limit) ++chosen;
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
  Values v = {.count = BS_ROUTE_PARAMS};
  set_tensor(&v, BS_ROUTE_LOGITS, args, routing->at.logits);
  set_tensor(&v, BS_ROUTE_BIAS, args, routing->at.correction_bias);
  v.values[BS_ROUTE_SCALE] = args[routing->at.scale];
  set_tensor(&v, BS_ROUTE_IDS, args, routing->at.topk_ids);
  set_tensor(&v, BS_ROUTE_WEIGHTS, args, routing->at.topk_weights);
  set_integer(&v, BS_ROUTE_ROWS, rows);
  return launch(call, kernel, &v, ceil_div(rows, BS_ROUTE_WARPS), 32 * BS_ROUTE_WARPS);
}
