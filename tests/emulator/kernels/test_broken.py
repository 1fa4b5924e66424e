"""Kernels that are wrong in one respect: none goes unnoticed, nearly all by the right name."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.emulator.kernels import broken
from tests.emulator.kit import tools
from tests.emulator.kit.exhaustive import some_seeds

pytestmark = tools.needs_nvcc

NAMED = 0.9  # of all runs, those whose cause only the numbers can show included
MUTATIONS = broken.mutations()


@pytest.fixture(scope="module")
def outcomes():
    """Return the outcomes so far, by name and seeds; filled by the tests, judged by the last."""
    return {}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
@pytest.mark.parametrize("seeds", some_seeds(2, broken.SEEDS))
def test_mutation_is_noticed(mutation, seeds, outcomes):
    """Every run raises, reports or gives wrong numbers."""
    outcome = outcomes[mutation.name, seeds] = mutation.judge(seeds)
    print(outcome)
    assert outcome.counts["unnoticed"] == 0, str(outcome)


def test_mutations_are_named(outcomes):
    """At least 90 % of all runs say what is wrong."""
    if len({name for name, _ in outcomes}) < len(MUTATIONS):
        pytest.skip("only some mutations were run")
    table = "\n".join(map(str, outcomes.values()))
    named = sum(outcome.named for outcome in outcomes.values())
    runs = sum(len(seeds) for _, seeds in outcomes)
    print(f"{table}\nnamed: {named} of {runs}")
    assert named >= NAMED * runs, table


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
