"""Where the CPU seconds of tests go: `pytest -p tests.kit.cpu`, then `python -m tests.kit.cpu`.

Of each test's set-up, call and tear-down: user and system seconds of this process and of children
that have ended; which of our functions the process was in, by samples of its stack.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage  # some tests replace the module's
from types import FrameType
from typing import Any

import pytest

FOLDER = Path(os.environ.get("TESTS_CPU") or "/tmp/tests-cpu")
EVERY_S = 0.01
DEPTH = 40
DUMP_EVERY_S = 60.0
"""What is known is written now and then: a run may end before its time."""

_stacks: Counter[str] = Counter()
_last = 0.0


def _spent() -> tuple[float, float]:
    own, children = (getrusage(who) for who in (RUSAGE_SELF, RUSAGE_CHILDREN))
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
_dumped = time.monotonic()


def _timed(item: pytest.Item, phase: str) -> Iterator[None]:
    before = _spent()
    yield
    own, children = (b - a for a, b in zip(before, _spent(), strict=True))
    _rows.append((item.nodeid, phase, round(own, 4), round(children, 4)))


def _dump() -> None:
    global _dumped
    _dumped = time.monotonic()
    (FOLDER / f"{os.getpid()}.json").write_text(
        json.dumps({"rows": _rows, "stacks": _stacks.copy()})
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    yield from _timed(item, "setup")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield from _timed(item, "call")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield from _timed(item, "teardown")
    if time.monotonic() > _dumped + DUMP_EVERY_S:
        _dump()


def pytest_collection_finish(session: pytest.Session) -> None:
    own, children = _spent()
    _rows.append(("collection", "collection", own, children))


def pytest_unconfigure(config: pytest.Config) -> None:
    signal.setitimer(signal.ITIMER_PROF, 0, 0)
    own, children = _spent()
    _rows.append(("whole", "whole", own, children))
    _dump()


# ---- The table -----------------------------------------------------------------------------------

KINDS = (
    ("emulator: PTX to programs", r"emulator/(ptx|launching/(link|compiler|front))"),
    ("emulator: runs", r"emulator/"),
    ("compilers", r"tests/kit/compiled\.py:make|subprocess\.py|nvcc\.py"),
    ("kept entries", r"tests/kit/compiled\.py"),
    ("TVM's compiler", r"tvm/tirx/(build|compilation|pipeline)|lower/cpu\.py"),
    ("tuning", r"blockscale/tuning/"),
    ("derive, check, print kernels", r"blockscale/lower/"),
    ("schedules", r"/schedules/|building/space|tvm/s_tir/(schedule|meta_schedule)"),
    ("TensorIR", r"/tir/|tvm/script|tvm/tirx"),
    ("transformers", r"transformers/"),
    ("torch", r"torch/"),
    ("references", r"tests/reference/"),
    ("imports", r"importlib"),
    ("pytest", r"_pytest/|pluggy|xdist|execnet"),
)


def _kind(stack: str) -> str:
    """Return the kind of work of a stack: that of the innermost frame in `KINDS`."""
    for frame in stack.split(";"):
        for name, pattern in KINDS[:-2]:
            if re.search(pattern, frame):
                return name
    return next((name for name, pattern in KINDS[-2:] if re.search(pattern, stack)), "tests")


def main() -> None:
    """Print seconds by room, by kind, by file, and of the slowest tests."""
    rooms, files, tests, kinds, inner = (Counter[str]() for _ in range(5))
    children = Counter[str]()
    for path in FOLDER.glob("*.json"):
        data = json.loads(path.read_text())
        for name, phase, own, other in data["rows"]:
            if phase in ("collection", "whole"):
                print(f"{phase}: {own:.1f} + {other:.1f} of children")
                continue
            file = name.partition("::")[0]
            room = file.split("/")[1]
            for counter, key in ((rooms, room), (files, file), (tests, name)):
                counter[key] += own + other
            children[room] += other
        for stack, microseconds in data["stacks"].items():
            kinds[_kind(stack)] += microseconds / 1e6
            inner[stack.partition(";")[0]] += microseconds / 1e6
    for title, counter, most in (
        ("room", rooms, 99),
        ("children of room", children, 12),
        ("kind, of this process alone", kinds, 99),
        ("file", files, 60),
        ("test", tests, 120),
        ("function", inner, 60),
    ):
        print(f"\n{sum(counter.values()):9.1f} s by {title}")
        for name, seconds in counter.most_common(most):
            print(f"{seconds:9.2f}  {name}")


if __name__ == "__main__":
    main()
