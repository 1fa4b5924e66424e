"""cvt between scalar types (PTX ISA 9.7.9, cvt): integers, f16, bf16, f32, f64, tf32; cvt.pack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blockscale.emulator.alu.core import DTYPES, SLOTS, Alu, Mods, form
from blockscale.emulator.alu.exact import (
    canonical,
    clamp01,
    directed,
    flush,
    narrow,
    odd,
    two_sum,
    widen,
)
from blockscale.emulator.alu.exact import relu as clamp_relu
from blockscale.emulator.alu.half import odd32, round_bf16
from blockscale.emulator.alu.integer import bits_of
from blockscale.emulator.alu.minifloat import encode

INTS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
FLOATS = ("bf16", "f16", "f32", "f64")
WIDTH = {"bf16": 16, "f16": 16, "f32": 32, "f64": 64}
_ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _int_to_int(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    out, dtype = DTYPES[types[0]], DTYPES[types[1]]
    if not mods["sat"]:
        return Alu((out,), (dtype,), lambda a: a.astype(out))
    to, of = np.iinfo(out), np.iinfo(dtype)
    low, high = max(to.min, of.min), min(to.max, of.max)
    return Alu((out,), (dtype,), lambda a: np.clip(a, low, high).astype(out))


def _read(stype: str, ftz: bool) -> Callable[[Any], Any]:
    """Float operands as f4 (bf16) or their own dtype, f32 flushed where .ftz says so."""
    if stype == "bf16":
        return widen
    return flush if stype == "f32" and ftz else lambda a: a


def _float_to_int(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """Clamped to the destination's range; NaN gives 0, or 2**(bits - 1) with 64-bit types."""
    out, dtype = DTYPES[types[0]], DTYPES[types[1]]
    info, rounded = np.iinfo(out), _ROUND[mods["irnd"]]
    read = _read(types[1], bool(mods["ftz"]))
    wide = types[1] == "f64" or out in ("i8", "u8")
    bad = np.array(1 << (bits_of(out) - 1), "u8").astype(out)[()] if wide else np.dtype(out).type(0)
    # The largest value that a float64 holds and the clamp may let through.
    top = float(info.max) if out not in ("i8", "u8") else float(np.nextafter(float(info.max), 0))

    def fn(a: Any) -> Any:
        x = rounded(np.asarray(read(a), "f8"))
        r = np.clip(x, float(info.min), top).astype(out)
        if out in ("i8", "u8"):
            r = np.where(x > top, np.dtype(out).type(info.max), r)
        return np.where(x != x, bad, r)

    return Alu((out,), (dtype,), fn)


def write(x: Any, dtype: str, mode: str) -> Any:
    """f32 or f64 values, exact or rounded to odd, as f16, bf16 (bits), f32 or f64."""
    if dtype == "f64":
        return np.asarray(x, "f8")
    if dtype == "bf16":
        if mode != "rn":
            return encode(x, "bf16", mode)
        return round_bf16(x if x.dtype == np.float32 else odd32(x))
    to = DTYPES[dtype]
    return canonical(np.asarray(x).astype(to) if mode == "rn" else narrow(_f8(x), mode, to), to)


def _f8(x: Any) -> Any:
    return np.asarray(x, "f8")


def _int_to_float(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    out, dtype, mode = DTYPES[types[0]], DTYPES[types[1]], mods["rnd"]

    def exact(a: Any) -> tuple[Any, Any]:
        if dtype not in ("i8", "u8"):
            return _f8(a), 0
        high = (a >> 32).astype("f8") * 2.0**32
        return two_sum(high, (a & 0xFFFFFFFF).astype("f8"))

    def fn(a: Any) -> Any:
        if mode == "rn" and types[0] in ("f32", "f64"):
            r = a.astype(out)
        elif types[0] == "f64":
            s, e = exact(a)
            r = directed(s, e < 0, e > 0, mode) if dtype in ("i8", "u8") else s
        else:
            s, e = exact(a)
            r = write(odd(s, e) if dtype in ("i8", "u8") else s, types[0], mode)
        return clamp01(r) if mods["sat"] else r

    return Alu((out,), (dtype,), fn)


def _float_to_float(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """Widening (exact), narrowing with .rnd, or rounding to an integral value with .irnd."""
    out, dtype, mode = DTYPES[types[0]], DTYPES[types[1]], mods["rnd"] or "rn"
    read, rounded = _read(types[1], bool(mods["ftz"])), _ROUND.get(mods["irnd"])

    def fn(a: Any) -> Any:
        x = read(a)
        if rounded is not None:
            x = rounded(x)
        r = write(x, types[0], mode)
        if mods["ftz"] and types[0] == "f32":
            r = flush(r)
        return clamp01(r) if mods["sat"] else r

    return Alu((out,), (dtype,), fn)


def _narrow(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """cvt.{rn,rz}{.relu}{.satfinite}.{f16,bf16}.f32 and cvt.{rna,rn,rz}...tf32.f32."""
    mode, fmt = mods["rnz"] or mods["rna"], types[0]
    satfinite, relu = bool(mods["satfinite"]), bool(mods["relu"])
    if fmt == "f16" and mode == "rn" and not satfinite:
        return Alu(("f2",), ("f4",), lambda a: clamp_relu(a.astype("f2"), "f2"))

    def fn(a: Any) -> Any:
        return encode(a, fmt, mode, satfinite=satfinite, relu=relu).view(DTYPES[fmt])

    return Alu((DTYPES[fmt],), ("f4",), fn)


def _pack(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """cvt.pack.sat (PTX ISA 9.7.9, cvt.pack): saturated a above b, then c above both."""
    bits = int(types[0][1:])
    low, high = (
        (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if types[0][0] == "s" else (0, 2**bits - 1)
    )
    mask = np.uint32((1 << bits) - 1)

    def fn(a: Any, b: Any, *c: Any) -> Any:
        x, y = (np.clip(v, low, high).view("u4") & mask for v in (a, b))
        d = (x << bits) | y
        return d | (c[0] << (2 * bits)) if c else d

    return Alu(("u4",), ("i4", "i4") + (("u4",) if len(types) == 3 else ()), fn)


def _range(name: str) -> tuple[int, int]:
    info = np.iinfo(DTYPES[name])
    return int(info.min), int(info.max)


def _integers() -> None:
    for to in INTS:
        for of in INTS:
            low, high = _range(to)
            inner_low, inner_high = _range(of)
            fits = low <= inner_low and inner_high <= high
            form("cvt", f"{to}.{of}", "" if fits else "sat?", _int_to_int)


def _register() -> None:
    SLOTS["rna"] = ("rna",)
    _integers()
    for integer in INTS:
        for floating in FLOATS:
            ftz = " ftz?" if floating == "f32" else ""
            sat = "" if floating == "bf16" else " sat?"
            form("cvt", f"{integer}.{floating}", "irnd" + sat + ftz, _float_to_int)
            form("cvt", f"{floating}.{integer}", "rnd" + sat + ftz, _int_to_float)
    for to in FLOATS:
        for of in FLOATS:
            mods = (" ftz?" if "f32" in (to, of) else "") + ("" if "bf16" in (to, of) else " sat?")
            if to == of:
                form("cvt", f"{to}.{of}", "irnd?" + mods, _float_to_float)
            elif "bf16" in (to, of) and WIDTH[to] >= WIDTH[of]:
                # ptxas takes a rounding, here without effect, and f16 <-> bf16 without one (.rn)
                form("cvt", f"{to}.{of}", "rnd?" + mods, _float_to_float)
            elif WIDTH[to] < WIDTH[of]:
                form("cvt", f"{to}.{of}", "rnd" + mods, _float_to_float)
            else:
                form("cvt", f"{to}.{of}", mods.strip(), _float_to_float)
    form("cvt", "f16.f32 bf16.f32", "rnz relu satfinite?", _narrow)
    form("cvt", "f16.f32 bf16.f32", "rnz satfinite", _narrow)
    form("cvt", "tf32.f32", "rna satfinite?", _narrow)
    form("cvt", "tf32.f32", "rnz satfinite? relu?", _narrow)
    form("cvt", "u16.s32 s16.s32", "pack sat", _pack)
    form(
        "cvt",
        " ".join(f"{t}.s32.b32" for t in ("u2", "s2", "u4", "s4", "u8", "s8")),
        "pack sat",
        _pack,
    )


_register()
