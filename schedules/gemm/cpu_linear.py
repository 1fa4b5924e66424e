"""CPU schedules of linear: one parallel loop over output columns, weights decoded to vectors.

`linear_sketches` returns the sketches, functions of a schedule and of how it takes its decisions;
the decisions (``choose``: `schedules._steps`) are the search space.  Vector instructions are tensor
intrinsics of `blockscale.tir.intrin`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ExprRV, LoopRV, SBlockRV

from blockscale.base.targets import BF16_DOTS, CPU_TARGETS
from blockscale.schedules.steps import Choose, Sketch, keep_in_registers, last_loops, vectorize_last
from blockscale.specs import Linear
from blockscale.tir.intrin.x86 import panels as x86_panels
from blockscale.tir.intrin.x86 import rows as x86_rows
from blockscale.tir.intrin.x86 import width as x86

LOOP_REGISTERS = 6
"""Vector registers that a micro kernel needs besides its accumulators: operands, table, scale."""

MANY_REGISTERS = 32
"""From so many vector registers on, AVX-512's, the default schedule has larger tiles.

On 16 cores of a Xeon (2026-11-27; NVFP4 and MXFP4) tiles of two columns of 2 to 4 rows took 0.83 of
the time of one column (0.74 to 0.97 in 18 cases), as the committed logs of an AMD EPYC had found
(0.38 to 0.95), and of one row tasks of two tiles 0.92 of the time of four (0.69 to 1.01 in 17).
On two cores of an AMD EPYC, with AVX2's 16, two columns took 0.9 to 1.7 times as long as one, and
tiles of 8 rows 1.38 to 1.52 times as long as of 4: their 16 accumulators leave no register."""

FEW_ROWS_SUMS = 8
"""Accumulators of a tile of few rows."""


def divisors(value: int, candidates: tuple[int, ...]) -> list[int]:
    """Return those of ``candidates`` that divide ``value``."""
    return [candidate for candidate in candidates if value % candidate == 0]


MIN_PANEL_ROWS = 8
"""Row tile from which lanes run along n; below, a panel's set-up costs more than lane sums."""


def uses_panels(spec: Linear, level: str, row_tile: int) -> bool:
    """Whether lanes run along n for this row tile."""
    return row_tile >= MIN_PANEL_ROWS and spec.cols % x86.WIDTHS[level].lanes == 0


def pair_width(spec: Linear, level: str, row_tile: int) -> int:
    """Gates side by side, before their ups: a vector, or one where lanes run along k."""
    return x86.WIDTHS[level].lanes if uses_panels(spec, level, row_tile) else 1


def compute_type(spec: Linear, level: str, row_tile: int) -> str:
    """Bfloat16 products where the CPU has them, they are exact, and lanes run along n."""
    fits = spec.dtype == "bfloat16" and spec.fmt == "nvfp4"
    fits = fits and BF16_DOTS in CPU_TARGETS[level].features
    return "bfloat16" if fits and uses_panels(spec, level, row_tile) else "float32"


def linear_sketches(spec: Linear, level: str, row_tile: int) -> list[Sketch]:
    """Sketches of `blockscale.tir.gemm.linear`.

    Few rows: lanes run along k, weights are decoded in registers.  More rows: lanes run along n and
    a panel of weights is decoded once for all rows (staged) or once per row tile (fused).
    """
    width, compute = x86.WIDTHS[level], compute_type(spec, level, row_tile)
    if not uses_panels(spec, level, row_tile):
        return [partial(linear_rows, spec=spec, width=row_width(spec, level), row_tile=row_tile)]
    return [
        partial(
            linear_panels, spec=spec, width=width, row_tile=row_tile, compute=compute, staged=staged
        )
        for staged in (True, False)
    ]


def row_width(spec: Linear, level: str) -> x86.Width:
    """The widest vector of words that divides K; half of AVX-512 serves K = 64 * odd, as 2880."""
    widest = x86.WIDTHS[level]
    narrower = [x86.WIDTHS["avx2"]] if widest.level == "avx512" else []
    for width in (widest, *narrower):
        if spec.k % (WORD_CODES * width.lanes) == 0:
            return width
    return widest


class CodedRows(NamedTuple):
    """What `linear_rows` leaves to a GEMM, whose rows are codes and whose scales are 128x4 tiles.

    Attributes:
        flatten_scales: makes a row of the weight's scales one dimension, once they are in place.
        decode_rows: schedules the block that decodes rows; its second argument: they are laid out
            for `x86_rows.dot_row`.
    """

    flatten_scales: Callable[[Schedule], None]
    decode_rows: Callable[[Schedule, bool], None]


def linear_rows(
    sch: Schedule,
    choose: Choose,
    spec: Linear,
    width: x86.Width,
    row_tile: int,
    coded: CodedRows | None = None,
) -> None:
    """Lanes along k: weights are decoded into registers and used for all rows of a tile."""
    lanes = width.lanes
    words = spec.k % (WORD_CODES * lanes) == 0
    matmul, epilogue, decode, scale, widen = (
        sch.get_sblock(name) for name in ("matmul", "epilogue", "decode", "block_scale", "widen")
    )
    if spec.act_fmt:
        _quantise_rows(sch, spec, lanes)
    k = sch.get_loops(matmul)[-1]
    if words:
        sch.compute_inline(decode)
        _, lane, _ = sch.split(k, [None, lanes, WORD_CODES])
    else:
        _, lane = sch.split(k, [None, lanes])
    partial_sum = sch.rfactor(lane, 3)

    sums = 2 if spec.gated else 1
    most = max(1, (width.registers - LOOP_REGISTERS) // (row_tile * sums))
    widths = [c for c in divisors(spec.cols, (1, 2, 4, 8)) if c <= most]
    many = width.registers >= MANY_REGISTERS
    few_rows = FEW_ROWS_SUMS // (row_tile * sums) if many else 1
    columns = choose(sch, widths, 4 // sums if row_tile == 1 else few_rows)
    # Every pair of decisions divides n: a partial tile needs predicates, which do not tensorise.
    task_size = choose(sch, divisors(spec.cols // max(widths), (1, 2, 4, 8, 16)), 2 if many else 4)
    t, i, n = sch.get_loops(epilogue)
    tile, column = sch.split(n, [None, columns])
    task, tile = sch.split(tile, [None, task_size])
    sch.reorder(task, t, tile, i, column)
    sch.parallel(task)
    if spec.activation != "none":
        tile = _activate_rows(sch, spec, columns)
    sch.compute_at(matmul, tile, preserve_unit_loops=True)
    sch.compute_at(partial_sum, tile, preserve_unit_loops=True)
    if not words:
        lane, unit, row, column, step = last_loops(sch, partial_sum, 5)
        sch.reorder(step, lane, unit, row, column)
        sch.compute_at(decode, step, preserve_unit_loops=True)
    sch.compute_at(scale, task, preserve_unit_loops=True)
    if coded is not None:
        coded.flatten_scales(sch)
    vectorize_last(sch, scale, int(sch.get(last_loops(sch, scale, 1)[0]).extent), lanes)
    if words:
        _dot_words(sch, spec, width, partial_sum, widen)
    else:
        _dot_vectors(sch, width, partial_sum, decode)
    lane, unit, row, column = last_loops(sch, matmul, 4)
    sch.reorder(unit, row, column, lane)
    sch.decompose_reduction(matmul, lane)
    sch.tensorize(lane, x86_rows.lane_sum(width.level))
    if coded is not None:
        coded.decode_rows(sch, words)
    elif words or row_tile > 1 or spec.dtype != "float32" or spec.act_fmt:
        vectorize_last(sch, widen, spec.k, lanes)
    else:
        sch.compute_inline(widen)


def _quantise_rows(sch: Schedule, spec: Linear, lanes: int) -> None:
    """Quantise one row after the other, each while it is in the cache."""
    _, row, _ = sch.get_loops(sch.get_sblock("row_most"))
    for name in ("row_factor", "row_ratio", "row_code", "widen"):
        sch.reverse_compute_at(sch.get_sblock(name), row)
    for name in ("row_ratio", "row_code"):
        vectorize_last(sch, sch.get_sblock(name), spec.k, lanes)


def _activate_rows(sch: Schedule, spec: Linear, columns: ExprRV) -> LoopRV:
    """Apply the activation to all columns of a task at once: its steps wait for each other.

    Return the loop over tiles of columns of the sums.
    """
    epilogue, activate, added = (sch.get_sblock(b) for b in ("epilogue", "activate", "sum"))
    _, t, tile, i, column = sch.get_loops(epilogue)
    sch.reorder(i, tile, column)
    sch.fuse(tile, column)
    for block in (activate, added):
        sch.compute_at(block, t, preserve_unit_loops=True)
    sch.vectorize(last_loops(sch, activate, 1)[0])
    i, n = last_loops(sch, added, 2)
    if spec.gated:
        n, half = sch.split(n, [None, 2])
    tile, column = sch.split(n, [None, columns])
    if spec.gated:
        column = sch.fuse(column, half)
    sch.reorder(tile, i, column)
    return tile


WORD_CODES = 8
"""E2M1 codes of a 32-bit word."""


def _dot_words(
    sch: Schedule, spec: Linear, width: x86.Width, partial_sum: SBlockRV, widen: SBlockRV
) -> None:
    """Each lane takes a word of 8 codes; activations are laid out to match."""
    depth = width.lanes * WORD_CODES
    lane, unit, row, column, step, code = last_loops(sch, partial_sum, 6)
    sch.reorder(step, unit, row, column, lane, code)
    for loop in (unit, row, column):
        sch.unroll(loop)
    keep_in_registers(sch, sch.decompose_reduction(partial_sum, step), 3)
    sch.transform_layout(
        widen,
        ("write", 0),
        lambda t, i, k: (t, i, k // depth, k % WORD_CODES, k % depth // WORD_CODES),
    )
    sch.tensorize(lane, x86_rows.dot_row(width.level, spec.block))


def _dot_vectors(sch: Schedule, width: x86.Width, partial_sum: SBlockRV, decode: SBlockRV) -> None:
    """Each lane takes one code: for K that is no multiple of a vector of words."""
    column, lane = last_loops(sch, decode, 2)
    sch.unroll(column)
    sch.tensorize(lane, x86_rows.decode_row(width.level, "float32"))
    lane, unit, row, column = last_loops(sch, partial_sum, 4)
    sch.reorder(unit, row, column, lane)
    keep_in_registers(sch, partial_sum, 3)
    step = last_loops(sch, partial_sum, 5)[0]
    keep_in_registers(sch, sch.decompose_reduction(partial_sum, step), 3)


def panel_tiles(
    sch: Schedule,
    choose: Choose,
    blocks: tuple[SBlockRV, SBlockRV],
    columns: int,
    width: x86.Width,
    row_tile: int,
    pair: int,
    spec: Linear | None = None,
) -> tuple[LoopRV, LoopRV]:
    """Tile matmul and epilogue, ``blocks``; return the parallel loop and that over steps of K.

    A task is some vectors of ``width`` of all ``columns``; in it, tiles of rows.  A step is
    `x86_panels.BLOCK_CODES` elements of K, ``pair`` at a time.  ``spec``: of a linear layer, which
    may have an activation, and two sums for each column.
    """
    matmul, epilogue = blocks
    lanes = width.lanes
    two = spec is not None and spec.gated
    vectors = choose(
        sch, divisors(columns // lanes, (1, 2) if two else (1, 2, 3, 4)), 1 if two else 2
    )
    fit = 8 if width.registers >= MANY_REGISTERS else 4
    rows = choose(sch, divisors(row_tile, (4, 6, 8, 12, 16)) or [row_tile], fit)
    t, i, n = sch.get_loops(epilogue)
    task, vector, lane = sch.split(n, [None, vectors, lanes])
    tile, row = sch.split(i, [None, rows])
    sch.reorder(task, t, tile, row, vector, lane)
    sch.parallel(task)
    if spec is not None and spec.activation != "none":
        for name in ("activate", "sum"):
            block = sch.get_sblock(name)
            sch.compute_at(block, tile, preserve_unit_loops=True)
            _, lane = sch.split(last_loops(sch, block, 1)[0], [None, lanes])
            sch.vectorize(lane)
    sch.compute_at(matmul, tile, preserve_unit_loops=True)
    unit, row, n, k = last_loops(sch, matmul, 4)
    vector, lane = sch.split(n, [None, lanes])
    step, inner, part = sch.split(k, [None, x86_panels.BLOCK_CODES // pair, pair])
    sch.reorder(step, inner, unit, row, vector, lane, part)
    return task, step


def linear_panels(
    sch: Schedule,
    choose: Choose,
    spec: Linear,
    width: x86.Width,
    row_tile: int,
    compute: str,
    staged: bool,
) -> None:
    """Lanes along n: weights of a column panel, decoded to vectors, meet broadcast activations."""
    lanes, pair = width.lanes, 2 if compute == "bfloat16" else 1
    matmul, epilogue = sch.get_sblock("matmul"), sch.get_sblock("epilogue")
    decode, scale, widen = (sch.get_sblock(b) for b in ("decode", "block_scale", "widen"))
    blocks = matmul, epilogue
    task, step = panel_tiles(sch, choose, blocks, spec.cols, width, row_tile, pair, spec)
    if spec.act_fmt:
        _quantise_rows(sch, spec, lanes)

    sch.compute_at(decode, task if staged else step, preserve_unit_loops=True)
    sch.compute_at(scale, task, preserve_unit_loops=True)
    sch.transform_layout(
        decode, ("write", 0), lambda n, k: (n // lanes, k // pair, n % lanes * pair + k % pair)
    )
    sch.transform_layout(scale, ("write", 0), lambda n, b: (n // lanes, b, n % lanes))
    depth = x86_panels.panel_depth(width.level, spec.k) if staged else x86_panels.BLOCK_CODES
    name = x86_panels.decode_panel(width.level, compute, depth, spec.block)
    tensorize_panel(sch, decode, lanes, depth, name)
    group = x86_panels.scale_group(spec.k // spec.block)
    if group is not None:
        name = x86_panels.decode_panel_scales(width.level, spec.fmt, group)
        tensorize_panel(sch, scale, lanes, group, name)
    if compute == "bfloat16":
        sch.annotate(task, "pragma_import_llvm", x86_panels.DOT_BF16_LLVM)
    schedule_panel_matmul(sch, matmul, step, pair, unroll=not staged)
    sch.vectorize(last_loops(sch, epilogue, 1)[0])
    _copy_activations(sch, widen, spec, lanes * pair, row_tile)


def _copy_activations(
    sch: Schedule, widen: SBlockRV, spec: Linear, lanes: int, row_tile: int
) -> None:
    """Rows an odd number of cache lines apart: rows a power of two apart would share cache sets."""
    t, i, _ = sch.get_loops(widen)
    sch.storage_align(widen, 0, axis=1, factor=2 * lanes, offset=lanes)
    if row_tile >= PARALLEL_COPY_ROWS:
        sch.parallel(sch.fuse(t, i))
    vectorize_last(sch, widen, spec.k, lanes)


PARALLEL_COPY_ROWS = 12
"""Row tile from which activations are copied in parallel; for few rows the launch costs more."""


def tensorize_panel(sch: Schedule, block: SBlockRV, lanes: int, depth: int, name: str) -> None:
    """Tensorise ``lanes`` rows by ``depth`` positions along k of a panel block (loops n, k)."""
    n, k = last_loops(sch, block, 2)
    vector, lane = sch.split(n, [None, lanes])
    group, position = sch.split(k, [None, depth])
    sch.reorder(vector, group, lane, position)
    sch.tensorize(lane, name)


def schedule_panel_matmul(
    sch: Schedule, matmul: SBlockRV, step: LoopRV, pair: int, unroll: bool
) -> None:
    """Keep the accumulators of one row tile in registers across ``step``."""
    inner, unit, row, vector, lane, _ = last_loops(sch, matmul, 6)
    for loop in (unit, row, vector, *([inner] if unroll else [])):
        sch.unroll(loop)
    if pair == 1:
        sch.vectorize(lane)
    init = sch.decompose_reduction(matmul, step)
    sch.vectorize(last_loops(sch, init, 1)[0])
    for loop in last_loops(sch, init, 4)[:-1]:
        sch.unroll(loop)
    if pair == 2:
        sch.tensorize(lane, x86_panels.dot_bf16())
