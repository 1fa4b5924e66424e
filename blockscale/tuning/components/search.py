"""MetaSchedule's search strategy over decisions: points of a space, of which few are replayed.

TVM's evolutionary search replays hundreds of traces for every batch.  Here points are drawn, varied
and ranked as data; only those to be measured are scheduled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from random import Random
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.runner import RunnerResult
from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate, PySearchStrategy

from blockscale.building.records import FAILED_S, median_us
from blockscale.building.space import Point, Space, replay, trace_json
from blockscale.building.store import argument_infos

_WARMUP = 8
"""Measured points before the model is asked; below, points are drawn at random."""
_ENUMERATE = 4096
"""Spaces up to this size are ranked as a whole; larger ones are searched by evolution."""
_LAST = 4
"""Batches that measure what is left of a space, so that no model is asked for their order: training
it takes 0.2 s, in which 64 cores build 20 norms."""
_POPULATION = 192
_GENERATIONS = 3
_PARENTS = 12
_RANDOM_SHARE = 0.2
"""Part of each batch drawn without the model: keeps it honest about what it has not seen."""
_MAX_ILLEGAL = 64
"""Points in a row that TensorIR refuses before the search is given up."""


@derived_object
class DecisionSearch(PySearchStrategy):
    """Proposes points of the space of ``sketches``, best guess first, never one that is known.

    ``known``: traces as JSON with microseconds (infinite: it failed), of earlier sessions.
    ``schedules=False``: candidates stand for points (`Sketches.stand_in`); who builds schedules.
    """

    def __init__(
        self,
        sketches: Any,
        seed: int = 0,
        known: Iterable[tuple[Any, float]] = (),
        schedules: bool = True,
    ) -> None:
        self._sketches, self._seed, self._earlier = sketches, seed, list(known)
        self._schedules = schedules
        self._rng = Random(seed)
        self.known: dict[Point, float] = {}
        self._pending: set[Point] = set()

    def _initialize_with_tune_context(self, context: Any) -> None:
        self._context = context

    def pre_tuning(
        self, max_trials: int, per_iter: int, designs: Any, database: Any, cost_model: Any
    ) -> None:
        """Take over the size of a batch and the cost model; ``designs`` are those of `Sketches`."""
        self._per_iter, self._model = per_iter, cost_model

    def post_tuning(self) -> None:
        """Nothing is left to do."""

    def clone(self) -> Any:
        """Return a strategy that has measured nothing."""
        return DecisionSearch(self._sketches, self._seed, self._earlier, self._schedules)

    @cached_property
    def space(self) -> Space:
        """The space, with what is known of it told, to the model as well."""
        space: Space = self._sketches.space
        for trace, us in self._earlier:
            if (point := space.point(trace)) is not None:
                self.tell(point, us)
        if self.known:
            seconds = (us / 1e6 if us < math.inf else FAILED_S for us in self.known.values())
            results = [RunnerResult([each], None) for each in seconds]
            self._model.update(
                self._context, list(map(self._sketches.stand_in, self.known)), results
            )
        return space

    def generate_measure_candidates(self) -> list[MeasureCandidate] | None:
        """Return the next candidates; None when the space is exhausted."""
        found: list[MeasureCandidate] = []
        refused = 0
        while len(found) < self._per_iter and refused < _MAX_ILLEGAL:
            points = self.ask(self._per_iter - len(found))
            if not points:
                break
            made = [each for point in points if (each := self._candidate(point)) is not None]
            refused += len(points) - len(made)
            found += made
        return found or None

    def _candidate(self, point: Point) -> MeasureCandidate | None:
        """Schedule ``point``; None when TensorIR refuses it, or made a known one of it."""
        if not self._schedules:
            return self._sketches.stand_in(point)
        try:
            sch = replay(self._context.mod, self.space.trace(point))
        except Exception:  # e.g. the design needs another number of loops for these decisions
            self.tell(point, math.inf)
            return None
        same = self.space.point(trace_json(sch.trace)) or point
        if same != point:  # TVM clipped a tile
            self.tell(point, self.known.get(same, math.inf))
            if not self._fresh([same], 1):
                return None
        return MeasureCandidate(sch, argument_infos(sch.mod) or [])

    def notify_runner_results(self, candidates: Any, results: Any) -> None:
        """Learn what candidates took; one without a result that was not run is known no better."""
        for candidate, result in zip(candidates, results, strict=True):
            if (point := self._sketches.point(candidate)) is not None:
                self.tell(point, median_us([float(s) for s in result.run_secs or ()]))

    def tell(self, point: Point, us: float) -> None:
        """Learn that ``point`` takes ``us`` microseconds (infinite: it failed)."""
        self.known[point] = min(us, self.known.get(point, math.inf))
        self._pending.discard(point)

    def ask(self, count: int) -> list[Point]:
        """Return up to ``count`` unknown points; fewer, or none, when the space is exhausted."""
        space = self.space
        self._all = space.all() if space.size <= _ENUMERATE else None
        if sum(math.isfinite(us) for us in self.known.values()) < _WARMUP:
            return self._fresh(self._draws(count * 8), count)
        most = _LAST * count
        if self._all is not None and len(left := self._draws(most + 1)) <= most:
            return self._fresh(left, count)
        guess = round(count * (1 - _RANDOM_SHARE) + self._rng.random() - 0.5)
        chosen = self._fresh(self._ranked(), min(max(guess, 1), count))
        return chosen + self._fresh(self._draws(count * 8), count - len(chosen))

    def _unknown(self, points: list[Point]) -> list[Point]:
        return [p for p in points if p not in self.known and p not in self._pending]

    def _fresh(self, points: list[Point], count: int) -> list[Point]:
        """Return at most so many of ``points`` that are unknown, each once; they are pending."""
        found = list(dict.fromkeys(self._unknown(points)))[:count]
        self._pending.update(found)
        return found

    def _draws(self, count: int) -> list[Point]:
        if self._all is not None:
            unknown = self._unknown(self._all)
            return self._rng.sample(unknown, min(count, len(unknown)))
        return [self.space.random(self._rng) for _ in range(count)]

    def _ranked(self) -> list[Point]:
        """Return candidate points, lowest predicted time first."""
        if self._all is not None:
            return self._sorted([p for p in self._all if p not in self.known])
        best = sorted(self.known, key=lambda p: self.known[p])[:_PARENTS]
        pool = dict.fromkeys(best + self._draws(_POPULATION))
        parents = best
        for _ in range(_GENERATIONS):
            for _ in range(_POPULATION):
                mother, father = self._rng.choice(parents), self._rng.choice(parents)
                child = self.space.cross(mother, father, self._rng)
                pool[self.space.mutate(child, self._rng)] = None
            ranked = self._sorted(list(pool))
            parents = ranked[: 4 * _PARENTS]
        return ranked

    def _sorted(self, points: list[Point]) -> list[Point]:
        if not points:
            return []
        scores = self._model.predict(self._context, list(map(self._sketches.stand_in, points)))
        return [points[i] for i in (-scores).argsort(kind="stable")]
