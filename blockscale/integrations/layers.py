"""Parameters of engines' layers, as they lie after loading, to weights of ours and back out.

vLLM and SGLang allocate a layer's parameters as the checkpoint has them; one step after loading may
replace them by what a kernel wants.  That step is here: tensors in, `LinearWeights` or `MoeWeights`
out, the parameters released.  Nothing is dequantised.  No engine is imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch

from blockscale.nn import FusedMoE, Linear
from blockscale.ops.linear.layer import linear
from blockscale.ops.linear.weights import LinearWeights, prepare_linear_weights
from blockscale.ops.moe.weights import MoeWeights

Tensor = torch.Tensor

HELD = "blockscale"
"""Name of the module that a layer gets in place of its parameters."""

_NIBBLES = torch.arange(0, 32, 4, dtype=torch.int32)
_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which nibble of an AWQ word has the code of each of its 8 columns."""


# ---- Packed integers ----------------------------------------------------------------------------


def unpacked(words: Tensor, dim: int, order: Iterable[int] = range(8)) -> Tensor:
    """Return the codes, uint8, of int32 words that hold 8 of them along ``dim``.

    ``order``: which nibble has each code, the lowest is 0.
    """
    shifts = _NIBBLES.to(words.device)[[*order]]
    codes = (words.unsqueeze(-1) >> shifts).bitwise_and_(15).to(torch.uint8)
    dim %= words.dim()
    return codes.movedim(-1, dim + 1).flatten(dim, dim + 1)


def code_bytes(words: Tensor, dim: int) -> Tensor:
    """Return codes [..., N, K / 2] of int32 words that hold 8 of them along K, the axis ``dim``."""
    return words.detach().movedim(dim, -1).contiguous().view(torch.uint8)


def awq_bytes(words: Tensor) -> Tensor:
    """Return codes [..., N, K / 2] of AWQ's words [..., K, N / 8], one matrix at a time."""
    if words.dim() > 2:
        return torch.stack([awq_bytes(matrix) for matrix in words])
    codes = unpacked(words, -1, _AWQ).mT.contiguous()
    return codes[..., 0::2] | codes[..., 1::2] << 4


def awq_zeros(words: Tensor) -> Tensor:
    """Return zero points [..., N, K / group], uint8, of AWQ's words [..., K / group, N / 8]."""
    return unpacked(words, -1, _AWQ).mT.contiguous()


# ---- Methods of engines -------------------------------------------------------------------------


@cache
def ending_in(cls: Any, ours: Any, kind: str) -> type:
    """Return a subclass of an engine's method, by the same name, with what ``ours`` defines.

    An instance of ``cls`` may be given this class; ``kind`` is an attribute of it.
    """
    defined = {name: value for name, value in vars(ours).items() if not name.startswith("__")}
    return type(cls.__name__, (cls,), {**defined, "kind": kind})


# ---- What takes the place of parameters ---------------------------------------------------------


def release(layer: torch.nn.Module, names: Iterable[str]) -> None:
    """Take the parameters off the layer, and their memory, whoever else still holds them."""
    for name in names:
        value = getattr(layer, name, None)
        if hasattr(layer, name):
            delattr(layer, name)
        if isinstance(value, torch.nn.Parameter):
            value.data = torch.empty(0, dtype=value.dtype, device=value.device)


class HeldLinear(Linear):
    """`bs.nn.Linear` in a layer of an engine, which passes the bias in each call, or not."""

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return [..., N]: the product with x [..., K], plus ``bias`` [N], rounded once."""
        if (bias is None) == (self.bias is None):
            return self(x)
        if bias is None:
            return linear(x, replace(self.weights, bias=None))
        return self(x) + bias


def hold_linear(layer: torch.nn.Module, weights: LinearWeights, names: Iterable[str]) -> None:
    """Put the weights into the layer, in place of the parameters ``names``."""
    release(layer, names)
    setattr(layer, HELD, HeldLinear(weights))


def bias_of(layer: torch.nn.Module) -> Tensor | None:
    """Return the layer's bias [N], if it has one and it belongs to the product."""
    bias = getattr(layer, "bias", None)
    return None if bias is None or getattr(layer, "skip_bias_add", False) else bias.data


class Activation(NamedTuple):
    """What is between the GEMMs of experts, as `blockscale.fused_moe` takes it."""

    activation: str
    alpha: float | None = None
    limit: float | None = None


def hold_experts(
    layer: torch.nn.Module, weights: MoeWeights, act: Activation, names: Iterable[str]
) -> FusedMoE:
    """Put the weights into the layer, in place of the parameters ``names``; return the module."""
    release(layer, names)
    held = FusedMoE(weights, 1, activation=act.activation, alpha=act.alpha, limit=act.limit)
    setattr(layer, HELD, held)
    return held


def halves(rows: Tensor) -> Tensor:
    """Return [E, 2 I, ...] with gates, then ups, of rows that have them in turns (gpt-oss)."""
    return torch.cat([rows[:, 0::2], rows[:, 1::2]], 1)


def prepared_int4(
    layer: torch.nn.Module,
    packed: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    dtype: torch.dtype,
) -> LinearWeights:
    """Return an INT4 weight: codes [N, K / 2], scales [N, G] of G groups, points [N, G] or None."""
    return prepare_linear_weights(
        packed,
        scale.detach().contiguous(),
        fmt="int4",
        group_size=2 * packed.shape[1] // scale.shape[1],
        zero=zero,
        bias=bias_of(layer),
        dtype=dtype,
    )
