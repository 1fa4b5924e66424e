"""The four ways in which the demo runs one model, and the bytes that their weights take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blockscale.specs import Linear

from . import files
from .model import BertConfig, Encoder, LinearCall, checkpoint_name, torch_linears
from .quantise import Quantised

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LABELS = {  # "NVFP4 bf16": 4-bit weights, activations in bfloat16
    "torch_f32": "torch fp32",
    "torch_bf16": "torch bf16",
    "ours_f32": "NVFP4 fp32",
    "ours_bf16": "NVFP4 bf16",
}
REFERENCE = "torch_f32"


def needed_functions(config: BertConfig) -> dict[tuple[int, int, str], str]:
    """Return the exported name for each (N, K, dtype) that the encoder calls."""
    shapes = dict.fromkeys(config.linears().values())
    return {(n, k, d): Linear(n, k, "nvfp4", d).name for n, k in shapes for d in DTYPES}


def needed_specs(config: BertConfig) -> list[Linear]:
    """Return the specs of `needed_functions`, in the same order."""
    return [Linear(n, k, "nvfp4", dtype) for n, k, dtype in needed_functions(config)]


def check_library(config: BertConfig, functions: Mapping[str, Any], path: object) -> None:
    """Raise PrerequisiteError unless `functions` has all that the encoder calls."""
    missing = [name for name in needed_functions(config).values() if name not in functions]
    if missing:
        raise files.PrerequisiteError(
            f"demo: the library {path} has no function {', '.join(missing)}, but the model has "
            f"Linears of that shape; it has {', '.join(functions) or 'none'}: run `make demo` to "
            "build it again"
        )


def kernel_linear(function: Any, weight: Quantised, bias: Tensor) -> LinearCall:
    """Return x [rows, K] -> [rows, N] that calls `function`, an exported `linear_nvfp4_...`."""
    packed, scale = weight.packed, weight.block_scale.view(torch.uint8)

    def call(x: Tensor) -> Tensor:
        y: Tensor = function(x, packed, scale, weight.global_scale, bias)
        return y

    return call


def kernel_linears(
    config: BertConfig,
    functions: Mapping[str, Any],
    weights: Mapping[str, Quantised],
    tensors: Mapping[str, Tensor],
    dtype: str,
) -> dict[str, LinearCall]:
    """Return a call of our kernels for every encoder Linear, for activations of `dtype`."""
    names = needed_functions(config)
    return {
        name: kernel_linear(
            functions[names[n, k, dtype]], weights[name], tensors[f"{checkpoint_name(name)}.bias"]
        )
        for name, (n, k) in config.linears().items()
    }


def all_linears(
    config: BertConfig,
    fp32: Mapping[str, Tensor],
    stored: Mapping[str, Tensor],
    weights: Mapping[str, Quantised],
    functions: Mapping[str, Any],
) -> dict[str, dict[str, LinearCall]]:
    """Return the Linears of all four variants, by variant and short name.

    Those of torch read the checkpoint `fp32`, ours only what the quantised file holds.
    """
    return {
        "torch_f32": torch_linears(config, fp32, torch.float32),
        "torch_bf16": torch_linears(config, fp32, torch.bfloat16),
        "ours_f32": kernel_linears(config, functions, weights, stored, "float32"),
        "ours_bf16": kernel_linears(config, functions, weights, stored, "bfloat16"),
    }


def dtype_of(variant: str) -> torch.dtype:
    """Return the activation dtype of a variant."""
    return torch.bfloat16 if variant.endswith("bf16") else torch.float32


def encoders(
    config: BertConfig,
    fp32: Mapping[str, Tensor],
    stored: Mapping[str, Tensor],
    linears: Mapping[str, Mapping[str, LinearCall]],
) -> dict[str, Encoder]:
    """Return one encoder for each variant; torch's read the checkpoint, ours the quantised file."""
    return {
        v: Encoder(config, stored if v.startswith("ours") else fp32, calls, dtype_of(v))
        for v, calls in linears.items()
    }


def weight_bytes(
    config: BertConfig, tensors: Mapping[str, Tensor], weights: Mapping[str, Quantised]
) -> dict[str, int]:
    """Return the bytes of the encoder's Linear weights in each form, and of all that is left fp32.

    "nvfp4" counts packed codes, block scales and global scales; biases are in "rest".
    """
    count = sum(n * k for n, k in config.linears().values())
    nvfp4 = sum(
        t.numel() * t.element_size()
        for w in weights.values()
        for t in (w.packed, w.block_scale, w.global_scale)
    )
    linear = tuple(f"{checkpoint_name(name)}.weight" for name in config.linears())
    rest = sum(
        t.numel() * t.element_size()
        for name, t in tensors.items()
        if name not in linear and t.dtype == torch.float32
    )
    return {"fp32": 4 * count, "bf16": 2 * count, "nvfp4": nvfp4, "rest": rest}
