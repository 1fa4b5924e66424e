"""Rules of FP8 weights: one scale of the tensor, of each expert, of each row, or of each block.

Scales are multiplied, also where they are called "weight_scale_inv".
"""

from __future__ import annotations

from typing import Any

import torch

from blockscale.base.sizes import ceil_div
from blockscale.checkpoints.entry import FLOATS, Entry, Tensors, ones_dropped, weight_groups
from blockscale.checkpoints.files.safetensors import TensorInfo

Tensor = torch.Tensor

_BLOCKS = ((128, 128), (1, 32), (1, 128))
"""Rows and columns of a block: of DeepSeek, of MXFP8, and of activations stored alike."""
_DTYPES = (*FLOATS, "U8", "F8_E8M0")


def rule(tensors: Tensors, info: TensorInfo, base: str) -> Entry | None:
    """Return the weight of F8 values; ``base`` stands before "weight_scale"; None: no scale."""
    names = ("weight_scale_inv", "weight_scale", "scale_inv", "scale")
    found = tensors.first(*(base + name for name in names))
    if found not in tensors:
        return None
    parts = tensors.take(info, block_scale=found, input_scale=base + "input_scale")
    scale = parts["block_scale"]
    shape = info.shape
    scheme = "modelopt"
    method = tensors.config.get("quant_method")
    if method in ("compressed-tensors", "fp8") or found.endswith("_inv"):
        scheme = "fp8" if method != "compressed-tensors" else method
    one = ones_dropped(scale.shape)
    if scale.dtype in FLOATS and one in ((), shape[:-2]):
        parts["global_scale"] = parts.pop("block_scale")
        return Entry(info.name, "fp8", scheme, parts, shape)
    block = _block(tensors.config, shape, one) if scale.dtype in _DTYPES else None
    if block is None:
        raise scale.refused(
            f"is {scale.dtype} {list(scale.shape)}, but the scales of an FP8 weight {list(shape)} "
            "must be floats or E8M0: one of the tensor, of each expert, of each row, or of each "
            "block of 128 x 128 or 1 x 32; use the BF16 checkpoint"
        )
    return Entry(info.name, "fp8", scheme, parts, shape, block=block)


def _block(config: dict[str, Any], shape: tuple[int, ...], one: tuple[int, ...]) -> Any:
    """Return rows and columns of a block, or None where no block gives these scales."""
    if len(shape) not in (2, 3) or 0 in shape:
        return None
    rows, cols = shape[-2:]
    if one in (ones_dropped(shape[:-1]), shape[:-1]):
        return 1, cols
    said = _said(config)
    for high, wide in (*said, *_BLOCKS):
        count = (*shape[:-2], ceil_div(rows, high), ceil_div(cols, wide))
        if ones_dropped(count) == one:
            return high, wide
    return None


def told(config: dict[str, Any]) -> dict[str, Any]:
    """Return what says the sizes of blocks in a configuration of whichever form."""
    sizes = [[*size] for size in _said(config)]
    if len(sizes) == 1:
        return {"weight_block_size": sizes[0]}
    groups = {f"fp8_{i}": {"weights": {"block_structure": size}} for i, size in enumerate(sizes)}
    return {"config_groups": groups} if groups else {}


def _said(config: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the sizes of blocks that the configuration names."""
    found = [config.get("weight_block_size")]
    found += [weights.get("block_structure") for weights in weight_groups(config)]
    return [
        (sizes[0], sizes[1])
        for sizes in found
        if isinstance(sizes, list)
        and len(sizes) == 2
        and all(type(size) is int and 0 < size <= 1 << 20 for size in sizes)
    ]


def values(entry: Entry, parts: dict[str, Tensor]) -> dict[str, Any]:
    """Return ``data`` and ``block_scale`` of a `Weight`, of the tensors as they are stored."""
    scale = parts.get("block_scale")
    if scale is not None and entry.block is not None:
        high, wide = entry.block
        rows, cols = entry.shape[-2:]
        scale = scale.reshape(*entry.shape[:-2], ceil_div(rows, high), ceil_div(cols, wide))
    return {"data": parts["packed"], "block_scale": scale, "block": entry.block}
