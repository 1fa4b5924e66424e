// Scalar CUDA C++ with much control flow: reductions, votes, atomics, divergence, switches, calls,
// local arrays, a grid barrier made of atomics, cp.async, labels in inline assembly.
#include <stdint.h>

// Sum and maximum of x[n] over the block's part: shuffles, then shared memory, then one atomic.
extern "C" __global__ void block_reduce(const float* x, int n, float* sum, int* top,
    unsigned* positive) {
  __shared__ float sums[32];
  __shared__ int tops[32];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float s = 0;
  int m = INT32_MIN;
  unsigned count = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    s += x[i];
    m = max(m, __float_as_int(x[i]));  // order of non-negative floats
    count += __popc(__ballot_sync(__activemask(), x[i] > 0)) * (__ffs(__activemask()) - 1 == lane);
  }
  for (int step = 16; step; step >>= 1) s += __shfl_xor_sync(~0u, s, step);
  m = __reduce_max_sync(~0u, m);
  if (count) atomicAdd(positive, count);
  if (lane == 0) sums[warp] = s, tops[warp] = m;
  __syncthreads();
  if (warp) return;
  bool there = lane < blockDim.x / 32;
  s = there ? sums[lane] : 0;
  m = there ? tops[lane] : INT32_MIN;
  for (int step = 16; step; step >>= 1) {
    s += __shfl_down_sync(~0u, s, step);
    m = max(m, __shfl_down_sync(~0u, m, step));
  }
  if (lane == 0) {
    atomicAdd(sum, s);
    atomicMax(top, m);
  }
}

// Inclusive scan of the warp by shuffles, and what votes and matches say of the same values.
extern "C" __global__ void warp_words(const int* x, int* scan, unsigned* votes) {
  int i = blockIdx.x * 32 + threadIdx.x, value = x[i], total = value;
  for (int step = 1; step < 32; step *= 2) {
    int below = __shfl_up_sync(~0u, total, step);
    if (threadIdx.x >= step) total += below;
  }
  scan[i] = total;
  unsigned* out = votes + 8 * i;
  out[0] = __ballot_sync(~0u, value & 1);
  out[1] = __any_sync(~0u, value == 7) | __all_sync(~0u, value >= 0) << 1;
  out[2] = __match_any_sync(~0u, value);
  out[3] = __reduce_add_sync(~0u, value);
  out[4] = __shfl_sync(~0u, value, threadIdx.x ^ 5, 8);
  out[5] = 0;
  if (value & 1) out[5] = __ballot_sync(__activemask(), value > 4);  // only the odd lanes
  out[6] = __reduce_xor_sync(~0u, value);
  __syncwarp();
  out[7] = __activemask();
}

// Histogram in shared memory, merged into global memory; float maximum through compare-and-swap.
extern "C" __global__ void histogram(const uint8_t* x, int n, unsigned* bins, float* top,
    double* total,
                                     unsigned long long* last) {
  __shared__ unsigned local[256];
  __shared__ float best;
  for (int i = threadIdx.x; i < 256; i += blockDim.x) local[i] = 0;
  if (threadIdx.x == 0) best = -1;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    atomicAdd(&local[x[i]], 1u);
    float value = x[i] * 0.5f;
    int* at = reinterpret_cast<int*>(&best);
    for (int old = *at; __int_as_float(old) < value;) {
      int seen = atomicCAS(at, old, __float_as_int(value));
      if (seen == old) break;
      old = seen;
    }
    atomicAdd(total, double(value));
    atomicMax(last, (unsigned long long)i << 32 | x[i]);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 256; i += blockDim.x)
    if (local[i]) atomicAdd(&bins[i], local[i]);
  if (threadIdx.x == 0) atomicMax(reinterpret_cast<int*>(top), __float_as_int(best));
}

// y = a x + y, 16 bytes a thread: nothing but memory traffic.
extern "C" __global__ void axpy(const float4* x, float4* y, float a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float4 u = x[i], v = y[i];
  y[i] = make_float4(a * u.x + v.x, a * u.y + v.y, a * u.z + v.z, a * u.w + v.w);
}

// Steps of the Collatz sequence: every lane its own number of rounds, with continue and break.
extern "C" __global__ void collatz(const unsigned* x, int* steps, int n, int limit) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  unsigned long long value = x[i];
  if (value == 0) {
    steps[i] = -1;
    return;
  }
  int count = 0;
  while (value != 1) {
    if (++count > limit) break;
    if (value % 2 == 0) {
      value /= 2;
      continue;
    }
    value = 3 * value + 1;
  }
  steps[i] = count > limit ? -2 : count;
}

// A stack machine: a switch, a local array with computed index, calls that return.
__device__ __noinline__ int power(int base, int exponent) {
  int result = 1;
  for (; exponent; exponent /= 2, base *= base)
    if (exponent % 2) result *= base;
  return result;
}

__device__ __noinline__ void divide(int a, int b, int* quotient, int* rest) {
  *quotient = b ? a / b : 0;
  *rest = b ? a % b : a;
}

extern "C" __global__ void interpret(const uint8_t* programs, int length, const int* input,
    int* output) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  const uint8_t* code = programs + i * length;
  int stack[16], top = 0;
  for (int j = 0; j < 16; ++j) stack[j] = j ? j : input[i];
  for (int pc = 0; pc < length; ++pc) {
    int value = stack[top], rest;
    switch (code[pc]) {
      case 0: output[i] = value; return;
      case 1: stack[top = (top + 1) & 15] = pc; break;
      case 2: stack[top] = value + stack[(top + 15) & 15]; break;
      case 3: stack[top] = value - stack[(top + 15) & 15]; break;
      case 4: stack[top] = value * 3; break;
      case 5: top = (top + 15) & 15; break;
      case 6: stack[top] = power(value & 7, pc & 7); break;
      case 7: divide(value, pc - 4, &stack[top], &rest); stack[(top + 1) & 15] = rest; break;
      case 8: if (value & 1) pc += 1; break;
      case 9: stack[top] = __popc(value) - __clz(value); break;
      case 10: top = (top + 1) & 15; stack[top] = value; break;
      default: stack[top] = ~value;
    }
  }
  output[i] = stack[top] ^ top;
}

// All blocks meet `rounds` times at one counter; every round reads what other blocks wrote before
// it.
__device__ void grid_barrier(unsigned* arrived, unsigned target) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(arrived, 1u);
    while (*reinterpret_cast<volatile unsigned*>(arrived) < target) __nanosleep(40);
    __threadfence();
  }
  __syncthreads();
}

extern "C" __global__ void grid_rounds(int* values, unsigned* arrived, long long* clocks,
    int rounds) {
  int n = gridDim.x * blockDim.x, i = blockIdx.x * blockDim.x + threadIdx.x;
  long long start = clock64();
  for (int round = 0; round < rounds; ++round) {
    volatile int* old = values + round % 2 * n;
    int next = old[i] + old[(i + blockDim.x) % n];
    values[(round + 1) % 2 * n + i] = next;
    grid_barrier(arrived, gridDim.x * (round + 1));
  }
  clocks[i] = clock64() - start;
}

// A copy through shared memory by cp.async: beyond n the source size is 0 and nothing may be read.
extern "C" __global__ void async_copy(const float* x, float* y, int n) {
  __shared__ __align__(16) float buffer[2][4 * 64];
  int first = blockIdx.x * 1024;
  for (int part = 0; part < 5; ++part) {
    if (part < 4) {
      int at = first + part * 256 + threadIdx.x * 4, bytes = min(max(n - at, 0), 4) * 4;
      uint32_t to = (uint32_t)__cvta_generic_to_shared(&buffer[part % 2][threadIdx.x * 4]);
      asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;"
          :: "r"(to), "l"(x + at), "r"(bytes) : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    if (part) {
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      __syncthreads();
      for (int j = threadIdx.x; j < 256; j += 64) y[first + (part - 1) * 256 + j] =
          buffer[(part - 1) % 2][j ^ 3];
      __syncthreads();
    }
  }
}

// Greatest common divisor in assembly: local labels and registers, twice in one function.
extern "C" __global__ void gcd_labels(const unsigned* a, const unsigned* b, unsigned* c) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x, r = 0;
#pragma unroll
  for (int twice = 0; twice < 2; ++twice) {
    unsigned x = a[i] + twice, y = b[i], out;
    asm volatile(
        "{\n .reg .u32 x, y, rest;\n .reg .pred zero;\n mov.u32 x, %1;\n mov.u32 y, %2;\n"
        "loop:\n setp.eq.u32 zero, y, 0;\n @zero bra done;\n rem.u32 rest, x, y;\n mov.u32 x, y;\n"
        " mov.u32 y, rest;\n bra loop;\ndone:\n mov.u32 %0, x;\n}" : "=r"(out) : "r"(x), "r"(y));
    r = r * 65536 + out;
  }
  c[i] = r;
}

// A jump table (brx.idx), which this compiler does not print by itself: a small state machine.
extern "C" __global__ void jump_table(const unsigned* x, unsigned* y, int rounds) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned value = x[i];
  for (int round = 0; round < rounds; ++round)
    asm volatile(
        "{\n .reg .u32 which, v;\n mov.u32 v, %0;\n and.b32 which, v, 3;\n"
        "table: .branchtargets zero, one, two, one;\n brx.idx which, table;\n"
        "zero:\n add.u32 v, v, 5;\n bra done;\n"
        "one:\n mul.lo.u32 v, v, 3;\n add.u32 v, v, 1;\n bra done;\n"
        "two:\n shr.u32 v, v, 1;\n"
        "done:\n mov.u32 %0, v;\n}" : "+r"(value));
  y[i] = value;
}
