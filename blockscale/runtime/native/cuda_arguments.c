/* The arguments of a call of a CUDA function: counted, checked, and made what TVM's host code takes.
 *
 * TVM's host code checks sizes, and that they agree; here is what it cannot know: defaults, bytes that
 * have another dtype, leading dimensions to be flattened, alignment, and memory that overlaps.
 */
#include <stdio.h>
#include <string.h>

#include "cuda_library.h"

#include <tvm/ffi/extra/c_env_api.h>

typedef struct {
  DLTensor tensors[BS_MAX_PARAMS];
  int64_t shapes[BS_MAX_PARAMS][BS_MAX_RANK];
  uint64_t bytes[BS_MAX_PARAMS];
  TVMFFIAny args[BS_MAX_PARAMS];
  int32_t missing; /* tensors that the caller left out */
  int32_t first;   /* the first tensor that is there, or -1 */
} Bound;

static const char *type_name(const TVMFFIAny *arg) {
  switch (arg->type_index) {
    case kTVMFFINone: return "None";
    case kTVMFFIInt: return "an int";
    case kTVMFFIBool: return "a bool";
    case kTVMFFIFloat: return "a float";
    case kTVMFFIDLTensorPtr:
    case kTVMFFITensor: return "a tensor";
    case kTVMFFIRawStr:
    case kTVMFFIStr:
    case kTVMFFISmallStr: return "a string";
    default: return "an object of another type";
  }
}

static void dtype_name(uint32_t number, char *out, size_t size) {
  static const char *const names[] = {[kDLInt] = "int", [kDLUInt] = "uint", [kDLFloat] = "float",
                                      [kDLBfloat] = "bfloat", [kDLBool] = "bool"};
  uint32_t code = number & 0xFF, bits = number >> 8 & 0xFF, lanes = number >> 16;
  const char *name = code < sizeof names / sizeof *names ? names[code] : NULL;
  if (code == kDLFloat8_e4m3fn) {
    snprintf(out, size, "float8_e4m3fn");
  } else if (code == kDLFloat8_e8m0fnu) {
    snprintf(out, size, "float8_e8m0fnu");
  } else if (code == kDLFloat4_e2m1fn) {
    snprintf(out, size, "float4_e2m1fn%s", lanes == 2 ? "_x2" : "");
  } else if (name != NULL && lanes == 1) {
    snprintf(out, size, "%s%u", name, bits);
  } else {
    snprintf(out, size, "DLPack dtype (%u, %u, %u)", code, bits, lanes);
  }
}

static int bind_scalar(const BsFunction *f, const BsParam *p, const TVMFFIAny *given, TVMFFIAny *out) {
  int whole = (p->dtype & 0xFF) != kDLFloat;
  double value = p->scalar;
  *out = (TVMFFIAny){.type_index = whole ? kTVMFFIInt : kTVMFFIFloat};
  if (given->type_index == kTVMFFIFloat && !whole) {
    value = given->v_float64;
  } else if (given->type_index == kTVMFFIInt || given->type_index == kTVMFFIBool) {
    if (whole) { /* not through a double, which has 53 bits */
      uint32_t bits = p->dtype >> 8 & 0xFF;
      if (bits == 32 && (given->v_int64 < INT32_MIN || given->v_int64 > INT32_MAX)) {
        return blockscale_raise("ValueError", "%s: %s is %lld, which is no int32; pass a smaller number", f->name,
                                p->name, (long long)given->v_int64);
      }
      out->v_int64 = given->v_int64;
      return 0;
    }
    value = (double)given->v_int64;
  } else if (given->type_index != kTVMFFINone || !(p->flags & BS_OPTIONAL)) {
    return blockscale_raise("TypeError", "%s: %s is %s; pass %s", f->name, p->name, type_name(given),
                            whole ? "an int" : "a float");
  }
  if (value != value || (p->flags & BS_NOT_NEGATIVE && value < 0)) {
    return blockscale_raise("ValueError", "%s: %s is %g; pass %s", f->name, p->name, value,
                            p->flags & BS_NOT_NEGATIVE ? "0 or more" : "a number");
  }
  if (whole) {
    out->v_int64 = (int64_t)value;
  } else {
    out->v_float64 = value;
  }
  return 0;
}

/* One row after the other; the stride of a dimension of one element is never used. */
static int is_contiguous(const DLTensor *t, uint64_t count) {
  if (t->strides == NULL || count == 0) return 1;
  int64_t expected = 1;
  for (int i = t->ndim - 1; i >= 0; --i) {
    if (t->shape[i] != 1 && t->strides[i] != expected) return 0;
    expected *= t->shape[i];
  }
  return 1;
}

static int check_dtype(const BsFunction *f, const BsParam *p, DLTensor *tensor) {
  uint32_t got = tensor->dtype.code | (uint32_t)tensor->dtype.bits << 8 | (uint32_t)tensor->dtype.lanes << 16;
  if (got != p->dtype) {
    int known = 0;
    for (int i = 0; i < 3; ++i) known |= p->other[i] != 0 && got == p->other[i];
    if (!known) {
      char name[48];
      dtype_name(got, name, sizeof name);
      return blockscale_raise("TypeError", "%s: %s has dtype %s, expected %s; pass a tensor of this dtype", f->name,
                              p->name, name, p->type);
    }
    tensor->dtype = (DLDataType){(uint8_t)p->dtype, (uint8_t)(p->dtype >> 8), (uint16_t)(p->dtype >> 16)};
  }
  return 0;
}

/* Copies the shape to `shape`, where leading dimensions beyond the parameter's become one. */
static int check_rank(const BsFunction *f, const BsParam *p, DLTensor *tensor, int64_t *shape) {
  int surplus = tensor->ndim - p->rank;
  if (surplus == -1 && p->flags & BS_FLAT && tensor->shape[0] % p->dims[1] == 0) {
    shape[0] = tensor->shape[0] / p->dims[1]; /* tiles of scales, whose rows are no rows of memory */
    shape[1] = p->dims[1];
    tensor->ndim = 2;
    tensor->shape = shape;
    tensor->strides = NULL;
    return 0;
  }
  if (surplus < 0 || (surplus > 0 && !(p->flags & BS_FLATTENS))) {
    return blockscale_raise("ValueError", "%s: %s has %d dimensions, but %s has %d; reshape it", f->name, p->name,
                            tensor->ndim, p->type, p->rank);
  }
  memcpy(shape, tensor->shape + surplus, p->rank * sizeof *shape);
  for (int i = 0; i < surplus; ++i) shape[0] *= tensor->shape[i];
  tensor->ndim = p->rank;
  tensor->shape = shape;
  tensor->strides = NULL;
  return 0;
}

/* TVM's host code rounds cols / 16 down: kernels would read and write past the end of rows. */
static int check_multiples(const BsFunction *f, const BsParam *p, const int64_t *shape) {
  for (int d = 0; d < p->rank; ++d) {
    if (p->multiples[d] > 1 && shape[d] % p->multiples[d] != 0) {
      return blockscale_raise("ValueError",
                              "%s: %s has size %lld in dimension %d of %s, which is not a multiple of %d; pad it",
                              f->name, p->name, (long long)shape[d], d, p->type, p->multiples[d]);
    }
  }
  return 0;
}

static int bind_tensor(const BsFunction *f, int i, const DLTensor *given, Bound *b) {
  const BsParam *p = &f->params[i];
  DLTensor *tensor = &b->tensors[i];
  *tensor = *given;
  uint64_t count = 1;
  for (int d = 0; d < given->ndim; ++d) count *= (uint64_t)given->shape[d];
  if (given->device.device_type != kDLCUDA) {
    return blockscale_raise("ValueError", "%s: %s is not on a CUDA device, where this function runs; pass %s.cuda()",
                            f->name, p->name, p->name);
  }
  if (check_dtype(f, p, tensor) != 0) return -1;
  if (!is_contiguous(given, count)) {
    return blockscale_raise("ValueError",
                            "%s: %s is not contiguous, but the kernel expects one row after the other; %s", f->name,
                            p->name, p->flags & BS_OUTPUT ? "pass a contiguous output" : "pass a contiguous copy");
  }
  if (check_rank(f, p, tensor, b->shapes[i]) != 0 || check_multiples(f, p, b->shapes[i]) != 0) return -1;
  const DLTensor *first = &b->tensors[b->first < 0 ? i : b->first];
  if (first->device.device_id != tensor->device.device_id) {
    return blockscale_raise("ValueError", "%s: %s is on device %d, but %s is on device %d; pass all on one device",
                            f->name, p->name, tensor->device.device_id, f->params[b->first].name,
                            first->device.device_id);
  }
  if (b->first < 0) b->first = i;
  tensor->data = (char *)tensor->data + tensor->byte_offset;
  tensor->byte_offset = 0;
  b->bytes[i] = count * (p->dtype >> 8 & 0xFF) / 8;
  uintptr_t address = (uintptr_t)tensor->data;
  if (count != 0 && (address == 0 || (address & (p->align - 1u)) != 0)) {
    return blockscale_raise("ValueError",
                            "%s: %s lies at address 0x%llx, which is not a multiple of %u bytes, as the kernel relies "
                            "on; pass a copy of %s",
                            f->name, p->name, (unsigned long long)address, p->align, p->name);
  }
  b->args[i] = (TVMFFIAny){.type_index = kTVMFFIDLTensorPtr, .v_ptr = tensor};
  return 0;
}

static int bind_all(const BsFunction *f, const TVMFFIAny *args, Bound *b) {
  b->first = -1;
  b->missing = 0;
  for (int i = 0; i < f->param_count; ++i) {
    const BsParam *p = &f->params[i];
    int status = 0;
    b->bytes[i] = 0;
    if (p->flags & BS_SCALAR) {
      status = bind_scalar(f, p, &args[i], &b->args[i]);
    } else if (args[i].type_index == kTVMFFIDLTensorPtr) {
      status = bind_tensor(f, i, args[i].v_ptr, b);
    } else if (args[i].type_index == kTVMFFITensor) {
      status = bind_tensor(f, i, (const DLTensor *)((const char *)args[i].v_obj + sizeof(TVMFFIObject)), b);
    } else if (args[i].type_index == kTVMFFINone && p->alias >= 0) { /* that input: bound before */
      b->tensors[i] = b->tensors[p->alias];
      b->bytes[i] = b->bytes[p->alias];
      b->args[i] = b->args[p->alias];
    } else if (args[i].type_index == kTVMFFINone && p->flags & BS_OPTIONAL) {
      b->args[i].type_index = kTVMFFINone;
      b->missing += 1;
    } else {
      status = blockscale_raise("TypeError", "%s: %s is %s; pass a CUDA tensor of %s", f->name, p->name,
                                type_name(&args[i]), p->type);
    }
    if (status != 0) return -1;
  }
  if (b->first < 0) return blockscale_raise("TypeError", "%s: got no tensor; pass at least one", f->name);
  return 0;
}

/* An output may overlap no argument but the one that it may be, and that one as a whole. */
static int check_overlap(const BsFunction *f, const Bound *b) {
  for (int i = 0; i < f->param_count; ++i) {
    if (!(f->params[i].flags & BS_OUTPUT) || b->bytes[i] == 0) continue;
    const char *start = b->tensors[i].data, *end = start + b->bytes[i];
    for (int j = 0; j < f->param_count; ++j) {
      if (j == i || b->bytes[j] == 0) continue;
      const char *other = b->tensors[j].data;
      if (start >= other + b->bytes[j] || other >= end) continue;
      if (f->params[i].alias == j && other == start && b->bytes[i] == b->bytes[j]) continue;
      return blockscale_raise("ValueError",
                              "%s: %s overlaps %s in memory, but the kernel may write an output before it has read "
                              "every input; pass memory of its own for %s",
                              f->name, f->params[i].name, f->params[j].name, f->params[i].name);
    }
  }
  return 0;
}

/* A kernel that reduces over nothing would leave its output unwritten. */
static int check_not_empty(const BsFunction *f, const Bound *b) {
  int writes = 0;
  const BsParam *empty = NULL;
  for (int i = 0; i < f->param_count; ++i) {
    const BsParam *p = &f->params[i];
    if (p->flags & BS_SCALAR || b->args[i].type_index == kTVMFFINone) continue;
    if (p->flags & BS_OUTPUT) {
      writes |= b->bytes[i] != 0 && strcmp(p->name, "workspace") != 0; /* a larger call's may do */
    } else if (b->bytes[i] == 0) {
      empty = p;
    }
  }
  if (!writes || empty == NULL) return 0;
  return blockscale_raise("ValueError",
                          "%s: %s has no elements, but the output has; pass at least one element in every dimension",
                          f->name, empty->name);
}

/* The size of a symbol, from a tensor that is there; -1 if none tells. */
static int64_t solve(const BsFunction *f, const Bound *b, int64_t symbol) {
  for (int i = 0; i < f->param_count; ++i) {
    if (f->params[i].flags & BS_SCALAR || b->args[i].type_index == kTVMFFINone) continue;
    for (int d = 0; d < f->params[i].rank; ++d) {
      if (f->params[i].dims[d] == symbol) return b->shapes[i][d];
    }
  }
  return -1;
}

static int fill_default(const BsCall *call, int i, Bound *b) {
  const BsFunction *f = call->function;
  const BsParam *p = &f->params[i];
  DLTensor *tensor = &b->tensors[i];
  uint64_t bytes = (p->dtype >> 8 & 0xFF) / 8;
  for (int d = 0; d < p->rank; ++d) {
    int64_t size = p->dims[d] >= 0 ? p->dims[d] : solve(f, b, p->dims[d]);
    if (size < 0) {
      return blockscale_raise("TypeError", "%s: %s is missing, and its shape does not follow from the others; pass %s",
                              f->name, p->name, p->type);
    }
    b->shapes[i][d] = size;
    bytes *= (uint64_t)size;
  }
  *tensor = (DLTensor){.device = {kDLCUDA, call->device->ordinal}, .ndim = p->rank, .shape = b->shapes[i]};
  tensor->dtype = (DLDataType){(uint8_t)p->dtype, (uint8_t)(p->dtype >> 8), (uint16_t)(p->dtype >> 16)};
  if (bytes != 0 && (tensor->data = blockscale_constant(call, p->fill, bytes)) == NULL) return -1;
  b->args[i] = (TVMFFIAny){.type_index = kTVMFFIDLTensorPtr, .v_ptr = tensor};
  return 0;
}

static int fill_missing(const BsCall *call, Bound *b) {
  const BsFunction *f = call->function;
  for (int i = 0; i < f->param_count; ++i) {
    if (b->args[i].type_index != kTVMFFINone) continue;
    if (fill_default(call, i, b) != 0) return -1;
  }
  return 0;
}

int blockscale_call(const BsFunction *f, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
  if (count != f->param_count && count != f->param_count + 1) {
    return blockscale_raise("TypeError", "%s: got %d arguments for %d parameters, and launch flags after these",
                            f->name, count, f->param_count);
  }
  BsCall call = {.function = f};
  if (count > f->param_count) {
    const TVMFFIAny *flags = &args[f->param_count];
    if (flags->type_index != kTVMFFIInt && flags->type_index != kTVMFFIBool && flags->type_index != kTVMFFINone) {
      return blockscale_raise("TypeError", "%s: the launch flags are %s; pass an int", f->name, type_name(flags));
    }
    call.flags = flags->type_index == kTVMFFINone ? 0 : flags->v_int64;
  }
  Bound bound;
  if (bind_all(f, args, &bound) != 0 || check_overlap(f, &bound) != 0 || check_not_empty(f, &bound) != 0) return -1;
  int ordinal = bound.tensors[bound.first].device.device_id;
  if ((call.device = blockscale_device(f->name, ordinal)) == NULL) return -1;
  const BsEntry *entry = blockscale_choose(f, call.device);
  if (entry == NULL) return -1;
  call.stream = TVMFFIEnvGetStream(kDLCUDA, ordinal);
  if (bound.missing != 0 && fill_missing(&call, &bound) != 0) return -1;
  if (!(call.flags & BS_FLAG_RECORD)) return blockscale_enter(&call, entry, bound.args); /* result stays None */
  if ((call.record = blockscale_record(&call)) == NULL) return -1;
  if (blockscale_enter(&call, entry, bound.args) != 0) {
    blockscale_release(call.record);
    return -1;
  }
  *result = (TVMFFIAny){.type_index = kTVMFFIInt, .v_int64 = (int64_t)(intptr_t)call.record};
  return 0;
}
