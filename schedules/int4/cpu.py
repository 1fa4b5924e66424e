"""CPU schedules of INT4 weights: one parallel loop over columns, weights decoded to vectors.

Where words hold columns (the plain layout), a group's weights are decoded once, to a panel that
stays in the L1 cache, and meet broadcast rows of x; where they hold rows, they are decoded in
registers for the rows of a tile, and lanes run along k.
"""

from __future__ import annotations

from functools import partial
from math import gcd

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV

from blockscale.base.targets import BF16_DOTS, CPU_TARGETS
from blockscale.schedules.steps import Choose, Sketch, last_loops
from blockscale.specs.int4 import Int4Mm
from blockscale.tir.int4.forms import MAPS, Form, form_of
from blockscale.tir.int4.mm import Tiling
from blockscale.tir.intrin.x86 import int4 as x86_int4
from blockscale.tir.intrin.x86 import panels as x86_panels
from blockscale.tir.intrin.x86 import width as x86
from blockscale.tir.intrin.x86.int4 import SIXTEEN

ACCUMULATORS = 24
"""Vector registers of sums, of 32; half of it where there are 16."""

VECTORS = 8
"""Vectors of words under way at a time, for one row: their sums do not wait for each other."""


def form(spec: Int4Mm, level: str) -> Form | None:
    """Return the widest vectors of a weight that the level has; None: code by code."""
    return form_of(spec.layout, spec.k, spec.n, spec.group, x86.WIDTHS[level].lanes)


def tiling(spec: Int4Mm, level: str, row_tile: int) -> Tiling:
    """Return rows of a tile, bands of a task and the operands' type."""
    found = form(spec, level)
    if found is None:
        return Tiling(1)
    exact = spec.dtype == "bfloat16" or spec.activation == "a8"
    pairs = BF16_DOTS in CPU_TARGETS[level].features and exact and found.lanes == SIXTEEN
    if found.along == "n":
        pairs = pairs and spec.group % 2 == 0
        slots = max(c for c in (1, 2, 4, 8) if c * row_tile <= sums(level) or c == 1)
        return Tiling(row_tile, "bfloat16" if pairs else "float32", slots=slots)
    most = max(1, sums(level) // (row_tile * found.inner))
    wanted = min(most, max(1, VECTORS // found.inner))
    bands = spec.n // found.band
    count = next(c for c in range(wanted, 0, -1) if bands % c == 0)
    return Tiling(row_tile, "bfloat16" if pairs else "float32", count)


def sums(level: str) -> int:
    """Registers of sums."""
    return ACCUMULATORS if x86.WIDTHS[level].registers == 32 else ACCUMULATORS // 3


def int4_sketches(spec: Int4Mm, level: str, row_tile: int) -> list[Sketch]:
    """The sketch of `blockscale.tir.int4.mm`."""
    found = form(spec, level)
    if found is None:
        return [_one_by_one]
    steps = _columns if found.along == "n" else _rows
    made = tiling(spec, level, row_tile)
    return [partial(steps, spec=spec, level=level, form=found, tiling=made)]


def _one_by_one(sch: Schedule, choose: Choose) -> None:
    n, _, _ = last_loops(sch, sch.get_sblock("dot"), 3)
    sch.parallel(n)


def _lay(sch: Schedule, spec: Int4Mm, tiling: Tiling, loops: int) -> None:
    """Rows of x by vectors; in parallel, where there are some."""
    for i in range(4 if spec.activation == "a8" else 2):
        row, k = last_loops(sch, sch.get_sblock(f"prepare{i}"), 2)
        _, k = sch.split(k, [None, gcd(spec.k, SIXTEEN)])
        sch.vectorize(k)
        if tiling.rows > 1:
            sch.parallel(row)
    if tiling.rows > 1:
        sch.parallel(last_loops(sch, sch.get_sblock("lay"), loops)[0])
        if spec.zero != "none":
            sch.parallel(last_loops(sch, sch.get_sblock("group_sum"), 3)[0])


def _import_dots(sch: Schedule, block: SBlockRV, tiling: Tiling) -> None:
    if tiling.compute == "bfloat16":
        loop = last_loops(sch, block, 1)[0]
        sch.annotate(loop, "pragma_import_llvm", x86_panels.DOT_BF16_LLVM)


def _columns(
    sch: Schedule, choose: Choose, spec: Int4Mm, level: str, form: Form, tiling: Tiling
) -> None:
    """Lanes along n."""
    flip = MAPS[spec.layout].flip
    _lay(sch, spec, tiling, 4)
    task = sch.get_sblock("task")
    sch.parallel(sch.get_loops(task)[-1])
    decode = sch.get_sblock("decode")
    _, p, j, _ = last_loops(sch, decode, 4)
    if tiling.pair == 2:
        sch.tensorize(p, x86_int4.decode_column_pairs(spec.n // 2, flip))
    else:
        width = x86.WIDTHS[level].level
        sch.tensorize(j, x86_int4.decode_columns(width, form.lanes, flip, spec.n // 2))
    matmul, scale = sch.get_sblock("matmul"), sch.get_sblock("scale")
    sch.vectorize(last_loops(sch, scale, 1)[0])
    i, c, k, j, p = last_loops(sch, matmul, 5)
    sch.reorder(k, i, c, j, p)
    sch.unroll(i)
    sch.unroll(c)
    if tiling.pair == 1:
        sch.vectorize(j)
    init = sch.decompose_reduction(matmul, k)
    i, c, lane = last_loops(sch, init, 3)
    sch.vectorize(lane)
    sch.unroll(i)
    sch.unroll(c)
    if tiling.pair == 2:
        sch.tensorize(j, x86_panels.dot_bf16())
    _import_dots(sch, task, tiling)


def _rows(
    sch: Schedule, choose: Choose, spec: Int4Mm, level: str, form: Form, tiling: Tiling
) -> None:
    """Lanes along k."""
    _lay(sch, spec, tiling, 6)
    task = sch.get_sblock("task")
    sch.parallel(last_loops(sch, task, 2)[0])
    dot = sch.get_sblock("dot")
    s, b, n, i, j, h, _ = last_loops(sch, dot, 7)
    if tiling.pair == 1:  # what is tensorized has no loops of one iteration
        sch.reorder(h, i, j)
    sch.unroll(b)
    sch.unroll(n)
    init = sch.decompose_reduction(dot, s)
    *outer, lane = last_loops(sch, init, 4)
    sch.vectorize(lane)
    for loop in outer:
        sch.unroll(loop)
    ahead = spec.k // 2 * form.band * tiling.bands
    name = x86_int4.dot_rows(
        x86.WIDTHS[level].level,
        form.lanes,
        MAPS[spec.layout].flip,
        tiling.rows,
        tiling.compute,
        ahead,
    )
    sch.tensorize(j if tiling.rows == 1 else i, name)
    *outer, lane = last_loops(sch, sch.get_sblock("scale"), 4)
    sch.vectorize(lane)
    for loop in outer:
        sch.unroll(loop)
    _import_dots(sch, task, tiling)


def dequantize_sketches() -> list[Sketch]:
    """The sketch of `blockscale.tir.int4.dequantize`: rows in parallel, LLVM finds the vectors."""

    def rows(sch: Schedule, choose: Choose) -> None:
        e, k, _, h = sch.get_loops(sch.get_sblock("dequantize"))
        sch.parallel(sch.fuse(e, k))
        sch.unroll(h)

    return [rows]
