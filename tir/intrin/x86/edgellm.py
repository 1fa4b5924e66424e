"""x86 intrinsics of Edge-LLM's GEMVs: 16 rows of a strip of 64 columns, and their block scales.

Levels avx512 and avx2.  A lane has the four columns of a 16-bit word: 32 bytes of a row are 16
lanes.
`blockscale.tir.intrin.x86.width` says what a *desc* and an *impl* are.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T

from blockscale.base.edgellm_index import BLOCK, TILE, TILE_BYTES
from blockscale.tir import formats
from blockscale.tir.common import i64
from blockscale.tir.edgellm.passes import LANES, QUARTERS, code_value, scale_decode
from blockscale.tir.intrin.operands import Operand, describe, intrinsic
from blockscale.tir.intrin.x86.width import WIDTHS, e2m1_lookup, packed

AHEAD = 16
"""How many rows ahead of those in use codes are requested from memory."""


def _shifted(words: PrimExpr, bits: int) -> PrimExpr:
    return words >> formats.const(bits, words, "int32") if bits else words


@intrinsic
def dot(level: str) -> str:
    """Register and name: ``sums[q, i] += sum_k a[k] * e2m1(codes[k, 4 i + q])``, 16 rows k."""
    width = WIDTHS[level].lanes
    Q, L, K, B, two = (i64(v) for v in (QUARTERS, LANES, BLOCK, TILE_BYTES, 2))
    operands = (
        Operand("C", (Q, L), "float32", "rw"),
        Operand("A", (K,), "float32"),
        packed("P", (K, B), strided=True),
    )

    @T.inline
    def desc(C, A, P):
        for q, i, k in T.grid(Q, L, K):
            with T.sblock("dot"):
                vq, vi, vk = T.axis.remap("SSR", [q, i, k])
                C[vq, vi] = C[vq, vi] + A[vk] * code_value(P[vk, vi * two + vq // two], vq)

    def impl(C: PrimExpr, A: PrimExpr, P: PrimExpr) -> None:
        with T.unroll(K) as ahead:
            address = T.address_of(P[ahead + AHEAD, 0])
            T.evaluate(T.call_llvm_intrin("void", "llvm.prefetch", address, 0, 3, 1))
        for start in range(0, LANES, width):
            ramp = tirx.Ramp(i64(start), i64(1), width)
            sums = [C.vload([i64(q), i64(start)], f"float32x{width}") for q in range(QUARTERS)]
            for k in range(BLOCK):
                raw = P.vload([i64(k), i64(2 * start)], f"uint8x{2 * width}")
                words = formats.cast(tirx.reinterpret(f"uint16x{width}", raw), "int32")
                factor = tirx.Broadcast(A[i64(k)], width)
                for q in range(QUARTERS):
                    sums[q] = sums[q] + factor * e2m1_lookup(level, _shifted(words, 4 * q))
            for q in range(QUARTERS):
                T.buffer_store(C, sums[q], [i64(q), ramp])

    return describe(f"edgellm_dot_{level}", operands, desc, impl)


@intrinsic
def scale(level: str) -> str:
    """Register and name: ``total[q, i] += sums[q, i] * s[q, i]``, s of byte 4 i + q."""
    width = WIDTHS[level].lanes
    Q, L, N = i64(QUARTERS), i64(LANES), i64(TILE)
    operands = (
        Operand("C", (Q, L), "float32", "rw"),
        Operand("A", (Q, L), "float32"),
        packed("S", (N,)),
    )

    @T.inline
    def desc(C, A, S):
        for q, i in T.grid(Q, L):
            with T.sblock("scale"):
                vq, vi = T.axis.remap("SS", [q, i])
                C[vq, vi] = C[vq, vi] + A[vq, vi] * scale_decode(T.Cast("int32", S[vi * Q + vq]))

    def impl(C: PrimExpr, A: PrimExpr, S: PrimExpr) -> None:
        for start in range(0, LANES, width):
            ramp = tirx.Ramp(i64(start), i64(1), width)
            raw = S.vload([i64(QUARTERS * start)], f"uint8x{QUARTERS * width}")
            words = tirx.reinterpret(f"int32x{width}", raw)
            for q in range(QUARTERS):
                byte = _shifted(words, 8 * q) & formats.const(255, words, "int32")
                at = [i64(q), i64(start)]
                before, sums = (b.vload(at, f"float32x{width}") for b in (C, A))
                T.buffer_store(C, before + sums * scale_decode(byte), [i64(q), ramp])

    return describe(f"edgellm_scale_{level}", operands, desc, impl)


def register_all() -> None:
    """Register every intrinsic of this module."""
    for level in ("avx512", "avx2"):
        dot(level)
        scale(level)
