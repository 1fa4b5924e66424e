"""A tuning session: which workload next, build, measure, write down, within the time allowed."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockscale.building.records import median_us
from blockscale.tuning import worker
from blockscale.tuning.pool import Answer, Pool
from blockscale.tuning.task import Candidate, Task
from blockscale.tuning.worker import Measurement

_GRACE_S = 1.0
"""How far past its deadline a session may finish what runs."""


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


class Session:
    """Runs tasks until a limit; every finished trial is on disk before the next one starts."""

    def __init__(
        self,
        tasks: list[Task],
        limits: Limits,
        exporter: str,
        folder: Path,
        on_trial: Callable[[Task, dict[str, Any]], None],
        say: Callable[[str], None],
    ) -> None:
        self.tasks = tasks
        self.history: list[dict[str, Any]] = []
        self._limits = limits
        self._exporter = exporter
        self._folder = folder
        self._on_trial = on_trial
        self._say = say
        self._started = time.monotonic()
        self._trial_s = 0.5
        self._libraries = 0
        self._queue: list[Candidate] = []

    @property
    def model(self) -> str | None:
        """The model that times candidates; None: they are measured."""
        return None

    def elapsed(self) -> float:
        """Seconds since the session was made."""
        return time.monotonic() - self._started

    def run(self, pool: Pool, width: int) -> None:
        """Tune until a limit is reached or every space is exhausted; ``width``: builds at once."""
        while True:
            count = self._affordable(2 * width)
            if not count:
                return
            if not self._queue:
                self._queue = self._next(count, width)
            if not self._queue:
                return
            batch, self._queue = self._queue[:count], self._queue[count:]
            self._batch(pool, batch)
            self._queue = [c for c in self._queue if not c.task.finished]

    def _affordable(self, most: int) -> int:
        """Return how many trials still fit: 0 ends the session."""
        left = self._limits.left()
        fits = most if math.isinf(left) else int(left / self._trial_s)
        if self._limits.trials is not None:
            fits = min(fits, self._limits.trials - len(self.history))
        return max(0, min(most, fits))

    def _next(self, count: int, width: int) -> list[Candidate]:
        """Return the next candidates: baselines of every workload first, then of the best bet."""
        found: list[Candidate] = []
        for task in self.tasks:
            if task.fresh and len(found) < min(count, width):
                found += self._propose(task, count)
        while not found:
            active = [task for task in self.tasks if self._open(task)]
            if not active:
                return []
            found = self._propose(max(active, key=promise), count)
        return found

    def _open(self, task: Task) -> bool:
        """Return whether ``task`` may have more trials."""
        return not task.finished and task.trials < self._limits.each

    def _propose(self, task: Task, count: int) -> list[Candidate]:
        found = task.propose(count)
        self._speak(task)
        return found

    def _speak(self, task: Task) -> None:
        for message in task.messages:
            self._say(message)
        task.messages.clear()

    def _batch(self, pool: Pool, candidates: list[Candidate]) -> None:
        started = time.monotonic()
        before = {c.task.tag: c.task.best_us for c in candidates}
        libraries = []
        for _ in candidates:
            # A name is used once: dlopen() takes a library that it has for one of the same name.
            self._libraries += 1
            libraries.append(str(self._folder / f"{self._libraries}.so"))
        jobs = [
            (candidate.module, str(candidate.task.target), self._exporter, library)
            for candidate, library in zip(candidates, libraries, strict=True)
        ]
        until = self._limits.deadline + _GRACE_S
        built = pool.map(worker.build, jobs, self._limits.build_s, until)
        for candidate, library, answer in zip(candidates, libraries, built, strict=True):
            self._judge(pool, candidate, library, answer)
            Path(library).unlink(missing_ok=True)
        for task in {c.task.tag: c.task for c in candidates}.values():
            old = before[task.tag]
            now = 1 - task.best_us / old if math.isfinite(old) and old > 0 else 0.0
            task.gain = 0.5 * task.gain + 0.5 * now
            task.batches += 1
        mean = (time.monotonic() - started) / len(candidates)
        self._trial_s = 0.5 * self._trial_s + 0.5 * mean

    def _judge(self, pool: Pool, candidate: Candidate, library: str, built: Answer | None) -> None:
        """Measure one built candidate and write it down, unless the session's time is up.

        A candidate of a task that was given up is skipped: there is nothing to compare it with.
        """
        if built is None or candidate.task.finished:
            return
        if built.error is not None:
            self._finish(candidate, (), f"build: {built.error}")
            return
        result = self._measure(pool, candidate.task, library)
        if result is None:
            return
        if median_us(result.run_secs) < candidate.task.best_us:  # lucky, or really the best?
            again = self._measure(pool, candidate.task, library)
            if again is None:
                return
            result = Measurement((*result.run_secs, *again.run_secs), again.error)
        self._finish(candidate, () if result.error else result.run_secs, result.error)

    def _measure(self, pool: Pool, task: Task, library: str) -> Measurement | None:
        """Return what the candidate did; None when the session's time was up before."""
        job = (library, task.arguments(), task.timing, task.reference)
        until = self._limits.deadline + _GRACE_S
        answer = pool.call(worker.measure, job, self._limits.run_s, until)
        if answer is None:
            return None
        if answer.error is not None:
            return Measurement((), f"run: {answer.error}")
        measured: Measurement = answer.value
        return measured

    def _finish(self, candidate: Candidate, times: tuple[float, ...], error: str | None) -> None:
        task = candidate.task
        us = median_us(times)
        if not candidate.record:
            if error is not None:
                task.give_up(error)
                self._speak(task)
            return
        task.finish(candidate, us)
        line = {
            "workload": task.tag,
            "trial": task.trials - 1,
            "elapsed_s": round(self.elapsed(), 3),
            "us": us,
            "best_us": task.best_us,
            "failed": error is not None,
            "kind": candidate.kind,
            "error": error,
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        if task.model is not None:
            line["model"] = task.model
        with _whole():
            task.store.append(task.entry, candidate.trace, times, task.target, line)
            self.history.append(line)
        self._on_trial(task, line)
        self._speak(task)


@contextmanager
def _whole() -> Iterator[None]:
    """Let Ctrl-C wait: a trial is counted if, and only if, it is written down."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *given: seen.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if seen and callable(before):
            before(*seen[-1])


def promise(task: Task) -> float:
    """Return what the next batch of ``task`` may gain, as a part of its time."""
    return task.gain + 1 / (1 + task.batches)
