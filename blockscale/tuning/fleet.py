"""Measuring on machines that have registered with TVM's RPC tracker.

Each server has a process here that holds its TVM RPC session (`connect`, `measure`), and there a
`pool.Worker` that runs candidates, with the functions that measure on one machine: a candidate that
crashes or hangs ends that worker and no session.  A server that dies, hangs or says what cannot be
is given up by name (`pool.Lost`), and what it had to measure goes to another.

TVM's RPC trusts everybody who can connect: use it in a network of your own.
"""

from __future__ import annotations

import math
import os
import pickle
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from blockscale.base import host
from blockscale.base.targets import is_gpu
from blockscale.base.version import VERSION
from blockscale.building.records import sentence
from blockscale.tuning import gpu
from blockscale.tuning.components.nursery import die_with
from blockscale.tuning.components.pool import Job, Lost, Worker, Workers
from blockscale.tuning.site import MEASUREMENTS, Measuring, Site
from blockscale.tuning.task import Task
from blockscale.tuning.worker import Measurement, need_openmp

SERVE, PLACE = "blockscale.tuning.serve", "blockscale.tuning.place"
"""Names of `serve` and `place` among the functions that TVM's RPC calls."""
SLACK_S = 20.0
"""Beside the time of a candidate, for its way to the server and back."""
_TRACKER_S = 20.0
"""For the tracker to answer."""
_START_S = 100.0
"""For a server's worker to start and to describe its machine."""


class Fleet(Site):
    """The servers that have registered under ``key`` with ``tracker``, a ``host:port``.

    Raises:
        ValueError: ``tracker`` is no address, or there is no key.
        RuntimeError: no tracker answers there, or it knows no free server of the key.
    """

    def __init__(self, level: str, tracker: str, key: str | None) -> None:
        super().__init__(level)
        self.exclusive, self.slack_s = False, SLACK_S
        where, _, port = tracker.rpartition(":")
        if not where or not port.isdecimal():
            raise ValueError(f"tune: tracker={tracker!r} is no address; write host:port")
        if not key:
            raise ValueError(f"tune: tracker={tracker!r} needs a key; name that of its servers")
        self._address, self._key = (where, int(port)), key
        self._tracker, self._known = f"tracker {tracker}", list[str]()

    def measurers(self, log: Path) -> list[Worker]:
        """Return a process for each server that is free now."""
        from tvm import rpc

        where, usual_s = self._tracker, socket.getdefaulttimeout()
        socket.setdefaulttimeout(_TRACKER_S)  # TVM has none
        try:
            told = rpc.connect_tracker(*self._address).summary()
        except Exception as error:
            raise RuntimeError(
                f"tune: {where} does not answer ({sentence(error)}); start it with "
                "python -m tvm.exec.rpc_tracker"
            ) from error
        finally:
            socket.setdefaulttimeout(usual_s)
        free = told["queue_info"].get(self._key, {}).get("free", 0)
        own = (each for each in told["server_info"] if each["key"] == f"server:{self._key}")
        self._known = [":".join(map(str, each["addr"])) for each in own]
        if not free:
            raise RuntimeError(
                f"tune: {where} knows no free server of key {self._key!r} ({len(self._known)} in "
                "use); start some with python -m blockscale.tuning.server"
            )
        return [Worker(log, max_jobs=1 << 30) for _ in range(free)]

    def measuring(self, task: Task, library: str, limit_s: float) -> Measuring:
        """Return the job that has a candidate measured by a server."""
        return measure, (*super().measuring(task, library, limit_s), limit_s)

    def unheard(self, workers: Workers) -> str:
        """Return the servers that the tracker knew, without those that have answered."""
        heard = {each.place for each in workers.measurers}
        names = (name for name in self._known if f"server {name}" not in heard)
        return f"{', '.join(names)} (key {self._key!r} at {self._tracker})"

    def describing(self) -> Measuring:
        """Return the job that connects to a server and describes its machine."""
        return connect, (*self._address, self._key, self.level)


# ---- here, in a server's process


class _Link:
    """The session with the next free server, whose jobs need the module ``needs``."""

    def __init__(self, where: str, port: int, key: str, needs: str) -> None:
        from tvm import rpc

        self._session, self._needs = rpc.connect_tracker(where, port).request(key), needs
        try:
            told = self._session.get_function(PLACE)()
        except Exception:
            raise Lost(
                f"a server of {key!r} at tracker {where}:{port}: it runs TVM's rpc_server without "
                "blockscale; start python -m blockscale.tuning.server there"
            ) from None
        self.name, self.version = str(told).split()
        self._serve = self._session.get_function(SERVE)
        self._sent: set[str] = set()

    def call(self, function: Callable[..., Any], arguments: Sequence[Any], timeout: float) -> Any:
        """Return the `pool.Answer` to a job there."""
        request = pickle.dumps((function, tuple(arguments), timeout, self._needs))
        with self._held():
            return pickle.loads(self._serve(request))

    def put(self, path: str) -> _File:
        """Upload a library, once, and return its name there."""
        if path not in self._sent:
            data = bytearray(Path(path).read_bytes())
            with self._held():
                self._session.upload(data, Path(path).name)
            self._sent.add(path)
        return _File(Path(path).name)

    def remove(self, path: str) -> None:
        """Remove a library there."""
        with self._held():
            self._session.remove(Path(path).name)
        self._sent.discard(path)

    @contextmanager
    def _held(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise Lost(f"server {self.name}: is gone ({gpu.brief(error)})") from None


class _File(str):
    """Name of a file in a server's folder."""


_links: list[_Link] = []


def connect(where: str, port: int, key: str, level: str) -> dict[str, Any]:
    """Connect to the next free server and return what it says of its machine.

    Raises:
        Lost: it has no blockscale, another version of it, or a machine without ``level``.
    """
    link = _Link(where, port, key, "torch" if is_gpu(level) else "tvm")
    if link.version != VERSION:
        raise Lost(
            f"server {link.name}: runs blockscale {link.version}, and this is {VERSION}; install "
            "that"
        )
    described = link.call(gpu.describe if is_gpu(level) else describe, (level,), _START_S)
    if described.error is not None:
        raise Lost(f"server {link.name}: {described.error.removeprefix('RuntimeError: ')}")
    _links[:] = [link]
    return {"server": link.name, **described.value}


def measure(function: Callable[..., Any], arguments: Sequence[Any], run_s: float) -> Measurement:
    """Return what ``function``, which measures, returns on the server that is connected.

    The first and the last of its arguments are libraries.

    Raises:
        Lost: the server is gone, or says what cannot be.
    """
    [link] = _links
    library, *told, reference = arguments
    sent = [link.put(library), *told, link.put(reference)]
    started = time.monotonic()
    answer = link.call(function, sent, run_s)
    wall = time.monotonic() - started
    found = Measurement((), f"run: {answer.error}") if answer.error else answer.value
    if not isinstance(found, Measurement) or not _possible(found, wall):
        raise Lost(f"server {link.name}: says what cannot be, {str(found)[:80]} after {wall:.2f} s")
    if library != reference:
        link.remove(library)
    return found


def _possible(found: Measurement, wall: float) -> bool:
    """Return whether a measurement may have taken ``wall`` seconds."""
    if found.error is not None:
        return not found.run_secs
    fine = all(isinstance(s, float) and math.isfinite(s) and s > 0 for s in found.run_secs)
    return fine and 0 < sum(found.run_secs) < wall


# ---- there, in the session's process

_crew: list[Workers] = []


def place() -> str:
    """Return which server this is, and its version; from now on its session ends with it."""
    from tvm.rpc.server import PopenRPCServerState

    die_with(os.getppid())
    state = PopenRPCServerState.current
    return f"{state.custom_addr or platform.node()}:{state.port} {VERSION}"


def describe(level: str) -> dict[str, Any]:
    """Return this machine's CPU.

    Raises:
        RuntimeError: it lacks features of ``level``, or libgomp.
    """
    if missing := host.lacking(level):
        raise RuntimeError(
            f"its CPU ({host.cpu_model()}) lacks {', '.join(missing)}, which {level} "
            "needs; tune for a level that it has"
        )
    need_openmp()
    return {"cpu": host.cpu_model(), "cores": os.cpu_count()}


def serve(request: bytes) -> bytes:
    """Do a pickled job in a worker of the server and return its pickled `pool.Answer`."""
    import tvm_ffi

    function, arguments, timeout, needs = pickle.loads(request)
    path = tvm_ffi.get_global_func("tvm.rpc.server.workpath")
    told = [str(path(a)) if isinstance(a, _File) else a for a in arguments]
    if not _crew:
        _crew.append(Workers([], [Worker(Path(str(path("worker.log"))), needs, MEASUREMENTS)]))
    job = Job(function, told, timeout)
    _crew[0].to_measure.append(job)
    _crew[0].wait(job.done)
    answer = job.answer
    if answer and getattr(answer.value, "broken", False):  # its process, and not the one that asks
        answer = replace(answer, value=replace(answer.value, broken=False))
    return pickle.dumps(answer)


def register(parent: int) -> None:
    """Let TVM's RPC call `serve` and `place` in this process and those that it forks.

    It ends with ``parent``, and with the thread that listens, which no session that was killed
    may leave behind: nobody would serve, and nobody know.
    """
    import tvm_ffi

    die_with(parent)
    threading.excepthook = _end
    tvm_ffi.register_global_func(SERVE, serve, override=True)
    tvm_ffi.register_global_func(PLACE, place, override=True)


def _end(told: threading.ExceptHookArgs) -> None:
    threading.__excepthook__(told)
    os._exit(1)
