"""The experts of a module are one object, however they are stored; values against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale.base.errors import CheckpointError
from blockscale.checkpoints.experts.stack import turned
from blockscale.checkpoints.files import safetensors
from blockscale.checkpoints.weight import ROWS, Weight
from tests.checkpoints.test_checkpoint_layouts import EXPERTS
from tests.checkpoints.test_checkpoint_layouts import experts as stored_experts
from tests.checkpoints.test_checkpoints import GOLDEN
from tests.kit import checkpoint_files as files
from tests.kit.checkpoint_files import BF16, E4M3, fp4, nibbles, same, words

E, H, I = 3, 64, 32  # noqa: E741 - experts, hidden, intermediate, as everywhere


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


NAMES = [
    ("model.layers.0.mlp.experts.{e}.{p}", ("gate_proj", "up_proj", "down_proj")),
    ("model.language_model.layers.0.block_sparse_moe.experts.{e}.{p}", ("w1", "w3", "w2")),
    ("model.layers.0.mlp.experts.{p}.{e}", ("gate_proj", "up_proj", "down_proj")),
    ("_orig_mod.layers.0.ffn.experts.{e}.{p}", ("w1", "w3", "w2")),
]


@pytest.mark.parametrize(("pattern", "leaves"), NAMES)
@pytest.mark.parametrize("shared", [False, True])
def test_nvfp4_experts_one_by_one(opened, rng, pattern, leaves, shared):
    """Gate comes first; global scales are [E] where gate and up share them, else [E, 2]."""
    tensors, values, tops = {}, {}, {}
    for e in range(E):
        for p, shape in zip(leaves, ((I, H), (I, H), (H, I)), strict=True):
            parts, dense = fp4(rng, *shape)
            if shared and p == leaves[1]:
                first = tops[e, leaves[0]]
                dense = dense / parts["weight_scale_2"] * first
                scale = parts["weight_scale"].astype(np.float32) * first
                codes = np.stack([parts["weight"] & 15, parts["weight"] >> 4], -1).reshape(I, H)
                dense = files.E2M1[codes] * np.repeat(scale.astype(float), 16, 1)
                parts["weight_scale_2"] = first
            base = pattern.format(e=e, p=p)
            tensors |= {f"{base}.{name}": value for name, value in parts.items()}
            values[e, p], tops[e, p] = dense, parts["weight_scale_2"]
    ckpt = opened(tensors)
    module = pattern[: pattern.index(".experts") + len(".experts")]
    for name in (module, module.removesuffix(".experts")):
        assert name in ckpt
        found = ckpt[name]
        assert (found.name, found.fmt, found.gated) == (module, "nvfp4", True)
        assert found.shape == ((E, 2 * I, H), (E, H, I))
        dense = found.dequantize()
        gate, up, down = leaves
        wanted = [np.concatenate([values[e, gate], values[e, up]]) for e in range(E)]
        same(dense.gate_up, np.stack(wanted))
        same(dense.down, np.stack([values[e, down] for e in range(E)]))
    wanted = np.array([[tops[e, p] for p in (gate, up)] for e in range(E)])
    np.testing.assert_array_equal(found.global_scale.gate_up, wanted[:, 0] if shared else wanted)
    assert found.global_scale.down.shape == (E,)
    assert found.gate_up.gate_up == "halves"
    assert ckpt.modules == [module]


def test_the_golden_qwen3_moe_is_its_expectation(opened):
    ckpt = bs.checkpoints.open(GOLDEN / "modelopt_qwen3moe_nvfp4_default_cfg")
    expected = np.load(GOLDEN / "modelopt_qwen3moe_nvfp4_default_cfg" / "expected.npz")
    found = ckpt["model.layers.0.mlp"].dequantize()
    base = "model.layers.0.mlp.experts"
    for e in range(4):
        gate, up, down = (expected[f"{base}.{e}.{p}_proj.weight"] for p in ("gate", "up", "down"))
        same(found.gate_up[e], np.concatenate([gate, up]))
        same(found.down[e], down)


@pytest.mark.parametrize("file", ["", "original_names.safetensors"])
def test_the_golden_gpt_oss_is_its_expectation_gate_first(file):
    ckpt = bs.checkpoints.open(GOLDEN / "gptoss_mxfp4" / file)
    expected = np.load(GOLDEN / "gptoss_mxfp4" / "expected.npz")
    base = "model.layers.0.mlp.experts"
    rows = expected[f"{base}.gate_up_proj"].swapaxes(1, 2)
    found = ckpt["block.0.mlp" if file else base]
    dense = found.dequantize()
    same(dense.gate_up, np.concatenate([rows[:, 0::2], rows[:, 1::2]], 1))
    same(dense.down, expected[f"{base}.down_proj"].swapaxes(1, 2))
    assert (found.fmt, found.gate_up.gate_up) == ("mxfp4", "halves")
    assert any("alternate" in note for note in found.notes)
    if not file:
        stored = ckpt[f"{base}.gate_up_proj_bias"].data
        assert torch.equal(found.gate_up_bias, torch.cat([stored[:, 0::2], stored[:, 1::2]], 1))
        assert torch.equal(found.down_bias, ckpt[f"{base}.down_proj_bias"].data)


@pytest.mark.parametrize("tops", ["one", "each", "pairs"])
@pytest.mark.parametrize("model", ["llama4", "gpt_oss"])
def test_fused_nvfp4_of_modelopt(opened, rng, model, tops):
    """[E, K / 2, N]; gpt-oss alternates gate and up, Llama-4 has them in halves."""
    name = "model.layers.1.feed_forward.experts"
    shape = {"one": (), "each": (E, 1, 1), "pairs": (E, 2)}[tops]
    top = rng.uniform(1e-5, 1e-3, shape).astype(np.float32)
    pairs = np.broadcast_to(top.reshape(E, -1) if shape else top, (E, 2))
    tensors, wanted = {}, []
    for leaf, rows, inner in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
        codes, scale, _, _ = files.nvfp4(rng, E, rows, inner)
        of_rows = np.repeat(pairs[:, :1], rows, 1)
        if leaf == "gate_up_proj":
            of_rows = np.tile(pairs, (1, I)) if model == "gpt_oss" else np.repeat(pairs, I, 1)
        effective = scale.astype(np.float32) * of_rows[..., None]
        wanted.append(files.E2M1[codes] * np.repeat(effective.astype(float), 16, -1))
        tensors |= {
            f"{name}.{leaf}": nibbles(codes.swapaxes(1, 2), 1),
            f"{name}.{leaf}_weight_scale": np.ascontiguousarray(scale.swapaxes(1, 2)),
            f"{name}.{leaf}_weight_scale_2": top if rows > H or tops != "pairs" else top[:, 0],
            f"{name}.{leaf}_input_scale": np.float32(1),
            f"{name}.{leaf}_bias": rng.standard_normal((E, rows)).astype(BF16),
        }
    if tops == "pairs":
        tensors[f"{name}.gate_up_proj_weight_scale_2"] = top
        tensors[f"{name}.down_proj_weight_scale_2"] = np.ascontiguousarray(top[:, 0])
    ckpt = opened(tensors, text_config={"model_type": model})
    found = ckpt[name]
    rows, bias = wanted[0], tensors[f"{name}.gate_up_proj_bias"].astype(np.float32)
    same(ckpt[f"{name}.gate_up_proj"].dequantize(), rows)
    if model == "gpt_oss":
        rows = np.concatenate([rows[:, 0::2], rows[:, 1::2]], 1)
        bias = np.concatenate([bias[:, 0::2], bias[:, 1::2]], 1)
    same(found.dequantize().gate_up, rows)
    same(found.dequantize().down, wanted[1])
    np.testing.assert_array_equal(found.gate_up_bias.float(), bias)
    assert found.global_scale.gate_up.shape == ((E, 2) if tops == "pairs" else (E,))


def test_compressed_tensors_experts_divide(opened, rng):
    tensors, values, divisors = {}, {}, {}
    for e in range(E):
        for p, shape in (("gate_proj", (I, H)), ("up_proj", (I, H)), ("down_proj", (H, I))):
            codes, scale, _, _ = files.nvfp4(rng, *shape)
            divisor = np.float32(rng.uniform(1e3, 1e5))
            effective = (scale.astype(np.float32) / divisor).astype(float)
            values[e, p] = files.E2M1[codes] * np.repeat(effective, 16, 1)
            divisors[e, p] = divisor
            base = f"m.mlp.experts.{e}.{p}."
            tensors |= {
                f"{base}weight_packed": nibbles(codes),
                f"{base}weight_scale": scale,
                f"{base}weight_global_scale": np.array([divisor]),
                f"{base}input_global_scale": np.array([8], np.float32),
            }
    found = opened(tensors)["m.mlp.experts"]
    for e in range(E):
        gate_up = np.concatenate([values[e, "gate_proj"], values[e, "up_proj"]])
        same(found.gate_up.dequantize()[e], gate_up)
    wanted = [[divisors[e, p] for p in ("gate_proj", "up_proj")] for e in range(E)]
    np.testing.assert_array_equal(found.gate_up.global_divisor, wanted)
    assert found.gate_up.input_scale.tolist() == [0.125] * E


@pytest.mark.parametrize("scheme", ["compressed-tensors", "awq"])
def test_int4_experts_with_zeros_and_biases(opened, rng, scheme):
    tensors, values, biases = {}, {}, {}
    for e in range(E):
        for p, (out, inner) in (("w1", (I, H)), ("w3", (I, H)), ("w2", (H, I))):
            codes, zero, scale, values[e, p] = files.int4(rng, out, inner, 32)
            base = f"m.experts.{e}.{p}."
            biases[e, p] = rng.standard_normal(out).astype(np.float16)
            tensors[f"{base}bias"] = biases[e, p]
            if scheme == "awq":
                tensors[f"{base}qweight"] = words(codes.T, files.AWQ)
                tensors[f"{base}qzeros"] = words(zero.T, files.AWQ)
                tensors[f"{base}scales"] = np.ascontiguousarray(scale.T)
            else:
                stored = words(zero.T, files.STRAIGHT).T
                tensors[f"{base}weight_packed"] = words(codes, files.STRAIGHT)
                tensors[f"{base}weight_zero_point"] = np.ascontiguousarray(stored)
                tensors[f"{base}weight_scale"] = scale
    found = opened(tensors)["m"]
    assert (found.fmt, found.zero.gate_up.shape) == ("int4", (E, 2 * I, 2))
    for e in range(E):
        same(found.dequantize().gate_up[e], np.concatenate([values[e, "w1"], values[e, "w3"]]))
        same(found.dequantize().down[e], values[e, "w2"])
        bias = np.concatenate([biases[e, "w1"], biases[e, "w3"]])
        np.testing.assert_array_equal(found.gate_up_bias[e], bias)
        np.testing.assert_array_equal(found.down_bias[e], biases[e, "w2"])


def test_ungated_experts_of_nemotron(opened, rng):
    tensors, values = {}, {}
    for e in range(E):
        for p, shape in (("up_proj", (I, H)), ("down_proj", (H, I))):
            parts, values[e, p] = fp4(rng, *shape)
            base = f"backbone.layers.1.mixer.experts.{e}.{p}"
            tensors |= {f"{base}.{name}": value for name, value in parts.items()}
    found = opened(tensors)["backbone.layers.1.mixer"]
    assert not found.gated
    assert found.shape == ((E, I, H), (E, H, I))
    same(found.dequantize().gate_up, np.stack([values[e, "up_proj"] for e in range(E)]))
    weights = found.prepare(layout="linear")
    assert (weights.gated, weights.intermediate) == (False, I)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("hidden", [H, None])
def test_plain_experts_are_turned_as_shapes_or_the_width_say(opened, rng, turned, fused, hidden):
    gate, up = (rng.standard_normal((E, I, H)).astype(BF16) for _ in range(2))
    down = rng.standard_normal((E, H, I)).astype(BF16)
    base = "model.language_model.layers.0.mlp.experts"
    both = np.concatenate([gate, up], 1)
    stored = {"gate_up_proj": both} if fused else {"gate_proj": gate, "up_proj": up}
    tensors = {
        f"{base}.{name}": np.ascontiguousarray(value.swapaxes(1, 2)) if turned else value
        for name, value in (*stored.items(), ("down_proj", down))
    }
    config = {"text_config": {"hidden_size": hidden}} if hidden else {}
    if not hidden:
        config["model_type"] = "llama4" if turned else "qwen3_moe"
    found = opened(tensors, **config)[base]
    same(found.dequantize().gate_up, both.astype(float))
    same(found.dequantize().down, down.astype(float))
    why = "as their shapes say" if fused else "hidden_size 64" if hidden else "models of type"
    assert len([note for note in found.notes if why in note]) == 1
    order = "[E, in, out]" if turned else "[E, out, in]"
    assert order in found.notes[0]


def test_plain_gpt_oss_alternates_and_is_turned(opened, rng):
    rows = rng.standard_normal((E, 2 * I, H)).astype(BF16)
    base = "model.layers.0.mlp.experts."
    tensors = {
        f"{base}gate_up_proj": np.ascontiguousarray(rows.swapaxes(1, 2)),
        f"{base}down_proj": rng.standard_normal((E, I, H)).astype(BF16),
    }
    found = opened(tensors, architectures=["GptOssForCausalLM"])["model.layers.0.mlp"]
    same(found.dequantize().gate_up, np.concatenate([rows[:, 0::2], rows[:, 1::2]], 1))


def test_fp8_experts_in_blocks(opened, rng):
    tensors, values = {}, {}
    for e in range(2):
        for p, shape in (
            ("gate_proj", (128, 256)),
            ("up_proj", (128, 256)),
            ("down_proj", (256, 128)),
        ):
            eight = rng.standard_normal(shape).astype(E4M3)
            scale = rng.uniform(0.1, 1, (shape[0] // 128, shape[1] // 128)).astype(np.float32)
            values[e, p] = eight.astype(np.float32) * np.kron(scale, np.ones((128, 128), "f4"))
            tensors[f"m.experts.{e}.{p}.weight"] = eight
            tensors[f"m.experts.{e}.{p}.weight_scale_inv"] = scale
    found = opened(tensors)["m.experts"]
    assert found.fmt == "fp8"
    for e in range(2):
        wanted = np.concatenate([values[e, "gate_proj"], values[e, "up_proj"]])
        np.testing.assert_array_equal(found.dequantize().gate_up[e], wanted)
    with pytest.raises(CheckpointError, match="has experts of fp8 with groups of"):
        found.prepare()


def test_blocks_are_turned_with_the_values():
    """Blocks that are not square: 2 rows x 4 columns become 4 x 2."""
    data = torch.arange(2 * 4 * 8, dtype=torch.float32).view(2, 4, 8).to(torch.float8_e4m3fn)
    scale = torch.tensor([0.5, 1, 2, 4]).view(1, 2, 2).expand(2, 2, 2).contiguous()
    weight = Weight("w", "fp8", (2, 4, 8), data=data, block_scale=scale, block=(2, 4))
    assert torch.equal(turned(weight).dequantize(), weight.dequantize().transpose(1, 2))


@pytest.mark.parametrize("scale", [(), (2, 1, 2)])
def test_fused_fp8_experts_are_turned(opened, rng, scale):
    """Scales of tensors, and of blocks, which are turned with the data."""
    data = rng.standard_normal((2, 256, 512)).astype(E4M3)  # [E, H, 2 I]
    down = rng.standard_normal((2, 256, 256)).astype(E4M3)
    tensors = {"m.experts.gate_up_proj": data, "m.experts.down_proj": down}
    factors = rng.uniform(0.1, 1, (2, 2, 4) if scale else ()).astype(np.float32)
    tensors[
        "m.experts.gate_up_proj_scale_inv" if scale else "m.experts.gate_up_proj_weight_scale"
    ] = factors
    tensors["m.experts.down_proj_weight_scale"] = np.float32(0.5)
    found = opened(tensors, model_type="qwen3_vl_moe", hidden_size=256)["m"]
    full = np.kron(factors, np.ones((1, 128, 128), "f4")) if scale else factors
    np.testing.assert_array_equal(
        found.gate_up.dequantize(), (data.astype(np.float32) * full).swapaxes(1, 2)
    )
    np.testing.assert_array_equal(
        found.down.dequantize(), down.astype(np.float32).swapaxes(1, 2) * np.float32(0.5)
    )


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4)])
def test_what_is_no_matrix_is_stacked_too(opened, rng, shape):
    values = [rng.standard_normal(shape).astype(BF16) for _ in range(E)]
    ckpt = opened({f"m.experts.{e}.w1.bias": value for e, value in enumerate(values)})
    found = ckpt["m.experts.w1.bias"]
    assert found.shape == (E, *shape)
    same(found.dequantize(), np.stack(values))
    eight = {f"m.experts.{e}.w1": np.ones((2, 3, 4), E4M3) for e in range(E)}
    scales = {f"m.experts.{e}.w1_weight_scale": np.float32(1) for e in range(E)}
    with pytest.raises(CheckpointError, match=r"must have \[N, K\]; read them one by one"):
        opened({**eight, **scales})["m.experts.w1"]


def test_gpt_oss_saved_dequantised_by_transformers_keeps_blocks_in_its_names(tmp_path):
    """transformers 5.23.0 saves bf16 [E, K, N] under the names of the blocks."""
    rng = np.random.default_rng(3)
    up, down = rng.standard_normal((2, 32, 192)), rng.standard_normal((2, 96, 32))
    name = "model.layers.0.mlp.experts"
    tensors = {
        f"{name}.gate_up_proj_blocks": up.astype(np.float32),
        f"{name}.down_proj_blocks": down.astype(np.float32),
        f"{name}.gate_up_proj_bias": np.zeros((2, 192), np.float32),
        f"{name}.down_proj_bias": np.zeros((2, 32), np.float32),
    }
    ckpt = bs.checkpoints.open(files.folder(tmp_path / "c", tensors, {"model_type": "gpt_oss"}))
    assert ckpt[f"{name}.down_proj"].shape == (2, 96, 32)
    made = ckpt[name].dequantize()
    turned = up.swapaxes(1, 2).astype(np.float32)
    np.testing.assert_array_equal(made[0], np.concatenate([turned[:, 0::2], turned[:, 1::2]], 1))
    np.testing.assert_array_equal(made[1], down.swapaxes(1, 2).astype(np.float32))


def alike(some, whole, only):
    """Whether experts are those of the whole module, in the order of ``only``, byte for byte."""
    assert (some.fmt, some.gated, some.notes) == (whole.fmt, whole.gated, whole.notes)
    pairs = [(some.gate_up_bias, whole.gate_up_bias), (some.down_bias, whole.down_bias)]
    for one, all_ in ((some.gate_up, whole.gate_up), (some.down, whole.down)):
        assert one.shape == (len(only), *all_.shape[1:])
        assert torch.equal(one.dequantize(), all_.dequantize()[only])
        pairs += [(getattr(one, f), getattr(all_, f)) for f in (*ROWS, "global_scale")]
    for value, wanted in pairs:
        assert (value is None) == (wanted is None)
        if value is not None:
            wanted = wanted[only]
            value = value[:, None] if value.dim() < wanted.dim() else value
            value = value.expand(wanted.shape)
            assert value.dtype == wanted.dtype
            assert torch.equal(value.view(wanted.dtype).float(), wanted.float())


@pytest.mark.parametrize("only", [[1], [1, 2], [2, 0]])
@pytest.mark.parametrize("form", ["nvfp4", "ungated", "awq", "gpt-oss", "plain-oss", "fused"])
def test_some_experts_are_those_of_all_and_no_other_is_read(opened, rng, monkeypatch, form, only):
    """As a rank of expert parallelism loads them: bytes of the others stay on the disk."""
    if form == "fused":
        name, tensors, config = "m.experts", {}, {}
        for leaf, rows, inner in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
            codes, scale, _, _ = files.nvfp4(rng, E, rows, inner)
            top = rng.uniform(1e-5, 1e-3, (E, 2) if rows > H or leaf[0] == "g" else E)
            tensors |= {
                f"{name}.{leaf}": nibbles(codes),
                f"{name}.{leaf}_weight_scale": scale,
                f"{name}.{leaf}_weight_scale_2": top.astype(np.float32),
                f"{name}.{leaf}_bias": rng.standard_normal((E, rows)).astype(BF16),
            }
    else:
        tensors, config = stored_experts(rng, form, E)
        name = EXPERTS
    ckpt = opened(tensors, **config)
    whole = ckpt.experts(name)
    seen: list[int] = []
    read = safetensors._bytes

    def noted(info, mapped):
        seen.append(info.nbytes)
        return read(info, mapped)

    monkeypatch.setattr(safetensors, "_bytes", noted)
    some = ckpt.experts(name, only)
    stored = sum(ckpt.entries[n].nbytes for n in ckpt.below(name))
    assert sum(seen) <= stored * len(only) // E
    alike(some, whole, only)
    for wrong in ([3], [-1], []):
        with pytest.raises(
            ValueError, match=r"has 3 experts, but those asked for are \[.*\]; pass"
        ):
            ckpt.experts(name, wrong)
