"""Worker processes seen from the tuner: start, call with a deadline, kill, start again.

MetaSchedule's LocalBuilder starts new processes for every batch (importing tvm costs 1.6 s each
time), and its timeout is kept by the worker itself.  These workers stay; the tuner keeps the time.
"""

from __future__ import annotations

import math
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAX_JOBS = 200
"""Jobs before a worker is replaced: compiling leaks a little memory each time."""

_TIMEOUT = "timeout"
_START_TIMEOUT_S = 60.0
_KILL_TIMEOUT_S = 10.0

_SPIN_COUNT = "100000"
"""Rounds that an idle OpenMP thread of a measurement spins before it sleeps (GOMP_SPINCOUNT).

Seen on 2 shared cores of an AMD EPYC, kernels of 6 to 90 us: with 2000 and with 20000 stretches of
candidates took 110 us and 1 ms, threads falling asleep in every run; with 100000 and with libgomp's
default that was gone.  Under a load of 4 the default once gave 16 ms for a kernel of 9 us."""

_START = (
    "import sys; sys.path[:] = {path!r}; "
    "from blockscale.tuning.worker import main; main({reading}, {writing}, {parent}, {needs!r})"
)


@dataclass(frozen=True)
class Answer:
    """What came of a job: its value, or a sentence saying why there is none."""

    value: Any
    error: str | None


class Worker:
    """One process; started by the first job, and again by the first job after it died."""

    def __init__(self, log: Path, needs: str = "tvm", max_jobs: int = _MAX_JOBS) -> None:
        """``log``: where its output goes; ``needs``: the module that it imports at its start."""
        self._log = log
        self._needs = needs
        self._max_jobs = max_jobs
        self._timeout = math.inf
        self._deadline = math.inf
        self._process: subprocess.Popen[bytes] | None = None
        self._jobs = 0
        self._ready = False
        self._pipes: tuple[int, int] = (-1, -1)

    def start(self) -> None:
        """Start the process unless it runs; returns before it is ready."""
        if self._process is not None:
            return
        reading, to_worker = os.pipe()
        from_worker, writing = os.pipe()
        code = _START.format(
            path=[os.path.abspath(p) for p in sys.path],
            reading=reading,
            writing=writing,
            parent=os.getpid(),
            needs=self._needs,
        )
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=(reading, writing),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"GOMP_SPINCOUNT": _SPIN_COUNT, **os.environ},
                start_new_session=True,
            )
        os.close(reading)
        os.close(writing)
        self._pipes = (from_worker, to_worker)
        self._jobs = 0
        self._ready = False

    def __enter__(self) -> Worker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def fileno(self) -> int:
        """Return what to wait at for `poll`, after `send`."""
        return self._pipes[0]

    def send(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        timeout: float = math.inf,
    ) -> None:
        """Hand over a job; ``function`` must be importable by name.

        ``timeout`` is what `poll` allows the job, not counting the start of the process.
        """
        if self._jobs >= self._max_jobs:
            self.kill()
        self.start()
        self._jobs += 1
        self._timeout = timeout
        self._deadline = time.monotonic() + (timeout if self._ready else _START_TIMEOUT_S)
        data = pickle.dumps((function, tuple(arguments)))
        with suppress(BrokenPipeError):  # it died: receive() says so
            view = memoryview(struct.pack("<q", len(data)) + data)
            while view:
                view = view[os.write(self._pipes[1], view) :]

    def receive(self, timeout: float, until: float) -> Answer | None:
        """Wait ``timeout`` for the answer (not counting the start of the process).

        A worker that crashed or is late is killed and described.  None: the clock shows ``until``.
        """
        if not self._ready:
            hello = self._read(8, min(time.monotonic() + _START_TIMEOUT_S, until))
            if isinstance(hello, str):
                return self._failed(hello, _START_TIMEOUT_S, until)
            self._ready = True
        deadline = min(time.monotonic() + timeout, until)
        header = self._read(8, deadline)
        if isinstance(header, bytes):
            body = self._read(struct.unpack("<q", header)[0], deadline)
            if isinstance(body, bytes):
                fine, value = pickle.loads(body)
                return Answer(value if fine else None, None if fine else value)
            header = body
        return self._failed(header, timeout, until)

    def poll(self) -> Answer | None:
        """Return the answer, if it is there or its time is up; does not wait."""
        now = time.monotonic()
        if not select.select([self], [], [], 0)[0]:
            if now < self._deadline:
                return None
            return self._failed(
                _TIMEOUT, self._timeout if self._ready else _START_TIMEOUT_S, math.inf
            )
        if self._ready:
            return self.receive(_START_TIMEOUT_S, math.inf)  # all of it follows at once
        hello = self._read(8, now + _START_TIMEOUT_S)
        if isinstance(hello, str):
            return self._failed(hello, _START_TIMEOUT_S, math.inf)
        self._ready = True
        self._deadline = now + self._timeout
        return None

    @property
    def deadline(self) -> float:
        """When (monotonic clock) `poll` gives the job up."""
        return self._deadline

    def _failed(self, why: str, timeout: float, until: float) -> Answer | None:
        self.kill()
        if why != _TIMEOUT:
            return Answer(None, why)
        if time.monotonic() >= until:
            return None
        return Answer(None, f"{why}: killed after {timeout:.1f} s")

    def _read(self, size: int, deadline: float) -> bytes | str:
        """Return ``size`` bytes, or a sentence saying why they did not come."""
        data = b""
        while len(data) < size:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._pipes[0]], [], [], left)[0]:
                return _TIMEOUT
            part = os.read(self._pipes[0], min(size - len(data), 1 << 20))
            if not part:
                return self._death()
            data += part
        return data

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
        for pipe in self._pipes:
            os.close(pipe)
        self._process = None


class Pool:
    """Workers that build together and measure one at a time, never both at once."""

    def __init__(self, workers: int, log: Path) -> None:
        self._workers = [Worker(log) for _ in range(workers)]
        for worker in self._workers:
            worker.start()

    @property
    def workers(self) -> list[Worker]:
        """Every worker, for those who give each its own jobs."""
        return self._workers

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.kill()

    def map(
        self,
        function: Callable[..., Any],
        jobs: Sequence[Sequence[Any]],
        timeout: float,
        until: float,
    ) -> list[Answer | None]:
        """Run ``function(*job)`` for every job on all workers.

        ``timeout`` is per job; a job that does not end before ``until`` (monotonic clock) is
        abandoned, and its answer is None.
        """
        answers: list[Answer | None] = []
        for start in range(0, len(jobs), len(self._workers)):
            part = list(zip(self._workers, jobs[start : start + len(self._workers)], strict=False))
            if time.monotonic() >= until:
                answers += [None] * len(part)
                continue
            for worker, job in part:
                worker.send(function, job)
            answers += [worker.receive(timeout, until) for worker, _ in part]
        return answers

    def call(
        self, function: Callable[..., Any], job: Sequence[Any], timeout: float, until: float
    ) -> Answer | None:
        """Run ``function(*job)`` alone: in the last worker, while the others idle."""
        if time.monotonic() >= until:
            return None
        self._workers[-1].send(function, job)
        return self._workers[-1].receive(timeout, until)
