"""MetaSchedule's builder with workers that stay, for CPUs (LLVM, gcc) as for GPUs (nvcc)."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.builder import BuilderResult, PyBuilder

from blockscale.tuning import worker
from blockscale.tuning.components.pool import OVER, Job, Workers


def _as_it_is(mod: Any, library: Path) -> bytes:
    return pickle.dumps(mod)


@derived_object
class WorkerBuilder(PyBuilder):
    """Builds the candidates of a batch into libraries in ``folder``.

    Args:
        workers: who builds.
        exporter: ``module:function (module, target, out)`` that a worker calls.
        folder: where libraries lie.
        timeout: seconds that a candidate may take.
        module: candidate's module, library -> the pickled module to build in its place.
        ahead: return at once; `WorkerRunner` waits for the build of what it is to measure.
    """

    def __init__(
        self,
        workers: Workers,
        exporter: str,
        folder: Path,
        timeout: float = 30.0,
        module: Callable[[Any, Path], bytes] = _as_it_is,
        ahead: bool = False,
    ) -> None:
        self._workers, self._exporter, self._folder = workers, exporter, folder
        self._timeout, self._module, self._ahead = timeout, module, ahead
        self._count = 0
        self.jobs: dict[str, Job] = {}
        """Of libraries that were promised."""

    def build(self, build_inputs: list[Any]) -> list[BuilderResult]:
        """Return a library, or an error, for each input."""
        made = [self._submit(each.mod, str(each.target)) for each in build_inputs]
        if self._ahead:
            self.jobs.update(made)
            return [BuilderResult(library, None) for library, _ in made]
        self._workers.wait(lambda: all(job.answer is not None for _, job in made))
        return [_result(library, job) for library, job in made]

    def _submit(self, mod: Any, target: str) -> tuple[str, Job]:
        # A name is used once: dlopen() takes a library that it has for one of the same name.
        self._count += 1
        library = self._folder / f"{self._count}.so"
        arguments = (self._module(mod, library), target, self._exporter, str(library))
        job = Job(worker.build, arguments, self._timeout)
        self._workers.to_build.append(job)
        return str(library), job


def _result(library: str, job: Job) -> BuilderResult:
    if job.answer is None:
        return BuilderResult(None, OVER)
    if job.answer.error is not None:
        return BuilderResult(None, f"build: {job.answer.error}")
    return BuilderResult(library, None)
