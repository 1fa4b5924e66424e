"""Quantise and dequantise as GPU threads walk them; the arithmetic is that of the ops for CPUs.

The blocks (`quant.quantize`), or units of eight elements (`quant.dequantize`), of
a tensor lie on a grid [a, b]: with linear scales 32 consecutive items along b, in the 128x4 layout
the items of one row.  The grid covers more than the tensor, so that a schedule can split it without
a remainder: loads outside of it read the last item again, stores are left out, and scales there are
the padding, which is zero.  To the right of a swizzled grid `quantize` stores nothing at all: it
may be split into any number of columns, without a check that they are within the grid.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.specs import Dequantize, Quantize
from blockscale.tir import formats
from blockscale.tir.block_grid import offset_128x4, padded_128x4
from blockscale.tir.common import fix_shape, i64, keep_params, tiles_of, widen
from blockscale.tir.gemm.linear import weight_value
from blockscale.tir.quant.quantize import element_code, pack_codes, scale_byte

LANES = 32
"""Items along b with linear scales: one for each thread of a warp."""

ITEMS = 2048
"""A linear grid has a multiple of these: as many as a CTA can have threads, times items of each."""

ROWS = 4
"""A swizzled grid has a multiple of these rows: as many as a thread can take."""

UNIT = 8
"""Elements that a thread dequantises at a time: a word of codes, 16 bytes of bfloat16."""


@dataclass(frozen=True)
class ThreadGrid:
    """Items of ``item`` elements of a tensor [rows, cols]; ``padded``: and those of its padding."""

    item: int
    swizzled: bool
    padded: bool = False

    def shape(self, rows: PrimExpr, cols: PrimExpr) -> tuple[PrimExpr, PrimExpr]:
        """Extents of the grid."""
        width = tirx.floordiv(cols, i64(self.item))
        if not self.swizzled:
            return tiles_of(rows * width, ITEMS) * i64(ITEMS // LANES), i64(LANES)
        if self.padded:
            return padded_128x4(rows, width)
        return tiles_of(rows, ROWS) * i64(ROWS), width

    def inside(self, a: PrimExpr, b: PrimExpr, rows: PrimExpr, cols: PrimExpr) -> PrimExpr:
        """Whether the tensor has this item."""
        width = tirx.floordiv(cols, i64(self.item))
        if not self.swizzled:
            return a * i64(LANES) + b < rows * width
        return tirx.all(a < rows, b < width) if self.padded else a < rows

    def at(self, a: PrimExpr, b: PrimExpr, rows: PrimExpr, cols: PrimExpr) -> PrimExpr:
        """Number of the item in the tensor."""
        if not self.swizzled:
            return a * i64(LANES) + b
        return a * tirx.floordiv(cols, i64(self.item)) + b

    def near(self, a: PrimExpr, b: PrimExpr, rows: PrimExpr, cols: PrimExpr) -> PrimExpr:
        """Number of the item, or of one that the tensor has."""
        width = tirx.floordiv(cols, i64(self.item))
        if not self.swizzled:
            return tirx.Min(a * i64(LANES) + b, rows * width - i64(1))
        col = tirx.Min(b, width - i64(1)) if self.padded else b
        return tirx.Min(a, rows - i64(1)) * width + col


def _scale_size(block: int, swizzled: bool, rows: PrimExpr, cols: PrimExpr) -> PrimExpr:
    """Shape of the scale tensor."""
    blocks = tirx.floordiv(cols, i64(block))
    return padded_128x4(rows, blocks) if swizzled else (rows, blocks)


def quantize(spec: Quantize, shape: tuple[int, int] | None = None) -> PrimFunc:
    """Return the kernel ``(x[rows, cols], (block_amax), global_scale) -> packed, block_scale``."""
    block, half, two, one = i64(spec.block), i64(spec.block // 2), i64(2), i64(1)
    swizzled = spec.layout == "128x4"
    grid = ThreadGrid(spec.block, swizzled, padded=True)

    @T.inline
    def load(x, raw, rows, cols):
        for a, b, e in T.grid(*grid.shape(rows, cols), block):
            with T.sblock("load"):
                va, vb, ve = T.axis.remap("SSS", [a, b, e])
                raw[va, vb, ve] = x[grid.near(va, vb, rows, cols) * block + ve]

    @T.inline
    def own_amax(raw, amax, a, b):
        for e in range(block):
            with T.sblock("amax"):
                va, vb, ve = T.axis.remap("SSR", [a, b, e])
                with T.init():
                    amax[va, vb] = 0
                amax[va, vb] = T.max(amax[va, vb], formats.abs_bits(widen(raw[va, vb, ve])))

    @T.inline
    def given_amax(block_amax, amax, a, b, rows, cols):
        with T.sblock("amax"):
            va, vb = T.axis.remap("SS", [a, b])
            amax[va, vb] = formats.abs_bits(block_amax[grid.near(va, vb, rows, cols)])

    @T.inline
    def encode(raw, amax, byte, divisor, pair, global_scale, a, b):
        with T.sblock("scale"):
            va, vb = T.axis.remap("SS", [a, b])
            byte[va, vb] = scale_byte(spec, amax[va, vb], global_scale[0])
        with T.sblock("divisor"):
            va, vb = T.axis.remap("SS", [a, b])
            divisor[va, vb] = formats.decode(spec.format.scale, byte[va, vb]) * global_scale[0]
        for j in range(half):
            with T.sblock("pack"):
                va, vb, vj = T.axis.remap("SSS", [a, b, j])
                pair[va, vb, vj] = pack_codes(
                    element_code(spec, widen(raw[va, vb, vj * two]), divisor[va, vb], byte[va, vb]),
                    element_code(
                        spec, widen(raw[va, vb, vj * two + one]), divisor[va, vb], byte[va, vb]
                    ),
                )

    @T.inline
    def store(pair, byte, packed, block_scale, a, b, rows, cols):
        with T.sblock("codes"):
            va, vb = T.axis.remap("SS", [a, b])
            if grid.inside(va, vb, rows, cols):
                for j in range(half):
                    with T.sblock("store_codes"):
                        vj = T.axis.spatial(half, j)
                        packed[grid.at(va, vb, rows, cols) * half + vj] = pair[va, vb, vj]
        with T.sblock("store_scale"):
            va, vb = T.axis.remap("SS", [a, b])
            if swizzled:
                if vb < grid.shape(rows, cols)[1]:  # not to the right of the padding
                    block_scale[offset_128x4(va, vb, cols // block)] = T.Select(
                        grid.inside(va, vb, rows, cols), T.Cast("uint8", byte[va, vb]), T.uint8(0)
                    )
            else:
                if grid.inside(va, vb, rows, cols):
                    block_scale[grid.at(va, vb, rows, cols)] = T.Cast("uint8", byte[va, vb])

    @T.prim_func(s_tir=True)
    def main(
        x_handle: T.handle,
        amax_handle: T.handle,
        global_scale: T.Buffer((i64(1),), "float32"),
        packed_handle: T.handle,
        scale_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        rows, cols = T.int64(), T.int64()
        x = T.match_buffer(x_handle, (rows, cols), spec.dtype)
        block_amax = T.match_buffer(amax_handle, (rows * cols // block,), "float32")
        packed = T.match_buffer(packed_handle, (rows, cols // two), "uint8")
        sizes = T.meta_var(_scale_size(spec.block, swizzled, rows, cols))
        block_scale = T.match_buffer(scale_handle, sizes, "uint8")
        shape = T.meta_var(grid.shape(rows, cols))
        flat_x = T.decl_buffer((rows * cols,), spec.dtype, data=x.data)
        flat_packed = T.decl_buffer((rows * (cols // two),), "uint8", data=packed.data)
        flat_scale = T.decl_buffer((sizes[0] * sizes[1],), "uint8", data=block_scale.data)
        raw = T.sblock_alloc_buffer((*shape, block), spec.dtype)
        amax = T.sblock_alloc_buffer(shape, "int32")
        byte = T.sblock_alloc_buffer(shape, "int32")
        divisor = T.sblock_alloc_buffer(shape, "float32")
        pair = T.sblock_alloc_buffer((*shape, half), "uint8")
        load(flat_x, raw, rows, cols)
        for a, b in T.grid(*shape):
            if spec.given_amax:
                given_amax(block_amax, amax, a, b, rows, cols)
            else:
                own_amax(raw, amax, a, b)
            encode(raw, amax, byte, divisor, pair, global_scale, a, b)
            store(pair, byte, flat_packed, flat_scale, a, b, rows, cols)

    main = keep_params(main, [param.name for param in spec.params()])
    return main if shape is None else fix_shape(main, "x", shape)


def dequantize(spec: Dequantize, shape: tuple[int, int] | None = None) -> PrimFunc:
    """Kernel ``(packed[rows, cols / 2], block_scale, global_scale) -> out[rows, cols]``."""
    swizzled, two = spec.layout == "128x4", i64(2)
    unit, half, units = i64(UNIT), i64(UNIT // 2), i64(spec.block // UNIT)
    grid = ThreadGrid(UNIT, swizzled)

    def scale_at(a: PrimExpr, b: PrimExpr, rows: PrimExpr, cols: PrimExpr) -> PrimExpr:
        if not swizzled:
            return tirx.floordiv(grid.near(a, b, rows, cols), units)
        row = tirx.Min(a, rows - i64(1))
        return offset_128x4(row, tirx.floordiv(b, units), tirx.floordiv(cols, i64(spec.block)))

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
        sizes = T.meta_var(_scale_size(spec.block, swizzled, rows, cols))
        block_scale = T.match_buffer(scale_handle, sizes, "uint8")
        shape = T.meta_var(grid.shape(rows, cols))
        flat_out = T.decl_buffer((rows * cols,), spec.dtype, data=out.data)
        flat_packed = T.decl_buffer((rows * (cols // two),), "uint8", data=packed.data)
        flat_scale = T.decl_buffer((sizes[0] * sizes[1],), "uint8", data=block_scale.data)
        codes = T.sblock_alloc_buffer((*shape, half), "uint8")
        byte = T.sblock_alloc_buffer(shape, "int32")
        scale = T.sblock_alloc_buffer(shape, "float32")
        value = T.sblock_alloc_buffer((*shape, unit), "float32")
        for a, b in T.grid(*shape):
            for j in range(half):
                with T.sblock("fetch"):
                    va, vb, vj = T.axis.remap("SSS", [a, b, j])
                    codes[va, vb, vj] = flat_packed[grid.near(va, vb, rows, cols) * half + vj]
            with T.sblock("fetch_scale"):
                va, vb = T.axis.remap("SS", [a, b])
                byte[va, vb] = T.Cast("int32", flat_scale[scale_at(va, vb, rows, cols)])
        for a, b in T.grid(*shape):
            with T.sblock("block_scale"):
                va, vb = T.axis.remap("SS", [a, b])
                scale[va, vb] = formats.decode(spec.format.scale, byte[va, vb]) * global_scale[0]
            for e in range(unit):
                with T.sblock("decode"):
                    va, vb, ve = T.axis.remap("SSS", [a, b, e])
                    value[va, vb, ve] = weight_value(
                        codes[va, vb, ve // two], ve, scale[va, vb], "float32"
                    )
            with T.sblock("unit"):
                va, vb = T.axis.remap("SS", [a, b])
                if grid.inside(va, vb, rows, cols):
                    for e in range(unit):
                        with T.sblock("out"):
                            ve = T.axis.spatial(unit, e)
                            flat_out[grid.at(va, vb, rows, cols) * unit + ve] = formats.round_to(
                                spec.dtype, value[va, vb, ve]
                            )

    return main if shape is None else fix_shape(main, "out", shape)
