"""MetaSchedule's space generator for our sketches: one design space for each sketch that fits."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir.meta_schedule.mutator import MutateTileSize, Mutator
from tvm.s_tir.meta_schedule.space_generator import PySpaceGenerator

from blockscale.building.space import Space, replay
from blockscale.tuning.components.pool import Job, Workers


def draw(workload: Any, level: str, seed: int, mod: Any = None) -> Space:
    """Return the space of ``workload`` as data; ValueError where no sketch can be scheduled."""
    mod = mod or workload.mod(level)
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
        self._drawn: tuple[Workers, Job] | None = None

    def begin(self, workers: Workers) -> None:
        """Have one of ``workers`` draw the space."""
        self._drawn = workers, Job(draw, (self.workload, self.level, self.seed))
        workers.to_build.append(self._drawn[1])

    @cached_property
    def space(self) -> Space:
        """The space as data; ValueError where no sketch can be scheduled."""
        if self._drawn is not None:
            workers, job = self._drawn
            workers.wait(lambda: job.answer is not None)
            if job.answer is not None and job.answer.error is None:
                found: Space = job.answer.value
                return found
        return draw(self.workload, self.level, self.seed, self._mod)

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
