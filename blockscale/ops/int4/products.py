"""Torch functions that multiply by INT4 weights: one, or one for each expert.

Formats and rounding: `int4.mm`, docs/int4.md.  Errors: TypeError for an argument that
is no tensor or of another dtype; ValueError for an unknown option, a shape, stride or device that
does not fit, tensors that overlap.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import torch

from blockscale.ops import call, checks
from blockscale.ops.call import Checked
from blockscale.ops.checks import dtype_name
from blockscale.ops.int4.weight import TENSORS, Given, Int4Weight, prepared
from blockscale.runtime.arguments import brief
from blockscale.specs.int4 import TILES, Int4Mm

Tensor = torch.Tensor


def linear(
    x: Tensor,
    packed: Tensor | Int4Weight,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    *,
    group_size: int = 128,
    activation: str | None = None,
    layout: str = "plain",
    sm: int = 80,
    moe: bool = False,
    group_index: Tensor | None = None,
    pre_quant_scale: Tensor | None = None,
    alpha: float | Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``alpha * x' @ w + bias`` [..., N], summed in float32 and rounded once.

    x' is x * pre_quant_scale, rounded to the dtype of x, and to E4M3 for "a8".  Call it with a
    prepared weight, ``linear(x, prepared)``: tensors are converted in every call on CUDA.

    Args:
        x: [..., K] bfloat16 or float16, on the CPU also float32.
        packed, scale, zero, group_size, layout, sm, moe, group_index, pre_quant_scale, alpha, bias:
            one weight, as in `prepare`, which returns what may be given in place of packed.
        activation: "a16" or "a8"; None: what the weight was prepared for, else "a16".
        out_dtype: bfloat16, float16 or float32; None, and always on CUDA: that of x.
        out: output, [..., N] of out_dtype; None: allocated.

    Raises:
        TypeError, ValueError: as the module says.
    """
    extra = (scale, zero, group_index, pre_quant_scale, alpha, bias)
    weight = _weight(
        *(_LINEAR.name, x, packed, extra, group_size, activation, layout, sm, moe),
        dims=2,
    )
    return _multiplied(_LINEAR, x, None, weight, out_dtype, out)


def grouped_mm(
    x: Tensor,
    packed: Tensor | Int4Weight,
    scale: Tensor | None = None,
    offsets: Tensor | None = None,
    zero: Tensor | None = None,
    *,
    group_size: int = 128,
    activation: str | None = None,
    layout: str = "plain",
    sm: int = 80,
    moe: bool = True,
    pre_quant_scale: Tensor | None = None,
    alpha: float | Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return [rows, N]: for each row i of expert e ``alpha[e] * x'[i] @ w[e] + bias[e]``.

    Args:
        x: [rows, K], sorted by expert.
        packed: [E, K, N / 2], or a prepared weight: ``grouped_mm(x, prepared, offsets=offsets)``.
        scale, zero: [E, G, N].
        offsets: [E + 1] int32: expert e has the rows offsets[e] to offsets[e + 1].  Checked on the
            CPU; on a GPU those that fall or lie outside of x are taken as the nearest that do not.
        group_size, activation, layout, sm, moe, out_dtype: as in `linear`.
        pre_quant_scale: [K] or [E, K].
        alpha: [E], or a number.
        bias: [E, N].
        out: output, [rows, N]; None: allocated.  Rows of no expert are not written.

    Raises:
        TypeError, ValueError: as the module says.
    """
    extra = (scale, zero, None, pre_quant_scale, alpha, bias)
    weight = _weight(
        *(_GROUPED.name, x, packed, extra, group_size, activation, layout, sm, moe),
        dims=3,
    )
    return _multiplied(_GROUPED, x, offsets, weight, out_dtype, out)


def _weight(
    where: str,
    x: Any,
    packed: Any,
    extra: tuple[Any, ...],
    group_size: int,
    activation: str | None,
    layout: str,
    sm: int,
    moe: bool,
    dims: int,
) -> Int4Weight:
    """Return the weight of this call."""
    if isinstance(packed, Int4Weight):
        _check_prepared(where, packed, extra, activation, dims)
        return packed
    checks.tensor(where, "x", x, checks.ACTIVATIONS, dims=1)
    if call.traced(x) and x.device.type != "cpu":
        raise ValueError(
            f"{where}: packed is a tensor, but converting it on {x.device.type} cannot be traced; "
            "convert it once, with int4.prepare(), outside of what is compiled"
        )
    if isinstance(packed, torch.Tensor):
        checks.same_device(where, "packed", packed, "x", x)
        if packed.dim() != dims:
            wanted = "[K, N / 2]" if dims == 2 else "[experts, K, N / 2]"
            raise ValueError(
                f"{where}: packed has shape {list(packed.shape)}, but must have {dims} dimensions, "
                f"such as {wanted}; int4.linear takes one weight, int4.grouped_mm one per expert"
            )
    scale, zero, index, pre, alpha, bias = extra
    given = Given(
        *(packed, scale, zero, group_size, layout, sm, activation or "a16", moe, index),
        *(pre, alpha, bias),
    )
    return prepared(where, given, x.dtype, None)


def _check_prepared(
    where: str, weight: Int4Weight, extra: tuple[Any, ...], activation: str | None, dims: int
) -> None:
    if any(value is not None for value in extra):
        raise ValueError(
            f"{where}: the weight is prepared, but scales, zeros, factors or biases are given too; "
            "leave them out, or pass them to int4.prepare()"
        )
    if activation not in (None, weight.activation):
        raise ValueError(
            f"{where}: activation={activation!r} is given, but the weight was prepared for "
            f"{weight.activation!r}; pass it to int4.prepare(), or leave it out"
        )
    if (weight.experts > 0) != (dims == 3):
        other = "int4.grouped_mm" if weight.experts else "int4.linear"
        raise ValueError(
            f"{where}: the weight has {weight.experts or 'no'} experts; call {other}() with it"
        )


def _multiplied(
    op: _Product,
    x: Tensor,
    offsets: Tensor | None,
    weight: Int4Weight,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
) -> Tensor:
    pre = weight.pre_quant_scale is None
    return op.run((out_dtype, pre, *_flat(weight)), (x, offsets, weight, out))


class _Product(call.Op[Tensor]):
    def recorded(self, options: Any, given: Any) -> Tensor:
        x, offsets, weight, out = given
        spec = _check_call(self.name, x, offsets, weight, options[0])
        made = _output(x, spec) if out is None else out
        tensors = [getattr(weight, name) for name in TENSORS]
        call.operator("int4_mm")(x, offsets, *tensors, *_flat(weight), made)
        return made

    def ready(self, spec: Any, options: Any, given: Any) -> call.Ready:
        x, offsets, weight, out = given
        fits = x.dim() == 2 and x.shape[1] == weight.k and len(x) and x.is_contiguous()
        if not fits:
            return None
        known = offsets is None or type(offsets) in call.PLAIN
        if not known or (offsets is not None and not _in_order(offsets, len(x))):
            return None
        y = _output(x, spec) if out is None else out
        return _arguments(spec, x, offsets, weight, y), y

    def check(self, options: Any, given: Any) -> Checked:
        x, offsets, weight, out = given
        where = self.name
        spec = _check_call(where, x, offsets, weight, options[0])
        y = _output(x, spec) if out is None else out
        dtypes = (getattr(torch, spec.out_dtype),)
        checks.like(where, "out", y, dtypes, "x", x, (*x.shape[:-1], spec.n), output=True)
        if out is not None:
            checks.no_overlap(where, "out", y, "x", x)
        rows = prod(x.shape[:-1])
        if not rows:
            return Checked(None, (), y)
        if offsets is not None and not _in_order(offsets, rows):
            raise ValueError(
                f"{where}: offsets is {brief(offsets.tolist())}, but must rise from 0 or more to "
                f"at most {rows}, the rows of x; pass the first row of each expert and the end of "
                "the last"
            )
        flat = x.view(rows, spec.k)
        return Checked(spec, _arguments(spec, flat, offsets, weight, y.view(rows, spec.n)), y)


_LINEAR, _GROUPED = _Product("int4.linear"), _Product("int4.grouped_mm")
_OF_LINEAR = _Product("linear")


def product(x: Tensor, weight: Int4Weight, out_dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """Return x [..., K] times one prepared weight, for `blockscale.linear`, as errors say."""
    return _multiplied(_OF_LINEAR, x, None, weight, out_dtype, out)


def _arguments(
    spec: Int4Mm, x: Tensor, offsets: Tensor | None, weight: Int4Weight, y: Tensor
) -> tuple[Any, ...]:
    """Return what the kernel takes."""
    w, pre = weight, weight.pre_quant_scale
    if w.order is not None:
        x = x.index_select(1, w.order)
    start = (x,) if offsets is None else (x, offsets)
    if spec.layout == TILES:
        size = spec.workspace_bytes(len(x))
        workspace = x.new_empty(size, dtype=torch.uint8)
        rest = () if pre is None else (pre,)
        return (*start, w.packed, w.scale, *rest, w.alpha, w.bias, y, workspace)
    if pre is not None:
        pre = pre.to(x.dtype).float().expand(spec.matrices, spec.k).contiguous()
    terms = () if w.zero is None else (w.zero,)
    packed = w.packed.view(spec.matrices, -1)
    return (*start, packed, w.scale, *terms, pre, w.alpha, w.bias, y)


def _output(x: Tensor, spec: Int4Mm) -> Tensor:
    dtype = getattr(torch, spec.out_dtype)
    return x.new_empty((*x.shape[:-1], spec.n), dtype=dtype)


def _check_call(
    where: str, x: Any, offsets: Any, weight: Int4Weight, out_dtype: torch.dtype | None
) -> Int4Mm:
    """Return the spec of the kernel."""
    checks.tensor(where, "x", x, checks.ACTIVATIONS, dims=2 if weight.experts else 1)
    checks.same_device(where, "the weight", weight.packed, "x", x)
    if x.shape[-1] != weight.k or (weight.experts and x.dim() != 2):
        wanted = f"[rows, {weight.k}]" if weight.experts else f"[..., {weight.k}]"
        raise ValueError(
            f"{where}: x has shape {list(x.shape)}, but must have {wanted}, as the weight has "
            f"K={weight.k}; pass rows of this length"
        )
    tiles = weight.layout == TILES
    if tiles != (x.device.type != "cpu") and x.device.type != "meta":
        made = "cuda" if tiles else "cpu"
        raise ValueError(
            f"{where}: the weight was prepared for {made}, but x is on {x.device}; pass "
            f"target={x.device.type!r} to int4.prepare()"
        )
    if weight.dtype not in (None, x.dtype):
        raise TypeError(
            f"{where}: x has dtype {dtype_name(x.dtype)}, but the weight was prepared for "
            f"{dtype_name(weight.dtype or x.dtype)}; pass dtype=x.dtype to int4.prepare()"
        )
    to = out_dtype or x.dtype
    checks.activation(where, "out_dtype", to, (x.dtype,) if tiles else checks.ACTIVATIONS)
    if weight.experts:
        checks.beside(where, "offsets", offsets, (torch.int32,), "x", x)
        rest = f": the first row of each of the {weight.experts} experts, and the end of the last"
        checks.sized(where, "offsets", offsets, [[weight.experts + 1]], rest)
    return _spec(x, weight, to)


def _spec(x: Tensor, weight: Int4Weight, to: torch.dtype) -> Int4Mm:
    tiles = weight.layout == TILES
    zero = weight.zeros if tiles else "none" if weight.zero is None else "term"
    return Int4Mm(
        *(weight.n, weight.k, weight.group, dtype_name(x.dtype), dtype_name(to), weight.experts),
        *(weight.layout, weight.activation, zero),
        tiles and weight.pre_quant_scale is not None,
    )


def _in_order(offsets: Any, rows: int) -> bool:
    """Return whether the ranges are in order and in x, or on a GPU, where kernels see to it."""
    if not isinstance(offsets, torch.Tensor) or offsets.dim() != 1:
        return False
    if offsets.device.type != "cpu":
        return True
    ends = offsets.tolist()
    rising = all(start <= end for start, end in pairwise(ends))
    return bool(ends) and rising and ends[0] >= 0 and ends[-1] <= rows


# ---- The operator -------------------------------------------------------------------------------


def _flat(weight: Int4Weight) -> tuple[Any, ...]:
    """Return everything but the tensors, as an operator takes it."""
    w = weight
    dtype = None if w.dtype is None else dtype_name(w.dtype)
    return w.n, w.k, w.group, w.experts, w.layout, w.zeros, w.activation, dtype


def _int4_op(x: Tensor, offsets: Tensor | None, *given: Any) -> None:
    tensors, flat, out = given[: len(TENSORS)], given[len(TENSORS) : -1], given[-1]
    dtype = None if flat[-1] is None else getattr(torch, flat[-1])
    fields: tuple[Any, ...] = (*tensors, *flat[:-1], dtype)
    weight = Int4Weight(*fields)
    op = _GROUPED if weight.experts else _LINEAR
    if checks.has_data():
        _multiplied(op, x, offsets, weight, out.dtype, out)
    else:
        _check_call(op.name, x, offsets, weight, out.dtype)


call.define(
    "int4_mm",
    "(Tensor x, Tensor? offsets, Tensor packed, Tensor scale, Tensor? zero, Tensor? order, "
    "Tensor? pre_quant_scale, Tensor? alpha, Tensor? bias, SymInt n, SymInt k, SymInt group, "
    "SymInt experts, str layout, str zeros, str activation, str? scale_dtype, Tensor! out) -> ()",
    _int4_op,
)
