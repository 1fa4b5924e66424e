"""MetaSchedule's builder with workers that stay, for CPUs (LLVM, gcc) as for GPUs (nvcc)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.builder import BuilderResult, PyBuilder

from blockscale.tuning import worker
from blockscale.tuning.components.pool import OVER, Answer, Job, Workers


@derived_object
class WorkerBuilder(PyBuilder):
    """Builds the candidates of a batch into libraries in ``folder``.

    Args:
        workers: who builds.
        exporter: ``module:function (module, target, out)`` that a worker calls.
        folder: where libraries lie.
        timeout: seconds that a candidate may take.
        module: candidate's module, library -> what `worker.build` is to build in its place, and a
            key: of those with the same one (it keeps libraries) the first is built alone.
        ahead: return at once; `WorkerRunner` waits for the build of what it is to measure.
    """

    def __init__(
        self,
        workers: Workers,
        exporter: str,
        folder: Path,
        timeout: float = 30.0,
        module: Callable[[Any, str], tuple[Any, Any]] = lambda mod, library: (mod, library),
        ahead: bool = False,
    ) -> None:
        self._workers, self._exporter, self._folder = workers, exporter, folder
        self._timeout, self._module, self._ahead = timeout, module, ahead
        self._count = 0
        self._first: dict[Any, Job] = {}

    def build(self, build_inputs: list[Any]) -> list[BuilderResult]:
        """Return a library, or an error, for each input."""
        made = {}
        for each in build_inputs:
            # A name is used once: dlopen() takes a library that it has for one of the same name.
            self._count += 1
            library = str(self._folder / f"{self._count}.so")
            module, key = self._module(each.mod, library)
            arguments = (module, str(each.target), self._exporter, library)
            made[library] = job = Job(worker.build, arguments, self._timeout)
            if (first := self._first.setdefault(key, job)) is not job:
                job.ready = first.done
        self._workers.to_build += made.values()
        self._workers.builds.update(made)
        if self._ahead:
            return [BuilderResult(library, None) for library in made]
        self._workers.wait(lambda: all(job.done() for job in made.values()))
        found = {library: job.answer or Answer(None, OVER) for library, job in made.items()}
        return [
            BuilderResult(None if answer.error else library, answer.why("build"))
            for library, answer in found.items()
        ]
