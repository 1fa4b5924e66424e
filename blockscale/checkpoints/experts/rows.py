"""Experts' tensors brought to [E, out, in], and to gate rows first: bytes are moved, no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from blockscale.base.errors import CheckpointError
from blockscale.checkpoints.entry import Facts
from blockscale.checkpoints.weight import Weight

Tensor = torch.Tensor

_TRANSPOSED = ("llama4", "llama4_text", "gpt_oss", "qwen3_vl_moe", "qwen3_vl_moe_text")
"""Model types that store plain experts as [E, in, out]; asked only where shapes cannot say it."""


def is_turned(up: Weight, down: Weight, facts: Facts) -> tuple[bool, str]:
    """Return whether tensors of all experts hold [E, in, out], and how that was found.

    Only plain and FP8 ones can: of the others, scales tell it.  If ``up`` is gate and up together,
    one of its sizes is 2 I, and shapes decide.  Else the width of the model does.

    Raises:
        CheckpointError: the shapes are not of one layer.
    """
    if any(weight.packed is not None or len(weight.shape) != 3 for weight in (up, down)):
        return False, ""
    (_, a, b), (_, c, d) = up.shape, down.shape
    straight, turned = b == c, a == d  # H of both, or I of both: gate and up together have 2 I
    why = "as their shapes say"
    if straight and turned:
        if facts.hidden in (a, b) and a != b:
            turned = a == facts.hidden
            why = f"as hidden_size {facts.hidden} says"
        else:
            turned = facts.model in _TRANSPOSED
            why = f"as models of type {facts.model!r} do"
    elif not straight and not turned:
        raise CheckpointError(
            f"{up.name} is {list(up.shape)} and {down.name} {list(down.shape)}, which are no "
            "weights of one layer: [E, 2 I, H] and [E, H, I], or both transposed; copy them again"
        )
    order = "[E, in, out]" if turned else "[E, out, in]"
    return turned, f"experts are stored as {order}, {why}"


def turned(weight: Weight) -> Weight:
    """Return a weight of data [E, in, out] as [E, out, in]."""
    assert weight.data is not None
    data = _bytes(weight.data).transpose(1, 2).contiguous().view(weight.data.dtype)
    e, rows, cols = weight.shape
    made = replace(weight, data=data, shape=(e, cols, rows))
    if weight.block_scale is None or weight.block is None:
        return made
    scale = _bytes(weight.block_scale).transpose(1, 2).contiguous().view(weight.block_scale.dtype)
    return replace(made, block_scale=scale, block=weight.block[::-1])


def _bytes(value: Tensor) -> Tensor:
    return value.view(torch.uint8) if value.dtype.itemsize == 1 else value


def split_rows(rows: Tensor) -> Tensor:
    """Return [E, rows, ...] with the even rows first."""
    flat = _bytes(rows)
    return torch.cat([flat[:, 0::2], flat[:, 1::2]], 1).view(rows.dtype)


def halves(weight: Weight) -> Weight:
    """Return the weight with the even rows, of gate, first."""
    if weight.block is not None and weight.block[0] > 1:
        raise CheckpointError(
            f"{weight.name}: gate and up alternate under scales of {weight.block[0]} rows each, "
            "which cannot be parted; use the BF16 checkpoint"
        )
    parts = {name: getattr(weight, name) for name in ("data", "packed", "block_scale", "zero")}
    moved: dict[str, Any] = {
        name: None if value is None else split_rows(value) for name, value in parts.items()
    }
    return replace(weight, gate_up="halves", **moved)


def each(weight: Weight) -> Weight:
    """Return the weight with one global scale of each expert, also where one serves all."""
    experts = weight.shape[0]
    moved: dict[str, Any] = {}
    for name in ("global_scale", "global_divisor"):
        value = getattr(weight, name)
        if value is not None and not value.dim():
            moved[name] = value.repeat(experts)
    return replace(weight, **moved) if moved else weight
