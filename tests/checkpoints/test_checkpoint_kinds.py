"""Every stored variant of the kinds gives the values that its specification's formula gives.

Codes and scales are drawn, stored as an exporter stores them, and worked out in float64 here.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale.base.errors import CheckpointError
from tests.kit import checkpoint_files as files
from tests.kit.checkpoint_files import BF16, E4M3, nibbles, same


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def nvfp4_values(codes, scale, top):
    effective = scale.astype(np.float32) * np.float32(top)
    return files.E2M1[codes] * np.repeat(effective.astype(np.float64), 16, -1)


# ModelOpt, and those who store alike


@pytest.mark.parametrize("stored", ["U8", "I8", "F4"])
@pytest.mark.parametrize("scales", ["F8_E4M3", "U8"])
@pytest.mark.parametrize("top_shape", [(), (1,), (1, 1, 1)])
def test_nvfp4_however_its_bytes_are_called(opened, rng, stored, scales, top_shape):
    """A scale of U8 is E4M3 where a global scale is beside it; it may be [1, N, K / 16]."""
    codes, scale, top, values = files.nvfp4(rng, 8, 64)
    packed = nibbles(codes)
    tensors = {
        "p.weight": {"U8": packed, "I8": packed.view(np.int8), "F4": packed.view(files.F4)}[stored],
        "p.weight_scale": scale if scales == "F8_E4M3" else scale.view(np.uint8)[None],
        "p.weight_scale_2": np.full(top_shape, top, np.float32),
        "p.bias": np.ones(8, BF16),
    }
    ckpt = opened(tensors, {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"})
    assert ckpt.kind == "modelopt-nvfp4"
    weight = ckpt["p"]
    same(weight.dequantize(), values)
    assert (weight.packed.dtype, weight.block_scale.dtype) == (torch.uint8, torch.float8_e4m3fn)
    assert ckpt["p.bias"].data.tolist() == [1] * 8


def test_w4a8_nvfp4_fp8_multiplies_as_nvfp4_does(opened, rng):
    """Its global scale is amax / 448, so block scales stay below 448 / 6; the formula is one."""
    codes, _, _, _ = files.nvfp4(rng, 8, 64)
    scale = rng.uniform(1, 74, (8, 4)).astype(E4M3)
    top = np.float32(3.5 / 448)
    tensors = {"p.weight": nibbles(codes), "p.weight_scale": scale, "p.weight_scale_2": top}
    same(opened(tensors)["p"].dequantize(), nvfp4_values(codes, scale, top))


def test_nvfp4_awq_keeps_its_smoothing_apart(opened, rng):
    codes, scale, top, values = files.nvfp4(rng, 8, 64)
    smooth = rng.uniform(0.5, 2, 64).astype(BF16)
    tensors = {
        "p.weight": nibbles(codes),
        "p.weight_scale": scale,
        "p.weight_scale_2": top,
        "p.pre_quant_scale": smooth,
    }
    ckpt = opened(tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"})
    same(ckpt["p"].dequantize(), values)
    np.testing.assert_array_equal(ckpt["p"].pre_quant_scale.float(), smooth.astype(np.float32))
    assert any("1 weights have a pre_quant_scale" in note for note in ckpt.notes)
    with pytest.raises(CheckpointError, match=r"must have 64 values, one of each input"):
        opened({**tensors, "p.pre_quant_scale": smooth[:32]})["p"]


def test_a_low_rank_part_is_noted_and_refused(opened, rng):
    codes, scale, top, _ = files.nvfp4(rng, 8, 64)
    tensors = {"p.weight": nibbles(codes), "p.weight_scale": scale, "p.weight_scale_2": top}
    ckpt = opened({**tensors, "p.svdquant_lora_a": np.ones((2, 64), BF16)})
    assert any("1 weights have a low-rank part" in note for note in ckpt.notes)
    with pytest.raises(CheckpointError, match="has a low-rank part"):
        ckpt["p"]


@pytest.mark.parametrize("dtype", [np.uint8, "float8_e8m0fnu"])
@pytest.mark.parametrize("stored", [np.uint8, np.int8])
@pytest.mark.parametrize("name", ["weight_scale", "scale"])
def test_mxfp4_in_every_dtype(opened, rng, dtype, stored, name):
    codes, scale, values = files.mxfp4(rng, 8, 64)
    if name == "scale":
        dtype = "float8_e8m0fnu"
    tensors = {"p.weight": nibbles(codes).view(stored), f"p.{name}": scale.view(dtype)}
    weight = opened(tensors, {"quant_method": "modelopt", "quant_algo": "MXFP4"})["p"]
    assert weight.fmt == "mxfp4"
    same(weight.dequantize(), values)


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 1, 1), (), (1,)])
@pytest.mark.parametrize("second", [False, True])
def test_stacked_experts_of_modelopt_in_every_shape_of_global_scales(opened, rng, shape, second):
    codes, scale, _, _ = files.nvfp4(rng, 3, 8, 32)
    tops = rng.uniform(1e-5, 1e-3, shape).astype(np.float32)
    values = nvfp4_values(codes, scale, np.broadcast_to(tops.reshape(-1, 1, 1), (3, 1, 1)))
    name = "model.language_model.layers.1.feed_forward.experts.down_proj"
    tensors = {
        name: nibbles(codes.swapaxes(1, 2), 1) if second else nibbles(codes),
        f"{name}_weight_scale": np.ascontiguousarray(scale.swapaxes(1, 2)) if second else scale,
        f"{name}_weight_scale_2": tops,
    }
    weight = opened(tensors)[name]
    same(weight.dequantize(), values)
    same(weight.rows(5, 19), values.reshape(-1, 32)[5:19])


def test_mixed_precision_with_kv_scales_of_every_name(opened, rng):
    codes, scale, top, values = files.nvfp4(rng, 8, 64)
    eight = rng.standard_normal((8, 64)).astype(E4M3)
    kv = ("k_proj.k_scale", "v_proj.v_scale", "k_proj.output_scale", "attn.k_scale", "attn.v_scale")
    more = ("attn.q_scale", "attn.kv_scale", "attn.prob_output_scale", "k_proj.k_bias")
    tensors = {
        "a.weight": nibbles(codes),
        "a.weight_scale": scale,
        "a.weight_scale_2": top,
        "b.weight": eight,
        "b.weight_scale": np.float32(0.125),
        "b.input_scale": np.ones(1, np.float32),
        "c.weight": np.ones((2, 2), BF16),
        "c.input_scale": np.float32(1),  # left over of a layer in BF16
        **{f"l.self_attn.{name}": np.float32(1) for name in (*kv, *more)},
    }
    layers = {"a": {"quant_algo": "NVFP4", "group_size": 16}, "b": {"quant_algo": "FP8"}}
    said = {"quant_algo": "MIXED_PRECISION", "group_size": 99, "quantized_layers": layers}
    ckpt = opened(tensors, {"quant_method": "modelopt", **said})
    assert ckpt.names == ["a.weight", "b.weight", "c.input_scale", "c.weight"]
    assert any("9 scales of an FP8 KV cache are ignored" in note for note in ckpt.notes)
    same(ckpt["a"].dequantize(), values)
    same(ckpt["b"].dequantize(), eight.astype(float) * 0.125)


# FP8


def blocks(rng, *shape):
    values = rng.standard_normal(shape).astype(E4M3)
    high, wide = -(-shape[-2] // 128), -(-shape[-1] // 128)
    scale = rng.uniform(0.1, 1, (*shape[:-2], high, wide)).astype(np.float32)
    full = np.repeat(np.repeat(scale, 128, -2), 128, -1)[..., : shape[-2], : shape[-1]]
    return values, scale, values.astype(np.float32) * full


@pytest.mark.parametrize("shape", [(130, 200), (2, 130, 128)])
def test_fp8_in_blocks_of_deepseek(opened, rng, shape):
    values, scale, wanted = blocks(rng, *shape)
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    ckpt = opened({"p.weight": values, "p.weight_scale_inv": scale}, said)
    assert ckpt.kind == "fp8"
    np.testing.assert_array_equal(ckpt["p"].dequantize(), wanted)
    named = {"p.weight": values, "p.weight_scale": scale[..., :, None, :, None]}
    np.testing.assert_array_equal(opened(named)["p"].dequantize(), wanted)


def test_fp8_in_blocks_that_the_configuration_names(opened, rng):
    values = rng.standard_normal((6, 8)).astype(E4M3)
    scale = rng.uniform(0.1, 1, (3, 2)).astype(BF16)
    wanted = values.astype(np.float32) * np.repeat(np.repeat(scale, 2, 0), 4, 1)
    group = {"weights": {"num_bits": 8, "type": "float", "block_structure": [2, 4]}}
    said = {"quant_method": "compressed-tensors", "config_groups": {"g": group}}
    ckpt = opened({"p.weight": values, "p.weight_scale": scale}, said)
    assert ckpt.kind == "compressed-tensors-fp8"
    np.testing.assert_array_equal(ckpt["p"].dequantize(), wanted.astype(np.float32))


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_fp8_of_each_row_and_mxfp8(opened, rng, shape):
    values = rng.standard_normal((6, 64)).astype("float8_e5m2")
    scale = rng.uniform(0.1, 1, shape).astype(np.float32)
    wanted = values.astype(np.float32) * scale.reshape(6, 1)
    tensors = {"p.weight": values, "p.weight_scale": scale}
    np.testing.assert_array_equal(opened(tensors)["p"].dequantize(), wanted)
    powers = rng.integers(120, 130, (6, 2)).astype(np.uint8)
    wanted = values.astype(float) * np.repeat(2.0 ** (powers.astype(float) - 127), 32, 1)
    same(opened({"p.weight": values, "p.weight_scale": powers})["p"].dequantize(), wanted)


def test_fp8_without_its_scale_is_refused_where_it_is_said_to_be_quantised(opened):
    tensors = {"p.weight": np.ones((4, 4), E4M3)}
    assert opened(tensors)["p"].fmt == "f8_e4m3"
    with pytest.raises(CheckpointError, match="has values of F8_E4M3, but no scales"):
        opened(tensors, {"quant_method": "fp8"})


# compressed-tensors


@pytest.mark.parametrize("shape", [(), (1,)])
def test_compressed_tensors_mixed_formats_with_extras(opened, rng, shape):
    codes, scale, _, _ = files.nvfp4(rng, 8, 64)
    mx_codes, mx_scale, mx_values = files.mxfp4(rng, 8, 64)
    divisor = np.full(shape, 12345.5, np.float32)
    eight = rng.standard_normal((8, 4)).astype(E4M3)
    rows = rng.uniform(0.1, 1, (8, 1)).astype(BF16)
    tensors = {
        "m.0.weight_packed": nibbles(codes),
        "m.0.weight_scale": scale,
        "m.0.weight_global_scale": divisor,
        "m.0.input_global_scale": divisor,
        "m.1.weight_packed": nibbles(mx_codes),
        "m.1.weight_scale": mx_scale,
        "m.2.weight": eight,
        "m.2.weight_scale": rows,
        "m.self_attn.k_scale": np.ones(1, BF16),
        "m.self_attn.v_scale": np.ones(1, BF16),
    }
    groups = {
        "group_0": {"format": "nvfp4-pack-quantized", "weights": {"num_bits": 4, "group_size": 16}},
        "group_1": {"format": "mxfp4-pack-quantized", "weights": {"num_bits": 4, "group_size": 32}},
        "group_2": {"format": "float-quantized", "weights": {"num_bits": 8, "group_size": None}},
    }
    said = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    kv = {"num_bits": 8, "type": "float"}
    ckpt = opened(tensors, {**said, "config_groups": groups, "kv_cache_scheme": kv})
    assert ckpt.kind == "compressed-tensors-mixed"
    effective = scale.astype(np.float32) / np.float32(12345.5)
    same(ckpt["m.0"].dequantize(), files.E2M1[codes] * np.repeat(effective, 16, 1).astype(float))
    same(ckpt["m.1"].dequantize(), mx_values)
    same(ckpt["m.2"].dequantize(), eight.astype(float) * rows.astype(float))


# what is no 4-bit checkpoint of these kinds


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        (
            {"p.weight": np.zeros((4, 64), np.int8), "p.weight_scale": np.ones((4, 1), "f4")},
            "a weight of integers of 8 bits, which is not supported",
        ),
        (
            {"p.weight": np.zeros((64, 1), np.uint8), "p.weight.absmax": np.ones(2, "f4")},
            "a weight of bitsandbytes",
        ),
        (
            {"p.weight": np.zeros((4, 64), np.int8), "p.SCB": np.ones(4, "f4")},
            r"a weight of bitsandbytes \(INT8\)",
        ),
        (
            {"p.weight": np.zeros((4, 8), np.uint8), "p.weight_scale": np.ones((4, 1), E4M3)}
            | {"p.weight_scale_2": np.float32(1), "p.comfy_quant": np.zeros(20, np.uint8)},
            "a weight of ComfyUI, which orders block scales",
        ),
        (
            {"p.weight": np.ones((4, 64), E4M3), "p.weight_scale": np.full((4, 2), 127, np.uint8)}
            | {"p.comfy_quant": np.zeros(20, np.uint8)},
            "a weight of ComfyUI, which orders block scales",
        ),
        (
            {"p.weight_packed": np.zeros((4, 8), np.uint8), "p.weight_scale": np.ones((4, 1), E4M3)}
            | {"p.weight_global_scale": np.ones(1, "f4"), "p.weight_zero_point": np.ones(1, "i1")},
            "codes of E2M1 have no zero points",
        ),
        (
            {"p.weight": np.zeros((4, 8), np.int32), "p.weight_scale": np.ones((4, 1), "f4")},
            "a weight I32 with scales, which is not supported",
        ),
        (
            {"p.w": np.zeros((4, 8), np.uint8).view(files.F4)},
            "has values of F4, but no scales",
        ),
        (
            {"p.weight": np.zeros((4, 16), np.uint8), "p.weight_scale_2": np.float32(1)}
            | {"p.weight_scale": np.zeros((4, 2), "float8_e8m0fnu")},
            "E8M0 block scales and a global scale",
        ),
        (
            {"p.weight": np.zeros((4, 8), np.uint8), "p.weight_scale": np.zeros((4, 1), E4M3)},
            "U8 weight without 'p.weight_scale_2'",
        ),
    ],
)
def test_other_weights_are_refused_in_words(opened, tensors, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        opened(tensors)


def test_integers_are_refused_where_the_configuration_names_bitsandbytes(opened):
    tensors = {"p.weight": np.zeros((4, 64), np.int8)}
    assert opened(tensors)["p"].fmt == "i8"
    with pytest.raises(CheckpointError, match=r"a weight of bitsandbytes \(INT8\)"):
        opened(tensors, {"quant_method": "bitsandbytes", "load_in_8bit": True})


def test_fp8_of_comfyui_with_one_scale_is_read(opened, rng):
    values = rng.standard_normal((4, 64)).astype(E4M3)
    tensors = {"p.weight": values, "p.weight_scale": np.float32(0.5)}
    weight = opened(tensors | {"p.comfy_quant": np.zeros(20, np.uint8)})["p"]
    same(weight.dequantize(), values.astype(float) / 2)


# names and files


def test_names_may_leave_out_what_compile_puts_into_them(opened, rng):
    codes, scale, top, values = files.nvfp4(rng, 8, 64)
    base = "model._orig_mod.language_model.layers.0.self_attn.q_proj."
    tensors = {
        f"{base}weight": nibbles(codes),
        f"{base}weight_scale": scale,
        f"{base}weight_scale_2": top,
    }
    ckpt = opened(tensors)
    assert ckpt.names == [f"{base}weight"]
    for name in (base + "weight", "model.language_model.layers.0.self_attn.q_proj"):
        same(ckpt[name].dequantize(), values)


def test_a_model_may_have_scales_of_its_own(opened):
    assert opened({"m.layer_scales": np.ones(4, BF16)}).names == ["m.layer_scales"]
    for name, value in (("m.layer_scales", np.ones(4, np.uint8)), ("p.scales", np.ones(4, BF16))):
        with pytest.raises(CheckpointError, match="belongs to a quantised weight"):
            opened({name: value})


def test_a_tied_head_is_noted(opened):
    tensors = {"model.embed_tokens.weight": np.ones((4, 4), BF16)}
    ckpt = opened(tensors, tie_word_embeddings=True)
    assert ckpt.notes == ["lm_head is not stored: it is the embeddings' weight"]
    assert "lm_head" not in ckpt


def test_files_beside_the_shards_are_left_out_with_a_note(tmp_path):
    parts = {f"l.{i}.weight": np.full((2, 2), i, np.float32) for i in range(2)}
    for i, (name, value) in enumerate(parts.items()):
        files.save(tmp_path / f"model-0000{i + 1}-of-00002.safetensors", {name: value})
    files.save(tmp_path / "consolidated.safetensors", {"layers.0.w": np.ones(2, "f4"), **parts})
    ckpt = bs.checkpoints.open(tmp_path)
    assert ckpt.names == ["l.0.weight", "l.1.weight"]
    assert "1 files are left out, since others are numbered: consolidated.safetensors" in ckpt.notes
    weight_map = {name: f"model-0000{i + 1}-of-00002.safetensors" for i, name in enumerate(parts)}
    index = json.dumps({"weight_map": weight_map})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    ckpt = bs.checkpoints.open(tmp_path)
    assert "1 files are left out, since the index names: consolidated.safetensors" in ckpt.notes
    alone = bs.checkpoints.open(tmp_path / "consolidated.safetensors")
    assert len(alone) == 3


@pytest.mark.parametrize("name", ["weights.safetensors", "consolidated.safetensors"])
def test_one_file_of_any_name_is_a_checkpoint(tmp_path, name):
    files.save(tmp_path / name, {"x": np.ones(2, "f4")})
    assert bs.checkpoints.open(tmp_path).names == ["x"]
