"""Scale sweep: per block, the candidate scale with the least squared FP4 rounding error.

With g the global amax and c_k the candidates, in float32 and in ascending k:

    s_k = fl(c_k * g) / 6, or 1 where that is 0
    L_k = sum_i (|w_i| - e2m1(|w_i| / s_k) * s_k)^2
    best = the first k with the least L_k; a NaN loss never wins, and no winner means k = 0
    best_amax = fl(g * c_best)

This is ModelOpt's fused sweep (nvfp4_fp8_scale_sweep): 126 candidates, the positive E4M3 values /
448.  On CPUs (`scale_sweep`) blocks are computed in tiles of ``TILE``, one block a lane; a partial
tile repeats the last block.  On GPUs (`scale_sweep_threads`) a thread has a block.  In both a step
of the loss is d = fma(-q, s, |w|), L = fma(d, d, L): LLVM contracts the CPU's products and sums
where the level has FMA, the GPU's form names the fma.  At level "plain" each product is rounded, so
that another candidate may win where two err alike.
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

    return _static(main, spec, blocks)


def _static(main: PrimFunc, spec: ScaleSweep, blocks: int | None) -> PrimFunc:
    """Return ``main`` for ``blocks`` blocks and the default number of candidates, if given."""
    if blocks is None:
        return main
    static = fix_shape(main, "x", (blocks, spec.block_size))
    return fix_shape(static, "candidates", (CANDIDATES,))


COLUMNS = 136
"""Columns of the table of scales: candidates, a group of 8 beyond each, and a flag in the last."""

REGISTER_BLOCK = 32
"""Largest block that a thread of a GPU loads as a whole (block "load"); others stay in L1."""

SMALLEST_G, LARGEST_G = 2.0**-40, 2.0**62
"""Where all scales of the default candidates, and their reciprocals, are normal numbers."""


def fused(a: PrimExpr, b: PrimExpr, c: PrimExpr) -> PrimExpr:
    """``a * b + c`` rounded once, in CUDA C++ as in C."""
    return tirx.call_pure_extern("float32", "fmaf", a, b, c)


def error_of(value: PrimExpr, quotient: PrimExpr, scale: PrimExpr) -> PrimExpr:
    """Rounding error of ``|value|`` at ``scale``, with ``quotient`` of the two."""
    return fused(-formats.e2m1_round(quotient), scale, magnitude(value))


def magnitude(value: PrimExpr) -> PrimExpr:
    """``|value|`` in float32."""
    return tirx.abs(widen(value))


def candidate_scale(candidate: PrimExpr, g: PrimExpr) -> PrimExpr:
    """Scale s of a candidate."""
    return nonzero(candidate * g / tirx.const(6.0, "float32"))


def is_other(k: PrimExpr, candidate: PrimExpr, count: PrimExpr, g: PrimExpr) -> PrimExpr:
    """0 if candidate ``k`` of ``count`` has the default's bits and g is in range, else 1."""
    code = tirx.Cast("int32", k) + tirx.const(1, "int32")
    default = formats.e4m3_decode(code) / tirx.const(448.0, "float32")
    same = formats.bits_of(candidate) == formats.bits_of(default)
    in_range = tirx.all(
        g >= tirx.const(SMALLEST_G, "float32"), g <= tirx.const(LARGEST_G, "float32")
    )
    default_here = tirx.all(count == i64(CANDIDATES), in_range, same)
    return tirx.Select(default_here, tirx.const(0, "int32"), tirx.const(1, "int32"))


def table_entry(
    row: PrimExpr, k: PrimExpr, candidate: PrimExpr, count: PrimExpr, g: PrimExpr, others: PrimExpr
) -> PrimExpr:
    """Row 0: scales; row 1: their reciprocals.

    NaN beyond ``count``, which never wins; then 1 and 0.  Last scale: 1 if there are no ``others``.
    """
    nan, zero, one = (tirx.const(value, "float32") for value in (float("nan"), 0.0, 1.0))
    scale = tirx.Select(k < count, candidate_scale(candidate, g), nan)
    flagged = tirx.all(k == i64(COLUMNS - 1), others > tirx.const(0, "int32"))
    own = tirx.Select(k < i64(CANDIDATES), scale, tirx.Select(flagged, zero, one))
    rest = tirx.Select(k < i64(CANDIDATES), one / scale, zero)
    return tirx.Select(row == i64(0), own, rest)


def scale_sweep_threads(spec: ScaleSweep, blocks: int | None = None) -> PrimFunc:
    """Kernel of `scale_sweep`'s signature for GPUs: block "pick" is the work of a thread.

    "pick" has the first 126 candidates, whose scales are in a table, and "more" all others.  The
    table's flag tells an implementation of "pick" that these are the default candidates and that g
    is in a range where bounds on the loss hold.
    """
    size, columns, first = i64(spec.block_size), i64(COLUMNS), i64(CANDIDATES)
    held = spec.block_size <= REGISTER_BLOCK

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
        others = T.sblock_alloc_buffer((i64(1),), "int32")
        table = T.sblock_alloc_buffer((i64(2), columns), "float32")
        raw = T.meta_var(T.sblock_alloc_buffer((blocks, size), spec.dtype) if held else x)
        index = T.sblock_alloc_buffer((blocks,), "int32")
        least = T.sblock_alloc_buffer((blocks,), "float32")
        trial = T.sblock_alloc_buffer((blocks, i64(2)), "float32")
        winner = T.sblock_alloc_buffer((blocks,), "int32")
        smallest = T.sblock_alloc_buffer((blocks,), "float32")
        more_trial = T.sblock_alloc_buffer((blocks, i64(3)), "float32")
        for k in T.grid(first):
            with T.sblock("others"):
                vk = T.axis.reduce(first, k)
                with T.init():
                    others[0] = T.int32(0)
                others[0] = others[0] + is_other(
                    vk, candidates[last_repeated(vk, count)], count, global_amax[0]
                )
        for j, k in T.grid(i64(2), columns):
            with T.sblock("scale"):
                vj, vk = T.axis.remap("SS", [j, k])
                candidate = T.meta_var(candidates[last_repeated(vk, count)])
                table[vj, vk] = table_entry(vj, vk, candidate, count, global_amax[0], others[0])
        if held:
            for b, e in T.grid(blocks, size):
                with T.sblock("load"):
                    vb, ve = T.axis.remap("SS", [b, e])
                    raw[vb, ve] = x[vb, ve]
        for b in T.grid(blocks):
            with T.sblock("pick"):
                vb = T.axis.spatial(blocks, b)
                T.reads(raw[vb, 0:size], table[0:2, 0:columns])
                T.writes(index[vb], least[vb], trial[vb, 0:2])
                index[vb] = T.int32(0)
                least[vb] = tirx.infinity("float32")
                for k in T.serial(first):
                    trial[vb, 0] = T.float32(0)
                    for e in T.serial(size):
                        trial[vb, 1] = magnitude(raw[vb, e]) / table[0, k]
                        trial[vb, 1] = error_of(raw[vb, e], trial[vb, 1], table[0, k])
                        trial[vb, 0] = fused(trial[vb, 1], trial[vb, 1], trial[vb, 0])
                    index[vb] = T.Select(trial[vb, 0] < least[vb], T.Cast("int32", k), index[vb])
                    least[vb] = T.Select(trial[vb, 0] < least[vb], trial[vb, 0], least[vb])
        for b in T.grid(blocks):
            with T.sblock("more"):
                vb = T.axis.spatial(blocks, b)
                T.reads(x[vb, 0:size], candidates[0:count], global_amax[0], index[vb], least[vb])
                T.writes(winner[vb], smallest[vb], more_trial[vb, 0:3])
                winner[vb] = index[vb]
                smallest[vb] = least[vb]
                for k in T.serial(tirx.Max(count - first, i64(0))):
                    more_trial[vb, 0] = T.float32(0)
                    more_trial[vb, 2] = candidate_scale(candidates[k + first], global_amax[0])
                    for e in T.serial(size):
                        more_trial[vb, 1] = magnitude(x[vb, e]) / more_trial[vb, 2]
                        more_trial[vb, 1] = error_of(x[vb, e], more_trial[vb, 1], more_trial[vb, 2])
                        more_trial[vb, 0] = fused(
                            more_trial[vb, 1], more_trial[vb, 1], more_trial[vb, 0]
                        )
                    winner[vb] = T.Select(
                        more_trial[vb, 0] < smallest[vb], T.Cast("int32", k + first), winner[vb]
                    )
                    smallest[vb] = T.Select(
                        more_trial[vb, 0] < smallest[vb], more_trial[vb, 0], smallest[vb]
                    )
        for b in T.grid(blocks):
            with T.sblock("best_amax"):
                vb = T.axis.spatial(blocks, b)
                best_amax[vb] = candidates[T.Cast("int64", winner[vb])] * global_amax[0]

    return _static(main, spec, blocks)
