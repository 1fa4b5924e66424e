"""Swizzle and unswizzle as GPU threads walk them: `blockscale.tir.quant.swizzle`, the same bytes.

In the 128x4 layout the scales of the rows r, r + 32, r + 64 and r + 96 of a tile, four columns
each, are 16 bytes in a row.  A thread takes these four rows and ``chunk`` words of four columns:
4 x chunk words, which are transposed in its registers.  One of three kernels runs, by what the
number of columns is a multiple of: 16 (four words, 16 bytes a load), 4 (one word), or 1 (bytes).
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.specs import Swizzle, Unswizzle
from blockscale.tir.block_grid import COLS_128X4, ROWS_128X4, padded_128x4
from blockscale.tir.common import fix_shape, i64, tiles_of

KINDS = {"wide": 4, "words": 1}
"""Words of a thread's rows, by kernel; "bytes" is the third."""

QUARTERS = 4
"""Rows of a thread, a quarter of a tile's apart."""

_QUARTER = ROWS_128X4 // QUARTERS


def _tiles(rows: PrimExpr, cols: PrimExpr, of: int, but_not: int = 0) -> PrimExpr:
    """Tiles of rows if ``cols`` is a multiple of ``of`` and not of ``but_not``, else 0: no launch.

    The call of C's abs keeps TVM from dropping the kernels that a static instance does not use: the
    traces of static and symbolic instances would differ.  A branch around the kernels does not do:
    TVM 0.27's schedules then change what their copies share.
    """
    bits = tirx.call_pure_extern("int32", "abs", tirx.Cast("int32", cols))
    zero = tirx.IntImm("int32", 0)

    def multiple(factor: int) -> PrimExpr:
        return tirx.EQ(tirx.floormod(bits, tirx.IntImm("int32", factor)), zero)

    fits = multiple(of) if not but_not else tirx.all(multiple(of), tirx.Not(multiple(but_not)))
    return tirx.Select(fits, tiles_of(rows, ROWS_128X4), i64(0))


def _row(tile: PrimExpr, row: PrimExpr, quarter: PrimExpr) -> PrimExpr:
    return tile * i64(ROWS_128X4) + quarter * i64(_QUARTER) + row


def _spot(
    tile: PrimExpr, row: PrimExpr, col: PrimExpr, quarter: PrimExpr, width: PrimExpr
) -> PrimExpr:
    """Word of the 128x4 layout: four scales of a row; ``width`` words are in a row."""
    return ((tile * width + col) * i64(_QUARTER) + row) * i64(QUARTERS) + quarter


def _swizzling(kind: str) -> Any:
    """Step of `swizzle` on words, for columns that are a multiple of four."""
    chunk, four = i64(KINDS[kind]), i64(QUARTERS)

    @T.inline
    def step(given, out, tiles, rows, words):
        shape = T.meta_var((tiles, i64(_QUARTER), words // chunk))
        raw = T.sblock_alloc_buffer((*shape, four, chunk), "uint32")
        turned = T.sblock_alloc_buffer((*shape, chunk, four), "uint32")
        for t, r, c in T.grid(*shape):
            for q, w in T.grid(four, chunk):
                with T.sblock(f"{kind}_load"):
                    vt, vr, vc, vq, vw = T.axis.remap("SSSSS", [t, r, c, q, w])
                    row = T.meta_var(tirx.Min(_row(vt, vr, vq), rows - i64(1)))
                    raw[vt, vr, vc, vq, vw] = given[row * words + vc * chunk + vw]
            for w, q in T.grid(chunk, four):
                with T.sblock(f"{kind}_turn"):
                    vt, vr, vc, vw, vq = T.axis.remap("SSSSS", [t, r, c, w, q])
                    turned[vt, vr, vc, vw, vq] = T.Select(
                        _row(vt, vr, vq) < rows, raw[vt, vr, vc, vq, vw], T.uint32(0)
                    )
            for w, q in T.grid(chunk, four):
                with T.sblock(f"{kind}_store"):
                    vt, vr, vc, vw, vq = T.axis.remap("SSSSS", [t, r, c, w, q])
                    out[_spot(vt, vr, vc * chunk + vw, vq, words)] = turned[vt, vr, vc, vw, vq]

    return step


def _unswizzling(kind: str) -> Any:
    """Step of `unswizzle` on words, for columns that are a multiple of four."""
    chunk, four = i64(KINDS[kind]), i64(QUARTERS)

    @T.inline
    def step(given, out, tiles, rows, words):
        shape = T.meta_var((tiles, i64(_QUARTER), words // chunk))
        raw = T.sblock_alloc_buffer((*shape, chunk, four), "uint32")
        turned = T.sblock_alloc_buffer((*shape, four, chunk), "uint32")
        for t, r, c in T.grid(*shape):
            for w, q in T.grid(chunk, four):
                with T.sblock(f"{kind}_load"):
                    vt, vr, vc, vw, vq = T.axis.remap("SSSSS", [t, r, c, w, q])
                    raw[vt, vr, vc, vw, vq] = given[_spot(vt, vr, vc * chunk + vw, vq, words)]
            for q, w in T.grid(four, chunk):
                with T.sblock(f"{kind}_turn"):
                    vt, vr, vc, vq, vw = T.axis.remap("SSSSS", [t, r, c, q, w])
                    turned[vt, vr, vc, vq, vw] = raw[vt, vr, vc, vw, vq]
            for q in range(four):
                with T.sblock(f"{kind}_row"):
                    vt, vr, vc, vq = T.axis.remap("SSSS", [t, r, c, q])
                    if _row(vt, vr, vq) < rows:
                        for w in range(chunk):
                            with T.sblock(f"{kind}_store"):
                                vw = T.axis.spatial(chunk, w)
                                out[_row(vt, vr, vq) * words + vc * chunk + vw] = turned[
                                    vt, vr, vc, vq, vw
                                ]

    return step


def _swizzle_bytes() -> Any:
    """Step of `swizzle` for any number of columns."""

    @T.inline
    def step(given, out, tiles, rows, cols):
        shape = T.meta_var((tiles, i64(_QUARTER), tiles_of(cols, COLS_128X4)))
        turned = T.sblock_alloc_buffer((*shape, i64(QUARTERS * COLS_128X4)), "uint8")
        for t, r, c in T.grid(*shape):
            for i in range(i64(QUARTERS * COLS_128X4)):
                with T.sblock("bytes_load"):
                    vt, vr, vc, vi = T.axis.remap("SSSS", [t, r, c, i])
                    row = T.meta_var(_row(vt, vr, vi // i64(COLS_128X4)))
                    col = T.meta_var(vc * i64(COLS_128X4) + vi % i64(COLS_128X4))
                    turned[vt, vr, vc, vi] = T.if_then_else(
                        tirx.all(row < rows, col < cols), given[row * cols + col], T.uint8(0)
                    )
            for i in range(i64(QUARTERS * COLS_128X4)):
                with T.sblock("bytes_store"):
                    vt, vr, vc, vi = T.axis.remap("SSSS", [t, r, c, i])
                    spot = T.meta_var(_spot(vt, vr, vc, i64(0), tiles_of(cols, COLS_128X4)))
                    out[spot * i64(COLS_128X4) + vi] = turned[vt, vr, vc, vi]

    return step


def _unswizzle_bytes() -> Any:
    """Step of `unswizzle` for any number of columns."""

    @T.inline
    def step(given, out, tiles, rows, cols):
        for t, r, c in T.grid(tiles, i64(ROWS_128X4), cols):
            with T.sblock("bytes"):
                vt, vr, vc = T.axis.remap("SSS", [t, r, c])
                four, quarter = T.meta_var((i64(COLS_128X4), i64(_QUARTER)))
                width = T.meta_var(tiles_of(cols, COLS_128X4))
                spot = T.meta_var(_spot(vt, vr % quarter, vc // four, vr // quarter, width))
                if vt * i64(ROWS_128X4) + vr < rows:
                    out[(vt * i64(ROWS_128X4) + vr) * cols + vc] = given[spot * four + vc % four]

    return step


def swizzle(spec: Swizzle, shape: tuple[int, int] | None = None) -> PrimFunc:
    """Kernel ``scale[rows, cols] -> out[ceil_to(rows, 128), ceil_to(cols, 4)]``, uint8."""
    wide, words, single = _swizzling("wide"), _swizzling("words"), _swizzle_bytes()
    four = i64(COLS_128X4)

    @T.prim_func(s_tir=True)
    def main(scale_handle: T.handle, out_handle: T.handle):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        rows, cols = T.int64(), T.int64()
        scale = T.match_buffer(scale_handle, (rows, cols), "uint8")
        padded = T.meta_var(padded_128x4(rows, cols))
        out = T.match_buffer(out_handle, padded, "uint8")
        flat = T.decl_buffer((rows * cols,), "uint8", data=scale.data)
        flat_out = T.decl_buffer((padded[0] * padded[1],), "uint8", data=out.data)
        row_words = T.decl_buffer((rows * (cols // four),), "uint32", data=scale.data)
        tile_words = T.decl_buffer((padded[0] * (cols // four),), "uint32", data=out.data)
        wide(row_words, tile_words, _tiles(rows, cols, 16), rows, cols // four)
        words(row_words, tile_words, _tiles(rows, cols, 4, but_not=16), rows, cols // four)
        single(flat, flat_out, _tiles(rows, cols, 1, but_not=4), rows, cols)

    return main if shape is None else fix_shape(main, "scale", shape)


def unswizzle(spec: Unswizzle, shape: tuple[int, int] | None = None) -> PrimFunc:
    """Kernel ``scale[ceil_to(rows, 128), ceil_to(cols, 4)] -> out[rows, cols]``, uint8."""
    wide, words, single = _unswizzling("wide"), _unswizzling("words"), _unswizzle_bytes()
    four = i64(COLS_128X4)

    @T.prim_func(s_tir=True)
    def main(scale_handle: T.handle, out_handle: T.handle):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        rows, cols = T.int64(), T.int64()
        out = T.match_buffer(out_handle, (rows, cols), "uint8")
        padded = T.meta_var(padded_128x4(rows, cols))
        scale = T.match_buffer(scale_handle, padded, "uint8")
        flat = T.decl_buffer((padded[0] * padded[1],), "uint8", data=scale.data)
        flat_out = T.decl_buffer((rows * cols,), "uint8", data=out.data)
        tile_words = T.decl_buffer((padded[0] * (cols // four),), "uint32", data=scale.data)
        row_words = T.decl_buffer((rows * (cols // four),), "uint32", data=out.data)
        wide(tile_words, row_words, _tiles(rows, cols, 16), rows, cols // four)
        words(tile_words, row_words, _tiles(rows, cols, 4, but_not=16), rows, cols // four)
        single(flat, flat_out, _tiles(rows, cols, 1, but_not=4), rows, cols)

    return main if shape is None else fix_shape(main, "out", shape)
