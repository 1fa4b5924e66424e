"""Workers of the tuner that are there at once: forks of a process that has imported tvm, for 1 s.

Each is new, as in the product.  One that needs another module than tvm is started as there.
"""

from __future__ import annotations

import atexit
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Pipe
from typing import Any

import pytest

from blockscale.tuning.components import pool
from tests.kit.paths import without_torch

NURSERY = """
import gc, json, os, socket, sys
sys.modules["torch"] = None
import tvm
from blockscale.tuning import exporter, fleet, modelled, worker
from blockscale.tuning.components import pool
from tests.kit import fake_gpu, fake_moe_gpu, fake_workload
worker._warm_up_s.clear()  # no time is judged
gc.freeze()
asked = socket.socket(fileno=int(sys.argv[1]))
own = os.getpid()
asked.send(b"ready")
while True:
    said, fds, _, _ = socket.recv_fds(asked, 100, 2)
    if not said:
        break
    pid = int(said)
    if pid:  # how did it end?
        found, status = os.waitpid(pid, os.WNOHANG)
        answer = os.waitstatus_to_exitcode(status) if found else None
    else:
        pipe, log = fds
        answer = os.fork()
        if not answer:
            asked.close()
            os.setpgid(0, 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            pool.main(pipe, own, "tvm")
            os._exit(0)
        os.setpgid(answer, answer)  # whoever is first: it may be killed as a group from now on
        os.close(pipe)
        os.close(log)
    asked.send(json.dumps(answer).encode())
"""


class Nursery:
    """The process that forks."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={"GOMP_SPINCOUNT": pool._SPIN_COUNT} | without_torch(),
        )
        theirs.close()
        assert self._socket.recv(100) == b"ready"

    def ask(self, pid: int, fds: list[int]) -> Any:
        """Return the process that was forked (``pid`` 0), or the exit code of ``pid``."""
        socket.send_fds(self._socket, [str(pid).encode()], fds)
        return json.loads(self._socket.recv(100))

    def close(self) -> None:
        """End it, and all that it forked."""
        self._socket.close()
        self._process.wait()


class Forked:
    """What `pool.Worker` needs of a `subprocess.Popen`."""

    returncode: int | None = None

    def __init__(self, nursery: Nursery, fds: list[int]) -> None:
        self._nursery, self.pid = nursery, nursery.ask(0, fds)

    def wait(self, timeout: float) -> None:
        """Wait for its end."""
        deadline = time.monotonic() + timeout
        while self.returncode is None:
            self.returncode = self._nursery.ask(self.pid, [])
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("worker", timeout)
            time.sleep(0.002)


_nurseries: list[Nursery] = []


@contextmanager
def workers() -> Iterator[None]:
    """Let workers be forks; the process that forks stays until the tests' own ends."""
    start = pool.Worker.start
    if not _nurseries:
        _nurseries.append(Nursery())
        atexit.register(_nurseries[0].close)

    def fork(worker: pool.Worker) -> None:
        if worker.needs != "tvm":
            start(worker)
        if worker.process is not None:
            return
        worker.pipe, theirs = Pipe()
        with worker.log.open("ab") as log:
            process = Forked(_nurseries[0], [theirs.fileno(), log.fileno()])
        theirs.close()
        worker.process = process  # type: ignore[assignment]
        worker.jobs, worker.ready = 0, False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool.Worker, "start", fork)
        yield
