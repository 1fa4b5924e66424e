"""Modules from checkpoints against float64: router, experts and shared expert of whole layers.

Truth is made from the dense tensors that exporters expect, or from codes that are drawn here, by
`reference_moe`; 1e-5 is float32 sums of at most 96 products.
"""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale import nn
from blockscale.base.errors import CheckpointError
from blockscale.checkpoints.convert.convert import convert
from blockscale.ops.moe import weights as moe_weights
from tests.kit import checkpoint_files as files
from tests.kit.helpers import same
from tests.kit.paths import CHECKPOINTS as GOLDEN
from tests.kit.tiles64 import weight_of
from tests.reference import core as ref
from tests.reference import moe as moe

MLP = "model.layers.0.mlp"
TOLERANCE = 1e-5
E, K, H, I = 4, 2, 64, 32  # noqa: E741
NUMPY = {
    "U8": np.uint8,
    "F32": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}


def stored(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file, float64 where they are floats."""
    raw = path.read_bytes()
    size = 8 + int.from_bytes(raw[:8], "little")
    found = {}
    for name, entry in json.loads(raw[8:size]).items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            value = np.frombuffer(raw[size + first : size + last], NUMPY[entry["dtype"]])
            found[name] = value.reshape(entry["shape"]).astype(np.float64)
    return found


class Dense(moe.Layer):
    """A layer given by its values."""

    def __init__(self, w13, w2, **options):
        self.values = w13, w2
        super().__init__(w13, w2, None, None, "nvfp4", **options)

    def dense(self):
        return self.values


def tokens(count: int = 7, hidden: int = H) -> np.ndarray:
    return moe.random_hidden(count, hidden)


def truth(x, layer, gate, routing, bias=0.0, shared=None):
    logits = x.astype(np.float64) @ gate.T + bias
    ids, weights = moe.moe_route(logits, **routing)
    y = moe.fused_moe(x, layer, ids, weights)
    return y if shared is None else y + shared


def near(module, x, expected, tolerance=TOLERANCE):
    y = module(torch.from_numpy(x))
    assert y.dtype == torch.float32
    assert ref.row_error(y.numpy(), expected).max() < tolerance


def codes(rng, names: dict[str, tuple[int, int]], base: str) -> tuple[dict, dict]:
    """NVFP4 weights of ModelOpt by name, and their values."""
    tensors, values = {}, {}
    for name, shape in names.items():
        code, scale, top, value = files.nvfp4(rng, *shape)
        top = np.float32(top / 64)
        tensors[f"{base}.{name}.weight"] = files.nibbles(code)
        tensors[f"{base}.{name}.weight_scale"] = scale
        tensors[f"{base}.{name}.weight_scale_2"] = np.asarray(top)
        factor = (scale.astype(np.float32) * top).astype(np.float64)
        values[name] = files.E2M1[code] * np.repeat(factor, 16, -1)
        assert value.shape == values[name].shape
    return tensors, values


def experts(rng, base: str, leaves=("gate_proj", "up_proj", "down_proj"), inner: int = I):
    """Experts one by one: tensors, w13 and w2."""
    tensors, w13, w2 = {}, [], []
    *ups, down = leaves
    for e in range(E):
        names = {**dict.fromkeys(ups, (inner, H)), down: (H, inner)}
        made, values = codes(rng, names, f"{base}.{e}")
        tensors.update(made)
        w13.append(np.concatenate([values[name] for name in ups]))
        w2.append(values[down])
    return tensors, np.stack(w13), np.stack(w2)


def router(rng) -> np.ndarray:
    return (rng.standard_normal((E, H)) / 8).astype(np.float32)


def load(tmp_path, tensors, config, name=MLP, **options) -> nn.FusedMoE:
    folder = files.folder(tmp_path / "in", tensors, config)
    return nn.FusedMoE.from_checkpoint(folder, name, dtype=torch.float32, **options)


# ---- FusedMoE -----------------------------------------------------------------------------------


def qwen() -> tuple[np.ndarray, np.ndarray]:
    name = "modelopt_qwen3moe_nvfp4_default_cfg"
    gate = stored(GOLDEN / name / "model.safetensors")[f"{MLP}.gate.weight"]
    values = np.load(GOLDEN / name / "expected.npz")

    def part(e, leaf):
        return values[f"{MLP}.experts.{e}.{leaf}_proj.weight"].astype(np.float64)

    w13 = np.stack([np.concatenate([part(e, "gate"), part(e, "up")]) for e in range(E)])
    layer = Dense(w13, np.stack([part(e, "down") for e in range(E)]))
    return truth(tokens(), layer, gate, {"top_k": K}), tokens()


@pytest.mark.parametrize("layout", ["export", "linear", "128x4", "tiles64"])
def test_qwen3_moe_of_modelopt(tmp_path, layout):
    """The export itself, and what convert makes of it."""
    folder = GOLDEN / "modelopt_qwen3moe_nvfp4_default_cfg"
    expected, x = qwen()
    if layout != "export":
        convert(bs.checkpoints.open(folder), tmp_path / "out", layout=layout)
        folder = tmp_path / "out"
    layer = nn.FusedMoE.from_checkpoint(folder, MLP, dtype=torch.float32)
    assert (layer.top_k, layer.scoring, layer.renormalize) == (K, "softmax", True)
    assert layer.weights.layout == "linear"
    near(layer, x, expected)


@pytest.mark.parametrize(
    "names",
    ["transformers", "tiles64", pytest.param("openai", marks=pytest.mark.exhaustive)],
)
def test_gpt_oss(tmp_path, names):
    """Rows of gate and up alternate, also in the bias; the router has a bias."""
    folder, name = GOLDEN / "gptoss_mxfp4", MLP
    tensors = stored(folder / "model.safetensors")
    values = np.load(folder / "expected.npz")
    up, down = (values[f"{MLP}.experts.{n}_proj"].astype(np.float64) for n in ("gate_up", "down"))
    bias = tensors[f"{MLP}.experts.gate_up_proj_bias"]
    layer = Dense(
        np.concatenate([up[..., 0::2], up[..., 1::2]], -1).transpose(0, 2, 1),
        down.transpose(0, 2, 1),
        activation="swiglu_oai",
        w13_bias=np.concatenate([bias[:, 0::2], bias[:, 1::2]], -1),
        w2_bias=tensors[f"{MLP}.experts.down_proj_bias"],
    )
    gate, shift = tensors[f"{MLP}.router.weight"], tensors[f"{MLP}.router.bias"]
    if names == "openai":
        folder, name = folder / "original_names.safetensors", "block.0.mlp"
        layer.w13_bias = layer.w2_bias = None  # the golden file has codes and scales alone
    if names == "tiles64":
        convert(bs.checkpoints.open(folder), tmp_path / "out", target="sm_90a")
        folder = tmp_path / "out"
    module = nn.FusedMoE.from_checkpoint(folder, name, dtype=torch.float32)
    assert (module.alpha, module.limit) == (1.702, 7.0)
    x = tokens()
    if module.router is None:
        module.router = nn.Router(torch.from_numpy(gate), torch.from_numpy(shift))
    near(module, x, truth(x, layer, gate, {"top_k": K}, shift))


def test_tiles64_is_what_prepare_makes(tmp_path):
    """Weights that lie in tiles on the disk are taken as they are: the bytes of to_tiles."""
    for name in ("gptoss_mxfp4", "modelopt_qwen3moe_nvfp4_default_cfg"):
        source = bs.checkpoints.open(GOLDEN / name)
        convert(source, tmp_path / name, target="sm_90a")
        module = nn.FusedMoE.from_checkpoint(tmp_path / name, MLP, layout="tiles64")
        expected = nn.FusedMoE.from_checkpoint(source, MLP, layout="tiles64")
        assert module.weights.meta() == expected.weights.meta()
        pairs = zip(module.weights.tensors(), expected.weights.tensors(), strict=True)
        for (key, got), (other, wanted) in pairs:
            assert key == other
            assert got.dtype == wanted.dtype
            assert torch.equal(got, wanted), key


ROUNDED = {"layout": "tiles64e", "act_fmt": "fp8", "rounded": True}


def as_stored(stored, tmp_path):
    """Return a checkpoint of NVFP4 experts, and what to load: itself, or it in layout "tiles64"."""
    source = bs.checkpoints.open(GOLDEN / "modelopt_qwen3moe_nvfp4_default_cfg")
    if stored == "as given":
        return source, source
    convert(source, tmp_path / "out", target="sm_90a")
    return source, tmp_path / "out"


@pytest.mark.parametrize("stored", ["as given", "tiles64"])
@pytest.mark.parametrize("act_fmt", [None, "fp8", "fp8_tensor", "nvfp4"])
@pytest.mark.parametrize("name", ["gptoss_mxfp4", "modelopt_qwen3moe_nvfp4_default_cfg"])
def test_the_layout_of_a_gpu_is_the_one_prepare_makes(tmp_path, monkeypatch, name, act_fmt, stored):
    """On a GPU, whose tensors stay on the CPU here: which layout is asked for decides."""
    source = bs.checkpoints.open(GOLDEN / name)
    whole = source.experts(MLP)
    if stored == "tiles64":
        convert(source, tmp_path / "out", target="sm_90a")
        source = bs.checkpoints.open(tmp_path / "out")
    meant = torch.device("cuda")
    monkeypatch.setattr(nn.moe, "checked_device", lambda *_: meant)
    monkeypatch.setattr(nn.FusedMoE, "to", lambda self, _: self)

    def on_a_gpu(where, given, dtype, layout, act_fmt=None, rounded=False):
        """As `prepared` on a GPU, but on the CPU."""
        sizes = moe_weights.check_weights(where, given)
        form = given.fmt, sizes.group
        by_rows = layout is None and moe_weights._prefers_bytes(
            form, given.w13_zero is not None, dtype, act_fmt
        )
        plain = moe_weights._plain(given, sizes)
        made = moe_weights._to_rows(where, plain, dtype, must=False) if by_rows else None
        return made or moe_weights.laid_out(where, plain, dtype, layout or "tiles64", rounded)

    monkeypatch.setattr(moe_weights, "prepared", on_a_gpu)
    move = torch.Tensor.to
    stay = lambda self, to, *more, **options: (  # noqa: E731
        self if to == meant else move(self, to, *more, **options)
    )
    monkeypatch.setattr(torch.Tensor, "to", stay)
    made = nn.FusedMoE.from_checkpoint(source, MLP, device="cuda", act_fmt=act_fmt).weights
    want = whole.prepare(act_fmt=act_fmt)
    assert made.layout == want.layout
    wanted = name.startswith("gptoss") and act_fmt in ("fp8", "fp8_tensor")
    assert made.layout == ("tiles64e" if wanted else "tiles64")
    for (key, got), (_, right) in zip(made.tensors(), want.tensors(), strict=True):
        if not key.endswith("global"):
            assert torch.equal(got, right), key


@pytest.mark.filterwarnings("ignore:.*rounding nvfp4 weights to E4M3")
@pytest.mark.parametrize("stored", ["as given", "tiles64"])
def test_experts_are_rounded_where_asked(tmp_path, stored):
    """Those of the checkpoint, and those of a converted one, become what prepare makes of them."""
    source, folder = as_stored(stored, tmp_path)
    module = nn.FusedMoE.from_checkpoint(folder, MLP, **ROUNDED)
    plain = nn.FusedMoE.from_checkpoint(source, MLP).weights
    want = bs.prepare_moe_weights(
        plain.w13, plain.w2, w13_scale=plain.w13_scale, w2_scale=plain.w2_scale,
        w13_global_scale=plain.w13_global, w2_global_scale=plain.w2_global, **ROUNDED,
    )  # fmt: skip
    made = module.weights
    assert made.added_error == pytest.approx(want.added_error)
    assert 0.01 < made.added_error[0] < 0.03
    for (key, got), (_, wanted) in zip(made.tensors(), want.tensors(), strict=True):
        if key.endswith("global"):
            assert torch.allclose(got, wanted, rtol=1e-6, atol=0)
        else:
            assert torch.equal(got, wanted), key
    with pytest.raises(ValueError, match="rounded=True, but the tensors are on the CPU"):
        nn.FusedMoE.from_checkpoint(folder, MLP, act_fmt="fp8", rounded=True)


@pytest.mark.filterwarnings("ignore:.*rounding nvfp4 weights to E4M3")
def test_a_linear_layer_is_rounded_where_asked():
    source = bs.checkpoints.open(GOLDEN / "modelopt_qwen3moe_nvfp4_default_cfg")
    name = "model.layers.0.self_attn.q_proj"
    made = nn.Linear.from_checkpoint(source, name, **ROUNDED).weights
    weight = source.weight(name)
    want = bs.prepare_linear_weights(
        weight.packed, weight.block_scale, global_scale=weight.global_scale, **ROUNDED
    )
    assert made.added_error == want.added_error
    for (key, got), (_, wanted) in zip(made.tensors(), want.tensors(), strict=True):
        assert torch.equal(got, wanted), key
    plain = weight.packed, weight.block_scale
    assert nn.Linear(want).weights.added_error == want.added_error
    with pytest.raises(ValueError, match="rounded=True is given with a prepared weight"):
        nn.Linear(want, rounded=True)
    with pytest.raises(ValueError, match="Linear: rounded=True, but the tensors are on the CPU"):
        nn.Linear(*plain, act_fmt="fp8", rounded=True)
    source = bs.checkpoints.open(GOLDEN / "gptoss_mxfp4")
    name = next(name for name, entry in source.entries.items() if entry.fmt != "nvfp4")
    with pytest.raises(ValueError, match=f"rounded=True, but {name} is .*, and nvfp4 alone"):
        nn.Linear.from_checkpoint(source, name, **ROUNDED)


@pytest.mark.parametrize("stored", ["as given", "tiles64"])
def test_codes_for_tensor_cores(tmp_path, stored):
    """Layout "128x4" is made of what is stored, and holds the same values."""
    source, folder = as_stored(stored, tmp_path)
    made = nn.FusedMoE.from_checkpoint(folder, MLP, layout="128x4").weights
    assert made.layout == "128x4"
    want = nn.FusedMoE.from_checkpoint(source, MLP, layout="linear").weights
    back = made.to_linear()
    for name in ("w13", "w2"):
        values = [
            bs.dequantize(
                getattr(w, name)[0], getattr(w, f"{name}_scale")[0].view(torch.float8_e4m3fn)
            )
            for w in (back, want)
        ]
        assert torch.equal(*values)


def test_mixtral(tmp_path):
    """w1 is gate, w3 up, w2 down; gate and up have global scales of their own."""
    rng = np.random.default_rng(1)
    base = "model.layers.0.block_sparse_moe"
    tensors, w13, w2 = experts(rng, f"{base}.experts", ("w1", "w3", "w2"))
    tensors[f"{base}.gate.weight"] = gate = router(rng)
    config = {"model_type": "mixtral", "num_experts_per_tok": K, "hidden_act": "silu"}
    module = load(tmp_path, tensors, config, base)
    x = tokens()
    near(module, x, truth(x, Dense(w13, w2), gate, {"top_k": K}))


def mlp(values, x, activation="swiglu"):
    names = ("up_proj",) if activation == "relu2" else ("gate_proj", "up_proj")
    product = x.astype(np.float64) @ np.concatenate([values[n] for n in names]).T
    return moe.activate(product, activation) @ values["down_proj"].T


def test_deepseek_v3(tmp_path):
    """Groups, a correction of the choice, a factor, shared experts."""
    rng = np.random.default_rng(2)
    tensors, w13, w2 = experts(rng, f"{MLP}.experts")
    extra, values = codes(
        rng, {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}, f"{MLP}.shared_experts"
    )
    correction = (rng.standard_normal(E) / 4).astype(np.float32)
    gate = router(rng)
    tensors |= {
        **extra,
        f"{MLP}.gate.weight": gate,
        f"{MLP}.gate.e_score_correction_bias": correction,
    }
    config = {
        "model_type": "deepseek_v3",
        "num_experts_per_tok": K,
        "hidden_act": "silu",
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
    }
    module = load(tmp_path, tensors, config)
    routing = {"top_k": K, "scoring": "sigmoid", "correction_bias": correction}
    routing |= {"n_group": 2, "topk_group": 1, "scale": 2.5}
    x = tokens()
    near(module, x, truth(x, Dense(w13, w2), gate, routing, shared=mlp(values, x)))


def test_qwen2_moe_has_a_gate_of_its_shared_expert(tmp_path):
    """norm_topk_prob is false where config.json leaves it out; text_config has the model's."""
    rng = np.random.default_rng(3)
    tensors, w13, w2 = experts(rng, f"{MLP}.experts")
    names = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
    extra, values = codes(rng, names, f"{MLP}.shared_expert")
    gate, factor = router(rng), rng.standard_normal((1, H)).astype(np.float32)
    tensors |= {
        **extra,
        f"{MLP}.gate.weight": gate,
        f"{MLP}.shared_expert_gate.weight": factor,
    }
    text = {"model_type": "qwen2_moe", "num_experts_per_tok": K, "hidden_act": "silu"}
    module = load(tmp_path, tensors, {"model_type": "some_vl", "text_config": text})
    assert module.renormalize is False
    x = tokens()
    shared = mlp(values, x) * moe.sigmoid(x.astype(np.float64) @ factor.T)
    routing = {"top_k": K, "renormalize": False}
    near(module, x, truth(x, Dense(w13, w2), gate, routing, shared=shared))


def test_nemotron_has_no_gates(tmp_path):
    rng = np.random.default_rng(4)
    base = "backbone.layers.1.mixer"
    tensors, w13, w2 = experts(rng, f"{base}.experts", ("up_proj", "down_proj"))
    names = {"up_proj": (I, H), "down_proj": (H, I)}
    extra, values = codes(rng, names, f"{base}.shared_experts")
    gate, correction = router(rng), rng.standard_normal(E).astype(np.float32)
    tensors |= {
        **extra,
        f"{base}.gate.weight": gate,
        f"{base}.gate.e_score_correction_bias": correction,
    }
    config = {
        "model_type": "nemotron_h",
        "num_experts_per_tok": K,
        "mlp_hidden_act": "relu2",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
    }
    module = load(tmp_path, tensors, config, base)
    x = tokens()
    routing = {"top_k": K, "scoring": "sigmoid", "correction_bias": correction, "scale": 1.5}
    layer = Dense(w13, w2, activation="relu2")
    near(module, x, truth(x, layer, gate, routing, shared=mlp(values, x, "relu2")))


def test_llama4_weighs_the_input(tmp_path):
    """All experts in one tensor with K second; the one weight of a token multiplies its input."""
    rng = np.random.default_rng(5)
    base, tensors, values = "language_model.model.layers.0.feed_forward", {}, []
    for leaf, shape in (("gate_up_proj", (E, 2 * I, H)), ("down_proj", (E, H, I))):
        code, scale, top, _ = files.nvfp4(rng, *shape)
        top = np.float32(top / 64)
        tensors[f"{base}.experts.{leaf}"] = files.nibbles(code).transpose(0, 2, 1).copy()
        name = f"{base}.experts.{leaf}_weight_scale"
        tensors[name] = scale.transpose(0, 2, 1).copy()
        tensors[name + "_2"] = np.asarray(top)
        factor = (scale.astype(np.float32) * top).astype(np.float64)
        values.append(files.E2M1[code] * np.repeat(factor, 16, -1))
    tensors[f"{base}.router.weight"] = gate = router(rng)
    text = {"model_type": "llama4_text", "num_experts_per_tok": 1, "hidden_act": "silu"}
    module = load(tmp_path, tensors, {"model_type": "llama4", "text_config": text}, base)
    x = tokens()
    logits = x.astype(np.float64) @ gate.T
    ids = moe.best(logits, 1)
    scaled = x * moe.sigmoid(np.take_along_axis(logits, ids, 1))
    near(module, x, moe.fused_moe(scaled, Dense(*values), ids, np.ones((len(x), 1))))


def test_plain_experts_are_quantised_where_asked(tmp_path):
    """Plain [E, K, N] experts, alternating rows: fmt= gives what convert gives."""
    rng = np.random.default_rng(6)
    tensors = {
        f"{MLP}.experts.gate_up_proj": rng.standard_normal((E, H, 2 * I)).astype(np.float32),
        f"{MLP}.experts.down_proj": rng.standard_normal((E, I, H)).astype(np.float32),
        f"{MLP}.gate.weight": router(rng),
    }
    config = {"model_type": "gpt_oss", "num_experts_per_tok": K, "hidden_act": "silu"}
    folder = files.folder(tmp_path / "in", tensors, config)
    with pytest.raises(CheckpointError, match="is f32, but kernels take 4-bit experts; pass fmt="):
        nn.FusedMoE.from_checkpoint(folder, MLP)
    module = nn.FusedMoE.from_checkpoint(folder, MLP, fmt="nvfp4", activation="swiglu")
    up = tensors[f"{MLP}.experts.gate_up_proj"].transpose(0, 2, 1)
    w13 = np.concatenate([up[:, 0::2], up[:, 1::2]], 1)
    w = module.weights
    top = np.abs(w13.reshape(E, 2, I, H)).max((2, 3)) / 2688
    np.testing.assert_allclose(w.w13_global.numpy(), top, rtol=1e-6)
    code, byte = ref.quantize(w13[1, I:], "nvfp4", float(w.w13_global[1, 1]))
    np.testing.assert_array_equal(w.w13_scale[1, I:].numpy(), byte)
    np.testing.assert_array_equal(w.w13[1, I:].numpy(), ref.pack(code))


def test_options_of_the_caller_come_first(tmp_path):
    rng = np.random.default_rng(7)
    tensors, w13, w2 = experts(rng, f"{MLP}.experts")
    gate = router(rng)
    unknown = {"model_type": "new_moe", "hidden_act": "silu"}
    folder = files.folder(tmp_path / "in", tensors, unknown)
    words = r"model_type 'new_moe' and does not say top_k, scoring, renormalize; pass top_k="
    with pytest.raises(CheckpointError, match=words):
        nn.FusedMoE.from_checkpoint(folder, MLP)
    options = {"top_k": K, "scoring": "sigmoid", "renormalize": False, "scale": 0.5}
    given = torch.nn.Linear(H, E, bias=False)
    given.weight.data = torch.from_numpy(gate)
    module = nn.FusedMoE.from_checkpoint(
        folder, f"{MLP}.experts", dtype=torch.float32, router=given, **options
    )
    x = tokens()
    with torch.no_grad():
        near(module, x, truth(x, Dense(w13, w2), gate, options))


def test_experts_that_are_none(tmp_path):
    rng = np.random.default_rng(8)
    tensors, *_ = experts(rng, f"{MLP}.experts")
    config = {"model_type": "qwen3_moe", "num_experts_per_tok": K, "hidden_act": "gelu"}
    folder = files.folder(tmp_path / "in", tensors, config)
    with pytest.raises(CheckpointError, match=r"no experts below 'model.layers.1.mlp'; give"):
        nn.FusedMoE.from_checkpoint(folder, "model.layers.1.mlp")
    with pytest.raises(CheckpointError, match="'gelu' for experts with gates, which no kernel"):
        nn.FusedMoE.from_checkpoint(folder, MLP)
    with pytest.raises(CheckpointError, match="is nvfp4 already, and rounding it to mxfp4"):
        nn.FusedMoE.from_checkpoint(folder, MLP, fmt="mxfp4", activation="swiglu")
    config |= {"hidden_act": "silu", "scoring_func": "sqrtsoftplus"}
    with pytest.raises(CheckpointError, match="scoring_func 'sqrtsoftplus', which the router"):
        load(tmp_path, tensors, config)
    extra = {f"{MLP}.gate.weight": np.ones((E + 1, H), np.float32)}
    config.pop("scoring_func")
    with pytest.raises(CheckpointError, match=r"gate.weight is \[5, 64\], but .* has 4 experts"):
        load(tmp_path, tensors | extra, config)
    extra = {f"{MLP}.gate.e_score_correction_bias": np.ones(3, np.float32)}
    with pytest.raises(CheckpointError, match="has 3 values, but there are 4 experts"):
        load(tmp_path, tensors | extra, config)
    extra = {f"{MLP}.shared_expert.up_proj.weight": np.ones((I, H), np.float32)}
    with pytest.raises(CheckpointError, match="must have up_proj and down_proj, and gate_proj"):
        load(tmp_path, tensors | extra, config)
    extra = {f"{MLP}.fc1_latent_proj.weight": np.ones((I, H), np.float32)}
    with pytest.raises(CheckpointError, match="projects its tokens before and after the experts"):
        load(tmp_path, tensors | extra, config)
    with pytest.raises(ValueError, match="weight_on_input=True with top_k=2"):
        nn.FusedMoE(None, 2, weight_on_input=True)


# ---- Linear -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q_proj", "q_proj.weight"])
def test_linear_of_compressed_tensors(name):
    folder = GOLDEN / "ct_llama_nvfp4"
    layer = nn.Linear.from_checkpoint(folder, f"model.layers.0.self_attn.{name}")
    weight = np.load(folder / "expected.npz")["model.layers.0.self_attn.q_proj.weight"]
    x = tokens()
    # the expectation was decompressed in bfloat16
    near(layer, x, x.astype(np.float64) @ weight.T.astype(np.float64), 2e-2)
    exact = bs.checkpoints.open(folder)["model.layers.0.self_attn.q_proj"].dequantize().double()
    near(layer, x, x.astype(np.float64) @ exact.numpy().T)


def test_linear_with_bias_and_pre_quant_scale(tmp_path):
    rng = np.random.default_rng(9)
    tensors, values = codes(rng, {"p": (E * 8, H)}, "m")
    smooth = rng.uniform(0.5, 2, H).astype(np.float32)
    bias = rng.standard_normal(E * 8).astype(ml_dtypes.bfloat16)
    tensors |= {"m.p.pre_quant_scale": smooth, "m.p.bias": bias}
    layer = nn.Linear.from_checkpoint(files.folder(tmp_path / "in", tensors), "m.p")
    x = tokens()
    near(layer, x, (x * smooth).astype(np.float64) @ values["p"].T + bias.astype(np.float64))
    other = nn.Linear()
    other.load_state_dict(layer.state_dict())
    same(other(torch.from_numpy(x)), layer(torch.from_numpy(x)))


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "int4", "fp8", "bf16"])
def test_dense_weights(tmp_path, fmt):
    """Plain and FP8 weights stay dense; others are dequantised where asked."""
    rng = np.random.default_rng(10)
    if fmt == "mxfp4":
        code, scale, value = files.mxfp4(rng, 32, H)
        tensors = {"p.weight_packed": files.nibbles(code), "p.weight_scale": scale}
    elif fmt == "nvfp4":
        tensors, values = codes(rng, {"p": (32, H)}, "m")
        value = values["p"]
    elif fmt == "int4":
        code, zero, scale, value = files.int4(rng, 32, H, 32)
        straight = list(range(8))
        tensors = {
            "p.qweight": np.ascontiguousarray(files.words(code, straight).T),
            "p.qzeros": files.words((zero - 1).T, straight),
            "p.scales": scale.T,
        }
    elif fmt == "fp8":
        value = rng.standard_normal((32, H)).astype(files.E4M3)
        scale = np.asarray(0.25, np.float32)
        tensors = {"p.weight": value, "p.weight_scale": scale}
        value = value.astype(np.float64) * 0.25
    else:
        tensors = {"p.weight": rng.standard_normal((32, H)).astype(ml_dtypes.bfloat16)}
        value = tensors["p.weight"].astype(np.float64)
    name = "m.p" if fmt == "nvfp4" else "p"
    ckpt = bs.checkpoints.open(files.folder(tmp_path / "in", tensors))
    if fmt == "int4":
        near(nn.Linear.from_checkpoint(ckpt, name), tokens(), tokens().astype(np.float64) @ value.T)
    if fmt in ("int4", "mxfp4"):
        rows = moe.qdq(tokens(), "fp8")
        near(nn.Linear.from_checkpoint(ckpt, name, act_fmt="fp8"), tokens(), rows @ value.T)
    given = None if fmt in ("fp8", "bf16") else "dense"
    layer = nn.Linear.from_checkpoint(ckpt, name, dtype=torch.float32, fmt=given)
    assert (layer.fmt, layer.in_features, layer.out_features) == ("dense", H, 32)
    x = tokens()
    near(layer, x, x.astype(np.float64) @ value.T)
    if fmt in ("fp8", "bf16"):
        assert nn.Linear.from_checkpoint(ckpt, name).weight.dtype == torch.bfloat16
        assert nn.Linear.from_checkpoint(ckpt, name, fmt="nvfp4").fmt == "nvfp4"
    if fmt == "mxfp4":
        with pytest.raises(CheckpointError, match="is mxfp4 already, and rounding it to nvfp4"):
            nn.Linear.from_checkpoint(ckpt, name, fmt="nvfp4")
        near(nn.Linear.from_checkpoint(ckpt, name), x, x.astype(np.float64) @ value.T)


def gptq(rng, rows, group=32, order=None):
    """A weight [rows, H] of GPTQ, and its values."""
    code, zero, scale, value = files.int4(rng, rows, H, group)
    straight = list(range(8))
    tensors = {
        "qweight": np.ascontiguousarray(files.words(code, straight).T),
        "qzeros": files.words((zero - 1).T, straight),
        "scales": scale.T,
    }
    if order is not None:
        wide = (code - zero[:, order].astype(np.float64)) * scale[:, order].astype(np.float64)
        return tensors | {"g_idx": order.astype(np.int32)}, wide
    return tensors, value


def test_int4_weights(tmp_path):
    """Rows of several, biases, act-order; a state holds what was prepared."""
    rng = np.random.default_rng(12)
    order = rng.permutation(np.arange(H) // 32)
    made = {name: gptq(rng, rows) for name, rows in (("q", 32), ("k", 16), ("v", 16))}
    made["o"] = gptq(rng, 24, order=order)
    tensors = {f"{name}.{key}": v for name, (held, _) in made.items() for key, v in held.items()}
    bias = rng.standard_normal(16)
    tensors |= {"k.bias": bias.astype(np.float32)}
    ckpt = bs.checkpoints.open(files.folder(tmp_path / "in", tensors))
    x = tokens()
    layer = nn.Linear.from_checkpoint(ckpt, ["q", "k", "v"])
    assert isinstance(layer, nn.Int4Linear)
    assert (layer.fmt, layer.in_features, layer.out_features) == ("int4", H, 64)
    expected = np.concatenate([made[name][1] for name in "qkv"]).astype(np.float64)
    shift = np.concatenate([np.zeros(32), bias, np.zeros(16)])
    near(layer, x, x.astype(np.float64) @ expected.T + shift)
    other = nn.Int4Linear()
    other.load_state_dict(layer.state_dict())
    same(other(torch.from_numpy(x)), layer(torch.from_numpy(x)))
    with pytest.raises(ValueError, match="Int4Linear: it has no weight yet"):
        nn.Int4Linear()(torch.from_numpy(x))
    layer.act_fmt = "fp8"  # of a model that is loaded: the same as a Linear that was asked for it
    near(layer, x, moe.qdq(x, "fp8") @ expected.T + shift)
    asked = nn.Linear.from_checkpoint(ckpt, ["q", "k", "v"], act_fmt="fp8")
    same(layer(torch.from_numpy(x)), asked(torch.from_numpy(x)))
    ordered = nn.Linear.from_checkpoint(ckpt, "o")
    ordered.act_fmt = "fp8"
    with pytest.raises(ValueError, match=r"act-order.*set act_fmt to None"):
        ordered(torch.from_numpy(x))
    near(nn.Linear.from_checkpoint(ckpt, "o"), x, x.astype(np.float64) @ made["o"][1].T)
    with pytest.raises(CheckpointError, match="differ in group_index, so their rows cannot be one"):
        nn.Linear.from_checkpoint(ckpt, ["q", "o"])


def test_rows_of_fp8_of_int4_weights():
    """Scales of channels come before rows are rounded; another weight makes another copy."""
    rng, layer = np.random.default_rng(4), nn.Int4Linear()
    x, smooth = tokens(), np.exp2(rng.integers(-1, 2, H))
    for points in (np.full((24, H // 32), 8), rng.integers(0, 16, (24, H // 32))):
        code = rng.integers(0, 16, (24, H))
        scale = rng.uniform(0.1, 1, (24, H // 32)).astype(np.float32)
        packed = torch.from_numpy((code[:, ::2] | code[:, 1::2] << 4).astype(np.uint8))
        zero = torch.from_numpy(points.astype(np.uint8))
        made = bs.int4.prepare(
            packed, torch.from_numpy(scale), zero, group_size=32, layout="rows",
            pre_quant_scale=torch.from_numpy(smooth).float(), dtype=torch.float32,
        )  # fmt: skip
        layer.load_state_dict(nn.Int4Linear(made).state_dict())
        layer.act_fmt = "fp8"
        value = (code - points.repeat(32, 1).astype(np.float64)) * scale.repeat(32, 1)
        near(layer, x, moe.qdq((x * smooth).astype(np.float32), "fp8") @ value.T)
        assert layer._of_codes(torch.float32).zeros == bool((points != 8).any())


def test_rows_of_several_weights(tmp_path):
    """One global scale, or one for each row, so that nothing is rounded; formats are one."""
    rng = np.random.default_rng(11)
    tensors, values = codes(rng, {"q": (32, H), "k": (16, H), "v": (16, H)}, "m")
    top = tensors["m.q.weight_scale_2"]
    factor = {n: float(top / tensors[f"m.{n}.weight_scale_2"]) for n in "qkv"}
    same_top = tensors | {f"m.{n}.weight_scale_2": top for n in "kv"}
    same_top |= {"m.k.bias": np.ones(16, np.float32)}
    names = ["m.q", "m.k", "m.v"]
    layer = nn.Linear.from_checkpoint(files.folder(tmp_path / "a", same_top), names)
    expected = np.concatenate([values[n] * factor[n] for n in "qkv"])
    shift = np.concatenate([np.zeros(32), np.ones(16), np.zeros(16)])
    x = tokens()
    near(layer, x, x.astype(np.float64) @ expected.T + shift)
    assert layer.global_scale.shape == (1,)
    layer = nn.Linear.from_checkpoint(files.folder(tmp_path / "b", tensors), names)
    expected = np.concatenate([values[n] for n in "qkv"])
    near(layer, x, x.astype(np.float64) @ expected.T)
    assert layer.weights.by_row
    other = {n: v for n, v in tensors.items() if not n.startswith("m.k")}
    other["m.k.weight"] = np.ones((16, H), np.float32)
    with pytest.raises(CheckpointError, match=r"'m.q' and 'm.k' differ in format, so their"):
        nn.Linear.from_checkpoint(files.folder(tmp_path / "c", other), names)


def silu(value):
    return value * moe.sigmoid(value)


@pytest.mark.parametrize("fmt", ["nvfp4", "int4", "bf16"])
def test_gate_and_up_of_one_layer(tmp_path, fmt):
    """A list of two with an activation: gate and up, each with a global scale of its own."""
    rng = np.random.default_rng(13)
    if fmt == "nvfp4":
        tensors, values = codes(rng, {"gate": (24, H), "up": (24, H)}, "m")
        gate, up = values["gate"], values["up"]
        assert tensors["m.gate.weight_scale_2"] != tensors["m.up.weight_scale_2"]
    elif fmt == "int4":
        made = {name: gptq(rng, 24) for name in ("gate", "up")}
        tensors = {f"m.{n}.{key}": v for n, (held, _) in made.items() for key, v in held.items()}
        gate, up = (value.astype(np.float64) for _, value in made.values())
    else:
        names = "m.gate.weight", "m.up.weight"
        tensors = {n: (rng.standard_normal((24, H)) / 8).astype(ml_dtypes.bfloat16) for n in names}
        gate, up = (value.astype(np.float64) for value in tensors.values())
    bias = rng.standard_normal(24).astype(np.float32)
    ckpt = bs.checkpoints.open(files.folder(tmp_path / "in", tensors | {"m.up.bias": bias}))
    options = {"activation": "silu", "dtype": torch.float32}
    layer = nn.Linear.from_checkpoint(ckpt, ["m.gate", "m.up"], **options)
    x = tokens() / 8
    wide = x.astype(np.float64)
    near(layer, x, silu(wide @ gate.T) * (wide @ up.T + bias), 1e-4 if fmt == "bf16" else TOLERANCE)
    assert (layer.gated, layer.activation, layer.out_features) == (True, "silu", 24)
    stacked = nn.Linear.from_checkpoint(ckpt, ["m.up"], **options)
    near(stacked, x, silu(wide @ up.T + bias), 1e-4 if fmt == "bf16" else TOLERANCE)
    if fmt != "bf16":
        options |= {"layout": "tiles64", "dtype": torch.bfloat16}
        tiles = nn.Linear.from_checkpoint(ckpt, ["m.gate", "m.up"], **options)
        w = np.concatenate([gate, up])
        assert np.allclose(weight_of(tiles.weights), w, rtol=2**-8 if fmt == "int4" else 1e-6)


def test_act_order_has_no_activation(tmp_path):
    rng = np.random.default_rng(14)
    held, _ = gptq(rng, 16, order=rng.permutation(np.arange(H) // 32))
    tensors = {f"o.{key}": value for key, value in held.items()}
    ckpt = bs.checkpoints.open(files.folder(tmp_path / "in", tensors))
    with pytest.raises(CheckpointError, match=r"act-order.*leave both out"):
        nn.Linear.from_checkpoint(ckpt, "o", activation="silu")


def test_linear_that_is_none(tmp_path):
    rng = np.random.default_rng(12)
    tensors, *_ = codes(rng, {"p": (32, H)}, "m")
    tensors |= {"m.p.bias": np.ones(3, np.float32), "v": np.ones(4, np.float32)}
    tensors["n"] = np.ones((4, 4), np.int32)
    ckpt = bs.checkpoints.open(files.folder(tmp_path / "in", tensors))
    with pytest.raises(KeyError, match=r"has no weight 'm.q'"):
        nn.Linear.from_checkpoint(ckpt, "m.q")
    with pytest.raises(CheckpointError, match=r"m.p.bias is f32 \[3\], but must be 32 floats"):
        nn.Linear.from_checkpoint(ckpt, "m.p")
    with pytest.raises(CheckpointError, match=r"v has the shape \[4\], but a linear layer's"):
        nn.Linear.from_checkpoint(ckpt, "v")
    with pytest.raises(CheckpointError, match="n is i32, which is no weight of a linear layer"):
        nn.Linear.from_checkpoint(ckpt, "n")
    with pytest.raises(ValueError, match="fmt='int8' is not known; choose one of None, 'dense'"):
        nn.Linear.from_checkpoint(ckpt, "m.p", fmt="int8")
    with pytest.raises(ValueError, match="no name is given; pass one"):
        nn.Linear.from_checkpoint(ckpt, [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:7", torch.device("cuda", 0), "cdua", 1.5])
@pytest.mark.parametrize("module", [nn.Linear, nn.FusedMoE])
def test_a_device_that_is_not_there_is_refused_before_anything_is_read(module, device):
    words = "names none" if device in ("cdua", 1.5) else "finds 0 CUDA GPUs here; leave device out"
    with pytest.raises(ValueError, match=rf"{module.__name__}.from_checkpoint: device=.*{words}"):
        module.from_checkpoint("/no/such/folder", "m", device=device)
