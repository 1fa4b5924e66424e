"""Tensor intrinsics of a grouped 4-bit GEMM on Hopper: what one instruction does with a tile.

Each is a *desc* in plain loops (the expressions of `blockscale.tir.moe.tiles`) and an *impl* that
calls the function of ``blockscale/native/moe_*.cuh`` which issues the instruction.  Scope "local"
is registers: a fragment is spread over the lanes of a warp (16 rows) or of a warpgroup (64 rows)
as the MMA wants it (PTX ISA 9.7.14.5.8, 9.7.15.5.2).
"""

from __future__ import annotations

import re
from functools import cache

from tvm.ir import Expr as PrimExpr
from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.base.formats import MOE
from blockscale.specs.plans.moe import scale_count
from blockscale.tir.common import i64
from blockscale.tir.intrin.cuda import blocks as cuda_blocks
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


def call(name: str, *args: PrimExpr) -> PrimExpr:
    """Call of the device function ``name``."""
    return cuda_blocks.call(name, *args, header=HEADER)


def _register(name: str, desc: PrimFunc, impl: PrimFunc) -> str:
    TensorIntrin.register(name, desc, impl, override=True)
    return name


# ---- Loads --------------------------------------------------------------------------------------


@cache
def bulk_copy(blocks: int, count: int, dtype: str) -> str:
    """Register and name: copy codes or scales of the expert's matrix to shared memory.

    cp.async.bulk (PTX ISA 9.7.9.25.4.1) of contiguous bytes: ``count`` elements, or of 64 rows
    ``blocks`` blocks of so many.
    """
    name = f"cp_async_bulk_{blocks}x{count}_{dtype}"
    return _register(name, *(_bulk(blocks, count, dtype, body) for body in (False, True)))


def _bulk(blocks: int, count: int, dtype: str, body: bool) -> PrimFunc:
    K, B = i64(blocks), i64(count)
    size = blocks * count * {"uint8": 1, "uint32": 4}.get(dtype, 2)

    @T.prim_func(s_tir=True)
    def several(source: T.handle, table: T.handle, target: T.handle):
        S = T.match_buffer(source, (K, B), dtype, offset_factor=1)
        E = T.match_buffer(table, (i64(1),), "int32", offset_factor=1)
        D = T.match_buffer(target, (K, B), dtype, offset_factor=1, scope=SMEM)
        with T.sblock("root"):
            T.reads(S[0:K, 0:B], E[0:1])
            T.writes(D[0:K, 0:B])
            if body:
                T.evaluate(
                    call("bs_bulk_load", D.access_ptr("w"), S.access_ptr("r"), T.int32(size))
                )
            else:
                for k, b in T.grid(K, B):
                    with T.sblock("copy"):
                        vk, vb = T.axis.remap("SS", [k, b])
                        T.reads(S[vk, vb], E[0])
                        T.writes(D[vk, vb])
                        D[vk, vb] = S[vk, vb]

    @T.prim_func(s_tir=True)
    def single(source: T.handle, table: T.handle, target: T.handle):
        S = T.match_buffer(source, (B,), dtype, offset_factor=1)
        E = T.match_buffer(table, (i64(1),), "int32", offset_factor=1)
        D = T.match_buffer(target, (B,), dtype, offset_factor=1, scope=SMEM)
        with T.sblock("root"):
            T.reads(S[0:B], E[0:1])
            T.writes(D[0:B])
            if body:
                T.evaluate(
                    call("bs_bulk_load", D.access_ptr("w"), S.access_ptr("r"), T.int32(size))
                )
            else:
                for b in range(B):
                    with T.sblock("copy"):
                        vb = T.axis.spatial(B, b)
                        T.reads(S[vb], E[0])
                        T.writes(D[vb])
                        D[vb] = S[vb]

    return several if blocks > 1 else single


@cache
def row_copy(dtype: str, gather: bool) -> str:
    """Register and name: copy 64 elements of a row of x to a row of 128 bytes in shared memory.

    Eight lanes' cp.async of 16 bytes (PTX ISA 9.7.9.25.3.1), swizzled by the row.  With ``gather``
    it is the row of the slot's token.
    """
    name = f"cp_async_row64_{_TYPES[dtype]}{'_gather' if gather else ''}"
    make = _gathered_row if gather else _row
    return _register(name, make(dtype, False), make(dtype, True))


def _gathered_row(dtype: str, body: bool) -> PrimFunc:
    N = i64(ROW)

    @T.prim_func(s_tir=True)
    def row(source: T.handle, order: T.handle, target: T.handle):
        S = T.match_buffer(source, (N,), dtype, offset_factor=1)
        O = T.match_buffer(order, (i64(1),), "int32", offset_factor=1)
        D = T.match_buffer(target, (N,), dtype, offset_factor=1, scope=SMEM)
        with T.sblock("root"):
            T.reads(S[0:N], O[0:1])
            T.writes(D[0:N])
            if body:
                T.evaluate(call("bs_cp_async_row", D.access_ptr("w"), S.access_ptr("r")))
            else:
                for i in range(N):
                    with T.sblock("copy"):
                        vi = T.axis.spatial(N, i)
                        T.reads(S[vi], O[0])
                        T.writes(D[vi])
                        D[vi] = S[vi]

    return row


def _row(dtype: str, body: bool) -> PrimFunc:
    N = i64(ROW)

    @T.prim_func(s_tir=True)
    def row(source: T.handle, target: T.handle):
        S = T.match_buffer(source, (N,), dtype, offset_factor=1)
        D = T.match_buffer(target, (N,), dtype, offset_factor=1, scope=SMEM)
        with T.sblock("root"):
            T.reads(S[0:N])
            T.writes(D[0:N])
            if body:
                T.evaluate(call("bs_cp_async_row", D.access_ptr("w"), S.access_ptr("r")))
            else:
                for i in range(N):
                    with T.sblock("copy"):
                        vi = T.axis.spatial(N, i)
                        D[vi] = S[vi]

    return row


# ---- Decoding -----------------------------------------------------------------------------------


@cache
def decode(fmt: str, group: int, zeros: bool, dtype: str) -> str:
    """Register and name: decode 16 rows x 64 k to the A fragments of four steps, in registers.

    A lane's four words are its rows g and g + 8; `native/moe/moe_decode.cuh` says how.
    """
    name = f"decode_{fmt}_g{group}{'z' if zeros else ''}_16x64_{_TYPES[dtype]}"
    made = (_decode(fmt, group, zeros, dtype, body) for body in (False, True))
    return _register(name, *made)


def _decode(fmt: str, group: int, zeros: bool, dtype: str, body: bool) -> PrimFunc:
    M, K, N, B = i64(16), i64(64), i64(WORDS), i64(scale_count(fmt, group, zeros))
    stored = dtype if fmt == "int4" else "uint8"
    numbers = [T.int32(number) for number in ([*MOE].index(fmt), group, int(zeros))]

    @T.prim_func(s_tir=True)
    def fragment(words: T.handle, scales: T.handle, target: T.handle):
        W = T.match_buffer(words, (N,), "uint32", offset_factor=1, scope=SMEM)
        S = T.match_buffer(scales, (B,), stored, offset_factor=1, scope=SMEM)
        A = T.match_buffer(target, (M, K), dtype, offset_factor=1, scope=LOCAL)
        with T.sblock("root"):
            T.reads(W[0:N], S[0:B])
            T.writes(A[0:M, 0:K])
            if body:
                T.evaluate(
                    call(
                        "bs_moe_decode",
                        A.access_ptr("w"),
                        W.access_ptr("r"),
                        S.access_ptr("r"),
                        *numbers,
                    )
                )
            else:
                for r, p in T.grid(M, K):
                    with T.sblock("decode"):
                        vr, vp = T.axis.remap("SS", [r, p])
                        A[vr, vp] = decoded(fmt, group, zeros, dtype, W, S, vr, vp)

    return fragment


# ---- Products -----------------------------------------------------------------------------------


@cache
def mma(dtype: str) -> str:
    """Register and name: mma.sync of 16 rows of weights and 8 tokens (PTX ISA 9.7.14.5.14)."""
    name = f"mma_m16n8k16_{_TYPES[dtype]}f32"
    made = (_product(16, 8, dtype, function) for function in (None, "bs_mma16816"))
    return _register(name, *made)


@cache
def wgmma(tokens: int, dtype: str) -> str:
    """Register and name: wgmma of 64 rows of weights, in registers (PTX ISA 9.7.15.5.2)."""
    name = f"wgmma_m64n{tokens}k16_{_TYPES[dtype]}f32"
    function = f"bs_wgmma_m64k16<{tokens}>"
    made = (_product(64, tokens, dtype, body) for body in (None, function))
    return _register(name, *made)


def _product(rows: int, tokens: int, dtype: str, function: str | None) -> PrimFunc:
    """d[token, row] += sum of 16 a[row, k] * x[token, k]."""
    M, N, K = i64(rows), i64(tokens), i64(16)

    @T.prim_func(s_tir=True)
    def product(a: T.handle, x: T.handle, d: T.handle):
        A = T.match_buffer(a, (M, K), dtype, offset_factor=1, scope=LOCAL)
        X = T.match_buffer(x, (N, K), dtype, offset_factor=1, scope=SMEM)
        D = T.match_buffer(d, (N, M), "float32", offset_factor=1, scope=LOCAL)
        with T.sblock("root"):
            T.reads(D[0:N, 0:M], A[0:M, 0:K], X[0:N, 0:K])
            T.writes(D[0:N, 0:M])
            if function is not None:
                T.evaluate(call(function, D.access_ptr("rw"), A.access_ptr("r"), X.access_ptr("r")))
            else:
                for n, m, k in T.grid(N, M, K):
                    with T.sblock("product"):
                        vn, vm, vk = T.axis.remap("SSR", [n, m, k])
                        D[vn, vm] = D[vn, vm] + f32(A[vm, vk]) * f32(X[vn, vk])

    return product
