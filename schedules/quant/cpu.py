"""CPU schedules of the memory-bound ops: quantise, dequantise, swizzle, scale sweep.

Rows and tiles of blocks are one parallel loop; within a tile the block scales are one vector and
every block's elements another.  The sweep has one block a lane.
"""

from __future__ import annotations

from functools import partial

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from blockscale.schedules.steps import Choose, Sketch, last_loops, vectorize_last
from blockscale.specs import Dequantize, Quantize, ScaleSweep
from blockscale.tir.intrin.x86 import rows as x86_rows
from blockscale.tir.intrin.x86 import width as x86


def quantize_sketches(spec: Quantize, level: str, tile: int) -> list[Sketch]:
    """Sketches of `blockscale.tir.quant.quantize`."""
    return [partial(quantize, spec=spec, tile=tile)]


def quantize(sch: Schedule, choose: Choose, spec: Quantize, tile: int) -> None:
    """A tile of blocks at a time: maxima, one vector of scales, then codes block by block."""
    scale, divisor, code, pack, store, amax = (
        sch.get_sblock(name) for name in ("scale", "divisor", "code", "pack", "store_scale", "amax")
    )
    rows, tiles, _ = sch.get_loops(scale)
    task = sch.fuse(rows, tiles)
    sch.parallel(task)
    linear = spec.layout == "linear"
    for block in (divisor, code, *([store] if linear else [])):
        sch.reverse_compute_at(block, task, preserve_unit_loops=True)
    block_loop = last_loops(sch, code, 2)[0]
    codes = sch.get_sblock("store_codes")
    for block in (pack, codes):
        sch.reverse_compute_at(block, block_loop, preserve_unit_loops=True)
    sch.vectorize(last_loops(sch, codes, 1)[0])
    _unroll_blocks(sch, choose, block_loop, tile)
    sch.compute_at(amax, task, preserve_unit_loops=True)
    for block in (divisor, scale):
        vectorize_last(sch, block, tile, tile)
    vectorize_last(sch, code, spec.block, spec.block)
    sch.tensorize(last_loops(sch, pack, 1)[0], x86_rows.pack_row(spec.block))
    if not spec.given_amax:
        magnitude = sch.get_sblock("magnitude")
        sch.compute_at(magnitude, last_loops(sch, amax, 2)[0], preserve_unit_loops=True)
        vectorize_last(sch, magnitude, spec.block, spec.block)
        element = last_loops(sch, amax, 1)[0]
        sch.decompose_reduction(amax, element)
        sch.tensorize(element, x86_rows.lane_max(spec.block))


def dequantize_sketches(spec: Dequantize, level: str, tile: int) -> list[Sketch]:
    """Sketches of `blockscale.tir.quant.dequantize`."""
    return [partial(dequantize, spec=spec, width=x86.WIDTHS[level], tile=tile)]


def dequantize(
    sch: Schedule, choose: Choose, spec: Dequantize, width: x86.Width, tile: int
) -> None:
    """A tile of blocks at a time: one vector of scales, then weights block by block."""
    out, decode, scale = (sch.get_sblock(name) for name in ("out", "decode", "block_scale"))
    rows, tiles, block, _ = sch.get_loops(out)
    task = sch.fuse(rows, tiles)
    sch.parallel(task)
    fetch = sch.get_sblock("fetch")
    for producer in (decode, fetch):
        sch.compute_at(producer, block, preserve_unit_loops=True)
    sch.vectorize(last_loops(sch, fetch, 1)[0])
    sch.compute_at(scale, task, preserve_unit_loops=True)
    _unroll_blocks(sch, choose, block, tile)
    element = last_loops(sch, decode, 1)[0]
    _, lane = sch.split(element, [None, width.lanes])
    sch.tensorize(lane, x86_rows.decode_row(width.level, "float32"))
    vectorize_last(sch, out, spec.block, spec.block)
    if spec.layout == "linear":
        vectorize_last(sch, scale, tile, tile)


def _unroll_blocks(sch: Schedule, choose: Choose, loop: LoopRV, tile: int) -> None:
    """Unroll some blocks of a tile: their instructions overlap."""
    factors = [factor for factor in (1, 2, 4, 8, 16) if factor <= tile]
    _, inner = sch.split(loop, [None, choose(sch, factors, 2)])
    sch.unroll(inner)


def scale_sweep_sketches(spec: ScaleSweep, level: str) -> list[Sketch]:
    """Sketches of `blockscale.tir.quant.scale_sweep`."""
    return [partial(scale_sweep, spec=spec)]


def scale_sweep(sch: Schedule, choose: Choose, spec: ScaleSweep) -> None:
    """One block a lane; a tile's weights stay in registers or the L1 cache for all candidates."""
    result, best, loss = (sch.get_sblock(name) for name in ("best_amax", "best", "loss"))
    task, _ = sch.get_loops(result)
    sch.parallel(task)
    sch.compute_at(best, task, preserve_unit_loops=True)
    candidate = last_loops(sch, best, 2)[0]
    sch.compute_at(loss, candidate, preserve_unit_loops=True)
    weight = sch.get_sblock("weight")
    sch.compute_at(weight, task, preserve_unit_loops=True)
    sch.vectorize(last_loops(sch, loss, 1)[0])
    sch.vectorize(last_loops(sch, best, 1)[0])
    element, _ = last_loops(sch, loss, 2)
    if spec.block_size <= UNROLLED_BLOCK:
        sch.unroll(element)
    init = sch.decompose_reduction(loss, element)
    sch.vectorize(last_loops(sch, init, 1)[0])
    init = sch.decompose_reduction(best, candidate)
    sch.vectorize(last_loops(sch, init, 1)[0])


UNROLLED_BLOCK = 16
"""Largest block whose weights are kept in registers during the sweep: one vector per element."""


def swizzle_sketches() -> list[Sketch]:
    """Sketches of `blockscale.tir.quant.swizzle`: rows in parallel, four bytes at a time."""
    return [swizzle]


def swizzle(sch: Schedule, choose: Choose) -> None:
    """Rows in parallel, groups of four bytes as vectors."""
    groups, rest = sch.get_sblock("groups"), sch.get_sblock("rest")
    sch.vectorize(last_loops(sch, groups, 1)[0])
    for block in (groups, rest):
        sch.parallel(sch.get_loops(block)[0])
