"""Where the tests' files are, and the environment of processes that need only these."""

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent
GOLDEN = TESTS / "golden"
"""Outputs of other projects' code."""
CHECKPOINTS = GOLDEN / "checkpoints"


def without_torch() -> dict[str, str]:
    """Return this environment for a process that uses TVM, which imports torch where it is."""
    paths = [str(TESTS / "kit" / "no_torch"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
