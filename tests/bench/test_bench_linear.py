"""The benchmark of linear layers, on a CPU: what others are given, and the tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

linear = pytest.importorskip(
    "bench.gpu.linear", reason="bench/ is part of the checkout, not of the wheel"
)
from bench import measure  # noqa: E402
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
        "floor_us": 2.0,
        "peers": others,
        "errors": {},
    }


def test_tables_compare_with_the_best_of_the_others() -> None:
    rows = [_row(1, 2.0, 8.0, a=5.0, b=4.0), _row(8, 4.0, 4.0, a=None, b=8.0), _row(64, None, 9.0)]
    machine = {"gpu": "G", "driver_version": "1", "l2_bytes": 60 << 20}
    result: dict[str, Any] = {
        "rows": rows,
        "peers": {"a": "1.0", "b": "of c 2.0"},
        "machine": machine,
        "versions": {"CUDA": "13", "torch": "2"},
        "date": "2026-11-24T00:00:00",
        "failed": {},
    }
    text = linear_report.section(result, "x.json")
    assert "| INT4 g128 | 4096 x 4096 | 2.00 (4.00; 2.00) | 4.00 (1.00; 2.00) |" in text
    assert "| INT4 | torch | 2.00 (1.00; 4.00) |  |  |  |  |" in text
    assert "| INT4 | a | 2.50 (2.50; 2.50) |  |  |  |  |" in text
    assert "| INT4 | b | 2.00 (2.00; 2.00) |  |  |  |  |" in text
    assert "b of c 2.0" in text
    assert "8.0e-03" in text
    assert "1 results were wrong" in text


def test_an_empty_range_keeps_its_column() -> None:
    """Means of 384 to 768 rows stand under their heading where none of 1 to 256 are there."""
    result: dict[str, Any] = {
        "rows": [_row(512, 2.0, 8.0)],
        "peers": {},
        "machine": {"gpu": "G", "driver_version": "1", "l2_bytes": 60 << 20},
        "versions": {"CUDA": "13", "torch": "2"},
        "date": "2026-11-24T00:00:00",
        "failed": {},
    }
    assert "| INT4 | torch |  |  |  | 4.00 (4.00; 4.00) |  |" in linear_report.section(result)


def test_the_page_says_which_weights_may_be_cached() -> None:
    """Ten of 1 MB fit into 10 MB, not into less."""
    result: dict[str, Any] = {
        "rows": [_row(512, 2.0, 8.0)],
        "peers": {},
        "machine": {"gpu": "G", "driver_version": "1", "l2_bytes": 10_000_001},
        "versions": {"CUDA": "13", "torch": "2"},
        "date": "2026-11-24T00:00:00",
        "failed": {},
    }
    said = "but perhaps for those of 4096 x 4096 with 512 rows and more"
    result["rows"][0]["floor_us"] = (1e6 + 2 * 512 * 8192) / 4.3e6
    assert said in linear_report.section(result)
    result["machine"]["l2_bytes"] = 9_999_999
    assert said not in linear_report.section(result)
    result["cache_multiple"] = "3"
    assert "of more than 3 times the L2 cache in turn" in linear_report.section(result)


@pytest.mark.parametrize("rows", [1, 4096])
def test_a_graph_reads_more_than_the_cache_holds(rows: int, monkeypatch: Any) -> None:
    """Of every contender, three times over, and each copy in as many launches."""
    case, l2 = linear.Case(64, 128, "mxfp4"), 100_000
    packed = torch.zeros(64, 64, dtype=torch.uint8)
    scale = torch.zeros(64, 4, dtype=torch.uint8)
    weight = peers.Weight("mxfp4", 32, packed, scale, torch.randn(64, 128).bfloat16())
    captured: dict[int, int] = {}

    def calls_of(x: torch.Tensor, copies: int) -> list[Any]:
        return [lambda: functional.linear(x.float(), weight.dense.float())] * copies

    class Peer:
        name = "peer"

        def __init__(self, given: peers.Weight) -> None:
            self.calls = calls_of

        @staticmethod
        def missing() -> str:
            return ""

    def capture(calls: list[Any], launches: int) -> int:
        assert launches % len(calls) == 0
        assert launches >= (linear.CALLS if rows == 1 else linear.FEWER)
        captured[len(captured)] = len(calls)
        return launches

    def interleaved(graphs: dict[str, int], replays: int) -> dict[str, measure.Timing]:
        assert replays == 7
        return {name: measure.Timing(1.0, 1.0, 1.0, 7, n, 1) for name, n in graphs.items()}

    monkeypatch.setattr(linear, "weight_of", lambda case, seed: weight)
    monkeypatch.setattr(linear, "ours", lambda weight, x, copies: calls_of(x, copies))
    monkeypatch.setattr(linear, "PEERS", (Peer,))
    monkeypatch.setattr(measure, "l2_bytes", lambda: l2)
    monkeypatch.setattr(measure, "capture", capture)
    monkeypatch.setattr(measure, "interleaved", interleaved)
    monkeypatch.setattr(measure, "warm_up", lambda seconds: None)
    assert linear.Bench(case, 7).row(rows)["right"]
    ours, peer, dense = captured.values()
    assert ours == peer
    assert ours * (packed.nbytes + scale.nbytes) > 3 * l2
    assert dense * weight.dense.nbytes > 3 * l2
