"""f32, f32x2 and f64 arithmetic (PTX ISA 9.7.3), rounded once in every direction.

mad.f32 and mad.f64 are fma, as since sm_20.  add, sub and mul without .rnd round to nearest; a
compiler may contract them, the emulator does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blockscale.emulator.alu.core import Alu, Mods, form
from blockscale.emulator.alu.exact import (
    add32,
    canonical,
    clamp01,
    flush,
    fma32,
    mul32,
    narrow,
    some,
)
from blockscale.emulator.alu.integer import lanes, packed
from blockscale.emulator.alu.wide import add64, div64, fma64, mul64, sqrt64

_UFUNC = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}


def _div32(a: Any, b: Any, mode: str) -> Any:
    # A quotient of two 24-bit numbers is never closer than 2**-49 to a tie or a float.
    return a / b if mode in ("rn", "") else narrow(np.divide(a, b, dtype="f8"), mode)


def _rcp32(a: Any, mode: str) -> Any:
    return _div32(np.float32(1), a, mode)


def _sqrt32(a: Any, mode: str) -> Any:
    return np.sqrt(a) if mode in ("rn", "") else narrow(np.sqrt(a, dtype="f8"), mode)


F32: dict[str, Callable[..., Any]] = {
    "add": add32,
    "sub": lambda a, b, mode: add32(a, -b, mode),
    "mul": mul32,
    "fma": fma32,
    "mad": fma32,
    "div": _div32,
    "rcp": _rcp32,
    "sqrt": _sqrt32,
}
F64: dict[str, Callable[..., Any]] = {
    "add": add64,
    "sub": lambda a, b, mode: add64(a, -b, mode),
    "mul": mul64,
    "fma": fma64,
    "mad": fma64,
    "div": div64,
    "rcp": lambda a, mode: div64(np.float64(1), a, mode),
    "sqrt": sqrt64,
}
COUNT = {"add": 2, "sub": 2, "mul": 2, "div": 2, "fma": 3, "mad": 3, "rcp": 1, "sqrt": 1}


def arithmetic(base: str, mods: Mods) -> Callable[..., Any]:
    """One f32 operation with rounding, .ftz and .sat; NaN is canonical."""
    op, mode, ftz, sat = F32[base], mods["rnd"] or "rn", mods["ftz"], mods["sat"]

    def fn(*ins: Any) -> Any:
        if ftz:
            ins = tuple(flush(x) for x in ins)
        r = op(*ins, mode)
        if ftz:
            r = flush(r)
        return clamp01(r) if sat else canonical(r)

    return fn


def _f32(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    ins = ("f4",) * COUNT[base]
    if base in _UFUNC and mods["rnd"] in ("", "rn") and not (mods["ftz"] or mods["sat"]):
        return Alu(("f4",), ins, _UFUNC[base], ufunc=True)
    return Alu(("f4",), ins, arithmetic(base, mods))


def _f32x2(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    op = arithmetic(base, mods)

    def fn(*ins: Any) -> Any:
        return packed(op(*[lanes(x, "f4") for x in ins]), "u8")

    return Alu(("u8",), ("u8",) * COUNT[base], fn)


def _f64(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    ins, mode = ("f8",) * COUNT[base], mods["rnd"] or "rn"
    if base in _UFUNC and mode == "rn":
        return Alu(("f8",), ins, _UFUNC[base], ufunc=True)
    if base == "sqrt" and mode == "rn":
        return Alu(("f8",), ins, np.sqrt, ufunc=True)
    return Alu(("f8",), ins, lambda *x: F64[base](*x, mode))


def _sign(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """abs and neg."""
    dtype = "f4" if types[0] == "f32" else "f8"
    op = np.abs if base == "abs" else np.negative
    if mods["ftz"]:
        return Alu((dtype,), (dtype,), lambda a: op(flush(a)))
    return Alu((dtype,), (dtype,), op, ufunc=True)


def extreme(a: Any, b: Any, largest: bool, nan: bool, dtype: str) -> Any:
    """min or max: -0 < +0; a number wins over NaN, or with .NaN the canonical NaN does."""
    if nan:
        r = np.maximum(a, b) if largest else np.minimum(a, b)
    else:
        r = np.fmax(a, b) if largest else np.fmin(a, b)
    zero = r == 0
    if some(zero):
        # The sign of a zero that NumPy returns is that of whichever operand comes first.
        wanted = np.signbit(a) != largest
        found = (a == 0) & wanted | (b == 0) & (np.signbit(b) != largest)
        sign = np.where(found, not largest, largest)
        r = np.where(zero, np.where(sign, -np.abs(r), np.abs(r)), r)
    return canonical(r, dtype)


def min_max(base: str, mods: Mods, dtype: str) -> Callable[..., Any]:
    """min and max of f32, f64 or f16: .ftz, .NaN, .xorsign.abs, .abs (three inputs)."""
    largest, nan = base == "max", bool(mods["NaN"])
    xorsign, absolute = bool(mods["xorsign"]), bool(mods["abs"])

    def fn(*ins: Any) -> Any:
        if mods["ftz"]:
            ins = tuple(flush(x, dtype) for x in ins)
        values = [np.abs(x) for x in ins] if absolute else list(ins)
        r = values[0]
        for other in values[1:]:
            r = extreme(r, other, largest, nan, dtype)
        if xorsign:
            negative = np.signbit(ins[0]) ^ np.signbit(ins[1])
            r = np.where(negative & (r == r), -r, r)
        return r

    return fn


def _min_max(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    dtype = "f4" if types[0] == "f32" else "f8"
    return Alu((dtype,), (dtype, dtype), min_max(base, mods, dtype))


def _min_max3(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    return Alu(("f4",), ("f4",) * 3, min_max(base, mods, "f4"))


def _register() -> None:
    form("add sub mul", "f32", "rnd? ftz? sat?", _f32)
    form("fma mad", "f32", "rnd ftz? sat?", _f32)
    form("div rcp sqrt", "f32", "rnd ftz?", _f32)
    form("add sub mul", "f32x2", "rnd? ftz?", _f32x2)
    form("fma", "f32x2", "rnd ftz?", _f32x2)
    form("add sub mul", "f64", "rnd?", _f64)
    form("fma mad div rcp sqrt", "f64", "rnd", _f64)
    form("abs neg", "f32", "ftz?", _sign)
    form("abs neg", "f64", "", _sign)
    form("min max", "f32", "ftz? NaN?", _min_max)
    form("min max", "f32", "ftz? NaN? xorsign abs", _min_max)
    form("min max", "f32", "ftz? NaN? abs?", _min_max3, n_src=3)
    form("min max", "f64", "", _min_max)


_register()
