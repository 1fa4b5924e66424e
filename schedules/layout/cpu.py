"""CPU schedules of `blockscale.tir.layout.relayout`: vectors along plain rows, words of the layout.

A task has the tiles of some rows: words along the columns are a vector, the rows of a tile are
registers whose elements are exchanged in them; then words go where the layout has them.  The tiles
that complete its cache lines come one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tvm.s_tir import Schedule

from blockscale.schedules.steps import Choose, Sketch, last_loops
from blockscale.specs.layout import Relayout
from blockscale.tir.layout.plan import Plan, follow
from blockscale.tir.layout.relayout import block_names, of_plan

BLOCKS = (1, 2, 4, 8)
"""Tiles along the rows before the next columns."""


def relayout_sketches(spec: Relayout, plans: Sequence[Plan]) -> list[Sketch]:
    """Sketches of `blockscale.tir.layout.relayout.tiles` with lanes last."""
    return [partial(relayout, spec=spec, plans=plans)]


def relayout(sch: Schedule, choose: Choose, spec: Relayout, plans: Sequence[Plan]) -> None:
    """Rows in parallel, lanes as vectors."""
    # Of layouts that are columns, 64 bytes of a column are 4 tiles or 8.
    run = choose(sch, list(BLOCKS), 4)
    names = block_names(sch.mod["main"])
    for number, plan in enumerate(plans):
        _tiles(sch, of_plan(names, number), number, plan, spec, run)
    first, second, *_ = sch.get_loops(sch.get_sblock("element"))
    sch.parallel(sch.fuse(first, second))


def _tiles(
    sch: Schedule, names: list[str], number: int, plan: Plan, spec: Relayout, run: object
) -> None:
    """Schedule one plan."""
    axis0, axis1, axis2, fixed = sch.get_loops(sch.get_sblock(f"load_{number}"))[:4]
    outer, inner = sch.split(axis1, [None, run])
    sch.reorder(axis0, outer, axis2, inner, fixed)
    sch.parallel(sch.fuse(axis0, outer))
    lanes = len(plan.lanes)
    for name in names:
        block = sch.get_sblock(name)
        if name.startswith(("take", "exchange", "give")):
            regs, lane = last_loops(sch, block, 2)
            sch.unroll(regs)
            if lanes:
                sch.vectorize(lane)
        elif name in (f"load_{number}", f"store_{number}"):
            plain = name.startswith("load") != spec.inverse
            checked = f"{name}_vector" in names
            count = 2 if checked else 3
            loops = last_loops(sch, sch.get_sblock(f"{name}_vector") if checked else block, count)
            sch.unroll(loops[0])
            if lanes and not checked and follow(plan, plain):
                sch.vectorize(loops[1])
