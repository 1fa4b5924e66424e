"""A search space as data: the designs that a space function draws and the choices inside each.

A *point* is ``(design, decisions)``; with the design's instructions it is a trace.  Points are
made, mutated and compared without touching TensorIR; only those to be measured are applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from random import Random
from typing import Any

from tvm.ir import IRModule
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace

from blockscale.building.records import canonical, sentence
from blockscale.schedules.steps import Drawing, unshared

Decision = int | tuple[int, ...]
Point = tuple[int, tuple[Decision, ...]]

_SEEDS = 8
"""Draws of a space function that looks at what it draws: each branch is a design of its own."""


def plain(value: Any) -> Any:
    """Return a TVM container or number as MetaSchedule's JSON has it; booleans are integers."""
    from tvm.ir import save_json
    from tvm.tirx import IndexMap

    if value is None or isinstance(value, int | float):
        return canonical(value)
    if isinstance(value, str):
        return canonical(str(value))
    if isinstance(value, IndexMap):
        return canonical(str(save_json(value)))
    if hasattr(value, "value"):  # IntImm, FloatImm
        return plain(value.value)
    if hasattr(value, "items"):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value]


def new_schedule(mod: IRModule, seed: int = 1) -> Schedule:
    """Return a fresh schedule of ``mod`` whose errors are one sentence (without the whole IR)."""
    return Schedule(unshared(mod), seed=seed, debug_mask="none", error_render_level="fast")


def replay(mod: IRModule, trace: list[Any]) -> Schedule:
    """Return ``mod`` scheduled by a trace in JSON; raises what TVM says when it does not fit."""
    from blockscale.tir.intrin import register_named

    register_named(repr(trace))
    sch = new_schedule(mod)
    Trace.apply_json_to_schedule(trace, sch)
    return sch


def replays(mod: IRModule, trace: list[Any]) -> bool:
    """Return whether a trace in JSON applies to ``mod``."""
    try:
        replay(mod, trace)
    except Exception:
        return False
    return True


def trace_json(trace: Trace) -> list[Any]:
    """Return ``trace`` as ``[instructions, [[index, decision], ...]]`` of plain values."""
    from tvm.s_tir.schedule import _ffi_api

    return plain(_ffi_api.TraceAsJSON(trace, False))


@lru_cache(maxsize=4096)
def _tiles(extent: int, parts: int, innermost: int) -> tuple[tuple[int, ...], ...]:
    """Return every factorisation of ``extent`` into ``parts`` with last factor <= ``innermost``."""
    if parts == 1:
        return ((extent,),)
    found = []
    for last in range(1, min(extent, innermost if innermost > 0 else extent) + 1):
        if extent % last == 0:
            found += [(*rest, last) for rest in _tiles(extent // last, parts - 1, 0)]
    return tuple(found)


@dataclass(frozen=True)
class Choice:
    """One sampling instruction: its options and the weight of each."""

    index: int
    options: tuple[Decision, ...]
    weights: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]
    """What the cost model sees of each option."""
    name: str = ""
    """Key of the annotation that it becomes; empty when it is another argument."""


def _log2(value: float) -> float:
    return math.copysign(math.log2(1 + abs(value)), value)


def _choice(index: int, instruction: list[Any], decision: Any) -> Choice:
    kind, _, attrs, _ = instruction
    if kind == "SampleCategorical":
        candidates, probabilities = attrs
        options = tuple(range(len(candidates)))
        numeric = all(isinstance(c, int | float) for c in candidates)
        values: tuple[tuple[float, ...], ...] = tuple(
            (_log2(c) if numeric else float(i),) for i, c in enumerate(candidates)
        )
        return Choice(index, options, tuple(map(float, probabilities)), values)
    if kind == "SamplePerfectTile":
        parts, innermost = attrs
        tiles = _tiles(math.prod(decision), parts, innermost)
        values = tuple(tuple(_log2(f) for f in tile) for tile in tiles)
        return Choice(index, tiles, (1.0,) * len(tiles), values)
    raise ValueError(
        f"search space: instruction {kind} is not supported; draw with sample_categorical or "
        "sample_perfect_tile"
    )


class Design:
    """A trace whose sampling instructions are open."""

    def __init__(self, trace: list[Any], facts: Mapping[str, float] | None = None) -> None:
        """``facts``: decisions of the design by name, those of its choices as they were drawn."""
        self.instructions, decisions = trace
        self.facts = facts
        self.drawn = decisions
        drawn = dict(decisions)
        keys = {i[1][-1]: i[2][0] for i in self.instructions if i[0] == "Annotate"}
        self.choices = [
            replace(_choice(i, instruction, drawn.get(i)), name=keys.get(instruction[3][0], ""))
            for i, instruction in enumerate(self.instructions)
            if instruction[0].startswith("Sample")
        ]
        self.size = math.prod(sum(w > 0 for w in c.weights) for c in self.choices)


class Space:
    """The search space of one workload.

    Raises ValueError when the space function fails for every seed, with its last error.
    """

    def __init__(
        self,
        mod: IRModule,
        function: Callable[[Schedule], Any],
        seed: int = 0,
        facts: Callable[[Schedule], Mapping[str, float]] | None = None,
    ) -> None:
        """Draw the designs of ``function``.

        ``facts`` says what a scheduled design is, under names that all designs share, choices under
        the keys of their annotations: then the cost model sees these, and one draw shows all.
        """
        self.designs: list[Design] = []
        self._index: dict[str, int] = {}
        error: Exception | None = None
        for number in range(_SEEDS):
            sch = new_schedule(mod, seed * _SEEDS + number + 1)
            try:
                drawn = function(sch)
            except Exception as failure:
                error = failure
                continue
            made = drawn if isinstance(drawn, list) else [sch]
            for item in made:
                self._add(trace_json(item.trace), facts and facts(item))
            if facts is not None or all(isinstance(s, Drawing) and not s.looked for s in made):
                break
        if not self.designs:
            raise ValueError(
                f"search space: the space function failed for all of {_SEEDS} seeds, last with "
                f"'{sentence(error) if error else ''}'; run it on one Schedule to see where"
            ) from error
        self.size = sum(design.size for design in self.designs)

    def _add(self, trace: list[Any], facts: Mapping[str, float] | None) -> None:
        text = repr(trace[0])
        if text not in self._index:
            self._index[text] = len(self.designs)
            self.designs.append(Design(trace, facts))

    def trace(self, point: Point) -> list[Any]:
        """Return the trace of ``point`` as JSON."""
        design = self.designs[point[0]]
        pairs = zip(design.choices, point[1], strict=True)
        decisions = [[c.index, list(d) if isinstance(d, tuple) else d] for c, d in pairs]
        return [design.instructions, decisions]

    def point(self, trace: list[Any]) -> Point | None:
        """Return the point whose trace this is; None for a trace from outside of the space."""
        number = self._index.get(repr(trace[0]))
        if number is None:
            return None
        drawn = {i: tuple(d) if isinstance(d, list) else d for i, d in trace[1]}
        try:
            return number, tuple(drawn[c.index] for c in self.designs[number].choices)
        except KeyError:
            return None

    def random(self, rng: Random) -> Point:
        """Return a point, each option with the probability that the space function gave it."""
        weights = [design.size for design in self.designs]
        number = rng.choices(range(len(weights)), weights)[0]
        choices = self.designs[number].choices
        return number, tuple(rng.choices(c.options, c.weights)[0] for c in choices)

    def mutate(self, point: Point, rng: Random) -> Point:
        """Return ``point`` with one or two decisions drawn anew."""
        number, decisions = point
        choices = self.designs[number].choices
        changed = list(decisions)
        for _ in range(rng.choice((1, 1, 2))):
            if choices:
                at = rng.randrange(len(choices))
                changed[at] = rng.choices(choices[at].options, choices[at].weights)[0]
        return number, tuple(changed)

    def cross(self, first: Point, second: Point, rng: Random) -> Point:
        """Return a point with each decision from one of two parents.

        Of two designs with names it is the second's design with the first's choices where it has
        them; else both parents must be of one design.
        """
        if first[0] != second[0]:
            return self._moved(first, second)
        pairs = zip(first[1], second[1], strict=True)
        return first[0], tuple(rng.choice(pair) for pair in pairs)

    def _moved(self, first: Point, second: Point) -> Point:
        """Return the design of ``second`` with the choices of ``first`` that it offers."""
        design = self.designs[second[0]]
        if design.facts is None:
            return first
        wanted = self._named(first)
        decisions = []
        for choice, own in zip(design.choices, second[1], strict=True):
            value = wanted.get(choice.name)
            found = (o for o in choice.options if choice.name and choice.values[o][0] == value)  # type: ignore[index]
            decisions.append(next(found, own))
        return second[0], tuple(decisions)

    def _named(self, point: Point) -> dict[str, float]:
        """Return what the point is by name: the facts of its design, with its own choices."""
        design = self.designs[point[0]]
        found = {name: _log2(value) for name, value in (design.facts or {}).items()}
        for choice, decision in zip(design.choices, point[1], strict=True):
            found[choice.name] = self._value(choice, decision)[0]
        return found

    def all(self) -> list[Point]:
        """Return every point; meant for spaces of a few thousand."""
        found: list[Point] = []
        for number, design in enumerate(self.designs):
            open_options = [
                [o for o, w in zip(c.options, c.weights, strict=True) if w > 0]
                for c in design.choices
            ]
            found += [(number, decisions) for decisions in product(*open_options)]
        return found

    def features(self, points: Sequence[Point]) -> list[list[float]]:
        """Return one row per point: the design, then the drawn values (-1 outside the design).

        Where designs have facts: these, with the drawn values, in columns that designs share.
        """
        if all(design.facts is not None for design in self.designs):
            found = [self._named(point) for point in points]
            names = sorted({name for d in self.designs for name in d.facts or ()})
            return [[row.get(name, -1.0) for name in names] for row in found]
        widths = [sum(len(c.values[0]) for c in d.choices) for d in self.designs]
        rows = []
        for number, decisions in points:
            row = [float(number), *([-1.0] * sum(widths[:number]))]
            for choice, decision in zip(self.designs[number].choices, decisions, strict=True):
                row += self._value(choice, decision)
            rows.append(row + [-1.0] * (1 + sum(widths) - len(row)))
        return rows

    @staticmethod
    def _value(choice: Choice, decision: Decision) -> tuple[float, ...]:
        if isinstance(decision, tuple):  # a tile of a loop whose extent depends on another choice
            return tuple(_log2(f) for f in decision)
        return choice.values[decision]
