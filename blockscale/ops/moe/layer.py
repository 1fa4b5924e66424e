"""Torch functions of the MoE layer: route tokens to experts, and run the experts.

Formats and rounding: `moe.fused_moe`, docs/moe.md.  Errors: TypeError for an argument that is
no tensor or of another dtype; ValueError for an unknown option, a shape, stride or device that does
not fit, tensors that overlap.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from blockscale.ops import checks, dispatch, torch_ops
from blockscale.ops.checks import dtype_name
from blockscale.ops.moe.check import Given
from blockscale.ops.moe.options import WHERE, Options, check_call, check_output
from blockscale.ops.moe.weights import TENSORS, MoeWeights, prepare_moe_weights, prepared
from blockscale.runtime import jit
from blockscale.specs import FusedMoe
from blockscale.specs.moe import ALPHA, LIMIT

__all__ = ["fused_moe", "prepare_moe_weights"]

Tensor = torch.Tensor

_REFUSED = (TypeError, ValueError, AttributeError, IndexError, NotImplementedError)


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
    if dispatch.traced(hidden) and hidden.device.type != "cpu":
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
    if dispatch.traced(hidden):
        made = torch.empty_like(hidden) if out is None else out
        tensors = [getattr(weights, name) for name in TENSORS]
        torch_ops.operator(WHERE)(
            hidden, topk_ids, topk_weights, *tensors, *_flat(weights), *options, made
        )
        return made
    key, rows = None, (hidden, topk_ids, topk_weights)
    try:
        key = _key(hidden, topk_ids, weights, options)
        run = jit.recall(key)
        if run is not None and _plain(hidden, topk_ids, topk_weights):
            y = torch.empty_like(hidden) if out is None else out
            run(rows, weights, options, y)
            return y
    except _REFUSED:  # the full checks below say it in our words
        pass
    spec = check_call(hidden, weights, topk_ids, topk_weights, options)
    y = torch.empty_like(hidden) if out is None else out
    check_output(y, hidden)
    if not len(hidden):
        return y
    if topk_ids is not None and topk_ids.dtype == torch.int64:
        rows = hidden, _narrowed(topk_ids, weights.experts), topk_weights
    function = dispatch.kernel(spec, hidden.device)
    _launch(function, spec, rows, weights, options, y)
    if key is not None:
        known: Any = partial(_launch, dispatch.direct(function), spec)
        jit.remember(key, known)
    return y


def _key(hidden: Tensor, ids: Any, weights: MoeWeights, options: Options) -> tuple[Any, ...]:
    """Return what the kernel and the checks of a call depend on, but for sizes of rows."""
    given = options.a1_scale is None, options.a2_scale is None
    return (
        *(WHERE, hidden.dtype, hidden.is_cuda, ids.shape[1], weights.bias, *_flat(weights)),
        *(options[:4], given),
    )


def _plain(hidden: Tensor, ids: Any, factors: Any) -> bool:
    """Return whether the kernel takes the rows as they are, and there are some."""
    grad = torch.is_grad_enabled() and (hidden.requires_grad or factors.requires_grad)
    return ids.dtype == torch.int32 and len(hidden) > 0 and not grad


def _flat(weights: MoeWeights) -> tuple[Any, ...]:
    """Return everything but the tensors, as an operator takes it."""
    w = weights
    dtype = None if w.dtype is None else dtype_name(w.dtype)
    sizes = w.group, w.experts, w.hidden, w.intermediate
    return w.fmt, *sizes, w.gated, w.zero, w.layout, dtype


def _narrowed(ids: Tensor, experts: int) -> Tensor:
    """Return int64 ids as int32; one that is out of range stays so."""
    return ids.clamp(-1, experts).to(torch.int32)


def _launch(
    run: Any,
    spec: FusedMoe,
    rows: tuple[Tensor | None, ...],
    weights: MoeWeights,
    options: Options,
    out: Tensor,
) -> None:
    given = options[4:] if spec.static_scales else ()
    scales = [None if scale is None else scale.reshape(1) for scale in given]
    alpha = ALPHA.get(spec.activation, 1.0) if options.alpha is None else options.alpha
    limit = LIMIT.get(spec.activation, math.inf) if options.limit is None else options.limit
    tensors = [value for _, value in weights.tensors()]
    tail: tuple[Any, ...] = ()
    if spec.layout == "tiles64":
        size = spec.workspace_bytes(len(out))
        workspace = torch.empty(size, dtype=torch.uint8, device=out.device)
        tail = (workspace, *dispatch.launch_flags(True, None))
    run(*rows, *tensors, *scales, alpha, limit, out, *tail)


# ---- The operator -------------------------------------------------------------------------------


def _moe_op(
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w13_zero: Tensor | None,
    w13_global: Tensor,
    w13_bias: Tensor | None,
    w2: Tensor,
    w2_scale: Tensor,
    w2_zero: Tensor | None,
    w2_global: Tensor,
    w2_bias: Tensor | None,
    fmt: str,
    group: int,
    experts: int,
    hidden_size: int,
    intermediate: int,
    gated: bool,
    zero: bool,
    layout: str,
    scale_dtype: str | None,
    activation: str,
    alpha: float | None,
    limit: float | None,
    act_fmt: str | None,
    a1_scale: Tensor | None,
    a2_scale: Tensor | None,
    out: Tensor,
) -> None:
    weights = MoeWeights(
        *(w13, w13_scale, w13_zero, w13_global, w13_bias),
        *(w2, w2_scale, w2_zero, w2_global, w2_bias),
        fmt=fmt,
        group=group,
        experts=experts,
        hidden=hidden_size,
        intermediate=intermediate,
        gated=gated,
        zero=zero,
        layout=layout,
        dtype=None if scale_dtype is None else getattr(torch, scale_dtype),
    )
    options = Options(activation, alpha, limit, act_fmt, a1_scale, a2_scale)
    if checks.has_data():
        run_experts(hidden, weights, topk_ids, topk_weights, options, out)
    else:
        check_call(hidden, weights, topk_ids, topk_weights, options)
        check_output(out, hidden)


torch_ops.define(WHERE, _moe_op, _moe_op, ("out",))
