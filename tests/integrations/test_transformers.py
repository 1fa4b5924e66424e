"""Models that transformers loads from 4-bit checkpoints, against stock models of the same values.

Checkpoints are made by `tests.kit.hf_models`, which shares nothing with the package.  In float32
both models sum the same products in another order: 1e-4 of a row's norm is some 100 times what is
seen.  In bfloat16 a model rounds its activations, 4e-3 to 8e-3 of a row of logits beside the stock
model in float32 if layers add little to the embeddings (FLAT); there each token goes to all
experts, since of two that are nearly equal either may be chosen.
"""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import blockscale as bs
from blockscale.base.errors import CheckpointError
from blockscale.checkpoints.convert.convert import convert
from blockscale.checkpoints.entry import CODES
from blockscale.checkpoints.weight import Weight
from blockscale.cli.command import cli
from tests.kit import hf_models
from tests.kit.paths import ROOT
from tests.reference.core import row_error

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("blockscale.integrations.transformers")
hf_build = pytest.importorskip("blockscale.integrations.hf_build")

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
FLAT = 0.015
"""initializer_range of models in bfloat16."""
ALL = {
    "qwen3_moe": {"num_experts_per_tok": 4},
    "mixtral": {"num_experts_per_tok": 4},
    "gpt_oss": {"num_experts_per_tok": 4},
    "deepseek_v3": {"num_experts_per_tok": 8, "topk_group": 2},
}

LLAMA = ("modelopt-nvfp4", "modelopt-mxfp4", "modelopt-mixed", "ct-nvfp4", "ct-mxfp4")
INT4 = ("ct-int4", "awq", "gptq")
CASES = [
    *(("llama", scheme) for scheme in (*LLAMA, *INT4)),
    *(("qwen3_moe", scheme) for scheme in ("modelopt-nvfp4", "modelopt-mxfp4", *INT4)),
    *(("mixtral", scheme) for scheme in ("modelopt-nvfp4", "ct-nvfp4", "ct-mxfp4", *INT4)),
    *(("deepseek_v3", scheme) for scheme in ("modelopt-nvfp4", "ct-int4")),
    ("gpt_oss", "openai"),
]
QUICK = {("llama", "awq"), ("mixtral", "ct-int4"), ("gpt_oss", "openai"), ("llama", "ct-nvfp4")}


def loaded(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)


def tokens(rows: int = 3, count: int = 9) -> torch.Tensor:
    return torch.randint(2, hf_models.V, (rows, count), generator=torch.Generator().manual_seed(1))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()).logits.flatten(0, 1)


def near(model: Any, dense: Path, dtype: torch.dtype = torch.float32) -> None:
    """The logits of ``model`` are those of a stock model of ``dense`` in float32."""
    found, wanted = logits(model), logits(loaded(dense))
    assert found.dtype == dtype
    error = row_error(found.double().numpy(), wanted.double().numpy())
    assert error.max() <= BOUNDS[dtype], error.max()


def made(path: Path, kind: str, scheme: str, *, shards: int = 1, **changes: Any) -> hf_models.Pair:
    config = hf_models.config(kind, **changes)
    if scheme == "openai":
        return hf_models.gpt_oss(path, config, shards)
    return hf_models.pair(path, config, scheme, shards=shards)


def modules(model: Any, kind: type) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, kind)]


def saved_again(model: Any, path: Path) -> None:
    """`save_pretrained` writes what is loaded with equal logits, and what others can read."""
    model.save_pretrained(path)
    again = loaded(path, model.dtype)
    assert torch.equal(logits(again), logits(model))
    assert bs.checkpoints.open(path).kind != "plain"


# ---- Formats and models -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.exhaustive) for case in CASES],
)
def test_logits_are_those_of_the_dequantised_model(tmp_path, kind, scheme):
    stored = made(tmp_path, kind, scheme, shards=3)
    model = loaded(stored.folder)
    near(model, stored.dense)
    saved_again(model, tmp_path / "again")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "scheme"), CASES)
def test_bfloat16(tmp_path, kind, scheme):
    stored = made(tmp_path, kind, scheme, initializer_range=FLAT, **ALL.get(kind, {}))
    model = loaded(stored.folder, torch.bfloat16)
    near(model, stored.dense, torch.bfloat16)
    saved_again(model, tmp_path / "again")


def test_modelopt_nvfp4_with_bias_tied_embeddings_and_layers_left_out(tmp_path, monkeypatch):
    """All that a Llama of ModelOpt may have, in three files; 4-bit weights are not dequantised."""
    config = hf_models.config("llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    left = [r"layers\.0\.mlp\.down_proj", r"layers\.1\.self_attn\.[qk]_proj"]
    stored = hf_models.pair(tmp_path, config, "modelopt-nvfp4", keep=left, shards=3)
    rows = Weight.rows

    def dense_only(self: Weight, start: int, stop: int) -> torch.Tensor:
        assert self.fmt not in CODES, f"{self.name} is dequantised"
        return rows(self, start, stop)

    with monkeypatch.context() as patch:
        patch.setattr(Weight, "rows", dense_only)
        model = loaded(stored.folder)
    layers = [f"model.layers.{number}." for number in range(2)]
    assert sorted(modules(model, bs.nn.Linear)) == sorted(
        [
            *(f"{layers[0]}self_attn.{name}_proj" for name in ("qkv", "o")),
            *(f"{layers[1]}self_attn.{name}_proj" for name in "vo"),
            *(f"{layer}mlp.gate_up_proj" for layer in layers),
            f"{layers[1]}mlp.down_proj",
        ]
    )
    assert len(stored.quantised) == 11
    assert modules(model, torch.nn.Linear) == [
        *("model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj"),
        *("model.layers.1.self_attn.k_proj", "lm_head"),
    ]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    held = {p.numel() for name, p in model.named_parameters() if "layers.0.self_attn" in name}
    assert not held, "there is a dense weight, or a bias that the kernel does not add"
    near(model, stored.dense)
    saved_again(model, tmp_path / "again")
    ckpt = bs.checkpoints.open(tmp_path / "again")
    assert ckpt.kind == "modelopt-nvfp4"
    before = bs.checkpoints.open(stored.folder)
    for name in stored.quantised:
        assert torch.equal(ckpt[name].packed, before[name].packed), name
        assert torch.equal(ckpt[name].dequantize(), before[name].dequantize()), name
    assert "lm_head.weight" not in ckpt.names
    assert "lm_head.weight" not in model.hf_quantizer.get_state_dict_and_metadata(model)[0]
    assert torch.equal(model(tokens()).logits.flatten(0, 1), logits(model)), "without no_grad()"


def test_experts_of_modelopt_keep_their_names(tmp_path):
    """Experts one by one, beside a dense layer; bytes and names are those that were read."""
    stored = made(tmp_path, "qwen3_moe", "modelopt-nvfp4", shards=2)
    model, info = loaded(stored.folder, output_loading_info=True)
    assert not any(info.values()), "something is missing, or nobody expected it"
    near(model, stored.dense)
    assert [type(layer.mlp.experts).__name__ for layer in model.model.layers[:1]] == [
        "ModelExperts"
    ]
    assert isinstance(model.model.layers[1].mlp.gate_up_proj, bs.nn.Linear)
    saved_again(model, tmp_path / "again")
    before, after = (bs.checkpoints.open(p) for p in (stored.folder, tmp_path / "again"))
    assert set(after.names) == set(before.names)
    for name in stored.quantised:
        assert torch.equal(after[name].dequantize(), before[name].dequantize()), name


def test_gptq_in_act_order_is_saved_in_its_order(tmp_path):
    stored = made(tmp_path, "llama", "gptq", num_hidden_layers=1)
    model = loaded(stored.folder)
    near(model, stored.dense)
    saved_again(model, tmp_path / "again")
    before, after = (bs.checkpoints.open(p) for p in (stored.folder, tmp_path / "again"))
    for name in stored.quantised:
        assert torch.equal(after[name].group_index, before[name].group_index), name
        assert torch.equal(after[name].zero, before[name].zero), name
        assert torch.equal(after[name].dequantize(), before[name].dequantize()), name


def test_fp8_layers_are_dequantised(tmp_path):
    stored = made(tmp_path, "llama", "modelopt-mixed", num_hidden_layers=1)
    model = loaded(stored.folder)
    assert sorted(modules(model, torch.nn.Linear)) == [
        "lm_head",
        *(f"model.layers.0.self_attn.{name}_proj" for name in "koqv"),
    ]
    near(model, stored.dense)
    saved_again(model, tmp_path / "again")


def test_a_model_of_fp8_alone_becomes_a_plain_one(tmp_path):
    config = hf_models.config("llama", num_hidden_layers=1)
    stored = hf_models.pair(tmp_path, config, "modelopt-fp8", keep=["o_proj"])
    model = loaded(stored.folder)
    assert not modules(model, bs.nn.Linear)
    assert not getattr(model, "is_quantized", False)
    near(model, stored.dense)
    model.save_pretrained(tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again/config.json").read_text())
    assert torch.equal(logits(loaded(tmp_path / "again")), logits(model))


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_fp8_experts_are_dequantised(tmp_path, kind):
    """One by one, and all in one tensor, whose rows of gate and up alternate, [E, in, out]."""
    if kind == "gpt_oss":
        stored = hf_models.gpt_oss(tmp_path, hf_models.config(kind), eight=True)
    else:
        stored = made(tmp_path, kind, "modelopt-mixed-experts")
    model = loaded(stored.folder)
    assert isinstance(model.model.layers[0].self_attn.qkv_proj, bs.nn.Linear)
    assert isinstance(model.model.layers[0].mlp.experts.down_proj, torch.nn.Parameter)
    near(model, stored.dense)
    saved_again(model, tmp_path / "again")


def test_bfloat16_quick(tmp_path):
    stored = made(tmp_path, "llama", "modelopt-nvfp4", initializer_range=FLAT)
    near(loaded(stored.folder, torch.bfloat16), stored.dense, torch.bfloat16)


def test_saving_over_the_source_and_models_without_a_head(tmp_path):
    """The index of three files stays behind; what is there with or without a prefix is found."""
    stored = made(tmp_path, "gpt_oss", "openai", shards=3)
    model = loaded(stored.folder)
    before = logits(model)
    assert torch.equal(logits(copy.deepcopy(model)), before)
    model.save_pretrained(stored.folder)
    assert torch.equal(logits(model), before)
    assert torch.equal(logits(loaded(stored.folder)), before)
    base = transformers.AutoModel.from_pretrained(stored.folder, dtype=torch.float32)
    states = base(tokens()).last_hidden_state
    assert torch.equal(model.lm_head(states).flatten(0, 1), before)
    base.save_pretrained(tmp_path / "base")
    again = loaded(tmp_path / "base")  # its head is new
    assert torch.equal(again.model(tokens()).last_hidden_state, states)


@pytest.mark.parametrize("target", ["cpu", "sm_90a"])
def test_what_convert_writes_is_loaded(tmp_path, target):
    """Also experts in the layout of Hopper's kernels, and under their names of before."""
    hf_models.stock(tmp_path / "plain", hf_models.config("qwen3_moe"))
    convert(bs.checkpoints.open(tmp_path / "plain"), tmp_path / "out", "nvfp4", target=target)
    ckpt = bs.checkpoints.open(tmp_path / "out")
    values = {name: ckpt.weight(name).dequantize().numpy() for name in ckpt.names}
    about = json.loads((tmp_path / "plain" / "config.json").read_text())
    dense = hf_models.files.folder(tmp_path / "dense", values, about)
    model = loaded(tmp_path / "out")
    assert isinstance(model.model.layers[0].self_attn.qkv_proj, bs.nn.Linear)
    assert type(model.model.layers[0].mlp.experts).__name__ == "ModelExperts"
    near(model, dense)


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json"])
def test_the_configuration_may_be_in_a_file_of_its_own(tmp_path, name):
    scheme = {"hf_quant_config.json": "modelopt-nvfp4", "quantize_config.json": "gptq"}[name]
    stored = made(tmp_path, "llama", scheme, num_hidden_layers=1)
    about = json.loads((stored.folder / "config.json").read_text())
    said = about.pop("quantization_config")
    (stored.folder / "config.json").write_text(json.dumps(about))
    if name == "hf_quant_config.json":
        said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (stored.folder / name).write_text(json.dumps(said))
    model = loaded(stored.folder)
    layer = "model.layers.0"
    fused = [
        *(f"{layer}.mlp.{leaf}_proj" for leaf in ("down", "gate_up")),
        *(f"{layer}.self_attn.{leaf}_proj" for leaf in ("o", "qkv")),
    ]
    apart = scheme == "gptq"  # in act-order
    assert sorted(modules(model, bs.nn.Linear)) == (sorted(stored.quantised) if apart else fused)
    near(model, stored.dense)


# ---- Generation and compilation -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("gpt_oss", "openai"),
        pytest.param("llama", "modelopt-nvfp4", marks=pytest.mark.exhaustive),
        pytest.param("deepseek_v3", "modelopt-nvfp4", marks=pytest.mark.exhaustive),
        pytest.param("mixtral", "ct-int4", marks=pytest.mark.exhaustive),
    ],
)
def test_generate_gives_the_tokens_of_the_reference(tmp_path, kind, scheme):
    stored = made(tmp_path, kind, scheme)
    found, wanted = (
        loaded(folder).generate(tokens(2, 5), max_new_tokens=6, do_sample=False)
        for folder in (stored.folder, stored.dense)
    )
    assert found.shape == (2, 11)
    assert torch.equal(found, wanted)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "scheme"),
    [("llama", "modelopt-nvfp4"), ("llama", "awq"), ("qwen3_moe", "modelopt-nvfp4")],
)
def test_torch_compile(tmp_path, kind, scheme):
    """One graph without a break: the model's layers are traced through our operators."""
    stored = made(tmp_path, kind, scheme)
    model = loaded(stored.folder)
    before = logits(model)
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, fullgraph=True)
    with torch.no_grad():
        found = compiled(tokens()).logits.flatten(0, 1)
    assert row_error(found.numpy(), before.numpy()).max() <= BOUNDS[torch.float32]


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("gpt_oss", "openai"),
        pytest.param("qwen3_moe", "modelopt-nvfp4", marks=pytest.mark.exhaustive),
        pytest.param("llama", "gptq", marks=pytest.mark.exhaustive),
        pytest.param("deepseek_v3", "ct-int4", marks=pytest.mark.exhaustive),
    ],
)
def test_kernels_that_were_built_ahead_are_all_that_are_called(tmp_path, kind, scheme):
    """A process with an empty cache and without the compiler; 10 s: kernels are compiled."""
    stored = made(tmp_path, kind, scheme)
    words = ["build", "--checkpoint", str(stored.folder), "--dtype", "f32"]
    run = CliRunner().invoke(cli, [*words, "-o", str(tmp_path / "model.so")])
    assert run.exit_code == 0, run.output
    code = f"""
import os, sys
os.environ["BLOCKSCALE_CACHE"] = {str(tmp_path / "empty")!r}
sys.modules["tvm"] = None
import torch, blockscale, blockscale.integrations.transformers
from transformers import AutoModelForCausalLM
blockscale.load({str(tmp_path / "model.so")!r})
model = AutoModelForCausalLM.from_pretrained({str(stored.folder)!r}, dtype=torch.float32)
print(model.generate(torch.arange(2, 12)[None], max_new_tokens=3, do_sample=False).tolist())
"""
    run = python(code)
    assert run.returncode == 0, run.stderr
    wanted = loaded(stored.dense).generate(
        torch.arange(2, 12)[None], max_new_tokens=3, do_sample=False
    )
    assert run.stdout.strip() == str(wanted.tolist())


# ---- Quantising while loading -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "fmt", "bound"),
    [
        ("mixtral", "int4", 0.1),
        ("mixtral", "nvfp4", 0.12),
        pytest.param("llama", "int4", 0.1, marks=pytest.mark.exhaustive),
        pytest.param("gpt_oss", "mxfp4", 0.16, marks=pytest.mark.exhaustive),
        pytest.param("gpt_oss", "int4", 0.1, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_moe", "int4", 0.1, marks=pytest.mark.exhaustive),
        pytest.param("deepseek_v3", "nvfp4", 0.12, marks=pytest.mark.exhaustive),
        pytest.param("llama", "mxfp4", 0.16, marks=pytest.mark.exhaustive),
    ],
)
def test_a_plain_model_is_quantised_while_it_loads(tmp_path, kind, fmt, bound):
    """Values that are saved are near the plain ones, and logits are those of these values.

    ``bound``: of normal numbers in blocks of 32 and 15 steps from -2.05 to 2.05 sigma, the error of
    a row is 0.08, and more where ends are cut off; E2M1 is coarser at its ends, MXFP4's scales too.
    """
    plain = hf_models.stock(tmp_path / "plain", hf_models.config(kind))
    config = hf.BlockscaleConfig(fmt, skip=["v_proj", "model.layers.1.self_attn"])
    model = loaded(tmp_path / "plain", quantization_config=config)
    saved_again(model, tmp_path / "again")
    ckpt = bs.checkpoints.open(tmp_path / "again")
    values: dict[str, np.ndarray] = {}
    for name, value in plain.items():
        entry = ckpt.entries.get(name)
        assert entry is not None, name
        values[name] = value
        skipped = "v_proj" in name or "layers.1.self_attn" in name
        if entry.fmt not in CODES:
            assert skipped or not name.endswith(("proj.weight", "w1.weight")), name
            continue
        assert entry.fmt == fmt
        assert not skipped
        dense = ckpt.weight(name).dequantize().numpy()
        if kind == "gpt_oss" and "experts" in name:
            dense = dense.swapaxes(1, 2)
        values[name] = np.ascontiguousarray(dense)
        error = row_error(values[name], value)
        assert 0 < error.max() < 4 * bound, name
        assert error.mean() < bound, name
    assert ckpt.entries["lm_head.weight"].fmt == "f32"
    dense = hf_models.files.folder(
        tmp_path / "dense", values, json.loads((tmp_path / "plain" / "config.json").read_text())
    )
    near(model, dense)


@pytest.mark.parametrize("group", [32, 64])
def test_int4_is_within_a_step_and_keeps_zeros(rng, monkeypatch, group):
    """A step is a 15th of the block's range; zero points move ends by up to half of one.

    Rows are quantised some at a time.
    """
    values = rng.standard_normal((5, 24, 128)).astype(np.float32)
    values[1] += 5  # blocks on one side of zero, which zero still belongs to
    values[2] -= 5
    values[..., 3] = 0
    values[3, 4] = 0
    weight = Weight("w", "f32", values.shape, data=torch.from_numpy(values))
    whole = hf_build.to_int4(weight, group)
    monkeypatch.setattr(hf_build, "_CHUNK", 7 * 128)
    found = hf_build.to_int4(weight, group)
    for name in ("packed", "block_scale", "zero"):
        assert torch.equal(getattr(found, name), getattr(whole, name)), name
    blocks = values.reshape(-1, group)
    step = (np.maximum(blocks.max(-1), 0) - np.minimum(blocks.min(-1), 0)) / 15
    np.testing.assert_allclose(found.block_scale.flatten()[step > 0], step[step > 0], rtol=2**-8)
    gap = np.abs(found.dequantize().numpy().reshape(blocks.shape) - blocks)
    assert (gap <= 1.1 * step[:, None]).all()
    inner = np.sort(gap, -1)[:, : group // 2]
    assert (inner <= 0.51 * step[:, None]).all()
    assert (gap[blocks == 0] == 0).all()


def test_sizes_that_a_format_does_not_hold_stay_plain(tmp_path):
    """K=80 is no multiple of 32; the layers around it are quantised."""
    config = hf_models.config("llama", intermediate_size=80, num_hidden_layers=1)
    hf_models.stock(tmp_path / "plain", config)
    config = hf.BlockscaleConfig("mxfp4")
    model = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=config
    )
    assert modules(model, torch.nn.Linear) == ["model.layers.0.mlp.down_proj", "lm_head"]
    assert config.stored is None, "the caller's configuration is as it was"


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"fmt": "fp4"}, ValueError, "BlockscaleConfig: fmt='fp4'.*choose one of 'nvfp4'"),
        ({"fmt": "int4", "group_size": 48}, ValueError, "group_size=48"),
        ({"fmt": "nvfp4", "group_size": 32}, ValueError, "group_size=32"),
        ({"skip": "o_proj"}, TypeError, r"skip='o_proj' is no list of names; pass \['o_proj'\]"),
    ],
)
def test_configurations_that_are_none(arguments, error, words):
    with pytest.raises(error, match=words):
        hf.BlockscaleConfig(**arguments)


def test_a_configuration_survives_json():
    config = hf.BlockscaleConfig("int4", ["o_proj"], 64)
    again = hf.BlockscaleConfig.from_dict(json.loads(config.to_json_string()))
    assert (again.fmt, again.skip, again.group_size) == ("int4", ("o_proj",), 64)
    assert again.stored is None


# ---- Errors -------------------------------------------------------------------------------------


def rewritten(stored: hf_models.Pair, change: Any) -> None:
    """Write the one file of tensors anew after ``change``."""
    path = stored.folder / "model.safetensors"
    entries = bs.checkpoints.files.safetensors.read_header(path)[0]
    dtypes = {name: dtype for dtype, name in hf_models.files.DTYPES.items()}
    raw = path.read_bytes()
    tensors = {}
    for name, info in entries.items():
        dtype = np.dtype(getattr(hf_models.ml_dtypes, dtypes[info.dtype], dtypes[info.dtype]))
        tensors[name] = np.frombuffer(raw[info.start : info.stop], dtype).reshape(info.shape)
    change(tensors)
    hf_models.files.save(path, tensors)


Q = "model.layers.0.self_attn.q_proj"


def without(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def narrower(tensors: dict[str, np.ndarray]) -> None:
    """Half of the inputs of one layer."""
    tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"][:, :16]
    tensors[f"{Q}.weight_scale"] = tensors[f"{Q}.weight_scale"][:, :2]


def eight_bits(tensors: dict[str, np.ndarray]) -> None:
    tensors[f"{Q}.weight"] = np.zeros((64, 64), np.int8)
    tensors[f"{Q}.weight_scale"] = np.ones((64, 1), np.float32)
    del tensors[f"{Q}.weight_scale_2"]


def embeddings(tensors: dict[str, np.ndarray]) -> None:
    """4-bit embeddings, which no linear layer reads."""
    for name in ("weight", "weight_scale", "weight_scale_2"):
        tensors[f"model.embed_tokens.{name}"] = tensors[f"{Q}.{name}"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without(f"{Q}.weight_scale"), r"model.safetensors: .*q_proj.weight.* without .*copy all"),
        (without(f"{Q}.weight_scale_2"), "q_proj"),
        (without(f"{Q}.weight"), r"q_proj.weight_scale.* belongs to a quantised weight, which is"),
        (narrower, r"q_proj.weight is \[64, 32\], but .*q_proj.weight of the model is \[64, 64\]"),
        (eight_bits, "q_proj.weight.* of integers of 8 bits, which is not supported; use a"),
        (embeddings, "embed_tokens.weight is nvfp4, but .* a Embedding, which is no linear layer"),
    ],
)
def test_a_damaged_checkpoint_is_refused_before_weights_are_made(
    tmp_path, monkeypatch, change, words
):
    stored = made(tmp_path, "llama", "modelopt-nvfp4", num_hidden_layers=1)
    rewritten(stored, change)
    refused(stored.folder, monkeypatch, words)


def refused(folder: Path, monkeypatch: Any, words: str) -> None:
    """Loading ends with a CheckpointError, and transformers has not begun to load anything."""

    def begun(*arguments: Any, **options: Any) -> None:
        raise AssertionError("weights are being loaded")

    with monkeypatch.context() as patch:
        patch.setattr(transformers.PreTrainedModel, "_load_pretrained_model", begun)
        with pytest.raises(CheckpointError, match=words):
            loaded(folder)


@pytest.mark.parametrize("shard", [1, 2])
def test_a_truncated_file_is_refused_before_weights_are_made(tmp_path, monkeypatch, shard):
    stored = made(tmp_path, "llama", "modelopt-nvfp4", num_hidden_layers=1, shards=2)
    path = stored.folder / f"model-{shard:05d}-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    refused(stored.folder, monkeypatch, rf"{path.name}.*truncated, so copy it again")


def renamed(stored: hf_models.Pair, new: str) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        for name in [*tensors]:
            tensors[name.replace("model.layers", new)] = tensors.pop(name)

    rewritten(stored, change)


def test_weights_of_another_model_are_refused(tmp_path, monkeypatch):
    stored = made(tmp_path, "llama", "modelopt-nvfp4", num_hidden_layers=1)
    renamed(stored, "model.body.layers")
    refused(stored.folder, monkeypatch, "LlamaForCausalLM has none of the 4-bit weights, e.g. mod")


def test_names_that_transformers_maps_are_mapped_once(tmp_path, monkeypatch):
    """Of a mapping that is registered: its reverse, done twice, would give body.body.layers."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    stored = made(tmp_path, "llama", "modelopt-nvfp4", num_hidden_layers=1)
    renamed(stored, "model.body.layers")
    conversion_mapping.get_checkpoint_conversion_mapping("llama")  # so that there is a table
    table = dict(conversion_mapping._checkpoint_conversion_mapping_cache)
    table["llama"] = [WeightRenaming("body.layers", "layers")]
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", table)
    model = loaded(stored.folder)
    saved_again(model, tmp_path / "again")
    names = [bs.checkpoints.open(p).names for p in (stored.folder, tmp_path / "again")]
    assert sorted(names[0]) == sorted(names[1])


def test_sizes_of_experts_are_compared_with_the_model(tmp_path, monkeypatch):
    stored = made(tmp_path, "gpt_oss", "openai")
    path = stored.folder / "config.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps({**about, "num_local_experts": 8}))
    refused(stored.folder, monkeypatch, r"has 4 experts with .* of the model has 8 with \[64, 32\]")


def test_a_quantised_head_that_is_tied_is_refused(tmp_path, monkeypatch):
    def head(tensors: dict[str, np.ndarray]) -> None:
        tensors.pop("lm_head.weight")
        for name in ("weight", "weight_scale", "weight_scale_2"):
            tensors[f"lm_head.{name}"] = tensors[f"{Q}.{name}"]

    stored = made(tmp_path, "llama", "modelopt-nvfp4", num_hidden_layers=1, vocab_size=64)
    rewritten(stored, head)
    assert "lm_head" in modules(loaded(stored.folder), bs.nn.Linear)
    path = stored.folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    refused(stored.folder, monkeypatch, "lm_head.weight is quantised, but .* tie_word_embeddings")


def test_experts_with_an_activation_of_no_kernel_are_refused(tmp_path, monkeypatch):
    stored = made(tmp_path, "mixtral", "ct-int4")
    path = stored.folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_act": "gelu"}))
    refused(stored.folder, monkeypatch, r"experts \(MixtralExperts\) has an activation that no ke")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device_map": {"model": "cpu", "lm_head": "disk"}}, "device_map has cpu, disk, but"),
        ({"use_kernels": True}, "use_kernels=True would replace layers"),
    ],
)
def test_arguments_without_a_meaning_are_refused(tmp_path, options, words):
    pytest.importorskip("accelerate")
    stored = made(tmp_path, "llama", "modelopt-nvfp4", num_hidden_layers=1)
    with pytest.raises(ValueError, match=words):
        loaded(stored.folder, **options)


@pytest.mark.parametrize("place", ["auto", "cpu", {"": "cpu"}])
def test_one_device_is_taken_in_every_spelling(tmp_path, place):
    pytest.importorskip("accelerate")
    if place == "auto" and torch.cuda.is_available():
        pytest.skip("it means the GPU here")
    stored = made(tmp_path, "llama", "modelopt-nvfp4", num_hidden_layers=1)
    near(loaded(stored.folder, device_map=place), stored.dense)


# ---- What is imported and replaced --------------------------------------------------------------


def python(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    old = [entry for entry in [os.environ.get("PYTHONPATH")] if entry]
    path = os.pathsep.join([*map(str, paths), str(ROOT), *old])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_import_costs_neither_the_compiler_nor_cuda():
    """And without it transformers' own tables are as they were."""
    code = """
import sys
import torch
import blockscale.checkpoints, blockscale.nn
from transformers.quantizers import auto
assert "modelopt" not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING
before = dict(auto.AUTO_QUANTIZATION_CONFIG_MAPPING)
stock = dict(auto.AUTO_QUANTIZER_MAPPING)
import blockscale.integrations.transformers as ours
assert not {name for name in sys.modules if name.partition(".")[0] == "tvm"}
assert not torch.cuda.is_initialized()
table = auto.AUTO_QUANTIZATION_CONFIG_MAPPING
changed = {name for name in table if table[name] is not before.get(name)}
assert changed == {
    "modelopt", "blockscale", "compressed-tensors", "mxfp4", "awq", "gptq"
}, changed
assert {k: v for k, v in auto.AUTO_QUANTIZER_MAPPING.items() if k != "blockscale"} == stock
print("as it should be")
"""
    run = python(code)
    assert run.stdout == "as it should be\n", run.stderr


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "gptq", "bits": 8, "group_size": 128},
        {"quant_method": "awq", "bits": 4, "version": "gemv"},
    ],
)
def test_formats_that_are_not_ours_go_where_they_went(said):
    from transformers.quantizers.auto import AutoQuantizationConfig

    found = AutoQuantizationConfig.from_dict(said)
    assert not isinstance(found, hf.BlockscaleConfig)
    assert type(found).__name__ in ("GPTQConfig", "AwqConfig")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, r"needs transformers, which is not installed; pip install '.\[transformers\]'"),
        (
            "__version__ = '4.57.1'",
            "transformers 4.57.1 has no transformers.quantizers.base, but must have what 5.17",
        ),
    ],
)
def test_a_transformers_that_is_not_there_or_too_old_is_named(tmp_path, content, words):
    if content is None:
        code = "import sys; sys.modules['transformers'] = None\n"
    else:
        (tmp_path / "transformers").mkdir()
        (tmp_path / "transformers" / "__init__.py").write_text(content)
        code = ""
    run = python(code + "import blockscale.integrations.transformers", tmp_path)
    assert run.returncode == 1
    assert run.stderr.strip().splitlines()[-1].startswith(("ImportError", "ModuleNotFoundError"))
    assert re.search(words, run.stderr.strip().splitlines()[-1]), run.stderr


# ---- The page -----------------------------------------------------------------------------------


def test_the_examples_of_the_page_run(tmp_path):
    """docs/engines.md: from a folder with a tokenizer to tokens; unfused; a plain one quantised."""
    page = (ROOT / "docs" / "engines.md").read_text()
    first, apart, second = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    stored = made(tmp_path, "llama", "modelopt-nvfp4", initializer_range=FLAT)
    stored.folder.rename(tmp_path / "model")
    words = ["[UNK]", "The", "answer", "is", *(f"word{i}" for i in range(hf_models.V - 4))]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[UNK]"
    ).save_pretrained(tmp_path / "model")
    code = f"{first}\nprint(type(model.model.layers[0].mlp.gate_up_proj).__module__)\n{apart}"
    code += f"print(type(model.model.layers[0].mlp).__name__)\n{second}"
    run = python(f"import os; os.chdir({str(tmp_path)!r})\n{code}")
    assert run.returncode == 0, run.stderr
    text, module, mlp = run.stdout.splitlines()
    assert mlp == "LlamaMLP"
    assert text.startswith("The answer is ")
    assert len(text.split()) == 3 + 20
    assert module == "blockscale.nn.linear"
    again = bs.checkpoints.open(tmp_path / "quantised")
    assert again.entries["model.layers.1.self_attn.q_proj.weight"].fmt == "nvfp4"
    assert again.entries["model.layers.0.self_attn.q_proj.weight"].fmt == "f32"
    assert again.entries["model.layers.1.self_attn.o_proj.weight"].fmt == "f32"
