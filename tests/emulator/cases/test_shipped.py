"""Kernels that another compiler made and that are right: they run right on every seed.

Each case is one 128 x 128 tile of a block-scaled GEMM, 0.3 s a run.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from blockscale.cli import command as cli
from blockscale.emulator.case import Case
from tests.emulator.cases.shipped import DIGESTS, NAMES, digest, unpack
from tests.emulator.kit.exhaustive import some_seeds

SEEDS = some_seeds(3, 10)


@pytest.fixture(scope="module", params=NAMES)
def folder(request, tmp_path_factory):
    """The folder of a case, with all its arrays."""
    return unpack(request.param, tmp_path_factory.mktemp("cases"))


@pytest.mark.parametrize("suffix", ["", "_wide"])
def test_expected_outputs_are_those_that_came_with_the_case(folder, suffix):
    array = np.load(folder / f"c_expected{suffix}.npy")
    assert digest(array) == DIGESTS[f"{folder.name}{suffix}"]


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("suffix", ["", "_wide"])
def test_a_right_kernel_is_right_on_every_seed(folder, suffix, seeds):
    """Exact data: bit for bit; wide data: the rounding inside an MMA is not defined, 2e-6."""
    case = Case.load(folder / f"case{suffix}.json")
    for seed in seeds:
        report, outcomes = case.run(seed)
        assert [outcome.sentence for outcome in outcomes if not outcome.passed] == [], seed
        assert report.check() is report
        assert not [h for h in report.hazards if h.kind == "race"], seed


def test_the_report_of_a_gemm_counts_what_it_must(folder):
    case = Case.load(folder)
    report, _ = case.run()
    problem = json.loads(case.path.read_text())["problem"]
    assert report.kernel == "scaled_gemm"
    assert report.bytes["global"]["written"] == problem["M"] * problem["N"] * 4
    assert report.engines["tensor core"]["operations"] > 0
    operands = [case.files[arg["file"]] for arg in case.args[:2]]
    assert report.engines["cp.async"]["bytes"] >= sum(array.nbytes for array in operands)
    assert report.tmem_columns_high_water in (64, 128, 256, 512)
    assert 0 < report.smem_bytes <= 228 * 1024
    assert report.warp_instructions == sum(report.instructions.values())
    assert any(name.startswith("tcgen05.mma") for name in report.instructions)
    assert report.cycles > 0


def test_the_command_runs_a_case_and_draws_it(folder, tmp_path, monkeypatch, capsys):
    svg = tmp_path / "timeline.svg"
    words = ["emulate", folder / "kernel.ptx", "--case", folder / "case.json", "--timeline", svg]
    monkeypatch.setattr(sys, "argv", ["blockscale", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, _ = capsys.readouterr()
    assert stop.value.code == 0, out
    assert "passed with seed 0" in out
    shown = svg.read_text(encoding="utf-8")
    for part in ("scaled_gemm", "warp 3", "tensor core", "virtual cycles"):
        assert part in shown
