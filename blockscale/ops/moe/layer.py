"""Torch functions of the MoE layer: route tokens to experts, and run the experts.

Formats and rounding: `moe.fused_moe`, docs/moe.md.  Errors: TypeError for an argument that is
no tensor or of another dtype; ValueError for an unknown option, a shape, stride or device that does
not fit, tensors that overlap.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from blockscale.ops import call, checks
from blockscale.ops.call import Checked
from blockscale.ops.checks import dtype_name
from blockscale.ops.moe.weights import TENSORS, Given, MoeWeights, prepared
from blockscale.specs import FusedMoe
from blockscale.specs.moe import (
    ACT_FORMATS,
    ACTIVATIONS,
    ALPHA,
    GATED,
    LIMIT,
    MAX_TOP_K,
    STATIC_SCALES,
)

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


def fused_moe(
    hidden: Tensor,
    w13: Tensor | MoeWeights,
    w2: Tensor | None = None,
    topk_ids: Tensor | None = None,
    topk_weights: Tensor | None = None,
    *,
    fmt: str = "nvfp4",
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    w13_global_scale: Tensor | None = None,
    w2_global_scale: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    activation: str = "swiglu",
    alpha: float | None = None,
    limit: float | None = None,
    group_size: int | None = None,
    w13_zero: Tensor | None = None,
    w2_zero: Tensor | None = None,
    int4_signed: bool = False,
    act_fmt: str | None = None,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``sum_j topk_weights[t, j] * expert(topk_ids[t, j])(hidden[t])`` [T, H].

    ``expert(e)(x) = act(x @ w13[e].T + w13_bias[e]) @ w2[e].T + w2_bias[e]``, weights dequantised.
    Sums are float32; what is between the GEMMs, and each expert's result, are rounded to the dtype
    of hidden.  Call it with prepared weights, ``fused_moe(hidden, prepared, topk_ids,
    topk_weights)``: weights that are given as tensors are converted in every call on CUDA.

    Args:
        hidden: [T, H] bfloat16 or float16, on the CPU also float32.
        w13, w2 and their scales, zeros, biases, fmt, group_size, int4_signed: as in
            `prepare_moe_weights`, which returns what may be given in place of w13 and w2.
        topk_ids: [T, k] int32, or int64 (converted); others than 0 to E - 1 are dropped.
        topk_weights: [T, k] float32.
        activation: "swiglu": silu(gate) * up; "swiglu_oai": gate * sigmoid(alpha * gate) * (up + 1)
            of clamped gate and up, as gpt-oss; "gelu_tanh": gelu(gate) * up; "relu2": max(x, 0)^2,
            w13 has no gate.
        alpha: factor in the sigmoid; None: 1.702 for swiglu_oai, else 1.
        limit: bound: gate <= limit, -limit <= up <= limit; None: 7 for swiglu_oai, else none.
        act_fmt: what the operands of both GEMMs are rounded to: None; "fp8": E4M3, one scale a row;
            "fp8_tensor": E4M3, static scales; "nvfp4": E2M1, an E4M3 scale for 16.
        a1_scale: [1] float32, static scale of hidden: of "fp8_tensor", what the E4M3 codes are
            multiplied with; of "nvfp4", what the block scales are, None: 1.
        a2_scale: [1] float32, the same of what is between the GEMMs.
        out: output, [T, H] like hidden; None: allocated.

    Raises:
        TypeError, ValueError: as the module says.
    """
    options = Options(activation, alpha, limit, act_fmt, a1_scale, a2_scale)
    tensors = (w13_scale, w2_scale, w13_global_scale, w2_global_scale, w13_bias, w2_bias)
    if isinstance(w13, MoeWeights):
        _nothing_more((*tensors, w13_zero, w2_zero))
        if topk_weights is None:  # (hidden, prepared, topk_ids, topk_weights)
            w2, topk_ids, topk_weights = None, w2, topk_ids
        _no_second(w2)
        return run_experts(hidden, w13, topk_ids, topk_weights, options, out)
    given = Given(
        *(w13, w2, fmt, *tensors, activation, group_size, w13_zero, w2_zero),
        int4_signed=int4_signed,
    )
    weights = _converted(hidden, given)
    return run_experts(hidden, weights, topk_ids, topk_weights, options, out)


def _nothing_more(tensors: tuple[Tensor | None, ...]) -> None:
    if any(value is not None for value in tensors):
        raise ValueError(
            f"{WHERE}: the weights are prepared, but scales, zeros or biases are given too; leave "
            "them out, or pass them to prepare_moe_weights()"
        )


def _no_second(w2: Tensor | None) -> None:
    if w2 is not None:
        raise TypeError(
            f"{WHERE}: w2 is given, but prepared weights hold both; pass fused_moe(hidden, "
            "prepared, topk_ids, topk_weights)"
        )


def _converted(hidden: Tensor, given: Given) -> MoeWeights:
    """Return the weights of this call."""
    checks.tensor(WHERE, "hidden", hidden, checks.ACTIVATIONS, dims=2)
    if call.traced(hidden) and hidden.device.type != "cpu":
        raise ValueError(
            f"{WHERE}: w13 is a tensor, but converting it on {hidden.device.type} cannot be "
            "traced; convert it once, with prepare_moe_weights(), outside of what is compiled"
        )
    return prepared(WHERE, given, hidden.dtype, None)


def run_experts(
    hidden: Tensor,
    weights: MoeWeights,
    topk_ids: Tensor | None,
    topk_weights: Tensor | None,
    options: Options,
    out: Tensor | None,
) -> Tensor:
    """Return `fused_moe` of prepared weights."""
    return _EXPERTS.run(
        (
            *(*options[:4], options.a1_scale is None, options.a2_scale is None),
            *(checks.last_size(topk_ids), weights.bias, *_flat(weights)),
        ),
        (hidden, topk_ids, topk_weights, weights, options, out),
    )


class _Experts(call.Op[Tensor]):
    def recorded(self, options: Any, given: Any) -> Tensor:
        hidden, topk_ids, topk_weights, weights, choices, out = given
        made = torch.empty_like(hidden) if out is None else out
        tensors = [getattr(weights, name) for name in TENSORS]
        call.operator(self.name)(
            hidden, topk_ids, topk_weights, *tensors, *_flat(weights), *choices, made
        )
        return made

    def ready(self, spec: Any, options: Any, given: Any) -> call.Ready:
        hidden, ids, factors, weights, choices, out = given
        if torch.is_grad_enabled() and getattr(factors, "requires_grad", False):
            return None
        if not len(hidden) or ids.dtype != torch.int32:  # a tensor, as it has a last size
            return None
        for scale in choices[4:]:
            if scale is not None and (type(scale) not in call.PLAIN or scale.numel() != 1):
                return None
        y = torch.empty_like(hidden) if out is None else out
        return _arguments(spec, (hidden, ids, factors), weights, choices, y), y

    def check(self, options: Any, given: Any) -> Checked:
        hidden, ids, factors, weights, choices, out = given
        spec = check_call(hidden, weights, ids, factors, choices)
        y = torch.empty_like(hidden) if out is None else out
        check_output(y, hidden)
        if not len(hidden):
            return Checked(None, (), y)
        if ids.dtype == torch.int64:  # narrowed; one that is out of range stays so
            ids = ids.clamp(-1, weights.experts).to(torch.int32)
        return Checked(spec, _arguments(spec, (hidden, ids, factors), weights, choices, y), y)


_EXPERTS = _Experts(WHERE)


def _flat(weights: MoeWeights) -> tuple[Any, ...]:
    """Return everything but the tensors, as an operator takes it."""
    w = weights
    dtype = None if w.dtype is None else dtype_name(w.dtype)
    sizes = w.group, w.experts, w.hidden, w.intermediate
    return w.fmt, *sizes, w.gated, w.zero, w.layout, dtype


def _arguments(
    spec: FusedMoe,
    rows: tuple[Tensor, ...],
    weights: MoeWeights,
    options: Options,
    out: Tensor,
) -> tuple[Any, ...]:
    """Return what the kernel takes."""
    given = options[4:] if spec.static_scales else ()
    scales = [None if scale is None else scale.reshape(1) for scale in given]
    alpha = ALPHA.get(spec.activation, 1.0) if options.alpha is None else options.alpha
    limit = LIMIT.get(spec.activation, math.inf) if options.limit is None else options.limit
    tensors = [value for _, value in weights.tensors()]
    if spec.layout != "tiles64":
        return (*rows, *tensors, *scales, alpha, limit, out)
    size = spec.workspace_bytes(len(rows[0]))
    workspace = torch.empty(size, dtype=torch.uint8, device=rows[0].device)
    return (*rows, *tensors, *scales, alpha, limit, out, workspace)


# ---- Checks -------------------------------------------------------------------------------------


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
    ids = checks.beside(WHERE, "topk_ids", topk_ids, (torch.int32, torch.int64), "hidden", hidden)
    if ids.dim() != 2 or ids.shape[0] != hidden.shape[0] or not 1 <= ids.shape[1] <= MAX_TOP_K:
        raise ValueError(
            f"{WHERE}: topk_ids has shape {list(ids.shape)}, but must have "
            f"[{hidden.shape[0]}, k], k from 1 to {MAX_TOP_K}: the experts of each row of hidden"
        )
    factors = checks.beside(WHERE, "topk_weights", topk_weights, (torch.float32,), "hidden", hidden)
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


# ---- The operator -------------------------------------------------------------------------------


def _moe_op(hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, *given: Any) -> None:
    count, out = len(TENSORS), given[-1]
    flat, choices = given[count:-7], given[-7:-1]
    dtype = None if flat[-1] is None else getattr(torch, flat[-1])
    weights = MoeWeights(*given[:count], *flat[:-1], dtype)
    options = Options(*choices)
    if checks.has_data():
        run_experts(hidden, weights, topk_ids, topk_weights, options, out)
    else:
        check_call(hidden, weights, topk_ids, topk_weights, options)
        check_output(out, hidden)


call.define(
    WHERE,
    "(Tensor hidden, Tensor topk_ids, Tensor topk_weights, Tensor w13, Tensor w13_scale, "
    "Tensor? w13_zero, Tensor w13_global, Tensor? w13_bias, Tensor w2, Tensor w2_scale, "
    "Tensor? w2_zero, Tensor w2_global, Tensor? w2_bias, str fmt, SymInt group, SymInt experts, "
    "SymInt hidden_size, SymInt intermediate, bool gated, bool zero, str layout, "
    "str? scale_dtype, str activation, float? alpha, float? limit, str? act_fmt, "
    "Tensor? a1_scale, Tensor? a2_scale, Tensor! out) -> ()",
    _moe_op,
)
