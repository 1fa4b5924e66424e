"""Scale sweep: per block, the candidate scale with the least squared FP4 rounding error.

With g the global amax and c_k the candidates, in float32 and in ascending k:

    s_k = fl(c_k * g) / 6, or 1 where that is 0
    L_k = sum_i (|w_i| - e2m1(|w_i| / s_k) * s_k)^2
    best = the first k with the least L_k; a NaN loss never wins, and no winner means k = 0
    best_amax = fl(g * c_best)

This is ModelOpt's fused sweep (nvfp4_fp8_scale_sweep): 126 candidates, the positive E4M3 values /
448.  Blocks are computed in tiles of ``TILE``, one block a lane; a partial tile repeats the last
block.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.specs import ScaleSweep
from blockscale.tir import formats
from blockscale.tir.common import fix_shape, i64, tiles_of, widen

TILE = 16
"""Blocks that are swept together."""

CANDIDATES = 126
"""Candidates of a static instance: as many as there are positive finite E4M3 values."""


def last_repeated(block: PrimExpr, blocks: PrimExpr) -> PrimExpr:
    """``block``, at most the last one."""
    return tirx.Min(block, blocks - i64(1))


def nonzero(scale: PrimExpr) -> PrimExpr:
    """``scale``, or 1 where it is 0 (the global amax is 0 or underflows)."""
    return tirx.Select(scale == tirx.const(0.0, "float32"), tirx.const(1.0, "float32"), scale)


def squared_error(weight: PrimExpr, scale: PrimExpr) -> PrimExpr:
    """Squared rounding error of ``weight`` >= 0 at ``scale``."""
    error = weight - formats.e2m1_round(weight / scale) * scale
    return error * error


def scale_sweep(spec: ScaleSweep, blocks: int | None = None) -> PrimFunc:
    """Kernel ``(x[blocks, size], global_amax, candidates[count]) -> best_amax[blocks]``."""
    size, tile = i64(spec.block_size), i64(TILE)

    @T.prim_func(s_tir=True)
    def main(
        x_handle: T.handle,
        global_amax: T.Buffer((i64(1),), "float32"),
        candidates_handle: T.handle,
        best_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        blocks, count = T.int64(), T.int64()
        x = T.match_buffer(x_handle, (blocks, size), spec.dtype)
        candidates = T.match_buffer(candidates_handle, (count,), "float32")
        best_amax = T.match_buffer(best_handle, (blocks,), "float32")
        tiles = T.meta_var(tiles_of(blocks, TILE))
        scale = T.sblock_alloc_buffer((count,), "float32")
        weight = T.sblock_alloc_buffer((tiles, size, tile), "float32")
        loss = T.sblock_alloc_buffer((tiles, count, tile), "float32")
        least = T.sblock_alloc_buffer((tiles, tile), "float32")
        best = T.sblock_alloc_buffer((tiles, tile), "float32")
        for k in T.grid(count):
            with T.sblock("scale"):
                vk = T.axis.spatial(count, k)
                scale[vk] = nonzero(candidates[vk] * global_amax[0] / T.float32(6))
        for t, i, e in T.grid(tiles, tile, size):
            with T.sblock("weight"):
                vt, vi, ve = T.axis.remap("SSS", [t, i, e])
                weight[vt, ve, vi] = tirx.abs(widen(x[last_repeated(vt * tile + vi, blocks), ve]))
        for t, k, e, i in T.grid(tiles, count, size, tile):
            with T.sblock("loss"):
                vt, vk, ve, vi = T.axis.remap("SSRS", [t, k, e, i])
                with T.init():
                    loss[vt, vk, vi] = T.float32(0)
                loss[vt, vk, vi] = loss[vt, vk, vi] + squared_error(weight[vt, ve, vi], scale[vk])
        for t, k, i in T.grid(tiles, count, tile):
            with T.sblock("best"):
                vt, vk, vi = T.axis.remap("SRS", [t, k, i])
                with T.init():
                    best[vt, vi] = candidates[0]
                    least[vt, vi] = tirx.infinity("float32")
                best[vt, vi] = T.Select(
                    loss[vt, vk, vi] < least[vt, vi], candidates[vk], best[vt, vi]
                )
                least[vt, vi] = T.Select(
                    loss[vt, vk, vi] < least[vt, vi], loss[vt, vk, vi], least[vt, vi]
                )
        for t, i in T.grid(tiles, tile):
            with T.sblock("best_amax"):
                vt, vi = T.axis.remap("SS", [t, i])
                best_amax[last_repeated(vt * tile + vi, blocks)] = best[vt, vi] * global_amax[0]

    if blocks is None:
        return main
    static = fix_shape(main, "x", (blocks, spec.block_size))
    return fix_shape(static, "candidates", (CANDIDATES,))
