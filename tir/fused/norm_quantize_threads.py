"""`norm_quantize` row by row and block by block, as GPUs compute it: the same bits.

A block "row" holds the steps of a row, in it "sum" and "encode" those of a block of elements, so
that a schedule divides blocks among threads and a thread keeps what it computes.  Every load is
written before the first sum.  Where scales have padding, the loop over rows goes on to the end of
the last tile: "pad" writes the zeros of a row that is none, and those beside a row that is one.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.specs import NormQuantize
from blockscale.tir import encode, formats
from blockscale.tir.common import i64, widen
from blockscale.tir.fused.norm_quantize import GROUP, factor, norm_kernel, normed, square_sum
from blockscale.tir.quant.quantize import pack_codes
from blockscale.tir.scale_store import scale_index, scale_shape


def _load_step(spec: NormQuantize, name: str) -> Any:
    """Step, its block called ``name``, that loads a row of a tensor; ``row`` None: a vector."""
    blocks, block = i64(spec.blocks), i64(spec.block)

    @T.inline
    def load(x, raw, row):
        for b, e in T.grid(blocks, block):
            with T.sblock(name):
                vb, ve = T.axis.remap("SS", [b, e])
                at = T.meta_var(vb * block + ve)
                raw[vb, ve] = x[at] if row is None else x[row, at]

    return load


def _sum_steps(spec: NormQuantize) -> tuple[Any, Any, Any, Any]:
    """Steps: h; what is kept of it; what a block adds to the sum of squares; the row's rstd."""
    blocks, block, groups = i64(spec.blocks), i64(spec.block), i64(spec.block // GROUP)

    @T.inline
    def take(x, old, h):
        for b, e in T.grid(blocks, block):
            with T.sblock("h"):
                vb, ve = T.axis.remap("SS", [b, e])
                if spec.residual:
                    h[vb, ve] = widen(x[vb, ve]) + widen(old[vb, ve])
                else:
                    h[vb, ve] = widen(x[vb, ve])

    @T.inline
    def keep(h, kept):
        for b, e in T.grid(blocks, block):
            with T.sblock("residual"):
                vb, ve = T.axis.remap("SS", [b, e])
                kept[vb * block + ve] = formats.round_to(spec.dtype, h[vb, ve])

    @T.inline
    def add_up(h, group_sum, b):
        for g in range(groups):
            with T.sblock("square_sum"):
                vg = T.axis.spatial(groups, g)
                group_sum[b, vg] = square_sum(lambda j: h[b, vg * i64(GROUP) + i64(j)])

    @T.inline
    def reduce(group_sum, total, rstd, eps):
        for b, g in T.grid(blocks, groups):
            with T.sblock("total"):
                vb, vg = T.axis.remap("RR", [b, g])
                with T.init():
                    total[i64(0)] = T.float64(0)
                total[i64(0)] = total[i64(0)] + T.Cast("float64", group_sum[vb, vg])
        with T.sblock("rstd"):
            rstd[i64(0)] = T.float32(1) / T.sqrt(
                T.Cast("float32", total[i64(0)]) / T.float32(spec.hidden) + eps
            )

    return take, keep, add_up, reduce


def _scale_steps(spec: NormQuantize) -> tuple[Any, Any]:
    """Steps: the factor of the values, y, scale and inverse of a block."""
    block = i64(spec.block)
    scaled = spec.scaled

    @T.inline
    def take_factor(global_scale, gs):
        for i in range(i64(1)):
            with T.sblock("gs"):
                vi = T.axis.spatial(i64(1), i)
                gs[vi] = factor(spec.convention, global_scale[vi])

    @T.inline
    def scale(h, w, rstd, gs, y, magnitude, amax, byte, inverse, b):
        for e in range(block):
            with T.sblock("norm"):
                ve = T.axis.spatial(block, e)
                at = T.meta_var((ve,) if len(w.shape) == 1 else (b, ve))
                y[ve] = normed(spec, h[b, ve], rstd[i64(0)], w[at])
        for e in range(block):
            with T.sblock("magnitude"):
                ve = T.axis.spatial(block, e)
                magnitude[ve] = encode.magnitude(y[ve])
        for e in range(block):
            with T.sblock("amax"):
                ve = T.axis.reduce(block, e)
                with T.init():
                    amax[i64(0)] = -1
                amax[i64(0)] = T.max(amax[i64(0)], magnitude[ve])
        for i in range(i64(1)):
            with T.sblock("scale"):
                vi = T.axis.spatial(i64(1), i)
                byte[vi] = encode.scale_byte(
                    spec.scale_format, amax[vi], gs[i64(0)] if scaled else None
                )
        for i in range(i64(1)):
            with T.sblock("inverse"):
                vi = T.axis.spatial(i64(1), i)
                inverse[vi] = encode.inverse_scale(
                    spec.scale_format, byte[vi], gs[i64(0)] if scaled else None
                )

    return take_factor, scale


def _store_steps(spec: NormQuantize) -> tuple[Any, Any, Any]:
    """Steps: codes and y_out of a block; a row of residual_out; the padding of a row of scales."""
    blocks, block, half, two = i64(spec.blocks), i64(spec.block), i64(spec.block // 2), i64(2)

    @T.inline
    def store(y, inverse, code, pair, y_out, packed, row, b):
        if spec.y_out:
            for e in range(block):
                with T.sblock("y_out"):
                    ve = T.axis.spatial(block, e)
                    y_out[row, b * block + ve] = formats.round_to(spec.dtype, y[ve])
        for e in range(block):
            with T.sblock("code"):
                ve = T.axis.spatial(block, e)
                code[ve] = formats.e2m1_encode(y[ve] * inverse[i64(0)])
        for j in range(half):
            with T.sblock("pack"):
                vj = T.axis.spatial(half, j)
                pair[vj] = pack_codes(code[vj * two], code[vj * two + i64(1)])
        for j in range(half):
            with T.sblock("store_codes"):
                vj = T.axis.spatial(half, j)
                packed[row, b * half + vj] = pair[vj]

    @T.inline
    def store_row(kept, residual_out, row):
        for i in range(i64(spec.hidden)):
            with T.sblock("store_residual"):
                vi = T.axis.spatial(i64(spec.hidden), i)
                residual_out[row, vi] = kept[vi]

    @T.inline
    def pad(block_scale, r, rows):
        size = T.meta_var(scale_shape("128x4", rows, blocks))
        for b in range(size[1]):
            with T.sblock("pad"):
                vr = T.axis.spatial(size[0], r)
                vb = T.axis.spatial(size[1], b)
                T.reads()
                T.writes()
                to = T.meta_var(scale_index("128x4", vr, vb, blocks))
                if vr >= rows or vb >= blocks:
                    block_scale[to[0], to[1]] = T.uint8(0)

    return store, store_row, pad


def norm_rows(spec: NormQuantize, rows: int | None = None, late_weight: bool = False) -> PrimFunc:
    """Return the kernel of ``spec``, its parameters those of ``spec.params()``.

    None of ``rows`` lets the function take any number of them.  ``late_weight``: weights are loaded
    block by block after the row's reduction, which spares registers, and not before it.
    """
    hidden, blocks, block = i64(spec.hidden), i64(spec.blocks), i64(spec.block)
    half, groups, one = i64(spec.block // 2), i64(spec.block // GROUP), i64(1)
    layout = "linear" if spec.layout == "linear" else "128x4"
    load_input, load_residual, load_weight = (
        _load_step(spec, name) for name in ("load_input", "load_residual", "load_weight")
    )
    (take, keep, add_up, reduce), (take_factor, scale) = _sum_steps(spec), _scale_steps(spec)
    store, store_row, pad = _store_steps(spec)

    @T.inline
    def body(given, global_scale, eps, made, rows):
        input, residual, weight = T.meta_var(given)
        packed, block_scale, linear, y_out, residual_out = T.meta_var(made)
        for r in range(scale_shape(layout, rows, blocks)[0]):
            with T.sblock("row"):
                vr = T.axis.spatial(rows, r)
                if layout != "linear":
                    T.where(r < rows)
                x = T.sblock_alloc_buffer((blocks, block), spec.dtype)
                old = T.sblock_alloc_buffer((blocks, block), spec.dtype)
                if not late_weight:
                    w = T.sblock_alloc_buffer((blocks, block), spec.dtype)
                h = T.sblock_alloc_buffer((blocks, block), "float32")
                group_sum = T.sblock_alloc_buffer((blocks, groups), "float32")
                total = T.sblock_alloc_buffer((one,), "float64")
                rstd = T.sblock_alloc_buffer((one,), "float32")
                gs = T.sblock_alloc_buffer((one,), "float32")
                load_input(input, x, vr)
                if spec.residual:
                    load_residual(residual, old, vr)
                if not late_weight:
                    load_weight(weight, w, None)
                take_factor(global_scale, gs)
                take(x, old, h)
                if spec.residual:
                    kept = T.sblock_alloc_buffer((hidden,), spec.dtype)
                    keep(h, kept)
                    store_row(kept, residual_out, vr)
                for b in range(blocks):
                    with T.sblock("sum"):
                        vb = T.axis.spatial(blocks, b)
                        add_up(h, group_sum, vb)
                reduce(group_sum, total, rstd, eps)
                for b in range(blocks):
                    with T.sblock("encode"):
                        vb = T.axis.spatial(blocks, b)
                        y = T.sblock_alloc_buffer((block,), "float32")
                        magnitude = T.sblock_alloc_buffer((block,), "int32")
                        amax = T.sblock_alloc_buffer((one,), "int32")
                        byte = T.sblock_alloc_buffer((one,), "int32")
                        inverse = T.sblock_alloc_buffer((one,), "float32")
                        code = T.sblock_alloc_buffer((block,), "int32")
                        pair = T.sblock_alloc_buffer((half,), "uint8")
                        if late_weight:
                            part = T.sblock_alloc_buffer((block,), spec.dtype)
                            for e in range(block):
                                with T.sblock("load_weight"):
                                    ve = T.axis.spatial(block, e)
                                    part[ve] = weight[vb * block + ve]
                        weights = T.meta_var(part if late_weight else w)
                        scale(h, weights, rstd, gs, y, magnitude, amax, byte, inverse, vb)
                        store(y, inverse, code, pair, y_out, packed, vr, vb)
                        with T.sblock("store_scale"):
                            to = T.meta_var(scale_index(layout, vr, vb, blocks))
                            block_scale[to[0], to[1]] = T.Cast("uint8", byte[i64(0)])
                        if spec.layout == "both":
                            with T.sblock("store_scale_linear"):
                                linear[vr, vb] = T.Cast("uint8", byte[i64(0)])
            if layout != "linear":
                pad(block_scale, r, rows)

    return norm_kernel(spec, rows, body)
