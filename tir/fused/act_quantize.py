"""Gated activations quantised to E2M1 with block scales, and quantise in FlashInfer's convention.

    a = activation(gate) * up, rounded once to 16 bits    (`blockscale.tir.activations`)
    or a = input                                          ("none")

"divide": scales and codes of a as in `quant.quantize`.  "flashinfer", in IEEE float32 with
gs the global scale and 1/6 rounded to float32:

    E4M3:   s = E4M3(amax * (gs * (1/6)));  code = E2M1(a * min(1 / (s * (1 / gs)), largest number))
    UE8M0:  s = the least power of two >= amax * (1/6), without gs;  code = E2M1(a * (1 / s))
    zero with the sign of a where amax (UE8M0: the scale byte) is 0

A block of zeros has the zero scale byte; a NaN makes its block's scale NaN and all its codes 7.

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
from blockscale.tir import activations, formats
from blockscale.tir.common import fix_shape, i64, keep_params, widen
from blockscale.tir.encode import SIXTH, reciprocal, rounded
from blockscale.tir.quant.quantize import element_code, pack_codes, scale_byte
from blockscale.tir.scale_store import expert_store, scale_shape

_RULE = {number.name: Quantize(first_with(number).name) for number in (E4M3, UE8M0)}
_LARGEST = 3.4028234663852886e38


def block_byte(spec: ActQuantize, amax_bits: PrimExpr, g: PrimExpr) -> PrimExpr:
    """Scale byte (int32) of a block from the bits of its largest magnitude."""
    if spec.convention == "divide":
        return scale_byte(_RULE[spec.scale_format], amax_bits, g)
    amax, zero = formats.from_bits(amax_bits), formats.const(0, amax_bits, "int32")
    sixth = formats.const(SIXTH, amax, "float32")
    if spec.scale_format == "ue8m0":
        return formats.ue8m0_encode_ceil(amax * sixth)
    byte = formats.e4m3_encode(amax * (g * sixth))
    return tirx.Select(amax_bits > zero, byte, zero)


def block_factor(spec: ActQuantize, amax_bits: PrimExpr, byte: PrimExpr, g: PrimExpr) -> PrimExpr:
    """What a block's values are divided by ("divide") or multiplied with ("flashinfer")."""
    if spec.convention == "divide":
        return formats.decode(NUMBERS[spec.scale_format], byte) * g
    zero = formats.const(0.0, byte, "float32")
    if spec.scale_format == "ue8m0":
        power = reciprocal(formats.ue8m0_decode(byte))
        return tirx.Select(byte > formats.const(0, byte, "int32"), power, zero)
    inverse = reciprocal(formats.e4m3_decode(byte) * reciprocal(g))
    largest = formats.const(_LARGEST, byte, "float32")
    inverse = tirx.Select(inverse > largest, largest, inverse)
    return tirx.Select(amax_bits > formats.const(0, byte, "int32"), inverse, zero)


def block_code(spec: ActQuantize, a: PrimExpr, factor: PrimExpr, byte: PrimExpr) -> PrimExpr:
    """E2M1 code (int32) of an element."""
    if spec.convention == "divide":
        return element_code(_RULE[spec.scale_format], a, factor, byte)
    return formats.e2m1_encode(a * factor)


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
    """Step from a to scale bytes and packed codes, which lie where ``at`` says."""
    block, half, two = i64(spec.block), i64(spec.block // 2), i64(2)

    @T.inline
    def encode(
        a, g, mask, magnitude, amax, byte, factor, code, pair, packed, experts, rows, blocks
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
        for e, r, b in T.grid(experts, rows, blocks):
            with T.sblock("scale"):
                ve, vr, vb = T.axis.remap("SSS", [e, r, b])
                byte[ve, vr, vb] = block_byte(spec, amax[ve, vr, vb], g[ve])
        for e, r, b in T.grid(experts, rows, blocks):
            with T.sblock("factor"):
                ve, vr, vb = T.axis.remap("SSS", [e, r, b])
                factor[ve, vr, vb] = block_factor(spec, amax[ve, vr, vb], byte[ve, vr, vb], g[ve])
        for e, r, b, k in T.grid(experts, rows, blocks, block):
            with T.sblock("code"):
                ve, vr, vb, vk = T.axis.remap("SSSS", [e, r, b, k])
                code[ve, vr, vb, vk] = block_code(
                    spec, a[ve, vr, vb, vk], factor[ve, vr, vb], byte[ve, vr, vb]
                )
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


def act_kernel(spec: ActQuantize, shape: tuple[int, ...] | None, body: Any) -> PrimFunc:
    """Return the kernel of ``spec``, its parameters those of ``spec.params()``.

    ``shape`` is the input's; None lets the function take any.  ``body(input, g, mask, packed,
    block_scale, experts, rows, cols, numbers)`` fills it: ``mask`` is None without groups, and
    ``numbers`` are those of swiglu.
    """
    at, block, halves = _at(spec), i64(spec.block), i64(2 if spec.gated else 1)

    @T.prim_func(s_tir=True)
    def main(
        input_handle: T.handle,
        mask_handle: T.handle,
        scale_handle: T.handle,
        alpha: T.float32,
        beta: T.float32,
        limit: T.float32,
        packed_handle: T.handle,
        bytes_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        rows, width = T.int64(), T.int64()
        experts = T.meta_var(T.int64() if spec.grouped else i64(1))
        cols = T.meta_var(width // halves if spec.gated else width)
        input = T.match_buffer(input_handle, at(experts, rows, width), spec.dtype)
        global_scale = T.match_buffer(scale_handle, (experts,), "float32")
        packed = T.match_buffer(packed_handle, at(experts, rows, cols // i64(2)), "uint8")
        block_scale = T.match_buffer(
            bytes_handle, at(experts, *scale_shape(spec.layout, rows, cols // block)), "uint8"
        )
        if spec.grouped:
            mask = T.match_buffer(mask_handle, (experts,), "int32")
        used = T.meta_var(mask if spec.grouped else None)
        numbers = T.meta_var((alpha, beta, limit) if spec.activation == "swiglu" else ())
        body(input, global_scale, used, packed, block_scale, experts, rows, cols, numbers)

    main = keep_params(main, [param.name for param in spec.params()])
    return main if shape is None else fix_shape(main, "input", shape)


def act_quantize(spec: ActQuantize, shape: tuple[int, ...] | None = None) -> PrimFunc:
    """Return the kernel of ``spec``, its parameters those of ``spec.params()``.

    ``shape`` is the input's; None lets the function take any.
    """
    block, half = i64(spec.block), i64(spec.block // 2)
    at = _at(spec)
    activate = value_step(spec, lambda x, *place: widen(x[at(*place)]))
    encode = encode_step(spec, at)
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
        activate(input, mask, a, experts, rows, cols, numbers)
        encode(a, g, mask, *steps, packed, experts, rows, blocks)
        store(byte, block_scale, experts, rows, blocks)
        if spec.layout != "linear":
            pad(block_scale, experts, rows, blocks)

    return act_kernel(spec, shape, body)
