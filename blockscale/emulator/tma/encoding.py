"""The 128 bytes that stand for a tensor map in memory, and the edits of tensormap.replace.

NVIDIA's encoding is opaque and documented nowhere; this one is ours. Kernels may only copy the
bytes and edit fields (PTX ISA 5.5.8, 9.7.9.26), so no right kernel can see the difference.
"""

from __future__ import annotations

import struct
from functools import lru_cache

from blockscale.emulator.errors import IllegalOperation
from blockscale.emulator.tma.modes import (
    PTX_ELEMTYPE,
    DataType,
    Interleave,
    L2Promotion,
    OobFill,
    Swizzle,
    spelling,
)
from blockscale.emulator.tma.tiling import MAX_ELEMENT_STRIDE, MAX_RANK, Tiling, aligned

SIZE = 128  # bytes of a tensor map (CU_TENSOR_MAP_NUM_QWORDS * 8)
_MAGIC = b"bTM1"
# magic, rank, dtype, interleave, swizzle width, swizzle atomicity, fill, L2 promotion, address,
# 4 strides (bytes), 5 dimensions, 5 box sizes, 5 element strides.
_LAYOUT = struct.Struct("<4s7BxxxxxQ4Q5Q5I5B7x")
_ATOMS = ("16B", "32B", "32B_FLIP_8B", "64B")  # tensormap.replace.swizzle_atomicity, Table 33
_WIDTHS = (Swizzle.NONE, Swizzle.B32, Swizzle.B64, Swizzle.B128)


def _split(swizzle: Swizzle) -> tuple[int, int]:
    """(swizzle_mode, swizzle_atomicity) as tensormap.replace numbers them."""
    return (3, swizzle - 3) if swizzle >= Swizzle.B128 else (int(swizzle), 0)


def encode(tiling: Tiling, address: int) -> bytes:
    """The 128 bytes of a map at `address`."""

    def padded(values: tuple[int, ...], size: int) -> tuple[int, ...]:
        return values + (0,) * (size - len(values))

    width, atom = _split(tiling.swizzle)
    modes = (tiling.rank, tiling.dtype, tiling.interleave, width, atom, tiling.oob_fill)
    steps = tuple(min(max(step, 0), 255) for step in tiling.element_strides)
    return _LAYOUT.pack(
        _MAGIC,
        *modes,
        tiling.l2_promotion,
        address,
        *padded(tiling.global_strides, 4),
        *padded(tiling.global_dim, 5),
        *padded(tiling.box_dim, 5),
        *padded(steps, 5),
    )


@lru_cache(maxsize=4096)
def decode(data: bytes) -> tuple[Tiling, int]:
    """(tiling, address) of an encoded map, checked by every rule of cuTensorMapEncodeTiled."""
    if len(data) != SIZE or data[:4] != _MAGIC:
        raise IllegalOperation(
            f"tensor map: the {len(data)} bytes at the operand (first: {data[:8].hex()}) are no "
            "tensor map (PTX ISA 5.5.8); pass the address of an encoded TensorMap in .param, "
            ".const or .global memory"
        )
    _, rank, dtype, interleave, width, atom, fill, promotion, address, *rest = _LAYOUT.unpack(data)
    strides, dims, boxes, steps = rest[:4], rest[4:9], rest[9:14], rest[14:]
    if atom and width != 3:
        raise IllegalOperation(
            f"tensor map: swizzle_atomicity {_ATOMS[atom]} with a swizzle of "
            f"{spelling(_WIDTHS[width])} (PTX ISA 5.5.7, Table 14: only the 128B swizzle has "
            "atomicities); replace swizzle_mode by 3 too"
        )
    try:
        tiling = Tiling(
            DataType(dtype),
            tuple(dims[:rank]),
            tuple(strides[: rank - 1]),
            tuple(boxes[:rank]),
            tuple(steps[:rank]),
            Interleave(interleave),
            Swizzle(width + atom),
            OobFill(fill),
            L2Promotion(promotion),
        )
        return tiling, aligned(tiling, address)
    except ValueError as error:
        raise IllegalOperation(f"{error} (tensor map as tensormap.replace left it)") from None


def replace(data: bytes, field: str, value: int, ordinal: int = 0) -> bytes:
    """The map with one field edited: `tensormap.replace.tile.<field>` (PTX ISA 9.7.9.26).

    128 zero bytes are a blank map: kernels build whole maps by replacing every field. What the
    edits leave is checked when a copy reads it (`decode`), because single edits may be
    inconsistent.
    """
    if len(data) == SIZE and not any(data):
        data = _LAYOUT.pack(_MAGIC, 1, *(0,) * 7, *(0,) * 4, *(0,) * 5, *(0,) * 5, *(1,) * 5)
    if len(data) != SIZE or data[:4] != _MAGIC:
        raise IllegalOperation(
            f"tensormap.replace.tile.{field}: the bytes at the address (first: {data[:8].hex()}) "
            "are no tensor map; copy one there first, or 128 zero bytes"
        )
    if field not in _FIELDS:
        raise IllegalOperation(
            f"tensormap.replace.tile.{field}: no such field (PTX ISA 9.7.9.26); "
            f"use one of {', '.join(_FIELDS)}"
        )
    first, count, lowest, highest = _FIELDS[field]
    if not 0 <= ordinal < count:
        raise IllegalOperation(
            f"tensormap.replace.tile.{field}: ordinal {ordinal} is not within 0..{count - 1}; "
            "dimensions count from the innermost one"
        )
    if not lowest <= value <= highest:
        raise IllegalOperation(
            f"tensormap.replace.tile.{field}: new value {value} is not within {lowest}..{highest} "
            "(PTX ISA 9.7.9.26, Table 33); see the table"
        )
    values = list(_LAYOUT.unpack(data))
    if field == "rank":
        value += 1
    elif field == "elemtype":
        value = PTX_ELEMTYPE[value]
    values[first + ordinal] = value
    return _LAYOUT.pack(*values)


# Position in _LAYOUT, number of ordinals, lowest and highest value of each field.
_FIELDS = {
    "global_address": (8, 1, 0, (1 << 64) - 1),
    "rank": (1, 1, 0, MAX_RANK - 1),
    "box_dim": (18, 5, 0, (1 << 32) - 1),
    "global_dim": (13, 5, 0, (1 << 32) - 1),
    "global_stride": (9, 4, 0, (1 << 64) - 1),
    "element_stride": (23, 5, 1, MAX_ELEMENT_STRIDE),
    "elemtype": (2, 1, 0, 15),
    "interleave_layout": (3, 1, 0, 2),
    "swizzle_mode": (4, 1, 0, 3),
    "swizzle_atomicity": (5, 1, 0, 3),
    "fill_mode": (6, 1, 0, 1),
}
