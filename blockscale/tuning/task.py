"""One workload being tuned: its candidates, what is known about them, and how they are judged."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockscale.tuning.model import Search
from blockscale.tuning.records import Record, trace_key
from blockscale.tuning.space import Point, Space, new_schedule, replay, trace_json
from blockscale.tuning.store import Store, Workload, target_of
from blockscale.tuning.worker import Argument, Timing

_MAX_ILLEGAL = 64
"""Proposals in a row that TensorIR refuses before a workload is given up."""

_SUSPECT = 4.0
"""A default schedule that seems so many times slower than the best is measured once more: it came
first, and what is measured first in a process is most often disturbed."""


@dataclass
class Candidate:
    """A schedule to be built and measured."""

    task: Task
    kind: str
    """"default", "recheck" (default, once more), "committed" (from a log) or "search"."""
    trace: Any
    module: bytes
    point: Point | None
    record: bool = True
    """Whether to write it down: a default that is known is run again only for its outputs."""


@dataclass
class Task:
    """The state of one workload in a tuning session."""

    workload: Workload
    level: str
    seeds: Sequence[tuple[Any, str]]
    """Traces from logs with where they come from, measured before the search starts."""
    folder: Path
    """Where reference outputs lie, for this session only."""
    default_us: float = math.inf
    best_us: float = math.inf
    trials: int = 0
    failed: int = 0
    batches: int = 0
    gain: float = 0.0
    illegal: int = 0
    """Points that TensorIR refused to schedule; they are not trials."""
    finished: bool = False
    """Nothing more is measured: the space is exhausted, or the default schedule failed."""
    messages: list[str] = field(default_factory=list)

    def open(self, store: Store, seed: int) -> None:
        """Make the search space and take over what earlier sessions measured."""
        self.store = store
        self.mod = self.workload.mod(self.level)
        self.target = target_of(self.workload, self.level)
        self.entry, known = store.open(self.workload, self.level)
        self._default = self._apply_default()
        default_key = trace_key(trace_json(self._default.trace))
        self._seen: dict[str, float] = {}
        space = Space(self.mod, self.workload.space(self.level), seed)
        self.search = Search(space, seed)
        for record in known:
            self._recall(record, default_key)
        self.measured_default = math.isfinite(self.default_us)
        self._rechecked = False
        self.referenced = False
        self._pending_seeds = [s for s in self.seeds if not self._is_known(s[0])]

    def _is_known(self, trace: Any) -> bool:
        return trace_key(trace_json(trace)) in self._seen

    def _recall(self, record: Record, default_key: str) -> None:
        self.trials += 1
        self.failed += math.isinf(record.us)
        self.best_us = min(self.best_us, record.us)
        self._seen[record.key] = min(record.us, self._seen.get(record.key, math.inf))
        if record.key == default_key:
            self.default_us = min(self.default_us, record.us)
        point = self.search.space.point(record.trace)
        if point is not None:
            self.search.tell(point, record.us)

    def _apply_default(self) -> Any:
        sch = new_schedule(self.mod)
        self.workload.default(sch, self.level)
        return sch

    @property
    def tag(self) -> str:
        """The workload's name."""
        return self.workload.tag

    @property
    def fresh(self) -> bool:
        """Whether the default or a log's schedule is still to be measured."""
        return not self.measured_default or bool(self._pending_seeds)

    @property
    def reference(self) -> str:
        """File with the outputs of the default schedule."""
        return str(self.folder / f"{self.tag}.npz")

    @property
    def timing(self) -> Timing:
        """How to time a candidate: weights of a single row's product stream from memory."""
        flush = self.workload.op == "linear" and self.workload.rows == 1
        return Timing(flush=flush, give_up_us=3 * self.best_us)

    def arguments(self) -> list[Argument]:
        """Return what the kernel takes, shapes from its module and meaning from its spec."""
        from tvm.s_tir.meta_schedule.arg_info import ArgInfo

        infos = ArgInfo.from_entry_func(self.mod, False)
        return [
            Argument(p.name, str(i.dtype), tuple(map(int, i.shape)), p.output, p.storage)
            for p, i in zip(self.workload.spec.params(), infos, strict=True)
        ]

    def propose(self, count: int) -> list[Candidate]:
        """Return up to ``count`` candidates; the default and the logs' schedules come first."""
        found: list[Candidate] = []
        if not self.referenced:
            self.referenced = True
            found.append(self._candidate("default", self._default, not self.measured_default))
            self.measured_default = True
        while self._pending_seeds:
            trace, source = self._pending_seeds.pop(0)
            made = self._make("committed", trace_json(trace), None)
            if made is None:
                self.messages.append(f"{self.tag}: the schedule of {source} no longer applies")
            else:
                found.append(made)
        if not found and not self._rechecked and self.default_us > _SUSPECT * self.best_us:
            self._rechecked = True
            found.append(self._candidate("recheck", self._default, True))
        return found or self._search(count)

    def _search(self, count: int) -> list[Candidate]:
        found: list[Candidate] = []
        illegal = 0
        while len(found) < count and illegal < _MAX_ILLEGAL:
            points = self.search.ask(count - len(found))
            if not points:
                break
            for point in points:
                made = self._make("search", self.search.space.trace(point), point)
                if made is None:
                    illegal += 1
                    self.search.tell(point, math.inf)
                else:
                    found.append(made)
        self.finished = not found
        return found

    def _make(self, kind: str, trace: list[Any], point: Point | None) -> Candidate | None:
        """Apply ``trace``; None when TensorIR refuses it or it is known by another name."""
        try:
            sch = replay(self.mod, trace)
        except Exception:  # e.g. the design needs another number of loops for these decisions
            self.illegal += 1
            return None
        made = trace_key(trace_json(sch.trace))
        if made in self._seen and point is not None:  # TVM clipped a tile to a known one
            self.search.tell(point, self._seen[made])
            return None
        return self._candidate(kind, sch, True, point)

    def _candidate(
        self, kind: str, sch: Any, record: bool, point: Point | None = None
    ) -> Candidate:
        self._seen.setdefault(trace_key(trace_json(sch.trace)), math.inf)
        return Candidate(self, kind, sch.trace, pickle.dumps(sch.mod), point, record)

    def give_up(self, error: str = "") -> None:
        """End the task: without the default's outputs no candidate can be judged."""
        self.finished = True
        self._pending_seeds = []
        why = f" ({error})" if error else ""
        self.messages.append(f"{self.tag}: not tuned, since its default schedule failed{why}")

    def finish(self, candidate: Candidate, us: float) -> None:
        """Take over the result of ``candidate`` (infinite: it failed)."""
        self.trials += 1
        self.failed += math.isinf(us)
        if candidate.kind in ("default", "recheck"):
            self.default_us = min(self.default_us, us)
            if math.isinf(self.default_us):
                self.give_up()
        trace = trace_json(candidate.trace)
        key = trace_key(trace)
        self._seen[key] = min(us, self._seen.get(key, math.inf))
        points = {candidate.point, self.search.space.point(json.loads(key))} - {None}
        for point in points:
            self.search.tell(point, us)  # type: ignore[arg-type]
        self.best_us = min(self.best_us, us)
