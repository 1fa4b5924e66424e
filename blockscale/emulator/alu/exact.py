"""Exact rounding: sums and products with their error, round-to-odd, and every rounding direction.

A value that is rounded twice is right when the first rounding is *to odd* (truncate, then set the
last bit if anything was lost) and has two bits more than the second.  Here the wide format is
float64, which holds the product of two f32 exactly; `odd_sum` makes a sum odd by its TwoSum error.
"""

from __future__ import annotations

from typing import Any

import numpy as np

NAN32 = np.uint32(0x7FFFFFFF).view("f4")
NAN16 = np.uint16(0x7FFF)
NAN64 = np.uint64(0x7FFFFFFFFFFFFFFF).view("f8")
_TINY = {"f2": np.finfo("f2").tiny, "f4": np.finfo("f4").tiny, "f8": np.finfo("f8").tiny}
_NAN = {"f2": np.uint16(0x7FFF).view("f2"), "f4": NAN32, "f8": NAN64}
_SIGNED = {"f2": "i2", "f4": "i4", "f8": "i8"}
_LOST, _HALF = np.uint64(0x1FFFFFFF), np.uint64(0x10000000)
"""The bits of f64 that f32 has not, and half of its last one."""

some = np.count_nonzero
"""Whether any element is true; np.any takes ten times as long for the arrays of a few warps."""


def flush(x: Any, dtype: str = "f4") -> Any:
    """Subnormal values as zeros of their sign (.ftz); NaN stays NaN."""
    return x * (np.abs(x) >= _TINY[dtype])


def canonical(x: Any, dtype: str = "f4") -> Any:
    """NaN as the hardware writes it: 0x7fffffff for f32, 0x7fff for f16."""
    nan = x != x
    return np.where(nan, _NAN[dtype], x) if some(nan) else x


def clamp01(x: Any) -> Any:
    """.sat: clamp to [0, 1], NaN and -0 to +0."""
    zero, one = x.dtype.type(0), x.dtype.type(1)
    return np.where(x > 0, np.minimum(x, one), zero)


def relu(x: Any, dtype: str) -> Any:
    """.relu: negative results and -0 to +0, NaN to the canonical NaN."""
    return np.where(x != x, _NAN[dtype], np.where(x > 0, x, x.dtype.type(0)))


def widen(x: Any) -> Any:
    """bf16 bits (u2) as f32."""
    return (x.astype("u4") << 16).view("f4")


def two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """a + b as rounded, and the exact error of it (no overflow)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def odd(s: Any, e: Any) -> Any:
    """The float64 s + e (e the error of a nearest rounding) rounded to odd."""
    inexact = (e != 0) & np.isfinite(s)
    if not some(inexact):
        return s
    bits = np.asarray(s).view("i8")
    # Where the error points towards zero the truncated value is one bit pattern lower.
    bits = bits - (inexact & (np.signbit(e) != np.signbit(s)))
    return np.where(inexact, bits | 1, bits).view("f8")


def odd_sum(a: Any, b: Any) -> Any:
    """a + b (float64) rounded to odd."""
    return odd(*two_sum(a, b))


def step(r: Any, outward: Any, inward: Any) -> Any:
    """Floats one pattern further from zero where `outward`, one nearer where `inward`."""
    bits = np.asarray(r).view(_SIGNED[r.dtype.str[1:]])
    one = bits.dtype.type(1)
    return (
        (bits + np.where(outward, one, 0) - np.where(inward, one, 0))
        .astype(bits.dtype)
        .view(r.dtype)
    )


def directed(r: Any, above: Any, below: Any, mode: str) -> Any:
    """Correct a result rounded to nearest, given where it lies above or below the exact value."""
    sign = np.signbit(r)
    if mode == "rz":
        return step(r, False, np.where(sign, below, above))
    if mode == "rm":
        return step(r, above & sign, above & ~sign)
    return step(r, below & ~sign, below & sign)


def narrow(x: Any, mode: str, dtype: str = "f4") -> Any:
    """Round float64 values, exact or rounded to odd, to f32 or f16 in the direction of `mode`."""
    r = np.asarray(x).astype(dtype)
    if mode in ("rn", ""):
        return r
    back = r.astype("f8")
    return directed(r, back > x, back < x, mode)


def zero_sign(result: Any, a: Any, b: Any, mode: str) -> Any:
    """-0 for an exact sum of zero rounded down, unless both addends are +0 (IEEE 754, 6.3)."""
    if mode != "rm":
        return result
    negative = (result == 0) & (np.signbit(a) | np.signbit(b))
    return np.where(negative, -np.abs(result), result)


def fma32(a: Any, b: Any, c: Any, mode: str) -> Any:
    """a * b + c of f32 values rounded once to f32."""
    p = np.multiply(a, b, dtype="f8")
    if mode in ("rn", ""):
        # Rounding twice goes wrong only at a tie of f32 or below its normal range.
        s = p + c
        if not some(np.asarray(s).view("u8") & _LOST == _HALF):
            small = np.abs(s) < 1.5e-38
            if not (some(small) and some(small & (s != 0))):
                return s.astype("f4")
        return odd_sum(p, np.asarray(c, "f8")).astype("f4")
    wide = np.asarray(c, "f8")
    return narrow(zero_sign(odd_sum(p, wide), p, wide, mode), mode)


def add32(a: Any, b: Any, mode: str) -> Any:
    """a + b of f32 values rounded once to f32."""
    if mode in ("rn", ""):
        return a + b
    x, y = np.asarray(a, "f8"), np.asarray(b, "f8")
    return narrow(zero_sign(odd_sum(x, y), x, y, mode), mode)


def mul32(a: Any, b: Any, mode: str) -> Any:
    """a * b of f32 values rounded once to f32."""
    return a * b if mode in ("rn", "") else narrow(np.multiply(a, b, dtype="f8"), mode)
