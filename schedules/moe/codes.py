"""Schedules of the GEMMs of an MoE layer that multiply codes by codes.

They are those of `gemm.tcgen05`, or of `gemm.sync`.  By tcgen05, GEMM 2 may begin in GEMM 1's
launch: "blockscale.one_launch" on its loop over tiles.  It does where both multiply with as many
CTAs together, and neither divides K.
"""

from __future__ import annotations

from functools import partial

from tvm.s_tir import Schedule

from blockscale.schedules.gemm import sync, tcgen05
from blockscale.schedules.gemm.tcgen05_tiles import legal_tiles
from blockscale.schedules.steps import Choose, Sketch
from blockscale.specs import FusedMoe
from blockscale.specs.plans import PREFIX
from blockscale.specs.plans.gemm import GemmPlan
from blockscale.tir.moe.codes_tiles import rule

ONE_LAUNCH = f"{PREFIX}one_launch"
"""The annotation: 1, or 0."""


def sketches(spec: FusedMoe, part: int, slots: int, by_warps: bool) -> list[Sketch]:
    """Sketches of GEMM ``part`` for about ``slots`` rows of all experts, the default's first.

    ``by_warps``: MMAs are those of warps, mma.sync.
    """
    schedules = sync if by_warps else tcgen05
    if part == 1:
        sizes = spec.padded_rows, spec.padded_hidden, spec.experts, slots
        return schedules.gated_sketches(spec.product, rule(spec), *sizes)
    sizes = spec.hidden, spec.padded_intermediate, spec.experts, slots
    if by_warps:
        return sync.gemm_sketches(spec.product, spec.dtype, *sizes)
    found = legal_tiles(spec.product, spec.dtype, *sizes)
    return [partial(_second, tile=tile, slots=slots) for tile in found]


def _second(sch: Schedule, choose: Choose, tile: GemmPlan, slots: int) -> None:
    tiles = tcgen05.gemm(sch, choose, tile, slots)
    if tile.split_k == 1:
        sch.annotate(tiles, ONE_LAUNCH, choose(sch, [0, 1], 0))
