"""How the functions that normalise rows and quantise them reach their kernels.

Arithmetic: `fused.norm_quantize`.  A call whose dtypes and options were seen before goes
straight to its kernel, which checks shapes, devices, alignment and overlap itself; what it refuses
is checked again here, in the words of the function that was called.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import is_grad_enabled

from blockscale.base.sizes import ceil_div, round_up
from blockscale.ops import checks, dispatch, torch_ops
from blockscale.ops.checks import FP4, SCALE_DTYPES, SCALE_FORMAT
from blockscale.runtime import jit
from blockscale.specs import NormQuantize

Tensor = torch.Tensor
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)  # compared by identity: it is in the key of every call
class NormOp:
    """One of the functions that normalise: its name, and what its kernels are."""

    name: str
    residual: bool
    convention: str = "divide"


class NormArguments(NamedTuple):
    """The arguments of `add_rmsnorm_fp4quant`, in its order."""

    input: Tensor
    residual: Tensor | None
    weight: Tensor
    y_fp4: Tensor | None
    block_scale: Tensor | None
    global_scale: Tensor | None
    eps: float
    block_size: int
    scale_format: str | None
    swizzled: bool
    both: bool
    unswizzled: Tensor | None
    enable_pdl: bool | None
    y_out: Tensor | None


def norm(
    op: NormOp,
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    y_fp4: Tensor | None,
    block_scale: Tensor | None,
    global_scale: Tensor | None,
    eps: float,
    block_size: int,
    scale_format: str | None,
    swizzled: bool,
    both: bool,
    unswizzled: Tensor | None,
    enable_pdl: bool | None,
    y_out: Tensor | None,
) -> Tensors:
    """Run ``op`` on plain tensors; arguments and errors as in `add_rmsnorm_fp4quant`."""
    key = None
    try:
        hidden, cuda, y = weight.numel(), input.is_cuda, y_out is not None
        key = (op, input.dtype, cuda, hidden, block_size, scale_format, swizzled, both, y)
        run = jit.recall(key)
        if unswizzled is not None and not both:
            run = None  # not to be written: an error in one convention
        if run is not None and not (
            is_grad_enabled()
            and (
                input.requires_grad
                or weight.requires_grad
                or (residual is not None and residual.requires_grad)
            )
        ):
            codes, scale, linear = y_fp4, block_scale, unswizzled
            if codes is None or scale is None or (both and linear is None):
                codes, scale, linear = _outputs(
                    input, y_fp4, block_scale, unswizzled, block_size, scale_format, swizzled, both
                )
            rows = scale
            if not cuda and (swizzled or both) and scale.dim() == 1:  # a CUDA library takes both
                rows = checks.tiles(scale, round_up(ceil_div(hidden, block_size), 4))
            tail: tuple[Any, ...] = dispatch.launch_flags(cuda, enable_pdl)
            if residual is not None:
                tail = (residual, *tail)  # updated in place; named, it is checked for overlaps
            if y:
                tail = (y_out, *tail)
            if both:
                tail = (linear, *tail)
            if residual is not None:
                run(input, residual, weight, global_scale, eps, codes, rows, *tail)
            else:
                run(input, weight, global_scale, eps, codes, rows, *tail)
            return (codes, scale, linear) if both else (codes, scale)  # type: ignore[return-value]
    except (TypeError, ValueError, AttributeError, IndexError):
        pass  # the checks below say it in our words
    given = NormArguments(
        *(input, residual, weight, y_fp4, block_scale, global_scale, eps, block_size),
        *(scale_format, swizzled, both, unswizzled, enable_pdl, y_out),
    )
    return _norm_in_full(op, given, key)


def _outputs(
    input: Tensor,
    y_fp4: Tensor | None,
    block_scale: Tensor | None,
    unswizzled: Tensor | None,
    block_size: int,
    scale_format: str | None,
    swizzled: bool,
    both: bool,
    fp4: torch.dtype = FP4,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes, scales and, for both layouts, linear scales: those given, the others new."""
    *lead, hidden = input.shape
    device = input.device
    dtype = SCALE_DTYPES[scale_format or SCALE_FORMAT[block_size]][0]
    wide = (*lead, hidden // block_size)
    if y_fp4 is None:
        y_fp4 = torch.empty((*lead, hidden // 2), dtype=fp4, device=device)
    if block_scale is None:
        shape: tuple[int, ...] = wide
        if swizzled or both:
            shape = (prod(checks.padded_shape(prod(lead), wide[-1])),)
        block_scale = torch.empty(shape, dtype=dtype, device=device)
    if unswizzled is None and both:
        unswizzled = torch.empty(wide, dtype=dtype, device=device)
    return y_fp4, block_scale, unswizzled


def _norm_in_full(op: NormOp, given: NormArguments, key: Any) -> Tensors:
    """Check everything, run the kernel, and remember it under ``key``."""
    spec = _spec(op, given)
    x, rows = given.input, prod(given.input.shape[:-1])
    codes, scale, linear = _outputs(
        x,
        given.y_fp4,
        given.block_scale,
        given.unswizzled,
        given.block_size,
        given.scale_format,
        given.swizzled,
        given.both,
    )
    _check(op, spec, given._replace(y_fp4=codes, block_scale=scale, unswizzled=linear))
    arguments: list[Any] = [x.view(rows, spec.hidden)]
    if given.residual is not None and op.residual:
        checks.no_overlap(op.name, "residual", given.residual, "input", x)
        arguments.append(given.residual.view(rows, spec.hidden))
    g = checks.one_element(op.name, "global_scale", given.global_scale, "input", x)
    arguments += [given.weight, g, float(given.eps), codes.view(rows, spec.hidden // 2)]
    padded = checks.padded_shape(rows, spec.blocks)
    arguments.append(scale.view((rows, spec.blocks) if spec.layout == "linear" else padded))
    if linear is not None and given.both:
        arguments.append(linear.view(rows, spec.blocks))
    if given.y_out is not None:
        arguments.append(given.y_out.view(rows, spec.hidden))
    if given.residual is not None and op.residual:
        arguments.append(given.residual.view(rows, spec.hidden))
    function = dispatch.kernel(spec, x.device)
    function(*arguments, *dispatch.launch_flags(x.is_cuda, given.enable_pdl))
    if key is not None:
        jit.remember(key, dispatch.direct(function))
    return (codes, scale, linear) if given.both else (codes, scale)  # type: ignore[return-value]


def _spec(op: NormOp, given: NormArguments) -> NormQuantize:
    """Return the spec of a call after the checks of its options and of ``input``."""
    where, block = op.name, given.block_size
    chosen = checks.scale_format(where, block, given.scale_format)
    checks.number(where, "eps", given.eps)
    x = checks.tensor(where, "input", given.input, checks.SIXTEEN_BIT)
    hidden = int(x.shape[-1])
    if hidden % block or hidden < 64:
        raise ValueError(
            f"{where}: hidden={hidden}, the last dimension of input, must be a multiple of "
            f"block_size={block} and at least 64; pad the rows to "
            f"{max(64, round_up(hidden, block))}"
        )
    if given.unswizzled is not None and not given.both and op.convention == "divide":
        raise ValueError(
            f"{where}: block_scale_unswizzled is given, but is written only with "
            "output_both_sf_layouts=True; pass that, or leave it out"
        )
    layout = "both" if given.both else "128x4" if given.swizzled else "linear"
    dtype, y = checks.dtype_name(x.dtype), given.y_out is not None
    return NormQuantize(hidden, block, chosen, dtype, op.residual, layout, y, op.convention)


def _check(op: NormOp, spec: NormQuantize, given: NormArguments) -> None:
    """Check all tensors but ``input``, outputs included."""
    x, lead, own = given.input, given.input.shape[:-1], (given.input.dtype,)
    dtypes, wide = SCALE_DTYPES[spec.scale_format], (*lead, spec.blocks)
    padded = checks.padded_shape(prod(lead), spec.blocks)

    def check(name: str, value: object, allowed: tuple[torch.dtype, ...], *shapes: Any) -> None:
        checks.like(op.name, name, value, allowed, "input", x, *shapes)

    if op.residual:
        check("residual", given.residual, own, x.shape)
    check("weight", given.weight, own, (spec.hidden,))
    check("y_fp4", given.y_fp4, checks.PACKED, (*lead, spec.hidden // 2))
    if spec.layout == "linear":
        check("block_scale", given.block_scale, dtypes, wide)
    else:
        check("block_scale", given.block_scale, dtypes, (prod(padded),), padded)
    if given.both:
        check("block_scale_unswizzled", given.unswizzled, dtypes, wide)
    if given.y_out is not None:
        check("y_out", given.y_out, own, x.shape)


def traced_norm(
    op: NormOp,
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    y_fp4: Tensor | None,
    block_scale: Tensor | None,
    global_scale: Tensor | None,
    eps: float,
    block_size: int,
    scale_format: str | None,
    swizzled: bool,
    both: bool,
    unswizzled: Tensor | None,
    enable_pdl: bool | None,
    y_out: Tensor | None,
) -> Tensors:
    """As `norm`, by way of torch's operators."""
    scale_format = checks.scale_format(op.name, block_size, scale_format)
    # Inductor (torch 2.13) cannot allocate float4_e2m1fn_x2; it can view bytes as such.
    codes, scale, linear = _outputs(
        input,
        y_fp4,
        block_scale,
        unswizzled,
        block_size,
        scale_format,
        swizzled,
        both,
        torch.uint8,
    )
    x = (input, residual, weight) if op.residual else (input, weight)
    torch_ops.operator(op.name)(
        *(*x, codes, scale, linear if both else None, y_out),
        *(global_scale, eps, block_size, scale_format, swizzled, both, enable_pdl),
    )
    if y_fp4 is None:
        codes = codes.view(FP4)
    return (codes, scale, linear) if both else (codes, scale)  # type: ignore[return-value]


def _fake_norm(op: NormOp, given: NormArguments) -> None:
    _check(op, _spec(op, given), given)


def _in_order(
    x: tuple[Any, ...], codes: tuple[Any, ...], more: tuple[Any, ...], rest: tuple[Any, ...]
) -> NormArguments:
    """Return the arguments of an operator in the order of the function."""
    unswizzled, y_out = more
    *options, enable_pdl = rest
    return NormArguments._make((*x, *codes, *options, unswizzled, enable_pdl, y_out))


def define_add(op: NormOp) -> NormOp:
    """Register ``op``, which adds a residual, with torch and return it."""

    def run(
        input: Tensor,
        residual: Tensor,
        weight: Tensor,
        y_fp4: Tensor,
        block_scale: Tensor,
        block_scale_unswizzled: Tensor | None,  # written, so without default: torch 2.11 fails on
        y_out: Tensor | None,  # arguments that are written and left out
        global_scale: Tensor | None = None,
        eps: float = 1e-6,
        block_size: int = 16,
        scale_format: str | None = None,
        is_sf_swizzled_layout: bool = False,
        output_both_sf_layouts: bool = False,
        enable_pdl: bool | None = None,
    ) -> None:
        norm(
            *(op, input, residual, weight, y_fp4, block_scale, global_scale, eps, block_size),
            *(scale_format, is_sf_swizzled_layout, output_both_sf_layouts),
            *(block_scale_unswizzled, enable_pdl, y_out),
        )

    def fake(*given: Any) -> None:
        x, codes, more, rest = given[:3], given[3:5], given[5:7], given[7:]
        _fake_norm(op, _in_order(x, codes, more, rest))

    written = ("residual", "y_fp4", "block_scale", "block_scale_unswizzled", "y_out")
    torch_ops.define(op.name, run, fake, written)
    return op


def define_norm(op: NormOp) -> NormOp:
    """Register ``op``, which adds nothing, with torch and return it."""

    def run(
        input: Tensor,
        weight: Tensor,
        y_fp4: Tensor,
        block_scale: Tensor,
        block_scale_unswizzled: Tensor | None,  # written, so without default: torch 2.11 fails on
        y_out: Tensor | None,  # arguments that are written and left out
        global_scale: Tensor | None = None,
        eps: float = 1e-6,
        block_size: int = 16,
        scale_format: str | None = None,
        is_sf_swizzled_layout: bool = False,
        output_both_sf_layouts: bool = False,
        enable_pdl: bool | None = None,
    ) -> None:
        norm(
            *(op, input, None, weight, y_fp4, block_scale, global_scale, eps, block_size),
            *(scale_format, is_sf_swizzled_layout, output_both_sf_layouts),
            *(block_scale_unswizzled, enable_pdl, y_out),
        )

    def fake(*given: Any) -> None:
        x, codes, more, rest = (given[0], None, given[1]), given[2:4], given[4:6], given[6:]
        _fake_norm(op, _in_order(x, codes, more, rest))

    written = ("y_fp4", "block_scale", "block_scale_unswizzled", "y_out")
    torch_ops.define(op.name, run, fake, written)
    return op
