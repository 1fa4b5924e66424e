"""CPU schedules of the fused ops: RMS norm and activations that end in FP4 codes.

Rows run in parallel.  A row of the norm is read once into a buffer that stays in the cache, then
tiles of its blocks are quantised: their scales are one vector, each block's elements another.
"""

from __future__ import annotations

from functools import partial
from math import gcd

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from blockscale.schedules.steps import Choose, Sketch, last_loops, vectorize_last
from blockscale.specs import ActQuantize, NormQuantize
from blockscale.tir.block_grid import COLS_128X4
from blockscale.tir.fused.four_over_six import MOST
from blockscale.tir.intrin.x86 import fused as x86_fused
from blockscale.tir.intrin.x86 import rows as x86_rows

BLOCK_TILES = (4, 8, 16)
"""Blocks whose scales are one vector, as a schedule may choose them."""


def norm_quantize_sketches(spec: NormQuantize, level: str) -> list[Sketch]:
    """Sketches of `blockscale.tir.fused.norm_quantize`."""
    return [partial(norm_quantize, spec=spec)]


def norm_quantize(sch: Schedule, choose: Choose, spec: NormQuantize) -> None:
    """A row: h and the sum of its squares block by block, then codes tile by tile."""
    updates = ["residual"] if spec.residual else []
    norm_values = ["y_out"] if spec.y_out else []
    linear_scales = ["store_scale_linear"] if spec.layout == "both" else []
    first = "add" if spec.residual else "widen"
    sch.compute_inline(sch.get_sblock("gs"))
    row, block, _ = sch.get_loops(sch.get_sblock(first))
    sch.parallel(row)
    _move(sch, block, *updates, "square_sum")
    _move(sch, row, "total", "rstd", "norm")
    sizes = sorted({gcd(spec.blocks, size) for size in BLOCK_TILES})
    tile = choose(sch, sizes, BLOCK_TILES[-1])
    outer, _ = sch.split(last_loops(sch, sch.get_sblock("norm"), 2)[0], [None, tile])
    _move(sch, outer, *norm_values, "magnitude", "amax", "scale", "inverse", "code", "pack")
    _move(sch, outer, "store_codes", "store_scale", *linear_scales)
    for name in ("scale", "inverse"):
        sch.vectorize(last_loops(sch, sch.get_sblock(name), 1)[0])
    group = last_loops(sch, sch.get_sblock("square_sum"), 1)[0]
    sch.tensorize(group, x86_fused.square_sum(spec.block))
    total = sch.get_sblock("total")
    sch.decompose_reduction(total, last_loops(sch, total, 2)[0])
    _vectorize_elements(sch, spec.block, first, *updates, "norm", *norm_values)
    _encode(sch, spec.block)
    if spec.layout != "linear":
        _pad(sch, "pad_rows", *(["pad_cols"] if spec.blocks % COLS_128X4 else []))


def act_quantize_sketches(spec: ActQuantize, level: str) -> list[Sketch]:
    """Sketches of `blockscale.tir.fused.act_quantize`."""
    return [partial(act_quantize, spec=spec)]


def act_quantize(sch: Schedule, choose: Choose, spec: ActQuantize) -> None:
    """Block by block, then the padding of scales."""
    act_blocks(sch, spec)
    if spec.layout != "linear":
        _pad(sch, "pad_rows", "pad_cols")


def act_blocks(sch: Schedule, spec: ActQuantize) -> None:
    """Block by block; the columns may be any number, so that scales are not a vector."""
    expert, row, block, _ = sch.get_loops(sch.get_sblock("value"))
    steps: tuple[str, ...] = ("scale", "factor", "code")
    if spec.search != "none":
        kinds = ("byte", "value", "factor", "code", "loss", "error")
        steps = (*(f"{kind}_{name}" for name in MOST for kind in kinds), "scale", "code")
    _move(sch, block, "magnitude", "amax", *steps, "pack", "store_codes")
    _move(sch, block, "store_scale")
    if spec.finds_scale:
        row = _find_scale(sch, spec)
    else:
        row = sch.fuse(expert, row)
    sch.parallel(row)
    _vectorize_elements(sch, spec.block, "value")
    if spec.search != "none":
        for name in MOST:
            _vectorize_elements(sch, spec.block, f"code_{name}", f"loss_{name}")
            error = sch.get_sblock(f"error_{name}")
            sch.decompose_reduction(error, last_loops(sch, error, 1)[0])
    _encode(sch, spec.block)


def _find_scale(sch: Schedule, spec: ActQuantize) -> LoopRV:
    """The largest magnitude of a row, a vector of lanes at first; return the loop over rows."""
    part, most = sch.get_sblock("row_part"), sch.get_sblock("row_most")
    _vectorize_elements(sch, spec.block, "row_part")
    sch.decompose_reduction(part, sch.get_loops(part)[0])
    element = last_loops(sch, most, 1)[0]
    sch.decompose_reduction(most, element)
    sch.tensorize(element, x86_rows.lane_max(spec.block))
    return sch.get_loops(sch.get_sblock("row"))[0]


def _move(sch: Schedule, loop: LoopRV, *names: str) -> None:
    """Compute these blocks, each after what it reads, inside of ``loop``."""
    for name in names:
        sch.reverse_compute_at(sch.get_sblock(name), loop, preserve_unit_loops=True)


def _vectorize_elements(sch: Schedule, extent: int, *names: str) -> None:
    for name in names:
        vectorize_last(sch, sch.get_sblock(name), extent, extent)


def _encode(sch: Schedule, block: int) -> None:
    """From elements to packed codes: a vector per block, its maximum and its bytes as well."""
    _vectorize_elements(sch, block, "magnitude", "code")
    amax = sch.get_sblock("amax")
    element = last_loops(sch, amax, 1)[0]
    sch.decompose_reduction(amax, element)
    sch.tensorize(element, x86_rows.lane_max(block))
    sch.tensorize(last_loops(sch, sch.get_sblock("pack"), 1)[0], x86_rows.pack_row(block))
    _vectorize_elements(sch, block // 2, "store_codes")


def _pad(sch: Schedule, *names: str) -> None:
    for name in names:
        *outer, _ = sch.get_loops(sch.get_sblock(name))
        sch.parallel(sch.fuse(*outer))
