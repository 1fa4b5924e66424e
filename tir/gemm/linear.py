"""Linear layer on 4-bit weights: y[m, n] = global_scale * sum_k x[m, k] * w[n, k] + bias[n].

w[n, k] = e2m1(packed[n, k / 2], nibble k % 2) * block_scale[n, k / block], exactly; block is 16
(NVFP4, E4M3 scales) or 32 (MXFP4, E8M0 scales).  The sum is accumulated in float32; the global
scale and the bias are applied to it in float32, and y is rounded once to the dtype of x.

``compute`` is the type in which x and w are multiplied.  "float32" serves every dtype of x.
"bfloat16" serves bfloat16 x and NVFP4: an E2M1 code times an E4M3 scale has at most 6 significant
bits, so w is exact in bfloat16, and two products at a time go to a float32 accumulator (VDPBF16PS).
Its operands are held as uint16 bits.

Rows are padded with zeros to a multiple of ``row_tile``, so that a schedule sees whole tiles.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.specs import Linear
from blockscale.tir import formats
from blockscale.tir.common import fix_shape, i64, tiles_of, widen


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


def linear(
    spec: Linear, row_tile: int, compute: str = "float32", rows: int | None = None
) -> PrimFunc:
    """Return the kernel ``(x[rows, K], packed, block_scale, global_scale, bias) -> y[rows, N]``.

    ``rows`` None: symbolic, any number of rows per call.
    """
    N, K, R = i64(spec.n), i64(spec.k), i64(row_tile)
    blocks, block = i64(spec.k // spec.block), i64(spec.block)
    half, two = i64(spec.k // 2), i64(2)
    operand = "float32" if compute == "float32" else "uint16"
    zero = tirx.const(0, operand)

    @T.prim_func(s_tir=True)
    def main(
        x_handle: T.handle,
        packed: T.Buffer((N, half), "uint8"),
        block_scale: T.Buffer((N, blocks), "uint8"),
        global_scale: T.Buffer((i64(1),), "float32"),
        bias: T.Buffer((N,), "float32"),
        y_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        rows = T.int64()
        x = T.match_buffer(x_handle, (rows, K), spec.dtype)
        y = T.match_buffer(y_handle, (rows, N), spec.dtype)
        A = T.sblock_alloc_buffer((tiles_of(rows, row_tile), R, K), operand)
        S = T.sblock_alloc_buffer((N, blocks), "float32")
        W = T.sblock_alloc_buffer((N, K), operand)
        C = T.sblock_alloc_buffer((tiles_of(rows, row_tile), R, N), "float32")
        for t, i, k in T.grid(tiles_of(rows, row_tile), R, K):
            with T.sblock("widen"):
                vt, vi, vk = T.axis.remap("SSS", [t, i, k])
                A[vt, vi, vk] = T.if_then_else(
                    vt * R + vi < rows, to_operand(widen(x[vt * R + vi, vk]), compute), zero
                )
        for n, b in T.grid(N, blocks):
            with T.sblock("block_scale"):
                vn, vb = T.axis.remap("SS", [n, b])
                S[vn, vb] = formats.decode(spec.format.scale, T.Cast("int32", block_scale[vn, vb]))
        for n, k in T.grid(N, K):
            with T.sblock("decode"):
                vn, vk = T.axis.remap("SS", [n, k])
                W[vn, vk] = weight_value(packed[vn, vk // two], vk, S[vn, vk // block], compute)
        for t, i, n, k in T.grid(tiles_of(rows, row_tile), R, N, K):
            with T.sblock("matmul"):
                vt, vi, vn, vk = T.axis.remap("SSSR", [t, i, n, k])
                with T.init():
                    C[vt, vi, vn] = T.float32(0)
                C[vt, vi, vn] = C[vt, vi, vn] + from_operand(A[vt, vi, vk]) * from_operand(
                    W[vn, vk]
                )
        for t, i, n in T.grid(tiles_of(rows, row_tile), R, N):
            with T.sblock("epilogue"):
                vt, vi, vn = T.axis.remap("SSS", [t, i, n])
                if vt * R + vi < rows:
                    y[vt * R + vi, vn] = formats.round_to(
                        spec.dtype, C[vt, vi, vn] * global_scale[0] + bias[vn]
                    )

    return main if rows is None else fix_shape(main, "x", (rows, spec.k))
