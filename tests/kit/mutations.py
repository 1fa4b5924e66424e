"""Break the kernels on purpose and see a test fail: ``python -m tests.kit.mutations [text ...]``.

Each mutation of mutations*.txt replaces one piece of source in a copy of this checkout and runs the
tests that should notice, as ``make test`` selects them.  Prints two lines each and a summary; ends
with status 1 if one survived, or no longer fits the source.  ``text``: only mutations whose first
line holds it; ``--sample``: so many of them, drawn at random.
"""

from __future__ import annotations

import argparse
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
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.kit import compiled, cover
from tests.kit.paths import ROOT, TESTS

SOURCES = ("tir/**/*", "schedules/**/*", "blockscale/**/*")
SUFFIXES = (".py", ".c", ".h", ".cuh")
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.so")
MADE = {"build", "dist", "typings"}
"""Folders at the top of a checkout that hold what was built."""
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


def killer(root: Path, tests: Sequence[str], options: Sequence[str] = ()) -> str | None:
    """Return the first test that fails in the copy ``root``; None if all pass.

    UNPROVEN if those that ran pass, and others were skipped, for what this machine is.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += [*options, *tests]
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")])),
        # By content: what the copy has in common with this checkout is compiled once.
        "BLOCKSCALE_TEST_CACHE": str(compiled.folder()),
    }
    given = {"cwd": root, "env": environ, "capture_output": True, "text": True}
    try:
        done = subprocess.run(command, timeout=TIMEOUT_S, **given)  # type: ignore[call-overload]
    except subprocess.TimeoutExpired:
        return LATE
    if done.returncode == 0:
        return UNPROVEN if re.search(r"\d skipped\b", done.stdout) else None
    if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED and any("[" in name for name in tests):
        return killer(root, [cover.function(name) for name in tests], options)  # others do run
    if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED and "deselected" in done.stdout:
        return None  # all of them are exhaustive
    if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED or "ERROR: not found:" in done.stderr:
        raise ValueError(f"the list names tests that are not there: {' '.join(tests)}")
    failed = re.search(r"^(?:FAILED|ERROR) (tests/\S.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"ended with status {done.returncode}"


def judged(mutation: Mutation, root: Path, options: Sequence[str] = ()) -> str:
    """Return what becomes of ``mutation`` in the copy ``root``."""
    if mutation.path is None:
        return UNFIT
    path = root / mutation.path
    source = path.read_text()
    path.write_text(source.replace(mutation.old, mutation.new))
    try:
        by = killer(root, mutation.tests, options)
    finally:
        path.write_text(source)
    if by is None or by == UNPROVEN:
        return by or SURVIVED
    return f"{KILLED} by {by}"


def chosen(options: argparse.Namespace) -> list[Mutation]:
    """Return the mutations that hold one of the texts (or all), or a sample of these."""
    found = [m for m in mutations() if not options.text or any(t in str(m) for t in options.text)]
    if options.killers:
        known = cover.known_killers()
        found = [mutation for mutation in found if known.get(str(mutation)) is None]
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
    options = parser.parse_args(arguments)
    started, counts = time.monotonic(), Counter[str]()
    given = ["--exhaustive"] if options.exhaustive else []
    if options.killers:
        given = ["--listed", "-p", cover.__name__]
        os.environ["COVER_ORDER"] = str(cover.FOLDER)
    with tempfile.TemporaryDirectory(prefix="blockscale-mutations-") as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for i in range(options.jobs):
            shutil.copytree(ROOT, Path(folder) / f"checkout{i}", ignore=left_out)
            copies.put(Path(folder) / f"checkout{i}")

        def result(mutation: Mutation) -> str:
            root = copies.get()
            try:
                return judged(mutation, root, given)
            finally:
                copies.put(root)

        wanted = chosen(options)
        with ThreadPoolExecutor(options.jobs) as pool:
            for mutation, said in zip(wanted, pool.map(result, wanted), strict=True):
                print(f"{mutation}\n    {said}", flush=True)
                counts[said.partition(" ")[0]] += 1
                counts[LATE] += said.endswith(LATE)
                by = said.removeprefix(f"{KILLED} by ")
                if options.killers and (said == SURVIVED or by.startswith("tests/")):
                    cover.note_killer(str(mutation), None if said == SURVIVED else by)
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
