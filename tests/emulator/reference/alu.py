"""Rounding with fractions, one number at a time: the reference of the scalar instructions."""

import math
from fractions import Fraction

import numpy as np

FORMATS = {
    "f16": (11, -14, 15),
    "bf16": (8, -126, 127),
    "f32": (24, -126, 127),
    "f64": (53, -1022, 1023),
}
NUMPY = {"f16": np.float16, "f32": np.float32, "f64": np.float64}


def magnitude(value):
    """floor(log2(value)) of a positive fraction."""
    e = value.numerator.bit_length() - value.denominator.bit_length()
    return e if Fraction(2) ** e <= value else e - 1


def rounded(value, fmt, mode):
    """A fraction other than zero as a Python float of that format (inf: overflow)."""
    p, emin, emax = FORMATS[fmt]
    size, negative = abs(value), value < 0
    quantum = Fraction(2) ** (max(magnitude(size), emin) - p + 1)
    units = size / quantum
    n = math.floor(units)
    rest = units - n
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and n % 2 == 1),
        "rna": rest >= Fraction(1, 2),
        "rz": False,
        "rm": negative and rest > 0,
        "rp": not negative and rest > 0,
    }[mode]
    result = (n + up) * quantum
    if result > (2 - Fraction(2) ** (1 - p)) * Fraction(2) ** emax:
        away = (
            mode in ("rn", "rna") or (mode == "rm" and negative) or (mode == "rp" and not negative)
        )
        big = math.inf if away else float((2 - Fraction(2) ** (1 - p)) * Fraction(2) ** emax)
        return -big if negative else big
    return -float(result) if negative else float(result)


def flushed(x, fmt):
    return math.copysign(0.0, x) if abs(x) < 2.0 ** FORMATS[fmt][1] else x


def exact(op, args):
    """The fraction of an operation on finite numbers, or the float of a special case."""
    with np.errstate(all="ignore"):
        if not all(map(math.isfinite, args)):
            if op == "fma" and all(map(math.isfinite, args[:2])):
                return args[2]  # however large the product
            f = [np.float64(a) for a in args]
            return float(
                {
                    "add": lambda a, b: a + b, "sub": lambda a, b: a - b,
                    "mul": lambda a, b: a * b, "div": lambda a, b: a / b,
                    "fma": lambda a, b, c: a * b + c, "rcp": lambda a: 1 / a, "sqrt": np.sqrt,
                }[op](*f)
            )  # fmt: skip
        if (op == "div" and args[1] == 0) or (op == "rcp" and args[0] == 0):
            return float(np.float64(args[0] if op == "div" else 1) / np.float64(args[-1]))
        if op == "sqrt":
            if args[0] <= 0:
                return float(np.sqrt(np.float64(args[0])))
            root = math.isqrt(int(Fraction(args[0]) * 4**1200))
            sticky = 0 if Fraction(root) ** 2 == Fraction(args[0]) * 4**1200 else Fraction(1, 2)
            return (root + sticky) / Fraction(2) ** 1200
    f = [Fraction(a) for a in args]
    return {
        "add": lambda: f[0] + f[1], "sub": lambda: f[0] - f[1], "mul": lambda: f[0] * f[1],
        "div": lambda: f[0] / f[1], "rcp": lambda: 1 / f[0], "fma": lambda: f[0] * f[1] + f[2],
    }[op]()  # fmt: skip


def zero(op, args, mode):
    """The signed zero of an exact result of zero."""
    sign = [math.copysign(1, a) for a in args]
    if op in ("mul", "div"):
        return math.copysign(0.0, sign[0] * sign[1])
    first = sign[0] * (sign[1] if op == "fma" else 1)
    other = sign[-1] * (-1 if op == "sub" else 1)
    if first == other:
        return math.copysign(0.0, first)
    return -0.0 if mode == "rm" else 0.0


def operate(op, args, fmt, mode, ftz=False, sat=False):
    """One instruction on Python floats."""
    if ftz:
        args = [flushed(a, fmt) for a in args]
    value = exact(op, args)
    if isinstance(value, Fraction):
        r = rounded(value, fmt, mode) if value else zero(op, args, mode)
    else:
        r = value
    if ftz:
        r = flushed(r, fmt)
    if sat:
        r = min(r, 1.0) if r > 0 else 0.0
    return r


def bits_of(values, fmt):
    """Python floats, all of them values of the format, as bits; NaN is the canonical one."""
    x = np.array(values, np.float64)
    with np.errstate(all="ignore"):
        if fmt == "bf16":
            bits = (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        else:
            bits = x.astype(NUMPY[fmt]).view(f"u{NUMPY[fmt]().itemsize}")
    nan = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0x7FFFFFFFFFFFFFFF}[fmt]
    return np.where(np.isnan(x), bits.dtype.type(nan), bits)


def values_of(bits, fmt):
    """Bits as float64."""
    with np.errstate(all="ignore"):
        if fmt == "bf16":
            return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return bits.view(NUMPY[fmt]).astype(np.float64)


def interesting(fmt, n, seed):
    """Bits of a format: specials, subnormals, powers of two, close and far values."""
    width = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}[fmt]
    p = FORMATS[fmt][0]
    rng = np.random.default_rng(seed)
    top = ((1 << (width - p)) - 1) << (p - 1)  # infinity
    one = (top >> 1) & ~((1 << (p - 1)) - 1)
    special = [0, 1, 2, (1 << (p - 1)) - 1, 1 << (p - 1), (1 << (p - 1)) + 1, one - 1, one, one + 1]
    special += [top - 1, top, top | (1 << (p - 2)), one + (1 << (p - 1)), one + 3]
    sign = 1 << (width - 1)
    special += [s | sign for s in special]
    random = [int(v) for v in rng.integers(0, 1 << min(width, 63), n // 2, dtype=np.uint64)]
    near = [int(one + v) for v in rng.integers(-(30 << (p - 1)) // 8, (30 << (p - 1)) // 8, n)]
    pool = np.array([*special, *random, *near], dtype=object)
    picked = [
        int(v) ^ (sign if flip else 0)
        for v, flip in zip(rng.choice(pool, n), rng.random(n) < 0.5, strict=True)
    ]
    return np.array(picked, dtype=np.uint64).astype(f"u{width // 8}")
