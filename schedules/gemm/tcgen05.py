"""Schedules of block-scaled GEMMs for tcgen05: tiles, memories, tensor intrinsics, annotations.

`blockscale.tir.gemm.tiles` becomes loops over tiles of d, within them one over stages of K: TMA
loads of both operands and their scales to shared memory, scales to tensor memory, MMAs into an
accumulator in tensor memory ("shared.tmem"); then the epilogue, some columns at a time, through
registers.  The CTAs of a pair are bound to "clusterCtaIdx.x", the epilogue's warps and lanes to
"threadIdx.y" and "threadIdx.x".  What loops cannot say is annotated: "blockscale.stages" and
"blockscale.split_k" on the loop over K, the cluster, the order of tiles and the accumulators on the
innermost loop over tiles.  `blockscale.lower.pipe` makes the kernel of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from blockscale.schedules.fused.gpu import act_steps, mxfp8_steps
from blockscale.schedules.gemm import tcgen05_tiles as sm100_tiles
from blockscale.schedules.gpu_steps import in_registers
from blockscale.schedules.steps import Choose, Sketch, last_loops
from blockscale.specs import ActQuantize
from blockscale.specs.plans import ONCE, PREFIX
from blockscale.specs.plans.gemm import K_LOOP, LANES, RASTERS, GemmPlan
from blockscale.specs.plans.sync import SyncPlan
from blockscale.tir.fused.mxfp8 import MxFp8Rule
from blockscale.tir.gemm.tiles import ATOM_BYTES
from blockscale.tir.intrin import tcgen05, tma

WARPS, WARP = 4, 32
"""Of the epilogue: each warp reads the lanes of tensor memory that are its own."""

PAIR = "clusterCtaIdx.x"
"""What the CTAs of a pair are bound to."""

Rule = ActQuantize | MxFp8Rule
"""How an epilogue quantises what it has activated."""

Reads = Callable[[Schedule, SBlockRV | None, SBlockRV, LoopRV], None]
"""How sums come to registers: blocks that stage and read them, and the loop over warps."""


def gemm_sketches(
    fmt: str, out_dtype: str, n: int, k: int, experts: int, rows: int
) -> list[Sketch]:
    """Sketches of `gemm_tiles` for about ``rows`` rows; ``experts``: 0 for a plain GEMM."""
    found = sm100_tiles.legal_tiles(fmt, out_dtype, n, k, experts, rows)
    return [partial(gemm, tile=tile, rows=rows) for tile in found]


def gated_sketches(fmt: str, rule: Rule, n: int, k: int, experts: int, rows: int) -> list[Sketch]:
    """Sketches of `gated_tiles` for about ``rows`` rows."""
    found = sm100_tiles.gated_tiles(fmt, rule.block, n, k, experts, rows)
    return [partial(gemm, tile=tile, rows=rows, rule=rule) for tile in found]


def gemm(
    sch: Schedule, choose: Choose, tile: GemmPlan, rows: int, rule: Rule | None = None
) -> LoopRV:
    """Schedule the GEMM in the shape of ``tile``; what it leaves open is chosen.

    Returns the innermost loop over tiles.
    """
    tiles, stages = shape(sch, tile, rule)
    open_ = sm100_tiles.options(tile, rows)
    for name, candidates in open_.candidates.items():
        value = choose(sch, list(candidates), open_.preferred[name])
        sch.annotate(stages if name in K_LOOP else tiles, PREFIX + name, value)
    return tiles


def decided(sch: Schedule, plan: GemmPlan, rule: Rule | None = None) -> None:
    """Schedule the GEMM as ``plan`` says, with no choice left."""
    tiles, stages = shape(sch, plan, rule)
    for name in ("stages", "split_k"):
        sch.annotate(stages, PREFIX + name, getattr(plan, name))
    for name in ("cluster_x", "cluster_y", "acc_stages", "group"):
        sch.annotate(tiles, PREFIX + name, getattr(plan, name))
    sch.annotate(tiles, PREFIX + "raster", RASTERS.index(plan.raster))


def shape(sch: Schedule, tile: GemmPlan, rule: Rule | None = None) -> tuple[LoopRV, LoopRV]:
    """Schedule all that names instructions; return the loops over tiles and over stages.

    ``rule``: of the epilogue of `gemm.gated_tiles`.
    """
    block = sch.get_sblock("gemm")
    copies = memories(sch, block, tile)
    tiles, stages = tile_loops(sch, block, tile)
    reads = partial(_read_accumulator, tile=tile)
    if rule is None:
        epilogue(sch, tiles, tile, reads)
    else:
        act_epilogue(sch, tiles, tile, rule, reads)
    for side in "ab":
        load_operand(sch, copies[side], stages, tile, side)
    load_scales(sch, copies, stages, tile, tcgen05.scale_copy(tile.cta_group))
    sch.decompose_reduction(block, stages)
    inner = last_loops(sch, block, 3)[0]
    instruction = tcgen05.Mma(tile.fmt, tile.mma_m, tile.mma_n, tile.row_bytes, tile.swap)
    sch.tensorize(inner, tcgen05.mma(instruction), preserve_unit_iters=False)
    return tiles, stages


def memories(
    sch: Schedule, block: SBlockRV, tile: GemmPlan | SyncPlan, sums: str = tma.TMEM
) -> dict[str, SBlockRV]:
    """Give every buffer its memory; return the copies to shared memory and tensor memory.

    ``sums``: the memory of the accumulator and of the scales that MMAs read.
    """
    copies = {"a": sch.cache_read(block, 0, tma.SMEM)}
    for side in "ab":
        lanes = copies[f"{side}_scale_lanes"] = sch.get_sblock(f"{side}_scale_lanes")
        if side == "b" and tile.experts:
            copies["b"] = sch.get_sblock("b_of_expert")
            copies["b_scale"] = sch.get_sblock("b_scale_of_expert")
            for name in ("b", "b_scale"):
                sch.set_scope(copies[name], 0, tma.SMEM)
        else:
            copies[f"{side}_scale"] = sch.cache_read(lanes, 0, tma.SMEM)
        sch.set_scope(lanes, 0, sums)
    if not tile.experts:
        copies["b"] = sch.cache_read(block, 2, tma.SMEM)
    sch.set_scope(block, 0, sums)
    if tile.swap:  # lanes of the accumulator are columns of d
        sch.transform_layout(block, ("write", 0), lambda t, i, j: (t, j, i))
    return copies


def tile_loops(sch: Schedule, block: SBlockRV, tile: GemmPlan | SyncPlan) -> tuple[LoopRV, LoopRV]:
    """Split into tiles, stages and instructions.

    Return the innermost loop over tiles, and that over stages.
    """
    group, row, col, atom, element = sch.get_loops(block)
    row_tile, row_in = sch.split(row, [None, tile.tile_rows])
    col_tile, col_in = sch.split(col, [None, tile.tile_cols])
    stage, atom_in = sch.split(atom, [None, tile.atoms_k])
    step, element_in = sch.split(element, [None, tile.format.step])
    sch.reorder(group, row_tile, col_tile, stage, atom_in, step, row_in, col_in, element_in)
    return col_tile, stage


def epilogue(
    sch: Schedule, tiles: LoopRV, tile: GemmPlan | SyncPlan, reads: Reads, sums: str = ""
) -> None:
    """Read some columns of the accumulator to registers, scale and round them, store them.

    128 lanes at a time, as a CTA has them; of a pair each CTA stores its own.  A warp stores what
    it has read.  ``reads``: how; ``sums``: a memory that sums go through, if any.
    """
    block = sch.get_sblock("epilogue")
    staged = sch.cache_read(block, 0, sums) if sums else None
    read = sch.cache_read(block, 0, "local")
    store = sch.cache_write(block, 0, tma.SMEM) if tile.store == "tma" else None
    for moved in (staged, read, block, store):
        if moved is not None:
            sch.reverse_compute_at(moved, tiles)
    warp = _parts(sch, block, tile, tile.epi_cols)
    reads(sch, staged, read, warp)
    if store is not None:
        sch.reverse_compute_at(store, warp)
        rows, cols = (tile.epi_cols, WARP) if tile.swap else (WARP, tile.epi_cols)
        row = last_loops(sch, store, 2)[0]
        sch.tensorize(sch.blockize(row), tma.store(rows, cols, tile.out_dtype))


def act_epilogue(
    sch: Schedule,
    tiles: LoopRV,
    tile: GemmPlan | SyncPlan,
    rule: Rule,
    reads: Reads,
    sums: str = "",
) -> None:
    """Read gates and ups to registers; activate, quantise and store them there; see `epilogue`."""
    block = sch.get_sblock("epilogue")
    staged = sch.cache_read(block, 0, sums) if sums else None
    read = sch.cache_read(block, 0, "local")
    for moved in (staged, read, block):
        if moved is not None:
            sch.reverse_compute_at(moved, tiles)
    reads(sch, staged, read, _parts(sch, block, tile, tile.epi_cols // (2 * rule.block)))
    in_registers(sch, "gate", "up")
    if not rule.gated:  # the activation is of float32 sums, and no intrinsic
        in_registers(sch, "value")
    if isinstance(rule, MxFp8Rule):
        mxfp8_steps(sch, rule)
    else:
        in_registers(sch, "own_scale")
        act_steps(sch, rule, held=True)


def _parts(sch: Schedule, block: SBlockRV, tile: GemmPlan | SyncPlan, columns: int) -> LoopRV:
    """Divide a tile among CTAs, warps and lanes, ``columns`` at a time; return the warps' loop."""
    lanes, along = last_loops(sch, block, 2)[:: -1 if tile.swap else 1]
    cta, warp, lane = sch.split(lanes, [None, WARPS, WARP])
    chunk, column = sch.split(along, [None, columns])
    sch.reorder(cta, chunk, warp, lane, column)
    sch.bind(cta, PAIR)
    sch.bind(warp, "threadIdx.y")
    sch.bind(lane, "threadIdx.x")
    return warp


def _read_accumulator(
    sch: Schedule, staged: SBlockRV | None, read: SBlockRV, warp: LoopRV, tile: GemmPlan
) -> None:
    """Read a part of the accumulator by the warps that store it."""
    assert staged is None
    sch.compute_at(read, warp)
    # With rows of a on columns, an MMA writes multiples of 16 of them.
    width = tcgen05.READ_COLUMNS[0] if tile.swap else min(tile.epi_cols, tcgen05.READ_COLUMNS[-1])
    lane, columns = last_loops(sch, read, 2)
    part, column = sch.split(columns, [None, width])
    sch.reorder(part, lane, column)
    sch.tensorize(sch.blockize(lane), tcgen05.read_accumulator(width))


def load_scales(
    sch: Schedule,
    copies: dict[str, SBlockRV],
    stages: LoopRV,
    tile: GemmPlan | SyncPlan,
    copied: str,
) -> None:
    """Load and copy whole 128x4 tiles of scales, by ``copied``: those that a stage's rows touch.

    TVM cannot prove that they hold what tiles of 192 rows read, and then moves no more blocks:
    all of them move after all is tensorized, at the end.
    """
    moved = []
    for side in "ab":
        lanes = sch.blockize(last_loops(sch, copies[f"{side}_scale_lanes"], 2)[0])
        sch.tensorize(lanes, copied)
        _, atom = sch.split(last_loops(sch, copies[f"{side}_scale"], 1)[0], [None, ATOM_BYTES])
        load = sch.blockize(atom)
        expert = side == "b" and tile.experts > 0
        sch.tensorize(load, tma.load_scales(tile.cta_group, expert))
        moved += [lanes, load]
    for block in (*moved[::2], *moved[1::2]):
        sch.compute_at(block, stages)
    if tile.cta_group > 1:  # each CTA of a pair has the scales of its own rows of X
        lanes, load = moved[2 * tile.swap : 2 * tile.swap + 2]
        depth = len(sch.get_loops(sch.get_sblock("gemm"))) - 5
        sch.bind(sch.get_loops(lanes)[-1], PAIR)
        sch.bind(sch.get_loops(load)[depth], PAIR)


def load_operand(
    sch: Schedule, copy: SBlockRV, stages: LoopRV, tile: GemmPlan | SyncPlan, side: str
) -> None:
    """Load a stage of an operand: of a pair each CTA half of the rows."""
    sch.compute_at(copy, stages)
    row, _ = last_loops(sch, copy, 2)
    is_x = (side == "b") == tile.swap
    rows = LANES if is_x else tile.mma_n // tile.cta_group
    cta, row_in = sch.split(row, [None, rows])
    sch.bind(cta, PAIR)
    bits = tile.format.a.bits if side == "a" else tile.format.b.bits
    loaded = tma.load(
        rows,
        tile.block_k * bits // 8,
        tile.row_bytes,
        tile.cta_group,
        expert=side == "b" and tile.experts > 0,
    )
    outer = sch.blockize(row_in)
    sch.tensorize(outer, loaded)
    if is_x and tile.swap:
        sch.annotate(outer, ONCE, 1)
