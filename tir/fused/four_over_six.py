"""Block scales by search: of a block's maximum over 6, or of that over 4 where it errs less.

In IEEE float32, with amax the block's maximum, gs its global scale and x an element:

    six = E4M3((amax / 6) * gs);  four = E4M3(((amax / 6) * gs) * 1.5)
    of each: code = E2M1(x * min(1 / (s * (1 / gs)), largest number))
    error = sum of |d| or d * d of the 16 elements, in their order, with the difference d

        "mae", "mse":                (code * s) * (1 / gs) - x
                                     ((code * s) * row maximum) / span - x   ("token", see there)
        "mae_scaled", "mse_scaled":  code * s - x * gs

    four where its error is less, else six; a block of zeros has scale byte 0 and codes 0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T

from blockscale.specs import ActQuantize
from blockscale.tir import formats
from blockscale.tir.common import i64, widen
from blockscale.tir.encode import bounded, reciprocal
from blockscale.tir.gemm.linear import weight_value
from blockscale.tir.quant.quantize import pack_codes

MOST = {"six": 1.0, "four": 1.5}
"""The candidates, in the order in which they are tried, and what their scales are multiplied by."""


def candidate_byte(name: str, amax_bits: PrimExpr, g: PrimExpr) -> PrimExpr:
    """Scale byte (int32) of a candidate."""
    largest = formats.from_bits(amax_bits)
    s = (largest / formats.const(6.0, largest, "float32")) * g
    more = MOST[name]
    return formats.e4m3_encode(s if more == 1.0 else s * formats.const(more, s, "float32"))


def candidate_factor(value: PrimExpr, g: PrimExpr) -> PrimExpr:
    """What a block's values are multiplied with, from the value of its scale byte."""
    return bounded(value * reciprocal(g))


def _as_it_is(product: PrimExpr) -> PrimExpr:
    """Return the product: nvcc fuses it with no sum (``--fmad=false``)."""
    return product


def _fenced(product: PrimExpr) -> PrimExpr:
    """Return the product, rounded: LLVM would make it and a sum one operation, where FMA is."""
    return T.call_llvm_pure_intrin("float32", "llvm.arithmetic.fence.f32", product)


def candidate_loss(
    spec: ActQuantize,
    weighed: PrimExpr,
    x: PrimExpr,
    g: PrimExpr,
    row: tuple[PrimExpr, ...],
    rounded: Callable[[PrimExpr], PrimExpr] = _as_it_is,
) -> PrimExpr:
    """What an element adds to the error of a candidate; ``weighed``: code times scale.

    ``row``: maximum and span of "token", else empty.  ``rounded``: keeps a product out of sums.
    """
    if spec.search.endswith("_scaled"):
        difference = weighed - rounded(x * g)
    elif row:
        top, span = row
        difference = (weighed * top) / span - x
    else:
        difference = rounded(weighed * reciprocal(g)) - x
    if spec.search.startswith("mse"):
        return rounded(difference * difference)
    return formats.from_bits(formats.abs_bits(difference))


def chosen(amax_bits: PrimExpr, errors: list[PrimExpr], values: list[PrimExpr]) -> PrimExpr:
    """Return the value (int32) of the better candidate; 0 of a block of zeros."""
    zero, (six, four) = formats.const(0, amax_bits, "int32"), values
    return tirx.Select(amax_bits > zero, tirx.Select(errors[1] < errors[0], four, six), zero)


def _candidate_step(spec: ActQuantize, g_at: Callable[..., PrimExpr], name: str) -> Any:
    """Step of `search_step`: byte, codes and error of a candidate."""
    block = i64(spec.block)
    # The parser keeps the first text that an f-string in a T.inline had.
    byte_block, value_block, factor_block, code_block, loss_block, error_block = (
        f"{kind}_{name}" for kind in ("byte", "value", "factor", "code", "loss", "error")
    )

    @T.inline
    def candidate(a, g, amax, row, made, experts, rows, blocks):
        byte, value, factor, code, loss, error = T.meta_var(made)
        for e, r, b in T.grid(experts, rows, blocks):
            with T.sblock(byte_block):
                ve, vr, vb = T.axis.remap("SSS", [e, r, b])
                byte[ve, vr, vb] = candidate_byte(name, amax[ve, vr, vb], g[g_at(ve, vr)])
        for e, r, b in T.grid(experts, rows, blocks):
            with T.sblock(value_block):
                ve, vr, vb = T.axis.remap("SSS", [e, r, b])
                value[ve, vr, vb] = formats.e4m3_decode(byte[ve, vr, vb])
        for e, r, b in T.grid(experts, rows, blocks):
            with T.sblock(factor_block):
                ve, vr, vb = T.axis.remap("SSS", [e, r, b])
                factor[ve, vr, vb] = candidate_factor(value[ve, vr, vb], g[g_at(ve, vr)])
        for e, r, b, k in T.grid(experts, rows, blocks, block):
            with T.sblock(code_block):
                ve, vr, vb, vk = T.axis.remap("SSSS", [e, r, b, k])
                code[ve, vr, vb, vk] = formats.e2m1_encode(a[ve, vr, vb, vk] * factor[ve, vr, vb])
        for e, r, b, k in T.grid(experts, rows, blocks, block):
            with T.sblock(loss_block):
                ve, vr, vb, vk = T.axis.remap("SSSS", [e, r, b, k])
                loss[ve, vr, vb, vk] = candidate_loss(
                    spec,
                    formats.e2m1_decode(code[ve, vr, vb, vk]) * value[ve, vr, vb],
                    a[ve, vr, vb, vk],
                    g[g_at(ve, vr)],
                    row,
                    _fenced,
                )
        for e, r, b, k in T.grid(experts, rows, blocks, block):
            with T.sblock(error_block):
                ve, vr, vb, vk = T.axis.remap("SSSR", [e, r, b, k])
                with T.init():
                    error[ve, vr, vb] = T.float32(0)
                error[ve, vr, vb] = error[ve, vr, vb] + loss[ve, vr, vb, vk]

    return candidate


def search_step(spec: ActQuantize, g_at: Callable[..., PrimExpr]) -> Any:
    """Step of a CPU from a and amax to scale bytes and codes of all blocks.

    ``g_at``: index of the global scale from (expert, row).
    """
    block = i64(spec.block)
    try_six, try_four = (_candidate_step(spec, g_at, name) for name in MOST)

    @T.inline
    def search(a, g, amax, row, byte, code, experts, rows, blocks):
        six = T.meta_var(_candidate_buffers(experts, rows, blocks, block))
        four = T.meta_var(_candidate_buffers(experts, rows, blocks, block))
        try_six(a, g, amax, row, six, experts, rows, blocks)
        try_four(a, g, amax, row, four, experts, rows, blocks)
        for e, r, b in T.grid(experts, rows, blocks):
            with T.sblock("scale"):
                ve, vr, vb = T.axis.remap("SSS", [e, r, b])
                byte[ve, vr, vb] = chosen(
                    amax[ve, vr, vb],
                    [six[5][ve, vr, vb], four[5][ve, vr, vb]],
                    [six[0][ve, vr, vb], four[0][ve, vr, vb]],
                )
        for e, r, b, k in T.grid(experts, rows, blocks, block):
            with T.sblock("code"):
                ve, vr, vb, vk = T.axis.remap("SSSS", [e, r, b, k])
                code[ve, vr, vb, vk] = chosen(
                    amax[ve, vr, vb],
                    [six[5][ve, vr, vb], four[5][ve, vr, vb]],
                    [six[3][ve, vr, vb, vk], four[3][ve, vr, vb, vk]],
                )

    return search


def _candidate_buffers(*shape: PrimExpr) -> tuple[Any, ...]:
    """Allocate byte, value, factor, code, loss and error of the blocks of ``shape``."""
    one, each = shape[:-1], shape
    scalars = [(one, dtype) for dtype in ("int32", "float32", "float32")]
    kinds = [*scalars, (each, "int32"), (each, "float32"), (one, "float32")]
    return tuple(T.sblock_alloc_buffer(size, dtype) for size, dtype in kinds)


def _candidate_threads(spec: ActQuantize, name: str) -> Any:
    """Step of `search_threads`: byte, codes and error of a candidate."""
    block, half, two, one = i64(spec.block), i64(spec.block // 2), i64(2), i64(1)
    # The parser keeps the first text that an f-string in a T.inline had.
    byte_block, value_block, factor_block, code_block, pack_block, weigh_block, error_block = (
        f"{kind}_{name}" for kind in ("byte", "value", "factor", "code", "pack", "weigh", "error")
    )

    @T.inline
    def candidate(a, g, amax, row, made, e):
        byte, value, factor, code, pair, weighed, error = T.meta_var(made)
        for i in range(one):
            with T.sblock(byte_block):
                vi = T.axis.spatial(one, i)
                byte[vi] = candidate_byte(name, amax[vi], g[e])
        for i in range(one):
            with T.sblock(value_block):
                vi = T.axis.spatial(one, i)
                value[vi] = formats.e4m3_decode(byte[vi])
        for i in range(one):
            with T.sblock(factor_block):
                vi = T.axis.spatial(one, i)
                factor[vi] = candidate_factor(value[vi], g[e])
        for k in range(block):
            with T.sblock(code_block):
                vk = T.axis.spatial(block, k)
                code[vk] = formats.e2m1_encode(widen(a[vk]) * factor[i64(0)])
        for j in range(half):
            with T.sblock(pack_block):
                vj = T.axis.spatial(half, j)
                pair[vj] = pack_codes(code[vj * two], code[vj * two + i64(1)])
        for k in range(block):
            with T.sblock(weigh_block):
                vk = T.axis.spatial(block, k)
                weighed[vk] = weight_value(pair[vk // two], vk, value[i64(0)], "float32")
        for k in range(block):
            with T.sblock(error_block):
                vk = T.axis.reduce(block, k)
                with T.init():
                    error[i64(0)] = T.float32(0)
                error[i64(0)] = error[i64(0)] + candidate_loss(
                    spec, weighed[vk], widen(a[vk]), g[e], row
                )

    return candidate


def search_threads(spec: ActQuantize) -> Any:
    """Step of a GPU's thread from a block of a and its amax to scale byte and packed codes."""
    block, half, one = i64(spec.block), i64(spec.block // 2), i64(1)
    try_six, try_four = (_candidate_threads(spec, name) for name in MOST)

    @T.inline
    def search(a, g, amax, row, byte, pair, e):
        six = T.meta_var(_thread_buffers(block, half, one))
        four = T.meta_var(_thread_buffers(block, half, one))
        try_six(a, g, amax, row, six, e)
        try_four(a, g, amax, row, four, e)
        for i in range(one):
            with T.sblock("scale"):
                vi = T.axis.spatial(one, i)
                byte[vi] = chosen(amax[vi], [six[6][vi], four[6][vi]], [six[0][vi], four[0][vi]])
        for j in range(half):
            with T.sblock("pack"):
                vj = T.axis.spatial(half, j)
                pair[vj] = T.Cast(
                    "uint8",
                    chosen(
                        amax[i64(0)],
                        [six[6][i64(0)], four[6][i64(0)]],
                        [T.Cast("int32", six[4][vj]), T.Cast("int32", four[4][vj])],
                    ),
                )

    return search


def _thread_buffers(block: PrimExpr, half: PrimExpr, one: PrimExpr) -> tuple[Any, ...]:
    """Allocate byte, value, factor, code, pair, weighed and error of one block."""
    scalars = [(one, dtype) for dtype in ("int32", "float32", "float32")]
    blocks = [(block, "int32"), (half, "uint8"), (block, "float32")]
    kinds = [*scalars, *blocks, (one, "float32")]
    return tuple(T.sblock_alloc_buffer((size,), dtype) for size, dtype in kinds)
