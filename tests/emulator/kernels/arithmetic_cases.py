"""Cases of arithmetic.cu: exact results in float64 or Python integers, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np

from tests.emulator.kernels.cuda_kernels import Case, nans
from tests.emulator.kernels.kind_cases import FORMATS
from tests.reference import core as reference

Generator = np.random.Generator
F32, F64 = np.float32, np.float64
MASK = 2**32 - 1


def close(got: np.ndarray, want: list[tuple[np.ndarray, float]]) -> Callable[[], str | None]:
    """Judge got[j] against (values, largest relative error) j; error 0: equal, ±0 apart."""

    def judge() -> str | None:
        for j, (value, tolerance) in enumerate(want):
            exact = np.asarray(value)
            if tolerance:
                bad = ~(np.abs(got[j] - exact) <= tolerance * np.abs(exact))
            else:
                bad = got[j] != exact
                if got.dtype.kind == "f":
                    bad |= np.signbit(got[j]) != np.signbit(exact)
            if bad.any():
                i = int(np.flatnonzero(bad)[0])
                where = f"result {j}: {bad.sum()} wrong, the first at {i}"
                return f"{where}: {got[j, i]!r} instead of {exact[i]!r}"
        return None

    return judge


def _signed(value: int, bits: int = 32) -> int:
    return (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


def _truncate(a: int, b: int) -> int:
    return (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1) if b else 0


def _pairs(a: int, b: int) -> list[tuple[int, int]]:
    """Return the bytes of two words, side by side."""
    return list(zip(a.to_bytes(4, "little"), b.to_bytes(4, "little"), strict=True))


def _permute(a: int, b: int, selector: int) -> int:
    source = (a & MASK | (b & MASK) << 32).to_bytes(8, "little")
    return sum(source[selector >> 4 * i & 7] << 8 * i for i in range(4))


def _integers(a: int, b: int) -> list[int]:
    """Return what kernel `integers` writes for one pair."""
    ua, ub = a & MASK, b & MASK
    wide = _signed((a << 20) ^ b, 64)
    uwide = wide & (1 << 64) - 1
    left = ((ub << 32 | ua) << (b & 31)) >> 32 & MASK
    right = (ub << 32 | ua) >> min(b & 63, 32) & MASK
    dot = sum(_signed(x, 8) * _signed(y, 8) for x, y in _pairs(ua, ub))
    position, length = b & 31, 7
    field = sum((ua >> min(position + i, 31) & 1) << i for i in range(length))
    insert = ub & ~(0x7FF << 9) | (ua & 0x7FF) << 9
    add4 = sum((x + y & 255) << 8 * i for i, (x, y) in enumerate(_pairs(ua, ub)))
    return [
        _truncate(a, b),
        a - _truncate(a, b) * b if b else 0,
        ua // ub if ub else 0,
        _truncate(wide, b),
        _signed(uwide % ub, 64) if ub else 0,
        a * b >> 32,
        ua * ub >> 32,
        wide * (b << 13) >> 64,
        32 - ua.bit_length(),
        ua.bit_count(),
        int(f"{ua:032b}"[::-1], 2),
        (ua & -ua).bit_length(),
        _permute(ua, ub, 0x5F24),
        left,
        right,
        _signed(dot + 77),
        abs(ua - ub) + 5 & MASK,
        a >> (b & 31),
        ua >> (b & 31),
        (64 - uwide.bit_length()) * 100 + uwide.bit_count(),
        max(min(a, b), -1000) + abs(a >> 1),
        (a & b) | (~a & 0x5555) ^ b,
        _signed(a, 8) * (b & 0xFFFF) + _signed(b, 16),
        _signed(_signed(_signed(a, 24) * _signed(b, 24)) + a * b, 64),
        _signed(field, length),
        insert,
        add4,
        ((a + b + 1 >> 1) + (ua + ub >> 1)) & MASK,
    ]


def integers(rng: Generator) -> Case:
    x, y = (rng.integers(-(2**31), 2**31, 64) >> rng.integers(0, 32, 64) for _ in range(2))
    x[:3], y[:3] = (0, 5, -7), (3, 0, -1)
    out = np.full((28, 64), -1, np.int64)
    want = np.array([_integers(int(a), int(b)) for a, b in zip(x, y, strict=True)]).T
    args = [x.astype(np.int32), y.astype(np.int32), out, 64]
    judge = close(out, [(row, 0) for row in want])
    return Case("arithmetic", "integers", args, judge, grid=(2,), threads=32)


def rounded(value: np.ndarray, mode: str = "n") -> np.ndarray:
    """Return exact float64 values as float32: to nearest even, towards zero, up or down."""
    near = value.astype(F32)
    low = np.where(near.astype(F64) > value, np.nextafter(near, F32(-np.inf)), near)
    high = np.where(near.astype(F64) < value, np.nextafter(near, F32(np.inf)), near)
    by_mode = {"n": near, "d": low, "u": high, "z": np.where(value < 0, high, low)}
    return by_mode[mode]


def _quotient_rz(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    near = (a.astype(F64) / b).astype(F32)
    off = [
        abs(Fraction(float(q)) * Fraction(float(y))) > abs(Fraction(float(x)))
        for q, x, y in zip(near, a, b, strict=True)
    ]
    return np.where(off, np.nextafter(near, F32(0)), near)


def floats(rng: Generator) -> Case:
    """16-bit significands: sums, products and a * b + 1 are exact in float64."""
    n = 96
    significands = rng.integers(1, 2**15, (2, n)) * rng.choice([-1, 1], (2, n))
    a32, b32 = (significands * 2.0 ** rng.integers(-14, -8, (2, n))).astype(F32)
    a, b = a32.astype(F64), b32.astype(F64)
    out = nans(29, n)
    cut = (a32.view(np.uint32) & np.uint32(0xFFFF0000)).view(F32)
    with np.errstate(all="ignore"):
        want = [
            (rounded(a + b), 0),
            (a32 / b32, 0),
            (np.sqrt(np.abs(a32)), 0),
            (rounded(a * b - a), 0),
            (rounded(a + b, "z"), 0),
            (rounded(a * b, "u"), 0),
            (rounded(a * b + 1, "d"), 0),
            (_quotient_rz(a32, b32), 0),
            (rounded(np.minimum(a, b) * np.maximum(a, 0.5)), 0),
            (np.rint(a) + 0.0, 0),
            (np.floor(rounded(a * 3).astype(F64)) + 0.0, 0),
            (np.maximum(np.trunc(a), 0) + 0.0, 0),
            (rounded(np.trunc(a) + np.ceil(b) * 1024), 0),
            (np.copysign(np.rint(a), b), 0),
            (rounded(cut.astype(F64) - a) + 0.0, 0),
            ((a * b + 1e-3).astype(F32), 0),
            (np.sqrt(np.abs(b)).astype(F32) / F32(3), 0),
            (np.where(a < 0, 3.0, 4.0), 0),
            (rounded(a * b, "u"), 0),
            (rounded(np.trunc(a * 65536)) + 0.0, 0),
            (np.clip(a, 0, 1) + 0.0, 0),
            (np.exp(np.minimum(a, 20)), 3e-7),
            (np.log((np.abs(a32) + F32(1e-3)).astype(F64)), 1e-6),
            (1 / np.sqrt(np.abs(b)), 3e-7),
            (np.tanh(b), 1e-6),
            (np.sin(a), 1e-5),
            (np.exp2(b), 3e-7),
            (np.exp(np.minimum(b, 10)), 1e-5),
            (a / b, 3e-7),
        ]
    args = [a32, b32, out, n]
    return Case("arithmetic", "floats", args, close(out, want), grid=(3,), threads=32)


def _bf16(value: np.ndarray) -> np.ndarray:
    """Return float64 values as bfloat16 bits, rounded once to nearest even; no subnormals."""
    bits = np.asarray(value, F64).view(np.uint64)
    cut = np.uint64(52 - 7)
    half = (np.uint64(1) << cut - np.uint64(1)) - np.uint64(1) + (bits >> cut & np.uint64(1))
    kept = ((bits + half) >> cut << cut).view(F64).astype(F32)
    return (kept.view(np.uint32) >> 16).astype(np.uint16)


def halves(rng: Generator) -> Case:
    n = 96
    a, b = ((rng.standard_normal(n) * 4).astype(np.float16) for _ in range(2))
    a[:4] = b[:4]
    x, y = a.view(np.uint16), b.view(np.uint16)
    c, d = ((bits.astype(np.uint32) << 16).view(F32).astype(F64) for bits in (x, y))
    a64, b64 = a.astype(F64), b.astype(F64)
    f17 = F32(1.7)

    def f16(value):
        return np.asarray(value).astype(np.float16).view(np.uint16)

    cut = (b.astype(F32) * f17).astype(F64)
    near = cut.astype(np.float16)
    toward = np.where(np.abs(near) > np.abs(cut), np.nextafter(near, np.float16(0)), near)
    compare = (a == b) | (a < b) << 1 | (c >= d) << 3 | (c != d) << 4
    want = [
        f16(a64 + b64),
        f16(a64 * b64),
        f16(a64 * b64 + a64),
        f16(a64 * b64 + b64),
        f16(b64 * b64 + a64),
        f16(np.maximum(a, b)),
        f16((a.astype(F32) * f17).astype(F64)),
        f16(toward),
        f16(np.trunc(a64) + 0.0),
        _bf16(c + d),
        _bf16(c * d + c),
        _bf16(c * d),
        _bf16((c.astype(F32) * f17).astype(F64)),
        _bf16(np.minimum(c, d)),
        compare,
        f16(np.abs(a64) - b64),
    ]
    out = np.full((16, n), 0xFFFF, np.uint16)
    judge = close(out, [(row, 0) for row in want])
    return Case("arithmetic", "halves", [x, y, out, n], judge, grid=(3,), threads=32)


def _nearest(name: str, value: np.ndarray) -> np.ndarray:
    """Return the codes of a narrow float, to nearest even, saturating: a search in its table."""
    table = FORMATS[name].values()
    table = table[: len(table) // 2]
    table = table[np.isfinite(table)]
    distance = np.abs(np.minimum(np.abs(value), table[-1])[..., None] - table)
    tie = np.arange(len(table)) % 2 * 1e-12 * table  # prefer the even code
    code = (distance + tie).argmin(-1)
    return (code | np.signbit(value) << FORMATS[name].bits - 1).astype(np.uint16)


def narrow(rng: Generator) -> Case:
    n = 256
    x = (rng.standard_normal((n, 2)) * 2.0 ** rng.integers(-18, 18, (n, 2))).astype(F32)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 1e-9, 464, 480, 61440, 7e4], F32)
    x[: len(ties), 0], x[: len(ties), 1] = ties, -ties
    codes = {name: _nearest(name, x.astype(F64)) for name in ("e2m1", "e4m3", "e5m2")}
    exponent = np.log2(np.abs(x).astype(F64))
    up, down = (np.clip(f(exponent) + 127, 0, 254).astype(np.uint16) for f in (np.ceil, np.floor))
    rows = [codes["e2m1"][:, 0] | codes["e2m1"][:, 1] << 4]
    rows += [c[:, 0] | c[:, 1] << 8 for c in (codes["e4m3"], codes["e5m2"], up, down)]
    for name in ("e2m1", "e4m3", "e5m2"):
        back = FORMATS[name].values()[codes[name]].astype(np.float16)
        rows += list(back.view(np.uint16).T)
    scale = reference.ue8m0_decode(np.arange(n))
    bits = (scale.astype(F32).view(np.uint32) >> 16).astype(np.uint16)
    rows.append(np.where(np.isnan(scale), 0x7FFF, bits))
    out = np.full((12, n), 0xFFFF, np.uint16)
    judge = close(out, [(row, 0) for row in rows])
    return Case("arithmetic", "narrow", [x, out, n], judge, grid=(2,), threads=128)
