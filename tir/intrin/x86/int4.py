"""x86 intrinsics of INT4 weights: a vector of words of codes decoded, or times a few rows.

`x86.width` says what a *desc* and an *impl* are.  Codes are looked up in a table
that a register holds: of 16 float32 (VPERMPS), or twice 16 bfloat16 (VPERMW), whose index has a bit
too many.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2: VPERMPS, VPERMW.
"""

from __future__ import annotations

import re

import numpy as np
from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T

from blockscale.tir import formats
from blockscale.tir.common import i64
from blockscale.tir.gemm.linear import from_operand, to_operand
from blockscale.tir.int4.forms import WORD
from blockscale.tir.int4.mm import code_value
from blockscale.tir.intrin.operands import Operand, describe, intrinsic, nest
from blockscale.tir.intrin.x86.width import packed, prefetch, vector

NUMBERS = {8: tuple(range(-8, 8)), 0: (*range(8), *range(-8, 0))}
"""Numbers of codes 0 to 15, by the flip of the layout."""

ROWS_AHEAD = 32
"""How many rows further on memory is asked for where a row's vectors lie far apart."""

SIXTEEN = 16
"""Lanes of the vectors that are looked up; others are computed."""


def _float_values(words: PrimExpr, slot: int, flip: int, lookup: bool) -> PrimExpr:
    """Float32 of code ``slot`` of every word (int32 lanes)."""
    if lookup:
        table = vector([tirx.const(float(v), "float32") for v in NUMBERS[flip]])
        shifted = words >> formats.const(4 * slot, words, "int32") if slot else words
        return tirx.call_llvm_pure_intrin(
            "float32x16", "llvm.x86.avx512.permvar.sf.512", table, shifted
        )
    if flip:
        code = (words >> formats.const(4 * slot, words, "int32")) & formats.const(
            15, words, "int32"
        )
        return formats.cast(code - formats.const(8, words, "int32"), "float32")
    up = words << formats.const(28 - 4 * slot, words, "int32")
    return formats.cast(up >> formats.const(28, words, "int32"), "float32")


def _bf16_values(halves: PrimExpr, slot: int, flip: int) -> PrimExpr:
    """Bits of bfloat16 (uint16x32) of code ``slot`` of every half of a word."""
    bits = (np.array(NUMBERS[flip] * 2, np.float32).view(np.uint32) >> 16).tolist()
    table = vector([tirx.const(int(b), "uint16") for b in bits])
    shifted = halves >> formats.const(4 * slot, halves, "uint16") if slot else halves
    return tirx.call_llvm_pure_intrin("uint16x32", "llvm.x86.avx512.permvar.hi.512", table, shifted)


def _looks_up(level: str, lanes: int) -> bool:
    return level.startswith("avx512") and lanes == SIXTEEN


@intrinsic
def decode_columns(level: str, lanes: int, flip: int, row_bytes: int) -> str:
    """Register and name: ``W[c, j]``, float32 of code c of word j of a vector.

    What lies `ROWS_AHEAD` rows of ``row_bytes`` further on is requested from memory.
    """
    L, size, bytes_, four, two = i64(lanes), i64(WORD), i64(4 * lanes), i64(4), i64(2)
    operands = (
        packed("P", (bytes_,)),
        Operand("W", (size, L), "float32", "w"),
    )

    @T.inline
    def desc(P, W):
        for j, c in T.grid(L, size):
            with T.sblock("decode"):
                vj, vc = T.axis.remap("SS", [j, c])
                W[vc, vj] = code_value(P[vj * four + vc // two], vc, flip)

    def impl(P: PrimExpr, W: PrimExpr) -> None:
        T.evaluate(prefetch(P, ROWS_AHEAD * row_bytes))
        words = tirx.reinterpret(f"int32x{lanes}", P.vload([i64(0)], f"uint8x{4 * lanes}"))
        for c in range(WORD):
            value = _float_values(words, c, flip, _looks_up(level, lanes))
            T.buffer_store(W, value, [i64(c), tirx.Ramp(i64(0), i64(1), lanes)])

    return describe(f"int4_columns_{level}_{lanes}_{row_bytes}_flip{flip}", operands, desc, impl)


@intrinsic
def decode_column_pairs(row_bytes: int, flip: int) -> str:
    """Register and name: ``W[c, 2 * j + p]``, bfloat16 of code c of word j of rows p = 0, 1.

    ``row_bytes`` lie between the rows.  AVX-512.
    """
    lanes = SIXTEEN
    L, size, four, two = i64(lanes), i64(WORD), i64(4), i64(2)
    apart, bytes_, width = i64(row_bytes), i64(row_bytes + 4 * lanes), i64(2 * lanes)
    operands = (
        packed("P", (bytes_,)),
        Operand("W", (size, width), "uint16", "w"),
    )

    @T.inline
    def desc(P, W):
        for p, j, c in T.grid(two, L, size):
            with T.sblock("decode"):
                vp, vj, vc = T.axis.remap("SSS", [p, j, c])
                W[vc, vj * two + vp] = to_operand(
                    code_value(P[vp * apart + vj * four + vc // two], vc, flip), "bfloat16"
                )

    def impl(P: PrimExpr, W: PrimExpr) -> None:
        for p in range(2):
            T.evaluate(prefetch(P, (ROWS_AHEAD + p) * row_bytes))
        rows = [
            tirx.reinterpret("uint32x16", P.vload([i64(p * row_bytes)], "uint8x64"))
            for p in range(2)
        ]
        sixteen = formats.const(16, rows[0], "uint32")
        low = (rows[0] & formats.const(0xFFFF, rows[0], "uint32")) | (rows[1] << sixteen)
        high = (rows[0] >> sixteen) | (rows[1] & formats.const(0xFFFF0000, rows[0], "uint32"))
        for c in range(WORD):
            halves = tirx.reinterpret("uint16x32", low if c < 4 else high)
            value = _bf16_values(halves, c % 4, flip)
            T.buffer_store(W, value, [i64(c), tirx.Ramp(i64(0), i64(1), 2 * lanes)])

    return describe(f"int4_column_pairs_{row_bytes}_flip{flip}", operands, desc, impl)


@intrinsic
def dot_rows(level: str, lanes: int, flip: int, rows: int, compute: str, ahead: int) -> str:
    """Register and name: ``acc[i, j] += sum over the codes of word j, times a[i]``, ``rows`` rows.

    float32: ``a[i, c, j]`` meets code c; bfloat16: ``a[i, c, 2 * j + h]`` code c + 4 h, two of them
    by VDPBF16PS.  The vector ``ahead`` bytes further on is requested from memory.
    """
    pairs = compute == "bfloat16"
    halves = 2 if pairs else 1
    operand = "uint16" if pairs else "float32"
    L, R, H, slots = i64(lanes), i64(rows), i64(halves), i64(WORD // halves)
    bytes_, width, four, two, half = i64(4 * lanes), i64(lanes * halves), i64(4), i64(2), i64(2)
    operands = (
        Operand("A", (R, slots, width), operand),
        packed("P", (bytes_,)),
        Operand("C", (R, L), "float32", "rw"),
    )

    def desc(A: PrimExpr, P: PrimExpr, C: PrimExpr) -> None:
        with nest("dot", "SSRR", R, L, H, slots) as (i, j, h, c):
            a = A[i, c, j * H + h]
            code = code_value(P[j * four + h * half + c // two], c, flip)
            product = (from_operand(a) if pairs else a) * code
            T.buffer_store(C, C[i, j] + product, [i, j])

    def impl(A: PrimExpr, P: PrimExpr, C: PrimExpr) -> None:
        T.evaluate(prefetch(P, ahead))
        loaded = P.vload([i64(0)], f"uint8x{4 * lanes}")
        words = tirx.reinterpret("uint16x32" if pairs else f"int32x{lanes}", loaded)
        values = [
            _bf16_values(words, c, flip)
            if pairs
            else _float_values(words, c, flip, _looks_up(level, lanes))
            for c in range(WORD // halves)
        ]
        for i in range(rows):
            total = C.vload([i64(i), i64(0)], f"float32x{lanes}")
            for c, value in enumerate(values):
                a = A.vload([i64(i), i64(c), i64(0)], f"{operand}x{lanes * halves}")
                total = _dot_pairs(total, a, value) if pairs else total + a * value
            T.buffer_store(C, total, [i64(i), tirx.Ramp(i64(0), i64(1), lanes)])

    name = f"int4_dot_{level}_{lanes}_flip{flip}_r{rows}_{compute}_{ahead}"
    return describe(name, operands, desc, impl)


def _dot_pairs(total: PrimExpr, a: PrimExpr, w: PrimExpr) -> PrimExpr:
    """``total`` plus products of pairs of bfloat16 (`x86_panels.DOT_BF16_LLVM`)."""
    return tirx.call_pure_extern(
        "float32x16",
        "blockscale_vdpbf16ps",
        total,
        tirx.reinterpret("int32x16", a),
        tirx.reinterpret("int32x16", w),
    )


_COLUMNS = re.compile(r"int4_columns_([a-z0-9]+)_(\d+)_(\d+)_flip(\d+)")
_PAIRS = re.compile(r"int4_column_pairs_(\d+)_flip(\d+)")
_DOT = re.compile(r"int4_dot_([a-z0-9]+)_(\d+)_flip(\d+)_r(\d+)_(float32|bfloat16)_(\d+)")


def register_named(trace: str) -> None:
    """Register the intrinsics of this module that ``trace`` names."""
    for level, lanes, row_bytes, flip in _COLUMNS.findall(trace):
        decode_columns(level, int(lanes), int(flip), int(row_bytes))
    for row_bytes, flip in _PAIRS.findall(trace):
        decode_column_pairs(int(row_bytes), int(flip))
    for level, lanes, flip, rows, compute, ahead in _DOT.findall(trace):
        dot_rows(level, int(lanes), int(flip), int(rows), compute, int(ahead))
