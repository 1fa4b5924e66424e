"""Rules of the copies without a tensor map: cp.async.bulk, its reductions and cp.async.

PTX ISA 9.7.9.25.3.1, 9.7.9.25.4.1, 9.7.9.25.4.2.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blockscale.emulator.errors import IllegalOperation

BULK_ALIGNMENT = 16  # of both addresses and of the size of bulk copies
_ASYNC_SIZES = {"ca": (4, 8, 16), "cg": (16,)}


def check_bulk(opcode: str, destination: int | None, source: int, size: int) -> None:
    """Alignment and size of cp.async.bulk, cp.reduce.async.bulk and .prefetch (no destination)."""
    for name, value in (("destination", destination), ("source", source)):
        if value is not None and value % BULK_ALIGNMENT:
            raise IllegalOperation(
                f"{opcode}: {name} address {value:#x} is not a multiple of 16 (PTX ISA "
                "9.7.9.25.4); align the buffer to 16 bytes"
            )
    if size % BULK_ALIGNMENT or not 0 <= size < 1 << 32:
        raise IllegalOperation(
            f"{opcode}: size {size} is not a multiple of 16 (PTX ISA 9.7.9.25.4); "
            "copy whole 16 bytes"
        )


def check_ignored(opcode: str, left: int, right: int) -> None:
    """ignoreBytesLeft and ignoreBytesRight of .ignore_oob."""
    for name, value in (("ignoreBytesLeft", left), ("ignoreBytesRight", right)):
        if not 0 <= value <= 15:
            raise IllegalOperation(
                f"{opcode}: {name} is {value} (PTX ISA 9.7.9.25.4.1: 0 to 15); "
                "move the address by 16 bytes instead"
            )


def masked_offsets(size: int, byte_mask: int) -> NDArray[np.int64]:
    """.cp_mask: offsets of the bytes that are copied; bit i stands for byte i of every 16."""
    bits = np.array([byte_mask >> bit & 1 for bit in range(16)], bool)
    return np.flatnonzero(np.resize(bits, size)).astype(np.int64)


def check_async(
    opcode: str, cache: str, destination: int, source: int, size: int, source_size: int
) -> None:
    """cp.async of one thread; `source_size` is `size` where the operand is missing.

    A source of 0 bytes is not read, so its address may be anything.
    """
    if size not in _ASYNC_SIZES[cache]:
        raise IllegalOperation(
            f"{opcode}: cp-size {size} (PTX ISA 9.7.9.25.3.1: {_ASYNC_SIZES[cache]} with "
            f".{cache}); split the copy"
        )
    if not 0 <= source_size <= size:
        raise IllegalOperation(
            f"{opcode}: src-size {source_size} is more than cp-size {size} (PTX ISA 9.7.9.25.3.1); "
            "pass at most cp-size, the rest is filled with zeros"
        )
    for name, value in (("destination", destination), ("source", source)):
        if value % size and (name == "destination" or source_size):
            raise IllegalOperation(
                f"{opcode}: {name} address {value:#x} is no multiple of cp-size {size} "
                "(PTX ISA 6.4.1.1: natural alignment); align it or copy less at a time"
            )
