"""Block scales between the linear and the 128x4 layout (`base.index_maps`), byte for byte.

Padding is always written as zero: a GEMM reads it.  Four scales of a row stay together in both
layouts: whole groups of four are copied as such, the rest of a row one by one.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.specs import Swizzle, Unswizzle
from blockscale.tir.block_grid import COLS_128X4, index_128x4, padded_128x4
from blockscale.tir.common import fix_shape, i64, tiles_of


def swizzle(spec: Swizzle, shape: tuple[int, int] | None = None) -> PrimFunc:
    """Kernel ``scale[rows, cols] -> out[ceil_to(rows, 128), ceil_to(cols, 4)]``, uint8."""
    group = i64(COLS_128X4)

    @T.prim_func(s_tir=True)
    def main(scale_handle: T.handle, out_handle: T.handle):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        rows, cols = T.int64(), T.int64()
        scale = T.match_buffer(scale_handle, (rows, cols), "uint8")
        out = T.match_buffer(out_handle, padded_128x4(rows, cols), "uint8")
        height = T.meta_var(padded_128x4(rows, cols)[0])
        for r, g, i in T.grid(height, cols // group, group):
            with T.sblock("groups"):
                vr, vg, vi = T.axis.remap("SSS", [r, g, i])
                to = T.meta_var(index_128x4(vr, vg * group + vi, cols))
                out[to[0], to[1]] = T.if_then_else(
                    vr < rows, scale[vr, vg * group + vi], T.uint8(0)
                )
        for r, g, i in T.grid(height, tiles_of(cols, COLS_128X4) - cols // group, group):
            with T.sblock("rest"):
                vr, vg, vi = T.axis.remap("SSS", [r, g, i])
                col = T.meta_var((cols // group + vg) * group + vi)
                to = T.meta_var(index_128x4(vr, col, cols))
                out[to[0], to[1]] = T.if_then_else(
                    tirx.all(vr < rows, col < cols), scale[vr, col], T.uint8(0)
                )

    return main if shape is None else fix_shape(main, "scale", shape)


def unswizzle(spec: Unswizzle, shape: tuple[int, int] | None = None) -> PrimFunc:
    """Kernel ``scale[ceil_to(rows, 128), ceil_to(cols, 4)] -> out[rows, cols]``, uint8."""
    group = i64(COLS_128X4)

    @T.prim_func(s_tir=True)
    def main(scale_handle: T.handle, out_handle: T.handle):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        rows, cols = T.int64(), T.int64()
        out = T.match_buffer(out_handle, (rows, cols), "uint8")
        scale = T.match_buffer(scale_handle, padded_128x4(rows, cols), "uint8")
        for r, g, i in T.grid(rows, cols // group, group):
            with T.sblock("groups"):
                vr, vg, vi = T.axis.remap("SSS", [r, g, i])
                at = T.meta_var(index_128x4(vr, vg * group + vi, cols))
                out[vr, vg * group + vi] = scale[at[0], at[1]]
        for r, i in T.grid(rows, cols % group):
            with T.sblock("rest"):
                vr, vi = T.axis.remap("SS", [r, i])
                at = T.meta_var(index_128x4(vr, cols // group * group + vi, cols))
                out[vr, cols // group * group + vi] = scale[at[0], at[1]]

    return main if shape is None else fix_shape(main, "out", shape)
