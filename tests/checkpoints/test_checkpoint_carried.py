"""`blockscale convert` loses nothing: what it copies, and what tells how to read it, come along."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale.base.errors import CheckpointError
from blockscale.checkpoints.convert.convert import convert
from tests.kit import checkpoint_files as files
from tests.kit.checkpoint_files import BF16, E4M3

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


@pytest.mark.parametrize("layout", ["linear", "128x4", "marlin", "deepgemm", "tiles64"])
@pytest.mark.parametrize(("scheme", "model"), [("modelopt", "gpt_oss"), ("ct", "qwen3_moe")])
def test_global_scales_of_gate_and_up_stay_apart(opened, rng, tmp_path, layout, scheme, model):
    """[E, 2] of experts in one tensor, multiplied or divided by: every value is what it was."""
    tensors = {}
    for leaf, rows, inner in (("gate_up_proj", 256, 128), ("down_proj", 128, 128)):
        codes, scale, _, _ = files.nvfp4(rng, E, rows, inner)
        top = rng.uniform(1e-5, 1e-3, (E, 2) if rows == 256 else E).astype(np.float32)
        tails = ("", "_weight_scale", "_weight_scale_2")
        if scheme == "ct":
            tails, top = ("_packed", "_scale", "_global_scale"), 1 / top
        values = files.nibbles(codes), scale, top
        tensors |= {f"{EXPERTS}.{leaf}{t}": v for t, v in zip(tails, values, strict=True)}
    source = opened(tensors, model_type=model)
    result = made(source, tmp_path / "out", layout=layout)
    assert source.weight(f"{EXPERTS}.gate_up_proj").gate_up == (
        "interleaved" if model == "gpt_oss" else "halves"
    )
    for name in source:
        new, old = result.weight(name), source.weight(name)
        assert torch.equal(new.dequantize(), old.dequantize())
        assert torch.equal(new.global_scale, old.global_scale)
        assert (new.global_divisor is None) == (old.global_divisor is None)
    for new, old in zip(result[EXPERTS].dequantize(), source[EXPERTS].dequantize(), strict=True):
        assert torch.equal(new, old)


@pytest.mark.parametrize("layout", ["linear", "deepgemm", "tiles64"])
def test_what_compressed_tensors_divide_by_is_kept(opened, rng, tmp_path, layout):
    """A reciprocal is rounded: multiplied by, some values would be others."""
    tensors, leaves = {}, ("gate_proj", "up_proj", "down_proj")
    for name in (f"{EXPERTS}.{e}.{leaf}.weight" for e in range(E) for leaf in leaves):
        codes, scale, _, _ = files.nvfp4(rng, 128, 128)
        tensors |= {f"{name}_packed": files.nibbles(codes), f"{name}_scale": scale}
        tensors[f"{name}_global_scale"] = rng.uniform(1e3, 1e5, 1).astype(np.float32)
    source = opened(tensors)
    result = made(source, tmp_path / "out", layout=layout)
    assert len(source) == 3 * E
    for name in source:
        new, old = result.weight(name), source.weight(name)
        assert torch.equal(new.dequantize(), old.dequantize())
        assert (new.global_scale, new.global_divisor) == (old.global_scale, old.global_divisor)
    assert torch.equal(result[EXPERTS].dequantize().gate_up, source[EXPERTS].dequantize().gate_up)
    mixed = {n.replace("_packed", ""): v for n, v in tensors.items() if f"{EXPERTS}.1.up" in n}
    top = f"{EXPERTS}.1.up_proj.weight_global_scale"
    mixed[f"{EXPERTS}.1.up_proj.weight_scale_2"] = 1 / mixed.pop(top)
    rest = {n: v for n, v in tensors.items() if f"{EXPERTS}.1.up" not in n}
    if layout != "linear":
        with pytest.raises(CheckpointError, match="or divides where others multiply, which layout"):
            convert(opened(rest | mixed), tmp_path / "mixed", layout=layout)


def blocks_of(rng, rows: int, high: int, wide: int) -> dict[str, np.ndarray]:
    """FP8 [rows, rows] under scales of blocks."""
    scale = rng.uniform(0.1, 1, (-(-rows // high), -(-rows // wide))).astype(np.float32)
    return {"weight": rng.standard_normal((rows, rows)).astype(E4M3), "weight_scale_inv": scale}


def test_the_blocks_of_fp8_are_known_after_a_conversion(opened, rng, tmp_path):
    """200 rows have two scales under blocks of 100 and of 128: only the configuration tells."""
    a, b = blocks_of(rng, 200, 100, 100), blocks_of(rng, 200, 50, 100)
    more = {"o.weight": rng.standard_normal((64, 64)).astype(BF16)}
    one = {f"a.{name}": value for name, value in a.items()} | more
    two = one | {f"b.{name}": value for name, value in b.items()}
    groups = {str(i): {"weights": {"block_structure": [n, 100]}} for i, n in enumerate((50, 100))}
    for i, (tensors, told) in enumerate(
        (
            (one, {"quant_method": "fp8", "weight_block_size": [100, 100]}),
            (two, {"quant_method": "compressed-tensors", "config_groups": groups}),
        )
    ):
        source = opened(tensors, told)
        result = made(source, tmp_path / f"out{i}")
        assert result["o"].fmt == "nvfp4"
        for name in tensors.keys() & {"a.weight", "b.weight"}:
            assert result[name].block == source[name].block == (100 if name[0] == "a" else 50, 100)
            assert torch.equal(result[name].dequantize(), source[name].dequantize())
    assert said(tmp_path / "out0")["weight_block_size"] == [100, 100]


def test_plain_fp8_is_still_read_beside_what_was_quantised(opened, rng, tmp_path):
    value = rng.standard_normal((64, 64))
    source = opened({"a.weight": value.astype(E4M3), "b.weight": value.astype(BF16)})
    result = made(source, tmp_path / "out")
    assert (result["a"].fmt, result["b"].fmt) == ("f8_e4m3", "nvfp4")
    assert torch.equal(result["a"].dequantize(), source["a"].dequantize())


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
def test_what_is_said_of_a_checkpoint_stays_where_nothing_is_quantised(rng, tmp_path, file):
    told = {"quant_method": "fp8", "weight_block_size": [100, 100]}
    config = {"model_type": "llama", "quantization_config": told}
    if file != "config.json":
        config = {"quantization": {"quant_algo": "FP8", "weight_block_size": [100, 100]}}
    files.folder(tmp_path / "in", {f"a.{n}": v for n, v in blocks_of(rng, 200, 100, 100).items()})
    (tmp_path / "in" / file).write_text(json.dumps(config))
    source = bs.checkpoints.open(tmp_path / "in")
    result = made(source, tmp_path / "out")
    assert json.loads((tmp_path / "out" / file).read_text()) == config
    assert torch.equal(result["a"].dequantize(), source["a"].dequantize())


def test_learned_parameters_named_like_scales_of_a_cache_are_copied(opened, rng, tmp_path):
    names = ("layers.0.attn.q_scale", "layers.0.attn.output_scale", "layers.0.attn.k_proj.k_bias")
    tensors = {name: rng.standard_normal(64).astype(BF16) for name in names}
    plain = opened(tensors | {"layers.0.attn.k_scale": np.float32(2)})
    eight = {f"a.{name}": value for name, value in blocks_of(rng, 128, 128, 128).items()}
    source = opened(tensors | eight | {"layers.0.attn.k_scale": np.float32(2)})
    assert "layers.0.attn.k_scale" not in source
    for i, ckpt in enumerate((source, plain)):
        result = made(ckpt, tmp_path / f"out{i}")
        assert result.names == ckpt.names
        for name in names:
            assert torch.equal(result[name].data, ckpt[name].data)
    assert plain["layers.0.attn.k_scale"].data == 2
    assert not [note for note in plain.notes if "ignored" in note]


def test_embeddings_heads_and_routers_of_every_name_are_copied(opened, rng, tmp_path):
    kept = ("model.embed_tokens", "transformer.wte", "transformer.wpe", "shared", "output", "head")
    kept += ("model.shared", "lm_head", "transformer.output_layer", "m.mlp.shared_expert_gate")
    kept += tuple(f"m.mlp.{leaf}" for leaf in ("gate", "gate.wg", "router.classifier"))
    others = ("m.mlp.gate_proj", "blocks.0.attention.output", "m.mlp.shared.gate_up", "m.head.q")
    value = rng.standard_normal((64, 64)).astype(BF16)
    source = opened({f"{name}.weight": value for name in (*kept, *others)})
    result = made(source, tmp_path / "out")
    assert {n for n in result if result[n].fmt == "bf16"} == {f"{name}.weight" for name in kept}


def test_weights_without_values_are_copied(opened, tmp_path):
    shapes = {"a.weight": (0, 64), "b.weight": (64, 0), f"{EXPERTS}.up_proj": (0, 64, 64)}
    shapes |= {f"{EXPERTS}.down_proj": (0, 64, 64)}
    source = opened({name: np.zeros(shape, BF16) for name, shape in shapes.items()})
    result = made(source, tmp_path / "out")
    assert {name: result.entries[name].shape for name in result} == shapes
