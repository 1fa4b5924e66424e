"""The block-scaled GEMM in whole tiles, which the schedules for tcgen05 split without a remainder.

d[i, j] = round(activation(alpha * c[i, j] + bias[j]) + residual[i, j])
c[i, j] = sum_k (a[i, k] * sfa[i, k / block]) * (b[j, k] * sfb[j, k / block])

An activation and a residual are there only where they are asked for: other kernels pay nothing.
Sizes are padded: rows of a and d to tiles of `ROW_TILE`, those of b to `COL_TILE`, K to `K_TILE`.
The true sizes are in the attribute "blockscale.shapes": TMA loads zeros and leaves stores out
beyond them, so that padding exists on paper only.  K is two axes, 128x4 tiles of scales and
elements in one, so that every index is a sum.  Scales are [tiles of 128 rows, 512-byte tiles along
K]: the byte of row r and column c is at
[r / 128, c / 4 * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4].  The MMA reads them from [32 lanes
of each tile along K, 4 * (r / 32) + c % 4]: blocks "a_scale_lanes" and "b_scale_lanes".

Grouped: a tile of rows belongs to one expert, whose number is in expert_of_tile; a kernel finds it
from the offsets of the experts' rows.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.base.formats import GEMM
from blockscale.base.sizes import ceil_div, round_up
from blockscale.tir import activations, formats
from blockscale.tir.common import fix_shape, i64, keep_params

ROW_TILE = 768
"""Rows of a are a multiple of this, which every tile's height divides: 256 and 192."""

COL_TILE = 768
"""Rows of b are a multiple of this, which every tile's width divides: 256 and 192."""

K_TILE = 256
"""K is a multiple of this, the longest stage."""

ATOM_SCALES = 4
"""Columns of a 128x4 tile of scales."""

ATOM_BYTES = 512
"""Bytes of a 128x4 tile of scales."""

LANES = 32
"""Rows of 16 bytes in such a tile: bytes 4 q to 4 q + 3 of row r belong to row 32 q + r."""


EXPERT, ROWS = "expert_of_tile", "rows_of_tile"
"""Parameters that a kernel finds in the offsets of the experts' rows."""

PARAMS, OPTIONAL = "blockscale.shapes", "blockscale.optional"
"""Function attributes: the parameters' true shapes (`true_shapes`), and the values of those that
may be null."""


class Sizes(NamedTuple):
    """Padded sizes."""

    cols: int
    """Rows of b."""
    atoms: int
    """128x4 tiles of scales along K."""
    depth: int
    """Elements of K of one of them."""

    @staticmethod
    def of(fmt: str, n: int, k: int) -> Sizes:
        """Sizes of a GEMM of ``n`` columns and ``k`` elements of K."""
        depth = ATOM_SCALES * GEMM[fmt].block
        return Sizes(round_up(n, COL_TILE), round_up(k, K_TILE) // depth, depth)


@lru_cache(maxsize=8)  # the buckets of a spec schedule one function
def gemm_tiles(
    fmt: str,
    out_dtype: str,
    n: int,
    k: int,
    experts: int = 0,
    rows: int | None = None,
    activation: str = "none",
    residual: bool = False,
) -> PrimFunc:
    """Return the unscheduled GEMM in whole tiles.

    Parameters are (a, b, a_scale, b_scale, alpha, bias, (residual), d); with ``experts``,
    expert_of_tile instead of bias, and neither activation nor residual.  ``rows`` None: any number
    of tiles of rows.
    """
    if experts:
        func = _grouped(fmt, out_dtype, n, k, experts)
    else:
        func = _plain(fmt, out_dtype, n, k, activation, residual)
    if rows is not None:
        codes = GEMM[fmt].a.per_byte
        tiles = max(1, ceil_div(rows, ROW_TILE))
        func = fix_shape(func, "a", (tiles, ROW_TILE, round_up(k, K_TILE) // codes))
    optional = {"alpha": 1.0} if experts else {"alpha": 1.0, "bias": 0.0}
    shapes = true_shapes(fmt, n, k, experts, residual)
    return func.with_attrs({PARAMS: shapes, OPTIONAL: optional})


def true_shapes(
    fmt: str, n: int, k: int, experts: int, residual: bool = False
) -> dict[str, list[tuple[str, int, int, int]]]:
    """Return the true dimensions of the parameters.

    Of each: its axis, the elements of the axis that an index stands for, its extent (-1: any), and
    how many dimensions of the TensorIR it is.
    """
    row = GEMM[fmt]
    along = ceil_div(k, ATOM_SCALES * row.block) * ATOM_BYTES
    many = [("experts", 1, experts, 1)] if experts else []
    out = [("rows", 1, -1, 2), ("cols", 1, n, 1)]
    return {
        "a": [("rows", 1, -1, 2), ("k", 1, k // row.a.per_byte, 1)],
        "b": [*many, ("cols", 1, n, 1), ("k", 1, k // row.b.per_byte, 1)],
        "a_scale": [("rows", 128, -1, 2), ("k", 1, along, 1)],
        "b_scale": [*many, ("cols", 128, ceil_div(n, 128), 1), ("k", 1, along, 1)],
        "alpha": [("experts" if experts else "", 1, max(1, experts), 1)],
        **({} if experts else {"bias": [("cols", 1, n, 1)]}),
        **({"residual": out} if residual else {}),
        "d": out,
    }


def _plain(fmt: str, out_dtype: str, n: int, k: int, activation: str, adds: bool) -> PrimFunc:
    """The GEMM of one matrix b."""
    row = GEMM[fmt]
    a_codes, b_codes = row.a.per_byte, row.b.per_byte
    scale = partial(formats.decode_byte, row.scale)
    size = Sizes.of(fmt, n, k)
    N, NA, KA, KD = i64(size.cols), i64(size.cols // 128), i64(size.atoms), i64(size.depth)
    R, RA, one = i64(ROW_TILE), i64(ROW_TILE // 128), i64(1)
    AT, L, Q = i64(ATOM_BYTES), i64(LANES), i64(ATOM_BYTES // LANES)
    AB, BB = (i64(size.atoms * size.depth // codes) for codes in (a_codes, b_codes))
    AD, BD = (i64(size.depth // codes) for codes in (a_codes, b_codes))
    AC, BC, block = i64(a_codes), i64(b_codes), i64(row.block)

    def finished(value: PrimExpr, added: Any, *at: PrimExpr) -> PrimExpr:
        made = activations.of(activation, value, exp=tirx.exp)
        return made if added is None else made + formats.cast(added[at], "float32")

    @T.prim_func(s_tir=True)
    def main(
        a_handle: T.handle,
        b: T.Buffer((N, BB), "uint8"),
        a_scale_handle: T.handle,
        b_scale: T.Buffer((NA, KA * AT), "uint8"),
        alpha: T.Buffer((one,), "float32"),
        bias: T.Buffer((N,), "float32"),
        residual_handle: T.handle,
        d_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        tiles = T.int64()
        a = T.match_buffer(a_handle, (tiles, R, AB), "uint8")
        a_scale = T.match_buffer(a_scale_handle, (tiles, RA, KA * AT), "uint8")
        if adds:
            residual = T.match_buffer(residual_handle, (tiles, R, N), out_dtype)
        d = T.match_buffer(d_handle, (tiles, R, N), out_dtype)
        added = T.meta_var(residual if adds else None)
        SA = T.sblock_alloc_buffer((tiles, KA * L, RA * Q), "uint8")
        SB = T.sblock_alloc_buffer((KA * L, NA * Q), "uint8")
        C = T.sblock_alloc_buffer((tiles, R, N), "float32")
        for t, ka, ra, r, s in T.grid(tiles, KA, RA, L, Q):
            with T.sblock("a_scale_lanes"):
                vt, va, vo, vr, vs = T.axis.remap("SSSSS", [t, ka, ra, r, s])
                SA[vt, va * L + vr, vo * Q + vs] = a_scale[vt, vo, va * AT + vr * Q + vs]
        for ka, na, r, s in T.grid(KA, NA, L, Q):
            with T.sblock("b_scale_lanes"):
                va, vo, vr, vs = T.axis.remap("SSSS", [ka, na, r, s])
                SB[va * L + vr, vo * Q + vs] = b_scale[vo, va * AT + vr * Q + vs]
        for t, i, j, ka, ke in T.grid(tiles, R, N, KA, KD):
            with T.sblock("gemm"):
                vt, vi, vj, va, ve = T.axis.remap("SSSRR", [t, i, j, ka, ke])
                with T.init():
                    C[vt, vi, vj] = T.float32(0)
                C[vt, vi, vj] = C[vt, vi, vj] + (
                    formats.element(row.a, a[vt, vi, va * AD + ve // AC], ve)
                    * scale(
                        SA[vt, va * L + vi % L, vi // L * 4 + ve // block],
                    )
                ) * (
                    formats.element(row.b, b[vj, va * BD + ve // BC], ve)
                    * scale(SB[va * L + vj % L, vj // L * 4 + ve // block])
                )
        for t, i, j in T.grid(tiles, R, N):
            with T.sblock("epilogue"):
                vt, vi, vj = T.axis.remap("SSS", [t, i, j])
                d[vt, vi, vj] = T.Cast(
                    out_dtype,
                    finished(T.fma(C[vt, vi, vj], alpha[0], bias[vj]), added, vt, vi, vj),
                )

    return keep_params(main, list(true_shapes(fmt, n, k, 0, adds)))


def products(fmt: str, n: int, k: int) -> Any:
    """Steps of the grouped GEMM from its parameters to sums C [tiles, rows of a tile, n]."""
    row = GEMM[fmt]
    a_codes, b_codes = row.a.per_byte, row.b.per_byte
    scale = partial(formats.decode_byte, row.scale)
    size = Sizes.of(fmt, n, k)
    N, NA, KA, KD = i64(size.cols), i64(size.cols // 128), i64(size.atoms), i64(size.depth)
    R, RA = i64(ROW_TILE), i64(ROW_TILE // 128)
    AT, L, Q = i64(ATOM_BYTES), i64(LANES), i64(ATOM_BYTES // LANES)
    BB = i64(size.atoms * size.depth // b_codes)
    AD, BD = (i64(size.depth // codes) for codes in (a_codes, b_codes))
    AC, BC, block = i64(a_codes), i64(b_codes), i64(row.block)

    @T.inline
    def steps(a, b, a_scale, b_scale, expert_of_tile, C, tiles):
        B = T.sblock_alloc_buffer((tiles, N, BB), "uint8")
        BS = T.sblock_alloc_buffer((tiles, NA, KA * AT), "uint8")
        SA = T.sblock_alloc_buffer((tiles, KA * L, RA * Q), "uint8")
        SB = T.sblock_alloc_buffer((tiles, KA * L, NA * Q), "uint8")
        for t, j, kb in T.grid(tiles, N, BB):
            with T.sblock("b_of_expert"):
                vt, vj, vk = T.axis.remap("SSS", [t, j, kb])
                B[vt, vj, vk] = b[expert_of_tile[vt], vj, vk]
        for t, na, s in T.grid(tiles, NA, KA * AT):
            with T.sblock("b_scale_of_expert"):
                vt, vo, vs = T.axis.remap("SSS", [t, na, s])
                BS[vt, vo, vs] = b_scale[expert_of_tile[vt], vo, vs]
        for t, ka, ra, r, s in T.grid(tiles, KA, RA, L, Q):
            with T.sblock("a_scale_lanes"):
                vt, va, vo, vr, vs = T.axis.remap("SSSSS", [t, ka, ra, r, s])
                SA[vt, va * L + vr, vo * Q + vs] = a_scale[vt, vo, va * AT + vr * Q + vs]
        for t, ka, na, r, s in T.grid(tiles, KA, NA, L, Q):
            with T.sblock("b_scale_lanes"):
                vt, va, vo, vr, vs = T.axis.remap("SSSSS", [t, ka, na, r, s])
                SB[vt, va * L + vr, vo * Q + vs] = BS[vt, vo, va * AT + vr * Q + vs]
        for t, i, j, ka, ke in T.grid(tiles, R, N, KA, KD):
            with T.sblock("gemm"):
                vt, vi, vj, va, ve = T.axis.remap("SSSRR", [t, i, j, ka, ke])
                with T.init():
                    C[vt, vi, vj] = T.float32(0)
                C[vt, vi, vj] = C[vt, vi, vj] + (
                    formats.element(row.a, a[vt, vi, va * AD + ve // AC], ve)
                    * scale(
                        SA[vt, va * L + vi % L, vi // L * 4 + ve // block],
                    )
                ) * (
                    formats.element(row.b, B[vt, vj, va * BD + ve // BC], ve)
                    * scale(SB[vt, va * L + vj % L, vj // L * 4 + ve // block])
                )

    return steps


def _grouped(fmt: str, out_dtype: str, n: int, k: int, experts: int) -> PrimFunc:
    """The GEMM whose tiles of rows have a matrix b each, gathered as it is loaded."""
    row, size, multiply = GEMM[fmt], Sizes.of(fmt, n, k), products(fmt, n, k)
    N, NA, KA = i64(size.cols), i64(size.cols // 128), i64(size.atoms)
    R, RA, E, AT = i64(ROW_TILE), i64(ROW_TILE // 128), i64(experts), i64(ATOM_BYTES)
    AB, BB = (i64(size.atoms * size.depth // code.per_byte) for code in (row.a, row.b))

    @T.prim_func(s_tir=True)
    def main(
        a_handle: T.handle,
        b: T.Buffer((E, N, BB), "uint8"),
        a_scale_handle: T.handle,
        b_scale: T.Buffer((E, NA, KA * AT), "uint8"),
        alpha: T.Buffer((E,), "float32"),
        expert_handle: T.handle,
        d_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        tiles = T.int64()
        a = T.match_buffer(a_handle, (tiles, R, AB), "uint8")
        a_scale = T.match_buffer(a_scale_handle, (tiles, RA, KA * AT), "uint8")
        expert_of_tile = T.match_buffer(expert_handle, (tiles,), "int32")
        d = T.match_buffer(d_handle, (tiles, R, N), out_dtype)
        C = T.sblock_alloc_buffer((tiles, R, N), "float32")
        multiply(a, b, a_scale, b_scale, expert_of_tile, C, tiles)
        for t, i, j in T.grid(tiles, R, N):
            with T.sblock("epilogue"):
                vt, vi, vj = T.axis.remap("SSS", [t, i, j])
                d[vt, vi, vj] = T.Cast(out_dtype, C[vt, vi, vj] * alpha[expert_of_tile[vt]])

    return main
