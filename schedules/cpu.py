"""CPU schedules: vectors of the host's width, one parallel loop over output columns, decode in registers.

Every function returns the sketches of an op as ``Schedule -> None`` functions; the ``sample_*`` calls in
them are the search space.  Vector instructions are tensor intrinsics of `blockscale.tir.intrin.x86`.
"""

from __future__ import annotations

from functools import partial

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from blockscale.schedules._steps import Choose, Sketch, keep_in_registers, last_loops, vectorize_last
from blockscale.specs import Linear
from blockscale.tir.intrin import x86

LOOP_REGISTERS = 6
"""Vector registers that a micro kernel needs besides its accumulators: operands, table, scale."""


def _divisors(value: int, candidates: tuple[int, ...]) -> list[int]:
    return [candidate for candidate in candidates if value % candidate == 0]


MIN_PANEL_ROWS = 8
"""Row tile from which lanes run along n: below, the column panel's set-up costs more than lane sums."""


def uses_panels(spec: Linear, level: str, row_tile: int) -> bool:
    """Whether lanes run along n for this row tile."""
    return row_tile >= MIN_PANEL_ROWS and spec.n % x86.WIDTHS[level].lanes == 0


def linear_sketches(spec: Linear, level: str, row_tile: int, compute: str) -> list[Sketch]:
    """Sketches of `blockscale.tir.linear`.

    Few rows: lanes run along k, weights are decoded in registers.  More rows: lanes run along n and
    a panel of weights is decoded once for all rows (staged) or once per row tile (fused).
    """
    width = x86.WIDTHS[level]
    if not uses_panels(spec, level, row_tile):
        return [partial(linear_rows, spec=spec, width=width, row_tile=row_tile)]
    return [
        partial(
            linear_panels, spec=spec, width=width, row_tile=row_tile, compute=compute, staged=staged
        )
        for staged in (True, False)
    ]


def linear_rows(
    sch: Schedule, choose: Choose, spec: Linear, width: x86.Width, row_tile: int
) -> None:
    """Lanes along k: every weight vector is decoded into a register and used for all rows of a tile."""
    lanes = width.lanes
    matmul, epilogue = sch.get_sblock("matmul"), sch.get_sblock("epilogue")
    _, lane = sch.split(sch.get_loops(matmul)[-1], [None, lanes])
    partial_sum = sch.rfactor(lane, 3)

    most = max(1, (width.registers - LOOP_REGISTERS) // row_tile)
    widths = [c for c in _divisors(spec.n, (1, 2, 4, 8)) if c <= most]
    columns = choose(sch, widths, 4)
    # Every pair of decisions divides n: a partial tile would need predicates, which do not tensorise.
    task_size = choose(sch, _divisors(spec.n // max(widths), (1, 2, 4, 8, 16)), 4)
    t, i, n = sch.get_loops(epilogue)
    tile, column = sch.split(n, [None, columns])
    task, tile = sch.split(tile, [None, task_size])
    sch.reorder(task, t, tile, i, column)
    sch.parallel(task)
    sch.compute_at(matmul, tile, preserve_unit_loops=True)
    sch.compute_at(partial_sum, tile, preserve_unit_loops=True)

    lane, unit, row, column, step = last_loops(sch, partial_sum, 5)
    sch.reorder(step, unit, row, column, lane)
    decode = sch.get_sblock("decode")
    sch.compute_at(decode, step, preserve_unit_loops=True)
    column, lane = last_loops(sch, decode, 2)
    sch.unroll(column)
    sch.tensorize(lane, x86.decode_row(width.level))
    keep_in_registers(sch, partial_sum, 3)
    keep_in_registers(sch, sch.decompose_reduction(partial_sum, step), 3)

    lane, unit, row, column = last_loops(sch, matmul, 4)
    sch.reorder(unit, row, column, lane)
    sch.decompose_reduction(matmul, lane)
    sch.tensorize(lane, x86.lane_sum(width.level))
    scale = sch.get_sblock("block_scale")
    sch.compute_at(scale, task, preserve_unit_loops=True)
    vectorize_last(sch, scale, spec.k // spec.block, lanes)
    _schedule_widen(sch, spec, width, inline=row_tile == 1 and spec.dtype == "float32")


def linear_panels(
    sch: Schedule,
    choose: Choose,
    spec: Linear,
    width: x86.Width,
    row_tile: int,
    compute: str,
    staged: bool,
) -> None:
    """Lanes along n: a column panel of weights is decoded to vectors and meets broadcast activations."""
    lanes, pair = width.lanes, 2 if compute == "bfloat16" else 1
    matmul, epilogue = sch.get_sblock("matmul"), sch.get_sblock("epilogue")
    decode, scale, widen = (sch.get_sblock(b) for b in ("decode", "block_scale", "widen"))
    vectors = choose(sch, _divisors(spec.n // lanes, (1, 2, 3, 4)), 2)
    rows = choose(sch, _divisors(row_tile, (4, 6, 8, 12, 16)), 8)
    t, i, n = sch.get_loops(epilogue)
    task, vector, lane = sch.split(n, [None, vectors, lanes])
    tile, row = sch.split(i, [None, rows])
    sch.reorder(task, t, tile, row, vector, lane)
    sch.parallel(task)
    sch.compute_at(matmul, tile, preserve_unit_loops=True)
    unit, row, n, k = last_loops(sch, matmul, 4)
    vector, lane = sch.split(n, [None, lanes])
    step, inner, part = sch.split(k, [None, x86.BLOCK_CODES // pair, pair])
    sch.reorder(step, inner, unit, row, vector, lane, part)

    sch.compute_at(decode, task if staged else step, preserve_unit_loops=True)
    sch.compute_at(scale, task, preserve_unit_loops=True)
    sch.transform_layout(
        decode, ("write", 0), lambda n, k: (n // lanes, k // pair, n % lanes * pair + k % pair)
    )
    sch.transform_layout(scale, ("write", 0), lambda n, b: (n // lanes, b, n % lanes))
    sch.transform_layout(widen, ("write", 0), lambda t, i, k: (t, k // pair, i * pair + k % pair))
    _tensorize_panel(sch, decode, lanes, x86.BLOCK_CODES, x86.decode_panel(width.level, compute))
    if spec.k // spec.block % x86.SCALE_GROUP == 0:
        name = x86.decode_panel_scales(width.level, spec.fmt)
        _tensorize_panel(sch, scale, lanes, x86.SCALE_GROUP, name)
    if compute == "bfloat16":
        sch.annotate(task, "pragma_import_llvm", x86.DOT_BF16_LLVM)
    _schedule_panel_matmul(sch, matmul, step, pair, unroll=not staged)
    sch.vectorize(last_loops(sch, epilogue, 1)[0])
    _schedule_widen(sch, spec, width, inline=False)


def _tensorize_panel(sch: Schedule, block: SBlockRV, lanes: int, depth: int, name: str) -> None:
    """Tensorise ``lanes`` rows by ``depth`` positions along k of a panel block (loops n, k)."""
    n, k = last_loops(sch, block, 2)
    vector, lane = sch.split(n, [None, lanes])
    group, position = sch.split(k, [None, depth])
    sch.reorder(vector, group, lane, position)
    sch.tensorize(lane, name)


def _schedule_panel_matmul(
    sch: Schedule, matmul: SBlockRV, step: LoopRV, pair: int, unroll: bool
) -> None:
    """Accumulators of one row tile in registers across ``step``; loops inner, unit, row, vector, lane."""
    inner, unit, row, vector, lane, part = last_loops(sch, matmul, 6)
    for loop in (unit, row, vector, *([inner] if unroll else [])):
        sch.unroll(loop)
    if pair == 1:
        sch.vectorize(lane)
    init = sch.decompose_reduction(matmul, step)
    sch.vectorize(last_loops(sch, init, 1)[0])
    for loop in last_loops(sch, init, 4)[:-1]:
        sch.unroll(loop)
    if pair == 2:
        sch.tensorize(lane, x86.dot_bf16())


def _schedule_widen(sch: Schedule, spec: Linear, width: x86.Width, inline: bool) -> None:
    widen = sch.get_sblock("widen")
    if inline:
        sch.compute_inline(widen)
    else:
        vectorize_last(sch, widen, spec.k, width.lanes)
