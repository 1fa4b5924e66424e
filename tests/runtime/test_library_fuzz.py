"""Whatever a library file holds: inspected or refused, loaded or refused, and never a crash.

The mutations are those of `fuzz_libraries`, the same ones in every run.  For other ones, so many:
``BLOCKSCALE_FUZZ=20000 BLOCKSCALE_FUZZ_SEED=7 pytest tests/runtime/test_library_fuzz.py``.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.kit.paths import ROOT
from tests.kit.tiny_kernels import library_file

BATCH = 250
LONG = int(os.environ.get("BLOCKSCALE_FUZZ", "0"))
SEED = os.environ.get("BLOCKSCALE_FUZZ_SEED", "own")
BATCHES = (
    [(f"{SEED}.{i}", BATCH) for i in range(-(-LONG // BATCH))]
    if LONG
    else [
        ("quick", 60),
        *(pytest.param(f"{i}", BATCH, marks=pytest.mark.exhaustive) for i in range(15)),
    ]
)


@pytest.mark.always
@pytest.mark.parametrize(("seed", "count"), BATCHES)
def test_mutated_libraries(seed, count):
    """In a process with 2 GiB to spare; a crash or a hang names its mutation in the last line."""
    command = [sys.executable, "-m", "tests.runtime.fuzz_libraries"]
    done = subprocess.run(
        [*command, str(library_file()), seed, str(count)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # each thread takes address space
    )
    assert done.returncode == 0, done.stdout[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert sum(seen.values()) == count
    assert {"bytes: refused, refused", "manifest: refused, refused"} <= seen.keys()
    assert any(outcome.startswith("image: shown, refused") for outcome in seen)
    assert any(outcome.endswith("loaded") for outcome in seen)
