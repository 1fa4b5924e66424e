"""Where candidates are measured: on this CPU, its GPU, or a model of one; `fleet` has servers."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
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
_GRACE_S = 5.0
"""For the others to answer when one has: the session begins."""
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
        self._asked, self._late, self._machine = dict[Worker, Job](), math.inf, dict[str, Any]()
        if asked := self.describing():
            self._asked = {each: Job(*asked, timeout=_START_S) for each in workers.measurers}
        elif not is_gpu(self.level):
            worker.need_openmp()
        for each, job in self._asked.items():
            each.send(job)

    def describe(self, workers: Workers) -> dict[str, Any] | None:
        """Return what logs say of what measures; None: it is this machine's CPU.

        Or the session is over, also because nothing there runs code for the level.

        Raises:
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
        if not self._asked or not workers.wait(self._enough):
            return None
        found |= self.judged(workers) | {"tvm": tvm.__version__, "tvm_ffi": tvm_ffi.__version__}
        return None if workers.over() else found

    def _enough(self) -> bool:
        """Return whether all have answered, or one has and the others had `_GRACE_S` since then."""
        answers = [job.answer for job in self._asked.values()]
        if any(answer and answer.error is None for answer in answers):
            self._late = min(self._late, time.monotonic() + _GRACE_S)
        return all(answers) or time.monotonic() >= self._late

    def judged(self, workers: Workers) -> dict[str, Any]:
        """Return what the machines of all measurers are; do without those that differ.

        Who has not answered is judged when it does.
        """
        name = "gpu" if is_gpu(self.level) else "cpu"
        answers = [job.answer for job in self._asked.values()]
        kinds = Counter(a.value[name] for a in answers if a and a.error is None)
        usual = kinds.most_common(1)[0][0] if kinds else None
        for each, job in self._asked.items():
            job.then = partial(self._judge, workers, each, name, usual)
            if job.answer:
                job.then(job.answer)
        if late := answers.count(None):
            names = self.unheard(workers)
            workers.say(f"not used before they answer: {late} of the servers {names}")
        return self._machine

    def unheard(self, workers: Workers) -> str:
        """Return the names of who may not have answered."""
        return ""

    def _judge(
        self, workers: Workers, each: Worker, name: str, usual: str | None, answer: Answer
    ) -> None:
        why, told = answer.error, dict(answer.value or {})
        if why is None:
            each.place = f"server {told.pop('server')}" if "server" in told else ""
            if told[name] == usual:
                self._machine = self._machine or told
                return
            why = (
                f"{each.place}: has a {told[name]}, and most others a {usual}, whose times "
                "do not compare"
            )
        elif not answer.lost and (names := self.unheard(workers)):
            why = f"one of the servers {names}: {why}"
        each.dead = why.removeprefix("RuntimeError: ")
        each.kill()
        if len(workers.measurers) > 1:
            workers.say(f"not used: {each.dead}")
        if all(other.dead for other in workers.measurers):
            workers.abandon(RuntimeError(f"tune: level={self.level!r}: {each.dead}"))
