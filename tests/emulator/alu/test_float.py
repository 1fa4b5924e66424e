"""Floating-point instructions against fractions: every rounding, .ftz, .sat, .relu, specials."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from blockscale.emulator.alu import lookup
from tests.emulator.reference.alu import (
    FORMATS,
    bits_of,
    flushed,
    interesting,
    operate,
    rounded,
    values_of,
)

COUNT = {"add": 2, "sub": 2, "mul": 2, "div": 2, "fma": 3, "rcp": 1, "sqrt": 1}
MODES = ("rn", "rz", "rm", "rp")
N = 600


def run(opcode, *ins, n_src=None):
    """Call the instruction on bits, return bits; inputs stay as they are and nothing warns."""
    alu = lookup(opcode, 1, n_src)
    args = [np.ascontiguousarray(x).view(d) for x, d in zip(ins, alu.ins, strict=True)]
    before = [a.copy() for a in args]
    with np.errstate(all="ignore"):
        r = np.asarray(alu.fn(*args))
        if alu.ufunc:
            out = np.empty(r.shape, alu.outs[0])
            assert alu.fn(*args, out=out) is out
    assert r.dtype == np.dtype(alu.outs[0])
    assert all(a.tobytes() == b.tobytes() for a, b in zip(args, before, strict=True))
    return r.view(f"u{r.itemsize}"), alu.ufunc


def operands(op, fmt, seed):
    """Operand bits, some of which cancel or lie at a tie of the sum."""
    ins = [interesting(fmt, N, seed + i) for i in range(COUNT[op])]
    sign = ins[0].dtype.type(1 << (ins[0].itemsize * 8 - 1))
    if op in ("add", "sub"):
        ins[1][: N // 6] = ins[0][: N // 6] ^ sign
        ins[1][N // 6 : N // 3] = ins[0][N // 6 : N // 3] ^ np.arange(N // 3 - N // 6).astype(
            sign.dtype
        )
    if op == "fma":  # c cancels most of a * b
        with np.errstate(all="ignore"):
            product = values_of(ins[0], fmt) * values_of(ins[1], fmt)
            ins[2][: N // 2] = bits_of(-product, fmt)[: N // 2]
    return ins


def compare(opcode, got, expected, fmt, ufunc):
    """Bit for bit; of plain ufuncs any NaN."""
    bad = got != expected
    if ufunc:
        bad &= ~(np.isnan(values_of(got, fmt)) & np.isnan(values_of(expected, fmt)))
    where = np.nonzero(bad)[0]
    assert len(where) == 0, (opcode, len(where), where[:3], got[where[:3]], expected[where[:3]])


def check(opcode, op, fmt, mode, ftz=False, sat=False, relu=False):
    ins = operands(op, fmt, len(opcode))
    values = [values_of(x, fmt).tolist() for x in ins]
    results = [operate(op, args, fmt, mode, ftz, sat) for args in zip(*values, strict=True)]
    if relu:
        results = [r if math.isnan(r) or r > 0 else 0.0 for r in results]
    got, ufunc = run(opcode, *ins)
    compare(opcode, got, bits_of(results, fmt), fmt, ufunc)


@pytest.mark.parametrize("op", list(COUNT))
@pytest.mark.parametrize("mode", MODES)
def test_f32(op, mode):
    check(f"{op}.{mode}.f32", op, "f32", mode)
    check(f"{op}.{mode}.ftz.f32", op, "f32", mode, ftz=True)
    if op in ("add", "sub", "mul", "fma"):
        check(f"{op}.{mode}.sat.f32", op, "f32", mode, sat=True)
        check(f"{op}.{mode}.ftz.sat.f32", op, "f32", mode, ftz=True, sat=True)


@pytest.mark.parametrize("op", list(COUNT))
@pytest.mark.parametrize("mode", MODES)
def test_f64(op, mode):
    check(f"{op}.{mode}.f64", op, "f64", mode)


@pytest.mark.parametrize("fmt", ["f32", "f64", "bf16", "f16"])
@pytest.mark.parametrize("subnormal", [False, True])
def test_fma_beside_a_tie(fmt, subnormal):
    """c plus half its last place, and a little more or less: where rounding twice goes wrong."""
    p, emin, _ = FORMATS[fmt]
    rng = np.random.default_rng(1)
    ulp = 2.0 ** (emin - p + 1) if subnormal else 2.0
    c = ulp * (rng.integers(1 << (p - 3), 1 << (p - 2), N) * 2 + rng.integers(0, 2, N))
    if not subnormal:
        c = ulp * rng.integers(1 << (p - 1), 1 << p, N).astype("f8")
    k = rng.integers(0, 8, N) * 2.0 ** (1 - p)
    # ulp / 2 = 2**e1 * 2**e2, neither factor subnormal
    half = int(math.log2(ulp)) - 1
    a, b = (1 + k) * 2.0 ** (half // 2), (1 - k * rng.integers(0, 2, N)) * 2.0 ** (half - half // 2)
    signs = rng.choice([-1.0, 1.0], (2, N))
    ins = [bits_of(x, fmt) for x in (a * signs[0], b, c * signs[1])]
    values = [values_of(x, fmt).tolist() for x in ins]
    for mode in MODES if fmt in ("f32", "f64") else ("rn",):
        expected = [operate("fma", args, fmt, mode) for args in zip(*values, strict=True)]
        compare(fmt, run(f"fma.{mode}.{fmt}", *ins)[0], bits_of(expected, fmt), fmt, False)


@pytest.mark.parametrize("fmt", ["f32", "f64", "bf16", "f16"])
def test_fma_of_a_tie_and_little(fmt):
    """3 m is half-way between two numbers; c, however small, decides."""
    p = FORMATS[fmt][0]
    m = np.random.default_rng(2).integers((1 << p) // 6 + 1, (1 << (p + 1)) // 6 - 1, N) * 2 + 1.0
    little = 2.0**-24 if fmt == "f16" else 2.0**-120
    scale = 2.0**-4 if fmt == "f16" else 1.0
    c = np.random.default_rng(3).choice([-little, little, 0.0], N)
    ins = [bits_of(x, fmt) for x in (m * scale, np.full(N, 3.0), c)]
    values = [values_of(x, fmt).tolist() for x in ins]
    for mode in MODES if fmt in ("f32", "f64") else ("rn",):
        expected = [operate("fma", args, fmt, mode) for args in zip(*values, strict=True)]
        compare(fmt, run(f"fma.{mode}.{fmt}", *ins)[0], bits_of(expected, fmt), fmt, False)


def test_mad_is_fma_and_rn_is_the_default():
    a, b, c = (interesting("f32", N, seed) for seed in range(3))
    for mode in MODES:
        np.testing.assert_array_equal(
            run(f"mad.{mode}.f32", a, b, c)[0], run(f"fma.{mode}.f32", a, b, c)[0]
        )
    for op in ("add", "sub", "mul"):
        np.testing.assert_array_equal(run(f"{op}.f32", a, b)[0], run(f"{op}.rn.f32", a, b)[0])


@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ftz", ["", ".ftz"])
def test_f32x2(op, mode, ftz):
    """Each half is the scalar instruction; rz too (mul.rz.ftz.f32x2)."""
    low, high = ([interesting("f32", N, s + i) for i in range(COUNT[op])] for s in (20, 40))
    words = [a.astype("u8") | (b.astype("u8") << 32) for a, b in zip(low, high, strict=True)]
    got, _ = run(f"{op}.{mode}{ftz}.f32x2", *words)
    for half, ins in ((got & 0xFFFFFFFF, low), (got >> 32, high)):
        expected, ufunc = run(f"{op}.{mode}{ftz}.f32", *ins)
        compare(op, half.astype("u4"), expected, "f32", ufunc)


@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
def test_f16_and_bf16(op):
    check(f"{op}.rn.f16", op, "f16", "rn")
    check(f"{op}.rn.ftz.f16", op, "f16", "rn", ftz=True)
    check(f"{op}.rn.sat.f16", op, "f16", "rn", sat=True)
    check(f"{op}.rn.bf16", op, "bf16", "rn")
    if op == "fma":
        check("fma.rn.relu.f16", op, "f16", "rn", relu=True)
        check("fma.rn.ftz.relu.f16", op, "f16", "rn", ftz=True, relu=True)
        check("fma.rn.relu.bf16", op, "bf16", "rn", relu=True)


PAIRS = [
    *(f"{op}.rn{mods}.f16" for op in ("add", "sub", "mul", "fma") for mods in ("", ".ftz", ".sat")),
    *(f"{op}.rn.bf16" for op in ("add", "sub", "mul", "fma")),
    "fma.rn.relu.f16", "fma.rn.relu.bf16", "fma.rn.oob.f16", "fma.rn.oob.relu.bf16",
    "abs.f16", "neg.bf16", "abs.ftz.f16", "min.NaN.f16", "max.bf16", "min.xorsign.abs.bf16",
    "max.ftz.NaN.xorsign.abs.f16", "tanh.approx.f16", "tanh.approx.bf16",
    "ex2.approx.f16", "ex2.approx.ftz.bf16",
]  # fmt: skip


@pytest.mark.parametrize("opcode", PAIRS)
def test_pairs_are_two_scalars(opcode):
    fmt = opcode.rsplit(".", 1)[1]
    count = len(lookup(opcode).ins)
    low, high = ([interesting(fmt, N, s + i) for i in range(count)] for s in (20, 40))
    words = [a.astype("u4") | (b.astype("u4") << 16) for a, b in zip(low, high, strict=True)]
    got, _ = run(opcode + "x2", *words)
    for half, ins in ((got & 0xFFFF, low), (got >> 16, high)):
        expected, ufunc = run(opcode, *ins)
        compare(opcode, half.astype("u2"), expected, fmt, ufunc)


def test_oob_nan_makes_zero():
    a = np.array([0x7FF7, 0x3C00, 0xFFF7, 0x7FFF], "u2")
    one = np.full(4, 0x3C00, "u2")
    assert run("fma.rn.oob.f16", a, one, one)[0].tolist() == [0, 0x4000, 0, 0x7FFF]
    assert run("fma.rn.oob.f16", one, one, a)[0].tolist() == [0, 0x4000, 0, 0x7FFF]


@pytest.mark.parametrize("fmt", ["f16", "bf16"])
@pytest.mark.parametrize("mode", MODES)
def test_mixed_precision(fmt, mode):
    half, other = (interesting(fmt, N, s) for s in (1, 2))
    c = interesting("f32", N, 3)
    x, y, z = (
        values_of(half, fmt).tolist(),
        values_of(other, fmt).tolist(),
        values_of(c, "f32").tolist(),
    )
    for sat in (False, True):
        mods = f".{mode}" + (".sat" if sat else "")
        for op in ("add", "sub"):
            expected = [operate(op, args, "f32", mode, sat=sat) for args in zip(x, z, strict=True)]
            got, _ = run(f"{op}{mods}.f32.{fmt}", half, c)
            compare(op, got, bits_of(expected, "f32"), "f32", False)
        expected = [
            operate("fma", args, "f32", mode, sat=sat) for args in zip(x, y, z, strict=True)
        ]
        compare(
            "fma",
            run(f"fma{mods}.f32.{fmt}", half, other, c)[0],
            bits_of(expected, "f32"),
            "f32",
            False,
        )


def least(args, largest, nan, absolute):
    """min or max of Python floats: -0 < +0, NaN loses or wins."""
    args = [abs(a) if absolute else a for a in args]
    if any(map(math.isnan, args)):
        if nan or all(map(math.isnan, args)):
            return math.nan
        args = [a for a in args if not math.isnan(a)]
    return sorted(args, key=lambda a: (a, math.copysign(1, a)))[-1 if largest else 0]


@pytest.mark.parametrize("base", ["min", "max"])
@pytest.mark.parametrize("fmt", list(FORMATS))
def test_min_max(base, fmt):
    """All modifiers; three inputs for f32."""
    ins = [interesting(fmt, N, s) for s in (5, 6, 7)]
    zero = ins[0].dtype.type(1 << (ins[0].itemsize * 8 - 1))
    for i, signs in enumerate(itertools.product((0, zero), repeat=3)):
        for x, sign in zip(ins, signs, strict=True):
            x[i] = sign
    values = [values_of(x, fmt) for x in ins]
    options = ["", ".NaN"] if fmt != "f64" else [""]
    options += [o + ".xorsign.abs" for o in options] if fmt != "f64" else []
    if fmt in ("f16", "f32"):
        options += [".ftz" + o for o in options]
    for option, count in itertools.product(options, (2, 3)):
        if count == 3 and (fmt != "f32" or "xorsign" in option):
            continue
        used = [v.tolist() for v in values[:count]]
        if "ftz" in option:
            used = [[flushed(a, fmt) for a in v] for v in used]
        expected = [
            least(args, base == "max", "NaN" in option, "abs" in option)
            for args in zip(*used, strict=True)
        ]
        if "xorsign" in option:
            expected = [
                e if math.isnan(e) else math.copysign(e, math.copysign(1, a) * math.copysign(1, b))
                for e, a, b in zip(expected, *used, strict=True)
            ]
        opcode = f"{base}{option}.{fmt}"
        got, _ = run(opcode, *ins[:count], n_src=count)
        compare(opcode, got, bits_of(expected, fmt), fmt, False)


def test_sign_and_class():
    x = interesting("f32", N, 9)
    v = values_of(x, "f32")
    assert (run("neg.f32", x)[0] == x ^ 0x80000000).all()
    assert (run("abs.f32", x)[0] == x & 0x7FFFFFFF).all()
    y = interesting("f32", N, 10)
    assert (run("copysign.f32", x, y)[0] == (x & 0x80000000 | y & 0x7FFFFFFF)).all()
    normal = np.isfinite(v) & (np.abs(v) >= 2.0**-126)
    for test, expected in (
        ("finite", np.isfinite(v)), ("infinite", np.isinf(v)), ("number", ~np.isnan(v)),
        ("notanumber", np.isnan(v)), ("normal", normal),
        ("subnormal", np.isfinite(v) & ~normal & (v != 0)),
    ):  # fmt: skip
        assert (lookup(f"testp.{test}.f32").fn(x.view("f4")) == expected).all(), test


APPROX = {
    "rcp": lambda x: 1 / x, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "sin": np.sin,
    "cos": np.cos, "lg2": np.log2, "ex2": np.exp2, "tanh": np.tanh,
}  # fmt: skip


@pytest.mark.parametrize("name", list(APPROX))
def test_approx(name):
    """Within an ulp of long double, and the manual's special values."""
    x = interesting("f32", 4000, 3)
    with np.errstate(all="ignore"):
        exact = APPROX[name](x.view("f4").astype(np.longdouble))
        got = run(f"{name}.approx.f32", x)[0]
        expected = exact.astype("f4").view("u4")
    value = got.view("f4")
    nan = np.isnan(value)
    assert (nan == np.isnan(exact)).all()
    assert (got[nan] == 0x7FFFFFFF).all()
    assert (np.abs(got[~nan].astype("i8") - expected[~nan].astype("i8")) <= 1).all()


@pytest.mark.parametrize(
    ("opcode", "given", "expected"),
    [
        ("rcp.approx.f32", [-math.inf, -0.0, 0.0, math.inf], [-0.0, -math.inf, math.inf, 0.0]),
        (
            "rsqrt.approx.f32",
            [-math.inf, -1, -0.0, 0.0, math.inf],
            [math.nan, math.nan, -math.inf, math.inf, 0.0],
        ),
        ("sqrt.approx.f32", [-1, -0.0, 0.0, math.inf], [math.nan, -0.0, 0.0, math.inf]),
        ("sin.approx.f32", [-math.inf, -0.0, 0.0, math.inf], [math.nan, -0.0, 0.0, math.nan]),
        ("cos.approx.f32", [-math.inf, -0.0, 0.0, math.inf], [math.nan, 1.0, 1.0, math.nan]),
        (
            "lg2.approx.f32",
            [-math.inf, -1, -0.0, 0.0, math.inf],
            [math.nan, math.nan, -math.inf, -math.inf, math.inf],
        ),
        ("ex2.approx.f32", [-math.inf, -0.0, 0.0, 1e-40, math.inf], [0.0, 1.0, 1.0, 1.0, math.inf]),
        ("ex2.approx.ftz.f32", [-127.0, -126.0], [0.0, 2.0**-126]),
        ("lg2.approx.ftz.f32", [1e-40, -1e-40], [-math.inf, -math.inf]),
        ("rcp.approx.ftz.f32", [1e-40, -1e-40, 2.0**127], [math.inf, -math.inf, 0.0]),
        ("tanh.approx.f32", [-math.inf, -0.0, math.inf], [-1.0, -0.0, 1.0]),
    ],
)
def test_special_values(opcode, given, expected):
    got, _ = run(opcode, np.array(given, "f4").view("u4"))
    compare(opcode, got, bits_of(expected, "f32"), "f32", False)


def test_div_approx_and_full():
    a, b = (interesting("f32", N, s) for s in (1, 2))
    x, y = values_of(a, "f32"), values_of(b, "f32")
    with np.errstate(all="ignore"):
        plain = (x / y).astype("f4").astype("f8")
        big = (np.abs(y) > 2.0**126) & np.isfinite(y)
        expected = np.where(big, x * np.copysign(0.0, y), plain)
    compare("div.full", run("div.full.f32", a, b)[0], bits_of(plain, "f32"), "f32", False)
    compare("div.approx", run("div.approx.f32", a, b)[0], bits_of(expected, "f32"), "f32", False)


@pytest.mark.parametrize("name", ["rcp", "rsqrt"])
def test_gross_f64(name):
    """About 20 bits, the lower word is zero."""
    x = np.exp(np.random.default_rng(0).uniform(-300, 300, N))
    got = run(f"{name}.approx.ftz.f64", x.view("u8"))[0]
    assert (got & 0xFFFFFFFF == 0).all()
    assert (np.abs(got.view("f8") / APPROX[name](x) - 1) < 2.0**-18).all()


def test_half_functions_are_rounded_once():
    every = np.arange(65536).astype("u2")
    for name in ("tanh", "ex2"):
        for fmt, mods in (("f16", ""), ("bf16", ".ftz" if name == "ex2" else "")):
            v = values_of(every, fmt)
            with np.errstate(all="ignore"):
                exact = APPROX[name](v)
            got = run(f"{name}.approx{mods}.{fmt}", every)[0]
            for i in range(0, 65536, 97):
                e = float(exact[i])
                if math.isfinite(e) and e != 0:
                    e = rounded(Fraction(e), fmt, "rn")
                if mods:
                    e = flushed(e, fmt)
                assert got[i] == bits_of([e], fmt)[0], (name, fmt, hex(i))
