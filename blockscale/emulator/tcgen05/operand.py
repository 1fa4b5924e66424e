"""Where an operand of tcgen05.mma, tcgen05.cp or wgmma lies in shared memory (PTX ISA 9.7.16.3).

In units of 16-byte chunks (T elements each) the canonical layouts are, with LBO and SBO in bytes,

    K-major   none  ((8, m), 2)       : ((1, SBO), LBO)     row r, chunk j of K
              32B   ((8, m), 2)       : ((2, SBO), 1)
              64B   ((8, m), 4)       : ((4, SBO), 1)
              128B  ((8, m), 8)       : ((8, SBO), 1)
    MN-major  none  (m, (8, k))       : (SBO, (1, LBO))     chunk i of M or N, index k of K
              32B   ((2, m), (8, k))  : ((1, LBO), (2, SBO))
              64B   ((4, m), (8, k))  : ((1, LBO), (4, SBO))
              128B  ((8, m), (8, k))  : ((1, LBO), (8, SBO))
              128B, 32B atoms ((8, m), (4, k)) : ((1, LBO), (8, SBO))

The swizzle then acts on the bits of the address itself: bits 4-6 are XORed with bits 7-9 (128B),
bits 4-5 with bits 7-8 (64B), bit 4 with bit 7 (32B), bits 5-6 with bits 7-8 (128B with 32B
atomicity). So a start address in the middle of a row, which is how every compiler steps along K,
needs no base offset; a base offset shifts the phase of the pattern, which then starts at an address
with (address >> 7) & 7 == base offset.

Not in the manual's text, taken from CUTLASS (cute/arch/mma_sm100_desc.hpp): the strides of 128B
swizzling with 32B atomicity, and that it is M/N-major only; the manual's Table 54 allows it
K-major, where we use the 128B strides with its own XOR.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from blockscale.emulator.errors import IllegalOperation
from blockscale.emulator.tcgen05.descriptor import ADDRESS_MASK, SmemDescriptor

CHUNK = 16  # bytes: the unit of matrix descriptors and of swizzling
PATTERN = 1024  # bytes after which every swizzle pattern repeats
# swizzle -> (lowest bit changed, number of bits): XORed with as many bits from bit 7 up
XOR_BITS = {"32B": (4, 1), "64B": (4, 2), "128B": (4, 3), "128B_base32B": (5, 2)}

Offsets = NDArray[np.int32]


def tile_offsets(
    descriptor: SmemDescriptor, rows: int, row_bytes: int, bits: int = 8, major: str = "K"
) -> Offsets:
    """Return int32 [rows, row_bytes]: the shared address of every byte of each row, along K.

    `rows` counts along M or N; `row_bytes` is K times the container's bytes (packed e2m1: K / 2).
    `bits` is the container's width, needed where M or N is contiguous (`major` "MN"): element (r,
    k) then has bytes k * bits / 8 and up of row r. Addresses wrap at 18 bits as those of the
    hardware do.
    """
    high = descriptor.start & ~(PATTERN - 1)
    low = _relative(
        descriptor.start - high,
        descriptor.leading,
        descriptor.stride,
        descriptor.base_offset,
        descriptor.swizzle,
        rows,
        row_bytes,
        bits,
        major,
    )
    return (low + np.int32(high)) & np.int32(ADDRESS_MASK)


def swizzle_addresses(address: Offsets, swizzle: str, base_offset: int = 0) -> Offsets:
    """Return the addresses after the swizzle's XOR (PTX ISA 9.7.16.10.6)."""
    if swizzle == "none":
        return address
    bit, count = XOR_BITS[swizzle]
    phase = ((address >> 7) - base_offset) & ((1 << count) - 1)
    return address ^ (phase << bit)


@lru_cache(maxsize=512)
def _relative(
    start: int,
    leading: int,
    stride: int,
    base_offset: int,
    swizzle: str,
    rows: int,
    row_bytes: int,
    bits: int,
    major: str,
) -> Offsets:
    """Return the addresses for a start address below 1024: multiples of it change no XOR."""
    width = 128 if swizzle.startswith("128B") else CHUNK if swizzle == "none" else int(swizzle[:-1])
    if major == "K":
        address = _k_major(leading, stride, width, rows, row_bytes)
    elif major == "MN":
        address = _mn_major(leading, stride, width, swizzle, rows, row_bytes, bits)
    else:
        raise ValueError(f"tile_offsets: major={major!r} is not 'K' or 'MN'")
    result = swizzle_addresses((address + start).astype(np.int32), swizzle, base_offset)
    result.setflags(write=False)
    return result


def _k_major(leading: int, stride: int, width: int, rows: int, row_bytes: int) -> NDArray[np.int64]:
    row = np.arange(rows)[:, None]
    byte = np.arange(row_bytes)[None, :]
    chunk_step = leading if width == CHUNK else CHUNK
    along_k = byte // CHUNK * chunk_step + byte % CHUNK
    return row % 8 * width + row // 8 * stride + along_k


def _mn_major(
    leading: int, stride: int, width: int, swizzle: str, rows: int, row_bytes: int, bits: int
) -> NDArray[np.int64]:
    size = bits // 8
    if size == 0 or row_bytes % size or (rows * size) % CHUNK:
        raise IllegalOperation(
            f"an M/N-major operand of {rows} rows with {bits}-bit elements does not fill 16-byte "
            "chunks (PTX ISA 9.7.16.3); use K-major or a multiple of "
            f"{CHUNK * 8 // max(bits, 1)} rows"
        )
    along_mn = np.arange(rows)[:, None] * size + np.arange(row_bytes)[None, :] % size
    k = np.arange(row_bytes)[None, :] // size
    group = 4 if swizzle == "128B_base32B" else 8
    if width == CHUNK:
        return along_mn // CHUNK * stride + along_mn % CHUNK + k % 8 * CHUNK + k // 8 * leading
    return along_mn // width * leading + along_mn % width + k % group * width + k // group * stride
