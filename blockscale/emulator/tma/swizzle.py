"""Shared-memory swizzles of tensor copies (PTX ISA 5.5.7 "Swizzling Modes").

Hardware exchanges chunks by address bits: the number of the 128-byte line, counted from shared
address 0, is XORed into the chunk number. The manual's "swizzle base offset" (dstMem / 128 % 8 and
so on) says the same, so the pattern starts at its first row only where dstMem is aligned to the
pattern's period.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blockscale.emulator.tma.modes import Swizzle

# mode: (lines until the pattern repeats, log2 of the bytes that stay together)
_PATTERN = {
    Swizzle.B32: (2, 4),
    Swizzle.B64: (4, 4),
    Swizzle.B128: (8, 4),
    Swizzle.B128_ATOM_32B: (4, 5),
    Swizzle.B128_ATOM_32B_FLIP_8B: (4, 5),
    Swizzle.B128_ATOM_64B: (2, 6),
}
PERIOD = 1024  # bytes after which every pattern repeats
_LINE_BITS = 7


def swizzled(address: NDArray[np.int64], mode: Swizzle) -> NDArray[np.int64]:
    """Where the byte that belongs at shared `address` without a swizzle lies with it."""
    if mode == Swizzle.NONE:
        return address
    lines, chunk = _PATTERN[mode]
    line = address >> _LINE_BITS
    moved = address ^ ((line & (lines - 1)) << chunk)
    if mode == Swizzle.B128_ATOM_32B_FLIP_8B:
        moved = moved ^ ((line & 1) << 3)  # every other line swaps the 8-byte halves of 16 bytes
    return moved


def granule(mode: Swizzle) -> int:
    """Bytes that no swizzle of this mode takes apart, at most 16."""
    return 8 if mode == Swizzle.B128_ATOM_32B_FLIP_8B else 16
