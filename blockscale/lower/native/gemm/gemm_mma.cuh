// The warp of a tcgen05 GEMM that multiplies: scales to tensor memory, MMAs, commits.
//
// tcgen05.cp and tcgen05.mma of one thread run in the order of issue (PTX ISA 9.7.16.6.2), so that
// the scales of the next stage may go to the same columns.
#pragma once
#include "gemm_load.cuh"

template <class P>
struct BsMma {
  using L = BsGemm<P>;
  static constexpr int X_FORMAT = P::KIND != BS_MXF8F6F4           ? BS_E2M1
                                  : (P::SWAP ? P::B_BITS : P::A_BITS) == 8 ? BS_E4M3
                                                                   : BS_E2M1_OF_8;
  static constexpr int Y_FORMAT = P::KIND != BS_MXF8F6F4           ? BS_E2M1
                                  : (P::SWAP ? P::A_BITS : P::B_BITS) == 8 ? BS_E4M3
                                                                   : BS_E2M1_OF_8;
  static constexpr int UE8M0 = P::KIND != BS_MXF4NVF4;
  static constexpr int ID_STEP = P::KIND == BS_MXF4 ? 2 : 1;  // scales of one MMA, in bytes

  static BS_INLINE void mma(uint32_t d, uint64_t x, uint64_t y, uint32_t idesc, uint32_t sfx,
                            uint32_t sfy, uint32_t more) {
    constexpr int G = P::G;
    if constexpr (P::KIND == BS_MXF4NVF4)
      bs_tcgen05_mma_mxf4nvf4<G>(d, x, y, idesc, sfx, sfy, more);
    else if constexpr (P::KIND == BS_MXF4) bs_tcgen05_mma_mxf4<G>(d, x, y, idesc, sfx, sfy, more);
    else bs_tcgen05_mma_mxf8f6f4<G>(d, x, y, idesc, sfx, sfy, more);
  }

  // Descriptor of a part of the shared memory at smem16 * 16, of BYTES a stage.
  template <int AT, int BYTES>
  static BS_INLINE uint64_t desc(uint64_t of_zero, uint32_t smem16, uint32_t stage) {
    return bs_desc_at(of_zero, smem16 + AT / 16 + stage * (BYTES / 16));
  }

  // STEPS MMAs of one stage; `d` is the accumulator, `sfy` the columns of Y's scales.
  template <int STEPS>
  static BS_INLINE void stage(uint32_t smem, uint32_t stage, uint32_t tmem, uint32_t d,
                              uint32_t sfy, uint32_t columns, uint32_t more) {
    constexpr int ATOMS = bs_ceil(STEPS, L::PER_ATOM);
    uint64_t rows = bs_matrix_desc<P::ROW_BYTES>(0), scales = bs_scale_desc(0);
    uint64_t x = desc<L::X, P::X_BYTES>(rows, smem / 16, stage);
    uint64_t y = desc<L::Y, P::Y_BYTES>(rows, smem / 16, stage);
    uint64_t sx = desc<L::SX, L::SX_BYTES>(scales, smem / 16, stage);
    uint64_t sy = desc<L::SY, L::SY_BYTES>(scales, smem / 16, stage);
#pragma unroll
    for (int k = 0; k < ATOMS; ++k) {
      bs_tcgen05_cp<P::G>(tmem + L::SFX + 4 * k, sx + 32 * k);
#pragma unroll
      for (int i = 0; i < P::Y_ATOMS; ++i)
        bs_tcgen05_cp<P::G>(tmem + L::SFY + 4 * (P::Y_ATOMS * k + i),
                            sy + 32 * (P::ATOMS_K * i + k));
    }
#pragma unroll
    for (int j = 0; j < STEPS; ++j) {
      int k = j / L::PER_ATOM, id = j % L::PER_ATOM * ID_STEP;
      uint32_t idesc = bs_instruction_desc(128 * P::G, 0, X_FORMAT, Y_FORMAT, UE8M0, id, id);
      mma(d, x + 2 * j, y + 2 * j, idesc | columns << 14, tmem + L::SFX + 4 * k,
          sfy + 4 * P::Y_ATOMS * k, j > 0 ? 1 : more);
    }
  }

  // An arrival at the barriers of CTAs in `mask`, one of them this.
  static BS_INLINE void commit(uint32_t bar, uint32_t mask) {
    if constexpr (L::CLUSTER / P::SPLIT > 1) bs_tcgen05_commit_multicast<P::G>(bar, mask);
    else bs_tcgen05_commit<P::G>(bar);
  }

  // Stages of a tile that are whole; one more where K ends within a stage.
  static constexpr int WHOLE = L::K_STAGES - (L::LAST_STEPS != L::STEPS);
  // How often the loop over K is unrolled: without a rest, where its length is known.
  static constexpr int UNROLL = P::SPLIT > 1 ? 2 : WHOLE % 4 == 0 ? 4 : WHOLE % 3 == 0 ? 3
                                                 : WHOLE % 2 == 0 ? 2 : 1;

  uint32_t smem, tmem, senders;
  bool issues;
  BsRing<P::STAGES> ring;

  // The next stage of the ring, when it is full; then those that load it may fill it again.
  template <int STEPS>
  BS_INLINE void take(uint32_t d, uint32_t sfy, uint32_t columns, uint32_t more) {
    bs_mbar_wait_from<P::G == 2 && L::UNPACK>(smem + L::FULL + 8 * ring.stage, ring.parity);
    bs_tcgen05_fence_after();
    if (issues) {
      stage<STEPS>(smem, ring.stage, tmem, d, sfy, columns, more);
      commit(smem + L::EMPTY + 8 * ring.stage, senders);
    }
    __syncwarp();
    ring.next();
  }
};

// The MMAs of all tiles, by a whole warp of the leader: its loops are uniform, and ptxas keeps
// descriptors in uniform registers; one thread issues.
template <class P>
BS_INLINE void bs_multiply_tiles(const BsCta<P> &cta, const BsTiles<P> &tiles, uint32_t tmem) {
  using L = BsGemm<P>;
  using M = BsMma<P>;
  // CTAs that load for this pair wait for it: those of its row and of its columns.
  uint32_t own = ((1u << P::G) - 1) << cta.rank, senders = ((1u << P::CX) - 1) << (cta.y * P::CX);
#pragma unroll
  for (int y = 0; y < P::CY; ++y) senders |= ((1u << P::G) - 1) << (y * P::CX + cta.x);
  M mma{cta.smem, tmem, senders, bs_elect(), {}};
  uint32_t number = 0;
  for (int t = blockIdx.x / L::CLUSTER; t < tiles.total; t += gridDim.x / L::CLUSTER, ++number) {
    BsTile tile = tiles.at(t);
    uint32_t columns = tiles.columns(tile), slot = number % P::ACC;
    uint32_t d = tmem + slot * (P::MMA_N - P::OVERLAP), sfy = tmem + L::SFY + tile.y_column;
    uint32_t free = cta.smem + L::FREE + 8 * (number % L::FREES);
    bs_mbar_wait_from<P::G == 2>(free, (number / L::FREES & 1) ^ 1);
    int first = bs_k_bound<P>(cta.split), last = bs_k_bound<P>(cta.split + 1);
#pragma unroll(M::UNROLL)
    for (int k = first; k < min(last, M::WHOLE); ++k)
      mma.template take<L::STEPS>(d, sfy, columns, k > first);
    if (M::WHOLE < L::K_STAGES && last == L::K_STAGES)
      mma.template take<L::LAST_STEPS>(d, sfy, columns, M::WHOLE > first);
    if (mma.issues) M::commit(cta.smem + L::DONE + 8 * slot, own);
    __syncwarp();
  }
}
