"""x86 intrinsics of block-scaled GEMMs: E4M3 column panels, rows of operands in the compute type.

`blockscale.tir.intrin.x86.width` says what a *desc* and an *impl* are.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T

from blockscale.tir import formats
from blockscale.tir.common import i64
from blockscale.tir.gemm.linear import weight_value
from blockscale.tir.intrin.operands import Operand, describe, intrinsic
from blockscale.tir.intrin.x86.panels import BLOCK_CODES, column_words, store_all, transposed
from blockscale.tir.intrin.x86.rows import spread
from blockscale.tir.intrin.x86.width import WIDTHS, e2m1_lookup, packed

E4M3_BLOCK = 32
"""Elements that share a scale in the formats with E4M3 elements."""


def e4m3_depth(level: str, k: int) -> int:
    """Codes of a row that the panel decode takes at a time: the most that divide K."""
    return next(depth for depth in e4m3_depths(level) if k % depth == 0)


def e4m3_depths(level: str) -> tuple[int, ...]:
    """What the panel decode of E4M3 can take at a time: a square of words, or 16 bytes."""
    return 4 * WIDTHS[level].lanes, BLOCK_CODES


@intrinsic
def decode_panel_e4m3(level: str, depth: int, block: int) -> str:
    """Register and name: ``depth`` E4M3 elements of each of ``lanes`` rows, one vector per k."""
    lanes = WIDTHS[level].lanes
    scale_count, per_word = max(1, depth // block), 4
    L, K, one, words_count = i64(lanes), i64(depth), i64(1), i64(depth // per_word)
    scales, words_per_scale = i64(scale_count), i64(min(depth, block) // per_word)
    operands = (
        packed("P", (L, K), strided=True),
        Operand("S", (scales, L), "float32"),
        Operand("W", (K, L), "float32", "w"),
    )

    @T.inline
    def desc(P, S, W):
        for n, k in T.grid(L, K):
            with T.sblock("decode"):
                vn, vk = T.axis.remap("SS", [n, k])
                W[vk, vn] = (
                    formats.e4m3_decode(T.Cast("int32", P[vn, vk])) * S[vk // i64(block), vn]
                )

    def columns(load: list[PrimExpr]) -> list[PrimExpr]:
        size = depth // per_word
        rows = [tirx.reinterpret(f"int32x{size}", row) for row in load]
        return transposed(rows) if size == lanes else [column_words(rows, w) for w in range(size)]

    @T.inline
    def impl(P, S, W):
        words = T.alloc_buffer((words_count, L), "int32")
        store_all(
            words,
            columns([P.vload([i64(row), i64(0)], f"uint8x{depth}") for row in range(lanes)]),
        )
        for w in T.serial(words_count):
            for at in T.unroll(i64(per_word)):
                W[w * i64(per_word) + at, T.ramp(i64(0), one, lanes)] = formats.e4m3_decode(
                    (
                        words.vload([w, i64(0)], f"int32x{lanes}")
                        >> T.broadcast(T.Cast("int32", at) * 8, lanes)
                    )
                    & T.broadcast(255, lanes)
                ) * S.vload([w // words_per_scale, i64(0)], f"float32x{lanes}")

    return describe(f"e4m3_panel_{level}_{lanes}x{depth}_b{block}", operands, desc, impl)


@intrinsic
def decode_words(level: str, block: int) -> str:
    """Register and name: words of 8 E2M1 elements times their scales, as `dot_row` reads rows."""
    lanes, word = WIDTHS[level].lanes, 8
    L, size, half, one, two = i64(lanes), i64(word), i64(4 * lanes), i64(1), i64(2)
    lanes_per_scale = block // word
    scales = i64(lanes // lanes_per_scale)
    operands = (
        packed("P", (half,)),
        Operand("S", (scales,), "float32"),
        Operand("W", (size, L), "float32", "w"),
    )

    @T.inline
    def desc(P, S, W):
        for j, t in T.grid(L, size):
            with T.sblock("decode"):
                vk = T.axis.spatial(L * size, j * size + t)
                W[vk % size, vk // size] = weight_value(
                    P[vk // two], vk, S[vk // i64(block)], "float32"
                )

    @T.inline
    def impl(P, S, W):
        words = T.alloc_buffer((L,), "int32")
        words[T.ramp(i64(0), one, lanes)] = T.reinterpret(
            f"int32x{lanes}", P.vload([i64(0)], f"uint8x{4 * lanes}")
        )
        for t in T.unroll(size):
            W[t, T.ramp(i64(0), one, lanes)] = e2m1_lookup(
                level,
                words.vload([i64(0)], f"int32x{lanes}")
                >> T.broadcast(T.Cast("int32", t) * 4, lanes),
            ) * spread(S.vload([i64(0)], f"float32x{lanes // lanes_per_scale}"), lanes)

    return describe(f"e2m1_words_{level}_{lanes}x{word}_b{block}", operands, desc, impl)
