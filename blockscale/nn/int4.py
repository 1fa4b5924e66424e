"""A linear layer on an INT4 weight of AWQ, GPTQ or TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from blockscale.base.errors import CheckpointError
from blockscale.nn.parts import Linear, equal, stacked
from blockscale.ops.int4 import products as int4_ops
from blockscale.ops.int4.weight import TENSORS, Int4Weight, prepare

if TYPE_CHECKING:
    from blockscale.checkpoints.weight import Weight

Tensor = torch.Tensor

FMT = "int4"

_MIDDLE = 8
"""Zero of symmetric codes."""


class Int4Linear(Linear):
    """``y = x' @ w + bias`` of a prepared weight; see `blockscale.int4.linear`.

    The weight is in the layout of the device that it was prepared for, and moves there alone.
    """

    _names = TENSORS

    def __init__(self, weight: Int4Weight | None = None) -> None:
        """Take what `blockscale.int4.prepare` makes of one weight; None: to be loaded."""
        torch.nn.Module.__init__(self)
        meta = {} if weight is None else weight.meta()
        self._hold({**meta, "fmt": FMT}, {} if weight is None else dict(weight.tensors()))

    @property
    def prepared(self) -> Int4Weight:
        """The weight: the module's buffers."""
        if self.packed is None:
            raise ValueError("Int4Linear: it has no weight yet; load a state_dict, or pass one")
        return Int4Weight.of(self._meta, {name: self._buffers[name] for name in TENSORS})

    @property
    def out_features(self) -> int:
        """Return N; 0 before there is a weight."""
        return int(self._meta.get("n", 0))

    @property
    def in_features(self) -> int:
        """Return K; 0 before there is a weight."""
        return int(self._meta.get("k", 0))

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., N] of x [..., K], in the dtype of x."""
        return int4_ops.linear(x, self.prepared)


def of_weights(
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None],
    dtype: torch.dtype | None,
    device: str | torch.device | None,
) -> Int4Linear:
    """Return the layer of weights of a checkpoint that are one above the other.

    Raises:
        CheckpointError: they differ in groups, their order, or pre_quant_scale.
    """
    first = weights[0]
    for other in weights[1:]:
        same = ("group_size", "group_index", "pre_quant_scale")
        what = next((f for f in same if not equal(getattr(first, f), getattr(other, f))), None)
        if what is not None:
            raise CheckpointError(
                f"{first.name} and {other.name} differ in {what}, so their rows cannot be one "
                "weight; load them one by one and concatenate what they give"
            )
    scales = [w.block_scale for w in weights]
    zeros = [
        torch.full_like(scale, _MIDDLE, dtype=torch.uint8) if w.zero is None else w.zero
        for w, scale in zip(weights, scales, strict=True)
        if scale is not None
    ]
    bias = None
    if any(value is not None for value in biases):
        rows = [torch.zeros(w.shape[0]) for w in weights]
        bias = torch.cat([z if b is None else b for z, b in zip(rows, biases, strict=True)])
    smooth = first.pre_quant_scale
    tensors: list[Any] = [stacked([w.packed for w in weights]), stacked(scales), stacked(zeros)]
    return Int4Linear(
        prepare(
            *tensors,
            group_size=first.group_size,
            layout="rows",
            group_index=first.group_index,
            pre_quant_scale=None if smooth is None else smooth.float(),
            bias=bias,
            dtype=dtype or torch.bfloat16,
            target=None if device is None else torch.device(device).type,
        )
    )
