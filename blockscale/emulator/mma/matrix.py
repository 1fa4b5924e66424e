"""ldmatrix, stmatrix and movmatrix: rows of shared memory to registers and back.

PTX ISA 9.2, sections 9.7.14.5.15 "ldmatrix", 9.7.14.5.16 "stmatrix" and 9.7.14.5.17 "movmatrix".
Lane i supplies the address of row i, for the first `rows` lanes; a row is 16 aligned bytes.
With g = lane / 4, t = lane % 4 and one matrix after the other:

* m8n8 .b16: register j is row g of matrix j (8 rows), bytes 4 * t and up; .trans: the elements in
  *column* g of rows 2 * t and 2 * t + 1.
* m8n16 .b8x16: the same as m8n8 of the 8-bit elements after decompression.
* m16n16 .trans .b8: matrix j (16 rows) fills registers 2 * j and 2 * j + 1: the bytes of rows 4 * t
  to 4 * t + 3 in columns g and g + 8.
* stmatrix m16n8 .trans .b8: byte e of register j goes to row 2 * t + e % 2 of matrix j (8 rows of
  16 bytes), column g + 8 * (e / 2): a packed accumulator fragment.

.b4x16_p64 is 16 elements of 4 bits and 8 bytes of padding, .b6x16_p32 16 of 6 bits and 4 bytes of
padding; the element becomes the low bits of a byte, the rest is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockscale.emulator.errors import PtxError
from blockscale.emulator.mma.fragments import LANES, Index, Words

ROW_BYTES = 16
Octets = NDArray[np.uint8]


@dataclass(frozen=True)
class MatrixAccess:
    """One ldmatrix or stmatrix opcode.

    Lanes 0 to rows - 1 supply the rows' addresses (each a multiple of row_bytes); data_bytes of a
    row carry data, the rest is padding that ldmatrix does not look at.  space is "shared" or ""
    (generic).  ldmatrix: fn(uint8 [W, rows, 16]) -> uint32 [W, 32, registers]; stmatrix:
    fn(uint32 [W, 32, registers]) -> uint8 [W, rows, 16].
    """

    text: str
    rows: int
    registers: int
    space: str
    fn: Callable[[NDArray[Any]], NDArray[Any]]
    row_bytes: int = ROW_BYTES
    data_bytes: int = ROW_BYTES


@cache
def byte_index(shape: str, trans: bool, number: int) -> Index:
    """The flat byte (row * 16 + byte) of each register byte: [32, registers, 4]."""
    lane, matrix, byte = np.ogrid[:LANES, :number, :4]
    group, thread = lane // 4, lane % 4
    if shape == "m16n16":
        register = np.arange(2 * number).reshape(1, -1, 1)
        row = 16 * (register // 2) + 4 * thread + byte
        column = group + 8 * (register % 2)
    elif shape == "m16n8":
        row, column = 8 * matrix + 2 * thread + byte % 2, group + 8 * (byte // 2)
    elif trans:
        row, column = 8 * matrix + 2 * thread + byte // 2, 2 * group + byte % 2
    else:
        row, column = 8 * matrix + group, 4 * thread + byte
    index = np.ascontiguousarray(np.broadcast_arrays(row * ROW_BYTES + column)[0], dtype=np.intp)
    index.flags.writeable = False
    return index


@cache
def lookup_ldmatrix(opcode: str) -> MatrixAccess | None:
    """The instruction of a full dotted opcode; None if it is not ldmatrix.

    Raises:
        PtxError: modifiers that do not exist or do not go together.
    """
    parsed = _parse(opcode, "ldmatrix", ("m8n8", "m8n16", "m16n16"))
    if parsed is None:
        return None
    shape, number, trans, space, types = parsed
    legal: dict[str, tuple[tuple[str, ...], ...]] = {
        "m8n8": (("b16",),),
        "m8n16": (("b8x16", "b6x16_p32"), ("b8x16", "b4x16_p64")),
        "m16n16": (("b8",), ("b8x16", "b6x16_p32"), ("b8x16", "b4x16_p64")),
    }
    if types not in legal[shape]:
        raise _error(opcode, f"types .{'.'.join(types)} do not exist for .{shape}")
    if shape == "m16n16" and (not trans or number == 4):
        raise _error(opcode, ".m16n16 needs .trans, and .x1 or .x2")
    if shape == "m8n16" and trans:
        raise _error(opcode, ".m8n16 has no .trans")
    index = byte_index(shape, trans, number)
    bits = {"b6x16_p32": 6, "b4x16_p64": 4}.get(types[-1], 8)
    rows = number * (16 if shape == "m16n16" else 8)
    fn = partial(_load, index, bits)
    return MatrixAccess(opcode, rows, index.shape[1], space, fn, data_bytes=2 * bits)


@cache
def lookup_stmatrix(opcode: str) -> MatrixAccess | None:
    """The instruction of a full dotted opcode; None if it is not stmatrix.

    Raises:
        PtxError: modifiers that do not exist or do not go together.
    """
    parsed = _parse(opcode, "stmatrix", ("m8n8", "m16n8"))
    if parsed is None:
        return None
    shape, number, trans, space, types = parsed
    if types != {"m8n8": ("b16",), "m16n8": ("b8",)}[shape]:
        raise _error(opcode, f"types .{'.'.join(types)} do not exist for .{shape}")
    if shape == "m16n8" and not trans:
        raise _error(opcode, ".m16n8 needs .trans")
    index = byte_index(shape, trans, number)
    return MatrixAccess(opcode, 8 * number, number, space, partial(_store, index))


def is_movmatrix(opcode: str) -> bool:
    """Whether an opcode is movmatrix, of which there is one.

    Raises:
        PtxError: a movmatrix with other modifiers.
    """
    if opcode.split(".")[0] != "movmatrix":
        return False
    if sorted(opcode.split(".")[1:]) != sorted(("sync", "aligned", "m8n8", "trans", "b16")):
        raise _error(opcode, "the only form is movmatrix.sync.aligned.m8n8.trans.b16")
    return True


def movmatrix(registers: Words) -> Words:
    """The transposed 8 x 8 matrix of 16-bit elements: uint32 [W, 32] -> [W, 32]."""
    rows = _store(byte_index("m8n8", False, 1), registers[..., None])
    return _load(byte_index("m8n8", True, 1), 8, rows)[..., 0]


def _load(index: Index, bits: int, rows: Octets) -> Words:
    flat = _decompress(bits, np.ascontiguousarray(rows)).reshape(len(rows), -1)
    return np.ascontiguousarray(flat[:, index]).view(np.uint32)[..., 0]


def _store(index: Index, registers: Words) -> Octets:
    octets = np.ascontiguousarray(registers, dtype=np.uint32).view(np.uint8)
    flat = np.empty((len(octets), index.size), dtype=np.uint8)
    flat[:, index.ravel()] = octets.reshape(len(octets), -1)
    return flat.reshape(len(octets), -1, ROW_BYTES)


def _decompress(bits: int, rows: Octets) -> Octets:
    """One byte per element of .b4x16_p64 and .b6x16_p32 rows: uint8 [..., 16] -> [..., 16]."""
    if bits == 8:
        return rows
    stream = np.unpackbits(rows[..., : 2 * bits], axis=-1, bitorder="little")
    stream = stream.reshape(*rows.shape[:-1], 16, bits)
    return np.packbits(stream, axis=-1, bitorder="little")[..., 0]


def _error(opcode: str, what: str) -> PtxError:
    return PtxError(f"{opcode}: {what} (PTX ISA 9.7.14.5.15 ldmatrix, 9.7.14.5.16 stmatrix)")


def _parse(
    opcode: str, name: str, shapes: tuple[str, ...]
) -> tuple[str, int, bool, str, tuple[str, ...]] | None:
    """Shape, number of matrices, .trans, state space and the types of an opcode."""
    word, *modifiers = opcode.split(".")
    if word != name:
        return None
    numbers = {"x1": 1, "x2": 2, "x4": 4}
    spaces = ("shared", "shared::cta")
    types = ("b16", "b8", "b8x16", "b6x16_p32", "b4x16_p64")
    known = {"sync", "aligned", "trans", *shapes, *numbers, *spaces, *types}
    unknown = [mod for mod in modifiers if mod not in known]
    if unknown:
        raise _error(opcode, f"modifier .{unknown[0]} does not exist for {name}")
    if len(set(modifiers)) != len(modifiers) or not {"sync", "aligned"} <= set(modifiers):
        raise _error(opcode, ".sync and .aligned are needed, and each modifier once")
    shape = [mod for mod in modifiers if mod in shapes]
    number = [numbers[mod] for mod in modifiers if mod in numbers]
    space = [mod for mod in modifiers if mod in spaces]
    if len(shape) != 1 or len(number) != 1 or len(space) > 1:
        raise _error(
            opcode, "needs one shape, one of .x1, .x2 and .x4, and at most one state space"
        )
    found = tuple(mod for mod in modifiers if mod in types)
    return shape[0], number[0], "trans" in modifiers, "shared" if space else "", found
