/* A GPU library as an exporter would make it, small: a fat binary, and host functions that find the
 * driver with dlopen, load the code once, and launch. test_run_module.py compiles it. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <dlpack/dlpack.h>
#include <tvm/ffi/c_api.h>

#define EXPORT __attribute__((visibility("default")))
#define FUNCTION(name) \
  EXPORT int __tvm_ffi_##name(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result)

typedef void *Handle;
typedef struct {
  int id, pad;
  union {
    char bytes[64];
    uint32_t dim[3];
    int flag;
  } value;
} Attribute;
typedef struct {
  uint32_t grid[3], block[3], shared;
  Handle stream;
  Attribute *attributes;
  uint32_t count;
} Config;

__asm__(".section .rodata\n.balign 16\ncode: .incbin \"code.bin\"\n.byte 0\n.previous\n");
extern const char code[] __attribute__((visibility("hidden")));

static struct {
  int (*init)(unsigned);
  int (*device_get)(int *, int);
  int (*attribute)(int *, int, int);
  int (*retain)(Handle *, int);
  int (*get_current)(Handle *);
  int (*set_current)(Handle);
  int (*load)(Handle *, const void *, void *, void *, unsigned, void *, void *, unsigned);
  int (*get_kernel)(Handle *, Handle, const char *);
  int (*get_function)(Handle *, Handle);
  int (*set_attribute)(Handle, int, int);
  int (*launch)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void **, void **);
  int (*launch_ex)(const Config *, Handle, void **, void **);
  int (*encode)(void *, int, uint32_t, void *, const uint64_t *, const uint64_t *, const uint32_t *,
                const uint32_t *, int, int, int, int);
  int (*alloc)(uint64_t *, size_t, Handle);
  int (*release)(uint64_t, Handle);
  int (*set8)(uint64_t, unsigned char, size_t, Handle);
  int (*set32)(uint64_t, unsigned, size_t, Handle);
  int (*copy)(uint64_t, uint64_t, size_t, Handle);
  int (*name)(int, const char **);
  int (*text)(int, const char **);
} cu;
static Handle library;
static int loads;

static int fail(const char *kind, const char *message) {
  TVMFFIErrorSetRaisedFromCStr(kind, message);
  return -1;
}

static int failed(const char *what, int code) {
  const char *name = "?", *text = "?";
  char message[256];
  cu.name(code, &name);
  cu.text(code, &text);
  snprintf(message, sizeof message, "%s: %s (%s)", what, name, text);
  return fail("RuntimeError", message);
}

#define TRY(call) \
  do { \
    int code_ = (call); \
    if (code_ != 0) return failed(#call, code_); \
  } while (0)

static int start(void) {
  Handle context = NULL;
  int device;
  if (library == NULL) {
    void *so = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (so == NULL) return fail("RuntimeError", dlerror());
    int (*find)(const char *, void **, int, uint64_t, void *) = dlsym(so, "cuGetProcAddress_v2");
    struct {
      const char *name;
      void *to;
    } wanted[] = {
        {"cuInit", &cu.init}, {"cuDeviceGet", &cu.device_get}, {"cuDeviceGetAttribute", &cu.attribute},
        {"cuDevicePrimaryCtxRetain", &cu.retain}, {"cuCtxGetCurrent", &cu.get_current},
        {"cuCtxSetCurrent", &cu.set_current}, {"cuLibraryLoadData", &cu.load},
        {"cuLibraryGetKernel", &cu.get_kernel}, {"cuKernelGetFunction", &cu.get_function},
        {"cuFuncSetAttribute", &cu.set_attribute}, {"cuLaunchKernel", &cu.launch},
        {"cuLaunchKernelEx", &cu.launch_ex}, {"cuTensorMapEncodeTiled", &cu.encode},
        {"cuMemAllocAsync", &cu.alloc}, {"cuMemFreeAsync", &cu.release}, {"cuMemsetD8Async", &cu.set8},
        {"cuMemsetD32Async", &cu.set32}, {"cuMemcpyAsync", &cu.copy}, {"cuGetErrorName", &cu.name},
        {"cuGetErrorString", &cu.text},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; ++i) {
      if (find(wanted[i].name, wanted[i].to, 12080, 0, NULL) != 0) return fail("RuntimeError", wanted[i].name);
    }
    TRY(cu.init(0));
  }
  TRY(cu.get_current(&context));
  if (context == NULL) {
    TRY(cu.device_get(&device, 0));
    TRY(cu.retain(&context, device));
    TRY(cu.set_current(context));
  }
  if (library == NULL) {
    TRY(cu.load(&library, code, NULL, NULL, 0, NULL, NULL, 0));
    ++loads;
  }
  return 0;
}

static int kernel(const char *name, Handle *function) {
  Handle found;
  TRY(cu.get_kernel(&found, library, name));
  TRY(cu.get_function(function, found));
  return 0;
}

/* The DLTensor of an argument, or NULL. */
static DLTensor *tensor(const TVMFFIAny *arg) {
  if (arg->type_index == kTVMFFIDLTensorPtr) return arg->v_ptr;
  if (arg->type_index == kTVMFFITensor) return (DLTensor *)((char *)arg->v_obj + sizeof(TVMFFIObject));
  return NULL;
}

static DLTensor *floats_on_gpu(const TVMFFIAny *arg) {
  DLTensor *t = tensor(arg);
  if (t == NULL) return fail("TypeError", "expected a tensor"), NULL;
  if (t->device.device_type != kDLCUDA) return fail("ValueError", "expected a tensor on device cuda"), NULL;
  if (t->dtype.code != kDLFloat || t->dtype.bits != 32) return fail("TypeError", "expected float32"), NULL;
  return t;
}

static void *data(DLTensor *t) { return (char *)t->data + t->byte_offset; }

static int64_t numel(const DLTensor *t) {
  int64_t n = 1;
  for (int i = 0; i < t->ndim; ++i) n *= t->shape[i];
  return n;
}

static int add(void *x, void *y, void *out, int64_t n, float scale, unsigned block) {
  Handle function;
  uint32_t length = (uint32_t)n;
  uint8_t tag = 3;
  double wide = 0.5;
  void *params[] = {&x, &y, &out, &length, &tag, &wide, &scale};
  if (kernel("scaled_add", &function) != 0) return -1;
  TRY(cu.launch(function, (length + block - 1) / block, 1, 1, block, 1, 1, 0, NULL, params, NULL));
  return 0;
}

/* scaled_add(x, y, out, scale, block): out = x + scale * y + 3.5 */
FUNCTION(scaled_add) {
  (void)self;
  DLTensor *x = floats_on_gpu(args), *y = floats_on_gpu(args + 1), *out = floats_on_gpu(args + 2);
  if (x == NULL || y == NULL || out == NULL) return -1;
  if (count != 5 || numel(x) != numel(y) || numel(x) != numel(out))
    return fail("ValueError", "scaled_add: x, y and out differ in size; pass tensors of one size");
  if (start() != 0) return -1;
  result->type_index = kTVMFFIInt;
  result->v_int64 = loads;
  return add(data(x), data(y), data(out), numel(x), (float)args[3].v_float64, (unsigned)args[4].v_int64);
}

/* tma_double(x, out, box_columns, ignore): out = 2 * x + rank; ignore: do not look at the error code */
FUNCTION(tma_double) {
  (void)self, (void)count, (void)result;
  DLTensor *x = floats_on_gpu(args), *out = floats_on_gpu(args + 1);
  if (x == NULL || out == NULL) return -1;
  if (start() != 0) return -1;
  _Alignas(64) char map[128];
  uint64_t dims[] = {(uint64_t)x->shape[1], (uint64_t)x->shape[0]}, strides[] = {dims[0] * 4};
  uint32_t box[] = {(uint32_t)args[2].v_int64, 8}, steps[] = {1, 1};
  int encoded = cu.encode(map, 7 /* FLOAT32 */, 2, data(x), dims, strides, box, steps, 0, 0, 0, 0);
  if (encoded != 0) return args[3].v_int64 ? 0 : failed("tma_double: the tensor map of x", encoded);
  void *address = data(out);
  uint32_t columns = (uint32_t)dims[0];
  Handle function;
  if (kernel("tma_double", &function) != 0) return -1;
  Attribute attributes[] = {{4 /* cluster dimension */, 0, {.dim = {2, 1, 1}}}, {6 /* PDL */, 0, {.flag = 1}}};
  Config config = {{columns / 32, (uint32_t)(dims[1] / 8), 1}, {64, 1, 1}, 0, NULL, attributes, 2};
  void *params[] = {map, &address, &columns};
  TRY(cu.launch_ex(&config, function, params, NULL));
  return 0;
}

/* reverse(x, shared): reverses x at the end of so many bytes of dynamic shared memory */
FUNCTION(reverse) {
  (void)self, (void)count, (void)result;
  DLTensor *x = floats_on_gpu(args);
  if (x == NULL || start() != 0) return -1;
  void *address = data(x);
  uint32_t n = (uint32_t)numel(x), shared = (uint32_t)args[1].v_int64, offset = shared - 4 * n;
  Handle function;
  if (kernel("reverse", &function) != 0) return -1;
  if (args[2].v_int64) TRY(cu.set_attribute(function, 8, (int)shared));
  struct {
    void *x;
    uint32_t n, offset;
  } block = {address, n, offset};
  size_t size = sizeof block;
  void *extra[] = {(void *)1, &block, (void *)2, &size, NULL};
  TRY(cu.launch(function, 1, 1, 1, n, 1, 1, shared, NULL, NULL, extra));
  return 0;
}

/* chain(x, out): out = x + 2 * (x + 1 * ones + 3.5) + 3.5, through a workspace of the driver */
FUNCTION(chain) {
  (void)self, (void)count, (void)result;
  DLTensor *x = floats_on_gpu(args), *out = floats_on_gpu(args + 1);
  if (x == NULL || out == NULL || start() != 0) return -1;
  size_t bytes = 4 * (size_t)numel(x);
  uint64_t ones, sum;
  float one = 1.0f;
  uint32_t bits;
  memcpy(&bits, &one, 4);
  TRY(cu.alloc(&ones, bytes, NULL));
  TRY(cu.alloc(&sum, bytes, NULL));
  TRY(cu.set32(ones, bits, numel(x), NULL));
  TRY(cu.set8((uint64_t)(uintptr_t)data(out), 0xEE, bytes, NULL));
  if (add(data(x), (void *)ones, (void *)sum, numel(x), 1.0f, 64) != 0) return -1;
  TRY(cu.copy(ones, sum, bytes, NULL));
  TRY(cu.release(sum, NULL));
  if (add(data(x), (void *)ones, data(out), numel(x), 2.0f, 128) != 0) return -1;
  TRY(cu.release(ones, NULL));
  return 0;
}

/* attribute(number) -> its value for device 0 */
FUNCTION(attribute) {
  (void)self, (void)count;
  int value = 0;
  if (start() != 0) return -1;
  TRY(cu.attribute(&value, (int)args[0].v_int64, 0));
  result->type_index = kTVMFFIInt;
  result->v_int64 = value;
  return 0;
}
