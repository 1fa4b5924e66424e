/* The tables that blockscale/building/export_cuda.py writes for a CUDA library, and what reads them.
 *
 * A call goes: exported stub -> blockscale_call (cuda_arguments.c: checks and normalises arguments) ->
 * TVM's host code for the device's architecture (checks shapes, computes launch sizes) ->
 * blockscale_launch (cuda_runtime.c). In TVM's host code, TVMFFIEnvModLookupFromImports is renamed and
 * TVMFFIFunctionCall replaced, so that its look-ups and calls end here. The host code's first argument
 * is the call: a variable of the thread would take static TLS, of which there is enough for 200 libraries.
 */
#ifndef BLOCKSCALE_CUDA_LIBRARY_H
#define BLOCKSCALE_CUDA_LIBRARY_H

#include <stdatomic.h>
#include <stdint.h>

#include <dlpack/dlpack.h>
#include <tvm/ffi/c_api.h>

#define BS_HIDDEN __attribute__((visibility("hidden")))

enum { BS_MAX_PARAMS = 32, BS_MAX_RANK = 8, BS_MAX_DEVICES = 64 };

/* ---- Tables --------------------------------------------------------------------------------- */

/* What machine code or PTX was made for: sm_103f is {10, 3, 'f', 0}. */
typedef struct {
  uint8_t major, minor;
  char suffix; /* 'a': this architecture alone, 'f': its family from here up, 0: neither */
  uint8_t is_ptx;
} BsArch;

/* Machine code (an ELF file) or PTX (text with a 0 at its end); loaded at first use. */
typedef struct {
  const void *data;
  _Atomic(void *) library; /* CUlibrary */
} BsImage;

/* Kinds of kernel parameters: as TVM passes them, narrowed, or what the argument points to. */
enum { BS_DIRECT, BS_FLOAT32, BS_BY_ADDRESS };

/* Where a launch argument goes. */
enum { BS_GRID = 0, BS_BLOCK = 3, BS_CLUSTER = 6, BS_PREFERRED_CLUSTER = 9, BS_SHARED = 12, BS_PLACES };

enum { BS_HAS_CLUSTER = 1, BS_HAS_PREFERRED_CLUSTER = 2, BS_PROGRAMMATIC = 4, BS_COOPERATIVE = 8,
       BS_WAITS = 16 /* for the kernel before it: code for sm_90 and later alone can */ };

typedef struct {
  const char *name;
  BsImage *image;
  const uint8_t *kinds;  /* [params] */
  const uint8_t *places; /* [places]: of the launch arguments, which follow the parameters */
  uint8_t params, count, options;
  _Atomic(void *) function;            /* CUkernel */
  _Atomic int32_t shared[BS_MAX_DEVICES];   /* dynamic shared memory that it may use */
  _Atomic int32_t clusters[BS_MAX_DEVICES]; /* that the device runs at a time; 0: not asked yet */
} BsKernel;

/* The kernels that one host function knows. */
typedef struct {
  BsKernel *kernels;
  int32_t count;
} BsKernels;

typedef struct {
  const char *arch; /* as the manifest spells it */
  BsArch made_for;
  int32_t (*host)(void *self, void *args, int32_t count, void *result);
} BsEntry;

enum {
  BS_OUTPUT = 1,
  BS_OPTIONAL = 2,
  BS_SCALAR = 4,
  BS_FLATTENS = 8,
  BS_FLAT = 16, /* a flat tensor will do */
  BS_NOT_NEGATIVE = 32
};

/* One parameter. `dtype` and `other` are DLDataTypes as numbers: code | bits << 8 | lanes << 16. */
typedef struct {
  const char *name;
  const char *type;     /* for messages: "float32[rows, 64]" */
  const int64_t *dims;  /* [rank]: a size, or -1 - k for symbol k, or BS_EXPRESSION */
  const int32_t *multiples; /* [rank]: what the size must be a multiple of */
  double scalar;        /* default of a scalar */
  uint32_t dtype;
  uint32_t other[3];    /* dtypes whose bytes are taken for `dtype`; 0: no more */
  uint32_t fill;        /* default of a tensor: four bytes of it */
  uint16_t align;       /* of the address, a power of two */
  uint8_t rank, flags;
  int8_t alias;         /* the input that this output may be, or -1 */
} BsParam;

#define BS_EXPRESSION INT64_MIN

typedef struct {
  const char *name;
  const BsParam *params;
  const BsEntry *entries;
  int32_t param_count, entry_count;
} BsFunction;

/* The optional last argument of every function. A recorded call launches nothing, and returns the handle of its
 * launches (an int) for blockscale_replay and blockscale_forget. */
enum { BS_FLAG_PROGRAMMATIC = 1, BS_FLAG_RECORD = 2 };

/* ---- Functions ------------------------------------------------------------------------------ */

/* A device that this process uses. */
typedef struct {
  void *context; /* the primary one */
  int32_t ordinal, major, minor, multiprocessors;
  char name[96];
} BsDevice;

typedef struct BsRecord BsRecord; /* launches of one call, kept */

/* What launches need to know of the call that they belong to. */
typedef struct {
  const BsFunction *function;
  const BsDevice *device;
  void *stream;
  int64_t flags;
  BsRecord *record; /* what keeps launches; NULL: they are done */
} BsCall;

/* How well code fits a device: the larger the better, negative: not at all. */
BS_HIDDEN int blockscale_fit(BsArch code, int major, int minor);

/* The best entry for a device; NULL, with an error raised, if none fits. */
BS_HIDDEN const BsEntry *blockscale_choose(const BsFunction *function, const BsDevice *device);

/* A device by number, ready for use; NULL, with an error raised, if there is no driver or device. */
BS_HIDDEN const BsDevice *blockscale_device(const char *function, int ordinal);

/* Device memory of at least `bytes` that repeats `fill`, for good; NULL with an error raised. */
BS_HIDDEN void *blockscale_constant(const BsCall *call, uint32_t fill, uint64_t bytes);

/* Runs an entry with the device's context current, and the caller's one after that. */
BS_HIDDEN int blockscale_enter(const BsCall *call, const BsEntry *entry, TVMFFIAny *args);

/* The body of every exported stub. */
BS_HIDDEN int blockscale_call(const BsFunction *function, const TVMFFIAny *args, int32_t count,
                              TVMFFIAny *result);

/* What keeps the launches of a call; NULL, with an error raised, if there is no memory. */
BS_HIDDEN BsRecord *blockscale_record(const BsCall *call);

/* Frees it. */
BS_HIDDEN void blockscale_release(BsRecord *record);

/* The body of the exported blockscale_replay(handle, stream): does the launches of a recorded call, whose tensors must
 * still be there, on a stream (an int); without one, on the environment's for the device. */
BS_HIDDEN int blockscale_replay(const TVMFFIAny *args, int32_t count);

/* The body of the exported blockscale_forget(handle): frees the launches of a recorded call. */
BS_HIDDEN int blockscale_forget(const TVMFFIAny *args, int32_t count);

/* What TVM's host code calls in place of TVMFFIFunctionCall: launches, on the stream of the call. */
BS_HIDDEN int blockscale_launch(const BsCall *call, TVMFFIObjectHandle what, TVMFFIAny *args, int32_t count,
                                TVMFFIAny *result);

/* The body of every renamed TVMFFIEnvModLookupFromImports. */
BS_HIDDEN int blockscale_lookup(const BsKernels *known, const char *name, TVMFFIObjectHandle *out);

/* What cuTensorMapEncodeTiled is told of a tensor: dtype, swizzle as the driver numbers them. */
typedef struct {
  void *address;
  int32_t dtype, rank, swizzle;
  uint64_t dims[5], strides[4]; /* elements, bytes; innermost first, whose stride is not there */
  uint32_t box[5];
} BsTensor;

typedef struct {
  _Alignas(64) char bytes[128];
} BsTensorMap; /* CUtensorMap */

/* Encodes a tensor map; returns 0, or -1 with an error raised. */
BS_HIDDEN int blockscale_tensor_map(const BsCall *call, const BsTensor *tensor, BsTensorMap *map);

/* Clusters of `size` CTAs that the device runs at a time; -1 with an error raised. */
BS_HIDDEN int blockscale_active_clusters(const BsCall *call, BsKernel *kernel, int32_t size, int32_t threads,
                                         int32_t shared);

/* Raises an error with a printf-like sentence; returns -1. */
BS_HIDDEN __attribute__((format(printf, 2, 3))) int blockscale_raise(const char *kind, const char *format, ...);

#endif
