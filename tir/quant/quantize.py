"""Quantise to E2M1 with block scales: NVFP4 (16 elements, E4M3) and MXFP4 (32 elements, E8M0).

In IEEE float32, with g the global scale and amax the largest magnitude of a block (or given):

    NVFP4:         s = E4M3(amax / (6 * g))                      saturating at 448
    MXFP4, ceil:   s = the least power of two >= amax / (6 * g)  in 2^-127 .. 2^127
    MXFP4, floor:  s = 2^(floor(log2(amax / g)) - 2)             in 2^-127 .. 2^127 (the OCP rule)
    code = E2M1(x / (s * g)); zero with the sign of x where s is 0

A block of zeros has the zero scale byte, whatever g is, and 0 / (s * g) is 0 even where s * g
underflows to 0.  A NaN makes its block's scale NaN and all
its codes 7.  Two codes a byte, the even element in the low nibble.

Blocks are computed in tiles (`layouts.BlockGrid`), so that a schedule can treat the scales of a
tile as one vector.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.base.formats import E4M3
from blockscale.specs import Quantize
from blockscale.tir import formats
from blockscale.tir.block_grid import BlockGrid
from blockscale.tir.common import fix_shape, i64, widen

TILE = 16
"""Blocks whose scales are computed together."""


def scale_byte(spec: Quantize, amax_bits: PrimExpr, g: PrimExpr) -> PrimExpr:
    """Scale byte (int32) of a block from the bits of its largest magnitude."""
    amax = formats.from_bits(amax_bits)
    six = formats.const(6.0, amax, "float32")
    if spec.format.scale is E4M3:
        byte = formats.e4m3_encode(amax / (six * g))
    elif spec.rounding == "ceil":
        byte = formats.ue8m0_encode_ceil(amax / (six * g))
    else:
        byte = formats.ue8m0_encode_floor(amax / g)
    zero = formats.const(0, amax_bits, "int32")
    return tirx.Select(amax_bits > zero, byte, zero)


def element_code(spec: Quantize, x: PrimExpr, divisor: PrimExpr, byte: PrimExpr) -> PrimExpr:
    """E2M1 code (int32) of an element."""
    code = formats.e2m1_encode(x / divisor)
    sign = (formats.bits_of(x) >> formats.const(28, x, "int32")) & formats.const(8, x, "int32")
    # 0 / 0, where the divisor underflows or is flushed to zero, is a zero, not a NaN.
    some = formats.abs_bits(x) | formats.abs_bits(divisor)
    code = tirx.Select(some > formats.const(0, x, "int32"), code, sign)
    if spec.format.scale is not E4M3:
        return code
    return tirx.Select(byte > formats.const(0, byte, "int32"), code, sign)


def pack_codes(even: PrimExpr, odd: PrimExpr) -> PrimExpr:
    """Byte of two codes (int32): the even element in the low nibble."""
    return formats.cast(even | (odd << 4), "uint8")


def tile_of(block: PrimExpr, blocks: PrimExpr, tile: int) -> tuple[PrimExpr, PrimExpr]:
    """Tile of ``block`` in a run of ``blocks``, and the place in it; the last tile overlaps."""
    t = tirx.floordiv(block, i64(tile))
    return t, block - tirx.Min(t * i64(tile), blocks - i64(tile))


def _maxima(grid: BlockGrid) -> tuple[Any, Any]:
    """Steps that fill ``amax``: from given block maxima, and from the elements."""
    block = i64(grid.block)

    @T.inline
    def given_amax(block_amax, amax, rows, cols):
        for r, t, i in T.grid(*grid.shape(rows, cols)):
            with T.sblock("amax"):
                vr, vt, vi = T.axis.remap("SSS", [r, t, i])
                amax[vr, vt, vi] = formats.abs_bits(
                    block_amax[vr * grid.blocks(rows, cols) + grid.block_at(vt, vi, rows, cols)]
                )

    @T.inline
    def own_amax(x, magnitude, amax, rows, cols):
        for r, t, i, e in T.grid(*grid.shape(rows, cols), block):
            with T.sblock("magnitude"):
                vr, vt, vi, ve = T.axis.remap("SSSS", [r, t, i, e])
                at = T.meta_var(
                    grid.index(vr, grid.block_at(vt, vi, rows, cols) * block + ve, cols)
                )
                magnitude[vr, vt, vi, ve] = formats.abs_bits(widen(x[at[0], at[1]]))
        for r, t, i, e in T.grid(*grid.shape(rows, cols), block):
            with T.sblock("amax"):
                vr, vt, vi, ve = T.axis.remap("SSSR", [r, t, i, e])
                with T.init():
                    amax[vr, vt, vi] = 0
                amax[vr, vt, vi] = T.max(amax[vr, vt, vi], magnitude[vr, vt, vi, ve])

    return given_amax, own_amax


def _encoding(spec: Quantize, grid: BlockGrid) -> Any:
    """Step from ``amax`` to scale bytes, divisors and packed codes."""
    block, half, two = i64(grid.block), i64(grid.block // 2), i64(2)

    @T.inline
    def encode(x, amax, byte, divisor, code, pair, global_scale, packed, rows, cols):
        for r, t, i in T.grid(*grid.shape(rows, cols)):
            with T.sblock("scale"):
                vr, vt, vi = T.axis.remap("SSS", [r, t, i])
                byte[vr, vt, vi] = scale_byte(spec, amax[vr, vt, vi], global_scale[0])
        for r, t, i in T.grid(*grid.shape(rows, cols)):
            with T.sblock("divisor"):
                vr, vt, vi = T.axis.remap("SSS", [r, t, i])
                divisor[vr, vt, vi] = (
                    formats.decode(spec.format.scale, byte[vr, vt, vi]) * global_scale[0]
                )
        for r, t, i, e in T.grid(*grid.shape(rows, cols), block):
            with T.sblock("code"):
                vr, vt, vi, ve = T.axis.remap("SSSS", [r, t, i, e])
                at = T.meta_var(
                    grid.index(vr, grid.block_at(vt, vi, rows, cols) * block + ve, cols)
                )
                code[vr, vt, vi, ve] = element_code(
                    spec, widen(x[at[0], at[1]]), divisor[vr, vt, vi], byte[vr, vt, vi]
                )
        for r, t, i, j in T.grid(*grid.shape(rows, cols), half):
            with T.sblock("pack"):
                vr, vt, vi, vj = T.axis.remap("SSSS", [r, t, i, j])
                pair[vr, vt, vi, vj] = pack_codes(
                    code[vr, vt, vi, vj * two], code[vr, vt, vi, vj * two + i64(1)]
                )
        for r, t, i, j in T.grid(*grid.shape(rows, cols), half):
            with T.sblock("store_codes"):
                vr, vt, vi, vj = T.axis.remap("SSSS", [r, t, i, j])
                to = T.meta_var(
                    grid.index(vr, grid.block_at(vt, vi, rows, cols) * half + vj, cols // two)
                )
                packed[to[0], to[1]] = pair[vr, vt, vi, vj]

    return encode


def _scale_store(grid: BlockGrid) -> Any:
    """Step that writes the scale bytes in the layout of ``grid``."""

    @T.inline
    def store_linear(byte, block_scale, rows, cols):
        for r, t, i in T.grid(*grid.shape(rows, cols)):
            with T.sblock("store_scale"):
                vr, vt, vi = T.axis.remap("SSS", [r, t, i])
                to = T.meta_var(grid.scale_index(vr, grid.block_at(vt, vi, rows, cols), cols))
                block_scale[to[0], to[1]] = T.Cast("uint8", byte[vr, vt, vi])

    @T.inline
    def store_swizzled(byte, block_scale, rows, cols):
        for r, c in T.grid(*grid.scale_shape(rows, cols)):
            with T.sblock("store_scale"):
                vr, vc = T.axis.remap("SS", [r, c])
                to = T.meta_var(grid.scale_index(vr, vc, cols))
                last = T.meta_var(grid.blocks(rows, cols) - i64(1))
                at = T.meta_var(tile_of(tirx.Min(vc, last), grid.blocks(rows, cols), grid.tile))
                block_scale[to[0], to[1]] = T.Cast(
                    "uint8",
                    T.if_then_else(
                        tirx.all(vr < rows, vc < grid.blocks(rows, cols)), byte[vr, at[0], at[1]], 0
                    ),
                )

    return store_swizzled if grid.swizzled else store_linear


def quantize(spec: Quantize, tile: int = TILE, shape: tuple[int, int] | None = None) -> PrimFunc:
    """Return the kernel ``(x[rows, cols], (block_amax), global_scale) -> packed, block_scale``."""
    block, half, two = i64(spec.block), i64(spec.block // 2), i64(2)
    grid = BlockGrid(spec.block, tile, spec.layout == "128x4")
    given_amax, own_amax = _maxima(grid)
    encode, store = _encoding(spec, grid), _scale_store(grid)

    if spec.given_amax:

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
            block_scale = T.match_buffer(scale_handle, grid.scale_shape(rows, cols), "uint8")
            shape = T.meta_var(grid.shape(rows, cols))
            amax = T.sblock_alloc_buffer(shape, "int32")
            byte = T.sblock_alloc_buffer(shape, "int32")
            divisor = T.sblock_alloc_buffer(shape, "float32")
            code = T.sblock_alloc_buffer((*shape, block), "int32")
            pair = T.sblock_alloc_buffer((*shape, half), "uint8")
            given_amax(block_amax, amax, rows, cols)
            encode(x, amax, byte, divisor, code, pair, global_scale, packed, rows, cols)
            store(byte, block_scale, rows, cols)

    else:

        @T.prim_func(s_tir=True)
        def main(
            x_handle: T.handle,
            global_scale: T.Buffer((i64(1),), "float32"),
            packed_handle: T.handle,
            scale_handle: T.handle,
        ):
            T.func_attr({"global_symbol": "main", "tirx.noalias": True})
            rows, cols = T.int64(), T.int64()
            x = T.match_buffer(x_handle, (rows, cols), spec.dtype)
            packed = T.match_buffer(packed_handle, (rows, cols // two), "uint8")
            block_scale = T.match_buffer(scale_handle, grid.scale_shape(rows, cols), "uint8")
            shape = T.meta_var(grid.shape(rows, cols))
            magnitude = T.sblock_alloc_buffer((*shape, block), "int32")
            amax = T.sblock_alloc_buffer(shape, "int32")
            byte = T.sblock_alloc_buffer(shape, "int32")
            divisor = T.sblock_alloc_buffer(shape, "float32")
            code = T.sblock_alloc_buffer((*shape, block), "int32")
            pair = T.sblock_alloc_buffer((*shape, half), "uint8")
            own_amax(x, magnitude, amax, rows, cols)
            encode(x, amax, byte, divisor, code, pair, global_scale, packed, rows, cols)
            store(byte, block_scale, rows, cols)

    return main if shape is None else fix_shape(main, "x", shape)
