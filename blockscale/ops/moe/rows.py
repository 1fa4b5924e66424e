"""Matrices in the layout "tiles64e", whose codes kernels decode to E4M3 too: MXFP4, INT4.

INT4 has the codes of "tiles64" (`ops.moe.tiles`, those of MoE layers) and its scales in bfloat16,
groups of `BYTE_GROUPS`, and each row has a factor, its global scale: kernels multiply
code - zero, which E4M3 holds, and sums of groups with scales.

MXFP4 is "tiles64" but for three things:

* Bits of the codes lie as `CODE_BITS` ["e2m1e"] says: two bytes of a word select four of eight
  numbers, and signs are in place (``native/moe/moe_bytes.cuh``).
* A scale byte is ``b - top + 237``, ``top`` the largest byte b of a block of this row that is not
  all zeros; where b is the least one, it is at least `LEAST`.  Blocks of zeros have `LEAST`.
* Each row has a factor, its global scale times 2^(top - 127).

So in units of the row's factor times 2^-6 a block's weights are code * 2^d, d = 6 - (top - b) from
-5 to 6: 0.5 * 2^-5 = 2^-6 to 6 * 2^6 = 384 are normal numbers of E4M3 (2^-6 to 448), exactly, and
with d = 7 it has no 6 * 2^7.  Subnormal numbers, multiples of 2^-9, would allow for d from -8 on:
0.5 * 2^-8 and 1.5 * 2^-8 are 1 and 3 of them.  But kernels make a scale's table with one
multiplication and one addition, of normal numbers alone.
"""

from __future__ import annotations

import torch

from blockscale.ops.moe import tiles
from blockscale.specs.plans.moe import BYTE_GROUPS

Tensor = torch.Tensor

SCALES = torch.bfloat16
"""Dtype of scales and zeros of int4."""

KIND = "e2m1e"
"""Of `tiles.CODE_BITS`."""

SPREAD = 11
"""The most by which exponents of a row's blocks may differ."""

LEAST = tiles.E8M0_TOP - SPREAD
"""The least scale byte."""

BLOCK = 32


def check_form(where: str, fmt: str, group: int) -> None:
    """ValueError unless the layout holds weights of this format and group that are not rounded."""
    if fmt == "nvfp4" or group not in BYTE_GROUPS.get(fmt, ()):
        what = f"int4 in groups of {group}" if fmt == "int4" else fmt
        raise ValueError(
            f"{where}: layout='tiles64e' is for mxfp4 weights, int4 in groups of 64 or 128, and "
            f"nvfp4 ones with rounded=True, not for {what}; leave layout out"
        )


def pack_int4(
    codes: Tensor, scale: Tensor, zero: Tensor | None, order: Tensor
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of an int4 matrix as `tiles.pack_int4` does, in `SCALES`."""
    zeros = None if zero is None else zero.to(SCALES)
    return tiles.pack_int4(codes, scale.to(SCALES), zeros, order)


def ranges(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest and the least scale byte [rows] int32 of blocks that are not all zeros.

    Of rows without any they are both 127.

    Args:
        codes: [rows, K / 2] uint8, E2M1.
        scale: [rows, K / 32] E8M0 bytes.
    """
    byte = scale.view(torch.uint8).int()
    live = (codes.view(*byte.shape, BLOCK // 2) & 0x77).ne(0).any(-1)
    most, least = byte.where(live, -1).amax(-1), byte.where(live, 256).amin(-1)
    dead = most < 0
    return most.masked_fill_(dead, 127), least.masked_fill_(dead, 127)


def pack(codes: Tensor, scale: Tensor, top: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [R / 64, K / 64, 2048] and scales [R / 64, K / 64, 128] of a matrix.

    Args:
        codes: [rows, K / 2] uint8, E2M1.
        scale: bytes [rows, K / 32].
        top: the first of `ranges`.
        order: the matrix's row at each row of the layout; -1: padding.
    """
    byte = scale.view(torch.uint8).int() - top[:, None] + tiles.E8M0_TOP
    return tiles.pack_bytes(codes, byte.clamp(LEAST, tiles.E8M0_TOP).to(torch.uint8), order, KIND)


def unpack(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [R, K / 2] and scale bytes [R, K / 32] of `pack`, rows in the layout's order."""
    return tiles.unpack_codes(codes, KIND), tiles.unpack_scales(scale, BLOCK)[..., 0]


def factors(factor: Tensor, top: Tensor | None, order: Tensor) -> Tensor:
    """Return the factors [R] float32 of a matrix's rows; of padding 1.

    Args:
        factor: the global scale of each row [rows].
        top: the first of `ranges`; None: of int4.
        order: the matrix's row at each row of the layout; -1: padding.
    """
    value = factor if top is None else torch.ldexp(factor, top - 127)
    each = value.index_select(0, order.clamp(min=0))
    return each.masked_fill_(order < 0, 1.0)


def linear(scale: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return E8M0 bytes [rows, K / 32], relative to one global scale, and that, of rows' factors.

    Factors [rows] are powers of two times one number, at most 2^110 apart.
    """
    most = factor[factor.abs().argmax()]
    _, exponent = torch.frexp(factor)
    _, largest = torch.frexp(most)
    below = (exponent - largest)[:, None]
    byte = (scale.int() + below).clamp(0).to(torch.uint8)
    return byte, torch.ldexp(most, torch.tensor(127 - tiles.E8M0_TOP, device=most.device))
