// The 16-bit floats of cuda_bf16.h and cuda_fp16.h, as TVM's sources need them: a type of two bytes,
// a pair of them, conversions and comparisons.  What computes does so in float32, or by instructions
// of its own: arithmetic of two such numbers, which would be float32's here, is an error.
#pragma once

#define BS_HERE static __host__ __device__ __forceinline__

// FROM and TO: PTX that converts float32 %1 to 16 bits %0, and back.
#define BS_FLOAT16(NAME, PAIR, FROM, TO)                                         \
  struct __align__(2) NAME {                                                     \
    unsigned short __x;                                                          \
    NAME() = default;                                                            \
    __host__ __device__ __forceinline__ NAME(float value) {                      \
      BS_ON_DEVICE(asm(FROM : "=h"(__x) : "f"(value));)                          \
    }                                                                            \
    __host__ __device__ __forceinline__ operator float() const {                 \
      float value = 0.0f;                                                        \
      BS_ON_DEVICE(asm(TO : "=f"(value) : "h"(__x));)                            \
      return value;                                                              \
    }                                                                            \
  };                                                                             \
  struct __align__(4) PAIR {                                                     \
    NAME x, y;                                                                   \
    PAIR() = default;                                                            \
    __host__ __device__ __forceinline__ PAIR(NAME a, NAME b) : x(a), y(b) {}     \
  };                                                                             \
  BS_HERE bool __hgt(NAME a, NAME b) { return float(a) > float(b); }             \
  BS_HERE bool __hlt(NAME a, NAME b) { return float(a) < float(b); }             \
  NAME operator+(NAME, NAME) = delete;                                           \
  NAME operator-(NAME, NAME) = delete;                                           \
  NAME operator*(NAME, NAME) = delete;                                           \
  NAME operator/(NAME, NAME) = delete;

#ifdef __CUDA_ARCH__
#define BS_ON_DEVICE(...) __VA_ARGS__
#else
#define BS_ON_DEVICE(...)
#endif
