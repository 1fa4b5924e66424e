"""MetaSchedule's runner with processes that stay: for this CPU, a GPU, a model of one, or a fleet.

What measures is a function that a worker calls (`worker.measure`, `gpu.measure`, `moe.gpu.measure`,
`modelled.measure`, `fleet.measure`), so a candidate that crashes or hangs harms nobody.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.runner import PyRunner, PyRunnerFuture, RunnerResult

from blockscale.building.records import median_us
from blockscale.tuning import worker
from blockscale.tuning.components.pool import OVER, Answer, Job, Workers
from blockscale.tuning.worker import Argument, Measurement, Timing

Measuring = tuple[Callable[..., Any], Sequence[Any]]
"""A function that returns a `Measurement`, and its arguments."""


def alone(library: str, args_info: Sequence[Any]) -> Measuring:
    """Return the job that times a candidate of which nothing is known but types and shapes."""
    arguments = [
        Argument(f"a{i}", str(info.dtype), tuple(map(int, info.shape)), False, None)
        for i, info in enumerate(args_info)
    ]
    return worker.measure, (library, arguments, Timing(), library)


class Plan:
    """What a runner has to know of candidates; this one knows nothing."""

    def measuring(self, library: str, args_info: Sequence[Any]) -> Measuring:
        """Return the job that measures what was built into ``library``."""
        return alone(library, args_info)

    def group(self, library: str) -> str:
        """Return what candidates share that had better be measured one after the other."""
        return ""

    def ready(self, library: str) -> bool | None:
        """Return whether there is something to compare the candidate with; None: never."""
        return True

    def best_us(self, library: str) -> float:
        """Return the time below which a candidate is measured twice: lucky, or really the best?"""
        return 0.0

    def finish(self, library: str, result: Measurement) -> None:
        """Take note of a result, as soon as it is there."""


@derived_object
class WorkerRunner(PyRunner):
    """Measures each candidate in one of the measuring workers.

    Args:
        workers: who measures.
        plan: what is known of candidates.
        timeout: seconds that a candidate may run.
        built: builds that may still go on, by library (`WorkerBuilder.jobs`).
    """

    def __init__(
        self,
        workers: Workers,
        plan: Plan | None = None,
        timeout: float = 10.0,
        built: Mapping[str, Job] | None = None,
    ) -> None:
        self.workers, self.plan, self.timeout = workers, plan or Plan(), timeout
        self.built = built if built is not None else {}

    def run(self, runner_inputs: list[Any]) -> list[Any]:
        """Return a future for each input."""
        return [Measured(self, str(i.artifact_path), i.args_info) for i in runner_inputs]


@derived_object
class Measured(PyRunnerFuture):
    """What a candidate takes, once its build and its measurement have ended."""

    def __init__(self, runner: Any, library: str, args_info: Any) -> None:
        self._runner, self._plan = runner, runner.plan
        self._library, self._args_info = library, args_info
        self._result: Measurement | None = None
        self._first: tuple[float, ...] = ()
        job = runner.built.pop(library, None)
        if job is None:
            self._measure()
        elif job.answer is None:
            job.then = self._build_ended
        else:
            self._build_ended(job.answer)

    def _build_ended(self, answer: Answer) -> None:
        if answer.error is None:
            self._measure()
        else:
            self._finish(Measurement((), f"build: {answer.error}"))

    def _measure(self) -> None:
        plan, library = self._plan, self._library
        function, arguments = plan.measuring(library, self._args_info)
        job = Job(
            function,
            arguments,
            self._runner.timeout,
            self._measured,
            plan.group(library),
            lambda: plan.ready(library),
        )
        self._runner.workers.to_measure.append(job)

    def _measured(self, answer: Answer) -> None:
        over = answer.error == OVER
        why = answer.error if over else f"run: {answer.error}"
        result = Measurement((), why) if answer.error else answer.value
        assert isinstance(result, Measurement)
        us = median_us(result.run_secs)
        if not result.error and not self._first and us < self._plan.best_us(self._library):
            self._first = result.run_secs
            self._measure()
            return
        self._finish(Measurement((*self._first, *result.run_secs), result.error))

    def _finish(self, result: Measurement) -> None:
        self._result = result
        self._plan.finish(self._library, result)

    def done(self) -> bool:
        """Return whether there is a result; waits for nothing."""
        return self._result is not None or self._runner.workers.over()

    def result(self) -> RunnerResult:
        """Return the result; waits for it unless the workers' time is up."""
        self._runner.workers.wait(lambda: self._result is not None)
        found = self._result
        if found is None:
            return RunnerResult(None, OVER)
        if found.error is not None or not all(map(math.isfinite, found.run_secs)):
            return RunnerResult(None, found.error or "run: no time")
        return RunnerResult(list(found.run_secs), None)
