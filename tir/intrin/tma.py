"""Tensor intrinsics of TMA: loads of tiles to shared memory, stores from it.

Each is a *desc* in plain loops and an *impl* that calls the function of
``native/tcgen05.cuh``: of the addresses in it, that in global memory stands for a tensor
map and coordinates, and a load's barrier is left out.

Tiles of operands in shared memory are [rows, bytes] of packed codes; how the bytes lie there (the
swizzle, and for the 4-bit operand of kind mxf8f6f4 eight bytes of padding after eight of codes) is
between the TMA load and the MMA.  Scales are 128x4 tiles of 512 bytes.
"""

from __future__ import annotations

from functools import cache

from tvm.ir import Expr as PrimExpr
from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.tir.common import i64
from blockscale.tir.gemm.tiles import ATOM_BYTES
from blockscale.tir.intrin.cuda import blocks as cuda_blocks

HEADER = '#include "tcgen05.cuh"\n'
"""What declares the device functions."""

SMEM, TMEM = "shared.dyn", "shared.tmem"


def call(name: str, *args: PrimExpr, dtype: str = "void") -> PrimExpr:
    """Call of the device function ``name``."""
    return cuda_blocks.call(name, *args, dtype=dtype, header=HEADER)


def register(name: str, desc: PrimFunc, impl: PrimFunc) -> str:
    """Register a tensor intrinsic, again if need be, and return its name."""
    TensorIntrin.register(name, desc, impl, override=True)
    return name


def _tile(
    shape: tuple[int, int], dtype: str, scopes: tuple[str, str], function: str | None
) -> PrimFunc:
    """Copy of a tile between buffers of these scopes, by loops or by ``function``."""
    M, N = (i64(extent) for extent in shape)

    @T.prim_func(s_tir=True)
    def tile(source: T.handle, target: T.handle):
        S = T.match_buffer(source, (M, N), dtype, offset_factor=1, scope=scopes[0])
        D = T.match_buffer(target, (M, N), dtype, offset_factor=1, scope=scopes[1])
        with T.sblock("root"):
            T.reads(S[0:M, 0:N])
            T.writes(D[0:M, 0:N])
            if function is None:
                for i, j in T.grid(M, N):
                    with T.sblock("copy"):
                        vi, vj = T.axis.remap("SS", [i, j])
                        D[vi, vj] = S[vi, vj]
            else:
                T.evaluate(call(function, D.access_ptr("w"), S.access_ptr("r")))

    return tile


def register_copy(
    name: str, shape: tuple[int, int], dtype: str, scopes: tuple[str, str], function: str
) -> str:
    """Register and name: copy a tile between memories by ``function``."""
    desc, impl = (_tile(shape, dtype, scopes, body) for body in (None, function))
    return register(name, desc, impl)


def _scale_load(function: str | None) -> PrimFunc:
    """Copy of a 128x4 tile of scales, 512 bytes, to shared memory."""
    B = i64(ATOM_BYTES)

    @T.prim_func(s_tir=True)
    def tile(source: T.handle, target: T.handle):
        S = T.match_buffer(source, (B,), "uint8", offset_factor=1)
        D = T.match_buffer(target, (B,), "uint8", offset_factor=1, scope=SMEM)
        with T.sblock("root"):
            T.reads(S[0:B])
            T.writes(D[0:B])
            if function is None:
                for i in range(B):
                    with T.sblock("copy"):
                        vi = T.axis.spatial(B, i)
                        D[vi] = S[vi]
            else:
                T.evaluate(call(function, D.access_ptr("w"), S.access_ptr("r")))

    return tile


def _expert_load(function: str | None, shape: tuple[int, ...]) -> PrimFunc:
    """Copy of a tile of the expert's matrix to shared memory; E names the expert."""
    if len(shape) == 1:
        (B,) = (i64(extent) for extent in shape)

        @T.prim_func(s_tir=True)
        def scales(source: T.handle, table: T.handle, target: T.handle):
            S = T.match_buffer(source, (B,), "uint8", offset_factor=1)
            E = T.match_buffer(table, (i64(1),), "int32", offset_factor=1)
            D = T.match_buffer(target, (B,), "uint8", offset_factor=1, scope=SMEM)
            with T.sblock("root"):
                T.reads(S[0:B], E[0:1])
                T.writes(D[0:B])
                if function is None:
                    for i in range(B):
                        with T.sblock("copy"):
                            vi = T.axis.spatial(B, i)
                            T.reads(S[vi], E[0])
                            T.writes(D[vi])
                            D[vi] = S[vi]
                else:
                    T.evaluate(call(function, D.access_ptr("w"), S.access_ptr("r")))

        return scales
    M, N = (i64(extent) for extent in shape)

    @T.prim_func(s_tir=True)
    def tile(source: T.handle, table: T.handle, target: T.handle):
        S = T.match_buffer(source, (M, N), "uint8", offset_factor=1)
        E = T.match_buffer(table, (i64(1),), "int32", offset_factor=1)
        D = T.match_buffer(target, (M, N), "uint8", offset_factor=1, scope=SMEM)
        with T.sblock("root"):
            T.reads(S[0:M, 0:N], E[0:1])
            T.writes(D[0:M, 0:N])
            if function is None:
                for i, j in T.grid(M, N):
                    with T.sblock("copy"):
                        vi, vj = T.axis.remap("SS", [i, j])
                        T.reads(S[vi, vj], E[0])
                        T.writes(D[vi, vj])
                        D[vi, vj] = S[vi, vj]
            else:
                T.evaluate(call(function, D.access_ptr("w"), S.access_ptr("r")))

    return tile


@cache
def load(rows: int, tile_bytes: int, row_bytes: int, group: int, expert: bool = False) -> str:
    """Register and name: load ``rows`` rows to shared memory, swizzled over their width.

    Args:
        rows: of the tile.
        tile_bytes: of a row in global memory.
        row_bytes: of a row in shared memory, twice as many where kind mxf8f6f4 wants 4-bit codes
            padded (16U4_ALIGN16B, PTX ISA 5.5.1).
        group: CTAs of a pair that share the barrier.
        expert: load from the matrix that a table names.
    """
    kind = "" if tile_bytes == row_bytes else "_u4align16"
    name = f"tma_load_{rows}x{tile_bytes}{kind}_sw{row_bytes}_cg{group}"
    shape, function = (rows, tile_bytes), f"bs_tma_load_2d<{group}>"
    if expert:
        desc, impl = (_expert_load(body, shape) for body in (None, function))
        return register(f"{name}_expert", desc, impl)
    return register_copy(name, shape, "uint8", ("global", SMEM), function)


@cache
def load_scales(group: int, expert: bool = False) -> str:
    """Register and name: load a 128x4 tile of scales to shared memory."""
    name, function = f"tma_load_scales_cg{group}", f"bs_tma_load_3d<{group}>"
    if expert:
        desc, impl = (_expert_load(body, (ATOM_BYTES,)) for body in (None, function))
        return register(f"{name}_expert", desc, impl)
    return register(name, _scale_load(None), _scale_load(function))


@cache
def store(rows: int, cols: int, dtype: str) -> str:
    """Register and name: store a tile of d from shared memory."""
    return register_copy(
        f"tma_store_{rows}x{cols}_{dtype}", (rows, cols), dtype, (SMEM, "global"), "bs_tma_store_2d"
    )
