"""Worker processes that stay, and the queues of what they build and measure.

MetaSchedule's LocalBuilder starts new processes for every batch (importing tvm costs 1.6 s each
time), and its timeouts are kept by the worker itself, which a kernel that hangs need not allow.
These workers stay, and the tuner keeps the time.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Any

OVER = "not measured: the session's time was up"
"""Error of a result that is none: nothing is known of the candidate."""

_MAX_JOBS = 200
"""Jobs before a worker is replaced: compiling leaks a little memory each time."""
_START_TIMEOUT_S = 60.0
_KILL_TIMEOUT_S = 10.0
_MAX_TRIES = 3
"""Servers that a job may lose before it is thought to be the cause."""

_SPIN_COUNT = "100000"
"""Rounds that an idle OpenMP thread of a measurement spins before it sleeps (GOMP_SPINCOUNT).

Seen on 2 shared cores of an AMD EPYC, kernels of 6 to 90 us: with 2000 and with 20000 stretches of
candidates took 110 us and 1 ms, threads falling asleep in every run; with 100000 and with libgomp's
default that was gone.  Under a load of 4 the default once gave 16 ms for a kernel of 9 us."""

_START = (
    "import sys; sys.path[:] = {path!r}; "
    "from blockscale.tuning.worker import main; main({pipe}, {parent}, {needs!r})"
)


@dataclass(frozen=True)
class Answer:
    """What came of a job: its value, or a sentence saying why there is none."""

    value: Any
    error: str | None = None
    lost: bool = False
    """The error is the worker's and not the job's: another worker may try."""


class Lost(Exception):
    """Raised by a job whose machine is gone or not to be trusted; the message names it."""


@dataclass(eq=False)
class Job:
    """A function that is importable by name, and what to do with its answer."""

    function: Callable[..., Any]
    arguments: Sequence[Any]
    timeout: float = math.inf
    then: Callable[[Answer], None] = lambda answer: None
    group: str = ""
    """A worker goes on with jobs of its last job's group: what these share is there."""
    ready: Callable[[], bool | None] = lambda: True
    """Whether it may start; None: it never will, and is answered with `OVER`."""
    answer: Answer | None = None
    tries: int = 0

    def end(self, answer: Answer) -> None:
        """Take the answer, and hand it on."""
        self.answer = answer
        self.then(answer)


class Worker:
    """One process; started by the first job, and again by the first job after it died."""

    def __init__(self, log: Path, needs: str = "tvm", max_jobs: int = _MAX_JOBS) -> None:
        """``log``: where its output goes; ``needs``: the module that it imports at its start."""
        self._log, self._needs, self._max_jobs = log, needs, max_jobs
        self._process: subprocess.Popen[bytes] | None = None
        self.job: Job | None = None
        self.group = ""
        self.dead: str | None = None
        """Why it is given no more jobs."""
        self.measures = False
        """Whether its job is a measurement."""
        self.place = ""
        """The machine far away for which it stands, and which is lost with it."""

    def start(self) -> None:
        """Start the process unless it runs; returns before it is ready."""
        if self._process is not None:
            return
        self.pipe, theirs = Pipe()
        path = [os.path.abspath(p) for p in sys.path]
        needs = {"path": path, "pipe": theirs.fileno(), "parent": os.getpid(), "needs": self._needs}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START.format(**needs)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"GOMP_SPINCOUNT": _SPIN_COUNT, **os.environ},
                start_new_session=True,
            )
        theirs.close()
        self._jobs, self._ready = 0, False

    def send(self, job: Job) -> None:
        """Hand over a job; its timeout does not count the start of the process."""
        if self._process is not None and self._jobs >= self._max_jobs:
            self.kill()
        self.start()
        self._jobs += 1
        self.job, self.group = job, job.group
        self.deadline = time.monotonic() + (job.timeout if self._ready else _START_TIMEOUT_S)
        with suppress(BrokenPipeError, ConnectionResetError):  # it died: poll() says so
            self.pipe.send((job.function, tuple(job.arguments)))

    def poll(self) -> Answer | None:
        """Return the answer, if it is there or its time is up; does not wait."""
        assert self.job is not None
        try:
            while self.pipe.poll():
                said = self.pipe.recv()
                if self._ready:
                    return Answer(**said)
                self._ready = True
                self.deadline = time.monotonic() + self.job.timeout
        except (EOFError, ConnectionResetError):
            return self._failed(self._death())
        if time.monotonic() < self.deadline:
            return None
        limit = self.job.timeout if self._ready else _START_TIMEOUT_S
        return self._failed(f"timeout: killed after {limit:.1f} s")

    def call(self, function: Callable[..., Any], *arguments: Any, timeout: float) -> Answer:
        """Run a job alone and wait for its answer."""
        self.send(Job(function, arguments, timeout))
        while (answer := self.poll()) is None:
            wait([self.pipe], 0.1)
        self.job = None
        return answer

    def _failed(self, why: str) -> Answer:
        self.kill()
        if self.place:
            return Answer(None, f"{self.place}: does not answer ({why})", lost=True)
        return Answer(None, why)

    def _death(self) -> str:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.returncode
        if code is not None and code < 0:
            with suppress(ValueError):
                return f"crashed with {signal.Signals(-code).name}"
        return f"crashed with exit code {code}"

    def kill(self) -> None:
        """End the process and everything it started."""
        if self._process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a driver may hold it until a kernel ends
            self._process.wait(_KILL_TIMEOUT_S)
        self.pipe.close()
        self._process = None


@dataclass
class Workers:
    """Workers that build and workers that measure, with a queue of jobs for each kind.

    Nothing starts but in `step` and `wait`, which whoever needs an answer calls.  Without measurers
    the last builder measures.
    """

    builders: list[Worker]
    measurers: list[Worker]
    exclusive: bool = True
    """Never build and measure at once: both use this machine's CPU."""
    until: float = math.inf
    """When (monotonic clock) everything is abandoned."""
    failure: BaseException | None = None
    """Why everything is abandoned now."""
    say: Callable[[str], None] = print
    to_build: list[Job] = field(default_factory=list)
    to_measure: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Let a builder measure where nobody else does."""
        self.measurers = self.measurers or self.builders[-1:]
        self._all = list(dict.fromkeys([*self.measurers, *self.builders]))

    def __enter__(self) -> Workers:
        for worker in self._all:
            worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._all:
            worker.kill()

    def over(self) -> bool:
        """Return whether no answer will come any more."""
        return self.failure is not None or time.monotonic() >= self.until

    def wait(self, done: Callable[[], bool]) -> bool:
        """Run jobs until ``done()``; False: what it waits for will not come."""
        while not done():
            if self.over() or not self.step(0.2):
                return False
        return True

    def step(self, seconds: float) -> bool:
        """Start what may start, and take what comes within ``seconds``; False: nothing runs."""
        self._start(self.to_measure, self.measurers)
        self._start(self.to_build, self.builders)
        busy = [worker for worker in self._all if worker.job is not None]
        if busy:
            left = min(self.until, *(worker.deadline for worker in busy)) - time.monotonic()
            wait([worker.pipe for worker in busy], max(0.0, min(seconds, left)))
        for worker in busy:
            self._take(worker)
        return bool(busy)

    def _start(self, queue: list[Job], own: list[Worker]) -> None:
        """Give every idle worker of ``own`` a job of ``queue``, if possible one of its group."""
        measures = queue is self.to_measure
        for worker in own:
            others = (each for each in self._all if each.job is not None)
            if self.exclusive and any(each.measures != measures for each in others):
                return
            ready = self._ready(queue) if worker.job is None and worker.dead is None else []
            if ready:
                job = next((j for j in ready if j.group == worker.group), ready[0])
                queue.remove(job)
                worker.measures = measures
                worker.send(job)

    @staticmethod
    def _ready(queue: list[Job]) -> list[Job]:
        """Return the jobs that may start; answer those that never will."""
        found = [(job, job.ready()) for job in queue]
        for job, ready in found:
            if ready is None:
                queue.remove(job)
                job.end(Answer(None, OVER))
        return [job for job, ready in found if ready]

    def _take(self, worker: Worker) -> None:
        """Take a worker's answer if it is there, and hand it on."""
        answer, job = worker.poll(), worker.job
        if answer is None or job is None:
            return
        worker.job = None
        if answer.lost and worker.place:
            self._lose(worker, job, str(answer.error))
            return
        if getattr(answer.value, "broken", False):
            worker.kill()
            worker.start()
        job.end(answer)

    def _lose(self, worker: Worker, job: Job, why: str) -> None:
        """Do without a worker, and let another one do its job."""
        worker.dead = why
        worker.kill()
        job.tries += 1
        left = sum(each.dead is None for each in self.measurers)
        self.say(f"{why}; its work goes to the others: {left}")
        if not left:
            self.abandon(RuntimeError(f"tune: no server is left; the last one: {why}"))
        elif job.tries < _MAX_TRIES:
            self.to_measure.insert(0, job)
        else:
            job.end(Answer(None, f"lost {job.tries} servers, the last: {why}"))

    def abandon(self, why: BaseException) -> None:
        """End everything now, because of ``why``."""
        self.failure = self.failure or why
