"""MoE layer on 4-bit weights, on a CPU: each token's rows through the experts that it is routed to.

For token t, slot j and expert e = topk_ids[t, j]; slots with e outside [0, experts) are left out:

    G = w13_global[e, 0] * sum_k X[t, k] * W[e, n, k] + bias      (U: rows I + n, w13_global[e, 1])
    h = round(act(G, U)),  Z = round(w2_global[e] * sum_n h[n] * W2[e, m, n] + bias)
    out[t] = round(sum over j, ascending, of topk_weights[t, j] * Z_j)

round is to the dtype of hidden, all else is float32.  With an ``act_fmt``, X and h are numbers of
that format (`blockscale.tir.moe.rows`).  nvfp4, mxfp4: W = e2m1(code) * block scale.  int4:
W = (code - zero) * scale, code and zero 0 .. 15, zero 8 where there is none.  Codes are two a byte,
the even element low.  Activations (`blockscale.tir.activations`): swiglu (beta 0), swiglu_oai
(beta 1), gelu_tanh; relu2 is max(G, 0)^2 and has no U.

A counting sort puts the rows of an expert together, in tiles of ``row_tile`` rows.  Both GEMMs run
over tasks of columns, in them over tiles.  ``lanes``: a row's sum is made of so many partial sums,
of 8 neighbouring elements in turn, for each GEMM.  Tokens go through in chunks (`chunk_tokens`), so
that the memory between the steps has a bound (`CHUNK_BYTES`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.base.formats import FLOAT
from blockscale.specs import FusedMoe
from blockscale.tir import formats
from blockscale.tir.activations import gated, of
from blockscale.tir.common import fix_shape, i64, keep_params, tiles_of, widen
from blockscale.tir.gemm.linear import weight_value
from blockscale.tir.moe.rows import rows_step, sort_step

WORD = 8
"""Codes of a 32-bit word."""

COLUMNS = 16
"""Columns of a task: what divides every hidden and intermediate size."""

CHUNK_BYTES = 1 << 27
"""Memory of the rows between the steps, about: 128 MiB."""

ROW_TILES = (1, 2)
"""Rows of a tile, for few rows an expert and for more."""

FEWEST_SLOTS, MOST_SLOTS = 64, 16384
"""Bounds of a chunk."""


class Product(NamedTuple):
    """One of the GEMMs: ``parts`` (gate, up) times ``n`` columns of ``k`` elements."""

    number: int
    parts: int
    n: int
    k: int
    lanes: int

    @property
    def steps(self) -> int:
        """Vectors of words in a row."""
        return self.k // (WORD * self.lanes)


def products(spec: FusedMoe, lanes: tuple[int, int]) -> tuple[Product, Product]:
    """Return both GEMMs."""
    parts = 2 if spec.gated else 1
    return (
        Product(1, parts, spec.intermediate, spec.hidden, lanes[0]),
        Product(2, 1, spec.hidden, spec.intermediate, lanes[1]),
    )


def chunk_tokens(spec: FusedMoe) -> int:
    """Return how many tokens go through at a time."""
    slots = CHUNK_BYTES // (8 * (spec.hidden + spec.intermediate))  # two float32 of each
    return max(1, min(max(slots, FEWEST_SLOTS), MOST_SLOTS) // spec.top_k)


def coded_value(
    code: str, byte: PrimExpr, k: PrimExpr, scale: PrimExpr, zero: PrimExpr
) -> PrimExpr:
    """Weight ``k`` from its packed byte (uint8), block scale and zero ("int4z"), all float32."""
    if code == "e2m1":
        return weight_value(byte, k, scale, "float32")
    number = tirx.Cast("float32", formats.nibble(tirx.Cast("int32", byte), k))
    return (number - (zero if code == "int4z" else tirx.const(8.0, "float32"))) * scale


def code_of(spec: FusedMoe) -> str:
    """How the weights are coded."""
    return f"{spec.format.codes.name}{'z' if spec.zero else ''}"


def _activated(
    spec: FusedMoe, gate: PrimExpr, up: PrimExpr, alpha: PrimExpr, limit: PrimExpr
) -> PrimExpr:
    if spec.activation == "relu2":
        return of("relu2", gate)
    if spec.activation == "gelu_tanh":
        return gated("gelu_tanh", gate, up)
    beta = tirx.const(1.0 if spec.activation == "swiglu_oai" else 0.0, "float32")
    return gated("swiglu", gate, up, (alpha, beta, limit))


def _rounded(spec: FusedMoe, value: PrimExpr) -> PrimExpr:
    """Float32 ``value`` rounded to the dtype of the rows, as float32."""
    return value if spec.dtype == "float32" else widen(formats.round_to(spec.dtype, value))


def _product_step(spec: FusedMoe, product: Product, row_tile: int, finish: Any) -> Any:
    """Step from laid out rows A [tiles, steps, R, 8, lanes] to out [tiles, R, N].

    ``finish(totals, e, row, column, alpha, limit)``: the output from the sums [parts, R, columns].
    """
    E, R, blocks = i64(spec.experts), i64(row_tile), i64(product.k // spec.group)
    parts, cols, L = i64(product.parts), i64(COLUMNS), i64(product.lanes)
    N, steps, word = i64(product.n), i64(product.steps), i64(WORD)
    one, two, index, code = i64(1), i64(2), product.number, code_of(spec)
    vector_bytes, word_bytes = i64(4 * product.lanes), i64(4)

    def block_of(step: PrimExpr, lane: PrimExpr) -> PrimExpr:
        """Block of the 8 codes of a lane."""
        depth = WORD * product.lanes
        if spec.group >= depth:
            return step // i64(spec.group // depth)
        return step * i64(depth // spec.group) + lane // i64(spec.group // WORD)

    def scale_of(value: PrimExpr) -> PrimExpr:
        if spec.format.scale is FLOAT:
            return value
        return formats.decode_byte(spec.format.scale, value)

    @T.inline
    def decode_zeros(zeros, zero, ve, task):
        for p, n, b in T.grid(parts, cols, blocks):
            with T.sblock(f"zero{index}"):
                vp, vn, vb = T.axis.remap("SSS", [p, n, b])
                zero[vp, vn, vb] = T.Cast("float32", zeros[ve, vp * N + task * cols + vn, vb])

    @T.inline
    def no_zeros(zeros, zero, ve, task):
        pass

    fill = decode_zeros if spec.zero else no_zeros

    @T.inline
    def step(A, w, w_scale, w_zero, factor, bias, alpha, limit, out, expert, used, tiles):
        for task, t in T.grid(N // cols, tiles):
            with T.sblock(f"tile{index}"):
                vk, vt = T.axis.remap("SS", [task, t])
                T.where(t < used[0])
                T.reads(A[vt, 0:steps, 0:R, 0:word, 0:L], expert[vt], used[0])
                T.writes(out[vt, 0:R, vk * cols : vk * cols + cols])
                # One iteration: what is tensorized may name a variable and may not load it.
                for e in T.serial(expert[vt], expert[vt] + one):
                    with T.sblock(f"product{index}"):
                        ve = T.axis.spatial(E, e)
                        T.reads(A[vt, 0:steps, 0:R, 0:word, 0:L])
                        T.writes(out[vt, 0:R, vk * cols : vk * cols + cols])
                        scale = T.sblock_alloc_buffer((parts, cols, blocks), "float32")
                        zero = T.sblock_alloc_buffer((parts, cols, blocks), "float32")
                        sums = T.sblock_alloc_buffer((parts, cols, R, L), "float32")
                        totals = T.sblock_alloc_buffer((parts, R, cols), "float32")
                        for p, n, b in T.grid(parts, cols, blocks):
                            with T.sblock(f"scale{index}"):
                                vp, vn, vb = T.axis.remap("SSS", [p, n, b])
                                scale[vp, vn, vb] = scale_of(
                                    w_scale[ve, vp * N + vk * cols + vn, vb]
                                )
                        fill(w_zero, zero, ve, vk)
                        for p, i, n, s, j, c in T.grid(parts, R, cols, steps, L, word):
                            with T.sblock(f"dot{index}"):
                                vp, vi, vn, vs, vj, vc = T.axis.remap("SSSRSR", [p, i, n, s, j, c])
                                with T.init():
                                    sums[vp, vn, vi, vj] = T.float32(0)
                                sums[vp, vn, vi, vj] = sums[vp, vn, vi, vj] + A[
                                    vt, vs, vi, vc, vj
                                ] * coded_value(
                                    code,
                                    w[
                                        ve,
                                        vp * N + vk * cols + vn,
                                        vs * vector_bytes + vj * word_bytes + vc // two,
                                    ],
                                    vc,
                                    scale[vp, vn, block_of(vs, vj)],
                                    zero[vp, vn, block_of(vs, vj)],
                                )
                        for p, i, n, j in T.grid(parts, R, cols, L):
                            with T.sblock(f"sum{index}"):
                                vp, vi, vn, vj = T.axis.remap("SSSR", [p, i, n, j])
                                with T.init():
                                    totals[vp, vi, vn] = T.float32(0)
                                totals[vp, vi, vn] = totals[vp, vi, vn] + sums[vp, vn, vi, vj]
                        for i, n in T.grid(R, cols):
                            with T.sblock(f"finish{index}"):
                                vi, vn = T.axis.remap("SS", [i, n])
                                out[vt, vi, vk * cols + vn] = finish(
                                    totals, factor, bias, ve, vi, vn, vk * cols + vn, alpha, limit
                                )

    return step


def _finish1(spec: FusedMoe) -> Any:
    """h from the sums of gate and up."""
    I = i64(spec.intermediate)

    def finish(totals, factor, bias, e, i, n, column, alpha, limit):
        def value(part: int) -> PrimExpr:
            product = totals[part, i, n] * factor[e, part]
            return product + bias[e, i64(part) * I + column] if spec.bias else product

        gate = value(0)
        up = value(1) if spec.gated else gate
        return _rounded(spec, _activated(spec, gate, up, alpha, limit))

    return finish


def _finish2(spec: FusedMoe) -> Any:
    """Z from its sum."""

    def finish(totals, factor, bias, e, i, n, column, alpha, limit):
        product = totals[0, i, n] * factor[e]
        return _rounded(spec, product + bias[e, column] if spec.bias else product)

    return finish


def _combine_step(spec: FusedMoe) -> Any:
    """Step from rows of tiles to out: the weighted sum over the slots of a token, ascending."""
    top_k, H, cols = i64(spec.top_k), i64(spec.hidden), i64(COLUMNS)

    @T.inline
    def step(Z, place, topk_weights, out, first, tokens, row_tile):
        for t, g in T.grid(tokens, H // cols):
            with T.sblock("token"):
                vt, vg = T.axis.remap("SS", [t, g])
                total = T.sblock_alloc_buffer((cols,), "float32")
                for j, m in T.grid(top_k, cols):
                    with T.sblock("combine"):
                        vj, vm = T.axis.remap("RS", [j, m])
                        with T.init():
                            total[vm] = T.float32(0)
                        total[vm] = total[vm] + T.if_then_else(
                            place[vt, vj] >= i64(0),
                            topk_weights[first + vt, vj]
                            * Z[
                                place[vt, vj] // row_tile, place[vt, vj] % row_tile, vg * cols + vm
                            ],
                            T.float32(0),
                        )
                for m in T.serial(cols):
                    with T.sblock("store"):
                        vm = T.axis.spatial(cols, m)
                        out[first + vt, vg * cols + vm] = formats.round_to(spec.dtype, total[vm])

    return step


def _slots_step(spec: FusedMoe) -> Any:
    """Step from rows of tiles to out [rows, k, H]: those of each slot; left out ones: zeros."""
    top_k, H, cols = i64(spec.top_k), i64(spec.hidden), i64(COLUMNS)

    @T.inline
    def step(Z, place, topk_weights, out, first, tokens, row_tile):
        for t, g in T.grid(tokens, H // cols):
            with T.sblock("token"):
                vt, vg = T.axis.remap("SS", [t, g])
                for j, m in T.grid(top_k, cols):
                    with T.sblock("store"):
                        vj, vm = T.axis.remap("SS", [j, m])
                        out[first + vt, vj, vg * cols + vm] = formats.round_to(
                            spec.dtype,
                            T.if_then_else(
                                place[vt, vj] >= i64(0),
                                Z[
                                    place[vt, vj] // row_tile,
                                    place[vt, vj] % row_tile,
                                    vg * cols + vm,
                                ],
                                T.float32(0),
                            ),
                        )

    return step


def _used_params(spec: FusedMoe) -> list[str]:
    return [param.name for param in spec.params()]


def fused_moe(
    spec: FusedMoe, row_tile: int, lanes: tuple[int, int], rows: int | None = None
) -> PrimFunc:
    """Return the kernel with the parameters of ``spec.params()`` (weights in layout linear).

    ``rows`` None: symbolic, any number of tokens per call.
    """
    E, H, I = i64(spec.experts), i64(spec.hidden), i64(spec.intermediate)
    N1, k, R, word = i64(spec.rows), i64(spec.top_k), i64(row_tile), i64(WORD)
    half_h, half_i = i64(spec.hidden // 2), i64(spec.intermediate // 2)
    blocks_h, blocks_i = i64(spec.hidden // spec.group), i64(spec.intermediate // spec.group)
    one, chunk = i64(1), i64(chunk_tokens(spec))
    first_gemm, second_gemm = products(spec, lanes)
    L1, L2 = i64(lanes[0]), i64(lanes[1])
    steps1, steps2 = i64(first_gemm.steps), i64(second_gemm.steps)
    scale_dtype = "float32" if spec.format.scale is FLOAT else "uint8"
    sort = sort_step(spec, row_tile)
    x_rows, h_rows = rows_step(spec, 1, lanes[0]), rows_step(spec, 2, lanes[1])
    gemm1 = _product_step(spec, first_gemm, row_tile, _finish1(spec))
    gemm2 = _product_step(spec, second_gemm, row_tile, _finish2(spec))
    combine = _slots_step(spec) if spec.slots else _combine_step(spec)
    of_row = (k, H) if spec.slots else (H,)
    all_of_row = [slice(i64(0), size) for size in of_row]
    across, x_dtype = (
        (i64(spec.row_bytes), "uint8") if spec.coded else (i64(spec.hidden), spec.dtype)
    )

    def used_rows(hidden: Any, topk_ids: Any, topk_weights: Any, rows: PrimExpr) -> list[Any]:
        weights = [] if spec.slots else [topk_weights[0:rows, 0:k]]
        return [hidden[0:rows, 0:across], topk_ids[0:rows, 0:k], *weights]

    @T.prim_func(s_tir=True)
    def main(
        hidden_handle: T.handle,
        topk_ids_handle: T.handle,
        topk_weights_handle: T.handle,
        w13: T.Buffer((E, N1, half_h), "uint8"),
        w13_scale: T.Buffer((E, N1, blocks_h), scale_dtype),
        w13_zero: T.Buffer((E, N1, blocks_h), "uint8"),
        w13_global: T.Buffer((E, i64(2)), "float32"),
        w13_bias: T.Buffer((E, N1), "float32"),
        w2: T.Buffer((E, H, half_i), "uint8"),
        w2_scale: T.Buffer((E, H, blocks_i), scale_dtype),
        w2_zero: T.Buffer((E, H, blocks_i), "uint8"),
        w2_global: T.Buffer((E,), "float32"),
        w2_bias: T.Buffer((E, H), "float32"),
        a1_scale: T.Buffer((one,), "float32"),
        a2_scale: T.Buffer((one,), "float32"),
        alpha: T.float32,
        limit: T.float32,
        out_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        rows = T.int64()
        hidden = T.match_buffer(hidden_handle, (rows, across), x_dtype)
        topk_ids = T.match_buffer(topk_ids_handle, (rows, k), "int32")
        topk_weights = T.match_buffer(topk_weights_handle, (rows, k), "float32")
        out = T.match_buffer(out_handle, (rows, *of_row), spec.dtype)
        for c in range(tiles_of(rows, chunk_tokens(spec))):
            with T.sblock("chunk"):
                vc = T.axis.spatial(tiles_of(rows, chunk_tokens(spec)), c)
                T.reads(*used_rows(hidden, topk_ids, topk_weights, rows))
                T.writes(out[(slice(i64(0), rows), *all_of_row)])
                first = T.meta_var(vc * chunk)
                tokens = T.meta_var(tirx.Min(chunk, rows - vc * chunk))
                # Memory as for the largest chunk: its size must not depend on the loop.
                most = T.meta_var(tirx.Min(chunk, rows))
                tiles = T.meta_var(most_tiles(most * k, spec.experts, row_tile))
                used = T.sblock_alloc_buffer((one,), "int64")
                expert = T.sblock_alloc_buffer((tiles,), "int64")
                source = T.sblock_alloc_buffer((tiles, R), "int64")
                place = T.sblock_alloc_buffer((most, k), "int64")
                x = T.sblock_alloc_buffer((tiles, steps1, R, word, L1), "float32")
                h = T.sblock_alloc_buffer((tiles, R, I), "float32")
                h_laid = T.sblock_alloc_buffer((tiles, steps2, R, word, L2), "float32")
                z = T.sblock_alloc_buffer((tiles, R, H), "float32")
                sort(topk_ids, used, expert, source, place, first, tokens, tiles)
                x_rows(hidden, a1_scale, x, source, used, first, tiles, R)
                gemm1(
                    x, w13, w13_scale, w13_zero, w13_global, w13_bias, alpha, limit, h,
                    expert, used, tiles,
                )  # fmt: skip
                h_rows(h, a2_scale, h_laid, source, used, first, tiles, R)
                gemm2(
                    h_laid, w2, w2_scale, w2_zero, w2_global, w2_bias, alpha, limit, z,
                    expert, used, tiles,
                )  # fmt: skip
                combine(z, place, topk_weights, out, first, tokens, R)

    func = keep_params(main, _used_params(spec))
    if rows is None:
        return func
    return fix_shape(func, "hidden", (rows, spec.row_bytes if spec.coded else spec.hidden))


def most_tiles(slots: PrimExpr, experts: int, row_tile: int) -> PrimExpr:
    """Return the most tiles that so many slots can fill: one begun for each expert, whole ones."""
    if row_tile == 1:
        return slots
    return tirx.Min(slots, i64(experts)) + tirx.floordiv(slots, i64(row_tile))
