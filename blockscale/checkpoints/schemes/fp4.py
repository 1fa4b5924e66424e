"""Rules of E2M1 weights: NVFP4 and MXFP4 of ModelOpt and compressed-tensors, and gpt-oss.

Two codes are one byte along K, the even one low; bytes are U8, I8 or F4.  What tells NVFP4 from
MXFP4 is the block scale: E4M3 under a global scale, or E8M0 without one.  Bytes of either may be
U8; then the global scale decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch

from blockscale.base.formats import QUANTIZED
from blockscale.checkpoints.entry import (
    SCALE_BYTES,
    Entry,
    Tensors,
    byte_shape,
    check_dtype,
    named,
    need,
    ones_dropped,
)
from blockscale.checkpoints.files.safetensors import TensorInfo, shown
from blockscale.checkpoints.moves import transposed
from blockscale.ops.quant import quantize

Tensor = torch.Tensor

CODE_BYTES = ("U8", "I8", "F4")
_GROUPS = {"nvfp4": (16, 32, 64, 128), "mxfp4": (QUANTIZED["mxfp4"].block,)}
"""Values of a block scale; ModelOpt's W4A8_NVFP4_FP8 and some W4A16_NVFP4 have 32."""
_LORA = "weight_quantizer._svdquant_lora"
_GLOBALS = ("global_scale", "global_divisor")
_SINGLE = (*_GLOBALS, "input_scale", "input_divisor")


def modelopt(tensors: Tensors, info: TensorInfo, base: str) -> Entry:
    """Return ModelOpt's weight; ``base`` is what stands before "weight_scale".

    It is "P." for P.weight, and "X_" for all experts in one tensor X.
    """
    parts = tensors.take(
        info,
        block_scale=tensors.first(base + "weight_scale", base + "scale"),
        **named(base, *_GLOBALS, "input_scale", "pre_quant_scale"),
        lora_a=tensors.first(base + "svdquant_lora_a", f"{base}{_LORA}_a"),
        lora_b=tensors.first(base + "svdquant_lora_b", f"{base}{_LORA}_b"),
    )
    need(info, parts, "block_scale", base + "weight_scale")
    return _fp4(info.name, "modelopt", parts, base + "weight_scale_2")


def compressed_tensors(tensors: Tensors, info: TensorInfo, stem: str) -> Entry:
    """Return the weight whose codes are ``stem`` + "_packed", scales ``stem`` + "_scale"."""
    inputs = stem.removesuffix("weight") if stem.endswith(".weight") else stem + "_"
    parts = tensors.take(
        info,
        block_scale=stem + "_scale",
        global_divisor=stem + "_global_scale",
        input_divisor=inputs + "input_global_scale",
        shape=stem + "_shape",
    )
    parts.pop("shape", None)
    zero = stem + "_zero_point"
    if zero in tensors:
        raise info.refused(
            f"has {shown(zero)}, but codes of E2M1 have no zero points; quantise it with "
            "symmetric=True"
        )
    need(info, parts, "block_scale", stem + "_scale")
    return _fp4(stem, "compressed-tensors", parts, stem + "_global_scale")


def _fp4(name: str, scheme: str, parts: dict[str, TensorInfo], top: str) -> Entry:
    info, scale = parts["packed"], parts["block_scale"]
    check_dtype(info, CODE_BYTES)
    check_dtype(scale, SCALE_BYTES, " or F8_E4M3") if scale.dtype != "F8_E4M3" else None
    has_top = any(role in parts for role in _GLOBALS)
    if scale.dtype == "F8_E8M0" and has_top:
        raise info.refused(
            "has E8M0 block scales and a global scale, but MXFP4 has none; convert it again"
        )
    if scale.dtype == "F8_E4M3" and not has_top:
        need(info, parts, _GLOBALS[0], top)
    fmt = "nvfp4" if has_top else "mxfp4"
    shape, transposed, group = _shape(info, scale, _GROUPS[fmt])
    for role in _SINGLE:
        if role in parts:
            _per_expert(parts[role], shape[:-2], role in _GLOBALS)
    return Entry(name, fmt, scheme, parts, shape, group, transposed)


def gpt_oss(tensors: Tensors, info: TensorInfo, base: str) -> Entry | None:
    """Return the weight whose codes are ``base`` + "_blocks", scales ``base`` + "_scales"."""
    other = base + info.name[len(base)] + "scales"
    if info.dtype != "U8":
        return None
    parts = tensors.take(info, block_scale=other)
    scale = need(info, parts, "block_scale", other)
    check_dtype(scale, SCALE_BYTES)
    half = QUANTIZED["mxfp4"].block // 2
    if len(info.shape) < 3 or info.shape[-1] != half or scale.shape != info.shape[:-1]:
        raise info.refused(
            f"is {list(info.shape)} and its scales are {list(scale.shape)}, but must be "
            f"[..., N, K / 32, {half}] and [..., N, K / 32]; copy it again"
        )
    group = QUANTIZED["mxfp4"].block
    shape = (*info.shape[:-2], info.shape[-2] * group)
    return Entry(base, "mxfp4", "gpt-oss", parts, shape, group)


def _shape(
    info: TensorInfo, scale: TensorInfo, groups: tuple[int, ...]
) -> tuple[tuple[int, ...], bool, int]:
    """Return the dense shape, whether K is the second of three dimensions, and values a scale."""
    p, s = byte_shape(info), scale.shape
    if len(p) == 2 and len(s) == 3 and s[0] == 1:
        s = s[1:]
    last = len(p) in (2, 3) and s[:-1] == p[:-1]
    second = len(p) == len(s) == 3 and (s[0], s[2]) == (p[0], p[2]) and info.dtype != "F4"
    for group in groups:
        if last and 2 * p[-1] == group * s[-1]:
            return (*p[:-1], 2 * p[-1]), False, group
        if second and 2 * p[1] == group * s[1]:
            return (p[0], p[2], 2 * p[1]), True, group
    raise info.refused(
        f"is {list(p)} and its block scales are {list(s)}, but must be [N, K / 2] and "
        f"[N, K / {groups[0]}], or these of each expert with K last or second; convert the "
        "checkpoint again"
    )


def _per_expert(info: TensorInfo, experts: tuple[int, ...], parts: bool) -> None:
    count = experts[0] if experts else 1
    allowed = [(), ones_dropped([count])]
    if parts and experts:  # gate and up in one tensor, each with its own
        allowed.append(ones_dropped([count, 2]))
    if info.dtype != "F32" or ones_dropped(info.shape) not in allowed:
        raise info.refused(
            f"is {info.dtype} {list(info.shape)}, but must be one "
            f"F32{f' or {count}, one of each expert' if count > 1 else ''}; convert the "
            "checkpoint again"
        )


def values(entry: Entry, parts: dict[str, Tensor]) -> dict[str, Any]:
    """Return ``packed`` and ``block_scale`` of a `Weight`, of the tensors as they are stored."""
    packed, scale = parts["packed"].view(torch.uint8), parts["block_scale"]
    if entry.scheme == "gpt-oss":
        packed = packed.flatten(-2)
    if entry.fmt == "nvfp4" and scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e4m3fn)
    if scale.dim() > len(entry.shape):
        scale = scale[0]
    if entry.transposed:  # a byte keeps its two codes, neighbours along K
        packed, scale = transposed(packed), transposed(scale)
    if entry.group > QUANTIZED[entry.fmt].block:
        repeats = entry.group // QUANTIZED[entry.fmt].block
        scale = scale.view(torch.uint8).repeat_interleave(repeats, -1).view(scale.dtype)
    return {"packed": packed, "block_scale": scale}


def quantized(
    fmt: str, shape: Sequence[int], pieces: Iterable[tuple[int, Tensor, Tensor | None]]
) -> tuple[Tensor, Tensor]:
    """Return codes and block scales of a weight [..., N, K] that comes in pieces.

    A piece is the number of its first row, its values [rows, K], and their global scale.
    """
    *lead, cols = shape
    packed = torch.empty((prod(lead), cols // 2), dtype=torch.uint8, device="cpu")
    dtype = getattr(torch, QUANTIZED[fmt].scale.dtypes[0])
    blocks = cols // QUANTIZED[fmt].block
    scale = torch.empty((prod(lead), blocks), dtype=dtype, device="cpu")
    for start, rows, top in pieces:
        at = slice(start, start + len(rows))
        quantize(rows, fmt, top, packed=packed[at], block_scale=scale[at])
    return packed.view(*lead, -1), scale.view(*lead, -1)
