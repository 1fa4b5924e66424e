"""x86 vector code for E2M1 weights: decode by table permute, bfloat16 dot products, lane sums.

Each intrinsic is a *desc* in plain loops (the same expressions as the ops) and an *impl* on whole vectors.
A `Width` says which instructions are there:

* "avx512": 16 float32 lanes; VPERMPS looks all 16 codes up in one register.
* "avx2": 8 lanes; VPERMPS looks up the 8 magnitudes, the sign is or-ed in.
* "plain": 8 lanes, which LLVM splits as the CPU needs; the arithmetic of `formats.e2m1_decode`.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2: VPERMPS, VDPBF16PS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T
from tvm.script.ir_builder import tirx as ir_builder
from tvm.tirx import PrimFunc

from blockscale.tir import formats
from blockscale.tir.common import i64
from blockscale.tir.linear import from_operand, weight_value
from blockscale.tir.quantize import pack_codes


@dataclass(frozen=True)
class Width:
    """A vector width: float32 lanes and vector registers."""

    level: str
    lanes: int
    registers: int


WIDTHS = {w.level: w for w in (Width("avx512", 16, 32), Width("avx2", 8, 16), Width("plain", 8, 8))}
WIDTHS["avx512bf16"] = WIDTHS["avx512"]
"""Vector widths by CPU level."""

BLOCK_CODES = 16
"""Codes of one row that the column-panel decode takes at a time: 8 bytes."""


def vector(values: list[PrimExpr]) -> PrimExpr:
    """Vector of scalar expressions."""
    return tirx.Shuffle(values, [tirx.const(i, "int32") for i in range(len(values))])


def _lanes_of(expr: PrimExpr, start: int, count: int) -> PrimExpr:
    indices = [tirx.const(start + i, "int32") for i in range(count)]
    return tirx.Shuffle([expr], indices)


def _table(values: tuple[float, ...]) -> PrimExpr:
    return vector([tirx.const(value, "float32") for value in values])


def e2m1_lookup(level: str, codes: PrimExpr) -> PrimExpr:
    """E2M1 values (float32) of the low four bits of every int32 lane of ``codes``."""
    positive = formats.E2M1.values
    if level == "avx512":
        table = _table(positive + tuple(-value for value in positive))
        name = "llvm.x86.avx512.permvar.sf.512"
        return tirx.call_llvm_pure_intrin("float32x16", name, table, codes)
    if level == "avx2":
        name = "llvm.x86.avx2.permps"
        magnitude = tirx.call_llvm_pure_intrin("float32x8", name, _table(positive), codes)
        sign = (codes & formats.const(8, codes, "int32")) << formats.const(28, codes, "int32")
        return formats.from_bits(formats.bits_of(magnitude) | sign)
    return formats.e2m1_decode(codes)


def _row_codes(packed: PrimExpr, lanes: int) -> PrimExpr:
    """Codes of ``lanes / 2`` packed bytes as int32 lanes in the low nibbles; upper bits are arbitrary."""
    wide = formats.cast(packed, "int64")
    pairs = wide | (wide << formats.const(28, wide, "int64"))
    return tirx.reinterpret(f"int32x{lanes}", pairs)


@cache
def dot_row(level: str, block: int) -> str:
    """Register and name: ``acc[j] += sum_t a[t, j] * w[8 * j + t]``, one 32-bit word of codes a lane.

    Lane j decodes the 8 codes of word j in place (shift, look up); activations arrive transposed.  The
    lane's 8 weights share a block scale, which multiplies their sum.
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

    def spread(scale: PrimExpr) -> PrimExpr:
        """Each scale in all the lanes that share it; Shuffle wants no fewer lanes in than out."""
        picks = [tirx.const(lane // lanes_per_scale, "int32") for lane in range(lanes)]
        return tirx.Shuffle([scale] * lanes_per_scale, picks)

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
            ) * spread(S.vload([i64(0)], f"float32x{lanes // lanes_per_scale}"))

    return _register(f"e2m1_dot_{level}_{lanes}x{word}_b{block}", desc, impl)


@cache
def decode_row(level: str) -> str:
    """Register and name: one vector of weights along k, float32, times its block scale."""
    lanes = WIDTHS[level].lanes
    count, half = i64(lanes), i64(lanes // 2)
    one, two = i64(1), i64(2)

    @T.prim_func(s_tir=True)
    def desc(packed: T.handle, scale: T.handle, weight: T.handle):
        P = T.match_buffer(packed, (half,), "uint8", align=1, offset_factor=1)
        S = T.match_buffer(scale, (one,), "float32", offset_factor=1)
        W = T.match_buffer(weight, (count,), "float32", offset_factor=1)
        with T.sblock("root"):
            T.reads(P[0:half], S[0:one])
            T.writes(W[0:count])
            for k in range(count):
                with T.sblock("decode"):
                    vk = T.axis.spatial(count, k)
                    W[vk] = weight_value(P[vk // two], vk, S[0], "float32")

    @T.prim_func(s_tir=True)
    def impl(packed: T.handle, scale: T.handle, weight: T.handle):
        P = T.match_buffer(packed, (half,), "uint8", align=1, offset_factor=1)
        S = T.match_buffer(scale, (one,), "float32", offset_factor=1)
        W = T.match_buffer(weight, (count,), "float32", offset_factor=1)
        with T.sblock("root"):
            T.reads(P[0:half], S[0:one])
            T.writes(W[0:count])
            codes = T.alloc_buffer((count,), "int32")
            codes[T.ramp(i64(0), one, lanes)] = _row_codes(
                P.vload([i64(0)], f"uint8x{lanes // 2}"), lanes
            )
            W[T.ramp(i64(0), one, lanes)] = e2m1_lookup(
                level, codes.vload([i64(0)], f"int32x{lanes}")
            ) * T.broadcast(S[0], lanes)

    return _register(f"e2m1_row_{level}_{lanes}", desc, impl)


def _column_words(rows: list[PrimExpr], word: int) -> PrimExpr:
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


PREFETCH_BYTES = 8192
"""How far ahead of the packed codes in use the next ones are requested from memory."""


def prefetch(buffer: PrimExpr, distance: int) -> PrimExpr:
    """Request the cache line ``distance`` bytes after the start of uint8 ``buffer`` (PREFETCHT0)."""
    address = tirx.address_of(buffer[i64(distance)])
    return tirx.call_llvm_intrin("void", "llvm.prefetch", address, 0, 3, 1)


def store_all(words: PrimExpr, columns: list[PrimExpr]) -> None:
    """Emit the stores of vector ``columns[i]`` to row i of buffer ``words`` (inside a PrimFunc)."""
    for row, column in enumerate(columns):
        lanes = int(column.ty.dtype.lanes)
        ir_builder.buffer_store(words, column, [i64(row), tirx.Ramp(i64(0), i64(1), lanes)])


def panel_depth(level: str, k: int) -> int:
    """Codes of a row that the column-panel decode takes at a time: a vector, or 8 bytes for odd K."""
    whole = 8 * WIDTHS[level].lanes
    return whole if k % whole == 0 else BLOCK_CODES


@cache
def decode_panel(level: str, compute: str, depth: int, block: int) -> str:
    """Register and name: ``depth`` weights of each of ``lanes`` rows, one vector per k, lanes over rows.

    float32: ``W[k, lane]``; bfloat16: ``W[k / 2, 2 * lane + k % 2]``, pairs as VDPBF16PS takes them.
    """
    lanes = WIDTHS[level].lanes
    pairs = compute == "bfloat16"
    operand = "uint16" if pairs else "float32"
    step, per_word = (2, 4) if pairs else (1, 8)  # codes a vector, vectors a word
    scale_count, words_per_scale = max(1, depth // block), min(depth, block) // 8
    L, K, half, one, two = i64(lanes), i64(depth), i64(depth // 2), i64(1), i64(2)
    scales, words_count = i64(scale_count), i64(depth // 8)
    vectors, width = i64(depth // step), i64(step * lanes)

    @T.prim_func(s_tir=True)
    def desc(packed: T.handle, scale: T.handle, weight: T.handle):
        P = T.match_buffer(
            packed, (L, half), "uint8", align=1, offset_factor=1, strides=[T.int64(), one]
        )
        S = T.match_buffer(scale, (scales, L), "float32", offset_factor=1)
        W = T.match_buffer(weight, (vectors, width), operand, offset_factor=1)
        with T.sblock("root"):
            T.reads(P[0:L, 0:half], S[0:scales, 0:L])
            T.writes(W[0:vectors, 0:width])
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
        return transposed(rows) if size == lanes else [_column_words(rows, w) for w in range(size)]

    def weights(word: PrimExpr, at: PrimExpr, scale: PrimExpr) -> PrimExpr:
        """Weight ``at`` (pairs: and its successor) of every row, from the rows' words."""
        shift = tirx.Broadcast(tirx.Cast("int32", at) * 4, lanes)
        even = formats.bits_of(e2m1_lookup(level, word >> shift) * scale)
        if not pairs:
            return formats.from_bits(even)
        next_shift = shift + tirx.Broadcast(tirx.const(4, "int32"), lanes)
        odd = formats.bits_of(e2m1_lookup(level, word >> next_shift) * scale)
        # bfloat16 is the upper half of float32: no rounding, the products are exact (see linear.py).
        low = (even >> formats.const(16, even, "int32")) & formats.const(0xFFFF, even, "int32")
        both = low | (odd & formats.const(-65536, odd, "int32"))
        return tirx.reinterpret(f"uint16x{2 * lanes}", both)

    @T.prim_func(s_tir=True)
    def impl(packed: T.handle, scale: T.handle, weight: T.handle):
        P = T.match_buffer(
            packed, (L, half), "uint8", align=1, offset_factor=1, strides=[T.int64(), one]
        )
        S = T.match_buffer(scale, (scales, L), "float32", offset_factor=1)
        W = T.match_buffer(weight, (vectors, width), operand, offset_factor=1)
        with T.sblock("root"):
            T.reads(P[0:L, 0:half], S[0:scales, 0:L])
            T.writes(W[0:vectors, 0:width])
            words = T.alloc_buffer((words_count, L), "int32")
            store_all(
                words, words_of(lambda row, byte, dtype: P.vload([i64(row), i64(byte)], dtype))
            )
            for w in T.serial(words_count):
                for at in T.unroll(i64(per_word)):
                    W[w * i64(per_word) + at, T.ramp(i64(0), one, step * lanes)] = weights(
                        words.vload([w, i64(0)], f"int32x{lanes}"),
                        at * i64(step),
                        S.vload([w // i64(words_per_scale), i64(0)], f"float32x{lanes}"),
                    )

    return _register(f"e2m1_panel_{level}_{lanes}x{depth}_{compute}_b{block}", desc, impl)


SCALE_GROUPS = (16, 4)
"""Block scales of one row that the column-panel decode takes at a time, best first."""


def scale_group(blocks: int) -> int | None:
    """The largest group that divides ``blocks``; None: the plain loop."""
    return next((group for group in SCALE_GROUPS if blocks % group == 0), None)


@cache
def decode_panel_scales(level: str, fmt: str, group: int) -> str:
    """Register and name: ``group`` block scales of each of ``lanes`` rows, one vector per scale."""
    lanes = WIDTHS[level].lanes
    L, count, one = i64(lanes), i64(group), i64(1)

    @T.prim_func(s_tir=True)
    def desc(block_scale: T.handle, value: T.handle):
        B = T.match_buffer(
            block_scale, (L, count), "uint8", align=1, offset_factor=1, strides=[T.int64(), one]
        )
        V = T.match_buffer(value, (count, L), "float32", offset_factor=1)
        with T.sblock("root"):
            T.reads(B[0:L, 0:count])
            T.writes(V[0:count, 0:L])
            for n, b in T.grid(L, count):
                with T.sblock("block_scale"):
                    vn, vb = T.axis.remap("SS", [n, b])
                    V[vb, vn] = formats.scale_decode(fmt, T.Cast("int32", B[vn, vb]))

    def words_of(load: Callable[[int], PrimExpr]) -> list[PrimExpr]:
        size = group // 4
        dtype = f"int32x{size}" if size > 1 else "int32"
        rows = [tirx.reinterpret(dtype, load(row)) for row in range(lanes)]
        return [_column_words(rows, word) for word in range(size)]

    @T.prim_func(s_tir=True)
    def impl(block_scale: T.handle, value: T.handle):
        B = T.match_buffer(
            block_scale, (L, count), "uint8", align=1, offset_factor=1, strides=[T.int64(), one]
        )
        V = T.match_buffer(value, (count, L), "float32", offset_factor=1)
        with T.sblock("root"):
            T.reads(B[0:L, 0:count])
            T.writes(V[0:count, 0:L])
            words = T.alloc_buffer((i64(group // 4), L), "int32")
            store_all(words, words_of(lambda row: B.vload([i64(row), i64(0)], f"uint8x{group}")))
            for b in T.unroll(count):
                V[b, T.ramp(i64(0), one, lanes)] = formats.scale_decode(
                    fmt,
                    (
                        words.vload([b // i64(4), i64(0)], f"int32x{lanes}")
                        >> T.broadcast(T.Cast("int32", b % i64(4)) * 8, lanes)
                    )
                    & T.broadcast(255, lanes),
                )

    return _register(f"scale_panel_{fmt}_{level}_{lanes}x{group}", desc, impl)


# TVM rewrites bfloat16 vectors to uint16, which the LLVM intrinsic refuses: hence this inlined function.
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


@cache
def dot_bf16() -> str:
    """Register and name: ``acc[lane] += a[0] * w[lane, 0] + a[1] * w[lane, 1]`` (VDPBF16PS)."""
    lanes = 16
    L, pair, width, one = i64(lanes), i64(2), i64(2 * lanes), i64(1)

    @T.prim_func(s_tir=True)
    def desc(a: T.handle, w: T.handle, acc: T.handle):
        A = T.match_buffer(a, (pair,), "uint16", offset_factor=1)
        W = T.match_buffer(w, (width,), "uint16", offset_factor=1)
        C = T.match_buffer(acc, (L,), "float32", offset_factor=1)
        with T.sblock("root"):
            T.reads(C[0:L], A[0:pair], W[0:width])
            T.writes(C[0:L])
            for n, p in T.grid(L, pair):
                with T.sblock("matmul"):
                    vn, vp = T.axis.remap("SR", [n, p])
                    C[vn] = C[vn] + from_operand(A[vp]) * from_operand(W[vn * pair + vp])

    @T.prim_func(s_tir=True)
    def impl(a: T.handle, w: T.handle, acc: T.handle):
        A = T.match_buffer(a, (pair,), "uint16", offset_factor=1)
        W = T.match_buffer(w, (width,), "uint16", offset_factor=1)
        C = T.match_buffer(acc, (L,), "float32", offset_factor=1)
        with T.sblock("root"):
            T.reads(C[0:L], A[0:pair], W[0:width])
            T.writes(C[0:L])
            C[T.ramp(i64(0), one, lanes)] = T.call_pure_extern(
                "float32x16",
                "blockscale_vdpbf16ps",
                C.vload([i64(0)], "float32x16"),
                T.broadcast(T.reinterpret("int32", A.vload([i64(0)], "uint16x2")), lanes),
                T.reinterpret("int32x16", W.vload([i64(0)], "uint16x32")),
            )

    return _register(f"vdpbf16ps_{lanes}x2", desc, impl)


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

    return _register(f"lane_sum_{level}_{lanes}", desc, impl)


@cache
def lane_max(count: int) -> str:
    """Register and name: ``largest = max(largest, values)`` over ``count`` int32 lanes, as a tree."""
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

    return _register(f"lane_max_{count}", desc, impl)


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

    return _register(f"pack_row_{count}", desc, impl)


def pack_pairs(pairs: PrimExpr) -> PrimExpr:
    """Bytes of pairs of codes, each pair an int64 lane with the even code in its lower half."""
    # The odd code is at bit 32: 28 places down it is the high nibble.
    return formats.cast(pairs | (pairs >> formats.const(28, pairs, "int64")), "uint8")


def _register(name: str, desc: PrimFunc, impl: PrimFunc) -> str:
    TensorIntrin.register(name, desc, impl)
    return name
