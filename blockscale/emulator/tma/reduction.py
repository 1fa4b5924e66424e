"""The reductions of cp.reduce.async.bulk and cp.reduce.async.bulk.tensor, element by element.

PTX ISA 9.7.9.25.4.2 and 9.7.9.25.5.3. Additions of floats round to nearest even; .f16 and .bf16
keep subnormals (.noftz); .f32 of the bulk form flushes subnormal inputs and results to zero of
their sign.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blockscale.emulator.errors import IllegalOperation
from blockscale.emulator.tma.modes import DataType, spelling
from blockscale.emulator.tma.tiling import Tiling

Bytes = NDArray[np.uint8]

_INTEGER = {"u32": np.uint32, "s32": np.int32, "b32": np.uint32} | {
    "u64": np.uint64,
    "s64": np.int64,
    "b64": np.uint64,
}
_HALF = ("f16", "bf16")
_HALF_NAN = np.uint16(0x7FFF)
_FLOAT_NAN = np.uint32(0x7FFFFFFF)
_DOUBLE_NAN = np.uint64(0x7FF8000000000000)
# Element types of a tensor map's data type; what is missing has no reduction.
_TENSOR = {
    DataType.UINT32: "u32",
    DataType.INT32: "s32",
    DataType.UINT64: "u64",
    DataType.INT64: "s64",
    DataType.FLOAT16: "f16",
    DataType.BFLOAT16: "bf16",
    DataType.FLOAT32: "f32",
    DataType.FLOAT32_FTZ: "f32",
}
_TENSOR_RULE = {
    "add": ("u32", "s32", "u64", "f32", "f16", "bf16"),
    "min": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "inc": ("u32",),
    "and": ("u32", "s32", "u64", "s64"),
}
_TENSOR_RULE |= {"max": _TENSOR_RULE["min"], "dec": _TENSOR_RULE["inc"]}
_TENSOR_RULE |= {"or": _TENSOR_RULE["and"], "xor": _TENSOR_RULE["and"]}


def tensor_element(tiling: Tiling, operation: str) -> tuple[str, bool]:
    """(element type, flush subnormals) of a tensor reduction; its type comes from the map.

    Only FLOAT32_FTZ flushes: the manual says of the bulk form alone that .f32 does.
    """
    element = _TENSOR.get(tiling.dtype, "")
    if element not in _TENSOR_RULE[operation]:
        raise IllegalOperation(
            f"cp.reduce.async.bulk.tensor: .{operation} of dtype {spelling(tiling.dtype)} (PTX ISA "
            f"9.7.9.25.5.3: only {', '.join(_TENSOR_RULE[operation])}); encode the map with a "
            "dtype of the list"
        )
    return element, tiling.dtype == DataType.FLOAT32_FTZ


def combine(operation: str, element: str, old: Bytes, source: Bytes, *, ftz: bool = False) -> Bytes:
    """The new bytes of memory [same shape as `old`]; shapes end in whole elements.

    `ftz`: .f32 additions flush subnormals (True for cp.reduce.async.bulk.add.f32).
    """
    shape = old.shape
    left, right = (np.ascontiguousarray(data).reshape(-1) for data in (old, source))
    with np.errstate(all="ignore"):
        if element in _INTEGER:
            kind = _INTEGER[element]
            result = _integer(operation, left.view(kind), right.view(kind))
        elif element in _HALF:
            result = _half(operation, element, left.view(np.uint16), right.view(np.uint16))
        elif element == "f32":
            result = _add_float(left.view(np.uint32), right.view(np.uint32), ftz)
        else:
            total = left.view(np.float64) + right.view(np.float64)
            result = np.where(np.isnan(total), _DOUBLE_NAN, total.view(np.uint64))
    return result.view(np.uint8).reshape(shape)


def _integer(operation: str, old: NDArray, source: NDArray) -> NDArray:
    if operation == "inc":
        return np.where(old >= source, 0, old + old.dtype.type(1)).astype(old.dtype)
    if operation == "dec":
        wraps = (old == 0) | (old > source)
        return np.where(wraps, source, old - old.dtype.type(1)).astype(old.dtype)
    table = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    return table[operation](old, source)


def _flush(bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return np.where(bits & 0x7F800000 == 0, bits & np.uint32(0x80000000), bits).astype(np.uint32)


def _add_float(old: NDArray[np.uint32], source: NDArray[np.uint32], ftz: bool) -> NDArray:
    if ftz:
        old, source = _flush(old), _flush(source)
    total = old.view(np.float32) + source.view(np.float32)
    bits = np.where(np.isnan(total), _FLOAT_NAN, total.view(np.uint32)).astype(np.uint32)
    return _flush(bits) if ftz else bits


def _half(operation: str, element: str, old: NDArray, source: NDArray) -> NDArray:
    """16-bit floats as bits: sums are exact enough in float32 (24 >= 2 * 11 + 2 bits)."""
    infinity = 0x7C00 if element == "f16" else 0x7F80
    nan_old, nan_source = ((bits & 0x7FFF) > infinity for bits in (old, source))
    if operation == "add":
        if element == "f16":
            bits = (old.view(np.float16) + source.view(np.float16)).view(np.uint16)
        else:
            wide = [(side.astype(np.uint32) << 16).view(np.float32) for side in (old, source)]
            word = (wide[0] + wide[1]).view(np.uint32).astype(np.uint64)
            bits = ((word + 0x7FFF + ((word >> 16) & 1)) >> 16).astype(np.uint16)
            nan_old = nan_old | ((word & 0x7FFFFFFF) > 0x7F800000)  # inf - inf
        bad = (bits & 0x7FFF) > infinity
        return np.where(nan_old | nan_source | bad, _HALF_NAN, bits).astype(np.uint16)
    # Sign and magnitude as an ascending integer, -0 below +0.
    keys = [np.where(side >> 15, 0xFFFF - side, side | 0x8000) for side in (old, source)]
    takes_old = keys[0] < keys[1] if operation == "min" else keys[0] > keys[1]
    chosen = np.where(nan_source | (takes_old & ~nan_old), old, source)
    return np.where(nan_old & nan_source, _HALF_NAN, chosen).astype(np.uint16)
