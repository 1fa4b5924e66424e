"""GPU schedules of `blockscale.tir.relayout`: a tile's words in registers, its lanes a warp.

A warp touches whole sectors on both sides, see `blockscale.tir.relayout_plan`; warps of a CTA lie
beside it along the columns, along the fixed digits and along the rows, and complete lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ExprRV

from blockscale.schedules._gpu_steps import bind, in_registers, tensorize
from blockscale.schedules._steps import Choose, Sketch, last_loops
from blockscale.specs_layout import Relayout
from blockscale.tir.intrin import cuda_blocks
from blockscale.tir.relayout import block_names, of_plan
from blockscale.tir.relayout_plan import Plan

THREADS = 256
"""Threads of a CTA that copies single elements."""


def relayout_sketches(spec: Relayout, plans: Sequence[Plan]) -> list[Sketch]:
    """Sketches of `blockscale.tir.relayout.tiles` with lanes around all steps.

    CTAs that follow each other take the next columns, or the next rows; both with streaming and
    with default caching.
    """
    return [
        partial(relayout, spec=spec, plans=plans, columns=columns, hint=hint)
        for columns in (True, False)
        for hint in cuda_blocks.HINTS
    ]


def relayout(
    sch: Schedule,
    choose: Choose,
    spec: Relayout,
    plans: Sequence[Plan],
    columns: bool,
    hint: str,
) -> None:
    """Warps along columns, fixed digits and rows: at most 8 x 4 x 4 / 4 of them, 1024 threads."""
    warps = choose(sch, [1, 2, 4, 8], 4), choose(sch, [1, 2], 2), choose(sch, [1, 2], 1)
    names = block_names(sch.mod["main"])
    for number, plan in enumerate(plans):
        mine = of_plan(names, number)
        _bind(sch, f"load_{number}", warps, columns)
        for name in mine:
            _step(sch, name, mine, plan, spec, hint)
    axis0, *rest = sch.get_loops(sch.get_sblock("element"))
    group, thread = sch.split(sch.fuse(*rest), [None, THREADS])
    bind(sch, (group, axis0, thread), ("blockIdx.x", "blockIdx.y", "threadIdx.x"))


def _bind(sch: Schedule, name: str, warps: tuple[ExprRV, ...], columns: bool) -> None:
    """Bind the loops around a tile."""
    axis0, axis1, axis2, fixed, lane = sch.get_loops(sch.get_sblock(name))[:5]
    pairs = [
        sch.split(loop, [None, count])
        for loop, count in zip((axis2, fixed, axis1), warps, strict=True)
    ]
    (cols, col), (rest, digit), (rows, row) = pairs
    order = (rows, cols, rest) if columns else (cols, rows, rest)
    sch.reorder(axis0, *order, row, digit, col, lane)
    loops = (sch.fuse(*order), axis0, sch.fuse(row, digit, col, lane))
    bind(sch, loops, ("blockIdx.x", "blockIdx.y", "threadIdx.x"))


def _step(
    sch: Schedule, name: str, names: list[str], plan: Plan, spec: Relayout, hint: str
) -> None:
    """Schedule one block of a tile: registers, or an access."""
    if name.endswith("_vector"):
        return
    block = sch.get_sblock(name)
    if not name.startswith("store"):
        in_registers(sch, name)
    if name.startswith(("take", "exchange", "give")):
        sch.unroll(last_loops(sch, block, 1)[0])
        return
    loading = name.startswith("load")
    side = plan.plain if loading != spec.inverse else plan.laid
    checked = f"{name}_vector" in names
    loops = last_loops(sch, sch.get_sblock(f"{name}_vector") if checked else block, 1 + (not checked))
    sch.unroll(loops[0])
    words = 2 ** plan.vector(side)
    access = cuda_blocks.load if loading else cuda_blocks.store
    tensorize(sch, name, access("uint32", words, hint))
