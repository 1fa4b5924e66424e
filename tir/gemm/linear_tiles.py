"""The linear layer of 4-bit weights in whole tiles, which schedules for mma.sync and wgmma split.

y[i, j] = round(act(fma(sum_k x[i, k] * w[j, k], global_scale, bias[j])) + residual[i, j])

and of gated layers round(act(gate) * up + residual); by row, global_scale[j].  Weights are in the
layout "tiles64" (`blockscale.ops.moe.tiles`): rows of w in an order in which a thread of an MMA has
neighbouring columns of y; of each 16 channels, which a thread has, word j holds 2 j, 2 j + 1,
2 j + 8 and 2 j + 9.  Sizes are padded: rows of w to `ROW_TILE`, K to `K_TILE`, rows of x to
`TOKEN_TILE`; the true ones are in the attribute "blockscale.shapes".

A decoded weight is w * 2^-LEFT_OVER: what 16-bit arithmetic makes of codes without a further step.

Of a layer that quantises its rows ("fp8") x holds their codes as another kernel wrote them, numbers
of 16 bits, and each row's scale is multiplied with the sum.  In layout "tiles64e" K lies as in
`moe.tiles` ("bytes"), each row of w has a global scale, weights become bfloat16 or E4M3, and so
does x.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Any

from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.base.sizes import ceil_div, round_up
from blockscale.specs import Linear
from blockscale.specs.plans.moe import AFTER, E4M3, FAST, scale_count
from blockscale.tir.common import i64, keep_params
from blockscale.tir.gemm.tiles import OPTIONAL, PARAMS
from blockscale.tir.moe.tiles import (
    BLOCK_WORDS,
    K_TILE,
    ROW_TILE,
    TOKEN_TILE,
    approximate_sigmoid,
    column,
    decoded,
    f32,
    left_over,
    natural,
    relu2,
    summed,
)

WEIGHT = ("packed", "block_scale")
"""Parameters that are written once, long before."""


@lru_cache(maxsize=8)  # the buckets of a spec schedule one function
def linear_tiles(spec: Linear, rows: int | None = None, *, by_bytes: bool = False) -> PrimFunc:
    """Return the unscheduled layer in whole tiles.

    Args:
        spec: of layout "tiles64" or "tiles64e".
        rows: of x, for which it is tuned; None: any number.
        by_bytes: of layout "tiles64e": whether E4M3 is multiplied, not bfloat16.

    Parameters are those of the spec, residual in any case (without one it is null), and where rows
    are quantised row_scale, behind x, in place of a workspace.
    """
    operand = operand_of(spec, by_bytes)
    func = (_gated if spec.gated else _plain)(spec, operand)
    optional = {"global_scale": 1.0, "bias": 0.0, "residual": 0.0}
    shapes = true_shapes(spec)
    func = keep_params(func, [*shapes])
    func = func.with_attrs({PARAMS: shapes, OPTIONAL: optional, AFTER: after(shapes)})
    if by_bytes and spec.fast_accum:
        func = func.with_attr(FAST, True)
    # Whole tiles are the same for several numbers of rows, whose best schedules are not.
    return func if rows is None else func.with_attr("blockscale.rows", rows)


def operand_of(spec: Linear, by_bytes: bool) -> str:
    """Return the dtype of x and of decoded weights as they are multiplied."""
    if spec.layout == "tiles64e":
        return E4M3 if by_bytes else "bfloat16"
    return spec.dtype


def scale_dtype(spec: Linear) -> str:
    """Return the dtype of block scales as kernels read them."""
    return operand_of(spec, by_bytes=False) if spec.fmt == "int4" else "uint8"


def after(shapes: Iterable[str]) -> list[str]:
    """Return the parameters that the kernel before may write, or read: all but the weight."""
    return [name for name in shapes if name not in WEIGHT]


def true_shapes(spec: Linear) -> dict[str, list[tuple[str, int, int, int]]]:
    """Return the true dimensions of the parameters; see `tiles.true_shapes`."""
    blocks = ceil_div(spec.padded_k, max(64, spec.group))
    y = [("rows", 1, -1, 2), ("", 1, spec.cols, 1)]
    k = spec.padded_k if spec.layout == "tiles64e" else spec.k
    row_scale = {"row_scale": [("rows", 1, -1, 2)]} if spec.act_fmt else {}
    return {
        "x": [("rows", 1, -1, 2), ("k", 1, k, 2)],
        **row_scale,
        "packed": [
            ("cols", 64, spec.padded_n // 64, 1),
            ("k", 64, spec.padded_k // 64, 1),
            ("", 1, BLOCK_WORDS, 1),
        ],
        "block_scale": [
            ("cols", 64, spec.padded_n // 64, 1),
            ("k", max(64, spec.group), blocks, 1),
            ("", 1, 4 * scale_count(spec.fmt, spec.group, spec.zero), 1),
        ],
        "global_scale": [("", 1, spec.factors, 1)],
        "bias": [*([("", 1, 2, 1)] if spec.gated else []), ("", 1, spec.cols, 1)],
        "residual": y,
        "y": y,
    }


def activated(name: str, value: PrimExpr) -> PrimExpr:
    """An activation in float32, from named device functions where hardware approximates it."""
    if name == "none":
        return value
    if name == "relu2":
        return relu2(value)
    if name == "silu":
        return value * approximate_sigmoid(value)
    inner = T.float32(0.7978845608028654) * (value + T.float32(0.044715) * value * value * value)
    return value * approximate_sigmoid(T.float32(2) * inner)  # (1 + tanh(z)) / 2 = sigmoid(2 z)


def _sizes(spec: Linear) -> tuple[PrimExpr, ...]:
    """Rows; blocks of 64 rows, of 64 k, and of scales; numbers in one of these; all padded."""
    rows, k = round_up(spec.padded_n, ROW_TILE), round_up(spec.padded_k, K_TILE)
    shared = max(1, spec.group // 64)
    numbers = 4 * scale_count(spec.fmt, spec.group, spec.zero)
    return tuple(i64(n) for n in (rows, rows // 64, k // 64, k // 64 // shared, numbers))


def _products(spec: Linear, dtype: str) -> Any:
    """Steps from x and the weight to sums C [tiles, rows of a tile, rows of w], of ``dtype``."""
    R, RB, KB, SB, SN = _sizes(spec)
    N = i64(TOKEN_TILE)
    numbers = scale_dtype(spec)
    order = "bytes" if spec.layout == "tiles64e" else ""
    decode = partial(decoded, spec.fmt, spec.group, spec.zero, dtype, order=order)
    multiply = summed(spec.fmt, spec.group, spec.zero, dtype, _sizes(spec), TOKEN_TILE)

    @T.inline
    def steps(x, packed, block_scale, C, tiles):
        W = T.sblock_alloc_buffer((RB, KB, i64(BLOCK_WORDS)), "uint32")
        S = T.sblock_alloc_buffer((RB, SB, SN), numbers)
        X = T.sblock_alloc_buffer((tiles, KB, N, i64(64)), dtype)
        A = T.sblock_alloc_buffer((KB, R, i64(64)), dtype)
        for r, k, b in T.grid(RB, KB, i64(BLOCK_WORDS)):
            with T.sblock("weights"):
                vr, vk, vb = T.axis.remap("SSS", [r, k, b])
                W[vr, vk, vb] = packed[vr, vk, vb]
        for r, k, b in T.grid(RB, SB, SN):
            with T.sblock("scales"):
                vr, vk, vb = T.axis.remap("SSS", [r, k, b])
                S[vr, vk, vb] = block_scale[vr, vk, vb]
        for t, k, i, p in T.grid(tiles, KB, N, i64(64)):
            with T.sblock("tokens"):
                vt, vk, vi, vp = T.axis.remap("SSSS", [t, k, i, p])
                X[vt, vk, vi, vp] = x[vt, vi, vk, vp]
        for k, r, p in T.grid(KB, R, i64(64)):
            with T.sblock("decode"):
                vk, vr, vp = T.axis.remap("SSS", [k, r, p])
                A[vk, vr, vp] = decode(W, S, vr, vp, (vr // i64(64),), vk)
        multiply(
            lambda t, k, r, p: A[k, r, p],
            lambda t, k, i, p: X[t, k, i, p],
            lambda t, r: (r // i64(64),),
            S,
            C,
            tiles,
        )

    return steps


def _factors(spec: Linear, operand: str) -> tuple[PrimExpr, Any]:
    """How many global scales there are, and what returns that of a sum, with what is left over.

    It takes them, the rows' scales, the half (0: gates, 1: ups), and the indices of the sum.
    """
    left = T.float32(left_over(spec.fmt, spec.zero, operand))
    rows, *_ = _sizes(spec)

    def factor(global_scale, row_scale, half, tile, i, row):
        at = row if spec.layout == "tiles64e" else natural(row) if spec.by_row else half
        value = global_scale[at] * left
        return value * row_scale[tile, i] if spec.act_fmt else value

    if spec.layout == "tiles64e" or spec.by_row:
        return rows, factor
    return i64(2 if spec.gated else 1), factor


def _plain(spec: Linear, operand: str) -> PrimFunc:
    """The layer whose rows of w are columns of y."""
    R, RB, KB, SB, SN = _sizes(spec)
    N, dtype, out_dtype = i64(TOKEN_TILE), spec.dtype, spec.out_dtype
    numbers = scale_dtype(spec)
    multiply, act = _products(spec, operand), partial(activated, spec.activation)
    factors, factor = _factors(spec, operand)

    @T.prim_func(s_tir=True)
    def main(
        x_handle: T.handle,
        row_scale_handle: T.handle,
        packed: T.Buffer((RB, KB, i64(BLOCK_WORDS)), "uint32"),
        block_scale: T.Buffer((RB, SB, SN), numbers),
        global_scale: T.Buffer((factors,), "float32"),
        bias: T.Buffer((R,), "float32"),
        residual_handle: T.handle,
        y_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        tiles = T.int64()
        x = T.match_buffer(x_handle, (tiles, N, KB, i64(64)), operand)
        row_scale = T.match_buffer(row_scale_handle, (tiles, N), "float32")
        residual = T.match_buffer(residual_handle, (tiles, N, R), dtype)
        y = T.match_buffer(y_handle, (tiles, N, R), out_dtype)
        C = T.sblock_alloc_buffer((tiles, N, R), "float32")
        multiply(x, packed, block_scale, C, tiles)
        for t, i, r in T.grid(tiles, N, R):
            with T.sblock("epilogue"):
                vt, vi, vr = T.axis.remap("SSS", [t, i, r])
                y[vt, vi, natural(vr)] = T.Cast(
                    out_dtype,
                    act(
                        T.fma(
                            C[vt, vi, vr],
                            factor(global_scale, row_scale, 0, vt, vi, vr),
                            bias[natural(vr)],
                        )
                    )
                    + f32(residual[vt, vi, natural(vr)]),
                )

    return main


def _gated(spec: Linear, operand: str) -> PrimFunc:
    """The layer whose rows of w are gates and ups, 8 of each in turn."""
    R, RB, KB, SB, SN = _sizes(spec)
    N, dtype, out_dtype, two = i64(TOKEN_TILE), spec.dtype, spec.out_dtype, i64(2)
    numbers = scale_dtype(spec)
    multiply, act = _products(spec, operand), partial(activated, spec.activation)
    factors, factor = _factors(spec, operand)
    half, eight, sixteen = R // two, i64(8), i64(16)

    @T.prim_func(s_tir=True)
    def main(
        x_handle: T.handle,
        row_scale_handle: T.handle,
        packed: T.Buffer((RB, KB, i64(BLOCK_WORDS)), "uint32"),
        block_scale: T.Buffer((RB, SB, SN), numbers),
        global_scale: T.Buffer((factors,), "float32"),
        bias: T.Buffer((two, half), "float32"),
        residual_handle: T.handle,
        y_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        tiles = T.int64()
        x = T.match_buffer(x_handle, (tiles, N, KB, i64(64)), operand)
        row_scale = T.match_buffer(row_scale_handle, (tiles, N), "float32")
        residual = T.match_buffer(residual_handle, (tiles, N, half), dtype)
        y = T.match_buffer(y_handle, (tiles, N, half), out_dtype)
        C = T.sblock_alloc_buffer((tiles, N, R), "float32")
        multiply(x, packed, block_scale, C, tiles)
        for t, i, q, p in T.grid(tiles, N, R // sixteen, eight):
            with T.sblock("epilogue"):
                vt, vi, vq, vp = T.axis.remap("SSSS", [t, i, q, p])
                y[vt, vi, column(vq, vp)] = T.Cast(
                    out_dtype,
                    act(
                        T.fma(
                            C[vt, vi, vq * sixteen + vp],
                            factor(global_scale, row_scale, 0, vt, vi, vq * sixteen + vp),
                            bias[0, column(vq, vp)],
                        )
                    )
                    * T.fma(
                        C[vt, vi, vq * sixteen + eight + vp],
                        factor(global_scale, row_scale, 1, vt, vi, vq * sixteen + eight + vp),
                        bias[1, column(vq, vp)],
                    )
                    + f32(residual[vt, vi, column(vq, vp)]),
                )

    return main
