"""Where candidates are measured: on this CPU, its GPU, or a model of one; `fleet` has servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from blockscale.base.targets import is_gpu
from blockscale.tuning import exporter, gpu, modelled, moe, worker
from blockscale.tuning.components.pool import Answer, Job, Worker, Workers
from blockscale.tuning.task import Task

Measuring = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function that a worker calls, and its arguments."""

_START_S = 120.0
"""For what measures to find its GPU, or to answer from far away."""
_GPU_NEEDS = "torch"
"""The module that a process imports which measures on a GPU."""
MEASUREMENTS = 5000
"""After so many a process that measures on a GPU is replaced: candidates stay loaded in it."""


class Site:
    """This machine's CPU or GPU for ``level``, or a model of a GPU."""

    slack_s = 0.0
    """For what a measurement needs beside its time, where that is kept elsewhere."""

    def __init__(self, level: str, modelled_: bool = False) -> None:
        self.level = level
        self.model = modelled.model_name() if modelled_ else None
        """The model that times candidates; None: they are measured."""
        self.exclusive = not is_gpu(level)
        """Candidates are never built while one is measured: both use this machine's CPU."""
        self.exporter = exporter.CUDA if is_gpu(level) else exporter.OPENMP
        if modelled_:
            self.exporter = modelled.EXPORTER

    def measurers(self, log: Path) -> list[Worker]:
        """Return the processes that measure; none: the last builder, while the others idle."""
        needs_own = is_gpu(self.level) and self.model is None
        return [Worker(log, _GPU_NEEDS, MEASUREMENTS)] if needs_own else []

    def measuring(self, task: Task, library: str, limit_s: float) -> Measuring:
        """Return the job that measures a candidate of ``task`` within ``limit_s``."""
        how = task.timing, str(task.reference)
        if self.model is not None:  # there are no results to compare
            return modelled.measure, (library, task.workload.rows)
        if task.gemm is not None:
            return moe.measure, (library, task.gemm, task.workload.rows, *how)
        measure = gpu.measure if is_gpu(self.level) else worker.measure
        return measure, (library, task.arguments(), *how)

    def describing(self) -> Measuring | None:
        """Return the job that describes what measures; None: nothing need be asked."""
        return (gpu.describe, (self.level,)) if is_gpu(self.level) and not self.model else None

    def ask(self, workers: Workers) -> None:
        """Have what measures describe itself, which takes seconds; for `describe`."""
        asked = self.describing()
        self._asked = [Job(*asked, timeout=_START_S) for _ in workers.measurers] if asked else []
        for each, job in zip(workers.measurers, self._asked, strict=False):
            each.send(job)

    def describe(self, workers: Workers) -> dict[str, Any] | None:
        """Return what logs say of what measures; None: it is this machine's CPU.

        Raises:
            RuntimeError: nothing there runs code for the level.
            CompileError: there is no nvcc.
        """
        import tvm
        import tvm_ffi

        found: dict[str, Any] = {}
        if is_gpu(self.level):
            from blockscale.lower import nvcc

            found = {"nvcc": nvcc.version()}
        if self.model is not None:
            return {"modelled": True, "model": self.model, **found}
        if not self._asked:
            return None
        if workers.wait(lambda: all(job.done() for job in self._asked)):
            found |= self.judged(workers, [job.answer for job in self._asked if job.answer])
        return found | {"tvm": tvm.__version__, "tvm_ffi": tvm_ffi.__version__}

    def judged(self, workers: Workers, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return what the machines of all measurers are; do without those that differ."""
        name = "gpu" if is_gpu(self.level) else "cpu"
        kinds = Counter(a.value[name] for a in answers if a.error is None)
        usual = kinds.most_common(1)[0][0] if kinds else None
        found: dict[str, Any] = {}
        for each, answer in zip(workers.measurers, answers, strict=True):
            why, told = answer.error, dict(answer.value or {})
            if why is None:
                each.place = f"server {told.pop('server')}" if "server" in told else ""
                if told[name] == usual:
                    found = found or told
                    continue
                why = (
                    f"{each.place}: has a {told[name]}, and most others a {usual}, whose times "
                    "do not compare"
                )
            each.dead = why.removeprefix("RuntimeError: ")
            each.kill()
            if len(answers) > 1:
                workers.say(f"not used: {each.dead}")
        if not found:
            raise RuntimeError(f"tune: level={self.level!r}: {each.dead}")
        return found
