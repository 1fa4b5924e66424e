"""Edge-LLM's NVFP4 experts: index functions, decoding, and the decode ops as GEMVs in float32.

For token t, slot j and expert e = topk_ids[t, j]; slots with e outside [0, experts) are left out:

    up:    z[t, j, n] = g[e] * sum_k x[t, k] * w[e, k, n]           (g also times x's global scale)
    down:  out[t, n] = sum over j, ascending, of
               topk_weights[t, j] * g[e] * sum_k act(z[t, j, k]) * w[e, k, n]

w[e, k, n] = e2m1(payload[e, k, n / 2], nibble n % 2) * scale(decode_scales[e, k / 16, n]), exactly.
A scale byte is S0E5M3, the upper bits of a float16 without sign.  act: relu2 is max(v, 0)^2, silu
is v / (1 + exp(-v)) with v limited to -50 .. 50.  Of a NaN relu2 makes 0, as the original does, and
silu a NaN.  Sums of 16 products are scaled and then added up in float32; global scale and routing
weight come last, in float32; out is rounded once.

Tiles, words and coordinates: `blockscale.base.edgellm_index`, whose functions take expressions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.base import edgellm_index as index
from blockscale.specs.edgellm import EdgeDown, EdgeUp
from blockscale.tir import formats
from blockscale.tir.activations import exp
from blockscale.tir.common import i64, keep_params, tiles_of, widen

LANES = 16
"""Lanes of a strip: each has the four columns of a 16-bit word."""

QUARTERS = 4

STRIPS = 8
"""Strips (tiles of 64 columns) of a task on a CPU."""

LIMIT = 50.0
"""Beyond which silu's argument is cut off."""


def word_at(words: Any, number: PrimExpr) -> PrimExpr:
    """Word ``number`` of an int32 buffer as int64, 0 .. 2^32 - 1."""
    return tirx.Cast("int64", words[number]) & tirx.const(0xFFFFFFFF, "int64")


def scale_word(words: Any, c: Sequence[PrimExpr], *sizes: Any) -> PrimExpr:
    """Word of scales of tile ``c``, its bytes exchanged; ``sizes``: of `index.tile_scale_index`."""
    return index.exchange(word_at(words, index.tile_scale_index(c, *sizes)))


def scale_word_linear(words: Any, c: Sequence[PrimExpr], strides: Sequence[Any]) -> PrimExpr:
    """Word of scales of tile ``c``, where there is one a tile in the order of the payload."""
    return word_at(words, index.linear_word(c, strides))


def tile_lane(words: Any, c: Sequence[PrimExpr], strides: Sequence[Any], lane: Any) -> PrimExpr:
    """Lane 0 .. 7 of tile ``c`` of a payload as int32 words."""
    return word_at(words, index.tile_offset(c, strides) * index.LANES + lane)


def scale_decode(byte: PrimExpr) -> PrimExpr:
    """Value (float32) of an S0E5M3 byte (0 .. 255 as int32): 248 is infinity, above is NaN."""

    def constant(value: int) -> PrimExpr:
        return formats.const(value, byte, "int32")

    normal = (byte << constant(20)) + constant(112 << 23)
    subnormal = formats.bits_of(
        formats.cast(byte, "float32") * formats.const(2.0**-17, byte, "float32")
    )
    special = ((byte & constant(7)) << constant(20)) | constant(0x7F800000)
    finite = tirx.Select(byte < constant(8), subnormal, normal)
    return formats.from_bits(tirx.Select(byte < constant(248), finite, special))


def code_value(byte: PrimExpr, column: PrimExpr) -> PrimExpr:
    """Value (float32) of the code of ``column`` in its packed byte (uint8)."""
    return formats.e2m1_decode(formats.nibble(tirx.Cast("int32", byte), column))


def x_scale_byte(k: PrimExpr) -> PrimExpr:
    """Where in its token's bytes of linear words the scale of activation ``k`` is."""
    tile, block = k // index.TILE, k % index.TILE // index.BLOCK
    return tile * index.LANES + index.block_byte(block)


def activated(activation: str, value: PrimExpr) -> PrimExpr:
    """Return ``activation`` of a float32 number."""
    zero, one = tirx.const(0.0, "float32"), tirx.const(1.0, "float32")
    if activation == "relu2":
        positive = tirx.Select(value > zero, value, zero)
        return positive * positive
    low, high = tirx.const(-LIMIT, "float32"), tirx.const(LIMIT, "float32")
    # Not Min and Max: of a NaN they make a limit.
    value = tirx.Select(value > high, high, tirx.Select(value < low, low, value))
    return value / (one + exp(-value))


def x_value(spec: EdgeUp, x: Any, x_scale: Any, t: PrimExpr, k: PrimExpr) -> PrimExpr:
    """Activation ``k`` of token ``t`` in float32, without its global scale."""
    if spec.dtype != "nvfp4":
        return widen(x[t, k])
    byte = tirx.Cast("int32", x_scale[t, x_scale_byte(k)])
    return code_value(x[t, k // 2], k) * scale_decode(byte)


def is_expert(e: PrimExpr, experts: PrimExpr) -> PrimExpr:
    """Whether the id ``e`` (int32) names an expert."""
    return tirx.all(e >= 0, tirx.Cast("int64", e) < experts)


def _gemv_step(rows: int, columns: int) -> Any:
    """Step from activations A [tokens, shared or slots, K] to out [tokens, slots, N].

    ``factor(t, j, e)``: what a sum is multiplied by.
    """
    K, N, strips = i64(rows), i64(columns), i64(columns // index.TILE)
    blocks, block, bytes_ = i64(rows // index.BLOCK), i64(index.BLOCK), i64(index.TILE_BYTES)
    tasks, some, tile = tiles_of(strips, STRIPS), i64(STRIPS), i64(index.TILE)
    Q, L, two = i64(QUARTERS), i64(LANES), i64(2)

    @T.inline
    def step(A, payload, scales, ids, out, tokens, slots, shared, experts, factor):
        for t, j, g in T.grid(tokens, slots, tasks):
            with T.sblock("task"):
                vt, vj, vg = T.axis.remap("SSS", [t, j, g])
                slot = T.meta_var(i64(0) if shared else vj)
                there = T.meta_var(is_expert(ids[vt, vj], experts))
                count = T.meta_var(tirx.Min(some, strips - vg * some))
                first = T.meta_var(T.Cast("int64", ids[vt, vj]))
                T.reads(A[vt, slot, 0:K], ids[vt, vj])
                T.writes(out[vt, vj, 0:N])
                total = T.sblock_alloc_buffer((some, Q, L), "float32")
                for p, q, i in T.grid(some, Q, L):
                    with T.sblock("clear_total"):
                        vp, vq, vi = T.axis.remap("SSS", [p, q, i])
                        total[vp, vq, vi] = T.float32(0)
                for e in T.serial(
                    T.if_then_else(there, first, i64(0)),
                    T.if_then_else(there, first + i64(1), i64(0)),
                ):
                    with T.sblock("expert"):
                        ve = T.axis.spatial(experts, e)
                        T.reads(A[vt, slot, 0:K], total[0:some, 0:Q, 0:L])
                        T.writes(total[0:some, 0:Q, 0:L])
                        for b, p in T.grid(blocks, count):
                            with T.sblock("block"):
                                vb, vp = T.axis.remap("RS", [b, p])
                                T.reads(
                                    A[vt, slot, vb * block : vb * block + block],
                                    total[vp, 0:Q, 0:L],
                                )
                                T.writes(total[vp, 0:Q, 0:L])
                                sums = T.sblock_alloc_buffer((Q, L), "float32")
                                strip = T.meta_var(vg * some + vp)
                                for q, i in T.grid(Q, L):
                                    with T.sblock("clear"):
                                        vq, vi = T.axis.remap("SS", [q, i])
                                        sums[vq, vi] = T.float32(0)
                                for q, i, k in T.grid(Q, L, block):
                                    with T.sblock("dot"):
                                        vq, vi, vk = T.axis.remap("SSR", [q, i, k])
                                        sums[vq, vi] = sums[vq, vi] + A[
                                            vt, slot, vb * block + vk
                                        ] * code_value(
                                            payload[
                                                ve,
                                                vb * block + vk,
                                                strip * bytes_ + (vi * two + vq // two),
                                            ],
                                            vq,
                                        )
                                for q, i in T.grid(Q, L):
                                    with T.sblock("scale"):
                                        vq, vi = T.axis.remap("SS", [q, i])
                                        total[vp, vq, vi] = total[vp, vq, vi] + sums[
                                            vq, vi
                                        ] * scale_decode(
                                            T.Cast(
                                                "int32",
                                                scales[ve, vb, strip * tile + (vi * Q + vq)],
                                            )
                                        )
                for p, i, q in T.grid(count, L, Q):
                    with T.sblock("store"):
                        vp, vi, vq = T.axis.remap("SSS", [p, i, q])
                        out[vt, vj, (vg * some + vp) * tile + vi * Q + vq] = total[
                            vp, vq, vi
                        ] * T.if_then_else(there, factor(vt, vj, first), T.float32(0))

    return step


def up_kernel(spec: EdgeUp, attrs: dict[str, Any], body: Any) -> PrimFunc:
    """Return the kernel with the parameters of ``spec.params()``, which ``body`` fills.

    ``body(x, x_scale, ids, z, tokens, slots, experts, weights, factor)``: x_scale is None without
    coded activations, weights are the payload and its scales, and ``factor(t, j, e)`` is what the
    sums of a slot are multiplied by.
    """
    K, N, one = i64(spec.hidden), i64(spec.intermediate), i64(1)
    blocks, half_k, half_n = i64(spec.hidden // 16), K // 2, N // 2
    coded = spec.dtype == "nvfp4"
    x_dtype, x_width = ("uint8", half_k) if coded else (spec.dtype, K)

    @T.prim_func(s_tir=True)
    def main(
        x_handle: T.handle,
        x_scale_handle: T.handle,
        x_global_scale: T.Buffer((one,), "float32"),
        payload_handle: T.handle,
        scales_handle: T.handle,
        global_handle: T.handle,
        ids_handle: T.handle,
        z_handle: T.handle,
    ):
        T.func_attr(attrs)
        tokens, slots, experts = T.int64(), T.int64(), T.int64()
        x = T.match_buffer(x_handle, (tokens, x_width), x_dtype)
        if coded:
            x_scale = T.match_buffer(x_scale_handle, (tokens, blocks), "uint8")
        payload = T.match_buffer(payload_handle, (experts, K, half_n), "uint8")
        decode_scales = T.match_buffer(scales_handle, (experts, blocks, N), "uint8")
        global_scale = T.match_buffer(global_handle, (experts,), "float32")
        topk_ids = T.match_buffer(ids_handle, (tokens, slots), "int32")
        z = T.match_buffer(z_handle, (tokens, slots, N), "float32")
        factor = T.meta_var(
            lambda t, j, e: global_scale[e] * x_global_scale[0] if coded else global_scale[e]
        )
        side = T.meta_var(x_scale if coded else None)
        weights = T.meta_var((payload, decode_scales))
        body(x, side, topk_ids, z, tokens, slots, experts, weights, factor)

    return keep_params(main, [param.name for param in spec.params()])


def down_kernel(spec: EdgeDown, attrs: dict[str, Any], body: Any) -> PrimFunc:
    """Return the kernel with the parameters of ``spec.params()``, which ``body`` fills.

    ``body(z, ids, partial, out, tokens, slots, experts, weights, factor)``: as in `up_kernel`.
    """
    K, N = i64(spec.intermediate), i64(spec.hidden)
    blocks, half_n = i64(spec.intermediate // 16), N // 2

    @T.prim_func(s_tir=True)
    def main(
        z_handle: T.handle,
        payload_handle: T.handle,
        scales_handle: T.handle,
        global_handle: T.handle,
        ids_handle: T.handle,
        weights_handle: T.handle,
        partial_handle: T.handle,
        out_handle: T.handle,
    ):
        T.func_attr(attrs)
        tokens, slots, experts = T.int64(), T.int64(), T.int64()
        z = T.match_buffer(z_handle, (tokens, slots, K), "float32")
        payload = T.match_buffer(payload_handle, (experts, K, half_n), "uint8")
        decode_scales = T.match_buffer(scales_handle, (experts, blocks, N), "uint8")
        global_scale = T.match_buffer(global_handle, (experts,), "float32")
        topk_ids = T.match_buffer(ids_handle, (tokens, slots), "int32")
        topk_weights = T.match_buffer(weights_handle, (tokens, slots), "float32")
        partial = T.match_buffer(partial_handle, (tokens, slots, N), "float32")
        out = T.match_buffer(out_handle, (tokens, N), spec.dtype)
        factor = T.meta_var(lambda t, j, e: global_scale[e] * topk_weights[t, j])
        weights = T.meta_var((payload, decode_scales))
        body(z, topk_ids, partial, out, tokens, slots, experts, weights, factor)

    return main


ATTRS = {"global_symbol": "main", "tirx.noalias": True}


def edge_up(spec: EdgeUp) -> PrimFunc:
    """Return the kernel with the parameters of ``spec.params()``."""
    K, one = i64(spec.hidden), i64(1)
    step = _gemv_step(spec.hidden, spec.intermediate)

    @T.inline
    def body(x, x_scale, ids, z, tokens, slots, experts, weights, factor):
        A = T.sblock_alloc_buffer((tokens, one, K), "float32")
        for t, k in T.grid(tokens, K):
            with T.sblock("act"):
                vt, vk = T.axis.remap("SS", [t, k])
                A[vt, 0, vk] = x_value(spec, x, x_scale, vt, vk)
        step(A, weights[0], weights[1], ids, z, tokens, slots, True, experts, factor)

    return up_kernel(spec, ATTRS, body)


def edge_down(spec: EdgeDown) -> PrimFunc:
    """Return the kernel with the parameters of ``spec.params()``."""
    K, N = i64(spec.intermediate), i64(spec.hidden)
    step = _gemv_step(spec.intermediate, spec.hidden)

    @T.inline
    def body(z, ids, partial, out, tokens, slots, experts, weights, factor):
        A = T.sblock_alloc_buffer((tokens, slots, K), "float32")
        total = T.sblock_alloc_buffer((tokens, N), "float32")
        for t, j, k in T.grid(tokens, slots, K):
            with T.sblock("act"):
                vt, vj, vk = T.axis.remap("SSS", [t, j, k])
                A[vt, vj, vk] = activated(spec.activation, z[vt, vj, vk])
        step(A, weights[0], weights[1], ids, partial, tokens, slots, False, experts, factor)
        for t, n, j in T.grid(tokens, N, slots):
            with T.sblock("combine"):
                vt, vn, vj = T.axis.remap("SSR", [t, n, j])
                with T.init():
                    total[vt, vn] = T.float32(0)
                total[vt, vn] = total[vt, vn] + partial[vt, vj, vn]
        for t, n in T.grid(tokens, N):
            with T.sblock("out"):
                vt, vn = T.axis.remap("SS", [t, n])
                out[vt, vn] = formats.round_to(spec.dtype, total[vt, vn])

    return down_kernel(spec, ATTRS, body)
