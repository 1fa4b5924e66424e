"""A tuning session: the trials on their way, what came of them, and when it ends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockscale.building.records import median_us
from blockscale.tuning.components.pool import OVER, Workers
from blockscale.tuning.components.runner import Measuring, Plan
from blockscale.tuning.site import Site
from blockscale.tuning.task import Task, Trial
from blockscale.tuning.worker import Measurement


@dataclass
class Limits:
    """When a session ends: at ``deadline`` (monotonic clock) or after ``trials`` measurements.

    ``build_s`` and ``run_s`` end a candidate, ``each`` trials, with those of earlier sessions, a
    workload.
    """

    deadline: float
    trials: int | None
    build_s: float
    run_s: float
    each: float = math.inf

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()


@dataclass(eq=False)
class Session(Plan):
    """What the components of one `tune` share; every trial is on disk as soon as it has ended."""

    limits: Limits
    workers: Workers
    site: Site
    report: Callable[[Task, dict[str, Any]], None]
    say: Callable[[str], None]
    tasks: list[Task] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    trial_s: float = 0.5
    """What a trial takes, about."""
    _by_module: dict[int, Trial] = field(default_factory=dict)
    _by_library: dict[str, Trial] = field(default_factory=dict)

    def elapsed(self) -> float:
        """Seconds since the session was made."""
        return time.monotonic() - self.started

    def room(self, task: Task) -> float:
        """Return how many trials of ``task`` may still be proposed."""
        left = self.limits.left()
        fits = math.inf if math.isinf(left) else int(max(0.0, left) / self.trial_s)
        if self.limits.trials is not None:
            flying = sum(each.flying for each in self.tasks)
            fits = min(fits, self.limits.trials - len(self.history) - flying)
        return min(fits, self.limits.each - task.trials - task.flying)

    def begin(self, trials: list[Trial]) -> None:
        """Take note of trials that go to the builder next."""
        for trial in trials:
            self._by_module[_address(trial.candidate.sch.mod)] = trial
            trial.task.flying += trial.record

    def speak(self, task: Task) -> None:
        """Print what a task has to say."""
        for message in task.messages:
            self.say(message)
        task.messages.clear()

    def module(self, mod: Any, library: Path) -> bytes:
        """Return the pickled module to build for a candidate's ``mod``: what is shipped."""
        trial = self._by_module[_address(mod)]
        self._by_library[str(library)] = trial
        if trial.kind == "default":
            trial.task.reference = library
        return trial.module

    def trial_by(self, candidate: Any) -> Trial | None:
        """Return the trial of a candidate that has come back, once."""
        return self._by_module.pop(_address(candidate.sch.mod), None)

    def measuring(self, library: str, args_info: Sequence[Any]) -> Measuring:
        """Return the job that measures a candidate, at the site."""
        return self.site.measuring(self._by_library[library].task, library)

    def group(self, library: str) -> str:
        """Return the workload: its arguments and the default's results are there."""
        return self._by_library[library].task.tag

    def ready(self, library: str) -> bool | None:
        """Return whether the default schedule, which is compared with itself, has run."""
        trial = self._by_library[library]
        if trial.task.given_up:
            return None
        return trial.kind == "default" or trial.task.ready

    def best_us(self, library: str) -> float:
        """Return the best time where another process may disturb a measurement: on a CPU."""
        trial = self._by_library[library]
        return trial.task.best_us if self.site.exclusive and trial.record else 0.0

    def finish(self, library: str, result: Measurement) -> None:
        """Write down a result as soon as it is there."""
        self.end(self._by_library[library], result)

    def end(self, trial: Trial, result: Measurement) -> None:
        """Write down what came of a trial, once."""
        if trial.finished:
            return
        trial.finished = True
        task, error = trial.task, result.error
        task.flying -= trial.record
        if error == OVER:
            return
        times = () if error else result.run_secs
        us = median_us(times)
        task.finish(trial, us, error)
        if trial.record:
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
            trace = trial.candidate.sch.trace
            task.store.append(task.entry, trace, times, task.target, line)
            self.history.append(line)
            try:
                self.report(task, line)
            except BaseException as error:  # TVM's loop would lose a KeyboardInterrupt
                self.workers.abandon(error)
        self.speak(task)

    def drop(self, library: str) -> None:
        """Forget a candidate's library, unless others are compared with it."""
        trial = self._by_library.pop(library, None)
        if trial is not None and trial.task.reference != Path(library):
            Path(library).unlink(missing_ok=True)


def _address(mod: Any) -> int:
    """Return what tells a module from others that live."""
    return int(mod.__chandle__())
