// The order of an MoE layer's routed rows: a counting sort of expert ids by one CTA of 1024 threads,
// or, of many slots, by a cluster of `CTAS` of them.
//
// Slot t * top_k + j is the j-th choice of token t.  `order` lists the slots of valid ids (those from
// 0 to experts - 1) by expert.  Within an expert they come in a warp's shares, ascending; the order
// within 32 neighbours is that in which the hardware adds (no sum depends on it).
// A table cuts each expert's rows into blocks of at most `tokens`, as equal as multiples of 8 allow;
// an entry is {expert << 16 | rows, first row, index of the expert's first block, its blocks}.
// Instead of a table there may be `offsets`, where each expert's rows begin, and `atoms`, where their
// tiles of 128 rows do.
#pragma once
#include "cuda_launches.h"
#include "tma.cuh"

constexpr int BS_SORT_WARPS = BS_SORT_THREADS / 32;

struct BsMoeIds {
  const void *ids;
  int experts, wide;  // wide: int64, else int32

  // Expert of a slot; -1 where the id is none.
  BS_INLINE int at(int slot) const {
    uint32_t id = 0, high = 0;
    if (wide) {
      uint2 v = bs_load8<BS_KEEP>(static_cast<const uint2 *>(ids) + slot);
      id = v.x, high = v.y;
    } else {
      id = bs_load4<BS_KEEP>(static_cast<const uint32_t *>(ids) + slot);
    }
    return high == 0 && id < static_cast<uint32_t>(experts) ? static_cast<int>(id) : -1;
  }
};

struct BsMoeTable {
  int4 *blocks;  // null: there is no such table
  int *count;    // of blocks, then of rows
  int tokens;    // the most rows of a block, a multiple of 8

  BS_INLINE int blocks_of(int rows) const {
    return blocks == nullptr ? 0 : (rows + tokens - 1) / tokens;
  }

  // Entries `from`, from + step, ... of an expert whose `rows` rows begin at `start`.
  BS_INLINE void write(int expert, int rows, int start, int first, int from, int step) const {
    int made = blocks_of(rows);
    if (made == 0) return;
    int size = ((rows + made - 1) / made + 7) & ~7;
    for (int i = from; i < made; i += step) {
      int own = min(size, rows - i * size);
      blocks[first + i] = make_int4(expert << 16 | own, start + i * size, first, made);
    }
  }

  BS_INLINE void end(int made, int rows) const {
    if (blocks != nullptr) count[0] = made, count[1] = rows;
  }
};

struct BsMoeSort {
  BsMoeIds ids;
  int slots;
  int *order;
  BsMoeTable tables[2];
  int *offsets, *atoms;  // [experts + 1], [experts]; null: there are tables
};

// Three counters in a number: rows, blocks of both tables; each below 2^20.
BS_INLINE uint64_t bs_sort_pack(const BsMoeSort &s, int rows) {
  uint64_t first = s.tables[0].blocks_of(rows), second = s.tables[1].blocks_of(rows);
  if (s.offsets != nullptr) first = (rows + 127) / 128;
  return static_cast<uint64_t>(rows) | first << 20 | second << 40;
}

BS_INLINE int bs_sort_part(uint64_t counters, int i) {
  return static_cast<int>(counters >> (20 * i)) & 0xFFFFF;
}

// Up to 32 slots: each lane of a warp compares its own with all others.
BS_INLINE void bs_sort_warp(const BsMoeSort &s) {
  int lane = threadIdx.x;
  int expert = lane < s.slots ? s.ids.at(lane) : -1;
  uint32_t key = static_cast<uint32_t>(expert);  // no expert comes last
  int before = 0, same = 0, rank = 0;
  for (int i = 0; i < s.slots; ++i) {
    uint32_t other = __shfl_sync(~0u, key, i);
    before += other < key;
    same += other == key;
    rank += other == key && i < lane;
  }
  bool leads = expert >= 0 && rank == 0;
  uint64_t own = leads ? bs_sort_pack(s, same) : 0, start = 0, total = 0;
  for (int i = 0; i < s.slots; ++i) {
    uint64_t other = __shfl_sync(~0u, own, i);
    start += __shfl_sync(~0u, key, i) < key ? other : 0;
    total += other;
  }
  if (expert >= 0) s.order[before + rank] = lane;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (leads) s.tables[i].write(expert, same, before, bs_sort_part(start, i + 1), 0, 1);
    if (lane == 0) s.tables[i].end(bs_sort_part(total, i + 1), bs_sort_part(total, 0));
  }
  if (s.offsets == nullptr) return;
  for (int e = lane; e - lane <= s.ids.experts; e += 32) {
    int rows = 0, tiles = 0;
    for (int i = 0; i < s.slots; ++i) {
      bool less = __shfl_sync(~0u, key, i) < static_cast<uint32_t>(e);
      uint64_t other = __shfl_sync(~0u, own, i);
      rows += less;
      tiles += less ? bs_sort_part(other, 1) : 0;
    }
    if (e <= s.ids.experts) s.offsets[e] = rows;
    if (e < s.ids.experts) s.atoms[e] = tiles;
  }
}

// Sum of `value` over lanes up to this one.
BS_INLINE uint64_t bs_sort_scan(uint64_t value) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    uint64_t other = __shfl_up_sync(~0u, value, step);
    value += static_cast<int>(threadIdx.x % 32) >= step ? other : 0;
  }
  return value;
}

constexpr int BS_SORT_AHEAD = 16;  // ids of a thread that are on their way at a time

// Slots that CTAS CTAs sort: one, so few that a thread has few; a cluster, all of a pass.
template <int CTAS>
constexpr int BS_SORT_MOST = CTAS == 1 ? BS_SORT_SLOTS : BS_CHUNK * BS_MAX_TOP_K;

// Slots of a thread, whose ranks it holds, two in a register: whole loads ahead.
template <int CTAS>
constexpr int BS_SORT_HELD =
    (BS_SORT_MOST<CTAS> / (CTAS * BS_SORT_THREADS) + BS_SORT_AHEAD - 1) / BS_SORT_AHEAD *
    BS_SORT_AHEAD;

// Slots of a thread's warp: whole rounds of 32, the first of which is `from`.
template <int CTAS>
struct BsSortShare {
  int from, to;

  BS_INLINE explicit BsSortShare(int slots) {
    constexpr int THREADS = CTAS * BS_SORT_THREADS;
    int share = ((slots + THREADS - 1) / THREADS) * 32;
    int warp = static_cast<int>(threadIdx.x / 32);
    if constexpr (CTAS > 1) warp += static_cast<int>(bs_cluster_rank()) * BS_SORT_WARPS;
    from = warp * share, to = min(slots, from + share);
  }
  // Experts of rounds i0, i0 + 1, ...; -1 where there is none.
  BS_INLINE void load(const BsMoeSort &s, int i0, int *expert) const {
#pragma unroll
    for (int i = 0; i < BS_SORT_AHEAD; ++i) {
      int slot = at(i0 + i);
      expert[i] = slot < to ? s.ids.at(slot) : -1;
    }
  }
  BS_INLINE int at(int i) const { return from + 32 * i + static_cast<int>(threadIdx.x % 32); }
};

// Rows of an expert: of all CTAs, and of those before this one.
struct BsSortRows {
  int all, before;
};

// Sums of the cluster's `own` rows; `sums` [experts]: shared memory, which others read until
// bs_cluster_wait.
template <int CTAS>
BS_INLINE BsSortRows bs_sort_sum(int expert, int experts, int own, int *sums) {
  BsSortRows rows = {own, 0};
  if constexpr (CTAS > 1) {
    if (expert < experts) sums[expert] = own;
    bs_cluster_sync();
    int rank = static_cast<int>(bs_cluster_rank());
    if (expert < experts) {
      uint32_t other[CTAS];
#pragma unroll
      for (int i = 0; i < CTAS; ++i) {
        other[i] = bs_load4_cluster(bs_map_rank(bs_shared(sums + expert), i));
      }
      rows.all = 0;
#pragma unroll
      for (int i = 0; i < CTAS; ++i) {
        rows.all += static_cast<int>(other[i]);
        rows.before += i < rank ? static_cast<int>(other[i]) : 0;
      }
    }
    __syncwarp();
    bs_cluster_arrive();
  }
  return rows;
}

// Experts' starts and tables, a thread for an expert; `counts` of warps become their first rows.
// Each CTA writes the tables of every CTAS-th expert.
template <int CTAS>
BS_INLINE void bs_sort_starts(const BsMoeSort &s, int *counts, uint64_t *totals) {
  int expert = threadIdx.x, warp = expert / 32, lane = expert % 32, here = 0;
  if (expert < s.ids.experts) {
#pragma unroll 8
    for (int i = 0; i < BS_SORT_WARPS; ++i) here += counts[i * s.ids.experts + expert];
  }
  int *sums = counts + BS_SORT_WARPS * s.ids.experts;
  BsSortRows sum = bs_sort_sum<CTAS>(expert, s.ids.experts, here, sums);
  int rows = sum.all;
  uint64_t own = bs_sort_pack(s, rows), upto = bs_sort_scan(own);
  if (lane == 31) totals[warp] = upto;
  __syncthreads();
  uint64_t all = bs_sort_scan(totals[lane]);
  uint64_t start = upto - own, before = __shfl_sync(~0u, all, (warp + 31) % 32);
  start += warp > 0 ? before : 0;
  uint64_t total = __shfl_sync(~0u, all, 31);
  if (expert < s.ids.experts) {
    int next = bs_sort_part(start, 0) + sum.before;
#pragma unroll 8
    for (int i = 0; i < BS_SORT_WARPS; ++i) {
      int *at = counts + i * s.ids.experts + expert, taken = *at;
      *at = next;
      next += taken;
    }
  }
  int rank = 0;
  if constexpr (CTAS > 1) rank = static_cast<int>(bs_cluster_rank());
  bool writes = CTAS == 1 || expert % CTAS == rank;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    constexpr int FEW = 4;  // blocks that a thread writes alone
    int first = bs_sort_part(start, i + 1), made = writes ? bs_sort_part(own, i + 1) : 0;
    if (writes && made <= FEW) s.tables[i].write(expert, rows, bs_sort_part(start, 0), first, 0, 1);
    for (uint32_t many = __ballot_sync(~0u, made > FEW); many != 0; many &= many - 1) {
      int from = __ffs(many) - 1;
      int of = __shfl_sync(~0u, rows, from), at = __shfl_sync(~0u, first, from);
      int row = __shfl_sync(~0u, bs_sort_part(start, 0), from);
      s.tables[i].write(warp * 32 + from, of, row, at, lane, 32);
    }
    if (expert == 0 && writes) s.tables[i].end(bs_sort_part(total, i + 1), bs_sort_part(total, 0));
  }
  if (s.offsets == nullptr || !writes || expert >= s.ids.experts) return;
  s.offsets[expert] = bs_sort_part(start, 0);
  s.atoms[expert] = bs_sort_part(start, 1);
  if (expert == 0) s.offsets[s.ids.experts] = bs_sort_part(total, 0);
}

// Places slots by ranks that counting gave them.  `counts`: [warps][experts] and, of a cluster,
// [experts] more; `totals` [warps]: shared memory.
template <int CTAS>
BS_INLINE void bs_sort_ctas(const BsMoeSort &s, int *counts, uint64_t *totals) {
  constexpr int HELD = BS_SORT_HELD<CTAS>;
  int *own = counts + threadIdx.x / 32 * s.ids.experts;
  for (int i = threadIdx.x % 32; i < s.ids.experts; i += 32) own[i] = 0;
  __syncwarp();
  uint32_t ranks[HELD / 2];
  BsSortShare<CTAS> share(s.slots);
#pragma unroll
  for (int i0 = 0; i0 < HELD; i0 += BS_SORT_AHEAD) {
    if (share.from + 32 * i0 >= share.to) break;
    int expert[BS_SORT_AHEAD];
    share.load(s, i0, expert);
#pragma unroll
    for (int i = 0; i < BS_SORT_AHEAD; ++i) {
      uint32_t rank = expert[i] >= 0 ? atomicAdd(own + expert[i], 1) : 0;
      uint32_t &both = ranks[(i0 + i) / 2];
      both = i % 2 == 0 ? rank : both | rank << 16;
    }
  }
  __syncthreads();
  bs_sort_starts<CTAS>(s, counts, totals);
  __syncthreads();
#pragma unroll
  for (int i0 = 0; i0 < HELD; i0 += BS_SORT_AHEAD) {
    if (share.from + 32 * i0 >= share.to) break;
    int expert[BS_SORT_AHEAD];
    share.load(s, i0, expert);
#pragma unroll
    for (int i = 0; i < BS_SORT_AHEAD; ++i) {
      int rank = ranks[(i0 + i) / 2] >> (i % 2 * 16) & 0xFFFF;
      if (expert[i] >= 0) s.order[own[expert[i]] + rank] = share.at(i0 + i);
    }
  }
  if constexpr (CTAS > 1) bs_cluster_wait();  // others have read the own sums
}

// All threads of the CTA, or of the cluster; `shared` is aligned to 8.
template <int CTAS>
BS_INLINE void bs_moe_sort(const BsMoeSort &s, char *shared) {
  if (CTAS == 1 && s.slots <= 32) {
    if (threadIdx.x < 32) bs_sort_warp(s);
    return;
  }
  uint64_t *totals = reinterpret_cast<uint64_t *>(shared);
  bs_sort_ctas<CTAS>(s, reinterpret_cast<int *>(totals + BS_SORT_WARPS), totals);
}
