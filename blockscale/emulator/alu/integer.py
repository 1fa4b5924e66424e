"""Integer arithmetic and extended precision (PTX ISA 9.7.1 and 9.7.2).

Division by zero is "unspecified" in the manual; here quotient and remainder are all ones, as the
code that ptxas makes gives, and the report has a warning.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from blockscale.emulator.alu.core import DTYPES, Alu, Mods, form

ALL = "u16 u32 u64 s16 s32 s64"
_BITS = {"1": 8, "2": 16, "4": 32, "8": 64}
_WIDER = {"u2": "u4", "i2": "i4", "u4": "u8", "i4": "i8"}


def bits_of(dtype: str) -> int:
    """The width of a NumPy dtype in bits."""
    return _BITS[dtype[1]]


def lanes(x: Any, dtype: str) -> Any:
    """View packed words as their elements: [n, elements] (the lowest bits first)."""
    parts = np.ascontiguousarray(x).view(dtype)
    return parts.reshape(-1, np.dtype(x.dtype).itemsize // parts.itemsize)


def packed(x: Any, dtype: str) -> Any:
    """View elements [n, elements] as packed words [n]."""
    return np.ascontiguousarray(x).reshape(-1).view(dtype)


def saturate(wide: Any, dtype: str) -> Any:
    """Clamp integers of a wider dtype to the range of `dtype`."""
    info = np.iinfo(dtype)
    return np.clip(wide, info.min, info.max).astype(dtype)


def _low(op: Any) -> Any:
    def build(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
        dtype = DTYPES[types[0]]
        return Alu((dtype,), (dtype, dtype), op, ufunc=True)

    return build


def _vector(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """add, sub, min, max, neg of packed integers, with .sat and .relu."""
    element = types[0][0].replace("s", "i") + ("2" if types[0].endswith("x2") else "1")
    op = {"add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum}[base]

    def fn(a: Any, b: Any) -> Any:
        x, y = lanes(a, element), lanes(b, element)
        if mods["sat"]:
            return packed(saturate(op(x, y, dtype="i4"), element), "u4")
        r = op(x, y)
        return packed(np.maximum(r, 0) if mods["relu"] else r, "u4")

    return Alu(("u4",), ("u4", "u4"), fn)


def _saturating(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    dtype = DTYPES[types[0]]
    op = {"add": np.add, "sub": np.subtract}[base]
    return Alu((dtype,), (dtype, dtype), lambda a, b: saturate(op(a, b, dtype="i8"), dtype))


def _relu(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    op = {"min": np.minimum, "max": np.maximum}[base]
    return Alu(("i4",), ("i4", "i4"), lambda a, b: np.maximum(op(a, b), 0))


def _unary(op: Any) -> Any:
    def build(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
        dtype = DTYPES[types[0]]
        return Alu((dtype,), (dtype,), op, ufunc=True)

    return build


def high(a: Any, b: Any, dtype: str) -> Any:
    """The upper half of a full product."""
    if dtype in _WIDER:
        wide = np.multiply(a, b, dtype=_WIDER[dtype])
        return (wide >> bits_of(dtype)).astype(dtype)
    x, y = a.view("u8"), b.view("u8")
    mask = np.uint64(0xFFFFFFFF)
    xl, xh, yl, yh = x & mask, x >> 32, y & mask, y >> 32
    low, m1, m2 = xl * yl, xh * yl, xl * yh
    middle = (low >> 32) + (m1 & mask) + (m2 & mask)
    top = xh * yh + (m1 >> 32) + (m2 >> 32) + (middle >> 32)
    if dtype == "i8":
        zero = np.uint64(0)
        top = top - np.where(a < 0, y, zero) - np.where(b < 0, x, zero)
    return top.view(dtype)


def _product(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """mul and mad: .lo, .hi, .wide."""
    dtype = DTYPES[types[0]]
    wide = _WIDER.get(dtype, dtype)
    if mods["wide"]:
        if base == "mul":
            return Alu((wide,), (dtype, dtype), lambda a, b: np.multiply(a, b, dtype=wide))
        return Alu((wide,), (dtype, dtype, wide), lambda a, b, c: np.multiply(a, b, dtype=wide) + c)
    if mods["hilo"] == "lo":
        if base == "mul":
            return Alu((dtype,), (dtype, dtype), np.multiply, ufunc=True)
        return Alu((dtype,), (dtype,) * 3, lambda a, b, c: a * b + c)
    if base == "mul":
        return Alu((dtype,), (dtype, dtype), lambda a, b: high(a, b, dtype))
    return Alu((dtype,), (dtype,) * 3, lambda a, b, c: high(a, b, dtype) + c)


def _mad_hi_sat(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    def fn(a: Any, b: Any, c: Any) -> Any:
        return saturate((np.multiply(a, b, dtype="i8") >> 32) + c, "i4")

    return Alu(("i4",), ("i4",) * 3, fn)


def _product24(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """mul24 and mad24: bits 0..31 or 16..47 of the product of the low 24 bits."""
    dtype = DTYPES[types[0]]
    wide = _WIDER[dtype]
    shift = 0 if mods["hilo"] == "lo" else 16

    def product(a: Any, b: Any) -> Any:
        x, y = (a << 8) >> 8, (b << 8) >> 8
        return (np.multiply(x, y, dtype=wide) >> shift).astype(dtype)

    if base == "mul24":
        return Alu((dtype,), (dtype,) * 2, product)
    if mods["sat"]:
        return Alu(
            (dtype,),
            (dtype,) * 3,
            lambda a, b, c: saturate(np.add(product(a, b), c, dtype="i8"), "i4"),
        )
    return Alu((dtype,), (dtype,) * 3, lambda a, b, c: product(a, b) + c)


def _sad(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    dtype = DTYPES[types[0]]
    return Alu((dtype,), (dtype,) * 3, lambda a, b, c: c + np.where(a < b, b - a, a - b))


def _divide(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """div and rem: truncated, the remainder has the dividend's sign."""
    dtype = DTYPES[types[0]]
    unsigned = "u" + dtype[1]
    ones = np.array(-1, f"i{dtype[1]}").view(dtype)[()]
    op = np.floor_divide if base == "div" else np.remainder

    def fn(a: Any, b: Any) -> Any:
        if dtype[0] == "u":
            r = op(a, b)
        else:
            ua, ub = np.abs(a).view(unsigned), np.abs(b).view(unsigned)
            r = op(ua, ub).view(dtype)
            r = np.where((a < 0) ^ (b < 0) if base == "div" else a < 0, -r, r)
        return np.where(b == 0, ones, r)

    return Alu((dtype,), (dtype, dtype), fn, divides=True)


def _dot(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """dp4a and dp2a (PTX ISA 9.7.1, dp4a, dp2a): c + the sum of products, wrapping."""
    out = "u4" if types == ("u32", "u32") else "i4"
    element = [t[0].replace("s", "i") for t in types]
    start = 2 if mods["hilo"] == "hi" else 0

    def fn(a: Any, b: Any, c: Any) -> Any:
        if base == "dp4a":
            x, y = lanes(a, element[0] + "1"), lanes(b, element[1] + "1")
        else:
            x, y = lanes(a, element[0] + "2"), lanes(b, element[1] + "1")[:, start : start + 2]
        total = np.multiply(x, y, dtype="i8").sum(axis=1) + c
        return total.astype(out)

    return Alu((out,), tuple(DTYPES[t] for t in types) + (out,), fn)


def _carry_add(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """add.cc, addc, sub.cc, subc (PTX ISA 9.7.2): carry-out, or borrow-out of a subtraction."""
    dtype = DTYPES[types[0]]
    unsigned = "u" + dtype[1]
    reads, writes = base.endswith("c"), bool(mods["cc"])
    minus = base.startswith("sub")

    def fn(a: Any, b: Any, carry: Any = False) -> Any:
        x, y = a.view(unsigned), b.view(unsigned)
        d = x - y if minus else x + y
        out = (x < y) if minus else (d < x)
        if reads:
            one = np.asarray(carry).astype(unsigned)
            e = d - one if minus else d + one
            out = out | ((d < one) if minus else (e < one))
            d = e
        return (d.view(dtype), out) if writes else d.view(dtype)

    return Alu((dtype,), (dtype, dtype), fn, reads_cc=reads, writes_cc=writes)


def _carry_mad(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """mad.cc and madc (PTX ISA 9.7.2)."""
    dtype = DTYPES[types[0]]
    reads, writes = base == "madc", bool(mods["cc"])
    inner = _carry_add("addc" if reads else "add", types, mods).fn
    is_low = mods["hilo"] == "lo"

    def fn(a: Any, b: Any, c: Any, *carry: Any) -> Any:
        return inner(a * b if is_low else high(a, b, dtype), c, *carry)

    return Alu((dtype,), (dtype,) * 3, fn, reads_cc=reads, writes_cc=writes)


def _differences(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """vabsdiff4 (PTX ISA 9.7.17.9) of all four bytes, without a second operation: c is not read."""

    def fn(a: Any, b: Any, c: Any) -> Any:
        x, y = (lanes(np.asarray(v, "u4"), "u1").astype("i4") for v in np.broadcast_arrays(a, b))
        return packed(np.abs(x - y).astype("u1"), "u4")

    return Alu(("u4",), ("u4", "u4", "u4"), fn)


def _register() -> None:
    form("add", ALL, "", _low(np.add))
    form("sub", ALL, "", _low(np.subtract))
    form("min", ALL, "", _low(np.minimum))
    form("max", ALL, "", _low(np.maximum))
    form("min max", "s32", "relu", _relu)
    form("add sub", "s32", "sat", _saturating)
    form("add", "u32", "sat", _saturating, isa=9.2)
    form("add", "u16x2 s16x2", "", _vector)
    form("add", "u16x2 s16x2", "sat", _vector, isa=9.2)
    form("add sub", "u8x4 s8x4", "sat?", _vector, isa=9.2)
    form("min max", "u16x2", "", _vector)
    form("min max", "s16x2", "relu?", _vector)
    form("min max", "u8x4", "", _vector, isa=9.2)
    form("min max", "s8x4", "relu?", _vector, isa=9.2)
    form("mul mad", ALL, "hilo", _product)
    form("mul mad", "u16 u32 s16 s32", "wide", _product)
    form("mad", "s32", "hi sat", _mad_hi_sat)
    form("mul24 mad24", "u32 s32", "hilo", _product24)
    form("mad24", "s32", "hi sat", _product24)
    form("sad", ALL, "", _sad)
    form("vabsdiff4", "u32.u32.u32", "", _differences)
    form("div rem", ALL, "", _divide)
    form("abs", "s16 s32 s64", "", _unary(np.abs))
    form("neg", "s16 s32 s64", "", _unary(np.negative))
    form("dp4a", "u32.u32 u32.s32 s32.u32 s32.s32", "", _dot)
    form("dp2a", "u32.u32 u32.s32 s32.u32 s32.s32", "hilo", _dot)
    form("add sub", "u32 s32 u64 s64", "cc", _carry_add)
    form("addc subc", "u32 s32 u64 s64", "cc?", _carry_add)
    form("mad", "u32 s32 u64 s64", "hilo cc", _carry_mad)
    form("madc", "u32 s32 u64 s64", "hilo cc?", _carry_mad)


_register()
