"""Hostile files of every kind, and that what they must not do is noticed."""

import pytest

from tests.kit import fuzz

FEW = {"ptx": 40, "logs": 12, "checkpoints": 30}


@pytest.mark.always
@pytest.mark.parametrize("kind", fuzz.TARGETS)
def test_hostile_files_are_refused_or_read(kind):
    result = fuzz.run(kind, count=FEW[kind])
    assert not result.findings, "\n\n".join(result.findings)
    assert result.ends.total() == FEW[kind]


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)  # 300 inputs, each with up to ten seconds
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kind", fuzz.TARGETS)
def test_many_hostile_files_are_refused_or_read(kind, seed):
    result = fuzz.run(kind, seed=seed, count=300)
    assert not result.findings, "\n\n".join(result.findings)


def test_what_a_reader_must_not_do_is_found():
    """Each input of this reader does another thing; only the first two are allowed."""
    result = fuzz.run("tests.kit.hostile_reader", count=6)
    assert (result.ends["read"], result.ends["ValueError"]) == (1, 2)  # one is too long
    found = [finding.partition(": ")[2] for finding in result.findings]
    assert len(found) == 4
    for finding, words in zip(
        found, ("KeyError", "MemoryError", "a message of 20000", "killed"), strict=True
    ):
        assert words in finding
