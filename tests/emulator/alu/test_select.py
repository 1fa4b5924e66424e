"""Logic, moves, comparisons and selections against Python, lane by lane."""

import math
import operator

import numpy as np
import pytest

from blockscale.emulator.alu import lookup
from tests.emulator.reference.alu import interesting, values_of
from tests.emulator.reference.integers import INTS, N, check


@pytest.mark.parametrize("t", ["b16", "b32", "b64"])
def test_logic(t):
    u = "u" + t[1:]
    check(f"and.{t}", (u, u), operator.and_)
    check(f"or.{t}", (u, u), operator.or_)
    check(f"xor.{t}", (u, u), operator.xor)
    check(f"not.{t}", (u,), operator.invert)
    check(f"cnot.{t}", (u,), lambda a: a == 0)
    check(f"mov.{t}", (u,), lambda a: a)
    check(f"selp.{t}", (u, u, "p"), lambda a, b, p: a if p else b)
    check(f"slct.{t}.s32", (u, u, "s32"), lambda a, b, c: a if c >= 0 else b)


def test_predicates():
    check("and.pred", ("p", "p"), operator.and_)
    check("or.pred", ("p", "p"), operator.or_)
    check("xor.pred", ("p", "p"), operator.xor)
    check("not.pred", ("p",), operator.not_)
    check("mov.pred", ("p",), lambda a: a)


ORDER = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge,
    "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge,
}  # fmt: skip
JOIN = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


@pytest.mark.parametrize("t", [*INTS, "b32"])
def test_integer_comparisons(t):
    u = t.replace("b", "u")
    names = ["eq", "ne"] if t[0] == "b" else list(ORDER)[: 6 if t[0] == "s" else 10]
    for name in names:
        op = ORDER[name]
        check(f"setp.{name}.{t}", (u, u), op)
        check(f"setp.{name}.{t}", (u, u), lambda a, b, f=op: (f(a, b), not f(a, b)), n_dst=2)
        check(f"set.{name}.u32.{t}", (u, u), lambda a, b, f=op: -f(a, b))
        for word, join in JOIN.items():
            check(
                f"setp.{name}.{word}.{t}", (u, u, "p"),
                lambda a, b, c, f=op, j=join: (j(f(a, b), c), j(not f(a, b), c)), n_dst=2,
            )  # fmt: skip
            check(
                f"set.{name}.{word}.s32.{t}",
                (u, u, "p"),
                lambda a, b, c, f=op, j=join: -j(f(a, b), c),
            )


def compared(name, a, b):
    """A comparison of Python floats by its name."""
    nan = math.isnan(a) or math.isnan(b)
    if name in ("num", "nan"):
        return nan == (name == "nan")
    if name.endswith("u"):
        return nan or ORDER[name[:-1]](a, b)
    return not nan and ORDER[name](a, b)


FLOAT = [*list(ORDER)[:6], "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]


@pytest.mark.parametrize("fmt", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("name", FLOAT)
def test_float_comparisons(name, fmt):
    a, b = interesting(fmt, N, 1), interesting(fmt, N, 2)
    a[:80] = b[:80]
    expected = np.array(
        [compared(name, x, y) for x, y in zip(values_of(a, fmt), values_of(b, fmt), strict=True)]
    )
    alu = lookup(f"setp.{name}.{fmt}")
    x, y = a.view(alu.ins[0]), b.view(alu.ins[0])
    assert (alu.fn(x, y) == expected).all()
    c = np.arange(N) % 2 == 0
    assert (lookup(f"setp.{name}.xor.{fmt}").fn(x, y, c) == expected ^ c).all()
    if fmt in ("f32", "f64"):
        assert (lookup(f"setp.{name}.{fmt}", 2).fn(x, y)[1] == ~expected).all()
        assert (lookup(f"set.{name}.and.f32.{fmt}").fn(x, y, c) == (expected & c)).all()
        return
    word = 0x3C00 if fmt == "f16" else 0x3F80
    assert (lookup(f"set.{name}.{fmt}.{fmt}").fn(x, y).view("u2") == expected * word).all()
    low, high = (
        a.astype("u4") | np.roll(a, 1).astype("u4") << 16,
        b.astype("u4") | np.roll(b, 1).astype("u4") << 16,
    )
    p, q = lookup(f"setp.{name}.and.{fmt}x2", 2).fn(low, high, c)
    assert (p == expected & c).all()
    assert (q == np.roll(expected, 1) & c).all()
    r = lookup(f"set.{name}.{fmt}x2.{fmt}x2").fn(low, high)
    assert (r == (expected * word | np.roll(expected, 1).astype("u4") * word << 16)).all()


def test_flushed_comparisons():
    tiny, zero = np.array([1e-40, -1e-40], "f4"), np.zeros(2, "f4")
    assert lookup("setp.eq.ftz.f32").fn(tiny, zero).all()
    assert not lookup("setp.eq.f32").fn(tiny, zero).any()
    a, b = np.array([1, 1], "u4"), np.array([2, 2], "u4")
    assert lookup("slct.b32.f32").fn(a, b, tiny).tolist() == [1, 2]
    assert lookup("slct.ftz.b32.f32").fn(a, b, tiny).tolist() == [1, 1]
    assert lookup("slct.b32.f32").fn(a, b, np.array([np.nan, -0.0], "f4")).tolist() == [2, 1]
