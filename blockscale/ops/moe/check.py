"""Checks of the weights of an MoE layer; errors say where, what, the rule and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from blockscale.base.sizes import round_up
from blockscale.ops import checks
from blockscale.specs.gemm import MAX_EXPERTS
from blockscale.specs.moe import ACTIVATIONS, FORMATS, GATED

Tensor = torch.Tensor

SCALES = {
    "nvfp4": checks.SCALES["nvfp4"],
    "mxfp4": checks.SCALES["mxfp4"],
    "int4": checks.ACTIVATIONS,
}
"""Dtypes of block scales."""


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
    checks.choice(where, "fmt", given.fmt, tuple(FORMATS))
    checks.choice(where, "activation", given.activation, ACTIVATIONS)
    _check_int4(where, given)
    w13 = _codes(where, "w13", given.w13, given)
    w2 = _codes(where, "w2", given.w2, given)
    sizes = _sizes(where, given, w13, w2)
    experts, hidden, rows = sizes.experts, sizes.hidden, sizes.rows
    blocks = hidden // sizes.group, sizes.intermediate // sizes.group
    for name, shape in (("w13", (experts, rows, blocks[0])), ("w2", (experts, hidden, blocks[1]))):
        scale = getattr(given, f"{name}_scale")
        _like(where, f"{name}_scale", scale, SCALES[given.fmt], w13, shape)
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


def _codes(where: str, name: str, value: Tensor, given: Given) -> Tensor:
    dtypes = (torch.uint8,) if given.fmt == "int4" else checks.PACKED
    codes = checks.tensor(where, name, value, dtypes)
    checks.same_device(where, name, codes, "w13", given.w13)
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
        raise ValueError(
            f"{where}: w2 has shape {list(w2.shape)}, but w13 of shape {list(w13.shape)} and "
            f"activation={given.activation!r} need {list(wanted)}: [experts, H, I / 2] with "
            f"H={hidden} and I={intermediate}; pass both weights of one layer"
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


def _group(where: str, given: Given, hidden: int) -> int:
    """Return the elements of a block scale."""
    allowed = FORMATS[given.fmt]
    group = given.group_size
    if group is None:
        group = allowed[0]
        if given.fmt == "int4":
            scale = checks.tensor(where, "w13_scale", given.w13_scale, SCALES["int4"])
            group = hidden // max(1, scale.shape[-1])
            if group not in allowed or group * scale.shape[-1] != hidden:
                raise ValueError(
                    f"{where}: w13_scale has shape {list(scale.shape)}, but rows of {hidden} need "
                    f"{', '.join(str(hidden // g) for g in allowed)} scales, for groups of "
                    f"{', '.join(map(str, allowed))}; pass one scale for each group of a row"
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
    checked = checks.tensor(where, name, value, dtypes)
    checks.same_device(where, name, checked, "w13", first)
    if tuple(checked.shape) not in [tuple(shape) for shape in allowed]:
        raise ValueError(
            f"{where}: {name} has shape {list(checked.shape)}, but must have "
            f"{' or '.join(str(list(shape)) for shape in allowed)}, as w13 of shape "
            f"{list(first.shape)} says; pass a tensor of this shape"
        )


def _check_int4(where: str, given: Given) -> None:
    """Errors for options that only int4 has."""
    zeros = given.w13_zero is not None, given.w2_zero is not None
    if given.fmt != "int4" and (any(zeros) or given.int4_signed):
        name = "int4_signed" if not any(zeros) else "w13_zero" if zeros[0] else "w2_zero"
        raise ValueError(
            f"{where}: {name} is given, but codes of {given.fmt} have no zero points; leave it "
            "out, or pass fmt='int4'"
        )
    if zeros[0] != zeros[1]:
        missing = "w2_zero" if zeros[0] else "w13_zero"
        raise ValueError(
            f"{where}: {missing} is missing, but the other weight has zeros; pass both, a tensor "
            "of 8 for symmetric codes"
        )
    if zeros[0] and given.int4_signed:
        raise ValueError(
            f"{where}: int4_signed=True is given with zeros, which are of unsigned codes; pass "
            "codes from 0 to 15, which are the signed ones ^ 0x88"
        )
