/* Arguments of kernels, and sizes of launches, of host functions that C code of ours has (cuda_moe.c, cuda_int4.c). */
#ifndef BLOCKSCALE_CUDA_VALUES_H
#define BLOCKSCALE_CUDA_VALUES_H

#include "cuda_library.h"

static inline int64_t up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

static inline int64_t ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static inline const DLTensor *tensor(const TVMFFIAny *args, int i) { return args[i].v_ptr; }

typedef struct {
  TVMFFIAny values[32];
  int32_t count;
} Values;

static inline void add_pointer(Values *v, const void *value) {
  v->values[v->count++] = (TVMFFIAny){.type_index = kTVMFFIOpaquePtr, .v_ptr = (void *)value};
}

static inline void add_integer(Values *v, int64_t value) {
  v->values[v->count++] = (TVMFFIAny){.type_index = kTVMFFIInt, .v_int64 = value};
}

static inline void add_tensor(Values *v, const TVMFFIAny *args, int param) {
  add_pointer(v, param < 0 ? NULL : tensor(args, param)->data);
}

/* Adds the sizes of a launch and does it. */
static inline int launch(const BsCall *call, TVMFFIObjectHandle kernel, Values *v, int64_t grid, int64_t threads) {
  TVMFFIAny result = {.type_index = kTVMFFINone};
  add_integer(v, grid);
  add_integer(v, threads);
  return blockscale_launch(call, kernel, v->values, v->count, &result);
}

static inline int launch_shared(const BsCall *call, TVMFFIObjectHandle kernel, Values *v, int64_t grid,
                                int64_t threads, int64_t shared) {
  TVMFFIAny result = {.type_index = kTVMFFINone};
  add_integer(v, grid);
  add_integer(v, threads);
  add_integer(v, shared);
  return blockscale_launch(call, kernel, v->values, v->count, &result);
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
