"""What runs by default, and what only with ``--exhaustive``: further seeds, other combinations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

EXHAUSTIVE = pytest.mark.exhaustive


def some_seeds(few: int, many: int) -> list[Any]:
    """Return two parameters: the first ``few`` seeds, and the others up to ``many``."""
    others = pytest.param(range(few, many), id=f"seeds {few} to {many - 1}", marks=EXHAUSTIVE)
    return [pytest.param(range(few), id=f"{few} seeds"), others]


def each_once(*axes: Sequence[Any]) -> list[Any]:
    """Return the product of ``axes``; by default only a diagonal runs, with each value in it."""
    steps = range(max(map(len, axes)))
    diagonal = {tuple(step % len(axis) for axis in axes) for step in steps}
    return [
        pytest.param(*values, marks=[] if at in diagonal else EXHAUSTIVE)
        for at, values in zip(
            itertools.product(*(range(len(axis)) for axis in axes)),
            itertools.product(*axes),
            strict=True,
        )
    ]
