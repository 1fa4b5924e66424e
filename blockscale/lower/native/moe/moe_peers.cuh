// Rows between GPUs: stores into other ranks' symmetric buffers, and cells that say they are there.
//
// A cell is a word of 64 bits that one rank writes and one reads: the call's number (epoch) in the
// high half, the call's bound and the sender's tokens in 16 bits each below.  Order of memory:
//
//   sender:    stores of a CTA; bar.sync; fence.acq_rel.sys and a count of the CTAs that are through;
//              the last one: fence.acq_rel.sys, st.relaxed.sys of a cell of each rank
//              (a fence at the system's scope waits for all stores to other GPUs: one a CTA)
//   receiver:  ld.acquire.sys of the cell until it has the epoch; bar.sync; loads
//
// A cell of the other step acknowledges: who has seen all cells of combine n may overwrite what
// dispatch n has sent, and who has seen all of dispatch n + 1 what combine n has.  docs/ep.md.
//
// A wait ends at the latest `timeout` ns after it began.  Who gives up says so in all its cells, so
// that the others give up too, names rank and step in the status record, which the host reads, and
// sends nothing any more.
#pragma once
#include "memory.cuh"

enum BsEpFrame { BS_EP_RANK, BS_EP_BOUND, BS_EP_TIMEOUT, BS_EP_STATUS, BS_EP_PARTS, BS_EP_PEERS = 9 };
enum BsEpPart { BS_EP_CELLS, BS_EP_IDS, BS_EP_WEIGHTS, BS_EP_ROWS, BS_EP_SLOTS };
enum BsEpState { BS_EP_EPOCH, BS_EP_DISPATCHED, BS_EP_COMBINED, BS_EP_FAILED };
enum BsEpStep { BS_EP_DISPATCH, BS_EP_COMBINE };
enum BsEpCode { BS_EP_TIMED_OUT = 1, BS_EP_GAVE_UP, BS_EP_OTHER_BOUND };

constexpr int BS_EP_MAX_RANKS = 32;
constexpr uint32_t BS_EP_ABORTED = 0xFFFFFFFFu;  // the epoch of a cell whose writer has given up

BS_INLINE char *bs_ep_part(const int64_t *frame, int rank, int part) {
  return reinterpret_cast<char *>(frame[BS_EP_PEERS + rank]) + frame[BS_EP_PARTS + part];
}

BS_INLINE uint64_t bs_ep_now() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

BS_INLINE void bs_ep_fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

BS_INLINE uint64_t bs_ep_look(const uint64_t *cell) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(cell) : "memory");
  return value;
}

// What comes before it has to be seen before it: after a fence.
BS_INLINE void bs_ep_tell(uint64_t *cell, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(cell), "l"(value) : "memory");
}

BS_INLINE int bs_ep_read(const int *word) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

BS_INLINE uint64_t *bs_ep_cell(const int64_t *frame, int ranks, int of, int step, int from) {
  return reinterpret_cast<uint64_t *>(bs_ep_part(frame, of, BS_EP_CELLS)) + step * ranks + from;
}

// 16 bytes, a word, and half a word, into a part of a rank's buffer, at a multiple of their size.
BS_INLINE void bs_ep_put16(const int64_t *frame, int rank, int part, int64_t at, const void *from) {
  const uint32_t *w = static_cast<const uint32_t *>(from);
  *reinterpret_cast<uint4 *>(bs_ep_part(frame, rank, part) + 16 * at) = make_uint4(w[0], w[1], w[2], w[3]);
}

BS_INLINE void bs_ep_put4(const int64_t *frame, int rank, int part, int64_t at, int value) {
  *reinterpret_cast<int *>(bs_ep_part(frame, rank, part) + 4 * at) = value;
}

// Eight sums, rounded to 16 bits: 16 bytes.
template <class F>
BS_INLINE void bs_ep_put_rounded(const int64_t *frame, int rank, int part, int64_t at, const float *sum) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = F::pack(sum[2 * i], sum[2 * i + 1]);
  bs_ep_put16(frame, rank, part, at, words);
}

BS_INLINE void bs_ep_put2(const int64_t *frame, int rank, int part, int64_t at, int value) {
  *reinterpret_cast<uint16_t *>(bs_ep_part(frame, rank, part) + 2 * at) = static_cast<uint16_t>(value);
}

// Whether this rank still takes part: nothing is sent after a failure.
BS_INLINE bool bs_ep_takes_part(const int *state) { return bs_ep_read(state + BS_EP_FAILED) == 0; }

// The first failure: told to the host and to all ranks.
template <int RANKS>
BS_INLINE void bs_ep_fail(const int64_t *frame, int *state, int code, int step, int rank, uint32_t epoch) {
  if (atomicExch(state + BS_EP_FAILED, 1) != 0) return;
  int64_t *status = reinterpret_cast<int64_t *>(frame[BS_EP_STATUS]);
  status[1] = step, status[2] = rank, status[3] = epoch;
  bs_ep_fence();
  bs_ep_tell(reinterpret_cast<uint64_t *>(status), code);
  uint64_t value = static_cast<uint64_t>(BS_EP_ABORTED) << 32 | step << 16 | rank;
  int own = static_cast<int>(frame[BS_EP_RANK]);
  for (int r = 0; r < RANKS; ++r) {
    bs_ep_tell(bs_ep_cell(frame, RANKS, r, BS_EP_DISPATCH, own), value);
    bs_ep_tell(bs_ep_cell(frame, RANKS, r, BS_EP_COMBINE, own), value);
  }
}

// When a CTA has sent all it has: the last one tells all ranks that everything is there.  Returns
// whether it is the last one.
template <int RANKS, int STEP>
BS_INLINE bool bs_ep_sent(const int64_t *frame, int *state, int tokens) {
  __shared__ int last;
  // Loaded while stores are under way.
  uint32_t epoch = state[BS_EP_EPOCH] + (STEP == BS_EP_DISPATCH ? 1 : 0);
  uint64_t value = static_cast<uint64_t>(epoch) << 32 | frame[BS_EP_BOUND] << 16 | tokens;
  bool takes_part = bs_ep_takes_part(state);
  __syncthreads();
  if (threadIdx.x == 0) {
    int *count = state + (STEP == BS_EP_DISPATCH ? BS_EP_DISPATCHED : BS_EP_COMBINED);
    last = 1;
    if (gridDim.x > 1) {
      bs_ep_fence();
      last = atomicAdd(count, 1) == static_cast<int>(gridDim.x) - 1;
    }
    if (last) {
      bs_ep_fence();
      *count = 0;
      if (STEP == BS_EP_DISPATCH) state[BS_EP_EPOCH] = epoch;
      for (int r = 0; takes_part && r < RANKS; ++r) {
        bs_ep_tell(bs_ep_cell(frame, RANKS, r, STEP, static_cast<int>(frame[BS_EP_RANK])), value);
      }
    }
  }
  __syncthreads();
  return last;
}

// A thread, where kernels before have stored all that this rank sends: tells all ranks.
template <int RANKS, int STEP>
BS_INLINE void bs_ep_stored(const int64_t *frame, int *state, int tokens) {
  if (threadIdx.x != 0 || !bs_ep_takes_part(state)) return;
  uint64_t value = static_cast<uint64_t>(state[BS_EP_EPOCH]) << 32 | frame[BS_EP_BOUND] << 16 | tokens;
  bs_ep_fence();
  for (int r = 0; r < RANKS; ++r) {
    bs_ep_tell(bs_ep_cell(frame, RANKS, r, STEP, static_cast<int>(frame[BS_EP_RANK])), value);
  }
}

constexpr int BS_EP_TURNS = 32;  // looks at a cell between looks at the clock, which takes longer

// Tokens of rank `from`, once all that it sends in this step is there; -1 if that never comes.
template <int RANKS, int STEP>
BS_INLINE int bs_ep_wait(const int64_t *frame, int *state, int from) {
  uint32_t epoch = state[BS_EP_EPOCH];
  const uint64_t *cell = bs_ep_cell(frame, RANKS, static_cast<int>(frame[BS_EP_RANK]), STEP, from);
  uint64_t began = 0, value = bs_ep_look(cell);
  for (int turn = 1; static_cast<uint32_t>(value >> 32) != epoch; ++turn) {
    if (static_cast<uint32_t>(value >> 32) == BS_EP_ABORTED) {
      if (!bs_ep_takes_part(state)) return -1;
      int step = static_cast<int>(value >> 16 & 0xFF), rank = static_cast<int>(value & 0xFFFF);
      bs_ep_fail<RANKS>(frame, state, BS_EP_GAVE_UP, step, rank, epoch);  // passes the blame on
      return -1;
    }
    if (turn % BS_EP_TURNS == 0) {
      if (!bs_ep_takes_part(state)) return -1;
      uint64_t now = bs_ep_now();
      if (began == 0) began = now;
      if (now - began > static_cast<uint64_t>(frame[BS_EP_TIMEOUT])) {
        bs_ep_fail<RANKS>(frame, state, BS_EP_TIMED_OUT, STEP, from, epoch);
        return -1;
      }
      if (turn > 8 * BS_EP_TURNS) __nanosleep(200);  // it is late: others may have the memory
    }
    value = bs_ep_look(cell);
  }
  if (static_cast<int64_t>(value >> 16 & 0xFFFF) != frame[BS_EP_BOUND]) {
    bs_ep_fail<RANKS>(frame, state, BS_EP_OTHER_BOUND, STEP, from, epoch);
    return -1;
  }
  return static_cast<int>(value & 0xFFFF);
}

__shared__ int bs_ep_came[BS_EP_MAX_RANKS];  // tokens of each rank; of one that does not come, 0

// Whether all ranks' rows have come, for all threads of a CTA.
template <int RANKS, int STEP>
BS_INLINE bool bs_ep_all_arrived(const int64_t *frame, int *state) {
  int missing = 0;
  if (threadIdx.x < RANKS) {
    int tokens = bs_ep_wait<RANKS, STEP>(frame, state, threadIdx.x);
    bs_ep_came[threadIdx.x] = max(tokens, 0);
    missing = tokens < 0;
  }
  return __syncthreads_or(missing) == 0;
}

// After bs_ep_all_arrived: how many tokens a rank has.
BS_INLINE int bs_ep_tokens(int rank) { return bs_ep_came[rank]; }

// The next kernel may be launched once all CTAs have said so, or have ended: not while one waits for
// other ranks, as its CTAs would have the SMs meanwhile.
BS_INLINE void bs_let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Eight elements times a weight, added up: one rounding, as in bs_moe_combine.
template <class F>
BS_INLINE void bs_ep_add(float *sum, const void *from, float weight) {
  const uint32_t *w = static_cast<const uint32_t *>(from);
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    sum[2 * q] = __fmaf_rn(weight, F::lo(w[q]), sum[2 * q]);
    sum[2 * q + 1] = __fmaf_rn(weight, F::hi(w[q]), sum[2 * q + 1]);
  }
}
