"""`blockscale.linear`: a linear layer on a 4-bit weight, with an activation, a gate or a residual.

Formats and rounding: `blockscale.tir.gemm.linear`, docs/numerics.md.  Weights: `linear.weights`.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from blockscale.base.formats import QUANTIZED
from blockscale.ops import call, checks, gemm
from blockscale.ops.call import Checked
from blockscale.ops.checks import dtype_name
from blockscale.ops.int4.products import product
from blockscale.ops.linear.weights import (
    ACTS,
    Facts,
    Given,
    LinearWeights,
    by_row,
    check_beside,
    global_scales,
    prepared,
)
from blockscale.ops.quant import quantize
from blockscale.specs import Linear
from blockscale.specs.gemm import ACTIVATIONS, LINEAR_FORMATS, TILED

Tensor = torch.Tensor

WHERE = "linear"

LARGEST = 448.0 * 6.0
"""The largest value of nvfp4 under a global scale of 1."""

LEAST = 1e-30
"""Least global scale of activations: those of zeros have one too."""

FP8_MAX = 448.0
"""The largest value of E4M3."""

Epilogue = tuple[str, Tensor | None, torch.dtype | None]
"""Activation, residual and dtype of the result; None: no residual, the dtype of x."""

Acts = tuple[str, bool]
"""What rows are rounded to ("": nothing), and whether MMAs of 8 bits sum up all of K."""


def linear(
    x: Tensor,
    packed: Tensor | LinearWeights,
    block_scale: Tensor | None = None,
    fmt: str = "nvfp4",
    global_scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    gated: bool = False,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    act_fmt: str | None = None,
    act_global_scale: Tensor | None = None,
    fast_accum: bool = False,
    group_size: int | None = None,
    zero: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``act(x @ w.T + bias) + residual`` [..., N], w the dequantised weight [N, K].

    Gated, half of the rows of w are gates and half are ups, and the result is
    ``act(gate) * up + residual`` [..., N / 2].  Sums are float32, and so is all that is done to
    them before the one rounding.  Call it with a prepared weight, ``linear(x, prepared)``: tensors
    are converted in every call on CUDA, and on the CPU those of int4.

    Args:
        x: [..., K] bfloat16 or float16, on the CPU also float32.
        packed, block_scale, fmt, global_scale, bias, gated, group_size, zero: a weight as in
            `prepare_linear_weights`, which returns what may be given in place of packed.
        activation: "none", "silu", "gelu_tanh" or "relu2", max(s, 0)^2; gated: of the gate.
        residual: [..., N], or [..., N / 2], of the dtype of x; None: 0.
        out_dtype: None: that of x; float32, on the CPU any of the three.
        act_fmt: "fp8": each row of x is rounded to E4M3 times its largest magnitude / 448, whatever
            the weight's format; of one prepared with act_fmt="fp8" that is in layout "tiles64e",
            many rows are multiplied in 8 bits (sm_90a).  "nvfp4": x is quantised too, and
            multiplied as by `mm_fp4` (CPU, sm_100a), whose limits of N and K, and lack of gates,
            are this call's as well; the weight is nvfp4, prepared with layout="128x4".
        act_global_scale: [1] float32 that divides x before it is quantised; None: the largest
            magnitude of x / (448 * 6), computed in every call.
        fast_accum: of "fp8", as torch._scaled_mm's use_fast_accum: tensor cores that multiply in 8
            bits (layout "tiles64e", sm_90a) sum up all of K, in some 14 bits; docs/linear.md says
            what it costs and gains.
        out: output [..., N] or [..., N / 2] of out_dtype, in memory of its own; None: allocated.

    Raises:
        TypeError: an argument that is no tensor, or of another dtype.
        ValueError: an unknown option, a shape, device or stride that does not fit, tensors that
            overlap.
    """
    acts = act_fmt or "", bool(fast_accum)
    if isinstance(packed, LinearWeights):
        if not (block_scale is None and global_scale is None and bias is None and zero is None):
            _nothing_more()
        if gated and not packed.gated:
            raise ValueError(
                f"{WHERE}: gated=True, but the weight was prepared without gates; pass gated=True "
                "to prepare_linear_weights()"
            )
        if packed.layout in TILED and act_fmt in (None, "fp8") and act_global_scale is None:
            w = packed
            given = x, w.packed, w.block_scale, w.global_scale, w.bias, residual, out
            return _LINEAR.run((activation, out_dtype, residual is None, w.facts, acts), given)
        weights = packed
    else:
        gated = bool(gated)
        plain = act_fmt in (None, "fp8") and act_global_scale is None and fmt != "int4"
        if plain and group_size is None and zero is None and not getattr(x, "is_cuda", False):
            kind = fmt, gated, _shape(packed), _shape(global_scale)
            options = activation, out_dtype, residual is None, kind, acts
            return _LINEAR.run(options, (x, packed, block_scale, global_scale, bias, residual, out))
        tensors = Given(packed, block_scale, fmt, global_scale, bias, gated, group_size, zero)
        weights = _converted(x, tensors, act_fmt)
    epilogue = activation, residual, out_dtype
    if act_global_scale is not None or act_fmt not in (None, "fp8"):
        _check_fast(acts)
        return _quantised(x, weights, epilogue, act_fmt, act_global_scale, out)
    op = _LINEAR if weights is packed else _CONVERTED
    return _prepared(x, weights, epilogue, acts, out, op)


def _shape(value: object) -> Any:
    return getattr(value, "shape", None)


def _prepared(
    x: Tensor,
    weights: LinearWeights,
    epilogue: Epilogue,
    acts: Acts,
    out: Tensor | None,
    op: _Linear,
) -> Tensor:
    """Return `linear` of prepared weights, whatever their layout."""
    activation, residual, out_dtype = epilogue
    w = weights
    _check_layout(x, w.facts)
    if w.fmt == "int4" and w.layout == "linear":
        return _int4(x, weights, epilogue, acts, out)
    plain = w.fmt, w.gated, w.packed.shape, w.global_scale.shape
    kind = w.facts if w.layout in TILED else plain
    given = x, w.packed, w.block_scale, w.global_scale, w.bias, residual, out
    return op.run((activation, out_dtype, residual is None, kind, acts), given)


def _nothing_more() -> None:
    raise ValueError(
        f"{WHERE}: the weight is prepared, but scales, zeros or a bias are given too; leave them "
        "out, or pass them to prepare_linear_weights()"
    )


def _converted(x: Tensor, given: Given, act_fmt: str | None) -> LinearWeights:
    """Return the weight of this call."""
    checks.choice(WHERE, "fmt", given.fmt, LINEAR_FORMATS)
    checks.tensor(WHERE, "x", x, checks.ACTIVATIONS)
    if call.traced(x) and x.device.type != "cpu":
        raise ValueError(
            f"{WHERE}: packed is a tensor, but converting it on {x.device.type} cannot be traced; "
            "convert it once, with prepare_linear_weights(), outside of what is compiled"
        )
    if isinstance(given.packed, torch.Tensor):
        checks.same_device(WHERE, "packed", given.packed, "x", x)
    layout = None if act_fmt in (None, "fp8") else "128x4"
    if layout is None and x.is_cuda:
        _check_sixteen(x)
    return prepared(WHERE, given, x.dtype, layout, act_fmt)


class _Linear(call.Op[Tensor]):
    """Options: activation, out_dtype, whether there is no residual, the weight's kind, and `Acts`.

    The kind is the `Facts` of a weight in a layout of `TILED`; of one in layout "linear", whose
    tensors may be anything until checked, its format, whether it is gated, and the shapes of its
    codes and of its global scale.
    """

    def recorded(self, options: Any, given: Any) -> Tensor:
        x, packed, block_scale, g, bias, residual, out = given
        activation, out_dtype, _, kind, acts = options
        facts = kind if isinstance(kind, Facts) else Facts(kind[0], 0, 0, 0, kind[1])
        fmt, n, k, group, gated, zeros, layout, scale_dtype, _ = facts
        made = call.operator(self.name)(
            *(x, packed, block_scale, fmt, g, bias, residual, activation, gated, out_dtype),
            *(n, k, group, zeros, layout, scale_dtype, *acts),
        )
        return call.copied(WHERE, "out", out, made)

    def ready(self, spec: Any, options: Any, given: Any) -> call.Ready:
        x, _, _, g, bias, residual, out = given
        if not x.numel():
            return None
        if residual is not None:
            plain = type(residual) in call.PLAIN
            if not plain or (residual.requires_grad and torch.is_grad_enabled()):
                return None
            given = *given[:5], residual
        else:
            given = given[:5]
        if spec.tiled:
            if out is None:
                out = x.new_empty((*x.shape[:-1], spec.cols), dtype=_dtype(spec))
            return (*given, out, *_workspace(spec, x)), out
        if type(bias) in call.PLAIN and bias.dtype in checks.SIXTEEN_BIT:
            bias = bias.float()
        if spec.gated and type(g) in call.PLAIN and g.numel() == 1:
            g = g.reshape(-1).expand(2).contiguous()
        return (*given[:3], g, bias, *given[5:], out), None

    def check(self, options: Any, given: Any) -> Checked:
        x, *_, residual, out = given
        spec, weight = _check_call(x, given[1:5], residual, options)
        wide = *x.shape[:-1], spec.cols
        y = x.new_empty(wide, dtype=_dtype(spec)) if out is None else out
        if out is not None:
            checks.like(WHERE, "out", y, (_dtype(spec),), "x", x, wide, output=True)
            for name, value in {"x": x, "residual": residual, "bias": given[4]}.items():
                if value is not None:
                    checks.no_overlap(WHERE, "out", y, name, value)
        rows = prod(x.shape[:-1])
        if not rows:
            return Checked(None, (), y)
        added = () if residual is None else (residual.view(rows, spec.cols),)
        arguments = x.view(rows, spec.k), *weight, *added, y.view(rows, spec.cols)
        return Checked(spec, (*arguments, *_workspace(spec, x)), y)


class _Converted(_Linear):
    """The same of a weight that torch's kernels write just before: no launch begins early."""

    def check(self, options: Any, given: Any) -> Checked:
        return super().check(options, given)._replace(enable_pdl=False)


_LINEAR, _CONVERTED = _Linear(WHERE), _Converted(WHERE)


def _workspace(spec: Linear, x: Tensor) -> tuple[Tensor, ...]:
    """Return the memory that a kernel needs beside its tensors, if it needs any."""
    if not spec.copies_rows:
        return ()
    size = spec.workspace_bytes(x.numel() // spec.k)
    return (torch.empty(size, dtype=torch.uint8, device=x.device),)


def _dtype(spec: Linear) -> torch.dtype:
    found: torch.dtype = getattr(torch, spec.out_dtype)
    return found


# ---- Checks -------------------------------------------------------------------------------------


def _check_call(
    x: Tensor, weight: tuple[Any, ...], residual: Any, options: Any
) -> tuple[Linear, tuple[Any, ...]]:
    """Return the spec of the kernel, and the weight's tensors as it takes them."""
    activation, out_dtype, _, kind, acts = options
    act_fmt, fast = acts
    _check_fast(acts)
    if isinstance(kind, Facts):
        facts = kind
        checks.tensor(WHERE, "x", x, checks.ACTIVATIONS)
        _check_layout(x, facts)
        checks.same_device(WHERE, "the weight", weight[0], "x", x)
        _check_columns(x, facts.k, f"the weight has K={facts.k}", "")
    else:
        facts, weight = _check_linear(x, weight, *kind[:2])
    _check_activation(activation, facts.gated)
    if facts.layout == "tiles64e" and not act_fmt:
        raise ValueError(
            f"{WHERE}: the weight is in layout 'tiles64e', which kernels multiply with rows of FP8 "
            "alone; pass act_fmt='fp8', or layout='tiles64' to prepare_linear_weights()"
        )
    tiles = facts.layout in TILED
    to = x.dtype if out_dtype is None else out_dtype
    allowed = (x.dtype, torch.float32) if tiles else checks.ACTIVATIONS
    checks.activation(WHERE, "out_dtype", to, allowed)
    spec = Linear(
        *(facts.n, facts.k, facts.fmt, dtype_name(x.dtype), facts.group, facts.zeros),
        *(facts.layout, activation, facts.gated, residual is not None, dtype_name(to)),
        by_row=facts.by_row and facts.layout != "tiles64e",
        act_fmt=act_fmt,
        # Sums of int4 are those of groups, those of other layouts float32.
        fast_accum=fast and facts.layout == "tiles64e" and facts.fmt != "int4",
    )
    if residual is not None:
        wide = *x.shape[:-1], spec.cols
        checks.like(WHERE, "residual", residual, (x.dtype,), "x", x, wide)
    return spec, weight


def _check_fast(acts: Acts) -> None:
    act_fmt, fast = acts
    if fast and act_fmt != "fp8":
        raise ValueError(
            f"{WHERE}: fast_accum=True, but act_fmt={act_fmt or None!r} has no sums of 8-bit "
            "products; leave it out, or pass act_fmt='fp8'"
        )


def _check_activation(activation: str, gated: bool) -> None:
    checks.choice(WHERE, "activation", activation, ACTIVATIONS)
    if gated and activation == "none":
        raise ValueError(
            f"{WHERE}: activation='none', but the weight is gated; pass that of the gates, one of "
            f"{', '.join(map(repr, ACTIVATIONS[1:]))}"
        )


def _check_layout(x: Tensor, facts: Facts) -> None:
    """Errors for a prepared weight that is not for the device or the dtype of x."""
    checks.tensor(WHERE, "x", x, checks.ACTIVATIONS)
    kind = x.device.type
    wanted = "linear" if kind == "cpu" else "tiles64"
    if kind != "meta" and facts.layout not in (TILED if wanted == "tiles64" else (wanted,)):
        raise ValueError(
            f"{WHERE}: the weight is in layout {facts.layout!r}, but kernels on {kind} read "
            f"{wanted!r}; prepare_linear_weights(layout={wanted!r}) makes it, and to_linear() the "
            "linear one"
        )
    if facts.layout in TILED:
        _check_sixteen(x)
    if facts.dtype not in (None, dtype_name(x.dtype)):
        raise TypeError(
            f"{WHERE}: x has dtype {dtype_name(x.dtype)}, but the weight was prepared for "
            f"{facts.dtype}; pass dtype=x.dtype to prepare_linear_weights()"
        )


def _check_sixteen(x: Tensor) -> None:
    if x.dtype == torch.float32:
        raise TypeError(
            f"{WHERE}: x has dtype float32, but CUDA kernels take bfloat16 or float16; pass "
            "x.to(torch.bfloat16)"
        )


def _check_columns(x: Tensor, k: int, what: str, remedy: str) -> None:
    if x.shape[-1] != k:
        raise ValueError(
            f"{WHERE}: x has {x.shape[-1]} columns, but {what}"
            f"{remedy or f'; pass activations with {k} features'}"
        )


def _check_linear(
    x: Tensor, weight: tuple[Any, ...], fmt: str, gated: bool
) -> tuple[Facts, tuple[Any, ...]]:
    """Return the facts of a weight in layout "linear", and its tensors as kernels take them."""
    packed, block_scale, global_scale, bias = weight
    checks.choice(WHERE, "fmt", fmt, LINEAR_FORMATS)
    checks.tensor(WHERE, "x", x, checks.ACTIVATIONS)
    codes = checks.tensor(WHERE, "packed", packed, checks.PACKED, dims=2)
    if codes.dim() != 2:
        raise ValueError(
            f"{WHERE}: packed has shape {list(packed.shape)}, but a weight has 2 dimensions, "
            "[N, K / 2]"
        )
    n, k = int(codes.shape[0]), 2 * int(codes.shape[1])
    remedy = checks.transposed("packed", codes.shape, (codes.shape[1], x.shape[-1] // 2))
    if n == x.shape[-1]:
        remedy = "; it is made of the weight's transpose, so quantise the weight as [N, K]"
    _check_columns(x, k, f"packed of shape {list(packed.shape)} holds rows of {k}", remedy)
    checks.block_multiple(WHERE, "packed", k, fmt)
    given = Given(packed, block_scale, fmt, global_scale, bias, gated)
    facts = Facts(fmt, n, k, QUANTIZED[fmt].block, gated, by_row=by_row(given))
    scale = checks.scales(WHERE, block_scale, [n], k // facts.group, fmt)
    checks.same_device(WHERE, "packed", packed, "x", x)
    checks.same_device(WHERE, "block_scale", scale, "x", x)
    check_beside(WHERE, given, n, "x", x)
    g = None if global_scale is None else global_scales(given, x)
    return facts, (packed.view(torch.uint8), scale, g, None if bias is None else bias.float())


# ---- What other kernels compute -----------------------------------------------------------------


def _int4(
    x: Tensor,
    weights: LinearWeights,
    epilogue: Epilogue,
    acts: Acts,
    out: Tensor | None,
) -> Tensor:
    """Return `linear` of int4 on a CPU: a product, and what follows it in float32."""
    activation, residual, out_dtype = epilogue
    _check_fast(acts)
    _check_activation(activation, weights.gated)
    to = x.dtype if out_dtype is None else out_dtype
    checks.activation(WHERE, "out_dtype", to)
    given, x = x, _rounded(x) if acts[0] else x
    if activation == "none" and residual is None and not weights.gated:
        return product(x, weights.product, to, out)
    n = weights.n // 2 if weights.gated else weights.n
    wide = *x.shape[:-1], n
    if residual is not None:
        checks.like(WHERE, "residual", residual, (given.dtype,), "x", given, wide)
    if out is not None:
        checks.like(WHERE, "out", out, (to,), "x", given, wide, output=True)
    sums = product(x, weights.product, torch.float32, None)
    if weights.gated:
        sums = sums * weights.global_scale.repeat_interleave(n)
        sums = sums if weights.bias is None else sums + weights.bias
    y = finished(sums, activation, weights.gated, residual, to)
    return call.copied(WHERE, "out", out, y)


def _rounded(x: Tensor) -> Tensor:
    """Return rows as "fp8" rounds them, float32."""
    scale = x.abs().amax(-1, keepdim=True).float() / FP8_MAX
    ratio = torch.where(scale == 0, 0, x.float() / scale)
    return ratio.to(torch.float8_e4m3fn).float() * scale


def finished(
    sums: Tensor,
    activation: str,
    gated: bool,
    residual: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return act(sums), gated or not, plus a residual, computed in float32 and rounded once."""
    gate, up = sums.float(), None
    if gated:
        gate, up = gate.chunk(2, -1)
    if activation == "silu":
        gate = torch.nn.functional.silu(gate)
    elif activation == "gelu_tanh":
        gate = torch.nn.functional.gelu(gate, approximate="tanh")
    elif activation == "relu2":
        gate = gate.relu().square()
    y = gate if up is None else gate * up
    return (y if residual is None else y + residual).to(dtype)


def _quantised(
    x: Tensor,
    weights: LinearWeights,
    epilogue: Epilogue,
    act_fmt: str | None,
    act_global_scale: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """Return `linear` of quantised activations: `quantize`, then `mm_fp4`."""
    activation, residual, out_dtype = epilogue
    if act_fmt in (None, "fp8"):
        raise ValueError(
            f"{WHERE}: act_global_scale is given with act_fmt={act_fmt!r}; pass act_fmt='nvfp4', "
            "or leave it out"
        )
    checks.choice(WHERE, "act_fmt", act_fmt, ACTS)
    checks.tensor(WHERE, "x", x, checks.ACTIVATIONS)
    checks.one_element(WHERE, "act_global_scale", act_global_scale, "x", x)
    if weights.layout != "128x4":
        raise ValueError(
            f"{WHERE}: act_fmt={act_fmt!r} takes a weight in layout '128x4', not in "
            f"{weights.layout!r}; pass layout='128x4' to prepare_linear_weights()"
        )
    _check_columns(x, weights.k, f"the weight has K={weights.k}", "")
    factor = act_global_scale
    if factor is None and x.numel():
        factor = (x.detach().abs().amax().float() / LARGEST).clamp(min=LEAST)
    factor = None if factor is None else factor.reshape(1)
    codes, scale = quantize(x, "nvfp4", factor, "128x4")
    alpha = weights.global_scale if factor is None else weights.global_scale * factor
    tensors = codes, weights.packed, scale, weights.block_scale, alpha
    to = x.dtype if out_dtype is None else out_dtype
    return gemm.mm_fp4(
        *(*tensors, "nvfp4", to, weights.bias), residual=residual, activation=activation, out=out
    )


# ---- The operator -------------------------------------------------------------------------------


def _linear_op(
    x: Tensor,
    packed: Tensor,
    block_scale: Tensor,
    fmt: str = "nvfp4",
    global_scale: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    n: int = 0,
    k: int = 0,
    group: int = 0,
    zeros: bool = False,
    layout: str = "linear",
    scale_dtype: str | None = None,
    act_fmt: str = "",
    fast_accum: bool = False,
) -> Tensor:
    """Run `linear` on a weight in layout "linear", or on one of `TILED` with its facts."""
    kind: tuple[Any, ...] = (fmt, gated, packed.shape, _shape(global_scale))
    if layout in TILED:
        rows = by_row(Given(packed, block_scale, fmt, global_scale, bias, gated))
        kind = Facts(fmt, n, k, group, gated, zeros, layout, scale_dtype, rows)
    weight = packed, block_scale, global_scale, bias
    options = activation, out_dtype, residual is None, kind, (act_fmt, fast_accum)
    if checks.has_data():
        return _LINEAR.run(options, (x, *weight, residual, None))
    spec, _ = _check_call(x, weight, residual, options)
    return x.new_empty((*x.shape[:-1], spec.cols), dtype=_dtype(spec))


call.define(
    WHERE,
    "(Tensor x, Tensor packed, Tensor block_scale, str fmt='nvfp4', Tensor? global_scale=None, "
    "Tensor? bias=None, Tensor? residual=None, str activation='none', bool gated=False, "
    "ScalarType? out_dtype=None, SymInt n=0, SymInt k=0, SymInt group=0, bool zeros=False, "
    "str layout='linear', str? scale_dtype=None, str act_fmt='', bool fast_accum=False) -> Tensor",
    _linear_op,
)
