"""Half precision and mixed precision (PTX ISA 9.7.4 and 9.7.5): f16, bf16 and their pairs.

f16 add, sub and mul are NumPy's, which go through float32: 24 bits are at least 2 * 11 + 2, so the
second rounding is harmless.  The same holds for bf16 through f32 (a product has 16 bits: f32 rounds
it only where bf16 gives 0); its fma goes through float64 rounded to odd.  NaN results are 0x7fff.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blockscale.emulator.alu.approx import FUNCTIONS
from blockscale.emulator.alu.core import DTYPES, Alu, Mods, form
from blockscale.emulator.alu.exact import (
    NAN16,
    add32,
    canonical,
    clamp01,
    flush,
    fma32,
    narrow,
    odd_sum,
    relu,
    some,
    widen,
)
from blockscale.emulator.alu.integer import lanes, packed
from blockscale.emulator.alu.real import min_max

OOB_NAN = 0x7FF7
"""The NaN with which the tensor copies fill what is out of bounds (measured on sm_120)."""


def round_bf16(x: Any) -> Any:
    """f32 values, exact or rounded to odd, as bf16 bits (u2), to nearest even."""
    bits = np.asarray(x).view("u4")
    r = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("u2")
    nan = x != x
    return np.where(nan, NAN16, r) if some(nan) else r


def odd32(x: Any) -> Any:
    """float64 values, exact or rounded to odd, rounded to odd in f32."""
    r = narrow(x, "rz")
    lost = (r.astype("f8") != x) & (r == r)
    return np.asarray(np.asarray(r).view("u4") | lost).view("f4")


def _f16(base: str) -> Callable[..., Any]:
    def fma(a: Any, b: Any, c: Any) -> Any:
        # f64 loses bits only where one addend is too small to reach a tie of the other.
        return (np.multiply(a, b, dtype="f8") + np.asarray(c, "f8")).astype("f2")

    ops: dict[str, Any] = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": fma}
    return ops[base]


def _bf16(base: str) -> Callable[..., Any]:
    def fma(a: Any, b: Any, c: Any) -> Any:
        return odd32(odd_sum(np.multiply(a, b, dtype="f8"), np.asarray(c, "f8")))

    ops: dict[str, Any] = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": fma}
    return ops[base]


def _oob(bits: tuple[Any, ...]) -> Any:
    """Where an operand is the out-of-bounds NaN."""
    found: Any = False
    for x in bits:
        found = found | ((x.view("u2") & 0x7FFF) == OOB_NAN)
    return found


def scalar(base: str, element: str, mods: Mods) -> Callable[..., Any]:
    """add, sub, mul, fma of f16 (f2) or bf16 (u2) with .ftz, .sat, .relu, .oob."""
    brain = element == "bf16"
    op = _bf16(base) if brain else _f16(base)

    def fn(*ins: Any) -> Any:
        x = tuple(widen(i) for i in ins) if brain else ins
        if mods["ftz"]:
            x = tuple(flush(i, "f2") for i in x)
        r = op(*x)
        if mods["ftz"]:
            r = flush(r, "f2")
        if mods["sat"]:
            r = clamp01(r)
        if mods["relu"]:
            r = relu(r, "f4" if brain else "f2")
        if mods["oob"]:
            r = np.where(_oob(ins), r.dtype.type(0), r)
        return round_bf16(r) if brain else canonical(r, "f2")

    return fn


def on_pairs(op: Callable[..., Any], element: str) -> Callable[..., Any]:
    """An operation of elements as one of words of two."""

    def fn(*ins: Any) -> Any:
        return packed(op(*[lanes(x, element) for x in ins]), "u4")

    return fn


def _arithmetic(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    count = 3 if base == "fma" else 2
    element, pair = types[0].removesuffix("x2"), types[0].endswith("x2")
    op = scalar(base, element, mods)
    if pair:
        return Alu(("u4",), ("u4",) * count, on_pairs(op, DTYPES[element]))
    dtype = DTYPES[element]
    if element == "f16" and base != "fma" and not (mods["ftz"] or mods["sat"]):
        return Alu((dtype,), (dtype,) * count, _f16(base), ufunc=True)
    return Alu((dtype,), (dtype,) * count, op)


def _sign(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """abs and neg: of the sign bits, or of flushed f16 values."""
    dtype, pair = DTYPES[types[0]], types[0].endswith("x2")
    word = "u4" if pair else "u2"
    bits = {"u2": 0x8000, "u4": 0x80008000}[word]
    keep = {"u2": 0x7FFF, "u4": 0x7FFF7FFF}[word]

    def fn(a: Any) -> Any:
        if mods["ftz"]:
            a = packed(flush(lanes(a, "f2"), "f2"), "u4") if pair else flush(a, "f2")
        x = np.asarray(a).view(word)
        return (x & keep if base == "abs" else x ^ bits).view(dtype)

    return Alu((dtype,), (dtype,), fn)


def _min_max(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    element, pair = types[0].removesuffix("x2"), types[0].endswith("x2")
    count = 2
    if element == "f16":
        op = min_max(base, mods, "f2")
    else:
        inner = min_max(base, mods, "f4")

        def op(*ins: Any) -> Any:
            return round_bf16(inner(*[widen(x) for x in ins]))

    if pair:
        return Alu(("u4",), ("u4",) * count, on_pairs(op, DTYPES[element]))
    dtype = DTYPES[element]
    return Alu((dtype,), (dtype,) * count, op)


def _approx(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """tanh and ex2, rounded from float64."""
    element, pair = types[0].removesuffix("x2"), types[0].endswith("x2")
    function = FUNCTIONS[base]

    def op(a: Any) -> Any:
        if element == "f16":
            x = flush(a, "f2") if mods["ftz"] else a
            r = canonical(function(np.asarray(x, "f8")).astype("f2"), "f2")
            return flush(r, "f2") if mods["ftz"] else r
        x = widen(a)
        r = odd32(function(np.asarray(flush(x) if mods["ftz"] else x, "f8")))
        return round_bf16(flush(r) if mods["ftz"] else r)

    if pair:
        return Alu(("u4",), ("u4",), on_pairs(op, DTYPES[element]))
    return Alu((DTYPES[element],), (DTYPES[element],), op)


def _mixed(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """add, sub, fma of f32 with f16 or bf16 operands (PTX ISA 9.7.5)."""
    dtype, mode = DTYPES[types[1]], mods["rnd"] or "rn"

    def wide(x: Any) -> Any:
        return widen(x) if types[1] == "bf16" else np.asarray(x, "f4")

    def fn(*ins: Any) -> Any:
        if base == "fma":
            r = fma32(wide(ins[0]), wide(ins[1]), ins[2], mode)
        else:
            r = add32(wide(ins[0]), ins[1] if base == "add" else -ins[1], mode)
        return clamp01(r) if mods["sat"] else canonical(r)

    return Alu(("f4",), (dtype, dtype, "f4") if base == "fma" else (dtype, "f4"), fn)


def _register() -> None:
    form("add sub mul", "f16 f16x2", "rn? ftz? sat?", _arithmetic)
    form("add sub mul", "bf16 bf16x2", "rn?", _arithmetic)
    form("fma", "f16 f16x2", "rn ftz? sat?", _arithmetic)
    form("fma", "f16 f16x2", "rn ftz? relu", _arithmetic)
    form("fma", "bf16 bf16x2", "rn relu?", _arithmetic)
    form("fma", "f16 f16x2 bf16 bf16x2", "rn oob relu?", _arithmetic)
    form("abs neg", "f16 f16x2", "ftz?", _sign)
    form("abs neg", "bf16 bf16x2", "", _sign)
    form("min max", "f16 f16x2", "ftz? NaN?", _min_max)
    form("min max", "f16 f16x2", "ftz? NaN? xorsign abs", _min_max)
    form("min max", "bf16 bf16x2", "NaN?", _min_max)
    form("min max", "bf16 bf16x2", "NaN? xorsign abs", _min_max)
    form("tanh", "f16 f16x2 bf16 bf16x2", "approx", _approx)
    form("ex2", "f16 f16x2", "approx", _approx)
    form("ex2", "bf16 bf16x2", "approx ftz", _approx)
    form("add sub", "f32.f16 f32.bf16", "rnd? sat?", _mixed)
    form("fma", "f32.f16 f32.bf16", "rnd sat?", _mixed)


_register()
