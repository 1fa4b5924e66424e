"""CPU schedules of the MoE layer: each GEMM is one parallel loop over columns, all experts in it.

Lanes run along k, weights are decoded in registers and used for the rows of a tile, gate and up
together.  What is between the GEMMs takes a parallel loop of its own where there are many rows.
"""

from __future__ import annotations

from functools import partial

from tvm.s_tir import Schedule

from blockscale.schedules.gemm.cpu_linear import LOOP_REGISTERS, divisors
from blockscale.schedules.steps import Choose, Sketch, keep_in_registers, last_loops
from blockscale.specs import FusedMoe
from blockscale.tir.intrin.x86 import rows as x86_rows
from blockscale.tir.intrin.x86 import width as x86
from blockscale.tir.intrin.x86 import words as x86_words
from blockscale.tir.moe.fused_moe import COLUMNS, WORD, Product, code_of, products

PLAIN_LANES = 2
"""Lanes where a row is no whole number of vectors of words: loops without vectors."""


def width(k: int, level: str) -> x86.Width | None:
    """The widest vector of words that divides K, or None."""
    widest = x86.WIDTHS[level]
    narrower = [x86.WIDTHS["avx2"]] if widest.level == "avx512" else []
    return next((w for w in (widest, *narrower) if k % (WORD * w.lanes) == 0), None)


def lanes(spec: FusedMoe, level: str) -> tuple[int, int]:
    """Partial sums of a row in both GEMMs."""
    widths = (width(spec.hidden, level), width(spec.intermediate, level))
    first, second = (PLAIN_LANES if w is None else w.lanes for w in widths)
    return first, second


def moe_sketches(spec: FusedMoe, level: str, row_tile: int) -> list[Sketch]:
    """The sketch of `blockscale.tir.moe.fused_moe`."""
    return [partial(_moe, spec=spec, level=level, row_tile=row_tile)]


def _moe(sch: Schedule, choose: Choose, spec: FusedMoe, level: str, row_tile: int) -> None:
    for product in products(spec, lanes(spec, level)):
        _gemm(sch, choose, spec, product, level, row_tile)
    if row_tile > 1:
        names = ["rows1", "rows2"]
        measured = spec.act_fmt not in (None, "fp8_tensor")
        for name in ("amax", "factor") if measured else ():
            names += [f"{name}2"] if spec.coded else [f"{name}1", f"{name}2"]
        for name in names:
            t, i = last_loops(sch, sch.get_sblock(name), 3 if "amax" not in name else 4)[:2]
            sch.parallel(sch.fuse(t, i))
    _combine(sch, row_tile, spec.slots)


def _gemm(
    sch: Schedule, choose: Choose, spec: FusedMoe, product: Product, level: str, row_tile: int
) -> None:
    """Accumulators of some columns of all rows of a tile stay in registers along k."""
    g = product.number
    vector = width(product.k, level)
    sch.parallel(sch.get_loops(sch.get_sblock(f"tile{g}"))[-2])
    dot, total = sch.get_sblock(f"dot{g}"), sch.get_sblock(f"sum{g}")
    registers = x86.WIDTHS[level].registers if vector is None else vector.registers
    most = max(1, (registers - LOOP_REGISTERS) // (row_tile * product.parts))
    columns = choose(sch, [c for c in divisors(COLUMNS, (1, 2, 4, 8)) if c <= most], 4)
    p, i, n, lane = last_loops(sch, total, 4)
    group, n = sch.split(n, [None, columns])
    sch.reorder(group, p, i, n, lane)
    sch.compute_at(dot, group, preserve_unit_loops=True)
    _vectorize_block(sch, f"scale{g}", product.k // spec.group)
    if spec.zero:
        _vectorize_block(sch, f"zero{g}", product.k // spec.group)
    _, n = last_loops(sch, sch.get_sblock(f"finish{g}"), 2)
    sch.vectorize(n)
    if vector is None:
        return
    p, i, n, step, lane, word = last_loops(sch, dot, 6)
    sch.reorder(step, p, n, i, lane, word)
    for loop in (p, n):
        sch.unroll(loop)
    init = sch.decompose_reduction(dot, step)
    keep_in_registers(sch, init, 3)
    name = x86_words.dot_words(vector.level, code_of(spec), spec.group, row_tile)
    sch.tensorize(lane if row_tile == 1 else i, name)
    lane = last_loops(sch, total, 1)[0]
    sch.decompose_reduction(total, lane)
    sch.tensorize(lane, x86_rows.lane_sum(vector.level))


def _vectorize_block(sch: Schedule, name: str, extent: int) -> None:
    """Block scales of a row, as many at a time as divide them."""
    count = next(c for c in (16, 8, 4, 2, 1) if extent % c == 0)
    _, inner = sch.split(last_loops(sch, sch.get_sblock(name), 1)[0], [None, count])
    sch.vectorize(inner)


def _combine(sch: Schedule, row_tile: int, slots: bool) -> None:
    """Columns by vectors, the slots of a token in turn; tokens in parallel where they are many."""
    if not slots:
        combine = sch.get_sblock("combine")
        slot, m = last_loops(sch, combine, 2)
        sch.vectorize(m)
        init = sch.decompose_reduction(combine, slot)
        sch.vectorize(last_loops(sch, init, 1)[0])
    sch.vectorize(last_loops(sch, sch.get_sblock("store"), 1)[0])
    if row_tile > 1:
        sch.parallel(last_loops(sch, sch.get_sblock("token"), 2)[0])


def route_sketches() -> list[Sketch]:
    """The sketch of `blockscale.tir.moe.route`: tokens in parallel."""

    def tokens(sch: Schedule, choose: Choose) -> None:
        sch.parallel(sch.get_loops(sch.get_sblock("route"))[0])

    return [tokens]
