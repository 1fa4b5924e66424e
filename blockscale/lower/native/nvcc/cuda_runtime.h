// What kernels need of CUDA's header of this name, which nvcc puts in front of every source: that
// one takes more than half of the time of a small kernel, for the host's runtime and <cmath>.
// The declarations are those of NVIDIA's headers, so machine code is the same
// (tests/lower/test_nvcc.py); a function that is missing here is an error of the compiler.
#pragma once

#define __CUDA_INCLUDE_COMPILER_INTERNAL_HEADERS__
#include <cstdint>

#include "builtin_types.h"
#include "crt/host_defines.h"
#include "device_launch_parameters.h"
#include "vector_functions.h"

#define BS_BUILTIN extern "C" __host__ __device__ __device_builtin__
#define BS_OVERLOAD static inline __host__ __device__

BS_BUILTIN void *memcpy(void *, const void *, size_t) noexcept;
BS_BUILTIN void *memset(void *, int, size_t) noexcept;

#define BS_MATH1(name) BS_BUILTIN float name##f(float) noexcept; BS_BUILTIN double name(double) noexcept;
#define BS_MATH2(name) \
  BS_BUILTIN float name##f(float, float) noexcept; BS_BUILTIN double name(double, double) noexcept;
BS_MATH1(fabs) BS_MATH1(sqrt) BS_MATH1(exp) BS_MATH1(exp2) BS_MATH1(log) BS_MATH1(log2)
BS_MATH1(log10) BS_MATH1(log1p) BS_MATH1(sin) BS_MATH1(cos) BS_MATH1(tan) BS_MATH1(atan)
BS_MATH1(tanh) BS_MATH1(erf) BS_MATH1(floor) BS_MATH1(ceil) BS_MATH1(trunc) BS_MATH1(round)
BS_MATH1(rint) BS_MATH1(nearbyint)
BS_MATH2(copysign) BS_MATH2(fmin) BS_MATH2(fmax) BS_MATH2(fmod) BS_MATH2(pow)
BS_BUILTIN float fmaf(float, float, float) noexcept;
BS_BUILTIN double fma(double, double, double) noexcept;
BS_BUILTIN float ldexpf(float, int) noexcept;
BS_BUILTIN double ldexp(double, int) noexcept;
BS_BUILTIN float rsqrtf(float);
BS_BUILTIN double rsqrt(double);
BS_BUILTIN int abs(int) noexcept;
BS_BUILTIN unsigned umin(unsigned, unsigned);
BS_BUILTIN unsigned umax(unsigned, unsigned);
BS_BUILTIN long long llmin(long long, long long);
BS_BUILTIN long long llmax(long long, long long);
BS_BUILTIN unsigned long long ullmin(unsigned long long, unsigned long long);
BS_BUILTIN unsigned long long ullmax(unsigned long long, unsigned long long);
#undef BS_MATH1
#undef BS_MATH2

BS_OVERLOAD int min(int a, int b) { return a < b ? a : b; }
BS_OVERLOAD int max(int a, int b) { return a > b ? a : b; }
BS_OVERLOAD unsigned min(unsigned a, unsigned b) { return umin(a, b); }
BS_OVERLOAD unsigned max(unsigned a, unsigned b) { return umax(a, b); }
BS_OVERLOAD long min(long a, long b) { return llmin(a, b); }
BS_OVERLOAD long max(long a, long b) { return llmax(a, b); }
BS_OVERLOAD long long min(long long a, long long b) { return llmin(a, b); }
BS_OVERLOAD long long max(long long a, long long b) { return llmax(a, b); }
BS_OVERLOAD unsigned long min(unsigned long a, unsigned long b) { return ullmin(a, b); }
BS_OVERLOAD unsigned long max(unsigned long a, unsigned long b) { return ullmax(a, b); }
BS_OVERLOAD unsigned long long min(unsigned long long a, unsigned long long b) {
  return ullmin(a, b);
}
BS_OVERLOAD unsigned long long max(unsigned long long a, unsigned long long b) {
  return ullmax(a, b);
}
BS_OVERLOAD float min(float a, float b) { return fminf(a, b); }
BS_OVERLOAD float max(float a, float b) { return fmaxf(a, b); }
BS_OVERLOAD double min(double a, double b) { return fmin(a, b); }
BS_OVERLOAD double max(double a, double b) { return fmax(a, b); }
BS_OVERLOAD float sqrt(float a) { return sqrtf(a); }
BS_OVERLOAD float fabs(float a) { return fabsf(a); }
BS_OVERLOAD float floor(float a) { return floorf(a); }
BS_OVERLOAD float erf(float a) { return erff(a); }
#undef BS_BUILTIN
#undef BS_OVERLOAD

#include "crt/device_functions.h"
#undef __CUDA_INCLUDE_COMPILER_INTERNAL_HEADERS__
