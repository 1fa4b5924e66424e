"""Worker processes that stay, and the queues of what they build and measure.

MetaSchedule's LocalBuilder starts new processes for every batch (importing tvm costs 1.6 s each
time), and its timeouts are kept by the worker itself, which a kernel that hangs need not allow.
These workers stay, and the tuner keeps the time.  A candidate may crash, hang or exhaust memory; it
does so in a worker and not in the tuner.
"""

from __future__ import annotations

import math
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from blockscale.building.records import sentence
from blockscale.tuning.components.nursery import START_TIMEOUT_S, Child, Nursery

OVER = "not measured: the session's time was up"
"""Error of a result that is none: nothing is known of the candidate."""

_MAX_JOBS = 200
"""Jobs before a worker is replaced: compiling leaks a little memory each time."""
_KILL_TIMEOUT_S = 10.0
_MAX_TRIES = 3
"""Servers, or processes of which nobody knows how they ended, that a job may lose before it is
thought to be the cause."""


@dataclass(frozen=True)
class Answer:
    """What came of a job: its value, or a sentence saying why there is none."""

    value: Any
    error: str | None = None
    lost: bool = False
    """The error is the worker's and not the job's: another worker may try."""

    def why(self, doing: str) -> str | None:
        """Return the error as records have it."""
        return self.error if self.error in (None, OVER) else f"{doing}: {self.error}"


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

    def done(self) -> bool:
        """Return whether there is an answer."""
        return self.answer is not None

    def end(self, answer: Answer) -> None:
        """Take the answer, and hand it on."""
        self.answer = answer
        self.then(answer)


@dataclass(eq=False)
class Worker:
    """One process; started by the first job, and again by the first job after it died."""

    log: Path
    """Where its output goes."""
    needs: str = "tvm"
    """The module that its jobs use, "tvm" or "torch"."""
    max_jobs: int = _MAX_JOBS
    job: Job | None = None
    following: Job | None = None
    """What it goes on with, and has been sent, so that it waits for nobody in between."""
    group: str = ""
    dead: str | None = None
    """Why it is given no more jobs."""
    measures: bool = False
    """Whether its job is a measurement."""
    place: str = ""
    """The machine far away for which it stands, and which is lost with it."""
    folder: Path | None = None
    """Where its temporary files go; None: where the system has them."""
    nursery: Nursery | None = None
    """Whose fork its process is."""
    process: Child | None = None
    ready: bool = False
    """Whether its process takes jobs, as far as is known."""

    def start(self) -> None:
        """Start the process unless it runs; returns before it is ready."""
        if self.process is not None:
            return
        assert self.nursery is not None, "a worker of no `Workers`"
        self.pipe, theirs = Pipe()
        with self.log.open("ab") as log:
            told = theirs.fileno(), log.fileno(), self.folder
            self.process = self.nursery.fork(main, *told)
        theirs.close()
        self.jobs, self.ready = 0, False

    def send(self, job: Job) -> None:
        """Hand over a job; its timeout does not count the start of the process."""
        if self.process is not None and (self.jobs >= self.max_jobs or self._is_gone()):
            self.kill()
        self.start()
        self.job = job
        self._begin()
        self._hand_over(job)

    def _is_gone(self) -> bool:
        """Return whether its process, which has no job, has died."""
        return self.ready and self.pipe.poll()

    def send_ahead(self, job: Job) -> None:
        """Hand over what comes after the job that it has."""
        self.following = job
        self._hand_over(job)

    def advance(self) -> None:
        """Go on with what was sent ahead, whose time begins."""
        self.job, self.following = self.following, None
        if self.job is not None:
            self._begin()

    def may_go_on(self) -> bool:
        """Return whether it has one job, and its process will take another."""
        one = self.job is not None and self.following is None
        return one and self.ready and self.jobs < self.max_jobs

    def _hand_over(self, job: Job) -> None:
        self.jobs += 1
        self.group = job.group
        with suppress(BrokenPipeError, ConnectionResetError):  # it died: poll() says so
            self.pipe.send((job.function, tuple(job.arguments)))

    def _begin(self) -> None:
        assert self.job is not None
        self._limit = self.job.timeout if self.ready else START_TIMEOUT_S
        self.deadline = time.monotonic() + self._limit

    def poll(self) -> Answer | None:
        """Return the answer, if it is there or its time is up; does not wait."""
        try:
            while self.pipe.poll():
                answer: Answer = self.pipe.recv()
                if self.ready:
                    return answer
                self.ready = True
                self._begin()
            if time.monotonic() < self.deadline:
                return None
            why, lost = f"timeout: killed after {self._limit:.1f} s", not self.ready
        except (EOFError, ConnectionResetError):
            assert self.process is not None
            code = self.process.wait(5)
            why, lost = _death(code), code is None
        self.kill()
        if self.place:
            return Answer(None, f"{self.place}: does not answer ({why})", lost=True)
        return Answer(None, why, lost)

    def kill(self) -> None:
        """End the process and everything it started."""
        if self.process is None:
            return
        self.process.kill()
        self.process.wait(_KILL_TIMEOUT_S)  # a driver may hold it until a kernel ends
        self.pipe.close()
        self.process = None


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"crashed with {signal.Signals(-code).name}"
    return "crashed" if code is None else f"crashed with exit code {code}"


def main(pipe: int) -> None:
    """Serve ``(function, arguments)`` jobs in a worker until the tuner closes the pipe."""
    jobs = Connection(pipe)
    jobs.send(None)  # ready
    with suppress(EOFError):
        while True:
            jobs.send(answer := _answer(jobs.recv_bytes()))
            if answer.lost or getattr(answer.value, "broken", False):
                return  # what was sent ahead is another's


def _answer(data: bytes) -> Answer:
    try:
        function, arguments = pickle.loads(data)
        return Answer(function(*arguments))
    except Lost as error:
        return Answer(None, str(error), lost=True)
    except Exception as error:
        traceback.print_exc()
        return Answer(None, sentence(error))


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
    folder: Path | None = None
    """Where temporary files of all of them go."""
    to_build: list[Job] = field(default_factory=list)
    to_measure: list[Job] = field(default_factory=list)
    builds: dict[str, Job] = field(default_factory=dict)
    """By library, of those that nobody has asked to measure."""

    def __post_init__(self) -> None:
        """Let a builder measure where nobody else does."""
        self.measurers = self.measurers or self.builders[-1:]
        self._all = list(dict.fromkeys([*self.measurers, *self.builders]))
        self._nurseries = {needs: Nursery(needs) for needs in {each.needs for each in self._all}}
        for worker in self._all:
            worker.nursery, worker.folder = self._nurseries[worker.needs], self.folder

    def __enter__(self) -> Workers:
        for worker in self._all:
            worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._all:
            worker.kill()
        for nursery in self._nurseries.values():
            nursery.close()

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
        """Give every idle worker of ``own`` a job of ``queue``, if possible one of its group.

        Who measures gets another one ahead, unless it shares this machine's CPU: the search, which
        is busy most of the time, would be what it waits for.
        """
        measures = queue is self.to_measure
        for worker in own:
            busy = {each.measures for each in self._all if each.job is not None}
            if self.exclusive and (not measures) in busy:
                return
            if worker.job is not None or worker.dead is not None:
                continue
            if (job := self._fitting(queue, worker)) is not None:
                worker.measures = measures
                worker.send(job)
        alive = sum(worker.dead is None for worker in own)
        for worker in own if measures and not self.exclusive else ():
            # What another could soon begin is not to wait for one that may hang.
            if len(queue) < alive or not worker.may_go_on():
                continue
            if (job := self._fitting(queue, worker)) is not None:
                worker.send_ahead(job)

    @staticmethod
    def _fitting(queue: list[Job], worker: Worker) -> Job | None:
        """Take a job that may start off the queue, if possible one of the worker's group."""
        ready = {job: job.ready() for job in queue}
        for job in [job for job, may in ready.items() if may is None]:
            queue.remove(job)
            job.end(Answer(None, OVER))
        fit = [job for job, may in ready.items() if may]
        if not fit:
            return None
        found = next((each for each in fit if each.group == worker.group), fit[0])
        queue.remove(found)
        return found

    def _take(self, worker: Worker) -> None:
        """Take a worker's answer if it is there, and hand it on."""
        answer, job = worker.poll(), worker.job
        if answer is None or job is None:
            return
        lost, broken = answer.lost and worker.place, getattr(answer.value, "broken", False)
        if worker.following is not None and (lost or broken or worker.process is None):
            self.to_measure.insert(0, worker.following)
            worker.following = None
        worker.advance()
        if lost:
            self._lose(worker, job, str(answer.error))
            return
        if answer.lost and worker.process is None and job.tries + 1 < _MAX_TRIES:
            job.tries += 1  # its nursery has died, or never came to be
            worker.send(job)
            return
        if broken:
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
