/* Arguments of kernels, and sizes of launches, of host functions that C code of ours has (cuda_gemm.c, cuda_moe.c, cuda_int4.c). */
#ifndef BLOCKSCALE_CUDA_VALUES_H
#define BLOCKSCALE_CUDA_VALUES_H

#include "cuda_moe.h"

static inline int64_t up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

static inline int64_t ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static inline const DLTensor *tensor(const TVMFFIAny *args, int i) { return args[i].v_ptr; }

typedef struct {
  TVMFFIAny values[48];
  int32_t count;
} Values;

static inline void set_pointer(Values *v, int at, const void *value) {
  v->values[at] = (TVMFFIAny){.type_index = kTVMFFIOpaquePtr, .v_ptr = (void *)value};
}

static inline void set_integer(Values *v, int at, int64_t value) {
  v->values[at] = (TVMFFIAny){.type_index = kTVMFFIInt, .v_int64 = value};
}

static inline void set_tensor(Values *v, int at, const TVMFFIAny *args, int param) {
  set_pointer(v, at, param < 0 ? NULL : tensor(args, param)->data);
}

/* Adds the sizes of a launch and does it. */
static inline int launch(const BsCall *call, TVMFFIObjectHandle kernel, Values *v, int64_t grid, int64_t threads) {
  TVMFFIAny result = {.type_index = kTVMFFINone};
  set_integer(v, v->count++, grid);
  set_integer(v, v->count++, threads);
  return blockscale_launch(call, kernel, v->values, v->count, &result);
}

static inline int launch_shared(const BsCall *call, TVMFFIObjectHandle kernel, Values *v, int64_t grid,
                                int64_t threads, int64_t shared) {
  TVMFFIAny result = {.type_index = kTVMFFINone};
  set_integer(v, v->count++, grid);
  set_integer(v, v->count++, threads);
  set_integer(v, v->count++, shared);
  return blockscale_launch(call, kernel, v->values, v->count, &result);
}

/* The most tiles of so many rows: an expert's last one may not be full. */
static inline int64_t most_tiles(int64_t slots, int64_t experts) {
  return least(slots, experts + slots / BS_MIN_TOKENS);
}

/* Says where the parts of a workspace are, and returns the bytes of all. */
static inline int64_t divide(const BsPart *parts, int count, int64_t tokens, int64_t slots, int64_t tiles,
                             char *workspace, char **at) {
  int64_t used = 0;
  for (int i = 0; i < count; ++i) {
    const BsPart *part = &parts[i];
    at[i] = workspace + used;
    used += up(part->token * tokens + part->slot * slots + part->tile * tiles + part->fixed, BS_PART);
  }
  return used;
}

/* Shared memory of a CTA of which an SM is to hold `each`: a kernel that begins while its predecessor's CTAs
 * end would else fill the first free SMs with as many as they hold, and others would have none. */
static inline int64_t spread(int64_t sm_shared, int64_t shared, int64_t each) {
  enum { FOR_SYSTEM = 1024, STEP = 128 }; /* of each CTA; of allocations */
  if (each < 1) return shared;
  int64_t too_much = sm_shared / (each + 1) - FOR_SYSTEM + STEP; /* for each + 1 of them */
  int64_t most = sm_shared / each - FOR_SYSTEM;
  return shared >= too_much || too_much > most ? shared : up(too_much, STEP);
}

#endif
