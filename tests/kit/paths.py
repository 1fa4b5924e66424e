"""Where the tests' files are."""

from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent
GOLDEN = TESTS / "golden"
"""Outputs of other projects' code."""
CHECKPOINTS = GOLDEN / "checkpoints"
