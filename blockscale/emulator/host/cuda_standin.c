/* The CUDA driver's functions without a driver: blockscale/emulator/host/driver.py answers them.
 *
 * Every function hands its name and arguments, widened to 64 bits, to one callback. While there is
 * none (outside emulator.run_module, and at the end of the process) all of them say
 * CUDA_ERROR_NO_DEVICE. Linked with a soname under which libraries look for the driver.
 */
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

typedef int (*Callback)(const char *name, const uint64_t *args);

static _Atomic(Callback) callback;

EXPORT void blockscale_standin_answer(Callback function) { atomic_store(&callback, function); }

static int ask(const char *name, const uint64_t *args) {
  enum { CUDA_ERROR_NO_DEVICE = 100 };
  Callback function = atomic_load(&callback);
  return function != NULL ? function(name, args) : CUDA_ERROR_NO_DEVICE;
}

/* P: a pointer or handle, I: int or enum, U: unsigned, H: unsigned short, B: unsigned char, Z: 64 bits */
typedef uintptr_t P;
typedef int32_t I;
typedef uint32_t U;
typedef uint16_t H;
typedef uint8_t B;
typedef uint64_t Z;

#define ASK(name, ...) return ask(#name, (const uint64_t[]){__VA_ARGS__})
#define X(v) ((uint64_t)(v))
#define F0(n) EXPORT int n(void) { ASK(n, 0); }
#define F1(n, A) EXPORT int n(A a) { ASK(n, X(a)); }
#define F2(n, A, B_) EXPORT int n(A a, B_ b) { ASK(n, X(a), X(b)); }
#define F3(n, A, B_, C) EXPORT int n(A a, B_ b, C c) { ASK(n, X(a), X(b), X(c)); }
#define F4(n, A, B_, C, D) \
  EXPORT int n(A a, B_ b, C c, D d) { ASK(n, X(a), X(b), X(c), X(d)); }
#define F5(n, A, B_, C, D, E) \
  EXPORT int n(A a, B_ b, C c, D d, E e) { ASK(n, X(a), X(b), X(c), X(d), X(e)); }
#define F8(n, A, B_, C, D, E, F, G, H_) \
  EXPORT int n(A a, B_ b, C c, D d, E e, F f, G g, H_ h) { \
    ASK(n, X(a), X(b), X(c), X(d), X(e), X(f), X(g), X(h)); \
  }

F1(cuInit, U)
F1(cuDriverGetVersion, P)
F2(cuGetErrorName, I, P)
F2(cuGetErrorString, I, P)
F4(cuGetProcAddress, P, P, I, Z)
F5(cuGetProcAddress_v2, P, P, I, Z, P)
F2(cuGetExportTable, P, P)

F2(cuDeviceGet, P, I)
F1(cuDeviceGetCount, P)
F3(cuDeviceGetName, P, I, I)
F2(cuDeviceGetUuid, P, I)
F2(cuDeviceGetUuid_v2, P, I)
F2(cuDeviceTotalMem_v2, P, I)
F3(cuDeviceGetAttribute, P, I, I)
F2(cuDevicePrimaryCtxRetain, P, I)
F1(cuDevicePrimaryCtxRelease_v2, I)
F3(cuDevicePrimaryCtxGetState, I, P, P)

F1(cuCtxGetCurrent, P)
F1(cuCtxSetCurrent, P)
F1(cuCtxPushCurrent_v2, P)
F1(cuCtxPopCurrent_v2, P)
F1(cuCtxGetDevice, P)
F2(cuCtxGetId, P, P)
F0(cuCtxSynchronize)

F8(cuLibraryLoadData, P, P, P, P, U, P, P, U)
F1(cuLibraryUnload, P)
F3(cuLibraryGetKernel, P, P, P)
F2(cuLibraryGetModule, P, P)
F4(cuLibraryGetGlobal, P, P, P, P)
F2(cuKernelGetFunction, P, P)
F4(cuKernelGetAttribute, P, I, P, I)
F4(cuKernelSetAttribute, I, I, P, I)
F2(cuModuleLoadData, P, P)
F5(cuModuleLoadDataEx, P, P, U, P, P)
F2(cuModuleLoadFatBinary, P, P)
F1(cuModuleUnload, P)
F3(cuModuleGetFunction, P, P, P)
F4(cuModuleGetGlobal_v2, P, P, P, P)
F3(cuFuncGetAttribute, P, I, P)
F3(cuFuncSetAttribute, P, I, I)
F2(cuFuncSetCacheConfig, P, I)
F1(cuFuncLoad, P)

EXPORT int cuLaunchKernel(P f, U gx, U gy, U gz, U bx, U by, U bz, U shared, P stream, P params, P extra) {
  ASK(cuLaunchKernel, f, gx, gy, gz, bx, by, bz, shared, stream, params, extra);
}
EXPORT int cuLaunchCooperativeKernel(P f, U gx, U gy, U gz, U bx, U by, U bz, U shared, P stream, P params) {
  ASK(cuLaunchCooperativeKernel, f, gx, gy, gz, bx, by, bz, shared, stream, params);
}
F4(cuLaunchKernelEx, P, P, P, P)
F4(cuOccupancyMaxActiveBlocksPerMultiprocessor, P, P, I, Z)
F5(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, P, P, I, Z, U)
F3(cuOccupancyMaxActiveClusters, P, P, P)
F3(cuOccupancyMaxPotentialClusterSize, P, P, P)

EXPORT int cuTensorMapEncodeTiled(P map, I dtype, U rank, P address, P dim, P strides, P box, P steps,
                                  I interleave, I swizzle, I l2, I fill) {
  ASK(cuTensorMapEncodeTiled, map, X(dtype), rank, address, dim, strides, box, steps, X(interleave), X(swizzle),
      X(l2), X(fill));
}
F2(cuTensorMapReplaceAddress, P, P)

F2(cuMemAlloc_v2, P, Z)
F3(cuMemAllocAsync, P, Z, P)
F1(cuMemFree_v2, P)
F2(cuMemFreeAsync, P, P)
F3(cuMemsetD8_v2, P, B, Z)
F3(cuMemsetD16_v2, P, H, Z)
F3(cuMemsetD32_v2, P, U, Z)
F4(cuMemsetD8Async, P, B, Z, P)
F4(cuMemsetD16Async, P, H, Z, P)
F4(cuMemsetD32Async, P, U, Z, P)
F3(cuMemcpy, P, P, Z)
F4(cuMemcpyAsync, P, P, Z, P)
F3(cuMemcpyHtoD_v2, P, P, Z)
F3(cuMemcpyDtoH_v2, P, P, Z)
F3(cuMemcpyDtoD_v2, P, P, Z)
F4(cuMemcpyHtoDAsync_v2, P, P, Z, P)
F4(cuMemcpyDtoHAsync_v2, P, P, Z, P)
F4(cuMemcpyDtoDAsync_v2, P, P, Z, P)
F3(cuPointerGetAttribute, P, I, P)

F2(cuStreamCreate, P, U)
F1(cuStreamDestroy_v2, P)
F1(cuStreamSynchronize, P)
F1(cuStreamQuery, P)
F2(cuStreamIsCapturing, P, P)
F2(cuStreamGetCtx, P, P)
F2(cuStreamGetDevice, P, P)
F3(cuStreamWaitEvent, P, P, U)
F1(cuThreadExchangeStreamCaptureMode, P)
F2(cuEventCreate, P, U)
F1(cuEventDestroy_v2, P)
F2(cuEventRecord, P, P)
F1(cuEventQuery, P)
F1(cuEventSynchronize, P)
