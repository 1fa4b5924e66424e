"""x86 intrinsics with lanes along a row: dot products, decoding, lane sums and maxima, packing.

`blockscale.tir.intrin.x86.width` says what a *desc* and an *impl* are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T

from blockscale.tir import formats
from blockscale.tir.common import i64
from blockscale.tir.gemm.linear import to_operand, weight_value
from blockscale.tir.intrin.x86.width import PREFETCH_BYTES, WIDTHS, e2m1_lookup, prefetch, register
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


@cache
def dot_row(level: str, block: int) -> str:
    """Register and name: ``acc[j] += sum_t a[t, j] * w[8 * j + t]``, a 32-bit word of codes a lane.

    Lane j decodes the 8 codes of word j in place (shift, look up); activations arrive transposed.
    The lane's 8 weights share a block scale, which multiplies their sum.
    """
    lanes, word = WIDTHS[level].lanes, 8
    L, size, half = i64(lanes), i64(word), i64(4 * lanes)
    lanes_per_scale = block // word
    scales, one, two = i64(lanes // lanes_per_scale), i64(1), i64(2)

    @T.prim_func(s_tir=True)
    def desc(a: T.handle, packed: T.handle, scale: T.handle, acc: T.handle):
        A = T.match_buffer(a, (size, L), "float32", offset_factor=1)
        P = T.match_buffer(packed, (half,), "uint8", align=1, offset_factor=1)
        S = T.match_buffer(scale, (scales,), "float32", offset_factor=1)
        C = T.match_buffer(acc, (L,), "float32", offset_factor=1)
        with T.sblock("root"):
            T.reads(C[0:L], A[0:size, 0:L], P[0:half], S[0:scales])
            T.writes(C[0:L])
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

    @T.prim_func(s_tir=True)
    def impl(a: T.handle, packed: T.handle, scale: T.handle, acc: T.handle):
        A = T.match_buffer(a, (size, L), "float32", offset_factor=1)
        P = T.match_buffer(packed, (half,), "uint8", align=1, offset_factor=1)
        S = T.match_buffer(scale, (scales,), "float32", offset_factor=1)
        C = T.match_buffer(acc, (L,), "float32", offset_factor=1)
        with T.sblock("root"):
            T.reads(C[0:L], A[0:size, 0:L], P[0:half], S[0:scales])
            T.writes(C[0:L])
            T.evaluate(prefetch(P, PREFETCH_BYTES))
            words = T.alloc_buffer((L,), "int32")
            words[T.ramp(i64(0), one, lanes)] = T.reinterpret(
                f"int32x{lanes}", P.vload([i64(0)], f"uint8x{4 * lanes}")
            )
            C[T.ramp(i64(0), one, lanes)] = C.vload([i64(0)], f"float32x{lanes}") + partial(
                words.vload([i64(0)], f"int32x{lanes}"),
                lambda t: A.vload([i64(t), i64(0)], f"float32x{lanes}"),
            ) * spread(S.vload([i64(0)], f"float32x{lanes // lanes_per_scale}"), lanes)

    return register(f"e2m1_dot_{level}_{lanes}x{word}_b{block}", desc, impl)


@cache
def decode_row(level: str, compute: str) -> str:
    """Register and name: one vector of E2M1 elements along k times its block scale, an operand.

    ``compute`` is the operand's type: "float32", or "bfloat16", held as uint16 bits.
    """
    operand = "float32" if compute == "float32" else "uint16"
    lanes = WIDTHS[level].lanes
    count, half = i64(lanes), i64(lanes // 2)
    one, two = i64(1), i64(2)

    @T.prim_func(s_tir=True)
    def desc(packed: T.handle, scale: T.handle, weight: T.handle):
        P = T.match_buffer(packed, (half,), "uint8", align=1, offset_factor=1)
        S = T.match_buffer(scale, (one,), "float32", offset_factor=1)
        W = T.match_buffer(weight, (count,), operand, offset_factor=1)
        with T.sblock("root"):
            T.reads(P[0:half], S[0:one])
            T.writes(W[0:count])
            for k in range(count):
                with T.sblock("decode"):
                    vk = T.axis.spatial(count, k)
                    W[vk] = weight_value(P[vk // two], vk, S[0], compute)

    @T.prim_func(s_tir=True)
    def impl(packed: T.handle, scale: T.handle, weight: T.handle):
        P = T.match_buffer(packed, (half,), "uint8", align=1, offset_factor=1)
        S = T.match_buffer(scale, (one,), "float32", offset_factor=1)
        W = T.match_buffer(weight, (count,), operand, offset_factor=1)
        with T.sblock("root"):
            T.reads(P[0:half], S[0:one])
            T.writes(W[0:count])
            codes = T.alloc_buffer((count,), "int32")
            codes[T.ramp(i64(0), one, lanes)] = row_codes(
                P.vload([i64(0)], f"uint8x{lanes // 2}"), lanes
            )
            W[T.ramp(i64(0), one, lanes)] = to_operand(
                e2m1_lookup(level, codes.vload([i64(0)], f"int32x{lanes}"))
                * T.broadcast(S[0], lanes),
                compute,
            )

    kind = "bf16_" if compute == "bfloat16" else ""
    return register(f"e2m1_row_{kind}{level}_{lanes}", desc, impl)


def _lanes_of(expr: PrimExpr, start: int, count: int) -> PrimExpr:
    indices = [tirx.const(start + i, "int32") for i in range(count)]
    return tirx.Shuffle([expr], indices)


@cache
def lane_sum(level: str) -> str:
    """Register and name: ``total += sum over lanes``, as a tree."""
    lanes = WIDTHS[level].lanes
    L, one = i64(lanes), i64(1)

    def tree(values: PrimExpr, count: int) -> PrimExpr:
        while count > 1:
            count //= 2
            values = _lanes_of(values, 0, count) + _lanes_of(values, count, count)
        return values

    @T.prim_func(s_tir=True)
    def desc(partial: T.handle, total: T.handle):
        R = T.match_buffer(partial, (L,), "float32", offset_factor=1)
        C = T.match_buffer(total, (one,), "float32", offset_factor=1)
        with T.sblock("root"):
            T.reads(C[0], R[0:L])
            T.writes(C[0])
            for lane in range(L):
                with T.sblock("matmul"):
                    vl = T.axis.reduce(L, lane)
                    C[0] = C[0] + R[vl]

    @T.prim_func(s_tir=True)
    def impl(partial: T.handle, total: T.handle):
        R = T.match_buffer(partial, (L,), "float32", offset_factor=1)
        C = T.match_buffer(total, (one,), "float32", offset_factor=1)
        with T.sblock("root"):
            T.reads(C[0], R[0:L])
            T.writes(C[0])
            C[0] = C[0] + tree(R.vload([i64(0)], f"float32x{lanes}"), lanes)

    return register(f"lane_sum_{level}_{lanes}", desc, impl)


@cache
def lane_max(count: int) -> str:
    """Register and name: ``largest = max(largest, values)`` over ``count`` int32 lanes, a tree."""
    L, one = i64(count), i64(1)

    def tree(values: PrimExpr, lanes: int) -> PrimExpr:
        while lanes > 1:
            lanes //= 2
            values = tirx.Max(_lanes_of(values, 0, lanes), _lanes_of(values, lanes, lanes))
        return values

    @T.prim_func(s_tir=True)
    def desc(values: T.handle, largest: T.handle):
        V = T.match_buffer(values, (L,), "int32", offset_factor=1)
        M = T.match_buffer(largest, (one,), "int32", offset_factor=1)
        with T.sblock("root"):
            T.reads(M[0], V[0:L])
            T.writes(M[0])
            for e in range(L):
                with T.sblock("amax"):
                    ve = T.axis.reduce(L, e)
                    M[0] = T.max(M[0], V[ve])

    @T.prim_func(s_tir=True)
    def impl(values: T.handle, largest: T.handle):
        V = T.match_buffer(values, (L,), "int32", offset_factor=1)
        M = T.match_buffer(largest, (one,), "int32", offset_factor=1)
        with T.sblock("root"):
            T.reads(M[0], V[0:L])
            T.writes(M[0])
            M[0] = T.max(M[0], tree(V.vload([i64(0)], f"int32x{count}"), count))

    return register(f"lane_max_{count}", desc, impl)


@cache
def pack_row(count: int) -> str:
    """Register and name: ``count`` codes (int32) to ``count / 2`` bytes, the even code low."""
    L, half, one, two = i64(count), i64(count // 2), i64(1), i64(2)

    @T.prim_func(s_tir=True)
    def desc(codes: T.handle, packed: T.handle):
        C = T.match_buffer(codes, (L,), "int32", offset_factor=1)
        P = T.match_buffer(packed, (half,), "uint8", align=1, offset_factor=1)
        with T.sblock("root"):
            T.reads(C[0:L])
            T.writes(P[0:half])
            for j in range(half):
                with T.sblock("pack"):
                    vj = T.axis.spatial(half, j)
                    P[vj] = pack_codes(C[vj * two], C[vj * two + one])

    @T.prim_func(s_tir=True)
    def impl(codes: T.handle, packed: T.handle):
        C = T.match_buffer(codes, (L,), "int32", offset_factor=1)
        P = T.match_buffer(packed, (half,), "uint8", align=1, offset_factor=1)
        with T.sblock("root"):
            T.reads(C[0:L])
            T.writes(P[0:half])
            P[T.ramp(i64(0), one, count // 2)] = pack_pairs(
                T.reinterpret(f"int64x{count // 2}", C.vload([i64(0)], f"int32x{count}"))
            )

    return register(f"pack_row_{count}", desc, impl)


def pack_pairs(pairs: PrimExpr) -> PrimExpr:
    """Bytes of pairs of codes, each pair an int64 lane with the even code in its lower half."""
    # The odd code is at bit 32: 28 places down it is the high nibble.
    return formats.cast(pairs | (pairs >> formats.const(28, pairs, "int64")), "uint8")
