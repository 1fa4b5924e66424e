"""What tests.kit.mutations says of the tests that it runs."""

import pytest

from tests.kit import mutations

PASSES = "def test_passes(): pass\n"
SKIPS = "import pytest\ndef test_skips(): pytest.skip('this CPU lacks avx512')\n"
FAILS = "def test_fails(): assert not 'value - with a dash'\n"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (PASSES, "SURVIVED"),
        (PASSES + SKIPS, "SURVIVED where tests were skipped"),
        (PASSES + SKIPS + FAILS, "killed by tests/test_a.py::test_fails"),
    ],
    ids=["passes", "skips", "fails"],
)
def test_verdicts(tmp_path, source, said):
    """Who survives where tests are skipped may be killed by these on another machine."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(source)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # not the options of this checkout
    (tmp_path / "x.py").write_text("one = 1\n")
    mutation = mutations.Mutation(("tests/test_a.py",), "one = 1", "one = 2", "x.py")
    assert mutations.judged(mutation, tmp_path) == said
    assert (tmp_path / "x.py").read_text() == "one = 1\n"
