"""Block scales between the linear and the 128x4 layout (`blockscale.tir.layouts`), byte for byte.

Padding is always written as zero: a GEMM reads it.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.specs import Swizzle, Unswizzle
from blockscale.tir.common import fix_shape
from blockscale.tir.layouts import index_128x4, padded_128x4


def swizzle(spec: Swizzle, shape: tuple[int, int] | None = None) -> PrimFunc:
    """Kernel ``scale[rows, cols] -> out[ceil_to(rows, 128), ceil_to(cols, 4)]``, uint8."""

    @T.prim_func(s_tir=True)
    def main(scale_handle: T.handle, out_handle: T.handle):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        rows, cols = T.int64(), T.int64()
        scale = T.match_buffer(scale_handle, (rows, cols), "uint8")
        out = T.match_buffer(out_handle, padded_128x4(rows, cols), "uint8")
        for r, c in T.grid(padded_128x4(rows, cols)[0], padded_128x4(rows, cols)[1]):
            with T.sblock("swizzle"):
                vr, vc = T.axis.remap("SS", [r, c])
                out[index_128x4(vr, vc, cols)[0], index_128x4(vr, vc, cols)[1]] = T.if_then_else(
                    tirx.all(vr < rows, vc < cols), scale[vr, vc], T.uint8(0)
                )

    return main if shape is None else fix_shape(main, "scale", shape)


def unswizzle(spec: Unswizzle, shape: tuple[int, int] | None = None) -> PrimFunc:
    """Kernel ``scale[ceil_to(rows, 128), ceil_to(cols, 4)] -> out[rows, cols]``, uint8."""

    @T.prim_func(s_tir=True)
    def main(scale_handle: T.handle, out_handle: T.handle):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        rows, cols = T.int64(), T.int64()
        out = T.match_buffer(out_handle, (rows, cols), "uint8")
        scale = T.match_buffer(scale_handle, padded_128x4(rows, cols), "uint8")
        for r, c in T.grid(rows, cols):
            with T.sblock("unswizzle"):
                vr, vc = T.axis.remap("SS", [r, c])
                out[vr, vc] = scale[index_128x4(vr, vc, cols)[0], index_128x4(vr, vc, cols)[1]]

    return main if shape is None else fix_shape(main, "out", shape)
