"""Gated activations quantised to E2M1 with block scales, and quantise in FlashInfer's convention.

    a = activation(gate) * up, rounded once to 16 bits    (`blockscale.tir.activations`)
    or a = input                                          ("none")

"divide": scales and codes of a as in `quant.quantize`.  "flashinfer", in IEEE float32 with
gs the global scale and 1/6 rounded to float32:

    E4M3:   s = E4M3(amax * (gs * (1/6)));  code = E2M1(a * min(1 / (s * (1 / gs)), largest number))
    UE8M0:  s = the least power of two >= amax * (1/6), without gs;  code = E2M1(a * (1 / s))
    zero with the sign of a where amax (UE8M0: the scale byte) is 0

A block of zeros has the zero scale byte; a NaN makes its block's scale NaN and all its codes 7.

Bytes as input (`FP8`) become a = (value of the byte * (6 * (1 / gs))) rounded to float16, then

    s = E4M3 or UE8M0 of (gs * (amax * (1/6)));  code = E2M1(a * (gs * (1 / s))), zero where s is 0

A search (`four_over_six`) chooses among two scales.  "token" finds the global scale of each row,
from its largest magnitude top (NaNs ignored) and
the base, which stands where others have their global scale:

    gs = min((1 / base) / top, largest number), 1 where that is 0
    row_scale = 1 / gs, 0 where top is 0

Grouped: rows from ``mask[expert]`` on count as zeros and their codes are not stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.base.formats import E4M3, NUMBERS, UE8M0, first_with
from blockscale.specs import ActQuantize, Quantize
from blockscale.specs.fused import FP8
from blockscale.tir import activations, formats
from blockscale.tir.common import fix_shape, i64, keep_params, widen
from blockscale.tir.encode import SIXTH, bounded, clipped, magnitude, reciprocal, rounded
from blockscale.tir.fused.four_over_six import search_step
from blockscale.tir.quant.quantize import element_code, pack_codes, scale_byte
from blockscale.tir.scale_store import expert_store, scale_index, scale_shape

_RULE = {number.name: Quantize(first_with(number).name) for number in (E4M3, UE8M0)}


def block_byte(spec: ActQuantize, amax_bits: PrimExpr, g: PrimExpr) -> PrimExpr:
    """Scale byte (int32) of a block from the bits of its largest magnitude."""
    if spec.convention == "divide":
        return scale_byte(_RULE[spec.scale_format], amax_bits, g)
    amax, zero = formats.from_bits(amax_bits), formats.const(0, amax_bits, "int32")
    sixth = formats.const(SIXTH, amax, "float32")
    if spec.dtype == FP8:
        e8m0 = spec.scale_format == "ue8m0"
        return (formats.ue8m0_encode_ceil if e8m0 else formats.e4m3_encode)(g * (amax * sixth))
    if spec.scale_format == "ue8m0":
        return formats.ue8m0_encode_ceil(amax * sixth)
    byte = formats.e4m3_encode(amax * (g * sixth))
    return tirx.Select(amax_bits > zero, byte, zero)


def block_factor(spec: ActQuantize, amax_bits: PrimExpr, byte: PrimExpr, g: PrimExpr) -> PrimExpr:
    """What a block's values are divided by ("divide") or multiplied with ("flashinfer")."""
    if spec.convention == "divide":
        return formats.decode(NUMBERS[spec.scale_format], byte) * g
    zero = formats.const(0.0, byte, "float32")
    if spec.dtype == FP8:
        value = formats.decode(NUMBERS[spec.scale_format], byte)
        return tirx.Select(byte > formats.const(0, byte, "int32"), g * reciprocal(value), zero)
    if spec.scale_format == "ue8m0":
        power = reciprocal(formats.ue8m0_decode(byte))
        return tirx.Select(byte > formats.const(0, byte, "int32"), power, zero)
    inverse = bounded(formats.e4m3_decode(byte) * reciprocal(g))
    return tirx.Select(amax_bits > formats.const(0, byte, "int32"), inverse, zero)


def block_code(spec: ActQuantize, a: PrimExpr, factor: PrimExpr, byte: PrimExpr) -> PrimExpr:
    """E2M1 code (int32) of an element."""
    if spec.convention == "divide":
        return element_code(_RULE[spec.scale_format], a, factor, byte)
    return formats.e2m1_encode(a * factor)


def byte_value(byte: PrimExpr, g: PrimExpr) -> PrimExpr:
    """Return a, as float32, of a byte of the input."""
    six = formats.const(6.0, g, "float32") * reciprocal(g)
    return rounded("float16", formats.decode_byte(E4M3, byte) * six)


def row_factor(base: PrimExpr, top: PrimExpr) -> PrimExpr:
    """Return the global scale of a row from its largest magnitude ``top``."""
    zero, one = (formats.const(value, top, "float32") for value in (0.0, 1.0))
    found = clipped(reciprocal(base) / top)
    return tirx.Select(found > zero, found, one)


def row_scale(factor: PrimExpr, top: PrimExpr) -> PrimExpr:
    """Return what is stored for a row of that global scale."""
    zero = formats.const(0.0, top, "float32")
    return tirx.Select(top > zero, reciprocal(factor), zero)


def scale_place(spec: ActQuantize) -> Callable[[PrimExpr, PrimExpr], PrimExpr]:
    """Return the function from (expert, row) to the index of the global scale."""
    return lambda e, r: r if spec.scaling == "rows" else e


def _at(spec: ActQuantize) -> Callable[..., tuple[PrimExpr, ...]]:
    """Return the function from (expert, row, ...) to an index of a parameter."""
    return lambda e, *rest: (e, *rest) if spec.grouped else rest


def value_step(spec: ActQuantize, load: Callable[..., PrimExpr]) -> Any:
    """Step from the input to a; ``load(input, expert, row, column)``: an element as float32."""
    block = i64(spec.block)

    def value(x, e, r, col, cols, numbers):
        first = load(x, e, r, col)
        if not spec.gated:
            return first
        second = load(x, e, r, cols + col)
        return rounded(spec.dtype, activations.gated(spec.activation, first, second, numbers))

    @T.inline
    def activate(x, mask, a, experts, rows, cols, numbers):
        for e, r, b, k in T.grid(experts, rows, cols // block, block):
            with T.sblock("value"):
                ve, vr, vb, vk = T.axis.remap("SSSS", [e, r, b, k])
                if spec.grouped:
                    a[ve, vr, vb, vk] = T.if_then_else(
                        vr < T.Cast("int64", mask[ve]),
                        value(x, ve, vr, vb * block + vk, cols, numbers),
                        T.float32(0),
                    )
                else:
                    a[ve, vr, vb, vk] = value(x, ve, vr, vb * block + vk, cols, numbers)

    return activate


def encode_step(spec: ActQuantize, at: Callable[..., tuple[PrimExpr, ...]]) -> Any:
    """Step from a to scale bytes and packed codes, which lie where ``at`` says.

    ``row``: see `four_over_six.candidate_loss`.
    """
    block, half, two = i64(spec.block), i64(spec.block // 2), i64(2)
    g_at = scale_place(spec)
    search = search_step(spec, g_at)

    @T.inline
    def choose(a, g, amax, byte, factor, code, experts, rows, blocks):
        for e, r, b in T.grid(experts, rows, blocks):
            with T.sblock("scale"):
                ve, vr, vb = T.axis.remap("SSS", [e, r, b])
                byte[ve, vr, vb] = block_byte(spec, amax[ve, vr, vb], g[g_at(ve, vr)])
        for e, r, b in T.grid(experts, rows, blocks):
            with T.sblock("factor"):
                ve, vr, vb = T.axis.remap("SSS", [e, r, b])
                factor[ve, vr, vb] = block_factor(
                    spec, amax[ve, vr, vb], byte[ve, vr, vb], g[g_at(ve, vr)]
                )
        for e, r, b, k in T.grid(experts, rows, blocks, block):
            with T.sblock("code"):
                ve, vr, vb, vk = T.axis.remap("SSSS", [e, r, b, k])
                code[ve, vr, vb, vk] = block_code(
                    spec, a[ve, vr, vb, vk], factor[ve, vr, vb], byte[ve, vr, vb]
                )

    @T.inline
    def encode(
        a, g, mask, magnitude, amax, byte, factor, code, pair, packed, experts, rows, blocks, row
    ):
        for e, r, b, k in T.grid(experts, rows, blocks, block):
            with T.sblock("magnitude"):
                ve, vr, vb, vk = T.axis.remap("SSSS", [e, r, b, k])
                magnitude[ve, vr, vb, vk] = formats.abs_bits(a[ve, vr, vb, vk])
        for e, r, b, k in T.grid(experts, rows, blocks, block):
            with T.sblock("amax"):
                ve, vr, vb, vk = T.axis.remap("SSSR", [e, r, b, k])
                with T.init():
                    amax[ve, vr, vb] = 0
                amax[ve, vr, vb] = T.max(amax[ve, vr, vb], magnitude[ve, vr, vb, vk])
        if spec.search == "none":
            choose(a, g, amax, byte, factor, code, experts, rows, blocks)
        else:
            search(a, g, amax, row, byte, code, experts, rows, blocks)
        for e, r, b, j in T.grid(experts, rows, blocks, half):
            with T.sblock("pack"):
                ve, vr, vb, vj = T.axis.remap("SSSS", [e, r, b, j])
                pair[ve, vr, vb, vj] = pack_codes(
                    code[ve, vr, vb, vj * two], code[ve, vr, vb, vj * two + i64(1)]
                )
        for e, r, b, j in T.grid(experts, rows, blocks, half):
            with T.sblock("store_codes"):
                ve, vr, vb, vj = T.axis.remap("SSSS", [e, r, b, j])
                if spec.grouped:
                    if vr < T.Cast("int64", mask[ve]):
                        packed[at(ve, vr, vb * half + vj)] = pair[ve, vr, vb, vj]
                else:
                    packed[at(ve, vr, vb * half + vj)] = pair[ve, vr, vb, vj]

    return encode


def _row_step(spec: ActQuantize) -> Any:
    """Step from a row of the input to its largest magnitude, its global scale and row_scale."""
    block, one = i64(spec.block), i64(1)

    @T.inline
    def find(x, base, top, g, row_scale_out, r, blocks):
        part = T.sblock_alloc_buffer((block,), "int32")
        most = T.sblock_alloc_buffer((one,), "int32")
        for b, k in T.grid(blocks, block):
            with T.sblock("row_part"):
                vb, vk = T.axis.remap("RS", [b, k])
                with T.init():
                    part[vk] = 0
                part[vk] = T.max(part[vk], magnitude(widen(x[r, vb * block + vk])))
        for k in range(block):
            with T.sblock("row_most"):
                vk = T.axis.reduce(block, k)
                with T.init():
                    most[i64(0)] = 0
                most[i64(0)] = T.max(most[i64(0)], part[vk])
        with T.sblock("row_top"):
            top[i64(0)] = formats.from_bits(most[i64(0)])
        with T.sblock("row_factor"):
            g[i64(0)] = row_factor(base[i64(0)], top[i64(0)])
        with T.sblock("row_scale"):
            row_scale_out[r] = row_scale(g[i64(0)], top[i64(0)])

    return find


def act_kernel(spec: ActQuantize, shape: tuple[int, ...] | None, body: Any) -> PrimFunc:
    """Return the kernel of ``spec``, its parameters those of ``spec.params()``.

    ``shape`` is the input's; None lets the function take any.  ``body(input, g, mask, packed,
    block_scale, experts, rows, cols, numbers)`` fills it: ``mask`` is None without groups, and
    ``numbers`` are those of swiglu.  Of "token", ``g`` is (g, span, row_scale) instead.
    """
    at, block, halves = _at(spec), i64(spec.block), i64(2 if spec.gated else 1)
    g_at = scale_place(spec)

    @T.prim_func(s_tir=True)
    def main(
        input_handle: T.handle,
        mask_handle: T.handle,
        scale_handle: T.handle,
        alpha: T.float32,
        beta: T.float32,
        limit: T.float32,
        span: T.float32,
        packed_handle: T.handle,
        bytes_handle: T.handle,
        rows_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        rows, width = T.int64(), T.int64()
        experts = T.meta_var(T.int64() if spec.grouped else i64(1))
        cols = T.meta_var(width // halves if spec.gated else width)
        input = T.match_buffer(
            input_handle, at(experts, rows, width), "uint8" if spec.dtype == FP8 else spec.dtype
        )
        global_scale = T.match_buffer(scale_handle, (g_at(experts, rows),), "float32")
        packed = T.match_buffer(packed_handle, at(experts, rows, cols // i64(2)), "uint8")
        block_scale = T.match_buffer(
            bytes_handle, at(experts, *scale_shape(spec.layout, rows, cols // block)), "uint8"
        )
        if spec.finds_scale:
            row_scale = T.match_buffer(rows_handle, (rows,), "float32")
        if spec.grouped:
            mask = T.match_buffer(mask_handle, (experts,), "int32")
        used = T.meta_var(mask if spec.grouped else None)
        numbers = T.meta_var((alpha, beta, limit) if spec.activation == "swiglu" else ())
        g = T.meta_var((global_scale, span, row_scale) if spec.finds_scale else global_scale)
        body(input, g, used, packed, block_scale, experts, rows, cols, numbers)

    main = keep_params(main, [param.name for param in spec.params()])
    return main if shape is None else fix_shape(main, "input", shape)


def _buffers(spec: ActQuantize, *shape: PrimExpr) -> tuple[Any, ...]:
    """Allocate a and the steps of `encode_step` of blocks [experts, rows, blocks]."""
    each, half = (*shape, i64(spec.block)), (*shape, i64(spec.block // 2))
    kinds = [(each, "float32"), (each, "int32"), (shape, "int32"), (shape, "int32")]
    kinds += [(shape, "float32"), (each, "int32"), (half, "uint8")]
    return tuple(T.sblock_alloc_buffer(size, dtype) for size, dtype in kinds)


def _rows_body(spec: ActQuantize) -> Any:
    """Body of "token", for `act_kernel`: each row finds its global scale, then encodes."""
    block, one, zero = i64(spec.block), i64(1), i64(0)
    find, (_, pad) = _row_step(spec), expert_store(spec.layout, False)

    @T.inline
    def body(input, given, mask, packed, block_scale, experts, rows, cols, numbers):
        blocks = T.meta_var(cols // block)
        base, span, stored = T.meta_var(given)
        for r in range(rows):
            with T.sblock("row"):
                vr = T.axis.spatial(rows, r)
                top = T.sblock_alloc_buffer((one,), "float32")
                g = T.sblock_alloc_buffer((one,), "float32")
                find(input, base, top, g, stored, vr, blocks)
                with T.sblock("blocks"):
                    made = T.meta_var(_buffers(spec, one, one, blocks))
                    at = T.meta_var(lambda e, r, c: (vr, c))
                    row = T.meta_var((top[zero], span))
                    activate = T.meta_var(value_step(spec, lambda x, *p: widen(x[at(*p)])))
                    encode = T.meta_var(encode_step(spec, at))
                    activate(input, mask, made[0], one, one, cols, numbers)
                    encode(made[0], g, mask, *made[1:], packed, one, one, blocks, row)
                    for b in range(blocks):
                        with T.sblock("store_scale"):
                            vb = T.axis.spatial(blocks, b)
                            to = T.meta_var(scale_index(spec.layout, vr, vb, blocks))
                            block_scale[to] = T.Cast("uint8", made[3][zero, zero, vb])
        if spec.layout != "linear":
            pad(block_scale, experts, rows, blocks)

    return body


def act_quantize(spec: ActQuantize, shape: tuple[int, ...] | None = None) -> PrimFunc:
    """Return the kernel of ``spec``, its parameters those of ``spec.params()``.

    ``shape`` is the input's; None lets the function take any.
    """
    block, half = i64(spec.block), i64(spec.block // 2)
    at = _at(spec)
    if spec.finds_scale:
        return act_kernel(spec, shape, _rows_body(spec))
    g_at, encode = scale_place(spec), encode_step(spec, at)

    def value(given, e, r, col):
        x, g = given
        element = x[at(e, r, col)]
        return byte_value(element, g[g_at(e, r)]) if spec.dtype == FP8 else widen(element)

    activate = value_step(spec, value)
    store, pad = expert_store(spec.layout, spec.grouped)

    @T.inline
    def body(input, g, mask, packed, block_scale, experts, rows, cols, numbers):
        blocks = T.meta_var(cols // block)
        a = T.sblock_alloc_buffer((experts, rows, blocks, block), "float32")
        magnitude = T.sblock_alloc_buffer((experts, rows, blocks, block), "int32")
        amax = T.sblock_alloc_buffer((experts, rows, blocks), "int32")
        byte = T.sblock_alloc_buffer((experts, rows, blocks), "int32")
        factor = T.sblock_alloc_buffer((experts, rows, blocks), "float32")
        code = T.sblock_alloc_buffer((experts, rows, blocks, block), "int32")
        pair = T.sblock_alloc_buffer((experts, rows, blocks, half), "uint8")
        steps = T.meta_var((magnitude, amax, byte, factor, code, pair))
        activate((input, g), mask, a, experts, rows, cols, numbers)
        encode(a, g, mask, *steps, packed, experts, rows, blocks, ())
        store(byte, block_scale, experts, rows, blocks)
        if spec.layout != "linear":
            pad(block_scale, experts, rows, blocks)

    return act_kernel(spec, shape, body)
