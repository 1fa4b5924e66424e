"""Weights of an MoE layer as its kernels load them, converted once.

`prepare_moe_weights` takes both weights as checkpoints hold them; the `MoeWeights` that it returns
is what `blockscale.fused_moe` and `blockscale.nn.FusedMoE` run on.  Layouts:

* "linear" (CPU): the tensors as given, scales of int4 as float32.
* "tiles64" (CUDA): `moe.tiles`, docs/moe.md.  Experts are converted one after the other.
* "tiles64e" (CUDA, mxfp4 whose blocks' exponents allow it, nvfp4 that is asked to be rounded, and
  int4 in groups of 64 and 128): `moe.rows`, `moe.rounded`; several tokens an expert are multiplied
  as FP8, if they are asked for in it.
* "128x4" (GPUs whose tensor cores multiply codes): codes as given, rows of w13 as
  `interleave_gate_up` orders them, scales of each expert in the 128x4 layout.

All hold the same values, up to the rounding of int4 scales to the dtype of the activations, and of
rounded weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, ClassVar, NamedTuple

import torch
from torch.compiler import is_compiling

from blockscale.base.formats import MOE
from blockscale.base.sizes import round_up
from blockscale.ops import checks
from blockscale.ops.checks import dtype_name
from blockscale.ops.gemm_act import interleave_gate_up
from blockscale.ops.moe import rounded as moe_rounded
from blockscale.ops.moe import rows as moe_rows
from blockscale.ops.moe import tiles as moe_tiles
from blockscale.ops.quant import swizzle_scales, unswizzle_scales
from blockscale.ops.weights import (
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
from blockscale.specs.gemm import MAX_EXPERTS
from blockscale.specs.moe import (
    ACT_FORMATS,
    ACTIVATIONS,
    BYTE_ACTS,
    COL_TILE,
    GATED,
    LAYOUTS,
    PRODUCTS,
)
from blockscale.specs.plans.moe import PREFERRED

Tensor = torch.Tensor

TENSORS = (
    *("w13", "w13_scale", "w13_zero", "w13_global", "w13_bias"),
    *("w2", "w2_scale", "w2_zero", "w2_global", "w2_bias"),
)
"""Names of a `MoeWeights`' tensors, in the order of a kernel's parameters."""

_META = ("fmt", "group", "experts", "hidden", "intermediate", "gated", "zero", "layout")


@dataclass(frozen=True, eq=False)
class MoeWeights(PreparedWeights):
    """Both weights of an MoE layer, ready for kernels; None: the layer has no such tensor.

    Attributes:
        w13, w2: codes, uint8.
        w13_scale, w2_scale: block scales; of int4, zeros are in them in layout "tiles64".
        w13_zero, w2_zero: uint8, in layout "linear" only.
        w13_global, w2_global: float32 [E, 2] (gate, up) and [E]; in layout "tiles64e" of rows.
        w13_bias, w2_bias: float32; both or neither.
        fmt: "nvfp4", "mxfp4" or "int4".
        group: elements of K that share a scale.
        experts, hidden, intermediate: the sizes E, H, I, without padding.
        gated: whether w13 has gate and up rows.
        zero: whether int4 codes have zeros other than 8.
        layout: "linear", "tiles64", "tiles64e" or "128x4".
        dtype: of int4 scales in layout "tiles64", so that activations must have it too; else None.
        added_error: of nvfp4 in layout "tiles64e", of w13 and of w2, what rounding changed,
            relative to their norms over all experts; else None.
    """

    w13: Tensor
    w13_scale: Tensor
    w13_zero: Tensor | None
    w13_global: Tensor
    w13_bias: Tensor | None
    w2: Tensor
    w2_scale: Tensor
    w2_zero: Tensor | None
    w2_global: Tensor
    w2_bias: Tensor | None
    fmt: str
    group: int
    experts: int
    hidden: int
    intermediate: int
    gated: bool
    zero: bool
    layout: str
    dtype: torch.dtype | None = None
    added_error: tuple[float, ...] | None = None
    names: ClassVar[tuple[str, ...]] = TENSORS
    described_by: ClassVar[tuple[str, ...]] = _META

    @property
    def rows(self) -> int:
        """Rows of w13 without padding: 2 * intermediate if gated."""
        return self.intermediate * (2 if self.gated else 1)

    @property
    def bias(self) -> bool:
        """Whether there are biases."""
        return self.w13_bias is not None

    @property
    def facts(self) -> tuple[Any, ...]:
        """Everything but the tensors, as operators take it; calls find their kernel by it."""
        return self._told() if is_compiling() else self._facts

    @cached_property
    def _facts(self) -> tuple[Any, ...]:  # a lock guards it, which torch.compile does not trace
        return self._told()

    def _told(self) -> tuple[Any, ...]:
        dtype = None if self.dtype is None else dtype_name(self.dtype)
        sizes = self.group, self.experts, self.hidden, self.intermediate
        return self.fmt, *sizes, self.gated, self.zero, self.layout, dtype

    @cached_property
    def passed(self) -> tuple[Tensor, ...]:
        """The tensors that there are, in the order of a kernel's parameters."""
        return tuple(value for _, value in self.tensors())

    @cached_property
    def workspaces(self) -> dict[tuple[Any, ...], int]:
        """What calls keep here: bytes of a workspace by all that the weights do not decide."""
        return {}

    def to_linear(self) -> MoeWeights:
        """Return weights of the same values in layout "linear", on the same device.

        Codes under a scale of zero come back as zero.  Scales of mxfp4 may be others whose products
        with the global scale are the same.  Rounded weights come back as they were before they
        were rounded to E4M3: 1.5, 3 and 6 times a scale are exact again, and only blocks of tiny
        scales stay as `moe.rounded` changed them.
        """
        if self.layout == "linear":
            return self
        if self.layout == "tiles64e":
            return _from_rows(self)
        return _from_codes(self) if self.layout == "128x4" else to_linear(self)


def prepare_moe_weights(
    w13: Tensor,
    w2: Tensor,
    *,
    fmt: str = "nvfp4",
    w13_scale: Tensor,
    w2_scale: Tensor,
    w13_global_scale: Tensor | None = None,
    w2_global_scale: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    activation: str = "swiglu",
    group_size: int | None = None,
    w13_zero: Tensor | None = None,
    w2_zero: Tensor | None = None,
    int4_signed: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    layout: str | None = None,
    act_fmt: str | None = None,
    rounded: bool = False,
) -> MoeWeights:
    """Return the weights as kernels load them; keep it, and pass it in place of ``w13``.

    Args:
        w13: codes [E, 2 I, H / 2] uint8 or float4_e2m1fn_x2, even k in the low nibble; gate rows,
            then up rows.  [E, I, H / 2] for "relu2".
        w2: codes [E, H, I / 2].
        fmt: "nvfp4" (blocks of 16), "mxfp4" (blocks of 32) or "int4".
        w13_scale: [E, rows of w13, H / block]: E4M3 (nvfp4) or E8M0 (mxfp4) bytes, or, for int4,
            float32, bfloat16 or float16.
        w2_scale: [E, H, I / block], likewise.
        w13_global_scale: float32 [E], or [E, 2] for gate and up, multiplied; None: 1.
        w2_global_scale: float32 [E]; None: 1.
        w13_bias: [E, rows of w13] float32, bfloat16 or float16; None: 0.
        w2_bias: [E, H]; None: 0.
        activation: as in `fused_moe`; whether w13 has gate rows depends on it.
        group_size: int4: 32, 64 or 128; None: what the scales' shapes say.
        w13_zero: int4: uint8 [E, rows of w13, H / group], from 0 to 15, not packed; None: 8, the
            symmetric codes of AWQ, GPTQ and Marlin.
        w2_zero: uint8 [E, H, I / group]; both or neither.
        int4_signed: int4 codes are two's complement, from -8 to 7, instead of 0 to 15.
        dtype: of the activations: on CUDA int4 scales are rounded to it.
        layout: "linear" or "tiles64"; None: that of the tensors' device.  "128x4": nvfp4 or
            mxfp4, for `fused_moe` with an ``act_fmt`` on GPUs whose tensor cores multiply codes
            (sm_100a).  "tiles64e": mxfp4, int4 in groups of 64 or 128, or nvfp4 with ``rounded``,
            for bfloat16, for `fused_moe` with act_fmt "fp8" or "fp8_tensor" on GPUs with wgmma
            (sm_90a), which multiply many tokens in 8 bits, of nvfp4 any number.
        act_fmt: of the calls that are to follow; "fp8" and "fp8_tensor" make mxfp4, and int4 in
            groups of 128 without zeros, "tiles64e" on CUDA, and warn where exponents of a row's
            blocks of mxfp4 are too far apart.
        rounded: nvfp4 with such an act_fmt: weights are rounded to E4M3 times a factor of their
            row, in layout "tiles64e"; a warning says by how much that changed them, and so does
            ``added_error``.  What multiplies in 16 bits takes the same rounded weights.

    Raises:
        TypeError, ValueError: an argument that does not fit, a scale that no kernel can multiply
            with (NaN, or below zero for nvfp4), layout "tiles64e" of a weight that cannot be.
    """
    given = Given(
        *(w13, w2, fmt, w13_scale, w2_scale, w13_global_scale, w2_global_scale),
        *(w13_bias, w2_bias, activation, group_size, w13_zero, w2_zero, int4_signed),
    )
    return prepared("prepare_moe_weights", given, dtype, layout, act_fmt, rounded)


def prepared(
    where: str,
    given: Given,
    dtype: torch.dtype,
    layout: str | None,
    act_fmt: str | None = None,
    rounded: bool = False,
) -> MoeWeights:
    """Return the weights of ``given``; errors begin with ``where``."""
    sizes = check_weights(where, given)
    checks.activation(where, "dtype", dtype)
    if act_fmt is not None:
        checks.choice(where, "act_fmt", act_fmt, ACT_FORMATS)
    form, on_cpu = (given.fmt, sizes.group), given.w13.device.type == "cpu"
    if rounded:
        check_rounded(where, given.fmt, BYTE_ACTS, (act_fmt, layout), on_cpu)
        layout = "tiles64e"
    on_gpu = layout is None and not on_cpu
    by_rows = on_gpu and _prefers_bytes(form, given.w13_zero is not None, dtype, act_fmt)
    layout = layout or ("linear" if on_cpu else "tiles64")
    checks.choice(where, "layout", layout, LAYOUTS)
    plain = _plain(given, sizes)
    made = _to_rows(where, plain, dtype, must=False) if by_rows else None
    return laid_out(where, plain, dtype, layout, rounded) if made is None else made


def laid_out(
    where: str, plain: MoeWeights, dtype: torch.dtype, layout: str, rounded: bool = False
) -> MoeWeights:
    """Return linear weights in ``layout``, rounded for it or not; errors begin with ``where``."""
    if layout == "linear":
        return plain
    checks.activation(where, "dtype", dtype, checks.SIXTEEN_BIT, "has no kernel on CUDA")
    if rounded:
        return _to_rounded(where, plain, dtype)
    if layout == "tiles64e":
        made = _to_rows(where, plain, dtype, must=True)
        assert made is not None, "it raises where there is none"
        return made
    return to_codes(where, plain) if layout == "128x4" else to_tiles(where, plain, dtype)


def _prefers_bytes(
    form: tuple[str, int], zeros: bool, dtype: torch.dtype, act_fmt: str | None
) -> bool:
    """Whether weights are to be in layout "tiles64e" on CUDA; ``form``: of `PREFERRED`.

    With zero points 8 bits were not measured in MoE layers.
    """
    known = form in PREFERRED and not zeros and dtype == torch.bfloat16
    return known and act_fmt in BYTE_ACTS


def _plain(given: Given, sizes: Sizes) -> MoeWeights:
    """Return the weights in layout "linear"."""
    experts, hidden, rows = sizes.experts, sizes.hidden, sizes.rows
    bias = given.w13_bias is not None or given.w2_bias is not None
    return MoeWeights(
        plain_codes(given.w13, given.int4_signed),
        *(plain_scales(given.w13_scale, given.fmt), given.w13_zero),
        _paired(_factor(given.w13_global_scale, experts, given.w13)),
        _bias(given.w13_bias, (experts, rows), given.w13) if bias else None,
        plain_codes(given.w2, given.int4_signed),
        *(plain_scales(given.w2_scale, given.fmt), given.w2_zero),
        _factor(given.w2_global_scale, experts, given.w2),
        _bias(given.w2_bias, (experts, hidden), given.w2) if bias else None,
        fmt=given.fmt,
        group=sizes.group,
        experts=experts,
        hidden=hidden,
        intermediate=sizes.intermediate,
        gated=sizes.gated,
        zero=given.w13_zero is not None,
        layout="linear",
    )


def _factor(value: Tensor | None, experts: int, like: Tensor) -> Tensor:
    if value is None:
        return torch.ones(experts, dtype=torch.float32, device=like.device)
    return value.detach()


def _paired(value: Tensor) -> Tensor:
    """Return the global scales [E, 2] of gate and up."""
    return value if value.dim() == 2 else value[:, None].repeat(1, 2)


def _bias(value: Tensor | None, shape: tuple[int, int], like: Tensor) -> Tensor:
    if value is None:
        return torch.zeros(shape, dtype=torch.float32, device=like.device)
    return value.detach().float()


# ---- Checks -------------------------------------------------------------------------------------


class Given(NamedTuple):
    """The weights as `prepare_moe_weights` and `fused_moe` take them, of any type until checked."""

    w13: Any
    w2: Any
    fmt: str
    w13_scale: Any
    w2_scale: Any
    w13_global_scale: Tensor | None
    w2_global_scale: Tensor | None
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    activation: str
    group_size: int | None
    w13_zero: Tensor | None
    w2_zero: Tensor | None
    int4_signed: bool


class Sizes(NamedTuple):
    """Sizes of a layer, read off its weights."""

    experts: int
    hidden: int
    intermediate: int
    group: int
    gated: bool

    @property
    def rows(self) -> int:
        """Rows of w13."""
        return self.intermediate * (2 if self.gated else 1)


def check_weights(where: str, given: Given) -> Sizes:
    """Return the sizes, after all checks that need no look at the numbers.

    Raises:
        TypeError: an argument that is no tensor, or of another dtype.
        ValueError: an option, a shape, a stride or a device that does not fit.
    """
    checks.choice(where, "fmt", given.fmt, tuple(MOE))
    checks.choice(where, "activation", given.activation, ACTIVATIONS)
    _check_int4(where, given)
    w13 = _checked_codes(where, "w13", given.w13, given)
    w2 = _checked_codes(where, "w2", given.w2, given)
    sizes = _sizes(where, given, w13, w2)
    experts, hidden, rows = sizes.experts, sizes.hidden, sizes.rows
    blocks = hidden // sizes.group, sizes.intermediate // sizes.group
    for name, shape in (("w13", (experts, rows, blocks[0])), ("w2", (experts, hidden, blocks[1]))):
        _check_scale(where, f"{name}_scale", getattr(given, f"{name}_scale"), given, w13, shape)
        zero = getattr(given, f"{name}_zero")
        if zero is not None:
            _like(where, f"{name}_zero", zero, (torch.uint8,), w13, shape)
        bias = getattr(given, f"{name}_bias")
        if bias is not None:
            _like(where, f"{name}_bias", bias, checks.ACTIVATIONS, w13, shape[:2])
    factors = given.w13_global_scale, given.w2_global_scale
    if factors[0] is not None:
        allowed = ((experts,), (experts, 2)) if sizes.gated else ((experts,),)
        _like(where, "w13_global_scale", factors[0], (torch.float32,), w13, *allowed)
    if factors[1] is not None:
        _like(where, "w2_global_scale", factors[1], (torch.float32,), w13, (experts,))
    return sizes


def _checked_codes(where: str, name: str, value: Tensor, given: Given) -> Tensor:
    dtypes = (torch.uint8,) if given.fmt == "int4" else checks.PACKED
    codes = checks.beside(where, name, value, dtypes, "w13", given.w13)
    if codes.dim() != 3 or not codes.numel():
        raise ValueError(
            f"{where}: {name} has shape {list(codes.shape)}, but must have 3 dimensions, none of "
            "them 0: [experts, rows, columns / 2], where two 4-bit codes are one byte"
        )
    return codes


def _sizes(where: str, given: Given, w13: Tensor, w2: Tensor) -> Sizes:
    experts, rows, hidden = w13.shape[0], w13.shape[1], 2 * w13.shape[2]
    gated = given.activation in GATED
    if gated and rows % 2:
        raise ValueError(
            f"{where}: w13 has {rows} rows, but activation={given.activation!r} needs as many gate "
            "rows as up rows; pass an even number of rows, or activation='relu2', which has no gate"
        )
    intermediate = rows // 2 if gated else rows
    wanted = (experts, hidden, intermediate // 2)
    if tuple(w2.shape) != wanted or intermediate % 2:
        meant = _meant(w13.shape, w2.shape, gated)
        form = f"[E, {'2 I' if gated else 'I'}, H / 2] and [E, H, I / 2]"
        raise ValueError(
            f"{where}: w13 and w2 have shapes {list(w13.shape)} and {list(w2.shape)}, but with "
            f"activation={given.activation!r} must have {form}; {meant}"
        )
    if experts > MAX_EXPERTS:
        raise ValueError(
            f"{where}: w13 has {experts} experts, but kernels take at most {MAX_EXPERTS}; divide "
            "the experts among several calls"
        )
    group = _group(where, given, hidden)
    for name, size in (("H", hidden), ("I", intermediate)):
        if size % group:
            raise ValueError(
                f"{where}: {name}={size} is not a multiple of {group}, the elements of a block "
                f"scale of {given.fmt}; pad {name} to {round_up(size, group)} when quantising"
            )
    return Sizes(experts, hidden, intermediate, group, gated)


def _meant(w13: Sequence[int], w2: Sequence[int], gated: bool) -> str:
    """Return what to do about weights that do not fit: the reading that does, fewest changes first.

    A shape is [E, rows, columns / 2]; with its last axes exchanged, or of a matrix that was
    transposed before it was quantised, it stands for others.
    """

    def readings(name: str, shape: Sequence[int]) -> list[tuple[str, int, int]]:
        _, rows, half = shape
        turned = f"{name} is transposed, so pass {name}.transpose(1, 2).contiguous()"
        before = f"{name} was transposed before it was quantised, so quantise [E, rows, columns]"
        return [("", rows, 2 * half), (turned, half, 2 * rows), (before, 2 * half, rows)]

    def fits(first: tuple[str, int, int], second: tuple[str, int, int], pairs: bool) -> bool:
        (_, rows, hidden), (_, down, intermediate) = first, second
        return (down, rows) == (hidden, intermediate * (2 if pairs else 1))

    if w13[0] == w2[0]:
        ups, downs = readings("w13", w13), readings("w2", w2)
        if fits(ups[0], downs[0], not gated):
            which = (
                "has no gate rows: pass activation='relu2'"
                if gated
                else ("has gate rows: pass the activation of the model, such as 'swiglu'")
            )
            return f"w13 {which}"
        if fits(downs[0], ups[0], gated):
            return "w13 and w2 are exchanged, so pass each in place of the other"
        pairs = sorted(product(ups, downs), key=lambda pair: bool(pair[0][0]) + bool(pair[1][0]))
        for first, second in pairs:
            if fits(first, second, gated):
                return "; ".join(filter(None, (first[0], second[0])))
    return "pass both weights of one layer"


def _group(where: str, given: Given, hidden: int) -> int:
    """Return the elements of a block scale."""
    allowed = MOE[given.fmt].blocks
    group = given.group_size
    if group is None:
        group = allowed[0]
        if given.fmt == "int4":
            scale = checks.tensor(where, "w13_scale", given.w13_scale, SCALES["int4"])
            group = hidden // max(1, scale.shape[-1])
            if group not in allowed or group * scale.shape[-1] != hidden:
                fit = [g for g in allowed if hidden % g == 0] or allowed[:1]
                raise ValueError(
                    f"{where}: w13_scale has shape {list(scale.shape)}, but rows of {hidden} need "
                    f"{' or '.join(str(-(-hidden // g)) for g in fit)} scales, for groups of "
                    f"{' or '.join(map(str, fit))}; pass one scale for each group of a row"
                )
    if group not in allowed:
        raise ValueError(
            f"{where}: group_size={group!r} is not known for {given.fmt}; choose one of "
            f"{', '.join(map(str, allowed))}"
        )
    return group


def _like(
    where: str,
    name: str,
    value: object,
    dtypes: Sequence[torch.dtype],
    first: Tensor,
    *allowed: Sequence[int],
) -> None:
    checked = checks.beside(where, name, value, dtypes, "w13", first)
    rest = f", as w13 of shape {list(first.shape)} says; pass a tensor of this shape"
    checks.sized(where, name, checked, allowed, rest)


def _check_scale(
    where: str, name: str, value: object, given: Given, first: Tensor, shape: tuple[int, int, int]
) -> None:
    """TypeError or ValueError unless they are block scales of this shape."""
    checked = checks.beside(where, name, value, SCALES[given.fmt], "w13", first)
    got, (experts, rows, blocks) = list(checked.shape), shape
    cols = blocks * (given.group_size or MOE[given.fmt].block)
    rest = checks.other_format(got, given.fmt, MOE, lambda block: [(experts, rows, cols // block)])
    if not rest and got == [experts, *checks.padded_shape(rows, blocks)]:
        rest = f"; this is the size of the 128x4 layout, so pass layouts.from_128x4({name}, "
        rest += f"{rows}, {blocks})"
    rest = rest or f", as w13 of shape {list(first.shape)} says; pass a tensor of this shape"
    checks.sized(where, name, checked, [shape], rest)


def _check_int4(where: str, given: Given) -> None:
    """Errors for options that only int4 has."""
    zeros = {"w13_zero": given.w13_zero, "w2_zero": given.w2_zero}
    missing = [name for name, value in zeros.items() if value is None]
    check_zeros(where, given.fmt, zeros, given.int4_signed)
    if len(missing) == 1:
        raise ValueError(
            f"{where}: {missing[0]} is missing, but the other weight has zeros; pass both, a "
            "tensor of 8 for symmetric codes"
        )


# ---- To tiles -----------------------------------------------------------------------------------


def to_tiles(where: str, plain: MoeWeights, dtype: torch.dtype) -> MoeWeights:
    """Return linear weights in layout "tiles64"."""
    _check_scales(where, plain, dtype)
    made: dict[str, Tensor | None] = {}
    for name, order in _orders(plain):
        scale, factor = getattr(plain, f"{name}_scale"), getattr(plain, f"{name}_global")
        tops = _largest(scale) if plain.fmt == "mxfp4" else None
        made[name], made[f"{name}_scale"] = _matrices(plain, name, order, tops, dtype)
        made[f"{name}_zero"] = None
        made[f"{name}_global"] = _times(factor, _powers(tops, plain.device))
        made[f"{name}_bias"] = _ordered(getattr(plain, f"{name}_bias"), order)
    kept = dtype if plain.fmt == "int4" else None
    return replace(plain, **made, layout="tiles64", dtype=kept)  # type: ignore[arg-type]


def _orders(weights: MoeWeights) -> tuple[tuple[str, Tensor], tuple[str, Tensor]]:
    """Return the names of both weights, and the row of each at each row of the layout."""
    w13 = moe_tiles.paired_order(weights.intermediate, weights.gated).to(weights.device)
    return ("w13", w13), ("w2", moe_tiles.natural_order(weights.hidden).to(weights.device))


def _times(factor: Tensor, each: Tensor) -> Tensor:
    """Return global scales [E] or [E, 2] times a number for each expert."""
    return factor * each.view(-1, *[1] * (factor.dim() - 1))


def _matrices(
    plain: MoeWeights, name: str, order: Tensor, tops: list[int] | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of all experts of one weight, converted one after the other."""
    codes, scale = getattr(plain, name), getattr(plain, f"{name}_scale")
    zero = getattr(plain, f"{name}_zero")
    outs: list[Tensor] = []
    for e in range(plain.experts):
        points, top = None if zero is None else zero[e], None if tops is None else tops[e]
        made = tiled(plain.fmt, codes[e], scale[e], points, order, top, dtype)
        if not outs:
            outs = [value.new_empty((plain.experts, *value.shape)) for value in made]
        for out, value in zip(outs, made, strict=True):
            out[e] = value
    return outs[0], outs[1]


def _largest(scale: Tensor) -> list[int]:
    """Return the largest scale byte of each expert."""
    values: list[int] = scale.view(torch.uint8).flatten(1).amax(1).tolist()
    return values


def _powers(tops: list[int] | None, device: torch.device) -> Tensor:
    """Return 2^(largest scale byte - 127) of each expert of mxfp4, else ones."""
    values = [1.0] if tops is None else [power(top) for top in tops]
    return torch.tensor(values, dtype=torch.float32, device=device)


def with_biases(tiles: MoeWeights, w13_bias: Tensor | None, w2_bias: Tensor | None) -> MoeWeights:
    """Return tiled weights with biases [E, rows] and [E, H], gate rows first; None: 0."""
    e, device = tiles.experts, tiles.device
    w13 = torch.zeros((e, tiles.rows), device=device) if w13_bias is None else w13_bias.float()
    w2 = torch.zeros((e, tiles.hidden), device=device) if w2_bias is None else w2_bias.float()
    (_, order), (_, natural) = _orders(tiles)
    return replace(tiles, w13_bias=_ordered(w13, order), w2_bias=_ordered(w2, natural))


def _ordered(bias: Tensor | None, order: Tensor) -> Tensor | None:
    """Return biases [E, rows] in the rows' order, those of padding 0."""
    if bias is None:
        return None
    return bias.index_select(1, order.clamp(min=0)).masked_fill_(order < 0, 0)


def _check_scales(where: str, plain: MoeWeights, dtype: torch.dtype) -> None:
    """ValueError for scales that the kernels' decoding does not know."""
    for name in ("w13_scale", "w2_scale"):
        refused = refused_scales(getattr(plain, name), plain.fmt, dtype)
        if refused is not None:
            raise ValueError(f"{where}: {name} of expert {refused[0]} {refused[1]}")


# ---- Factors of rows ----------------------------------------------------------------------------


def _to_rows(where: str, plain: MoeWeights, dtype: torch.dtype, *, must: bool) -> MoeWeights | None:
    """Return linear weights in layout "tiles64e"; None, after a warning, if they cannot be.

    ``must``: then it is an error.
    """
    moe_rows.check_form(where, plain.fmt, plain.group)
    if dtype != torch.bfloat16:
        raise ValueError(
            f"{where}: layout='tiles64e' is for dtype=torch.bfloat16, not for {dtype}; leave "
            "layout out"
        )
    if plain.fmt == "int4":
        tiles = to_tiles(where, plain, moe_rows.SCALES)
        return replace(
            *(tiles,), w13_global=_laid_out(plain, "w13"), w2_global=_laid_out(plain, "w2"),
            layout="tiles64e",
        )  # fmt: skip
    _check_scales(where, plain, dtype)
    found = {name: _ranges(plain, name) for name in ("w13", "w2")}
    for name, (top, least) in found.items():
        spread = top - least
        widest = int(spread.amax())
        if widest > moe_rows.SPREAD:
            e, row = divmod(int(spread.argmax()), spread.shape[1])
            said = (
                f"{where}: {name}_scale of expert {e}, row {row} has exponents {widest} apart, but "
                f"E4M3 holds blocks of a row exactly that are at most {moe_rows.SPREAD} apart"
            )
            if must:
                raise ValueError(f"{said}; leave layout out, for products of 16 bits")
            warnings.warn(
                f"{said}; the weights are in layout 'tiles64', for products of 16 bits",
                stacklevel=4,
            )
            return None
    made: dict[str, Tensor | None] = {}
    for name, order in _orders(plain):
        top = found[name][0]
        made |= {name: None, f"{name}_bias": _ordered(getattr(plain, f"{name}_bias"), order)}
        codes, scale = getattr(plain, name), getattr(plain, f"{name}_scale")
        each = [moe_rows.pack(*some, order) for some in zip(codes, scale, top, strict=True)]
        made[name], made[f"{name}_scale"] = (torch.stack(part) for part in zip(*each, strict=True))
        factor = _of_rows(getattr(plain, f"{name}_global"), codes.shape[1])
        rows = [moe_rows.factors(*some, order) for some in zip(factor, top, strict=True)]
        made[f"{name}_global"] = torch.stack(rows)
    return replace(plain, **made, layout="tiles64e")  # type: ignore[arg-type]


def _to_rounded(where: str, plain: MoeWeights, dtype: torch.dtype) -> MoeWeights:
    """Return linear weights of nvfp4 in layout "tiles64e", after a warning of what it changed."""
    if dtype != torch.bfloat16:
        raise ValueError(
            f"{where}: rounded=True is for dtype=torch.bfloat16, not for {dtype}; leave it out"
        )
    _check_scales(where, plain, dtype)
    made: dict[str, Tensor | None] = {}
    errors = []
    for name, order in _orders(plain):
        codes, scale = getattr(plain, name), getattr(plain, f"{name}_scale")
        factor = _of_rows(getattr(plain, f"{name}_global"), codes.shape[1])
        outs: list[tuple[Tensor, ...]] = []
        for one in zip(codes, scale, factor, strict=True):
            of = moe_rounded.rounded(*one[:2])
            own = moe_rounded.factors(one[2], of.octaves, order)
            squares = moe_rounded.squares(of, *one[:2])
            outs.append((*moe_rounded.pack(of, order), own, *squares))
        packed, scales, factors, changed, whole = map(torch.stack, zip(*outs, strict=True))
        errors.append(moe_rounded.relative(changed, whole, factor))
        made |= {name: packed, f"{name}_scale": scales, f"{name}_global": factors}
        made |= {f"{name}_bias": _ordered(getattr(plain, f"{name}_bias"), order)}
    say_rounded(where, ("w13", "w2"), errors)
    return replace(plain, **made, layout="tiles64e", added_error=tuple(errors))  # type: ignore[arg-type]


def _ranges(plain: MoeWeights, name: str) -> tuple[Tensor, Tensor]:
    """Return `moe.rows.ranges` [E, rows] of one of the weights, expert by expert."""
    pairs = zip(getattr(plain, name), getattr(plain, f"{name}_scale"), strict=True)
    each = [moe_rows.ranges(codes, scale) for codes, scale in pairs]
    top, least = (torch.stack(part) for part in zip(*each, strict=True))
    return top, least


def _laid_out(plain: MoeWeights, name: str) -> Tensor:
    """Return the global scales of one of int4's weights [E, rows of the layout]."""
    order = dict(_orders(plain))[name]
    each = _of_rows(getattr(plain, f"{name}_global"), getattr(plain, name).shape[1])
    return torch.stack([moe_rows.factors(factor, None, order) for factor in each])


def _of_rows(factor: Tensor, rows: int) -> Tensor:
    """Return the global scale of each row [E, rows] of global scales [E] or [E, 2]."""
    wide = factor.view(len(factor), -1)
    return wide.repeat_interleave(rows // wide.shape[1], 1)


def _from_rows(tiles: MoeWeights) -> MoeWeights:
    """Return weights in layout "tiles64e" in layout "linear"."""
    if tiles.fmt == "int4":
        return _from_int4_rows(tiles)
    kind: Any = moe_rounded if tiles.fmt == "nvfp4" else moe_rows
    made: dict[str, Tensor | None] = {}
    halves = 2 if tiles.gated else 1
    for (name, order), rows, cols, parts in zip(
        _orders(tiles), (tiles.rows, tiles.hidden), (tiles.hidden, tiles.intermediate), (halves, 1),
        strict=True,
    ):  # fmt: skip
        codes, scales, factors = [], [], []
        for e in range(tiles.experts):
            packed, byte = kind.unpack(getattr(tiles, name)[e], getattr(tiles, f"{name}_scale")[e])
            plain = [
                back(value, order, rows)
                for value in (packed[:, : cols // 2], byte[:, : cols // tiles.group])
            ]
            own = back(getattr(tiles, f"{name}_global")[e][:, None], order, rows)[:, 0]
            pairs = [
                kind.linear(*some)
                for some in zip(plain[1].chunk(parts), own.chunk(parts), strict=True)
            ]
            codes.append(plain[0])
            scales.append(torch.cat([byte for byte, _ in pairs]))
            factors.append(torch.stack([factor for _, factor in pairs]))
        factor = torch.stack(factors)
        if name == "w2":
            factor = factor[:, 0]
        elif parts == 1:
            factor = factor.repeat(1, 2)
        made |= {name: torch.stack(codes), f"{name}_scale": torch.stack(scales)}
        made[f"{name}_global"] = factor
        made[f"{name}_bias"] = _unordered(getattr(tiles, f"{name}_bias"), order, rows)
    return replace(tiles, **made, layout="linear", added_error=None)  # type: ignore[arg-type]


def _from_int4_rows(tiles: MoeWeights) -> MoeWeights:
    """The same of int4, whose rows have the global scale of the matrix, or of their half."""
    (_, paired), (_, natural) = _orders(tiles)
    ups = tiles.rows - tiles.intermediate  # the first up row; without gates the first row
    first, last = (int((paired == row).nonzero()[0]) for row in (0, ups))
    w13 = tiles.w13_global[:, [first, last]]
    w2 = tiles.w2_global[:, int((natural == 0).nonzero()[0])]
    return to_linear(replace(tiles, w13_global=w13, w2_global=w2))


# ---- Codes as they are --------------------------------------------------------------------------


def to_codes(where: str, plain: MoeWeights) -> MoeWeights:
    """Return linear weights in layout "128x4"."""
    known = list(dict.fromkeys(fmt for fmt, _ in PRODUCTS))
    if plain.fmt not in known or not plain.gated:
        what = plain.fmt if plain.fmt not in known else "weights without gates"
        raise ValueError(
            f"{where}: layout='128x4' is for gated weights in {' or '.join(known)}, which tensor "
            f"cores multiply as codes, not for {what}; leave layout out"
        )
    _check_scales(where, plain, torch.bfloat16)
    step = COL_TILE * plain.group
    rows = round_up(plain.intermediate, step)
    made: dict[str, Tensor | None] = {
        "w13": interleave_gate_up(_gates_padded(_padded(plain.w13, step // 2), rows)),
        "w13_scale": _scales128x4(_gates_padded(_padded(plain.w13_scale, COL_TILE), rows), True),
        "w2": _padded(plain.w2, step // 2),
        "w2_scale": _scales128x4(_padded(plain.w2_scale, COL_TILE), False),
    }
    if plain.w13_bias is not None:
        halves = _gates_padded(plain.w13_bias[:, :, None], rows)[:, :, 0]
        made["w13_bias"] = interleave_gate_up(halves, -1)
    return replace(plain, **made, layout="128x4")  # type: ignore[arg-type]


def _padded(value: Tensor, step: int) -> Tensor:
    """Return ``value`` with zeros up to a multiple of ``step`` columns."""
    more = -value.shape[-1] % step
    return torch.nn.functional.pad(value, (0, more)) if more else value.contiguous()


def _gates_padded(value: Tensor, rows: int) -> Tensor:
    """Return gates and ups [E, 2 I, X], each with zeros up to ``rows``."""
    half = value.shape[1] // 2
    both = value.unflatten(1, (2, half))
    return torch.nn.functional.pad(both, (0, 0, 0, rows - half)).flatten(1, 2)


def _scales128x4(scale: Tensor, gated: bool) -> Tensor:
    """Return scales [E, rows, blocks], those of w13 interleaved, each expert's laid out."""
    return _each(swizzle_scales, interleave_gate_up(scale) if gated else scale)


def _from_codes(weights: MoeWeights) -> MoeWeights:
    """Return weights in layout "128x4" in layout "linear"."""
    hidden, intermediate, group = weights.hidden, weights.intermediate, weights.group
    rows = round_up(intermediate, COL_TILE * group)
    order = interleave_gate_up(torch.arange(2 * rows, device=weights.device), 0).argsort()
    order = order.view(2, rows)[:, :intermediate].reshape(-1)

    def linear(scale: Tensor, count: int, cols: int) -> Tensor:
        blocks = round_up(cols, COL_TILE * group) // group
        return _each(lambda own: unswizzle_scales(own, count, blocks), scale)[..., : cols // group]

    made: dict[str, Tensor | None] = {
        "w13": weights.w13[..., : hidden // 2].index_select(1, order),
        "w13_scale": linear(weights.w13_scale, 2 * rows, hidden).index_select(1, order),
        "w2": weights.w2[..., : intermediate // 2].contiguous(),
        "w2_scale": linear(weights.w2_scale, hidden, intermediate).contiguous(),
    }
    if weights.w13_bias is not None:
        made["w13_bias"] = weights.w13_bias.index_select(1, order)
    return replace(weights, **made, layout="linear")  # type: ignore[arg-type]


def _each(change: Callable[[Tensor], Tensor], scale: Tensor) -> Tensor:
    """Return bytes of scales [E, ...] of which each expert's were changed."""
    return torch.stack([change(own).view(torch.uint8) for own in scale])


# ---- And back -----------------------------------------------------------------------------------


def to_linear(tiles: MoeWeights) -> MoeWeights:
    """Return tiled weights in layout "linear"."""
    made: dict[str, Tensor | None] = {}
    sizes = (tiles.rows, tiles.hidden), (tiles.hidden, tiles.intermediate)
    for (name, order), (rows, cols) in zip(_orders(tiles), sizes, strict=True):
        codes, scale, zero, gain = _untiled(tiles, name, order, rows, cols)
        factor = _times(getattr(tiles, f"{name}_global"), gain)
        bias = _unordered(getattr(tiles, f"{name}_bias"), order, rows)
        made |= {name: codes, f"{name}_scale": scale, f"{name}_zero": zero}
        made |= {f"{name}_global": factor, f"{name}_bias": bias}
    return replace(tiles, **made, layout="linear", dtype=None)  # type: ignore[arg-type]


def _untiled(
    tiles: MoeWeights, name: str, order: Tensor, rows: int, cols: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return codes, scales and zeros of all experts, and what their global scales gain."""
    outs: list[list[Tensor]] = [[], [], []]
    gains = []
    codes, scale = getattr(tiles, name), getattr(tiles, f"{name}_scale")
    for e in range(tiles.experts):
        sizes = rows, cols, tiles.group
        *made, gain = untiled(tiles.fmt, codes[e], scale[e], order, sizes, tiles.zero, tiles.dtype)
        gains.append(gain)
        for out, value in zip(outs, made, strict=True):
            if value is not None:
                out.append(value)
    factors = torch.tensor(gains, dtype=torch.float32, device=tiles.device)
    zeros = torch.stack(outs[2]) if outs[2] else None
    return torch.stack(outs[0]), torch.stack(outs[1]), zeros, factors


def _unordered(bias: Tensor | None, order: Tensor, rows: int) -> Tensor | None:
    return None if bias is None else back(bias.T, order, rows).T.contiguous()
