"""Edge-LLM's decode ops as GPU threads walk them; `edgellm.passes` has the arithmetic.

A CTA has a strip of 64 columns of one slot.  Its threads are groups along K times parts of the
strip: a thread adds up its columns of every so many blocks of 16 rows, and loads the next block's
codes, scales and activations before it computes with those that it has.  The groups' sums meet in
shared memory and are added in the order of the groups.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.base import edgellm_index as index
from blockscale.base.sizes import ceil_div, round_up
from blockscale.specs.edgellm import EdgeDown, EdgeUp
from blockscale.tir import formats
from blockscale.tir.common import i64, widen
from blockscale.tir.edgellm.passes import activated, code_value, down_kernel, is_expert, up_kernel

COLUMNS = 16
"""Columns of a thread: 16 bytes of scales, and 8 bytes of codes in each of 16 rows."""

PARTS = index.TILE // COLUMNS
"""Threads that share a strip."""

MOST_GROUPS = 64
"""Groups along K: 256 threads, so that two CTAs fit into an SM's registers."""

CTAS = 2
"""CTAs for which an SM must have registers: one computes while the other waits for memory."""

SHARES = 4
"""Parts in which the groups' sums are added, and then these."""


def groups(rows: int) -> int:
    """Groups along K, in whole warps: those with the least idle threads in the last round."""
    blocks = rows // index.BLOCK
    fits = range(8, MOST_GROUPS + 1, 8)
    return min(
        fits, key=lambda g: ceil_div(blocks, g) * MOST_GROUPS + (round_up(blocks, g) - blocks)
    )


def scale_value(byte: PrimExpr) -> PrimExpr:
    """Value (float32) of an S0E5M3 byte (uint8), by way of the float16 whose bits it has."""
    bits = tirx.Cast("uint16", byte) << tirx.const(7, "uint16")
    return tirx.Cast("float32", tirx.reinterpret("float16", bits))


def _x_steps(spec: EdgeUp | EdgeDown) -> tuple[int, str, Any]:
    """Elements and dtype of 16 activations as stored, and what ``e`` of them is in float32."""
    if isinstance(spec, EdgeDown):
        return 16, "float32", lambda raw, side, s, e: activated(spec.activation, raw[s, e])
    if spec.dtype != "nvfp4":
        return 16, spec.dtype, lambda raw, side, s, e: widen(raw[s, e])
    return 8, "uint8", lambda raw, side, s, e: code_value(raw[s, e // 2], e) * scale_value(side[s])


def _thread_step(spec: EdgeUp | EdgeDown) -> Any:
    """Step of one thread: its sums of one expert added to total[COLUMNS].

    ``side``: the bytes of scales of coded activations, or None.
    """
    blocks, G = spec.rows // index.BLOCK, groups(spec.rows)
    C, half, block, two = i64(COLUMNS), i64(COLUMNS // 2), i64(index.BLOCK), i64(2)
    count, dtype, value = _x_steps(spec)
    E, coded = i64(count), dtype == "uint8"
    trips, nb = i64(ceil_div(blocks, 2 * G)), i64(blocks)
    strip_bytes, strip_columns = i64(index.TILE_BYTES), i64(index.TILE)

    def side_at(b: PrimExpr) -> PrimExpr:
        tile = b // index.LANES
        return tile * index.LANES + index.block_byte(b % index.LANES)

    @T.inline
    def fetch(s, b, x_row, side_row, weights, e, strip, part, raw, side, codes, byte):
        if b < nb:
            for i in range(E):
                with T.sblock("load_x"):
                    vi = T.axis.spatial(E, i)
                    raw[s, vi] = x_row(b * E + vi)
            if coded:
                with T.sblock("load_side"):
                    side[s] = side_row(side_at(b))
            for k, i in T.grid(block, half):
                with T.sblock("load_codes"):
                    vk, vi = T.axis.remap("SS", [k, i])
                    codes[s, vk, vi] = weights[0][
                        e, b * block + vk, strip * strip_bytes + part * half + vi
                    ]
            for i in range(C):
                with T.sblock("load_scales"):
                    vi = T.axis.spatial(C, i)
                    byte[s, vi] = weights[1][e, b, strip * strip_columns + part * C + vi]

    @T.inline
    def compute(s, b, raw, side, codes, byte, total):
        if b < nb:
            with T.sblock("compute"):
                T.reads(raw[s, 0:E], codes[s, 0:block, 0:half], byte[s, 0:C], total[0:C])
                T.writes(total[0:C])
                a = T.sblock_alloc_buffer((block,), "float32")
                sums = T.sblock_alloc_buffer((C,), "float32")
                for i in range(block):
                    with T.sblock("act"):
                        vi = T.axis.spatial(block, i)
                        a[vi] = value(raw, side, s, vi)
                for i, k in T.grid(C, block):
                    with T.sblock("dot"):
                        vi, vk = T.axis.remap("SR", [i, k])
                        with T.init():
                            sums[vi] = T.float32(0)
                        sums[vi] = sums[vi] + a[vk] * code_value(codes[s, vk, vi // two], vi)
                for i in range(C):
                    with T.sblock("scale"):
                        vi = T.axis.spatial(C, i)
                        total[vi] = total[vi] + sums[vi] * scale_value(byte[s, vi])

    @T.inline
    def step(x_row, side_row, weights, e, strip, group, part, total):
        raw = T.sblock_alloc_buffer((two, E), dtype)
        side = T.sblock_alloc_buffer((two,), "uint8")
        codes = T.sblock_alloc_buffer((two, block, half), "uint8")
        byte = T.sblock_alloc_buffer((two, C), "uint8")
        held = T.meta_var((raw, side, codes, byte))
        given = T.meta_var((x_row, side_row, weights, e, strip, part, *held))
        fetch(0, group, *given)
        for r in T.serial(trips):
            with T.sblock("trip"):
                vr = T.axis.reduce(trips, r)
                T.reads(total[0:C])
                T.writes(total[0:C])
                first = T.meta_var(vr * i64(2 * G) + group)
                second = T.meta_var(vr * i64(2 * G) + i64(G) + group)
                third = T.meta_var(vr * i64(2 * G) + i64(2 * G) + group)
                fetch(1, second, *given)
                compute(0, first, *held, total)
                fetch(0, third, *given)
                compute(1, second, *held, total)

    return step


def _gemv_step(spec: EdgeUp | EdgeDown) -> Any:
    """Step from activations to out [tokens, slots, N]: sums times ``factor(t, j, e)``."""
    N, strips = i64(spec.columns), i64(spec.columns // index.TILE)
    G, P, C, tile = groups(spec.rows), i64(PARTS), i64(COLUMNS), i64(index.TILE)
    shares, share, Gs = i64(SHARES), i64(G // SHARES), i64(G)
    thread = _thread_step(spec)

    @T.inline
    def step(x_row, side_row, weights, ids, out, tokens, slots, experts, factor):
        for t, j, g in T.grid(tokens, slots, strips):
            with T.sblock("task"):
                vt, vj, vg = T.axis.remap("SSS", [t, j, g])
                there = T.meta_var(is_expert(ids[vt, vj], experts))
                first = T.meta_var(T.Cast("int64", ids[vt, vj]))
                T.reads(ids[vt, vj])
                T.writes(out[vt, vj, vg * tile : vg * tile + tile])
                met = T.sblock_alloc_buffer((Gs, tile), "float32")
                some = T.sblock_alloc_buffer((shares, tile), "float32")
                for q, p in T.grid(Gs, P):
                    with T.sblock("thread"):
                        vq, vp = T.axis.remap("SS", [q, p])
                        T.reads(ids[vt, vj])
                        T.writes(met[vq, vp * C : vp * C + C])
                        total = T.sblock_alloc_buffer((C,), "float32")
                        for i in range(C):
                            with T.sblock("clear"):
                                vi = T.axis.spatial(C, i)
                                total[vi] = T.float32(0)
                        # One iteration or none: what is tensorized may name a variable and may
                        # not load it.
                        for e in T.serial(
                            T.if_then_else(there, first, i64(0)),
                            T.if_then_else(there, first + i64(1), i64(0)),
                        ):
                            with T.sblock("expert"):
                                ve = T.axis.spatial(experts, e)
                                T.reads(total[0:C])
                                T.writes(total[0:C])
                                thread(
                                    lambda k: x_row(vt, vj, k),
                                    lambda k: side_row(vt, k),
                                    weights, ve, vg, vq, vp, total,
                                )  # fmt: skip
                        for i in range(C):
                            with T.sblock("meet"):
                                vi = T.axis.spatial(C, i)
                                met[vq, vp * C + vi] = total[vi]
                for s, n in T.grid(shares, tile):
                    with T.sblock("share"):
                        vs, vn = T.axis.remap("SS", [s, n])
                        T.reads(met[vs * share : vs * share + share, vn])
                        T.writes(some[vs, vn])
                        own = T.sblock_alloc_buffer((i64(1),), "float32")
                        for q in range(share):
                            with T.sblock("add"):
                                vq = T.axis.reduce(share, q)
                                with T.init():
                                    own[0] = T.float32(0)
                                own[0] = own[0] + met[vs * share + vq, vn]
                        with T.sblock("put"):
                            some[vs, vn] = own[0]
                for n in range(tile):
                    with T.sblock("store"):
                        vn = T.axis.spatial(tile, n)
                        T.reads(some[0:shares, vn], ids[vt, vj])
                        T.writes(out[vt, vj, vg * tile + vn])
                        out[vt, vj, vg * tile + vn] = _sum(some, vn) * T.if_then_else(
                            there, factor(vt, vj, first), T.float32(0)
                        )

    return step


def _sum(some: Any, n: PrimExpr) -> PrimExpr:
    total = some[0, n]
    for s in range(1, SHARES):
        total = total + some[s, n]
    return total


ATTRS = {"global_symbol": "main", "tirx.noalias": False, "blockscale.ctas": CTAS}


def up_rows(spec: EdgeUp) -> PrimFunc:
    """Return the kernel with the parameters of ``spec.params()``."""
    step = _gemv_step(spec)

    @T.inline
    def body(x, x_scale, ids, z, tokens, slots, experts, weights, factor):
        x_row = T.meta_var(lambda t, j, k: x[t, k])
        side_row = T.meta_var(lambda t, k: x_scale[t, k])
        step(x_row, side_row, weights, ids, z, tokens, slots, experts, factor)

    return up_kernel(spec, ATTRS, body)


def down_rows(spec: EdgeDown) -> PrimFunc:
    """Return the kernel with the parameters of ``spec.params()``."""
    N, step = i64(spec.hidden), _gemv_step(spec)

    @T.inline
    def body(z, ids, partial, out, tokens, slots, experts, weights, factor):
        x_row = T.meta_var(lambda t, j, k: z[t, j, k])
        step(x_row, None, weights, ids, partial, tokens, slots, experts, factor)
        for t, n in T.grid(tokens, N):
            with T.sblock("out"):
                vt, vn = T.axis.remap("SS", [t, n])
                T.reads(partial[vt, 0:slots, vn])
                T.writes(out[vt, vn])
                total = T.sblock_alloc_buffer((i64(1),), "float32")
                for j in range(slots):
                    with T.sblock("combine"):
                        vj = T.axis.reduce(slots, j)
                        with T.init():
                            total[0] = T.float32(0)
                        total[0] = total[0] + partial[vt, vj, vn]
                with T.sblock("round"):
                    out[vt, vn] = formats.round_to(spec.dtype, total[0])

    return down_kernel(spec, ATTRS, body)
