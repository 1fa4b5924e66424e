"""A prepared INT4 weight: what `int4.linear` and `int4.grouped_mm` run on, made once.

On a CPU the codes stay as they are, whatever their layout; scales become float32, and zeros terms
that are added.  For CUDA everything goes to the layout "tiles64" (`blockscale.ops.moe.tiles`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch

from blockscale.base.sizes import ceil_div
from blockscale.ops import checks
from blockscale.ops.checks import dtype_name
from blockscale.ops.int4.layout import INTEGERS, layout_of, unprocess_weights, weight_bytes
from blockscale.ops.moe import tiles as moe_tiles
from blockscale.ops.weights import INT4_LARGEST, PreparedWeights, untiled
from blockscale.specs.int4 import ACTIVATIONS, TILE_GROUPS, TILES

Tensor = torch.Tensor

WHERE = "int4.prepare"

GIVEN = ("plain", "preprocessed", "rows")
"""Layouts of what `prepare` takes."""

MOST_POINT = 16
"""Zero points of CUDA kernels are from 0 to this, which GPTQ's first format reaches."""

TENSORS = ("packed", "scale", "zero", "order", "pre_quant_scale", "alpha", "bias")
"""Names of an `Int4Weight`'s tensors."""

_META = ("n", "k", "group", "experts", "layout", "zeros", "activation")


@dataclass(frozen=True, eq=False)
class Int4Weight(PreparedWeights):
    """A weight [K, N], or one for each expert, ready for kernels; None: it has no such tensor.

    Attributes:
        packed: codes, uint8 [max(1, experts), ...].
        scale: float32 [E, G, N]; in layout "tiles64" bytes, zeros with them.
        zero: float32 like scale: terms that are added.
        order: int64 [K]: column of x that meets row k (act-order).
        pre_quant_scale: [1 or E, K], what x is multiplied by.
        alpha: float32 [E]; bias: float32 [E, N].
        n, k, group: sizes; group as kernels have it, which may divide the one given.
        experts: 0: dense.
        layout: of `blockscale.specs.int4`.
        zeros: "none", "point" or "term".
        activation: "a16" or "a8".
        dtype: of x in layout "tiles64", else None.
    """

    packed: Tensor
    scale: Tensor
    zero: Tensor | None
    order: Tensor | None
    pre_quant_scale: Tensor | None
    alpha: Tensor | None
    bias: Tensor | None
    n: int
    k: int
    group: int
    experts: int
    layout: str
    zeros: str
    activation: str
    dtype: torch.dtype | None = None
    names: ClassVar[tuple[str, ...]] = TENSORS
    described_by: ClassVar[tuple[str, ...]] = _META

    def to_rows(self) -> Rows:
        """Return a dense weight of layout "rows", or one prepared of it for CUDA, as it was given.

        For CUDA scales are those that were rounded, and a group may be a part of the one given.

        Raises:
            ValueError: it is of experts, was given in another layout, or has a factor or zeros that
                are no points.
        """
        plain = not self.experts and self.alpha is None and self.zeros != "term"
        if self.layout not in ("rows", TILES) or not plain:
            raise ValueError(
                f"Int4Weight.to_rows: layout={self.layout!r}, experts={self.experts}, "
                f"zeros={self.zeros!r}, alpha={self.alpha}, but only a dense weight in layout "
                "'rows' with zero points, or none, and no factor comes back; prepare such a one"
            )
        return _from_tiles(self) if self.layout == TILES else _from_rows(self)


class Rows(NamedTuple):
    """A dense weight as `prepare` takes it in layout "rows"; None: it has none.

    ``packed`` [N, K / 2] codes from 0 to 15, ``scale`` float32 [N, G], ``zero`` uint8 [N, G],
    ``group_index`` int32 [K], ``pre_quant_scale`` [K], ``bias`` float32 [N].
    """

    packed: Tensor
    scale: Tensor
    zero: Tensor | None
    group_index: Tensor | None
    pre_quant_scale: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True)
class Given:
    """A weight as callers have it, of any type until checked; see `prepare`."""

    packed: Any
    scale: Any
    zero: Any = None
    group_size: int = 128
    layout: str = "plain"
    sm: int = 80
    activation: str = "a16"
    moe: bool | None = None
    group_index: Any = None
    pre_quant_scale: Any = None
    alpha: Any = None
    bias: Any = None


def prepare(
    packed: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    group_size: int = 128,
    layout: str = "plain",
    sm: int = 80,
    activation: str = "a16",
    moe: bool | None = None,
    group_index: Tensor | None = None,
    pre_quant_scale: Tensor | None = None,
    alpha: float | Tensor | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    target: str | None = None,
) -> Int4Weight:
    """Return the weight as kernels load it; keep it, and pass it in place of ``packed``.

    Args:
        packed: uint8 or int8 codes of one weight, or with a leading axis of experts.  "plain":
            signed, [K, N / 2], the even n in the low nibble; "preprocessed": what
            `preprocess_weights` made of it; "rows": 0 to 15, [N, K / 2], the even k low, as
            `blockscale.checkpoints` has it.
        scale: float [G, N], G = K / group_size, or with experts; "rows": [N, G].
        zero: like scale.  Float: it is added; integer: a point z, (code - z) * scale, codes from 0
            to 15 (`int4.dequantize`).
        group_size: values of K that share a scale; the last group may be shorter on a CPU.  CUDA:
            a multiple of 32 that divides K.
        layout: "plain", "preprocessed" or "rows".
        sm, moe: of a preprocessed weight, see `preprocess_weights`; moe None: whether there are
            experts.
        activation: "a16"; "a8": x is rounded to E4M3.
        group_index: "rows", dense: int [K], the group of each k (act-order).
        pre_quant_scale: [K], or [E, K]: x is multiplied by it and rounded to its dtype.
        alpha: factor of the sum: a number or [1], with experts [E].
        bias: [N], with experts [E, N].
        dtype: of x, on CUDA: scales, zeros and pre_quant_scale are rounded to it.
        target: "cpu" or "cuda", whose kernels will read it; None: that of packed's device.

    Raises:
        TypeError, ValueError: an argument that does not fit; a size, or a scale too large, that no
            CUDA kernel takes.
    """
    given = Given(
        *(packed, scale, zero, group_size, layout, sm, activation, moe, group_index),
        *(pre_quant_scale, alpha, bias),
    )
    return prepared(WHERE, given, dtype, target)


def prepared(where: str, given: Given, dtype: torch.dtype, target: str | None) -> Int4Weight:
    """Return the weight of ``given``; errors begin with ``where``."""
    checks.choice(where, "layout", given.layout, GIVEN)
    checks.choice(where, "activation", given.activation, ACTIVATIONS)
    plain = _plain(where, given)
    target = target or plain.device.type
    checks.choice(where, "target", target, ("cpu", "cuda"))
    return plain if target == "cpu" else to_tiles(where, given, plain, dtype)


def kernel_layout(where: str, given: Given, moe: bool) -> str:
    """Return the name of the layout that an index map describes."""
    if given.layout != "preprocessed":
        return given.layout
    return layout_of(sm=given.sm, activation=given.activation, moe=moe, where=where).map_name


def _plain(where: str, given: Given) -> Int4Weight:
    """Return the weight for a CPU, after all checks."""
    packed = checks.tensor(where, "packed", given.packed, (torch.uint8, torch.int8), dims=2)
    if packed.dim() not in (2, 3) or not packed.numel():
        raise ValueError(
            f"{where}: packed has shape {list(packed.shape)}, but must have 2 dimensions, or 3 "
            "with experts, none of them 0"
        )
    experts = 0 if packed.dim() == 2 else int(packed.shape[0])
    moe = experts > 0 if given.moe is None else given.moe
    rows = given.layout == "rows"
    if given.layout == "preprocessed":
        form = layout_of(sm=given.sm, activation=given.activation, moe=moe, where=where)
        codes = weight_bytes(where, packed, form, False, 4)
    else:
        codes = packed.detach().view(torch.uint8)
        codes = codes if experts else codes[None]
    k, n = int(codes.shape[1]), int(codes.shape[2]) * 2
    if rows:
        n, k = int(codes.shape[1]), int(codes.shape[2]) * 2
        if n % 2:
            raise ValueError(f"{where}: packed has {n} rows, an odd N; pad the weight with a row")
    groups = _groups(where, given, k, experts)
    scale = _per_group(where, "scale", given, given.scale, checks.ACTIVATIONS, (groups, n))
    zero, zeros = None, "none"
    if given.zero is not None:
        dtypes = checks.ACTIVATIONS + INTEGERS
        zero = _per_group(where, "zero", given, given.zero, dtypes, (groups, n))
        zeros = "term" if zero.is_floating_point() else "point"
    made = Int4Weight(
        *(codes, scale, zero, None),
        *(_pre_quant(where, given, experts, k), _alpha(where, given, experts)),
        _bias(where, given, experts, n),
        n=n,
        k=k,
        group=given.group_size,
        experts=experts,
        layout=kernel_layout(where, given, moe),
        zeros=zeros,
        activation=given.activation,
    )
    made = made if given.group_index is None else _sorted_groups(where, given, made)
    return _terms(made)


def _terms(plain: Int4Weight) -> Int4Weight:
    """Return the weight with float32 scales, and points kept beside them for CUDA."""
    scale = plain.scale.float().contiguous()
    if plain.zero is None:
        return replace(plain, scale=scale, packed=plain.packed.contiguous())
    if plain.zeros == "point":
        zero = (8 - plain.zero.float()) * scale
    else:
        zero = plain.zero.float()
    return replace(plain, scale=scale, zero=zero.contiguous(), packed=plain.packed.contiguous())


def _groups(where: str, given: Given, k: int, experts: int) -> int:
    group = given.group_size
    if not isinstance(group, int) or isinstance(group, bool) or group < 1:
        raise ValueError(
            f"{where}: group_size={group!r}, but must be a positive integer; pass K for one scale "
            "per column"
        )
    if k % group and experts:
        raise ValueError(
            f"{where}: group_size={group} does not divide K={k}; only a dense weight may end in a "
            "shorter group, so pass the group size of the scales"
        )
    return ceil_div(k, group)


def _per_group(
    where: str,
    name: str,
    given: Given,
    value: Any,
    dtypes: tuple[torch.dtype, ...],
    sizes: tuple[int, int],
) -> Tensor:
    """Return scales or zeros as [E, G, N], after all checks."""
    checked = checks.beside(where, name, value, dtypes, "packed", given.packed)
    groups, n = sizes
    one = [n, groups] if given.layout == "rows" else [groups, n]
    lead = [] if given.packed.dim() == 2 else [int(given.packed.shape[0])]
    allowed = [[*lead, *one], *([[*lead, n]] if groups == 1 else [])]
    rest = (
        f" for packed {list(given.packed.shape)} in layout {given.layout!r} and this group_size"
        f"{_regrouped(given, list(checked.shape), allowed[0])}"
    )
    checks.sized(where, name, checked, allowed, rest)
    full = checked.detach().reshape(-1, *one)
    return full.transpose(1, 2) if given.layout == "rows" else full


def _regrouped(given: Given, got: list[int], wanted: list[int]) -> str:
    """Return the end of an error for scales of another shape: what they would fit, if anything."""
    rows, (high, wide) = given.layout == "rows", given.packed.shape[-2:]
    k, axis = (2 * wide, -1) if rows else (high, -2)
    if len(got) == len(wanted) and got[axis] and k % got[axis] == 0:
        size = k // got[axis]
        wanted = [*wanted]
        wanted[axis] = got[axis]
        if got == wanted:
            return f"; they are of groups of {size}, so pass group_size={size}"
    if not rows and sorted(got[-2:]) == sorted((high, ceil_div(2 * wide, given.group_size))):
        return (
            "; they fit a weight [N, K / 2], which layout='rows' takes, with codes from 0 to 15 "
            "and scales [N, G]"
        )
    return "; pass one value per group and column"


def _like(where: str, name: str, value: Any, given: Given, *allowed: list[int]) -> Tensor:
    checked = checks.beside(where, name, value, checks.ACTIVATIONS, "packed", given.packed)
    rest = f" for packed {list(given.packed.shape)}; pass a tensor of this shape"
    checks.sized(where, name, checked, allowed, rest)
    return checked.detach()


def _pre_quant(where: str, given: Given, experts: int, k: int) -> Tensor | None:
    if given.pre_quant_scale is None:
        return None
    allowed = [[k], [1, k], *([[experts, k]] if experts else [])]
    value = _like(where, "pre_quant_scale", given.pre_quant_scale, given, *allowed)
    return value.view(-1, k)


def _alpha(where: str, given: Given, experts: int) -> Tensor | None:
    value, count = given.alpha, max(1, experts)
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        number = checks.number(where, "alpha", value)
        return torch.full((count,), number, dtype=torch.float32, device=given.packed.device)
    checks.beside(where, "alpha", value, (torch.float32,), "packed", given.packed, dims=0)
    if value.numel() != count:
        raise ValueError(
            f"{where}: alpha has shape {list(value.shape)}, but must have [{count}], one factor "
            "for " + ("each expert" if experts else "the whole product")
        )
    return value.detach().reshape(count)


def _bias(where: str, given: Given, experts: int, n: int) -> Tensor | None:
    if given.bias is None:
        return None
    shape = [experts, n] if experts else [n]
    return _like(where, "bias", given.bias, given, shape).view(-1, n).float()


def _sorted_groups(where: str, given: Given, plain: Int4Weight) -> Int4Weight:
    """Return the weight with the columns of each group side by side."""
    if given.layout != "rows" or plain.experts:
        raise ValueError(
            f"{where}: group_index is given, but only a dense weight in layout 'rows' has one; "
            "leave it out, or put the groups of a plain weight in order"
        )
    index = checks.beside(where, "group_index", given.group_index, INTEGERS, "packed", given.packed)
    checks.sized(where, "group_index", index, [[plain.k]], ", the group of each k")
    order = torch.argsort(index.long(), stable=True)
    counts = torch.arange(plain.k, device=index.device) // plain.group
    if not torch.equal(index.long()[order], counts):
        raise ValueError(
            f"{where}: group_index does not give every group {plain.group} of K={plain.k}; pass "
            "that of the checkpoint, and its group_size"
        )
    codes = torch.stack((plain.packed & 15, plain.packed >> 4), -1).flatten(2)[:, :, order]
    pre = plain.pre_quant_scale
    return replace(
        plain,
        packed=codes[:, :, 0::2] | codes[:, :, 1::2] << 4,
        order=order,
        pre_quant_scale=None if pre is None else pre[:, order],
    )


# ---- To tiles -----------------------------------------------------------------------------------


def to_tiles(where: str, given: Given, plain: Int4Weight, dtype: torch.dtype) -> Int4Weight:
    """Return a weight of `_plain` in layout "tiles64"."""
    group = _check_tiles(where, plain, dtype)
    fold = plain.group // group
    numbers = None
    if plain.zeros == "point":
        numbers = _points(where, given, plain)
    elif plain.zero is not None:
        numbers = plain.zero
    order = moe_tiles.natural_order(plain.n).to(plain.device)
    outs: list[tuple[Tensor, Tensor]] = []
    for e in range(plain.packed.shape[0]):
        codes = _in_mma_order(_row_codes(given, plain, e), group)
        scale = plain.scale[e].to(dtype).repeat_interleave(fold, 0).T.contiguous()
        zero = None
        if numbers is not None:
            zero = numbers[e].to(dtype).repeat_interleave(fold, 0).T.contiguous()
        outs.append(moe_tiles.pack_int4(codes, scale, zero, order))
    pre = plain.pre_quant_scale
    return replace(
        plain,
        packed=torch.stack([codes for codes, _ in outs]),
        scale=torch.stack([scale for _, scale in outs]),
        zero=None,
        pre_quant_scale=None if pre is None else pre.to(dtype).contiguous(),
        group=group,
        layout=TILES,
        dtype=dtype,
    )


def _check_tiles(where: str, plain: Int4Weight, dtype: torch.dtype) -> int:
    """Return the group of the kernels, after all checks."""
    checks.activation(where, "dtype", dtype, checks.SIXTEEN_BIT, "has no kernel on CUDA")
    group = next((g for g in TILE_GROUPS if plain.group % g == 0), 0)
    if not group or plain.k % plain.group:
        raise ValueError(
            f"{where}: group_size={plain.group} of K={plain.k} has no kernel on CUDA, where groups "
            "are multiples of 32 that divide K; quantise in such groups, or compute on the CPU"
        )
    most = float(plain.scale.abs().amax())
    if not most < INT4_LARGEST[dtype]:  # NaN is not
        raise ValueError(
            f"{where}: scale has a magnitude of {most:g}; kernels for {dtype_name(dtype)} take "
            f"those below {INT4_LARGEST[dtype]:g}, so scale the weight down and pass the factor as "
            "alpha"
        )
    return group


def _points(where: str, given: Given, plain: Int4Weight) -> Tensor:
    """Return zero points [E, G, N] of what was given."""
    shape = plain.scale.shape
    points = given.zero.detach()
    if given.layout == "rows":
        points = points.reshape(shape[0], shape[2], shape[1]).transpose(1, 2)
    points = points.reshape(shape)
    low, high = int(points.min()), int(points.max())
    if low < 0 or high > MOST_POINT:
        raise ValueError(
            f"{where}: zero has points from {low} to {high}, but kernels on CUDA take those from 0 "
            f"to {MOST_POINT}; pass points of unsigned codes"
        )
    return points


def _row_codes(given: Given, plain: Int4Weight, expert: int) -> Tensor:
    """Return codes 0 to 15 of an expert as [N, K / 2], the even k in the low nibble."""
    codes = plain.packed[expert]
    if given.layout == "rows":
        return codes
    if given.layout == "preprocessed":
        moe = plain.experts > 0 if given.moe is None else given.moe
        one = codes[None] if moe else codes
        codes = unprocess_weights(one, sm=given.sm, activation=given.activation, moe=moe)
        codes = codes.view(plain.k, plain.n // 2)
    codes = codes ^ 0x88
    # bytes of rows k and k + 1 hold codes of columns n and n + 1: two by two they change places
    even, odd = codes[0::2], codes[1::2]
    low = (even & 15) | odd << 4
    high = even >> 4 | (odd & 0xF0)
    return torch.stack((low.T, high.T), 1).reshape(plain.n, plain.k // 2).contiguous()


def _in_mma_order(codes: Tensor, group: int) -> Tensor:
    """Return codes [N, K / 2] so that x comes in its own order: each 64 of K permuted.

    Not in groups of 32, which the permutation would mix: there x is permuted.
    """
    if group == 32:
        return codes
    places = torch.tensor(moe_tiles.K_ORDER[0::2], device=codes.device) // 2
    out = torch.empty_like(codes).view(codes.shape[0], -1, moe_tiles.TILE // 2)
    out[:, :, places] = codes.view(out.shape)
    return out.view(codes.shape)


# ---- And back -----------------------------------------------------------------------------------


def _from_rows(weight: Int4Weight) -> Rows:
    scale = weight.scale[0].T.contiguous()
    zero = None
    if weight.zero is not None:
        steps = torch.where(scale == 0, 0.0, weight.zero[0].T / scale)
        zero = (8 - steps).round().clamp(0, MOST_POINT).to(torch.uint8)
    return _in_own_order(weight, weight.packed[0], scale, zero)


def _from_tiles(weight: Int4Weight) -> Rows:
    order = moe_tiles.natural_order(weight.n).to(weight.device)
    sizes = weight.n, weight.k, weight.group
    zeros = weight.zeros != "none"
    codes, scale, zero, _ = untiled(
        "int4", weight.packed[0], weight.scale[0], order, sizes, zeros, weight.dtype
    )
    if weight.group != 32:
        places = torch.tensor(moe_tiles.K_ORDER[0::2], device=codes.device) // 2
        codes = codes.reshape(weight.n, -1, moe_tiles.TILE // 2)[:, :, places].flatten(1)
    return _in_own_order(weight, codes, scale, zero)


def _in_own_order(weight: Int4Weight, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Rows:
    """Return the weight with its columns where they were before act-order parted them."""
    pre = None if weight.pre_quant_scale is None else weight.pre_quant_scale[0]
    bias = None if weight.bias is None else weight.bias[0]
    if weight.order is None:
        return Rows(codes, scale, zero, None, pre, bias)
    back = torch.argsort(weight.order)
    single = torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, back]
    index = (back // weight.group).to(torch.int32)
    packed = single[:, 0::2] | single[:, 1::2] << 4
    return Rows(packed, scale, zero, index, None if pre is None else pre[back], bias)
