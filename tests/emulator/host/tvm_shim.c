/* Serves the kernels that TVM's host code looks up among the imports of its module: packed functions
 * that launch through the driver. tvm_export.py writes kernels.inc. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <tvm/ffi/c_api.h>

typedef void *Handle;
typedef struct {
  const char *name;
  int params, launch, places[6];
  Handle function;
} Kernel;

static Kernel kernels[] = {
#include "kernels.inc"
};

__asm__(".section .rodata\n.balign 16\ncode: .incbin \"code.bin\"\n.previous\n");
extern const char code[] __attribute__((visibility("hidden")));

static int fail(const char *what, int result) {
  char message[128];
  snprintf(message, sizeof message, "%s: CUDA error %d", what, result);
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", message);
  return -1;
}

static int load(Kernel *kernel, Handle so) {
  static Handle library;
  int (*init)(unsigned) = dlsym(so, "cuInit");
  int (*retain)(Handle *, int) = dlsym(so, "cuDevicePrimaryCtxRetain");
  int (*push)(Handle) = dlsym(so, "cuCtxPushCurrent_v2");
  int (*load_data)(Handle *, const void *, void *, void *, unsigned, void *, void *, unsigned) =
      dlsym(so, "cuLibraryLoadData");
  int (*get)(Handle *, Handle, const char *) = dlsym(so, "cuLibraryGetKernel");
  int (*function)(Handle *, Handle) = dlsym(so, "cuKernelGetFunction");
  Handle context, found;
  int result = init(0);
  if (result == 0) result = retain(&context, 0);
  if (result == 0) result = push(context);
  if (result == 0 && library == NULL) result = load_data(&library, code, NULL, NULL, 0, NULL, NULL, 0);
  if (result == 0) result = get(&found, library, kernel->name);
  if (result == 0) result = function(&kernel->function, found);
  return result;
}

static int launch(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
  (void)count, (void)result;
  Kernel *kernel = self;
  Handle so = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (so == NULL) return fail("libcuda.so.1", -1);
  int (*go)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void **, void **) =
      dlsym(so, "cuLaunchKernel");
  int status = kernel->function == NULL ? load(kernel, so) : 0;
  if (status != 0) return fail(kernel->name, status);
  void *params[64];
  unsigned sizes[6] = {1, 1, 1, 1, 1, 1};
  for (int i = 0; i < kernel->params; ++i) params[i] = (void *)&args[i].v_int64; /* little endian */
  for (int i = 0; i < kernel->launch; ++i) sizes[kernel->places[i]] = (unsigned)args[kernel->params + i].v_int64;
  status = go(kernel->function, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], 0, NULL, params, NULL);
  return status != 0 ? fail(kernel->name, status) : 0;
}

static int nothing(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
  (void)self, (void)args, (void)count, (void)result;
  return 0;
}

int shim_lookup(TVMFFIObjectHandle context, const char *name, TVMFFIObjectHandle *out) {
  (void)context;
  if (strcmp(name, "__tvm_set_device") == 0) return TVMFFIFunctionCreate(NULL, nothing, NULL, out);
  for (size_t i = 0; i < sizeof kernels / sizeof *kernels; ++i) {
    if (strcmp(name, kernels[i].name) == 0) return TVMFFIFunctionCreate(&kernels[i], launch, NULL, out);
  }
  return fail(name, -1);
}
