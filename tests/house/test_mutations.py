"""What tests.kit.mutations says of the tests that it runs."""

import shutil

import pytest

from tests.kit import mutations

PASSES = "def test_passes(): pass\n"
SKIPS = "import pytest\ndef test_skips(): pytest.skip('this CPU lacks avx512')\n"
FAILS = "def test_fails(): assert not 'value - with a dash'\n"
CRASHES = "import os\ndef test_crashes(): os.abort()\n"
HANGS = "import time\ndef test_hangs(): time.sleep(60)\n"
TEST = "tests/test_a.py"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """Return a checkout of one line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "copytree", lambda _, folder, ignore: folder.mkdir())
        made = mutations.Checkout(tmp_path_factory.mktemp("mutated") / "checkout", ())
    (made.root / "tests").mkdir()
    (made.root / "pytest.ini").write_text("[pytest]\n")  # not the options of this checkout
    (made.root / "x.py").write_text("one = 1\n")
    yield made
    made.close()


@pytest.mark.parametrize(
    ("source", "said", "by"),
    [
        (PASSES, "SURVIVED", None),
        (PASSES + SKIPS, "SURVIVED where tests were skipped", None),
        (PASSES + SKIPS + FAILS, f"killed by {TEST}::test_fails", f"{TEST}::test_fails"),
        (
            PASSES + CRASHES,
            f"killed by {TEST}::test_crashes, ended with status -6",
            f"{TEST}::test_crashes",
        ),
        (
            PASSES + HANGS,
            f"killed by {TEST}::test_hangs, the limit of 300 s",
            f"{TEST}::test_hangs",
        ),
        ("import nothing_such\n", f"killed by {TEST}", TEST),
    ],
    ids=["passes", "skips", "fails", "crashes", "hangs", "cannot be imported"],
)
def test_verdicts(monkeypatch, copy, source, said, by):
    """Who survives where tests are skipped may be killed by these on another machine."""
    monkeypatch.setattr(mutations, "TIMEOUT_S", 300 if "sleep" not in source else 8)
    (copy.root / TEST).write_text(source)
    mutation = mutations.Mutation((TEST,), "one = 1", "one = 2", "x.py")
    assert mutations.judged(mutation, copy, mutation.tests) == (said, by)
    assert (copy.root / "x.py").read_text() == "one = 1\n"
