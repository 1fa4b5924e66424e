"""Approximate functions (PTX ISA 9.7.3 and 9.7.4), here rounded from float64.

The hardware's results lie within the error that the manual states for each; these are the nearest
floats (up to float64's own error), which is inside every one of those bounds.  Special values are
the manual's tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blockscale.emulator.alu.core import Alu, Mods, form
from blockscale.emulator.alu.exact import canonical, flush

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "rcp": lambda x: 1.0 / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "lg2": np.log2,
    "ex2": np.exp2,
    "tanh": np.tanh,
}
"""Of float64; the special values (lg2(-1), rsqrt(-0), ...) are IEEE's and the manual's."""


def _approx(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    op = FUNCTIONS[base]

    def fn(a: Any) -> Any:
        x = flush(a) if mods["ftz"] else a
        r = op(np.asarray(x, "f8")).astype("f4")
        return canonical(flush(r) if mods["ftz"] else r)

    return Alu(("f4",), ("f4",), fn)


def _div(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """div.approx and div.full; .approx gives 0 (inf / b: NaN) for 2**126 < |b| < 2**128."""

    def fn(a: Any, b: Any) -> Any:
        if mods["ftz"]:
            a, b = flush(a), flush(b)
        r = a / b
        if mods["approx"]:
            big = (np.abs(b) > 2.0**126) & np.isfinite(b)
            # a * (1 / b), whose reciprocal is flushed to zero
            r = np.where(big, a * np.copysign(np.float32(0), b), r)
        return canonical(flush(r) if mods["ftz"] else r)

    return Alu(("f4",), ("f4", "f4"), fn)


def _gross(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """rcp.approx.ftz.f64, rsqrt.approx.ftz.f64: of the upper 32 bits, the lower 32 are zero."""
    op, mask = FUNCTIONS[base], np.uint64(0xFFFFFFFF00000000)

    def fn(a: Any) -> Any:
        upper = (np.asarray(a).view("u8") & mask).view("f8")
        r = canonical(op(flush(upper, "f8")), "f8")
        nan = r != r
        return flush(np.where(nan, r, (r.view("u8") & mask).view("f8")), "f8")

    return Alu(("f8",), ("f8",), fn)


def _rsqrt64(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    return Alu(("f8",), ("f8",), lambda a: canonical(1.0 / np.sqrt(a), "f8"))


def _register() -> None:
    form("rcp sqrt rsqrt sin cos lg2 ex2", "f32", "approx ftz?", _approx)
    form("tanh", "f32", "approx", _approx)
    form("div", "f32", "approx ftz?", _div)
    form("div", "f32", "full ftz?", _div)
    form("rcp rsqrt", "f64", "approx ftz", _gross)
    form("rsqrt", "f64", "approx", _rsqrt64)


_register()
