"""Processes that are there at once: forks of one that has imported what they need.

Importing TVM takes 2 s of CPU time, and 64 processes that did at once on 64 cores were ready after
8 s.  A nursery imports it once a session, and has one thread: forking is safe.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from blockscale.base import forks

PRELOADED = {
    "tvm": ("blockscale.tuning.exporter", "blockscale.tuning.fleet", "blockscale.tuning.modelled"),
    "torch": (),  # tvm_ffi asks torch for GPUs when it is imported: CUDA would be lost to forks
}
"""Modules to import after the one that workers need, for their jobs."""

_PR_SET_PDEATHSIG = 1
_MESSAGE = 4096
START_TIMEOUT_S = 60.0
_ANSWER_S = 10.0
"""For a nursery that is ready to answer a question, and for one that was killed to end."""
_POLL_S = 0.002
_MOST_WAITING = 64
"""Questions without an answer; with some hundred both sides would wait for room in the socket."""

_SPIN_COUNT = "100000"
"""Rounds that an idle OpenMP thread of a measurement spins before it sleeps (GOMP_SPINCOUNT).

Seen on 2 shared cores of an AMD EPYC, kernels of 6 to 90 us: with 2000 and with 20000 stretches of
candidates took 110 us and 1 ms, threads falling asleep in every run; with 100000 and with libgomp's
default that was gone.  Under a load of 4 the default once gave 16 ms for a kernel of 9 us."""

_START = (
    "import sys; sys.path[:] = {path!r}; "
    "from blockscale.tuning.components.nursery import main; main({asked}, {parent}, {modules!r})"
)


class Nursery:
    """Forks processes that have imported the module ``needs``; its own starts with the first."""

    def __init__(self, needs: str) -> None:
        self.needs = needs
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._waiting: list[Callable[[Any], None]] = []
        self.ready = False
        """Whether it has answered."""

    def start(self, log: int) -> None:
        """Start the process that forks, unless it runs; returns before it is ready.

        What imports say goes to the descriptor ``log``.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self.end()
        self._socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        path = [os.path.abspath(p) for p in sys.path]
        modules = [self.needs, *PRELOADED.get(self.needs, ())]
        told = {"path": path, "asked": theirs.fileno(), "parent": os.getpid(), "modules": modules}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START.format(**told)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={"GOMP_SPINCOUNT": _SPIN_COUNT, "OPENBLAS_NUM_THREADS": "1", **os.environ},
            start_new_session=True,
        )
        self._started = time.monotonic()
        theirs.close()

    def fork(
        self, function: Callable[[int], None], pipe: int, log: int, folder: Path | None = None
    ) -> Child:
        """Return a process that calls ``function`` with its copy of the descriptor ``pipe``.

        Its output goes to the descriptor ``log``, its temporary files to ``folder``: it may be
        killed.  Returns before it is there.
        """
        self.start(log)
        child = Child(self)
        place = f"{function.__module__}:{function.__qualname__}"
        what = {"fork": place, "folder": folder and str(folder)}
        self._ask(what, [pipe, log], child.born)
        return child

    def end_of(self, pid: int) -> list[int] | None:
        """Return the exit code of a process that it forked; [] if nobody knows; None: it runs."""
        found: list[list[int] | None] = []
        self._ask({"end": pid}, [], found.append)
        self.answer(lambda: bool(found))
        return found[0] if found else []

    def _ask(self, what: Any, descriptors: Sequence[int], then: Callable[[Any], None]) -> None:
        self.answer(lambda: len(self._waiting) < _MOST_WAITING)
        if self._socket is None:
            return
        with suppress(BrokenPipeError, ConnectionResetError):  # it died: no answer will come
            socket.send_fds(self._socket, [json.dumps(what).encode()], descriptors)
            self._waiting.append(then)

    def answer(self, done: Callable[[], bool], waits: bool = True) -> None:
        """Take answers, which come in the order of the questions, until ``done()`` or the end.

        ``waits=False``: only what is there.  A nursery that hangs is ended.
        """
        while not done() and self._socket is not None and self._waiting:
            left = _ANSWER_S if self.ready else self._started + START_TIMEOUT_S - time.monotonic()
            there = wait([self._socket], max(0.0, left) if waits else 0.0)
            if not there and not waits:
                return
            said = b""
            with suppress(ConnectionResetError):
                said = self._socket.recv(_MESSAGE) if there else said
            if not said:
                self.end()
                return
            self.ready = True
            self._waiting.pop(0)(json.loads(said))

    def close(self) -> None:
        """End the session's use of it."""
        self.end()

    def end(self) -> None:
        """End it, and what it has forked: who waits for a process hears that there is none."""
        if self._process is None or self._socket is None:
            return
        self._socket.close()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ANSWER_S)
        self._process = self._socket = None
        self.ready = False
        lost, self._waiting = self._waiting, []
        for then in lost:
            then(None)


class Child:
    """A process that a nursery forks."""

    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery
        self._pid: int | None = None
        self._ended = False
        self.returncode: int | None = None

    def born(self, pid: int | None) -> None:
        """Take note of the process; None: there is none."""
        self._pid, self._ended = pid, pid is None

    @property
    def pid(self) -> int | None:
        """The process; waits until it is there.  None: it never will be."""
        self._nursery.answer(lambda: self._pid is not None or self._ended)
        return self._pid

    def kill(self) -> None:
        """Kill it, and everything that it started.

        Where its nursery is not ready (it may never be), that is ended: it has forked nothing.
        """
        self._nursery.answer(lambda: self._nursery.ready, waits=False)
        if not (self._nursery.ready or self._pid or self._ended):
            self._nursery.end()
        elif self.pid is not None and not self._ended:
            _kill_group(self.pid)

    def wait(self, seconds: float) -> int | None:
        """Return its exit code.

        None: it did not end within so many seconds, or nobody knows, as its nursery has died.
        """
        deadline = time.monotonic() + seconds
        while self.pid is not None and not self._ended and time.monotonic() < deadline:
            found = self._nursery.end_of(self.pid)
            if found is None:
                time.sleep(_POLL_S)
            else:
                self._ended = True
                if not found:
                    _kill_group(self.pid)
                self.returncode = found[0] if found else None
        return self.returncode


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """End with the parent, its ``kill -9`` too; 0: no more."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def main(asked: int, parent: int, modules: Sequence[str]) -> None:
    """Import ``modules``, fork when asked to, until nobody asks any more."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if modules[0] != "torch":  # or tvm_ffi would import torch first, which takes 1.5 s
        sys.modules["torch"] = None  # type: ignore[assignment]
    gc.disable()  # or it takes a fifth of what follows, and of every build
    for name in modules:
        with suppress(ModuleNotFoundError):  # a job that needs it says so
            importlib.import_module(name)
    gc.freeze()
    gc.enable()
    die_with(parent, 0)  # what it has forked, and compilers that those started, end first
    questions, own, forked = socket.socket(fileno=asked), os.getpid(), set[int]()
    try:
        while True:
            said, descriptors, _, _ = socket.recv_fds(questions, _MESSAGE, 2)
            if not said:
                return
            what = json.loads(said)
            if "end" in what:
                if (found := _end(what["end"])) is not None:
                    forked.discard(what["end"])
                questions.send(json.dumps(found).encode())
                continue
            pid = _fork()
            if pid == 0:
                questions.close()
                _child(what["fork"], own, what["folder"], *descriptors)
            if pid is not None:
                forked.add(pid)
                with suppress(PermissionError, ProcessLookupError):
                    os.setpgid(pid, pid)  # whoever is first: it may be killed as a group now
            for each in descriptors:
                os.close(each)
            questions.send(json.dumps(pid).encode())
    finally:
        for pid in forked:
            _kill_group(pid)


def _fork() -> int | None:
    try:
        return os.fork()
    except OSError:  # no memory, or too many processes: that of one worker fails
        traceback.print_exc()
        return None


def _end(pid: int) -> list[int] | None:
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return []
    if not found:
        return None
    _kill_group(pid)  # compilers that it had started
    return [os.waitstatus_to_exitcode(status)]


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _child(place: str, parent: int, folder: str | None, pipe: int, log: int) -> None:
    code = 1
    try:
        die_with(parent)
        os.setpgid(0, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if folder is not None:
            tempfile.tempdir = os.environ["TMPDIR"] = folder
        forks.threads_lost = False  # a nursery has run nothing in parallel
        where, _, name = place.partition(":")
        getattr(importlib.import_module(where), name)(pipe)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(code)
