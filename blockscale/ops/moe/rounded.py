"""NVFP4 matrices in the layout "tiles64e": weights rounded to E4M3, with a factor for each row.

A code times its block's E4M3 scale has up to six bits, E4M3 four.  Words of codes are those of
`ops.moe.rows`; scales lie as those of nvfp4 in "tiles64".  In units of the row's factor times 2^-6
a block's scale is E4M3 itself:

* Bits 6..0 of its byte are the byte A of the scale, `LEAST` to `MOST`: 2^-5 to 72.  The row's
  factor is its global scale times a power of two, with which the largest scale of a block that is
  not all zeros is at least 80 / 2 = 40.  So 0.5 A is a normal number and 6 A is 448 at most.
* 0.5, 1, 2 and 4 times it are exact: bytes A - 8, A, A + 8, A + 16.  1.5 times it is rounded to
  nearest, ties to even, B = A + 4, or A + 5 where A's mantissa is 1 to 5; and 3 and 6 times it are
  B + 8 and B + 16.  Bit 7 of the byte is set where it is A + 4.

The error at 1.5, 3 and 6 is at most 1/21 of the value (of 2.625, which becomes 2.5), and none where
A's mantissa is 0, 2 or 4.

A block whose scale is less than 2^-5, that is 2^-10.3 of the row's largest or less, is changed
before: its scale is multiplied with the power of two that brings it to 2^-5 and above, and its
codes are divided by this and rounded to the nearest codes, ties to even ones (`SHRUNK`).  The error
is at most a quarter of the new scale, 2^-4 * 15 / 16 / 4, which is less than 1/2700 of the row's
largest scale; what is below that becomes zero.

Everything here runs on the device of its arguments.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from blockscale.ops.moe import tiles
from blockscale.ops.moe.rows import KIND

Tensor = torch.Tensor

BLOCK = 16

LEAST, MOST = 0x10, 0x69
"""Scale bytes: 2^-5, whose half is E4M3's least normal number, and 72, of which 6 times is 448."""

OCTAVE = 8
"""Of bytes: twice the number."""

DOWN = 0x80
"""Bit of a scale byte: 1.5 times the scale is A + 4, not A + 5."""

BYTE = 0x7F
"""Bits of a scale byte that are the scale's."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

AT_ONCE = 1 << 24
"""Codes whose values are in memory in one go, 4 bytes each."""

GONE = 5
"""Powers of two from which all codes become zero: 6 / 32 is less than 0.25."""


def _nearest(value: float) -> int:
    """Return the code of the magnitude nearest to ``value``, of two the even one."""
    return min(range(8), key=lambda code: (abs(E2M1[code] - value), code % 2))


SHRUNK = tuple(tuple(_nearest(m / 2**octaves) for m in E2M1) for octaves in range(GONE + 1))
"""What codes 0 to 7 become by the power of two that their block's scale is multiplied with."""


class Rounded(NamedTuple):
    """A matrix of which kernels make rounded weights.

    Attributes:
        codes: [rows, K / 2] uint8.
        byte: of scales, [rows, K / 16] uint8.
        octaves: of the powers of two in rows' factors, [rows] int32.
    """

    codes: Tensor
    byte: Tensor
    octaves: Tensor


def rounded(codes: Tensor, scale: Tensor) -> Rounded:
    """Return codes and scale bytes of a matrix [rows, K], rows in their order.

    Args:
        codes: [rows, K / 2] uint8, E2M1.
        scale: [rows, K / 16] E4M3 bytes from 0 to 0x7E.
    """
    blocks = codes.view(*scale.shape, BLOCK // 2)
    live = (blocks & 0x77).ne(0).any(-1) & (scale != 0)
    level = tiles.e4m3_table().to(scale.device)[scale.long()].int()
    top = level.where(live, -1).amax(-1)
    octaves = (top - MOST + OCTAVE - 1) >> 3
    octaves.masked_fill_(top < 0, 0)
    byte = (level - OCTAVE * octaves[:, None]).where(live, LEAST)
    up = (LEAST - byte + OCTAVE - 1).clamp(min=0) >> 3
    byte += OCTAVE * up
    made = blocks.masked_fill((scale == 0)[..., None], 0)
    if bool(up.any()):
        each = up.clamp(max=GONE)[up > 0][:, None]
        of_byte = _shrunk().to(codes.device)
        made[up > 0] = of_byte[each.long(), blocks[up > 0].long()]
    mantissa = byte & 7
    down = (mantissa < 1) | (mantissa > 5)
    stored = (byte | torch.where(down, DOWN, 0)).to(torch.uint8)
    return Rounded(made.view(codes.shape), stored, octaves)


@cache
def _shrunk() -> Tensor:
    """Return [6, 256] uint8: `SHRUNK` of both codes of a byte, which keep their signs."""
    byte = torch.arange(256)
    table = torch.tensor(SHRUNK, dtype=torch.uint8)
    low, high = table[:, byte & 7], table[:, byte >> 4 & 7]
    return (low | high << 4) | (byte & 0x88).to(torch.uint8)


def values(of: Rounded) -> Tensor:
    """Return the weights [rows, K] float32 that kernels multiply, without the rows' factors."""
    exact = _times(of.codes, (of.byte & BYTE).view(torch.float8_e4m3fn).float())
    return exact.to(torch.float8_e4m3fn).float() * 2.0**-6


def _times(codes: Tensor, scale: Tensor) -> Tensor:
    """Return codes [rows, K / 2] times float32 scales [rows, K / 16], [rows, K] float32."""
    table = torch.tensor((*E2M1, *(-value for value in E2M1)), device=codes.device)
    pairs = torch.stack((codes & 15, codes >> 4), -1).view(*scale.shape, BLOCK)
    return (table[pairs.long()] * scale[..., None]).view(len(codes), -1)


def squares(of: Rounded, codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return [rows] float64 sums of squares of what rounding changed, and of the exact weights.

    Both without the global scales of the rows.

    Args:
        of: what `rounded` made of the others.
        codes, scale: as `rounded` takes them.
    """
    step = max(1, AT_ONCE // max(1, 2 * codes.shape[1]))
    apart, whole = [], []
    for at in range(0, len(codes), step):
        part = slice(at, at + step)
        exact = _times(codes[part], scale[part].view(torch.float8_e4m3fn).float())
        made = Rounded(of.codes[part], of.byte[part], of.octaves[part])
        found = torch.ldexp(values(made), made.octaves[:, None])
        apart.append((found - exact).double().square().sum(-1))
        whole.append(exact.double().square().sum(-1))
    return torch.cat(apart), torch.cat(whole)


def relative(apart: Tensor, whole: Tensor, factor: Tensor) -> float:
    """Return ``||rounded - exact|| / ||exact||`` of `squares` of rows with these global scales.

    Of a weight of zeros it is 0.
    """
    weight = factor.double().square()
    most = float((whole * weight).sum())
    return (float((apart * weight).sum()) / most) ** 0.5 if most else 0.0


def pack(of: Rounded, order: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [R / 64, K / 64, 2048] and scales [R / 64, K / 64, 256] of a matrix.

    ``order``: the matrix's row at each row of the layout; -1: padding.
    """
    return tiles.pack_bytes(of.codes, of.byte, order, KIND)


def unpack(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [R, K / 2] and scale bytes [R, K / 16] of `pack`, rows in the layout's order."""
    return tiles.unpack_codes(codes, KIND), tiles.unpack_scales(scale, BLOCK)[..., 0]


def factors(factor: Tensor, octaves: Tensor, order: Tensor) -> Tensor:
    """Return the factors [R] float32 of a matrix's rows; of padding 1.

    Args:
        factor: the global scale of each row [rows].
        octaves: of `Rounded`.
        order: the matrix's row at each row of the layout; -1: padding.
    """
    each = torch.ldexp(factor, octaves).index_select(0, order.clamp(min=0))
    return each.masked_fill_(order < 0, 1.0)


def linear(byte: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 bytes [rows, K / 16], relative to one global scale, and that, of rows' factors.

    Those of weights that `rounded` has not changed are the exact ones, up to a power of two that
    the global scale takes.  Factors [rows] are powers of two times one number.
    """
    most = factor[factor.abs().argmax()]
    _, exponent = torch.frexp(factor)
    _, largest = torch.frexp(most)
    level = (byte & BYTE).int() + OCTAVE * (exponent - largest)[:, None]
    up = (_level_of(tiles.E4M3_LARGEST) - level.amax()) >> 3
    return _scales(level + OCTAVE * up), torch.ldexp(most, -up)


def by_row(byte: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same where each row keeps a global scale of its own [rows]."""
    up = (_level_of(tiles.E4M3_LARGEST) - MOST) >> 3
    return _scales((byte & BYTE).int() + OCTAVE * up), torch.ldexp(factor, torch.tensor(-up))


def _level_of(byte: int) -> int:
    return int(tiles.e4m3_table()[byte])


def _scales(level: Tensor) -> Tensor:
    """Return E4M3 bytes of scale bytes of "tiles64", those below the least one of the least."""
    return tiles.e4m3_inverse().to(level.device)[level.clamp(min=tiles.E4M3_ZERO).long()]
