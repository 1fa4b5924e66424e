"""Dequantise E2M1 with block scales: out = code * (block_scale * global_scale), NVFP4 and MXFP4.

The product of the two scales is rounded to float32, its product with the code too (an E2M1 code has two
significant bits), and the result is rounded once to the dtype of out.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.specs import Dequantize
from blockscale.tir import formats
from blockscale.tir.common import fix_shape, i64, tiles_of
from blockscale.tir.layouts import index_128x4, padded_128x4
from blockscale.tir.linear import weight_value
from blockscale.tir.quantize import TILE, tile_block


def dequantize(spec: Dequantize, rows: int | None = None, cols: int | None = None) -> PrimFunc:
    """Return the kernel ``(packed[rows, cols / 2], block_scale, global_scale) -> out[rows, cols]``."""
    block, tile = i64(spec.block), i64(TILE)
    swizzled = spec.layout == "128x4"

    def scale_shape(rows: PrimExpr, blocks: PrimExpr) -> tuple[PrimExpr, PrimExpr]:
        return padded_128x4(rows, blocks) if swizzled else (rows, blocks)

    def place(row: PrimExpr, col: PrimExpr, blocks: PrimExpr) -> tuple[PrimExpr, PrimExpr]:
        return index_128x4(row, col, blocks) if swizzled else (row, col)

    @T.prim_func(s_tir=True)
    def main(
        packed_handle: T.handle,
        scale_handle: T.handle,
        global_scale: T.Buffer((i64(1),), "float32"),
        out_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        rows, cols = T.int64(), T.int64()
        out = T.match_buffer(out_handle, (rows, cols), spec.dtype)
        packed = T.match_buffer(packed_handle, (rows, cols // i64(2)), "uint8")
        block_scale = T.match_buffer(scale_handle, scale_shape(rows, cols // block), "uint8")
        blocks = T.meta_var(cols // block)
        shape = T.meta_var((rows, tiles_of(blocks, TILE), tile))
        scale = T.sblock_alloc_buffer(shape, "float32")
        value = T.sblock_alloc_buffer((*shape, block), "float32")
        for r, t, i in T.grid(*shape):
            with T.sblock("block_scale"):
                vr, vt, vi = T.axis.remap("SSS", [r, t, i])
                scale[vr, vt, vi] = (
                    formats.scale_decode(
                        spec.fmt,
                        T.Cast(
                            "int32",
                            block_scale[
                                place(vr, tile_block(vt, vi, blocks), blocks)[0],
                                place(vr, tile_block(vt, vi, blocks), blocks)[1],
                            ],
                        ),
                    )
                    * global_scale[0]
                )
        for r, t, i, e in T.grid(*shape, block):
            with T.sblock("decode"):
                vr, vt, vi, ve = T.axis.remap("SSSS", [r, t, i, e])
                value[vr, vt, vi, ve] = weight_value(
                    packed[vr, tile_block(vt, vi, blocks) * (block // i64(2)) + ve // i64(2)],
                    ve,
                    scale[vr, vt, vi],
                    "float32",
                )
        for r, t, i, e in T.grid(*shape, block):
            with T.sblock("out"):
                vr, vt, vi, ve = T.axis.remap("SSSS", [r, t, i, e])
                out[vr, tile_block(vt, vi, blocks) * block + ve] = formats.round_to(
                    spec.dtype, value[vr, vt, vi, ve]
                )

    return main if rows is None else fix_shape(main, "out", (rows, cols))
