"""The two GEMMs of an MoE layer of quantised rows, in whole tiles, for tcgen05.

GEMM 1, of rows in the experts' order, with the activation and the next rows' quantisation:

    gate[i, c] = fma(sum_k x[i, k] * w[e, 32 q + j, k], w13_global[e, 0] * a1_scale, bias[e, ..])
    up[i, c]:  rows 32 q + 16 + j of w, w13_global[e, 1]                       c = 16 q + j
    h[i, c] = round(activation(gate, up))                                      to 16 bits
    packed, block_scale = codes of h / a2_scale, scales 128x4     (MX formats have no a2_scale)

GEMM 2 reads these:

    d[i, j] = round(fma(sum_k h[i, k] * w[e, j, k], w2_global[e] * a2_scale, bias[e, j]))

Operands are codes times block scales, as `gemm.tiles` says; sums are float32.  Rows of w13 are
gates and ups in turn, 16 of each, so that a thread has both of a block.  rows_of_tile as in
`gemm.gated_tiles`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.base.formats import GEMM
from blockscale.base.sizes import ceil_div
from blockscale.specs import ActQuantize, FusedMoe
from blockscale.specs.gemm import GATED_ROWS
from blockscale.tir import activations
from blockscale.tir.common import fix_shape, i64
from blockscale.tir.fused import mxfp8
from blockscale.tir.fused.act_quantize_threads import encode_step
from blockscale.tir.fused.mxfp8 import MxFp8Rule
from blockscale.tir.gemm.tiles import ATOM_BYTES, OPTIONAL, PARAMS, ROW_TILE, Sizes, products
from blockscale.tir.gemm.tiles import true_shapes as shapes_of
from blockscale.tir.moe.tiles import approximate_sigmoid

ONES = {"a1_scale": 1.0, "a2_scale": 1.0}
"""What stands for scales that are not given."""


def rule(spec: FusedMoe) -> ActQuantize | MxFp8Rule:
    """How rows between the GEMMs are quantised: blocks, scales, the dtype that is rounded to."""
    row = GEMM[spec.product]
    if row.a.bits == 8:
        return MxFp8Rule(spec.dtype)
    return ActQuantize("none", row.block, row.scale.name, spec.dtype, "128x4", True)


@lru_cache(maxsize=8)  # the buckets of a spec schedule one function
def moe_codes_tiles(spec: FusedMoe, part: int, slots: int | None = None) -> PrimFunc:
    """Return GEMM ``part`` of ``spec``, unscheduled, for any number of rows, or tuned at ``slots``.

    Parameters are (a, b, a_scale, b_scale, w13_global, a1_scale, bias, expert_of_tile,
    rows_of_tile, a2_scale, alpha, limit, block_scale, packed), or (a, b, a_scale, b_scale,
    w2_global, a2_scale, bias, expert_of_tile, d).  Of codes (uint8): a [tiles, 768, K / per byte],
    b [E, N, K / 2]; of scales (uint8) [.., 128-row tiles, 512-byte tiles along K]; float32
    w13_global [E, 2], w2_global [E], bias [E, N], a1_scale and a2_scale [1]; d [tiles, 768, N] of
    the layer's dtype.  All sizes are padded as in `gemm.tiles`; true ones are in its attributes.
    """
    func = _first(spec) if part == 1 else _second(spec)
    if slots is None:
        return func
    k = spec.padded_hidden if part == 1 else spec.padded_intermediate
    size, row = Sizes.of(spec.product, 1, k), GEMM[spec.product]
    tiles = max(1, ceil_div(slots, ROW_TILE))
    func = fix_shape(func, "a", (tiles, ROW_TILE, size.atoms * size.depth // row.a.per_byte))
    return func.with_attr("blockscale.rows", slots)


def activated(
    activation: str, gate: PrimExpr, up: PrimExpr, alpha: PrimExpr, limit: PrimExpr
) -> PrimExpr:
    """The activation in float32, by the sigmoid that GPUs approximate."""
    if activation == "gelu_tanh":  # (1 + tanh(z)) / 2 = sigmoid(2 z)
        cubed = T.float32(0.044715) * gate * gate * gate
        return gate * approximate_sigmoid(T.float32(2 * 0.7978845608028654) * (gate + cubed)) * up
    gate, up = activations.limited(gate, up, limit)
    if activation == "swiglu_oai":
        up = up + T.float32(1)
    return gate * approximate_sigmoid(alpha * gate) * up


def _first(spec: FusedMoe) -> PrimFunc:
    """GEMM 1, its activation, and what GEMM 2 reads."""
    fmt, n, k, experts = spec.product, spec.padded_rows, spec.padded_hidden, spec.experts
    row, size, multiply, own = GEMM[fmt], Sizes.of(fmt, n, k), products(fmt, n, k), rule(spec)
    encode, dtype, bits = _encode(own), spec.dtype, own.block
    N, NA, KA = i64(size.cols), i64(size.cols // 128), i64(size.atoms)
    R, RA, E, AT, one = i64(ROW_TILE), i64(ROW_TILE // 128), i64(experts), i64(ATOM_BYTES), i64(1)
    AB, BB = (i64(size.atoms * size.depth // code.per_byte) for code in (row.a, row.b))
    blocks, turn = size.cols // (2 * bits), i64(GATED_ROWS)
    block, stored, both = i64(bits), i64(bits // row.a.per_byte), i64(2 * bits)
    Q, along = i64(blocks), i64(ceil_div(blocks, 4) * ATOM_BYTES)

    def gate_of(q: PrimExpr, k: PrimExpr) -> PrimExpr:
        if bits == GATED_ROWS:
            return q * both + k
        return q * both + k // turn * i64(2 * GATED_ROWS) + k % turn

    @T.prim_func(s_tir=True)
    def main(
        a_handle: T.handle,
        b: T.Buffer((E, N, BB), "uint8"),
        a_scale_handle: T.handle,
        b_scale: T.Buffer((E, NA, KA * AT), "uint8"),
        w13_global: T.Buffer((E, i64(2)), "float32"),
        a1_scale: T.Buffer((one,), "float32"),
        bias: T.Buffer((E, N), "float32"),
        expert_handle: T.handle,
        rows_handle: T.handle,
        a2_scale: T.Buffer((one,), "float32"),
        alpha: T.float32,
        limit: T.float32,
        scale_handle: T.handle,
        packed_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        tiles = T.int64()
        a = T.match_buffer(a_handle, (tiles, R, AB), "uint8")
        a_scale = T.match_buffer(a_scale_handle, (tiles, RA, KA * AT), "uint8")
        expert_of_tile = T.match_buffer(expert_handle, (tiles,), "int32")
        rows_of_tile = T.match_buffer(rows_handle, (tiles,), "int32")
        block_scale = T.match_buffer(scale_handle, (tiles, RA, along), "uint8")
        packed = T.match_buffer(packed_handle, (tiles, R, Q * stored), "uint8")
        C = T.sblock_alloc_buffer((tiles, R, N), "float32")
        multiply(a, b, a_scale, b_scale, expert_of_tile, C, tiles)
        for t, i, q in T.grid(tiles, R, Q):
            with T.sblock("epilogue"):
                vt, vi, vq = T.axis.remap("SSS", [t, i, q])
                T.reads(
                    C[vt, vi, vq * both : vq * both + both],
                    w13_global[0:E, 0:2],
                    a1_scale[0:1],
                    bias[0:E, 0:N],
                    expert_of_tile[vt],
                    rows_of_tile[vt],
                    a2_scale[0:1],
                )
                T.writes(
                    packed[vt, vi, vq * stored : vq * stored + stored],
                    block_scale[vt, 0:RA, 0:along],
                )
                gate = T.sblock_alloc_buffer((block,), "float32")
                up = T.sblock_alloc_buffer((block,), "float32")
                h = T.sblock_alloc_buffer((block,), dtype)
                byte = T.sblock_alloc_buffer((one,), "int32")
                codes = T.sblock_alloc_buffer((stored,), "uint8")
                for k in range(block):
                    with T.sblock("gate"):
                        vk = T.axis.spatial(block, k)
                        gate[vk] = T.fma(
                            C[vt, vi, gate_of(vq, vk)],
                            w13_global[expert_of_tile[vt], 0] * a1_scale[0],
                            bias[expert_of_tile[vt], gate_of(vq, vk)],
                        )
                for k in range(block):
                    with T.sblock("up"):
                        vk = T.axis.spatial(block, k)
                        up[vk] = T.fma(
                            C[vt, vi, gate_of(vq, vk) + turn],
                            w13_global[expert_of_tile[vt], 1] * a1_scale[0],
                            bias[expert_of_tile[vt], gate_of(vq, vk) + turn],
                        )
                for k in range(block):
                    with T.sblock("value"):
                        vk = T.axis.spatial(block, k)
                        h[vk] = T.Cast(
                            dtype, activated(spec.activation, gate[vk], up[vk], alpha, limit)
                        )
                encode(h, a2_scale, byte, codes)
                for j in range(stored):
                    with T.sblock("store_codes"):
                        vj = T.axis.spatial(stored, j)
                        packed[vt, vi, vq * stored + vj] = codes[vj]
                with T.sblock("store_scale"):
                    block_scale[
                        vt,
                        vi // i64(128),
                        vq // i64(4) * AT
                        + vi % i64(32) * i64(16)
                        + vi % i64(128) // i64(32) * i64(4)
                        + vq % i64(4),
                    ] = T.if_then_else(
                        vi < T.Cast("int64", rows_of_tile[vt]),
                        T.Cast("uint8", byte[0]),
                        T.uint8(0),
                    )

    shapes = _operands(fmt, n, k, experts) | {
        "w13_global": [("experts", 1, experts, 1), ("", 1, 2, 1)],
        "a1_scale": [("", 1, 1, 1)],
        "bias": [("experts", 1, experts, 1), ("cols", 1, n, 1)],
        "a2_scale": [("", 1, 1, 1)],
        "block_scale": [("rows", 128, -1, 2), ("", 1, n // (8 * bits) * ATOM_BYTES, 1)],
        "packed": [("rows", 1, -1, 2), ("cols", 1, n // (2 * row.a.per_byte), 1)],
    }
    return main.with_attrs({PARAMS: shapes, OPTIONAL: {**ONES, "bias": 0.0}})


def _encode(own: ActQuantize | MxFp8Rule) -> Any:
    """Step from a block of h to its scale byte and codes."""
    block, one = i64(own.block), i64(1)
    if isinstance(own, MxFp8Rule):
        eight = mxfp8.encode_step(own)

        @T.inline
        def codes_of_8_bits(h, a2_scale, byte, codes):
            magnitude = T.sblock_alloc_buffer((block,), "int32")
            amax = T.sblock_alloc_buffer((one,), "int32")
            factor = T.sblock_alloc_buffer((one,), "float32")
            eight(h, magnitude, amax, byte, factor, codes)

        return codes_of_8_bits
    four = encode_step(own)

    @T.inline
    def codes_of_4_bits(h, a2_scale, byte, codes):
        own_scale = T.sblock_alloc_buffer((one,), "float32")
        magnitude = T.sblock_alloc_buffer((block,), "int32")
        amax = T.sblock_alloc_buffer((one,), "int32")
        factor = T.sblock_alloc_buffer((one,), "float32")
        code = T.sblock_alloc_buffer((block,), "int32")
        for i in range(one):
            with T.sblock("own_scale"):
                vo = T.axis.spatial(one, i)
                own_scale[vo] = a2_scale[vo]
        four(h, own_scale, magnitude, amax, byte, factor, code, codes, i64(0), ())

    return codes_of_4_bits


def _second(spec: FusedMoe) -> PrimFunc:
    """GEMM 2, of codes and scales that GEMM 1 wrote."""
    fmt, n, k, experts = spec.product, spec.hidden, spec.padded_intermediate, spec.experts
    row, size, multiply = GEMM[fmt], Sizes.of(fmt, n, k), products(fmt, n, k)
    N, NA, KA = i64(size.cols), i64(size.cols // 128), i64(size.atoms)
    R, RA, E, AT, one = i64(ROW_TILE), i64(ROW_TILE // 128), i64(experts), i64(ATOM_BYTES), i64(1)
    AB, BB = (i64(size.atoms * size.depth // code.per_byte) for code in (row.a, row.b))

    @T.prim_func(s_tir=True)
    def main(
        a_handle: T.handle,
        b: T.Buffer((E, N, BB), "uint8"),
        a_scale_handle: T.handle,
        b_scale: T.Buffer((E, NA, KA * AT), "uint8"),
        w2_global: T.Buffer((E,), "float32"),
        a2_scale: T.Buffer((one,), "float32"),
        bias: T.Buffer((E, N), "float32"),
        expert_handle: T.handle,
        d_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        tiles = T.int64()
        a = T.match_buffer(a_handle, (tiles, R, AB), "uint8")
        a_scale = T.match_buffer(a_scale_handle, (tiles, RA, KA * AT), "uint8")
        expert_of_tile = T.match_buffer(expert_handle, (tiles,), "int32")
        d = T.match_buffer(d_handle, (tiles, R, N), spec.dtype)
        C = T.sblock_alloc_buffer((tiles, R, N), "float32")
        multiply(a, b, a_scale, b_scale, expert_of_tile, C, tiles)
        for t, i, j in T.grid(tiles, R, N):
            with T.sblock("epilogue"):
                vt, vi, vj = T.axis.remap("SSS", [t, i, j])
                d[vt, vi, vj] = T.Cast(
                    spec.dtype,
                    T.fma(
                        C[vt, vi, vj],
                        w2_global[expert_of_tile[vt]] * a2_scale[0],
                        bias[expert_of_tile[vt], vj],
                    ),
                )

    shapes = _operands(fmt, n, k, experts) | {
        "w2_global": [("experts", 1, experts, 1)],
        "a2_scale": [("", 1, 1, 1)],
        "bias": [("experts", 1, experts, 1), ("cols", 1, n, 1)],
        "d": [("rows", 1, -1, 2), ("cols", 1, n, 1)],
    }
    optional = {"a2_scale": 1.0, "bias": 0.0}
    return main.with_attrs({PARAMS: shapes, OPTIONAL: optional})


def _operands(fmt: str, n: int, k: int, experts: int) -> dict[str, list[tuple[str, int, int, int]]]:
    """True dimensions of both operands and their scales; see `tiles.true_shapes`."""
    shapes = shapes_of(fmt, n, k, experts)
    return {name: shapes[name] for name in ("a", "b", "a_scale", "b_scale")}
