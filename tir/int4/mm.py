"""INT4 weights with groups along K: dequantised, and multiplied, whatever their layout.

    w[e, k, n] = q * scale[e, k // group, n] + zero[e, k // group, n]
    out[i, n] = round(alpha[e] * sum_k x'[i, k] * w[e, k, n] + bias[e, n])    for rows i of expert e

q, -8 to 7, is the code that the layout's index map (`int4_forms.MAPS`) finds for (e, k, n).
x' is x * pre_quant_scale[e], rounded to the dtype of x, then for "a8" to E4M3 (saturating, NaN
stays NaN).  Everything else is float32: numbers q are exact, the products of a group are added up
and then multiplied by the scale, so that x' meets no rounded weight; the zero is multiplied by the
sum of the group's x'.  Offsets that fall or lie outside of x are taken as the nearest that do not;
rows of no expert are not written.

Vectors of words are read in the order of memory, and the rows of x laid out to match; where sizes
make no vectors, every code is looked up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.specs.int4 import Int4Mm
from blockscale.tir import formats
from blockscale.tir.common import fix_shape, i64, keep_params, tiles_of
from blockscale.tir.gemm.linear import from_operand, to_operand
from blockscale.tir.int4.forms import MAPS, WORD, Form
from blockscale.tir.int4.rows import group_sums, prepare_rows, ranges


class Tiling(NamedTuple):
    """What `int4_mm` lets a schedule choose.

    Attributes:
        rows: of a tile.
        compute: type of operands: "float32" serves all, "bfloat16" (bits as uint16) an x' that is
            exact in it.
        bands: of a task, where words hold rows.
        slots: codes of a word that are multiplied at a time, where words hold columns.
    """

    rows: int
    compute: str = "float32"
    bands: int = 1
    slots: int = WORD

    @property
    def pair(self) -> int:
        """Codes that a lane multiplies at a time."""
        return 2 if self.compute == "bfloat16" else 1

    @property
    def operand(self) -> str:
        """Dtype of operands in memory."""
        return "uint16" if self.compute == "bfloat16" else "float32"


def code_value(byte: PrimExpr, index: PrimExpr, flip: int) -> PrimExpr:
    """Number -8 to 7 (float32) of a byte (uint8): the low nibble where ``index`` is even."""
    code = formats.nibble(tirx.Cast("int32", byte), index)
    number = code - 8 if flip else (code ^ 8) - 8
    return tirx.Cast("float32", number)


def _with_zero(spec: Int4Mm) -> Any:
    """``value + sum of x' * zero``."""

    def added(value, sums, zero, row, g, expert, column):
        return value if spec.zero == "none" else value + sums[row, g] * zero[expert, g, column]

    return added


def _columns_along(spec: Int4Mm, form: Form, tiling: Tiling) -> Any:
    """Step of one expert whose words hold columns: a group's weights are decoded, for all tiles."""
    R, L, G = i64(tiling.rows), i64(form.lanes), i64(spec.groups)
    pair, depth = i64(tiling.pair), i64(spec.group // tiling.pair)
    N, K, word, one, two = i64(spec.n), i64(spec.k), i64(WORD), i64(1), i64(2)
    vectors, width, flip = i64(spec.n // form.columns), i64(form.columns), MAPS[spec.layout].flip
    bytes_, four, group, some = i64(4 * form.lanes), i64(4), i64(spec.group), i64(tiling.slots)
    added = _with_zero(spec)

    @T.inline
    def step(X, packed, scale, zero, alpha, bias, out, sums, ve, before, mine, tiles, most):
        A = T.sblock_alloc_buffer((most, K // pair, R, pair), tiling.operand)
        for t, i, k, p in T.grid(tiles, R, K // pair, pair):
            with T.sblock("lay"):
                vt, vi, vk, vp = T.axis.remap("SSSS", [t, i, k, p])
                A[vt, vk, vi, vp] = to_operand(X[vt * R + vi, vk * pair + vp], tiling.compute)
        for task in T.serial(vectors):
            with T.sblock("task"):
                vb = T.axis.spatial(vectors, task)
                T.reads(A[0:tiles, 0 : K // pair, 0:R, 0:pair], packed[ve, 0 : K * N // two])
                T.writes(out[0 : before + mine, vb * width : vb * width + width])
                total = T.sblock_alloc_buffer((most, R, word, L), "float32")
                for g in T.serial(G):
                    with T.sblock("group"):
                        vg = T.axis.reduce(G, g)
                        T.reads(
                            A[0:tiles, 0 : K // pair, 0:R, 0:pair], packed[ve, 0 : K * N // two]
                        )
                        T.writes(total[0:tiles, 0:R, 0:word, 0:L])
                        W = T.sblock_alloc_buffer((depth, word, L * pair), tiling.operand)
                        factor = T.sblock_alloc_buffer((word, L), "float32")
                        for k, p, j, c in T.grid(depth, pair, L, word):
                            with T.sblock("decode"):
                                vk, vp, vj, vc = T.axis.remap("SSSS", [k, p, j, c])
                                W[vk, vc, vj * pair + vp] = to_operand(
                                    code_value(
                                        packed[
                                            ve,
                                            (vg * group + vk * pair + vp) * (N // two)
                                            + vb * bytes_
                                            + vj * four
                                            + vc // two,
                                        ],
                                        vc,
                                        flip,
                                    ),
                                    tiling.compute,
                                )
                        for c, j in T.grid(word, L):
                            with T.sblock("factor"):
                                vc, vj = T.axis.remap("SS", [c, j])
                                factor[vc, vj] = scale[ve, vg, vb * width + vj * word + vc]
                        for t, part in T.grid(tiles, word // some):
                            with T.sblock("rows"):
                                vt, vq = T.axis.remap("SS", [t, part])
                                partial = T.sblock_alloc_buffer((R, some, L), "float32")
                                for i, c, k, j, p in T.grid(R, some, depth, L, pair):
                                    with T.sblock("matmul"):
                                        vi, vc, vk, vj, vp = T.axis.remap("SSRSR", [i, c, k, j, p])
                                        with T.init():
                                            partial[vi, vc, vj] = T.float32(0)
                                        partial[vi, vc, vj] = partial[vi, vc, vj] + from_operand(
                                            A[vt, vg * depth + vk, vi, vp]
                                        ) * from_operand(W[vk, vq * some + vc, vj * pair + vp])
                                for i, c, j in T.grid(R, some, L):
                                    with T.sblock("scale"):
                                        vi, vc, vj = T.axis.remap("SSS", [i, c, j])
                                        vh = T.axis.reduce(G, vg)
                                        with T.init():
                                            total[vt, vi, vq * some + vc, vj] = T.float32(0)
                                        total[vt, vi, vq * some + vc, vj] = added(
                                            total[vt, vi, vq * some + vc, vj]
                                            + partial[vi, vc, vj] * factor[vq * some + vc, vj],
                                            sums, zero, vt * R + vi, vh, ve,
                                            vb * width + vj * word + vq * some + vc,
                                        )  # fmt: skip
                for t, i, j, c in T.grid(tiles, R, L, word):
                    with T.sblock("finish"):
                        vt, vi, vj, vc = T.axis.remap("SSSS", [t, i, j, c])
                        if mine > vt * R + vi:
                            out[before + vt * R + vi, vb * width + vj * word + vc] = (
                                formats.round_to(
                                    spec.out_dtype,
                                    total[vt, vi, vc, vj] * alpha[ve]
                                    + bias[ve, vb * width + vj * word + vc],
                                )
                            )

    return step


def _rows_along(spec: Int4Mm, form: Form, tiling: Tiling) -> Any:
    """Step of one expert whose words hold rows: codes are decoded in registers, by tiles."""
    R, L, G, H = i64(tiling.rows), i64(form.lanes), i64(spec.groups), i64(tiling.pair)
    slots, word, two, four = i64(WORD // tiling.pair), i64(WORD), i64(2), i64(4)
    N, K, steps, deep = (
        i64(spec.n),
        i64(spec.k),
        i64(spec.k // form.span),
        i64(spec.group // form.span),
    )
    bands, inner, cols = i64(tiling.bands), i64(form.inner), i64(form.columns)
    tasks, width = i64(spec.n // (form.band * tiling.bands)), i64(form.band * tiling.bands)
    share, span, flip = i64(form.lanes // form.columns), i64(form.span), MAPS[spec.layout].flip
    half_bytes, zero_terms = i64(4 // tiling.pair), _zero_terms(spec)

    @T.inline
    def step(X, packed, scale, zero, alpha, bias, out, sums, ve, before, mine, tiles, most):
        A = T.sblock_alloc_buffer((most, steps, R, slots, L * H), tiling.operand)
        for t, s, i, c, j, h in T.grid(tiles, steps, R, slots, L, H):
            with T.sblock("lay"):
                vt, vs, vi, vc, vj, vh = T.axis.remap("SSSSSS", [t, s, i, c, j, h])
                A[vt, vs, vi, vc, vj * H + vh] = to_operand(
                    X[vt * R + vi, vs * span + form.rows(vc + vh * slots, vj)], tiling.compute
                )
        for task, t in T.grid(tasks, tiles):
            with T.sblock("task"):
                vb, vt = T.axis.remap("SS", [task, t])
                T.reads(A[vt, 0:steps, 0:R, 0:slots, 0 : L * H], packed[ve, 0 : K * N // two])
                T.writes(out[0 : before + mine, vb * width : vb * width + width])
                total = T.sblock_alloc_buffer((bands, inner, R, L), "float32")
                sum_of = T.sblock_alloc_buffer((R, bands, inner, cols), "float32")
                for g in T.serial(G):
                    with T.sblock("group"):
                        vg = T.axis.reduce(G, g)
                        T.reads(
                            A[vt, 0:steps, 0:R, 0:slots, 0 : L * H], packed[ve, 0 : K * N // two]
                        )
                        T.writes(total[0:bands, 0:inner, 0:R, 0:L])
                        partial = T.sblock_alloc_buffer((bands, inner, R, L), "float32")
                        for s, b, n, i, j, h, c in T.grid(deep, bands, inner, R, L, H, slots):
                            with T.sblock("dot"):
                                vs, vx, vn, vi, vj, vh, vc = T.axis.remap(
                                    "RSSSSRR", [s, b, n, i, j, h, c]
                                )
                                with T.init():
                                    partial[vx, vn, vi, vj] = T.float32(0)
                                partial[vx, vn, vi, vj] = partial[vx, vn, vi, vj] + from_operand(
                                    A[vt, vg * deep + vs, vi, vc, vj * H + vh]
                                ) * code_value(
                                    packed[
                                        ve,
                                        (((vb * bands + vx) * steps + vg * deep + vs) * inner + vn)
                                        * (L * four)
                                        + vj * four
                                        + vh * half_bytes
                                        + vc // two,
                                    ],
                                    vc,
                                    flip,
                                )
                        for b, n, i, j in T.grid(bands, inner, R, L):
                            with T.sblock("scale"):
                                vx, vn, vi, vj = T.axis.remap("SSSS", [b, n, i, j])
                                vh = T.axis.reduce(G, vg)
                                with T.init():
                                    total[vx, vn, vi, vj] = T.float32(0)
                                total[vx, vn, vi, vj] = (
                                    total[vx, vn, vi, vj]
                                    + partial[vx, vn, vi, vj]
                                    * scale[
                                        ve, vh,
                                        ((vb * bands + vx) * inner + vn) * cols + vj // share,
                                    ]
                                )  # fmt: skip
                for i, b, n, c, j in T.grid(R, bands, inner, cols, share):
                    with T.sblock("sum"):
                        vi, vx, vn, vc, vj = T.axis.remap("SSSSR", [i, b, n, c, j])
                        with T.init():
                            sum_of[vi, vx, vn, vc] = T.float32(0)
                        sum_of[vi, vx, vn, vc] = (
                            sum_of[vi, vx, vn, vc] + total[vx, vn, vi, vc * share + vj]
                        )
                zero_terms(sum_of, sums, zero, ve, vt, R, bands, inner, cols, vb * bands)
                for i, b, n, c in T.grid(R, bands, inner, cols):
                    with T.sblock("finish"):
                        vi, vx, vn, vc = T.axis.remap("SSSS", [i, b, n, c])
                        if mine > vt * R + vi:
                            out[
                                before + vt * R + vi,
                                ((vb * bands + vx) * inner + vn) * cols + vc,
                            ] = formats.round_to(
                                spec.out_dtype,
                                sum_of[vi, vx, vn, vc] * alpha[ve]
                                + bias[ve, ((vb * bands + vx) * inner + vn) * cols + vc],
                            )

    return step


def _zero_terms(spec: Int4Mm) -> Any:
    """Step: adds the zeros to sums of columns; nothing without."""
    G = i64(spec.groups)

    @T.inline
    def some(sum_of, sums, zero, ve, vt, R, bands, inner, cols, first):
        for i, b, n, c, g in T.grid(R, bands, inner, cols, G):
            with T.sblock("zero_term"):
                vi, vx, vn, vc, vg = T.axis.remap("SSSSR", [i, b, n, c, g])
                sum_of[vi, vx, vn, vc] = (
                    sum_of[vi, vx, vn, vc]
                    + sums[vt * R + vi, vg] * zero[ve, vg, ((first + vx) * inner + vn) * cols + vc]
                )

    @T.inline
    def none(sum_of, sums, zero, ve, vt, R, bands, inner, cols, first):
        pass

    return none if spec.zero == "none" else some


def _one_by_one(spec: Int4Mm) -> Any:
    """Step of one expert that looks every code up in the index map."""
    K, N, two, group = i64(spec.k), i64(spec.n), i64(2), i64(spec.group)
    layout, sizes = MAPS[spec.layout], (1, i64(spec.k), i64(spec.n))

    def weight(packed, scale, zero, ve, k, n):
        place = layout.place((i64(0), k, n), sizes)
        value = code_value(packed[ve, place // two], place, layout.flip) * scale[ve, k // group, n]
        return value if spec.zero == "none" else value + zero[ve, k // group, n]

    @T.inline
    def step(X, packed, scale, zero, alpha, bias, out, sums, ve, before, mine, tiles, most):
        total = T.sblock_alloc_buffer((N, most), "float32")
        for n, k, i in T.grid(N, K, mine):
            with T.sblock("dot"):
                vn, vk, vi = T.axis.remap("SRS", [n, k, i])
                with T.init():
                    total[vn, vi] = T.float32(0)
                total[vn, vi] = total[vn, vi] + X[vi, vk] * weight(packed, scale, zero, ve, vk, vn)
        for i, n in T.grid(mine, N):
            with T.sblock("finish"):
                vi, vn = T.axis.remap("SS", [i, n])
                out[before + vi, vn] = formats.round_to(
                    spec.out_dtype, total[vn, vi] * alpha[ve] + bias[ve, vn]
                )

    return step


def int4_mm(spec: Int4Mm, form: Form | None, tiling: Tiling, rows: int | None = None) -> PrimFunc:
    """Return the kernel with the parameters of ``spec.params()``, of a layout of `MAPS`.

    ``form``: vectors of the weight, or None: code by code.  ``rows`` None: any number of rows.
    """
    E, N, K, G, one = i64(spec.matrices), i64(spec.n), i64(spec.k), i64(spec.groups), i64(1)
    R, size = i64(tiling.rows), i64(spec.k * spec.n // 2)
    find_ranges, prepare = ranges(spec), prepare_rows(spec)
    add_up = group_sums(spec, form is not None)
    if form is None:
        step = _one_by_one(spec)
    else:
        step = (_columns_along if form.along == "n" else _rows_along)(spec, form, tiling)

    @T.prim_func(s_tir=True)
    def main(
        x_handle: T.handle,
        offsets: T.Buffer((E + one,), "int32"),
        packed: T.Buffer((E, size), "uint8"),
        scale: T.Buffer((E, G, N), "float32"),
        zero: T.Buffer((E, G, N), "float32"),
        pre_quant_scale: T.Buffer((E, K), "float32"),
        alpha: T.Buffer((E,), "float32"),
        bias: T.Buffer((E, N), "float32"),
        out_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        rows = T.int64()
        x = T.match_buffer(x_handle, (rows, K), spec.dtype)
        out = T.match_buffer(out_handle, (rows, N), spec.out_dtype)
        start = T.sblock_alloc_buffer((E,), "int64")
        count = T.sblock_alloc_buffer((E,), "int64")
        find_ranges(offsets, start, count, rows)
        for e in range(E):
            with T.sblock("expert"):
                ve = T.axis.spatial(E, e)
                T.where(count[e] > 0)
                T.reads(start[ve], count[ve], x[0:rows, 0:K], packed[ve, 0:size])
                T.writes(out[0:rows, 0:N])
                # One iteration: what is tensorized may name a variable and may not load it.
                for s in T.serial(start[ve], start[ve] + one):
                    for m in T.serial(count[ve], count[ve] + one):
                        with T.sblock("product"):
                            before = T.axis.spatial(rows, s)
                            mine = T.axis.spatial(rows + one, m)
                            T.reads(x[0:rows, 0:K], packed[ve, 0:size])
                            T.writes(out[0:rows, 0:N])
                            tiles = T.meta_var(tiles_of(mine, tiling.rows))
                            # Memory as for all rows: its size must not depend on the loop.
                            most = T.meta_var(tiles_of(rows, tiling.rows))
                            X = T.sblock_alloc_buffer((most * R, K), "float32")
                            sums = T.sblock_alloc_buffer((most * R, G), "float32")
                            P = T.sblock_alloc_buffer((most * R, K), "float32")
                            Q = T.sblock_alloc_buffer((most * R, K), "float32")
                            codes = T.sblock_alloc_buffer((most * R, K), "int32")
                            prepare(x, pre_quant_scale, X, P, Q, codes, mine, before, ve, tiles * R)
                            add_up(X, sums, tiles * R)
                            step(
                                X, packed, scale, zero, alpha, bias, out, sums,
                                ve, before, mine, tiles, most,
                            )  # fmt: skip

    func = keep_params(main, [param.name for param in spec.params()])
    return func if rows is None else fix_shape(func, "x", (rows, spec.k))
