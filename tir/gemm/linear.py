"""Linear layer on 4-bit weights: y = act(s) + residual, or gated, act(gate) * up + residual.

s[m, n] = global_scale * sum_k x[m, k] * w[n, k] + bias[n]; gates are the first half of its columns,
ups the second, each half with a global scale of its own.  By row, it is global_scale[n].
Activations: `blockscale.tir.activations`.

w[n, k] = e2m1(packed[n, k / 2], nibble k % 2) * block_scale[n, k / block], exactly; block is 16
(NVFP4, E4M3 scales) or 32 (MXFP4, E8M0 scales).  The sum is accumulated in float32; all that is
done to it is float32 too, and y is rounded once to its dtype.

``compute`` is the type in which x and w are multiplied.  "float32" serves every dtype of x.
"bfloat16" serves bfloat16 x and NVFP4: an E2M1 code times an E4M3 scale has at most 6 significant
bits, so w is exact in bfloat16, and two products at a time go to a float32 accumulator (VDPBF16PS).
Its operands are held as uint16 bits.

With act_fmt "fp8" rows of codes e4m3(x / f), f = max |x| / 448 of the row, are multiplied instead
of x, and s is f * global_scale times the sum; where f is 0 they are zeros.  A NaN makes its row
NaN.

Rows are padded with zeros to a multiple of ``row_tile``, so that a schedule sees whole tiles.
Between loads and stores the rows of a gated weight are in another order, ``pair`` gates and then
their ups (`_Order`): a tile of neighbouring columns of y has neighbouring columns of sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.specs import Linear
from blockscale.tir import activations, formats
from blockscale.tir.common import fix_shape, i64, keep_params, tiles_of, widen


def weight_value(packed_byte: PrimExpr, k: PrimExpr, scale: PrimExpr, compute: str) -> PrimExpr:
    """Weight ``k`` from its packed byte (uint8) and block scale (float32), in the compute type."""
    code = formats.nibble(tirx.Cast("int32", packed_byte), k)
    return to_operand(formats.e2m1_decode(code) * scale, compute)


def to_operand(value: PrimExpr, compute: str) -> PrimExpr:
    """Float32 ``value`` as an operand; bfloat16 keeps the upper half, exact for weights."""
    if compute == "float32":
        return value
    return formats.cast(formats.bits_of(value) >> formats.const(16, value, "int32"), "uint16")


def from_operand(operand: PrimExpr) -> PrimExpr:
    """The float32 value of an operand."""
    if str(operand.ty.dtype).startswith("float32"):
        return operand
    return formats.from_bits(formats.cast(operand, "int32") << formats.const(16, operand, "int32"))


class _Order(NamedTuple):
    """Positions of a weight's rows among the sums; ``pair`` 0: they stay where they are."""

    cols: int
    pair: int

    def row(self, position: PrimExpr) -> PrimExpr:
        """Return the row of the weight at ``position``."""
        if not self.pair:
            return position
        pair = i64(self.pair)
        within = position // (i64(2) * pair) * pair + position % pair
        return self.half(position) * i64(self.cols) + within

    def half(self, position: PrimExpr) -> PrimExpr | int:
        """Return 0 for a gate, 1 for an up."""
        return position // i64(self.pair) % i64(2) if self.pair else 0

    def gate(self, col: PrimExpr) -> PrimExpr:
        """Return the position of the gate of a column of y."""
        return col // i64(self.pair) * i64(2 * self.pair) + col % i64(self.pair)


FP8_MAX = 448.0
"""The largest value of E4M3."""


def _rows_step(spec: Linear, row_tile: int, compute: str) -> Any:
    """Return the blocks from x to rows A of operands, padded with zeros, and their factors F.

    What a step of quantising computes is stored: expressions would repeat it as often as they name
    it.
    """
    R, K, zero = i64(row_tile), i64(spec.k), tirx.const(0, operand_type(compute))

    @T.inline
    def widened(x, A, F, rows):
        for t, i, k in T.grid(tiles_of(rows, row_tile), R, K):
            with T.sblock("widen"):
                vt, vi, vk = T.axis.remap("SSS", [t, i, k])
                A[vt, vi, vk] = T.if_then_else(
                    vt * R + vi < rows, to_operand(widen(x[vt * R + vi, vk]), compute), zero
                )

    # Bits, since a maximum of float32 is a > b ? a : b, which loses a NaN and what was before it.
    def magnitude(x, rows, row, k):
        return T.if_then_else(row < rows, formats.abs_bits(widen(x[row, k])), 0)

    def ratio(x, F, rows, t, i, k):
        there = tirx.And(t * R + i < rows, F[t, i] != T.float32(0))
        return T.if_then_else(there, widen(x[t * R + i, k]) / F[t, i], T.float32(0))

    @T.inline
    def quantised(x, A, F, rows):
        P = T.sblock_alloc_buffer((tiles_of(rows, row_tile), R, K), "float32")
        Q = T.sblock_alloc_buffer((tiles_of(rows, row_tile), R, K), "int32")
        M = T.sblock_alloc_buffer((tiles_of(rows, row_tile), R), "int32")
        for t, i, k in T.grid(tiles_of(rows, row_tile), R, K):
            with T.sblock("row_most"):
                vt, vi, vk = T.axis.remap("SSR", [t, i, k])
                with T.init():
                    M[vt, vi] = 0
                M[vt, vi] = T.max(M[vt, vi], magnitude(x, rows, vt * R + vi, vk))
        for t, i in T.grid(tiles_of(rows, row_tile), R):
            with T.sblock("row_factor"):
                vt, vi = T.axis.remap("SS", [t, i])
                F[vt, vi] = formats.from_bits(M[vt, vi]) / T.float32(FP8_MAX)
        for t, i, k in T.grid(tiles_of(rows, row_tile), R, K):
            with T.sblock("row_ratio"):
                vt, vi, vk = T.axis.remap("SSS", [t, i, k])
                P[vt, vi, vk] = ratio(x, F, rows, vt, vi, vk)
        for t, i, k in T.grid(tiles_of(rows, row_tile), R, K):
            with T.sblock("row_code"):
                vt, vi, vk = T.axis.remap("SSS", [t, i, k])
                Q[vt, vi, vk] = formats.e4m3_encode(P[vt, vi, vk])
        for t, i, k in T.grid(tiles_of(rows, row_tile), R, K):
            with T.sblock("widen"):
                vt, vi, vk = T.axis.remap("SSS", [t, i, k])
                A[vt, vi, vk] = to_operand(formats.e4m3_decode(Q[vt, vi, vk]), compute)

    return quantised if spec.act_fmt else widened


def operand_type(compute: str) -> str:
    """The dtype in which operands of the compute type are held."""
    return "float32" if compute == "float32" else "uint16"


def _finish(spec: Linear, order: _Order, row_tile: int) -> Any:
    """Return the blocks from the products C to y: one; three where there is an activation."""
    R, N, cols = i64(row_tile), i64(spec.n), i64(spec.cols)

    def sum_of(C, F, global_scale, bias, t, i, n):
        row = order.row(n)
        factor = global_scale[row if spec.by_row else order.half(n)]
        if spec.act_fmt:
            factor = factor * F[t, i]
        return C[t, i, n] * factor + bias[row]

    def active(E, t, i, n):
        if not spec.gated:
            return activations.of(spec.activation, E[t, i, n])
        gate = order.gate(n)
        return activations.gated(spec.activation, E[t, i, gate], E[t, i, gate + i64(order.pair)])

    def added(value, residual, row, n):
        return value + widen(residual[row, n]) if spec.residual else value

    @T.inline
    def epilogue(C, F, global_scale, bias, residual, y, rows):
        for t, i, n in T.grid(tiles_of(rows, row_tile), R, cols):
            with T.sblock("epilogue"):
                vt, vi, vn = T.axis.remap("SSS", [t, i, n])
                if vt * R + vi < rows:
                    y[vt * R + vi, vn] = formats.round_to(
                        spec.out_dtype,
                        added(
                            sum_of(C, F, global_scale, bias, vt, vi, vn), residual, vt * R + vi, vn
                        ),
                    )

    @T.inline
    def with_activation(C, F, global_scale, bias, residual, y, rows):
        E = T.sblock_alloc_buffer((tiles_of(rows, row_tile), R, N), "float32")
        H = T.sblock_alloc_buffer((tiles_of(rows, row_tile), R, cols), "float32")
        for t, i, n in T.grid(tiles_of(rows, row_tile), R, N):
            with T.sblock("sum"):
                vt, vi, vn = T.axis.remap("SSS", [t, i, n])
                E[vt, vi, vn] = sum_of(C, F, global_scale, bias, vt, vi, vn)
        for t, i, n in T.grid(tiles_of(rows, row_tile), R, cols):
            with T.sblock("activate"):
                vt, vi, vn = T.axis.remap("SSS", [t, i, n])
                H[vt, vi, vn] = active(E, vt, vi, vn)
        for t, i, n in T.grid(tiles_of(rows, row_tile), R, cols):
            with T.sblock("epilogue"):
                vt, vi, vn = T.axis.remap("SSS", [t, i, n])
                if vt * R + vi < rows:
                    y[vt * R + vi, vn] = formats.round_to(
                        spec.out_dtype, added(H[vt, vi, vn], residual, vt * R + vi, vn)
                    )

    return epilogue if spec.activation == "none" else with_activation


def _steps(spec: Linear, row_tile: int, compute: str, order: _Order) -> Any:
    """Return the blocks from the parameters to y."""
    N, K, R = i64(spec.n), i64(spec.k), i64(row_tile)
    blocks, block, two = i64(spec.k // spec.block), i64(spec.block), i64(2)
    operand = operand_type(compute)
    start, finish = _rows_step(spec, row_tile, compute), _finish(spec, order, row_tile)

    @T.inline
    def layer(F, x, packed, block_scale, global_scale, bias, residual, y, rows):
        A = T.sblock_alloc_buffer((tiles_of(rows, row_tile), R, K), operand)
        S = T.sblock_alloc_buffer((N, blocks), "float32")
        W = T.sblock_alloc_buffer((N, K), operand)
        C = T.sblock_alloc_buffer((tiles_of(rows, row_tile), R, N), "float32")
        start(x, A, F, rows)
        for n, b in T.grid(N, blocks):
            with T.sblock("block_scale"):
                vn, vb = T.axis.remap("SS", [n, b])
                S[vn, vb] = formats.decode(
                    spec.format.scale, T.Cast("int32", block_scale[order.row(vn), vb])
                )
        for n, k in T.grid(N, K):
            with T.sblock("decode"):
                vn, vk = T.axis.remap("SS", [n, k])
                W[vn, vk] = weight_value(
                    packed[order.row(vn), vk // two], vk, S[vn, vk // block], compute
                )
        for t, i, n, k in T.grid(tiles_of(rows, row_tile), R, N, K):
            with T.sblock("matmul"):
                vt, vi, vn, vk = T.axis.remap("SSSR", [t, i, n, k])
                with T.init():
                    C[vt, vi, vn] = T.float32(0)
                C[vt, vi, vn] = C[vt, vi, vn] + from_operand(A[vt, vi, vk]) * from_operand(
                    W[vn, vk]
                )
        finish(C, F, global_scale, bias, residual, y, rows)

    @T.inline
    def plain(x, packed, block_scale, global_scale, bias, residual, y, rows):
        layer(None, x, packed, block_scale, global_scale, bias, residual, y, rows)

    @T.inline
    def quantised(x, packed, block_scale, global_scale, bias, residual, y, rows):
        F = T.sblock_alloc_buffer((tiles_of(rows, row_tile), R), "float32")
        layer(F, x, packed, block_scale, global_scale, bias, residual, y, rows)

    return quantised if spec.act_fmt else plain


def linear(
    spec: Linear, row_tile: int, compute: str = "float32", rows: int | None = None, pair: int = 1
) -> PrimFunc:
    """Return the kernel with the parameters of ``spec.params()``.

    ``rows`` None: symbolic, any number of rows per call.  ``pair``: neighbouring gates, which are
    followed by their ups; divides the columns of y.
    """
    N, K, cols = i64(spec.n), i64(spec.k), i64(spec.cols)
    blocks, half, factors = i64(spec.k // spec.block), i64(spec.k // 2), i64(spec.factors)
    steps = _steps(spec, row_tile, compute, _Order(spec.cols, pair if spec.gated else 0))

    @T.prim_func(s_tir=True)
    def main(
        x_handle: T.handle,
        packed: T.Buffer((N, half), "uint8"),
        block_scale: T.Buffer((N, blocks), "uint8"),
        global_scale: T.Buffer((factors,), "float32"),
        bias: T.Buffer((N,), "float32"),
        residual_handle: T.handle,
        y_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        rows = T.int64()
        x = T.match_buffer(x_handle, (rows, K), spec.dtype)
        residual = T.match_buffer(residual_handle, (rows, cols), spec.dtype)
        y = T.match_buffer(y_handle, (rows, cols), spec.out_dtype)
        steps(x, packed, block_scale, global_scale, bias, residual, y, rows)

    func = keep_params(main, [param.name for param in spec.params()])
    return func if rows is None else fix_shape(func, "x", (rows, spec.k))
