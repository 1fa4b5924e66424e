"""Rows of an MoE layer between ranks: dispatch, combine, and the sum over the slots of a token.

    rank, expert = owner[topk_ids[t, j], (t + own rank) % replicas]
    dispatch:  row t goes once to every rank that has an expert of it; ids [t, j] to all ranks;
               with an act_fmt, as codes and scales (`CodedRow`) that are made once
    combine:   the result of slot (t, j) goes back to row t * k + j of its token's rank
               out[t] = round(sum over j, ascending, of topk_weights[t, j] * slot[t, j]), float32
    sums:      the rounded sum over the slots that rank r has of token t to row t * ranks + r
               out[t] = round(sum over r, ascending, of these), float32

Slots with an id outside [0, experts) are left out; a rank without tokens passes one row of such.
Sums are as in `tir.moe.fused_moe` (CPU) and `native/moe/moe_rows.cuh` (CUDA, a fused multiply-add),
so that they have the same bits.

Loops ``p`` run over the parts of a unit of work that a CTA's threads take.  What a rank stores into
another's memory, and how they tell each other, are device functions (`native/moe/moe_peers.cuh`,
docs/ep.md); TensorIR says which 16 bytes go where.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tvm import tirx
from tvm.backend.cuda.op import cuda_func_call
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.specs.exchange import (
    CHUNK_ELEMENTS,
    FRAME,
    OWNER_BITS,
    PARTS,
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

LETS_NEXT_BEGIN = "bs_let_next_begin"
"""Device function of a kernel that says itself when the next one may be launched (`lower.cuda`)."""

WORDS = 4
"""Words of 32 bits that a thread moves at a time."""

WARP = 32

TOGETHER = 8, 4
"""Rows whose pieces of a thread are loaded before they are added up, of few rows and of many."""

SCALES_BYTES = 2
"""Bytes of scales of the elements of 16 bytes of nvfp4 codes."""

CAST = {"bfloat16": "BsBf16", "float16": "BsF16"}


def _call(name: str, *args: Any, dtype: str = "void") -> PrimExpr:
    return cuda_func_call(name, *args, source_code=HEADER, return_type=dtype)


def _owner(spec: EpDispatch | EpCombine) -> Callable[..., PrimExpr]:
    """The entry of the owner table for an id of token t; -1 where there is none."""

    def owner_of(e: Any, owner: Any, frame: Any, replicas: Any, t: Any) -> PrimExpr:
        own = owner[e, tirx.truncmod(t + frame[i64(FRAME.index("rank"))], replicas)]
        return tirx.if_then_else(tirx.all(e >= 0, e < spec.experts), own, tirx.const(-1))

    return owner_of


def _put(size: int, part: str) -> Any:
    """Step that stores ``size`` bytes to unit ``at`` of a part of each rank in ``goes``."""
    number = T.int32(PARTS.index(part))

    @T.inline
    def put(ranks, frame, goes, at, value):
        for r in T.unroll(ranks):
            if (goes[0] >> T.Cast("int32", r)) & 1 != 0:
                T.evaluate(
                    _call(
                        f"bs_ep_put{size}",
                        frame.access_ptr("r"),
                        T.Cast("int32", r),
                        number,
                        at,
                        value,
                    )
                )

    return put


class _Row:
    """Steps that load row t of x, all pieces of a thread, and store it to the ranks in ``goes``.

    A piece is what makes 16 bytes of what is sent: a chunk, or so many as `CodedRow.step` says.
    """

    def __init__(self, spec: EpDispatch, parts: int) -> None:
        coded = spec.act_fmt is not None
        step = spec.row.step if coded else CHUNK_ELEMENTS
        cols = spec.row.cols if coded else spec.hidden
        self.spec, self.held = spec, -(-cols // (step * parts))
        P, U, chunk, words = map(i64, (parts, self.held, CHUNK_ELEMENTS, WORDS))
        self.shape = (U, i64(step // CHUNK_ELEMENTS) * words)
        loads, pieces = i64(step // CHUNK_ELEMENTS), i64(cols // step)
        self.sizes = parts, pieces, loads

        @T.inline
        def load(x, raw, t, vp):
            for u in T.unroll(U):
                for a in T.unroll(loads):
                    if coded:
                        for w in T.unroll(words):
                            raw[u, a * words + w] = T.uint32(0)
                    if u * P + vp < pieces:
                        T.evaluate(
                            _call(
                                "bs_load<16, BS_KEEP>",
                                raw.access_ptr("rw", offset=(u * loads + a) * words),
                                T.address_of(x[t, ((u * P + vp) * loads + a) * chunk]),
                            )
                        )

        self.load = load
        self.store = self._coded() if coded else self._whole()

    def _whole(self) -> Any:
        parts, pieces, _ = self.sizes
        P, U, R, words = map(i64, (parts, self.held, self.spec.ranks, WORDS))
        put = _put(16, "rows")

        @T.inline
        def store(raw, a1_scale, frame, goes, row, vp):
            for u in T.unroll(U):
                if u * P + vp < pieces:
                    put(
                        R,
                        frame,
                        goes,
                        row * pieces + u * P + vp,
                        raw.access_ptr("r", offset=u * words),
                    )

        return store

    def _coded(self) -> Any:
        spec, (parts, pieces, loads) = self.spec, self.sizes
        row_of, fp8, cast = spec.row, spec.act_fmt == "fp8", CAST[spec.dtype]
        P, U, R, words = map(i64, (parts, self.held, spec.ranks, WORDS))
        puts = {size: _put(size, "rows") for size in (ALIGNMENT, SCALES_BYTES)}
        put, put_scales = puts[ALIGNMENT], puts[SCALES_BYTES]
        scales = {size: i64(row_of.codes // size) for size in puts}
        pitch = {size: i64(row_of.bytes // size) for size in puts}

        @T.inline
        def rows_of_fp8(raw, a1_scale, frame, goes, row, vp):
            codes = T.sblock_alloc_buffer((words,), "uint32", scope="local")
            factor = T.sblock_alloc_buffer((words,), "float32", scope="local")
            for w in T.unroll(words):
                factor[w] = T.float32(0)
            factor[0] = _call(
                f"bs_coded_factor<{cast}, {self.held * row_of.step // 2}>",
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
                    at = T.meta_var(row * pitch[ALIGNMENT])
                    put(R, frame, goes, at + u * P + vp, codes.access_ptr("r"))
            if vp == 0:
                at = T.meta_var(row * pitch[ALIGNMENT] + scales[ALIGNMENT])
                put(R, frame, goes, at, factor.access_ptr("r"))

        @T.inline
        def rows_of_nvfp4(raw, a1_scale, frame, goes, row, vp):
            codes = T.sblock_alloc_buffer((words,), "uint32", scope="local")
            both = T.sblock_alloc_buffer((i64(1),), "int32", scope="local")
            for u in T.unroll(U):
                if u * P + vp < pieces:
                    both[0] = _call(
                        f"bs_coded_nvfp4<{cast}>",
                        codes.access_ptr("w"),
                        raw.access_ptr("r", offset=u * loads * words),
                        a1_scale[0],
                        dtype="int32",
                    )
                    at = T.meta_var(row * pitch[ALIGNMENT])
                    put(R, frame, goes, at + u * P + vp, codes.access_ptr("r"))
                    of = T.meta_var(row * pitch[SCALES_BYTES] + scales[SCALES_BYTES])
                    put_scales(R, frame, goes, of + u * P + vp, both[0])

        return rows_of_fp8 if fp8 else rows_of_nvfp4


def dispatch(spec: EpDispatch, parts: int, ctas: int, rows: int | None = None) -> PrimFunc:
    """Return the kernel with the parameters of ``spec.params()``.

    The CTA that has sent last waits for what other ranks send, and says which ids are none.

    Args:
        spec: of the exported function.
        parts: threads that share a row.
        ctas: CTAs that share the rows, at most; each takes every ``ctas``-th.
        rows: of x; None: symbolic.
    """
    H, k, R, E, P, C = map(i64, (spec.hidden, spec.top_k, spec.ranks, spec.experts, parts, ctas))
    entries = i64(len(FRAME) + spec.ranks)
    row_of = _Row(spec, parts)
    states, owner_of = i64(len(STATE)), _owner(spec)
    shift, mask = tirx.const(OWNER_BITS), tirx.const((1 << OWNER_BITS) - 1)
    sent = f"bs_ep_sent<{spec.ranks}, BS_EP_DISPATCH>"
    arrived = f"bs_ep_all_arrived<{spec.ranks}, BS_EP_DISPATCH>"
    ids_part, weights_part = (T.int32(PARTS.index(part)) for part in ("ids", "weights"))

    def used(x: Any, a1_scale: Any, ids: Any, weights: Any, owner: Any, n: Any, m: Any) -> Any:
        scale = [a1_scale[0:1]] if spec.act_fmt == "nvfp4" else []
        return [x[0:n, 0:H], *scale, ids[0:n, 0:k], weights[0:n, 0:k], owner[0:E, 0:m]]

    @T.prim_func(s_tir=True)
    def main(
        x_handle: T.handle,
        a1_scale: T.Buffer((i64(1),), "float32"),
        topk_ids_handle: T.handle,
        topk_weights_handle: T.handle,
        owner_handle: T.handle,
        frame: T.Buffer((entries,), "int64"),
        state: T.Buffer((states,), "int32"),
        landed_ids_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        rows, replicas, landed = T.int64(), T.int64(), T.int64()
        x = T.match_buffer(x_handle, (rows, H), spec.dtype)
        topk_ids = T.match_buffer(topk_ids_handle, (rows, k), "int32")
        topk_weights = T.match_buffer(topk_weights_handle, (rows, k), "float32")
        owner = T.match_buffer(owner_handle, (E, replicas), "int32")
        landed_ids = T.match_buffer(landed_ids_handle, (landed, k), "int32")
        for c, p in T.grid(T.min(rows, C), P):
            with T.sblock("send"):
                vc, vp = T.axis.remap("SS", [c, p])
                T.reads(*used(x, a1_scale, topk_ids, topk_weights, owner, rows, replicas))
                T.writes(state[0:states], landed_ids[0:landed, 0:k])
                goes = T.sblock_alloc_buffer((i64(1),), "int32", scope="local")
                own = T.sblock_alloc_buffer((i64(1),), "int32", scope="local")
                raw = T.sblock_alloc_buffer(row_of.shape, "uint32", scope="local")
                tokens = T.sblock_alloc_buffer((i64(1),), "int32", scope="local")
                last = T.sblock_alloc_buffer((i64(1),), "bool", scope="local")
                takes_part = T.sblock_alloc_buffer((i64(1),), "bool", scope="local")
                chosen = T.sblock_alloc_buffer((k,), "int32", scope="local")
                bound = T.meta_var(frame[i64(FRAME.index("bound"))])
                # What a row needs is loaded at once: each of these waits half a microsecond.
                takes_part[0] = _call("bs_ep_takes_part", state.access_ptr("r"), dtype="bool")
                for n in T.serial(tiles_of(rows, ctas)):
                    t = T.meta_var(n * C + vc)
                    first = T.meta_var(frame[i64(FRAME.index("rank"))] * bound + t)
                    if t < rows:
                        row_of.load(x, raw, t, vp)
                        for j in T.unroll(k):
                            chosen[j] = topk_ids[t, j]
                        goes[0] = 0
                        for j in T.unroll(k):
                            own[0] = owner_of(chosen[j], owner, frame, replicas, t)
                            if own[0] >= 0:
                                goes[0] = goes[0] | T.shift_left(T.int32(1), own[0] >> shift)
                        if takes_part[0]:
                            for i in T.serial(tiles_of(R * k, parts)):
                                if i * P + vp < R * k:
                                    rank = T.meta_var((i * P + vp) // k)
                                    j = T.meta_var((i * P + vp) % k)
                                    own[0] = owner_of(topk_ids[t, j], owner, frame, replicas, t)
                                    T.evaluate(
                                        _call(
                                            "bs_ep_put4",
                                            frame.access_ptr("r"),
                                            T.Cast("int32", rank),
                                            ids_part,
                                            first * k + j,
                                            T.if_then_else(
                                                T.Cast("int64", own[0] >> shift) == rank,
                                                own[0] & mask,
                                                -1,
                                            ),
                                        )
                                    )
                                    T.evaluate(
                                        _call(
                                            "bs_ep_put4",
                                            frame.access_ptr("r"),
                                            T.Cast("int32", rank),
                                            weights_part,
                                            first * k + j,
                                            T.reinterpret("int32", topk_weights[t, j]),
                                        )
                                    )
                            row_of.store(raw, a1_scale, frame, goes, first, vp)
                last[0] = _call(
                    sent,
                    frame.access_ptr("r"),
                    state.access_ptr("rw"),
                    T.Cast("int32", rows),
                    dtype="bool",
                )
                if last[0]:
                    T.evaluate(
                        _call(arrived, frame.access_ptr("r"), state.access_ptr("rw"), dtype="bool")
                    )
                    T.evaluate(_call(LETS_NEXT_BEGIN))
                    for s in T.serial(R):
                        tokens[0] = _call("bs_ep_tokens", T.Cast("int32", s), dtype="int32")
                        none = T.meta_var((bound - T.Cast("int64", tokens[0])) * k)
                        for i in T.serial(tiles_of(none, parts)):
                            at = T.meta_var((s + 1) * bound * k - none + i * P + vp)
                            if i * P + vp < none:
                                landed_ids[T.floordiv(at, k), T.floormod(at, k)] = -1

    func = keep_params(main, [param.name for param in spec.params()])
    return func if rows is None else fix_shape(func, "x", (rows, spec.hidden))


def _quotient(a: PrimExpr, b: PrimExpr) -> PrimExpr:
    """a / b of numbers below 2^31, which takes a fifth of the instructions of one of 64 bits."""
    return tirx.Cast("int64", tirx.truncdiv(tirx.Cast("int32", a), tirx.Cast("int32", b)))


class Grid(NamedTuple):
    """CTAs that share rows, at most, and threads that share a row."""

    ctas: int
    threads: int


class _Steps:
    """Steps of `combine`: what a CTA sends back of a row that came, and the sum of a token.

    Of ``together`` rows at a time all loads of a thread come before the additions.
    """

    def __init__(self, spec: EpCombine, threads: int, slots: int, together: int) -> None:
        chunks = spec.hidden // CHUNK_ELEMENTS
        self.spec, self.parts = spec, threads
        self.chunks, self.held = i64(chunks), i64(-(-chunks // threads))
        self.slots, self.units = slots, 1 if spec.sums else spec.top_k // slots
        self.together = min(max(spec.top_k, spec.ranks), together)
        self.shape = (tirx.Max(self.held, i64(self.together)), i64(WORDS))
        self.give = self._give_sum() if spec.sums else self._give_slots()
        self.total = self._total()

    def _add(self, raw: Any, a: Any, total: Any, weight: Any) -> PrimExpr:
        return _call(
            f"bs_ep_add<{CAST[self.spec.dtype]}>",
            total.access_ptr("rw"),
            raw.access_ptr("rw", offset=a * i64(WORDS)),
            weight,
        )

    def _give_slots(self) -> Any:
        k, S, P, U = map(i64, (self.spec.top_k, self.slots, self.parts, self.units))
        chunk, words, chunks, held = i64(CHUNK_ELEMENTS), i64(WORDS), self.chunks, self.held
        part = T.int32(PARTS.index("slots"))

        @T.inline
        def give(y, landed_ids, landed_weights, frame, raw, total, takes_part, bound, u, vp):
            n = T.meta_var(T.truncdiv(u, U))
            source = T.meta_var(_quotient(n, bound))
            for i in T.serial(S):
                j = T.meta_var(T.truncmod(u, U) * S + i)
                if landed_ids[n, j] >= 0 and takes_part[0]:
                    for h in T.unroll(held):
                        if h * P + vp < chunks:
                            T.evaluate(
                                _call(
                                    "bs_load<16, BS_STREAM>",
                                    raw.access_ptr("rw", offset=h * words),
                                    T.address_of(y[n, j, (h * P + vp) * chunk]),
                                )
                            )
                    for h in T.unroll(held):
                        if h * P + vp < chunks:
                            T.evaluate(
                                _call(
                                    "bs_ep_put16",
                                    frame.access_ptr("r"),
                                    T.Cast("int32", source),
                                    part,
                                    ((n - source * bound) * k + j) * chunks + h * P + vp,
                                    raw.access_ptr("r", offset=h * words),
                                )
                            )

        return give

    def _give_sum(self) -> Any:
        spec, G = self.spec, i64(self.together)
        k, R, P = map(i64, (spec.top_k, spec.ranks, self.parts))
        chunk, words, chunks, held = i64(CHUNK_ELEMENTS), i64(WORDS), self.chunks, self.held
        groups, add = tiles_of(k, self.together), self._add
        part, put = T.int32(PARTS.index("slots")), f"bs_ep_put_rounded<{CAST[spec.dtype]}>"

        @T.inline
        def give(y, landed_ids, landed_weights, frame, raw, total, takes_part, bound, u, vp):
            source = T.meta_var(_quotient(u, bound))
            here = T.sblock_alloc_buffer((i64(1),), "int32", scope="local")
            here[0] = 0
            for j in T.unroll(k):
                if landed_ids[u, j] >= 0:
                    here[0] = 1
            if here[0] != 0 and takes_part[0]:
                for h in T.serial(held):
                    if h * P + vp < chunks:
                        for m in T.unroll(chunk):
                            total[m] = T.float32(0)
                        for g in T.unroll(groups):
                            for a in T.unroll(G):
                                if g * G + a < k and landed_ids[u, g * G + a] >= 0:
                                    T.evaluate(
                                        _call(
                                            "bs_load<16, BS_STREAM>",
                                            raw.access_ptr("rw", offset=a * words),
                                            T.address_of(y[u, g * G + a, (h * P + vp) * chunk]),
                                        )
                                    )
                            for a in T.unroll(G):
                                if g * G + a < k and landed_ids[u, g * G + a] >= 0:
                                    T.evaluate(add(raw, a, total, landed_weights[u, g * G + a]))
                        T.evaluate(
                            _call(
                                put,
                                frame.access_ptr("r"),
                                T.Cast("int32", source),
                                part,
                                ((u - source * bound) * R + frame[i64(FRAME.index("rank"))])
                                * chunks
                                + h * P
                                + vp,
                                total.access_ptr("r"),
                            )
                        )

        return give

    def _total(self) -> Any:
        """Step to a token's sum: of its slots, weighted, or of the sums of its ranks."""
        spec, G = self.spec, i64(self.together)
        k, P = i64(spec.top_k), i64(self.parts)
        count = i64(spec.ranks) if spec.sums else k
        chunk, words, chunks, held = i64(CHUNK_ELEMENTS), i64(WORDS), self.chunks, self.held
        groups, add, store = tiles_of(count, self.together), self._add, self._store()
        owner_of, shift = _owner(spec), tirx.const(OWNER_BITS)

        def there(ids: Any, goes: Any, t: PrimExpr, n: PrimExpr) -> PrimExpr:
            if spec.sums:
                return (goes[0] >> tirx.Cast("int32", n)) & 1 != 0
            return tirx.all(ids[t, n] >= 0, ids[t, n] < spec.experts)

        def weight(weights: Any, t: PrimExpr, n: PrimExpr) -> PrimExpr:
            return tirx.const(1.0, "float32") if spec.sums else weights[t, n]

        @T.inline
        def total_of(ids, weights, owner, frame, came, out, raw, total, here, rows, reps, t, vp):
            goes = T.sblock_alloc_buffer((i64(1),), "int32", scope="local")
            own = T.sblock_alloc_buffer((i64(1),), "int32", scope="local")
            if spec.sums:
                goes[0] = 0
                for j in T.unroll(k):
                    own[0] = owner_of(ids[t, j], owner, frame, reps, t)
                    if own[0] >= 0:
                        goes[0] = goes[0] | T.shift_left(T.int32(1), own[0] >> shift)
            for h in T.serial(held):
                if h * P + vp < chunks:
                    for m in T.unroll(chunk):
                        total[m] = T.Select(here[0], T.float32(0), T.float32(float("nan")))
                    for g in T.unroll(groups):
                        for a in T.unroll(G):
                            n = T.meta_var(g * G + a)
                            if n < count and there(ids, goes, t, n):
                                T.evaluate(
                                    _call(
                                        "bs_load<16, BS_INPLACE>",
                                        raw.access_ptr("rw", offset=a * words),
                                        T.address_of(came[t * count + n, (h * P + vp) * chunk]),
                                    )
                                )
                        for a in T.unroll(G):
                            n = T.meta_var(g * G + a)
                            if n < count and there(ids, goes, t, n):
                                T.evaluate(add(raw, a, total, weight(weights, t, n)))
                    T.evaluate(store(out, t, (h * P + vp) * chunk, total))

        return total_of

    def _store(self) -> Callable[..., PrimExpr]:
        name = f"bs_store_rounded<{CAST[self.spec.dtype]}, 8, BS_KEEP>"

        def store(out: Any, t: PrimExpr, column: PrimExpr, total: Any) -> PrimExpr:
            return _call(name, T.address_of(out[t, column]), total.access_ptr("r"))

        return store


def combine(
    spec: EpCombine, giving: Grid, adding: Grid | None, slots_each: int, rows: int | None
) -> PrimFunc:
    """Return the kernels with the parameters of ``spec.params()``.

    "give_back" sends back what came; the CTA that is the last waits for what other ranks send back.
    "reduce" adds up the tokens.  Or "combine" does both: its CTAs all wait, so they have to fit the
    GPU beside whatever else waits there.

    Args:
        spec: of the exported function.
        giving, adding: of "give_back" and of "reduce"; None: of "combine".
        slots_each: of a received row that a CTA sends back at a time, all or one; of `sums` all.
        rows: of out; None: symbolic.
    """
    one, adding = adding is None, adding or giving
    H, k, R, E = map(i64, (spec.hidden, spec.top_k, spec.ranks, spec.experts))
    (C, P), (D, Q) = map(i64, giving), map(i64, adding)
    entries, states = i64(len(FRAME) + spec.ranks), i64(len(STATE))
    steps = _Steps(spec, giving.threads, slots_each, TOGETHER[not one])
    sums = _Steps(spec, adding.threads, slots_each, TOGETHER[0])
    units, shape = i64(steps.units), steps.shape
    sent = f"bs_ep_sent<{spec.ranks}, BS_EP_COMBINE>"
    arrived = f"bs_ep_all_arrived<{spec.ranks}, BS_EP_COMBINE>"

    def came(y: Any, ids: Any, weights: Any, n: Any) -> list[Any]:
        return [y[0:n, 0:k, 0:H], ids[0:n, 0:k], *([weights[0:n, 0:k]] if spec.sums else [])]

    def own(ids: Any, weights: Any, owner: Any, slots: Any, n: Any, m: Any, most: Any) -> list[Any]:
        if most is None:
            return []
        rest = [owner[0:E, 0:m]] if spec.sums else [weights[0:n, 0:k]]
        return [ids[0:n, 0:k], *rest, slots[0:most, 0:H]]

    def wait(frame: Any, state: Any) -> PrimExpr:
        return _call(arrived, frame.access_ptr("r"), state.access_ptr("rw"), dtype="bool")

    @T.inline
    def give_back(y, landed_ids, landed_weights, frame, state, raw, total, landed, rows, vc, vp):
        takes_part = T.sblock_alloc_buffer((i64(1),), "bool", scope="local")
        takes_part[0] = _call("bs_ep_takes_part", state.access_ptr("r"), dtype="bool")
        bound = T.meta_var(_quotient(landed, R))
        for i in T.serial(tiles_of(landed * units, giving.ctas)):
            u = T.meta_var(i * C + vc)
            if u < landed * units:
                steps.give(
                    y, landed_ids, landed_weights, frame, raw, total, takes_part, bound, u, vp
                )
        last = T.sblock_alloc_buffer((i64(1),), "bool", scope="local")
        last[0] = _call(
            sent,
            frame.access_ptr("r"),
            state.access_ptr("rw"),
            T.Cast("int32", rows),
            dtype="bool",
        )
        if not one:
            if last[0]:
                T.evaluate(wait(frame, state))
                T.evaluate(_call(LETS_NEXT_BEGIN))

    @T.inline
    def add_up(ids, weights, owner, slots, frame, state, out, raw, total, rows, reps, vc, vp):
        here = T.sblock_alloc_buffer((i64(1),), "bool", scope="local")
        if one:
            here[0] = wait(frame, state)
            T.evaluate(_call(LETS_NEXT_BEGIN))
        else:
            here[0] = _call("bs_ep_takes_part", state.access_ptr("r"), dtype="bool")
        for i in T.serial(tiles_of(rows, adding.ctas)):
            t = T.meta_var(i * D + vc)
            if t < rows:
                sums.total(
                    ids, weights, owner, frame, slots, out, raw, total, here, rows, reps, t, vp
                )

    @T.prim_func(s_tir=True)
    def main(
        y_handle: T.handle,
        landed_ids_handle: T.handle,
        landed_weights_handle: T.handle,
        topk_ids_handle: T.handle,
        topk_weights_handle: T.handle,
        owner_handle: T.handle,
        slots_handle: T.handle,
        frame: T.Buffer((entries,), "int64"),
        state: T.Buffer((states,), "int32"),
        out_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        rows, landed, most, reps = T.int64(), T.int64(), T.int64(), T.int64()
        y = T.match_buffer(y_handle, (landed, k, H), spec.dtype)
        landed_ids = T.match_buffer(landed_ids_handle, (landed, k), "int32")
        landed_weights = T.match_buffer(landed_weights_handle, (landed, k), "float32")
        topk_ids = T.match_buffer(topk_ids_handle, (rows, k), "int32")
        topk_weights = T.match_buffer(topk_weights_handle, (rows, k), "float32")
        owner = T.match_buffer(owner_handle, (E, reps), "int32")
        slots = T.match_buffer(slots_handle, (most, H), spec.dtype)
        out = T.match_buffer(out_handle, (rows, H), spec.dtype)
        for c, p in T.grid(T.min(landed * units, C), P):
            with T.sblock("combine" if one else "give_back"):
                vc, vp = T.axis.remap("SS", [c, p])
                T.reads(
                    *came(y, landed_ids, landed_weights, landed),
                    *own(topk_ids, topk_weights, owner, slots, rows, reps, most if one else None),
                )
                T.writes(*[state[0:states], out[0:rows, 0:H]][: 2 if one else 1])
                raw = T.sblock_alloc_buffer(shape, "uint32", scope="local")
                total = T.sblock_alloc_buffer((i64(CHUNK_ELEMENTS),), "float32", scope="local")
                give_back(
                    y, landed_ids, landed_weights, frame, state, raw, total, landed, rows, vc, vp
                )
                if one:
                    add_up(
                        topk_ids, topk_weights, owner, slots, frame, state, out, raw, total, rows,
                        reps, vc, vp,
                    )  # fmt: skip
        if not one:
            for c, p in T.grid(T.min(rows, D), Q):
                with T.sblock("reduce"):
                    vc, vp = T.axis.remap("SS", [c, p])
                    T.reads(*own(topk_ids, topk_weights, owner, slots, rows, reps, most))
                    T.writes(state[0:states], out[0:rows, 0:H])
                    raw = T.sblock_alloc_buffer(sums.shape, "uint32", scope="local")
                    total = T.sblock_alloc_buffer((i64(CHUNK_ELEMENTS),), "float32", scope="local")
                    add_up(
                        topk_ids, topk_weights, owner, slots, frame, state, out, raw, total, rows,
                        reps, vc, vp,
                    )  # fmt: skip

    func = keep_params(main, [param.name for param in spec.params()])
    return func if rows is None else fix_shape(func, "out", (rows, spec.hidden))


def collect(spec: EpCombine, grid: Grid, together: bool, rows: int | None) -> PrimFunc:
    """Return the kernels with the parameters of ``spec.params()``, of results that are `stored`.

    "tell" says that what this rank sends is there, and waits for the other ranks; "reduce" adds up
    the tokens.  Or ``together``, "collect", does both, and all its CTAs wait.

    Args:
        spec: of the exported function.
        grid: CTAs that share tokens, and their threads.
        together: whether there is one kernel.
        rows: of out; None: symbolic.
    """
    H, k, C, P = map(i64, (spec.hidden, spec.top_k, *grid))
    entries, states = i64(len(FRAME) + spec.ranks), i64(len(STATE))
    steps = _Steps(spec, grid.threads, 1, TOGETHER[0])
    told = f"bs_ep_stored<{spec.ranks}, BS_EP_COMBINE>"
    arrived = f"bs_ep_all_arrived<{spec.ranks}, BS_EP_COMBINE>"
    none = i64(0)

    def tell(frame: Any, state: Any, rows: Any) -> PrimExpr:
        return _call(told, frame.access_ptr("r"), state.access_ptr("rw"), T.Cast("int32", rows))

    def wait(frame: Any, state: Any) -> PrimExpr:
        return _call(arrived, frame.access_ptr("r"), state.access_ptr("rw"), dtype="bool")

    @T.prim_func(s_tir=True)
    def main(
        topk_ids_handle: T.handle,
        topk_weights_handle: T.handle,
        slots_handle: T.handle,
        frame: T.Buffer((entries,), "int64"),
        state: T.Buffer((states,), "int32"),
        out_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        rows, most = T.int64(), T.int64()
        topk_ids = T.match_buffer(topk_ids_handle, (rows, k), "int32")
        topk_weights = T.match_buffer(topk_weights_handle, (rows, k), "float32")
        slots = T.match_buffer(slots_handle, (most, H), spec.dtype)
        out = T.match_buffer(out_handle, (rows, H), spec.dtype)
        if not together:
            for c, p in T.grid(i64(1), i64(WARP)):
                with T.sblock("tell"):
                    vc, vp = T.axis.remap("SS", [c, p])
                    T.reads(frame[0:entries])
                    T.writes(state[0:states])
                    T.evaluate(tell(frame, state, rows))
                    T.evaluate(wait(frame, state))
                    T.evaluate(_call(LETS_NEXT_BEGIN))
        for c, p in T.grid(T.min(rows, C), P):
            with T.sblock("collect" if together else "reduce"):
                vc, vp = T.axis.remap("SS", [c, p])
                T.reads(topk_ids[0:rows, 0:k], topk_weights[0:rows, 0:k], slots[0:most, 0:H])
                T.writes(state[0:states], out[0:rows, 0:H])
                raw = T.sblock_alloc_buffer(steps.shape, "uint32", scope="local")
                total = T.sblock_alloc_buffer((i64(CHUNK_ELEMENTS),), "float32", scope="local")
                here = T.sblock_alloc_buffer((i64(1),), "bool", scope="local")
                if together:
                    if vc == none:
                        T.evaluate(tell(frame, state, rows))
                    here[0] = wait(frame, state)
                    T.evaluate(_call(LETS_NEXT_BEGIN))
                else:
                    here[0] = _call("bs_ep_takes_part", state.access_ptr("r"), dtype="bool")
                for i in T.serial(tiles_of(rows, grid.ctas)):
                    t = T.meta_var(i * C + vc)
                    if t < rows:
                        steps.total(
                            topk_ids, topk_weights, topk_ids, frame, slots, out, raw, total, here,
                            rows, none, t, vp,
                        )  # fmt: skip

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
