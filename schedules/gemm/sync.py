"""Schedules of block-scaled GEMMs for mma.sync (sm_120a, sm_121a), from those of `gemm.tcgen05`.

But operands go from shared memory to the registers of four warps, each with 32 rows of X, which
multiply; sums are there too ("local"), and go through shared memory to a row a thread, which the
epilogue takes as it takes one of tensor memory.  `blockscale.lower.sync` makes the kernel of it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from blockscale.base.formats import GEMM
from blockscale.base.sizes import ceil_div
from blockscale.schedules.gemm import tcgen05
from blockscale.schedules.steps import Choose, Sketch, last_loops
from blockscale.specs.plans import PREFIX
from blockscale.specs.plans.gemm import RASTERS
from blockscale.specs.plans.sync import WARP_ROWS, WARPS, SyncPlan
from blockscale.tir.intrin import sync, tma

STAGES = (2, 3, 4, 5, 6, 8, 10)
"""Depths of the ring that are tried."""

GROUPS = (1, 2, 4, 8, 16)
"""Tiles of the other index that share what the L2 cache holds."""

SWAP_ROWS = 128
"""Most rows (of an expert) with which a may be Y."""


def gemm_sketches(
    fmt: str, out_dtype: str, n: int, k: int, experts: int, rows: int
) -> list[Sketch]:
    """Sketches of `gemm_tiles` for about ``rows`` rows; ``experts``: 0 for a plain GEMM."""
    each = ceil_div(rows, experts) if experts else rows
    widths = [w for w in (32, 64, 128) if w >= min(each, 128)] if each <= SWAP_ROWS else []
    shapes = [(True, width) for width in widths]
    shapes += [(False, width) for width in (128, 64)] if each > 64 else []
    found = [
        _plan(fmt, out_dtype, n, k, experts, swap, width, block_k, cols, store)
        for swap, width in shapes
        for block_k in _depths(fmt)
        for store, cols in (("tma", 32), ("direct", 32))
    ]
    return [partial(gemm, plan=plan) for plan in found if plan.illegal() is None]


def gated_sketches(
    fmt: str, rule: tcgen05.Rule, n: int, k: int, experts: int, rows: int
) -> list[Sketch]:
    """Sketches of `gated_tiles`: a thread has a row of d, and whole blocks of it."""
    cols = 2 * rule.block
    found = [
        _plan(fmt, "uint8", n, k, experts, False, width, block_k, cols, "direct")
        for width in (128, 64)
        for block_k in _depths(fmt)
        if width > cols
    ]
    return [partial(gemm, plan=plan, rule=rule) for plan in found if plan.illegal() is None]


def _depths(fmt: str) -> tuple[int, ...]:
    return (128, 256) if GEMM[fmt].a.bits == 4 else (128,)


def _plan(
    fmt: str,
    out_dtype: str,
    n: int,
    k: int,
    experts: int,
    swap: bool,
    width: int,
    block_k: int,
    cols: int,
    store: str,
) -> SyncPlan:
    return SyncPlan(
        fmt, out_dtype, n, k, experts, swap, width, block_k, stages=2, epi_cols=cols, store=store,
        raster="x", group=1,
    )  # fmt: skip


def gemm(sch: Schedule, choose: Choose, plan: SyncPlan, rule: tcgen05.Rule | None = None) -> None:
    """Schedule the GEMM in the shape of ``plan``; depth and order of tiles are chosen."""
    tiles, stages = shape(sch, plan, rule)
    depths = [n for n in STAGES if replace(plan, stages=n).illegal() is None]
    sch.annotate(stages, f"{PREFIX}stages", choose(sch, depths, depths[-1]))
    sch.annotate(tiles, f"{PREFIX}raster", choose(sch, [0, 1], 0))
    sch.annotate(tiles, f"{PREFIX}group", choose(sch, list(GROUPS), 8))


def decided(sch: Schedule, plan: SyncPlan, rule: tcgen05.Rule | None = None) -> None:
    """Schedule the GEMM as ``plan`` says, with no choice left."""
    tiles, stages = shape(sch, plan, rule)
    sch.annotate(stages, f"{PREFIX}stages", plan.stages)
    sch.annotate(tiles, f"{PREFIX}raster", RASTERS.index(plan.raster))
    sch.annotate(tiles, f"{PREFIX}group", plan.group)


def shape(sch: Schedule, plan: SyncPlan, rule: tcgen05.Rule | None = None) -> tuple[LoopRV, LoopRV]:
    """Schedule all that names instructions; return the loops over tiles and over stages."""
    block = sch.get_sblock("gemm")
    copies = tcgen05.memories(sch, block, plan, sync.LOCAL)
    tiles, stages = tcgen05.tile_loops(sch, block, plan)
    reads = partial(_read, columns=plan.read_cols)
    if rule is None:
        tcgen05.epilogue(sch, tiles, plan, reads, tma.SMEM)
    else:
        tcgen05.act_epilogue(sch, tiles, plan, rule, reads, tma.SMEM)
    for side in "ab":
        tcgen05.load_operand(sch, copies[side], stages, plan, side)
    tcgen05.load_scales(sch, copies, stages, plan, sync.scales())
    *_, atom, step, row, col, element = sch.get_loops(block)
    x = col if plan.swap else row
    own, inner = sch.split(x, [WARPS, WARP_ROWS])
    sch.reorder(own, atom, step, *((row, inner) if plan.swap else (inner, col)), element)
    sch.bind(own, "threadIdx.y")
    sch.decompose_reduction(block, stages)
    product = last_loops(sch, block, 3)[0]
    instruction = sync.Mma(plan.fmt, plan.mma_n, plan.row_bytes, plan.swap)
    sch.tensorize(product, sync.mma(instruction), preserve_unit_iters=False)
    return tiles, stages


def _read(
    sch: Schedule, staged: SBlockRV | None, read: SBlockRV, warp: LoopRV, columns: int
) -> None:
    """Bring a part of the sums to shared memory, and a row of it to each thread.

    TVM takes shared memory to be for all warps: the part of each is staged outside of the loop over
    them.
    """
    assert staged is not None
    sch.compute_at(read, warp)
    chunk, _, row, column = last_loops(sch, read, 4)
    part, column = sch.split(column, [None, columns])
    sch.reorder(part, row, column)
    sch.tensorize(sch.blockize(row), sync.row_of(columns))
    sch.compute_at(staged, chunk)
    row, column = last_loops(sch, staged, 2)
    own, row = sch.split(row, [WARPS, WARP_ROWS])
    part, column = sch.split(column, [None, columns])
    sch.reorder(own, part, row, column)
    sch.bind(own, "threadIdx.y")
    sch.tensorize(sch.blockize(row), sync.stage(columns))
