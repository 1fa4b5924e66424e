"""x86 intrinsics with lanes over rows: column panels of weights and scales, bfloat16 dot products.

`blockscale.tir.intrin.x86.width` says what a *desc* and an *impl* are.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2: VDPBF16PS.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T

from blockscale.base.formats import QUANTIZED
from blockscale.tir import formats
from blockscale.tir.common import i64
from blockscale.tir.gemm.linear import from_operand, weight_value
from blockscale.tir.intrin.operands import Operand, describe, intrinsic
from blockscale.tir.intrin.x86.width import WIDTHS, e2m1_lookup, packed

BLOCK_CODES = 16
"""Codes of one row that the column-panel decode takes at a time: 8 bytes."""


def column_words(rows: list[PrimExpr], word: int) -> PrimExpr:
    """Vector of one int32 per row: word ``word`` of each row's words (int32 vectors)."""
    width = int(rows[0].ty.dtype.lanes)
    picks = [tirx.const(row * width + word, "int32") for row in range(len(rows))]
    return tirx.Shuffle(rows, picks)


def transposed(rows: list[PrimExpr]) -> list[PrimExpr]:
    """Columns of a square of int32 vectors: log2(n) rounds of interleaving, one permute each."""
    count = len(rows)
    half = count // 2
    order = [(i // 2) + (i % 2) * count for i in range(count)]
    picks = [[tirx.const(index + start, "int32") for index in order] for start in (0, half)]
    for _ in range(count.bit_length() - 1):
        rows = [
            tirx.Shuffle([rows[i // 2], rows[i // 2 + half]], picks[i % 2]) for i in range(count)
        ]
    return rows


def store_all(words: PrimExpr, columns: list[PrimExpr]) -> None:
    """Emit the stores of vector ``columns[i]`` to row i of buffer ``words`` (inside a PrimFunc)."""
    for row, column in enumerate(columns):
        lanes = int(column.ty.dtype.lanes)
        T.buffer_store(words, column, [i64(row), tirx.Ramp(i64(0), i64(1), lanes)])


def panel_depth(level: str, k: int) -> int:
    """Codes of a row that the panel decode takes at a time: the most that divide K."""
    return next(depth for depth in panel_depths(level) if k % depth == 0)


def panel_depths(level: str) -> tuple[int, ...]:
    """What the panel decode can take at a time: a vector of words, half of one, 8 bytes."""
    lanes = WIDTHS[level].lanes
    return 8 * lanes, 4 * lanes, BLOCK_CODES


@intrinsic
def decode_panel(level: str, compute: str, depth: int, block: int) -> str:
    """Register and name: ``depth`` weights of each of ``lanes`` rows, one vector per k.

    float32: ``W[k, lane]``; bfloat16: ``W[k / 2, 2 * lane + k % 2]``, pairs as for VDPBF16PS.
    """
    lanes = WIDTHS[level].lanes
    pairs = compute == "bfloat16"
    operand = "uint16" if pairs else "float32"
    step, per_word = (2, 4) if pairs else (1, 8)  # codes a vector, vectors a word
    scale_count, words_per_scale = max(1, depth // block), min(depth, block) // 8
    L, K, half, one, two = i64(lanes), i64(depth), i64(depth // 2), i64(1), i64(2)
    scales, words_count = i64(scale_count), i64(depth // 8)
    vectors, width = i64(depth // step), i64(step * lanes)
    operands = (
        packed("P", (L, half), strided=True),
        Operand("S", (scales, L), "float32"),
        Operand("W", (vectors, width), operand, "w"),
    )

    @T.inline
    def desc(P, S, W):
        for n, k in T.grid(L, K):
            with T.sblock("decode"):
                vn, vk = T.axis.remap("SS", [n, k])
                W[vk // i64(step), vn * i64(step) + vk % i64(step)] = weight_value(
                    P[vn, vk // two], vk, S[vk // i64(block), vn], compute
                )

    def words_of(load: Callable[[int, int, str], PrimExpr]) -> list[PrimExpr]:
        """Vectors of 8 codes of every row; ``load(row, byte, dtype)`` reads the packed codes."""
        size = depth // 8
        rows = [
            tirx.reinterpret(f"int32x{size}", load(row, 0, f"uint8x{4 * size}"))
            for row in range(lanes)
        ]
        return transposed(rows) if size == lanes else [column_words(rows, w) for w in range(size)]

    def weights(word: PrimExpr, at: PrimExpr, scale: PrimExpr) -> PrimExpr:
        """Weight ``at`` (pairs: and its successor) of every row, from the rows' words."""
        shift = tirx.Broadcast(tirx.Cast("int32", at) * 4, lanes)
        even = formats.bits_of(e2m1_lookup(level, word >> shift) * scale)
        if not pairs:
            return formats.from_bits(even)
        next_shift = shift + tirx.Broadcast(tirx.const(4, "int32"), lanes)
        odd = formats.bits_of(e2m1_lookup(level, word >> next_shift) * scale)
        # bfloat16 is the upper half of float32: no rounding, weights are exact (see linear.py).
        low = (even >> formats.const(16, even, "int32")) & formats.const(0xFFFF, even, "int32")
        both = low | (odd & formats.const(-65536, odd, "int32"))
        return tirx.reinterpret(f"uint16x{2 * lanes}", both)

    @T.inline
    def impl(P, S, W):
        words = T.alloc_buffer((words_count, L), "int32")
        store_all(words, words_of(lambda row, byte, dtype: P.vload([i64(row), i64(byte)], dtype)))
        for w in T.serial(words_count):
            for at in T.unroll(i64(per_word)):
                W[w * i64(per_word) + at, T.ramp(i64(0), one, step * lanes)] = weights(
                    words.vload([w, i64(0)], f"int32x{lanes}"),
                    at * i64(step),
                    S.vload([w // i64(words_per_scale), i64(0)], f"float32x{lanes}"),
                )

    return describe(f"e2m1_panel_{level}_{lanes}x{depth}_{compute}_b{block}", operands, desc, impl)


SCALE_GROUPS = (16, 4)
"""Block scales of one row that the column-panel decode takes at a time, best first."""


def scale_group(blocks: int) -> int | None:
    """The largest group that divides ``blocks``; None: the plain loop."""
    return next((group for group in SCALE_GROUPS if blocks % group == 0), None)


@intrinsic
def decode_panel_scales(level: str, fmt: str, group: int) -> str:
    """Register and name: ``group`` block scales of each of ``lanes`` rows, one vector per scale."""
    lanes = WIDTHS[level].lanes
    L, count, one = i64(lanes), i64(group), i64(1)
    scale = QUANTIZED[fmt].scale
    operands = (
        packed("B", (L, count), strided=True),
        Operand("V", (count, L), "float32", "w"),
    )

    @T.inline
    def desc(B, V):
        for n, b in T.grid(L, count):
            with T.sblock("block_scale"):
                vn, vb = T.axis.remap("SS", [n, b])
                V[vb, vn] = formats.decode_byte(scale, B[vn, vb])

    def words_of(load: Callable[[int], PrimExpr]) -> list[PrimExpr]:
        size = group // 4
        dtype = f"int32x{size}" if size > 1 else "int32"
        rows = [tirx.reinterpret(dtype, load(row)) for row in range(lanes)]
        return [column_words(rows, word) for word in range(size)]

    @T.inline
    def impl(B, V):
        words = T.alloc_buffer((i64(group // 4), L), "int32")
        store_all(words, words_of(lambda row: B.vload([i64(row), i64(0)], f"uint8x{group}")))
        for b in T.unroll(count):
            V[b, T.ramp(i64(0), one, lanes)] = formats.decode(
                scale,
                (
                    words.vload([b // i64(4), i64(0)], f"int32x{lanes}")
                    >> T.broadcast(T.Cast("int32", b % i64(4)) * 8, lanes)
                )
                & T.broadcast(255, lanes),
            )

    return describe(f"scale_panel_{fmt}_{level}_{lanes}x{group}", operands, desc, impl)


# TVM rewrites bfloat16 vectors to uint16, which the LLVM intrinsic refuses: hence this function.
DOT_BF16_LLVM = """
define linkonce_odr hidden <16 x float> @blockscale_vdpbf16ps(
    <16 x float> %acc, <16 x i32> %a, <16 x i32> %w) alwaysinline {
  %x = bitcast <16 x i32> %a to <32 x bfloat>
  %y = bitcast <16 x i32> %w to <32 x bfloat>
  %sum = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(
      <16 x float> %acc, <32 x bfloat> %x, <32 x bfloat> %y)
  ret <16 x float> %sum
}
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
"""
"""LLVM code that a kernel using `dot_bf16` imports (loop annotation "pragma_import_llvm")."""


@intrinsic
def dot_bf16() -> str:
    """Register and name: ``acc[lane] += a[0] * w[lane, 0] + a[1] * w[lane, 1]`` (VDPBF16PS)."""
    lanes = 16
    L, pair, width, one = i64(lanes), i64(2), i64(2 * lanes), i64(1)
    operands = (
        Operand("A", (pair,), "uint16"),
        Operand("W", (width,), "uint16"),
        Operand("C", (L,), "float32", "rw"),
    )

    @T.inline
    def desc(A, W, C):
        for n, p in T.grid(L, pair):
            with T.sblock("matmul"):
                vn, vp = T.axis.remap("SR", [n, p])
                C[vn] = C[vn] + from_operand(A[vp]) * from_operand(W[vn * pair + vp])

    @T.inline
    def impl(A, W, C):
        C[T.ramp(i64(0), one, lanes)] = T.call_pure_extern(
            "float32x16",
            "blockscale_vdpbf16ps",
            C.vload([i64(0)], "float32x16"),
            T.broadcast(T.reinterpret("int32", A.vload([i64(0)], "uint16x2")), lanes),
            T.reinterpret("int32x16", W.vload([i64(0)], "uint16x32")),
        )

    return describe(f"vdpbf16ps_{lanes}x2", operands, desc, impl)
