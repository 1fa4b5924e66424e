"""One workload being tuned: what is known about it, and its turns in MetaSchedule's loop."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate, PySearchStrategy

from blockscale.base.targets import is_gpu
from blockscale.building.records import Record, sentence, trace_key
from blockscale.building.space import new_schedule, replay, trace_json
from blockscale.building.store import Store, argument_infos, with_model
from blockscale.tuning.components.facts import moe_gemm_of
from blockscale.tuning.worker import PARAMS, Argument, Timing

if TYPE_CHECKING:
    from blockscale.catalog import Workload

_SUSPECT = 4.0
"""A default schedule that seems so many times slower than the best is measured once more: it came
first, and what is measured first in a process is most often disturbed."""


@dataclass(eq=False)
class Trial:
    """A candidate on its way through builder and runner."""

    task: Task
    kind: str
    """"default", "recheck" (default, once more), "committed" (from a log) or "search"."""
    candidate: MeasureCandidate
    module: bytes
    record: bool = True
    """Whether to write it down: a default that is known is run again only for its results."""
    finished: bool = False
    times: tuple[float, ...] = ()
    """Of a measurement that is repeated."""


@dataclass(eq=False)
class Task:
    """The state of one workload in a tuning session."""

    workload: Workload
    level: str
    store: Store
    seeds: Sequence[tuple[Any, str]]
    """Traces from logs with where they come from, measured before the search starts."""
    default_us: float = math.inf
    best_us: float = math.inf
    trials: int = 0
    failed: int = 0
    illegal: int = 0
    """Candidates that cannot be scheduled for what is shipped; they are not trials."""
    refused: int = 0
    """Points that TensorIR refused to schedule."""
    batches: int = 0
    gain: float = 0.0
    flying: int = 0
    """Trials on their way."""
    exhausted: bool = False
    given_up: bool = False
    """The default schedule failed: there is nothing to compare a candidate with."""
    ready: bool = False
    """The default schedule has run."""
    reference: Path | None = None
    """Library of the default schedule."""
    messages: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Take over what earlier sessions measured."""
        self.mod = self.workload.mod(self.level)
        self.model = self.store.model
        self.target = with_model(self.workload.target(self.level), self.model)
        self.entry, self.known = self.store.open(self.workload, self.level)
        self._keys = {record.key for record in self.known}
        for record in self.known:
            self._recall(record)
        self._opened = self._rechecked = False

    def _recall(self, record: Record) -> None:
        self.trials += 1
        self.failed += math.isinf(record.us)
        self.best_us = min(self.best_us, record.us)
        if record.key == self._default_key:
            self.default_us = min(self.default_us, record.us)

    @cached_property
    def _default_key(self) -> str:
        return trace_key(trace_json(self._default.trace))

    @cached_property
    def _default(self) -> Any:
        sch = new_schedule(self.mod)
        self.workload.default(sch, self.level)
        return sch

    @cached_property
    def _symbolic(self) -> Any:
        return self.workload.symbolic(self.level)

    @property
    def tag(self) -> str:
        """The workload's name."""
        return self.workload.tag

    @property
    def fresh(self) -> bool:
        """Whether the default schedule is still to be run in this session."""
        return not self._opened

    @property
    def promise(self) -> float:
        """What the next batch may gain, as a part of the best time."""
        return self.gain + 1 / (1 + self.batches)

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

    def baselines(self) -> list[Trial]:
        """Return the schedules to measure before the search, each only once."""
        found: list[Trial | None] = []
        if not self._opened:
            self._opened = True
            new = not math.isfinite(self.default_us)
            found.append(self.trial("default", self._default, record=new))
            found += [self._seed(trace, source) for trace, source in self.seeds]
        elif not self._rechecked and self.default_us > _SUSPECT * self.best_us:
            self._rechecked = True
            found.append(self.trial("recheck", self._default))
        return [trial for trial in found if trial is not None]

    def _seed(self, trace: Any, source: str) -> Trial | None:
        """Return the trial of a log's schedule; None when it is known or no longer applies."""
        if trace_key(trace_json(trace)) in self._keys:
            return None
        try:
            return self.trial("committed", replay(self.mod, trace_json(trace)))
        except Exception:
            self.messages.append(f"{self.tag}: the schedule of {source} no longer applies")
            return None

    def search(self, candidate: MeasureCandidate) -> Trial | None:
        """Return the trial of what a strategy proposes; None when it is known or cannot be built.

        A space may hold the default, or a log's schedule, by the same trace.
        """
        if trace_key(trace_json(candidate.sch.trace)) in self._keys:
            return None
        try:
            return self.trial("search", candidate.sch, candidate)
        except Exception:
            self.illegal += 1
            return None

    def trial(
        self, kind: str, sch: Any, candidate: MeasureCandidate | None = None, record: bool = True
    ) -> Trial:
        """Return the trial of a schedule."""
        made = candidate or MeasureCandidate(sch, argument_infos(sch.mod) or [])
        found = Trial(self, kind, made, pickle.dumps(self._shipped(sch)), record)
        self._keys.add(trace_key(trace_json(sch.trace)))
        return found

    def _shipped(self, sch: Any) -> Any:
        """Return the module to measure for the schedule ``sch`` of the static instance.

        For a GPU it is the function for any sizes, which a library has: its bounds and indices cost
        more than those of the static instance, and other schedules win.  Quantising 8192 x 8192 on
        an H200: one block a thread 41.6 us static, 47.8 us for any sizes; two 42.0 and 44.0.
        """
        if not is_gpu(self.level) or moe_gemm_of(self.mod) is not None:
            return sch.mod
        made = new_schedule(self._symbolic)
        sch.trace.apply_to_schedule(made, remove_postproc=False)
        params = [param.to_manifest() for param in self.workload.spec.params()]
        return type(made.mod)({"main": made.mod["main"].with_attr(PARAMS, json.dumps(params))})

    def finish(self, trial: Trial, us: float, error: str | None) -> None:
        """Take over the result of ``trial`` (infinite: it failed)."""
        if trial.kind == "default" and error is None:
            self.ready = True
        if trial.record:
            self.trials += 1
            self.failed += math.isinf(us)
            self.best_us = min(self.best_us, us)
            if trial.kind in ("default", "recheck"):
                self.default_us = min(self.default_us, us)
        if trial.kind == "default" and error is not None:
            self.given_up = True
            self.messages.append(
                f"{self.tag}: not tuned, since its default schedule failed ({error})"
            )


class _Turns(PySearchStrategy):
    """The default schedule and those of logs first, then what ``inner`` proposes.

    Several contexts may take turns with one task: while candidates of one are built, those of
    another are measured.
    """

    def __init__(self, task: Task, inner: Any, session: Any) -> None:
        self.task, self._inner, self._session = task, inner, session
        self.flying: list[Trial] = []

    def _initialize_with_tune_context(self, context: Any) -> None:
        self._inner._initialize_with_tune_context(context)

    def pre_tuning(
        self, max_trials: int, per_iter: int, designs: Any, database: Any, cost_model: Any
    ) -> None:
        """Prepare ``inner``."""
        self._inner.pre_tuning(max_trials, per_iter, designs, database, cost_model)

    def post_tuning(self) -> None:
        """End ``inner``."""
        self._inner.post_tuning()

    def clone(self) -> Any:
        """Return another turn with the same task."""
        return Turns(self.task, self._inner, self._session)

    def generate_measure_candidates(self) -> list[MeasureCandidate] | None:
        """Return the next candidates; None when the task has ended."""
        task, room = self.task, self._session.room(self.task)
        if task.given_up or task.exhausted:
            return None
        self._before_us = task.best_us
        found: list[Trial] = []
        try:
            found = task.baselines() if task.fresh or room > 0 else []
        except Exception as error:  # an op without a schedule must not end the others' session
            task.given_up = True
            why = sentence(error)
            task.messages.append(f"{task.tag}: not tuned, since scheduling failed ({why})")
        if not found and room > 0 and not task.given_up:
            found = self._proposed(int(min(room, 1 << 30)))
        self._session.begin(found)
        self._session.speak(task)
        self.flying = found
        return [trial.candidate for trial in found] or (None if room <= 0 else [])

    def _proposed(self, most: int) -> list[Trial]:
        """Return the trials of what ``inner`` proposes next."""
        task = self.task
        task.batches += 1
        try:
            proposed = self._inner.generate_measure_candidates()
        except ValueError as error:  # one bad space must not end the others' session
            task.messages.append(f"{task.tag}: {error}")
            proposed = None
        task.exhausted = not proposed
        task.refused = getattr(self._inner, "illegal", 0)
        found: list[Trial] = []
        for each in proposed or ():
            trial = task.search(each) if len(found) < most else None
            found += [trial] if trial is not None else []
            self._session.workers.step(0.0)  # others' builds need not wait for this
        return found

    def notify_runner_results(self, candidates: Any, results: Any) -> None:
        """Tell ``inner`` what its candidates took."""
        task, trials, self.flying = self.task, self.flying, []
        ran = zip(trials, candidates, results, strict=True)
        own = [(candidate, result) for t, candidate, result in ran if t.kind == "search"]
        if own:
            self._inner.notify_runner_results([c for c, _ in own], [r for _, r in own])
            known = math.isfinite(self._before_us) and self._before_us > 0
            gained = 1 - task.best_us / self._before_us if known else 0.0
            task.gain = 0.5 * task.gain + 0.5 * gained


Turns = derived_object(_Turns)
