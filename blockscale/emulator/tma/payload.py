"""Units of bytes moved between flat memories and [units, unit] arrays, and their conversions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]
# One machine word per unit: NumPy copies 16 bytes fastest as a complex number, bit by bit.
_WORD: dict[int, np.dtype] = {
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}
_WORD[16] = np.dtype(np.complex128)


def spread(starts: Ints, unit: int) -> Ints:
    """Every byte of units that begin at `starts` [units * unit]."""
    return (starts[:, None] + np.arange(unit, dtype=np.int64)).ravel()


def _words(memory: Bytes, starts: Ints, unit: int) -> NDArray[np.generic] | None:
    """`memory` as words of `unit` bytes, if the units lie on word boundaries."""
    word = _WORD.get(unit)
    if word is None or starts.size == 0 or np.bitwise_or.reduce(starts) & (unit - 1):
        return None
    whole = memory[: memory.size // unit * unit]
    return whole.view(word) if starts.max() < whole.size else None


def gather(memory: Bytes, starts: Ints, unit: int) -> Bytes:
    """memory[starts[i] + k] as [units, unit]."""
    words = _words(memory, starts, unit)
    if words is None:
        return memory[spread(starts, unit)].reshape(-1, unit)
    return words[starts // unit].view(np.uint8).reshape(-1, unit)


def scatter(memory: Bytes, starts: Ints, data: Bytes) -> None:
    """memory[starts[i] + k] = data[i, k]."""
    unit = data.shape[1]
    words = _words(memory, starts, unit)
    if words is None:
        memory[spread(starts, unit)] = data.ravel()
    else:
        words[starts // unit] = np.ascontiguousarray(data).view(words.dtype).ravel()


def round_tf32(data: Bytes) -> Bytes:
    """Loads of TFLOAT32 round to 10 mantissa bits, to nearest even; NaN becomes 0x7FFFE000.

    PTX ISA 5.5.1 names the type and no rounding; this is what an sm_120 device was measured to do,
    for TFLOAT32_FTZ too, and it leaves the OOB fill alone.
    """
    shape = data.shape
    words = np.ascontiguousarray(data).reshape(-1).view(np.uint32).astype(np.uint64)
    rounded = (words + 0xFFF + ((words >> 13) & 1)) & 0xFFFFE000
    nan = (words & 0x7FFFFFFF) > 0x7F800000
    result = np.where(nan, 0x7FFFE000, rounded).astype(np.uint32)
    return result.view(np.uint8).reshape(shape)


def pack_b6(data: Bytes) -> Bytes:
    """[n, 16] bytes to [n, 12]: the low 6 bits of each byte (PTX ISA 5.5.1.1, .b6p2x16)."""
    lanes = (data & 0x3F).astype(np.uint32).reshape(-1, 4)
    words = lanes[:, 0] | lanes[:, 1] << 6 | lanes[:, 2] << 12 | lanes[:, 3] << 18
    return words[:, None].view(np.uint8).reshape(-1, 4)[:, :3].reshape(-1, 12)
