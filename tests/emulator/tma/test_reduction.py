"""Reductions value by value against Python, and the rules of copies without a tensor map."""

import math
import random
import struct

import numpy as np
import pytest

from blockscale.emulator.errors import IllegalOperation
from blockscale.emulator.tma import combine
from blockscale.emulator.tma.bulk import check_async, check_bulk, check_ignored, masked_offsets

INTEGERS = {"u32": (4, False), "s32": (4, True), "b32": (4, False)} | {
    "u64": (8, False),
    "s64": (8, True),
    "b64": (8, False),
}
LEGAL = {
    "add": ("u32", "s32", "u64"),
    "min": ("u32", "s32", "u64", "s64"),
    "max": ("u32", "s32", "u64", "s64"),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
}


def expected(operation, old, source):
    """The manual's words, in unbounded integers (atom: .inc and .dec wrap at the source)."""
    return {
        "add": old + source,
        "min": min(old, source),
        "max": max(old, source),
        "inc": 0 if old >= source else old + 1,
        "dec": source if old == 0 or old > source else old - 1,
        "and": old & source,
        "or": old | source,
        "xor": old ^ source,
    }[operation]


@pytest.mark.parametrize(
    ("operation", "element"), [(op, kind) for op, kinds in LEGAL.items() for kind in kinds]
)
def test_integers(operation, element):
    size, signed = INTEGERS[element]
    rng = random.Random(f"{operation} {element}")
    low, high = (-(1 << 8 * size - 1), (1 << 8 * size - 1) - 1) if signed else (0, 256**size - 1)
    some = [low, high, 0, 1, 5] + [rng.randint(low, high) for _ in range(20)]
    pairs = [(a, b) for a in some for b in some]
    old, source = (
        np.frombuffer(
            b"".join(pair[side].to_bytes(size, "little", signed=signed) for pair in pairs), np.uint8
        ).reshape(-1, size)
        for side in (0, 1)
    )
    got = combine(operation, element, old, source)
    want = b"".join(
        (expected(operation, a, b) % 256**size).to_bytes(size, "little") for a, b in pairs
    )
    assert got.tobytes() == want


def half_value(bits, element):
    if element == "f16":
        return struct.unpack("<e", struct.pack("<H", bits))[0]
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def half_bits(value, element):
    """Nearest 16-bit float of a value with at most 53 bits, ties to even, by search."""
    if math.isinf(value) or math.isnan(value):
        infinity = 0x7C00 if element == "f16" else 0x7F80
        return 0x7FFF if math.isnan(value) else infinity | (value < 0) << 15
    low, high = 0, 0x7C00 if element == "f16" else 0x7F80
    limit = 65536.0 if element == "f16" else 2.0**128
    size = abs(value)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if half_value(middle, element) <= size else (low, middle)
    upper = half_value(high, element) if math.isfinite(half_value(high, element)) else limit
    down, up = size - half_value(low, element), upper - size
    bits = low if down < up or (down == up and low % 2 == 0) else high
    return bits | (math.copysign(1, value) < 0) << 15


@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_halves_add(element):
    """Sums round once, to nearest even; subnormals stay (.noftz); NaN is 0x7FFF."""
    rng = random.Random(element)
    special = [0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x7BFF, 0x7C00, 0xFC00, 0x7F80, 0xFF80, 0x7FC1]
    pairs = [(a, b) for a in special for b in special]
    pairs += [(rng.randrange(65536), rng.randrange(65536)) for _ in range(4000)]
    near = [rng.randrange(65536) for _ in range(2000)]
    pairs += [(a, (a + rng.randrange(-3000, 3000)) & 0x7FFF | 0x8000) for a in near]
    old, source = (np.array(side, np.uint16) for side in zip(*pairs, strict=True))
    got = combine("add", element, old.view(np.uint8), source.view(np.uint8)).view(np.uint16)
    values = [half_value(a, element) + half_value(b, element) for a, b in pairs]
    assert got.tolist() == [half_bits(value, element) for value in values]


@pytest.mark.parametrize("element", ["f16", "bf16"])
@pytest.mark.parametrize("operation", ["min", "max"])
def test_halves_compare(element, operation):
    """A number wins over NaN, and -0 is below +0."""
    rng = random.Random(operation)
    special = [0, 0x8000, 1, 0x8001, 0x7C00, 0xFC00, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF]
    pairs = [(a, b) for a in special for b in special]
    pairs += [(rng.randrange(65536), rng.randrange(65536)) for _ in range(2000)]
    old, source = (np.array(side, np.uint16) for side in zip(*pairs, strict=True))
    got = combine(operation, element, old.view(np.uint8), source.view(np.uint8)).view(np.uint16)
    for (a, b), result in zip(pairs, got.tolist(), strict=True):
        values = {bits: half_value(bits, element) for bits in (a, b)}
        numbers = [bits for bits in (a, b) if not math.isnan(values[bits])]
        order = {bits: (values[bits], math.copysign(1, values[bits])) for bits in numbers}
        pick = min if operation == "min" else max
        assert result == (pick(numbers, key=order.get) if numbers else 0x7FFF)


def test_float_adds_flush_only_if_asked():
    """cp.reduce.async.bulk.add.f32 flushes subnormals to zero of their sign."""
    bits = [0x00000001, 0x80000001, 0x00800000, 0x3F800000, 0x7F800000]
    other = [0x00000001, 0x80000001, 0x80000001, 0x33800000, 0xFF800000]
    old, source = (np.array(side, np.uint32).view(np.uint8) for side in (bits, other))
    kept = combine("add", "f32", old, source).view(np.uint32).tolist()
    flushed = combine("add", "f32", old, source, ftz=True).view(np.uint32).tolist()
    assert kept == [2, 0x80000002, 0x007FFFFF, 0x3F800000, 0x7FFFFFFF]
    assert flushed == [0, 0x80000000, 0x00800000, 0x3F800000, 0x7FFFFFFF]


def test_double_adds():
    old, source = np.array([1.0, np.inf, 5e-324]), np.array([1e-300, -np.inf, 5e-324])
    got = combine("add", "f64", old.view(np.uint8), source.view(np.uint8)).view(np.float64)
    assert got[0] == 1.0
    assert np.isnan(got[1])
    assert got[2] == 1e-323


def test_byte_masks_repeat_every_16_bytes():
    assert masked_offsets(48, 0x8001).tolist() == [0, 15, 16, 31, 32, 47]
    assert masked_offsets(32, 0xFFFF).size == 32


@pytest.mark.parametrize(
    ("destination", "source", "size", "sentence"),
    [
        (8, 0, 16, "destination address 0x8 is not a multiple of 16"),
        (16, 4, 16, "source address 0x4 is not a multiple of 16"),
        (None, 0, 24, "size 24 is not a multiple of 16"),
    ],
)
def test_bulk_rules(destination, source, size, sentence):
    check_bulk("cp.async.bulk", 16, 32, 0)
    with pytest.raises(IllegalOperation, match=sentence):
        check_bulk("cp.async.bulk", destination, source, size)


@pytest.mark.parametrize(
    ("cache", "destination", "source", "size", "source_size", "sentence"),
    [
        ("cg", 0, 0, 8, 8, r"cp-size 8 .*\(16,\) with \.cg"),
        ("ca", 0, 0, 4, 5, "src-size 5 is more than cp-size 4"),
        ("ca", 4, 0, 8, 8, "destination address 0x4 is no multiple of cp-size 8"),
        ("ca", 8, 4, 8, 8, "source address 0x4 is no multiple of cp-size 8"),
    ],
)
def test_cp_async_rules(cache, destination, source, size, source_size, sentence):
    check_async("cp.async", "ca", 4, 8, 4, 3)
    check_async("cp.async", "cg", 16, 3, 16, 0)  # a source of 0 bytes is not read
    with pytest.raises(IllegalOperation, match=sentence):
        check_async("cp.async", cache, destination, source, size, source_size)


def test_ignored_bytes_are_at_most_15():
    check_ignored("cp.async.bulk", 0, 15)
    with pytest.raises(IllegalOperation, match="ignoreBytesRight is 16"):
        check_ignored("cp.async.bulk", 3, 16)
