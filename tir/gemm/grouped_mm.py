"""Grouped GEMM of block-scaled operands on a CPU: each range of rows meets its expert's matrix.

    d[m, n] = alpha[e] * sum_k A[m, k] * B[e, n, k]    for offsets[e] <= m < offsets[e + 1]

The operands are those of `blockscale.tir.gemm.mm`.  The rows of expert e have their scales in whole
128x4 tiles: the first is the number of tiles that the experts before e fill.  Rows of d in no range
are not written; offsets that fall, or lie outside of a, are taken as the nearest ones that do not.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.base.sizes import round_up
from blockscale.specs import GroupedMmFp4
from blockscale.tir import formats
from blockscale.tir.block_grid import COLS_128X4, ROWS_128X4
from blockscale.tir.common import fix_shape, i64, tiles_of
from blockscale.tir.gemm.linear import from_operand
from blockscale.tir.gemm.mm import Source, a_steps, b_steps, operand_dtype


def grouped_gemm(
    spec: GroupedMmFp4, row_tile: int, compute: str = "float32", rows: int | None = None
) -> PrimFunc:
    """Return the kernel ``(a[rows, ..], b, a_scale, b_scale, offsets, alpha) -> d[rows, N]``.

    ``rows`` None: symbolic, any number of rows per call.  Else a_scale has room for rows divided
    evenly among the experts.
    """
    one = spec.matrix
    E, N, cols = i64(spec.experts), i64(one.n), i64(one.scale_cols)
    a_bytes, b_bytes, scale_rows = i64(one.a_bytes), i64(one.b_bytes), i64(one.scale_rows)
    ranges, multiply = ranges_step(), products_step(spec, row_tile, compute)

    @T.prim_func(s_tir=True)
    def main(
        a_handle: T.handle,
        b: T.Buffer((E, N, b_bytes), "uint8"),
        a_scale_handle: T.handle,
        b_scale: T.Buffer((E, scale_rows, cols), "uint8"),
        offsets: T.Buffer((E + i64(1),), "int32"),
        alpha: T.Buffer((E,), "float32"),
        d_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        rows, scales_height = T.int64(), T.int64()
        a = T.match_buffer(a_handle, (rows, a_bytes), "uint8")
        a_scale = T.match_buffer(a_scale_handle, (scales_height, cols), "uint8")
        d = T.match_buffer(d_handle, (rows, N), spec.out_dtype)
        start = T.sblock_alloc_buffer((E,), "int64")
        count = T.sblock_alloc_buffer((E,), "int64")
        scale_row = T.sblock_alloc_buffer((rows,), "int64")
        ranges(offsets, start, count, scale_row, E, rows)
        multiply(
            *(a, b, a_scale, b_scale, alpha, d, start, count, scale_row, rows, scales_height),
            lambda row, col: (row, col),
            lambda value: formats.round_to(spec.out_dtype, value),
        )

    if rows is None:
        return main
    height_of_all = round_up(rows, spec.experts * ROWS_128X4)
    fixed = fix_shape(main, "a", (rows, one.a_bytes))
    return fix_shape(fixed, "a_scale", (height_of_all, one.scale_cols))


def products_step(spec: GroupedMmFp4, row_tile: int, compute: str) -> Any:
    """Step from the parameters and `ranges_step` to the products c [rows, N].

    ``at``: where in c the element of a row and a column of b goes; ``rounded``: what goes there.
    """
    one = spec.matrix
    E, N, K, R, cols = i64(spec.experts), i64(one.n), i64(one.k), i64(row_tile), i64(one.scale_cols)
    b_bytes, scale_rows = i64(one.b_bytes), i64(one.scale_rows)
    groups = i64(one.scale_cols // COLS_128X4)
    operand, from_a, from_b = operand_dtype(compute), a_steps(one, compute), b_steps(one, compute)
    one64 = i64(1)

    @T.inline
    def multiply(
        a, b, a_scale, b_scale, alpha, c, start, count, scale_row, rows, scales_height, at, rounded
    ):
        # The last tile of an expert may end beyond the last row.
        height = T.meta_var(rows + tirx.Min(rows, one64) * (R - one64))
        a_scale_bytes = T.sblock_alloc_buffer((one64, height, cols), "uint8")
        a_scales = T.sblock_alloc_buffer((one64, height, cols), "float32")
        A = T.sblock_alloc_buffer((one64, height, K), operand)
        source = T.meta_var(_scaled_row(scale_row, rows, scales_height))
        from_a(a, a_scale, a_scale_bytes, a_scales, A, one64, height, source)
        for e in range(E):
            with T.sblock("expert"):
                ve = T.axis.spatial(E, e)
                T.where(count[e] > 0)
                T.reads(
                    start[ve],
                    count[ve],
                    A[0, 0:height, 0:K],
                    b[ve, 0:N, 0:b_bytes],
                    b_scale[ve, 0:scale_rows, 0:cols],
                    alpha[ve],
                )
                T.writes(c[0:rows, 0:N])
                # One iteration: what is tensorized may name a variable and may not load it.
                for s in T.serial(start[ve], start[ve] + one64):
                    for m in T.serial(count[ve], count[ve] + one64):
                        with T.sblock("product"):
                            before = T.axis.spatial(height, s)
                            mine = T.axis.spatial(height, m)
                            T.reads(
                                A[0, 0:height, 0:K],
                                b[ve, 0:N, 0:b_bytes],
                                b_scale[ve, 0:scale_rows, 0:cols],
                                alpha[ve],
                            )
                            T.writes(c[0:rows, 0:N])
                            b_scale_bytes = T.sblock_alloc_buffer((N, cols), "uint8")
                            b_scales = T.sblock_alloc_buffer(
                                (N, groups, i64(COLS_128X4)), "float32"
                            )
                            B = T.sblock_alloc_buffer((N, K), operand)
                            C = T.sblock_alloc_buffer((tiles_of(mine, row_tile), R, N), "float32")
                            from_b(b, b_scale, b_scale_bytes, b_scales, B, (ve,))
                            for t, i, n, k in T.grid(tiles_of(mine, row_tile), R, N, K):
                                with T.sblock("matmul"):
                                    vt, vi, vn, vk = T.axis.remap("SSSR", [t, i, n, k])
                                    with T.init():
                                        C[vt, vi, vn] = T.float32(0)
                                    C[vt, vi, vn] = C[vt, vi, vn] + from_operand(
                                        A[0, before + vt * R + vi, vk]
                                    ) * from_operand(B[vn, vk])
                            for t, i, n in T.grid(tiles_of(mine, row_tile), R, N):
                                with T.sblock("epilogue"):
                                    vt, vi, vn = T.axis.remap("SSS", [t, i, n])
                                    if vt * R + vi < mine:
                                        c[at(before + vt * R + vi, vn)] = rounded(
                                            C[vt, vi, vn] * alpha[ve]
                                        )

    return multiply


def ranges_step() -> Any:
    """Step from offsets to each expert's rows of a, and each row's row of scales (-1: none)."""
    zero, one64, tile = i64(0), i64(1), i64(ROWS_128X4)

    def clamped(value: PrimExpr, low: PrimExpr, high: PrimExpr) -> PrimExpr:
        return tirx.Max(tirx.Min(tirx.Cast("int64", value), high), low)

    @T.inline
    def step(offsets, start, count, scale_row, experts, rows):
        for u in range(1):
            with T.sblock("ranges"):
                vu = T.axis.spatial(1, u)
                T.reads(offsets[0 : experts + one64])
                T.writes(start[0:experts], count[0:experts], scale_row[0:rows])
                first = T.alloc_buffer((one64,), "int64")
                first[0] = zero
                for r in range(rows):
                    scale_row[r] = i64(-1)
                for e in range(experts):
                    start[e] = clamped(offsets[e], zero, rows)
                    count[e] = clamped(offsets[e + one64], start[e], rows) - start[e]
                    for r in range(count[e]):
                        scale_row[start[e] + r] = first[0] + r
                    first[0] = first[0] + tiles_of(count[e], ROWS_128X4) * tile

    return step


def _scaled_row(scale_row: PrimExpr, rows: PrimExpr, height: PrimExpr) -> Source:
    """Each row of a, the last row instead of those beyond it."""

    def source(tile: PrimExpr, row: PrimExpr) -> tuple[PrimExpr, PrimExpr, PrimExpr]:
        at = tirx.Min(row, rows - i64(1))
        scale = scale_row[at]
        return at, scale, tirx.all(scale >= i64(0), scale < height)

    return source
