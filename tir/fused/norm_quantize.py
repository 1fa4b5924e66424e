"""RMS norm of ``input (+ residual)``, quantised to E2M1 with block scales.

Per row of H elements, every step one IEEE float32 operation that rounds to nearest:

    h = input + residual;  residual_out = h rounded to 16 bits        (without residual: h = input)
    S = sum of h * h, of the h before that rounding:
        per 16 neighbours p[j] = h[j] * h[j] + h[j + 8] * h[j + 8], j = 0 .. 7, no fused product,
        ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7])); these sums are added in
        float64, where the order does not matter to S rounded to float32
    rstd = 1 / sqrt(S / H + eps)
    y = (h rounded to 16 bits * rstd) * weight;  y_out = y rounded to 16 bits
    codes and scales of y: `blockscale.tir.encode`, with gs = 1 / global_scale ("divide") or
        global_scale ("flashinfer", which ignores it if scales are UE8M0)

"flashinfer" without residual multiplies with the weight first, in 16 bits: y = (h * weight rounded
to 16 bits) * rstd.

``residual_out`` may be the very memory of ``residual``, so that these functions do not promise
``tirx.noalias``.  A row's residual is read into h before its residual_out is written, and no other
row reads it: a schedule must keep that (two threads that share a row included).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.specs import NormQuantize
from blockscale.tir import encode, formats
from blockscale.tir.common import fix_shape, i64, keep_params, widen
from blockscale.tir.quant.quantize import pack_codes
from blockscale.tir.scale_store import norm_store, scale_shape

GROUP = 16
"""Elements whose squares are summed in float32."""


def square_sum(h: Callable[[int], PrimExpr]) -> PrimExpr:
    """Sum of the squares of ``h(0) .. h(15)`` in the order that the module describes."""
    p = [h(j) * h(j) + h(j + 8) * h(j + 8) for j in range(8)]
    return ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]))


def factor(convention: str, global_scale: PrimExpr) -> PrimExpr:
    """Return the factor of the values."""
    return encode.reciprocal(global_scale) if convention == "divide" else global_scale


def normed(spec: NormQuantize, h: PrimExpr, rstd: PrimExpr, weight: PrimExpr) -> PrimExpr:
    """Return y of an element."""
    if spec.residual:
        return (encode.rounded(spec.dtype, h) * rstd) * widen(weight)
    if spec.convention == "flashinfer":
        return encode.rounded(spec.dtype, h * widen(weight)) * rstd
    return (h * rstd) * widen(weight)


def _norm_steps(spec: NormQuantize) -> tuple[Any, Any, Any, Any]:
    """Steps: h from the sum or the input, the row's rstd, y."""
    blocks, block, groups = i64(spec.blocks), i64(spec.block), i64(spec.block // GROUP)

    @T.inline
    def add(x, residual, h, residual_out, rows):
        for r, b, e in T.grid(rows, blocks, block):
            with T.sblock("add"):
                vr, vb, ve = T.axis.remap("SSS", [r, b, e])
                h[vr, vb, ve] = widen(x[vr, vb * block + ve]) + widen(residual[vr, vb * block + ve])
        for r, b, e in T.grid(rows, blocks, block):
            with T.sblock("residual"):
                vr, vb, ve = T.axis.remap("SSS", [r, b, e])
                residual_out[vr, vb * block + ve] = formats.round_to(spec.dtype, h[vr, vb, ve])

    @T.inline
    def take(x, h, rows):
        for r, b, e in T.grid(rows, blocks, block):
            with T.sblock("widen"):
                vr, vb, ve = T.axis.remap("SSS", [r, b, e])
                h[vr, vb, ve] = widen(x[vr, vb * block + ve])

    @T.inline
    def reduce(h, group_sum, total, rstd, eps, rows):
        for r, b, g in T.grid(rows, blocks, groups):
            with T.sblock("square_sum"):
                vr, vb, vg = T.axis.remap("SSS", [r, b, g])
                group_sum[vr, vb, vg] = square_sum(lambda j: h[vr, vb, vg * i64(GROUP) + i64(j)])
        for r, b, g in T.grid(rows, blocks, groups):
            with T.sblock("total"):
                vr, vb, vg = T.axis.remap("SRR", [r, b, g])
                with T.init():
                    total[vr] = T.float64(0)
                total[vr] = total[vr] + T.Cast("float64", group_sum[vr, vb, vg])
        for r in range(rows):
            with T.sblock("rstd"):
                vr = T.axis.spatial(rows, r)
                rstd[vr] = T.float32(1) / T.sqrt(
                    T.Cast("float32", total[vr]) / T.float32(spec.hidden) + eps
                )

    @T.inline
    def norm(h, weight, rstd, y, rows):
        for r, b, e in T.grid(rows, blocks, block):
            with T.sblock("norm"):
                vr, vb, ve = T.axis.remap("SSS", [r, b, e])
                y[vr, vb, ve] = normed(spec, h[vr, vb, ve], rstd[vr], weight[vb * block + ve])

    return add, take, reduce, norm


def _encode_steps(spec: NormQuantize) -> Any:
    """Step from y to scale bytes and packed codes."""
    blocks, block, half, two = i64(spec.blocks), i64(spec.block), i64(spec.block // 2), i64(2)
    scaled = spec.scaled

    def factor(gs: Any) -> PrimExpr | None:
        return gs[0] if scaled else None

    @T.inline
    def quantize(y, gs, magnitude, amax, byte, inverse, code, pair, packed, rows):
        for r, b, e in T.grid(rows, blocks, block):
            with T.sblock("magnitude"):
                vr, vb, ve = T.axis.remap("SSS", [r, b, e])
                magnitude[vr, vb, ve] = encode.magnitude(y[vr, vb, ve])
        for r, b, e in T.grid(rows, blocks, block):
            with T.sblock("amax"):
                vr, vb, ve = T.axis.remap("SSR", [r, b, e])
                with T.init():
                    amax[vr, vb] = -1
                amax[vr, vb] = T.max(amax[vr, vb], magnitude[vr, vb, ve])
        for r, b in T.grid(rows, blocks):
            with T.sblock("scale"):
                vr, vb = T.axis.remap("SS", [r, b])
                byte[vr, vb] = encode.scale_byte(spec.scale_format, amax[vr, vb], factor(gs))
        for r, b in T.grid(rows, blocks):
            with T.sblock("inverse"):
                vr, vb = T.axis.remap("SS", [r, b])
                inverse[vr, vb] = encode.inverse_scale(spec.scale_format, byte[vr, vb], factor(gs))
        for r, b, e in T.grid(rows, blocks, block):
            with T.sblock("code"):
                vr, vb, ve = T.axis.remap("SSS", [r, b, e])
                code[vr, vb, ve] = formats.e2m1_encode(y[vr, vb, ve] * inverse[vr, vb])
        for r, b, j in T.grid(rows, blocks, half):
            with T.sblock("pack"):
                vr, vb, vj = T.axis.remap("SSS", [r, b, j])
                pair[vr, vb, vj] = pack_codes(
                    code[vr, vb, vj * two], code[vr, vb, vj * two + i64(1)]
                )
        for r, b, j in T.grid(rows, blocks, half):
            with T.sblock("store_codes"):
                vr, vb, vj = T.axis.remap("SSS", [r, b, j])
                packed[vr, vb * half + vj] = pair[vr, vb, vj]

    return quantize


def _extras(spec: NormQuantize) -> tuple[Any, Any, Any]:
    """Steps: the factor of the values, y_out, the second set of scales."""
    blocks, block = i64(spec.blocks), i64(spec.block)

    @T.inline
    def take_factor(global_scale, gs):
        for i in range(i64(1)):
            with T.sblock("gs"):
                vi = T.axis.spatial(i64(1), i)
                gs[vi] = factor(spec.convention, global_scale[vi])

    @T.inline
    def store_y(y, y_out, rows):
        for r, b, e in T.grid(rows, blocks, block):
            with T.sblock("y_out"):
                vr, vb, ve = T.axis.remap("SSS", [r, b, e])
                y_out[vr, vb * block + ve] = formats.round_to(spec.dtype, y[vr, vb, ve])

    @T.inline
    def store_linear(byte, block_scale, rows):
        for r, b in T.grid(rows, blocks):
            with T.sblock("store_scale_linear"):
                vr, vb = T.axis.remap("SS", [r, b])
                block_scale[vr, vb] = T.Cast("uint8", byte[vr, vb])

    return take_factor, store_y, store_linear


def norm_kernel(spec: NormQuantize, rows: int | None, body: Any) -> PrimFunc:
    """Return the kernel of ``spec``, its parameters those of ``spec.params()``.

    None of ``rows`` lets the function take any number of them.  ``body(given, global_scale, eps,
    made, rows)`` fills it: given are input, residual and weight, made are packed, the scales, the
    linear scales, y_out and residual_out; those that there are not are None.
    """
    hidden, blocks, half = i64(spec.hidden), i64(spec.blocks), i64(spec.block // 2)
    layout = "linear" if spec.layout == "linear" else "128x4"

    @T.prim_func(s_tir=True)
    def main(
        input_handle: T.handle,
        residual_handle: T.handle,
        weight: T.Buffer((hidden,), spec.dtype),
        global_scale: T.Buffer((i64(1),), "float32"),
        eps: T.float32,
        packed_handle: T.handle,
        scale_handle: T.handle,
        linear_handle: T.handle,
        y_handle: T.handle,
        out_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": not spec.residual})
        rows = T.int64()
        input = T.match_buffer(input_handle, (rows, hidden), spec.dtype)
        packed = T.match_buffer(packed_handle, (rows, blocks * half), "uint8")
        block_scale = T.match_buffer(scale_handle, scale_shape(layout, rows, blocks), "uint8")
        if spec.residual:
            residual = T.match_buffer(residual_handle, (rows, hidden), spec.dtype)
            residual_out = T.match_buffer(out_handle, (rows, hidden), spec.dtype)
        if spec.y_out:
            y_out = T.match_buffer(y_handle, (rows, hidden), spec.dtype)
        if spec.layout == "both":
            block_scale_linear = T.match_buffer(linear_handle, (rows, blocks), "uint8")
        given = T.meta_var((input, residual if spec.residual else None, weight))
        made = T.meta_var(
            (
                packed,
                block_scale,
                block_scale_linear if spec.layout == "both" else None,
                y_out if spec.y_out else None,
                residual_out if spec.residual else None,
            )
        )
        body(given, global_scale, eps, made, rows)

    main = keep_params(main, [param.name for param in spec.params()])
    return main if rows is None else fix_shape(main, "input", (rows, spec.hidden))


def norm_quantize(spec: NormQuantize, rows: int | None = None) -> PrimFunc:
    """Return the kernel of ``spec``, its parameters those of ``spec.params()``.

    None of ``rows`` lets the function take any number of them.
    """
    blocks, block = i64(spec.blocks), i64(spec.block)
    half, groups = i64(spec.block // 2), i64(spec.block // GROUP)
    layout = "linear" if spec.layout == "linear" else "128x4"
    add, take, reduce, norm = _norm_steps(spec)
    quantize = _encode_steps(spec)
    take_factor, store_y, store_linear = _extras(spec)
    store, pad = norm_store(layout, spec.blocks)

    @T.inline
    def body(given, global_scale, eps, made, rows):
        input, residual, weight = T.meta_var(given)
        packed, block_scale, linear, y_out, residual_out = T.meta_var(made)
        group_sum = T.sblock_alloc_buffer((rows, blocks, groups), "float32")
        total = T.sblock_alloc_buffer((rows,), "float64")
        rstd = T.sblock_alloc_buffer((rows,), "float32")
        gs = T.sblock_alloc_buffer((i64(1),), "float32")
        y = T.sblock_alloc_buffer((rows, blocks, block), "float32")
        magnitude = T.sblock_alloc_buffer((rows, blocks, block), "int32")
        amax = T.sblock_alloc_buffer((rows, blocks), "int32")
        byte = T.sblock_alloc_buffer((rows, blocks), "int32")
        inverse = T.sblock_alloc_buffer((rows, blocks), "float32")
        code = T.sblock_alloc_buffer((rows, blocks, block), "int32")
        pair = T.sblock_alloc_buffer((rows, blocks, half), "uint8")
        h = T.sblock_alloc_buffer((rows, blocks, block), "float32")
        take_factor(global_scale, gs)
        if spec.residual:
            add(input, residual, h, residual_out, rows)
        else:
            take(input, h, rows)
        reduce(h, group_sum, total, rstd, eps, rows)
        norm(h, weight, rstd, y, rows)
        if spec.y_out:
            store_y(y, y_out, rows)
        quantize(y, gs, magnitude, amax, byte, inverse, code, pair, packed, rows)
        store(byte, block_scale, rows)
        if spec.layout == "both":
            store_linear(byte, linear, rows)
        if layout != "linear":
            pad(block_scale, rows)

    return norm_kernel(spec, rows, body)
