"""Experts as engines' layers hold them after loading, by who wrote the checkpoint, to `MoeWeights`.

vLLM and SGLang allocate the same parameters, under the same names: ``w13_*`` and ``w2_*`` of all
experts.  What a method of theirs calls a layer's parameters is one row of `STORED`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from blockscale.integrations import layers
from blockscale.integrations.layers import Activation
from blockscale.ops.moe.weights import MoeWeights, prepare_moe_weights

Tensor = torch.Tensor

_BOTH = ("w13", "w2")


class Stored(NamedTuple):
    """One way to store experts.

    Attributes:
        fmt: of the codes.
        leaves: ends of the parameters' names that are released afterwards.
        parts: from layer and "w13" or "w2" to codes, scales, global scale and points.
        bias: end of a bias' name.
    """

    fmt: str
    leaves: tuple[str, ...]
    parts: Callable[[Any, str], tuple[Tensor, Tensor, Tensor | None, Tensor | None]]
    bias: str = "bias"


def _modelopt(layer: Any, which: str) -> Any:
    get = _getter(layer, which)
    return get("weight"), get("weight_scale"), get("weight_scale_2"), None


def _divided(layer: Any, which: str) -> Any:
    """NVFP4 of compressed-tensors, whose global scales are what values are divided by."""
    get = _getter(layer, which)
    return get("weight_packed"), get("weight_scale"), 1.0 / get("weight_global_scale"), None


def _packed(layer: Any, which: str) -> Any:
    get = _getter(layer, which)
    return get("weight_packed"), get("weight_scale"), None, None


def _plain(layer: Any, which: str) -> Any:
    get = _getter(layer, which)
    return get("weight"), get("weight_scale"), None, None


def _words(layer: Any, which: str) -> Any:
    """INT4 of compressed-tensors: words along K, points along rows."""
    get = _getter(layer, which)
    points = getattr(layer, f"{which}_weight_zero_point", None)
    zero = None if points is None else layers.unpacked(points.data, 1)
    return layers.code_bytes(get("weight_packed"), 2), get("weight_scale"), None, zero


def _gptq(layer: Any, which: str) -> Any:
    """GPTQ without zero points: words [E, K / 8, rows]."""
    get = _getter(layer, which)
    return layers.code_bytes(get("qweight"), 1), get("scales").mT.contiguous(), None, None


def _awq(layer: Any, which: str) -> Any:
    get = _getter(layer, which)
    zero = layers.awq_zeros(get("qzeros"))
    return layers.awq_bytes(get("qweight")), get("scales").mT.contiguous(), None, zero


def _getter(layer: Any, which: str) -> Callable[[str], Tensor]:
    return lambda leaf: getattr(layer, f"{which}_{leaf}").data


_FP4 = ("weight", "weight_scale", "weight_scale_2", "input_scale")
_CT = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_global_scale")
_SWIZZLED = ("blockscale_swizzled",)
_QWEIGHT = ("qweight", "scales", "qzeros", "g_idx", "g_idx_sort_indices")

STORED = {
    "modelopt": Stored("nvfp4", _FP4 + _SWIZZLED, _modelopt),
    "ct-nvfp4": Stored("nvfp4", (*_CT, "input_global_scale"), _divided),
    "ct-mxfp4": Stored("mxfp4", _CT, _packed),
    "ct-int4": Stored("int4", (*_CT, "weight_g_idx", "g_idx_sort_indices"), _words),
    "gpt-oss": Stored("mxfp4", _FP4, _plain),
    "sglang-gpt-oss": Stored("mxfp4", _FP4, _plain, "weight_bias"),
    "gptq": Stored("int4", _QWEIGHT, _gptq),
    "awq": Stored("int4", _QWEIGHT, _awq),
}
"""By what the parameters look like; as engines' methods are called in their interfaces here."""


def take(
    layer: torch.nn.Module,
    kind: str,
    act: Activation,
    dtype: torch.dtype,
    *,
    alternating: bool = False,
) -> MoeWeights:
    """Return the experts of a layer, which gets the module `layers.HELD` in place of parameters.

    Args:
        layer: with parameters as `STORED` says.
        kind: name of a row of `STORED`.
        act: what is between the GEMMs.
        dtype: of the activations.
        alternating: whether rows of w13 are gates and ups in turns, as gpt-oss has them.
    """
    stored = STORED[kind]
    tensors: dict[str, Tensor | None] = {}
    for which in _BOTH:
        codes, scale, factor, zero = stored.parts(layer, which)
        bias = getattr(layer, f"{which}_{stored.bias}", None)
        found = [codes, scale, zero, None if bias is None else bias.data]
        if alternating and which == "w13":
            found = [None if value is None else layers.halves(value) for value in found]
        names = (which, f"{which}_scale", f"{which}_zero", f"{which}_bias")
        tensors |= dict(zip(names, found, strict=True))
        tensors[f"{which}_global_scale"] = None if factor is None else factor.float().contiguous()
    if act.activation == "relu2" and tensors["w13_global_scale"] is not None:
        tensors["w13_global_scale"] = tensors["w13_global_scale"].reshape(-1)
    group = None
    if stored.fmt == "int4":
        whole, parts = tensors["w13"], tensors["w13_scale"]
        assert whole is not None
        assert parts is not None
        group = 2 * whole.shape[-1] // parts.shape[-1]
    weights = prepare_moe_weights(
        **tensors,  # type: ignore[arg-type]
        fmt=stored.fmt,
        activation=act.activation,
        group_size=group,
        dtype=dtype,
    )
    released = [f"{which}_{leaf}" for which in _BOTH for leaf in (*stored.leaves, stored.bias)]
    layers.hold_experts(layer, weights, act, released)
    return weights
