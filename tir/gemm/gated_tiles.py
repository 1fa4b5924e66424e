"""A grouped GEMM whose epilogue is a gated activation and the quantisation of its result.

    c = alpha[e] * a b[e]^T                             (`gemm.tiles`), rounded to 16 bits
    h[i, 16 q + k] = activation(c[i, 32 q + k]) * c[i, 32 q + 16 + k]
    packed, block_scale = codes of h / global_scale[e], scales 128x4   (`fused.act_quantize`)

Rows of b are gates and ups in turn, 16 of each, so that a thread has both of a block.  The result
is, bit for bit, that of the GEMM and of the quantising activation after it.

rows_of_tile[t]: rows of the expert from the first of tile t on.  Tiles of block_scale are of 128
rows; those that the expert does not have get zeros.  A kernel knows both from the offsets of the
experts' rows.
"""

from __future__ import annotations

from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.base.formats import GEMM
from blockscale.base.sizes import ceil_div
from blockscale.specs import ActQuantize
from blockscale.specs.gemm import GATED_ROWS
from blockscale.tir.common import fix_shape, i64, keep_params
from blockscale.tir.fused.act_quantize_threads import NUMBERS, activated, encode_step
from blockscale.tir.gemm.tiles import ATOM_BYTES, OPTIONAL, PARAMS, ROW_TILE, Sizes, products
from blockscale.tir.gemm.tiles import true_shapes as shapes_of

NUMBER_NAMES = ("gate_alpha", "beta", "limit")
"""Parameters of "swiglu"."""


def gated_tiles(
    fmt: str, rule: ActQuantize, n: int, k: int, experts: int, rows: int | None = None
) -> PrimFunc:
    """Return the unscheduled GEMM in whole tiles.

    Args:
        fmt: key of `formats.GEMM`.
        rule: of what is done with c: activation, block and format of scales, dtype of c.
        n: rows of b, a multiple of eight blocks, so that no row of 128x4 tiles of scales has
            padding.
        k: elements of K.
        experts: matrices b.
        rows: of a; None: any number.

    Parameters are (a, b, a_scale, b_scale, alpha, expert_of_tile, rows_of_tile, global_scale,
    (gate_alpha, beta, limit), block_scale, packed).
    """
    row, size, multiply = GEMM[fmt], Sizes.of(fmt, n, k), products(fmt, n, k)
    encode, dtype = encode_step(rule), rule.dtype
    N, NA, KA = i64(size.cols), i64(size.cols // 128), i64(size.atoms)
    R, RA, E, AT, one = i64(ROW_TILE), i64(ROW_TILE // 128), i64(experts), i64(ATOM_BYTES), i64(1)
    AB, BB = (i64(size.atoms * size.depth // code.per_byte) for code in (row.a, row.b))
    blocks, turn, swiglu = size.cols // (2 * rule.block), GATED_ROWS, rule.activation == "swiglu"
    block, half, both = i64(rule.block), i64(rule.block // 2), i64(2 * rule.block)
    Q, along = i64(blocks), i64(ceil_div(blocks, 4) * ATOM_BYTES)

    def gate_of(k: PrimExpr) -> PrimExpr:
        return k if rule.block == turn else k // i64(turn) * i64(2 * turn) + k % i64(turn)

    @T.prim_func(s_tir=True)
    def main(
        a_handle: T.handle,
        b: T.Buffer((E, N, BB), "uint8"),
        a_scale_handle: T.handle,
        b_scale: T.Buffer((E, NA, KA * AT), "uint8"),
        alpha: T.Buffer((E,), "float32"),
        expert_handle: T.handle,
        rows_handle: T.handle,
        global_scale: T.Buffer((E,), "float32"),
        gate_alpha: T.float32,
        beta: T.float32,
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
        packed = T.match_buffer(packed_handle, (tiles, R, Q * half), "uint8")
        C = T.sblock_alloc_buffer((tiles, R, N), "float32")
        multiply(a, b, a_scale, b_scale, expert_of_tile, C, tiles)
        for t, i, q in T.grid(tiles, R, Q):
            with T.sblock("epilogue"):
                vt, vi, vq = T.axis.remap("SSS", [t, i, q])
                T.reads(
                    C[vt, vi, vq * both : vq * both + both],
                    alpha[0:E],
                    expert_of_tile[vt],
                    rows_of_tile[vt],
                    global_scale[0:E],
                )
                T.writes(
                    packed[vt, vi, vq * half : vq * half + half], block_scale[vt, 0:RA, 0:along]
                )
                own_scale = T.sblock_alloc_buffer((one,), "float32")
                numbers = T.sblock_alloc_buffer((i64(NUMBERS),), "float32")
                gate = T.sblock_alloc_buffer((block,), dtype)
                up = T.sblock_alloc_buffer((block,), dtype)
                h = T.sblock_alloc_buffer((block,), dtype)
                magnitude = T.sblock_alloc_buffer((block,), "int32")
                amax = T.sblock_alloc_buffer((one,), "int32")
                byte = T.sblock_alloc_buffer((one,), "int32")
                factor = T.sblock_alloc_buffer((one,), "float32")
                code = T.sblock_alloc_buffer((block,), "int32")
                pair = T.sblock_alloc_buffer((half,), "uint8")
                for i in range(one):
                    with T.sblock("own_scale"):
                        vo = T.axis.spatial(one, i)
                        own_scale[vo] = global_scale[expert_of_tile[vt]]
                if swiglu:
                    for i in range(i64(NUMBERS)):
                        with T.sblock("numbers"):
                            vn = T.axis.spatial(i64(NUMBERS), i)
                            numbers[vn] = T.if_then_else(
                                vn == i64(0),
                                gate_alpha,
                                T.if_then_else(vn == one, beta, limit),
                            )
                for k in range(block):
                    with T.sblock("gate"):
                        vk = T.axis.spatial(block, k)
                        gate[vk] = T.Cast(
                            dtype, C[vt, vi, vq * both + gate_of(vk)] * alpha[expert_of_tile[vt]]
                        )
                for k in range(block):
                    with T.sblock("up"):
                        vk = T.axis.spatial(block, k)
                        up[vk] = T.Cast(
                            dtype,
                            C[vt, vi, vq * both + gate_of(vk) + i64(turn)]
                            * alpha[expert_of_tile[vt]],
                        )
                for k in range(block):
                    with T.sblock("value"):
                        vk = T.axis.spatial(block, k)
                        h[vk] = activated(
                            rule.activation, dtype, gate[vk], up[vk], numbers if swiglu else None
                        )
                encode(h, own_scale, magnitude, amax, byte, factor, code, pair, i64(0), ())
                for j in range(half):
                    with T.sblock("store_codes"):
                        vj = T.axis.spatial(half, j)
                        packed[vt, vi, vq * half + vj] = pair[vj]
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

    if not swiglu:
        main = keep_params(main, [p.name for p in main.params if p.name not in NUMBER_NAMES])
    if rows is not None:
        tiles = max(1, ceil_div(rows, ROW_TILE))
        main = fix_shape(main, "a", (tiles, ROW_TILE, size.atoms * size.depth // row.a.per_byte))
    shapes = shapes_of(fmt, n, k, experts)
    shapes.pop("d")
    shapes |= {
        "global_scale": [("experts", 1, experts, 1)],
        "block_scale": [
            ("rows", 128, -1, 2),
            ("", 1, n // (8 * rule.block) * ATOM_BYTES, 1),
        ],
        "packed": [("rows", 1, -1, 2), ("cols", 1, n // 4, 1)],
    }
    return main.with_attrs({PARAMS: shapes, OPTIONAL: {"alpha": 1.0, "global_scale": 1.0}})
