"""The product of INT4 weights in whole tiles, which schedules for tensor cores split.

    out[i, j] = round(fma(sum_k x[i, k] * w[e, j, k], alpha[e], bias[e, j]))

for the rows i of expert e, or of one weight.  It is GEMM 2 of an MoE layer (`tir.moe.tiles`:
layout, order of K, padding) whose rows keep their order.
"""

from __future__ import annotations

from functools import lru_cache

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.specs.int4 import ZEROS, Int4Mm
from blockscale.specs.plans.moe import AFTER, MoeGemm
from blockscale.tir.common import i64
from blockscale.tir.gemm.tiles import OPTIONAL, PARAMS
from blockscale.tir.moe import tiles


def gemm_of(spec: Int4Mm) -> MoeGemm:
    """Return the GEMM 2 that a product is."""
    return MoeGemm(
        fmt="int4",
        group=spec.group,
        zeros=[*ZEROS].index(spec.zero),
        dtype=spec.dtype,
        activation="none",
        experts=spec.matrices,
        rows=spec.padded_n,
        k=spec.padded_k,
        top_k=1,
        cols=spec.n,
    )


@lru_cache(maxsize=8)  # the buckets of a spec schedule one function
def int4_tiles(
    spec: Int4Mm, rows: int | None = None, token_tile: int = tiles.TOKEN_TILE
) -> PrimFunc:
    """Return the unscheduled product in whole tiles.

    Args:
        spec: of layout "tiles64".
        rows: of x, for which it is tuned; None: any number.
        token_tile: rows of a padded tile.

    Parameters are (x [tiles, rows, K], packed, scale, alpha [weights], bias [weights, n], out
    [tiles, rows, n], expert_of_tile [tiles]), without the last one of one weight.  alpha and bias
    may be null.
    """
    func = (_grouped if spec.experts else _dense)(spec, token_tile)
    gemm = gemm_of(spec)
    of_gemm = tiles.true_shapes(gemm)
    shapes = {
        "x": [("rows", 1, -1, 2), ("k", 1, spec.padded_k, 2)],
        "packed": of_gemm["w"],
        "scale": of_gemm["scales"],
        "alpha": [("experts", 1, spec.matrices, 1)],
        "bias": [("experts", 1, spec.matrices, 1), ("", 1, spec.n, 1)],
        "out": [("rows", 1, -1, 2), ("", 1, spec.n, 1)],
    }
    written = ["x"] if spec.copies_rows else []  # by the kernel before it
    if spec.experts:
        shapes["expert_of_tile"] = of_gemm["expert_of_tile"]
        written.append("expert_of_tile")
    func = func.with_attrs({PARAMS: shapes, OPTIONAL: {"alpha": 1.0, "bias": 0.0}})
    if written:
        func = func.with_attr(AFTER, written)
    return func if rows is None else func.with_attr("blockscale.rows", rows)


def _grouped(spec: Int4Mm, token_tile: int) -> PrimFunc:
    gemm = gemm_of(spec)
    E, R, RB, KB, SB, SN = tiles.sizes(gemm)
    N, dtype = i64(token_tile), spec.dtype
    multiply, natural = tiles.products(gemm, token_tile), tiles.natural
    left = T.float32(tiles.left_over("int4", gemm.zeros, dtype))

    @T.prim_func(s_tir=True)
    def main(
        x_handle: T.handle,
        packed: T.Buffer((E, RB, KB, i64(tiles.BLOCK_WORDS)), "uint32"),
        scale: T.Buffer((E, RB, SB, SN), dtype),
        alpha: T.Buffer((E,), "float32"),
        bias: T.Buffer((E, R), "float32"),
        out_handle: T.handle,
        expert_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        count = T.int64()
        x = T.match_buffer(x_handle, (count, N, KB, i64(64)), dtype)
        out = T.match_buffer(out_handle, (count, N, R), dtype)
        expert_of_tile = T.match_buffer(expert_handle, (count,), "int32")
        C = T.sblock_alloc_buffer((count, N, R), "float32")
        multiply(tiles.sorted_rows(x), tiles.in_table(expert_of_tile), packed, scale, C, count)
        for t, i, r in T.grid(count, N, R):
            with T.sblock("epilogue"):
                vt, vi, vr = T.axis.remap("SSS", [t, i, r])
                out[vt, vi, natural(vr)] = tirx.Cast(
                    dtype,
                    T.fma(
                        C[vt, vi, vr],
                        alpha[expert_of_tile[vt]] * left,
                        bias[expert_of_tile[vt], natural(vr)],
                    ),
                )

    return main


def _dense(spec: Int4Mm, token_tile: int) -> PrimFunc:
    gemm = gemm_of(spec)
    E, R, RB, KB, SB, SN = tiles.sizes(gemm)
    N, dtype = i64(token_tile), spec.dtype
    multiply, natural = tiles.products(gemm, token_tile), tiles.natural
    left = T.float32(tiles.left_over("int4", gemm.zeros, dtype))

    @T.prim_func(s_tir=True)
    def main(
        x_handle: T.handle,
        packed: T.Buffer((E, RB, KB, i64(tiles.BLOCK_WORDS)), "uint32"),
        scale: T.Buffer((E, RB, SB, SN), dtype),
        alpha: T.Buffer((E,), "float32"),
        bias: T.Buffer((E, R), "float32"),
        out_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        count = T.int64()
        x = T.match_buffer(x_handle, (count, N, KB, i64(64)), dtype)
        out = T.match_buffer(out_handle, (count, N, R), dtype)
        C = T.sblock_alloc_buffer((count, N, R), "float32")
        multiply(tiles.sorted_rows(x), lambda t: i64(0), packed, scale, C, count)
        for t, i, r in T.grid(count, N, R):
            with T.sblock("epilogue"):
                vt, vi, vr = T.axis.remap("SSS", [t, i, r])
                out[vt, vi, natural(vr)] = tirx.Cast(
                    dtype, T.fma(C[vt, vi, vr], alpha[0] * left, bias[0, natural(vr)])
                )

    return main
