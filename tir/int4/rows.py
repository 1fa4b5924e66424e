"""Rows of x on their way to an INT4 weight (`int4.mm`): ranges of experts, x', sums."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T

from blockscale.specs.int4 import Int4Mm
from blockscale.tir import formats
from blockscale.tir.common import i64, widen


def prepare_rows(spec: Int4Mm) -> Any:
    """Step: x' of an expert's rows as float32, those beyond them zero, in blocks ``prepare*``.

    What a step of it computes is stored: expressions would repeat it as often as they name it.
    """
    K = i64(spec.k)

    def product(x, pre, mine, before, expert, i, k):
        value = widen(x[before + i, k]) * pre[expert, k]
        return T.if_then_else(i < mine, value, T.float32(0))

    @T.inline
    def multiplied(P, x, pre, mine, before, expert, height):
        for i, k in T.grid(height, K):
            with T.sblock("prepare0"):
                vi, vk = T.axis.remap("SS", [i, k])
                P[vi, vk] = product(x, pre, mine, before, expert, vi, vk)

    @T.inline
    def rounded(X, P, height):
        for i, k in T.grid(height, K):
            with T.sblock("prepare1"):
                vi, vk = T.axis.remap("SS", [i, k])
                X[vi, vk] = widen(formats.round_to(spec.dtype, P[vi, vk]))

    @T.inline
    def coded(X, P, codes, height):
        for i, k in T.grid(height, K):
            with T.sblock("prepare2"):
                vi, vk = T.axis.remap("SS", [i, k])
                codes[vi, vk] = formats.e4m3_encode(P[vi, vk])
        for i, k in T.grid(height, K):
            with T.sblock("prepare3"):
                vi, vk = T.axis.remap("SS", [i, k])
                X[vi, vk] = formats.e4m3_decode(codes[vi, vk])

    @T.inline
    def a16(x, pre, X, P, Q, codes, mine, before, expert, height):
        multiplied(P, x, pre, mine, before, expert, height)
        rounded(X, P, height)

    @T.inline
    def a8(x, pre, X, P, Q, codes, mine, before, expert, height):
        multiplied(P, x, pre, mine, before, expert, height)
        rounded(Q, P, height)
        coded(X, Q, codes, height)

    return a8 if spec.activation == "a8" else a16


def ranges(spec: Int4Mm) -> Any:
    """Step from offsets to the first row of each expert, and how many it has."""
    zero, one = i64(0), i64(1)

    def clamped(value: PrimExpr, low: PrimExpr, high: PrimExpr) -> PrimExpr:
        return tirx.Max(tirx.Min(tirx.Cast("int64", value), high), low)

    @T.inline
    def grouped(offsets, start, count, rows):
        for u in range(1):
            with T.sblock("ranges"):
                vu = T.axis.spatial(1, u)
                T.reads(offsets[0 : i64(spec.matrices) + one])
                T.writes(start[0 : i64(spec.matrices)], count[0 : i64(spec.matrices)])
                for e in range(i64(spec.matrices)):
                    start[e] = clamped(offsets[e], zero, rows)
                    count[e] = clamped(offsets[e + one], start[e], rows) - start[e]

    @T.inline
    def dense(offsets, start, count, rows):
        for u in range(1):
            with T.sblock("ranges"):
                vu = T.axis.spatial(1, u)
                T.reads()
                T.writes(start[0], count[0])
                start[0] = zero
                count[0] = rows

    return grouped if spec.experts else dense


def group_sums(spec: Int4Mm, wanted: bool) -> Any:
    """Step: sums of x' over each group, for the zeros; nothing without."""
    G, group = i64(spec.groups), i64(spec.group)

    @T.inline
    def some(X, sums, height):
        for i, g, k in T.grid(height, G, group):
            with T.sblock("group_sum"):
                vi, vg, vk = T.axis.remap("SSR", [i, g, k])
                with T.init():
                    sums[vi, vg] = T.float32(0)
                sums[vi, vg] = sums[vi, vg] + X[vi, vg * group + vk]

    @T.inline
    def none(X, sums, height):
        pass

    return some if wanted and spec.zero != "none" else none
