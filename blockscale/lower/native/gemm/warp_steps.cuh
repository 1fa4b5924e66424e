// Words of codes and scales of the tiles64 layout of linear layers, as MMAs take them.
//
// Thread 4 g + t has four words of rows g and g + 8, of the channels 16 t to 16 t + 15 of 64: word j
// those of 2 j, 2 j + 1, 2 j + 8 and 2 j + 9.  They are the 16 bytes (t + g / 2) % 4 of the quad's 64,
// so that words of MMA j, one of each thread, lie in different banks.
#pragma once
#include "mma.cuh"
#include "moe_decode.cuh"

BS_INLINE uint32_t bs_word(uint4 v, int j) { return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w; }

BS_INLINE uint32_t bs_load4_shared(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}

BS_INLINE uint2 bs_load8_shared(uint32_t from) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
  return v;
}

// A fragments of two MMAs, of words j and j + 1 (j even): the first has the thread's channels 2 j to
// 2 j + 3, the second those 8 further on.
template <class D>
BS_INLINE void bs_decode_two(const D &scales, uint4 codes, int j, uint32_t (*a)[4]) {
  uint32_t first[4], second[4];
  scales.decode(bs_word(codes, j), first);
  scales.decode(bs_word(codes, j + 1), second);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    a[half][0] = first[2 * half], a[half][1] = first[2 * half + 1];
    a[half][2] = second[2 * half], a[half][3] = second[2 * half + 1];
  }
}

// Their products with a row of x, of which x[half] is the thread's half: a B fragment is two registers
// of one load.  Of one word of codes it would be one of each load, which ptxas moves together first.
template <bool BF16>
BS_INLINE void bs_mma_two(float *c, const uint32_t (*a)[4], const uint4 (&x)[2], int j) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
    bs_mma16816<BF16>(c, a[half], bs_word(x[half], j), bs_word(x[half], j + 1));
}

// Word t of each of a quad's four threads: that of thread j has channels 16 j + 2 t, ... of MMA j.
// `from`: word t of the quad's first 16 bytes; `turn`: where the threads' bytes begin.
BS_INLINE uint4 bs_load_steps(uint32_t from, const uint32_t (&turn)[4]) {
  return make_uint4(bs_load4_shared(from + turn[0]), bs_load4_shared(from + turn[1]),
                    bs_load4_shared(from + turn[2]), bs_load4_shared(from + turn[3]));
}

// Scales of rows g and g + 8 for the channels of all four MMAs, at `at`.
template <class P>
struct BsStepScales {
  using D = BsDecode<P>;
  static constexpr bool HALVES = P::GROUP == 32, QUARTERS = P::GROUP == 16, ZEROS = D::INT4 && P::ZEROS;
  uint2 v[HALVES && ZEROS ? 2 : 1];

  BS_INLINE BsStepScales(uint32_t at, int g) {
    if constexpr (QUARTERS) {
      v[0] = bs_load8_shared(at + 8 * g);
    } else if constexpr (!D::INT4) {
      v[0] = {bs_load4_shared(at + 4 * g), 0};
    } else if constexpr (HALVES && ZEROS) {
      v[0] = bs_load8_shared(at + 16 * g), v[1] = bs_load8_shared(at + 16 * g + 8);
    } else if constexpr (HALVES || ZEROS) {
      v[0] = bs_load8_shared(at + 8 * g);
    } else {
      v[0] = {bs_load4_shared(at + 4 * g), 0};
    }
  }

  // Those of MMA j.
  template <int J>
  BS_INLINE D of() const {
    if constexpr (QUARTERS) return D(uint2{J < 2 ? v[0].x : v[0].y, 0}, BsIndex<J % 2>());
    else if constexpr (!D::INT4) return D(v[0], BsIndex<J / 2>());
    else if constexpr (HALVES && ZEROS) return D(v[J / 2]);
    else if constexpr (HALVES) return D(uint2{J < 2 ? v[0].x : v[0].y, 0});
    else return D(v[0]);
  }
};
