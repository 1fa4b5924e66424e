"""A tuning session in MetaSchedule's loop: whose turn it is, and what becomes of the results."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule import TuneContext, _ffi_api
from tvm.s_tir.meta_schedule.logging import get_logging_func
from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate, PySearchStrategy
from tvm.s_tir.meta_schedule.task_scheduler import PyTaskScheduler

from blockscale.building.records import median_us, sentence
from blockscale.tuning.components.pool import OVER, Job, Workers
from blockscale.tuning.site import Site
from blockscale.tuning.task import Task, Trial
from blockscale.tuning.worker import Applied, Illegal, Measurement, Unscheduled

_ILLEGAL = f"build: {Illegal.__name__}: "
_POLL_S = 0.01
_MOST_BARREN = 32
"""Batches in a row without a candidate that is new, before a space is thought to be exhausted."""

_QUIET = logging.getLogger("blockscale.tuning")
_QUIET.addHandler(logging.NullHandler())
_QUIET.propagate = False


class Context(TuneContext):
    """A `TuneContext`; the class of TVM registers all of its own intrinsics first, for 20 s."""

    def __init__(
        self, mod: Any, target: Any, name: str, space: Any, strategy: Any, seed: int = 0
    ) -> None:
        told = (mod, target, space, strategy, name, 1, seed + 1, get_logging_func(_QUIET))
        self.__init_handle_by_constructor__(_ffi_api.TuneContext, *told)
        _ffi_api.TuneContextInitialize(self)


@dataclass(eq=False)
class Session:
    """The trials on their way, and those that have ended: they are on disk."""

    workers: Workers
    site: Site
    report: Callable[[Task, dict[str, Any]], None]
    started: float
    """By the monotonic clock."""
    most: float
    """Trials of the session."""
    each: float
    """Trials of a workload, with those of earlier sessions."""
    timeouts: tuple[float, float]
    """Seconds that a candidate may build and run."""
    tasks: list[Task] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    _to_build: deque[Trial] = field(default_factory=deque)
    _by_library: dict[str, Trial] = field(default_factory=dict)

    def elapsed(self) -> float:
        """Seconds since the session began."""
        return time.monotonic() - self.started

    def room(self, task: Task) -> float:
        """Return how many trials of ``task`` may still be proposed."""
        flying = [t.task for t in (*self._to_build, *self._by_library.values()) if t.record]
        left = self.most - len(self.history) - len(flying)
        return min(left, self.each - task.trials - flying.count(task))

    def begin(self, trials: list[Trial]) -> list[MeasureCandidate]:
        """Take note of trials that go to the builder next."""
        self._to_build += trials
        return [trial.candidate for trial in trials]

    def module(self, mod: Any, library: str) -> tuple[Unscheduled, Any]:
        """Return what to build for the next candidate; TVM's loop hands them on in their order.

        Buckets of a kernel have the same functions for any sizes: by the same trace, one library.
        """
        trial = self._by_library[library] = self._to_build.popleft()
        if trial.kind == "default":
            trial.task.reference = library
        made = trial.task.to_build(trial)
        return made, (trial.key, made.shipped or made.module)

    def job(self, library: str, args_info: Sequence[Any], built: Applied | None) -> Job:
        """Return the job that measures a candidate, at the site.

        Workloads are its groups: their arguments and the default's results are where they were.
        """
        trial = self._by_library[library]
        trial.built = built
        limit = trial.task.limit_s(self.timeouts[1])
        function, arguments = self.site.measuring(trial.task, library, limit)
        timeout = limit + self.site.slack_s
        return Job(function, arguments, timeout, group=trial.task.tag, ready=trial.comparable)

    def finish(self, library: str, result: Measurement) -> None:
        """Write down what came of a trial, as soon as it is there."""
        trial = self._by_library.pop(library)
        task, error = trial.task, result.error
        if task.reference != library:  # others are compared with that
            Path(library).unlink(missing_ok=True)
        if error == OVER:
            return
        if error is not None and error.startswith(_ILLEGAL):
            task.refuse(trial, error.removeprefix(_ILLEGAL))
            return
        applied = trial.built
        if not task.is_new(trial, applied.key if applied else trial.key):
            return
        times = () if error else result.run_secs
        us = median_us(times)
        task.finish(trial, us, error)
        if not trial.record:
            return
        line = {
            "workload": task.tag,
            "trial": task.trials - 1,
            "elapsed_s": round(self.elapsed(), 3),
            "us": us,
            "best_us": task.best_us,
            "failed": error is not None,
            "kind": trial.kind,
            "error": error,
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        if task.model is not None:
            line["model"] = task.model
        trace = trial.trace if applied is None else applied.trace
        task.store.append(task.entry, trace, times, task.target, line)
        self.history.append(line)
        try:
            self.report(task, line)
        except BaseException as failure:  # TVM's loop would make another error of it
            self.workers.abandon(failure)


@derived_object
class Turns(PySearchStrategy):
    """The default schedule and those of logs first, then what ``inner`` proposes.

    Several contexts may take turns with one task: while candidates of one are built, those of
    another are measured.
    """

    def __init__(self, task: Task, inner: Any, session: Session, sketches: Any) -> None:
        self.task, self._inner, self._session, self._sketches = task, inner, session, sketches
        self.flying: list[Trial] = []
        self._barren = 0

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

    def generate_measure_candidates(self) -> list[MeasureCandidate] | None:
        """Return the next candidates; None when the task has ended."""
        task, room = self.task, self._session.room(self.task)
        if task.first is None and not self._sketches.eager:
            self._sketches.begin(self._session.workers, task.modules[0])
        self._before_us = task.best_us
        if room <= 0 or task.ended:
            return None
        try:  # an op without a schedule, or a bad space, must not end the others' session
            self.flying = task.baselines(room) or self._proposed(room)
        except Exception as error:
            task.ended = True
            task.say(f"{task.tag}: not tuned, since scheduling failed ({sentence(error)})")
        return self._session.begin(self.flying)

    def _proposed(self, most: float) -> list[Trial]:
        """Return the trials of what ``inner`` proposes next."""
        task, found = self.task, list[Trial]()
        task.batches += 1
        proposed = self._inner.generate_measure_candidates()
        for each in proposed or ():
            if len(found) < most:
                found += task.trials_of("search", each, self._sketches.trace(each))
        self._barren = 0 if found else self._barren + 1
        task.ended = not proposed or self._barren >= _MOST_BARREN
        return found

    def notify_runner_results(self, candidates: Any, results: Any) -> None:
        """Tell ``inner`` what its candidates took."""
        task, trials, self.flying = self.task, self.flying, []
        if trials and trials[0].kind == "search":  # as all of the batch
            self._inner.notify_runner_results(candidates, results)
            known = 0 < self._before_us < math.inf
            gained = 1 - task.best_us / self._before_us if known else 0.0
            task.gain = 0.5 * task.gain + 0.5 * gained


@derived_object
class BestBet(PyTaskScheduler):
    """Default schedules of every task first, then the task that promises most.

    Args:
        session: whose limits end the loop.
        turns: the strategies (`Turns`) of the contexts, in their order.
        ahead: most trials on their way at once; 0: those of one batch.
    """

    def __init__(self, session: Session, turns: Sequence[Any], ahead: int) -> None:
        self._session, self._turns, self._ahead = session, turns, ahead

    def next_task_id(self) -> int:
        """Return which context is next; -1: the session is over, and what runs is joined."""
        loop, workers = self._outer(), self._session.workers
        while not workers.over():
            workers.step(0.0)  # what is there is built while the next task is prepared
            for number in range(len(self._turns)):
                loop.touch_task(number)  # joins it if it has ended
            flying = [i for i, turn in enumerate(self._turns) if turn.flying]
            under_way = sum(len(self._turns[i].flying) for i in flying)
            found = self._next() if not flying or under_way < self._ahead else None
            if found is not None:
                return found
            if not flying:
                break
            futures = [loop.tasks_[i].runner_futures for i in flying]
            if not workers.wait(partial(_any_ended, futures)):
                time.sleep(_POLL_S)  # another's runner, which has its own processes
        return -1

    def _next(self) -> int | None:
        """Return the context of the best bet; None if none may have a trial now."""
        idle = [(i, turn.task) for i, turn in enumerate(self._turns) if not turn.flying]
        open_ = [(i, t) for i, t in idle if not t.ended and self._session.room(t) > 0]
        for number, task in open_:
            if task.first is None:
                return number
        ready = [(i, t) for i, t in open_ if t.ready]
        return max(ready, key=lambda pair: pair[1].promise)[0] if ready else None


def _any_ended(futures: Sequence[Any]) -> bool:
    return any(all(future.done() for future in each) for each in futures)
