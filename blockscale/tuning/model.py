"""The cost model: gradient-boosted trees over the decisions of a point.

MetaSchedule's own feature extractor reads loops and stores and cannot see annotations (52
configurations of a tensorized GEMM gave 4 feature vectors); decisions separate every point.
"""

from __future__ import annotations

import math
from random import Random

import numpy as np

from blockscale.building.space import Point, Space

_WARMUP = 8
"""Measured points before the model is asked; below, points are drawn at random."""
_ENUMERATE = 4096
"""Spaces up to this size are ranked as a whole; larger ones are searched by evolution."""
_POPULATION = 192
_GENERATIONS = 3
_PARENTS = 12
_RANDOM_SHARE = 0.2
"""Part of each batch drawn without the model: keeps it honest about what it has not seen."""


class Search:
    """Proposes points of one space, best guess first, never one that is known."""

    def __init__(self, space: Space, seed: int = 0) -> None:
        self.space = space
        self.known: dict[Point, float] = {}
        self._rng = Random(seed)
        self._pending: set[Point] = set()
        self._all = space.all() if space.size <= _ENUMERATE else None
        self._model: object | None = None
        self._trained = 0

    def tell(self, point: Point, us: float) -> None:
        """Learn that ``point`` takes ``us`` microseconds (infinite: it failed)."""
        self.known[point] = min(us, self.known.get(point, math.inf))
        self._pending.discard(point)

    def ask(self, count: int) -> list[Point]:
        """Return up to ``count`` unknown points; fewer, or none, when the space is exhausted."""
        finite = sum(math.isfinite(us) for us in self.known.values())
        if finite < _WARMUP:
            chosen = self._fresh(self._draws(count * 8), count)
        else:
            guess = round(count * (1 - _RANDOM_SHARE) + self._rng.random() - 0.5)
            chosen = self._fresh(self._ranked(), min(max(guess, 1), count))
            chosen += self._fresh(self._draws(count * 8), count - len(chosen))
        self._pending.update(chosen)
        return chosen

    def _fresh(self, points: list[Point], count: int) -> list[Point]:
        found: dict[Point, None] = {}
        for point in points:
            if len(found) >= count:
                break
            if point not in self.known and point not in self._pending:
                found[point] = None
        self._pending.update(found)
        return list(found)

    def _draws(self, count: int) -> list[Point]:
        if self._all is not None:
            unknown = [p for p in self._all if p not in self.known and p not in self._pending]
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
        scores = self._predict(points)
        return [points[i] for i in np.argsort(scores, kind="stable")]

    def _predict(self, points: list[Point]) -> np.ndarray:
        import xgboost

        if self._model is None or self._trained != len(self.known):
            worst = max(us for us in self.known.values() if math.isfinite(us))
            # A failed point counts as twice the slowest one: avoided, and still on the scale.
            targets = [math.log(min(us, 2 * worst)) for us in self.known.values()]
            rows = np.asarray(self.space.features(list(self.known)), "float32")
            data = xgboost.DMatrix(rows, np.asarray(targets, "float32"))
            # One thread: on a loaded machine the spinning of several costs seconds.
            settings = {"max_depth": 5, "eta": 0.2, "nthread": 1, "seed": 0, "lambda": 0.1}
            self._model = xgboost.train(settings, data, num_boost_round=60)
            self._trained = len(self.known)
        rows = np.asarray(self.space.features(points), "float32")
        return self._model.predict(xgboost.DMatrix(rows))  # type: ignore[attr-defined]
