"""Bits: counting, fields, masks, shifts, prmt, lop3 (PTX ISA 9.7.1, 9.7.8, 9.7.9)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from blockscale.emulator.alu.core import DTYPES, Alu, Mods, form
from blockscale.emulator.alu.integer import bits_of

_ONES = np.uint32(0xFFFFFFFF)
PRMT_MODES = ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")


def highest(a: Any, dtype: str) -> Any:
    """The position of the highest set bit, -1 where there is none (i8)."""
    high, low = (a >> 16 >> 16, a & 0xFFFFFFFF) if dtype == "u8" else (None, a)
    # frexp of an integer below 2**53 is exact: exponent - 1 is the highest bit.
    place = np.frexp(np.asarray(low, "f8"))[1].astype("i8") - 1
    if high is not None:
        place = np.where(high != 0, np.frexp(np.asarray(high, "f8"))[1].astype("i8") + 31, place)
    return place


def _count(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    dtype = DTYPES[types[0]]
    if base == "popc":
        return Alu(("u4",), (dtype,), lambda a: np.bitwise_count(a).astype("u4"))
    width = bits_of(dtype)
    return Alu(("u4",), (dtype,), lambda a: (width - 1 - highest(a, dtype)).astype("u4"))


def _bfind(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    dtype = DTYPES[types[0]]
    unsigned, msb = "u" + dtype[1], bits_of(dtype) - 1

    def fn(a: Any) -> Any:
        if dtype[0] == "i":
            a = np.where(a < 0, ~a, a).view(unsigned)
        place = highest(a, unsigned)
        if mods["shiftamt"]:
            place = np.where(place < 0, place, msb - place)
        return place.astype("u4")

    return Alu(("u4",), (dtype,), fn)


def _fns(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """fns: the position of the n-th set bit from `base`, in the direction of n's sign."""

    def fn(mask: Any, start: Any, offset: Any) -> Any:
        mask, start, offset = np.broadcast_arrays(mask, start.astype("i8"), offset.astype("i8"))
        found = np.full(mask.shape, -1, "i8")
        valid = (start >= 0) & (start < 32)
        left = np.maximum(np.abs(offset), 1)
        for step in range(32):
            place = np.where(offset < 0, start - step, start + step)
            inside = valid & (place >= 0) & (place < 32)
            hit = inside & ((mask >> np.where(inside, place, 0).astype("u4")) & 1).astype("?")
            left = left - hit
            found = np.where(hit & (left == 0) & (found < 0), place, found)
        return found.astype("u4")

    def exact(mask: Any, start: Any, offset: Any) -> Any:
        # With offset 0 only the bit at `base` itself counts.
        near = fn(mask, start, np.where(offset == 0, 1, offset))
        return np.where((offset == 0) & (near != start.astype("u4")), _ONES, near)

    return Alu(("u4",), ("u4", "u4", "i4"), exact)


def _brev(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    dtype = DTYPES[types[0]]
    return Alu((dtype,), (dtype,), lambda a: reverse(a, bits_of(dtype)))


def reverse(a: Any, width: int) -> Any:
    """The lowest `width` (a power of two) bits in reverse order; those above are dropped."""
    full = (1 << width) - 1
    a = a & a.dtype.type(full)
    step = width // 2
    while step:
        # ones in the lower half of every group of 2 * step bits
        mask = a.dtype.type(full // ((1 << step) + 1))
        a = ((a >> step) & mask) | ((a & mask) << step)
        step //= 2
    return a


def _below(count: Any, dtype: str) -> Any:
    """A mask of the lowest `count` bits, count being 0..width or more."""
    return ~np.left_shift(np.array(-1, "i" + dtype[1]).view(dtype), np.asarray(count).astype(dtype))


def _bfe(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    dtype = DTYPES[types[0]]
    unsigned, msb = "u" + dtype[1], bits_of(dtype) - 1

    def fn(a: Any, b: Any, c: Any) -> Any:
        pos, length = b & 0xFF, c & 0xFF
        x = a.view(unsigned)
        keep = _below(length, unsigned)
        if dtype[0] == "u":
            return np.right_shift(x, pos.astype(unsigned)) & keep
        # Beyond the register, and above the field, the bits are the field's highest one.
        top = np.where(length == 0, 0, np.minimum(pos + length - 1, msb)).astype(unsigned)
        sign = np.where((length != 0) & (((x >> top) & 1) != 0), -1, 0).astype(dtype)
        inside = np.right_shift(a, np.minimum(pos, msb).astype(dtype)).view(unsigned)
        inside = np.where(pos > msb, sign.view(unsigned), inside)
        return ((inside & keep) | (sign.view(unsigned) & ~keep)).view(dtype)

    return Alu((dtype,), (dtype, "u4", "u4"), fn)


def _bfi(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    dtype = DTYPES[types[0]]

    def fn(a: Any, b: Any, c: Any, d: Any) -> Any:
        pos = (c & 0xFF).astype(dtype)
        mask = np.left_shift(_below(d & 0xFF, dtype), pos)
        return (b & ~mask) | (np.left_shift(a, pos) & mask)

    return Alu((dtype,), (dtype, dtype, "u4", "u4"), fn)


def _bmsk(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    def clamp(a: Any, b: Any) -> Any:
        return np.left_shift(_below(b, "u4"), a)

    if mods["clampwrap"] == "wrap":
        return Alu(("u4",), ("u4", "u4"), lambda a, b: clamp(a & 31, b & 31))
    return Alu(("u4",), ("u4", "u4"), clamp)


def _szext(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    dtype = DTYPES[types[0]]

    def fn(a: Any, b: Any) -> Any:
        count = b & 31 if mods["clampwrap"] == "wrap" else b
        keep = _below(count, "u4")
        x = a.view("u4")
        r = x & keep
        if dtype == "i4":
            sign = (x >> ((count - 1) & 31)) & 1 & (count != 0) & (count < 32)
            r = r | np.where(sign != 0, ~keep, np.uint32(0))
        return r.view(dtype)

    return Alu((dtype,), (dtype, "u4"), fn)


def _shift(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """shl and shr: amounts above the width are clamped to it."""
    dtype = DTYPES[types[0]]
    if base == "shl":
        if dtype in ("u4", "u8"):
            return Alu((dtype,), (dtype, "u4"), np.left_shift, ufunc=True)
        return Alu((dtype,), (dtype, "u4"), lambda a, b: a << np.minimum(b, 16).astype(dtype))
    if dtype in ("u4", "u8"):
        return Alu((dtype,), (dtype, "u4"), np.right_shift, ufunc=True)
    most = bits_of(dtype) - (dtype[0] == "i")
    return Alu((dtype,), (dtype, "u4"), lambda a, b: a >> np.minimum(b, most).astype(dtype))


def _funnel(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """shf: the upper word of [b, a] << n (.l), the lower word of [b, a] >> n (.r)."""
    left, wrap = bool(mods["l"]), mods["clampwrap"] == "wrap"

    def fn(a: Any, b: Any, c: Any) -> Any:
        n = c & 31 if wrap else np.minimum(c, 32)
        if left:
            return np.left_shift(b, n) | np.right_shift(a, 32 - n)
        return np.right_shift(a, n) | np.left_shift(b, 32 - n)

    return Alu(("u4",), ("u4", "u4", "u4"), fn)


def _prmt(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """prmt (PTX ISA 9.7.9): four of the eight bytes of [b, a]; nibble bit 3 copies the sign."""
    mode = next((name for name in PRMT_MODES if mods[name]), "")

    def general(a: Any, b: Any, c: Any) -> Any:
        both = a.astype("u8") | (b.astype("u8") << 32)
        r: Any = np.uint32(0)
        for i in range(4):
            nibble = (c >> (4 * i)) & 15
            byte = (both >> ((nibble & 7) << 3).astype("u8")).astype("u4") & 0xFF
            sign = np.where(byte & 0x80, np.uint32(0xFF), np.uint32(0))
            r = r | (np.where(nibble & 8, sign, byte) << (8 * i))
        return r

    def fixed(a: Any, b: Any, c: Any) -> Any:
        selector = int(c)
        if selector & 0x8888:
            return general(a, b, c)
        r: Any = np.uint32(0)
        for i in range(4):
            source = (selector >> (4 * i)) & 7
            word = b if source & 4 else a
            r = r | (((word >> (8 * (source & 3))) & 0xFF) << (8 * i))
        return r

    def plain(a: Any, b: Any, c: Any) -> Any:
        return fixed(a, b, c) if np.ndim(c) == 0 else general(a, b, c)

    def special(a: Any, b: Any, c: Any) -> Any:
        which = c & 3
        r: Any = np.uint32(0)
        for i in range(4):
            source = np.array([PERMUTE[mode](i, s) for s in range(4)], "u4")[which]
            r = r | (source << (4 * i))
        return general(a, b, r)

    return Alu(("u4",), ("u4", "u4", "u4"), special if mode else plain)


PERMUTE: dict[str, Callable[[int, int], int]] = {
    "f4e": lambda i, s: s + i,
    "b4e": lambda i, s: (s - i) & 7,
    "rc8": lambda i, s: s,
    "ecl": lambda i, s: max(i, s),
    "ecr": lambda i, s: min(i, s),
    "rc16": lambda i, s: (i & 1) | ((s & 1) << 1),
}
"""The source byte of result byte i for selector s in each mode (PTX ISA 9.7.9, prmt)."""


def _two(table: int) -> Callable[[Any, Any], Any]:
    """The function of two bits with a truth table: bit 2 * a + b."""
    functions: dict[int, Callable[[Any, Any], Any]] = {
        0b0000: lambda a, b: np.uint32(0), 0b1111: lambda a, b: _ONES,
        0b1100: lambda a, b: a, 0b0011: lambda a, b: ~a,
        0b1010: lambda a, b: b, 0b0101: lambda a, b: ~b,
        0b1000: lambda a, b: a & b, 0b0111: lambda a, b: ~(a & b),
        0b1110: lambda a, b: a | b, 0b0001: lambda a, b: ~(a | b),
        0b0110: lambda a, b: a ^ b, 0b1001: lambda a, b: ~(a ^ b),
        0b0100: lambda a, b: a & ~b, 0b1011: lambda a, b: ~a | b,
        0b0010: lambda a, b: ~a & b, 0b1101: lambda a, b: a | ~b,
    }  # fmt: skip
    return functions[table]


@functools.cache
def lop3(table: int) -> Callable[[Any, Any, Any], Any]:
    """The bitwise function of three words with a truth table: bit 4 * a + 2 * b + c."""
    zero = sum(((table >> (2 * i)) & 1) << i for i in range(4))  # c = 0
    one = sum(((table >> (2 * i + 1)) & 1) << i for i in range(4))  # c = 1
    low, change = _two(zero), _two(zero ^ one)
    if zero == one:
        return lambda a, b, c: low(a, b) | np.zeros_like(c)
    if zero == 0:
        return lambda a, b, c: change(a, b) & c
    if one == 15:
        return lambda a, b, c: low(a, b) | c
    if zero ^ one == 15:
        return lambda a, b, c: low(a, b) ^ c
    return lambda a, b, c: low(a, b) ^ (change(a, b) & c)


def _lop3(base: str, types: tuple[str, ...], mods: Mods) -> Alu:
    """lop3 (PTX ISA 9.7.8): with a Boolean operation also p = (d != 0) op q."""
    op = {"or": np.logical_or, "and": np.logical_and}.get(mods["or"] or mods["and"])

    def fn(a: Any, b: Any, c: Any, table: Any, *q: Any) -> Any:
        d = lop3(int(np.ravel(table)[0]) & 0xFF)(a, b, c)
        return d if op is None else (d, op(d != 0, q[0]))

    if op is None:
        return Alu(("u4",), ("u4",) * 4, fn)
    return Alu(("u4", "?"), ("u4",) * 4 + ("?",), fn)


def _register() -> None:
    form("popc clz", "b32 b64", "", _count)
    form("bfind", "u32 u64 s32 s64", "shiftamt?", _bfind)
    form("fns", "b32", "", _fns)
    form("brev", "b32 b64", "", _brev)
    form("bfe", "u32 u64 s32 s64", "", _bfe)
    form("bfi", "b32 b64", "", _bfi)
    form("bmsk", "b32", "clampwrap", _bmsk)
    form("szext", "u32 s32", "clampwrap", _szext)
    form("shl", "b16 b32 b64", "", _shift)
    form("shr", "b16 b32 b64 u16 u32 u64 s16 s32 s64", "", _shift)
    form("shf", "b32", "l clampwrap", _funnel)
    form("shf", "b32", "r clampwrap", _funnel)
    form("prmt", "b32", "", _prmt)
    for mode in PRMT_MODES:
        form("prmt", "b32", mode, _prmt)
    form("lop3", "b32", "", _lop3)
    form("lop3", "b32", "or", _lop3, n_dst=(2,))
    form("lop3", "b32", "and", _lop3, n_dst=(2,))


_register()
