"""mma.sync by the manual's formulas: one loop per fragment element, no code of the package.

PTX ISA 9.2, section 9.7.14.5: `row` and `col` of a_i, b_i and c_i as printed there for every shape.
"""

from __future__ import annotations

import math

import numpy as np

# (shape, bits of an element): (row, col) of a_i in a lane with groupID g and threadID_in_group t.
A = {
    ("m16n8k8", 16): lambda g, t, i: (g if i < 2 else g + 8, t * 2 + (i & 1)),
    ("m16n8k16", 16): lambda g, t, i: (
        g if 0 <= i < 2 or 4 <= i < 6 else g + 8,
        t * 2 + (i & 1) + (8 if i >= 4 else 0),
    ),
    ("m16n8k4", 32): lambda g, t, i: (g if i == 0 else g + 8, t),
    ("m16n8k8", 32): lambda g, t, i: (g if i in (0, 2) else g + 8, t if i < 2 else t + 4),
    ("m8n8k16", 8): lambda g, t, i: (g, t * 4 + i),
    ("m16n8k16", 8): lambda g, t, i: (g if i < 4 else g + 8, t * 4 + (i & 3)),
    ("m16n8k32", 8): lambda g, t, i: (
        g if 0 <= i < 4 or 8 <= i < 12 else g + 8,
        t * 4 + (i & 3) + (16 if i >= 8 else 0),
    ),
    ("m8n8k32", 4): lambda g, t, i: (g, t * 8 + i),
    ("m16n8k32", 4): lambda g, t, i: (g if i < 8 else g + 8, t * 8 + (i & 7)),
    ("m16n8k64", 4): lambda g, t, i: (
        g if 0 <= i < 8 or 16 <= i < 24 else g + 8,
        t * 8 + (i & 7) + (32 if i >= 16 else 0),
    ),
    ("m8n8k128", 1): lambda g, t, i: (g, t * 32 + i),
    ("m16n8k128", 1): lambda g, t, i: (g if i < 32 else g + 8, t * 32 + (i & 31)),
    ("m16n8k256", 1): lambda g, t, i: (
        g if i < 32 or 64 <= i < 96 else g + 8,
        t * 32 + (i & 31) + (128 if i >= 64 else 0),
    ),
    ("m8n8k4", 64): lambda g, t, i: (g, t),
    ("m16n8k4", 64): lambda g, t, i: (g if i == 0 else g + 8, t),
    ("m16n8k8", 64): lambda g, t, i: (g if i in (0, 2) else g + 8, t if i < 2 else t + 4),
    ("m16n8k16", 64): lambda g, t, i: (g if i % 2 == 0 else g + 8, i // 2 * 4 + t),
}
B = {
    ("m16n8k8", 16): lambda g, t, i: (t * 2 + i, g),
    ("m16n8k16", 16): lambda g, t, i: (t * 2 + (i & 1) + (8 if i >= 2 else 0), g),
    ("m16n8k4", 32): lambda g, t, i: (t, g),
    ("m16n8k8", 32): lambda g, t, i: (t if i == 0 else t + 4, g),
    ("m8n8k16", 8): lambda g, t, i: (t * 4 + i, g),
    ("m16n8k16", 8): lambda g, t, i: (t * 4 + i, g),
    ("m16n8k32", 8): lambda g, t, i: (t * 4 + (i & 3) + (16 if i >= 4 else 0), g),
    ("m8n8k32", 4): lambda g, t, i: (t * 8 + i, g),
    ("m16n8k32", 4): lambda g, t, i: (t * 8 + i, g),
    ("m16n8k64", 4): lambda g, t, i: (t * 8 + (i & 7) + (32 if i >= 8 else 0), g),
    ("m8n8k128", 1): lambda g, t, i: (t * 32 + i, g),
    ("m16n8k128", 1): lambda g, t, i: (t * 32 + i, g),
    ("m16n8k256", 1): lambda g, t, i: (t * 32 + (i & 31) + (128 if i >= 32 else 0), g),
    ("m8n8k4", 64): lambda g, t, i: (t, g),
    ("m16n8k4", 64): lambda g, t, i: (t, g),
    ("m16n8k8", 64): lambda g, t, i: (t + 4 * i, g),
    ("m16n8k16", 64): lambda g, t, i: (t + 4 * i, g),
}


def c_place(m, g, t, i):
    """Row and col of c_i: all shapes but m8n8k4 with f16."""
    return (g if m == 8 or i < 2 else g + 8, t * 2 + (i & 1))


def value(fmt, code):
    """The number of one code, by the definition of its format."""
    code = int(code)
    if fmt == "f64":
        return float(np.uint64(code).view(np.float64))
    if fmt in ("f32", "tf32"):
        return float(np.uint32(code & (0xFFFFE000 if fmt == "tf32" else 0xFFFFFFFF)).view("f4"))
    if fmt == "f16":
        return float(np.uint16(code).view(np.float16))
    if fmt == "bf16":
        return float(np.uint32(code << 16).view(np.float32))
    if fmt == "b1" or (fmt[0] == "u" and fmt[1:].isdigit()):
        return code
    if fmt[0] == "s" and fmt[1:].isdigit():
        return code - (1 << int(fmt[1:])) if code >> (int(fmt[1:]) - 1) else code
    if fmt == "ue8m0":
        return math.nan if code == 255 else 2.0 ** (code - 127)
    if fmt == "ue4m3":
        return value("e4m3", code & 127)
    exp_bits, man_bits = int(fmt[1]), int(fmt[3])
    bias = 2 ** (exp_bits - 1) - 1
    mantissa = code & ((1 << man_bits) - 1)
    exponent = code >> man_bits & ((1 << exp_bits) - 1)
    sign = -1.0 if code >> (exp_bits + man_bits) & 1 else 1.0
    if fmt == "e4m3" and exponent == 15 and mantissa == 7:
        return math.nan
    if fmt == "e5m2" and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - man_bits)
    return sign * (1 + mantissa / 2**man_bits) * 2.0 ** (exponent - bias)


def code_of(registers, i, bits):
    """Element i of one lane's registers, the first in the low bits."""
    per = max(1, 32 // bits)
    return int(registers[i // per]) >> (i % per * bits) & ((1 << bits) - 1)


def dot(xs, ys, c):
    """The sum of products and c, rounded once to float64, and its biggest term (IEEE NaN, inf)."""
    terms = [x * y for x, y in zip(xs, ys, strict=True)] + [c]
    if all(math.isfinite(term) for term in terms):
        return math.fsum(terms), max(map(abs, terms))
    return sum(terms), math.inf


def collect(place, registers, bits, shape, convert):
    """The matrix of one warp's fragments registers [32, n]."""
    matrix = np.empty(shape)
    for lane in range(32):
        for i in range(registers.shape[1] * max(1, 32 // bits)):
            row, col = place(lane >> 2, lane % 4, i)
            matrix[row, col] = convert(code_of(registers[lane], i, bits))
    return matrix
