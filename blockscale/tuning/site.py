"""Where candidates are measured: on this CPU, its GPU, or a model of one; `fleet` has servers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blockscale.base.targets import is_gpu
from blockscale.tuning import gpu, modelled, worker
from blockscale.tuning.components.facts import moe_gemm_of
from blockscale.tuning.components.pool import Answer, Job, Worker, Workers
from blockscale.tuning.components.runner import Measuring
from blockscale.tuning.moe import gpu as moe_gpu
from blockscale.tuning.task import Task

_START_S = 120.0
"""For what measures to find its GPU, or to answer from far away."""
_MEASUREMENTS = 5000
"""After so many a process that measures on a GPU is replaced: candidates stay loaded in it."""


class Site:
    """This machine's CPU, on which candidates are never built while one is measured."""

    exporter = "blockscale.tuning.exporter:export_openmp"
    """``module:function (module, target, out)`` that a worker calls to build a candidate."""
    exclusive = True
    model: str | None = None
    """The model that times candidates; None: they are measured."""
    slack_s = 0.0
    """For what a measurement needs beside its time, where that is kept elsewhere."""

    def __init__(self, level: str) -> None:
        self.level = level

    def measurers(self, log: Path) -> list[Worker]:
        """Return the processes that measure; none: the last builder, while the others idle."""
        return []

    def measuring(self, task: Task, library: str) -> Measuring:
        """Return the job that measures a candidate of ``task``."""
        return worker.measure, (library, task.arguments(), task.timing, str(task.reference))

    def describing(self) -> Measuring | None:
        """Return the job that describes what measures; None: nothing need be asked."""
        return None

    def describe(self, workers: Workers) -> dict[str, Any] | None:
        """Return what logs say of the machine that measures; None: it is this one's CPU.

        Raises:
            RuntimeError: nothing there runs code for the level.
            CompileError: there is no nvcc.
        """
        asked = self.describing()
        if asked is None:
            return None
        import tvm
        import tvm_ffi

        found = {"tvm": tvm.__version__, "tvm_ffi": tvm_ffi.__version__}
        if is_gpu(self.level):
            from blockscale.lower import nvcc

            found = {"nvcc": nvcc.version(), **found}
        jobs = [Job(*asked, timeout=_START_S) for _ in workers.measurers]
        for each, job in zip(workers.measurers, jobs, strict=True):
            each.send(job)
        workers.wait(lambda: all(job.answer is not None for job in jobs))
        answers = [job.answer for job in jobs if job.answer is not None]
        if len(answers) < len(jobs):  # Ctrl-C
            return found
        return self.judged(workers, answers) | found

    def judged(self, workers: Workers, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the description that the ``answers`` of all measurers give."""
        [answer] = answers
        if answer.error is not None:
            why = answer.error.removeprefix("RuntimeError: ")
            raise RuntimeError(f"tune: level={self.level!r}: {why}")
        found: dict[str, Any] = answer.value
        return found


class GpuSite(Site):
    """This machine's GPU; its CPU builds meanwhile."""

    exporter = "blockscale.tuning.exporter:export_cuda"
    exclusive = False

    def measurers(self, log: Path) -> list[Worker]:
        """Return the one process that uses the GPU, and may crash."""
        return [Worker(log, "torch", _MEASUREMENTS)]

    def measuring(self, task: Task, library: str) -> Measuring:
        """Return the job that measures a candidate of ``task``."""
        gemm = moe_gemm_of(task.mod)
        if gemm is not None:
            told = (library, gemm, task.workload.rows, task.timing, str(task.reference))
            return moe_gpu.measure, told
        return gpu.measure, (library, task.arguments(), task.timing, str(task.reference))

    def describing(self) -> Measuring:
        """Return the job that describes the GPU."""
        return gpu.describe, (self.level,)


class ModelSite(Site):
    """No machine: candidates are built, and a model of a B200 says what they take."""

    exporter = modelled.EXPORTER
    exclusive = False

    def __init__(self, level: str) -> None:
        super().__init__(level)
        self.model = modelled.model_name()

    def measuring(self, task: Task, library: str) -> Measuring:
        """Return the job that asks the model; there are no results to compare."""
        return modelled.measure, (library, task.workload.rows)

    def describe(self, workers: Workers) -> dict[str, Any]:
        """Return what logs say of the model, where they name a machine otherwise."""
        from blockscale.lower import nvcc

        return {"modelled": True, "model": self.model, "nvcc": nvcc.version()}
