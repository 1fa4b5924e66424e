"""A session for a GPU: many processes build while one measures.

nvcc takes seconds, a measurement a tenth of one, and the GPU does not disturb the cores; so
candidates flow: proposed, built by whoever is idle, measured in the order in which they come.
"""

from __future__ import annotations

import math
import select
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockscale.building.records import LogError, sentence
from blockscale.tuning import gpu, worker
from blockscale.tuning.facts import moe_gemm_of
from blockscale.tuning.moe import gpu as moe_gpu
from blockscale.tuning.pool import Answer, Pool, Worker
from blockscale.tuning.session import Session, promise
from blockscale.tuning.task import Candidate, Proposal, Task
from blockscale.tuning.worker import Measurement

if TYPE_CHECKING:
    from blockscale.catalog import Workload

_AHEAD = 2
"""Builds, per builder, that may wait for the GPU: more would be proposed without new knowledge."""
_GPU_START_S = 120.0
"""For the measuring process to find the GPU, importing torch aside."""
_BUILD_S = 4.0
"""What a build is thought to take before the first has ended."""


@dataclass
class _Group:
    """Points of a task that were proposed together."""

    task: Task
    before_us: float
    left: int


@dataclass
class Job:
    """A candidate on its way."""

    candidate: Candidate
    library: Path
    group: _Group | None
    started: float
    built: Answer | None = None


class Pipeline(Session):
    """Runs tasks until a limit; see `Session` for what it writes down."""

    measurer: Worker
    """It alone uses the GPU, and may crash."""
    unopened: Iterator[Workload]
    """Workloads to open one by one, as builders have nothing to do: each takes 0.2 s."""
    opener: Callable[[Workload], Task]

    needs = "torch"
    """The module that the measuring process imports."""

    def describing(self, arch: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the job that describes what measures."""
        return gpu.describe, (arch,)

    def measuring(self, job: Job, reference: Path) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the job that measures a candidate."""
        task = job.candidate.task
        gemm = moe_gemm_of(task.mod)
        if gemm is not None:
            rows = task.workload.rows
            return moe_gpu.measure, (str(job.library), gemm, rows, task.timing, str(reference))
        return gpu.measure, (str(job.library), task.arguments(), task.timing, str(reference))

    def describe(self, arch: str) -> dict[str, Any]:
        """Return what logs say of this machine's GPU and tools.

        Raises:
            RuntimeError: there is no GPU that runs code for ``arch``.
            CompileError: there is no nvcc.
        """
        import tvm
        import tvm_ffi

        from blockscale.lower import nvcc

        tools = {"nvcc": nvcc.version(), "tvm": tvm.__version__, "tvm_ffi": tvm_ffi.__version__}
        self.measurer.send(*self.describing(arch))
        # Waited for also when the time is over: without a GPU no time would do.
        answer = self.measurer.receive(_GPU_START_S, math.inf)
        assert answer is not None
        if answer.error is not None:
            why = answer.error.removeprefix("RuntimeError: ")
            raise RuntimeError(f"tune: level={arch!r}: {why}")
        if time.monotonic() > self._limits.deadline:
            raise RuntimeError(
                f"tune: level={arch!r}: the time was over before the GPU was ready; give it 60 s"
            )
        found: dict[str, Any] = answer.value
        return found | tools

    def run(self, pool: Pool, width: int) -> None:
        """Tune until a limit is reached or every space is exhausted; ``width``: builds at once."""
        self._width = width
        self._waiting: deque[tuple[Proposal, _Group | None]] = deque()
        self._building: dict[Worker, Job] = {}
        self._built: deque[Job] = deque()
        self._measuring: Job | None = None
        self._last: Task | None = None
        self._references: dict[str, Path] = {}
        self._build_s = _BUILD_S
        while self._limits.left() > 0:
            self._start_builds(pool)
            self._start_measurement()
            busy: list[Worker] = list(self._building)
            busy += [self.measurer] if self._measuring else []
            if not busy:
                if self._built:
                    continue
                return
            self._wait(busy)

    # ---- builds

    def _start_builds(self, pool: Pool) -> None:
        for builder in pool.workers:
            if builder in self._building:
                continue
            if not self._room():
                return
            made = self._next_candidate()
            if made is None:
                return
            candidate, group = made
            self._libraries += 1
            library = self._folder / f"{self._libraries}.so"
            job = (
                candidate.module,
                str(candidate.task.target),
                self._exporter,
                str(library),
            )
            builder.send(worker.build, job, self._limits.build_s)
            self._building[builder] = Job(candidate, library, group, time.monotonic())
            self._poll_all()

    def _room(self) -> bool:
        """Return whether another build makes sense: trials, time and the GPU's queue allow it."""
        flying = len(self._building) + len(self._built) + (self._measuring is not None)
        if len(self._built) >= _AHEAD * self._width:
            return False
        if self._limits.trials is not None and len(self.history) + flying >= self._limits.trials:
            return False
        return self._limits.left() > self._build_s

    def _next_candidate(self) -> tuple[Candidate, _Group | None] | None:
        """Return what to build next; None when there is nothing now."""
        while True:
            if not self._waiting and not self._refill():
                return None
            proposal, group = self._waiting.popleft()
            if proposal.task.given_up:
                continue
            if proposal.task.trials >= self._limits.each and proposal.kind == "search":
                self._leave(group)
                continue
            candidate = proposal.apply()
            self._speak(proposal.task)
            if candidate is not None:
                return candidate, group
            self._leave(group)

    def _refill(self) -> bool:
        """Queue the baselines of the next task that has some, else points of the best bet."""
        for task in chain(tuple(self.tasks), self._opened()):
            if task.fresh or not (task.referenced or task.trials >= self._limits.each):
                self._waiting.extend((proposal, None) for proposal in task.baselines())
                if self._waiting:
                    return True
        while ready := [task for task in self.tasks if task.ready and self._open(task)]:
            task = max(ready, key=promise)
            proposals = self._ask(task)
            if proposals:
                group = _Group(task, task.best_us, len(proposals))
                self._waiting.extend((proposal, group) for proposal in proposals)
                task.batches += 1
                return True
        return False

    def _opened(self) -> Iterator[Task]:
        for workload in self.unopened:
            try:
                task = self.opener(workload)
            except LogError:
                raise
            except Exception as error:  # an op without a schedule must not end the others' session
                self._say(f"{workload.tag}: not tuned, since scheduling failed ({sentence(error)})")
                continue
            self.tasks.append(task)
            yield task

    def _ask(self, task: Task) -> list[Proposal]:
        flying = [*self._building.values(), *self._built]
        flying += [self._measuring] if self._measuring else []
        own = sum(job.candidate.task is task for job in flying)
        count = min(max(4, self._width // 2), self._limits.each - task.trials - own)
        found: list[Proposal] = []
        if count > 0:
            try:
                found = task.baselines() or task.ask(int(count))
            except ValueError as error:  # one bad space must not end the others' session
                self._say(f"{task.tag}: {error}")
        task.finished = not found
        return found

    def _leave(self, group: _Group | None) -> None:
        """Count one member of ``group`` as done, and judge the group after the last one."""
        if group is None:
            return
        group.left -= 1
        if group.left == 0:
            known = math.isfinite(group.before_us) and group.before_us > 0
            gained = 1 - group.task.best_us / group.before_us if known else 0.0
            group.task.gain = 0.5 * group.task.gain + 0.5 * gained

    # ---- measurements

    def _start_measurement(self) -> None:
        """Hand the next built candidate to the GPU, failed builds to the history."""
        while self._measuring is None:
            ready = [job for job in self._built if self._measurable(job)]
            if not ready:
                return
            # Another task's arguments would have to be made first.
            job = next((j for j in ready if j.candidate.task is self._last), ready[0])
            self._built.remove(job)
            task = self._last = job.candidate.task
            assert job.built is not None
            if task.given_up:
                self._drop(job)
            elif job.built.error is not None:
                self._end(job, Measurement((), f"build: {job.built.error}"))
            else:
                reference = self._references.setdefault(task.tag, job.library)
                self.measurer.send(*self.measuring(job, reference), self._limits.run_s)
                self._measuring = job

    def _measurable(self, job: Job) -> bool:
        """Return whether there is something to compare with; a default is compared with itself."""
        task = job.candidate.task
        return job.candidate.kind == "default" or task.ready or task.given_up

    def _end(self, job: Job, result: Measurement) -> None:
        task = job.candidate.task
        if job.candidate.kind == "default" and not result.error:
            task.ready = True
        self._finish(job.candidate, () if result.error else result.run_secs, result.error)
        self._drop(job)

    def _drop(self, job: Job) -> None:
        if self._references.get(job.candidate.task.tag) != job.library:
            job.library.unlink(missing_ok=True)
        self._leave(job.group)

    # ---- events

    def _wait(self, busy: list[Worker]) -> None:
        """Wait until a worker answers, is late, or the session's time is up; take the answers."""
        until = min(self._limits.deadline, *(process.deadline for process in busy))
        timeout = min(1.0, max(0.0, until - time.monotonic()))
        select.select(busy, [], [], timeout)
        self._poll_all()

    def _poll_all(self) -> None:
        for builder in list(self._building):
            answer = builder.poll()
            if answer is not None:
                job = self._building.pop(builder)
                job.built = answer
                self._built.append(job)
                self._build_s += 0.1 * (time.monotonic() - job.started - self._build_s)
        if self._measuring is not None:
            answer = self.measurer.poll()
            if answer is not None:
                job, self._measuring = self._measuring, None
                result = Measurement((), f"run: {answer.error}")
                if answer.error is None:
                    result = answer.value
                if result.broken:
                    self.measurer.kill()
                    self.measurer.start()
                self._end(job, result)
                self._start_measurement()
