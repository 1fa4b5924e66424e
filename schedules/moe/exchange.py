"""Schedules of `blockscale.tir.moe.exchange`: a unit of work is a CTA, its parts are threads."""

from __future__ import annotations

from tvm.s_tir import Schedule

from blockscale.schedules.gemm.cpu_linear import divisors
from blockscale.schedules.gpu_steps import bind
from blockscale.schedules.steps import Choose, Sketch, last_loops

VECTOR = (8, 16, 1)
"""Elements of a row that a CPU adds at a time."""


def dispatch_sketches() -> list[Sketch]:
    """The sketch of `blockscale.tir.moe.exchange.dispatch`."""

    def threads(sch: Schedule, choose: Choose) -> None:
        bind(sch, sch.get_loops(sch.get_sblock("send")), ("blockIdx.x", "threadIdx.x"))
        source, group, part = sch.get_loops(sch.get_sblock("settle"))
        bind(sch, (group, source, part), ("blockIdx.x", "blockIdx.y", "threadIdx.x"))

    return [threads]


def combine_sketches() -> list[Sketch]:
    """The sketch of `blockscale.tir.moe.exchange.combine`."""

    def threads(sch: Schedule, choose: Choose) -> None:
        row, group, part = sch.get_loops(sch.get_sblock("give_back"))
        bind(sch, (sch.fuse(row, group), part), ("blockIdx.x", "threadIdx.x"))
        bind(sch, sch.get_loops(sch.get_sblock("reduce")), ("blockIdx.x", "threadIdx.x"))

    return [threads]


def reduce_sketches(hidden: int) -> list[Sketch]:
    """The sketch of `blockscale.tir.moe.exchange.reduce`: vectors of a row, tokens in parallel."""

    def vectors(sch: Schedule, choose: Choose) -> None:
        total = sch.get_sblock("sum")
        token, column, slot = sch.get_loops(total)
        width = choose(sch, divisors(hidden, VECTOR), 8)
        group, lane = sch.split(column, [None, width])
        sch.reorder(token, group, slot, lane)
        sch.vectorize(lane)
        store = sch.get_sblock("store")
        row, column = sch.get_loops(store)
        outer, inner = sch.split(column, [None, width])
        sch.vectorize(inner)
        sch.compute_at(total, outer, preserve_unit_loops=True)
        slot, lane = last_loops(sch, total, 2)
        init = sch.decompose_reduction(total, slot)
        sch.vectorize(last_loops(sch, init, 1)[0])
        sch.parallel(row)

    return [vectors]
