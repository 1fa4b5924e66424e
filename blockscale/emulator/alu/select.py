"""Logic, moves, comparisons and selections (PTX ISA 9.7.6, 9.7.7, 9.7.8, mov of 9.7.9).

A comparison of half precision values converts them to f32, which is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blockscale.emulator.alu.core import DTYPES, SLOTS, Alu, Mods, form
from blockscale.emulator.alu.exact import flush, widen
from blockscale.emulator.alu.integer import lanes

INTEGER_CMP = ("eq", "ne", "lt", "le", "gt", "ge")
UNSIGNED_CMP = ("lo", "ls", "hi", "hs")
FLOAT_CMP = ("equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
SLOTS["ecmp"] = ("eq", "ne")
SLOTS["icmp"] = INTEGER_CMP
SLOTS["ucmp"] = INTEGER_CMP + UNSIGNED_CMP
SLOTS["fcmp"] = INTEGER_CMP + FLOAT_CMP

_BOOL = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
COMPARE: dict[str, Callable[..., Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
    # unordered: true also where an operand is NaN
    "equ": lambda a, b: (a == b) | (a != a) | (b != b),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: (a == a) & (b == b),
    "nan": lambda a, b: (a != a) | (b != b),
}


def _ne_ordered(a: Any, b: Any) -> Any:
    return (a < b) | (a > b)


def comparison(name: str, floating: bool) -> Callable[..., Any]:
    """The comparison of that name; of floats all of eq..ge are false where an operand is NaN."""
    return _ne_ordered if floating and name == "ne" else COMPARE[name]


def _logic(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    dtype = DTYPES[types[0]]
    ops = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}
    if dtype == "?":
        ops = {**_BOOL, "not": np.logical_not}
    return Alu((dtype,), (dtype,) * ops[base].nin, ops[base], ufunc=True)


def _cnot(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    dtype = DTYPES[types[0]]
    return Alu((dtype,), (dtype,), lambda a: (a == 0).astype(dtype))


def _mov(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    dtype = DTYPES[types[0]]
    if dtype == "?":
        return Alu(("?",), ("?",), lambda a: np.array(a))
    return Alu((dtype,), (dtype,), np.positive, ufunc=True)


def _selp(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    dtype = DTYPES[types[0]]
    return Alu((dtype,), (dtype, dtype, "?"), lambda a, b, p: np.where(p, a, b))


def _slct(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """slct: a where c >= 0, else b; -0 counts as 0, NaN selects b."""
    dtype, kind = DTYPES[types[0]], DTYPES[types[1]]

    def fn(a: Any, b: Any, c: Any) -> Any:
        return np.where((flush(c) if mods["ftz"] else c) >= 0, a, b)

    return Alu((dtype,), (dtype, dtype, kind), fn)


def _compare(stype: str, mods: Mods) -> tuple[str, Callable[[Any, Any], Any]]:
    """The operands' dtype and their comparison, inputs flushed where .ftz says so."""
    floating = stype in ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2")
    name = next(mods[slot] for slot in ("ecmp", "icmp", "ucmp", "fcmp") if mods[slot])
    op = comparison(name, floating)
    if stype == "f32" and mods["ftz"]:
        return "f4", lambda a, b: op(flush(a), flush(b))
    if stype in ("f16", "f16x2") and mods["ftz"]:
        return DTYPES[stype], lambda a, b: op(flush(a, "f2"), flush(b, "f2"))
    if stype == "bf16":
        return "u2", lambda a, b: op(widen(a), widen(b))
    return DTYPES[stype], op


def _setp(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """setp: p = (a op b) bool c, q = !(a op b) bool c."""
    dtype, op = _compare(types[0], mods)
    both, join = mods["n_dst"] == "2", _BOOL.get(mods["bool"])
    outs = ("?", "?") if both else ("?",)
    if join is None:
        if not both:
            return Alu(outs, (dtype, dtype), op, ufunc=isinstance(op, np.ufunc))

        def pair(a: Any, b: Any) -> Any:
            p = op(a, b)
            return p, np.logical_not(p)

        return Alu(outs, (dtype, dtype), pair)

    def joined(a: Any, b: Any, c: Any) -> Any:
        p = op(a, b)
        return (join(p, c), join(np.logical_not(p), c)) if both else join(p, c)

    return Alu(outs, (dtype, dtype, "?"), joined)


def _halves(stype: str, mods: Mods) -> Callable[[Any, Any], Any]:
    """The comparison of packed halves: [n, 2], the lower half first."""
    element = "f2" if stype == "f16x2" else "u2"
    op = _compare(stype, mods)[1]
    if stype == "bf16x2":
        return lambda a, b: op(widen(lanes(a, element)), widen(lanes(b, element)))
    return lambda a, b: op(lanes(a, element), lanes(b, element))


def _setp_x2(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """setp.f16x2, setp.bf16x2: p compares the lower halves, q the upper ones."""
    pair = mods["n_dst"] == "2"
    op, join = _halves(types[0], mods), _BOOL.get(mods["bool"])

    def fn(a: Any, b: Any, *c: Any) -> Any:
        both = op(a, b)
        if join is not None:
            both = join(both, np.reshape(c[0], (-1, 1)))
        return (both[:, 0], both[:, 1]) if pair else both[:, 0]

    return Alu(("?", "?") if pair else ("?",), ("u4", "u4") + (("?",) if join else ()), fn)


_ONE: dict[str, Any] = {
    "f32": np.float32(1), "f16": np.float16(1), "bf16": np.uint16(0x3F80),
    "u32": np.uint32(0xFFFFFFFF), "s32": np.int32(-1),
    "u16": np.uint16(0xFFFF), "s16": np.int16(-1),
}  # fmt: skip


def _set(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """set: 1.0 (float) or all ones (integer) where the comparison holds, else 0."""
    out, (dtype, op) = DTYPES[types[0]], _compare(types[1], mods)
    join, one = _BOOL.get(mods["bool"]), _ONE[types[0]]
    zero = one.dtype.type(0)

    def fn(a: Any, b: Any, *c: Any) -> Any:
        p = op(a, b)
        return np.where(p if join is None else join(p, c[0]), one, zero)

    return Alu((out,), (dtype, dtype) + (("?",) if join else ()), fn)


def _set_x2(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """set with packed halves: 1.0 (0x3c00, 0x3f80), or all ones, or 0 in each half."""
    op, join = _halves(types[1], mods), _BOOL.get(mods["bool"])
    one = {"f16x2": np.uint16(0x3C00), "bf16x2": np.uint16(0x3F80)}.get(types[0], np.uint16(0xFFFF))

    def fn(a: Any, b: Any, *c: Any) -> Any:
        p = op(a, b)
        p = p if join is None else join(p, np.reshape(c[0], (-1, 1)))
        return np.where(p, one, np.uint16(0)).view("u4").reshape(-1)

    return Alu(("u4",), ("u4", "u4") + (("?",) if join else ()), fn)


def _testp(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    dtype = DTYPES[types[0]]
    tiny = np.finfo(dtype).tiny
    tests: dict[str, Callable[[Any], Any]] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda a: a == a,
        "notanumber": np.isnan,
        "normal": lambda a: np.isfinite(a) & (np.abs(a) >= tiny),
        "subnormal": lambda a: (np.abs(a) < tiny) & (a != 0),
    }
    return Alu(("?",), (dtype,), tests[mods["test"]])


def _copysign(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """copysign d, a, b: the sign of a, the magnitude of b."""
    dtype = DTYPES[types[0]]
    return Alu((dtype,), (dtype, dtype), lambda a, b: np.copysign(b, a))


def _comparisons(base: str, build: Any, prefix: str = "") -> None:
    def kinds(names: str) -> str:
        return " ".join(prefix + name for name in names.split())

    form(base, kinds("b16 b32 b64"), "ecmp bool?", build, n_dst=(1, 2))
    form(base, kinds("s16 s32 s64"), "icmp bool?", build, n_dst=(1, 2))
    form(base, kinds("u16 u32 u64"), "ucmp bool?", build, n_dst=(1, 2))
    form(base, kinds("f32"), "fcmp bool? ftz?", build, n_dst=(1, 2))
    form(base, kinds("f64"), "fcmp bool?", build, n_dst=(1, 2))


def _register() -> None:
    SLOTS["test"] = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    form("and or xor not", "pred b16 b32 b64", "", _logic)
    form("cnot", "b16 b32 b64", "", _cnot)
    words = "b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64"
    form("mov", f"pred {words}", "", _mov)
    form("selp", words, "", _selp)
    form("slct", " ".join(f"{t}.s32" for t in words.split()), "", _slct)
    form("slct", " ".join(f"{t}.f32" for t in words.split()), "ftz?", _slct)
    _comparisons("setp", _setp)
    for dtype in ("u32", "s32", "f32"):
        _comparisons("set", _set, f"{dtype}.")
    form("setp", "f16", "fcmp bool? ftz?", _setp)
    form("setp", "bf16", "fcmp bool?", _setp)
    form("setp", "f16x2", "fcmp bool? ftz?", _setp_x2, n_dst=(1, 2))
    form("setp", "bf16x2", "fcmp bool?", _setp_x2, n_dst=(1, 2))
    form("set", "f16.f16 u16.f16 s16.f16 u32.f16 s32.f16", "fcmp bool? ftz?", _set)
    form("set", "bf16.bf16 u16.bf16 s16.bf16 u32.bf16 s32.bf16", "fcmp bool?", _set)
    form("set", "f16x2.f16x2 u32.f16x2 s32.f16x2", "fcmp bool? ftz?", _set_x2)
    form("set", "bf16x2.bf16x2 u32.bf16x2 s32.bf16x2", "fcmp bool?", _set_x2)
    form("testp", "f32 f64", "test", _testp)
    form("copysign", "f32 f64", "", _copysign)


_register()
