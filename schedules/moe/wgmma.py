"""Schedules of an MoE layer's grouped GEMMs on Hopper: tiles, memories, tensor intrinsics.

`blockscale.tir.moe.tiles` becomes loops over tiles of out (padded tiles of an expert's slots, in
these tiles of rows, in these of tokens: weights come once from memory), within them one over
stages of K: bulk copies of codes and scales and copies of rows of x to shared memory; then each
warp decodes its tiles of 16 rows into registers and multiplies, by mma.sync or wgmma
(`schedules.gemm.warps`).  The ring's depth is annotated: "blockscale.stages" on the loop over K;
and there "blockscale.partial": of operands of 8 bits, how many channels' products are summed up by
themselves before they are added to the tile's.  `blockscale.lower.warp` makes the kernel of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from blockscale.base.targets import GPU_TARGETS
from blockscale.schedules.gemm import warps
from blockscale.schedules.moe import wgmma_tiles as sm90_tiles
from blockscale.schedules.steps import Choose, Sketch
from blockscale.specs.plans import PREFIX
from blockscale.specs.plans.moe import MoeGemm, MoeTile


def moe_sketches(gemm: MoeGemm, tokens: int, level: str = "sm_90a") -> list[Sketch]:
    """Sketches of `moe_tiles` for about ``tokens`` tokens, the default's first."""
    arch = GPU_TARGETS[level]
    return [
        partial(moe_gemm, gemm=gemm, tile=tile, depths=sm90_tiles.depths(gemm, tile, arch))
        for tile in sm90_tiles.legal_tiles(gemm, tokens, arch)
    ]


def moe_gemm(
    sch: Schedule, choose: Choose, gemm: MoeGemm, tile: MoeTile, depths: Sequence[int]
) -> None:
    """Schedule the GEMM in the shape of ``tile``; of ``depths`` its ring's is chosen."""
    k_loop = shape(sch, gemm, tile)
    sch.annotate(k_loop, f"{PREFIX}stages", choose(sch, list(depths), depths[0]))


def decided(sch: Schedule, gemm: MoeGemm, tile: MoeTile, stages: int) -> None:
    """Schedule the GEMM with no choice left."""
    sch.annotate(shape(sch, gemm, tile), f"{PREFIX}stages", stages)


def shape(sch: Schedule, gemm: MoeGemm, tile: MoeTile) -> LoopRV:
    """Schedule all that names instructions; return the loop over stages."""
    weight = warps.Weight(gemm.fmt, gemm.group, gemm.zeros, gemm.multiplied)
    k_loop = warps.by_rows(sch, weight, tile, gathered=gemm.gather, order=gemm.order)
    if tile.partial and not weight.scaled_sums:  # groups' sums are blocks of their own
        sch.annotate(k_loop, f"{PREFIX}partial", tile.partial)
    return k_loop
