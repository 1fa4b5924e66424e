/* The CUDA driver for one blockscale library: devices, code, constants, launches.
 *
 * The driver is opened at the first call, never linked: a CUDA library can be loaded and inspected
 * where there is none. Nothing here synchronises, and only a first use allocates; both the loading of
 * code and the allocation of constants are allowed within the capture of a CUDA graph.
 */
#define _GNU_SOURCE
#include "cuda_library.h"

#include <tvm/ffi/extra/c_env_api.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* How blockscale.base.manifest tells a truncated library of ours from a foreign one. */
BS_HIDDEN __attribute__((used)) const char blockscale_marker[] = "blockscale library, format 1";

/* ---- The driver's interface (cuda.h), as far as it is used ---------------------------------- */

typedef struct {
  int id;
  char pad[4];
  union {
    char bytes[64];
    uint32_t dim[3];
    int flag;
  } value;
} Attribute; /* CUlaunchAttribute */

typedef struct {
  uint32_t grid[3], block[3], shared;
  void *stream;
  Attribute *attributes;
  uint32_t count;
} Config; /* CUlaunchConfig */

enum { NOT_INITIALIZED = 3 };                                                /* CUresult */
enum { MULTIPROCESSORS = 16, MAJOR = 75, MINOR = 76 };                       /* CUdevice_attribute */
enum { MAX_DYNAMIC_SHARED = 8, NON_PORTABLE_CLUSTER = 14 };                  /* CUfunction_attribute */
enum { HOPPER = 9 }; /* the first compute capability with clusters and programmatic dependent launches */
enum { COOPERATIVE = 2, CLUSTER = 4, PROGRAMMATIC = 6, PREFERRED_CLUSTER = 11 }; /* CUlaunchAttributeID */
enum { NO_INTERLEAVE = 0, L2_128B = 2, ZEROS = 0 }; /* CUtensorMap's interleave, promotion, fill */
enum { PORTABLE_CLUSTER = 8, NON_BLOCKING = 1, RELAXED = 2 };

#define DRIVER(X) \
  X(cuInit, (unsigned)) \
  X(cuGetErrorName, (int, const char **)) \
  X(cuGetErrorString, (int, const char **)) \
  X(cuDeviceGet, (int *, int)) \
  X(cuDeviceGetName, (char *, int, int)) \
  X(cuDeviceGetAttribute, (int *, int, int)) \
  X(cuDevicePrimaryCtxRetain, (void **, int)) \
  X(cuCtxGetCurrent, (void **)) \
  X(cuCtxPushCurrent_v2, (void *)) \
  X(cuCtxPopCurrent_v2, (void **)) \
  X(cuLibraryLoadData, (void **, const void *, void *, void *, unsigned, void *, void *, unsigned)) \
  X(cuLibraryGetKernel, (void **, void *, const char *)) \
  X(cuKernelSetAttribute, (int, int, void *, int)) \
  X(cuLaunchKernelEx, (const Config *, void *, void **, void **)) \
  X(cuOccupancyMaxActiveClusters, (int *, void *, const Config *)) \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int *, void *, int, size_t)) \
  X(cuTensorMapEncodeTiled, (void *, int, uint32_t, void *, const uint64_t *, const uint64_t *, const uint32_t *, \
                             const uint32_t *, int, int, int, int)) \
  X(cuMemAlloc_v2, (uint64_t *, size_t)) \
  X(cuMemsetD32Async, (uint64_t, unsigned, size_t, void *)) \
  X(cuStreamCreate, (void **, unsigned)) \
  X(cuStreamSynchronize, (void *)) \
  X(cuStreamDestroy_v2, (void *)) \
  X(cuThreadExchangeStreamCaptureMode, (int *))

static struct {
#define FIELD(name, parameters) int(*name) parameters;
  DRIVER(FIELD)
#undef FIELD
} cu;

/* ---- Errors --------------------------------------------------------------------------------- */

static const char *error_name(int code) {
  const char *name = NULL;
  if (cu.cuGetErrorName == NULL || cu.cuGetErrorName(code, &name) != 0 || name == NULL) return "unknown error";
  return name;
}

static const char *error_text(int code) {
  if (code == NOT_INITIALIZED) {
    return "a process that was forked cannot use CUDA as its parent did; start it with multiprocessing's 'spawn'";
  }
  const char *text = NULL;
  if (cu.cuGetErrorString == NULL || cu.cuGetErrorString(code, &text) != 0 || text == NULL) return "no text";
  return text;
}

static int failed(const char *function, const char *what, int code) {
  return blockscale_raise("RuntimeError", "%s: %s failed: %s (%d: %s)", function, what, error_name(code), code,
                          error_text(code));
}

/* ---- Devices -------------------------------------------------------------------------------- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static BsDevice devices[BS_MAX_DEVICES];
static atomic_int ready[BS_MAX_DEVICES];
static int driver_open = 0;

static int open_driver(const char *function) {
  if (driver_open) return 0;
  void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (handle == NULL) {
    return blockscale_raise("RuntimeError",
                            "%s: needs the NVIDIA driver, but this machine has none (%s); install it, or build the "
                            "library for the CPU",
                            function, dlerror());
  }
#define FIND(name, parameters) \
  if ((cu.name = (int(*) parameters)dlsym(handle, #name)) == NULL) \
    return blockscale_raise("RuntimeError", \
                            "%s: the NVIDIA driver of this machine has no %s, so it is older than CUDA 12; " \
                            "upgrade it", function, #name);
  DRIVER(FIND)
#undef FIND
  int code = cu.cuInit(0);
  if (code != 0) return failed(function, "cuInit", code);
  driver_open = 1;
  return 0;
}

static int open_device(const char *function, int ordinal, BsDevice *device) {
  if (open_driver(function) != 0) return -1;
  int number, code;
  device->ordinal = ordinal;
  if ((code = cu.cuDeviceGet(&number, ordinal)) != 0) return failed(function, "cuDeviceGet", code);
  if ((code = cu.cuDeviceGetAttribute(&device->major, MAJOR, number)) != 0 ||
      (code = cu.cuDeviceGetAttribute(&device->minor, MINOR, number)) != 0 ||
      (code = cu.cuDeviceGetAttribute(&device->multiprocessors, MULTIPROCESSORS, number)) != 0) {
    return failed(function, "cuDeviceGetAttribute", code);
  }
  if (cu.cuDeviceGetName(device->name, sizeof device->name, number) != 0) strcpy(device->name, "GPU");
  code = cu.cuDevicePrimaryCtxRetain(&device->context, number);
  return code != 0 ? failed(function, "cuDevicePrimaryCtxRetain", code) : 0;
}

const BsDevice *blockscale_device(const char *function, int ordinal) {
  if (ordinal < 0 || ordinal >= BS_MAX_DEVICES) {
    blockscale_raise("ValueError", "%s: device number %d is not from 0 to %d; use one of these", function, ordinal,
                     BS_MAX_DEVICES - 1);
    return NULL;
  }
  BsDevice *device = &devices[ordinal];
  if (atomic_load_explicit(&ready[ordinal], memory_order_acquire)) return device;
  pthread_mutex_lock(&lock);
  int status = 0;
  if (!atomic_load(&ready[ordinal])) {
    status = open_device(function, ordinal, device);
    if (status == 0) atomic_store_explicit(&ready[ordinal], 1, memory_order_release);
  }
  pthread_mutex_unlock(&lock);
  return status == 0 ? device : NULL;
}

/* ---- What is set up at first use ------------------------------------------------------------ */

typedef struct Constant {
  struct Constant *next;
  uint64_t address, bytes;
  uint32_t fill;
} Constant;

static Constant *constants[BS_MAX_DEVICES];

/* The device's context is current. On a stream of its own, which no capture knows. */
static int allocate_constant(Constant *constant) {
  void *stream = NULL;
  int code = cu.cuMemAlloc_v2(&constant->address, constant->bytes);
  if (code == 0) code = cu.cuStreamCreate(&stream, NON_BLOCKING);
  if (code == 0) code = cu.cuMemsetD32Async(constant->address, constant->fill, constant->bytes / 4, stream);
  if (code == 0) code = cu.cuStreamSynchronize(stream);
  if (stream != NULL) cu.cuStreamDestroy_v2(stream);
  return code;
}

void *blockscale_constant(const BsCall *call, uint32_t fill, uint64_t bytes) {
  const BsDevice *device = call->device;
  pthread_mutex_lock(&lock);
  Constant *found = constants[device->ordinal];
  while (found != NULL && (found->fill != fill || found->bytes < bytes)) found = found->next;
  if (found == NULL && (found = calloc(1, sizeof *found)) != NULL) {
    found->fill = fill;
    found->bytes = (bytes + 255) / 256 * 256;
    int mode = RELAXED; /* a capture of this thread must not make the allocation an error */
    int code = cu.cuCtxPushCurrent_v2(device->context);
    if (code == 0) {
      void *popped;
      cu.cuThreadExchangeStreamCaptureMode(&mode);
      code = allocate_constant(found);
      cu.cuThreadExchangeStreamCaptureMode(&mode);
      cu.cuCtxPopCurrent_v2(&popped);
    }
    if (code == 0) { /* kept for good: a graph may hold its address */
      found->next = constants[device->ordinal];
      constants[device->ordinal] = found;
    } else {
      free(found);
      found = NULL;
      failed(call->function->name, "the allocation of a default argument", code);
    }
  }
  pthread_mutex_unlock(&lock);
  return found == NULL ? NULL : (void *)(uintptr_t)found->address;
}

/* The driver's handle of a kernel; its image is loaded when the first of its kernels is used. */
static void *load(const BsCall *call, BsKernel *kernel) {
  void *function = atomic_load_explicit(&kernel->function, memory_order_acquire);
  if (function != NULL) return function;
  pthread_mutex_lock(&lock);
  int mode = RELAXED, code = 0;
  const char *step = "cuLibraryLoadData";
  void *library = atomic_load(&kernel->image->library);
  cu.cuThreadExchangeStreamCaptureMode(&mode);
  if (library == NULL) {
    code = cu.cuLibraryLoadData(&library, kernel->image->data, NULL, NULL, 0, NULL, NULL, 0);
    if (code == 0) atomic_store(&kernel->image->library, library);
  }
  if (code == 0) {
    step = "cuLibraryGetKernel";
    code = cu.cuLibraryGetKernel(&function, library, kernel->name);
  }
  cu.cuThreadExchangeStreamCaptureMode(&mode);
  if (code == 0) atomic_store_explicit(&kernel->function, function, memory_order_release);
  pthread_mutex_unlock(&lock);
  if (code == 0) return function;
  blockscale_raise("RuntimeError", "%s: %s of kernel %s for device %d, %s, failed: %s (%d: %s)", call->function->name,
                   step, kernel->name, call->device->ordinal, call->device->name, error_name(code), code,
                   error_text(code));
  return NULL;
}

/* Beyond 48 KiB, static memory included, a kernel must be allowed what it uses; the limit never shrinks. */
static int allow_shared(const BsDevice *device, BsKernel *kernel, void *function, int32_t bytes) {
  atomic_int *allowed = &kernel->shared[device->ordinal];
  if (atomic_load_explicit(allowed, memory_order_acquire) >= bytes) return 0;
  pthread_mutex_lock(&lock);
  int code = 0;
  if (atomic_load(allowed) < bytes) {
    code = cu.cuKernelSetAttribute(MAX_DYNAMIC_SHARED, bytes, function, device->ordinal);
    if (code == 0) atomic_store_explicit(allowed, bytes, memory_order_release);
  }
  pthread_mutex_unlock(&lock);
  return code;
}

/* ---- Tensor maps ---------------------------------------------------------------------------- */

int blockscale_tensor_map(const BsCall *call, const BsTensor *t, BsTensorMap *map) {
  static const uint32_t steps[5] = {1, 1, 1, 1, 1};
  int code = cu.cuTensorMapEncodeTiled(map->bytes, t->dtype, (uint32_t)t->rank, t->address, t->dims, t->strides,
                                       t->box, steps, NO_INTERLEAVE, t->swizzle, L2_128B, ZEROS);
  return code == 0 ? 0 : failed(call->function->name, "the description of a tensor to the TMA unit", code);
}

/* ---- Launches ------------------------------------------------------------------------------- */

static char set_device; /* what TVM's __tvm_set_device is looked up as: blockscale_enter has done it */

int blockscale_enter(const BsCall *call, const BsEntry *entry, TVMFFIAny *args) {
  void *before = NULL;
  int code = cu.cuCtxGetCurrent(&before);
  int other = before != call->device->context;
  if (code == 0 && other) code = cu.cuCtxPushCurrent_v2(call->device->context);
  if (code != 0) return failed(call->function->name, "making the device's context current", code);
  TVMFFIAny result = {.type_index = kTVMFFINone};
  int status = entry->host((void *)call, args, call->function->param_count, &result);
  if (other) cu.cuCtxPopCurrent_v2(&before);
  return status;
}

int blockscale_lookup(const BsKernels *known, const char *name, TVMFFIObjectHandle *out) {
  if (strcmp(name, "__tvm_set_device") == 0) {
    *out = &set_device;
    return 0;
  }
  for (BsKernel *kernel = known->kernels; kernel < known->kernels + known->count; ++kernel) {
    if (strcmp(name, kernel->name) == 0) {
      *out = kernel;
      return 0;
    }
  }
  return blockscale_raise("RuntimeError", "blockscale: the host code asks for %s, which this library lacks", name);
}

static int launch_failed(const BsCall *call, const BsKernel *kernel, const Config *c, const char *what, int code) {
  return blockscale_raise("RuntimeError",
                          "%s: %s kernel %s on device %d, %s, failed: %s (%d: %s); grid (%u, %u, %u), block (%u, %u, "
                          "%u), %u bytes of dynamic shared memory",
                          call->function->name, what, kernel->name, call->device->ordinal,
                          call->device->name, error_name(code), code, error_text(code), c->grid[0], c->grid[1],
                          c->grid[2], c->block[0], c->block[1], c->block[2], c->shared);
}

/* A cluster stays within a GPC, so that the SMs left over in each run none. */
int blockscale_active_clusters(const BsCall *call, BsKernel *kernel, int32_t size, int32_t threads, int32_t shared) {
  atomic_int *known = &kernel->clusters[call->device->ordinal];
  int count = atomic_load_explicit(known, memory_order_acquire);
  if (count > 0) return count;
  void *function = load(call, kernel);
  if (function == NULL) return -1;
  Attribute cluster = {.id = CLUSTER, .value.dim = {(uint32_t)size, 1, 1}};
  Config config = {{(uint32_t)size, 1, 1}, {(uint32_t)threads, 1, 1}, (uint32_t)shared, NULL, &cluster, 1};
  int code = allow_shared(call->device, kernel, function, shared);
  if (code == 0 && size > 1) {
    code = cu.cuOccupancyMaxActiveClusters(&count, function, &config);
  } else if (code == 0) {
    code = cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(&count, function, threads, (size_t)shared);
    count *= call->device->multiprocessors;
  }
  if (code != 0) return failed(call->function->name, "asking how many clusters run at a time", code);
  if (count < 1) count = 1; /* the launch says what is wrong */
  atomic_store_explicit(known, count, memory_order_release);
  return count;
}

static uint32_t add_attributes(const BsCall *call, const BsKernel *kernel, const uint32_t *sizes,
                               Attribute *attributes) {
  uint32_t count = 0;
  if (kernel->options & BS_HAS_CLUSTER && call->device->major >= HOPPER) { /* of one CTA before it */
    attributes[count].id = CLUSTER;
    memcpy(attributes[count++].value.dim, sizes + BS_CLUSTER, 12);
  }
  if (kernel->options & BS_HAS_PREFERRED_CLUSTER) {
    attributes[count].id = PREFERRED_CLUSTER;
    memcpy(attributes[count++].value.dim, sizes + BS_PREFERRED_CLUSTER, 12);
  }
  if (kernel->options & BS_COOPERATIVE) {
    attributes[count].id = COOPERATIVE;
    attributes[count++].value.flag = 1;
  }
  int asked = kernel->options & BS_PROGRAMMATIC || call->flags & BS_FLAG_PROGRAMMATIC;
  if (asked && kernel->options & BS_WAITS && call->device->major >= HOPPER) {
    attributes[count].id = PROGRAMMATIC;
    attributes[count++].value.flag = 1;
  }
  return count;
}

/* ---- Launches that are kept ----------------------------------------------------------------- */

enum { VALUE_BYTES = 64, ATTRIBUTES = 4 }; /* of a kernel's parameter; a tensor map takes two */

typedef struct Launch {
  struct Launch *next;
  const BsKernel *kernel;
  void *function, **values;
  Config config; /* whose stream is that of the replay */
  Attribute attributes[ATTRIBUTES];
} Launch;

struct BsRecord {
  BsCall call;
  Launch *first, **end;
};

BsRecord *blockscale_record(const BsCall *call) {
  BsRecord *record = malloc(sizeof *record);
  if (record == NULL) {
    blockscale_raise("MemoryError", "%s: no memory to keep its launches", call->function->name);
    return NULL;
  }
  *record = (BsRecord){.call = *call};
  record->end = &record->first;
  return record;
}

void blockscale_release(BsRecord *record) {
  for (Launch *launch = record->first, *next; launch != NULL; launch = next) {
    next = launch->next;
    free(launch);
  }
  free(record);
}

/* Copies a launch with the values of its parameters, tensor maps included. */
static int keep(const BsCall *call, const BsKernel *kernel, void *function, const Config *config, void **values) {
  size_t head = (sizeof(Launch) + kernel->params * sizeof *values + VALUE_BYTES - 1) / VALUE_BYTES * VALUE_BYTES;
  Launch *launch = aligned_alloc(VALUE_BYTES, head + kernel->params * sizeof(BsTensorMap));
  if (launch == NULL) {
    return blockscale_raise("MemoryError", "%s: no memory to keep its launches", call->function->name);
  }
  *launch = (Launch){.kernel = kernel, .function = function, .values = (void **)(launch + 1), .config = *config};
  memcpy(launch->attributes, config->attributes, config->count * sizeof(Attribute));
  launch->config.attributes = launch->attributes;
  for (int i = 0; i < kernel->params; ++i) {
    launch->values[i] = (char *)launch + head + (size_t)i * sizeof(BsTensorMap);
    size_t bytes = kernel->kinds[i] == BS_BY_ADDRESS ? sizeof(BsTensorMap)
                   : kernel->kinds[i] == BS_FLOAT32  ? sizeof(float)
                                                     : sizeof(int64_t);
    memcpy(launch->values[i], values[i], bytes);
  }
  *call->record->end = launch;
  call->record->end = &launch->next;
  return 0;
}

static BsRecord *record_of(const TVMFFIAny *args, int32_t count, int32_t most) {
  int ints = count >= 1 && count <= most;
  for (int i = 0; ints && i < count; ++i) ints = args[i].type_index == kTVMFFIInt;
  if (ints && args[0].v_int64 != 0) return (BsRecord *)(intptr_t)args[0].v_int64;
  blockscale_raise("TypeError", "blockscale: launches are kept under a handle; pass what a recorded call returned");
  return NULL;
}

int blockscale_replay(const TVMFFIAny *args, int32_t count) {
  const BsRecord *record = record_of(args, count, 2);
  if (record == NULL) return -1;
  const BsCall *call = &record->call;
  void *stream = count > 1 ? (void *)(intptr_t)args[1].v_int64 : TVMFFIEnvGetStream(kDLCUDA, call->device->ordinal);
  void *before = NULL;
  int code = cu.cuCtxGetCurrent(&before);
  int other = before != call->device->context;
  if (code == 0 && other) code = cu.cuCtxPushCurrent_v2(call->device->context);
  if (code != 0) return failed(call->function->name, "making the device's context current", code);
  for (const Launch *launch = record->first; launch != NULL; launch = launch->next) {
    Config config = launch->config;
    config.stream = stream;
    code = cu.cuLaunchKernelEx(&config, launch->function, launch->values, NULL);
    if (code != 0) {
      launch_failed(call, launch->kernel, &config, "launching", code);
      break;
    }
  }
  if (other) cu.cuCtxPopCurrent_v2(&before);
  return code == 0 ? 0 : -1;
}

int blockscale_forget(const TVMFFIAny *args, int32_t count) {
  BsRecord *record = record_of(args, count, 1);
  if (record == NULL) return -1;
  blockscale_release(record);
  return 0;
}

int blockscale_launch(const BsCall *call, TVMFFIObjectHandle what, TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
  (void)result;
  if (what == &set_device) return 0;
  BsKernel *kernel = what;
  if (count != kernel->params + kernel->count) {
    return blockscale_raise("RuntimeError",
                            "%s: kernel %s got %d arguments instead of %d + %d; build the library again",
                            call->function->name, kernel->name, count, kernel->params, kernel->count);
  }
  uint32_t sizes[BS_PLACES] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0};
  for (int i = 0; i < kernel->count; ++i) {
    int64_t size = args[kernel->params + i].v_int64;
    if (size == 0 && kernel->places[i] < BS_BLOCK) return 0; /* the driver refuses an empty grid */
    if (size < 0 || size > INT32_MAX) {
      return blockscale_raise("RuntimeError", "%s: kernel %s would need a launch size of %lld; pass smaller tensors",
                              call->function->name, kernel->name, (long long)size);
    }
    sizes[kernel->places[i]] = (uint32_t)size;
  }
  void *values[256];
  float narrowed[256];
  for (int i = 0; i < kernel->params; ++i) {
    values[i] = &args[i].v_int64; /* the low bytes come first: any integer type finds its own */
    if (kernel->kinds[i] == BS_FLOAT32) {
      narrowed[i] = (float)args[i].v_float64;
      values[i] = &narrowed[i];
    } else if (kernel->kinds[i] == BS_BY_ADDRESS) {
      values[i] = args[i].v_ptr;
    }
  }
  Attribute attributes[ATTRIBUTES];
  Config config = {{sizes[0], sizes[1], sizes[2]}, {sizes[3], sizes[4], sizes[5]}, sizes[BS_SHARED],
                   call->stream, attributes, add_attributes(call, kernel, sizes, attributes)};
  void *function = load(call, kernel);
  if (function == NULL) return -1;
  int code = allow_shared(call->device, kernel, function, (int32_t)config.shared);
  uint64_t cluster = (uint64_t)sizes[BS_CLUSTER] * sizes[BS_CLUSTER + 1] * sizes[BS_CLUSTER + 2];
  if (code == 0 && cluster > PORTABLE_CLUSTER) {
    code = cu.cuKernelSetAttribute(NON_PORTABLE_CLUSTER, 1, function, call->device->ordinal);
  }
  if (code != 0) return launch_failed(call, kernel, &config, "allowing what is needed for", code);
  if (call->record != NULL) return keep(call, kernel, function, &config, values);
  code = cu.cuLaunchKernelEx(&config, function, values, NULL);
  return code == 0 ? 0 : launch_failed(call, kernel, &config, "launching", code);
}
