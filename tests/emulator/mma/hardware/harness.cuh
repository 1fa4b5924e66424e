// What runs the cases of generate.py on a GPU: inputs, kernels, and one file of named arrays of
// 32-bit words (little-endian: length of name, name, number of words, words), see golden.py.
//
// An instruction is a struct with the numbers of its registers and `run`, which is its inline PTX.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <set>
#include <string>
#include <vector>

#define DEV static __device__ __forceinline__
#define CHECK(call)                                                                           \
  do {                                                                                        \
    cudaError_t error_ = (call);                                                              \
    if (error_ != cudaSuccess) {                                                              \
      fprintf(stderr, "%s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
      exit(1);                                                                                \
    }                                                                                         \
  } while (0)

typedef uint32_t u32;
typedef uint64_t u64;
typedef std::vector<u32> Words;

static FILE *file;

static void put(const std::string &name, const Words &words) {
  u32 length = name.size(), number = words.size();
  fwrite(&length, 4, 1, file);
  fwrite(name.data(), 1, length, file);
  fwrite(&number, 4, 1, file);
  fwrite(words.data(), 4, number, file);
}

// --- inputs

static u32 seed = 1;

static u32 mix(u32 x) {  // the finaliser of MurmurHash3
  x ^= x >> 16;
  x *= 0x85ebca6bu;
  x ^= x >> 13;
  x *= 0xc2b2ae35u;
  return x ^ x >> 16;
}

static u32 f32(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return bits;
}

static int small(u32 r) { return int(r % 17) - 8; }

static u32 small_f16(u32 r) {
  int v = small(r), sign = v < 0 ? 0x8000 : 0;
  v = abs(v);
  if (!v) return 0;
  int e = 31 - __builtin_clz(v);
  return sign | (e + 15) << 10 | ((v << (10 - e)) & 0x3ff);
}

static u32 small_f8(u32 r, bool e4m3) {  // 0, 0.5, 1, 1.5 or 2, signed
  static const u32 e4m3_codes[5] = {0, 0x30, 0x38, 0x3c, 0x40};
  static const u32 e5m2_codes[5] = {0, 0x38, 0x3c, 0x3e, 0x40};
  return (e4m3 ? e4m3_codes : e5m2_codes)[r % 5] | (r >> 8 & 1) << 7;
}

// One word of elements. Types: h f16, b bf16, t tf32, 4 e4m3, 5 e5m2, f f32, i bits. Small numbers,
// whose sums are exact, or wide: random bits without infinity and NaN, also in the sums.
static u32 word(char type, bool wide, u32 r) {
  u32 r2 = mix(r + 12345), r3 = mix(r2), r4 = mix(r3);
  bool e4m3 = type == '4';
  switch (type) {
    case 'h':
      return wide ? r & 0xbfffbfffu : small_f16(r) | small_f16(r2) << 16;
    case 'b':
      return wide ? (r & 0x87ff87ffu) | 0x38003800u
                  : f32(small(r)) >> 16 | (f32(small(r2)) & 0xffff0000u);
    case 't':
      return wide ? (r & 0x87ffffffu) | 0x38000000u : f32(small(r));
    case 'f':
      return wide ? (r & 0x83ffffffu) | 0x3c000000u : f32(int(r % 65) - 32);
    case '4':
    case '5':
      return wide ? r & 0xbfbfbfbfu
                  : small_f8(r, e4m3) | small_f8(r2, e4m3) << 8 | small_f8(r3, e4m3) << 16 |
                        small_f8(r4, e4m3) << 24;
  }
  return r;
}

static Words fill(size_t number, char type, bool wide) {
  Words words(number);
  u32 start = mix(seed++ * 0x9e3779b9u);
  if (type != 'd') {
    for (size_t i = 0; i < number; ++i) words[i] = word(type, wide, mix(start + u32(i)));
    return words;
  }
  for (size_t i = 0; i + 1 < number; i += 2) {  // f64: small integers, or wide: in [1, 2)
    u32 r = mix(start + u32(i));
    u64 bits = (u64(mix(r)) << 32 | mix(r + 1)) >> 12 | 0x3ff0000000000000ull;
    double value = small(r);
    memcpy(&words[i], wide ? (void *)&bits : (void *)&value, 8);
  }
  return words;
}

// --- memory of the GPU

static u32 *up(const Words &words) {
  u32 *place;
  CHECK(cudaMalloc(&place, words.size() * 4));
  CHECK(cudaMemcpy(place, words.data(), words.size() * 4, cudaMemcpyHostToDevice));
  return place;
}

static Words down(u32 *place, size_t number) {
  Words words(number);
  CHECK(cudaGetLastError());
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMemcpy(words.data(), place, number * 4, cudaMemcpyDeviceToHost));
  return words;
}

static void release(std::initializer_list<u32 *> places) {
  for (u32 *place : places) CHECK(cudaFree(place));
}

// --- mma.sync: every thread has its own registers in global memory

template <class Op, class T = typename Op::T>
__global__ void mma_kernel(const T *pa, const T *pb, const T *pc, T *pd) {
  T a[Op::A], b[Op::B], c[Op::C], d[Op::D];
  int t = blockIdx.x * 32 + threadIdx.x;
  for (int i = 0; i < Op::A; ++i) a[i] = pa[t * Op::A + i];
  for (int i = 0; i < Op::B; ++i) b[i] = pb[t * Op::B + i];
  for (int i = 0; i < Op::C; ++i) c[i] = pc[t * Op::C + i];
  Op::run(a, b, c, d);
  for (int i = 0; i < Op::D; ++i) pd[t * Op::D + i] = d[i];
}

// types: those of a, b and c
template <class Op, class T = typename Op::T>
static void run_mma(const std::string &opcode, const char *types) {
  const int warps = 2, each = warps * 32 * sizeof(T) / 4;
  for (bool wide : {false, true}) {
    Words a = fill(each * Op::A, types[0], wide), b = fill(each * Op::B, types[1], wide);
    Words c = fill(each * Op::C, types[2], wide), unwritten(each * Op::D, 0xdeadbeefu);
    u32 *pa = up(a), *pb = up(b), *pc = up(c), *pd = up(unwritten);
    mma_kernel<Op><<<warps, 32>>>((const T *)pa, (const T *)pb, (const T *)pc, (T *)pd);
    std::string name = "mma|" + opcode + (wide ? "|wide" : "|exact");
    put(name + "|a", a);
    put(name + "|b", b);
    put(name + "|c", c);
    put(name + "|d", down(pd, unwritten.size()));
    release({pa, pb, pc, pd});
  }
}

// --- ldmatrix, stmatrix, movmatrix: from word 128 on lies shared memory, 32 slots of 16 bytes

template <class Op>
__global__ void matrix_kernel(const u32 *in, u32 *out) {
  __shared__ __align__(128) u32 memory[32 * 4];
  int t = threadIdx.x;
  u32 r[Op::R];
  for (int i = 0; i < 4; ++i) memory[t * 4 + i] = in[128 + t * 4 + i];
  for (int i = 0; i < Op::R; ++i) r[i] = in[t * Op::R + i];
  __syncwarp();
  int slot = t % (8 * Op::R) * 5 % 32;  // row t lies in slot 5 t mod 32
  Op::run((u32)__cvta_generic_to_shared(&memory[slot * 4]), r);
  __syncwarp();
  for (int i = 0; i < Op::R; ++i) out[t * Op::R + i] = r[i];
  for (int i = 0; i < 4; ++i) out[128 + t * 4 + i] = memory[t * 4 + i];
}

static __global__ void movmatrix_kernel(const u32 *in, u32 *out) {
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;"
               : "=r"(out[threadIdx.x])
               : "r"(in[threadIdx.x]));
}

static void run_words(const std::string &name, void (*kernel)(const u32 *, u32 *), size_t number) {
  Words in = fill(number, 'i', true);
  u32 *given = up(in), *made = up(Words(number));
  kernel<<<1, 32>>>(given, made);
  put(name + "|in", in);
  put(name + "|out", down(made, number));
  release({given, made});
}

// --- wgmma: A in the first 10 KiB of shared memory, B behind; descriptors count from its start

static const int MEMORY_WORDS = 32768 / 4, B_WORD = 10240 / 4, ALIGNMENT = 1024;
static const int DYNAMIC_BYTES = 4 * MEMORY_WORDS + ALIGNMENT;

// Shared memory of one pair of types, the same in all cases: written to the file once.
static Words memory_of(const std::string &types, char a, char b, bool wide) {
  static std::set<std::string> stored;
  u32 kept = seed;
  seed = 1000003u * u32(a) + 1009u * u32(b) + wide;
  Words words = fill(B_WORD, a, wide), rest = fill(MEMORY_WORDS - B_WORD, b, wide);
  seed = kept;
  words.insert(words.end(), rest.begin(), rest.end());
  std::string name = "smem|" + types + (wide ? "|wide|sm" : "|exact|sm");
  if (stored.insert(name).second) put(name, words);
  return words;
}

template <class Op>
__global__ void wgmma_kernel(const u32 *words, const u32 *pa, u32 *pd, u32 *start, u64 a_desc,
                             u64 b_desc, int scale_d) {
  extern __shared__ u32 dynamic[];
  int t = threadIdx.x;
  u32 given = (u32)__cvta_generic_to_shared(dynamic);
  u32 base = (given + ALIGNMENT - 1) & ~(ALIGNMENT - 1);
  for (int i = t; i < MEMORY_WORDS; i += 128) dynamic[(base - given) / 4 + i] = words[i];
  if (t == 0) *start = base;
  u32 a[4], d[Op::D];
  for (int i = 0; i < 4; ++i) a[i] = pa[t * 4 + i];
  for (int i = 0; i < Op::D; ++i) d[i] = pd[t * Op::D + i];
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  Op::run(a, a_desc + (base >> 4), b_desc + (base >> 4), scale_d, d);
  for (int i = 0; i < Op::D; ++i) pd[t * Op::D + i] = d[i];
}

// name: the case without its mode; types: those of A and B in words; letters: those of A, B and D
template <class Op>
static void run_wgmma(const std::string &name, const std::string &types, const char *letters,
                      u64 a_desc, u64 b_desc, int scale_d, bool also_wide) {
  CHECK(cudaFuncSetAttribute(wgmma_kernel<Op>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             DYNAMIC_BYTES));
  for (int wide = 0; wide <= also_wide; ++wide) {
    Words memory = memory_of(types, letters[0], letters[1], wide);
    Words a = fill(128 * 4, letters[0], wide), c = fill(128 * Op::D, letters[2], wide);
    u32 *pm = up(memory), *pa = up(a), *pd = up(c), *base = up(Words(1));
    wgmma_kernel<Op><<<1, 128, DYNAMIC_BYTES>>>(pm, pa, pd, base, a_desc, b_desc, scale_d);
    std::string mode = wide ? "|wide" : "|exact";
    put(name + mode + "|a", a);
    put(name + mode + "|c", c);
    put(name + mode + "|d", down(pd, c.size()));
    put(name + mode + "|base", down(base, 1));
    release({pm, pa, pd, base});
  }
}
