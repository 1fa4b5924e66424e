"""Rows of the MoE layer on a CPU: sorted by expert, quantised if asked for, laid out for the GEMMs.

``act_fmt`` of a row x (float32 steps): "fp8": s = max|x| / 448, e4m3(x / s) * s; "fp8_tensor": s is
given; "nvfp4": blocks of 16, b = e4m3(max|x| / (6 s)), e2m1(x / (b s)) * (b s), s is given;
"mxfp4": blocks of 32, b the power of two at or above max|x| / 6, e2m1(x / b) * b; "mxfp8":
likewise max|x| / 448 and e4m3.  Where a factor is 0, zeros.  A NaN makes all
numbers of its factor NaN.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T

from blockscale.base.formats import GEMM
from blockscale.specs import FusedMoe
from blockscale.specs.moe import MX_FORMATS
from blockscale.specs.plans.coded import SCALE_BLOCK, CodedRow
from blockscale.tir import formats
from blockscale.tir.common import i64, tiles_of, widen

FP8_MAX, FP4_MAX = 448.0, 6.0


def sort_step(spec: FusedMoe, row_tile: int) -> Any:
    """Step from ids to tiles: a counting sort of the slots of a chunk.

    used [1]: tiles; expert [tiles]; source [tiles, R]: slots (-1: none); place [tokens, k]: rows of
    tiles (-1: the slot is left out).
    """
    E, k, R, zero, one = i64(spec.experts), i64(spec.top_k), i64(row_tile), i64(0), i64(1)

    @T.inline
    def step(topk_ids, used, expert, source, place, first, tokens, tiles):
        for u in range(1):
            with T.sblock("sort"):
                vu = T.axis.spatial(1, u)
                T.reads(topk_ids[first : first + tokens, 0:k])
                T.writes(used[0], expert[0:tiles], source[0:tiles, 0:R], place[0:tokens, 0:k])
                count = T.alloc_buffer((E,), "int64")
                following = T.alloc_buffer((E,), "int64")
                for e in range(E):
                    count[e] = zero
                for t, j in T.grid(tokens, k):
                    if topk_ids[first + t, j] >= 0 and topk_ids[first + t, j] < spec.experts:
                        count[topk_ids[first + t, j]] = count[topk_ids[first + t, j]] + one
                used[0] = zero
                for e in range(E):
                    following[e] = used[0] * R
                    for i in range(tiles_of(count[e], row_tile)):
                        expert[used[0] + i] = T.Cast("int64", e)
                    used[0] = used[0] + tiles_of(count[e], row_tile)
                for t, i in T.grid(used[0], R):
                    source[t, i] = i64(-1)
                for t, j in T.grid(tokens, k):
                    if topk_ids[first + t, j] >= 0 and topk_ids[first + t, j] < spec.experts:
                        place[t, j] = following[topk_ids[first + t, j]]
                        source[place[t, j] // R, place[t, j] % R] = t * k + j
                        following[topk_ids[first + t, j]] = place[t, j] + one
                    else:
                        place[t, j] = i64(-1)

    return step


def coded_value(spec: FusedMoe, rows: Any, given: Any, row: PrimExpr, k: PrimExpr) -> PrimExpr:
    """Element k of a coded row (`CodedRow`), float32."""
    at = CodedRow(spec.act_fmt or "", spec.hidden)

    def byte(place: PrimExpr) -> PrimExpr:
        return tirx.Cast("int32", rows[row, place])

    if spec.act_fmt == "fp8":
        bits = byte(i64(at.codes))
        for i in range(1, 4):
            bits = bits | byte(i64(at.codes + i)) << tirx.const(8 * i, "int32")
        return formats.e4m3_decode(byte(k)) * formats.from_bits(bits)
    code = formats.e2m1_decode(formats.nibble(byte(tirx.floordiv(k, i64(2))), k))
    scale = formats.e4m3_decode(byte(i64(at.codes) + tirx.floordiv(k, i64(SCALE_BLOCK))))
    return code * (scale * given[0])


def rows_step(spec: FusedMoe, which: int, lanes: int) -> Any:
    """Step to rows [tiles, steps, R, 8, lanes] of GEMM ``which``: from hidden (1) or from h (2).

    Element k of row i is at [k / (8 lanes), i, k % 8, k % (8 lanes) / 8].  Rows of no slot: zeros.
    """
    size = spec.hidden if which == 1 else spec.intermediate
    block = GEMM[spec.act_fmt].block if spec.act_fmt in GEMM else size
    K, blocks, each, deep, word = map(i64, (size, size // block, block, 8 * lanes, 8))
    top_k, zero, f0 = i64(spec.top_k), i64(0), tirx.const(0.0, "float32")

    def value(values: Any, source: Any, first: PrimExpr, t: PrimExpr, i: PrimExpr, k: PrimExpr):
        slot = source[t, i]
        if which == 2:
            given = values[t, i, k]
        else:
            given = widen(values[first + tirx.floordiv(tirx.Max(slot, zero), top_k), k])
        return tirx.if_then_else(slot >= zero, given, f0)

    # Numbers that formulas have many times are stored: as expressions they would make trees of
    # thousands of nodes, of which TVM's passes take seconds.
    def scale_byte(most_bits: PrimExpr, given: Any) -> PrimExpr:
        largest = formats.from_bits(most_bits)
        if spec.act_fmt == "nvfp4":
            return formats.e4m3_encode(largest / (tirx.const(FP4_MAX, "float32") * given[0]))
        if spec.act_fmt in MX_FORMATS:
            most = FP4_MAX if spec.act_fmt == "mxfp4" else FP8_MAX
            return formats.ue8m0_encode_ceil(largest / tirx.const(most, "float32"))
        return tirx.const(0, "int32")

    def factor_of(most_bits: PrimExpr, given: Any, byte: PrimExpr) -> PrimExpr:
        largest = formats.from_bits(most_bits)
        some = most_bits > tirx.const(0, "int32")
        if spec.act_fmt == "fp8":
            return largest / tirx.const(FP8_MAX, "float32")
        if spec.act_fmt == "fp8_tensor":
            return given[0]
        if spec.act_fmt != "nvfp4":
            return tirx.Select(some, formats.ue8m0_decode(byte), f0)
        return tirx.Select(some, formats.e4m3_decode(byte) * given[0], f0)

    four_bits = spec.act_fmt in ("nvfp4", "mxfp4")
    encode = formats.e2m1_encode if four_bits else formats.e4m3_encode
    decoded = formats.e2m1_decode if four_bits else formats.e4m3_decode

    # Bits, since a maximum of float32 is a > b ? a : b, which loses a NaN and what was before it.
    @T.inline
    def amax(values, source, most_bits, used, first, tiles, R):
        for t, i, b, k in T.grid(tiles, R, blocks, each):
            with T.sblock(f"amax{which}"):
                vt, vi, vb, vk = T.axis.remap("SSSR", [t, i, b, k])
                T.where(t < used[0])
                with T.init():
                    most_bits[vt, vi, vb] = 0
                most_bits[vt, vi, vb] = T.max(
                    most_bits[vt, vi, vb],
                    formats.abs_bits(value(values, source, first, vt, vi, vb * each + vk)),
                )

    @T.inline
    def factors(most_bits, given, factor, used, tiles, R):
        for t, i, b in T.grid(tiles, R, blocks):
            with T.sblock(f"factor{which}"):
                vt, vi, vb = T.axis.remap("SSS", [t, i, b])
                T.where(t < used[0])
                byte = T.sblock_alloc_buffer((i64(1),), "int32")
                byte[0] = scale_byte(most_bits[vt, vi, vb], given)
                factor[vt, vi, vb] = factor_of(most_bits[vt, vi, vb], given, byte[0])

    @T.inline
    def quantise(values, given, laid, source, used, first, tiles, R):
        most_bits = T.sblock_alloc_buffer((tiles, R, blocks), "int32")
        factor = T.sblock_alloc_buffer((tiles, R, blocks), "float32")
        amax(values, source, most_bits, used, first, tiles, R)
        factors(most_bits, given, factor, used, tiles, R)
        for t, i, k in T.grid(tiles, R, K):
            with T.sblock(f"rows{which}"):
                vt, vi, vk = T.axis.remap("SSS", [t, i, k])
                T.where(t < used[0])
                ratio = T.sblock_alloc_buffer((i64(1),), "float32")
                code = T.sblock_alloc_buffer((i64(1),), "int32")
                ratio[0] = value(values, source, first, vt, vi, vk) / factor[vt, vi, vk // each]
                code[0] = encode(ratio[0])
                laid[vt, vk // deep, vi, vk % word, vk % deep // word] = T.Select(
                    factor[vt, vi, vk // each] == f0,
                    f0,
                    decoded(code[0]) * factor[vt, vi, vk // each],
                )

    @T.inline
    def copy(values, given, laid, source, used, first, tiles, R):
        for t, i, k in T.grid(tiles, R, K):
            with T.sblock(f"rows{which}"):
                vt, vi, vk = T.axis.remap("SSS", [t, i, k])
                T.where(t < used[0])
                laid[vt, vk // deep, vi, vk % word, vk % deep // word] = value(
                    values, source, first, vt, vi, vk
                )

    @T.inline
    def decode(values, given, laid, source, used, first, tiles, R):
        for t, i, k in T.grid(tiles, R, K):
            with T.sblock(f"rows{which}"):
                vt, vi, vk = T.axis.remap("SSS", [t, i, k])
                T.where(t < used[0])
                laid[vt, vk // deep, vi, vk % word, vk % deep // word] = tirx.if_then_else(
                    source[vt, vi] >= zero,
                    coded_value(
                        spec,
                        values,
                        given,
                        first + tirx.floordiv(tirx.Max(source[vt, vi], zero), top_k),
                        vk,
                    ),
                    f0,
                )

    if spec.coded and which == 1:
        return decode
    return copy if spec.act_fmt is None else quantise
