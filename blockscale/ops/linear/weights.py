"""The weight of a linear layer as its kernels load it, converted once.

`prepare_linear_weights` takes a weight as checkpoints hold it; the `LinearWeights` that it returns
is what `blockscale.linear` and `blockscale.nn.Linear` run on.  Layouts:

* "linear" (CPU): codes and scales as given.  Of int4, scales are float32 [groups, N], and so are
  zeros, as terms (8 - point) * scale that are added to (code - 8) * scale.
* "tiles64" (CUDA): `moe.tiles`, with words as `in_steps` and `turned` say; rows in `natural_order`,
  gated in `gated_order`.
* "tiles64e" (CUDA, mxfp4 whose blocks' exponents allow it, nvfp4 that is asked to be rounded, and
  int4 in groups of 64 and 128): `moe.rows`, `moe.rounded`, rows in the same order; for
  ``act_fmt="fp8"``, which multiplies many rows of x as E4M3.
* "128x4": codes as given, scales in the 128x4 layout, for ``act_fmt="nvfp4"``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch.compiler import is_compiling

from blockscale.base.formats import QUANTIZED
from blockscale.ops import checks
from blockscale.ops.int4.weight import Int4Weight
from blockscale.ops.moe import rounded as moe_rounded
from blockscale.ops.moe import rows as moe_rows
from blockscale.ops.moe import tiles as moe_tiles
from blockscale.ops.quant import swizzle_scales, unswizzle_scales
from blockscale.ops.weights import (
    E8M0_BIAS,
    SCALES,
    PreparedWeights,
    back,
    check_rounded,
    check_zeros,
    plain_codes,
    plain_scales,
    power,
    refused_scales,
    say_rounded,
    tiled,
    untiled,
)
from blockscale.specs.gemm import LINEAR_FORMATS, check_gemm
from blockscale.specs.int4 import TILE_GROUPS
from blockscale.specs.plans.moe import PREFERRED

Tensor = torch.Tensor

WHERE = "prepare_linear_weights"

LAYOUTS = ("linear", "tiles64", "tiles64e", "128x4")

ACTS = ("fp8", "nvfp4")
"""Formats of activations that `blockscale.linear` knows."""

TENSORS = ("packed", "block_scale", "zero", "global_scale", "bias")
"""Names of a `LinearWeights`' tensors."""

_META = ("fmt", "n", "k", "group", "gated", "zeros", "layout")

MOST_POINT = 16
"""Zero points are from 0 to this, which GPTQ's first format reaches."""


class Facts(NamedTuple):
    """Everything but the tensors, as operators take it; see `LinearWeights`."""

    fmt: str
    n: int
    k: int
    group: int
    gated: bool
    zeros: bool = False
    layout: str = "linear"
    dtype: str | None = None
    by_row: bool = False


@dataclass(frozen=True, eq=False)
class LinearWeights(PreparedWeights):
    """The weight of a linear layer, ready for kernels; None: it has no such tensor.

    Attributes:
        packed: codes, uint8.
        block_scale: block scales; of int4, zeros are in them in layout "tiles64".
        zero: of int4 in layout "linear".
        global_scale: float32 [1]; gated [2], of gates and of ups; by row [N]; in layout "tiles64e"
            one for each row of the layout.
        bias: float32 [N], gates first.
        fmt: "nvfp4", "mxfp4" or "int4".
        n, k: the sizes N and K, without padding.
        group: elements of K that share a scale, as kernels have it: it may divide the one given.
        gated: whether the first half of the rows are gates, the second their ups.
        zeros: whether int4 codes have zero points other than 8.
        layout: "linear", "tiles64", "tiles64e" or "128x4".
        dtype: of int4 scales in layout "tiles64", so that x must have it too; else None.
        by_row: whether each row was given a global scale of its own.
        added_error: of nvfp4 in layout "tiles64e" (one number), what rounding changed, relative to
            the weight's norm; else None.
    """

    packed: Tensor
    block_scale: Tensor
    zero: Tensor | None
    global_scale: Tensor
    bias: Tensor | None
    fmt: str
    n: int
    k: int
    group: int
    gated: bool
    zeros: bool
    layout: str
    dtype: torch.dtype | None = None
    by_row: bool = False
    added_error: tuple[float, ...] | None = None
    names: ClassVar[tuple[str, ...]] = TENSORS
    described_by: ClassVar[tuple[str, ...]] = _META

    def meta(self) -> dict[str, Any]:
        """Return everything but the tensors, as plain values."""
        return {**super().meta(), **({"by_row": True} if self.by_row else {})}

    @classmethod
    def of(cls, meta: Mapping[str, Any], tensors: Mapping[str, Tensor | None]) -> Self:
        """Return the weights of which `meta` and `tensors` are these."""
        found = super().of(meta, tensors)
        return replace(found, by_row=True) if meta.get("by_row") else found

    @property
    def facts(self) -> Facts:
        """Everything but the tensors, by which calls find their kernel."""
        return self._told() if is_compiling() else self._facts

    @cached_property
    def _facts(self) -> Facts:  # a lock guards it, which torch.compile does not trace
        return self._told()

    def _told(self) -> Facts:
        return Facts(
            **{name: value for name, value in self.meta().items() if name in Facts._fields}
        )

    @property
    def product(self) -> Int4Weight:
        """An int4 weight in layout "linear" as its product's kernel takes it.

        Without bias and global scale if it is gated, as its halves have one each.
        """
        alpha, bias = self.global_scale, None if self.bias is None else self.bias[None]
        return Int4Weight(
            *(self.packed[None], self.block_scale[None]),
            None if self.zero is None else self.zero[None],
            *(None, None, None if self.gated else alpha, None if self.gated else bias),
            n=self.n,
            k=self.k,
            group=self.group,
            experts=0,
            layout="rows",
            zeros="term" if self.zeros else "none",
            activation="a16",
        )

    def to_linear(self) -> LinearWeights:
        """Return weights of the same values in layout "linear", on the same device.

        Codes under a scale of zero come back from "tiles64" as zero.  Scales of mxfp4 may be others
        whose products with the global scale are the same.  A rounded weight comes back as it was
        before it was rounded to E4M3: 1.5, 3 and 6 times a scale are exact again, and only blocks
        of tiny scales stay as `moe.rounded` changed them.
        """
        return self if self.layout == "linear" else _to_linear(self)


class Given(NamedTuple):
    """A weight as callers have it, of any type until checked; see `prepare_linear_weights`."""

    packed: Any
    block_scale: Any
    fmt: str = "nvfp4"
    global_scale: Any = None
    bias: Any = None
    gated: bool = False
    group_size: int | None = None
    zero: Any = None
    int4_signed: bool = False


def prepare_linear_weights(
    packed: Tensor,
    block_scale: Tensor,
    *,
    fmt: str = "nvfp4",
    global_scale: Tensor | None = None,
    bias: Tensor | None = None,
    gated: bool = False,
    group_size: int | None = None,
    zero: Tensor | None = None,
    int4_signed: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    layout: str | None = None,
    act_fmt: str | None = None,
    rounded: bool = False,
) -> LinearWeights:
    """Return the weight as kernels load it; keep it, and pass it in place of ``packed``.

    Args:
        packed: codes [N, K / 2] uint8 or float4_e2m1fn_x2, even k in the low nibble; int4: from 0
            to 15.  Gated: the rows of gates, then those of ups.
        block_scale: [N, K / block]: E4M3 (nvfp4) or E8M0 (mxfp4) bytes, or, for int4, float32,
            bfloat16 or float16.
        fmt: "nvfp4" (blocks of 16), "mxfp4" (blocks of 32) or "int4".
        global_scale: [1] float32, or, gated, [2] for gates and ups, or else [N] for each row, not
            of int4; multiplied; None: 1.
        bias: [N] float32, bfloat16 or float16; None: 0.
        gated: whether the result is act(gate) * up.
        group_size: int4: a multiple of 32 that divides K; None: what the scales' shape says.
        zero: int4: integers [N, K / group], from 0 to 16, not packed; None: 8, the symmetric codes
            of AWQ, GPTQ and Marlin.
        int4_signed: int4 codes are two's complement, from -8 to 7, instead of 0 to 15.
        dtype: of the activations: on CUDA int4 scales are rounded to it.
        layout: "linear" or "tiles64"; None: that of the tensors' device.  "128x4": nvfp4, for
            ``linear(..., act_fmt="nvfp4")``.  "tiles64e": mxfp4, int4 in groups of 64 or 128, or
            nvfp4 with ``rounded``, for ``linear(..., act_fmt="fp8")`` on GPUs with wgmma (sm_90a),
            which multiply many rows in 8 bits.
        act_fmt: of the calls that are to follow; "fp8" makes mxfp4, and int4 in groups of 128,
            "tiles64e" on CUDA, and warns where exponents of a row's blocks of mxfp4 are too far
            apart; "nvfp4" makes it "128x4".
        rounded: nvfp4 with act_fmt="fp8": the weight is rounded to E4M3 times a factor of its row,
            in layout "tiles64e"; a warning says by how much that changed it, and so does
            ``added_error``.  Few rows are multiplied in 16 bits by the same rounded weight.

    Raises:
        TypeError, ValueError: an argument that does not fit, a scale that no kernel can multiply
            with (NaN, or below zero for nvfp4; of int4, one too large), layout "tiles64e" of a
            weight that cannot be.
    """
    given = Given(
        *(packed, block_scale, fmt, global_scale, bias, bool(gated), group_size, zero),
        int4_signed=int4_signed,
    )
    return prepared(WHERE, given, dtype, layout, act_fmt, rounded)


def prepared(
    where: str,
    given: Given,
    dtype: torch.dtype,
    layout: str | None,
    act_fmt: str | None = None,
    rounded: bool = False,
) -> LinearWeights:
    """Return the weight of ``given``; errors begin with ``where``."""
    sizes = check_weight(where, given)
    checks.activation(where, "dtype", dtype)
    if act_fmt is not None:
        checks.choice(where, "act_fmt", act_fmt, ACTS)
    on_cpu = given.packed.device.type == "cpu"
    if rounded:
        check_rounded(where, given.fmt, ("fp8",), (act_fmt, layout), on_cpu)
        layout = "tiles64e"
    plain = _plain(given, sizes)
    layout, if_it_can = _layout((plain.fmt, plain.group), act_fmt, layout, on_cpu)
    checks.choice(where, "layout", layout, LAYOUTS)
    if layout == "linear":
        return _terms(plain)
    if layout == "128x4":
        return _to_128x4(where, plain)
    checks.activation(where, "dtype", dtype, checks.SIXTEEN_BIT, "has no kernel on CUDA")
    if rounded:
        return _to_rounded(where, plain)
    if layout == "tiles64e":
        made = _to_rows(where, plain, must=not if_it_can)
        if made is not None:
            return made
    return _to_tiles(where, plain, dtype)


def _layout(
    form: tuple[str, int], act_fmt: str | None, layout: str | None, on_cpu: bool
) -> tuple[str, bool]:
    """Return the layout to make, and whether "tiles64" takes its place where it cannot be.

    ``form``: the weight's format, and the group that kernels have of it.
    """
    if layout is not None:
        return layout, False
    if act_fmt == "nvfp4":
        return "128x4", False
    if on_cpu:
        return "linear", False
    bytewise = act_fmt == "fp8" and form in PREFERRED
    return ("tiles64e", True) if bytewise else ("tiles64", False)


# ---- Checks -------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """Sizes of a weight; ``group`` is that of its scales as given."""

    n: int
    k: int
    group: int


def check_weight(where: str, given: Given) -> Sizes:
    """Return the sizes, after all checks that need no look at the numbers.

    Raises:
        TypeError: an argument that is no tensor, or of another dtype.
        ValueError: an option, a shape, a stride or a device that does not fit.
    """
    fmt = given.fmt
    checks.choice(where, "fmt", fmt, LINEAR_FORMATS)
    check_zeros(where, fmt, {"zero": given.zero}, given.int4_signed)
    dtypes = (torch.uint8,) if fmt == "int4" else checks.PACKED
    codes = checks.tensor(where, "packed", given.packed, dtypes, dims=2)
    if codes.dim() != 2 or not codes.numel():
        raise ValueError(
            f"{where}: packed has shape {list(codes.shape)}, but a weight has 2 dimensions, "
            "[N, K / 2], none of them 0"
        )
    n, k = int(codes.shape[0]), 2 * int(codes.shape[1])
    if given.gated and n % 2:
        raise ValueError(
            f"{where}: packed has {n} rows, but gated=True needs as many rows of gates as of ups; "
            "pass both, one above the other"
        )
    if fmt == "int4":
        group = _int4_group(where, given, n, k)
    else:
        group = _block(where, given, n, k)
    check_beside(where, given, n, "packed", codes)
    return Sizes(n, k, group)


def check_beside(where: str, given: Given, n: int, of: str, first: Tensor) -> None:
    """Check global scale and bias, which are on the device of ``first``, a tensor called ``of``."""
    scale, bias = given.global_scale, given.bias
    if scale is not None and given.gated:
        checks.beside(where, "global_scale", scale, (torch.float32,), of, first, dims=0)
        rest = ": one of the whole weight, or one of gates and one of ups"
        checks.sized(where, "global_scale", scale, [[], [1], [2]], rest)
    elif by_row(given):
        checks.beside(where, "global_scale", scale, (torch.float32,), of, first)
        rest = ": one of the whole weight, or one of each row"
        checks.sized(where, "global_scale", scale, [[], [1], [n]], rest)
    else:
        checks.one_element(where, "global_scale", scale, of, first)
    if bias is not None:
        checks.beside(where, "bias", bias, checks.ACTIVATIONS, of, first)
        checks.sized(where, "bias", bias, [[n]], ", one per row of packed")


def by_row(given: Given) -> bool:
    """Return whether there is a global scale for each row."""
    scale, several = given.global_scale, given.gated or given.fmt == "int4"
    return isinstance(scale, torch.Tensor) and scale.numel() > 1 and not several


def _block(where: str, given: Given, n: int, k: int) -> int:
    """Return the block of nvfp4 or mxfp4, after the checks of its scales."""
    fmt = given.fmt
    block = QUANTIZED[fmt].block
    if given.group_size not in (None, block):
        raise ValueError(
            f"{where}: group_size={given.group_size!r} is not known for {fmt}; choose {block}, or "
            "leave it out"
        )
    checks.block_multiple(where, "packed", k, fmt)
    scale = checks.scales(where, given.block_scale, [n], k // block, fmt)
    checks.same_device(where, "block_scale", scale, "packed", given.packed)
    return block


def _int4_group(where: str, given: Given, n: int, k: int) -> int:
    """Return the group of int4, after the checks of its scales and zeros."""
    scale = checks.beside(
        *(where, "block_scale", given.block_scale, SCALES["int4"], "packed", given.packed), dims=2
    )
    group = given.group_size
    if group is None:
        group = k // max(1, scale.shape[-1])
    if type(group) is not int or group < 1 or group % TILE_GROUPS[-1] or k % group:
        said = f"group_size={given.group_size!r}"
        if given.group_size is None:
            said = f"block_scale has shape {list(scale.shape)}"
        raise ValueError(
            f"{where}: {said}, but groups of int4 are multiples of {TILE_GROUPS[-1]} that divide "
            f"K={k}; pass scales [N, K / group] of such groups"
        )
    rest = f", one scale for each group of {group} of a row of packed {list(given.packed.shape)}"
    checks.sized(where, "block_scale", scale, [[n, k // group]], rest)
    if given.zero is not None:
        integers = (torch.uint8, torch.int8, torch.int32, torch.int64)
        zero = checks.beside(where, "zero", given.zero, integers, "packed", given.packed)
        checks.sized(where, "zero", zero, [list(scale.shape)], ", as block_scale has")
    return group


# ---- To the layouts of kernels ------------------------------------------------------------------


def _plain(given: Given, sizes: Sizes) -> LinearWeights:
    """Return the weight in rows: zeros are points, groups those that kernels have."""
    group, fold = sizes.group, 1
    scale, zero = plain_scales(given.block_scale, given.fmt), given.zero
    if given.fmt == "int4":
        group = next(size for size in TILE_GROUPS if sizes.group % size == 0)
        fold = sizes.group // group
    if fold > 1:
        scale = scale.repeat_interleave(fold, 1)
        zero = None if zero is None else zero.repeat_interleave(fold, 1)
    return LinearWeights(
        *(plain_codes(given.packed, given.int4_signed), scale, zero),
        global_scales(given, given.packed).detach(),
        None if given.bias is None else given.bias.detach().float(),
        fmt=given.fmt,
        n=sizes.n,
        k=sizes.k,
        group=group,
        gated=given.gated,
        zeros=zero is not None,
        layout="linear",
        by_row=by_row(given),
    )


def global_scales(given: Given, like: Tensor) -> Tensor:
    """Return the global scale [1], those of gates and ups [2], or of all rows [N]."""
    count, value = 2 if given.gated else 1, given.global_scale
    if value is None:
        return torch.ones(count, dtype=torch.float32, device=like.device)
    flat: Tensor = value.reshape(-1)
    return flat.contiguous() if by_row(given) else flat.expand(count).contiguous()


def _terms(plain: LinearWeights) -> LinearWeights:
    """Return what CPU kernels read: scales and zeros of int4 are [groups, N], zeros terms."""
    if plain.fmt != "int4":
        return plain
    zero = None if plain.zero is None else (8 - plain.zero.float()) * plain.block_scale
    return replace(
        plain,
        block_scale=plain.block_scale.T.contiguous(),
        zero=None if zero is None else zero.T.contiguous(),
    )


def _to_128x4(where: str, plain: LinearWeights) -> LinearWeights:
    if plain.fmt != "nvfp4" or plain.gated or plain.by_row:
        what = "a global scale of each row" if plain.by_row else plain.fmt
        what = "a gated weight" if plain.gated else what
        raise ValueError(
            f"{where}: layout='128x4' is for products of two nvfp4 operands, not for {what}; "
            "leave layout out"
        )
    check_gemm(where, plain.n, plain.k, plain.fmt, "bfloat16")
    return replace(plain, block_scale=swizzle_scales(plain.block_scale), layout="128x4")


def _order(weights: LinearWeights) -> Tensor:
    """Return the row of the weight at each row of layout "tiles64"."""
    if weights.gated:
        return moe_tiles.gated_order(weights.n // 2).to(weights.device)
    return moe_tiles.natural_order(weights.n).to(weights.device)


def _to_tiles(where: str, plain: LinearWeights, dtype: torch.dtype) -> LinearWeights:
    """Return a weight of `_plain` in layout "tiles64"."""
    _check_scales(where, plain, dtype)
    _check_points(where, plain.zero)
    top = int(plain.block_scale.amax()) if plain.fmt == "mxfp4" else None
    codes = moe_tiles.in_steps(plain.packed)
    packed, scale = tiled(
        *(plain.fmt, codes, plain.block_scale, plain.zero, _order(plain), top), dtype
    )
    factor = plain.global_scale if top is None else plain.global_scale * power(top)
    kept = dtype if plain.fmt == "int4" else None
    return replace(
        *(plain,), packed=moe_tiles.turned(packed), block_scale=scale, zero=None,
        global_scale=factor,
        layout="tiles64", dtype=kept,
    )  # fmt: skip


def _to_rows(where: str, plain: LinearWeights, *, must: bool) -> LinearWeights | None:
    """Return a weight of `_plain` in layout "tiles64e"; None, after a warning, if it cannot be.

    ``must``: then it is an error.
    """
    moe_rows.check_form(where, plain.fmt, plain.group)
    _check_scales(where, plain, torch.bfloat16)
    order = _order(plain)
    if plain.fmt == "int4":
        _check_points(where, plain.zero)
        packed, scale = moe_rows.pack_int4(plain.packed, plain.block_scale, plain.zero, order)
        factor = moe_rows.factors(_of_rows(plain), None, order)
        return replace(
            *(plain,), packed=packed, block_scale=scale, zero=None, global_scale=factor,
            layout="tiles64e",
        )  # fmt: skip
    top, least = moe_rows.ranges(plain.packed, plain.block_scale)
    widest, row = (int(value) for value in (top - least).max(0))
    if widest > moe_rows.SPREAD:
        said = (
            f"{where}: block_scale of row {row} has exponents {widest} apart, but E4M3 holds "
            f"blocks of a row exactly that are at most {moe_rows.SPREAD} apart"
        )
        if must:
            raise ValueError(f"{said}; leave layout out, for products of 16 bits")
        warnings.warn(
            f"{said}; the weight is in layout 'tiles64', for products of 16 bits", stacklevel=4
        )
        return None
    packed, scale = moe_rows.pack(plain.packed, plain.block_scale, top, order)
    return replace(
        plain,
        packed=packed,
        block_scale=scale,
        global_scale=moe_rows.factors(_of_rows(plain), top, order),
        layout="tiles64e",
    )


def _of_rows(plain: LinearWeights) -> Tensor:
    """Return the global scale of each row [N]."""
    return plain.global_scale.repeat_interleave(plain.n // plain.global_scale.numel())


def _to_rounded(where: str, plain: LinearWeights) -> LinearWeights:
    """Return an nvfp4 weight of `_plain` in "tiles64e", after a warning of what it changed."""
    _check_scales(where, plain, torch.bfloat16)
    exact, order, each = (plain.packed, plain.block_scale), _order(plain), _of_rows(plain)
    of = moe_rounded.rounded(*exact)
    error = moe_rounded.relative(*moe_rounded.squares(of, *exact), each)
    say_rounded(where, ("the weight",), (error,))
    packed, scale = moe_rounded.pack(of, order)
    return replace(
        plain,
        packed=packed,
        block_scale=scale,
        global_scale=moe_rounded.factors(each, of.octaves, order),
        layout="tiles64e",
        added_error=(error,),
    )


def _check_scales(where: str, plain: LinearWeights, dtype: torch.dtype) -> None:
    refused = refused_scales(plain.block_scale[None], plain.fmt, dtype)
    if refused is not None:
        raise ValueError(f"{where}: block_scale {refused[1]}")


def _check_points(where: str, zero: Tensor | None) -> None:
    if zero is None:
        return
    low, high = int(zero.min()), int(zero.max())
    if low < 0 or high > MOST_POINT:
        raise ValueError(
            f"{where}: zero has points from {low} to {high}, but kernels on CUDA take those from 0 "
            f"to {MOST_POINT}; pass points of unsigned codes"
        )


def _to_linear(weights: LinearWeights) -> LinearWeights:
    """Return a weight of another layout in layout "linear"."""
    if weights.layout == "128x4":
        scale = unswizzle_scales(weights.block_scale, weights.n, weights.k // weights.group)
        return replace(weights, block_scale=scale, layout="linear")
    if weights.layout == "tiles64e":
        return _from_rows(weights)
    sizes = weights.n, weights.k, weights.group
    codes, scale, zero, gain = untiled(
        *(weights.fmt, moe_tiles.turned(weights.packed, back=True), weights.block_scale),
        *(_order(weights), sizes),
        *(weights.zeros, weights.dtype),
    )
    factor = weights.global_scale * gain
    plain = replace(
        *(weights,), packed=moe_tiles.out_of_steps(codes), block_scale=scale.contiguous(),
        zero=zero, global_scale=factor,
        layout="linear", dtype=None,
    )  # fmt: skip
    return _terms(plain)


def _from_rows(weights: LinearWeights) -> LinearWeights:
    """Return a weight of layout "tiles64e" in layout "linear"."""
    kind: Any = moe_rounded if weights.fmt == "nvfp4" else moe_rows
    n, k, order = weights.n, weights.k, _order(weights)
    if weights.fmt == "int4":
        sizes = n, k, weights.group
        codes, scale, zero, _ = untiled(
            *(weights.fmt, weights.packed, weights.block_scale, order, sizes, weights.zeros),
            moe_rows.SCALES,
        )
        each = back(weights.global_scale[:, None], order, n)[:, 0].view(1 + weights.gated, -1)
        return _terms(
            replace(
                *(weights,), packed=codes.contiguous(), block_scale=scale.contiguous(), zero=zero,
                global_scale=each[:, 0].contiguous(), layout="linear",
            )
        )  # fmt: skip
    codes, byte = kind.unpack(weights.packed, weights.block_scale)
    codes, byte = back(codes, order, n)[:, : k // 2], back(byte, order, n)[:, : k // weights.group]
    factor = back(weights.global_scale[:, None], order, n)[:, 0]
    if weights.by_row and weights.fmt == "nvfp4":
        byte, factor = moe_rounded.by_row(byte, factor)
    elif weights.by_row:
        byte = byte - (moe_tiles.E8M0_TOP - E8M0_BIAS)
    else:
        halves = zip(
            *(value.chunk(2 if weights.gated else 1) for value in (byte, factor)), strict=True
        )
        scales, factors = zip(*(kind.linear(*half) for half in halves), strict=True)
        byte, factor = torch.cat(scales), torch.stack(factors)
    return replace(
        weights,
        packed=codes.contiguous(),
        block_scale=byte.contiguous(),
        global_scale=factor,
        layout="linear",
        added_error=None,
    )
