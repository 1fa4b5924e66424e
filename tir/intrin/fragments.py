"""What intrinsics that decode 4-bit weights to fragments of warps, and multiply these, mean.

Scope "local" is registers: a fragment of 16 rows is spread over the lanes of a warp, one of 64 over
those of a warpgroup, as the MMA wants it (PTX ISA 9.7.14.5.8, 9.7.15.5.2).
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T

from blockscale.base.formats import MOE
from blockscale.specs.plans.moe import E4M3, scale_count
from blockscale.tir.common import i64
from blockscale.tir.intrin.operands import Operand, describe
from blockscale.tir.intrin.tma import SMEM
from blockscale.tir.moe.tiles import WORDS, decoded, f32, scaled_sums

LOCAL = "local"

SHORT = {"bfloat16": "bf16", "float16": "f16", E4M3: "e4m3"}
"""Dtypes of fragments in names of intrinsics."""


def decoding(
    name: str,
    weight: tuple[str, int, int],
    dtype: str,
    call: Callable[..., PrimExpr],
    order: str,
) -> str:
    """Register and name: 16 rows x 64 k of a weight become the A fragments of four MMAs.

    What `tir.moe.tiles.left_over` says is left to the epilogue.  Where scales are of sums it reads
    codes and zeros, without zeros codes alone.

    Args:
        name: of the intrinsic.
        weight: its format, elements of K that share a scale, kind of zeros (`MoeGemm.zeros`).
        dtype: of the fragments, a key of `SHORT`.
        call: the device function, of fragments, codes, scales and the numbers of ``weight``.
        order: of K; see `tir.moe.tiles.decoded`.
    """
    fmt, group, zeros = weight
    M, K, N, B = i64(16), i64(64), i64(WORDS), i64(scale_count(fmt, group, zeros))
    numbers = [T.int32(number) for number in ([*MOE].index(fmt), group, int(zeros))]

    @T.inline
    def desc(W, S, A):
        for r, p in T.grid(M, K):
            with T.sblock("decode"):
                vr, vp = T.axis.remap("SS", [r, p])
                A[vr, vp] = decoded(fmt, group, zeros, dtype, W, S, vr, vp, order=order)

    @T.inline
    def of_codes(W, A):
        for r, p in T.grid(M, K):
            with T.sblock("decode"):
                vr, vp = T.axis.remap("SS", [r, p])
                A[vr, vp] = decoded(fmt, group, zeros, dtype, W, None, vr, vp, order=order)

    def impl(W: T.Buffer, S: T.Buffer, A: T.Buffer) -> PrimExpr:
        return call(A.access_ptr("w"), W.access_ptr("r"), S.access_ptr("r"), *numbers)

    def impl_of_codes(W: T.Buffer, A: T.Buffer) -> PrimExpr:
        return call(A.access_ptr("w"), W.access_ptr("r"), *numbers)

    own = scaled_sums(fmt, dtype)
    codes = Operand("W", (N,), "uint32", scope=SMEM)
    made = Operand("A", (M, K), dtype, "w", LOCAL)
    if own and not zeros:
        return describe(name, (codes, made), of_codes, impl_of_codes)
    kind = "uint8" if fmt != "int4" else "bfloat16" if own else dtype
    scales = Operand("S", (B - i64(own),), kind, scope=SMEM)
    return describe(name, (codes, scales, made), desc, impl)


def product(
    name: str,
    shape: tuple[int, int, int],
    dtype: str,
    call: Callable[..., PrimExpr],
    scope: str,
    sums: str = LOCAL,
) -> str:
    """Register and name: d[token, row] += sum of a[row, k] * x[token, k], in float32.

    Args:
        name: of the intrinsic.
        shape: rows, tokens, and elements of K.
        dtype: of a and x, a key of `SHORT`.
        call: the device function, of d, a and x.
        scope: of x.
        sums: of d, and of a: registers, or tensor memory.
    """
    M, N, K = (i64(size) for size in shape)

    @T.inline
    def desc(A, X, D):
        for n, m, k in T.grid(N, M, K):
            with T.sblock("product"):
                vn, vm, vk = T.axis.remap("SSR", [n, m, k])
                D[vn, vm] = D[vn, vm] + f32(A[vm, vk]) * f32(X[vn, vk])

    def impl(A: T.Buffer, X: T.Buffer, D: T.Buffer) -> PrimExpr:
        return call(D.access_ptr("rw"), A.access_ptr("r"), X.access_ptr("r"))

    operands = (
        Operand("A", (M, K), dtype, scope=sums),
        Operand("X", (N, K), dtype, scope=scope),
        Operand("D", (N, M), "float32", "rw", sums),
    )
    return describe(name, operands, desc, impl)
