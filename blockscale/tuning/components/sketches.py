"""MetaSchedule's space generator for our sketches: one design space for each sketch that fits."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir.meta_schedule.arg_info import TensorInfo
from tvm.s_tir.meta_schedule.mutator import MutateTileSize, Mutator
from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate
from tvm.s_tir.meta_schedule.space_generator import PySpaceGenerator

from blockscale.building.space import Point, Space, new_schedule, replay, trace_json
from blockscale.tuning.components.pool import Job, Workers
from blockscale.tuning.worker import unpacked

_POINT = "int64"
"""Type of the only argument of a candidate that stands for a point."""


def draw(workload: Any, level: str, seed: int, mod: Any) -> Space:
    """Return the space of ``workload``, whose module is ``mod``, also `packed`, as data.

    Raises:
        ValueError: no sketch can be scheduled.
    """
    mod = unpacked(mod) if isinstance(mod, bytes) else mod
    return Space(mod, workload.space(level), seed, workload.facts(level))


@derived_object
class Sketches(PySpaceGenerator):
    """The search space of a workload (`catalog.Workload`) at a level, drawn at its first use.

    ``eager=False`` generates nothing: for `DecisionSearch`, which asks for ``space`` when it needs
    it.  Drawing takes up to 0.5 s, and nobody has to wait for it before the first build.
    """

    def __init__(self, workload: Any, level: str, seed: int = 0, eager: bool = True) -> None:
        self.workload, self.level, self.seed, self.eager = workload, level, seed, eager
        # Sketches are complete: no rule or postprocessor of TVM's changes what they say.
        self.sch_rules, self.postprocs = list[Any](), list[Any]()
        self.mutator_probs: dict[Mutator, float] = {MutateTileSize(): 1.0}
        self._mod: Any = None
        self._stand_ins: dict[Point, MeasureCandidate] = {}
        self._points: list[Point] = []
        self._drawn: tuple[Workers, Job] | None = None

    def begin(self, workers: Workers, mod: bytes) -> None:
        """Have one of ``workers`` draw the space of the module, which is `packed`."""
        self._drawn = workers, Job(draw, (self.workload, self.level, self.seed, mod))
        workers.to_build.append(self._drawn[1])

    @cached_property
    def space(self) -> Space:
        """The space as data; ValueError where no sketch can be scheduled."""
        if self._drawn is not None:
            workers, job = self._drawn
            workers.wait(job.done)
            if job.answer is not None and job.answer.error is None:
                found: Space = job.answer.value
                return found
        mod = self._mod or self.workload.mod(self.level)
        return draw(self.workload, self.level, self.seed, mod)

    def stand_in(self, point: Point) -> MeasureCandidate:
        """Return a candidate that stands for ``point``, which nobody has scheduled.

        A cost model is asked for thousands; to replay a trace takes milliseconds.  Its schedule
        says nothing, the only size of its only argument is the point's number.
        """
        if point not in self._stand_ins:
            number = TensorInfo(_POINT, [len(self._stand_ins)])
            self._stand_ins[point] = MeasureCandidate(self._blank, [number])
            self._points.append(point)
        return self._stand_ins[point]

    @cached_property
    def _blank(self) -> Schedule:
        """A schedule without a step."""
        return new_schedule(self._mod)

    def _stands_for(self, candidate: MeasureCandidate) -> Point | None:
        told = candidate.args_info
        stands = len(told) == 1 and str(told[0].dtype) == _POINT
        return self._points[int(told[0].shape[0])] if stands else None

    def point(self, candidate: MeasureCandidate) -> Point | None:
        """Return the point that a candidate is, or stands for; None if it is outside the space."""
        return self._stands_for(candidate) or self.space.point(trace_json(candidate.sch.trace))

    def trace(self, candidate: MeasureCandidate) -> list[Any]:
        """Return the trace of a candidate as JSON, or that of the point for which it stands."""
        point = self._stands_for(candidate)
        return trace_json(candidate.sch.trace) if point is None else self.space.trace(point)

    def _initialize_with_tune_context(self, context: Any) -> None:
        self._mod = context.mod

    def generate_design_space(self, mod: Any) -> list[Schedule]:
        """Return a schedule of ``mod`` for every design."""
        if not self.eager:
            return []
        return [replay(mod, [d.instructions, d.drawn]) for d in self.space.designs]

    def clone(self) -> Any:
        """Return the same space for another context."""
        return Sketches(self.workload, self.level, self.seed, self.eager)
