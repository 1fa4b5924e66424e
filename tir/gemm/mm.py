"""GEMM of block-scaled operands on a CPU.

    d[m, n] = activation(alpha * sum_k A[m, k] * B[n, k] + bias[n]) + residual[m, n]

A[m, k] = code(a[m, k]) * scale(a_scale, m, k / block), and B likewise.  Codes are E2M1, two a byte
(`formats.nibble`), or E4M3; scales are E4M3 of 16 elements (nvfp4) or E8M0 of 32, in the 128x4
layout (`layouts.offset_128x4`), whose padding is not read.  A code times its scale is exact in
float32 where it is a normal number of that type.  The sum is accumulated in float32, all else is
applied to it in float32, and d is rounded once to its dtype.  An activation and a residual are
there only where the spec says so.

``compute`` is the type in which A and B are multiplied, as in `gemm.linear`: "float32",
or for nvfp4 "bfloat16", in which an E2M1 code times an E4M3 scale is exact.

Rows are padded to a multiple of ``row_tile`` by repeating the last one, so that a schedule sees
whole tiles; what comes of the repetitions is not stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.base.formats import Number
from blockscale.specs import MmFp4
from blockscale.tir import activations, formats
from blockscale.tir.block_grid import COLS_128X4, index_128x4, padded_128x4
from blockscale.tir.common import fix_shape, i64, keep_params, tiles_of, widen
from blockscale.tir.gemm.linear import from_operand, to_operand

Source = Callable[[PrimExpr, PrimExpr], tuple[PrimExpr, PrimExpr, PrimExpr]]
"""From a tile and a row in it to the row of a, the row of its scales, and whether it has any."""


def code_value(
    code: Number, byte: PrimExpr, k: PrimExpr, scale: PrimExpr, compute: str
) -> PrimExpr:
    """Element ``k`` from its byte (uint8) and block scale (float32), in the compute type."""
    return to_operand(formats.element(code, byte, k) * scale, compute)


def a_steps(spec: MmFp4, compute: str) -> Any:
    """Steps from a and its scales to A [tiles, rows of a tile, K]."""
    K, cols, block, blocks = map(i64, (spec.k, spec.scale_cols, spec.block, spec.k // spec.block))
    code, scale = spec.format.a, spec.format.scale
    step = i64(code.per_byte)

    @T.inline
    def steps(a, a_scale, bytes, scales, A, tiles, height, source):
        for t, i, c in T.grid(tiles, height, cols):
            with T.sblock("a_bytes"):
                vt, vi, vc = T.axis.remap("SSS", [t, i, c])
                at = T.meta_var(index_128x4(source(vt, vi)[1], vc, blocks))
                bytes[vt, vi, vc] = T.if_then_else(
                    source(vt, vi)[2], a_scale[at[0], at[1]], T.uint8(0)
                )
        for t, i, c in T.grid(tiles, height, cols):
            with T.sblock("a_scale"):
                vt, vi, vc = T.axis.remap("SSS", [t, i, c])
                scales[vt, vi, vc] = formats.decode_byte(scale, bytes[vt, vi, vc])
        for t, i, k in T.grid(tiles, height, K):
            with T.sblock("widen"):
                vt, vi, vk = T.axis.remap("SSS", [t, i, k])
                A[vt, vi, vk] = code_value(
                    code, a[source(vt, vi)[0], vk // step], vk, scales[vt, vi, vk // block], compute
                )

    return steps


def b_steps(spec: MmFp4, compute: str) -> Any:
    """Steps from b and its scales to B [N, K]; ``lead``: the indices before theirs.

    Scales are in groups of four: who needs one needs the group, padding included.
    """
    N, K, cols, group = i64(spec.n), i64(spec.k), i64(spec.scale_cols), i64(COLS_128X4)
    block, blocks = i64(spec.block), i64(spec.k // spec.block)
    code, scale = spec.format.b, spec.format.scale
    step = i64(code.per_byte)

    @T.inline
    def steps(b, b_scale, bytes, scales, B, lead):
        for n, c in T.grid(N, cols):
            with T.sblock("b_bytes"):
                vn, vc = T.axis.remap("SS", [n, c])
                at = T.meta_var((*lead, *index_128x4(vn, vc, blocks)))
                bytes[vn, vc] = b_scale[at]
        for n, g, c in T.grid(N, cols // group, group):
            with T.sblock("block_scale"):
                vn, vg, vc = T.axis.remap("SSS", [n, g, c])
                scales[vn, vg, vc] = formats.decode_byte(scale, bytes[vn, vg * group + vc])
        for n, k in T.grid(N, K):
            with T.sblock("decode"):
                vn, vk = T.axis.remap("SS", [n, k])
                at = T.meta_var((*lead, vn, vk // step))
                by = T.meta_var(scales[vn, vk // block // group, vk // block % group])
                B[vn, vk] = code_value(code, b[at], vk, by, compute)

    return steps


def operand_dtype(compute: str) -> str:
    """Dtype that holds elements of the compute type: bfloat16 as its bits."""
    return "float32" if compute == "float32" else "uint16"


def gemm(spec: MmFp4, row_tile: int, compute: str = "float32", rows: int | None = None) -> PrimFunc:
    """Return the kernel ``(a[rows, ..], b, a_scale, b_scale, alpha, bias, ...) -> d[rows, N]``.

    Its parameters are those of ``spec.params()``.  ``rows`` None: symbolic, any number per call.
    """
    N, K, R, cols = i64(spec.n), i64(spec.k), i64(row_tile), i64(spec.scale_cols)
    a_bytes, b_bytes, scale_rows = i64(spec.a_bytes), i64(spec.b_bytes), i64(spec.scale_rows)
    groups = i64(spec.scale_cols // COLS_128X4)
    operand, from_a, from_b = operand_dtype(compute), a_steps(spec, compute), b_steps(spec, compute)

    def finished(value: PrimExpr, residual: Any, row: PrimExpr, col: PrimExpr) -> PrimExpr:
        made = activations.of(spec.activation, value)
        return made if residual is None else made + widen(residual[row, col])

    @T.prim_func(s_tir=True)
    def main(
        a_handle: T.handle,
        b: T.Buffer((N, b_bytes), "uint8"),
        a_scale_handle: T.handle,
        b_scale: T.Buffer((scale_rows, cols), "uint8"),
        alpha: T.Buffer((i64(1),), "float32"),
        bias: T.Buffer((N,), "float32"),
        residual_handle: T.handle,
        d_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        rows = T.int64()
        a = T.match_buffer(a_handle, (rows, a_bytes), "uint8")
        a_scale = T.match_buffer(a_scale_handle, padded_128x4(rows, cols), "uint8")
        if spec.residual:
            residual = T.match_buffer(residual_handle, (rows, N), spec.out_dtype)
        d = T.match_buffer(d_handle, (rows, N), spec.out_dtype)
        added = T.meta_var(residual if spec.residual else None)
        tiles = T.meta_var(tiles_of(rows, row_tile))
        a_scale_bytes = T.sblock_alloc_buffer((tiles, R, cols), "uint8")
        a_scales = T.sblock_alloc_buffer((tiles, R, cols), "float32")
        A = T.sblock_alloc_buffer((tiles, R, K), operand)
        b_scale_bytes = T.sblock_alloc_buffer((N, cols), "uint8")
        b_scales = T.sblock_alloc_buffer((N, groups, i64(COLS_128X4)), "float32")
        B = T.sblock_alloc_buffer((N, K), operand)
        C = T.sblock_alloc_buffer((tiles, R, N), "float32")
        source = T.meta_var(_every_row(row_tile, rows))
        from_a(a, a_scale, a_scale_bytes, a_scales, A, tiles, R, source)
        from_b(b, b_scale, b_scale_bytes, b_scales, B, ())
        for t, i, n, k in T.grid(tiles, R, N, K):
            with T.sblock("matmul"):
                vt, vi, vn, vk = T.axis.remap("SSSR", [t, i, n, k])
                with T.init():
                    C[vt, vi, vn] = T.float32(0)
                C[vt, vi, vn] = C[vt, vi, vn] + from_operand(A[vt, vi, vk]) * from_operand(
                    B[vn, vk]
                )
        for t, i, n in T.grid(tiles, R, N):
            with T.sblock("epilogue"):
                vt, vi, vn = T.axis.remap("SSS", [t, i, n])
                if vt * R + vi < rows:
                    d[vt * R + vi, vn] = formats.round_to(
                        spec.out_dtype,
                        finished(C[vt, vi, vn] * alpha[0] + bias[vn], added, vt * R + vi, vn),
                    )

    main = keep_params(main, [param.name for param in spec.params()])
    return main if rows is None else fix_shape(main, "a", (rows, spec.a_bytes))


def _every_row(row_tile: int, rows: PrimExpr) -> Source:
    """Each row of a tile, the last row instead of those beyond it."""

    def source(tile: PrimExpr, row: PrimExpr) -> tuple[PrimExpr, PrimExpr, PrimExpr]:
        at = tirx.Min(tile * i64(row_tile) + row, rows - i64(1))
        return at, at, tirx.const(True, "bool")

    return source
