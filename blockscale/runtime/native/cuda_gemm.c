/* The host side of GEMMs: checks shapes, chooses a kernel by the rows, describes tensors, launches.
 *
 * blockscale/lower/pipe/host.py and lower/warp/host.py write the tables.
 */
#include "cuda_gemm.h"
#include "cuda_values.h"

static int wrong_size(const BsCall *call, int i, int d, int64_t got, int64_t wanted) {
  const BsParam *p = &call->function->params[i];
  return blockscale_raise("ValueError", "%s: %s has size %lld in dimension %d, but %lld is expected of %s; pass that",
                          call->function->name, p->name, (long long)got, d, (long long)wanted, p->type);
}

/* Sizes are constants, symbols (which agree where they meet), or those of the scales of all rows. */
int blockscale_check_shapes(const BsCall *call, const TVMFFIAny *args, int64_t rows) {
  const BsFunction *f = call->function;
  int64_t symbols[4] = {-1, -1, -1, -1};
  for (int i = 0; i < f->param_count; ++i) {
    const DLTensor *t = tensor(args, i);
    for (int d = 0; d < f->params[i].rank; ++d) {
      int64_t wanted = f->params[i].dims[d], got = t->shape[d];
      if (wanted == BS_EXPRESSION) {
        wanted = up(rows, BS_SCALE_ROWS);
      } else if (wanted < 0) {
        int64_t *symbol = &symbols[-1 - wanted];
        if (*symbol < 0) *symbol = got;
        wanted = *symbol;
      }
      if (got != wanted) return wrong_size(call, i, d, got, wanted);
    }
  }
  return 0;
}

static uint64_t size_of(int64_t size, int64_t rows, int64_t scale_rows) {
  if (size == BS_OF_ROWS) return (uint64_t)rows;
  return (uint64_t)(size == BS_OF_SCALES ? scale_rows / BS_SCALE_ROWS : size);
}

static int describe(const BsCall *call, const BsGemm *gemm, const TVMFFIAny *args, int64_t rows, int64_t scale_rows,
                    BsTensorMap *maps) {
  for (int i = 0; i < gemm->map_count; ++i) {
    const BsGemmMap *m = &gemm->maps[i];
    BsTensor what = {.address = tensor(args, m->param)->data, .dtype = m->dtype, .rank = m->rank,
                     .swizzle = m->swizzle};
    for (int d = 0; d < m->rank; ++d) {
      what.dims[d] = size_of(m->dims[d], rows, scale_rows);
      what.box[d] = (uint32_t)m->box[d];
      if (d > 0) what.strides[d - 1] = (uint64_t)m->strides[d - 1];
    }
    if (blockscale_tensor_map(call, &what, &maps[i]) != 0) return -1;
  }
  return 0;
}

/* CTAs: as many clusters as the device holds, each of which takes tile after tile; -1 with an error raised.
 * A cluster more would begin when another has done all its tiles.  `shared` grows so that CTAs that share SMs
 * are spread over all of them, also those of a kernel that begins before another has ended. */
static int64_t grid(const BsCall *call, const BsGemm *gemm, BsKernel *kernel, int64_t rows, int64_t *shared) {
  int64_t tiles = ((rows + gemm->cluster_rows - 1) / gemm->cluster_rows + gemm->ragged) * gemm->cluster_cols;
  int64_t sms = call->device->multiprocessors, resident = sms / gemm->cluster;
  if (gemm->persistent && (gemm->sm_shared || (tiles > 1 && gemm->cluster > 1))) {
    int clusters = blockscale_active_clusters(call, kernel, gemm->cluster, gemm->threads, gemm->shared);
    if (clusters < 0) return -1;
    if (gemm->sm_shared) {
      int64_t each = least(ceil_div(tiles * gemm->cluster, sms), clusters * (int64_t)gemm->cluster / sms);
      *shared = spread(gemm->sm_shared, gemm->shared, each);
      resident = clusters;
    } else if (clusters < resident) {
      resident = clusters;
    }
  }
  if (!gemm->persistent && gemm->sm_shared) {
    int64_t alone = spread(gemm->sm_shared, gemm->shared, 1);
    int clusters = blockscale_active_clusters(call, kernel, gemm->cluster, gemm->threads, (int32_t)alone);
    if (clusters < 0) return -1;
    if (tiles <= clusters) *shared = alone;
  }
  if (gemm->persistent && tiles > resident && resident > 0) tiles = resident;
  return tiles * gemm->cluster;
}

const BsGemm *blockscale_gemm_choose(const BsGemms *known, int64_t rows) {
  int chosen = 0;
  while (chosen + 1 < known->count && rows > known->gemms[chosen].limit) ++chosen;
  return &known->gemms[chosen];
}

int blockscale_gemm(const BsCall *call, const BsGemms *known, TVMFFIAny *args) {
  int64_t rows = tensor(args, known->a)->shape[0];
  int64_t scale_rows = known->a_scale < 0 ? 0 : tensor(args, known->a_scale)->shape[0];
  if (blockscale_check_shapes(call, args, rows) != 0) return -1;
  if (rows > INT32_MAX - BS_MAX_ROW_TILE) {
    return blockscale_raise("ValueError", "%s: %lld rows are more than a kernel counts; pass fewer at a time",
                            call->function->name, (long long)rows);
  }
  if (scale_rows % BS_SCALE_ROWS != 0) {
    return blockscale_raise("ValueError",
                            "%s: a_scale has %lld rows, no multiple of 128, the rows of a tile of scales; pad it",
                            call->function->name, (long long)scale_rows);
  }
  return rows == 0 ? 0 : blockscale_gemm_launch(call, known, args, rows, scale_rows);
}

int blockscale_gemm_launch(const BsCall *call, const BsGemms *known, const TVMFFIAny *args, int64_t rows,
                           int64_t scale_rows) {
  const BsGemm *gemm = blockscale_gemm_choose(known, rows);
  TVMFFIObjectHandle kernel = NULL;
  if (known->lookup(NULL, gemm->name, &kernel) != 0) return -1;
  int64_t shared = gemm->shared, ctas = grid(call, gemm, kernel, rows, &shared);
  if (ctas < 0) return -1;
  BsTensorMap maps[BS_GEMM_MAPS] = {0};
  if (describe(call, gemm, args, rows, scale_rows, maps) != 0) return -1;
  Values v = {.count = 0};
  for (; v.count < gemm->map_count; ++v.count) set_pointer(&v, v.count, &maps[v.count]);
  for (int i = 0; i < gemm->pointer_count; ++i) set_tensor(&v, v.count++, args, gemm->pointers[i]);
  for (int i = 0; i < gemm->number_count; ++i) v.values[v.count++] = args[gemm->numbers[i]];
  set_integer(&v, v.count++, rows);
  set_integer(&v, v.count++, ctas);
  set_integer(&v, v.count++, gemm->threads);
  set_integer(&v, v.count++, gemm->cluster);
  set_integer(&v, v.count++, shared);
  TVMFFIAny result = {.type_index = kTVMFFINone};
  return blockscale_launch(call, kernel, v.values, v.count, &result);
}
