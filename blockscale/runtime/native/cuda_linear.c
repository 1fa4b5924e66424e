/* The host side of linear layers that quantise their rows: checks shapes, divides the workspace, and launches,
 * in one stream,
 *
 *   quantize  rows of x to codes, in the order and width that the GEMM wants, and a scale of each
 *   GEMM      may begin before quantize has ended
 *
 * blockscale/lower/warp/rows.py writes the tables.
 */
#include "cuda_linear.h"
#include "cuda_values.h"

enum { PARAMS = 16 }; /* more than a function has */

static int quantize(const BsCall *call, const BsLinear *layer, const BsQuantize *before, const TVMFFIAny *args,
                    char *const *at, int64_t rows) {
  TVMFFIObjectHandle kernel = NULL;
  if (layer->gemms.lookup(NULL, before->name, &kernel) != 0) return -1;
  Values v = {.count = BS_LINEAR_QUANTIZE_PARAMS};
  set_tensor(&v, BS_LINEAR_QUANTIZE_X, args, layer->x);
  set_pointer(&v, BS_LINEAR_QUANTIZE_TO, at[BS_LINEAR_WS_X]);
  set_pointer(&v, BS_LINEAR_QUANTIZE_ROW_SCALE, at[BS_LINEAR_WS_ROW_SCALE]);
  set_integer(&v, BS_LINEAR_QUANTIZE_ROWS, rows);
  set_integer(&v, BS_LINEAR_QUANTIZE_COLS, layer->k);
  set_integer(&v, BS_LINEAR_QUANTIZE_PITCH, before->pitch);
  int64_t resident = 8 * (int64_t)call->device->multiprocessors;
  return launch(call, kernel, &v, least(ceil_div(rows, before->rows), resident), BS_TEAM);
}

int blockscale_linear(const BsCall *call, const BsLinear *layer, TVMFFIAny *args) {
  if (blockscale_check_shapes(call, args, 0) != 0) return -1;
  int64_t rows = tensor(args, layer->x)->shape[0];
  const DLTensor *workspace = tensor(args, layer->workspace);
  if (rows == 0) return 0;
  if (rows > INT32_MAX - BS_MAX_ROW_TILE) {
    return blockscale_raise("ValueError", "%s: %lld rows are more than a kernel counts; pass fewer at a time",
                            call->function->name, (long long)rows);
  }
  char *at[BS_LINEAR_WS_PARTS];
  int64_t needed = divide(layer->parts, BS_LINEAR_WS_PARTS, rows, rows, 0, workspace->data, at);
  if (needed > workspace->shape[0]) {
    return blockscale_raise("ValueError",
                            "%s: workspace has %lld bytes, but %lld are needed for %lld rows; allocate what the spec's "
                            "workspace_bytes tells",
                            call->function->name, (long long)workspace->shape[0], (long long)needed, (long long)rows);
  }
  DLTensor parts[BS_LINEAR_WS_PARTS] = {0};
  TVMFFIAny all[PARAMS];
  for (int i = 0; i < layer->params; ++i) all[i] = args[i];
  for (int i = 0; i < BS_LINEAR_WS_PARTS; ++i) {
    parts[i].data = at[i];
    all[layer->params + i] = (TVMFFIAny){.type_index = kTVMFFIDLTensorPtr, .v_ptr = &parts[i]};
  }
  int64_t chosen = blockscale_gemm_choose(&layer->gemms, rows) - layer->gemms.gemms;
  if (quantize(call, layer, &layer->quantize[chosen], args, at, rows) != 0) return -1;
  return blockscale_gemm_launch(call, &layer->gemms, all, rows, 0);
}
