"""A grouped GEMM whose epilogue is a gated activation and the quantisation of its result.

    c = alpha[e] * a b[e]^T                                   (`gemm.tiles`), rounded to 16 bits
    h[i, 16 q + k] = silu(c[i, 32 q + k]) * c[i, 32 q + 16 + k]
    codes, scales = NVFP4 of h, scales in the 128x4 layout    (`fused.act_quantize`)

Rows of b are gates and ups in turn, 16 of each, so that a thread has both of a block: those that
`interleaved` brings in order.  The result is, bit for bit, that of the GEMM and of the quantising
activation after it.
"""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.base.formats import GEMM
from blockscale.base.sizes import ceil_div
from blockscale.specs import ActQuantize
from blockscale.tir.common import i64
from blockscale.tir.fused.act_quantize_threads import activated, encode_step
from blockscale.tir.gemm.tiles import ATOM_BYTES, OPTIONAL, PARAMS, ROW_TILE, Sizes, products
from blockscale.tir.gemm.tiles import true_shapes as shapes_of

GATED = 32
"""Rows of b of a block of the result: as many gates as ups."""


def gated_tiles(fmt: str, rule: ActQuantize, n: int, k: int, experts: int) -> PrimFunc:
    """Return the unscheduled GEMM in whole tiles, any number of rows of a.

    Args:
        fmt: key of `formats.GEMM`.
        rule: of the activation: activation, block of 16, E4M3 scales, its dtype, 128x4.
        n: rows of b, a multiple of 128, so that no 128x4 tile of scales has padding along rows.
        k: elements of K.
        experts: matrices b.

    Parameters are (a, b, a_scale, b_scale, alpha, expert_of_tile, global_scale, out_scale, d).
    """
    row, size, multiply = GEMM[fmt], Sizes.of(fmt, n, k), products(fmt, n, k)
    encode, dtype = encode_step(rule), rule.dtype
    N, NA, KA = i64(size.cols), i64(size.cols // 128), i64(size.atoms)
    R, RA, E, AT, one = i64(ROW_TILE), i64(ROW_TILE // 128), i64(experts), i64(ATOM_BYTES), i64(1)
    AB, BB = (i64(size.atoms * size.depth // code.per_byte) for code in (row.a, row.b))
    blocks, block, half, pair_rows = (
        size.cols // GATED,
        i64(rule.block),
        i64(rule.block // 2),
        i64(GATED),
    )
    Q, along = i64(blocks), i64(ceil_div(blocks, 4) * ATOM_BYTES)

    @T.prim_func(s_tir=True)
    def main(
        a_handle: T.handle,
        b: T.Buffer((E, N, BB), "uint8"),
        a_scale_handle: T.handle,
        b_scale: T.Buffer((E, NA, KA * AT), "uint8"),
        alpha: T.Buffer((E,), "float32"),
        expert_handle: T.handle,
        global_scale: T.Buffer((one,), "float32"),
        out_scale_handle: T.handle,
        d_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        tiles = T.int64()
        a = T.match_buffer(a_handle, (tiles, R, AB), "uint8")
        a_scale = T.match_buffer(a_scale_handle, (tiles, RA, KA * AT), "uint8")
        expert_of_tile = T.match_buffer(expert_handle, (tiles,), "int32")
        out_scale = T.match_buffer(out_scale_handle, (tiles, RA, along), "uint8")
        d = T.match_buffer(d_handle, (tiles, R, Q * half), "uint8")
        C = T.sblock_alloc_buffer((tiles, R, N), "float32")
        multiply(a, b, a_scale, b_scale, expert_of_tile, C, tiles)
        for t, i, q in T.grid(tiles, R, Q):
            with T.sblock("epilogue"):
                vt, vi, vq = T.axis.remap("SSS", [t, i, q])
                T.reads(
                    C[vt, vi, vq * pair_rows : vq * pair_rows + pair_rows],
                    alpha[0:E],
                    expert_of_tile[vt],
                    global_scale[0],
                )
                T.writes(d[vt, vi, vq * half : vq * half + half], out_scale[vt, 0:RA, 0:along])
                gate = T.sblock_alloc_buffer((block,), dtype)
                up = T.sblock_alloc_buffer((block,), dtype)
                h = T.sblock_alloc_buffer((block,), dtype)
                magnitude = T.sblock_alloc_buffer((block,), "int32")
                amax = T.sblock_alloc_buffer((one,), "int32")
                byte = T.sblock_alloc_buffer((one,), "int32")
                factor = T.sblock_alloc_buffer((one,), "float32")
                code = T.sblock_alloc_buffer((block,), "int32")
                pair = T.sblock_alloc_buffer((half,), "uint8")
                for k in range(block):
                    with T.sblock("gate"):
                        vk = T.axis.spatial(block, k)
                        gate[vk] = T.Cast(
                            dtype, C[vt, vi, vq * pair_rows + vk] * alpha[expert_of_tile[vt]]
                        )
                for k in range(block):
                    with T.sblock("up"):
                        vk = T.axis.spatial(block, k)
                        up[vk] = T.Cast(
                            dtype,
                            C[vt, vi, vq * pair_rows + block + vk] * alpha[expert_of_tile[vt]],
                        )
                for k in range(block):
                    with T.sblock("value"):
                        vk = T.axis.spatial(block, k)
                        h[vk] = activated(rule.activation, dtype, gate[vk], up[vk], None)
                encode(h, global_scale, magnitude, amax, byte, factor, code, pair, i64(0))
                for j in range(half):
                    with T.sblock("store_codes"):
                        vj = T.axis.spatial(half, j)
                        d[vt, vi, vq * half + vj] = pair[vj]
                with T.sblock("store_scale"):
                    out_scale[
                        vt,
                        vi // i64(128),
                        vq // i64(4) * AT
                        + vi % i64(32) * i64(16)
                        + vi % i64(128) // i64(32) * i64(4)
                        + vq % i64(4),
                    ] = T.Cast("uint8", byte[0])

    shapes = shapes_of(fmt, n, k, experts)
    shapes.pop("d")
    shapes |= {
        "global_scale": [("", 1, 1, 1)],
        "out_scale": [("rows", 128, -1, 2), ("", 1, n // GATED // 4 * ATOM_BYTES, 1)],
        "d": [("rows", 1, -1, 2), ("cols", 1, n // GATED * (rule.block // 2), 1)],
    }
    return main.with_attrs({PARAMS: shapes, OPTIONAL: {"alpha": 1.0}})


def interleaved(rows: int) -> list[int]:
    """Return, for each row of b, which row of [gates, ups] it is."""
    half, block = rows // 2, GATED // 2
    return [
        r // GATED * block + r % block + (half if r % GATED >= block else 0) for r in range(rows)
    ]
