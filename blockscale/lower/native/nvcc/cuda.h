// What kernels need of the driver's header, which TVM's sources include: nothing but this type.
#pragma once

#include <cstdint>

struct alignas(128) CUtensorMap {
  uint64_t opaque[16];
};
