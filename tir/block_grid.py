"""Block scales in the 128x4 layout of `base.index_maps` as expressions; walks over blocks.

Tuning logs hang on the form of these expressions; `test_index_maps.py` compares them with the
index map of the layout.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class BlockGrid:
    """The blocks of a tensor [rows, cols] as a kernel walks them: in tiles of consecutive blocks.

    With linear scales a tensor is one run of blocks; in the 128x4 layout every row is a run.  A
    partial last tile starts earlier and repeats blocks, which writes the same bytes again; a run
    must hold at least one tile.
    """

    block: int
    tile: int
    swizzled: bool

    def runs(self, rows: PrimExpr, cols: PrimExpr) -> PrimExpr:
        """Number of runs."""
        return rows if self.swizzled else i64(1)

    def blocks(self, rows: PrimExpr, cols: PrimExpr) -> PrimExpr:
        """Blocks of a run."""
        blocks = tirx.floordiv(cols, i64(self.block))
        return blocks if self.swizzled else rows * blocks

    def shape(self, rows: PrimExpr, cols: PrimExpr) -> tuple[PrimExpr, PrimExpr, PrimExpr]:
        """Extents of the loops: runs, tiles, blocks of a tile."""
        tiles = tiles_of(self.blocks(rows, cols), self.tile)
        return self.runs(rows, cols), tiles, i64(self.tile)

    def block_at(self, t: PrimExpr, i: PrimExpr, rows: PrimExpr, cols: PrimExpr) -> PrimExpr:
        """Block ``i`` of tile ``t``, within its run."""
        last = self.blocks(rows, cols) - i64(self.tile)
        return tirx.Min(t * i64(self.tile), last) + i

    def index(self, run: PrimExpr, item: PrimExpr, width: PrimExpr) -> tuple[PrimExpr, PrimExpr]:
        """Index of ``item`` of ``run`` in a tensor with rows of ``width`` items."""
        if self.swizzled:
            return run, item
        return tirx.floordiv(item, width), tirx.floormod(item, width)

    def scale_shape(self, rows: PrimExpr, cols: PrimExpr) -> tuple[PrimExpr, PrimExpr]:
        """Shape of the scale tensor."""
        blocks = tirx.floordiv(cols, i64(self.block))
        return padded_128x4(rows, blocks) if self.swizzled else (rows, blocks)

    def scale_index(
        self, run: PrimExpr, block: PrimExpr, cols: PrimExpr
    ) -> tuple[PrimExpr, PrimExpr]:
        """Index of the scale of ``block`` of ``run`` in the scale tensor."""
        blocks = tirx.floordiv(cols, i64(self.block))
        if self.swizzled:
            return index_128x4(run, block, blocks)
        return self.index(run, block, blocks)
