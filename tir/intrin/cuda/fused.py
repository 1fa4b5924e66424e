"""CUDA intrinsics of the fused ops: one thread on one block, in its registers.

As in `blocks`; the device functions are in ``blockscale/lower/native/fp4_fused.cuh``.
"""

from __future__ import annotations

from functools import cache, partial

from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T

from blockscale.specs import NormQuantize
from blockscale.specs.fused import CONVENTIONS, MIN_HIDDEN, SIXTEEN_BIT
from blockscale.tir import encode, formats
from blockscale.tir.common import i64, widen
from blockscale.tir.fused import norm_quantize
from blockscale.tir.intrin.cuda import blocks as cuda_blocks
from blockscale.tir.intrin.cuda.blocks import (
    CLASS,
    ONE,
    codes_step,
    largest,
    local,
    mapped,
    scalar_step,
)
from blockscale.tir.intrin.operands import Operand, describe, intrinsic

HEADER = '#include "fp4_fused.cuh"\n'
"""What declares the device functions; nvcc looks for it in blockscale/native."""

call = partial(cuda_blocks.call, header=HEADER)


@intrinsic
def widened(dtype: str, count: int) -> str:
    """Register and name: ``count`` elements as float32."""
    size = (i64(count),)
    return mapped(
        f"cuda_widen_{dtype}x{count}",
        "widen",
        [local("X", size, dtype)],
        local("H", size, "float32", "w"),
        widen,
        partial(call, f"bs_widen<{CLASS[dtype]}, {count}>"),
    )


@intrinsic
def add(dtype: str, count: int) -> str:
    """Register and name: sums of ``count`` elements and residuals, float32."""
    size = (i64(count),)
    return mapped(
        f"cuda_add_{dtype}x{count}",
        "add",
        [local("X", size, dtype), local("R", size, dtype)],
        local("H", size, "float32", "w"),
        lambda x, r: widen(x) + widen(r),
        partial(call, f"bs_add<{CLASS[dtype]}, {count}>"),
    )


@intrinsic
def factor(convention: str) -> str:
    """Register and name: the factor of the values, from the global scale."""
    return scalar_step(
        f"cuda_factor_{convention}",
        [Operand("G", (ONE,), "float32")],
        "float32",
        lambda g: norm_quantize.factor(convention, g),
        lambda g: call(f"bs_factor_{convention}", g.source.access_ptr("r"), dtype="float32"),
        "gs",
    )


@intrinsic
def square_sum(count: int) -> str:
    """Register and name: the sums of the squares of each 16 of ``count`` neighbours, in order."""
    group = norm_quantize.GROUP
    size, groups, each = i64(count), i64(count // group), i64(group)
    one = count == group

    @T.inline
    def desc(H, S):
        for g in range(groups):
            with T.sblock("square_sum"):
                if one:  # TVM binds no variable to a loop of one iteration
                    S[i64(0)] = norm_quantize.square_sum(lambda j: H[i64(j)])
                else:
                    vg = T.axis.spatial(groups, g)
                    S[vg] = norm_quantize.square_sum(lambda j: H[vg * each + i64(j)])

    def impl(H: T.Buffer, S: T.Buffer) -> PrimExpr:
        return call(f"bs_square_sum<{count}>", S.access_ptr("w"), H.access_ptr("r"))

    operands = local("H", (size,), "float32"), local("S", (groups,), "float32", "w")
    return describe(f"cuda_square_sum_x{count}", operands, desc, impl)


@intrinsic
def norm(dtype: str, count: int, residual: bool, convention: str) -> str:
    """Register and name: a block of `norm_quantize.normed`."""
    spec = NormQuantize(2 * MIN_HIDDEN, dtype=dtype, residual=residual, convention=convention)
    mode = "BS_ROUND_FIRST"
    if not residual:
        mode = "BS_WEIGHT_FIRST" if convention == "flashinfer" else "BS_PLAIN"
    size = (i64(count),)
    return mapped(
        f"cuda_norm_{dtype}x{count}_{convention}{'_add' if residual else ''}",
        "norm",
        [local("H", size, "float32"), local("R", (ONE,), "float32"), local("W", size, dtype)],
        local("Y", size, "float32", "w"),
        partial(norm_quantize.normed, spec),
        partial(call, f"bs_norm<{CLASS[dtype]}, {count}, {mode}>"),
        "H W R" if mode == "BS_WEIGHT_FIRST" else None,
    )


@intrinsic
def most(count: int) -> str:
    """Register and name: maximum of `encode.magnitude` of ``count`` float32."""
    function = partial(call, f"bs_most<{count}>", dtype="int32")
    return largest(f"cuda_most_f32x{count}", "float32", count, encode.magnitude, function)


@intrinsic
def scale_of(scale_format: str, scaled: bool) -> str:
    """Register and name: `encode.scale_byte` of (factor), maximum; ``scaled``: with a factor."""

    def byte(*numbers: PrimExpr) -> PrimExpr:
        return encode.scale_byte(scale_format, numbers[-1], numbers[0] if scaled else None)

    amax = local("amax", (ONE,), "int32")
    return scalar_step(
        f"cuda_scale_{scale_format}{'_scaled' if scaled else ''}",
        [local("factor", (ONE,), "float32"), amax] if scaled else [amax],
        "int32",
        byte,
        partial(call, f"bs_scale_{scale_format}", dtype="int32"),
    )


@intrinsic
def inverse_of(scale_format: str, scaled: bool) -> str:
    """Register and name: `encode.inverse_scale` of byte, (factor); ``scaled``: with a factor."""

    def inverse(*numbers: PrimExpr) -> PrimExpr:
        return encode.inverse_scale(scale_format, numbers[0], numbers[1] if scaled else None)

    byte = local("byte", (ONE,), "int32")
    return scalar_step(
        f"cuda_inverse_{scale_format}{'_scaled' if scaled else ''}",
        [byte, local("factor", (ONE,), "float32")] if scaled else [byte],
        "float32",
        inverse,
        partial(call, f"bs_inverse_{scale_format}", dtype="float32"),
    )


@intrinsic
def codes_of(count: int) -> str:
    """Register and name: E2M1 codes of ``count`` float32 times ``inverse``, packed in pairs."""
    return codes_step(
        f"cuda_codes_of_x{count}",
        local("V", (i64(count),), "float32"),
        [local("R", (ONE,), "float32")],
        lambda value, inverse: formats.e2m1_encode(value * inverse),
        partial(call, f"bs_codes_of<{count}>"),
    )


@cache
def register_all() -> None:
    """Register every intrinsic of the fused ops, for `blockscale.tir.intrin.describe_gpu`."""
    for convention in CONVENTIONS:
        factor(convention)
    for count in (16, 32):
        square_sum(count)
        most(count)
        codes_of(count)
        for dtype in SIXTEEN_BIT:
            widened(dtype, count)
            add(dtype, count)
            for convention in CONVENTIONS:
                norm(dtype, count, False, convention)
                norm(dtype, count, True, convention)
    for scale_format in ("e4m3", "ue8m0"):
        for scaled in (False, True):
            scale_of(scale_format, scaled)
            inverse_of(scale_format, scaled)
