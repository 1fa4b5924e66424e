"""CPU schedules of block-scaled GEMMs: those of linear, and the decoding of a and of 128x4 scales.

A grouped GEMM is the same within its block of one expert; experts follow one another, and each has
the whole machine for its columns.
"""

from __future__ import annotations

from functools import partial

from tvm.s_tir import Schedule

from blockscale.base.formats import E2M1, first_with
from blockscale.base.targets import BF16_DOTS, CPU_TARGETS
from blockscale.schedules.fused.cpu import act_blocks
from blockscale.schedules.gemm import cpu_linear as cpu
from blockscale.schedules.steps import Choose, Sketch, last_loops, vectorize_last
from blockscale.specs import ActQuantize, GroupedMmActFp4Quant, Linear, MmFp4
from blockscale.tir.block_grid import COLS_128X4
from blockscale.tir.intrin.x86 import (
    gemm as x86_gemm,
)
from blockscale.tir.intrin.x86 import (
    panels as x86_panels,
)
from blockscale.tir.intrin.x86 import (
    rows as x86_rows,
)
from blockscale.tir.intrin.x86 import (
    width as x86,
)


def panel_width(spec: MmFp4, level: str) -> x86.Width:
    """The widest vector that divides N; N is a multiple of 8 and so has one."""
    widest = x86.WIDTHS[level]
    return widest if spec.n % widest.lanes == 0 else x86.WIDTHS["avx2"]


def uses_panels(spec: MmFp4, row_tile: int) -> bool:
    """Whether lanes run along n: for more rows, and for what `cpu.linear_rows` does not decode."""
    return row_tile >= cpu.MIN_PANEL_ROWS or spec.format.b is not E2M1


def compute_type(spec: MmFp4, level: str, row_tile: int) -> str:
    """Bfloat16 products where the CPU has them, they are exact, and lanes run along n."""
    dots = BF16_DOTS in CPU_TARGETS[level].features
    fits = spec.fmt == "nvfp4" and dots and uses_panels(spec, row_tile)
    return "bfloat16" if fits and panel_width(spec, level).lanes == 16 else "float32"


def gemm_sketches(spec: MmFp4, level: str, row_tile: int) -> list[Sketch]:
    """Sketches of `blockscale.tir.gemm.mm` and, with ``spec`` of one expert, of `.grouped_gemm`.

    A panel of B is decoded once for all rows (staged), or once per tile of rows (fused).
    """
    compute = compute_type(spec, level, row_tile)
    if not uses_panels(spec, row_tile):
        return [partial(gemm_rows, spec=spec, level=level, row_tile=row_tile)]
    order = (True, False) if row_tile >= cpu.MIN_PANEL_ROWS else (False, True)
    width = panel_width(spec, level)
    return [
        partial(
            gemm_panels, spec=spec, width=width, row_tile=row_tile, compute=compute, staged=staged
        )
        for staged in order
    ]


def gemm_act_sketches(spec: GroupedMmActFp4Quant, level: str, row_tile: int) -> list[Sketch]:
    """Sketches of `blockscale.tir.gemm.grouped_act`: the GEMM's, then rows in parallel."""
    products = gemm_sketches(spec.product.matrix, level, row_tile)
    return [partial(_gemm_act, product=product, rule=spec.rule) for product in products]


def _gemm_act(sch: Schedule, choose: Choose, product: Sketch, rule: ActQuantize) -> None:
    product(sch, choose)
    act_blocks(sch, rule)


def gemm_rows(sch: Schedule, choose: Choose, spec: MmFp4, level: str, row_tile: int) -> None:
    """Few rows: lanes run along k, as for a linear layer on the decoded rows of a."""
    scales = first_with(spec.format.scale).name
    weights = Linear(spec.n, spec.k, scales, "bfloat16")
    width = cpu.row_width(weights, level)
    coded = cpu.CodedRows(_flatten_scales, partial(_decode_rows, spec=spec, width=width))
    cpu.linear_rows(sch, choose, weights, width, row_tile, coded)
    task = sch.get_loops(sch.get_sblock("epilogue"))[0]
    sch.compute_at(sch.get_sblock("b_bytes"), task, preserve_unit_loops=True)
    _copy_scale_bytes(sch, "b_bytes")
    _decode_a_scales(sch)


def _decode_rows(sch: Schedule, words: bool, spec: MmFp4, width: x86.Width) -> None:
    """Rows of a: E2M1 by words where `x86_rows.dot_row` reads them, else a vector at a time."""
    k = last_loops(sch, sch.get_sblock("widen"), 1)[0]
    if words and spec.format.a is E2M1:
        _, lane, _ = sch.split(k, [None, width.lanes, cpu.WORD_CODES])
        sch.tensorize(lane, x86_gemm.decode_words(width.level, spec.block))
        return
    _, lane = sch.split(k, [None, width.lanes])
    sch.vectorize(lane)


def gemm_panels(
    sch: Schedule,
    choose: Choose,
    spec: MmFp4,
    width: x86.Width,
    row_tile: int,
    compute: str,
    staged: bool,
) -> None:
    """Lanes along n: a panel of B, decoded to vectors, meets broadcast elements of A."""
    lanes, pair = width.lanes, 2 if compute == "bfloat16" else 1
    matmul, epilogue = sch.get_sblock("matmul"), sch.get_sblock("epilogue")
    decode, scale, copy = (sch.get_sblock(b) for b in ("decode", "block_scale", "b_bytes"))
    task, step = cpu.panel_tiles(sch, choose, (matmul, epilogue), spec.n, width, row_tile, pair)

    sch.compute_at(decode, task if staged else step, preserve_unit_loops=True)
    for block in (scale, copy):
        sch.compute_at(block, task, preserve_unit_loops=True)
    sch.transform_layout(
        decode, ("write", 0), lambda n, k: (n // lanes, k // pair, n % lanes * pair + k % pair)
    )
    sch.transform_layout(
        scale, ("write", 0), lambda n, g, c: (n // lanes, g * COLS_128X4 + c, n % lanes)
    )
    depth = _panel_depth(spec, width.level) if staged else x86_panels.BLOCK_CODES
    if spec.format.b is E2M1:
        name = x86_panels.decode_panel(width.level, compute, depth, spec.block)
    else:
        name = x86_gemm.decode_panel_e4m3(width.level, depth, spec.block)
    cpu.tensorize_panel(sch, decode, lanes, depth, name)
    _decode_panel_scales(sch, spec, width)
    _copy_scale_bytes(sch, "b_bytes")
    if compute == "bfloat16":
        sch.annotate(task, "pragma_import_llvm", x86_panels.DOT_BF16_LLVM)
    cpu.schedule_panel_matmul(sch, matmul, step, pair, unroll=not staged)
    sch.vectorize(last_loops(sch, epilogue, 1)[0])
    _decode_a(sch, spec, width, compute, row_tile)


def _decode_panel_scales(sch: Schedule, spec: MmFp4, width: x86.Width) -> None:
    """Four scales of a vector of rows at a time; plain loops where a row has fewer."""
    if spec.k // spec.block < COLS_128X4:
        return
    scales = first_with(spec.format.scale).name
    name = x86_panels.decode_panel_scales(width.level, scales, COLS_128X4)
    n, group, col = last_loops(sch, sch.get_sblock("block_scale"), 3)
    vector, lane = sch.split(n, [None, width.lanes])
    sch.reorder(vector, group, lane, col)
    sch.tensorize(lane, name)


def _flatten_scales(sch: Schedule) -> None:
    """Rows of scales: groups of four one after the other, and one loop over them."""
    scale = sch.get_sblock("block_scale")
    sch.transform_layout(scale, ("write", 0), lambda n, g, c: (n, g * COLS_128X4 + c))
    sch.fuse(*last_loops(sch, scale, 2))


def _panel_depth(spec: MmFp4, level: str) -> int:
    """Elements of a row of b that a staged panel's decode takes at a time."""
    if spec.format.b is E2M1:
        return x86_panels.panel_depth(level, spec.k)
    return x86_gemm.e4m3_depth(level, spec.k)


def _decode_a(sch: Schedule, spec: MmFp4, width: x86.Width, compute: str, row_tile: int) -> None:
    """Rows an odd number of cache lines apart, as in `cpu.linear_panels`; a vector at a time."""
    _decode_a_scales(sch)
    widen = sch.get_sblock("widen")
    t, i, k = sch.get_loops(widen)
    pair = 2 if compute == "bfloat16" else 1
    lanes = width.lanes * pair
    sch.storage_align(widen, 0, axis=1, factor=2 * lanes, offset=lanes)
    _, lane = sch.split(k, [None, width.lanes])
    if row_tile >= cpu.PARALLEL_COPY_ROWS:
        sch.parallel(sch.fuse(t, i))
    if spec.format.a is not E2M1:
        sch.vectorize(lane)
    else:
        sch.tensorize(lane, x86_rows.decode_row(width.level, compute))


def _decode_a_scales(sch: Schedule) -> None:
    """Four scales at a time: they lie together in the 128x4 layout."""
    _copy_scale_bytes(sch, "a_bytes")
    vectorize_last(sch, sch.get_sblock("a_scale"), COLS_128X4, COLS_128X4)


def _copy_scale_bytes(sch: Schedule, name: str) -> None:
    block = sch.get_sblock(name)
    vectorize_last(sch, block, int(sch.get(last_loops(sch, block, 1)[0]).extent), COLS_128X4)
