"""Tiny models of transformers, quantised on the spot as other tools store them.

A stock model with random weights is saved; its linear layers and experts are rounded to a format by
NumPy, stored as a scheme stores them, and, dequantised, saved once more as the reference.  Nothing
here is shared with the package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.kit import checkpoint_files as files

transformers = pytest.importorskip("transformers")  # of whoever imports this
load_file = pytest.importorskip("safetensors.torch").load_file

H, I, V = 64, 96, 80  # noqa: E741 - sizes that are no multiples of each other
GROUP = 32
_SMALL = {
    "hidden_size": H,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": V,
    "initializer_range": 0.15,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": GROUP}


def config(kind: str, **changes: Any) -> Any:
    """The configuration of a tiny model."""
    of = {
        "llama": ("LlamaConfig", {"intermediate_size": I}),
        "qwen3_moe": (
            "Qwen3MoeConfig",
            {"intermediate_size": I, "num_experts": 4, "mlp_only_layers": [1], **_ROUTED},
        ),
        "mixtral": (
            "MixtralConfig",
            {"intermediate_size": GROUP, "num_local_experts": 4, "num_experts_per_tok": 2},
        ),
        "gpt_oss": (
            "GptOssConfig",
            {
                "intermediate_size": GROUP,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 8,
            },
        ),
        "deepseek_v3": (
            "DeepseekV3Config",
            {
                "intermediate_size": I,
                "n_routed_experts": 8,
                "n_group": 2,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "n_shared_experts": 1,
                "q_lora_rank": GROUP,
                "kv_lora_rank": GROUP,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 16,
                "v_head_dim": 16,
                **_ROUTED,
            },
        ),
    }
    name, own = of[kind]
    return getattr(transformers, name)(**{**_SMALL, **own, **changes})


# ---- Formats: values [..., N, K] to what is stored, and its values ------------------------------


def e2m1(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)


def nvfp4(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32, np.ndarray]:
    """Codes, E4M3 scales, a global scale, values."""
    top = np.float32(np.abs(values).max() / 2688)
    blocks = values.reshape(*values.shape[:-1], -1, 16)
    scale = (np.abs(blocks).max(-1) / 6 / top).astype(files.E4M3)
    each = np.repeat(scale.astype(np.float32) * top, 16, -1)
    codes = e2m1(values / np.where(each == 0, 1, each))
    return codes, scale, top, files.E2M1[codes] * each.astype(np.float64)


def mxfp4(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, bytes of E8M0, values."""
    blocks = values.reshape(*values.shape[:-1], -1, 32)
    scale = (np.floor(np.log2(np.abs(blocks).max(-1))) - 2 + 127).astype(np.uint8)
    each = np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, -1)
    codes = e2m1(np.clip(values / each, -6, 6))
    return codes, scale, files.E2M1[codes] * each


def int4(values: np.ndarray, index: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
    """Codes, zeros from 1 to 15, fp16 scales of [N, K], values; ``index``: the group of each k."""
    cols = values.shape[-1]
    index = np.arange(cols) // GROUP if index is None else index
    groups = [values[:, index == g] for g in range(cols // GROUP)]
    low = np.stack([np.minimum(g.min(-1), 0) for g in groups], -1)
    high = np.stack([np.maximum(g.max(-1), 0) for g in groups], -1)
    scale = ((high - low) / 14).astype(np.float16)
    zero = np.clip(np.rint(-low / scale.astype(float)), 1, 15).astype(np.uint8)
    each = scale.astype(float)[:, index]
    codes = np.clip(np.rint(values / each) + zero[:, index], 0, 15).astype(np.uint8)
    return codes, zero, scale, (codes - zero.astype(float)[:, index]) * each


# ---- Schemes: tensors of one linear layer P, and its values -------------------------------------

Made = tuple[dict[str, np.ndarray], np.ndarray]


def modelopt_nvfp4(p: str, values: np.ndarray, rng: Any) -> Made:
    codes, scale, top, dense = nvfp4(values)
    tensors = {"weight": files.nibbles(codes), "weight_scale": scale, "weight_scale_2": top}
    tensors["input_scale"] = np.float32(0.5)
    return {f"{p}.{name}": np.asarray(value) for name, value in tensors.items()}, dense


def modelopt_mxfp4(p: str, values: np.ndarray, rng: Any) -> Made:
    codes, scale, dense = mxfp4(values)
    return {f"{p}.weight": files.nibbles(codes), f"{p}.weight_scale": scale}, dense


def fp8(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """E4M3 numbers, the tensor's scale, values."""
    scale = np.float32(np.abs(values).max() / 448)
    eight = (values / scale).astype(files.E4M3)
    return eight, np.asarray(scale), eight.astype(float) * float(scale)


def modelopt_fp8(p: str, values: np.ndarray, rng: Any) -> Made:
    eight, scale, dense = fp8(values)
    return {f"{p}.weight": eight, f"{p}.weight_scale": scale}, dense


def modelopt_mixed(p: str, values: np.ndarray, rng: Any) -> Made:
    """FP8 attention beside NVFP4."""
    store = modelopt_fp8 if "self_attn" in p else modelopt_nvfp4
    return store(p, values, rng)


def modelopt_mixed_experts(p: str, values: np.ndarray, rng: Any) -> Made:
    """FP8 experts beside NVFP4."""
    store = modelopt_fp8 if ".experts." in p else modelopt_nvfp4
    return store(p, values, rng)


def compressed_nvfp4(p: str, values: np.ndarray, rng: Any) -> Made:
    codes, scale, top, _ = nvfp4(values)
    divisor = np.float32(1) / top
    effective = np.repeat(scale.astype(np.float64) / float(divisor), 16, -1)
    tensors = {
        "weight_packed": files.nibbles(codes),
        "weight_scale": scale,
        "weight_global_scale": np.array([divisor]),
    }
    return {f"{p}.{k}": v for k, v in tensors.items()}, files.E2M1[codes] * effective


def compressed_mxfp4(p: str, values: np.ndarray, rng: Any) -> Made:
    codes, scale, dense = mxfp4(values)
    return {f"{p}.weight_packed": files.nibbles(codes), f"{p}.weight_scale": scale}, dense


def compressed_int4(p: str, values: np.ndarray, rng: Any) -> Made:
    codes, zero, scale, dense = int4(values)
    tensors = {
        "weight_packed": files.words(codes, files.STRAIGHT),
        "weight_scale": scale,
        "weight_zero_point": np.ascontiguousarray(files.words(zero.T, files.STRAIGHT).T),
        "weight_shape": np.array(codes.shape, np.int64),
    }
    return {f"{p}.{k}": v for k, v in tensors.items()}, dense


def awq(p: str, values: np.ndarray, rng: Any) -> Made:
    codes, zero, scale, dense = int4(values)
    tensors = {
        "qweight": files.words(np.ascontiguousarray(codes.T), files.AWQ),
        "qzeros": files.words(np.ascontiguousarray(zero.T), files.AWQ),
        "scales": np.ascontiguousarray(scale.T),
    }
    return {f"{p}.{k}": v for k, v in tensors.items()}, dense


def gptq(p: str, values: np.ndarray, rng: Any) -> Made:
    """In act-order, but of experts, whose kernels have none."""
    cols = values.shape[1]
    index = np.arange(cols) // GROUP
    index = index if ".experts." in p else rng.permutation(index)
    codes, zero, scale, dense = int4(values, index)
    tensors = {
        "qweight": np.ascontiguousarray(files.words(codes, files.STRAIGHT).T),
        "qzeros": files.words(np.ascontiguousarray(zero.T) - 1, files.STRAIGHT),
        "scales": np.ascontiguousarray(scale.T),
        "g_idx": index.astype(np.int32),
    }
    return {f"{p}.{k}": v for k, v in tensors.items()}, dense


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, **weights}}}
    said = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    return {**said, "ignore": ["lm_head"]}


@dataclass(frozen=True)
class Scheme:
    """How a linear layer is stored, and what config.json says."""

    store: Callable[[str, np.ndarray, Any], Made]
    said: dict[str, Any] = field(default_factory=dict)


SCHEMES = {
    "modelopt-nvfp4": Scheme(
        modelopt_nvfp4,
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
        },
    ),
    "modelopt-mxfp4": Scheme(modelopt_mxfp4, {"quant_method": "modelopt", "quant_algo": "MXFP4"}),
    "modelopt-mixed": Scheme(
        modelopt_mixed, {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    ),
    "modelopt-fp8": Scheme(modelopt_fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "modelopt-mixed-experts": Scheme(
        modelopt_mixed_experts, {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    ),
    "ct-nvfp4": Scheme(compressed_nvfp4, _compressed("nvfp4-pack-quantized", type="float")),
    "ct-mxfp4": Scheme(compressed_mxfp4, _compressed("mxfp4-pack-quantized", type="float")),
    "ct-int4": Scheme(compressed_int4, _compressed("pack-quantized", type="int", group_size=GROUP)),
    "awq": Scheme(awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "gptq": Scheme(
        gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}
    ),
}

_LAYER = re.compile(
    r"(?!.*lm_head)(.*\.(?:[qkvo]_proj|gate_proj|up_proj|down_proj|w[123]|[qkvo]_[ab]_proj|"
    r"kv_[ab]_proj(?:_with_mqa)?))\.weight"
)
"""Names of weights that tools quantise; the first group is P."""


@dataclass(frozen=True)
class Pair:
    """A quantised checkpoint, and the dense one of the same values in float32."""

    folder: Path
    dense: Path
    quantised: tuple[str, ...]


def pair(
    path: Path,
    config: Any,
    scheme: str,
    *,
    keep: Iterable[str] = (),
    shards: int = 1,
    said: dict[str, Any] | None = None,
) -> Pair:
    """Write both checkpoints of a tiny model; names that ``keep`` matches stay as they are."""
    plain = stock(path / "plain", config)
    rng = np.random.default_rng(5)
    tensors: dict[str, np.ndarray] = {}
    values: dict[str, np.ndarray] = {}
    done = []
    for name, value in plain.items():
        match = _LAYER.fullmatch(name)
        if match is None or any(re.search(pattern, name) for pattern in keep):
            tensors[name] = values[name] = value
            continue
        parts, dense = SCHEMES[scheme].store(match[1], value.astype(np.float64), rng)
        tensors |= parts
        values[name] = dense.astype(np.float32)
        done.append(match[1])
    return _written(path, tensors, values, done, said or SCHEMES[scheme].said, shards)


def gpt_oss(path: Path, config: Any, shards: int = 1, *, eight: bool = False) -> Pair:
    """Write gpt-oss as OpenAI quantised it: experts in MXFP4, everything else as it is.

    ``eight``: experts in FP8, [E, in, out], and the projections of attention in NVFP4.
    """
    rng = np.random.default_rng(5)
    tensors, values, done = {}, {}, []
    for name, value in stock(path / "plain", config).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = values[name] = value
            if eight and name.endswith("proj.weight"):
                p = name.removesuffix(".weight")
                parts, dense = modelopt_nvfp4(p, value.astype(np.float64), rng)
                del tensors[name]
                tensors |= parts
                values[name] = dense.astype(np.float32)
            continue
        done.append(name)
        if eight:
            tensors[name], scale, dense = fp8(value.astype(np.float64))
            tensors[f"{name}_weight_scale"] = scale
            values[name] = dense.astype(np.float32)
            continue
        rows = value.astype(np.float64).swapaxes(1, 2)  # [E, out, in]
        codes, scale, dense = mxfp4(rows)
        tensors[f"{name}_blocks"] = files.nibbles(codes).reshape(*scale.shape, 16)
        tensors[f"{name}_scales"] = scale
        values[name] = np.ascontiguousarray(dense.swapaxes(1, 2)).astype(np.float32)
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    if eight:
        said = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    return _written(path, tensors, values, done, said, shards)


def stock(path: Path, config: Any) -> dict[str, np.ndarray]:
    """Save a stock model with random weights and biases; its tensors by their names in the file."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith(("bias", "sinks", "norm.weight")):
                value.add_(0.2 * torch.randn(value.shape))
        for name, value in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                value.add_(0.1 * torch.randn(value.shape))
    model.bfloat16().float().save_pretrained(path)  # so that a model in bfloat16 rounds no weight
    return {name: value.numpy() for name, value in load_file(path / "model.safetensors").items()}


def _written(
    path: Path,
    tensors: dict[str, np.ndarray],
    values: dict[str, np.ndarray],
    done: list[str],
    said: dict[str, Any],
    shards: int,
) -> Pair:
    about = json.loads((path / "plain" / "config.json").read_text())
    dense = files.folder(path / "dense", values, about)
    folder = path / "quantised"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**about, "quantization_config": said}))
    if shards == 1:
        files.save(folder / "model.safetensors", tensors)
    else:
        where = {}
        for number in range(shards):
            name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
            some = dict([*tensors.items()][number::shards])  # parts of a weight in several files
            files.save(folder / name, some)
            where |= dict.fromkeys(some, name)
        index = {"metadata": {}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return Pair(folder, dense, tuple(done))
