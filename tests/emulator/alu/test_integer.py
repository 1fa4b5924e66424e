"""Integer and bit instructions against Python integers, lane by lane."""

import operator

import numpy as np
import pytest

from blockscale.emulator.alu import lookup
from tests.emulator.reference.integers import INTS, N, array, check, clamp, numbers, width, wrap


@pytest.mark.parametrize("t", INTS)
def test_arithmetic(t):
    bits = width(t)
    check(f"add.{t}", (t, t), operator.add)
    check(f"sub.{t}", (t, t), operator.sub)
    check(f"min.{t}", (t, t), min)
    check(f"max.{t}", (t, t), max)
    check(f"mul.lo.{t}", (t, t), operator.mul)
    check(f"mul.hi.{t}", (t, t), lambda a, b: (a * b) >> bits)
    check(f"mad.lo.{t}", (t, t, t), lambda a, b, c: a * b + c)
    check(f"mad.hi.{t}", (t, t, t), lambda a, b, c: ((a * b) >> bits) + c)
    check(f"sad.{t}", (t, t, t), lambda a, b, c: c + abs(a - b))
    if t[0] == "s":
        check(f"abs.{t}", (t,), abs)
        check(f"neg.{t}", (t,), operator.neg)
    if bits < 64:
        wide = t[0] + str(2 * bits)
        check(f"mul.wide.{t}", (t, t), operator.mul)
        check(f"mad.wide.{t}", (t, t, wide), lambda a, b, c: a * b + c)


@pytest.mark.parametrize("t", INTS)
def test_division(t):
    def quotient(a, b):
        return -1 if b == 0 else abs(a) // abs(b) * (-1 if (a < 0) != (b < 0) else 1)

    check(f"div.{t}", (t, t), quotient)
    check(f"rem.{t}", (t, t), lambda a, b: -1 if b == 0 else a - b * quotient(a, b))


def test_saturation():
    check("add.sat.s32", ("s32", "s32"), lambda a, b: clamp(a + b, "s32"))
    check("sub.sat.s32", ("s32", "s32"), lambda a, b: clamp(a - b, "s32"))
    check("add.sat.u32", ("u32", "u32"), lambda a, b: clamp(a + b, "u32"))
    check("mad.hi.sat.s32", ("s32",) * 3, lambda a, b, c: clamp(((a * b) >> 32) + c, "s32"))
    check("min.relu.s32", ("s32",) * 2, lambda a, b: max(min(a, b), 0))
    check("max.relu.s32", ("s32",) * 2, lambda a, b: max(a, b, 0))


@pytest.mark.parametrize("t", ["u32", "s32"])
def test_mul24(t):
    small = "s24" if t == "s32" else "u24"

    def product(a, b):
        return wrap(a, small) * wrap(b, small)

    for mode, shift in (("lo", 0), ("hi", 16)):
        check(f"mul24.{mode}.{t}", (t, t), lambda a, b, s=shift: product(a, b) >> s)
        check(f"mad24.{mode}.{t}", (t, t, t), lambda a, b, c, s=shift: (product(a, b) >> s) + c)
    if t == "s32":
        check(
            "mad24.hi.sat.s32", (t,) * 3, lambda a, b, c: clamp(wrap(product(a, b) >> 16, t) + c, t)
        )


@pytest.mark.parametrize("t", ["u16x2", "s16x2", "u8x4", "s8x4"])
def test_packed_integers(t):
    element, count = t.split("x")[0], int(t[-1])
    bits = width(element)

    def lanes(op, sat=False):
        def model(a, b):
            r = 0
            for i in range(count):
                x, y = wrap(a >> (bits * i), element), wrap(b >> (bits * i), element)
                v = op(x, y)
                r |= ((clamp(v, element) if sat else v) % (1 << bits)) << (bits * i)
            return r

        return model

    two = ("u32", "u32")
    check(f"add.{t}", two, lanes(operator.add))
    check(f"add.sat.{t}", two, lanes(operator.add, sat=True))
    check(f"min.{t}", two, lanes(min))
    check(f"max.{t}", two, lanes(max))
    if "8" in t:
        check(f"sub.sat.{t}", two, lanes(operator.sub, sat=True))
    if t[0] == "s":
        check(f"max.relu.{t}", two, lanes(lambda x, y: max(x, y, 0)))


@pytest.mark.parametrize("t", ["u32", "s32", "u64", "s64"])
def test_extended_precision(t):
    bits = width(t)
    mask = (1 << bits) - 1

    def carry(total):
        return total, total > mask or total < 0

    check(f"add.cc.{t}", (t, t), lambda a, b: carry((a & mask) + (b & mask)))
    check(f"sub.cc.{t}", (t, t), lambda a, b: carry((a & mask) - (b & mask)))
    check(f"addc.{t}", (t, t, "p"), lambda a, b, c: a + b + c)
    check(f"subc.{t}", (t, t, "p"), lambda a, b, c: a - b - c)
    check(f"addc.cc.{t}", (t, t, "p"), lambda a, b, c: carry((a & mask) + (b & mask) + c))
    check(f"subc.cc.{t}", (t, t, "p"), lambda a, b, c: carry((a & mask) - (b & mask) - c))
    for mode, shift in (("lo", 0), ("hi", bits)):

        def half(a, b, s=shift):
            return ((a * b) >> s) & mask

        check(f"mad.{mode}.cc.{t}", (t,) * 3, lambda a, b, c, f=half: carry(f(a, b) + (c & mask)))
        check(f"madc.{mode}.{t}", (t, t, t, "p"), lambda a, b, c, d, f=half: f(a, b) + c + d)
        check(
            f"madc.{mode}.cc.{t}",
            (t, t, t, "p"),
            lambda a, b, c, d, f=half: carry(f(a, b) + (c & mask) + d),
        )


@pytest.mark.parametrize("bits", [32, 64])
def test_counting(bits):
    u, s, b = f"u{bits}", f"s{bits}", f"b{bits}"
    check(f"popc.{b}", (u,), int.bit_count)
    check(f"clz.{b}", (u,), lambda a: bits - a.bit_length())
    check(f"brev.{b}", (u,), lambda a: int(f"{a:0{bits}b}"[::-1], 2))
    check(f"bfind.{u}", (u,), lambda a: a.bit_length() - 1)
    check(f"bfind.{s}", (s,), lambda a: (~a if a < 0 else a).bit_length() - 1)

    def amount(a):
        a = ~a if a < 0 else a
        return bits - a.bit_length() if a else -1

    check(f"bfind.shiftamt.{u}", (u,), amount)
    check(f"bfind.shiftamt.{s}", (s,), amount)


def fields(n=N):
    rng = np.random.default_rng(4)
    return [int(v) for v in rng.choice([*range(70), 128, 255, 256, 300, 2**32 - 1], n)]


@pytest.mark.parametrize("t", ["u32", "s32", "u64", "s64"])
def test_bit_fields(t):
    """The manual's loops (PTX ISA 9.7.1, bfe and bfi)."""
    bits = width(t)

    def bfe(a, b, c):
        pos, length = b & 255, c & 255
        sign = 0 if t[0] == "u" or length == 0 else (a >> min(pos + length - 1, bits - 1)) & 1
        return sum(
            ((a >> (pos + i)) & 1 if i < length and pos + i < bits else sign) << i
            for i in range(bits)
        )

    def bfi(a, b, c, d):
        pos, length = c & 255, d & 255
        for i in range(length):
            if pos + i < bits:
                b = b & ~(1 << (pos + i)) | ((a >> i) & 1) << (pos + i)
        return b

    b, c = fields(), fields()[::-1]
    check(f"bfe.{t}", (), bfe, given=[numbers(t, 1), b, c])
    if t[0] == "u":
        check(f"bfi.b{bits}", (), bfi, given=[numbers(t, 1), numbers(t, 2), b, c])


def test_masks_and_extensions():
    a, b = fields(), fields()[::-1]

    def mask(start, count):
        return ((1 << count) - 1) << start

    check("bmsk.wrap.b32", (), lambda x, y: mask(x & 31, y & 31), given=[a, b])
    check("bmsk.clamp.b32", (), lambda x, y: mask(x, min(y, 32)) if x < 32 else 0, given=[a, b])

    def extend(x, n, signed):
        if n == 0:
            return 0
        low = x & ((1 << n) - 1)
        return low - (1 << n) if signed and low >> (n - 1) else low

    for t, signed in (("u32", False), ("s32", True)):
        given = [numbers(t, 3), a]
        check(f"szext.wrap.{t}", (), lambda x, n, s=signed: extend(x, n & 31, s), given=given)
        check(f"szext.clamp.{t}", (), lambda x, n, s=signed: extend(x, min(n, 32), s), given=given)


def test_find_nth_set():
    def fns(mask, base, offset):
        if offset == 0:
            return base if base < 32 and mask >> base & 1 else -1
        pos, count, step = base, abs(offset) - 1, 1 if offset > 0 else -1
        while 0 <= pos < 32:
            if mask >> pos & 1:
                if count == 0:
                    return pos
                count -= 1
            pos += step
        return -1

    rng = np.random.default_rng(8)
    base = [int(v) for v in rng.integers(0, 34, N)]
    offset = [int(v) for v in rng.integers(-6, 7, N)]
    check("fns.b32", (), fns, given=[numbers("u32", 2), base, offset])


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_shifts(bits):
    amounts = fields()
    full = (1 << bits) - 1
    for t in (f"b{bits}", f"u{bits}"):
        if t[0] == "b":
            check(
                f"shl.{t}",
                (),
                lambda a, n: (a << min(n, bits)) & full,
                given=[numbers(f"u{bits}", 1), amounts],
            )
        check(
            f"shr.{t}", (), lambda a, n: a >> min(n, bits), given=[numbers(f"u{bits}", 1), amounts]
        )
    check(
        f"shr.s{bits}", (), lambda a, n: a >> min(n, bits), given=[numbers(f"s{bits}", 1), amounts]
    )


def test_funnel_shifts():
    given = [numbers("u32", 1), numbers("u32", 2), fields()]
    for mode, amount in (("wrap", lambda n: n & 31), ("clamp", lambda n: min(n, 32))):
        check(
            f"shf.l.{mode}.b32",
            (),
            lambda a, b, n, f=amount: ((b << 32 | a) << f(n)) >> 32,
            given=given,
        )
        check(f"shf.r.{mode}.b32", (), lambda a, b, n, f=amount: (b << 32 | a) >> f(n), given=given)


TABLE = {
    "f4e": ["3210", "4321", "5432", "6543"], "b4e": ["5670", "6701", "7012", "0123"],
    "rc8": ["0000", "1111", "2222", "3333"], "ecl": ["3210", "3211", "3222", "3333"],
    "ecr": ["0000", "1110", "2210", "3210"], "rc16": ["1010", "3232", "1010", "3232"],
}  # fmt: skip


def test_permutation():
    """prmt: the manual's tables of modes, selectors of lanes and immediate ones, sign copies."""

    def pick(a, b, nibbles):
        r = 0
        for i, nibble in enumerate(nibbles):
            byte = (b << 32 | a) >> (8 * (nibble & 7)) & 255
            r |= ((255 if byte >> 7 else 0) if nibble & 8 else byte) << (8 * i)
        return r

    def plain(a, b, c):
        return pick(a, b, [c >> (4 * i) & 15 for i in range(4)])

    given = [numbers("u32", 1), numbers("u32", 2), numbers("u32", 3)]
    check("prmt.b32", (), plain, given=given)
    a, b = (array(v, "u4") for v in given[:2])
    for selector in (0x3210, 0x5410, 0x7632, 0x8888, 0x0F23, 0xFFFF1234):
        got = lookup("prmt.b32").fn(a, b, np.uint32(selector))
        assert got.tolist() == [plain(x, y, selector) for x, y in zip(*given[:2], strict=True)]
    for mode, rows in TABLE.items():
        check(
            f"prmt.b32.{mode}",
            (),
            lambda x, y, c, r=rows: pick(x, y, [int(d) for d in reversed(r[c & 3])]),
            given=given,
        )


def test_every_lop3():
    rng = np.random.default_rng(0)
    a, b, c = rng.integers(0, 1 << 32, (3, 64), dtype=np.uint32)
    alu, both = lookup("lop3.b32"), lookup("lop3.or.b32", 2)
    q = np.arange(64) % 2 == 0
    for table in range(256):
        expected = np.zeros(64, np.uint32)
        for minterm in range(8):
            if table >> minterm & 1:
                terms = [x if minterm >> bit & 1 else ~x for x, bit in ((a, 2), (b, 1), (c, 0))]
                expected |= terms[0] & terms[1] & terms[2]
        got = alu.fn(a, b, c, np.uint32(table))
        assert got.dtype == np.uint32
        assert (got == expected).all(), hex(table)
        d, p = both.fn(a, b, c, np.uint32(table), q)
        assert (d == expected).all()
        assert (p == ((expected != 0) | q)).all()
    assert (
        lookup("lop3.and.b32", 2).fn(a & 1, b, c, np.uint32(0xF0), q)[1] == ((a & 1 != 0) & q)
    ).all()


def test_dot_products():
    def split(x, t, count):
        bits = width(t)
        return [wrap(x >> (bits * i), t) for i in range(count)]

    for at in ("u32", "s32"):
        for bt in ("u32", "s32"):
            a8, a16, b8 = at[0] + "8", at[0] + "16", bt[0] + "8"

            def four(a, b, c, x=a8, y=b8):
                return c + sum(map(operator.mul, split(a, x, 4), split(b, y, 4)))

            def low(a, b, c, x=a16, y=b8):
                return c + sum(map(operator.mul, split(a, x, 2), split(b, y, 4)))

            def high(a, b, c, f=low):
                return f(a, b >> 16, c)

            check(f"dp4a.{at}.{bt}", ("u32",) * 3, four)
            check(f"dp2a.lo.{at}.{bt}", ("u32",) * 3, low)
            check(f"dp2a.hi.{at}.{bt}", ("u32",) * 3, high)


def test_differences_of_bytes():
    """vabsdiff4 of all bytes: c, which masked bytes would come from, counts for nothing."""

    def bytewise(a, b, c):
        pairs = ((a >> i & 255, b >> i & 255) for i in (0, 8, 16, 24))
        return sum(abs(x - y) << 8 * i for i, (x, y) in enumerate(pairs))

    check("vabsdiff4.u32.u32.u32", ("u32",) * 3, bytewise)
