"""Where the CPU seconds of tests go: `pytest -p tests.kit.cpu`, then `python -m tests.kit.cpu`.

Of each test's set-up, call and tear-down: user and system seconds of this process and of children
that have ended; which of our functions the process was in, by samples of its stack.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

FOLDER = Path(os.environ.get("TESTS_CPU") or "/tmp/tests-cpu")
EVERY_S = 0.01
DEPTH = 60

_stacks: Counter[str] = Counter()
_last = 0.0


def _spent() -> tuple[float, float]:
    own, children = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime


def _sample(_number: int, frame: FrameType | None) -> None:
    global _last
    now = sum(os.times()[:2])
    spent, _last = now - _last, now
    names = []
    while frame is not None and len(names) < DEPTH:
        code = frame.f_code
        names.append(f"{code.co_filename}:{code.co_name}")
        frame = frame.f_back
    _stacks[";".join(names)] += round(spent * 1e6)


def pytest_configure(config: pytest.Config) -> None:
    global _last
    FOLDER.mkdir(parents=True, exist_ok=True)
    _last = sum(os.times()[:2])
    signal.signal(signal.SIGPROF, _sample)
    signal.siginterrupt(signal.SIGPROF, False)
    signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)


_rows: list[Any] = []


def _timed(item: pytest.Item, phase: str) -> Iterator[None]:
    before = _spent()
    yield
    own, children = (b - a for a, b in zip(before, _spent(), strict=True))
    _rows.append((item.nodeid, phase, round(own, 4), round(children, 4)))
    if len(_rows) % 3000 == 0:
        _dump()


def _dump() -> None:
    (FOLDER / f"{os.getpid()}.json").write_text(json.dumps({"rows": _rows, "stacks": _stacks.copy()}))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    yield from _timed(item, "setup")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield from _timed(item, "call")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield from _timed(item, "teardown")


def pytest_collection_finish(session: pytest.Session) -> None:
    own, children = _spent()
    _rows.append(("collection", "collection", own, children))


def pytest_unconfigure(config: pytest.Config) -> None:
    signal.setitimer(signal.ITIMER_PROF, 0, 0)
    own, children = _spent()
    _rows.append(("whole", "whole", own, children))
    _dump()
