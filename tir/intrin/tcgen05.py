"""Tensor intrinsics of tcgen05: what one instruction does with a tile.

Each is a *desc* in plain loops (the expressions of `blockscale.tir.gemm.tiles`) and an *impl* that
calls the function of ``native/tcgen05.cuh``.  Scope "shared.tmem" is tensor memory.

Scales in tensor memory are [lane, 4 * column + byte]: those of row r and column c of a 128x4 tile
are byte c of column r / 32, lane r % 32 (PTX ISA 9.7.16.10.7).
"""

from __future__ import annotations

import re
from functools import partial
from typing import NamedTuple

from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T

from blockscale.base.formats import E4M3, GEMM, UE8M0, Number
from blockscale.tir import formats
from blockscale.tir.common import i64
from blockscale.tir.gemm.tiles import ATOM_BYTES
from blockscale.tir.intrin import tma
from blockscale.tir.intrin.operands import Body, Operand, describe, intrinsic, nest
from blockscale.tir.intrin.tma import SMEM, TMEM, call, tile_copy

_NAMES = {
    "mma": r"tcgen05_mma_(\w+?)_(\d+)x(\d+)x\d+_((?:e\dm\d){2})f32_sw(\d+)(_swap)?",
    "load": r"tma_load_(\d+)x(\d+)(?:_u4align16)?_sw(\d+)_cg(\d)(_expert)?",
    "scales": r"tma_load_scales_cg(\d)(_expert)?",
    "copy": r"tcgen05_cp_32x128b_warpx4_cg(\d)",
    "read": r"tcgen05_ld_32x32b_x(\d+)",
    "store": r"tma_store_(\d+)x(\d+)_([a-z]+\d+)",
}
"""The names of intrinsics, of this module and of `tma`."""


def register_named(text: str) -> list[str]:
    """Register the tcgen05 and TMA intrinsics that ``text`` names; return their names."""
    made = []
    for kind, pattern in _NAMES.items():
        for found in sorted(set(re.findall(rf"\b{pattern}\b", text))):
            parts = found if isinstance(found, tuple) else (found,)
            made.append(_describe(kind, parts))
    return made


def _describe(kind: str, parts: tuple[str, ...]) -> str:
    """Register the intrinsic of a name's parts."""
    if kind == "mma":
        instruction, m, n, codes, row_bytes, swap = parts
        return mma(Mma(format_of(instruction, codes), int(m), int(n), int(row_bytes), bool(swap)))
    numbers = [int(part) for part in parts if part.isdigit()]
    expert = parts[-1] == "_expert"
    if kind == "load":
        return tma.load(numbers[0], numbers[1], numbers[2], numbers[3], expert)
    if kind == "scales":
        return tma.load_scales(numbers[0], expert)
    if kind == "store":
        return tma.store(numbers[0], numbers[1], parts[2])
    return (scale_copy if kind == "copy" else read_accumulator)(numbers[0])


def format_of(instruction: str, codes: str) -> str:
    """Format of operands that are multiplied by this kind of MMA."""
    for name, row in GEMM.items():
        both = [row.a.name, row.b.name]
        if row.kind == instruction and codes in ("".join(both), "".join(reversed(both))):
            return name
    raise ValueError(f"register_named: no format multiplies {codes} by kind {instruction}")


def product_name(room: str, m: int, n: int, fmt: str, row_bytes: int, swap: bool) -> str:
    """Name of a product X [m, step] times Y [n, step] transposed; X is b with ``swap``.

    For example ``tcgen05_mma_mxf4nvf4_256x256x64_e2m1e2m1f32_sw128``.
    """
    row = GEMM[fmt]
    x, y = (row.a, row.b)[:: -1 if swap else 1]
    turned = "_swap" if swap else ""
    return f"{room}_mma_{row.kind}_{m}x{n}x{row.step}_{x.name}{y.name}f32_sw{row_bytes}{turned}"


class Mma(NamedTuple):
    """One tcgen05.mma: X [m, step] times Y [n, step] transposed; X is b with ``swap``."""

    fmt: str
    m: int
    n: int
    row_bytes: int
    """Of a row of X and Y in shared memory, which is their swizzle."""
    swap: bool

    @property
    def name(self) -> str:
        """See `product_name`."""
        return product_name("tcgen05", self.m, self.n, self.fmt, self.row_bytes, self.swap)


def element_format(kind: str, code: Number) -> int:
    """Number of an operand's format in the instruction descriptor: enum BsElement."""
    if code is E4M3:
        return 0
    return 5 if kind == "mxf8f6f4" else 1


@intrinsic
def mma(shape: Mma) -> str:
    """Register and name: d += (x * sfx) (y * sfy)^T, one instruction (PTX ISA 9.7.16.10.9.1).

    Buffers in the order of the op: a, a's scales, b, b's scales, d [m, n].
    """
    rows, cols = (shape.n, shape.m) if shape.swap else (shape.m, shape.n)
    desc, operands = scaled_product(shape.fmt, rows, cols, shape.swap)
    return describe(shape.name, operands, desc, partial(_issue, shape))


def scaled_product(
    fmt: str, rows: int, cols: int, swap: bool
) -> tuple[Body, tuple[Operand, Operand, Operand, Operand, Operand]]:
    """What block-scaled MMAs compute of ``rows`` of a and ``cols`` of b in a step of K.

    Returns the body of the desc, and operands in the memories of tcgen05.mma: a, a's scales, b,
    b's scales, and d [rows, cols], or [cols, rows] with ``swap``.
    """
    row = GEMM[fmt]
    scale = partial(formats.decode_byte, row.scale)
    R, C, K, L = i64(rows), i64(cols), i64(row.step), i64(32)
    AC, BC, block = i64(row.a.per_byte), i64(row.b.per_byte), i64(row.block)
    # From the first row's scales to the last one's: rows r and r + 32 are 4 bytes apart.
    RS, CS = (i64(extent // 8 - 4 + row.step // row.block) for extent in (rows, cols))

    def desc(A: T.Buffer, SA: T.Buffer, B: T.Buffer, SB: T.Buffer, D: T.Buffer) -> None:
        with nest("gemm", "SSR", R, C, K) as (vi, vj, vk):
            at = (vj, vi) if swap else (vi, vj)
            a = formats.element(row.a, A[vi, vk // AC], vk)
            b = formats.element(row.b, B[vj, vk // BC], vk)
            a_scale = scale(SA[vi % L, vi // L * 4 + vk // block])
            b_scale = scale(SB[vj % L, vj // L * 4 + vk // block])
            T.buffer_store(D, D[at] + (a * a_scale) * (b * b_scale), at)

    m, n = (cols, rows) if swap else (rows, cols)
    return desc, (
        Operand("A", (R, i64(row.step // row.a.per_byte)), "uint8", scope=SMEM),
        Operand("SA", (L, RS), "uint8", scope=TMEM),
        Operand("B", (C, i64(row.step // row.b.per_byte)), "uint8", scope=SMEM),
        Operand("SB", (L, CS), "uint8", scope=TMEM),
        Operand("D", (i64(m), i64(n)), "float32", "rw", TMEM),
    )


def _issue(
    shape: Mma, a: T.Buffer, a_scale: T.Buffer, b: T.Buffer, b_scale: T.Buffer, d: T.Buffer
) -> PrimExpr:
    """The call that issues the MMA."""
    row = GEMM[shape.fmt]
    turn = -1 if shape.swap else 1
    x, y = (a, b)[::turn]
    sx, sy = (a_scale, b_scale)[::turn]
    x_format, y_format = (element_format(row.kind, code) for code in (row.a, row.b)[::turn])
    desc = call(
        "bs_instruction_desc",
        shape.m,
        shape.n,
        x_format,
        y_format,
        int(row.scale is UE8M0),
        _first_byte(sx),
        _first_byte(sy),
        dtype="uint32",
    )
    matrices = [
        call(f"bs_matrix_desc<{shape.row_bytes}>", tile.access_ptr("r"), dtype="uint64")
        for tile in (x, y)
    ]
    return call(
        f"bs_tcgen05_mma_{row.kind}<{shape.m // 128}>",
        d.access_ptr("rw"),
        *matrices,
        desc,
        sx.access_ptr("r"),
        sy.access_ptr("r"),
        T.int32(1),
    )


def _first_byte(scales: T.Buffer) -> PrimExpr:
    """Byte of a column of tensor memory at which the scales of this instruction start."""
    return T.Cast("int32", scales.elem_offset % i64(4))


@intrinsic
def scale_copy(group: int) -> str:
    """Register and name: a 128x4 tile of scales to tensor memory (PTX ISA 9.7.16.9.1).

    Row r % 32 is a lane, r / 32 a column, whose four bytes are the tile's columns; the instruction
    writes it to the lanes of all four sub-partitions.
    """
    M, N = i64(32), i64(16)

    @T.inline
    def desc(S, D):
        for i, j in T.grid(M, N):
            with T.sblock("copy"):
                vi, vj = T.axis.remap("SS", [i, j])
                D[vi, vj] = S[vi * N + vj]

    def impl(S: T.Buffer, D: T.Buffer) -> PrimExpr:
        tile = call("bs_scale_desc", S.access_ptr("r"), dtype="uint64")
        return call(f"bs_tcgen05_cp<{group}>", D.access_ptr("w"), tile)

    source = Operand("S", (i64(ATOM_BYTES),), "uint8", scope=SMEM)
    target = Operand("D", (M, N), "uint8", "w", TMEM)
    return describe(f"tcgen05_cp_32x128b_warpx4_cg{group}", (source, target), desc, impl)


READ_COLUMNS = (16, 32)
"""Columns that tcgen05.ld may read at once."""


@intrinsic
def read_accumulator(columns: int) -> str:
    """Register and name: 32 lanes of the accumulator to the registers of a warp."""
    return tile_copy(
        f"tcgen05_ld_32x32b_x{columns}",
        (32, columns),
        "float32",
        (TMEM, "local"),
        f"bs_tcgen05_ld<{columns}>",
    )
