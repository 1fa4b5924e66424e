"""Operand bytes to numbers: the packing formats of PTX ISA 9.7.16.10.4.

In shared memory f8f6f4 and mxf8f6f4 read 4- and 6-bit elements packed within 16-byte chunks: 16
elements fill the first 8 or 12 bytes, the rest is padding (what TMA's 16U4_ALIGN16B and
16U6_ALIGN16B write). In tensor memory each such element has a byte of its own: 6-bit codes in bits
0-5, e2m1 in bits 2-5 (as in mma.sync's .e2m1 operands; the manual's Figure 199 is a picture). mxf4
and mxf4nvf4 pack pairs, the even element low.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockscale.emulator import formats

CHUNK = 16  # bytes, and elements of 4 or 6 bits
E2M1_SHIFT = 2  # bits below an e2m1 code in its byte of tensor memory
_PACKED_PAIRS = ("mxf4", "mxf4nvf4")
_WIDE = {"f16": "<u2", "tf32": "<u4"}


def from_shared(
    raw: NDArray[np.uint8], kind: str, fmt: str, major: str = "K"
) -> NDArray[np.float64]:
    """Return float64 [rows, K] from bytes [rows, row_bytes] gathered with `tile_offsets`."""
    if kind in _WIDE:
        return formats.decode(fmt, np.ascontiguousarray(raw).view(_WIDE[kind]))
    if kind in _PACKED_PAIRS:
        return formats.table(fmt)[split_nibbles(raw)]
    if formats.BITS[fmt] == 8:
        return formats.table(fmt)[raw]
    chunks = raw if major == "K" else raw.T
    codes = unpack_chunks(chunks, formats.BITS[fmt])
    return formats.table(fmt)[codes if major == "K" else codes.T]


def from_tensor_memory(words: NDArray[np.uint32], kind: str, fmt: str) -> NDArray[np.float64]:
    """Return float64 [..., K] from words [..., words] of A in tensor memory."""
    raw = np.ascontiguousarray(words, dtype="<u4").view(np.uint8)
    if kind in _WIDE:
        return formats.decode(fmt, raw.view(_WIDE[kind]))
    if kind in _PACKED_PAIRS:
        return formats.table(fmt)[split_nibbles(raw)]
    if fmt == "e2m1":
        return formats.table(fmt)[raw >> E2M1_SHIFT & 0xF]
    if formats.BITS[fmt] == 6:
        return formats.table(fmt)[raw & 0x3F]
    return formats.table(fmt)[raw]


def split_nibbles(raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return [..., 2 * bytes]: the low nibble of each byte, then its high one."""
    out = np.empty((*raw.shape, 2), np.uint8)
    np.bitwise_and(raw, 0xF, out=out[..., 0])
    np.right_shift(raw, 4, out=out[..., 1])
    return out.reshape(*raw.shape[:-1], -1)


def unpack_chunks(raw: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Return codes [..., bytes]: 16 codes of 4 or 6 bits from the front of each 16-byte chunk."""
    chunks = np.ascontiguousarray(raw).reshape(*raw.shape[:-1], -1, CHUNK)
    if bits == 4:
        codes = split_nibbles(chunks[..., : CHUNK // 2])
    else:
        triples = chunks[..., : CHUNK * 6 // 8].reshape(*chunks.shape[:-1], -1, 3).astype(np.uint32)
        word = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
        codes = np.stack([word >> shift & 0x3F for shift in (0, 6, 12, 18)], axis=-1)
    return codes.astype(np.uint8).reshape(raw.shape)
