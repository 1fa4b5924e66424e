"""Rows of an MoE layer between ranks: dispatch, combine, and the sum over the slots of a token.

    rank, expert = owner[topk_ids[t, j], (t + own rank) % replicas]
    dispatch:  row t goes once to every rank that has an expert of it; ids [t, j] to all ranks;
               with an act_fmt, as codes and scales (`CodedRow`) that are made once
    combine:   the result of slot (t, j) goes back to row t * k + j of its token's rank
    reduce:    out[t] = round(sum over j, ascending, of topk_weights[t, j] * slot[t, j]), float32

Slots with an id outside [0, experts) are left out; a rank without tokens passes one row of such.
Sums are as in `tir.moe.fused_moe` (CPU) and `native/moe/moe_rows.cuh` (CUDA, a fused multiply-add),
so that they have the same bits.

Loops ``p`` run over the parts of a unit of work that a CTA's threads take.  What a rank stores into
another's memory, and how they tell each other, are device functions (`native/moe/moe_peers.cuh`,
docs/ep.md); TensorIR says which 16 bytes go where.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.backend.cuda.op import cuda_func_call
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.specs.exchange import (
    CHUNK_ELEMENTS,
    FRAME,
    OWNER_BITS,
    STATE,
    EpCombine,
    EpDispatch,
    EpReduce,
)
from blockscale.specs.plans.coded import ALIGNMENT
from blockscale.tir import formats
from blockscale.tir.common import fix_shape, i64, keep_params, tiles_of, widen

HEADER = '#include "fp4.cuh"\n#include "moe_coded.cuh"\n#include "moe_peers.cuh"\n'
"""What declares the device functions."""

WORDS = 4
"""Words of 32 bits that a thread moves at a time."""

SCALES_BYTES = 2
"""Bytes of scales of the elements of 16 bytes of nvfp4 codes."""

CAST = {"bfloat16": "BsBf16", "float16": "BsF16"}


def _call(name: str, *args: Any, dtype: str = "void") -> PrimExpr:
    return cuda_func_call(name, *args, source_code=HEADER, return_type=dtype)


def _owner(spec: EpDispatch) -> Callable[..., PrimExpr]:
    """The entry of the owner table for slot (t, j); -1 where there is none."""

    def owner_of(topk_ids: Any, owner: Any, frame: Any, rows: Any, replicas: Any, t: Any, j: Any):
        def there(e: PrimExpr) -> PrimExpr:
            own = owner[e, tirx.truncmod(t + frame[i64(FRAME.index("rank"))], replicas)]
            return tirx.if_then_else(tirx.all(e >= 0, e < spec.experts), own, tirx.const(-1))

        return tirx.if_then_else(t < rows, there(topk_ids[t, j]), tirx.const(-1))

    return owner_of


def _whole_row(spec: EpDispatch, parts: int, ahead: int) -> Any:
    """Step that stores row vt of x to the ranks whose bits ``goes`` has."""
    R, P, A, chunk, words = map(i64, (spec.ranks, parts, ahead, CHUNK_ELEMENTS, WORDS))
    chunks = i64(spec.hidden // CHUNK_ELEMENTS)

    @T.inline
    def step(x, a1_scale, frame, goes, vt, vp):
        raw = T.sblock_alloc_buffer((A, words), "uint32", scope="local")
        for i in T.serial(tiles_of(chunks, parts * ahead)):
            for a in T.unroll(A):
                if goes[0] != 0 and (i * A + a) * P + vp < chunks:
                    T.evaluate(
                        _call(
                            "bs_load<16, BS_KEEP>",
                            raw.access_ptr("rw", offset=a * words),
                            T.address_of(x[vt, ((i * A + a) * P + vp) * chunk]),
                        )
                    )
            for r in T.unroll(R):
                for a in T.unroll(A):
                    if (goes[0] >> T.Cast("int32", r)) & 1 != 0 and (i * A + a) * P + vp < chunks:
                        T.evaluate(
                            _call(
                                "bs_ep_put16",
                                frame.access_ptr("r"),
                                T.Cast("int32", r),
                                T.int32(2),
                                (frame[i64(0)] * frame[i64(1)] + vt) * chunks
                                + (i * A + a) * P
                                + vp,
                                raw.access_ptr("rw", offset=a * words),
                            )
                        )

    return step


def _coded_row(spec: EpDispatch, parts: int) -> Any:
    """Step that codes row vt of x, and stores it to the ranks whose bits ``goes`` has.

    A thread holds all its pieces of the row, of which each makes 16 bytes of codes.
    """
    row, fp8, cast = spec.row, spec.act_fmt == "fp8", CAST[spec.dtype]
    held = -(-row.cols // (row.step * parts))
    R, P, U, chunk, words = map(i64, (spec.ranks, parts, held, CHUNK_ELEMENTS, WORDS))
    loads, pieces = i64(row.step // CHUNK_ELEMENTS), i64(row.cols // row.step)
    scales = {size: i64(row.codes // size) for size in (ALIGNMENT, SCALES_BYTES)}

    @T.inline
    def put(size, frame, goes, vt, place, value):
        for r in T.unroll(R):
            if (goes[0] >> T.Cast("int32", r)) & 1 != 0:
                T.evaluate(
                    _call(
                        f"bs_ep_put{size}",
                        frame.access_ptr("r"),
                        T.Cast("int32", r),
                        T.int32(2),
                        (frame[i64(0)] * frame[i64(1)] + vt) * i64(row.bytes // size) + place,
                        value,
                    )
                )

    @T.inline
    def load(x, goes, raw, vt, vp):
        for u in T.unroll(U):
            for a in T.unroll(loads):
                for w in T.unroll(words):
                    raw[u, a * words + w] = T.uint32(0)
                if goes[0] != 0 and u * P + vp < pieces:
                    T.evaluate(
                        _call(
                            "bs_load<16, BS_KEEP>",
                            raw.access_ptr("rw", offset=(u * loads + a) * words),
                            T.address_of(x[vt, ((u * P + vp) * loads + a) * chunk]),
                        )
                    )

    @T.inline
    def rows_of_fp8(x, a1_scale, frame, goes, vt, vp):
        raw = T.sblock_alloc_buffer((U, loads * words), "uint32", scope="local")
        codes = T.sblock_alloc_buffer((words,), "uint32", scope="local")
        factor = T.sblock_alloc_buffer((words,), "float32", scope="local")
        load(x, goes, raw, vt, vp)
        for w in T.unroll(words):
            factor[w] = T.float32(0)
        factor[0] = _call(
            f"bs_coded_factor<{cast}, {held * row.step // 2}>",
            raw.access_ptr("r"),
            dtype="float32",
        )
        for u in T.unroll(U):
            if u * P + vp < pieces:
                T.evaluate(
                    _call(
                        f"bs_coded_fp8<{cast}>",
                        codes.access_ptr("w"),
                        raw.access_ptr("r", offset=u * loads * words),
                        factor[0],
                    )
                )
                put(ALIGNMENT, frame, goes, vt, u * P + vp, codes.access_ptr("r"))
        if vp == 0:
            put(ALIGNMENT, frame, goes, vt, scales[ALIGNMENT], factor.access_ptr("r"))

    @T.inline
    def rows_of_nvfp4(x, a1_scale, frame, goes, vt, vp):
        raw = T.sblock_alloc_buffer((U, loads * words), "uint32", scope="local")
        codes = T.sblock_alloc_buffer((words,), "uint32", scope="local")
        both = T.sblock_alloc_buffer((i64(1),), "int32", scope="local")
        load(x, goes, raw, vt, vp)
        for u in T.unroll(U):
            if u * P + vp < pieces:
                both[0] = _call(
                    f"bs_coded_nvfp4<{cast}>",
                    codes.access_ptr("w"),
                    raw.access_ptr("r", offset=u * loads * words),
                    a1_scale[0],
                    dtype="int32",
                )
                put(ALIGNMENT, frame, goes, vt, u * P + vp, codes.access_ptr("r"))
                put(SCALES_BYTES, frame, goes, vt, scales[SCALES_BYTES] + u * P + vp, both[0])

    return rows_of_fp8 if fp8 else rows_of_nvfp4


def dispatch(spec: EpDispatch, parts: int, ahead: int, rows: int | None = None) -> PrimFunc:
    """Return the kernels with the parameters of ``spec.params()``: "send", then "settle".

    Args:
        spec: of the exported function.
        parts: threads that share a row.
        ahead: chunks of a thread whose loads come before their stores; of rows that are coded, all.
        rows: of x; None: symbolic.
    """
    H, k, R, E, P = map(i64, (spec.hidden, spec.top_k, spec.ranks, spec.experts, parts))
    entries = i64(len(FRAME) + spec.ranks)
    send_row = _whole_row(spec, parts, ahead) if spec.act_fmt is None else _coded_row(spec, parts)
    states, owner_of = i64(len(STATE)), _owner(spec)
    shift, mask = tirx.const(OWNER_BITS), tirx.const((1 << OWNER_BITS) - 1)
    sent = f"bs_ep_sent<{spec.ranks}, BS_EP_DISPATCH>"
    arrived = f"bs_ep_arrived<{spec.ranks}, BS_EP_DISPATCH>"

    def used(x: Any, a1_scale: Any, topk_ids: Any, owner: Any, rows: Any, replicas: Any) -> Any:
        scale = [a1_scale[0:1]] if spec.act_fmt == "nvfp4" else []
        return [x[0:rows, 0:H], *scale, topk_ids[0:rows, 0:k], owner[0:E, 0:replicas]]

    @T.prim_func(s_tir=True)
    def main(
        x_handle: T.handle,
        a1_scale: T.Buffer((i64(1),), "float32"),
        topk_ids_handle: T.handle,
        owner_handle: T.handle,
        frame: T.Buffer((entries,), "int64"),
        state: T.Buffer((states,), "int32"),
        landed_ids_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        rows, replicas, landed = T.int64(), T.int64(), T.int64()
        x = T.match_buffer(x_handle, (rows, H), spec.dtype)
        topk_ids = T.match_buffer(topk_ids_handle, (rows, k), "int32")
        owner = T.match_buffer(owner_handle, (E, replicas), "int32")
        landed_ids = T.match_buffer(landed_ids_handle, (landed, k), "int32")
        for t, p in T.grid(rows, P):
            with T.sblock("send"):
                vt, vp = T.axis.remap("SS", [t, p])
                T.reads(*used(x, a1_scale, topk_ids, owner, rows, replicas))
                T.writes(state[0:states])
                goes = T.sblock_alloc_buffer((i64(1),), "int32", scope="local")
                own = T.sblock_alloc_buffer((i64(1),), "int32", scope="local")
                if _call("bs_ep_takes_part", state.access_ptr("r"), dtype="bool"):
                    goes[0] = 0
                    for j in T.unroll(k):
                        own[0] = owner_of(topk_ids, owner, frame, rows, replicas, vt, j)
                        if own[0] >= 0:
                            goes[0] = goes[0] | T.shift_left(T.int32(1), own[0] >> shift)
                    for i in T.serial(tiles_of(R * k, parts)):
                        if vt < rows and i * P + vp < R * k:
                            rank = T.meta_var((i * P + vp) // k)
                            own[0] = owner_of(
                                topk_ids, owner, frame, rows, replicas, vt, (i * P + vp) % k
                            )
                            T.evaluate(
                                _call(
                                    "bs_ep_put4",
                                    frame.access_ptr("r"),
                                    T.Cast("int32", rank),
                                    T.int32(1),
                                    (frame[i64(0)] * frame[i64(1)] + vt) * k + (i * P + vp) % k,
                                    T.if_then_else(
                                        T.Cast("int64", own[0] >> shift) == rank, own[0] & mask, -1
                                    ),
                                )
                            )
                    send_row(x, a1_scale, frame, goes, vt, vp)
                T.evaluate(
                    _call(
                        sent,
                        frame.access_ptr("r"),
                        state.access_ptr("rw"),
                        T.Cast("int32", rows),
                    )
                )
        for s, g, p in T.grid(R, tiles_of(T.floordiv(landed, R) * k, parts), P):
            with T.sblock("settle"):
                vs, vg, vp = T.axis.remap("SSS", [s, g, p])
                T.reads()
                T.writes(state[0:states], landed_ids[0:landed, 0:k])
                tokens = T.sblock_alloc_buffer((i64(1),), "int32", scope="local")
                size = T.meta_var(T.floordiv(landed, R) * k)
                at = T.meta_var(vg * P + vp)
                tokens[0] = _call(
                    arrived,
                    frame.access_ptr("r"),
                    state.access_ptr("rw"),
                    T.Cast("int32", vs),
                    dtype="int32",
                )
                if T.Cast("int64", T.max(tokens[0], 0)) * k <= at and at < size:
                    landed_ids[T.floordiv(vs * size + at, k), T.floormod(vs * size + at, k)] = -1

    func = keep_params(main, [param.name for param in spec.params()])
    return func if rows is None else fix_shape(func, "x", (rows, spec.hidden))


def combine(spec: EpCombine, parts: int, slots: int, rows: int | None = None) -> PrimFunc:
    """Return the kernels with the parameters of ``spec.params()``: "give back", then "reduce".

    Args:
        spec: of the exported function.
        parts: threads that share a unit of work.
        slots: of a received row that a CTA sends back, all or one.
        rows: of out; None: symbolic.
    """
    H, k, R = i64(spec.hidden), i64(spec.top_k), i64(spec.ranks)
    P, chunk, words = i64(parts), i64(CHUNK_ELEMENTS), i64(WORDS)
    S, chunks = i64(slots), i64(spec.hidden // CHUNK_ELEMENTS)
    entries, states = i64(len(FRAME) + spec.ranks), i64(len(STATE))
    sent = f"bs_ep_sent<{spec.ranks}, BS_EP_COMBINE>"
    arrived = f"bs_ep_all_arrived<{spec.ranks}, BS_EP_COMBINE>"
    add, store = (
        f"bs_ep_add<{CAST[spec.dtype]}>",
        f"bs_store_rounded<{CAST[spec.dtype]}, 8, BS_KEEP>",
    )

    @T.prim_func(s_tir=True)
    def main(
        y_handle: T.handle,
        landed_ids_handle: T.handle,
        topk_ids_handle: T.handle,
        topk_weights_handle: T.handle,
        slots_handle: T.handle,
        frame: T.Buffer((entries,), "int64"),
        state: T.Buffer((states,), "int32"),
        out_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        rows, landed, most = T.int64(), T.int64(), T.int64()
        y = T.match_buffer(y_handle, (landed, k, H), spec.dtype)
        landed_ids = T.match_buffer(landed_ids_handle, (landed, k), "int32")
        topk_ids = T.match_buffer(topk_ids_handle, (rows, k), "int32")
        topk_weights = T.match_buffer(topk_weights_handle, (rows, k), "float32")
        came = T.match_buffer(slots_handle, (most, H), spec.dtype)
        out = T.match_buffer(out_handle, (rows, H), spec.dtype)
        for n, g, p in T.grid(landed, k // S, P):
            with T.sblock("give_back"):
                vn, vg, vp = T.axis.remap("SSS", [n, g, p])
                T.reads(y[0:landed, 0:k, 0:H], landed_ids[0:landed, 0:k])
                T.writes(state[0:states])
                raw = T.sblock_alloc_buffer((words,), "uint32", scope="local")
                bound = T.meta_var(T.floordiv(landed, R))
                if _call("bs_ep_takes_part", state.access_ptr("r"), dtype="bool"):
                    for j in T.serial(S):
                        if landed_ids[vn, vg * S + j] >= 0:
                            for i in T.serial(tiles_of(chunks, parts)):
                                if i * P + vp < chunks:
                                    T.evaluate(
                                        _call(
                                            "bs_load<16, BS_STREAM>",
                                            raw.access_ptr("w"),
                                            T.address_of(y[vn, vg * S + j, (i * P + vp) * chunk]),
                                        )
                                    )
                                    T.evaluate(
                                        _call(
                                            "bs_ep_put16",
                                            frame.access_ptr("r"),
                                            T.Cast("int32", T.floordiv(vn, bound)),
                                            T.int32(3),
                                            (T.floormod(vn, bound) * k + vg * S + j) * chunks
                                            + i * P
                                            + vp,
                                            raw.access_ptr("r"),
                                        )
                                    )
                T.evaluate(
                    _call(
                        sent,
                        frame.access_ptr("r"),
                        state.access_ptr("rw"),
                        T.Cast("int32", rows),
                    )
                )
        for g, p in T.grid(tiles_of(rows * chunks, parts), P):
            with T.sblock("reduce"):
                vg, vp = T.axis.remap("SS", [g, p])
                T.reads(topk_ids[0:rows, 0:k], topk_weights[0:rows, 0:k], came[0:most, 0:H])
                T.writes(state[0:states], out[0:rows, 0:H])
                here = T.sblock_alloc_buffer((i64(1),), "bool", scope="local")
                total = T.sblock_alloc_buffer((chunk,), "float32", scope="local")
                raw = T.sblock_alloc_buffer((k, words), "uint32", scope="local")
                at = T.meta_var(vg * P + vp)
                t = T.meta_var(T.floordiv(at, chunks))
                c = T.meta_var(T.floormod(at, chunks))
                here[0] = _call(
                    arrived, frame.access_ptr("r"), state.access_ptr("rw"), dtype="bool"
                )
                if at < rows * chunks:
                    for m in T.unroll(chunk):
                        total[m] = T.Select(here[0], T.float32(0), T.float32(float("nan")))
                    for j in T.unroll(k):
                        if topk_ids[t, j] >= 0 and topk_ids[t, j] < spec.experts:
                            T.evaluate(
                                _call(
                                    "bs_load<16, BS_INPLACE>",
                                    raw.access_ptr("rw", offset=j * words),
                                    T.address_of(came[t * k + j, c * chunk]),
                                )
                            )
                    for j in T.unroll(k):
                        if topk_ids[t, j] >= 0 and topk_ids[t, j] < spec.experts:
                            T.evaluate(
                                _call(
                                    add,
                                    total.access_ptr("rw"),
                                    raw.access_ptr("rw", offset=j * words),
                                    topk_weights[t, j],
                                )
                            )
                    T.evaluate(_call(store, T.address_of(out[t, c * chunk]), total.access_ptr("r")))

    return main if rows is None else fix_shape(main, "out", (rows, spec.hidden))


def reduce(spec: EpReduce, rows: int | None = None) -> PrimFunc:
    """Return the sum over slots, for a CPU, with the parameters of ``spec.params()``."""
    H, k, cols = i64(spec.hidden), i64(spec.top_k), i64(CHUNK_ELEMENTS)

    @T.prim_func(s_tir=True)
    def main(
        slots_handle: T.handle,
        topk_ids_handle: T.handle,
        topk_weights_handle: T.handle,
        out_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        rows = T.int64()
        slots = T.match_buffer(slots_handle, (rows, k, H), spec.dtype)
        topk_ids = T.match_buffer(topk_ids_handle, (rows, k), "int32")
        topk_weights = T.match_buffer(topk_weights_handle, (rows, k), "float32")
        out = T.match_buffer(out_handle, (rows, H), spec.dtype)
        for t, g in T.grid(rows, H // cols):
            with T.sblock("token"):
                vt, vg = T.axis.remap("SS", [t, g])
                total = T.sblock_alloc_buffer((cols,), "float32")
                place = T.sblock_alloc_buffer((k,), "int64")
                for j in T.serial(k):  # one comparison at each sum, as in the layer: the same code
                    with T.sblock("place"):
                        vj = T.axis.spatial(k, j)
                        place[vj] = T.Select(
                            topk_ids[vt, vj] >= 0 and topk_ids[vt, vj] < spec.experts,
                            vj,
                            i64(-1),
                        )
                for j, m in T.grid(k, cols):
                    with T.sblock("sum"):
                        vj, vm = T.axis.remap("RS", [j, m])
                        with T.init():
                            total[vm] = T.float32(0)
                        total[vm] = total[vm] + T.if_then_else(
                            place[vj] >= i64(0),
                            topk_weights[vt, vj] * widen(slots[vt, place[vj], vg * cols + vm]),
                            T.float32(0),
                        )
                for m in T.serial(cols):
                    with T.sblock("store"):
                        vm = T.axis.spatial(cols, m)
                        out[vt, vg * cols + vm] = formats.round_to(spec.dtype, total[vm])

    return main if rows is None else fix_shape(main, "slots", (rows, spec.top_k, spec.hidden))
