"""Break the kernels on purpose and see a test fail: ``python tests/kit/mutations.py [text ...]``.

Each mutation of mutations*.txt replaces one piece of source in a copy of this checkout and runs the
tests that should notice.  Prints two lines each; ends with status 1 if one survived, or no longer
fits the source.  ``text``: only mutations whose first line holds it.  All take half an hour.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.kit.paths import ROOT

SOURCES = (
    *("tir/**/*.py", "schedules/**/*.py", "blockscale/**/*.py"),
    *("blockscale/lower/native/**/*.cuh", "blockscale/runtime/native/*.c"),
)
IGNORED = shutil.ignore_patterns(".*", "__pycache__", "typings", "build", "dist", "*.so")
TIMEOUT_S = 300


def mutations() -> Iterator[tuple[list[str], str, str]]:
    """Yield the test files, the original and the replacement of each mutation."""
    tests: list[str] = []
    files = sorted((ROOT / "tests").glob("*/mutations*.txt"))
    text = "\n".join(file.read_text() for file in files)
    for block in re.findall(r"^tests: .*$|(?:^- .*\n)+(?:^\+ .*\n)+", text, re.MULTILINE):
        if block.startswith("tests: "):
            tests = [f"tests/{name}" for name in block.split()[1:]]
        else:
            old, new = ("\n".join(re.findall(rf"^\{sign} (.*)$", block, re.M)) for sign in "-+")
            yield tests, old, new


def find(root: Path, original: str) -> Path | None:
    """Return the only source file that holds ``original``, once; None if there is no such."""
    files = [path for pattern in SOURCES for path in sorted(root.glob(pattern))]
    found = [path for path in files for _ in range(path.read_text().count(original))]
    return found[0] if len(found) == 1 else None


def killer(root: Path, tests: Sequence[str]) -> str | None:
    """Return the first test that fails in the copy ``root``; None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"ended after {TIMEOUT_S} s"
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"ended with status {done.returncode}"


def main(texts: Sequence[str]) -> int:
    """Run the mutations that hold one of ``texts`` (or all); return the exit status."""
    bad = 0
    with tempfile.TemporaryDirectory(prefix="blockscale-mutations-") as folder:
        root = Path(folder) / "checkout"
        shutil.copytree(ROOT, root, ignore=IGNORED)
        for tests, old, new in mutations():
            path = find(root, old)
            name = path.relative_to(root) if path else "?"
            line = re.sub(r"\s+", " ", f"{name}: {old} -> {new}")
            if texts and not any(text in line for text in texts):
                continue
            print(line, flush=True)
            if path is None:
                result = "DOES NOT FIT: the source has it not once"
            else:
                source = path.read_text()
                path.write_text(source.replace(old, new))
                result = killer(root, tests) or "SURVIVED"
                path.write_text(source)
            bad += result.startswith(("SURVIVED", "DOES NOT FIT"))
            print(f"    {result}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
