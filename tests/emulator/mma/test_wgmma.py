"""wgmma.mma_async against the manual's fragment formulas and shared-memory layouts, in loops."""

from __future__ import annotations

import re

import numpy as np
import pytest

from blockscale.emulator.errors import IllegalOperation, PtxError
from blockscale.emulator.mma.wgmma import parse_wgmma
from tests.emulator.reference import mma as manual

SIZE = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
OPCODES = [
    "m64n8k16.f32.f16.f16",
    "m64n24k16.f16.f16.f16",
    "m64n256k16.f32.bf16.bf16",
    "m64n40k8.f32.tf32.tf32",
    "m64n16k32.f32.e4m3.e5m2",
    "m64n16k32.f16.e5m2.e5m2",
    "m64n32k32.s32.s8.u8",
    "m64n32k32.s32.u8.s8.satfinite",
    "m64n8k256.s32.b1.b1.and.popc",
]


def parse(tail):
    return parse_wgmma(f"wgmma.mma_async.sync.aligned.{tail}")


def d_place(thread, i):
    """Row and column of d_i (section 9.7.15.5.1, D fragments)."""
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2)
    return row, 8 * (i // 4) + 2 * (thread % 4) + i % 2


def a_byte_place(thread, register, byte):
    """Row and byte of K of A's registers: all types are 32-bit words in 16-byte halves of K."""
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register % 2)
    return row, 16 * (register // 2) + 4 * (thread % 4) + byte


def values(fmt, octets):
    """The numbers [rows, k] of bytes [rows, 32]."""
    if fmt == "b1":
        return np.unpackbits(octets, axis=1, bitorder="little").astype(float)
    codes = octets.view(f"u{SIZE[fmt]}")
    return np.array([[manual.value(fmt, code) for code in row] for row in codes])


def operands(op, rng, groups):
    a = rng.integers(0, 256, (groups, 64, 32), dtype=np.uint8)
    b = rng.integers(0, 256, (groups, op.n, 32), dtype=np.uint8)
    if op.a_type in ("f16", "bf16", "e4m3", "e5m2", "tf32"):  # no NaN, no infinity
        mask = 0xBF
        step = SIZE[op.a_type]
        a[..., step - 1 :: step] &= mask
        b[..., step - 1 :: step] &= mask
    d = rng.integers(0, 2**32, (4 * groups, 32, op.d), dtype=np.uint32)
    if op.d_type == "f32":
        d = rng.normal(size=d.shape).astype(np.float32).view(np.uint32)
    elif op.d_type == "f16":
        d &= np.uint32(0xBFFFBFFF)
    return d, a, b


@pytest.mark.parametrize("tail", OPCODES)
@pytest.mark.parametrize(("scale_d", "scale_a", "scale_b"), [(True, 1, -1), (False, -1, 1)])
def test_numbers_and_fragments(tail, scale_d, scale_a, scale_b):
    op = parse(tail)
    if op.d_type == "s32":
        scale_a = scale_b = 1
    d, a, b = operands(op, np.random.default_rng(op.n), 1)
    got = op.compute(d, a, b, scale_d=scale_d, scale_a=scale_a, scale_b=scale_b)
    left = values(op.a_type, a[0]) * scale_a
    right = values(op.b_type, b[0]) * scale_b
    bits = 16 if op.d_type == "f16" else 32
    old_registers, new_registers = d.reshape(128, -1), got.reshape(128, -1)
    for thread in range(0, 128, 3):
        for i in range(op.n // 2):
            row, col = d_place(thread, i)
            old = manual.value(op.d_type, manual.code_of(old_registers[thread], i, bits))
            new = manual.code_of(new_registers[thread], i, bits)
            if op.d_type == "s32":
                total = int(left[row] @ right[col]) + (int(old) if scale_d else 0)
                if op.saturate:
                    total = min(max(total, -(2**31)), 2**31 - 1)
                assert new == total % 2**32
                continue
            want, biggest = manual.dot(
                left[row].tolist(), right[col].tolist(), old if scale_d else 0.0
            )
            dtype, word = (np.float16, np.uint16) if bits == 16 else (np.float32, np.uint32)
            with np.errstate(over="ignore"):
                low, high = (dtype(want + s * 2.0**-48 * biggest) for s in (-1, 1))
            assert low <= word(new).view(dtype) <= high


@pytest.mark.parametrize("tail", [OPCODES[0], OPCODES[3], OPCODES[4]])
def test_a_in_registers(tail):
    op = parse(tail)
    registers = np.random.default_rng(5).integers(0, 2**32, (8, 32, 4), dtype=np.uint32)
    got = op.a_bytes(registers)
    assert got.shape == (2, 64, 32)
    octets = registers.view(np.uint8).reshape(2, 128, 4, 4)
    for group, thread, register, byte in np.ndindex(octets.shape):
        row, k = a_byte_place(thread, register, byte)
        assert got[group, row, k] == octets[group, thread, register, byte]


def test_warpgroups_are_independent():
    """Two warpgroups at once, each with its scale-d."""
    op = parse(OPCODES[0])
    d, a, b = operands(op, np.random.default_rng(2), 2)
    both = op.compute(d, a, b, scale_d=np.array([True, False]))
    for group, keep in enumerate((True, False)):
        one = slice(group, group + 1)
        warps = slice(4 * group, 4 * group + 4)
        assert (op.compute(d[warps], a[one], b[one], scale_d=keep) == both[warps]).all()


def descriptor(start, leading, stride, swizzle):
    mode = {"none": 0, "128B": 1, "64B": 2, "32B": 3}[swizzle]
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | mode << 62


def swizzled(address, swizzle):
    """Bits 4.. of the address xor the bits from 7 up: Swizzle<b, 4, 3>."""
    mask = {"none": 0, "32B": 1, "64B": 3, "128B": 7}[swizzle]
    return address ^ (address >> 7 & mask) << 4


@pytest.mark.parametrize(
    ("swizzle", "row_bytes"), [("none", 16), ("32B", 32), ("64B", 64), ("128B", 128)]
)
def test_k_major_operand(swizzle, row_bytes):
    """Rows of 32 bytes of K, eight rows to a group of the stride (9.7.15.5.1, K-major)."""
    op = parse("m64n16k16.f32.f16.f16")
    start = 2048
    if swizzle == "none":
        leading, stride = 128, 512
    else:
        leading, stride = 16, 8 * row_bytes
    got = op.b_offsets(descriptor(start, leading, stride, swizzle))
    for row, byte in np.ndindex(16, 32):
        address = start + row // 8 * stride + row % 8 * row_bytes
        address += byte if swizzle != "none" else byte // 16 * leading + byte % 16
        assert got[row, byte] == swizzled(address, swizzle)


def test_transposed_operand():
    """imm-trans-b: 64 columns of N to a row of 128 bytes, one row per k (9.7.15.5.1, MN-major)."""
    op = parse("m64n128k16.f32.bf16.bf16")
    start, leading, stride = 4096, 8192, 1024
    got = op.b_offsets(descriptor(start, leading, stride, "128B"), 1)
    for row, k, byte in np.ndindex(128, 16, 2):
        address = start + row // 64 * leading + k // 8 * stride + k % 8 * 128 + row % 64 * 2 + byte
        assert got[row, 2 * k + byte] == swizzled(address, "128B")


def test_operand_lists():
    assert parse(OPCODES[0]).immediates(True) == ("imm-scale-a", "imm-scale-b", "imm-trans-b")
    assert parse(OPCODES[2]).immediates(False)[2:] == ("imm-trans-a", "imm-trans-b")
    assert parse(OPCODES[3]).immediates(False) == ("imm-scale-a", "imm-scale-b")
    assert parse(OPCODES[6]).immediates(False) == ()
    assert (parse(OPCODES[1]).d, parse(OPCODES[1]).d_kind) == (6, "b32")
    assert (parse(OPCODES[2]).d, parse(OPCODES[2]).d_kind) == (128, "f32")


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        ("m64n12k16.f32.f16.f16", "n is a multiple of 8"),
        ("m64n40k32.s32.s8.s8", "8, 24 or a multiple of 16"),
        ("m64n8k8.f32.f16.f16", "k is 16"),
        ("m64n8k16.f32.f16.bf16", "do not go together"),
        ("m64n8k16.f16.bf16.bf16", "do not go together"),
        ("m64n8k16.f32.f16.f16.satfinite", ".satfinite is for"),
        ("m64n8k256.s32.b1.b1", ".and.popc is needed"),
        ("m64n8k16.f32.f16.f16.relu", "modifier .relu does not exist"),
        ("sp.m64n8k32.f32.f16.f16", "sparse"),
    ],
)
def test_malformed_opcodes(tail, message):
    with pytest.raises(PtxError, match=re.escape(message)):
        parse(tail)


def test_illegal_immediates():
    d, a, b = operands(parse(OPCODES[0]), np.random.default_rng(0), 1)
    with pytest.raises(IllegalOperation, match="imm-scale-a is 2; it is -1 or 1"):
        parse(OPCODES[0]).compute(d, a, b, scale_a=2)
    with pytest.raises(IllegalOperation, match=r"only .f16 and .bf16 can be transposed"):
        parse(OPCODES[4]).b_offsets(descriptor(0, 16, 256, "32B"), 1)
    assert parse_wgmma("wgmma.fence.sync.aligned") is None
