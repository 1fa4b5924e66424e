"""GPU schedules of `blockscale.tir.layout.relayout`: a tile's words in registers, its lanes a warp.

A warp touches whole sectors on both sides, see `blockscale.tir.layout.plan`; warps of a CTA lie
beside it along the columns, along the fixed digits and along the rows, and complete lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tvm.s_tir import Schedule

from blockscale.schedules.gpu_steps import bind, in_registers, tensorize
from blockscale.schedules.steps import Choose, Sketch, last_loops
from blockscale.specs.layout import Relayout
from blockscale.tir.intrin.cuda import blocks as cuda_blocks
from blockscale.tir.layout.plan import Plan, streams
from blockscale.tir.layout.relayout import block_names, of_plan

GRID = ("blockIdx.x", "blockIdx.y", "blockIdx.z")
"""Axes of the grid: no index needs a division.  The first may have 2^31 - 1 CTAs, others 65535."""

THREADS = 256
"""Threads of a CTA that copies single elements."""


def relayout_sketches(spec: Relayout, plans: Sequence[Plan]) -> list[Sketch]:
    """Sketches of `blockscale.tir.layout.relayout.tiles` with lanes around all steps.

    CTAs that follow each other take the next columns, or the next rows; both with streaming and
    with default caching.
    """
    return [
        partial(relayout, spec=spec, plans=plans, columns=columns, hint=hint)
        for columns in (True, False)
        for hint in (reversed(cuda_blocks.HINTS) if streams(plans[0]) else cuda_blocks.HINTS)
    ]


def relayout(
    sch: Schedule,
    choose: Choose,
    spec: Relayout,
    plans: Sequence[Plan],
    columns: bool,
    hint: str,
) -> None:
    """Loads, exchanges and stores of a tile in turn; elements where no tile fits."""
    names = block_names(sch.mod["main"])
    for number, plan in enumerate(plans):
        mine = of_plan(names, number)
        _bind(sch, choose, f"load_{number}", columns)
        for name in mine:
            _step(sch, name, mine, plan, spec, hint)
    axis0, axis1, axis2, fixed = sch.get_loops(sch.get_sblock("element"))
    group, thread = sch.split(sch.fuse(axis2, fixed), [None, THREADS])
    bind(sch, (group, axis1, axis0, thread), (*GRID, "threadIdx.x"))


def _bind(sch: Schedule, choose: Choose, name: str, columns: bool) -> None:
    """Bind the loops around a tile."""
    axis0, axis1, axis2, fixed, lane = sch.get_loops(sch.get_sblock(name))[:5]
    digits = int(sch.get(fixed).extent)
    across = choose(sch, [1, 2, 4, 8], 4)
    deep = choose(sch, [count for count in (1, 2, 4) if count <= digits], 2)
    down = choose(sch, [1, 2, 4], 1 if digits > 1 else 2)
    pairs = [
        sch.split(loop, [None, count])
        for loop, count in ((axis2, across), (fixed, deep), (axis1, down))
    ]
    (cols, col), (rest, digit), (rows, row) = pairs
    sch.reorder(axis0, rows, cols, rest, row, digit, col, lane)
    fast, slow = (sch.fuse(cols, rest), rows) if columns else (rows, sch.fuse(cols, rest))
    bind(sch, (fast, slow, axis0, sch.fuse(row, digit, col, lane)), (*GRID, "threadIdx.x"))


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
    loops = last_loops(
        sch, sch.get_sblock(f"{name}_vector") if checked else block, 1 + (not checked)
    )
    sch.unroll(loops[0])
    words = 2 ** plan.vector(side)
    access = cuda_blocks.load if loading else cuda_blocks.store
    tensorize(sch, name, access("uint32", words, hint))
