/* Compiles if what native/cuda_runtime.c says of the driver's interface is what cuda.h says. */
#include <cuda.h>

#include "cuda_runtime.c"

#include <stddef.h>

#define SAME(a, b) _Static_assert((int)(a) == (int)(b), #a)
#define SAME_PLACE(type, field, theirs, their_field) \
  SAME(offsetof(type, field), offsetof(theirs, their_field)); \
  SAME(sizeof((type *)0)->field, sizeof((theirs *)0)->their_field)

SAME(sizeof(Attribute), sizeof(CUlaunchAttribute));
SAME_PLACE(Attribute, id, CUlaunchAttribute, id);
SAME_PLACE(Attribute, value, CUlaunchAttribute, value);
SAME(offsetof(CUlaunchAttributeValue, clusterDim.x), 0);
SAME(offsetof(CUlaunchAttributeValue, cooperative), 0);
SAME(sizeof(Config), sizeof(CUlaunchConfig));
SAME(offsetof(Config, grid), offsetof(CUlaunchConfig, gridDimX));
SAME(offsetof(Config, block), offsetof(CUlaunchConfig, blockDimX));
SAME_PLACE(Config, shared, CUlaunchConfig, sharedMemBytes);
SAME_PLACE(Config, stream, CUlaunchConfig, hStream);
SAME_PLACE(Config, attributes, CUlaunchConfig, attrs);
SAME_PLACE(Config, count, CUlaunchConfig, numAttrs);

SAME(NOT_INITIALIZED, CUDA_ERROR_NOT_INITIALIZED);
SAME(MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME(MAX_DYNAMIC_SHARED, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
SAME(NON_PORTABLE_CLUSTER, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED);
SAME(COOPERATIVE, CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
SAME(CLUSTER, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
SAME(PROGRAMMATIC, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
SAME(PREFERRED_CLUSTER, CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION);
SAME(NON_BLOCKING, CU_STREAM_NON_BLOCKING);
SAME(RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED);

/* Every function is declared there. */
static void *const functions[] __attribute__((used)) = {
#define ADDRESS(name, parameters) (void *)name,
    DRIVER(ADDRESS)
#undef ADDRESS
};
