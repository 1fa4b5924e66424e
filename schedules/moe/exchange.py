"""Schedules of `blockscale.tir.moe.exchange`: a unit of work is a CTA, its parts are threads."""

from __future__ import annotations

from tvm.s_tir import Schedule

from blockscale.schedules.gpu_steps import bind
from blockscale.schedules.steps import Choose, Sketch, last_loops


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


def reduce_sketches() -> list[Sketch]:
    """The sketch of `blockscale.tir.moe.exchange.reduce`: vectors of a row, tokens in parallel."""

    def vectors(sch: Schedule, choose: Choose) -> None:
        total = sch.get_sblock("sum")
        slot, m = last_loops(sch, total, 2)
        sch.vectorize(m)
        init = sch.decompose_reduction(total, slot)
        sch.vectorize(last_loops(sch, init, 1)[0])
        sch.vectorize(last_loops(sch, sch.get_sblock("store"), 1)[0])
        sch.parallel(sch.get_loops(sch.get_sblock("token"))[0])

    return [vectors]
