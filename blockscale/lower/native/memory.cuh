// Device functions of blockscale's GPU kernels: loads and stores of a thread, 16 bytes at a time.
#pragma once
#include <cstdint>

#define BS_INLINE __device__ __forceinline__

enum BsHint {
  BS_KEEP = 0,     // default caching
  BS_STREAM = 1,   // touched once: not kept in L1, first to leave L2
  BS_INPLACE = 2,  // loads of what the kernel also writes: coherent, in program order
};

// All loads are volatile: none may move above the wait for the preceding kernel (PDL), and a kernel
// that names several loads first has all of them in flight.
template <int HINT>
BS_INLINE uint4 bs_load16(const void *from) {
  uint4 v;
  if (HINT == BS_KEEP) {
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(from));
  } else if (HINT == BS_STREAM) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(from));
  } else {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
  }
  return v;
}

template <int HINT>
BS_INLINE uint2 bs_load8(const void *from) {
  uint2 v;
  if (HINT == BS_KEEP) {
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
  } else if (HINT == BS_STREAM) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(from));
  } else {
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from) : "memory");
  }
  return v;
}

template <int HINT>
BS_INLINE uint32_t bs_load4(const void *from) {
  uint32_t v;
  if (HINT == BS_KEEP) {
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(from));
  } else if (HINT == BS_STREAM) {
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(from));
  } else {
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  }
  return v;
}

// BYTES (a multiple of 4) from memory aligned to 16, or to BYTES where they are fewer.
template <int BYTES, int HINT>
BS_INLINE void bs_load(void *to, const void *from) {
  uint32_t *word = static_cast<uint32_t *>(to);
  const char *at = static_cast<const char *>(from);
#pragma unroll
  for (int i = 0; i < BYTES / 16; ++i) {
    uint4 v = bs_load16<HINT>(at + 16 * i);
    word[4 * i] = v.x, word[4 * i + 1] = v.y, word[4 * i + 2] = v.z, word[4 * i + 3] = v.w;
  }
  if (BYTES % 16 >= 8) {
    uint2 v = bs_load8<HINT>(at + BYTES / 16 * 16);
    word[BYTES / 16 * 4] = v.x, word[BYTES / 16 * 4 + 1] = v.y;
  }
  if (BYTES % 8 >= 4) word[BYTES / 4 - 1] = bs_load4<HINT>(at + BYTES - 4);
}

template <int BYTES, int HINT>
BS_INLINE void bs_store(void *to, const void *from) {
  const uint32_t *word = static_cast<const uint32_t *>(from);
  char *at = static_cast<char *>(to);
#pragma unroll
  for (int i = 0; i < BYTES / 16; ++i) {
    uint4 v = make_uint4(word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]);
    if (HINT == BS_STREAM) __stcs(reinterpret_cast<uint4 *>(at + 16 * i), v);
    else *reinterpret_cast<uint4 *>(at + 16 * i) = v;
  }
  if (BYTES % 16 >= 8) {
    uint2 v = make_uint2(word[BYTES / 16 * 4], word[BYTES / 16 * 4 + 1]);
    if (HINT == BS_STREAM) __stcs(reinterpret_cast<uint2 *>(at + BYTES / 16 * 16), v);
    else *reinterpret_cast<uint2 *>(at + BYTES / 16 * 16) = v;
  }
  if (BYTES % 8 >= 4) {
    uint32_t v = word[BYTES / 4 - 1];
    if (HINT == BS_STREAM) __stcs(reinterpret_cast<uint32_t *>(at + BYTES - 4), v);
    else *reinterpret_cast<uint32_t *>(at + BYTES - 4) = v;
  }
}
