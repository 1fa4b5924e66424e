"""CPU schedules of Edge-LLM's GEMVs: a task is some strips of 64 columns of one slot, all rows.

Sums of a strip stay in registers for 16 rows; then their block scales join them to the totals.
"""

from __future__ import annotations

from functools import partial

from tvm.s_tir import Schedule

from blockscale.schedules.steps import Choose, Sketch, last_loops, vectorize_last
from blockscale.specs.edgellm import EdgeDown, EdgeUp
from blockscale.tir.edgellm.passes import LANES
from blockscale.tir.intrin.x86 import edgellm as x86_edgellm
from blockscale.tir.intrin.x86 import width as x86

VECTOR = 64
"""Elements of what is copied or added at once."""


def sketches(spec: EdgeUp | EdgeDown, level: str) -> list[Sketch]:
    """The sketch of `blockscale.tir.edgellm.passes`."""
    return [partial(_gemv, spec=spec, level=level)]


def _gemv(sch: Schedule, choose: Choose, spec: EdgeUp | EdgeDown, level: str) -> None:
    width = x86.WIDTHS[level]
    task = sch.get_sblock("task")
    sch.parallel(sch.fuse(*sch.get_loops(task)))
    for name in ("clear_total", "clear"):
        vectorize_last(sch, sch.get_sblock(name), LANES, LANES)
    dot, scale = sch.get_sblock("dot"), sch.get_sblock("scale")
    q, lane, k = last_loops(sch, dot, 3)
    if width.level == "plain":
        sch.reorder(k, q, lane)
    else:
        sch.tensorize(q, x86_edgellm.dot(width.level))
        sch.tensorize(last_loops(sch, scale, 2)[0], x86_edgellm.scale(width.level))
    coded = isinstance(spec, EdgeUp) and spec.dtype == "nvfp4"
    vectorize_last(sch, sch.get_sblock("act"), spec.rows, LANES if coded else VECTOR)
    if isinstance(spec, EdgeDown):
        _combine(sch)


def _combine(sch: Schedule) -> None:
    """Columns by vectors, in parallel; the slots of a token in turn."""
    out, combine = sch.get_sblock("out"), sch.get_sblock("combine")
    group, _ = sch.split(last_loops(sch, out, 1)[0], [None, VECTOR])
    sch.compute_at(combine, group, preserve_unit_loops=True)
    n, j = last_loops(sch, combine, 2)
    sch.reorder(j, n)
    sch.vectorize(n)
    sch.vectorize(last_loops(sch, sch.decompose_reduction(combine, j), 1)[0])
    sch.vectorize(last_loops(sch, out, 1)[0])
