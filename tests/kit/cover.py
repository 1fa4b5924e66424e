"""Which tests `make test` leaves to `make test-all`: ``python -m tests.kit.cover measure|choose``.

``measure`` runs what `make test` would run without lists: with empty caches for what each test
costs, then for the lines of the product that it runs (the emulator's tests with empty caches again,
as launches that are kept run none).  ``python -m tests.kit.mutations --killers`` adds which test is
the cheapest to kill each mutation; it takes hours, and may be stopped and gone on with.
``--verify`` runs each killer again, which takes an hour: whoever changed tests may have lost some.

A test costs what it does itself, and what compilers make for it and for no other test that stays.
``choose`` keeps every test that is cheap, the known killers, all tests of the lists of mutations
without known killer, and the cheapest variant of each function of tests that does not cost much.
It leaves a few mutations to ``make test-all``: those whose killers cost the most for each.  Then,
the most new lines a second first, it keeps what adds lines in good number.  The others go into the
``exhaustive.txt`` of their room.  What no line tells (what processes do to each other, what a
machine does to a kernel) is marked ``always``: of such a function a variant stays, whatever it
costs.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from blockscale.base import files
from tests.kit import compiled, emulated
from tests.kit.paths import ROOT, TESTS

LIST = "exhaustive.txt"
KILLERS = TESTS / "kit" / "killers.jsonl"
"""Mutations, and the test that kills each: hours of work, so part of the repository."""
FOLDER = ROOT / ".cache" / "cover"
PRODUCT = ("blockscale", "schedules", "tir")
HEAD = "# Left to make test-all: other tests tell as much (python -m tests.kit.cover).\n"
CHEAP_S = 0.15
"""CPU seconds below which a test always stays."""
VARIANT_S = 0.5
"""CPU seconds up to which a function of tests keeps its cheapest variant."""
LEFT = 0.005
"""Share of the mutations with a known killer that only `make test-all` has to kill."""
WORTH = 25
"""New lines that a CPU second must run, in what nothing else keeps."""

EMULATOR = "tests/emulator"
"""Tests whose lines are those of the emulator itself."""


def function(node: str) -> str:
    """Return the name of a test without its parameters."""
    return node.partition("[")[0]


def listed() -> set[str]:
    """Return the tests, or functions of tests, that the rooms' lists name."""
    return {
        f"{path.parent.relative_to(ROOT).as_posix()}/{line}"
        for path in TESTS.glob(f"*/{LIST}")
        for line in path.read_text().splitlines()
        if line and not line.startswith("#")
    }


# ---- Measuring: a plugin of pytest ---------------------------------------------------------------


def _cpu_s() -> float:
    return sum(os.times()[:4])


class Measured:
    """What a worker's tests cost, and what they run."""

    def __init__(self, folder: Path, lines: bool) -> None:
        self.out = folder / f"{'lines' if lines else 'costs'}-{os.getpid()}.json"
        self.tests: dict[str, dict[str, Any]] = {}
        self.node = ""
        self.keys: set[str] = set()
        self.made: dict[str, float] = {}
        self.inner_s = 0.0
        compiled.kept = self._noting(compiled.kept)
        emulated._kept = self._noting_launches(emulated._kept)
        self.coverage: Any = None
        if lines:
            import coverage

            self.coverage = coverage.Coverage(data_file=None, source=[*PRODUCT], messages=False)
            self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        """Measure one test, with its fixtures."""
        self.node, began = item.nodeid, _cpu_s()
        self.keys, self.made = set(), {}
        if self.coverage:
            self.coverage.switch_context(self.node)
        done = yield
        test = self.tests.setdefault(self.node, {})
        test["cpu_s"] = round(_cpu_s() - began, 3)
        test["always"] = item.get_closest_marker("always") is not None
        test["keys"], test["made"] = sorted(self.keys), self.made
        return done

    def _timed(self, name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``make`` that notes what it costs, without what else is made meanwhile."""

        def timed(*given: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return make(*given)  # CPU seconds are the process's: who waits for it is charged
            began, outer_s, self.inner_s = _cpu_s(), self.inner_s, 0.0
            try:
                return make(*given)
            finally:
                whole_s = _cpu_s() - began
                self.made[name] = round(whole_s - self.inner_s, 3)
                self.inner_s = outer_s + whole_s

        return timed

    def _noting(self, kept: Callable[..., Path]) -> Callable[..., Path]:
        """Return `compiled.kept` that notes what a test needs, and what it costs to make."""

        def noted(key: str, suffix: str, make: Callable[[Path], None]) -> Path:
            self.keys.add(key[:24])
            return kept(key, suffix, self._timed(key[:24], make))

        return noted

    def _noting_launches(self, kept: Callable[..., Any]) -> Callable[..., Any]:
        """Return what keeps emulated launches, and notes them in the same way."""
        place = compiled.place

        def noted(said: Any, memory: Any, params: bytes, emulate: Callable[[], Any]) -> Any:
            name = ""

            def placed(key: str, suffix: str) -> Path:
                nonlocal name
                name = name or key[:24]
                self.keys.add(name)
                return place(key, suffix)

            compiled.place = placed
            try:
                return kept(said, memory, params, lambda: self._timed(name, emulate)())
            finally:
                compiled.place = place

        return noted

    def pytest_sessionfinish(self) -> None:
        """Write all down; once the session has ended, a worker has ten seconds to live."""
        if self.coverage:
            self.coverage.stop()
            data = self.coverage.get_data()
            for path in data.measured_files():
                name = Path(path).relative_to(ROOT).as_posix()
                for line, nodes in data.contexts_by_lineno(path).items():
                    for node in filter(self.tests.__contains__, nodes):
                        self.tests[node].setdefault("lines", {}).setdefault(name, []).append(line)
        files.write(self.out, json.dumps(self.tests))


class Ordered:
    """Cheapest tests first; those that were never measured last."""

    def __init__(self, folder: Path) -> None:
        self.cpu_s = costs(folder)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort what was collected."""
        items.sort(key=lambda item: self.cpu_s.get(item.nodeid, {}).get("cpu_s", float("inf")))


def costs(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what each test costs, and whether it always stays."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("costs-*.json")):
        found |= json.loads(path.read_text())
    found.pop("", None)
    return found


def pytest_configure(config: pytest.Config) -> None:
    """Measure in workers, or order tests, when this module is a plugin (``-p tests.kit.cover``)."""
    if "COVER_ORDER" in os.environ:
        config.pluginmanager.register(Ordered(Path(os.environ["COVER_ORDER"])))
    elif hasattr(config, "workerinput"):
        folder, lines = Path(os.environ["COVER_FOLDER"]), os.environ["COVER_LINES"] == "1"
        config.pluginmanager.register(Measured(folder, lines))


def measure(folder: Path) -> None:
    """Run all tests and leave what they cost, in CPU seconds, and run in ``folder``."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    others = f"--ignore={EMULATOR}"
    for lines, options in ((0, ["--fresh"]), (1, [others]), (1, ["--fresh", EMULATOR])):
        command = [sys.executable, "-m", "pytest", "-n", "logical", "--dist", "worksteal", "-q"]
        command += ["-p", "tests.kit.cover", "--listed", *options]
        environ = os.environ | {"COVER_FOLDER": str(folder), "COVER_LINES": str(lines)}
        if subprocess.run(command, cwd=ROOT, env=environ).returncode:
            raise SystemExit("tests failed (above): mend them, and measure again")


# ---- Choosing ------------------------------------------------------------------------------------


def known_killers() -> dict[str, str | None]:
    """Return the cheapest test that kills each mutation, as far as ``tests.kit.mutations`` ran.

    None if all tests of its list were run, and none killed it.
    """
    lines = KILLERS.read_text().splitlines() if KILLERS.exists() else []
    return dict(map(json.loads, lines))


def note_killer(mutation: str, node: str | None) -> None:
    """Remember a test that kills a mutation, or that none does, in place of what was known."""
    _write_killers(known_killers() | {mutation: node})


def forget_killer(mutation: str) -> None:
    """Forget what was known of a mutation."""
    _write_killers({m: by for m, by in known_killers().items() if m != mutation})


def _write_killers(known: dict[str, str | None]) -> None:
    files.write(KILLERS, "".join(f"{json.dumps(item)}\n" for item in known.items()))


@dataclass
class Test:
    """A test: what it costs for itself, keys of what it needs that others may need, too, and lines.

    ``cpu_s``: CPU seconds, children's included; ``runs``: numbers of lines of the product.
    """

    node: str
    cpu_s: float
    always: bool
    keys: frozenset[str] = frozenset()
    runs: set[int] = field(default_factory=set)


class Tests:
    """All tests that were measured: how many mutations each ``kills``, and who ``may_kill`` one."""

    def __init__(self, folder: Path) -> None:
        self.numbers: dict[tuple[str, int], int] = {}
        measured = costs(folder)
        self.made: dict[str, float] = {}
        """CPU seconds of what compilers made, and of emulated launches, by their keys."""
        for test in measured.values():
            self.made |= test.get("made", {})
        found = {
            node: Test(
                node,
                test["cpu_s"] - sum(test.get("made", {}).values()),
                test["always"],
                frozenset(test.get("keys", ())),
            )
            for node, test in measured.items()
        }
        for path in sorted(folder.glob("lines-*.json")):
            for node, test in json.loads(path.read_text()).items():
                if node in found:
                    found[node].runs = self._runs(test)
        if not found:
            raise SystemExit(f"{folder} has no measurements: run python -m tests.kit.cover measure")
        self.all = list(found.values())
        killers = known_killers()
        killed = {m: self._named(by) for m, by in killers.items() if by is not None}
        self.kills = Counter(node for found in killed.values() for node in found)
        survived = {mutation for mutation, by in killers.items() if by is None}
        self.may_kill = self._may_kill(survived | {m for m, by in killed.items() if by})

    def _named(self, by: str) -> set[str]:
        """Return the test of this name; of a module that cannot be imported, the cheapest one."""
        found = [t for t in self.all if t.node == by or t.node.startswith(f"{by}::")]
        return {min(found, key=lambda test: test.cpu_s).node} if found else set()

    def _runs(self, test: dict[str, Any]) -> set[int]:
        lines = ((name, line) for name, all_ in test.get("lines", {}).items() for line in all_)
        return {self.numbers.setdefault(key, len(self.numbers)) for key in lines}

    def _may_kill(self, judged: set[str]) -> set[str]:
        """Return all tests of the lists of mutations but those that are ``judged``."""
        from tests.kit import mutations

        names = {
            name
            for mutation in mutations.mutations()
            if mutation.path is not None and str(mutation) not in judged
            for name in mutation.tests
        }
        return {test.node for test in self.all if test.node.startswith(tuple(names))}


class Stay:
    """The tests that stay, and what these make and run."""

    def __init__(self, tests: Tests) -> None:
        self.tests = tests
        self.nodes: set[str] = set()
        self.keys: set[str] = set()
        self.runs: set[int] = set()

    def add(self, test: Test) -> None:
        """Let one more stay."""
        self.nodes.add(test.node)
        self.keys |= test.keys
        self.runs |= test.runs

    def cpu_s(self, test: Test) -> float:
        """Return the CPU seconds that a test costs beside those that stay."""
        made = self.tests.made
        return test.cpu_s + sum(made.get(key, 0.0) for key in test.keys - self.keys)

    def worth(self, test: Test) -> float:
        """Return the new lines that a test runs in a CPU second."""
        return len(test.runs - self.runs) / max(self.cpu_s(test), 0.001)

    def add_cheap(self) -> None:
        """Add what costs next to nothing, the cheapest first."""
        for test in sorted(self.tests.all, key=self.cpu_s):
            if self.cpu_s(test) < CHEAP_S:
                self.add(test)

    def add_killers(self) -> None:
        """Add known killers, but for a few mutations those that cost the most for each."""
        by = {test.node: test for test in self.tests.all}
        rest = {node for node in self.tests.kills if node not in self.nodes}
        needed = Counter(key for node in rest for key in by[node].keys - self.keys)

        def price(node: str) -> float:
            made = (self.tests.made.get(key, 0.0) for key in by[node].keys if needed[key] == 1)
            return (by[node].cpu_s + sum(made)) / self.tests.kills[node]

        left = int(LEFT * self.tests.kills.total())
        while rest:
            dearest = max(sorted(rest), key=price)
            left -= self.tests.kills[dearest]
            if left < 0:
                break
            needed.subtract(by[dearest].keys - self.keys)
            rest.remove(dearest)
        for node in rest:
            self.add(by[node])

    def add_variants(self) -> None:
        """Add the cheapest variant of functions that have none, if it does not cost much."""
        functions: dict[str, list[Test]] = defaultdict(list)
        for test in self.tests.all:
            functions[function(test.node)].append(test)
        for variants in functions.values():
            cheapest = min(variants, key=self.cpu_s)
            stays = self.cpu_s(cheapest) < VARIANT_S or cheapest.always
            if stays and not any(test.node in self.nodes for test in variants):
                self.add(cheapest)

    def add_lines(self) -> bool:
        """Add what runs new lines in good number, the most a second first; return whether any."""
        rest = [test for test in self.tests.all if test.node not in self.nodes]
        heap = [(-self.worth(test), i) for i, test in enumerate(rest)]
        heapq.heapify(heap)
        before = len(self.nodes)
        while heap:
            _, i = heapq.heappop(heap)
            worth = self.worth(rest[i])
            if worth < WORTH:
                continue
            if heap and worth < -heap[0][0]:
                heapq.heappush(heap, (-worth, i))
            else:
                self.add(rest[i])
        return len(self.nodes) > before


def chosen(tests: Tests) -> set[str]:
    """Return the tests that stay."""
    stay = Stay(tests)
    for test in tests.all:
        if test.node in tests.may_kill:
            stay.add(test)
    stay.add_cheap()
    stay.add_killers()
    stay.add_variants()
    while stay.add_lines():  # the more stay, the cheaper are those that need the same kernels
        pass
    return stay.nodes


def write(tests: Tests, stay: set[str]) -> None:
    """Write the lists of all rooms."""
    count = Counter(function(test.node) for test in tests.all)
    out = [test.node for test in tests.all if test.node not in stay]
    gone = Counter(map(function, out))
    lines: dict[Path, set[str]] = defaultdict(set)
    for node in out:
        whole = function(node)
        name = whole if gone[whole] == count[whole] else node
        room = TESTS / name.split("/")[1]
        lines[room].add(name.removeprefix(f"{room.relative_to(ROOT).as_posix()}/"))
    for path in TESTS.glob(f"*/{LIST}"):
        path.unlink()
    for room, names in lines.items():
        (room / LIST).write_text(HEAD + "".join(f"{name}\n" for name in sorted(names)))


def main(given: Sequence[str] | None = None) -> int:
    """Measure or choose; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["measure", "choose"])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the measurements")
    options = parser.parse_args(given)
    began = time.monotonic()
    if options.what == "measure":
        measure(options.folder.resolve())
        print(f"measured in {time.monotonic() - began:.0f} s")
        return 0
    tests = Tests(options.folder)
    stay = chosen(tests)
    write(tests, stay)
    total, kept = (
        sum(test.cpu_s for test in some)
        + sum(tests.made.get(key, 0.0) for key in set().union(*(test.keys for test in some)))
        for some in (tests.all, [test for test in tests.all if test.node in stay])
    )
    print(f"{len(stay)} of {len(tests.all)} tests stay: {kept:.0f} of {total:.0f} CPU seconds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
