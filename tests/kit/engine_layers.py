"""What layers of an engine are given: tiny weights as checkpoints store them, and their values.

`SCHEMES` has, for each way to store a weight, what config.json says about it in the words that vLLM
and SGLang read.  As `hf_models`, it shares nothing with the package.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch

from tests.kit import checkpoint_files as files
from tests.kit import hf_models

K, N, E, I = 128, 96, 3, 64  # noqa: E741 - of a linear layer; of experts: hidden size K
GROUP = hf_models.GROUP
TOP = np.float32(2.0**-11)
"""Global scale of NVFP4, the same for all weights, as tools write it for layers that are fused."""


def nvfp4(p: str, values: np.ndarray, rng: Any = None) -> hf_models.Made:
    """ModelOpt's NVFP4 under `TOP`."""
    codes, scale, dense = _nvfp4(values)
    tensors = {"weight": files.nibbles(codes), "weight_scale": scale, "weight_scale_2": TOP}
    tensors["input_scale"] = np.float32(0.5)
    return {f"{p}.{name}": np.asarray(value) for name, value in tensors.items()}, dense


def ct_nvfp4(p: str, values: np.ndarray, rng: Any = None) -> hf_models.Made:
    """NVFP4 of compressed-tensors under `TOP`."""
    codes, scale, dense = _nvfp4(values)
    tensors = {"weight_packed": files.nibbles(codes), "weight_scale": scale}
    tensors["weight_global_scale"] = np.array([1 / TOP], np.float32)
    return {f"{p}.{name}": value for name, value in tensors.items()}, dense


def _nvfp4(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    blocks = values.reshape(*values.shape[:-1], -1, 16)
    scale = (np.abs(blocks).max(-1) / 6 / TOP).astype(files.E4M3)
    each = np.repeat(scale.astype(np.float64) * float(TOP), 16, -1)
    codes = hf_models.e2m1(np.clip(values / np.where(each == 0, 1, each), -6, 6))
    return codes, scale, files.E2M1[codes] * each


def gptq(p: str, values: np.ndarray, rng: Any = None) -> hf_models.Made:
    """GPTQ without zero points or act-order."""
    scale = (np.abs(values.reshape(len(values), -1, GROUP)).max(-1) / 7).astype(np.float16)
    each = np.repeat(scale.astype(float), GROUP, -1)
    codes = np.clip(np.rint(values / each) + 8, 0, 15).astype(np.uint8)
    zero = np.full((scale.shape[1], len(values)), 7, np.uint8)  # stored is one less
    tensors = {
        "qweight": np.ascontiguousarray(files.words(codes, files.STRAIGHT).T),
        "qzeros": files.words(zero, files.STRAIGHT),
        "scales": np.ascontiguousarray(scale.T),
        "g_idx": (np.arange(values.shape[1]) // GROUP).astype(np.int32),
    }
    return {f"{p}.{name}": value for name, value in tensors.items()}, (codes - 8.0) * each


def symmetric(p: str, values: np.ndarray, rng: Any = None) -> hf_models.Made:
    """INT4 of compressed-tensors without zero points."""
    tensors, dense = gptq("", values)
    words = np.ascontiguousarray(tensors[".qweight"].T)
    made = {"weight_packed": words, "weight_scale": np.ascontiguousarray(tensors[".scales"].T)}
    made["weight_shape"] = np.array(values.shape, np.int64)
    return {f"{p}.{name}": value for name, value in made.items()}, dense


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "symmetric": True, "dynamic": False, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    said = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    return {**said, "ignore": ["lm_head"], "quantization_status": "compressed"}


_INT4 = {"type": "int", "strategy": "group", "group_size": GROUP}
_MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
_MODELOPT |= {"ignore": ["lm_head"], "exclude_modules": ["lm_head"], "kv_cache_quant_algo": None}

SCHEMES = {
    "modelopt-nvfp4": hf_models.Scheme(nvfp4, _MODELOPT),
    "modelopt-w4a16": hf_models.Scheme(nvfp4, {**_MODELOPT, "quant_algo": "W4A16_NVFP4"}),
    "ct-nvfp4": hf_models.Scheme(
        ct_nvfp4,
        _compressed(
            *("nvfp4-pack-quantized",), type="float", strategy="tensor_group", group_size=16
        ),
    ),
    "ct-mxfp4": hf_models.Scheme(
        hf_models.compressed_mxfp4,
        _compressed(
            *("mxfp4-pack-quantized",),
            type="float",
            strategy="group",
            group_size=32,
            scale_dtype="torch.uint8",
        ),
    ),
    "ct-int4": hf_models.Scheme(
        hf_models.compressed_int4, _compressed("pack-quantized", **_INT4, symmetric=False)
    ),
    "ct-int4-sym": hf_models.Scheme(symmetric, _compressed("pack-quantized", **_INT4)),
    "awq": hf_models.Scheme(
        hf_models.awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "version": "gemm",
            "zero_point": True,
        },
    ),
    "gptq": hf_models.Scheme(
        gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    ),
}
"""As `hf_models.SCHEMES`, in the words that engines want."""


def generator(name: str) -> np.random.Generator:
    """The generator of a weight whose parameters are recorded (`engine_facts`)."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def gpt_oss_experts(rng: np.random.Generator) -> tuple[Any, Any, tuple[np.ndarray, np.ndarray]]:
    """(codes, scales, values) of each expert's w13, gates and ups in turns, and w2; biases."""
    made = [hf_models.mxfp4(weight(rng, 2 * I, K)) for _ in range(E)]
    down = [hf_models.mxfp4(weight(rng, K, I)) for _ in range(E)]
    biases = rng.standard_normal((E, 2 * I)), rng.standard_normal((E, K))
    rounded = [torch.from_numpy(bias).bfloat16().double().numpy() for bias in biases]
    return made, down, (rounded[0], rounded[1])


def gpt_oss_truth(x: torch.Tensor, ids: np.ndarray, factors: np.ndarray, stored: Any) -> np.ndarray:
    """`truth` of experts of `gpt_oss_experts`."""
    made, down, biases = stored
    split = [np.concatenate([part[2][0::2], part[2][1::2]]) for part in made]
    ups = np.concatenate([biases[0][:, 0::2], biases[0][:, 1::2]], 1)

    def act(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)

    return truth(x, ids, factors, split, [part[2] for part in down], act, (ups, biases[1]))


def weight(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Values of a weight [N, K]."""
    return rng.standard_normal(shape) * 0.15


def dtype_of(scheme):
    """The dtype of the model: scales of INT4 are in it, those of the tests have 11 bits."""
    return torch.bfloat16 if scheme.endswith(("fp4", "w4a16")) else torch.float16


def torch_of(value):
    value = np.asarray(value)
    if value.dtype == files.E4M3:
        return torch.from_numpy(value.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape)


def worst(found, wanted):
    found, wanted = found.double().numpy(), np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape
    return float((np.linalg.norm(found - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)).max())


# ---- Experts ------------------------------------------------------------------------------------

SHARDS = {"gate_proj": ("w13", "w1"), "up_proj": ("w13", "w3"), "down_proj": ("w2", "w2")}
"""Names of a projection's parameters and of its shard."""


def routed(rng, tokens=7):
    ids = np.stack([rng.permutation(E)[:2] for _ in range(tokens)])
    factors = rng.random((tokens, 2)).astype(np.float32)
    x = torch.randn(tokens, K)
    return x, ids, factors


def silu(gate, up):
    return gate / (1 + np.exp(-gate)) * up


def truth(x, ids, factors, gate_up, down, act, biases=None):
    """The layer in float64, token by token."""
    x = x.double().numpy()
    made = np.zeros_like(x)
    for (t, j), e in np.ndenumerate(ids):
        sums = gate_up[e] @ x[t] + (biases[0][e] if biases else 0)
        h = act(sums[:I], sums[I:])
        made[t] += factors[t, j] * (down[e] @ h + (biases[1][e] if biases else 0))
    return made


def stored_experts(scheme, rng):
    """Tensors of all experts by projection, and their values."""
    store = SCHEMES[scheme].store
    values, tensors = {}, []
    for e in range(E):
        for name, shape in (("gate_proj", (I, K)), ("up_proj", (I, K)), ("down_proj", (K, I))):
            parts, dense = store(f"{e}.{name}", weight(rng, *shape), rng)
            tensors += parts.items()
            values[e, name] = dense
    gate_up = [np.concatenate([values[e, "gate_proj"], values[e, "up_proj"]]) for e in range(E)]
    return tensors, gate_up, [values[e, "down_proj"] for e in range(E)]
