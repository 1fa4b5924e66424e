"""Dequantise E2M1 with block scales: out = code * (block_scale * global_scale), NVFP4 and MXFP4.

The product of the two scales is rounded to float32, its product with the code too (an E2M1 code
has two significant bits), and the result is rounded once to the dtype of out.
"""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.specs import Dequantize
from blockscale.tir import formats
from blockscale.tir.block_grid import BlockGrid
from blockscale.tir.common import fix_shape, i64
from blockscale.tir.gemm.linear import weight_value
from blockscale.tir.quant.quantize import TILE


def dequantize(
    spec: Dequantize, tile: int = TILE, shape: tuple[int, int] | None = None
) -> PrimFunc:
    """Kernel ``(packed[rows, cols / 2], block_scale, global_scale) -> out[rows, cols]``."""
    block, half, two = i64(spec.block), i64(spec.block // 2), i64(2)
    grid = BlockGrid(spec.block, tile, spec.layout == "128x4")

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
        packed = T.match_buffer(packed_handle, (rows, cols // two), "uint8")
        block_scale = T.match_buffer(scale_handle, grid.scale_shape(rows, cols), "uint8")
        shape = T.meta_var(grid.shape(rows, cols))
        scale = T.sblock_alloc_buffer(shape, "float32")
        codes = T.sblock_alloc_buffer((*shape, half), "uint8")
        value = T.sblock_alloc_buffer((*shape, block), "float32")
        for r, t, i in T.grid(*shape):
            with T.sblock("block_scale"):
                vr, vt, vi = T.axis.remap("SSS", [r, t, i])
                at = T.meta_var(grid.scale_index(vr, grid.block_at(vt, vi, rows, cols), cols))
                scale[vr, vt, vi] = (
                    formats.decode(spec.format.scale, T.Cast("int32", block_scale[at[0], at[1]]))
                    * global_scale[0]
                )
        for r, t, i, j in T.grid(*shape, half):
            with T.sblock("fetch"):
                vr, vt, vi, vj = T.axis.remap("SSSS", [r, t, i, j])
                at = T.meta_var(
                    grid.index(vr, grid.block_at(vt, vi, rows, cols) * half + vj, cols // two)
                )
                codes[vr, vt, vi, vj] = packed[at[0], at[1]]
        for r, t, i, e in T.grid(*shape, block):
            with T.sblock("decode"):
                vr, vt, vi, ve = T.axis.remap("SSSS", [r, t, i, e])
                value[vr, vt, vi, ve] = weight_value(
                    codes[vr, vt, vi, ve // two], ve, scale[vr, vt, vi], "float32"
                )
        for r, t, i, e in T.grid(*shape, block):
            with T.sblock("out"):
                vr, vt, vi, ve = T.axis.remap("SSSS", [r, t, i, e])
                to = T.meta_var(
                    grid.index(vr, grid.block_at(vt, vi, rows, cols) * block + ve, cols)
                )
                out[to[0], to[1]] = formats.round_to(spec.dtype, value[vr, vt, vi, ve])

    return main if shape is None else fix_shape(main, "out", shape)
