"""Schedules of an MoE layer's grouped GEMMs for Hopper: tiles, memories, tensor intrinsics.

`blockscale.tir.moe.tiles` becomes loops over tiles of out (padded tiles of an expert's slots, in
these of tokens, in these of rows), within them one over stages of K: bulk copies of codes and
scales and copies of rows of x to shared memory; then, 16 or 64 rows at a time, codes become
fragments in registers that tensor cores multiply, by mma.sync or wgmma.  Slices of a stage's K
have sums of their own, of other warps, which are added up.  The ring's depth is annotated:
"blockscale.stages" on the loop over K.  `blockscale.lower.moe.read` reads all of it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from blockscale.base.targets import GPU_TARGETS
from blockscale.schedules.moe import wgmma_tiles as sm90_tiles
from blockscale.schedules.steps import Choose, Sketch, last_loops
from blockscale.specs.plans import PREFIX
from blockscale.specs.plans.moe import MoeGemm, MoePlan
from blockscale.tir.intrin import fragments, hopper
from blockscale.tir.moe.tiles import WORDS

STEP = 16
"""K of an MMA of 16-bit numbers."""


def moe_sketches(gemm: MoeGemm, tokens: int, level: str = "sm_90a") -> list[Sketch]:
    """Sketches of `moe_tiles` for about ``tokens`` tokens, the default's first."""
    arch = GPU_TARGETS[level]
    found = sm90_tiles.legal_tiles(gemm, tokens, arch)
    return [
        partial(moe_gemm, gemm=gemm, tile=tile, depths=sm90_tiles.depths(tile, arch))
        for tile in found
    ]


def moe_gemm(
    sch: Schedule, choose: Choose, gemm: MoeGemm, tile: MoePlan, depths: Sequence[int]
) -> None:
    """Schedule the GEMM in the shape of ``tile``; of ``depths`` its ring's is chosen."""
    product = _product(sch, tile)
    for name in ("weights", "scales", "tokens"):
        sch.set_scope(sch.get_sblock(name), 0, fragments.SMEM)
    for name in ("decode", "scaled"):
        sch.set_scope(sch.get_sblock(name), 0, fragments.LOCAL)
    tiles = _tiles(sch, tile)
    sums = [product] if tile.slices == 1 else [sch.get_sblock("gemm"), product]
    for block in (sch.get_sblock("scaled"), *sums):
        sch.compute_at(block, tiles, preserve_unit_loops=True)
    stages, rows = _stages(sch, product, tile)
    sch.compute_at(sch.get_sblock("decode"), rows, preserve_unit_loops=True)
    for name in ("tokens", "scales", "weights"):
        sch.compute_at(sch.get_sblock(name), stages, preserve_unit_loops=True)
    _tensorize_loads(sch, gemm, tile)
    _tensorize_product(sch, product, stages, gemm, tile)
    sch.annotate(stages, f"{PREFIX}stages", choose(sch, list(depths), depths[0]))


def _product(sch: Schedule, tile: MoePlan) -> SBlockRV:
    """Return the block that multiplies: with slices, one with sums of each slice."""
    block = sch.get_sblock("gemm")
    sch.set_scope(block, 0, fragments.LOCAL)
    if tile.slices == 1:
        return block
    *_, depth, _ = sch.get_loops(block)
    _, part, _ = sch.split(depth, [None, tile.slices, tile.blocks_k // tile.slices])
    own = sch.rfactor(part, 0)
    sch.set_scope(own, 0, fragments.LOCAL)
    return own


def _tiles(sch: Schedule, tile: MoePlan) -> LoopRV:
    """Split what is stored into tiles, of an expert's slots and of rows; return the last loop."""
    block = sch.get_sblock("epilogue")
    group, slot, row = list(sch.get_loops(block))[:3]
    slot_tile, slot_in = sch.split(slot, [None, tile.tokens])
    # Rows of GEMM 1 are tiles of 16 and positions in them.
    row_tile, row_in = sch.split(row, [None, tile.rows // 16 if tile.gather else tile.rows])
    sch.reorder(group, slot_tile, row_tile, slot_in, row_in)
    return row_tile


def _stages(sch: Schedule, product: SBlockRV, tile: MoePlan) -> tuple[LoopRV, LoopRV]:
    """Split into stages, slices, blocks of 64 k and instructions.

    Returns the loop over stages and the one over rows of an instruction.
    """
    high, wide = (64, tile.tokens) if tile.unit == "wgmma" else (16, 8)
    if tile.slices > 1:
        part, unit, slot, row, stage, inner, position = last_loops(sch, product, 7)
    else:
        unit, slot, row, depth, position = last_loops(sch, product, 5)
        stage, part, inner = sch.split(depth, [None, 1, tile.blocks_k])
    slot_mma, slot_in = sch.split(slot, [None, wide])
    row_mma, row_in = sch.split(row, [None, high])
    step, element = sch.split(position, [None, STEP])
    inside = (part, inner, row_mma, step, slot_mma, slot_in, row_in, element)
    sch.reorder(unit, stage, *inside)
    return sch.fuse(unit, stage), row_mma


def _tensorize_loads(sch: Schedule, gemm: MoeGemm, tile: MoePlan) -> None:
    """Map the copies onto bulk copies and cp.async, what is decoded onto its instructions."""
    sixteens = min(4, tile.rows // 16)
    for name, count, dtype in (
        ("weights", WORDS, "uint32"),
        ("scales", gemm.scales, gemm.scale_dtype),
    ):
        deep = last_loops(sch, sch.get_sblock(name), 2)[0]
        blocks = int(sch.get(deep).extent) if sixteens == 4 else 1  # what is contiguous
        _, deep = sch.split(deep, [None, blocks])
        first = deep if blocks > 1 else last_loops(sch, sch.get_sblock(name), 1)[0]
        bulk = hopper.bulk_copy(blocks, sixteens * count, dtype)
        sch.tensorize(sch.blockize(first), bulk)
    tokens = sch.get_sblock("tokens")
    copied = sch.blockize(last_loops(sch, tokens, 1)[0])
    sch.tensorize(copied, hopper.row_copy(gemm.dtype, gemm.gather))
    row, position = last_loops(sch, sch.get_sblock("decode"), 2)
    sixteen, row_in = sch.split(row, [None, 16])
    sch.reorder(sixteen, row_in, position)
    decoded = hopper.decode(gemm.fmt, gemm.group, gemm.zeros, gemm.dtype)
    sch.tensorize(sch.blockize(row_in), decoded)


def _tensorize_product(
    sch: Schedule, product: SBlockRV, stages: LoopRV, gemm: MoeGemm, tile: MoePlan
) -> None:
    """Map the innermost loops onto the MMA."""
    sch.decompose_reduction(product, stages)
    block = sch.blockize(last_loops(sch, product, 3)[0], preserve_unit_iters=False)
    wide = tile.unit == "wgmma"
    sch.tensorize(block, hopper.wgmma(tile.tokens, gemm.dtype) if wide else hopper.mma(gemm.dtype))
