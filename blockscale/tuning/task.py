"""One workload being tuned: what is known about it, and what is to be tried first."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate

from blockscale.base.targets import is_gpu
from blockscale.building.records import trace_key
from blockscale.building.space import new_schedule, replay, trace_json
from blockscale.building.store import Store, argument_infos, with_model
from blockscale.tuning import moe
from blockscale.tuning.worker import (
    TILE_SCALES,
    Applied,
    Argument,
    Timing,
    Unscheduled,
    packed,
    unpacked,
)

if TYPE_CHECKING:
    from blockscale.catalog import Workload

_SUSPECT = 4.0
"""A default schedule that seems so many times slower than the best is measured once more: it came
first, and what is measured first in a process is most often disturbed."""

_RUNS = 100
"""Runs of the default schedule in whose time a candidate, which has some 30, is to be measured."""
_LONGEST = 12
"""Times its usual limit a default may take, and a candidate of a default that takes long."""

_MOST_REFUSED = 64
"""Points in a row that TensorIR refuses before the search is given up."""


Modules = tuple[bytes, bytes | None]
"""The module that records know, and what is built in its place, both `packed`."""


def modules_of(workload: Workload, level: str) -> Modules:
    """Return the modules of ``workload``; a worker makes them: parsing takes 0.1 s for each.

    For a GPU the function for any sizes is built, which a library has: its bounds and indices cost
    more than those of the static instance, and other schedules win.  Quantising 8192 x 8192 on an
    H200: one block a thread 41.6 us static, 47.8 us for any sizes; two 42.0 and 44.0.
    """
    mod = workload.mod(level)
    whole = is_gpu(level) and moe.gemm_of(mod) is None
    return packed(mod), packed(workload.symbolic(level)) if whole else None


@dataclass(eq=False)
class Trial:
    """A candidate on its way through builder and runner."""

    task: Task
    kind: str
    """"default", "recheck" (default, once more), "committed" (from a log) or "search"."""
    candidate: MeasureCandidate
    trace: list[Any]
    key: str
    record: bool = True
    """Whether to write it down: a default that is known is run again only for its results."""
    built: Applied | None = None
    """Its trace as it was applied; None: it was not built."""

    def comparable(self) -> bool | None:
        """Return whether the default, which is compared with itself, has run; None: never."""
        if self.kind == "default" or self.task.ready:
            return True
        return None if self.task.ended else False


@dataclass(eq=False)
class Task:
    """The state of one workload in a tuning session."""

    workload: Workload
    level: str
    store: Store
    seeds: Sequence[tuple[Any, str]]
    """Traces from logs with where they come from, measured before the search starts."""
    say: Callable[[str], None]
    default_us: float = math.inf
    best_us: float = math.inf
    trials: int = 0
    failed: int = 0
    illegal: int = 0
    """Points that TensorIR refused to schedule; they are not trials."""
    refused: int = 0
    """Of these the last in a row."""
    batches: int = 0
    gain: float = 0.0
    ended: bool = False
    """The space is exhausted, or there is no default schedule to compare a candidate with."""
    ready: bool = False
    """The default schedule has run."""
    reference: str | None = None
    """Library of the default schedule."""
    modules: Modules = b"", None
    """What `modules_of` returns; empty: nobody has called that yet."""

    def __post_init__(self) -> None:
        """Take over what earlier sessions measured."""
        if not self.modules[0]:
            self.modules = modules_of(self.workload, self.level)
        self.mod = unpacked(self.modules[0])
        self.model = self.store.model
        self.target = with_model(self.workload.target(self.level), self.model)
        self.entry, self.known = self.store.open(self.workload, self.level, self.mod)
        self._keys = {record.key for record in self.known}
        for record in self.known:
            self._count(record.us, record.key == self._default_key)
        self.first: list[Trial] | None = None
        """What is to be tried before the search; None: not even the default schedule has been."""
        self._rechecked = False
        self.gemm = moe.gemm_of(self.mod)

    def _count(self, us: float, default: bool) -> None:
        self.trials += 1
        self.failed += math.isinf(us)
        self.best_us = min(self.best_us, us)
        if default:
            self.default_us = min(self.default_us, us)

    @cached_property
    def _default(self) -> Any:
        sch = new_schedule(self.mod)
        self.workload.default(sch, self.level)
        return sch

    @cached_property
    def _default_key(self) -> str:
        return trace_key(trace_json(self._default.trace))

    @property
    def tag(self) -> str:
        """The workload's name."""
        return self.workload.tag

    @property
    def promise(self) -> float:
        """What the next batch may gain, as a part of the best time."""
        return self.gain + 1 / (1 + self.batches)

    @property
    def timing(self) -> Timing:
        """How to time a candidate: weights of a single row's product stream from memory."""
        flush = self.workload.op == "linear" and self.workload.rows == 1
        return Timing(flush=flush, give_up_us=3 * self.best_us, again_us=self.best_us)

    def limit_s(self, least: float) -> float:
        """Return the seconds that a candidate may run: ``least``, or longer as its default does."""
        return min(max(least, _RUNS * self.default_us / 1e6), _LONGEST * least)

    def arguments(self) -> list[Argument]:
        """Return what the function takes, as its spec says, in the static instance's sizes."""
        spec, sizes = self.workload.spec, self.workload.sizes(self.level, self.mod)
        shapes = {p.name: tuple(d.evaluate(sizes) for d in p.dims) for p in spec.params()}
        first = next(iter(shapes.values()))
        numbers = {
            "mask": first[-2:][0],  # rows in use of each expert: all
            "offsets": first[0],  # rows of all experts: as many each
            "topk_ids": shapes.get("payload", (getattr(spec, "experts", 0),))[0],  # each in turn
        }
        found = []
        for p in spec.params():
            number = 1.0 if p.default is None else p.default
            value = number if p.scalar else numbers.get(p.name, 0)
            told = (p.output, p.storage or self._tile_scales(p.name), p.alias, value)
            found.append(Argument(p.name, p.dtype, None if p.scalar else shapes[p.name], *told))
        return found

    def _tile_scales(self, name: str) -> str | None:
        """Return how scales of a weight in whole tiles are stored; None for another parameter."""
        spec, layout = self.workload.spec, getattr(self.workload.spec, "layout", "")
        tiled = name in ("block_scale", "scale") and layout.startswith("tiles64")
        return TILE_SCALES[getattr(spec, "fmt", "int4")] if tiled else None

    def baselines(self, most: float) -> list[Trial]:
        """Return at most so many schedules to measure before the search, each only once."""
        if self.first is None:
            if self.model is None and self.gemm is None:
                self.arguments()  # where they cannot be made, nothing is built
            self.first = self._scheduled("default", self._default)
            self.first[0].record = math.isinf(self.default_us)
            for trace, source in self.seeds:
                try:
                    self.first += self._scheduled("committed", replay(self.mod, trace_json(trace)))
                except Exception:
                    self.say(f"{self.tag}: the schedule of {source} no longer applies")
        if not self.first and not self._rechecked and self.default_us > _SUSPECT * self.best_us:
            self._rechecked = True
            self.first = self._scheduled("recheck", self._default)
        count = int(min(most, len(self.first)))
        found, self.first = self.first[:count], self.first[count:]
        return found

    def _scheduled(self, kind: str, sch: Any) -> list[Trial]:
        made = MeasureCandidate(sch, argument_infos(sch.mod) or [])
        return self.trials_of(kind, made, trace_json(sch.trace))

    def trials_of(self, kind: str, candidate: Any, trace: list[Any]) -> list[Trial]:
        """Return the trial of a candidate which has, or stands for, the ``trace``; none: known.

        A space may hold the default, or a log's schedule, by the same trace.
        """
        key = trace_key(trace)
        if key in self._keys and kind in ("committed", "search"):
            return []
        self._keys.add(key)
        return [Trial(self, kind, candidate, trace, key)]

    def to_build(self, trial: Trial) -> Unscheduled:
        """Return what is built for ``trial``."""
        return Unscheduled(trial.trace, *self.modules, self._spec)

    @cached_property
    def _spec(self) -> str:
        return json.dumps(self.workload.spec.to_json())

    def is_new(self, trial: Trial, key: str) -> bool:
        """Return whether the trace that was applied, of ``key``, is no other trial's."""
        known = key != trial.key and key in self._keys
        self._keys.add(key)
        return not known or trial.kind == "default"  # for which others wait

    def refuse(self, trial: Trial, error: str) -> None:
        """Take note that ``trial`` cannot be scheduled."""
        self.illegal += 1
        self.refused += 1
        self.ended |= self.refused >= _MOST_REFUSED
        if trial.kind == "default":
            self.ended = True
            self.say(f"{self.tag}: not tuned, since scheduling failed ({error})")

    def finish(self, trial: Trial, us: float, error: str | None) -> None:
        """Take over the result of ``trial`` (infinite: it failed)."""
        self.refused = 0
        if trial.record:
            self._count(us, trial.kind in ("default", "recheck"))
        elif trial.kind == "default":
            # Known of earlier sessions, but the machine may be faster today; so may be the best.
            self.default_us, self.best_us = min(self.default_us, us), min(self.best_us, us)
        if trial.kind == "default":
            self.ready, self.ended = error is None, error is not None
            if error is not None:
                self.say(f"{self.tag}: not tuned, since its default schedule failed ({error})")
