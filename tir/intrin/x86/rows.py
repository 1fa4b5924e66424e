"""x86 intrinsics with lanes along a row: dot products, decoding, lane sums and maxima, packing.

`blockscale.tir.intrin.x86.width` says what a *desc* and an *impl* are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T

from blockscale.tir import formats
from blockscale.tir.common import i64
from blockscale.tir.gemm.linear import to_operand, weight_value
from blockscale.tir.intrin.operands import Operand, describe, intrinsic
from blockscale.tir.intrin.x86.width import PREFETCH_BYTES, WIDTHS, e2m1_lookup, packed, prefetch
from blockscale.tir.quant.quantize import pack_codes


def row_codes(packed: PrimExpr, lanes: int) -> PrimExpr:
    """Codes of ``lanes / 2`` packed bytes: low nibbles of int32 lanes, upper bits arbitrary."""
    wide = formats.cast(packed, "int64")
    pairs = wide | (wide << formats.const(28, wide, "int64"))
    return tirx.reinterpret(f"int32x{lanes}", pairs)


def spread(scale: PrimExpr, lanes: int) -> PrimExpr:
    """Each scale in all the lanes that share it; Shuffle wants no fewer lanes in than out."""
    share = lanes // int(scale.ty.dtype.lanes)
    picks = [tirx.const(lane // share, "int32") for lane in range(lanes)]
    return tirx.Shuffle([scale] * share, picks)


@intrinsic
def dot_row(level: str, block: int) -> str:
    """Register and name: ``acc[j] += sum_t a[t, j] * w[8 * j + t]``, a 32-bit word of codes a lane.

    Lane j decodes the 8 codes of word j in place (shift, look up); activations arrive transposed.
    The lane's 8 weights share a block scale, which multiplies their sum.
    """
    lanes, word = WIDTHS[level].lanes, 8
    L, size, half = i64(lanes), i64(word), i64(4 * lanes)
    lanes_per_scale = block // word
    scales, one, two = i64(lanes // lanes_per_scale), i64(1), i64(2)
    operands = (
        Operand("A", (size, L), "float32"),
        packed("P", (half,)),
        Operand("S", (scales,), "float32"),
        Operand("C", (L,), "float32", "rw"),
    )

    @T.inline
    def desc(A, P, S, C):
        for j, t in T.grid(L, size):
            with T.sblock("matmul"):
                vj, vt = T.axis.remap("SR", [j, t])
                C[vj] = C[vj] + A[vt, vj] * weight_value(
                    P[vj * i64(4) + vt // two], vt, S[vj // i64(lanes_per_scale)], "float32"
                )

    def partial(words: PrimExpr, load: Callable[[int], PrimExpr]) -> PrimExpr:
        total = load(0) * e2m1_lookup(level, words)
        for t in range(1, word):
            total += load(t) * e2m1_lookup(level, words >> formats.const(4 * t, words, "int32"))
        return total

    @T.inline
    def impl(A, P, S, C):
        T.evaluate(prefetch(P, PREFETCH_BYTES))
        words = T.alloc_buffer((L,), "int32")
        words[T.ramp(i64(0), one, lanes)] = T.reinterpret(
            f"int32x{lanes}", P.vload([i64(0)], f"uint8x{4 * lanes}")
        )
        C[T.ramp(i64(0), one, lanes)] = C.vload([i64(0)], f"float32x{lanes}") + partial(
            words.vload([i64(0)], f"int32x{lanes}"),
            lambda t: A.vload([i64(t), i64(0)], f"float32x{lanes}"),
        ) * spread(S.vload([i64(0)], f"float32x{lanes // lanes_per_scale}"), lanes)

    return describe(f"e2m1_dot_{level}_{lanes}x{word}_b{block}", operands, desc, impl)


@intrinsic
def decode_row(level: str, compute: str) -> str:
    """Register and name: one vector of E2M1 elements along k times its block scale, an operand.

    ``compute`` is the operand's type: "float32", or "bfloat16", held as uint16 bits.
    """
    operand = "float32" if compute == "float32" else "uint16"
    lanes = WIDTHS[level].lanes
    count, half = i64(lanes), i64(lanes // 2)
    one, two = i64(1), i64(2)
    operands = (
        packed("P", (half,)),
        Operand("S", (one,), "float32"),
        Operand("W", (count,), operand, "w"),
    )

    @T.inline
    def desc(P, S, W):
        for k in range(count):
            with T.sblock("decode"):
                vk = T.axis.spatial(count, k)
                W[vk] = weight_value(P[vk // two], vk, S[0], compute)

    @T.inline
    def impl(P, S, W):
        codes = T.alloc_buffer((count,), "int32")
        codes[T.ramp(i64(0), one, lanes)] = row_codes(
            P.vload([i64(0)], f"uint8x{lanes // 2}"), lanes
        )
        W[T.ramp(i64(0), one, lanes)] = to_operand(
            e2m1_lookup(level, codes.vload([i64(0)], f"int32x{lanes}")) * T.broadcast(S[0], lanes),
            compute,
        )

    kind = "bf16_" if compute == "bfloat16" else ""
    return describe(f"e2m1_row_{kind}{level}_{lanes}", operands, desc, impl)


def _lanes_of(expr: PrimExpr, start: int, count: int) -> PrimExpr:
    indices = [tirx.const(start + i, "int32") for i in range(count)]
    return tirx.Shuffle([expr], indices)


@intrinsic
def lane_sum(level: str) -> str:
    """Register and name: ``total += sum over lanes``, as a tree."""
    lanes = WIDTHS[level].lanes
    return _tree(f"lane_sum_{level}_{lanes}", lanes, "float32", "matmul", operator.add)


@intrinsic
def lane_max(count: int) -> str:
    """Register and name: ``largest = max(largest, values)`` over ``count`` int32 lanes, a tree."""
    return _tree(f"lane_max_{count}", count, "int32", "amax", tirx.Max)


def _tree(
    name: str, count: int, dtype: str, block: str, both: Callable[[PrimExpr, PrimExpr], PrimExpr]
) -> str:
    """Register and name: ``both`` of what was there and of all lanes, halved until one is left."""
    L, one = i64(count), i64(1)
    operands = Operand("R", (L,), dtype), Operand("C", (one,), dtype, "rw")

    @T.inline
    def desc(R, C):
        for lane in range(L):
            with T.sblock(block):
                vl = T.axis.reduce(L, lane)
                C[0] = both(C[0], R[vl])

    def impl(R: PrimExpr, C: PrimExpr) -> None:
        values, lanes = R.vload([i64(0)], f"{dtype}x{count}"), count
        while lanes > 1:
            lanes //= 2
            values = both(_lanes_of(values, 0, lanes), _lanes_of(values, lanes, lanes))
        T.buffer_store(C, both(C[0], values), [0])

    return describe(name, operands, desc, impl)


@intrinsic
def pack_row(count: int) -> str:
    """Register and name: ``count`` codes (int32) to ``count / 2`` bytes, the even code low."""
    L, half, one, two = i64(count), i64(count // 2), i64(1), i64(2)
    operands = (
        Operand("C", (L,), "int32"),
        packed("P", (half,), access="w"),
    )

    @T.inline
    def desc(C, P):
        for j in range(half):
            with T.sblock("pack"):
                vj = T.axis.spatial(half, j)
                P[vj] = pack_codes(C[vj * two], C[vj * two + one])

    @T.inline
    def impl(C, P):
        P[T.ramp(i64(0), one, count // 2)] = pack_pairs(
            T.reinterpret(f"int64x{count // 2}", C.vload([i64(0)], f"int32x{count}"))
        )

    return describe(f"pack_row_{count}", operands, desc, impl)


def pack_pairs(pairs: PrimExpr) -> PrimExpr:
    """Bytes of pairs of codes, each pair an int64 lane with the even code in its lower half."""
    # The odd code is at bit 32: 28 places down it is the high nibble.
    return formats.cast(pairs | (pairs >> formats.const(28, pairs, "int64")), "uint8")
