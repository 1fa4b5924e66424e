"""The benchmark of linear layers, on a CPU: what others are given, and the tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch

linear = pytest.importorskip(
    "bench.gpu.linear", reason="bench/ is part of the checkout, not of the wheel"
)
from bench.gpu import linear_report  # noqa: E402
from bench.peers import linear as peers  # noqa: E402
from blockscale.specs import Spec  # noqa: E402


def test_names_are_layers_and_what_makes_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert linear.main(["--names"]) == 0
    names = capsys.readouterr().out.split()
    assert len(names) == 24 + 4
    assert all(Spec.parse(name).name == name for name in names)


@pytest.mark.parametrize("shrunk", [1, 16])
def test_scales_become_marlins_bytes(shrunk: int) -> None:
    """A byte is bits 14 to 7 of the half of 128 times the scale; small ones are lifted."""
    scale = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float() / shrunk
    bits, factor = peers._unsigned_e5m3(scale)
    assert factor == shrunk
    halves = (bits.view(torch.uint8).to(torch.int16) << 7).view(torch.float16)
    exact = scale * shrunk >= 2**-6
    assert torch.equal((halves.float() / 128 / factor)[exact], scale[exact])


def test_weights_are_padded_with_zeros() -> None:
    made = peers._padded(torch.full((3, 2), 7, dtype=torch.uint8), 4, 4)
    assert made.tolist() == [[7, 7, 0, 0]] * 3 + [[0] * 4]


def _row(rows: int, us: float | None, torch_us: float, **others: float | None) -> dict[str, Any]:
    name = "linear_int4g128_n4096_k4096_tiles64_bf16"
    return {
        "kernel": name,
        "rows": rows,
        "right": us is not None,
        "error": 1e-3 * rows if us else None,
        "us": us,
        "torch_us": torch_us,
        "peers": others,
        "errors": {},
    }


def test_tables_compare_with_the_best_of_the_others() -> None:
    rows = [_row(1, 2.0, 8.0, a=5.0, b=4.0), _row(8, 4.0, 4.0, a=None, b=8.0), _row(64, None, 9.0)]
    machine = {"gpu": "G", "driver_version": "1"}
    result = {
        "rows": rows,
        "peers": {"a": "1.0", "b": "of c 2.0"},
        "machine": machine,
        "versions": {"CUDA": "13", "torch": "2"},
        "date": "2026-11-24T00:00:00",
        "failed": {},
    }
    text = linear_report.section(result, "x.json")
    assert "| INT4 g128 | 4096 x 4096 | 2.00 (4.00; 2.00) | 4.00 (1.00; 2.00) |" in text
    assert "| INT4 | torch | 2.00 (1.00; 4.00) |" in text
    assert "| INT4 | a | 2.50 (2.50; 2.50) |" in text
    assert "| INT4 | b | 2.00 (2.00; 2.00) |" in text
    assert "b of c 2.0" in text
    assert "8.0e-03" in text
    assert "1 results were wrong" in text
