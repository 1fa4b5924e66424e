"""Tensor intrinsics of a grouped 4-bit GEMM on Hopper: what one instruction does with a tile.

Each is a *desc* in plain loops (the expressions of `blockscale.tir.moe.tiles`) and an *impl* that
calls the function of ``blockscale/native/moe_*.cuh`` which issues the instruction.  Scope "local"
is registers: a fragment is spread over the lanes of a warp (16 rows) or of a warpgroup (64 rows)
as the MMA wants it (PTX ISA 9.7.14.5.8, 9.7.15.5.2).
"""

from __future__ import annotations

import re
from functools import partial

from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T

from blockscale.base.formats import MOE
from blockscale.specs.plans.moe import scale_count
from blockscale.tir.common import i64
from blockscale.tir.intrin.cuda import blocks as cuda_blocks
from blockscale.tir.intrin.operands import Operand, copy, describe, intrinsic
from blockscale.tir.moe.tiles import WORDS, decoded, f32

HEADER = '#include "moe_gemm.cuh"\n'
"""What declares the device functions."""

SMEM, LOCAL = "shared.dyn", "local"

ROW = 64
"""Elements of a row of x that are copied at a time: 128 bytes, a swizzle atom's row."""

_TYPES = {"bfloat16": "bf16", "float16": "f16"}
_NAMES = {
    "bulk": r"cp_async_bulk_(\d+)x(\d+)_([a-z]+\d+)",
    "row": r"cp_async_row64_(bf16|f16)(_gather)?",
    "decode": rf"decode_({'|'.join(MOE)})_g(\d+)(z?)_16x64_(bf16|f16)",
    "mma": r"mma_m16n8k16_(bf16|f16)f32",
    "wgmma": r"wgmma_m64n(\d+)k16_(bf16|f16)f32",
}
"""The names of the intrinsics."""


def register_named(text: str) -> list[str]:
    """Register the intrinsics that ``text`` names; return their names."""
    dtypes = {short: dtype for dtype, short in _TYPES.items()}
    makers = {
        "bulk": lambda m: bulk_copy(int(m[1]), int(m[2]), m[3]),
        "row": lambda m: row_copy(dtypes[m[1]], bool(m[2])),
        "decode": lambda m: decode(m[1], int(m[2]), bool(m[3]), dtypes[m[4]]),
        "mma": lambda m: mma(dtypes[m[1]]),
        "wgmma": lambda m: wgmma(int(m[1]), dtypes[m[2]]),
    }
    found = {
        match[0]: kind
        for kind, pattern in _NAMES.items()
        for match in re.finditer(rf"\b{pattern}\b", text)
    }
    made = []
    for name, kind in sorted(found.items()):
        match = re.fullmatch(_NAMES[kind], name)
        assert match is not None, "it was found by this pattern"
        made.append(makers[kind](match))
    return made


call = partial(cuda_blocks.call, header=HEADER)
"""Call of the device function of this name."""


# ---- Loads --------------------------------------------------------------------------------------


@intrinsic
def bulk_copy(blocks: int, count: int, dtype: str) -> str:
    """Register and name: copy codes or scales of the expert's matrix to shared memory.

    cp.async.bulk (PTX ISA 9.7.9.25.4.1) of contiguous bytes: ``count`` elements, or of 64 rows
    ``blocks`` blocks of so many.
    """
    size = T.int32(blocks * count * cuda_blocks.BYTES[dtype])

    def move(target: T.Buffer, source: T.Buffer) -> PrimExpr:
        return call("bs_bulk_load", target.access_ptr("w"), source.access_ptr("r"), size)

    shape = (i64(blocks), i64(count)) if blocks > 1 else (i64(count),)
    name = f"cp_async_bulk_{blocks}x{count}_{dtype}"
    return copy(name, shape, dtype, ("global", SMEM), move, table=True)


@intrinsic
def row_copy(dtype: str, gather: bool) -> str:
    """Register and name: copy 64 elements of a row of x to a row of 128 bytes in shared memory.

    Eight lanes' cp.async of 16 bytes (PTX ISA 9.7.9.25.3.1), swizzled by the row.  With ``gather``
    it is the row of the slot's token.
    """
    name = f"cp_async_row64_{_TYPES[dtype]}{'_gather' if gather else ''}"
    move = partial(cuda_blocks.moved, "bs_cp_async_row", header=HEADER)
    return copy(name, (i64(ROW),), dtype, ("global", SMEM), move, table=gather)


# ---- Decoding -----------------------------------------------------------------------------------


@intrinsic
def decode(fmt: str, group: int, zeros: bool, dtype: str) -> str:
    """Register and name: decode 16 rows x 64 k to the A fragments of four steps, in registers.

    A lane's four words are its rows g and g + 8; `native/moe/moe_decode.cuh` says how.
    """
    M, K, N, B = i64(16), i64(64), i64(WORDS), i64(scale_count(fmt, group, zeros))
    numbers = [T.int32(number) for number in ([*MOE].index(fmt), group, int(zeros))]

    @T.inline
    def desc(W, S, A):
        for r, p in T.grid(M, K):
            with T.sblock("decode"):
                vr, vp = T.axis.remap("SS", [r, p])
                A[vr, vp] = decoded(fmt, group, zeros, dtype, W, S, vr, vp)

    def impl(W: T.Buffer, S: T.Buffer, A: T.Buffer) -> PrimExpr:
        args = A.access_ptr("w"), W.access_ptr("r"), S.access_ptr("r")
        return call("bs_moe_decode", *args, *numbers)

    operands = (
        Operand("W", (N,), "uint32", scope=SMEM),
        Operand("S", (B,), dtype if fmt == "int4" else "uint8", scope=SMEM),
        Operand("A", (M, K), dtype, "w", LOCAL),
    )
    name = f"decode_{fmt}_g{group}{'z' if zeros else ''}_16x64_{_TYPES[dtype]}"
    return describe(name, operands, desc, impl)


# ---- Products -----------------------------------------------------------------------------------


@intrinsic
def mma(dtype: str) -> str:
    """Register and name: mma.sync of 16 rows of weights and 8 tokens (PTX ISA 9.7.14.5.14)."""
    return _product(f"mma_m16n8k16_{_TYPES[dtype]}f32", 16, 8, dtype, "bs_mma16816")


@intrinsic
def wgmma(tokens: int, dtype: str) -> str:
    """Register and name: wgmma of 64 rows of weights, in registers (PTX ISA 9.7.15.5.2)."""
    name = f"wgmma_m64n{tokens}k16_{_TYPES[dtype]}f32"
    return _product(name, 64, tokens, dtype, f"bs_wgmma_m64k16<{tokens}>")


def _product(name: str, rows: int, tokens: int, dtype: str, function: str) -> str:
    """Register and name: d[token, row] += sum of 16 a[row, k] * x[token, k]."""
    M, N, K = i64(rows), i64(tokens), i64(16)

    @T.inline
    def desc(A, X, D):
        for n, m, k in T.grid(N, M, K):
            with T.sblock("product"):
                vn, vm, vk = T.axis.remap("SSR", [n, m, k])
                D[vn, vm] = D[vn, vm] + f32(A[vm, vk]) * f32(X[vn, vk])

    def impl(A: T.Buffer, X: T.Buffer, D: T.Buffer) -> PrimExpr:
        return call(function, D.access_ptr("rw"), A.access_ptr("r"), X.access_ptr("r"))

    operands = (
        Operand("A", (M, K), dtype, scope=LOCAL),
        Operand("X", (N, K), dtype, scope=SMEM),
        Operand("D", (N, M), "float32", "rw", LOCAL),
    )
    return describe(name, operands, desc, impl)
