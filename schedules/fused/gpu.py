"""GPU schedules of the fused ops: RMS norm and activations that end in FP4 codes.

A CTA takes a row of the norm: its threads hold the row in registers, a block of elements each (or
several), from the first load to the last store.
"""

from __future__ import annotations

from functools import partial

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ExprRV, LoopRV

from blockscale.base.formats import NUMBERS, first_with
from blockscale.base.sizes import ceil_div, round_up
from blockscale.base.targets import BULK_COPIES, gpu
from blockscale.schedules.gpu_steps import (
    BRANCH_FREE,
    MAX_THREADS,
    WARP,
    bind,
    in_registers,
    tensorize,
)
from blockscale.schedules.steps import Choose, Sketch, last_loops
from blockscale.specs import ActQuantize, NormQuantize
from blockscale.specs.fused import FP8
from blockscale.tir.fused.four_over_six import MOST
from blockscale.tir.fused.mxfp8 import MxFp8Rule
from blockscale.tir.fused.norm_quantize import GROUP
from blockscale.tir.intrin.cuda import act as cuda_act
from blockscale.tir.intrin.cuda import blocks as cuda_blocks
from blockscale.tir.intrin.cuda import fused as cuda_fused
from blockscale.tir.intrin.cuda import mxfp8 as cuda_mxfp8

MAX_ELEMENTS = 64
"""Elements of a row that a thread may hold: they take 128 registers."""

ONE_BLOCK_THREADS = 512
"""Threads up to which each takes one block of a row.

Above, CTAs with fewer threads and more blocks overlap better: 1024 rows of 16384 on an H200 took
36.3 us with 1024 threads a row, 33.9 us with 512, 33.1 us with 256.
"""

ROW_WARPS = (2, 4, 8)
"""Rows of a CTA that has a warp for each."""

SMALL_BATCH = 64
"""Rows up to which what counts is how soon a row is done: as many threads as it has blocks."""

LARGE_BATCH = 1024
"""Rows from which a thread of a row of NVFP4 with linear scales has several blocks: fewer sums.

4096 rows of 7168 on an H200 (2026-11-23): one block 54.0 us, two 53.6, three 51.7, four 49.9; with
128x4 scales one block 52.8, four 53.9; MXFP4 one block 52.3, two 54.3.  It is also the number of
rows from which residual_out is stored in bulk: of two kernels written to try it on 256 rows of 7168
the one in bulk took 6.5 us, the other 5.6 (2026-11-26).
"""

MAX_STAGED = (48 << 10) - 1024
"""Bytes of a row that may be staged: a CTA has 48 KiB of static shared memory, sums included."""

TWO_BLOCKS_HIDDEN = 4096
"""Width from which a thread of a staged row of NVFP4 has two blocks, below it one.

Rows of 2048, 4096, 7168, 8192 and 16384 in 128x4, on an H200 (2026-11-26), one block and two, 4096
of them: 16.7 and 16.9 us, 31.0 and 30.4, 51.9 and 51.5, 59.3 and 58.4, 143 and 114.
"""

LARGEST_BATCH = 4096
"""Rows from which rows of NVFP4 with 128x4 scales are stored to stay in the cache, two blocks a
thread.

On an H200 (2026-11-23), one block and gone at once, two and gone, two and kept: 4096 rows of 7168
54.9 us, 53.2, 52.3; 16384 rows 210.1, 202.8, 198.3; 4096 rows of 8192 61.6, 61.2, 60.1.
"""


def row_threads(blocks: int, block: int) -> list[int]:
    """Threads that may share a row of ``blocks``: whole warps, which the reduction needs."""
    least = ceil_div(blocks, MAX_THREADS)
    most = max(least, MAX_ELEMENTS // block)
    return sorted({round_up(ceil_div(blocks, part), WARP) for part in range(least, most + 1)})


def _preferred_threads(spec: NormQuantize, rows: int, bulk: bool) -> int:
    every, half = (round_up(ceil_div(spec.blocks, part), WARP) for part in (1, 2))
    if bulk:
        return half if spec.block == GROUP and spec.hidden >= TWO_BLOCKS_HIDDEN else every
    if _stays(spec, rows):
        return half
    small = rows < LARGE_BATCH or spec.layout != "linear" or spec.block > GROUP
    if rows <= SMALL_BATCH or (small and every <= ONE_BLOCK_THREADS):
        return every
    return every * spec.block // MAX_ELEMENTS


def _stays(spec: NormQuantize, rows: int) -> bool:
    """Return whether what is stored shall stay in the cache, see `LARGEST_BATCH`."""
    return spec.block == GROUP and spec.layout != "linear" and rows >= LARGEST_BATCH


def _in_bulk(spec: NormQuantize, arch: str) -> bool:
    """Return whether a CTA can stage the row of residual_out and store it as a whole."""
    staged = spec.hidden * cuda_blocks.BYTES[spec.dtype]
    return spec.residual and BULK_COPIES in gpu(arch).features and staged <= MAX_STAGED


def norm_quantize_sketches(spec: NormQuantize, rows: int, arch: str) -> list[Sketch]:
    """Sketches of `fused.norm_quantize_threads`, tuned at ``rows`` for ``arch``.

    They differ in how residual_out is stored, by each thread or a row in bulk, in the cache hints
    of the stores, in which rows CTAs take one after the other, and in whether rstd is computed
    without branches; where a warp can hold a row, also CTAs of several rows.
    """
    keeps = spec.block != GROUP or _stays(spec, rows)
    hints = cuda_blocks.HINTS if keeps else cuda_blocks.HINTS[::-1]
    forms = [("rows", True), ("rows", False)]
    if spec.layout != "linear":
        forms.insert(len(forms) if _stays(spec, rows) else 0, ("tiles", True))
    sketches: list[Sketch] = [
        partial(
            norm_quantize,
            spec=spec,
            hint=hint,
            prefer=_preferred_threads(spec, rows, bulk=False),
            order=order,
            branch_free=branch_free,
        )
        for order, branch_free in forms
        for hint in hints
    ]
    if _in_bulk(spec, arch):
        prefer = _preferred_threads(spec, rows, bulk=True)
        bulk: list[Sketch] = [
            partial(norm_in_bulk, spec=spec, prefer=prefer, order=order)
            for order, branch_free in forms
            if branch_free
        ]
        sketches = [*bulk, *sketches] if rows >= LARGE_BATCH else [*sketches, *bulk]
    if ceil_div(spec.blocks, WARP) * spec.block <= MAX_ELEMENTS:
        sketches += [partial(norm_of_warps, spec=spec, hint=hint) for hint in hints]
    return sketches


def norm_quantize(
    sch: Schedule,
    choose: Choose,
    spec: NormQuantize,
    hint: str,
    prefer: int,
    order: str,
    branch_free: bool,
) -> None:
    """A row: loads, h and the sum of its squares, a reduction in the CTA, y and its codes."""
    threads = _row_a_cta(sch, choose, spec, prefer, order)
    _norm_row(sch, spec, threads, hint)
    if branch_free:
        sch.annotate(sch.get_sblock("rstd"), BRANCH_FREE, 1)


def norm_in_bulk(
    sch: Schedule, choose: Choose, spec: NormQuantize, prefer: int, order: str
) -> None:
    """The same, residual_out from shared memory by one bulk copy: whole lines, not half sectors."""
    threads = _row_a_cta(sch, choose, spec, prefer, order)
    _norm_row(sch, spec, threads, "BS_KEEP", bulk=True)
    sch.annotate(sch.get_sblock("rstd"), BRANCH_FREE, 1)


def _row_a_cta(
    sch: Schedule, choose: Choose, spec: NormQuantize, prefer: int, order: str
) -> ExprRV:
    """Bind rows to CTAs; return how many threads share one."""
    threads = choose(sch, row_threads(spec.blocks, spec.block), prefer)
    row = sch.get_loops(sch.get_sblock("row"))[0]
    if order == "tiles":
        row = _sector_after_sector(sch, row)
    sch.bind(row, "blockIdx.x")
    return threads


def norm_of_warps(sch: Schedule, choose: Choose, spec: NormQuantize, hint: str) -> None:
    """A row a warp, several a CTA: a sum of 32 lanes needs no barrier."""
    warps = choose(sch, list(ROW_WARPS), ROW_WARPS[-1])
    row = sch.get_loops(sch.get_sblock("row"))[0]
    if spec.layout != "linear":
        row = _sector_after_sector(sch, row)
    bind(sch, sch.split(row, [None, warps]), ("blockIdx.x", "threadIdx.y"))
    _norm_row(sch, spec, WARP, hint)
    sch.annotate(sch.get_sblock("rstd"), BRANCH_FREE, 1)


def _sector_after_sector(sch: Schedule, row: LoopRV) -> LoopRV:
    """Return the loop over rows in the order of their scales in the 128x4 layout.

    The rows r, r + 32, r + 64, r + 96, and those after each, write eight parts of four bytes of the
    same sectors: CTAs that run at the same time.
    """
    tile, quarter, within = sch.split(row, [None, 4, 32])
    sch.reorder(tile, within, quarter)
    return sch.fuse(tile, within, quarter)


def _norm_row(
    sch: Schedule, spec: NormQuantize, threads: ExprRV | int, hint: str, bulk: bool = False
) -> None:
    """Divide a row among ``threads``; from the first load to the last store in registers.

    ``bulk``: residual_out is staged in shared memory.
    """
    # BS_INPLACE: of the weight too, or ptxas sinks its loads below the reduction.
    loads = {"load_input": "BS_KEEP", "load_weight": "BS_INPLACE"}
    if spec.residual:
        loads["load_residual"] = "BS_INPLACE"
    late = len(sch.get_loops(sch.get_sblock("load_weight"))) == 1  # in the block "encode"
    shared = [name for name in loads if not (late and name == "load_weight")]
    stored = ["residual"] if spec.residual else []
    if spec.residual and not bulk:
        sch.reverse_compute_inline(sch.get_sblock("store_residual"))
    for name in (*shared, "h", *stored, "sum", "total", "encode"):
        _share(sch, name, threads)
    if spec.layout != "linear":
        _share(sch, "pad", threads)
    sch.compute_inline(sch.get_sblock("magnitude"))
    sch.compute_inline(sch.get_sblock("code"))
    in_registers(sch, *loads, "gs", "h", "square_sum", "total", "rstd", "norm")
    in_registers(sch, "amax", "scale", "inverse", "pack")
    for name, kind in loads.items():
        tensorize(sch, name, cuda_blocks.load(spec.dtype, spec.block, kind))
    _tensorize(sch, "gs", cuda_fused.factor(spec.convention))
    _norm_arithmetic(sch, spec)
    rounded = cuda_blocks.store_rounded(spec.dtype, spec.block, hint)
    if bulk:
        sch.set_scope(sch.get_sblock("residual"), 0, "shared")
        tensorize(sch, "residual", cuda_blocks.stage_rounded(spec.dtype, spec.block))
        _tensorize(sch, "store_residual", cuda_blocks.store_row(spec.dtype, spec.hidden))
    elif spec.residual:
        tensorize(sch, "residual", rounded)
    if spec.y_out:
        _tensorize(sch, "y_out", rounded)
    _tensorize(sch, "store_codes", cuda_blocks.store("uint8", spec.block // 2, hint))


def _share(sch: Schedule, name: str, threads: ExprRV | int) -> None:
    """Divide the loop over blocks that block ``name`` is in among the threads of a row."""
    loops = sch.get_loops(sch.get_sblock(name))
    block = loops[-1] if name == "pad" else loops[0]  # that one is beside "row", in its loops
    part, thread = sch.split(block, [None, threads])
    sch.reorder(thread, part)
    sch.bind(thread, "threadIdx.x")
    sch.unroll(part)


def _tensorize(sch: Schedule, name: str, intrinsic: str) -> None:
    """Map the innermost loop of block ``name``, which has no bounds check, onto ``intrinsic``."""
    sch.tensorize(last_loops(sch, sch.get_sblock(name), 1)[0], intrinsic)


def _norm_arithmetic(sch: Schedule, spec: NormQuantize) -> None:
    count, dtype = spec.block, spec.dtype
    first = cuda_fused.add if spec.residual else cuda_fused.widened
    tensorize(sch, "h", first(dtype, count))
    _tensorize(sch, "square_sum", cuda_fused.square_sum(count))
    _tensorize(sch, "norm", cuda_fused.norm(dtype, count, spec.residual, spec.convention))
    amax = sch.get_sblock("amax")
    sch.decompose_reduction(amax, sch.get_loops(amax)[-1])
    _tensorize(sch, "amax_update", cuda_fused.most(count))
    scaled = spec.scaled
    _tensorize(sch, "scale", cuda_fused.scale_of(spec.scale_format, scaled))
    _tensorize(sch, "inverse", cuda_fused.inverse_of(spec.scale_format, scaled))
    _tensorize(sch, "pack", cuda_fused.codes_of(count))


ACT_WARPS = (2, 4, 8)
"""Warps of a CTA of activation kernels; each thread has one block."""


def act_quantize_sketches(spec: ActQuantize) -> list[Sketch]:
    """Sketches of `fused.act_quantize_threads`: a CTA in a tile of scales, a CTA in a row."""
    if spec.finds_scale:
        return [partial(token_quantize, spec=spec)]
    layouts = [spec.layout, "linear"] if spec.layout != "linear" else ["linear"]
    return [partial(act_quantize, spec=spec, order=order) for order in layouts]


def act_quantize(sch: Schedule, choose: Choose, spec: ActQuantize, order: str) -> None:
    """A block a thread, from its loads to its last store."""
    _bind_blocks(sch, choose(sch, list(ACT_WARPS), 4), order)
    loads = ["load_gate", "load_up"] if spec.gated else ["load_input"]
    in_registers(sch, *loads)
    for name in loads:
        dtype = "uint8" if spec.dtype == FP8 else spec.dtype
        _tensorize(sch, name, cuda_blocks.load(dtype, spec.block, "BS_KEEP"))
    if spec.dtype == FP8:
        in_registers(sch, "value")
        _unroll(sch, "value")
    act_steps(sch, spec)


def token_quantize(sch: Schedule, choose: Choose, spec: ActQuantize) -> None:
    """A row a CTA: the largest magnitude of each thread's blocks, a reduction, then the codes."""
    sch.bind(sch.get_loops(sch.get_sblock("row"))[0], "blockIdx.x")
    for name in ("part", "total", "row_scale", "encode"):
        sch.bind(sch.get_loops(sch.get_sblock(name))[0], "threadIdx.x")
    if spec.layout != "linear":
        sch.bind(sch.get_loops(sch.get_sblock("pad"))[1], "threadIdx.x")  # after that over rows
    in_registers(sch, "start", "keep", "total", "row_top", "row_factor")
    in_registers(sch, "peek", "load_input")
    for name in ("peek", "load_input"):
        _tensorize(sch, name, cuda_blocks.load(spec.dtype, spec.block, "BS_KEEP"))
    _unroll(sch, "most")
    act_steps(sch, spec)


def _unroll(sch: Schedule, *names: str) -> None:
    """Unroll the innermost loops of these blocks."""
    for name in names:
        sch.unroll(last_loops(sch, sch.get_sblock(name), 1)[0])


def act_steps(sch: Schedule, spec: ActQuantize, held: bool = False) -> None:
    """What a thread does with a block of 16-bit values, or of gates and ups, in its registers.

    ``held``: the global scale is in a register too.
    """
    searches = spec.search != "none"
    sch.compute_inline(sch.get_sblock("magnitude"))
    if not searches:
        sch.compute_inline(sch.get_sblock("code"))
    in_registers(sch, "amax", "scale", *([] if searches else ["factor"]), "pack")
    if spec.gated:
        in_registers(sch, "value", *(["numbers"] if spec.activation == "swiglu" else []))
        _tensorize(sch, "value", cuda_act.activate(spec.activation, spec.dtype, spec.block))
    amax = sch.get_sblock("amax")
    sch.decompose_reduction(amax, sch.get_loops(amax)[-1])
    _tensorize(sch, "amax_update", cuda_blocks.amax(spec.held, spec.block))
    if searches:
        _search_steps(sch, spec)
    else:
        _act_codes(sch, spec, held)
    _tensorize(sch, "store_codes", cuda_blocks.store("uint8", spec.block // 2, "BS_KEEP"))


def mxfp8_steps(sch: Schedule, rule: MxFp8Rule) -> None:
    """What a thread does with a block of 16-bit values in its registers to make MXFP8 of it."""
    sch.compute_inline(sch.get_sblock("magnitude"))
    in_registers(sch, "amax", "scale", "factor", "pack")
    amax = sch.get_sblock("amax")
    sch.decompose_reduction(amax, sch.get_loops(amax)[-1])
    _tensorize(sch, "amax_update", cuda_blocks.amax(rule.dtype, rule.block))
    _tensorize(sch, "scale", cuda_mxfp8.scale_of())
    _tensorize(sch, "factor", cuda_mxfp8.divisor_of())
    _tensorize(sch, "pack", cuda_mxfp8.encode(rule.dtype, rule.block))
    _tensorize(sch, "store_codes", cuda_blocks.store("uint8", rule.block, "BS_KEEP"))


def _bind_blocks(sch: Schedule, warps: ExprRV, order: str) -> None:
    """Bind experts, rows and blocks: a warp's lanes are neighbours in ``order`` of the scales.

    Of 128x4, 32 neighbours are four blocks of the rows r, r + 1, r + 32, r + 33, ... r + 97: loads
    of 128 bytes, and one store of 32.
    """
    expert, row, block = sch.get_loops(sch.get_sblock("block"))
    if order == "linear":
        group, warp, lane = sch.split(block, [None, warps, WARP])
        thread = sch.fuse(warp, lane)
        bind(sch, (row, group, thread), ("blockIdx.x", "blockIdx.y", "threadIdx.x"))
    elif order == "8x4":
        tile, inner = sch.split(row, [None, 8])
        group, warp, col = sch.split(block, [None, warps, 4])
        sch.reorder(tile, group, warp, inner, col)
        thread = sch.fuse(warp, inner, col)
        bind(sch, (tile, group, thread), ("blockIdx.x", "blockIdx.y", "threadIdx.x"))
    else:
        tile, quarter, pair, inner = sch.split(row, [None, 4, 16, 2])
        group, warp, col = sch.split(block, [None, warps, 4])
        sch.reorder(tile, pair, group, warp, inner, quarter, col)
        thread = sch.fuse(warp, inner, quarter, col)
        bind(
            sch, (sch.fuse(tile, pair), group, thread), ("blockIdx.x", "blockIdx.y", "threadIdx.x")
        )
    sch.bind(expert, "blockIdx.z")


def _act_codes(sch: Schedule, spec: ActQuantize, held: bool) -> None:
    """Scales and codes of 16-bit values: those of `cuda_blocks`, or FlashInfer's exact mode."""
    if spec.convention == "flashinfer":
        if spec.dtype != FP8 and not spec.finds_scale:
            _tensorize(sch, "scale", cuda_act.scale_of(spec.scale_format))
            _tensorize(sch, "factor", cuda_act.factor_of(spec.scale_format))
        _tensorize(sch, "pack", cuda_act.codes_of(spec.held, spec.block))
        return
    row = first_with(NUMBERS[spec.scale_format])
    _tensorize(sch, "scale", cuda_blocks.scale_of(row.name, "ceil", spec.dtype, held))
    _tensorize(sch, "factor", cuda_blocks.divisor_of(row.name, held))
    _, inner = sch.split(last_loops(sch, sch.get_sblock("pack"), 1)[0], [None, row.block // 2])
    sch.tensorize(inner, cuda_blocks.encode(row.name, spec.dtype, True))


def _search_steps(sch: Schedule, spec: ActQuantize) -> None:
    """Both candidates of `four_over_six.search_threads`: codes, their values, errors; a choice."""
    for name in MOST:
        sch.compute_inline(sch.get_sblock(f"code_{name}"))
        steps = ("byte", "value", "factor", "pack", "weigh", "error")
        in_registers(sch, *(f"{step}_{name}" for step in steps))
        _tensorize(sch, f"pack_{name}", cuda_act.codes_of(spec.dtype, spec.block))
        _tensorize(sch, f"weigh_{name}", cuda_blocks.decode(spec.block))
        error = sch.get_sblock(f"error_{name}")
        sch.decompose_reduction(error, sch.get_loops(error)[-1])
        _unroll(sch, f"error_{name}_update")
    _unroll(sch, "pack")
