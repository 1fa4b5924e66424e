"""mma.sync: opcodes and their functions of registers.

PTX ISA 9.2, sections 9.7.14.3 "Block Scaling for mma.sync", 9.7.14.5 "Matrix multiply-accumulate
operation using mma instruction" (shapes and fragments) and 9.7.14.5.14 "mma".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockscale.emulator import formats
from blockscale.emulator.errors import IllegalOperation
from blockscale.emulator.mma import fragments, numerics
from blockscale.emulator.mma.opcodes import MmaOpcode, parse_mma

SELECTORS = ("b32", "u16", "u16", "b32", "u16", "u16")
# The lanes that supply the scales of rows 0..15 of A and columns 0..7 of B, for thread-id 0.
LANES_A = 4 * (np.arange(16) % 8) + np.arange(16) // 8
LANES_B = 4 * np.arange(8)


@dataclass(frozen=True)
class WarpMma:
    """One mma.sync opcode: its operands and what it computes.

    Operands in PTX order: d, a, b, c, then those of `scales`: scale-a-data, byte-id-a, thread-id-a,
    scale-b-data, byte-id-b, thread-id-b.  `d`, `a`, `b` and `c` are numbers of registers; the kinds
    are the type of one: "b32" (or .f16x2), "f32", "s32", "f64".

    fn(a, b, c, *scales) -> d: uint32 [W, 32, n] (f64: uint64); scale data is uint32 [W, 32], a
    selector is an int or an array [W, 32].
    """

    opcode: MmaOpcode
    m: int
    n: int
    k: int
    d: int
    a: int
    b: int
    c: int
    d_kind: str
    ab_kind: str
    c_kind: str
    scales: tuple[str, ...]
    fn: Callable[..., NDArray[Any]]


@cache
def lookup(opcode: str) -> WarpMma | None:
    """The instruction of a full dotted opcode; None if it is not mma.sync.

    Raises:
        PtxError: an mma.sync whose modifiers do not exist or do not go together.
    """
    op = parse_mma(opcode)
    if op is None:
        return None
    volta = (op.m, op.n, op.k, op.a_type) == (8, 8, 4, "f16")
    per_register = 1 if op.a_type == "f64" else 32 // op.element_bits
    products = 4 if volta else 1
    lane_elements = products * op.m * op.n // fragments.LANES

    def accumulators(dtype: str) -> int:
        return lane_elements // (2 if dtype == "f16" else 1)

    def kind(dtype: str) -> str:
        return "b32" if dtype == "f16" else dtype

    return WarpMma(
        opcode=op,
        m=op.m,
        n=op.n,
        k=op.k,
        d=accumulators(op.d_type),
        a=products * op.m * op.k // (fragments.LANES * per_register),
        b=products * op.k * op.n // (fragments.LANES * per_register),
        c=accumulators(op.c_type),
        d_kind=kind(op.d_type),
        ab_kind="f64" if op.a_type == "f64" else "b32",
        c_kind=kind(op.c_type),
        scales=SELECTORS if op.scale_type else (),
        fn=partial(_scaled if op.scale_type else _volta if volta else _plain, op),
    )


def _values(op: MmaOpcode, fmt: str, registers: NDArray[Any], index: NDArray[np.intp]) -> Any:
    """The values [W, *index.shape] of multiplicand registers."""
    codes = fragments.elements(registers, op.element_bits)[:, index]
    if op.in_containers:
        codes = numerics.container(fmt, codes)
    return formats.decode(fmt, codes)


def _multiplicands(op: MmaOpcode, a: NDArray[Any], b: NDArray[Any]) -> tuple[Any, Any]:
    per = 1 if op.a_type == "f64" else 32 // op.element_bits
    return (
        _values(op, op.a_type, a, fragments.a_index(op.m, op.k, per)),
        _values(op, op.b_type, b, fragments.b_index(op.k, op.n, per)),
    )


def _finish(op: MmaOpcode, a: Any, b: Any, c: NDArray[Any]) -> NDArray[Any]:
    """D's registers of the values of A and B and C's registers."""
    bits = formats.BITS[op.c_type] if op.c_type != "s32" else 32
    codes = fragments.elements(c, bits)[:, fragments.c_index(op.m, op.n)]
    if op.bit_op == "xor":
        # popc(a ^ b) = popc(a) + popc(b) - 2 * popc(a & b)
        a, b = _xor_operands(a, b)
    d = numerics.accumulate(a, b, numerics.decode_c(op.c_type, codes), op.d_type, op.saturate)
    flat = d.reshape(len(d), -1)[:, fragments.inverse(("c", op.m, op.n))]
    return fragments.registers(flat)


def _xor_operands(a: Any, b: Any) -> tuple[Any, Any]:
    ones_a, ones_b = np.ones_like(a[..., :1]), np.ones_like(b[..., :1, :])
    left = np.concatenate([-2 * a, a.sum(axis=-1, keepdims=True), ones_a], axis=-1)
    right = np.concatenate([b, ones_b, b.sum(axis=-2, keepdims=True)], axis=-2)
    return left, right


def _plain(op: MmaOpcode, a: NDArray[Any], b: NDArray[Any], c: NDArray[Any]) -> NDArray[Any]:
    """D = A * B + C, one product per warp."""
    with np.errstate(all="ignore"):
        return _finish(op, *_multiplicands(op, a, b), c)


def _volta(op: MmaOpcode, a: NDArray[Any], b: NDArray[Any], c: NDArray[Any]) -> NDArray[Any]:
    """m8n8k4 with f16: four products, each of the lanes 4p..4p+3 and 16+4p..16+4p+3."""
    with np.errstate(all="ignore"):
        left = _values(op, "f16", a, fragments.volta_a_index(op.a_layout == "row"))
        right = _values(op, "f16", b, fragments.volta_b_index(op.b_layout == "row"))
        codes = fragments.elements(c, formats.BITS[op.c_type])
        codes = codes[:, fragments.volta_c_index(op.c_type)]
        d = numerics.accumulate(left, right, formats.decode(op.c_type, codes), op.d_type)
        flat = d.reshape(len(d), -1)[:, fragments.inverse(("volta", op.d_type))]
        return fragments.registers(flat)


def _scaled(
    op: MmaOpcode,
    a: NDArray[Any],
    b: NDArray[Any],
    c: NDArray[Any],
    scale_a: NDArray[np.uint32],
    byte_a: Any,
    thread_a: Any,
    scale_b: NDArray[np.uint32],
    byte_b: Any,
    thread_b: Any,
) -> NDArray[Any]:
    """D = (A * scale_A) * (B * scale_B) + C (section 9.7.14.3).

    Row m of scale_A is in lane 4 * (m % 8) + 2 * thread-id-a + m / 8, column n of scale_B in lane
    4 * n + thread-id-b; the scale_vec bytes from byte-id up are the chunks in the order of k.
    """
    first_a, thread_a = selectors(op, "a", byte_a, thread_a)
    first_b, thread_b = selectors(op, "b", byte_b, thread_b)
    with np.errstate(all="ignore"):
        left, right = _multiplicands(op, a, b)
        sf_a = _scale_factors(op, scale_a, LANES_A + 2 * thread_a, first_a)
        sf_b = _scale_factors(op, scale_b, LANES_B + thread_b, first_b)
        left = left.reshape(*sf_a.shape, -1) * sf_a[..., None]
        by_column = right.swapaxes(1, 2).reshape(*sf_b.shape, -1) * sf_b[..., None]
        left = left.reshape(-1, op.m, op.k)
        right = by_column.reshape(-1, op.n, op.k).swapaxes(1, 2)
        return _finish(op, left, right, c)


def _scale_factors(op: MmaOpcode, data: NDArray[np.uint32], lanes: Any, first: Any) -> Any:
    """The scales [W, rows, scale_vec]; lanes [rows] or [W, rows], first byte a number or [W, 1]."""
    octets = np.ascontiguousarray(data, dtype=np.uint32).view(np.uint8)
    position = (4 * lanes + first)[..., None] + np.arange(op.scale_vec)
    if position.ndim == 2:
        codes = octets[:, position]
    else:
        codes = octets[np.arange(len(octets))[:, None, None], position]
    return formats.decode(op.scale_type, codes)


def selectors(op: MmaOpcode, which: str, byte: Any, thread: Any) -> tuple[Any, Any]:
    """byte-id and thread-id of matrix a or b as numbers or columns [W, 1], checked.

    Raises:
        IllegalOperation: a value that section 9.7.14.3 does not allow, or lanes that disagree.
    """
    legal_bytes = {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)}[op.scale_vec]
    legal_threads = (0, 1) if which == "a" else (0, 1, 2, 3)
    return (
        _selector(op, f"byte-id-{which}", byte, legal_bytes),
        _selector(op, f"thread-id-{which}", thread, legal_threads),
    )


def _selector(op: MmaOpcode, name: str, value: Any, legal: tuple[int, ...]) -> Any:
    if isinstance(value, int) and value in legal:
        return value
    given = np.atleast_2d(np.asarray(value))
    column = given[:, :1].astype(np.intp)
    if (given != column).any():
        raise IllegalOperation(
            f"{op.text}: {name} differs between lanes of a warp; all lanes take the same "
            "selector (PTX ISA 9.7.14.3), so compute it from warp-uniform values"
        )
    wrong = [number for number in column.ravel().tolist() if number not in legal]
    if wrong:
        raise IllegalOperation(
            f"{op.text}: {name} is {wrong[0]}; with .scale_vec::{op.scale_vec}X it is "
            f"one of {', '.join(map(str, legal))} (PTX ISA 9.7.14.3)"
        )
    return column
