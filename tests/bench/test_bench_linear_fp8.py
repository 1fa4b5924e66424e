"""The benchmark of linear layers with FP8 rows, on a CPU: names, what is compared and timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import blockscale as bs
from blockscale.ops.moe import rounded

linear_fp8 = pytest.importorskip(
    "bench.gpu.linear_fp8", reason="bench/ is part of the checkout, not of the wheel"
)
from blockscale.specs import Spec  # noqa: E402
from tests.kit.pairwise import few  # noqa: E402


class Session:
    """What a run adds."""

    def __init__(self) -> None:
        self.cases: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any], said: str) -> None:
        self.cases.append(row | {"said": said})


def test_names_are_those_of_the_roads(capsys: pytest.CaptureFixture[str]) -> None:
    assert linear_fp8.main(["--names", "--only", "2880x2880"]) == 0
    *names, _, _, _, _ = capsys.readouterr().out.split()  # four that make weights
    found = [Spec.parse(name) for name in names]
    kinds = [linear_fp8.KINDS[key] for key in ("mxfp4", "nvfp4", "int4g64")]  # of K 2880
    every = [(kind, road) for kind in kinds for road in linear_fp8.roads_of(kind)]
    assert found == [linear_fp8.spec_on(kind, 2880, 2880, road) for kind, road in every]
    assert len(found) == 11


def test_the_reference_rounds_as_kernels_do() -> None:
    """Four bits of significand, of values whose scales do not shrink."""
    made = torch.Generator().manual_seed(0)
    packed, scale = bs.quantize(torch.randn(8, 64, generator=made), "nvfp4")
    exact = bs.dequantize(packed, scale, "nvfp4", dtype=torch.float32)
    of = rounded.rounded(packed.view(torch.uint8), scale.view(torch.uint8))
    want = torch.ldexp(rounded.values(of), of.octaves[:, None])
    assert not torch.equal(want, exact)
    assert torch.equal(linear_fp8.four_bits(exact), want)


@pytest.mark.parametrize("key", few(["nvfp4", "mxfp4", "int4g128z", "int4g64"]))
def test_all_contenders_are_run(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every road is right against its own rows, and wrong against the other's."""
    made = {"16 bits": ("", False), "fp8": ("fp8", False), "fp8 fast": ("fp8", True)}
    if key.startswith("int4"):
        del made["fp8 fast"]
    roads = {road: ("linear", *acts) for road, acts in made.items()}
    monkeypatch.setattr(linear_fp8, "ROADS", roads)
    monkeypatch.setattr(linear_fp8, "ROWS", (1, 17))
    monkeypatch.setattr(linear_fp8, "copies_of", lambda held: 2)

    def microseconds(calls: list[Any], replays: int) -> float:
        return float(replays * len([call() for call in calls]))

    monkeypatch.setattr(linear_fp8, "microseconds", microseconds)
    session = Session()
    linear_fp8.measured(key, 96, 256, session, 5, "cpu")
    assert [row["rows"] for row in session.cases] == [1, 17]
    for row in session.cases:
        assert row["right"], row
        assert list(row["us"]) == [*roads, "torch", "_scaled_mm"]
        assert {row["us"][road] for road in roads} == {10.0}
        assert "96 x    256" in row["said"]
    monkeypatch.setattr(linear_fp8, "quantised", lambda x: x.float())
    linear_fp8.measured(key, 96, 256, session, 5, "cpu")
    assert not session.cases[-1]["right"]
    assert "WRONG" in session.cases[-1]["said"]
