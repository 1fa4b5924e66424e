"""Small number formats of PTX as tables: code -> float64, and float64 -> code.

PTX ISA 9.2, sections 5.2.3 "Alternate Floating-Point Data Formats" and 9.7.14.3 "Block Scaling":
sign, exponent and mantissa bits, the highest bit first.  e2m1, e2m3 and e3m2 have neither infinity
nor NaN; e4m3 has NaN only (0x7f, 0xff); e5m2, f16 and bf16 have both; ue8m0 is 2**(code - 127),
0xff is NaN; ue4m3 is e4m3 without a sign: seven bits in a byte whose top bit is ignored.
tf32 is a 32-bit register of which the low 13 bits are ignored.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

BITS: dict[str, int] = {
    "e2m1": 4,
    "e2m3": 6,
    "e3m2": 6,
    "e4m3": 8,
    "e5m2": 8,
    "ue8m0": 8,
    "ue4m3": 8,
    "f16": 16,
    "bf16": 16,
    "tf32": 32,
    "f32": 32,
    "f64": 64,
    "s8": 8,
    "u8": 8,
    "s4": 4,
    "u4": 4,
    "b1": 1,
}
"""Bits of one element in storage (tf32: of its register)."""

INTEGERS = frozenset({"s8", "u8", "s4", "u4", "b1"})
TF32_MASK = 0xFFFFE000
CANONICAL_NAN: dict[str, Any] = {
    "f16": np.uint16(0x7FFF),
    "bf16": np.uint16(0x7FFF),
    "f32": np.uint32(0x7FFFFFFF),
}

# exponent bits, mantissa bits, exponent bias, highest codes: "finite", "nan" (one NaN), "ieee"
_MINIFLOATS = {
    "e2m1": (2, 1, 1, "finite"),
    "e2m3": (2, 3, 1, "finite"),
    "e3m2": (3, 2, 3, "finite"),
    "e4m3": (4, 3, 7, "nan"),
    "e5m2": (5, 2, 15, "ieee"),
    "bf16": (8, 7, 127, "ieee"),
}


def _minifloat(exp_bits: int, man_bits: int, bias: int, top: str) -> NDArray[np.float64]:
    """Every value of a signed minifloat in the order of its codes: f8[2 ** bits]."""
    codes = np.arange(1 << (exp_bits + man_bits))
    exponent = codes >> man_bits
    mantissa = (codes & ((1 << man_bits) - 1)) / (1 << man_bits)
    values = np.where(
        exponent == 0,
        np.ldexp(mantissa, 1 - bias),
        np.ldexp(1 + mantissa, exponent - bias),
    )
    if top == "nan":
        values[-1] = np.nan
    elif top == "ieee":
        values[exponent == (1 << exp_bits) - 1] = np.nan
        values[((1 << exp_bits) - 1) << man_bits] = np.inf
    return np.concatenate([values, -values])


@cache
def table(fmt: str) -> NDArray[np.float64]:
    """Every value of a format of at most 16 bits, by code: read-only f8[2 ** bits]."""
    if fmt in _MINIFLOATS:
        values = _minifloat(*_MINIFLOATS[fmt])
    elif fmt == "f16":
        values = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float64)
    elif fmt == "ue8m0":
        values = np.ldexp(1.0, np.arange(256) - 127)
        values[255] = np.nan
    elif fmt == "ue4m3":
        values = np.tile(table("e4m3")[:128], 2)
    elif fmt in INTEGERS:
        values = np.arange(1 << BITS[fmt], dtype=np.float64)
        if fmt[0] == "s":
            values[len(values) // 2 :] -= len(values)
    else:
        raise ValueError(f"formats.table: there is no table of {fmt!r}; it has one of {list(BITS)}")
    values.flags.writeable = False
    return values


def decode(fmt: str, codes: Any) -> NDArray[np.float64]:
    """The exact values of codes (any unsigned integer array, bits above the format ignored)."""
    codes = np.asarray(codes)
    if fmt in ("tf32", "f32"):
        bits = codes.astype(np.uint32)
        if fmt == "tf32":
            bits = bits & np.uint32(TF32_MASK)
        return bits.view(np.float32).astype(np.float64)
    if fmt == "f64":
        return codes.astype(np.uint64).view(np.float64)
    values = table(fmt)
    if codes.dtype.itemsize * 8 > BITS[fmt]:
        codes = codes & codes.dtype.type(len(values) - 1)
    return values[codes]


@cache
def _rounding(fmt: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The finite non-negative values and the midpoints between neighbours: exact in float64."""
    values = table(fmt)
    values = values[: len(values) // (1 if fmt == "ue8m0" else 2)]
    values = values[np.isfinite(values)]
    return values, (values[:-1] + values[1:]) / 2


def encode(fmt: str, values: Any) -> NDArray[Any]:
    """The codes of float64 values, each rounded once, to nearest even.

    f16, bf16 and f32 (uint16, uint16, uint32) overflow to infinity and write NaN as 0x7fff or
    0x7fffffff; formats of at most 8 bits (uint8) saturate to the largest finite value and write NaN
    as 0x7f (ue8m0: 0xff), or, having none, as the largest value.  Negative values of unsigned
    formats give 0.
    """
    x = np.asarray(values, dtype=np.float64)
    nan = np.isnan(x)
    with np.errstate(all="ignore"):
        if fmt == "f16":
            return np.where(nan, CANONICAL_NAN[fmt], x.astype(np.float16).view(np.uint16))
        if fmt == "f32":
            return np.where(nan, CANONICAL_NAN[fmt], x.astype(np.float32).view(np.uint32))
    finite, midpoints = _rounding(fmt)
    size = np.where(nan, 0.0, np.abs(x))
    code = np.searchsorted(midpoints, size, side="left")
    on_tie = (code < len(midpoints)) & (size == midpoints[np.minimum(code, len(midpoints) - 1)])
    code = code + (on_tie & (code % 2 == 1))
    if fmt == "bf16":
        # Half an ulp above the largest finite value rounds to infinity.
        code = np.where(size >= finite[-1] + (finite[-1] - finite[-2]) / 2, len(finite), code)
        code = np.where(nan, CANONICAL_NAN[fmt], code | (np.signbit(x) << 15))
        return code.astype(np.uint16)
    if fmt in ("ue8m0", "ue4m3"):
        code = np.where(x < 0, 0, code)
        return np.where(nan, 0xFF if fmt == "ue8m0" else 0x7F, code).astype(np.uint8)
    sign = np.signbit(x).astype(np.int64) << (BITS[fmt] - 1)
    no_number = 0x7F if fmt in ("e4m3", "e5m2") else len(finite) - 1
    return np.where(nan, no_number, code | sign).astype(np.uint8)
