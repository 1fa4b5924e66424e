"""Checkpoints of every kind dequantise to what was stored: real exports, and synthetic ones."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import blockscale as bs
from blockscale.base.errors import CheckpointError
from blockscale.cli.command import cli
from tests.kit import checkpoint_files as files
from tests.kit.checkpoint_files import nibbles
from tests.kit.paths import CHECKPOINTS as GOLDEN

AWQ = [0, 2, 4, 6, 1, 3, 5, 7]
STRAIGHT = list(range(8))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def same(found: torch.Tensor, wanted: np.ndarray) -> None:
    """Equal to the float64 values rounded once to float32; the shapes agree."""
    assert found.dtype == torch.float32
    np.testing.assert_array_equal(found.numpy(), wanted.astype(np.float32))


@pytest.mark.parametrize(
    ("name", "kind", "weights"),
    [
        ("ct_llama_nvfp4", "compressed-tensors-nvfp4", 12),
        ("modelopt_qwen3moe_nvfp4_default_cfg", "modelopt-nvfp4", 24),
        ("gptoss_mxfp4", "gpt-oss-mxfp4", 20),
        ("modelopt_llama_w4a8_nvfp4_fp8", "modelopt-nvfp4", 12),
        ("modelopt_gptoss_nvfp4_fp8kv", "modelopt-nvfp4", 20),
        ("modelopt_llama4_four_over_six", "modelopt-nvfp4", 15),
        ("modelopt_qwen3moe_mixed_sharded", "modelopt-mixed", 18),
        ("modelopt_mixtral_mxfp4", "modelopt-mxfp4", 16),
        ("ct_llama_nvfp4_int4", "compressed-tensors-mixed", 12),
        ("autoawq_llama_g32", "awq-int4", 12),
        ("gptqmodel_llama_v1_act_order", "gptq-int4", 12),
    ],
)
def test_real_exports_have_their_expected_values(name, kind, weights):
    ckpt = bs.checkpoints.open(GOLDEN / name)
    assert (ckpt.kind, len(ckpt.names)) == (kind, weights)
    expected = np.load(GOLDEN / name / "expected.npz")
    quantised = {name for name, entry in ckpt.entries.items() if entry.scheme != "plain"}
    assert quantised == set(expected.files)
    for key in expected.files:
        values = expected[key]
        if values.ndim == 3:  # transformers holds [E, K, N]
            values = values.swapaxes(1, 2)
        same(ckpt[key].dequantize(), values)
        assert torch.equal(
            ckpt[key].dequantize(torch.bfloat16), torch.from_numpy(values.copy()).bfloat16()
        )


@pytest.mark.parametrize(
    "name", ["modelopt_llama_w4a8_nvfp4_fp8", "gptqmodel_llama_v1_act_order", "ct_llama_nvfp4_int4"]
)
def test_real_exports_are_converted_without_a_change_of_values(tmp_path, name):
    result = CliRunner().invoke(cli, ["convert", str(GOLDEN / name), "-o", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    ckpt = bs.checkpoints.open(tmp_path / "out")
    expected = np.load(GOLDEN / name / "expected.npz")
    for key in expected.files:
        wanted = torch.from_numpy(expected[key])
        assert torch.allclose(ckpt[key].dequantize(), wanted, rtol=1e-6, atol=0)


def test_a_low_rank_part_is_refused_by_both_of_its_names(tmp_path, rng):
    codes, scale, top, _ = files.nvfp4(rng, 8, 64)
    for lora in ("svdquant_lora_a", "weight_quantizer._svdquant_lora_a"):
        part = {f"p.{lora}": np.ones((4, 64), np.float32)}
        path = files.folder(tmp_path / lora, {**modelopt("p.", codes, scale, top), **part})
        ckpt = bs.checkpoints.open(path)
        assert ckpt.names == ["p.weight"]
        with pytest.raises(CheckpointError, match=r"low-rank part \(SVDQuant\), which is not supp"):
            ckpt["p"]


def test_the_names_that_openai_uses_give_the_same_weights():
    ours = bs.checkpoints.open(GOLDEN / "gptoss_mxfp4")
    original = bs.checkpoints.open(GOLDEN / "gptoss_mxfp4" / "original_names.safetensors")
    for new, old in (("gate_up_proj", "mlp1_weight"), ("down_proj", "mlp2_weight")):
        a, b = ours[f"model.layers.0.mlp.experts.{new}"], original[f"block.0.mlp.{old}"]
        assert torch.equal(a.packed, b.packed)
        assert torch.equal(a.block_scale, b.block_scale)
        assert a.gate_up == b.gate_up == ("interleaved" if "1" in old else None)


def test_experts_stored_one_by_one_come_stacked():
    ckpt = bs.checkpoints.open(GOLDEN / "modelopt_qwen3moe_nvfp4_default_cfg")
    weight = ckpt["model.layers.0.mlp.experts.gate_proj"]
    assert weight.shape == (4, 32, 64)
    assert weight.global_scale.shape == (4,)
    assert len(set(weight.global_scale.tolist())) == 4
    for e in range(4):
        one = ckpt[f"model.layers.0.mlp.experts.{e}.gate_proj"]
        assert torch.equal(weight.dequantize()[e], one.dequantize())


def modelopt(base: str, codes, scale, top, axis: int = -1) -> dict[str, np.ndarray]:
    return {
        f"{base}weight": nibbles(codes, axis),
        f"{base}weight_scale": scale,
        f"{base}weight_scale_2": np.asarray(top, np.float32),
    }


def test_modelopt_dense_with_inputs_kv_scales_and_plain_tensors(tmp_path, rng):
    codes, scale, top, values = files.nvfp4(rng, 8, 64)
    norm = rng.standard_normal(64).astype(np.float32)
    tensors = {
        **modelopt("m.q_proj.", codes, scale, top),
        "m.q_proj.input_scale": np.float32(0.25),
        "m.q_proj.pre_quant_scale": np.ones(64, np.float16),
        "m.k_proj.k_scale": np.float32(1),
        "m.v_proj.v_scale": np.float32(1),
        "m.norm.weight": norm,
        "ids": np.arange(3, dtype=np.int64),
    }
    config = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    path = files.folder(tmp_path / "c", {k: np.asarray(v) for k, v in tensors.items()})
    (path / "hf_quant_config.json").write_text(json.dumps(config))
    ckpt = bs.checkpoints.open(path)
    assert ckpt.names == ["ids", "m.norm.weight", "m.q_proj.weight"]
    assert any("2 scales of an FP8 KV cache are ignored" in note for note in ckpt.notes)
    weight = ckpt["m.q_proj"]
    same(weight.dequantize(), values)
    assert weight.input_scale == 0.25
    assert weight.pre_quant_scale.shape == (64,)
    assert weight.global_scale.item() == top
    assert torch.equal(weight.packed, torch.from_numpy(nibbles(codes)))
    same(ckpt["m.norm.weight"].data, norm)
    assert (ckpt["ids"].fmt, ckpt["ids"].data.tolist()) == ("i64", [0, 1, 2])


@pytest.mark.parametrize("tops", ["one", "each"])
def test_modelopt_stacked_experts_with_k_last(tmp_path, rng, tops):
    codes, scale, top, values = files.nvfp4(rng, 3, 8, 32)
    stored = np.full((3, 1), top) if tops == "each" else top
    ckpt = bs.checkpoints.open(
        files.folder(tmp_path / "c", modelopt("experts.w.", codes, scale, stored))
    )
    same(ckpt["experts.w"].dequantize(), values)


@pytest.mark.parametrize(("model", "order"), [("llama4", "halves"), ("gpt_oss", "interleaved")])
def test_modelopt_fused_experts_with_k_second(tmp_path, rng, model, order):
    codes, scale, top, values = files.nvfp4(rng, 3, 8, 32)  # [E, N, K]
    name = "model.layers.1.feed_forward.experts.gate_up_proj"
    tensors = {
        name: nibbles(codes.swapaxes(1, 2), 1),
        f"{name}_weight_scale": scale.swapaxes(1, 2),
        f"{name}_weight_scale_2": np.asarray(top),
        f"{name}_input_scale": np.asarray(top),
    }
    ckpt = bs.checkpoints.open(files.folder(tmp_path / "c", tensors, {"model_type": model}))
    weight = ckpt[name]
    assert weight.shape == (3, 8, 32)
    assert weight.gate_up == order
    assert torch.equal(weight.packed, torch.from_numpy(nibbles(codes)))
    same(weight.dequantize(), values)


def test_modelopt_four_over_six_and_w4a16_need_no_marker(tmp_path, rng):
    """Scales of up to 384 under a global scale of amax / (6 * 256): nothing but bytes."""
    codes, _, top, _ = files.nvfp4(rng, 8, 64)
    scale = rng.choice([256.0, 384.0], (8, 4)).astype(files.E4M3)
    ckpt = bs.checkpoints.open(files.folder(tmp_path / "c", modelopt("p.", codes, scale, top)))
    effective = scale.astype(np.float32) * top
    same(ckpt["p"].dequantize(), files.E2M1[codes] * np.repeat(effective, 16, 1).astype(float))
    assert any("W4A16" in note for note in ckpt.notes)


def test_modelopt_mxfp4_and_fp8_in_a_mixed_checkpoint(tmp_path, rng):
    codes, scale, values = files.mxfp4(rng, 8, 64)
    eight = rng.standard_normal((4, 6)).astype(files.E4M3)
    tensors = {
        "a.weight": nibbles(codes),
        "a.weight_scale": scale,
        "b.weight": eight,
        "b.weight_scale": np.asarray(0.5, np.float32),
    }
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}}
    ckpt = bs.checkpoints.open(files.folder(tmp_path / "c", tensors, config))
    assert ckpt.kind == "modelopt-mixed"
    same(ckpt["a"].dequantize(), values)
    same(ckpt["b"].dequantize(), eight.astype(float) * 0.5)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("second", [False, True])
def test_nvfp4_scales_of_more_values_are_read_for_each_16(tmp_path, rng, group, second):
    """W4A8_NVFP4_FP8 and some W4A16_NVFP4 of ModelOpt have 32."""
    codes = rng.integers(0, 16, (3, 8, 256)).astype(np.uint8)  # [E, N, K]
    scale = rng.uniform(0.1, 400, (3, 8, 256 // group)).astype(files.E4M3)
    top = np.float32(3e-4)
    swap = (lambda a: a.swapaxes(1, 2)) if second else (lambda a: a)
    name = "m.experts.down_proj"
    tensors = {
        name: nibbles(swap(codes), 1 if second else -1),
        f"{name}_weight_scale": swap(scale),
        f"{name}_weight_scale_2": np.asarray(top),
    }
    ckpt = bs.checkpoints.open(files.folder(tmp_path / "c", tensors))
    assert any("1 weights have scales of more than 16 values" in note for note in ckpt.notes)
    weight = ckpt[name]
    assert weight.group_size == 16
    assert weight.block_scale.shape == (3, 8, 16)
    effective = np.repeat(scale.astype(np.float32) * top, group, -1)
    same(weight.dequantize(), files.E2M1[codes] * effective.astype(float))


@pytest.mark.parametrize("experts", [(), (3,)])
def test_compressed_tensors_nvfp4_divides(tmp_path, rng, experts):
    codes, scale, _, _ = files.nvfp4(rng, *experts, 8, 64)
    divisor = rng.uniform(1e3, 1e5, (*experts, 1)).astype(np.float32)
    tensors = {
        "p.weight_packed": nibbles(codes),
        "p.weight_scale": scale,
        "p.weight_global_scale": divisor,
        "p.input_global_scale": np.full(1, 8, np.float32),
    }
    weight = bs.checkpoints.open(files.folder(tmp_path / "c", tensors))["p.weight"]
    effective = scale.astype(np.float32) / divisor.reshape(*experts, 1, 1)
    same(weight.dequantize(), files.E2M1[codes] * np.repeat(effective, 16, -1).astype(float))
    assert weight.global_scale.shape == experts
    np.testing.assert_array_equal(weight.global_scale.flatten(), 1 / divisor.flatten())
    assert weight.input_scale == 0.125


def test_compressed_tensors_mxfp4(tmp_path, rng):
    codes, scale, values = files.mxfp4(rng, 8, 64)
    tensors = {"p.weight_packed": nibbles(codes), "p.weight_scale": scale}
    ckpt = bs.checkpoints.open(files.folder(tmp_path / "c", tensors))
    assert ckpt.kind == "compressed-tensors-mxfp4"
    assert ckpt["p"].global_scale is None
    same(ckpt["p"].dequantize(), values)


def test_e8m0_reaches_from_the_smallest_power_to_nan(tmp_path):
    codes = np.full((1, 128), 2, np.uint8)
    scale = np.array([[0, 1, 254, 255]], np.uint8)
    tensors = {"p.weight_packed": nibbles(codes), "p.weight_scale": scale}
    values = bs.checkpoints.open(files.folder(tmp_path / "c", tensors))["p"].dequantize()
    assert values[0, ::32].tolist()[:3] == [2.0**-127, 2.0**-126, 2.0**127]
    assert values[0, 96:].isnan().all()


@pytest.mark.parametrize("out", [24, 520])
def test_awq(tmp_path, rng, out):
    codes, zero, scale, values = files.int4(rng, out, 64, 32)
    tensors = {
        "p.qweight": files.words(codes.T, AWQ),
        "p.qzeros": files.words(zero.T, AWQ),
        "p.scales": scale.T,
    }
    config = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}}
    ckpt = bs.checkpoints.open(files.folder(tmp_path / "c", tensors, config))
    assert ckpt.kind == "awq-int4"
    weight = ckpt["p"]
    assert torch.equal(weight.packed, torch.from_numpy(nibbles(codes)))
    assert torch.equal(weight.zero, torch.from_numpy(zero))
    same(weight.dequantize(), values)


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq(tmp_path, rng, version, act_order):
    index = np.arange(64) // 32
    if act_order:
        index = rng.permutation(index)
    codes, zero, scale, values = files.int4(rng, 24, 64, 32, index)
    stored = zero - (version == "gptq")
    tensors = {
        "p.qweight": np.ascontiguousarray(files.words(codes, STRAIGHT).T),
        "p.qzeros": files.words(stored.T, STRAIGHT),
        "p.scales": scale.T,
        "p.g_idx": index.astype(np.int32),
    }
    path = files.folder(tmp_path / "c", tensors)
    config = {"bits": 4, "group_size": 32, "desc_act": act_order, "checkpoint_format": version}
    (path / "quantize_config.json").write_text(json.dumps(config))
    weight = bs.checkpoints.open(path)["p"]
    assert (weight.group_index is not None) == act_order
    assert torch.equal(weight.packed, torch.from_numpy(nibbles(codes)))
    same(weight.dequantize(), values)


def test_plain_shards_with_an_index_and_layers_in_natural_order(tmp_path, rng):
    parts = [
        {f"l.{i}.weight": rng.standard_normal((3, i + 1)).astype(np.float16) for i in group}
        for group in ((10, 2), (1,))
    ]
    names = [f"model-0000{s + 1}-of-00002.safetensors" for s in range(2)]
    for name, part in zip(names, parts, strict=True):
        files.save(tmp_path / name, part)
    assert bs.checkpoints.open(tmp_path).names == ["l.1.weight", "l.2.weight", "l.10.weight"]
    weight_map = {k: n for n, part in zip(names, parts, strict=True) for k in part}
    index = {"weight_map": weight_map, "metadata": {"total_size": 1}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    ckpt = bs.checkpoints.open(tmp_path)
    assert (ckpt.kind, len(ckpt.shards)) == ("plain", 2)
    for part in parts:
        for name, value in part.items():
            assert ckpt[name].fmt == "f16"
            np.testing.assert_array_equal(ckpt[name].data.numpy(), value)


def test_a_large_tensor_is_mapped_and_writing_to_it_changes_no_file(tmp_path):
    value = np.arange(1 << 19, dtype=np.float32)
    path = files.save(tmp_path / "a.safetensors", {"x": value, "odd": np.ones(1, np.uint8)})
    before = path.read_bytes()
    data = bs.checkpoints.open(path)["x"].data
    data.zero_()
    assert path.read_bytes() == before
    assert torch.equal(bs.checkpoints.open(path)["x"].data, torch.from_numpy(value))


def test_a_header_of_any_length_gives_aligned_tensors(tmp_path):
    for pad in range(4):
        entries = json.dumps(files.header({"x": np.arange(5, dtype=np.float32)})) + " " * pad
        path = tmp_path / f"{pad}.safetensors"
        path.write_bytes(files.file_bytes(entries.encode(), np.arange(5, dtype="<f4").tobytes()))
        assert bs.checkpoints.open(path)["x"].data.tolist() == [0, 1, 2, 3, 4]


def test_unknown_names_say_what_there_is():
    ckpt = bs.checkpoints.open(GOLDEN / "gptoss_mxfp4")
    with pytest.raises(KeyError, match=r"but 9 below it; ask for one, e\.g\. "):
        ckpt["model.layers.0.self_attn"]
    with pytest.raises(CheckpointError, match=r"^/.* has no weight .*; did you mean 'model.norm"):
        ckpt["model.norm.wieght"]
    with pytest.raises(KeyError, match=r"did you mean 'model.norm.weight'"):
        ckpt["model.norms.weight"]
    assert "model.norm" in ckpt
    assert "model" not in ckpt


def test_stacked_experts_must_be_alike(tmp_path, rng):
    tensors = {}
    for e, k in enumerate((32, 64)):
        codes, scale, top, _ = files.nvfp4(rng, 8, k)
        tensors |= modelopt(f"m.experts.{e}.w1.", codes, scale, top)
    ckpt = bs.checkpoints.open(files.folder(tmp_path / "c", tensors))
    with pytest.raises(CheckpointError, match=r"expert 1 has shape \(8, 64\), but expert 0"):
        ckpt["m.experts.w1"]
