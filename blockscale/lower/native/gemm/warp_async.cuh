// Copies of a warp to shared memory by cp.async, 16 bytes of a lane at a time.
#pragma once
#include "mma.cuh"

// SIZE bytes that follow each other, a multiple of 16.
template <int SIZE>
BS_INLINE void bs_async_run(uint32_t to, const uint8_t *from, int lane, uint64_t policy) {
#pragma unroll
  for (int at = 0; at < SIZE; at += 512) {
    if (at + 512 <= SIZE || at + 16 * lane < SIZE)
      bs_cp_async16_hint(to + at + 16 * lane, from + at + 16 * lane, policy);
  }
}

// Of `rows` rows of x, PITCH elements apart, PIECES pieces of 16 bytes to rows STRIDE bytes apart;
// from piece HELD on, which x does not have, zeros: a NaN times 0 is no 0.  In odd rows neighbours
// 2 t and 2 t + 1 change places, so that 8 lanes that read the same pieces of two rows read from
// different banks.
template <int PIECES, int HELD, int STRIDE, int PITCH>
BS_INLINE void bs_async_rows(uint32_t to, const uint16_t *from, int rows, int lane) {
  for (int i = lane; i < rows * PIECES; i += 32) {
    int row = i / PIECES, piece = i % PIECES;
    bool held = HELD == PIECES || piece < HELD;
    bs_cp_async16(to + row * STRIDE + (piece ^ row % 2) * 16,
                  from + (int64_t(row) * PITCH + (held ? piece * 8 : 0)), held ? 16 : 0);
  }
}
