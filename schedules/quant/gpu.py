"""GPU schedules of quantise, dequantise and swizzle: what they move decides how fast they are.

A thread owns a block (a unit of eight elements where it dequantises) and loads those of all its
parts before it computes, so that many bytes are in flight.  Measured on an H200, quantising
8192 x 8192 bfloat16 to NVFP4: one block a thread 46.5 us, two of a thread 43.2 us, a copy of as
many bytes 42.4 us.
"""

from __future__ import annotations

from functools import partial

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ExprRV

from blockscale.schedules.gpu_steps import bind, in_registers, tensorize, tensorize_reduction
from blockscale.schedules.steps import Choose, Sketch
from blockscale.specs import Dequantize, Quantize, Swizzle, Unswizzle
from blockscale.tir.intrin.cuda import blocks as cuda_blocks
from blockscale.tir.quant.blocks_threads import LANES, UNIT
from blockscale.tir.quant.swizzle_threads import KINDS

WARPS = (2, 4, 8, 16)
"""Warps of a CTA; more leave too few CTAs on an SM to overlap loads with stores."""

PARTS = (1, 2, 4)
"""Blocks, or units, of a thread: their loads are in flight together."""


def quantize_sketches(spec: Quantize) -> list[Sketch]:
    """Sketches of `blocks_threads.quantize`: with default caching, and streaming."""
    orders = ("tiles", "rows") if spec.layout != "linear" else ("linear",)
    return [
        partial(quantize, spec=spec, hint=hint, order=order)
        for order in orders
        for hint in cuda_blocks.HINTS
    ]


def quantize(sch: Schedule, choose: Choose, spec: Quantize, hint: str, order: str) -> None:
    """A block a thread: load, scale, codes, store."""
    dtype = spec.dtype
    # Registers: a block is 8 of them as bfloat16, and 32 as MXFP4 in float32.
    parts = choose(sch, list(PARTS), 4 if order == "rows" else 2)
    warps = choose(sch, list(WARPS), 8)
    if order == "tiles":
        _bind_tile_order(sch, ("load", "codes"), parts, warps)
    else:
        _bind(sch, ("load", "codes"), parts, warps, order == "rows", clamped=True)
    in_registers(sch, "load", "amax", "scale", "divisor", "pack")
    tensorize(sch, "load", cuda_blocks.load(dtype, spec.block, hint))
    if not spec.given_amax:
        tensorize_reduction(sch, "amax", cuda_blocks.amax(dtype, spec.block))
    amax_dtype = "float32" if spec.given_amax else dtype
    tensorize_scalar(sch, "scale", cuda_blocks.scale_of(spec.fmt, spec.rounding, amax_dtype))
    tensorize_scalar(sch, "divisor", cuda_blocks.divisor_of(spec.fmt))
    tensorize(sch, "pack", cuda_blocks.encode(spec.fmt, dtype, not spec.given_amax))
    tensorize(sch, "store_codes", cuda_blocks.store("uint8", spec.block // 2, hint))


def dequantize_sketches(spec: Dequantize) -> list[Sketch]:
    """Sketches of `blocks_threads.dequantize`: streaming, and with default caching."""
    return [partial(dequantize, spec=spec, hint=hint) for hint in reversed(cuda_blocks.HINTS)]


def dequantize(sch: Schedule, choose: Choose, spec: Dequantize, hint: str) -> None:
    """Eight elements a thread: load codes and scale, decode, round, store."""
    swizzled = spec.layout != "linear"
    parts, warps = choose(sch, list(PARTS), 2), choose(sch, list(WARPS), 8)
    _bind(sch, ("fetch", "unit"), parts, warps, swizzled, clamped=False)
    in_registers(sch, "fetch", "fetch_scale", "block_scale", "decode")
    tensorize(sch, "fetch", cuda_blocks.load("uint8", UNIT // 2, hint))
    tensorize_scalar(sch, "block_scale", cuda_blocks.divisor_of(spec.fmt))
    tensorize(sch, "decode", cuda_blocks.decode(UNIT))
    tensorize(sch, "out", cuda_blocks.store_rounded(spec.dtype, UNIT, hint))


def tensorize_scalar(sch: Schedule, name: str, intrinsic: str) -> None:
    """Map block ``name``, which computes one number, onto ``intrinsic``."""
    block = sch.get_sblock(name)
    sch.blockize(sch.add_unit_loop(block))
    sch.tensorize(sch.add_unit_loop(block), intrinsic)


def _bind(
    sch: Schedule,
    nests: tuple[str, str],
    parts: ExprRV,
    warps: ExprRV,
    swizzled: bool,
    clamped: bool,
) -> None:
    """Bind the nest that loads and the one that computes to the same CTAs and threads.

    Linear scales: the parts of a thread are warps apart, so that a warp's loads are contiguous.
    The 128x4 layout: they are consecutive rows; rows take the x axis of the grid, which may have
    2^31 - 1 CTAs (the y axis 65535).

    ``clamped``: to the right of the grid the kernel itself loads what it may and stores nothing, so
    that TVM need not ask before every step whether a thread is within the grid.  Of quantise (NVFP4
    of bfloat16, any sizes; nvcc 13.0, sm_90a) that left 1544 of 1752 instructions and 52 of 79
    branches.
    """
    merged = []
    for name in nests:
        a, b = sch.get_loops(sch.get_sblock(name))[:2]
        if swizzled:
            rows, part = sch.split(a, [None, parts])
            group, warp, lane = sch.split(b, [None, warps, LANES], disable_predication=clamped)
            sch.reorder(rows, group, warp, lane, part)
        else:
            group, warp, part = sch.split(a, [None, warps, parts])
            lane = b
            sch.reorder(group, warp, lane, part)
        merged.append(lane)
    sch.merge(*merged)
    *outer, warp, lane = sch.get_loops(sch.get_sblock(nests[0]))[: 4 if swizzled else 3]
    bind(sch, outer, ("blockIdx.x", "blockIdx.y")[: len(outer)])
    bind(sch, [sch.fuse(warp, lane)], ["threadIdx.x"])
    for name in nests:
        sch.unroll(sch.get_loops(sch.get_sblock(name))[len(outer) + 1])


def _bind_tile_order(sch: Schedule, nests: tuple[str, str], parts: ExprRV, warps: ExprRV) -> None:
    """Bind both nests so that what a warp stores of scales lies together in the 128x4 layout.

    Its lanes are four blocks of the rows r, r + 1, r + 32, ... r + 97: scales are 32 bytes, a
    sector, where those of 32 blocks of a row would be eight pieces of four bytes.  The parts of a
    thread are the next pairs of rows, the next sectors; the warps beside it have the next columns.
    """
    merged = []
    for name in nests:
        row, block = sch.get_loops(sch.get_sblock(name))[:2]
        tile, quarter, pair, inner = sch.split(row, [None, 4, 16, 2])
        pair, part = sch.split(pair, [None, parts])
        group, warp, col = sch.split(block, [None, warps, 4], disable_predication=True)
        sch.reorder(tile, pair, group, warp, inner, quarter, col, part)
        merged.append(col)
    sch.merge(*merged)
    tile, pair, group, warp, *lanes = sch.get_loops(sch.get_sblock(nests[0]))[:7]
    bind(sch, [sch.fuse(tile, pair), group], ["blockIdx.x", "blockIdx.y"])
    bind(sch, [sch.fuse(warp, *lanes)], ["threadIdx.x"])
    for name in nests:
        sch.unroll(sch.get_loops(sch.get_sblock(name))[3])


def swizzle_sketches(spec: Swizzle | Unswizzle) -> list[Sketch]:
    """Sketches of `blockscale.tir.quant.swizzle_threads`: streaming, and with default caching."""
    reverse = isinstance(spec, Unswizzle)
    return [partial(swizzle, reverse=reverse, hint=hint) for hint in reversed(cuda_blocks.HINTS)]


def swizzle(sch: Schedule, choose: Choose, reverse: bool, hint: str) -> None:
    """Four rows a quarter of a tile apart for a thread, rows next to each other for a warp.

    In the 128x4 layout the 16 bytes of a thread and of the seven rows after it are a line; in the
    rows, those of eight groups of columns are.  A warp of eight rows and four groups touches whole
    lines of the layout, and the warps beside it in the CTA the rest of its lines in the rows.
    Measured on an H200 with a kernel in CUDA C++, unswizzling 229376 x 256: 2 rows a warp 33.7 us,
    4 rows 31.8 us, 8 rows 30.8 us, 16 rows 32.9 us, a copy 29.4 us.
    """
    lanes = choose(sch, [4, 8, 16], 4 if reverse else 8)
    rows = choose(sch, [8, 16], 8)
    across = choose(sch, [1, 2, 4], 4 if reverse else 1)  # at most 1024 threads
    for kind in KINDS:
        load, turn, store = (f"{kind}_{step}" for step in ("load", "turn", "store"))
        _bind_tiles(sch, load, rows, lanes, across)
        in_registers(sch, load, turn)
        quads = {load} if kind == "wide" or reverse else set()
        quads |= {store} if kind == "wide" or not reverse else set()
        for name in (load, turn, f"{kind}_row" if reverse else store):
            loops = sch.get_loops(sch.get_sblock(name))[3:]
            for loop in loops[: 1 if name in quads else 2]:
                sch.unroll(loop)
        if load in quads:
            tensorize(sch, load, cuda_blocks.load("uint32", 4, hint))
        if store in quads:
            tensorize(sch, store, cuda_blocks.store("uint32", 4, hint))
    if reverse:
        tile, row, col = sch.get_loops(sch.get_sblock("bytes"))
        group, thread = sch.split(col, [None, LANES])
        loops = (sch.fuse(tile, row), group, thread)
        bind(sch, loops, ("blockIdx.x", "blockIdx.y", "threadIdx.x"))
    else:
        _bind_tiles(sch, "bytes_load", rows, lanes, across)
        in_registers(sch, "bytes_load")
        sch.unroll(sch.get_loops(sch.get_sblock("bytes_load"))[3])
        tensorize(sch, "bytes_store", cuda_blocks.store("uint8", 16, hint))


def _bind_tiles(sch: Schedule, name: str, rows: ExprRV, lanes: ExprRV, across: ExprRV) -> None:
    """Bind the loops tile, row and group of columns of block ``name``.

    A CTA takes ``rows`` rows of a quarter of a tile and ``across`` times ``lanes`` groups of
    columns: first ``lanes`` groups of all its rows, then the next.
    """
    tile, row, col = sch.get_loops(sch.get_sblock(name))[:3]
    part, thread_row = sch.split(row, [None, rows])
    group, run, lane = sch.split(col, [None, across, lanes])
    sch.reorder(tile, part, group, run, thread_row, lane)
    loops = (sch.fuse(tile, part), group, sch.fuse(run, thread_row, lane))
    bind(sch, loops, ("blockIdx.x", "blockIdx.y", "threadIdx.x"))
