"""One workload being tuned: its candidates, what is known about them, and how they are judged."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockscale.base.targets import is_gpu
from blockscale.building.records import Record, trace_key
from blockscale.building.space import Point, Space, new_schedule, replay, trace_json
from blockscale.building.store import Store, with_model
from blockscale.tuning.facts import facts_of, moe_gemm_of
from blockscale.tuning.model import Search
from blockscale.tuning.worker import PARAMS, Argument, Timing

if TYPE_CHECKING:
    from blockscale.catalog import Workload

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
class Proposal:
    """A schedule to be tried, not applied yet; see `Candidate` for the fields."""

    task: Task
    kind: str
    trace: list[Any] | None
    """As JSON; None stands for the default schedule."""
    point: Point | None = None
    record: bool = True
    source: str = ""
    """The log that it comes from."""

    def apply(self) -> Candidate | None:
        """Return the candidate; None when TensorIR refuses the trace, or it is known."""
        return self.task.apply(self)


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
    """Nothing more is proposed: the space is exhausted, or the default schedule failed."""
    given_up: bool = False
    """The default schedule failed: there is nothing to compare a candidate with."""
    ready: bool = False
    """The outputs of the default schedule are there."""
    messages: list[str] = field(default_factory=list)

    def open(self, store: Store, seed: int) -> None:
        """Make the search space and take over what earlier sessions measured."""
        self.store = store
        self.mod = self.workload.mod(self.level)
        self.model = store.model
        self.target = with_model(self.workload.target(self.level), self.model)
        self.entry, known = store.open(self.workload, self.level)
        self._default = self._apply_default()
        default_key = trace_key(trace_json(self._default.trace))
        self._seen: dict[str, float] = {}
        self._seed = seed
        self._measured = [(record.trace, record.us) for record in known]
        self._opened: Search | None = None
        for record in known:
            self._recall(record, default_key)
        self.measured_default = math.isfinite(self.default_us)
        self._rechecked = False
        self.referenced = False
        self._pending_seeds = [s for s in self.seeds if not self._is_known(s[0])]

    @property
    def search(self) -> Search:
        """The search, with what is known told to it.

        Made at its first use: drawing a space takes up to 0.5 s, for which nobody has to wait
        before the first default schedule is built.
        """
        if self._opened is None:
            draw = self.workload.space(self.level)
            space = Space(self.mod, draw, self._seed, facts_of(self.mod))
            self._opened = Search(space, self._seed)
            for trace, us in self._measured:
                self._tell(trace, us)
        return self._opened

    def _tell(self, trace: list[Any], us: float) -> None:
        point = self.search.space.point(trace)
        if point is not None:
            self.search.tell(point, us)

    def _is_known(self, trace: Any) -> bool:
        return trace_key(trace_json(trace)) in self._seen

    def _recall(self, record: Record, default_key: str) -> None:
        self.trials += 1
        self.failed += math.isinf(record.us)
        self.best_us = min(self.best_us, record.us)
        self._seen[record.key] = min(record.us, self._seen.get(record.key, math.inf))
        if record.key == default_key:
            self.default_us = min(self.default_us, record.us)

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
        variables = self.mod["main"].params
        found = []
        for param, variable in zip(self.workload.spec.params(), variables, strict=True):
            shape = getattr(variable, "shape", None)
            value = 0.0
            if shape is None:
                value = 1.0 if param.default is None else param.default
            elif param.name == "mask":  # rows in use of each expert: all
                value = int(variables[0].shape[-2])
            elif param.name == "offsets":  # rows of all experts: as many each
                value = int(variables[0].shape[0])
            found.append(
                Argument(
                    param.name,
                    str(variable.ty.dtype),
                    None if shape is None else tuple(map(int, shape)),
                    param.output,
                    param.storage,
                    param.alias,
                    value,
                )
            )
        return found

    def propose(self, count: int) -> list[Candidate]:
        """Return up to ``count`` candidates; the default and the logs' schedules come first."""
        baselines = [made for p in self.baselines() if (made := p.apply()) is not None]
        return baselines or self._search(count)

    def baselines(self) -> list[Proposal]:
        """Return the schedules to measure before the search, each only once."""
        found: list[Proposal] = []
        if not self.referenced:
            self.referenced = True
            found.append(Proposal(self, "default", None, record=not self.measured_default))
            self.measured_default = True
        while self._pending_seeds:
            trace, source = self._pending_seeds.pop(0)
            found.append(Proposal(self, "committed", trace_json(trace), source=source))
        if not found and not self._rechecked and self.default_us > _SUSPECT * self.best_us:
            self._rechecked = True
            found.append(Proposal(self, "recheck", None))
        return found

    def ask(self, count: int) -> list[Proposal]:
        """Return up to ``count`` points of the search; none when the space is exhausted."""
        points = self.search.ask(count)
        return [Proposal(self, "search", self.search.space.trace(p), p) for p in points]

    def _search(self, count: int) -> list[Candidate]:
        found: list[Candidate] = []
        illegal = 0
        while len(found) < count and illegal < _MAX_ILLEGAL:
            proposals = self.ask(count - len(found))
            if not proposals:
                break
            made = [candidate for p in proposals if (candidate := p.apply()) is not None]
            illegal += len(proposals) - len(made)
            found += made
        self.finished = not found
        return found

    def apply(self, proposal: Proposal) -> Candidate | None:
        """Apply a trace; None when TensorIR refuses it or it is known by another name."""
        point = proposal.point
        if proposal.trace is None:
            return self._candidate(proposal, self._default, self._shipped(self._default))
        try:
            sch = replay(self.mod, proposal.trace)
            shipped = self._shipped(sch)
        except Exception:  # e.g. the design needs another number of loops for these decisions
            self.illegal += 1
            if point is not None:
                self.search.tell(point, math.inf)
            else:
                where = proposal.source
                self.messages.append(f"{self.tag}: the schedule of {where} no longer applies")
            return None
        made = trace_key(trace_json(sch.trace))
        if made in self._seen and point is not None:  # TVM clipped a tile to a known one
            self.search.tell(point, self._seen[made])
            return None
        return self._candidate(proposal, sch, shipped)

    def _shipped(self, sch: Any) -> Any:
        """Return the module to measure for the schedule ``sch`` of the static instance.

        For a GPU it is the function for any sizes, which a library has: its bounds and indices cost
        more than those of the static instance, and other schedules win.  Quantising 8192 x 8192 on
        an H200: one block a thread 41.6 us static, 47.8 us for any sizes; two 42.0 and 44.0.
        """
        if not is_gpu(self.level) or moe_gemm_of(self.mod) is not None:
            return sch.mod
        made = new_schedule(self.workload.symbolic(self.level))
        sch.trace.apply_to_schedule(made, remove_postproc=False)
        return self._with_params(made.mod)

    def _candidate(self, proposal: Proposal, sch: Any, shipped: Any) -> Candidate:
        self._seen.setdefault(trace_key(trace_json(sch.trace)), math.inf)
        module = pickle.dumps(shipped)
        return Candidate(self, proposal.kind, sch.trace, module, proposal.point, proposal.record)

    def _with_params(self, mod: Any) -> Any:
        """Return ``mod`` with what a CUDA library says of its parameters, for the exporter."""
        params = [param.to_manifest() for param in self.workload.spec.params()]
        return type(mod)({"main": mod["main"].with_attr(PARAMS, json.dumps(params))})

    def give_up(self, error: str = "") -> None:
        """End the task: without the default's outputs no candidate can be judged."""
        self.finished = self.given_up = True
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
        if candidate.point is not None:
            self.search.tell(candidate.point, us)
        if self._opened is None:
            self._measured.append((json.loads(key), us))
        else:
            self._tell(json.loads(key), us)
        self.best_us = min(self.best_us, us)
