"""What `blockscale inspect` tells of a weight: the range of its values, the state of its scales.

Of NVFP4 also what rounding it to E4M3 would change (`blockscale.ops.moe.rounded`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch

from blockscale.base.formats import QUANTIZED
from blockscale.base.sizes import ceil_div
from blockscale.checkpoints.weight import E8M0_NAN, Weight
from blockscale.ops.moe import rounded, tiles

Tensor = torch.Tensor

_ROW_VALUES = 1 << 21
_WARN_SHARE = 0.01
"""Share of degraded scales from which on a warning is due: sound exports have far fewer."""
_E4M3_MAGNITUDE, _E4M3_NAN, _E4M3_NORMAL = 0x7F, 0x7F, 0x08
_MAGNITUDES = 0x77
"""Bits of a byte of two E2M1 codes without their signs."""

COUNTS = ("values", "not_finite", "blocks", "zero", "empty", "subnormal", "lost", "nan")
SUMS = ("changed", "squares")


@dataclass
class Stats:
    """Range of the finite values, and counts of values and block scales.

    ``zero``, ``subnormal`` and ``lost`` are block scales: equal to zero; so small that they have
    lost bits (E8M0: 2^-127, where exponents were cut off); zero although codes are not.  Blocks
    without any code but zero count as ``zero`` only, and, if their scale is zero too, as ``empty``:
    nothing was lost there.  ``changed`` and ``squares``: of nvfp4, sums of squares of what rounding
    would change, and of the values.
    """

    low: float = inf
    high: float = -inf
    values: int = 0
    not_finite: int = 0
    blocks: int = 0
    zero: int = 0
    empty: int = 0
    subnormal: int = 0
    lost: int = 0
    nan: int = 0
    changed: float = 0.0
    squares: float = 0.0

    @property
    def rounding(self) -> float | None:
        """``||rounded - exact|| / ||exact||`` of nvfp4; None: it is of another format, or zero."""
        return (self.changed / self.squares) ** 0.5 if self.squares else None

    def add(self, other: Stats) -> None:
        """Count the weights of ``other``, too."""
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        for name in (*COUNTS, *SUMS):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def warnings(self) -> list[str]:
        """Return what is wrong, in sentences without a subject; nothing: all is well."""
        found = []
        if self.not_finite:
            found.append(f"{self.not_finite} of {self.values} values are NaN or infinite")
        if self.nan:
            found.append(f"{self.nan} of {self.blocks} block scales are NaN or infinite")
        if self.lost:
            found.append(f"{self.lost} block scales are zero, but codes below them are not")
        for what, number in (("zero", self.zero - self.empty), ("subnormal", self.subnormal)):
            share = number / max(1, self.blocks)
            if share >= _WARN_SHARE:
                found.append(
                    f"{share:.1%} of the block scales are {what}: the converter has degraded them, "
                    "probably by folding the global scale into them; convert the original again"
                )
        return found


def stats(weight: Weight) -> Stats:
    """Return the statistics of one weight, a few rows at a time."""
    packed, raw = weight.packed, weight.block_scale
    if packed is None:
        assert weight.data is not None
        found = Stats(values=weight.data.numel())
        if not weight.scaled:
            for part in weight.data.reshape(-1).split(_ROW_VALUES):
                _range(found, part)
            return found
    else:
        found = Stats(values=2 * packed.numel())
    cols = max(1, weight.shape[-1]) if weight.shape else 1
    step = max(1, _ROW_VALUES // cols)
    for start in range(0, ceil_div(found.values, cols), step):
        some = slice(start, start + step)
        values = weight.rows(some.start, some.stop)
        _range(found, values)
        if packed is not None and raw is not None:
            codes, scale = (value.reshape(-1, value.shape[-1])[some] for value in (packed, raw))
            _scales(found, weight.fmt, scale, codes)
            if weight.fmt == "nvfp4":
                _rounding(found, codes, scale, values)
    if packed is None and raw is not None:
        assert weight.data is not None
        empty = not (weight.data.view(torch.uint8) & _E4M3_MAGNITUDE).any()
        _scales(found, weight.fmt, raw, None, empty)
    return found


def _range(found: Stats, values: Tensor) -> None:
    if not values.numel() or values.dtype in (torch.bool, torch.complex64):
        return
    values = values.float() if values.dtype != torch.float64 else values
    low, high = (float(v) for v in torch.aminmax(values))
    if not (abs(low) < inf and abs(high) < inf):  # NaN compares false
        finite = values[values.isfinite()]
        found.not_finite += values.numel() - finite.numel()
        if not finite.numel():
            return
        low, high = float(finite.min()), float(finite.max())
    found.low, found.high = min(found.low, low), max(found.high, high)


def _rounding(found: Stats, packed: Tensor, raw: Tensor, values: Tensor) -> None:
    """Add what rounding changes; nothing of rows with scales that no kernel takes."""
    codes, scale = packed.view(torch.uint8), raw.view(torch.uint8)
    if int(scale.amax()) > tiles.E4M3_LARGEST:
        return
    changed, squares = rounded.squares(rounded.rounded(codes, scale), codes, scale)
    length = values.reshape(len(codes), -1).double().square().sum(-1)
    found.changed += float((changed / squares.where(squares > 0, 1) * length).sum())
    found.squares += float(length.sum())


def _scales(
    found: Stats, fmt: str, raw: Tensor, packed: Tensor | None, empty: bool = False
) -> None:
    # zeros of int4 need not be the code 8: every block may be in use, as are those of fp8
    used, known = torch.ones_like(raw, dtype=torch.bool), fmt in QUANTIZED
    nothing = torch.full_like(raw, empty, dtype=torch.bool)
    if packed is not None:
        codes = packed.view(*raw.shape, -1)
        nothing = (codes == codes[..., :1]).all(-1)  # one value, which may be zero
        if known:
            used = (codes & _MAGNITUDES).amax(-1) > 0
            nothing = ~used
    if fmt == "nvfp4":
        magnitude = raw.view(torch.uint8) & _E4M3_MAGNITUDE
        zero, nan = magnitude == 0, magnitude == _E4M3_NAN
        small = ~zero & (magnitude < _E4M3_NORMAL)
    elif raw.dtype == torch.uint8:
        zero, nan = torch.zeros_like(used), raw == E8M0_NAN
        small = (raw == 0) & known
    else:
        zero, nan = raw == 0, ~raw.isfinite()
        small = ~zero & (raw.abs() < torch.finfo(raw.dtype).tiny)
    found.blocks += raw.numel()
    found.zero += int(zero.sum())
    found.empty += int((zero & nothing).sum())
    found.subnormal += int((small & used).sum())
    found.nan += int(nan.sum())
    found.lost += int((zero & used).sum()) if known else 0
