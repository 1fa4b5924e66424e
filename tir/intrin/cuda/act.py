"""CUDA intrinsics of gated activations and of FlashInfer's exact mode, beside `cuda_fused`."""

from __future__ import annotations

from functools import cache, partial

from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T

from blockscale.specs import ActQuantize
from blockscale.specs.fused import SIXTEEN_BIT
from blockscale.tir.common import i64, widen
from blockscale.tir.fused.act_quantize import block_byte, block_code, block_factor
from blockscale.tir.fused.act_quantize_threads import NUMBERS, activated
from blockscale.tir.intrin.cuda.blocks import CLASS, ONE, codes_step, local, scalar_step
from blockscale.tir.intrin.cuda.fused import call
from blockscale.tir.intrin.operands import Operand, describe, intrinsic, nest


@intrinsic
def activate(activation: str, dtype: str, count: int) -> str:
    """Register and name: a block of `act_rows.activated`, within a few units of float32."""
    size = i64(count)
    function = f"bs_activate<{CLASS[dtype]}, {count}, BS_{activation.upper()}>"

    def desc(G: T.Buffer, *others: T.Buffer) -> None:
        *numbers, U, A = others
        with nest("value", "S", size) as (k,):
            numbered = numbers[0] if numbers else None
            T.buffer_store(A, activated(activation, dtype, G[k], U[k], numbered), [k])

    def impl(G: T.Buffer, *others: T.Buffer) -> PrimExpr:
        *numbers, U, A = others
        return call(
            function, A.access_ptr("w"), *(part.access_ptr("r") for part in (G, U, *numbers))
        )

    numbers = [local("N", (i64(NUMBERS),), "float32")] if activation == "swiglu" else []
    gate, up = (local(name, (size,), dtype) for name in "GU")
    operands = [gate, *numbers, up, local("A", (size,), dtype, "w")]
    return describe(f"cuda_{activation}_{dtype}x{count}", operands, desc, impl)


def _rule(scale_format: str, count: int, dtype: str) -> ActQuantize:
    """Return a spec of FlashInfer's exact mode."""
    return ActQuantize("none", count, scale_format, dtype, convention="flashinfer")


GLOBAL_SCALE = Operand("G", (ONE,), "float32")


@intrinsic
def scale_of(scale_format: str) -> str:
    """Register and name: a block's scale byte in FlashInfer's exact mode."""
    spec = _rule(scale_format, 32, "bfloat16")
    amax = local("amax", (ONE,), "int32")
    return scalar_step(
        f"cuda_exact_scale_{scale_format}",
        [amax, GLOBAL_SCALE] if scale_format == "e4m3" else [amax],
        "int32",
        lambda amax, g=None: block_byte(spec, amax, g),
        partial(call, f"bs_exact_scale_{scale_format}", dtype="int32"),
    )


@intrinsic
def factor_of(scale_format: str) -> str:
    """Register and name: what a block's values are multiplied with in that mode."""
    spec = _rule(scale_format, 32, "bfloat16")
    name, function = f"cuda_exact_factor_{scale_format}", f"bs_exact_factor_{scale_format}"
    amax, byte = (local(part, (ONE,), "int32") for part in ("amax", "byte"))
    device = partial(call, function, dtype="float32")
    if scale_format == "ue8m0":
        return scalar_step(
            name, [byte], "float32", lambda b: block_factor(spec, b, b, None), device
        )
    return scalar_step(
        name,
        [amax, byte, GLOBAL_SCALE],
        "float32",
        partial(block_factor, spec),
        device,
    )


@intrinsic
def codes_of(dtype: str, count: int) -> str:
    """Register and name: E2M1 codes of ``count`` 16-bit elements times a factor."""
    spec = _rule("e4m3", count, dtype)
    return codes_step(
        f"cuda_codes_of_{dtype}x{count}",
        local("A", (i64(count),), dtype),
        [local("F", (ONE,), "float32")],
        lambda value, factor: block_code(spec, widen(value), factor, factor),
        partial(call, f"bs_codes_of_16<{CLASS[dtype]}, {count}>"),
    )


@cache
def register_all() -> None:
    """Register every intrinsic of this module, for `blockscale.tir.intrin.describe_gpu`."""
    for dtype in SIXTEEN_BIT:
        for count in (16, 32):
            codes_of(dtype, count)
            for activation in ("silu", "gelu_tanh", "swiglu"):
                activate(activation, dtype, count)
    for scale_format in ("e4m3", "ue8m0"):
        scale_of(scale_format)
        factor_of(scale_format)
