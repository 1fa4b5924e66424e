"""Schedules of `blockscale.tir.moe.exchange`: CTAs share rows, threads a row."""

from __future__ import annotations

from tvm.s_tir import Schedule

from blockscale.schedules.gpu_steps import bind
from blockscale.schedules.steps import Choose, Sketch, last_loops


def dispatch_sketches() -> list[Sketch]:
    """The sketch of `blockscale.tir.moe.exchange.dispatch`."""
    return [_threads(("send",))]


def combine_sketches(kernels: tuple[str, ...]) -> list[Sketch]:
    """The sketch of `blockscale.tir.moe.exchange.combine`, or of `collect`, by their kernels."""
    return [_threads(kernels)]


def _threads(blocks: tuple[str, ...]) -> Sketch:
    def threads(sch: Schedule, choose: Choose) -> None:
        for block in blocks:
            bind(sch, sch.get_loops(sch.get_sblock(block)), ("blockIdx.x", "threadIdx.x"))

    return threads


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
