"""`act_quantize` block by block, as GPUs compute it.

A block "block" holds the steps of a block of elements, from its loads to its last store: a thread
computes one.  Where scales have padding, the loops go on to the end of the last tiles, and "pad"
writes the zeros.  Rows from ``mask[expert]`` on are not read.  Between the steps the values are 16
bits wide, as they are rounded.

Of "token" a block "row" holds the steps of a row, which `ROW_THREADS` threads share: each finds the
largest magnitude of its blocks, "total" that of the row; then each encodes its blocks, which it
loads again, from a cache.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T
from tvm.tirx import Buffer, PrimFunc

from blockscale.specs import ActQuantize
from blockscale.specs.fused import FP8
from blockscale.tir import activations, formats
from blockscale.tir.common import i64, tiles_of, widen
from blockscale.tir.encode import magnitude
from blockscale.tir.fused.act_quantize import (
    act_kernel,
    block_byte,
    block_code,
    block_factor,
    byte_value,
    row_factor,
    row_scale,
    scale_place,
)
from blockscale.tir.fused.four_over_six import search_threads
from blockscale.tir.quant.quantize import pack_codes
from blockscale.tir.scale_store import scale_index, scale_shape

NUMBERS = 3
"""Numbers of "swiglu"."""

ROW_THREADS = 256
"""Threads of a row of "token"."""


def activated(
    activation: str, dtype: str, gate: PrimExpr, up: PrimExpr, numbers: Buffer | None
) -> PrimExpr:
    """Return the gated activation of two elements, rounded to ``dtype``."""
    given = [] if numbers is None else [numbers[i64(i)] for i in range(NUMBERS)]
    value = activations.gated(activation, widen(gate), widen(up), given)
    return formats.round_to(dtype, value)


def _load_step(spec: ActQuantize, name: str = "load_input") -> Any:
    """Step, its block called ``name``, that loads a block of the input."""
    block = i64(spec.block)

    @T.inline
    def load(x, raw, at):
        for k in range(block):
            with T.sblock(name):
                vk = T.axis.spatial(block, k)
                raw[vk] = x[at(vk)]

    return load


def _gated_step(spec: ActQuantize) -> Any:
    """Step that loads a block of gate and of up, and makes it one of a."""
    block, swiglu = i64(spec.block), spec.activation == "swiglu"

    @T.inline
    def activate(x, gate, up, numbers, a, at, cols, given):
        for k in range(block):
            with T.sblock("load_gate"):
                vk = T.axis.spatial(block, k)
                gate[vk] = x[at(vk)]
        for k in range(block):
            with T.sblock("load_up"):
                vk = T.axis.spatial(block, k)
                up[vk] = x[at(cols + vk)]
        if swiglu:
            with T.sblock("numbers"):
                numbers[i64(0)] = given[0]
                numbers[i64(1)] = given[1]
                numbers[i64(2)] = given[2]
        for k in range(block):
            with T.sblock("value"):
                vk = T.axis.spatial(block, k)
                a[vk] = activated(spec.activation, spec.dtype, gate[vk], up[vk], numbers)

    return activate


def _bytes_step(spec: ActQuantize) -> Any:
    """Step from bytes of the input to a block of a."""
    block = i64(spec.block)

    @T.inline
    def widened(raw, g, a, e):
        for k in range(block):
            with T.sblock("value"):
                vk = T.axis.spatial(block, k)
                a[vk] = T.Cast("float16", byte_value(raw[vk], g[e]))

    return widened


def amax_step(size: int, first: str = "magnitude", second: str = "amax") -> Any:
    """Step from a block of ``size`` elements to the bits of its largest magnitude, int32 [1].

    ``first``, ``second``: names of its blocks.
    """
    block = i64(size)

    @T.inline
    def largest(a, magnitude, amax):
        for k in range(block):
            with T.sblock(first):
                vk = T.axis.spatial(block, k)
                magnitude[vk] = formats.abs_bits(widen(a[vk]))
        for k in range(block):
            with T.sblock(second):
                vk = T.axis.reduce(block, k)
                with T.init():
                    amax[i64(0)] = 0
                amax[i64(0)] = T.max(amax[i64(0)], magnitude[vk])

    return largest


def encode_step(spec: ActQuantize) -> Any:
    """Step from a block of a to its scale byte and packed codes.

    ``e``: index of its global scale.  ``row``: see `four_over_six.candidate_loss`.
    """
    block, half, two = i64(spec.block), i64(spec.block // 2), i64(2)
    largest, search = amax_step(spec.block), search_threads(spec)

    @T.inline
    def choose(a, g, amax, byte, factor, code, pair, e):
        for i in range(i64(1)):
            with T.sblock("scale"):
                vi = T.axis.spatial(i64(1), i)
                byte[vi] = block_byte(spec, amax[vi], g[e])
        for i in range(i64(1)):
            with T.sblock("factor"):
                vi = T.axis.spatial(i64(1), i)
                factor[vi] = block_factor(spec, amax[vi], byte[vi], g[e])
        for k in range(block):
            with T.sblock("code"):
                vk = T.axis.spatial(block, k)
                code[vk] = block_code(spec, widen(a[vk]), factor[i64(0)], byte[i64(0)])
        for j in range(half):
            with T.sblock("pack"):
                vj = T.axis.spatial(half, j)
                pair[vj] = pack_codes(code[vj * two], code[vj * two + i64(1)])

    @T.inline
    def encode(a, g, magnitude, amax, byte, factor, code, pair, e, row):
        largest(a, magnitude, amax)
        if spec.search == "none":
            choose(a, g, amax, byte, factor, code, pair, e)
        else:
            search(a, g, amax, row, byte, pair, e)

    return encode


def _store_steps(spec: ActQuantize, at: Any) -> tuple[Any, Any]:
    """Steps: store a block's codes and scale; write the zeros of a place without one."""
    half = i64(spec.block // 2)

    def place(e: PrimExpr, r: PrimExpr, b: PrimExpr, blocks: PrimExpr) -> tuple[PrimExpr, ...]:
        return at(e, *scale_index(spec.layout, r, b, blocks))

    @T.inline
    def store(pair, byte, packed, block_scale, e, r, b, blocks):
        for j in range(half):
            with T.sblock("store_codes"):
                vj = T.axis.spatial(half, j)
                packed[at(e, r, b * half + vj)] = pair[vj]
        with T.sblock("store_scale"):
            block_scale[place(e, r, b, blocks)] = T.Cast("uint8", byte[i64(0)])

    @T.inline
    def pad(block_scale, e, r, b, experts, used, size, blocks):
        with T.sblock("pad"):
            ve = T.axis.spatial(experts, e)
            vr = T.axis.spatial(size[0], r)
            vb = T.axis.spatial(size[1], b)
            T.reads()
            T.writes()
            if vr >= used(ve) or vb >= blocks:
                block_scale[place(ve, vr, vb, blocks)] = T.uint8(0)

    return store, pad


def act_rows(spec: ActQuantize, shape: tuple[int, ...] | None = None) -> PrimFunc:
    """Return the kernel of ``spec``, its parameters those of ``spec.params()``.

    ``shape`` is the input's; None lets the function take any.
    """
    block, half, one = i64(spec.block), i64(spec.block // 2), i64(1)
    tiled, swiglu = spec.layout != "linear", spec.activation == "swiglu"

    def at(e: PrimExpr, *rest: PrimExpr) -> tuple[PrimExpr, ...]:
        return (e, *rest) if spec.grouped else rest

    load, activate, widened = _load_step(spec), _gated_step(spec), _bytes_step(spec)
    encode, (store, pad) = encode_step(spec), _store_steps(spec, at)
    g_at = scale_place(spec)

    @T.inline
    def compute(input, g, packed, block_scale, given, e, r, b, cols):
        a = T.sblock_alloc_buffer((block,), spec.held)
        magnitude = T.sblock_alloc_buffer((block,), "int32")
        amax = T.sblock_alloc_buffer((one,), "int32")
        byte = T.sblock_alloc_buffer((one,), "int32")
        factor = T.sblock_alloc_buffer((one,), "float32")
        code = T.sblock_alloc_buffer((block,), "int32")
        pair = T.sblock_alloc_buffer((half,), "uint8")
        place = T.meta_var(lambda k: at(e, r, b * block + k))
        if spec.gated:
            gate = T.sblock_alloc_buffer((block,), spec.dtype)
            up = T.sblock_alloc_buffer((block,), spec.dtype)
            if swiglu:
                numbers = T.sblock_alloc_buffer((i64(NUMBERS),), "float32")
                activate(input, gate, up, numbers, a, place, cols, given)
            else:
                activate(input, gate, up, None, a, place, cols, given)
        elif spec.dtype == FP8:
            raw = T.sblock_alloc_buffer((block,), "uint8")
            load(input, raw, place)
            widened(raw, g, a, g_at(e, r))
        else:
            load(input, a, place)
        encode(a, g, magnitude, amax, byte, factor, code, pair, g_at(e, r), ())
        store(pair, byte, packed, block_scale, e, r, b, cols // block)

    @T.inline
    def body(input, g, mask, packed, block_scale, experts, rows, cols, given):
        size = T.meta_var(scale_shape(spec.layout, rows, cols // block))
        for e, r, b in T.grid(experts, *size):
            with T.sblock("block"):
                ve = T.axis.spatial(experts, e)
                vr = T.axis.spatial(rows, r)
                vb = T.axis.spatial(cols // block, b)
                if tiled:
                    T.where(tirx.all(r < rows, b < cols // block))
                if spec.grouped:
                    if vr < T.Cast("int64", mask[ve]):
                        with T.sblock("used"):
                            compute(input, g, packed, block_scale, given, ve, vr, vb, cols)
                else:
                    compute(input, g, packed, block_scale, given, ve, vr, vb, cols)
            if tiled:
                pad(
                    block_scale,
                    e,
                    r,
                    b,
                    experts,
                    (lambda v: tirx.Min(rows, T.Cast("int64", mask[v])))
                    if spec.grouped
                    else (lambda v: rows),
                    size,
                    cols // block,
                )

    return act_kernel(spec, shape, body)


def _most_step(spec: ActQuantize) -> Any:
    """Step from a block of the input to the largest magnitude that a thread has met."""
    block = i64(spec.block)

    @T.inline
    def most_of(a, own):
        for k in range(block):
            with T.sblock("most"):
                vk = T.axis.reduce(block, k)
                own[i64(0)] = T.max(own[i64(0)], magnitude(widen(a[vk])))

    return most_of


def token_rows(spec: ActQuantize, shape: tuple[int, ...] | None = None) -> PrimFunc:
    """Return the kernel of ``spec``, which finds the global scales of rows: as `act_rows` does."""
    block, half, one = i64(spec.block), i64(spec.block // 2), i64(1)
    threads, tiled = i64(ROW_THREADS), spec.layout != "linear"
    load, encode = _load_step(spec), encode_step(spec)
    store, pad = _store_steps(spec, lambda e, *rest: rest)
    peek, most_of = _load_step(spec, "peek"), _most_step(spec)

    @T.inline
    def find(input, base, most, total, top, g, r, cols, parts):
        for t in range(threads):
            with T.sblock("part"):
                vt = T.axis.spatial(threads, t)
                T.reads(input[r, i64(0) : cols])
                T.writes(most[vt])
                own = T.sblock_alloc_buffer((one,), "int32")
                with T.sblock("start"):
                    own[i64(0)] = 0
                for p in range(parts):
                    with T.sblock("own"):
                        vp = T.axis.reduce(parts, p)
                        if vp * threads + vt < cols // block:
                            with T.sblock("within"):
                                a = T.sblock_alloc_buffer((block,), spec.dtype)
                                peek(input, a, lambda k: (r, (vp * threads + vt) * block + k))
                                most_of(a, own)
                with T.sblock("keep"):
                    most[vt] = own[i64(0)]
        for t in range(threads):
            with T.sblock("total"):
                vt = T.axis.reduce(threads, t)
                with T.init():
                    total[i64(0)] = T.min_value("int32")
                total[i64(0)] = T.max(total[i64(0)], most[vt])
        with T.sblock("row_top"):
            top[i64(0)] = formats.from_bits(total[i64(0)])
        with T.sblock("row_factor"):
            g[i64(0)] = row_factor(base[i64(0)], top[i64(0)])

    @T.inline
    def body(input, given, mask, packed, block_scale, experts, rows, cols, numbers):
        blocks = T.meta_var(cols // block)
        size = T.meta_var(scale_shape(spec.layout, rows, blocks))
        parts = T.meta_var(tiles_of(size[1], ROW_THREADS))
        for r in range(size[0]):
            with T.sblock("row"):
                vr = T.axis.spatial(rows, r)
                if tiled:
                    T.where(r < rows)
                most = T.sblock_alloc_buffer((threads,), "int32")
                total = T.sblock_alloc_buffer((one,), "int32")
                top = T.sblock_alloc_buffer((one,), "float32")
                g = T.sblock_alloc_buffer((one,), "float32")
                find(input, given[0], most, total, top, g, vr, cols, parts)
                for t in range(threads):
                    with T.sblock("row_scale"):
                        vt = T.axis.spatial(threads, t)
                        if vt == i64(0):
                            given[2][vr] = row_scale(g[i64(0)], top[i64(0)])
                for t, p in T.grid(threads, parts):
                    with T.sblock("encode"):
                        vt, vp = T.axis.remap("SS", [t, p])
                        if vp * threads + vt < blocks:
                            with T.sblock("block"):
                                a = T.sblock_alloc_buffer((block,), spec.dtype)
                                magnitude = T.sblock_alloc_buffer((block,), "int32")
                                amax = T.sblock_alloc_buffer((one,), "int32")
                                byte = T.sblock_alloc_buffer((one,), "int32")
                                factor = T.sblock_alloc_buffer((one,), "float32")
                                code = T.sblock_alloc_buffer((block,), "int32")
                                pair = T.sblock_alloc_buffer((half,), "uint8")
                                b = T.meta_var(vp * threads + vt)
                                row = T.meta_var((top[i64(0)], given[1]))
                                load(input, a, lambda k: (vr, b * block + k))
                                encode(
                                    *(a, g, magnitude, amax, byte, factor, code, pair),
                                    i64(0),
                                    row,
                                )
                                store(pair, byte, packed, block_scale, i64(0), vr, b, blocks)
            if tiled:
                for t, p in T.grid(threads, parts):
                    if p * threads + t < size[1]:
                        pad(
                            block_scale,
                            i64(0),
                            r,
                            p * threads + t,
                            one,
                            lambda v: rows,
                            size,
                            blocks,
                        )

    return act_kernel(spec, shape, body)
