"""Workers that outlive a session, for tests of the tuner: a process that imports tvm costs 2 s.

A session's idle workers are kept when it ends, and the next session starts with them.  None serves
the same work folder twice: names of libraries begin anew there, and dlopen() would find old ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from blockscale.tuning.components import pool

_MOST = 4

_idle: list[tuple[dict[str, Any], set[Path]]] = []
"""What makes a worker a process, and the folders that it has served."""


@contextmanager
def workers() -> Iterator[None]:
    """Let sessions use workers of earlier ones."""
    start, kill = pool.Worker.start, pool.Worker.kill

    def warm_start(worker: pool.Worker) -> None:
        folder = worker._log.parent
        if worker._process is not None:
            return
        for kept in _idle:
            state, served = kept
            if state["_needs"] == worker._needs and folder not in served:
                _idle.remove(kept)
                worker.__dict__.update(state)
                worker.served = served | {folder}  # type: ignore[attr-defined]
                return
        start(worker)
        worker.served = {folder}  # type: ignore[attr-defined]

    def leave(crew: pool.Workers, *_: object) -> None:
        for worker in crew._all:
            usable = worker._process is not None and worker.job is None
            if usable and not worker.place and len(_idle) < _MOST:
                names = ("_process", "pipe", "_jobs", "_ready", "_needs")
                _idle.append(({n: getattr(worker, n) for n in names}, worker.served))
                worker._process = None
            else:
                kill(worker)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool.Worker, "start", warm_start)
        patch.setattr(pool.Workers, "__exit__", leave)
        yield
    for state, _ in _idle:
        state["_process"].kill()
        state["_process"].wait()
    _idle.clear()
