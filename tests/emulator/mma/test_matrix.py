"""ldmatrix, stmatrix and movmatrix against the layouts as the manual words them."""

from __future__ import annotations

import re

import numpy as np
import pytest

from blockscale.emulator.errors import PtxError
from blockscale.emulator.mma.matrix import is_movmatrix, lookup_ldmatrix, lookup_stmatrix, movmatrix

NUMBERS = (1, 2, 4)


def random_rows(op, warps=3):
    rng = np.random.default_rng(op.rows)
    return rng.integers(0, 256, (warps, op.rows, 16), dtype=np.uint8)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix_of_16_bits(number, trans):
    """A group of four lanes holds a row, two elements each; .trans: a column."""
    op = lookup_ldmatrix(f"ldmatrix.sync.aligned.m8n8.x{number}{trans}.shared.b16")
    assert (op.rows, op.registers, op.space) == (8 * number, number, "shared")
    assert (op.row_bytes, op.data_bytes) == (16, 16)
    rows = random_rows(op)
    got = op.fn(rows)
    assert got.shape == (3, 32, number)
    for warp in range(3):
        halves = rows[warp].view(np.uint16).astype(int)
        for lane in range(32):
            for j in range(number):
                matrix = halves[8 * j : 8 * j + 8]
                if trans:
                    matrix = matrix.T
                low, high = matrix[lane // 4, 2 * (lane % 4) :][:2]
                assert got[warp, lane, j] == low | high << 16


def unpack(row, bits):
    """16 elements of a row: element i is bits [bits * i, bits * (i + 1))."""
    number = int.from_bytes(bytes(row), "little")
    return [number >> (bits * i) & ((1 << bits) - 1) for i in range(16)]


@pytest.mark.parametrize(("source", "bits"), [("b8x16.b6x16_p32", 6), ("b8x16.b4x16_p64", 4)])
@pytest.mark.parametrize("number", NUMBERS)
def test_ldmatrix_decompresses(source, bits, number):
    """m8n16: a group of four lanes holds a row of 16 bytes, four each; padding does not matter."""
    op = lookup_ldmatrix(f"ldmatrix.sync.aligned.m8n16.x{number}.{source}")
    assert (op.rows, op.registers, op.space, op.data_bytes) == (8 * number, number, "", 2 * bits)
    rows = random_rows(op)
    got = op.fn(rows).view(np.uint8).reshape(3, 32, number, 4)
    for warp, lane, j in np.ndindex(3, 32, number):
        elements = unpack(rows[warp, 8 * j + lane // 4], bits)
        assert got[warp, lane, j].tolist() == elements[4 * (lane % 4) :][:4]
    rows[:, :, op.data_bytes :] ^= 255
    assert (op.fn(rows).view(np.uint8).reshape(got.shape) == got).all()


@pytest.mark.parametrize(
    ("kind", "bits"), [("b8", 8), ("b8x16.b6x16_p32", 6), ("b8x16.b4x16_p64", 4)]
)
@pytest.mark.parametrize("number", [1, 2])
def test_ldmatrix_of_16_by_16_bytes(kind, bits, number):
    """m16n16.trans: a lane holds four rows' bytes of column lane / 4, then of lane / 4 + 8."""
    op = lookup_ldmatrix(f"ldmatrix.sync.aligned.m16n16.x{number}.trans.shared::cta.{kind}")
    assert (op.rows, op.registers) == (16 * number, 2 * number)
    rows = random_rows(op)
    got = op.fn(rows).view(np.uint8).reshape(3, 32, number, 2, 4)
    for warp, lane, j, half in np.ndindex(3, 32, number, 2):
        matrix = np.array([unpack(row, bits) for row in rows[warp, 16 * j : 16 * j + 16]])
        column = matrix[:, lane // 4 + 8 * half]
        assert (got[warp, lane, j, half] == column[4 * (lane % 4) :][:4]).all()


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_stmatrix_is_the_inverse_of_ldmatrix(number, trans):
    store = lookup_stmatrix(f"stmatrix.sync.aligned.m8n8.x{number}{trans}.b16")
    load = lookup_ldmatrix(f"ldmatrix.sync.aligned.m8n8.x{number}{trans}.b16")
    rows = random_rows(load)
    assert (store.rows, store.registers) == (load.rows, load.registers)
    assert (store.fn(load.fn(rows)) == rows).all()


@pytest.mark.parametrize("number", NUMBERS)
def test_stmatrix_of_bytes(number):
    """m16n8.trans: bytes are accumulator fragments of a 16 x 8 matrix stored by columns."""
    op = lookup_stmatrix(f"stmatrix.sync.aligned.m16n8.x{number}.trans.shared.b8")
    assert (op.rows, op.registers) == (8 * number, number)
    rng = np.random.default_rng(number)
    registers = rng.integers(0, 2**32, (2, 32, number), dtype=np.uint32)
    got = op.fn(registers)
    assert got.shape == (2, 8 * number, 16)
    octets = registers.view(np.uint8).reshape(2, 32, number, 4)
    for warp, lane, j, e in np.ndindex(2, 32, number, 4):
        row, col = lane // 4 + (8 if e >= 2 else 0), 2 * (lane % 4) + (e & 1)
        assert got[warp, 8 * j + col, row] == octets[warp, lane, j, e]


def test_movmatrix_transposes():
    registers = np.random.default_rng(1).integers(0, 2**32, (2, 32), dtype=np.uint32)
    got = movmatrix(registers)
    before, after = (x.view(np.uint16).reshape(2, 8, 8) for x in (registers, got))
    assert (after == before.swapaxes(1, 2)).all()
    assert is_movmatrix("movmatrix.sync.aligned.m8n8.trans.b16")
    assert not is_movmatrix("mov.b32")


@pytest.mark.parametrize(
    ("opcode", "message"),
    [
        ("ldmatrix.sync.aligned.m8n8.x3.b16", "modifier .x3 does not exist"),
        ("ldmatrix.sync.aligned.m8n8.x4.b8", "types .b8 do not exist for .m8n8"),
        ("ldmatrix.sync.aligned.m16n16.x4.trans.b8", "needs .trans, and .x1 or .x2"),
        ("ldmatrix.sync.aligned.m8n16.x1.trans.b8x16.b4x16_p64", "has no .trans"),
        ("ldmatrix.sync.m8n8.x4.b16", ".sync and .aligned are needed"),
        ("ldmatrix.sync.aligned.x4.b16", "needs one shape"),
        ("stmatrix.sync.aligned.m16n8.x4.b8", ".m16n8 needs .trans"),
        ("stmatrix.sync.aligned.m8n8.x4.b8", "types .b8 do not exist"),
        ("movmatrix.sync.aligned.m8n8.b16", "the only form"),
    ],
)
def test_malformed_opcodes(opcode, message):
    functions = {"ld": lookup_ldmatrix, "st": lookup_stmatrix, "mo": is_movmatrix}
    with pytest.raises(PtxError, match=re.escape(message)):
        functions[opcode[:2]](opcode)


def test_other_opcodes():
    assert lookup_ldmatrix("stmatrix.sync.aligned.m8n8.x4.b16") is None
    assert lookup_stmatrix("ldmatrix.sync.aligned.m8n8.x4.b16") is None
