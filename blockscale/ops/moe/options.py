"""Checks of a call of the experts of an MoE layer: the rows, the options, the output."""

from __future__ import annotations

from typing import NamedTuple

import torch

from blockscale.ops import checks
from blockscale.ops.checks import dtype_name
from blockscale.ops.moe.weights import MoeWeights
from blockscale.specs import FusedMoe
from blockscale.specs.moe import ACT_FORMATS, ACTIVATIONS, GATED, STATIC_SCALES
from blockscale.specs.plans.launches import MAX_TOP_K

Tensor = torch.Tensor

WHERE = "fused_moe"

BOUNDED = ("swiglu", "swiglu_oai")
"""Activations with alpha and limit."""


class Options(NamedTuple):
    """What a call of the experts is told besides its tensors."""

    activation: str = "swiglu"
    alpha: float | None = None
    limit: float | None = None
    act_fmt: str | None = None
    a1_scale: Tensor | None = None
    a2_scale: Tensor | None = None


def check_call(
    hidden: Tensor,
    weights: MoeWeights,
    topk_ids: Tensor | None,
    topk_weights: Tensor | None,
    options: Options,
) -> FusedMoe:
    """Return the spec of the kernel, after all checks but those of the output."""
    _check_hidden(hidden, weights)
    _check_layout(hidden, weights)
    if weights.device != hidden.device:
        raise ValueError(
            f"{WHERE}: the weights are on device {weights.device}, but hidden is on "
            f"{hidden.device}; pass all tensors on one device, weights.to(hidden.device)"
        )
    _check_options(weights, options, hidden)
    ids = checks.tensor(WHERE, "topk_ids", topk_ids, (torch.int32, torch.int64))
    checks.same_device(WHERE, "topk_ids", ids, "hidden", hidden)
    if ids.dim() != 2 or ids.shape[0] != hidden.shape[0] or not 1 <= ids.shape[1] <= MAX_TOP_K:
        raise ValueError(
            f"{WHERE}: topk_ids has shape {list(ids.shape)}, but must have "
            f"[{hidden.shape[0]}, k], k from 1 to {MAX_TOP_K}: the experts of each row of hidden"
        )
    factors = checks.tensor(WHERE, "topk_weights", topk_weights, (torch.float32,))
    checks.same_device(WHERE, "topk_weights", factors, "hidden", hidden)
    if factors.shape != ids.shape:
        raise ValueError(
            f"{WHERE}: topk_weights has shape {list(factors.shape)}, but topk_ids has "
            f"{list(ids.shape)}; pass one weight for each id"
        )
    w = weights
    sizes = w.experts, w.hidden, w.intermediate, int(ids.shape[1])
    modes = options.activation, dtype_name(hidden.dtype), options.act_fmt
    return FusedMoe(*sizes, w.fmt, w.group, *modes, w.zero, w.bias, w.layout)


def _check_hidden(hidden: Tensor, weights: MoeWeights) -> None:
    checks.tensor(WHERE, "hidden", hidden, checks.ACTIVATIONS, dims=2)
    if hidden.dim() != 2 or hidden.shape[1] != weights.hidden:
        raise ValueError(
            f"{WHERE}: hidden has shape {list(hidden.shape)}, but must have "
            f"[T, {weights.hidden}], as the weights have H={weights.hidden}; flatten the rows"
        )


def _check_layout(hidden: Tensor, weights: MoeWeights) -> None:
    kind = hidden.device.type
    wanted = "linear" if kind == "cpu" else "tiles64"
    if weights.layout != wanted and kind != "meta":
        raise ValueError(
            f"{WHERE}: the weights are in layout {weights.layout!r}, but kernels on {kind} read "
            f"{wanted!r}; prepare_moe_weights(layout={wanted!r}) makes it, and to_linear() the "
            "linear one"
        )
    if weights.layout == "tiles64" and hidden.dtype == torch.float32:
        raise TypeError(
            f"{WHERE}: hidden has dtype float32, but CUDA kernels take bfloat16 or float16; "
            "convert it first"
        )
    if weights.dtype not in (None, hidden.dtype):
        raise TypeError(
            f"{WHERE}: hidden has dtype {dtype_name(hidden.dtype)}, but the weights were prepared "
            f"for {weights.dtype}; pass dtype=hidden.dtype to prepare_moe_weights()"
        )


def _check_options(weights: MoeWeights, options: Options, hidden: Tensor) -> None:
    checks.choice(WHERE, "activation", options.activation, ACTIVATIONS)
    if (options.activation in GATED) != weights.gated:
        has = "has" if weights.gated else "has no"
        raise ValueError(
            f"{WHERE}: activation={options.activation!r} does not go with w13, which {has} gate "
            "rows; pass the same activation as to prepare_moe_weights()"
        )
    for name, value in (("alpha", options.alpha), ("limit", options.limit)):
        if value is None:
            continue
        checks.number(WHERE, name, value)
        if options.activation not in BOUNDED:
            raise ValueError(
                f"{WHERE}: {name}={value!r} is given, but activation={options.activation!r} has "
                f"no {name}; leave it out"
            )
        if name == "limit" and not value > 0:
            raise ValueError(f"{WHERE}: limit={value!r} is not above 0; leave it out for no bound")
    _check_act_fmt(options, hidden)


def _check_act_fmt(options: Options, hidden: Tensor) -> None:
    if options.act_fmt is not None:
        checks.choice(WHERE, "act_fmt", options.act_fmt, ACT_FORMATS)
    for name in ("a1_scale", "a2_scale"):
        value = getattr(options, name)
        checks.one_element(WHERE, name, value, "hidden", hidden)
        if value is not None and options.act_fmt not in STATIC_SCALES:
            raise ValueError(
                f"{WHERE}: {name} is given, but act_fmt={options.act_fmt!r} has no static scales; "
                "leave it out, or pass act_fmt='fp8_tensor' or 'nvfp4'"
            )
        if value is None and options.act_fmt == "fp8_tensor":
            raise ValueError(
                f"{WHERE}: {name} is missing, but act_fmt='fp8_tensor' has static scales; pass "
                "both, or act_fmt='fp8', which measures each row"
            )


def check_output(out: Tensor, hidden: Tensor) -> None:
    """ValueError or TypeError unless ``out`` is like ``hidden``, in memory of its own."""
    checks.like(WHERE, "out", out, (hidden.dtype,), "hidden", hidden, tuple(hidden.shape))
    if checks.has_data():
        checks.no_overlap(WHERE, "out", out, "hidden", hidden)
