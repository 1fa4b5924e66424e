"""The rooms of the package: who may import whom, no circles, and no crowded folder.

Imports are read from the sources, in function bodies and under TYPE_CHECKING too.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.kit.paths import ROOT

COMPILER = ("base", "specs", "tir", "schedules", "tuning_logs", "lower", "catalog", "building")
CALLER = ("base", "specs", "runtime", "ops")
MAY_IMPORT = {
    **{room: set(COMPILER[:i]) for i, room in enumerate(COMPILER)},
    **{room: set(CALLER[:i]) for i, room in enumerate(CALLER)},
    "tuning": {*COMPILER, "runtime"},
    "compat": set(CALLER),
    "checkpoints": set(CALLER),
    "nn": {*CALLER, "checkpoints"},
    "integrations": {*CALLER, "checkpoints", "nn"},
    "emulator": {"base"},
}
"""Rooms not named here (cli, demo, bench, the package's own __init__) may import all others."""

DOOR = ("blockscale.runtime.jit", "building")
"""The one way from the process that calls kernels to the compiler: building on first use."""

MOST_ENTRIES = 17


def modules() -> dict[str, Path]:
    """Return every module of the package and of bench, by its name."""
    found = {}
    for folder in ("blockscale", "tir", "schedules", "tuning_logs", "bench"):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            own = folder in ("blockscale", "bench")
            found[".".join(parts if own else ("blockscale", *parts))] = path
    return found


MODULES = modules()


def imports(name: str, path: Path) -> Iterator[str]:
    """Yield the modules of ours that a module imports, wherever the statement stands."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(up if node.level else []), *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names]
            targets = [target if target in MODULES else base for target in names]
        else:
            continue
        yield from (target for target in targets if target in MODULES and target != name)


@cache
def graph() -> dict[str, set[str]]:
    """Return what each module imports of ours."""
    return {name: set(imports(name, path)) for name, path in MODULES.items()}


def room(name: str) -> str:
    """Return the room that a module lies in."""
    first, *rest = name.split(".")
    return rest[0] if first == "blockscale" and rest else first


@pytest.mark.always
def test_rooms_import_what_lies_below_them():
    wrong = defaultdict(list)
    for name, targets in graph().items():
        own = room(name)
        for target in targets:
            other = room(target)
            if own == other or own not in MAY_IMPORT or (name, other) == DOOR:
                continue
            if other not in MAY_IMPORT[own]:
                wrong[f"{own} -> {other}"].append(f"{name} imports {target}")
    assert not wrong, dict(wrong)


def test_no_circles():
    """Importing a package runs its __init__, so its modules may not import that again."""
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_the_calling_process_never_imports_the_compiler():
    """The emulator needs no TVM either; nor do names, shapes and formats."""
    rooms = (
        *("base", "specs", "runtime", "ops", "checkpoints", "nn", "integrations"),
        *("compat", "emulator"),
    )
    for name, path in MODULES.items():
        if room(name) in rooms:
            for node in ast.walk(ast.parse(path.read_text())):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not {n.partition(".")[0] for n in names} & {"tvm"}, f"{name} imports tvm"


def test_no_crowded_folder():
    for folder in ("bench", "blockscale", "schedules", "tir"):
        for path in [ROOT / folder, *(ROOT / folder).rglob("*/")]:
            if {"__pycache__", "results"} & {*path.parts} or not path.is_dir():
                continue
            entries = [p.name for p in path.iterdir() if p.name != "__pycache__"]
            assert len(entries) <= MOST_ENTRIES, f"{path}: {sorted(entries)}"
