"""f64 add, mul, fma, div and sqrt rounded once in every direction.

The fast path computes the rounding error of a product (Dekker) and of a sum (Knuth) in float64;
fma follows Boldo and Melquiond (2008): the two errors are added with round-to-odd.  Lanes whose
exponents could lose bits on the way are computed with fractions.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from blockscale.emulator.alu.exact import canonical, directed, odd, some, two_sum, zero_sign

_SPLIT = 134217729.0  # 2**27 + 1
_HUGE, _SMALL = 2.0**990, 2.0**-960
MAX = float(np.finfo("f8").max)


def _split(x: Any) -> tuple[Any, Any]:
    t = x * _SPLIT
    high = t - (t - x)
    return high, x - high


def two_product(a: Any, b: Any) -> tuple[Any, Any]:
    """a * b as rounded, and the exact error of it (exponents far from the limits)."""
    p = a * b
    ah, al = _split(a)
    bh, bl = _split(b)
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def round_fraction(value: Fraction, mode: str) -> float:
    """A fraction other than zero as a float."""
    try:
        r = value.numerator / value.denominator
    except OverflowError:
        r = math.inf if value > 0 else -math.inf
    if mode == "rn":
        return r
    exact = Fraction(r) if math.isfinite(r) else None
    above = exact > value if exact is not None else r > 0
    below = exact < value if exact is not None else r < 0
    if above and (mode == "rm" or (mode == "rz" and value > 0)):
        return math.nextafter(r, -math.inf)
    if below and (mode == "rp" or (mode == "rz" and value < 0)):
        return math.nextafter(r, math.inf)
    return _signed_zero(r, value)


def _signed_zero(r: float, value: Fraction) -> float:
    return math.copysign(r, -1.0 if value < 0 else 1.0)


def _slow_fma(a: float, b: float, c: float, mode: str) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return float(np.float64(a) * np.float64(b) + np.float64(c))
    if not math.isfinite(c):
        return c
    value = Fraction(a) * Fraction(b) + Fraction(c)
    if value:
        return round_fraction(value, mode)
    minus = math.copysign(1, a) * math.copysign(1, b) < 0
    other = math.copysign(1, c) < 0
    zeros = (a == 0 or b == 0) and c == 0
    if zeros and minus == other:
        return -0.0 if minus else 0.0
    return -0.0 if mode == "rm" else 0.0


def _slow_div(a: float, b: float, mode: str) -> float:
    plain = float(np.float64(a) / np.float64(b))
    if a == 0 or b == 0 or not (math.isfinite(a) and math.isfinite(b)):
        return plain
    return round_fraction(Fraction(a) / Fraction(b), mode)


def _slow_sqrt(a: float, mode: str) -> float:
    r = float(np.sqrt(np.float64(a)))
    if not math.isfinite(r) or r == 0:
        return r
    square, value = Fraction(r) ** 2, Fraction(a)
    if square > value and mode in ("rz", "rm"):
        return math.nextafter(r, 0.0)
    return math.nextafter(r, math.inf) if square < value and mode == "rp" else r


def _repair(r: Any, unsafe: Any, slow: Any, ins: tuple[Any, ...], mode: str) -> Any:
    """Replace the unsafe lanes by the slow function's results."""
    if not some(unsafe):
        return r
    r, unsafe, *all_ins = (np.atleast_1d(x) for x in np.broadcast_arrays(r, unsafe, *ins))
    r = r.copy()
    for index in zip(*np.nonzero(unsafe), strict=True):
        r[index] = slow(*(float(x[index]) for x in all_ins), mode)
    return r


def add64(a: Any, b: Any, mode: str) -> Any:
    """a + b."""
    s, e = two_sum(a, b)
    r = directed(zero_sign(s, a, b, mode), e < 0, e > 0, mode)
    unsafe = ~(np.abs(s) < _HUGE)
    return canonical(
        _repair(r, unsafe, lambda x, y, m: _slow_fma(x, 1.0, y, m), (a, b), mode), "f8"
    )


def _safe(a: Any, b: Any, p: Any) -> Any:
    size = np.abs(p)
    return (np.abs(a) < _HUGE) & (np.abs(b) < _HUGE) & (size < _HUGE) & (size > _SMALL)


def mul64(a: Any, b: Any, mode: str) -> Any:
    """a * b."""
    p, e = two_product(a, b)
    zero = (a == 0) | (b == 0)
    r = np.where(zero, p, directed(p, e < 0, e > 0, mode))
    unsafe = ~(_safe(a, b, p) | zero & np.isfinite(p))

    def slow(x: float, y: float, m: str) -> float:
        value = Fraction(x) * Fraction(y) if math.isfinite(x) and math.isfinite(y) else Fraction(0)
        return round_fraction(value, m) if value else float(np.float64(x) * np.float64(y))

    return canonical(_repair(r, unsafe, slow, (a, b), mode), "f8")


def fma64(a: Any, b: Any, c: Any, mode: str) -> Any:
    """a * b + c."""
    uh, ul = two_product(a, b)
    th, tl = two_sum(c, ul)
    vh, vl = two_sum(uh, th)
    z = odd(*two_sum(tl, vl))
    s, e = two_sum(vh, z)
    r = s
    if mode != "rn":
        r = directed(zero_sign(s, uh, c, mode), e < 0, e > 0, mode)
    unsafe = ~(_safe(a, b, uh) & (np.abs(c) < _HUGE) & (np.abs(s) < _HUGE))
    return canonical(_repair(r, unsafe, _slow_fma, (a, b, c), mode), "f8")


def div64(a: Any, b: Any, mode: str) -> Any:
    """a / b."""
    q = a / b
    if mode == "rn":
        return canonical(q, "f8")
    p, e = two_product(q, b)
    left = ((a - p) - e) * np.sign(b)  # has the sign of (exact - q)
    r = directed(q, left < 0, left > 0, mode)
    unsafe = ~(_safe(q, b, p) & _safe(a, 1.0, q) & (np.abs(b) > _SMALL))
    return canonical(_repair(r, unsafe, _slow_div, (a, b), mode), "f8")


def sqrt64(a: Any, mode: str) -> Any:
    """The square root of a."""
    q = np.sqrt(a)
    p, e = two_product(q, q)
    left = (a - p) - e
    r = directed(q, left < 0, left > 0, mode)
    unsafe = ~((np.abs(a) < _HUGE) & (np.abs(a) > _SMALL))
    return canonical(_repair(r, unsafe, _slow_sqrt, (a,), mode), "f8")
