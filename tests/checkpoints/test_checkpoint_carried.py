"""`blockscale convert` loses nothing: what it copies, and what tells how to read it, come along."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale.checkpoints.convert.convert import convert
from tests.kit import checkpoint_files as files
from tests.kit.checkpoint_files import BF16

EXPERTS = "model.layers.0.mlp.experts"
E = 3


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(17)


def made(source: bs.checkpoints.Checkpoint, out: Path, **options) -> bs.checkpoints.Checkpoint:
    convert(source, out, **options)
    return bs.checkpoints.open(out)


def said(out: Path) -> dict:
    return json.loads((out / "config.json").read_text()).get("quantization_config", {})


@pytest.mark.parametrize(
    ("inner", "options"),
    [
        (64, {"keep": ("*down_proj*",)}),  # square: no shape says how the copy lies
        (96, {"keep": ("*down_proj*",)}),
        (64, {"keep": ("*gate_up_proj*",)}),
        (48, {"fmt": "mxfp4"}),  # of which 48 is no multiple
    ],
)
@pytest.mark.parametrize("model", ["gpt_oss", "llama4"])
def test_experts_beside_quantised_ones_are_turned_with_them(
    opened, rng, tmp_path, model, inner, options
):
    tensors = {
        f"{EXPERTS}.gate_up_proj": rng.standard_normal((E, 64, 2 * inner)).astype(BF16),
        f"{EXPERTS}.down_proj": rng.standard_normal((E, inner, 64)).astype(BF16),
    }
    source = opened(tensors, model_type=model, hidden_size=64)
    found = made(source, tmp_path / "out", **options)[EXPERTS]
    assert set(found.fmt.split("+")) == {options.get("fmt", "nvfp4"), "bf16"}
    assert found.shape == ((E, 2 * inner, 64), (E, 64, inner))
    for new, old in zip(found.dequantize(), source[EXPERTS].dequantize(), strict=True):
        assert (new - old).norm() < 0.2 * old.norm()  # 9.5 % and 12 %: of codes of Gaussian values
    kept = found.down if found.down.packed is None else found.gate_up
    old = source[EXPERTS].down if found.down.packed is None else source[EXPERTS].gate_up
    assert torch.equal(kept.data, old.data)


def test_experts_that_all_stay_are_copied_as_they_lie(opened, rng, tmp_path):
    value = rng.standard_normal((E, 64, 64)).astype(BF16)
    names = (f"{EXPERTS}.up_proj", f"{EXPERTS}.down_proj")
    source = opened(dict.fromkeys(names, value), model_type="gpt_oss")
    result = made(source, tmp_path / "out", keep=("*experts*",))
    assert torch.equal(result.weight(names[0]).data, source.weight(names[0]).data)


@pytest.mark.parametrize("layout", ["linear", "128x4", "tiles64"])
def test_the_order_of_gate_and_up_is_known_without_the_model(opened, rng, tmp_path, layout):
    """Names of gpt-oss's blocks say that rows alternate; ModelOpt's, which are written, do not."""
    tensors = {}
    for leaf, rows, inner in (("gate_up_proj", 128, 64), ("down_proj", 64, 64)):
        codes, scale, _ = files.mxfp4(rng, E, rows, inner)
        packed = files.nibbles(codes).reshape(E, rows, inner // 32, 16)
        tensors |= {f"{EXPERTS}.{leaf}_blocks": packed, f"{EXPERTS}.{leaf}_scales": scale}
        tensors[f"{EXPERTS}.{leaf}_bias"] = rng.standard_normal((E, rows)).astype(BF16)
    source = opened(tensors)
    result = made(source, tmp_path / "out", layout=layout)
    for new, old in zip(result[EXPERTS].dequantize(), source[EXPERTS].dequantize(), strict=True):
        assert torch.equal(new, old)
    assert torch.equal(result[EXPERTS].gate_up_bias, source[EXPERTS].gate_up_bias)
    assert result.weight(f"{EXPERTS}.gate_up_proj").gate_up == "interleaved"
    assert said(tmp_path / "out")["gate_up"] == "interleaved"
