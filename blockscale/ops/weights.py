"""What prepared weights have in common: how they are kept, checked, and converted.

The layouts "linear" and "tiles64" hold the same values, up to the rounding of int4 scales to the
dtype of the activations.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch

from blockscale.base.formats import FLOAT, MOE
from blockscale.ops import checks
from blockscale.ops.checks import dtype_name
from blockscale.ops.moe import tiles as moe_tiles

Tensor = torch.Tensor

SIGN_BITS = 0x88
"""What turns two's complement codes into those from 0 to 15: both of a byte plus 8."""

SCALES = {
    name: checks.ACTIVATIONS if row.scale is FLOAT else checks.dtypes_of(row.scale)
    for name, row in MOE.items()
}
"""Dtypes of block scales."""

E8M0_BIAS, E8M0_NAN = 127, 255

INT4_LARGEST = {torch.bfloat16: 2.0**15, torch.float16: 2.0**12}
"""Scales of int4 are below: kernels multiply them by 2^112 (bfloat16), or by 15 (float16)."""


class PreparedWeights:
    """Base of weights that are ready for kernels: frozen dataclasses of tensors and plain values.

    Attributes:
        names: of the tensors, in the order of a kernel's parameters; the first is always there.
        described_by: names of all other attributes but dtype.
        dtype: that activations must have; None: any.
        added_error: where weights are rounded (`blockscale.ops.moe.rounded`), of each weight
            ``||rounded - exact|| / ||exact||``; None: nothing is rounded.
    """

    names: ClassVar[tuple[str, ...]]
    described_by: ClassVar[tuple[str, ...]]
    dtype: torch.dtype | None
    added_error: tuple[float, ...] | None = None

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        first: Tensor = getattr(self, self.names[0])
        return first.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(value.nbytes for _, value in self.tensors())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Return name and tensor of those that there are."""
        for name in self.names:
            value = getattr(self, name)
            if value is not None:
                yield name, value

    def meta(self) -> dict[str, Any]:
        """Return everything but the tensors, as plain values."""
        values = {name: getattr(self, name) for name in self.described_by}
        values["dtype"] = None if self.dtype is None else dtype_name(self.dtype)
        if self.added_error is not None:
            values["added_error"] = [*self.added_error]
        if values["layout"] == "tiles64" and values.get("fmt", "int4") != "int4":
            values["revision"] = moe_tiles.REVISION
        return values

    @classmethod
    def of(cls, meta: Mapping[str, Any], tensors: Mapping[str, Tensor | None]) -> Self:
        """Return the weights of which `meta` and `tensors` are these.

        Raises:
            ValueError: they were stored when the layout "tiles64" was another one.
        """
        fmt, revision = meta.get("fmt", "int4"), meta.get("revision", 1)
        if moe_tiles.outdated(fmt, meta["layout"], revision):
            raise ValueError(
                f"weights of {fmt} are in revision {revision} of layout "
                f"'tiles64', but kernels read revision {moe_tiles.REVISION}; prepare them again "
                "from the checkpoint"
            )
        found: dict[str, Any] = {name: tensors.get(name) for name in cls.names}
        found |= {name: meta[name] for name in cls.described_by}
        found["dtype"] = None if meta["dtype"] is None else getattr(torch, meta["dtype"])
        if meta.get("added_error") is not None:
            found["added_error"] = tuple(meta["added_error"])
        return cls(**found)

    def to(self, device: str | torch.device) -> Self:
        """Return them on another device, in the same layout."""
        moved: dict[str, Any] = {name: value.to(device) for name, value in self.tensors()}
        return replace(self, **moved)  # type: ignore[type-var]

    def state_dict(self) -> dict[str, Any]:
        """Return tensors by name, and under "meta" the rest; `load_state_dict` takes it."""
        return {**dict(self.tensors()), "meta": self.meta()}

    @classmethod
    def load_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Return the weights that `state_dict` described."""
        return cls.of(state["meta"], {n: v for n, v in state.items() if n != "meta"})


# ---- As given -----------------------------------------------------------------------------------


def plain_codes(value: Tensor, int4_signed: bool) -> Tensor:
    """Return codes as bytes, those of int4 from 0 to 15."""
    codes = value.detach().view(torch.uint8)
    return codes ^ SIGN_BITS if int4_signed else codes


def plain_scales(value: Tensor, fmt: str) -> Tensor:
    """Return block scales as bytes, those of int4 as float32."""
    return value.detach().float() if fmt == "int4" else value.detach().view(torch.uint8)


def check_zeros(
    where: str, fmt: str, zeros: Mapping[str, Tensor | None], int4_signed: bool
) -> None:
    """ValueError for zero points, or signed codes, where there are none."""
    given = [name for name, value in zeros.items() if value is not None]
    if fmt != "int4" and (given or int4_signed):
        raise ValueError(
            f"{where}: {(given or ['int4_signed'])[0]} is given, but codes of {fmt} have no zero "
            "points; leave it out, or pass fmt='int4'"
        )
    if given and int4_signed:
        raise ValueError(
            f"{where}: int4_signed=True is given with zeros, which are of unsigned codes; pass "
            "codes from 0 to 15, which are the signed ones ^ 0x88"
        )


def refused_scales(scale: Tensor, fmt: str, dtype: torch.dtype) -> tuple[int, str] | None:
    """Return which matrix of scales [E, rows, blocks] kernels cannot decode, and why; None: none.

    Args:
        scale: as `plain_scales` returns it.
        fmt: a row of `MOE`.
        dtype: of activations.
    """
    if fmt == "int4":
        limit = INT4_LARGEST[dtype]
        for number, one in enumerate(scale):
            most = float(one.abs().amax())
            if not most < limit:  # NaN is not
                return number, (
                    f"has a scale of magnitude {most:g}; kernels for {dtype_name(dtype)} take "
                    f"those below {limit:g}, so scale the weight down and the activations or the "
                    "output up"
                )
        return None
    largest = moe_tiles.E4M3_LARGEST if fmt == "nvfp4" else E8M0_NAN - 1
    bad = int(scale.amax())
    if bad <= largest:
        return None
    what = "NaN" if fmt == "mxfp4" else "NaN or below zero"
    number = int((scale.flatten(1).amax(1) > largest).nonzero()[0])
    return number, (
        f"has the byte {bad:#x}, which is {what}; block scales must be finite and not negative, "
        "so quantise the weight again"
    )


# ---- Weights rounded to E4M3 --------------------------------------------------------------------


def check_rounded(
    where: str, fmt: str, acts: Sequence[str], options: tuple[str | None, str | None], on_cpu: bool
) -> None:
    """ValueError for ``rounded=True`` where there are no such weights.

    Args:
        where: what errors begin with.
        fmt: of the weights.
        acts: the formats of activations for which weights are rounded.
        options: ``act_fmt`` and ``layout``.
        on_cpu: whether the tensors are there.
    """
    act_fmt, layout = options
    if fmt != "nvfp4":
        raise ValueError(
            f"{where}: rounded=True is for nvfp4 weights, which E4M3 does not hold exactly, not "
            f"for {fmt}; leave it out"
        )
    if act_fmt not in acts:
        raise ValueError(
            f"{where}: rounded=True, but act_fmt={act_fmt!r} has no products of 8 bits, for which "
            f"weights are rounded; pass act_fmt={' or '.join(map(repr, acts))}, or leave it out"
        )
    if layout not in (None, "tiles64e"):
        raise ValueError(
            f"{where}: rounded=True, but layout={layout!r} holds exact weights; leave one of them "
            "out"
        )
    if layout is None and on_cpu:
        raise ValueError(
            f"{where}: rounded=True, but the tensors are on the CPU, whose kernels multiply exact "
            "weights; leave it out, pass tensors on a GPU, or layout='tiles64e' for weights that "
            "are to move to one"
        )


def say_rounded(where: str, names: Sequence[str], errors: Sequence[float]) -> None:
    """Warn by how much weights of these names were changed."""
    each = " and ".join(f"{n} by {error:.2%}" for n, error in zip(names, errors, strict=True))
    norm = "their norms" if len(names) > 1 else "its norm"
    warnings.warn(
        f"{where}: rounding nvfp4 weights to E4M3 has changed {each} of {norm}", stacklevel=5
    )


# ---- Layout "tiles64" ---------------------------------------------------------------------------


def tiled(
    fmt: str,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    order: Tensor,
    top: int | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of a matrix in layout "tiles64".

    Args:
        fmt: a row of `MOE`.
        codes: [rows, K / 2], as `plain_codes` returns them.
        scale, zero: [rows, blocks].
        order: the matrix's row at each row of the layout; -1: padding.
        top: mxfp4: the largest scale byte, which the global scale has to be multiplied with
            (`power`); else None.
        dtype: of int4 scales and zeros.
    """
    if fmt != "int4":
        return moe_tiles.pack_fp4(codes, scale, top, order)
    zeros = None if zero is None else zero.to(dtype)
    return moe_tiles.pack_int4(codes, scale.to(dtype), zeros, order)


def power(top: int) -> float:
    """Return what the largest scale byte of mxfp4 stands for."""
    return 2.0 ** (top - E8M0_BIAS)


def untiled(
    fmt: str,
    codes: Tensor,
    scale: Tensor,
    order: Tensor,
    sizes: tuple[int, int, int],
    zero: bool,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor | None, float]:
    """Return codes, scales, zeros of a matrix as they were, and the gain of its global scale.

    ``sizes``: rows, columns, and the elements that share a scale.
    """
    rows, cols, group = sizes
    kind = "int4" if fmt == "int4" else "e2m1"
    plain = back(moe_tiles.unpack_codes(codes, kind), order, rows)[:, : cols // 2]
    byte, points, gain = _unscaled(fmt, scale, group, zero, dtype)
    outs = [
        None if value is None else back(value, order, rows)[:, : cols // group]
        for value in (byte, points)
    ]
    assert outs[0] is not None
    return plain, outs[0], outs[1], gain


def _unscaled(
    fmt: str, scale: Tensor, group: int, zero: bool, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None, float]:
    """Return scales and zeros [rows, blocks] of a matrix, and the gain of its global scale."""
    if fmt == "int4":
        assert dtype is not None, "int4 scales have a dtype"
        parts = 2 if zero else 1
        values = moe_tiles.unpack_scales(scale.contiguous().view(dtype), group, parts)
        points = values[..., 1].to(torch.uint8) if zero else None
        return values[..., 0].float(), points, 1.0
    byte = moe_tiles.unpack_scales(scale, group)[..., 0]
    if fmt == "nvfp4":
        return moe_tiles.e4m3_inverse().to(byte.device)[byte.long()], None, 1.0
    # b' stands for 2^(b' - 237), an E8M0 byte for 2^(byte - 127): small ones need a shift
    used = byte[byte > 0]
    apart = moe_tiles.E8M0_TOP - E8M0_BIAS
    shift = max(0, apart - int(used.min())) if used.numel() else 0
    plain = (byte.int() - apart + shift).clamp(0).to(torch.uint8)
    return plain, None, 2.0**-shift


def back(value: Tensor, order: Tensor, rows: int) -> Tensor:
    """Return the rows of a matrix that lie in ``order``."""
    out = value.new_empty((rows, value.shape[1]))
    real = order >= 0
    out[order[real]] = value[real]
    return out
