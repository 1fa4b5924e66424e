"""MetaSchedule's runner with processes that stay: for this CPU, a GPU, a model of one, or a fleet.

What measures is a function that a worker calls (`worker.measure`, `gpu.measure`, `moe.gpu.measure`,
`modelled.measure`, `fleet.measure`), so a candidate that crashes or hangs harms nobody.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.runner import PyRunner, PyRunnerFuture, RunnerResult

from blockscale.tuning import worker
from blockscale.tuning.components.pool import OVER, Answer, Job, Workers
from blockscale.tuning.worker import Argument, Measurement, Timing


def alone(library: str, args_info: Sequence[Any], built: Any) -> Job:
    """Return the job that times a candidate of which nothing is known but types and shapes."""
    arguments = [
        Argument(f"a{i}", str(info.dtype), tuple(map(int, info.shape)), False, None)
        for i, info in enumerate(args_info)
    ]
    return Job(worker.measure, (library, arguments, Timing(), library), 10.0)


@derived_object
class WorkerRunner(PyRunner):
    """Measures each candidate in one of the measuring workers.

    Args:
        workers: who measures.
        job: library, types and shapes, what its build returned -> the job that measures, which
            returns a `Measurement`.
        finish: is told a library and its `Measurement` as soon as it is there; TVM's callbacks
            hear of it when the whole batch has ended, too late for one that may be killed.
    """

    def __init__(
        self,
        workers: Workers,
        job: Callable[[str, Sequence[Any], Any], Job] = alone,
        finish: Callable[[str, Measurement], None] = lambda library, result: None,
    ) -> None:
        self.workers, self.job, self.finish = workers, job, finish

    def run(self, runner_inputs: list[Any]) -> list[Any]:
        """Return a future for each input."""
        return [Measured(self, str(i.artifact_path), i.args_info) for i in runner_inputs]


@derived_object
class Measured(PyRunnerFuture):
    """What a candidate takes, once its build and its measurement have ended."""

    def __init__(self, runner: Any, library: str, args_info: Any) -> None:
        self._runner, self._library, self._args_info = runner, library, args_info
        self._result: Measurement | None = None
        build = runner.workers.builds.pop(library, None)
        if build is not None and not build.done():
            build.then = self._built
        else:
            self._built((build and build.answer) or Answer(None))

    def _built(self, answer: Answer) -> None:
        if answer.error is not None:
            self._finish(Measurement((), answer.why("build")))
            return
        job = self._runner.job(self._library, self._args_info, answer.value)
        job.then = self._measured
        self._runner.workers.to_measure.append(job)

    def _measured(self, answer: Answer) -> None:
        why = answer.why("run")
        self._finish(Measurement((), why) if why else answer.value)

    def _finish(self, result: Measurement) -> None:
        self._result = result
        self._runner.finish(self._library, result)

    def done(self) -> bool:
        """Return whether there is a result; waits for nothing."""
        return self._result is not None or self._runner.workers.over()

    def result(self) -> RunnerResult:
        """Return the result; waits for it unless the workers' time is up."""
        self._runner.workers.wait(lambda: self._result is not None)
        found = self._result or Measurement((), OVER)
        if found.error is not None or not all(map(math.isfinite, found.run_secs)):
            return RunnerResult(None, found.error or "run: no time")
        return RunnerResult(list(found.run_secs), None)
