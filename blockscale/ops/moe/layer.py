"""Torch functions of the MoE layer: route tokens to experts, and run the experts.

Formats and rounding: `moe.fused_moe`, docs/moe.md; how ties are broken: `tir.moe.route`.  Errors:
TypeError for an argument that is no tensor or of another dtype; ValueError for an unknown option, a
shape, stride or device that does not fit, tensors that overlap.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from blockscale.ops import call, checks
from blockscale.ops.call import Checked
from blockscale.ops.checks import dtype_name
from blockscale.ops.moe.weights import TENSORS, Given, MoeWeights, prepared
from blockscale.specs import FusedMoe, MoeRoute
from blockscale.specs.gemm import MAX_EXPERTS
from blockscale.specs.moe import (
    ACT_FORMATS,
    ACTIVATIONS,
    ALPHA,
    BYTE_ACTS,
    GATED,
    LIMIT,
    MX_FORMATS,
    PRODUCTS,
    SCORINGS,
    STATIC_SCALES,
    TILED,
)
from blockscale.specs.plans.launches import MAX_TOP_K

Tensor = torch.Tensor

WHERE, ROUTE = "fused_moe", "moe_route"

BOUNDED = ("swiglu", "swiglu_oai")
"""Activations with alpha and limit."""


class Options(NamedTuple):
    """What a call of the experts is told besides its tensors."""

    activation: str = "swiglu"
    alpha: float | None = None
    limit: float | None = None
    act_fmt: str | None = None
    fast_accum: bool = False
    a1_scale: Tensor | None = None
    a2_scale: Tensor | None = None


MODES = 5
"""Of `Options`, how many come before the tensors."""


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
    fast_accum: bool = False,
    out: Tensor | None = None,
    ep: Any = None,
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
            "fp8_tensor": E4M3, static scales; "nvfp4": E2M1, an E4M3 scale for 16; "mxfp4" and
            "mxfp8": E2M1 and E4M3, a power of two for 32 (not of float16).
        a1_scale: [1] float32, static scale of hidden: of "fp8_tensor", what the E4M3 codes are
            multiplied with; of "nvfp4", what the block scales are, None: 1.
        a2_scale: [1] float32, the same of what is between the GEMMs.
        fast_accum: of "fp8" and "fp8_tensor", as torch._scaled_mm's use_fast_accum: tensor cores
            that multiply in 8 bits (weights in layout "tiles64e", many tokens, sm_90a) sum up all
            of K, in some 14 bits; docs/moe.md says what it costs and gains.
        out: output, [T, H] like hidden; None: allocated.
        ep: `blockscale.distributed.ExpertParallel`: topk_ids are of the experts of all its ranks,
            the prepared weights those of this rank's.

    Raises:
        TypeError, ValueError: as the module says; RuntimeError with ``ep``: a rank did not come.
    """
    options = Options(activation, alpha, limit, act_fmt, bool(fast_accum), a1_scale, a2_scale)
    tensors = (w13_scale, w2_scale, w13_global_scale, w2_global_scale, w13_bias, w2_bias)
    if isinstance(w13, MoeWeights):
        _nothing_more((*tensors, w13_zero, w2_zero))
        if topk_weights is None:  # (hidden, prepared, topk_ids, topk_weights)
            w2, topk_ids, topk_weights = None, w2, topk_ids
        _no_second(w2)
        if ep is not None:
            made: Tensor = ep.run(hidden, w13, topk_ids, topk_weights, options, out)
            return made
        return run_experts(hidden, w13, topk_ids, topk_weights, options, out)
    if ep is not None:
        raise TypeError(
            f"{WHERE}: w13 is a {type(w13).__name__}, but ep takes prepared weights; pass what "
            "prepare_moe_weights() returns for the experts of ep.local_experts"
        )
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
    static = options.a1_scale is None, options.a2_scale is None, weights.bias
    how = options[:MODES] + static + weights.facts
    given = hidden, topk_ids, topk_weights, weights, options, out
    return _EXPERTS.run((checks.last_size(topk_ids), how), given)


class _Experts(call.Op[Tensor]):
    def recorded(self, options: Any, given: Any) -> Tensor:
        hidden, topk_ids, topk_weights, weights, choices, out = given
        made = torch.empty_like(hidden) if out is None else out
        tensors = [getattr(weights, name) for name in TENSORS]
        call.operator(self.name)(
            hidden, topk_ids, topk_weights, *tensors, *weights.facts, *choices, made
        )
        return made

    def ready(self, spec: Any, options: Any, given: Any) -> call.Ready:
        hidden, ids, factors, weights, choices, out = given
        if torch.is_grad_enabled() and getattr(factors, "requires_grad", False):
            return None
        if not hidden.shape[0] or ids.dtype != torch.int32:  # a tensor, as it has a last size
            return None
        for scale in choices[MODES:]:
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


def run_slots(
    hidden: Tensor,
    weights: MoeWeights,
    ids: Tensor,
    options: Options,
    coded: torch.dtype | None = None,
    share: float = 1.0,
    to: Tensor | None = None,
) -> Tensor:
    """Return [T, k, H]: each slot's result of its expert, rounded and not weighted.

    Args:
        hidden, weights, options: as in `run_experts`.
        ids: [T, k] int32; of slots that others have than 0 to E - 1, the result is anything.
        coded: hidden [T, bytes] has rows of this dtype coded as ``act_fmt`` says (`CodedRow`).
        share: of all slots, about how many have an expert here: GPU kernels differ in the rows of
            an expert that they are fastest for.
        to: [T, k] int64: the addresses where results are stored instead; it is returned.
    """
    static = options.a1_scale is None, options.a2_scale is None, weights.bias, coded, to is None
    how = options[:MODES] + static + weights.facts
    given = hidden, ids, weights, options, coded, share, to
    return _SLOTS.run((checks.last_size(ids), how), given)


class _Slots(call.Op[Tensor]):
    def recorded(self, options: Any, given: Any) -> Tensor:
        raise RuntimeError(
            f"{self.name}: experts of several ranks cannot be traced; call the layer outside of "
            "what is compiled"
        )

    def ready(self, spec: Any, options: Any, given: Any) -> call.Ready:
        hidden, ids, *_ = given
        if not len(hidden) or ids.dtype != torch.int32:
            return None
        return self._ready(spec, given)

    def check(self, options: Any, given: Any) -> Checked:
        hidden, ids, weights, choices, coded, _, to = given
        rows = hidden
        if coded is not None:  # what it was made of
            rows = hidden.new_empty((len(hidden), weights.hidden), dtype=coded)
        spec = check_call(rows, weights, ids, ids.view(torch.float32), choices)
        spec = replace(spec, slots=True, coded=coded is not None, sent=to is not None)
        arguments, y = self._ready(spec, given)
        return Checked(spec if len(hidden) else None, arguments, y)

    def _ready(self, spec: FusedMoe, given: Any) -> tuple[tuple[Any, ...], Tensor]:
        hidden, ids, weights, choices, coded, share, y = given
        if y is None:
            y = hidden.new_empty((len(hidden), spec.top_k, spec.hidden), dtype=coded)
        return _arguments(spec, (hidden, ids), weights, choices, y, share), y


_SLOTS = _Slots("fused_moe(ep=...)")


def _arguments(
    spec: FusedMoe,
    rows: tuple[Tensor, ...],
    weights: MoeWeights,
    options: Options,
    out: Tensor,
    share: float = 1.0,
) -> tuple[Any, ...]:
    """Return what the kernel takes."""
    given = (options.a1_scale, options.a2_scale) if spec.static_scales else ()
    scales = [None if scale is None else scale.reshape(1) for scale in given]
    alpha = ALPHA.get(spec.activation, 1.0) if options.alpha is None else options.alpha
    limit = LIMIT.get(spec.activation, math.inf) if options.limit is None else options.limit
    tensors = weights.passed
    if spec.layout == "linear":
        return (*rows, *tensors, *scales, alpha, limit, out)
    tokens = rows[0].shape[0]
    key = tokens, spec.top_k, spec.slots, spec.act_fmt
    size = weights.workspaces.get(key)
    if size is None:
        size = weights.workspaces[key] = spec.workspace_bytes(tokens)
    workspace = torch.empty(size, dtype=torch.uint8, device=rows[0].device)
    more = (share,) if spec.slots else ()
    return (*rows, *tensors, *scales, alpha, limit, *more, out, workspace)


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
    form = *sizes, w.fmt, w.group, *modes, w.zero, w.bias, w.layout
    # Sums of int4 are those of groups, those of other layouts float32.
    fast = options.fast_accum and w.layout == "tiles64e" and w.fmt != "int4"
    return FusedMoe(*form, fast_accum=fast)


def _check_hidden(hidden: Tensor, weights: MoeWeights) -> None:
    checks.tensor(WHERE, "hidden", hidden, checks.ACTIVATIONS, dims=2)
    if hidden.dim() != 2 or hidden.shape[1] != weights.hidden:
        flat = f"flatten the rows, hidden.reshape(-1, {weights.hidden})"
        remedy = flat if hidden.shape[-1] == weights.hidden else "pass the weights of this layer"
        raise ValueError(
            f"{WHERE}: hidden has shape {list(hidden.shape)}, but must have "
            f"[T, {weights.hidden}], as the weights have H={weights.hidden}; {remedy}"
        )


def _check_layout(hidden: Tensor, weights: MoeWeights) -> None:
    kind = hidden.device.type
    wanted = "linear" if kind == "cpu" else "tiles64"
    known = ("linear",) if kind == "cpu" else (*TILED, "128x4")
    if weights.layout not in known and kind != "meta":
        raise ValueError(
            f"{WHERE}: the weights are in layout {weights.layout!r}, but kernels on {kind} read "
            f"{wanted!r}; prepare_moe_weights(layout={wanted!r}) makes it, and to_linear() the "
            "linear one"
        )
    if weights.layout != "linear" and hidden.dtype == torch.float32:
        raise TypeError(
            f"{WHERE}: hidden has dtype float32, but CUDA kernels take bfloat16 or float16; "
            "pass hidden.to(torch.bfloat16)"
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
    _check_act_fmt(weights, options, hidden)


def _check_act_fmt(weights: MoeWeights, options: Options, hidden: Tensor) -> None:
    if options.act_fmt is not None:
        checks.choice(WHERE, "act_fmt", options.act_fmt, ACT_FORMATS)
    known = [act for fmt, act in PRODUCTS if fmt == weights.fmt]
    if weights.layout == "128x4" and options.act_fmt not in known:
        raise ValueError(
            f"{WHERE}: act_fmt={options.act_fmt!r}, but {weights.fmt} weights in layout '128x4' "
            f"are multiplied by quantised rows; pass act_fmt={' or '.join(map(repr, known))}, or "
            "weights in layout 'tiles64'"
        )
    if weights.layout == "tiles64e" and options.act_fmt not in (None, *BYTE_ACTS):
        raise ValueError(
            f"{WHERE}: act_fmt={options.act_fmt!r}, but weights in layout 'tiles64e' take rows as "
            f"they are or in E4M3; pass act_fmt={' or '.join(map(repr, BYTE_ACTS))}, or weights in "
            "layout 'tiles64'"
        )
    if weights.layout == "tiles64e" and hidden.dtype != torch.bfloat16:
        raise TypeError(
            f"{WHERE}: hidden has dtype {dtype_name(hidden.dtype)}, but weights in layout "
            "'tiles64e' are for bfloat16; pass hidden.to(torch.bfloat16)"
        )
    if options.act_fmt in MX_FORMATS and hidden.dtype == torch.float16:
        raise ValueError(
            f"{WHERE}: act_fmt={options.act_fmt!r} has scales that float16 cannot hold; pass "
            "hidden.to(torch.bfloat16)"
        )
    if options.fast_accum and options.act_fmt not in BYTE_ACTS:
        raise ValueError(
            f"{WHERE}: fast_accum=True, but act_fmt={options.act_fmt!r} has no sums of 8-bit "
            f"products; leave it out, or pass act_fmt={' or '.join(map(repr, BYTE_ACTS))}"
        )
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
    checks.like(WHERE, "out", out, (hidden.dtype,), "hidden", hidden, hidden.shape, output=True)
    if checks.has_data():
        checks.no_overlap(WHERE, "out", out, "hidden", hidden)


# ---- The operator -------------------------------------------------------------------------------


def _moe_op(hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, *given: Any) -> None:
    count, out = len(TENSORS), given[-1]
    flat, choices = given[count:-8], given[-8:-1]
    dtype = None if flat[-1] is None else getattr(torch, flat[-1])
    fields: tuple[Any, ...] = (*given[:count], *flat[:-1], dtype)
    weights = MoeWeights(*fields)
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
    "bool fast_accum, Tensor? a1_scale, Tensor? a2_scale, Tensor! out) -> ()",
    _moe_op,
)


# ---- Routing -----------------------------------------------------------------------------------


def moe_route(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    correction_bias: Tensor | None = None,
    n_group: int | None = None,
    topk_group: int | None = None,
    scale: float = 1.0,
    topk_ids: Tensor | None = None,
    topk_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``(topk_ids, topk_weights)``: the best experts of each token, the best one first.

    Args:
        logits: [T, E] float32, bfloat16 or float16; scores are float32.
        top_k: experts of a token.
        scoring: "softmax" over all experts, or "sigmoid".
        renormalize: divide a token's weights by their sum.
        correction_bias: [E] float32, added to the scores when experts are chosen, but not to the
            weights; None: 0.
        n_group: groups of neighbouring experts, of which the ``topk_group`` best are left to choose
            from, by the sum of their two best scores if there is a correction_bias, else by their
            best one; None: 1.
        topk_group: None: n_group.
        scale: factor of all weights, after they are renormalised.
        topk_ids, topk_weights: outputs as below; None: allocated.

    Returns:
        topk_ids: [T, top_k] int32; the lower id first where scores are equal.
        topk_weights: [T, top_k] float32.

    Raises:
        TypeError: an argument that is no tensor, or of another dtype.
        ValueError: an unknown option, shape, device or stride, more experts than there are.
    """
    groups = 1 if n_group is None else n_group
    kept = groups if topk_group is None else topk_group
    experts, plain = checks.last_size(logits), correction_bias is None
    options = top_k, scoring, renormalize, groups, kept, experts, plain
    given = logits, correction_bias, scale, topk_ids, topk_weights
    return _ROUTE.run(options, given)


class _Route(call.Op[tuple[Tensor, Tensor]]):
    def recorded(self, options: Any, given: Any) -> tuple[Tensor, Tensor]:
        logits, bias, scale, *outputs = given
        top_k, scoring, renormalize, groups, kept, *_ = options
        modes = top_k, scoring, renormalize, bias, groups, kept, scale
        ids, weights = call.operator(self.name)(logits, *modes)
        return (
            call.copied(self.name, "topk_ids", outputs[0], ids),
            call.copied(self.name, "topk_weights", outputs[1], weights),
        )

    def ready(self, spec: Any, options: Any, given: Any) -> call.Ready:
        logits, bias, scale, ids, weights = given
        factor = checks.number(self.name, "scale", scale)
        outputs = _outputs(logits, options[0], ids, weights)
        if bias is None:
            return (logits, factor, *outputs), outputs
        return (logits, bias, factor, *outputs), outputs

    def check(self, options: Any, given: Any) -> Checked:
        logits, bias, scale, *outputs = given
        top_k, scoring, renormalize, groups, kept, *_ = options
        spec = _route_spec(logits, top_k, scoring, renormalize, bias, groups, kept, scale)
        ids, weights = _outputs(logits, top_k, *outputs)
        for name, value, dtype in (
            ("topk_ids", ids, torch.int32),
            ("topk_weights", weights, torch.float32),
        ):
            shape = len(logits), top_k
            checks.like(ROUTE, name, value, (dtype,), "logits", logits, shape, output=True)
        given = () if bias is None else (bias,)
        arguments = logits, *given, float(scale), ids, weights
        return Checked(spec if len(logits) else None, arguments, (ids, weights))


_ROUTE = _Route(ROUTE)


def _outputs(
    logits: Tensor, top_k: int, ids: Tensor | None, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], top_k
    if ids is None:
        ids = logits.new_empty(shape, dtype=torch.int32)
    if weights is None:
        weights = logits.new_empty(shape, dtype=torch.float32)
    return ids, weights


def _route_spec(
    logits: Tensor,
    top_k: int,
    scoring: str,
    renormalize: bool,
    correction_bias: Tensor | None,
    n_group: int,
    topk_group: int,
    scale: float,
) -> MoeRoute:
    """Return the spec of the kernel."""
    checks.choice(ROUTE, "scoring", scoring, SCORINGS)
    checks.tensor(ROUTE, "logits", logits, checks.ACTIVATIONS, dims=2)
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= MAX_EXPERTS:
        raise ValueError(
            f"{ROUTE}: logits has shape {list(logits.shape)}, but must have [T, E], E from 1 to "
            f"{MAX_EXPERTS}: a number for each expert"
        )
    experts = int(logits.shape[1])
    for name, value in (("top_k", top_k), ("n_group", n_group), ("topk_group", topk_group)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{ROUTE}: {name}={value!r} is not a positive integer; pass a count")
    if experts % n_group:
        raise ValueError(
            f"{ROUTE}: n_group={n_group} does not divide the {experts} experts of logits; choose "
            "a divisor, or None for one group"
        )
    if topk_group > n_group:
        raise ValueError(
            f"{ROUTE}: topk_group={topk_group} is more than n_group={n_group}; keep at most as "
            "many groups as there are"
        )
    left = experts // n_group * topk_group
    if top_k > min(left, MAX_TOP_K):
        raise ValueError(
            f"{ROUTE}: top_k={top_k} is more than {min(left, MAX_TOP_K)}, as {left} experts are "
            f"left to choose from, and a token has at most {MAX_TOP_K}; choose fewer"
        )
    if correction_bias is not None:
        checks.beside(ROUTE, "correction_bias", correction_bias, (torch.float32,), "logits", logits)
        rest = ": one number for each expert"
        checks.sized(ROUTE, "correction_bias", correction_bias, [[experts]], rest)
    checks.number(ROUTE, "scale", scale)
    given = correction_bias is not None
    modes = dtype_name(logits.dtype), scoring, bool(renormalize), given
    return MoeRoute(experts, top_k, *modes, n_group, topk_group)


def _route_op(
    logits: Tensor,
    top_k: int,
    scoring: str = "softmax",
    renormalize: bool = True,
    correction_bias: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    if not checks.has_data():
        _route_spec(
            logits, top_k, scoring, renormalize, correction_bias, n_group, topk_group, scale
        )
        return _outputs(logits, top_k, None, None)
    options = top_k, scoring, renormalize, n_group, topk_group, logits.shape[-1]
    given = logits, correction_bias, scale, None, None
    return _ROUTE.run((*options, correction_bias is None), given)


call.define(
    ROUTE,
    "(Tensor logits, SymInt top_k, str scoring='softmax', bool renormalize=True, "
    "Tensor? correction_bias=None, SymInt n_group=1, SymInt topk_group=1, float scale=1.) "
    "-> (Tensor, Tensor)",
    _route_op,
)
