"""Kernels that are wrong in one respect: none goes unnoticed, nearly all by the right name."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.emulator.kernels import broken
from tests.emulator.kit import tools
from tests.emulator.kit.exhaustive import some_seeds

pytestmark = tools.needs_nvcc

NAMED = 0.9  # of the runs of a mutation, but for those whose cause only the numbers can show
MUTATIONS = broken.mutations()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
@pytest.mark.parametrize("seeds", some_seeds(1, broken.SEEDS))
def test_mutation_is_noticed(mutation, seeds):
    """Every run raises, reports or gives wrong numbers; nearly all that can say what is wrong."""
    outcome = mutation.judge(seeds)
    assert outcome.counts["unnoticed"] == 0, str(outcome)
    if mutation.names is not None:
        assert outcome.named >= NAMED * len(seeds), str(outcome)


# Of swapped and pair_swizzle the data are wrong: there is no right kernel.
RIGHT = [
    m
    for m in dict.fromkeys(m.make for m in MUTATIONS)
    if m not in (broken.swapped, broken.pair_swizzle)
]


@pytest.mark.parametrize("make", RIGHT, ids=lambda make: make.__name__)
def test_names_do_not_fit_the_right_kernel(make):
    """The control: what names a mutation is not said about the kernel that is right."""
    case = make(np.random.default_rng(0))
    report = case.run(0)
    assert case.judge() is None
    for mutation in MUTATIONS:
        if mutation.make is make and mutation.names:
            said = [str(h) for h in report.hazards if re.search(mutation.names, str(h))]
            assert not said, f"{mutation.name}: {said}"
