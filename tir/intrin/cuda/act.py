"""CUDA intrinsics of gated activations and of FlashInfer's exact mode, beside `cuda_fused`."""

from __future__ import annotations

from functools import cache

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.specs import ActQuantize
from blockscale.specs.fused import SIXTEEN_BIT
from blockscale.tir.common import i64, widen
from blockscale.tir.fused.act_quantize import block_byte, block_code, block_factor
from blockscale.tir.fused.act_quantize_threads import NUMBERS, activated
from blockscale.tir.intrin.cuda.blocks import CLASS, register
from blockscale.tir.intrin.cuda.fused import call, scalar_step
from blockscale.tir.quant.quantize import pack_codes


@cache
def activate(activation: str, dtype: str, count: int) -> str:
    """Register and name: a block of `act_rows.activated`, within a few units of float32."""
    size, three = i64(count), i64(NUMBERS)
    function = f"bs_activate<{CLASS[dtype]}, {count}, BS_{activation.upper()}>"

    def plain(body: bool) -> PrimFunc:
        @T.prim_func(s_tir=True)
        def step(gate: T.handle, up: T.handle, a: T.handle):
            G = T.match_buffer(gate, (size,), dtype, offset_factor=1, scope="local")
            U = T.match_buffer(up, (size,), dtype, offset_factor=1, scope="local")
            A = T.match_buffer(a, (size,), dtype, offset_factor=1, scope="local")
            with T.sblock("root"):
                T.reads(G[0:size], U[0:size])
                T.writes(A[0:size])
                if body:
                    T.evaluate(
                        call(
                            function,
                            A.access_ptr("w"),
                            G.access_ptr("r"),
                            U.access_ptr("r"),
                        )
                    )
                else:
                    for k in range(size):
                        with T.sblock("value"):
                            vk = T.axis.spatial(size, k)
                            A[vk] = activated(activation, dtype, G[vk], U[vk], None)

        return step

    def numbered(body: bool) -> PrimFunc:
        @T.prim_func(s_tir=True)
        def step(gate: T.handle, numbers: T.handle, up: T.handle, a: T.handle):
            G = T.match_buffer(gate, (size,), dtype, offset_factor=1, scope="local")
            N = T.match_buffer(numbers, (three,), "float32", offset_factor=1, scope="local")
            U = T.match_buffer(up, (size,), dtype, offset_factor=1, scope="local")
            A = T.match_buffer(a, (size,), dtype, offset_factor=1, scope="local")
            with T.sblock("root"):
                T.reads(G[0:size], N[0:three], U[0:size])
                T.writes(A[0:size])
                if body:
                    T.evaluate(
                        call(
                            function,
                            A.access_ptr("w"),
                            G.access_ptr("r"),
                            U.access_ptr("r"),
                            N.access_ptr("r"),
                        )
                    )
                else:
                    for k in range(size):
                        with T.sblock("value"):
                            vk = T.axis.spatial(size, k)
                            A[vk] = activated(activation, dtype, G[vk], U[vk], N)

        return step

    made = numbered if activation == "swiglu" else plain
    name = f"cuda_{activation}_{dtype}x{count}"
    return register(name, made(False), made(True))


def _rule(scale_format: str, count: int, dtype: str) -> ActQuantize:
    """Return a spec of FlashInfer's exact mode."""
    return ActQuantize("none", count, scale_format, dtype, convention="flashinfer")


@cache
def scale_of(scale_format: str) -> str:
    """Register and name: a block's scale byte in FlashInfer's exact mode."""
    spec = _rule(scale_format, 32, "bfloat16")
    scaled = scale_format == "e4m3"
    return scalar_step(
        f"cuda_exact_scale_{scale_format}",
        ("int32", "float32") if scaled else ("int32",),
        "int32",
        lambda amax, g=None: block_byte(spec, amax, g),
        f"bs_exact_scale_{scale_format}",
        "global",
    )


@cache
def factor_of(scale_format: str) -> str:
    """Register and name: what a block's values are multiplied with in that mode."""
    spec = _rule(scale_format, 32, "bfloat16")
    name, function = f"cuda_exact_factor_{scale_format}", f"bs_exact_factor_{scale_format}"
    if scale_format == "ue8m0":
        return scalar_step(
            name, ("int32",), "float32", lambda b: block_factor(spec, b, b, None), function
        )
    return scalar_step(
        name,
        ("int32", "int32", "float32"),
        "float32",
        lambda amax, byte, g: block_factor(spec, amax, byte, g),
        function,
        "global",
    )


@cache
def codes_of(dtype: str, count: int) -> str:
    """Register and name: E2M1 codes of ``count`` 16-bit elements times a factor."""
    spec = _rule("e4m3", count, dtype)
    size, half, one, two = i64(count), i64(count // 2), i64(1), i64(2)

    def function(body: bool) -> PrimFunc:
        @T.prim_func(s_tir=True)
        def step(a: T.handle, factor: T.handle, packed: T.handle):
            A = T.match_buffer(a, (size,), dtype, offset_factor=1, scope="local")
            F = T.match_buffer(factor, (one,), "float32", offset_factor=1, scope="local")
            P = T.match_buffer(packed, (half,), "uint8", offset_factor=1, scope="local")
            with T.sblock("root"):
                T.reads(A[0:size], F[0:one])
                T.writes(P[0:half])
                if body:
                    T.evaluate(
                        call(
                            f"bs_codes_of_16<{CLASS[dtype]}, {count}>",
                            P.access_ptr("w"),
                            A.access_ptr("r"),
                            F[0],
                        )
                    )
                else:
                    for j in range(half):
                        with T.sblock("pack"):
                            vj = T.axis.spatial(half, j)
                            P[vj] = pack_codes(
                                block_code(spec, widen(A[vj * two]), F[0], F[0]),
                                block_code(spec, widen(A[vj * two + one]), F[0], F[0]),
                            )

        return step

    return register(f"cuda_codes_of_{dtype}x{count}", function(False), function(True))


@cache
def register_all() -> None:
    """Register every intrinsic of this module, for `blockscale.tir.intrin.register_gpu`."""
    for dtype in SIXTEEN_BIT:
        for count in (16, 32):
            codes_of(dtype, count)
            for activation in ("silu", "gelu_tanh", "swiglu"):
                activate(activation, dtype, count)
    for scale_format in ("e4m3", "ue8m0"):
        scale_of(scale_format)
        factor_of(scale_format)
