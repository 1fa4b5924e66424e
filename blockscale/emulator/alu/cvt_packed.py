"""cvt between packed formats (PTX ISA 9.7.9, cvt): pairs and quadruples of small floats.

The first source lands in the upper element; of {a, b, e, f} the first is the highest.  Sources of
the quadruples are five operands here: a, b, e, f and rbits.

Random bits of the quadruples: the manual gives 16 bits of rbits to a and b, the others to e and f
(e2m1x4: the upper, the lower byte of both halves).  Which bits go where inside is only in its
figures; here the first of each two reads its bits in reverse order, which was measured for
e4m3x4 on sm_100a and is assumed for the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from blockscale.emulator.alu.bits import reverse
from blockscale.emulator.alu.core import DTYPES, Alu, Mods, form
from blockscale.emulator.alu.cvt import write
from blockscale.emulator.alu.exact import relu as clamp_relu
from blockscale.emulator.alu.exact import widen
from blockscale.emulator.alu.integer import lanes, packed
from blockscale.emulator.alu.minifloat import FORMATS, encode, from_ue8m0, half_values, to_ue8m0


def join(upper: Any, lower: Any, bits: int, dtype: str) -> Any:
    """Two codes in one word."""
    return (upper.astype(dtype) << bits) | lower.astype(dtype)


def _halves(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """cvt.{rn,rz,rs}.{f16x2,bf16x2}.f32: a in the upper, b in the lower half."""
    fmt, mode = types[0].removesuffix("x2"), mods["rnz"] or "rs"
    satfinite, relu = bool(mods["satfinite"]), bool(mods["relu"])
    bits = 13 if fmt == "f16" else 16

    def convert(x: Any, random: Any = None) -> Any:
        if mode == "rn" and not satfinite:
            r = write(x, fmt, "rn")
            if relu:
                r = np.where(np.signbit(x) & (x == x), r.dtype.type(0), r)
            return np.asarray(r).view("u2")
        return encode(x, fmt, mode, satfinite=satfinite, relu=relu, random=random, bits=bits)

    if mode != "rs":
        return Alu(("u4",), ("f4", "f4"), lambda a, b: join(convert(a), convert(b), 16, "u4"))
    mask = (1 << bits) - 1

    def stochastic(a: Any, b: Any, rbits: Any) -> Any:
        upper, lower = (rbits >> 16) & mask, rbits & mask
        return join(convert(a, upper), convert(b, lower), 16, "u4")

    return Alu(("u4",), ("f4", "f4", "u4"), stochastic)


def _down(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """cvt.rn.satfinite{.relu} to pairs of fp8, fp6, fp4 from two f32 or one f16x2, bf16x2."""
    fmt, out = types[0].removesuffix("x2"), DTYPES[types[0]]
    bits, relu = (4 if fmt == "e2m1" else 8), bool(mods["relu"])

    def codes(x: Any) -> Any:
        return encode(x, fmt, "rn", satfinite=True, relu=relu)

    if types[1] == "f32":
        return Alu((out,), ("f4", "f4"), lambda a, b: join(codes(a), codes(b), bits, out))
    element = "f2" if types[1] == "f16x2" else "u2"

    def fn(a: Any) -> Any:
        x = lanes(a, element)
        both = codes(x if element == "f2" else widen(x))
        return join(both[:, 1], both[:, 0], bits, out)

    return Alu((out,), ("u4",), fn)


def _split(a: Any, fmt: str) -> tuple[Any, Any]:
    """The codes of a pair: upper, lower."""
    bits = 4 if fmt == "e2m1" else 8
    mask = (1 << bits) - 1
    return (a >> bits) & mask, a & mask


def _up(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """cvt.rn{.relu}.f16x2 from pairs of fp8, fp6, fp4: exact."""
    fmt, dtype = types[1].removesuffix("x2"), DTYPES[types[1]]
    table = half_values(fmt)
    if mods["relu"]:
        table = np.asarray(clamp_relu(table.view("f2"), "f2")).view("u2")

    def fn(a: Any) -> Any:
        upper, lower = _split(a, fmt)
        return join(table[upper], table[lower], 16, "u4")

    return Alu(("u4",), (dtype,), fn)


def _up_bf16(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """cvt.rn{.satfinite}{.relu}{.scaled::n2::ue8m0}.bf16x2 from small pairs, times a scale each."""
    fmt, dtype = types[1].removesuffix("x2"), DTYPES[types[1]]
    table = half_values(fmt).view("f2").astype("f8")

    def fn(a: Any, *scale: Any) -> Any:
        halves = []
        for index, codes in enumerate(_split(a, fmt)):
            x = table[codes]
            if scale:
                x = x * widen(from_ue8m0(_split(scale[0], "e4m3")[index].astype("u1"))).astype("f8")
            halves.append(
                encode(x, "bf16", satfinite=bool(mods["satfinite"]), relu=bool(mods["relu"]))
            )
        return join(halves[0], halves[1], 16, "u4")

    return Alu(("u4",), (dtype,) + (("u2",) if mods["scaled"] else ()), fn)


def _scale(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """cvt.{rz,rp}{.satfinite}.ue8m0x2 from two f32 or one bf16x2."""
    mode, satfinite = mods["rzp"], bool(mods["satfinite"])
    if types[1] == "f32":

        def pair(a: Any, b: Any) -> Any:
            x, y = (to_ue8m0(v, mode, satfinite) for v in (a, b))
            return join(x, y, 8, "u2")

        return Alu(("u2",), ("f4", "f4"), pair)

    def fn(a: Any) -> Any:
        both = to_ue8m0(widen(lanes(a, "u2")), mode, satfinite)
        return join(both[:, 1], both[:, 0], 8, "u2")

    return Alu(("u2",), ("u4",), fn)


def _from_scale(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    return Alu(("u4",), ("u2",), lambda a: packed(from_ue8m0(lanes(a, "u1")), "u4"))


def _random(rbits: Any, fmt: str) -> list[Any]:
    """The random bits of a, b, e and f."""
    if fmt == "e2m1":
        upper = ((rbits >> 16) & 0xFF00) | ((rbits >> 8) & 0xFF)
        lower = ((rbits >> 8) & 0xFF00) | (rbits & 0xFF)
    else:
        upper, lower = rbits >> 16, rbits & 0xFFFF
    return [reverse(upper, 16), upper, reverse(lower, 16), lower]


def _quadruple(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """cvt.rs{.relu}.satfinite to four codes: a is the highest, f the lowest."""
    fmt, out, relu = types[0].removesuffix("x4"), DTYPES[types[0]], bool(mods["relu"])
    bits = 4 if fmt == "e2m1" else 8

    def fn(a: Any, b: Any, e: Any, f: Any, rbits: Any) -> Any:
        word: Any = np.dtype(out).type(0)
        for x, random in zip((a, b, e, f), _random(rbits, fmt), strict=True):
            code = encode(x, fmt, "rs", satfinite=True, relu=relu, random=random, bits=16)
            word = (word << bits) | code.astype(out)
        return word

    return Alu((out,), ("f4",) * 4 + ("u4",), fn)


def _register() -> None:
    small = [f"{name}x2" for name in FORMATS if name.startswith("e")]
    form("cvt", "f16x2.f32 bf16x2.f32", "rnz relu? satfinite?", _halves)
    form("cvt", "f16x2.f32 bf16x2.f32", "rs relu? satfinite?", _halves)
    for name in small:
        form("cvt", f"{name}.f32", "rn satfinite relu?", _down)
        known = name[:4] in ("e4m3", "e5m2")
        form("cvt", f"{name}.f16x2", "rn satfinite relu?", _down, isa=9.0 if known else 9.1)
        form("cvt", f"{name}.bf16x2", "rn satfinite relu?", _down, isa=9.1)
        form("cvt", f"f16x2.{name}", "rn relu?", _up)
        form("cvt", f"bf16x2.{name}", "rn satfinite? relu? scaled?", _up_bf16, isa=9.2)
    form("cvt", "ue8m0x2.f32 ue8m0x2.bf16x2", "rzp satfinite?", _scale)
    form("cvt", "bf16x2.ue8m0x2", "rn", _from_scale)
    for name in small:
        form("cvt", name.replace("x2", "x4") + ".f32", "rs relu? satfinite", _quadruple)


_register()
