"""Break the kernels on purpose and see a test fail: ``python -m tests.kit.mutations [text ...]``.

Each mutation of mutations*.txt replaces one piece of source in a copy of this checkout and runs the
tests that should notice, as ``make test`` selects them.  Prints two lines each and a summary; ends
with status 1 if one survived, or no longer fits the source.  ``text``: only mutations whose first
line holds it; ``--sample``: so many of them, drawn at random.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from subprocess import PIPE
from typing import Any

import pytest

from tests.kit import compiled, cover, forked
from tests.kit.paths import ROOT, TESTS

SOURCES = ("tir/**/*", "schedules/**/*", "blockscale/**/*")
SUFFIXES = (".py", ".c", ".h", ".cuh")
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.so")
MADE = {"build", "dist", "typings"}
"""Folders at the top of a checkout that hold what was built."""
LOADED = ("numpy", "torch", "tvm", "tvm.s_tir", "hypothesis")
"""What nearly all tests import, and no mutation changes."""
TIMEOUT_S = 300
LATE = f"the limit of {TIMEOUT_S} s"
UNPROVEN = "SURVIVED where tests were skipped"
KILLED, SURVIVED, UNFIT = "killed", "SURVIVED", "DOES NOT FIT: the source has it not once"


@dataclass(frozen=True)
class Mutation:
    """One piece of source, what takes its place, and the tests that should notice."""

    tests: tuple[str, ...]
    old: str
    new: str
    path: str | None
    """The file that has ``old`` once, below the root; None if there is no such."""

    def __str__(self) -> str:
        return re.sub(r"\s+", " ", f"{self.path or '?'}: {self.old} -> {self.new}")


def mutations() -> Iterator[Mutation]:
    """Yield the mutations of every list."""
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in _sources()}
    tests: tuple[str, ...] = ()
    text = "\n".join(file.read_text() for file in sorted(TESTS.glob("*/mutations*.txt")))
    for block in re.findall(r"^tests: .*$|(?:^- .*\n)+(?:^\+ .*\n)+", text, re.MULTILINE):
        if block.startswith("tests: "):
            tests = tuple(f"tests/{name}" for name in block.split()[1:])
        else:
            old, new = ("\n".join(re.findall(rf"^\{sign} (.*)$", block, re.M)) for sign in "-+")
            found = [path for path, source in sources.items() for _ in range(source.count(old))]
            yield Mutation(tests, old, new, found[0] if len(found) == 1 else None)


def _sources() -> list[Path]:
    found = (path for pattern in SOURCES for path in ROOT.glob(pattern))
    return sorted(path for path in found if path.suffix in SUFFIXES)


def left_out(folder: str, names: list[str]) -> set[str]:
    """Return what a copy of the checkout does not need of ``folder``."""
    return LEFT_OUT(folder, names) | (MADE & set(names) if Path(folder) == ROOT else set())


class Checkout:
    """A copy of this checkout below ``folder``, and a process that runs pytest in it."""

    def __init__(self, folder: Path, loaded: Sequence[str] = LOADED) -> None:
        shutil.copytree(ROOT, folder, ignore=left_out)
        self.root = folder
        paths = filter(None, [str(folder), os.environ.get("PYTHONPATH")])
        self.environ = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            # By content: what the copy has in common with this checkout is compiled once.
            "BLOCKSCALE_TEST_CACHE": str(compiled.folder()),
        }
        self.process = subprocess.Popen(
            [sys.executable, forked.__file__, *loaded], stdin=PIPE, stdout=PIPE, text=True
        )

    def pytest(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Return what `forked` answers."""
        given = {"cwd": str(self.root), "environ": dict(self.environ), "limit_s": TIMEOUT_S}
        asked, said = self.process.stdin, self.process.stdout
        assert asked
        assert said
        asked.write(json.dumps(given | {"arguments": list(arguments)}) + "\n")
        asked.flush()
        answer: dict[str, Any] = json.loads(said.readline())
        return answer

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def verdict(
    copy: Checkout, tests: Sequence[str], options: Sequence[str] = ()
) -> tuple[str, str | None]:
    """Return what becomes of what is changed in the ``copy``, and the first test that tells.

    UNPROVEN if the tests that ran pass, and others were skipped, for what this machine is.
    """
    ended = copy.pytest(["-x", "-q", "-p", "no:cacheprovider", *options, *tests])
    status, output, test = ended["status"], ended["output"], ended["test"]
    if status == 0:
        return UNPROVEN if ended["skipped"] else SURVIVED, None
    none = status == pytest.ExitCode.NO_TESTS_COLLECTED
    if none and any("[" in name for name in tests):
        return verdict(copy, [cover.function(name) for name in tests], options)  # others do run
    if none and "deselected" in output:
        return SURVIVED, None  # all of them are exhaustive
    if none or "ERROR: not found:" in output:
        raise ValueError(f"the list names tests that are not there: {' '.join(tests)}")
    if status is None:
        return f"{KILLED} by {test}, {LATE}", test
    told = status in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)
    return f"{KILLED} by {test}{'' if told else f', ended with status {status}'}", test


def judged(
    mutation: Mutation, copy: Checkout, tests: Sequence[str], options: Sequence[str] = ()
) -> tuple[str, str | None]:
    """Return what becomes of ``mutation`` in the ``copy``, and which of ``tests`` tells."""
    if mutation.path is None:
        return UNFIT, None
    path = copy.root / mutation.path
    source = path.read_text()
    path.write_text(source.replace(mutation.old, mutation.new))
    try:
        return verdict(copy, tests, options)
    finally:
        path.write_text(source)


def chosen(options: argparse.Namespace) -> list[Mutation]:
    """Return the mutations that hold one of the texts (or all), or a sample of these."""
    found = [m for m in mutations() if not options.text or any(t in str(m) for t in options.text)]
    if options.killers or options.verify:
        known = cover.known_killers()
        found = [m for m in found if (known.get(str(m)) is None) == options.killers]
    if options.sample is None or options.sample >= len(found):
        return found
    return random.Random(options.seed).sample(found, options.sample)


def main(arguments: Sequence[str]) -> int:
    """Run mutations; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "text", nargs="*", help="only mutations whose first line holds one of these"
    )
    parser.add_argument("--sample", type=int, metavar="N", help="so many, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many at a time")
    parser.add_argument("--exhaustive", action="store_true", help="run the tests of make test-all")
    parser.add_argument(
        "--killers",
        action="store_true",
        help="find the cheapest test that kills each, for tests.kit.cover; goes on where it ended",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="run only the test that is known to kill each, and forget it where it passes",
    )
    options = parser.parse_args(arguments)
    started, counts = time.monotonic(), Counter[str]()
    given = ["--exhaustive"] if options.exhaustive else []
    known = cover.known_killers() if options.verify else {}
    if options.killers or options.verify:
        given = ["--listed"]
    if options.killers:
        given += ["-p", cover.__name__]
        os.environ["COVER_ORDER"] = str(cover.FOLDER)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="blockscale-mutations-"))
        copies: SimpleQueue[Checkout] = SimpleQueue()
        for i in range(options.jobs):
            copy = Checkout(Path(folder) / f"checkout{i}")
            stack.callback(copy.close)
            copies.put(copy)

        def result(mutation: Mutation) -> tuple[str, str | None]:
            by, copy = known.get(str(mutation)), copies.get()
            try:
                return judged(mutation, copy, [by] if by else mutation.tests, given)
            finally:
                copies.put(copy)

        wanted = chosen(options)
        with ThreadPoolExecutor(options.jobs) as pool:
            for mutation, (said, by) in zip(wanted, pool.map(result, wanted), strict=True):
                print(f"{mutation}\n    {said}", flush=True)
                counts[said.partition(" ")[0]] += 1
                counts[LATE] += said.endswith(LATE)
                if options.killers and (by or said == SURVIVED):
                    cover.note_killer(str(mutation), by)
                if options.verify and said == SURVIVED:
                    cover.forget_killer(str(mutation))
    total, killed = len(wanted), counts[KILLED]
    share = 100 * killed / total if total else 100
    print(
        f"{total} mutations: {killed} killed ({share:.1f} %; {counts[LATE]} by {LATE}), "
        f"{counts[SURVIVED]} survived, "
        f"{counts[UNFIT.partition(' ')[0]]} do not fit the source, "
        f"{time.monotonic() - started:.0f} s"
    )
    return int(killed < total)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
