"""Rounding to small formats: every direction, stochastic too, with .satfinite and .relu.

PTX ISA 5.2.3 (alternate formats) and 9.7.9 (cvt).  A magnitude is scaled so that one unit is the
format's last place at that exponent; what rounds to an integer there is the code, because codes of
neighbouring binades follow each other and a carry ends in the next binade by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np


@dataclass(frozen=True)
class MiniFloat:
    """A signed format by its widths; `top` is the largest finite code, `inf` and `nan` may lack."""

    exp: int
    man: int
    bias: int
    top: int
    inf: int | None
    nan: int | None
    shift: int = 0  # zero bits below the format in its register (tf32: 13)

    @property
    def sign(self) -> int:
        """The sign bit."""
        return 1 << (self.exp + self.man)

    @property
    def word(self) -> str:
        """The unsigned NumPy dtype that holds a code."""
        bits = self.exp + self.man + 1 + self.shift
        return "u1" if bits <= 8 else "u2" if bits <= 16 else "u4"


FORMATS: dict[str, MiniFloat] = {
    "e2m1": MiniFloat(2, 1, 1, 0x7, None, None),
    "e2m3": MiniFloat(2, 3, 1, 0x1F, None, None),
    "e3m2": MiniFloat(3, 2, 3, 0x1F, None, None),
    "e4m3": MiniFloat(4, 3, 7, 0x7E, None, 0x7F),
    "e5m2": MiniFloat(5, 2, 15, 0x7B, 0x7C, 0x7F),
    "f16": MiniFloat(5, 10, 15, 0x7BFF, 0x7C00, 0x7FFF),
    "bf16": MiniFloat(8, 7, 127, 0x7F7F, 0x7F80, 0x7FFF),
    "tf32": MiniFloat(8, 10, 127, 0x3FBFF, 0x3FC00, 0x3FFFF, 13),
}


def _rounded(units: Any, sign: Any, mode: str, random: Any, bits: int) -> Any:
    """Non-negative units as integers (f8), rounded in the direction of `mode`."""
    if mode == "rn":
        return np.rint(units)
    if mode == "rz":
        return np.floor(units)
    if mode == "rna":
        return np.floor(units + 0.5)
    if mode == "rs":
        return np.floor(units + np.asarray(random, "f8") * 2.0**-bits)
    return np.where(sign == (mode == "rm"), np.ceil(units), np.floor(units))


def encode(
    x: Any,
    fmt: str,
    mode: str = "rn",
    *,
    satfinite: bool = False,
    relu: bool = False,
    random: Any = None,
    bits: int = 16,
) -> Any:
    """The codes of f32 or f64 values, exact or rounded to odd.

    rs: `random` (integers of `bits` bits) is added below the last place, what it carries counts.
    Without .satfinite overflow gives infinity where the direction says so (a format without one
    always saturates); NaN gives the canonical NaN, or the largest value where there is none.
    """
    f = FORMATS[fmt]
    x = np.asarray(x, "f8")
    nan, sign = x != x, np.signbit(x)
    size = np.where(np.isfinite(x), np.abs(x), 2.0**1000)
    place = np.maximum((size.view("i8") >> 52) - 1023, 1 - f.bias)
    unit = ((f.man - place + 1023) << 52).view("f8")
    code = _rounded(size * unit, sign, mode, random, bits).astype("i8")
    code = code + ((place + (f.bias - 1)) << f.man)
    if f.inf is None or satfinite:
        code = np.minimum(code, f.top)
    else:
        # An infinite input stays infinite; a finite one overflows as far as its direction lets it.
        limit = np.where(np.isinf(x), f.inf, _overflow(f, f.inf, sign, mode))
        code = np.where(code > f.top, limit, code)
    code = np.where(sign, 0 if relu else code | f.sign, code)
    code = np.where(nan, f.top if f.nan is None else f.nan, code)
    word = code.astype(f.word)
    if f.shift:
        word = np.where(nan, np.uint32(0x7FFFFFFF), word << f.shift)
    return word


def _overflow(f: MiniFloat, inf: int, sign: Any, mode: str) -> Any:
    """The code of a finite value beyond the range."""
    if mode in ("rn", "rna", "rs"):
        return inf
    if mode == "rz":
        return f.top
    return np.where(sign == (mode == "rm"), inf, f.top)


@cache
def half_values(fmt: str) -> Any:
    """The f16 bits (u2) of all codes of a format of at most 8 bits; bits above it are ignored."""
    f = FORMATS[fmt]
    codes = np.arange(256) & (2 * f.sign - 1)
    body = codes & (f.sign - 1)
    exponent, mantissa = body >> f.man, body & ((1 << f.man) - 1)
    size = np.where(
        exponent == 0,
        np.ldexp(mantissa.astype("f8"), 1 - f.bias - f.man),
        np.ldexp((mantissa + (1 << f.man)).astype("f8"), exponent - f.bias - f.man),
    )
    with np.errstate(over="ignore"):  # e5m2's codes of infinity and NaN
        word = np.where(codes & f.sign, -size, size).astype("f2").view("u2")
    if f.inf is not None:
        word = np.where(body == f.inf, np.where(codes & f.sign, 0xFC00, 0x7C00), word)
    if f.nan is not None:
        word = np.where(body > f.top if f.inf is None else body > f.inf, 0x7FFF, word)
    return word.astype("u2")


def to_ue8m0(x: Any, mode: str, satfinite: bool) -> Any:
    """ue8m0 codes (u1) of f32 values, the sign ignored: rz or rp.

    Zero and what is below 2**-127 give code 0, which is 2**-127; NaN gives 0xff; infinity and what
    rounds beyond 2**127 give 0xfe with .satfinite, else 0xff.
    """
    bits = np.asarray(x).view("u4") & 0x7FFFFFFF
    code = bits >> 23
    if mode == "rp":
        code = code + (((bits & 0x7FFFFF) != 0) & (bits > 0x00400000) & (bits < 0x7F800000))
    if satfinite:
        code = np.where(bits <= 0x7F800000, np.minimum(code, 0xFE), code)
    return code.astype("u1")


def from_ue8m0(codes: Any) -> Any:
    """bf16 bits (u2) of ue8m0 codes: 0xff is NaN, code 0 the subnormal 2**-127."""
    wide = codes.astype("u2")
    r = np.where(wide == 0, np.uint16(0x0040), wide << 7)
    return np.where(wide == 0xFF, np.uint16(0x7FFF), r)
