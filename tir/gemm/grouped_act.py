"""A grouped GEMM on a CPU, a gated activation of its result, and the codes and scales of that.

    c = alpha[e] * a b[e]^T                        (`gemm.grouped_mm`), rounded to 16 bits
    h = activation(gates of c) * ups of c
    packed, block_scale = codes of h / global_scale[e], scales 128x4   (`fused.act_quantize`)

Rows of b, and so columns of the product, are 16 gates, 16 ups, and so on; c has all gates first.
The scales of an expert's rows lie where those of its rows of a do; rows that fill its last 128 have
the scale 0.  Rows of no expert are not written.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.base.sizes import round_up
from blockscale.specs import ActQuantize, GroupedMmActFp4Quant
from blockscale.specs.gemm import GATED_ROWS
from blockscale.tir import formats
from blockscale.tir.block_grid import ROWS_128X4, index_128x4
from blockscale.tir.common import fix_shape, i64, keep_params, widen
from blockscale.tir.fused.act_quantize import encode_step, value_step
from blockscale.tir.gemm.grouped_mm import products_step, ranges_step
from blockscale.tir.gemm.linear import from_operand


def grouped_gemm_act(
    spec: GroupedMmActFp4Quant, row_tile: int, compute: str = "float32", rows: int | None = None
) -> PrimFunc:
    """Return the kernel of ``spec``, its parameters those of ``spec.params()``.

    ``rows`` None: symbolic, any number of rows per call.  Else a_scale has room for rows divided
    evenly among the experts.
    """
    product, one, block = spec.product, spec.product.matrix, spec.block
    E, N, cols = i64(spec.experts), i64(spec.n), i64(one.scale_cols)
    a_bytes, b_bytes, scale_rows = i64(one.a_bytes), i64(one.b_bytes), i64(one.scale_rows)
    inner, blocks = i64(spec.n // 2), i64(spec.n // 2 // block)
    width, half, unit = i64(block), i64(block // 2), i64(1)
    ranges, multiply = ranges_step(), products_step(product, row_tile, compute)
    # Each row counts as an expert of one row: it has a scale and a mask of its own.
    scale = spec.format.scale.name
    rule = ActQuantize(spec.activation, block, scale, spec.dtype, "128x4", grouped=True)
    activate = value_step(rule, lambda c, *place: _from_bits(c[_own(*place)]))
    encode = encode_step(rule, _own)
    bits = "uint16" if spec.dtype == "bfloat16" else spec.dtype  # TVM has no vectors of bfloat16
    owners, store = _owners_step(), _store_step(spec)

    @T.prim_func(s_tir=True)
    def main(
        a_handle: T.handle,
        b: T.Buffer((E, N, b_bytes), "uint8"),
        a_scale_handle: T.handle,
        b_scale: T.Buffer((E, scale_rows, cols), "uint8"),
        offsets: T.Buffer((E + i64(1),), "int32"),
        alpha: T.Buffer((E,), "float32"),
        global_scale: T.Buffer((E,), "float32"),
        gate_alpha: T.float32,
        beta: T.float32,
        limit: T.float32,
        packed_handle: T.handle,
        bytes_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        rows, scales_height = T.int64(), T.int64()
        a = T.match_buffer(a_handle, (rows, a_bytes), "uint8")
        a_scale = T.match_buffer(a_scale_handle, (scales_height, cols), "uint8")
        packed = T.match_buffer(packed_handle, (rows, i64(spec.n // 4)), "uint8")
        block_scale = T.match_buffer(bytes_handle, (scales_height, blocks), "uint8")
        numbers = T.meta_var((gate_alpha, beta, limit) if spec.activation == "swiglu" else ())
        start = T.sblock_alloc_buffer((E,), "int64")
        count = T.sblock_alloc_buffer((E,), "int64")
        scale_row = T.sblock_alloc_buffer((rows,), "int64")
        used = T.sblock_alloc_buffer((rows,), "int32")
        own_scale = T.sblock_alloc_buffer((rows,), "float32")
        c = T.sblock_alloc_buffer((rows, N), bits)
        ranges(offsets, start, count, scale_row, E, rows)
        owners(start, count, scale_row, global_scale, used, own_scale, E, rows, scales_height)
        multiply(
            *(a, b, a_scale, b_scale, alpha, c, start, count, scale_row, rows, scales_height),
            _gates_first(spec.n),
            lambda value: _to_bits(spec.dtype, value),
        )
        for u in range(1):
            with T.sblock("activated"):
                vu = T.axis.spatial(1, u)
                T.reads(
                    c[0:rows, 0:N],
                    start[0:E],
                    count[0:E],
                    scale_row[0:rows],
                    used[0:rows],
                    own_scale[0:rows],
                )
                T.writes(packed[0:rows, 0 : N // i64(4)], block_scale[0:scales_height, 0:blocks])
                h = T.sblock_alloc_buffer((rows, unit, blocks, width), "float32")
                magnitude = T.sblock_alloc_buffer((rows, unit, blocks, width), "int32")
                amax = T.sblock_alloc_buffer((rows, unit, blocks), "int32")
                byte = T.sblock_alloc_buffer((rows, unit, blocks), "int32")
                factor = T.sblock_alloc_buffer((rows, unit, blocks), "float32")
                code = T.sblock_alloc_buffer((rows, unit, blocks, width), "int32")
                pair = T.sblock_alloc_buffer((rows, unit, blocks, half), "uint8")
                steps = T.meta_var((magnitude, amax, byte, factor, code, pair))
                activate(c, used, h, rows, unit, inner, numbers)
                encode(h, own_scale, used, *steps, packed, rows, unit, blocks, ())
                store(byte, block_scale, used, scale_row, start, count, rows, scales_height)

    main = keep_params(main, [param.name for param in spec.params()])
    if rows is None:
        return main
    height_of_all = round_up(rows, spec.experts * ROWS_128X4)
    fixed = fix_shape(main, "a", (rows, one.a_bytes))
    return fix_shape(fixed, "a_scale", (height_of_all, one.scale_cols))


def _to_bits(dtype: str, value: PrimExpr) -> PrimExpr:
    """Float32 ``value`` rounded to ``dtype``, bfloat16 as its bits."""
    if dtype != "bfloat16":
        return formats.cast(value, dtype)
    return formats.cast(formats.bf16_bits(value), "uint16")


def _from_bits(value: PrimExpr) -> PrimExpr:
    """What `_to_bits` made, as float32."""
    return from_operand(value) if str(value.ty.dtype).startswith("uint16") else widen(value)


def _own(row: PrimExpr, _: PrimExpr, col: PrimExpr) -> tuple[PrimExpr, ...]:
    """Index of a column of an expert that is one row."""
    return row, col


def _gates_first(n: int) -> Any:
    """From a row and a column of the product to its place among gates, or behind them ups."""
    turn, both = i64(GATED_ROWS), i64(2 * GATED_ROWS)

    def place(row: PrimExpr, col: PrimExpr) -> tuple[PrimExpr, PrimExpr]:
        up = tirx.floormod(tirx.floordiv(col, turn), i64(2))
        own = tirx.floordiv(col, both) * turn + tirx.floormod(col, turn)
        return row, up * i64(n // 2) + own

    return place


def _owners_step() -> Any:
    """Step to each row's global scale, and whether it is an expert's and has room for scales."""

    @T.inline
    def step(start, count, scale_row, global_scale, used, own_scale, experts, rows, height):
        for u in range(1):
            with T.sblock("owners"):
                vu = T.axis.spatial(1, u)
                T.reads(
                    start[0:experts],
                    count[0:experts],
                    scale_row[0:rows],
                    global_scale[0:experts],
                )
                T.writes(used[0:rows], own_scale[0:rows])
                for r in range(rows):
                    used[r] = 0
                    own_scale[r] = T.float32(1)
                for e in range(experts):
                    for r in range(count[e]):
                        used[start[e] + r] = T.Cast("int32", scale_row[start[e] + r] < height)
                        own_scale[start[e] + r] = global_scale[e]

    return step


def _store_step(spec: GroupedMmActFp4Quant) -> Any:
    """Steps: store scales where the experts' rows have them; zeros up to the next 128 rows.

    See `blockscale.tir.scale_store` on what the second one declares.
    """
    E, blocks, tile = i64(spec.experts), i64(spec.n // 2 // spec.block), i64(ROWS_128X4)

    @T.inline
    def store(byte, block_scale, used, scale_row, start, count, rows, height):
        for r, u, b in T.grid(rows, i64(1), blocks):
            with T.sblock("store_scale"):
                vr, vu, vb = T.axis.remap("SSS", [r, u, b])
                if used[vr] > 0:
                    to = T.meta_var(index_128x4(scale_row[vr], vb, blocks))
                    block_scale[to[0], to[1]] = T.Cast("uint8", byte[vr, vu, vb])
        for e, r, b in T.grid(E, tile, blocks):
            with T.sblock("pad_rows"):
                ve, vr, vb = T.axis.remap("SSS", [e, r, b])
                T.reads(start[ve], count[ve], scale_row[0:rows])
                T.writes()
                if count[ve] > i64(0):
                    if vr < tirx.floormod(-count[ve], tile):
                        if scale_row[start[ve]] + count[ve] + vr < height:
                            to = T.meta_var(
                                index_128x4(scale_row[start[ve]] + count[ve] + vr, vb, blocks)
                            )
                            block_scale[to[0], to[1]] = T.uint8(0)

    return store
