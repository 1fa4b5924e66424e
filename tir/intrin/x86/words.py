"""x86 intrinsics of a MoE layer: a vector of words of 4-bit codes times a few rows.

`blockscale.tir.intrin.x86.width` says what a *desc* and an *impl* are.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T

from blockscale.base.formats import INT4, MOE
from blockscale.tir import formats
from blockscale.tir.common import i64
from blockscale.tir.intrin.operands import Operand, describe, intrinsic, nest
from blockscale.tir.intrin.x86.rows import spread
from blockscale.tir.intrin.x86.width import PREFETCH_BYTES, WIDTHS, e2m1_lookup, packed, prefetch
from blockscale.tir.moe.fused_moe import ROW_TILES, WORD, coded_value

KINDS = tuple(
    (f"{row.codes.name}{zero}", group)
    for row in MOE.values()
    for zero in (("", "z") if row.codes is INT4 else ("",))
    for group in row.blocks
)
"""Codes ("int4z": with zeros) and the elements that share a scale."""


def _values(level: str, code: str, words: PrimExpr, at: int, zero: PrimExpr) -> PrimExpr:
    """Code ``at`` of every word (int32 lanes) as float32, less ``zero``; without the scale."""
    shifted = words >> formats.const(4 * at, words, "int32") if at else words
    if code == "e2m1":
        return e2m1_lookup(level, shifted)
    return formats.cast(shifted & formats.const(15, words, "int32"), "float32") - zero


def _shared(values: PrimExpr, count: int, lanes: int) -> PrimExpr:
    """``count`` values of a buffer, each in the lanes that share it."""
    if count == 1:
        return tirx.Broadcast(values[i64(0)], lanes)
    return spread(values.vload([i64(0)], f"float32x{count}"), lanes)


@intrinsic
def dot_words(level: str, code: str, block: int, rows: int) -> str:
    """Register and name: ``acc[i, j] += sum_t a[i, t, j] * w[8 * j + t]`` for ``rows`` rows i.

    Lane j decodes the 8 codes of word j in place, once for all rows; activations arrive
    transposed.  A lane's 8 weights share a block scale (and a zero), which multiplies their sum.
    """
    lanes = WIDTHS[level].lanes
    share = min(lanes, block // WORD)
    count, with_zero = lanes // share, code == "int4z"
    L, R, size, half, scales = map(i64, (lanes, rows, WORD, 4 * lanes, count))
    two, four = i64(2), i64(4)

    def at(lane: PrimExpr) -> PrimExpr:
        return i64(0) if share == lanes else lane // i64(share)

    def desc(A: PrimExpr, P: PrimExpr, S: PrimExpr, *others: PrimExpr) -> None:
        Z, C = others[0] if with_zero else S, others[-1]
        with nest("dot", "SSR", R, L, size) as (i, j, t):
            value = coded_value(code, P[j * four + t // two], t, S[at(j)], Z[at(j)])
            T.buffer_store(C, C[i, j] + A[i, t, j] * value, [i, j])

    def impl(A: PrimExpr, P: PrimExpr, S: PrimExpr, *others: PrimExpr) -> None:
        Z, C = others[0], others[-1]
        T.evaluate(prefetch(P, PREFETCH_BYTES))
        W = T.alloc_buffer((size, L), "float32")
        ramp = tirx.Ramp(i64(0), i64(1), lanes)
        words = tirx.reinterpret(f"int32x{lanes}", P.vload([i64(0)], f"uint8x{4 * lanes}"))
        eight = tirx.Broadcast(tirx.const(8.0, "float32"), lanes)
        zero = _shared(Z, count, lanes) if with_zero else eight
        for t in range(WORD):
            T.buffer_store(W, _values(level, code, words, t, zero), [i64(t), ramp])
        for i in range(rows):
            total = None
            for t in range(WORD):
                a = A.vload([i64(i), i64(t), i64(0)], f"float32x{lanes}")
                term = a * W.vload([i64(t), i64(0)], f"float32x{lanes}")
                total = term if total is None else total + term
            before = C.vload([i64(i), i64(0)], f"float32x{lanes}")
            T.buffer_store(C, before + total * _shared(S, count, lanes), [i64(i), ramp])

    zeros = (Operand("Z", (scales,), "float32"),) if with_zero else ()
    operands = (
        Operand("A", (R, size, L), "float32"),
        packed("P", (half,)),
        Operand("S", (scales,), "float32"),
        *zeros,
        Operand("C", (R, L), "float32", "rw"),
    )
    name = f"{code}_dots_{level}_{lanes}x{WORD}_b{block}_r{rows}"
    return describe(name, operands, desc, impl, "C A P Z S" if with_zero else None)


def register_all() -> None:
    """Register every intrinsic of this module."""
    for level in {width.level for width in WIDTHS.values()}:
        for code, block in KINDS:
            for rows in ROW_TILES:
                dot_words(level, code, block, rows)
