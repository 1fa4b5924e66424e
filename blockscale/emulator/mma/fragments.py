"""Which lane and register hold which matrix element in mma.sync and wgmma.

PTX ISA 9.2, sections 9.7.14.5 "Matrix multiply-accumulate operation using mma instruction" (matrix
fragments for mma.m8n8k4 ... m16n8k256) and 9.7.15.5.1 "Register Fragments" (wgmma).  All but
m8n8k4 with f16 are one rule: with g = lane / 4 and t = lane % 4, a register of E elements holds
E consecutive k; register r of A is row g + 8 * (r % 2) and k = E * (t + 4 * (r / 2)) and up (m = 8:
row g and k = E * (t + 4 * r)); register r of B is column g and k = E * (t + 4 * r) and up;
accumulator i is row g + 8 * (i / 2), column 2 * t + i % 2.

Every function returns positions in the *flat elements* of a warp: element j of register r of lane
l is l * n * E + r * E + j where a lane has n registers of E elements.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

LANES = 32
Index = NDArray[np.intp]
Words = NDArray[np.uint32]


def _frozen(array: NDArray[Any]) -> Index:
    index = np.ascontiguousarray(array, dtype=np.intp)
    index.flags.writeable = False
    return index


@cache
def a_index(m: int, k: int, per_register: int) -> Index:
    """Where A's elements lie: flat positions [m, k], for m of 8 or 16."""
    row, col = np.ogrid[:m, :k]
    group, within = row % 8, col % (4 * per_register)
    lane = 4 * group + within // per_register
    register = (col // (4 * per_register)) * (m // 8) + row // 8
    count = m * k // (LANES * per_register)
    return _frozen((lane * count + register) * per_register + within % per_register)


@cache
def b_index(k: int, n: int, per_register: int) -> Index:
    """Where B's elements lie: flat positions [k, n], n = 8."""
    row, col = np.ogrid[:k, :n]
    within = row % (4 * per_register)
    lane = 4 * col + within // per_register
    count = k * n // (LANES * per_register)
    register = row // (4 * per_register)
    return _frozen((lane * count + register) * per_register + within % per_register)


@cache
def c_index(m: int, n: int) -> Index:
    """Where the accumulators lie: flat positions [m, n]; n may be any multiple of 8 (wgmma)."""
    row, col = np.ogrid[:m, :n]
    lane = 4 * (row % 8) + (col % 8) // 2
    rows = m // 8
    element = (col // 8) * 2 * rows + 2 * (row // 8) + col % 2
    return _frozen(lane * (m * n // LANES) + element)


@cache
def volta_a_index(row_major: bool) -> Index:
    """A of the four products of m8n8k4 with f16: flat positions [4, 8, 4]."""
    part, row, col = np.ogrid[:4, :8, :4]
    if row_major:
        lane, element = 4 * part + row % 4 + 16 * (row // 4), col
    else:
        lane, element = 4 * part + col + 16 * (row // 4), row % 4
    return _frozen(lane * 4 + element)


@cache
def volta_b_index(row_major: bool) -> Index:
    """B of the four products of m8n8k4 with f16: flat positions [4, 4, 8]."""
    part, row, col = np.ogrid[:4, :4, :8]
    if row_major:
        lane, element = 4 * part + row + 16 * (col // 4), col % 4
    else:
        lane, element = 4 * part + col % 4 + 16 * (col // 4), row
    return _frozen(lane * 4 + element)


@cache
def volta_c_index(dtype: str) -> Index:
    """The accumulators of m8n8k4 with f16, of type f16 or f32: flat positions [4, 8, 8]."""
    part, row, col = np.ogrid[:4, :8, :8]
    base = 4 * part + 16 * (row // 4)
    if dtype == "f16":
        return _frozen((base + row % 4) * 8 + col + 0 * row)
    # f32: row = (lane & 1) + (i & 2), column = (i & 4) + (lane & 2) + (i & 1).
    lane = base + (row & 1) + (col & 2)
    element = (row & 2) + (col & 4) + (col & 1)
    return _frozen(lane * 8 + element)


@cache
def inverse(key: tuple[Any, ...]) -> Index:
    """The row-major element of D that each flat position holds, by c_index or volta_c_index."""
    name, *rest = key
    index = {"c": c_index, "volta": volta_c_index}[name](*rest).ravel()
    back = np.empty(index.size, dtype=np.intp)
    back[index] = np.arange(index.size)
    return _frozen(back)


def elements(registers: NDArray[Any], bits: int) -> NDArray[Any]:
    """The flat elements of registers [W, 32, n] (uint32, or uint64 for f64): [W, 32 * n * E]."""
    registers = np.ascontiguousarray(registers)
    flat = registers.reshape(len(registers), -1)
    if bits in (32, 64):
        return flat
    if bits == 16:
        return flat.view(np.uint16)
    octets = flat.view(np.uint8)
    if bits == 8:
        return octets
    if bits == 1:
        return np.unpackbits(octets, axis=1, bitorder="little")
    nibbles = np.empty((*octets.shape, 2), dtype=np.uint8)
    np.bitwise_and(octets, 15, out=nibbles[..., 0])
    np.right_shift(octets, 4, out=nibbles[..., 1])
    return nibbles.reshape(len(octets), -1)


def registers(flat: NDArray[Any]) -> NDArray[Any]:
    """The inverse of `elements` for 16-, 32- and 64-bit elements: [W, 32 * n * E] -> [W, 32, n]."""
    flat = np.ascontiguousarray(flat)
    if flat.dtype.itemsize == 2:
        flat = flat.view(np.uint32)
    return flat.reshape(len(flat), LANES, -1)
