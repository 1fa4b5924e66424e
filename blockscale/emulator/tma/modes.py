"""Names and numbers of the tensor map's enumerations (cuda.h, CUtensorMap*_enum).

Every mode is accepted as the number of cuda.h, as the full name (``CU_TENSOR_MAP_SWIZZLE_128B``) or
as its tail (``SWIZZLE_128B``, ``128B``); upper or lower case.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeVar


class DataType(IntEnum):
    """CUtensorMapDataType."""

    UINT8 = 0
    UINT16 = 1
    UINT32 = 2
    INT32 = 3
    UINT64 = 4
    INT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT32_FTZ = 10
    TFLOAT32 = 11
    TFLOAT32_FTZ = 12
    U4_ALIGN8B = 13
    U4_ALIGN16B = 14
    U6_ALIGN16B = 15


class Interleave(IntEnum):
    """CUtensorMapInterleave."""

    NONE = 0
    B16 = 1
    B32 = 2


class Swizzle(IntEnum):
    """CUtensorMapSwizzle."""

    NONE = 0
    B32 = 1
    B64 = 2
    B128 = 3
    B128_ATOM_32B = 4
    B128_ATOM_32B_FLIP_8B = 5
    B128_ATOM_64B = 6


class L2Promotion(IntEnum):
    """CUtensorMapL2promotion: a hint, without effect here."""

    NONE = 0
    B64 = 1
    B128 = 2
    B256 = 3


class OobFill(IntEnum):
    """CUtensorMapFloatOOBfill: what a load puts where the box leaves the tensor."""

    NONE = 0
    NAN_REQUEST_ZERO_FMA = 1


Mode = TypeVar("Mode", bound=IntEnum)

# What cuda.h writes before the tail that tells the modes of one enumeration apart.
_PREFIXES: dict[type[IntEnum], tuple[str, ...]] = {
    DataType: ("CU_TENSOR_MAP_DATA_TYPE_", "CU_TENSOR_MAP_", "DATA_TYPE_"),
    Interleave: ("CU_TENSOR_MAP_INTERLEAVE_", "INTERLEAVE_"),
    Swizzle: ("CU_TENSOR_MAP_SWIZZLE_", "SWIZZLE_"),
    L2Promotion: ("CU_TENSOR_MAP_L2_PROMOTION_", "L2_PROMOTION_"),
    OobFill: ("CU_TENSOR_MAP_FLOAT_OOB_FILL_", "FLOAT_OOB_FILL_", "OOB_FILL_"),
}
_BITS = {
    DataType.UINT8: 8,
    DataType.UINT16: 16,
    DataType.FLOAT16: 16,
    DataType.BFLOAT16: 16,
    DataType.UINT64: 64,
    DataType.INT64: 64,
    DataType.FLOAT64: 64,
    DataType.U4_ALIGN8B: 4,
    DataType.U4_ALIGN16B: 4,
    DataType.U6_ALIGN16B: 6,
}
FLOATS = frozenset(
    {
        DataType.FLOAT16,
        DataType.FLOAT32,
        DataType.FLOAT64,
        DataType.BFLOAT16,
        DataType.FLOAT32_FTZ,
        DataType.TFLOAT32,
        DataType.TFLOAT32_FTZ,
    }
)
# Sub-byte types that shared memory holds in 16-byte groups (PTX ISA 5.5.1.1: .b4x16_p64,
# .b6x16_p32).
PADDED = frozenset({DataType.U4_ALIGN16B, DataType.U6_ALIGN16B})
SUBBYTE = PADDED | {DataType.U4_ALIGN8B}
# Bytes of one row of the pattern within which 16-byte chunks (or larger atoms) change places.
SPAN = {Swizzle.NONE: 0, Swizzle.B32: 32, Swizzle.B64: 64} | {
    mode: 128 for mode in Swizzle if mode >= Swizzle.B128
}
# tensormap.replace.elemtype numbers the types differently from cuda.h (PTX ISA, Table 33).
PTX_ELEMTYPE = (
    *(DataType(number) for number in range(8)),
    DataType.FLOAT32_FTZ,
    DataType.FLOAT64,
    DataType.BFLOAT16,
    *(DataType(number) for number in range(11, 16)),
)


def bits(dtype: DataType) -> int:
    """Bits of one element in global memory."""
    return _BITS.get(dtype, 32)


def spelling(mode: IntEnum) -> str:
    """The mode's name as cuda.h writes it, without the enumeration's prefix."""
    name = mode.name
    if isinstance(mode, DataType):
        return "16" + name if mode in SUBBYTE else name
    if isinstance(mode, L2Promotion) and mode:
        return "L2_" + name[1:] + "B"
    if name[0] == "B" and name[1].isdigit():
        number, _, rest = name[1:].partition("_")
        return f"{number}B" + (f"_{rest}" if rest else "")
    return name


def parse(enum: type[Mode], value: object, what: str) -> Mode:
    """The member of `enum` that `value` names by number or by any of its spellings."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(
            f"TensorMap: {what}={value!r} is a {type(value).__name__}; "
            "give the name or the number that cuda.h uses"
        )
    if isinstance(value, int):
        if value in tuple(enum):
            return enum(value)
    else:
        text = value.strip().upper()
        for prefix in _PREFIXES[enum]:
            text = text.removeprefix(prefix)
        for mode in enum:
            if text in (spelling(mode), mode.name, str(int(mode))):
                return mode
    names = ", ".join(spelling(mode) for mode in enum)
    raise ValueError(
        f"TensorMap: {what}={value!r} is not in cuda.h's enumeration; use one of {names}"
    )
