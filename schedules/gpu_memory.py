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

from blockscale.schedules._gpu_steps import (
    bind,
    in_registers,
    tensorize,
    tensorize_reduction,
)
from blockscale.schedules._steps import Choose, Sketch
from blockscale.specs import Dequantize, Quantize
from blockscale.tir.gpu_blocks import LANES, UNIT
from blockscale.tir.intrin import cuda_blocks

THREADS = (64, 128, 256, 512)
"""Threads of a CTA; more leave too few CTAs on an SM to overlap loads with stores."""

PARTS = (1, 2, 4)
"""Blocks, or units, of a thread: their loads are in flight together."""


def quantize_sketches(spec: Quantize) -> list[Sketch]:
    """Sketches of `blockscale.tir.gpu_blocks.quantize`: with default caching, and streaming."""
    return [partial(quantize, spec=spec, hint=hint) for hint in cuda_blocks.HINTS]


def quantize(sch: Schedule, choose: Choose, spec: Quantize, hint: str) -> None:
    """A block a thread: load, scale, codes, store."""
    swizzled, dtype = spec.layout != "linear", spec.dtype
    # Registers: a block is 8 of them as bfloat16, and 32 as MXFP4 in float32.
    parts = choose(sch, list(PARTS), 4 if swizzled else 2)
    threads = choose(sch, list(THREADS), 256)
    _bind(sch, ("load", "store_codes"), parts, threads, swizzled)
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
    """Sketches of `blockscale.tir.gpu_blocks.dequantize`: streaming, and with default caching."""
    return [partial(dequantize, spec=spec, hint=hint) for hint in reversed(cuda_blocks.HINTS)]


def dequantize(sch: Schedule, choose: Choose, spec: Dequantize, hint: str) -> None:
    """Eight elements a thread: load codes and scale, decode, round, store."""
    swizzled = spec.layout != "linear"
    parts, threads = choose(sch, list(PARTS), 2), choose(sch, list(THREADS), 256)
    _bind(sch, ("fetch", "out"), parts, threads, swizzled)
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
    sch: Schedule, nests: tuple[str, str], parts: ExprRV, threads: ExprRV, swizzled: bool
) -> None:
    """Bind the nest that loads and the one that computes to the same CTAs and threads.

    Linear scales: the parts of a thread are warps apart, so that a warp's loads are contiguous.
    The 128x4 layout: they are consecutive rows; rows take the x axis of the grid, which may have
    2^31 - 1 CTAs (the y axis 65535).
    """
    merged = []
    for name in nests:
        a, b = sch.get_loops(sch.get_sblock(name))[:2]
        if swizzled:
            rows, part = sch.split(a, [None, parts])
            group, thread = sch.split(b, [None, threads])
            sch.reorder(rows, group, thread, part)
        else:
            cta, warp, part = sch.split(a, [None, sch_div(threads), parts])
            sch.reorder(cta, warp, b, part)
            thread = b
        merged.append(thread)
    sch.merge(*merged)
    outer, middle, inner = sch.get_loops(sch.get_sblock(nests[0]))[:3]
    if swizzled:
        bind(sch, (outer, middle, inner), ("blockIdx.x", "blockIdx.y", "threadIdx.x"))
    else:
        bind(sch, (outer, sch.fuse(middle, inner)), ("blockIdx.x", "threadIdx.x"))
    for name in nests:
        depth = 3 if swizzled else 2
        sch.unroll(sch.get_loops(sch.get_sblock(name))[depth])


def sch_div(threads: ExprRV) -> ExprRV:
    return threads // LANES


def swizzle_sketches(spec: Swizzle | Unswizzle) -> list[Sketch]:
    """Sketches of `blockscale.tir.gpu_swizzle`: streaming, and with default caching."""
    reverse = isinstance(spec, Unswizzle)
    return [partial(swizzle, reverse=reverse, hint=hint) for hint in reversed(cuda_blocks.HINTS)]


def swizzle(sch: Schedule, choose: Choose, reverse: bool, hint: str) -> None:
    """Four rows and a few columns a thread; a warp takes some rows next to each other."""
    rows = choose(sch, [2, 4, 8], 8 if reverse else 4)
    warps = choose(sch, [1, 2, 4], 4)
    for kind in KINDS:
        load, turn, store = (sch.get_sblock(f"{kind}_{step}") for step in ("load", "turn", "store"))
        tile, row, col = sch.get_loops(load)[:3]
        part, warp, lane_row = sch.split(row, [None, warps, rows])
        group, lane = sch.split(col, [None, LANES // rows])
        sch.reorder(tile, part, group, warp, lane_row, lane)
        bind(
            sch,
            (sch.fuse(tile, part), group, sch.fuse(warp, lane_row, lane)),
            ("blockIdx.x", "blockIdx.y", "threadIdx.x"),
        )
        in_registers(sch, f"{kind}_load", f"{kind}_turn")
        for block in (load, turn, store):
            for loop in sch.get_loops(block)[3:]:
                sch.unroll(loop)
        quads = (load, store) if not reverse or kind == "wide" else (load,)
        for block in quads:
            make = cuda_blocks.load if block is load else cuda_blocks.store
            tensorize(sch, block, make("uint32", 4, hint))
