"""INT4 of AWQ, GPTQ, compressed-tensors and ModelOpt: (code - zero) * scale, however stored.

Codes and scales are drawn, stored as an exporter stores them, and worked out in float64 here.
"""

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
from tests.kit.checkpoint_files import BF16, nibbles, same, words


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def test_modelopt_int4_packs_two_outputs_a_byte(opened, rng):
    for lead in ((), (3,)):
        signed = rng.integers(-8, 8, (*lead, 8, 64))
        scale = rng.uniform(0.01, 0.1, (*lead, 8, 2)).astype(BF16)
        codes = (signed & 15).astype(np.uint8)
        tensors = {
            "p.weight": nibbles(codes, -2),
            "p.weight_scale": scale,
            "p.pre_quant_scale": np.ones(64, BF16),
        }
        said = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 32}
        ckpt = opened(tensors, said)
        assert ckpt.kind == "modelopt-int4"
        same(ckpt["p"].dequantize(), signed * np.repeat(scale.astype(float), 32, -1))
        assert torch.equal(ckpt["p"].packed, torch.from_numpy(nibbles(codes ^ 8)))
        assert (ckpt["p"].zero == 8).all()


def test_the_second_scale_of_w4a8_awq_is_no_part_of_values(opened, rng, tmp_path):
    """As ModelOpt 0.47.0 exports it; it is that of FP8, divided by and multiplied with again."""
    signed = rng.integers(-8, 8, (8, 64))
    scale = rng.uniform(0.01, 0.1, (8, 2)).astype(np.float32)
    tensors = {
        "p.weight": nibbles((signed & 15).astype(np.uint8), -2),
        "p.weight_scale": scale,
        "p.weight_scale_2": np.float32(5e-4),
        "p.input_scale": np.float32(0.25),
    }
    ckpt = opened(tensors, {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"})
    assert any("1 weights have a weight_scale_2 for kernels that make FP8" in n for n in ckpt.notes)
    wanted = signed * np.repeat(scale.astype(float), 32, -1)
    same(ckpt["p"].dequantize(), wanted)
    out = tmp_path / "out"
    assert CliRunner().invoke(cli, ["convert", str(ckpt.path), "-o", str(out)]).exit_code == 0
    same(bs.checkpoints.open(out)["p"].dequantize(), wanted)
    assert bs.checkpoints.open(out)["p"].input_scale == 0.25


def test_experts_in_act_order_keep_an_order_of_each(opened, rng):
    """GPTQ sorts each expert's inputs by what it was shown; gate and up are shown the same."""
    tensors, wanted = {}, {"gate": [], "up": [], "down": []}
    for e in range(3):
        orders = {"gate": rng.permutation(64) // 32, "down": rng.permutation(64) // 32}
        orders["up"] = orders["gate"]
        for role, values in wanted.items():
            codes, zero, scale, dense = files.int4(rng, 64, 64, 32, orders[role])
            base = f"m.experts.{e}.{role}_proj"
            tensors[f"{base}.qweight"] = np.ascontiguousarray(words(codes, files.STRAIGHT).T)
            tensors[f"{base}.qzeros"] = words(zero.T - 1, files.STRAIGHT)
            tensors[f"{base}.scales"] = scale.T
            tensors[f"{base}.g_idx"] = orders[role].astype(np.int32)
            values.append(dense)
    made = opened(tensors)["m"]
    assert made.gate_up.group_index.shape == (3, 64)
    gate_up, down = made.dequantize()
    same(gate_up, np.concatenate([wanted["gate"], wanted["up"]], 1))
    same(down, np.stack(wanted["down"]))
    for e in range(3):
        same(opened(tensors)["m.experts.down_proj"].rows(e * 64, e * 64 + 64), wanted["down"][e])


@pytest.mark.parametrize("zeros", ["symmetric", "packed", "signed"])
@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("group", [32, 64])
def test_compressed_tensors_int4(opened, rng, zeros, lead, group):
    """The offset of 8 is in codes and in zeros; zeros are packed along N, which may be ragged."""
    signed = rng.integers(-8, 8, (*lead, 12, 64))
    points = rng.integers(-8, 8, (*lead, 12, 64 // group))
    points = np.zeros_like(points) if zeros == "symmetric" else points
    scale = rng.uniform(0.01, 0.1, points.shape).astype(BF16)
    wanted = (signed - np.repeat(points, group, -1)) * np.repeat(scale.astype(float), group, -1)
    tensors = {
        "p.weight_packed": words(signed + 8, files.STRAIGHT),
        "p.weight_scale": scale,
        "p.weight_shape": np.array([*lead, 12, 64]),
    }
    if zeros == "packed":
        padded = np.pad(points + 8, [(0, 0)] * len(lead) + [(0, 4), (0, 0)])
        stored = words(padded.swapaxes(-1, -2), files.STRAIGHT).swapaxes(-1, -2)
        tensors["p.weight_zero_point"] = np.ascontiguousarray(stored)
    elif zeros == "signed":
        tensors["p.weight_zero_point"] = points.astype(np.int8)
    weights = {"num_bits": 4, "type": "int", "group_size": group, "strategy": "group"}
    said = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": weights}}}
    ckpt = opened(tensors, said)
    assert ckpt.kind == "compressed-tensors-int4"
    weight = ckpt["p"]
    same(weight.dequantize(), wanted)
    assert torch.equal(weight.packed, torch.from_numpy(nibbles((signed + 8).astype(np.uint8))))
    assert weight.zero.shape == points.shape


@pytest.mark.parametrize("index", ["none", "linear", "order"])
def test_compressed_tensors_int4_in_act_order(opened, rng, index):
    groups = np.arange(64) // 32 if index != "order" else rng.permutation(np.arange(64) // 32)
    codes, _, scale, _ = files.int4(rng, 8, 64, 32)
    wanted = (codes.astype(float) - 8) * scale.astype(float)[:, groups]
    stored = np.full(64, -1) if index == "none" else groups
    tensors = {
        "p.weight_packed": words(codes, files.STRAIGHT),
        "p.weight_scale": scale,
        "p.weight_g_idx": stored.astype(np.int32),
    }
    weight = opened(tensors)["p"]
    assert (weight.group_index is not None) == (index == "order")
    same(weight.dequantize(), wanted)


def test_compressed_tensors_of_other_bits_is_refused(opened):
    tensors = {
        "p.weight_packed": np.zeros((4, 16), np.int32),
        "p.weight_scale": np.ones((4, 2), BF16),
        "p.weight_shape": np.array([4, 64]),
    }
    with pytest.raises(CheckpointError, match=r"says \[4, 64\], but words of eight codes"):
        opened(tensors)["p"]
    weights = {"num_bits": 8, "type": "int", "group_size": 32}
    with pytest.raises(CheckpointError, match="has num_bits=8, as the configuration says"):
        opened(tensors, {"config_groups": {"g": {"weights": weights}}})
    zeros = {"p.weight_zero_point": np.full((4, 2), 8, np.int8)}
    ckpt = opened({**tensors, **zeros, "p.weight_shape": np.array([4, 128])})
    with pytest.raises(CheckpointError, match=r"has the value 8, but zeros of 4 bits"):
        ckpt["p"]


# AWQ and GPTQ


def awq(codes, zero, scale) -> dict[str, np.ndarray]:
    return {
        "p.qweight": words(codes.T, files.AWQ),
        "p.qzeros": words(zero.T, files.AWQ),
        "p.scales": np.ascontiguousarray(scale.T),
        "p.bias": np.ones(len(codes), scale.dtype),
    }


def gptq(codes, zero, scale) -> dict[str, np.ndarray]:
    return {
        "p.qweight": np.ascontiguousarray(words(codes, files.STRAIGHT).T),
        "p.qzeros": words(zero.T, files.STRAIGHT),
        "p.scales": np.ascontiguousarray(scale.T),
    }


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("scheme", ["awq", "gptq"])
def test_int4_groups_and_dtypes(opened, rng, scheme, group, dtype):
    size = 256 if group == -1 else group
    codes, zero, scale, _ = files.int4(rng, 24, 256, size)
    scale = scale.astype(dtype)
    groups = np.arange(256) // size
    wanted = (codes.astype(float) - zero[:, groups]) * scale.astype(float)[:, groups]
    tensors = awq(codes, zero, scale) if scheme == "awq" else gptq(codes, zero - 1, scale)
    said = {"quant_method": scheme, "bits": 4, "group_size": group, "sym": False}
    same(opened(tensors, said)["p"].dequantize(), wanted)


@pytest.mark.parametrize("said", ["gptq", "gptq_v2", "auto_round", "auto_round:auto_gptq", None])
def test_gptq_zeros_reach_from_0_to_16(opened, rng, said):
    """Stored less one in 4 bits: 15 is 16 and never 0; stored as they are by v2 and auto-round."""
    codes, _, scale, _ = files.int4(rng, 16, 64, 16)
    stored = np.arange(64).reshape(16, 4) % 16
    less_one = said in ("gptq", "auto_round:auto_gptq", None)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 16}
    if said:
        config["checkpoint_format"] = said
    if said and said.startswith("auto"):
        config = {"quant_method": "auto-round", "bits": 4, "packing_format": said}
    weight = opened(gptq(codes, stored, scale), config)["p"]
    zero = stored + less_one
    assert weight.zero.tolist() == zero.tolist()
    groups = np.arange(64) // 16
    same(weight.dequantize(), (codes - zero[:, groups]) * scale.astype(float)[:, groups])


@pytest.mark.parametrize("config", [{"sym": True}, {"zero_point": False}])
def test_zeros_that_are_left_out_are_8_if_the_configuration_says_so(opened, rng, config):
    codes, _, scale, _ = files.int4(rng, 16, 64, 32)
    tensors = gptq(codes, codes, scale)
    del tensors["p.qzeros"]
    weight = opened(tensors, {"quant_method": "gptq", **config})["p"]
    same(weight.dequantize(), (codes.astype(float) - 8) * np.repeat(scale.astype(float), 32, 1))
    with pytest.raises(CheckpointError, match=r"without 'p.qzeros'"):
        opened(tensors, {"quant_method": "gptq"})


def test_int4_that_no_rule_reads_is_refused_in_words(opened, rng):
    codes, zero, scale, _ = files.int4(rng, 16, 64, 32)
    whole = gptq(codes, zero - 1, scale)
    eight = {**whole, "p.qzeros": np.zeros((2, 4), np.int32)}
    with pytest.raises(CheckpointError, match="has bits=8, as its zeros say"):
        opened(eight)
    three = {
        "p.qweight": whole["p.qweight"],
        "p.scales": np.ones((3, 16), np.float16),
        "p.qzeros": np.zeros((3, 2), np.int32),
    }
    with pytest.raises(CheckpointError, match=r"K=64 and 3 groups.*a last group that is not full"):
        opened(three)
    with pytest.raises(CheckpointError, match="is stored for 'marlin'"):
        opened(whole, {"quant_method": "gptq", "is_marlin_format": True})


def test_dynamic_layers_of_gptq_have_groups_of_their_own(opened, rng):
    codes, zero, scale, values = files.int4(rng, 16, 64, 32)
    said = {"quant_method": "gptq", "bits": 4, "group_size": 64, "dynamic": {"+:p": {}}}
    same(opened(gptq(codes, zero - 1, scale), said)["p"].dequantize(), values)


@pytest.mark.parametrize("place", ["text_config", "compression_config", "hf_quant_config.json"])
def test_the_configuration_is_found_wherever_it_is(tmp_path, rng, place):
    codes, _, scale, _ = files.int4(rng, 16, 64, 16)
    said = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    config = {"text_config": {"quantization_config": said}}
    if place == "compression_config":
        config = {place: said}
    path = files.folder(tmp_path / "c", gptq(codes, codes[:, ::16], scale), config)
    if place == "hf_quant_config.json":
        (path / "config.json").write_text("{}")
        (path / place).write_text(json.dumps({"quantization": {"group_size": 64}}))
    with pytest.raises(CheckpointError, match="configuration says group_size 64"):
        bs.checkpoints.open(path)
