"""Layouts of block scales as index maps.

128x4, the layout of tcgen05 and cuBLAS ("swizzled"): rows are padded to a multiple of 128, columns to
a multiple of 4; byte offset of scale (r, c), with C4 = ceil(columns / 4):

    (r // 128) * C4 * 512 + (c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr as PrimExpr

from blockscale.tir.common import i64, tiles_of

ROWS_128X4 = 128
COLS_128X4 = 4


def padded_128x4(rows: PrimExpr, cols: PrimExpr) -> tuple[PrimExpr, PrimExpr]:
    """Rows and columns of the padded tensor."""
    return tiles_of(rows, ROWS_128X4) * ROWS_128X4, tiles_of(cols, COLS_128X4) * COLS_128X4


def offset_128x4(row: PrimExpr, col: PrimExpr, cols: PrimExpr) -> PrimExpr:
    """Byte offset of scale (``row``, ``col``) of a tensor with ``cols`` columns before padding."""
    tile = tirx.floordiv(row, i64(128)) * tiles_of(cols, COLS_128X4) + tirx.floordiv(col, i64(4))
    within = (
        tirx.floormod(row, i64(32)) * 16
        + tirx.floordiv(tirx.floormod(row, i64(128)), i64(32)) * 4
        + tirx.floormod(col, i64(4))
    )
    return tile * 512 + within


def index_128x4(row: PrimExpr, col: PrimExpr, cols: PrimExpr) -> tuple[PrimExpr, PrimExpr]:
    """Index of scale (``row``, ``col``) in the padded tensor [padded rows, padded columns]."""
    width = tiles_of(cols, COLS_128X4) * COLS_128X4
    offset = offset_128x4(row, col, cols)
    return tirx.floordiv(offset, width), tirx.floormod(offset, width)
