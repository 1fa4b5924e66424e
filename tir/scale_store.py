"""Where the fused ops write block scales: linear, 128x4 or 8x4, padding as zero.

8x4 is the 128x4 layout (`blockscale.base.index_maps`) with tiles of 8 rows; byte offset of scale
(r, c), with C4 = ceil(columns / 4):  (r // 8) * C4 * 32 + (c // 4) * 32 + (r % 8) * 4 + c % 4

The blocks that write padding declare that they write nothing.  TVM moves no block whose buffer
has a second writer, and a schedule must be able to store a scale where it was computed.  Padding
and scales never share a byte, so that their order is free.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T

from blockscale.tir.block_grid import index_128x4
from blockscale.tir.common import i64, tiles_of

TILE_ROWS = {"128x4": 128, "8x4": 8}
"""Rows of a tile, by tiled layout."""

_COLS = 4


def scale_shape(layout: str, rows: PrimExpr, blocks: PrimExpr) -> tuple[PrimExpr, PrimExpr]:
    """Shape of the scale tensor of ``rows`` rows with ``blocks`` scales."""
    if layout == "linear":
        return rows, blocks
    tile = TILE_ROWS[layout]
    return tiles_of(rows, tile) * i64(tile), tiles_of(blocks, _COLS) * i64(_COLS)


def scale_index(
    layout: str, row: PrimExpr, col: PrimExpr, blocks: PrimExpr
) -> tuple[PrimExpr, PrimExpr]:
    """Index of scale (``row``, ``col``) in that tensor."""
    if layout == "linear":
        return row, col
    if layout == "128x4":
        return index_128x4(row, col, blocks)
    width = tiles_of(blocks, _COLS) * i64(_COLS)
    tile = tirx.floordiv(row, i64(8)) * tiles_of(blocks, _COLS) + tirx.floordiv(col, i64(4))
    offset = tile * i64(32) + tirx.floormod(row, i64(8)) * i64(4) + tirx.floormod(col, i64(4))
    return tirx.floordiv(offset, width), tirx.floormod(offset, width)


def norm_store(layout: str, width: int) -> tuple[Any, Any]:
    """Steps of a tensor [rows, width]: write its scales, write the padding around them.

    Whole tiles of columns have no block "pad_cols".
    """
    blocks, ragged = i64(width), width % _COLS > 0

    @T.inline
    def store(byte, block_scale, rows):
        for r, b in T.grid(rows, blocks):
            with T.sblock("store_scale"):
                vr, vb = T.axis.remap("SS", [r, b])
                to = T.meta_var(scale_index(layout, vr, vb, blocks))
                block_scale[to[0], to[1]] = T.Cast("uint8", byte[vr, vb])

    @T.inline
    def pad(block_scale, rows):
        size = T.meta_var(scale_shape(layout, rows, blocks))
        for r, b in T.grid(size[0] - rows, size[1]):
            with T.sblock("pad_rows"):
                vr, vb = T.axis.remap("SS", [r, b])
                T.reads()
                T.writes()
                to = T.meta_var(scale_index(layout, rows + vr, vb, blocks))
                block_scale[to[0], to[1]] = T.uint8(0)
        if ragged:
            for r, b in T.grid(rows, size[1] - blocks):
                with T.sblock("pad_cols"):
                    vr, vb = T.axis.remap("SS", [r, b])
                    T.reads()
                    T.writes()
                    to = T.meta_var(scale_index(layout, vr, blocks + vb, blocks))
                    block_scale[to[0], to[1]] = T.uint8(0)

    return store, pad


def expert_store(layout: str, grouped: bool) -> tuple[Any, Any]:
    """The same steps for [experts, rows, blocks]; not ``grouped``: of one expert, unnumbered."""

    def index(e: PrimExpr, r: PrimExpr, b: PrimExpr, blocks: PrimExpr) -> tuple[PrimExpr, ...]:
        at = scale_index(layout, r, b, blocks)
        return (e, *at) if grouped else at

    @T.inline
    def store(byte, block_scale, experts, rows, blocks):
        for e, r, b in T.grid(experts, rows, blocks):
            with T.sblock("store_scale"):
                ve, vr, vb = T.axis.remap("SSS", [e, r, b])
                block_scale[index(ve, vr, vb, blocks)] = T.Cast("uint8", byte[ve, vr, vb])

    @T.inline
    def pad(block_scale, experts, rows, blocks):
        size = T.meta_var(scale_shape(layout, rows, blocks))
        for e, r, b in T.grid(experts, size[0] - rows, size[1]):
            with T.sblock("pad_rows"):
                ve, vr, vb = T.axis.remap("SSS", [e, r, b])
                T.reads()
                T.writes()
                block_scale[index(ve, rows + vr, vb, blocks)] = T.uint8(0)
        for e, r, b in T.grid(experts, rows, size[1] - blocks):
            with T.sblock("pad_cols"):
                ve, vr, vb = T.axis.remap("SSS", [e, r, b])
                T.reads()
                T.writes()
                block_scale[index(ve, vr, blocks + vb, blocks)] = T.uint8(0)

    return store, pad
