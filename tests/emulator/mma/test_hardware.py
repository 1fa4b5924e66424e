"""mma.sync, ldmatrix, stmatrix, movmatrix and wgmma against what an H200 computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.emulator.mma import replay

GOLDEN = Path(__file__).with_name("mma_h200.npz")
HOW = (
    "no outputs of a GPU are stored; from the repository's root: "
    "`python -m tests.emulator.mma.hardware.generate build/mma_h200.cu`; on an H200 "
    "`tests/emulator/mma/hardware/run.sh build/mma_h200.cu build/mma_h200.bin`; then "
    "`python -m tests.emulator.mma.hardware.golden build/mma_h200.bin`"
)
# The hardware aligns the products of one step to the biggest and truncates: to 24 bits or more with
# f32 accumulators, to 13 or more with FP8 operands; f16 accumulators have 10 bits.
TOLERANCE = {"f32": 2.0**-20, "f16": 2.0**-9, "f64": 2.0**-51}
FP8_TOLERANCE = 2.0**-11


@pytest.mark.skipif(not GOLDEN.exists(), reason=HOW)
def test_everything_the_gpu_ran():
    """Bit by bit where sums are exact, else within the hardware's alignment of addends."""
    arrays = dict(np.load(GOLDEN))
    assert len(replay.cases(arrays)) > 200
    for case, group in replay.cases(arrays).items():
        dtype, got, want = replay.replay(case, group)
        wrong, relative = replay.error(dtype, got, want)
        if case.endswith("wide") and dtype in TOLERANCE:
            fp8 = "e4m3" in case or "e5m2" in case
            assert relative <= max(FP8_TOLERANCE if fp8 else 0, TOLERANCE[dtype]), case
        else:
            assert wrong == 0, case
