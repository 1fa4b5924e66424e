"""Weights that a checkpoint stores expert by expert, as one weight of all experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from blockscale.checkpoint_weight import Weight
from blockscale.errors import CheckpointError

Tensor = torch.Tensor

_SAME = ("fmt", "shape", "group_size")
_STACKED = ("data", "packed", "block_scale", "global_scale", "zero", "global_divisor")


def stack(name: str, experts: list[Weight]) -> Weight:
    """Return the weight [E, N, K] of equal weights of each expert; scales stay of each expert.

    Raises:
        CheckpointError: the experts differ in format or shape, or are in act-order.
    """
    first = experts[0]
    for e, expert in enumerate(experts):
        for field in _SAME:
            if getattr(expert, field) != getattr(first, field):
                raise CheckpointError(
                    f"{name}: expert {e} has {field} {getattr(expert, field)}, but expert 0 has "
                    f"{getattr(first, field)}; read them one by one, {expert.name!r}"
                )
        if expert.group_index is not None or expert.pre_quant_scale is not None:
            raise CheckpointError(
                f"{name}: expert {e} is in act-order or has a pre_quant_scale of its own, so they "
                f"cannot be one weight; read them one by one, {expert.name!r}"
            )
    stacked: dict[str, Any] = {
        field: _stacked([getattr(w, field) for w in experts]) for field in _STACKED
    }
    inputs = _stacked([w.input_scale for w in experts])
    shape = (len(experts), *first.shape)
    return replace(first, name=name, shape=shape, input_scale=inputs, **stacked)


def _stacked(values: list[Tensor | None]) -> Tensor | None:
    found = [v for v in values if v is not None]
    if len(found) != len(values):
        return None
    if found[0].dtype == torch.float8_e4m3fn:
        return torch.stack([v.view(torch.uint8) for v in found]).view(found[0].dtype)
    return torch.stack(found)
