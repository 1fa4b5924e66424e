"""cvt against fractions and Python integers: integers, floats, tf32, packed, stochastic."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from blockscale.emulator.alu import lookup
from blockscale.emulator.errors import PtxError
from tests.emulator.reference.alu import bits_of, flushed, interesting, rounded, values_of
from tests.emulator.reference.integers import array, clamp, numbers, wrap

INTS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
FLOATS = ("f16", "bf16", "f32", "f64")
MODES = ("rn", "rz", "rm", "rp")
N = 400


def run(opcode, *ins):
    alu = lookup(opcode)
    args = [np.ascontiguousarray(x).view(d) for x, d in zip(ins, alu.ins, strict=True)]
    with np.errstate(all="ignore"):
        r = np.asarray(alu.fn(*args))
    assert r.dtype == np.dtype(alu.outs[0])
    return r


def nearest(value, fmt, mode):
    """A Python float or fraction in another format."""
    if isinstance(value, float) and (not math.isfinite(value) or value == 0):
        return value
    value = Fraction(value)
    return rounded(value, fmt, mode) if value else 0.0


def same(opcode, got, expected):
    got = got.view(f"u{got.itemsize}")
    bad = got != expected
    if got.itemsize == 8:  # f64 keeps payloads
        bad &= ~(np.isnan(got.view("f8")) & np.isnan(expected.view("f8")))
    bad = np.nonzero(bad)[0]
    assert len(bad) == 0, (opcode, len(bad), bad[:3], got[bad[:3]], expected[bad[:3]])


@pytest.mark.parametrize("to", INTS)
@pytest.mark.parametrize("of", INTS)
def test_integers(to, of):
    given = numbers(of, 3)
    x = array(given, lookup(f"cvt.{to}.{of}").ins[0])
    assert run(f"cvt.{to}.{of}", x).tolist() == [wrap(v, to) for v in given]
    clamped = [clamp(v, to) for v in given]
    if clamped == given:  # .sat only where the source has values that the destination has not
        with pytest.raises(PtxError, match=r"the modifier \.sat does not exist"):
            lookup(f"cvt.sat.{to}.{of}")
    else:
        assert run(f"cvt.sat.{to}.{of}", x).tolist() == clamped


ROUND = {
    "rni": lambda v: round(Fraction(v)), "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil,
}  # fmt: skip


def near_limits(fmt):
    """Bits of the format: the pool, halves, and the limits of the integer types with neighbours."""
    limits = [
        s * 2.0**e * f
        for e in (0, 7, 8, 15, 16, 31, 32, 63, 64)
        for s in (1, -1)
        for f in (1, 0.999, 1.001)
    ]
    limits += [v + 0.5 for v in range(-6, 7)] + [
        2.0**63 - 1024,
        2.0**64 - 2048,
        2.0**31 - 1,
        2.0**31 - 0.5,
        255.5,
        254.5,
        127.5,
        -128.5,
    ]
    if fmt != "f64":
        limits = [nearest(v, fmt, "rn") for v in limits]
    return np.concatenate([interesting(fmt, N, 6), bits_of(limits, fmt)])


@pytest.mark.parametrize("of", FLOATS)
@pytest.mark.parametrize("to", INTS)
def test_floats_to_integers(to, of):
    """Clamped; NaN is 0, or 1 << (bits - 1) if f64 or a 64-bit integer is involved."""
    x = near_limits(of)
    bits = int(to[1:])
    nan = 1 << (bits - 1) if of == "f64" or bits == 64 else 0
    for mode, op in ROUND.items():
        for ftz in ("", ".ftz") if of == "f32" else ("",):
            expected = []
            for v in values_of(x, of).tolist():
                v = flushed(v, of) if ftz else v
                if math.isnan(v):
                    expected.append(wrap(nan, to))
                elif math.isinf(v):
                    expected.append(clamp(int(math.copysign(2.0**70, v)), to))
                else:
                    expected.append(clamp(op(v), to))
            got = run(f"cvt.{mode}{ftz}.{to}.{of}", x)
            assert got.tolist() == expected, (mode, ftz)
            if of != "bf16":
                assert run(f"cvt.{mode}.sat{ftz}.{to}.{of}", x).tolist() == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("of", INTS)
def test_integers_to_floats(to, of, mode):
    given = numbers(of, 3) + [wrap((1 << k) + d, of) for k in range(64) for d in (-1, 0, 1, 3)]
    x = array(given, lookup(f"cvt.{mode}.{to}.{of}").ins[0])
    expected = [nearest(v, to, mode) for v in given]
    same(of, run(f"cvt.{mode}.{to}.{of}", x), bits_of(expected, to))
    if to != "bf16":
        clamped = [min(max(v, 0.0), 1.0) for v in expected]
        same("sat", run(f"cvt.{mode}.sat.{to}.{of}", x), bits_of(clamped, to))


PAIRS = [(to, of) for to in FLOATS for of in FLOATS if to != of]


@pytest.mark.parametrize(("to", "of"), PAIRS)
def test_floats_to_floats(to, of):
    x = interesting(of, 3 * N, 6)
    values = values_of(x, of).tolist()
    exact = bits_of([0.0], of).itemsize < bits_of([0.0], to).itemsize
    for mode in ("rn",) if exact else MODES:
        for ftz in ("", ".ftz") if "f32" in (to, of) else ("",):
            given = [flushed(v, "f32") for v in values] if ftz and of == "f32" else values
            expected = [nearest(v, to, mode) for v in given]
            if ftz and to == "f32":
                expected = [flushed(v, to) for v in expected]
            opcode = f"cvt{'' if exact else '.' + mode}{ftz}.{to}.{of}"
            same(opcode, run(opcode, x), bits_of(expected, to))
            if "bf16" not in (to, of):
                clamped = [min(v, 1.0) if v > 0 else 0.0 for v in expected]
                same("sat", run(opcode.replace(f".{to}.", f".sat.{to}."), x), bits_of(clamped, to))


@pytest.mark.parametrize("fmt", FLOATS)
def test_integral_values(fmt):
    x = near_limits(fmt)
    for mode, op in ROUND.items():
        expected = [
            v if not math.isfinite(v) or v == 0 else math.copysign(float(op(v)), v)
            for v in values_of(x, fmt).tolist()
        ]
        same(mode, run(f"cvt.{mode}.{fmt}.{fmt}", x), bits_of(expected, fmt))


def test_same_type_flushes_and_saturates():
    x = interesting("f32", N, 2)
    v = values_of(x, "f32").tolist()
    same("ftz", run("cvt.ftz.f32.f32", x), bits_of([flushed(a, "f32") for a in v], "f32"))
    same(
        "sat", run("cvt.sat.f32.f32", x), bits_of([min(a, 1.0) if a > 0 else 0.0 for a in v], "f32")
    )


@pytest.mark.parametrize("fmt", ["f16", "bf16"])
@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("satfinite", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_narrow_halves(fmt, mode, satfinite, relu):
    x = interesting("f32", 3 * N, 4)
    x[:4] = np.array([65519.99, 65520, 3.3961774e38, -3.4e38], "f4").view("u4")
    top = {"f16": 65504.0, "bf16": float(np.uint32(0x7F7F0000).view("f4"))}[fmt]
    expected = []
    for v in values_of(x, "f32").tolist():
        r = nearest(v, fmt, mode)
        if satfinite and not math.isnan(r):
            r = min(max(r, -top), top)
        if relu and not math.isnan(r):
            r = r if r > 0 else 0.0
        expected.append(r)
    mods = f".{mode}" + ".relu" * relu + ".satfinite" * satfinite
    half = bits_of(expected, fmt)
    same(fmt, run(f"cvt{mods}.{fmt}.f32", x), half)
    word = run(f"cvt{mods}.{fmt}x2.f32", x, np.roll(x, 1))
    same(fmt, word, half.astype("u4") << 16 | np.roll(half, 1))


def tf32(v, mode, satfinite, relu):
    """A Python float as tf32: f32's exponents, ten bits of mantissa."""
    if math.isnan(v):
        return v
    if not math.isinf(v) and v != 0:
        size = Fraction(abs(v))
        quantum = Fraction(2) ** (max(math.frexp(v)[1] - 1, -126) - 10)
        n, rest = divmod(size, quantum)
        up = {
            "rna": rest * 2 >= quantum,
            "rz": False,
            "rn": rest * 2 > quantum or (rest * 2 == quantum and n % 2),
        }
        size = (n + bool(up[mode])) * quantum
        v = math.copysign(math.inf if size >= 2**128 else float(size), v)
    top = 2.0**128 - 2.0**117
    if satfinite:
        v = max(min(v, top), -top)
    return v if not relu or v > 0 else 0.0


@pytest.mark.parametrize("mode", ["rna", "rn", "rz"])
@pytest.mark.parametrize("satfinite", [False, True])
def test_tf32(mode, satfinite):
    x = interesting("f32", 3 * N, 8)
    x[: N // 2] = x[: N // 2] & 0xFFFFE000 | 0x1000  # ties
    for relu in (False, True) if mode != "rna" else (False,):
        expected = [tf32(v, mode, satfinite, relu) for v in values_of(x, "f32").tolist()]
        opcode = f"cvt.{mode}" + ".satfinite" * satfinite + ".relu" * relu + ".tf32.f32"
        same(opcode, run(opcode, x), bits_of(expected, "f32"))


SMALL = {
    "e2m1": ml_dtypes.float4_e2m1fn, "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip


def small_values(fmt):
    """The finite non-negative values of a format, ascending, by ml_dtypes."""
    bits = {"e2m1": 4, "e2m3": 6, "e3m2": 6}.get(fmt, 8)
    values = np.arange(1 << (bits - 1), dtype=np.uint8).view(SMALL[fmt]).astype(np.float64)
    return values[np.isfinite(values)]


def stochastic(v, fmt, random, relu):
    """Down to a value of the format, or up where random bits carry: a Python float to a code."""
    table, sign = (
        small_values(fmt),
        1 << (3 if fmt == "e2m1" else 5 if fmt in ("e2m3", "e3m2") else 7),
    )
    if math.isnan(v):
        return 0x7F if sign == 128 else sign - 1
    code = len(table) - 1
    if abs(v) < table[-1]:
        code = int(np.searchsorted(table, abs(v), side="right")) - 1
        part = (Fraction(abs(v)) - Fraction(table[code])) / Fraction(table[code + 1] - table[code])
        code += math.floor(part * 65536) + random >= 65536
    return (
        0 if relu and math.copysign(1, v) < 0 else code | (sign if math.copysign(1, v) < 0 else 0)
    )


@pytest.mark.parametrize("fmt", list(SMALL))
@pytest.mark.parametrize("relu", [False, True])
def test_stochastic_quadruples(fmt, relu):
    """a and e read their 16 bits in reverse order, b and f as they are."""
    rng = np.random.default_rng(1)
    top = small_values(fmt)[-1]
    x = [
        rng.uniform(-1.3 * top, 1.3 * top, N).astype("f4")
        * 2.0 ** rng.integers(-9, 1, N).astype("f4")
        for _ in range(4)
    ]
    x[0][:6] = [0, -0.0, np.inf, -np.inf, np.nan, 1e-30]
    rbits = rng.integers(0, 1 << 32, N, dtype=np.uint32)
    bits = 4 if fmt == "e2m1" else 8
    got = run("cvt.rs" + ".relu" * relu + f".satfinite.{fmt}x4.f32", *x, rbits)
    for lane in range(N):
        r = int(rbits[lane])
        high, low = r >> 16, r & 0xFFFF
        if fmt == "e2m1":
            high, low = (r >> 24) << 8 | (r >> 8 & 255), (r >> 16 & 255) << 8 | (r & 255)
        random = [int(f"{high:016b}"[::-1], 2), high, int(f"{low:016b}"[::-1], 2), low]
        word = 0
        for value, bit in zip(x, random, strict=True):
            word = word << bits | stochastic(float(value[lane]), fmt, bit, relu)
        assert int(got[lane]) == word, (lane, hex(int(got[lane])), hex(word))


@pytest.mark.parametrize(("fmt", "dropped", "used"), [("f16", 13, 13), ("bf16", 16, 16)])
def test_stochastic_halves(fmt, dropped, used):
    """Normal values: the random bits are added to the mantissa bits that are dropped."""
    rng = np.random.default_rng(2)
    a, b = (rng.uniform(-8, 8, N).astype("f4").view("u4") for _ in range(2))
    rbits = rng.integers(0, 1 << 32, N, dtype=np.uint32)
    got = run(f"cvt.rs.{fmt}x2.f32", a, b, rbits)
    halves = []
    for x, r in ((a, rbits >> 16), (b, rbits & 0xFFFF)):
        up = (x + (r & ((1 << used) - 1))) >> dropped << dropped
        halves.append(bits_of(up.view("f4").tolist(), fmt).astype("u4"))
    assert (got == halves[0] << 16 | halves[1]).all()


@pytest.mark.parametrize("fmt", list(SMALL))
def test_relu_of_small_formats(fmt):
    """.relu is the plain conversion with negative codes as zero."""
    x = interesting("f32", 3 * N, 3)
    y = np.roll(x, 5)
    plain = run(f"cvt.rn.satfinite.{fmt}x2.f32", x, y)
    positive = [
        np.where(np.signbit(v.view("f4")) & ~np.isnan(v.view("f4")), np.uint32(0), v)
        for v in (x, y)
    ]
    same(
        "relu",
        run(f"cvt.rn.satfinite.relu.{fmt}x2.f32", x, y),
        run(f"cvt.rn.satfinite.{fmt}x2.f32", *positive),
    )
    back = run(f"cvt.rn.f16x2.{fmt}x2", plain)
    halves = back.view("f2")
    expected = np.where(np.isnan(halves), halves, np.where(halves > 0, halves, np.float16(0))).view(
        "u4"
    )
    same("relu back", run(f"cvt.rn.relu.f16x2.{fmt}x2", plain), expected)


def test_scaled_bf16_from_small():
    """cvt.rn.scaled::n2::ue8m0.bf16x2: each value times its scale."""
    codes = np.arange(256, dtype="u2")
    scale = (np.uint16(130) << 8 | np.uint16(120)).repeat(256).astype("u2")
    word = run("cvt.rn.scaled::n2::ue8m0.bf16x2.e4m3x2", codes << 8 | codes, scale)
    v = codes.astype("u1").view(ml_dtypes.float8_e4m3fn).astype("f4")
    for half, factor in ((word >> 16, 8.0), (word & 0xFFFF, 2.0**-7)):
        same("scaled", half.astype("u2"), bits_of((v * factor).tolist(), "bf16"))


def test_ue8m0_edges():
    """Subnormals, zero, negative numbers, infinity and NaN; a in the upper byte."""
    x = np.array(
        [0, 2.0**-127, 2.0**-127 * 1.5, 2.0**-149, -3, 1, 1.5, 2.0**127 * 1.5, np.inf, np.nan], "f4"
    )
    expected = {
        "rz": [0, 0, 0, 0, 128, 127, 127, 254, 255, 255],
        "rp": [0, 0, 1, 0, 129, 127, 128, 255, 255, 255],
    }
    for mode, codes in expected.items():
        assert (
            run(f"cvt.{mode}.ue8m0x2.f32", x, x[::-1]) == np.array(codes) * 256 + codes[::-1]
        ).all()
        finite = [min(c, 254) if i < 9 else 255 for i, c in enumerate(codes)]
        assert (run(f"cvt.{mode}.satfinite.ue8m0x2.f32", x, x) == np.array(finite) * 257).all()
    assert run("cvt.rn.bf16x2.ue8m0x2", np.array([0x00FF, 0x7F80], "u2")).tolist() == [
        0x00407FFF,
        0x3F804000,
    ]


def test_cvt_pack():
    a, b, c = numbers("s32", 1), numbers("s32", 2), numbers("u32", 3)
    x, y, z = array(a, "i4"), array(b, "i4"), array(c, "u4")
    for t in ("u16", "s16", "u2", "s2", "u4", "s4", "u8", "s8"):
        bits = int(t[1:])
        pair = [
            clamp(v, t) % (1 << bits) << bits | clamp(w, t) % (1 << bits)
            for v, w in zip(a, b, strict=True)
        ]
        if bits == 16:
            assert run(f"cvt.pack.sat.{t}.s32", x, y).tolist() == pair
        else:
            expected = [(p | w << (2 * bits)) & 0xFFFFFFFF for p, w in zip(pair, c, strict=True)]
            assert run(f"cvt.pack.sat.{t}.s32.b32", x, y, z).tolist() == expected
