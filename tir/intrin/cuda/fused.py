"""CUDA intrinsics of the fused ops: one thread on one block, in its registers.

As in `blocks`; the device functions are in ``blockscale/lower/native/fp4_fused.cuh``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.specs import NormQuantize
from blockscale.specs.fused import CONVENTIONS, MIN_HIDDEN, SIXTEEN_BIT
from blockscale.tir import encode, formats
from blockscale.tir.common import i64, keep_params, widen
from blockscale.tir.fused import norm_quantize
from blockscale.tir.intrin.cuda import blocks as cuda_blocks
from blockscale.tir.intrin.cuda.blocks import CLASS, register
from blockscale.tir.quant.quantize import pack_codes

HEADER = '#include "fp4_fused.cuh"\n'
"""What declares the device functions; nvcc looks for it in blockscale/native."""

call = partial(cuda_blocks.call, header=HEADER)


@cache
def widened(dtype: str, count: int) -> str:
    """Register and name: ``count`` elements as float32."""
    size = i64(count)

    def function(body: bool) -> PrimFunc:
        @T.prim_func(s_tir=True)
        def step(x: T.handle, h: T.handle):
            X = T.match_buffer(x, (size,), dtype, offset_factor=1, scope="local")
            H = T.match_buffer(h, (size,), "float32", offset_factor=1, scope="local")
            with T.sblock("root"):
                T.reads(X[0:size])
                T.writes(H[0:size])
                if body:
                    T.evaluate(
                        call(
                            f"bs_widen<{CLASS[dtype]}, {count}>",
                            H.access_ptr("w"),
                            X.access_ptr("r"),
                        )
                    )
                else:
                    for i in range(size):
                        with T.sblock("widen"):
                            vi = T.axis.spatial(size, i)
                            H[vi] = widen(X[vi])

        return step

    return register(f"cuda_widen_{dtype}x{count}", function(False), function(True))


@cache
def add(dtype: str, count: int) -> str:
    """Register and name: sums of ``count`` elements and residuals, float32."""
    size = i64(count)

    def function(body: bool) -> PrimFunc:
        @T.prim_func(s_tir=True)
        def step(x: T.handle, residual: T.handle, h: T.handle):
            X = T.match_buffer(x, (size,), dtype, offset_factor=1, scope="local")
            R = T.match_buffer(residual, (size,), dtype, offset_factor=1, scope="local")
            H = T.match_buffer(h, (size,), "float32", offset_factor=1, scope="local")
            with T.sblock("root"):
                T.reads(X[0:size], R[0:size])
                T.writes(H[0:size])
                if body:
                    T.evaluate(
                        call(
                            f"bs_add<{CLASS[dtype]}, {count}>",
                            H.access_ptr("w"),
                            X.access_ptr("r"),
                            R.access_ptr("r"),
                        )
                    )
                else:
                    for i in range(size):
                        with T.sblock("add"):
                            vi = T.axis.spatial(size, i)
                            H[vi] = widen(X[vi]) + widen(R[vi])

        return step

    return register(f"cuda_add_{dtype}x{count}", function(False), function(True))


@cache
def factor(convention: str) -> str:
    """Register and name: the factor of the values, from the global scale."""
    one = i64(1)

    def function(body: bool) -> PrimFunc:
        @T.prim_func(s_tir=True)
        def step(global_scale: T.handle, gs: T.handle):
            G = T.match_buffer(global_scale, (one,), "float32", offset_factor=1)
            F = T.match_buffer(gs, (one,), "float32", offset_factor=1, scope="local")
            with T.sblock("root"):
                T.reads(G[0:one])
                T.writes(F[0:one])
                for i in range(one):
                    with T.sblock("gs"):
                        T.reads(G[0:one])
                        T.writes(F[0:one])
                        if body:
                            F[0] = call(
                                f"bs_factor_{convention}", G.access_ptr("r"), dtype="float32"
                            )
                        else:
                            F[0] = norm_quantize.factor(convention, G[0])

        return step

    return register(f"cuda_factor_{convention}", function(False), function(True))


@cache
def square_sum(count: int) -> str:
    """Register and name: the sums of the squares of each 16 of ``count`` neighbours, in order."""
    group = norm_quantize.GROUP
    size, groups, each = i64(count), i64(count // group), i64(group)
    one = count == group

    def function(body: bool) -> PrimFunc:
        @T.prim_func(s_tir=True)
        def step(h: T.handle, total: T.handle):
            H = T.match_buffer(h, (size,), "float32", offset_factor=1, scope="local")
            S = T.match_buffer(total, (groups,), "float32", offset_factor=1, scope="local")
            with T.sblock("root"):
                T.reads(H[0:size])
                T.writes(S[0:groups])
                if body:
                    T.evaluate(
                        call(f"bs_square_sum<{count}>", S.access_ptr("w"), H.access_ptr("r"))
                    )
                else:
                    for g in range(groups):
                        with T.sblock("square_sum"):
                            if one:  # TVM binds no variable to a loop of one iteration
                                S[i64(0)] = norm_quantize.square_sum(lambda j: H[i64(j)])
                            else:
                                vg = T.axis.spatial(groups, g)
                                S[vg] = norm_quantize.square_sum(lambda j: H[vg * each + i64(j)])

        return step

    return register(f"cuda_square_sum_x{count}", function(False), function(True))


@cache
def norm(dtype: str, count: int, residual: bool, convention: str) -> str:
    """Register and name: a block of `norm_quantize.normed`."""
    spec = NormQuantize(2 * MIN_HIDDEN, dtype=dtype, residual=residual, convention=convention)
    mode = "BS_ROUND_FIRST"
    if not residual:
        mode = "BS_WEIGHT_FIRST" if convention == "flashinfer" else "BS_PLAIN"
    size, one = i64(count), i64(1)

    def function(body: bool) -> PrimFunc:
        @T.prim_func(s_tir=True)
        def step(h: T.handle, rstd: T.handle, weight: T.handle, y: T.handle):
            H = T.match_buffer(h, (size,), "float32", offset_factor=1, scope="local")
            R = T.match_buffer(rstd, (one,), "float32", offset_factor=1, scope="local")
            W = T.match_buffer(weight, (size,), dtype, offset_factor=1, scope="local")
            Y = T.match_buffer(y, (size,), "float32", offset_factor=1, scope="local")
            with T.sblock("root"):
                if mode == "BS_WEIGHT_FIRST":  # the order in which the op's block names its reads
                    T.reads(H[0:size], W[0:size], R[0:one])
                else:
                    T.reads(H[0:size], R[0:one], W[0:size])
                T.writes(Y[0:size])
                if body:
                    T.evaluate(
                        call(
                            f"bs_norm<{CLASS[dtype]}, {count}, {mode}>",
                            Y.access_ptr("w"),
                            H.access_ptr("r"),
                            R[0],
                            W.access_ptr("r"),
                        )
                    )
                else:
                    for i in range(size):
                        with T.sblock("norm"):
                            vi = T.axis.spatial(size, i)
                            Y[vi] = norm_quantize.normed(spec, H[vi], R[0], W[vi])

        return step

    name = f"cuda_norm_{dtype}x{count}_{convention}{'_add' if residual else ''}"
    return register(name, function(False), function(True))


@cache
def most(count: int) -> str:
    """Register and name: maximum of `encode.magnitude` of ``count`` float32."""
    size, one = i64(count), i64(1)

    def function(body: bool) -> PrimFunc:
        @T.prim_func(s_tir=True)
        def step(values: T.handle, found: T.handle):
            V = T.match_buffer(values, (size,), "float32", offset_factor=1, scope="local")
            M = T.match_buffer(found, (one,), "int32", offset_factor=1, scope="local")
            with T.sblock("root"):
                T.reads(M[0:one], V[0:size])
                T.writes(M[0:one])
                if body:
                    M[0] = call(f"bs_most<{count}>", V.access_ptr("r"), M[0], dtype="int32")
                else:
                    for i in range(size):
                        with T.sblock("amax"):
                            vi = T.axis.reduce(size, i)
                            M[0] = T.max(M[0], encode.magnitude(V[vi]))

        return step

    return register(f"cuda_most_f32x{count}", function(False), function(True))


def scalar_step(
    name: str,
    dtypes: Sequence[str],
    out: str,
    expression: Callable[..., PrimExpr],
    function: str,
    last_scope: str = "local",
) -> str:
    """Register a step ``out[0] = expression(a[0], ...)`` of one to three numbers of ``dtypes``.

    They are read in this order; ``last_scope`` is that of the last one, if there are several.
    """
    one, count = i64(1), len(dtypes)
    scopes = ["local"] * (count - 1) + [last_scope if count > 1 else "local"]

    def make(body: bool) -> PrimFunc:
        def value(*numbers: PrimExpr) -> PrimExpr:
            return call(function, *numbers, dtype=out) if body else expression(*numbers)

        @T.prim_func(s_tir=True)
        def step(a: T.handle, b: T.handle, c: T.handle, result: T.handle):
            A = T.match_buffer(a, (one,), dtypes[0], offset_factor=1, scope=scopes[0])
            if count > 1:
                B = T.match_buffer(b, (one,), dtypes[1], offset_factor=1, scope=scopes[1])
            if count > 2:
                C = T.match_buffer(c, (one,), dtypes[2], offset_factor=1, scope=scopes[2])
            R = T.match_buffer(result, (one,), out, offset_factor=1, scope="local")
            with T.sblock("root"):
                if count == 1:
                    T.reads(A[0:one])
                elif count == 2:
                    T.reads(A[0:one], B[0:one])
                else:
                    T.reads(A[0:one], B[0:one], C[0:one])
                T.writes(R[0:one])
                for i in range(one):
                    with T.sblock("step"):
                        if count == 1:
                            T.reads(A[0:one])
                            T.writes(R[0:one])
                            R[0] = value(A[0])
                        elif count == 2:
                            T.reads(A[0:one], B[0:one])
                            T.writes(R[0:one])
                            R[0] = value(A[0], B[0])
                        else:
                            T.reads(A[0:one], B[0:one], C[0:one])
                            T.writes(R[0:one])
                            R[0] = value(A[0], B[0], C[0])

        return keep_params(step, [*"ABC"[:count], "R"])

    return register(name, make(False), make(True))


@cache
def scale_of(scale_format: str, scaled: bool) -> str:
    """Register and name: `encode.scale_byte` of (factor), maximum; ``scaled``: with a factor."""

    def byte(*numbers: PrimExpr) -> PrimExpr:
        return encode.scale_byte(scale_format, numbers[-1], numbers[0] if scaled else None)

    return scalar_step(
        f"cuda_scale_{scale_format}{'_scaled' if scaled else ''}",
        ("float32", "int32") if scaled else ("int32",),
        "int32",
        byte,
        f"bs_scale_{scale_format}",
    )


@cache
def inverse_of(scale_format: str, scaled: bool) -> str:
    """Register and name: `encode.inverse_scale` of byte, (factor); ``scaled``: with a factor."""

    def inverse(*numbers: PrimExpr) -> PrimExpr:
        return encode.inverse_scale(scale_format, numbers[0], numbers[1] if scaled else None)

    return scalar_step(
        f"cuda_inverse_{scale_format}{'_scaled' if scaled else ''}",
        ("int32", "float32") if scaled else ("int32",),
        "float32",
        inverse,
        f"bs_inverse_{scale_format}",
    )


@cache
def codes_of(count: int) -> str:
    """Register and name: E2M1 codes of ``count`` float32 times ``inverse``, packed in pairs."""
    size, half, one, two = i64(count), i64(count // 2), i64(1), i64(2)

    def function(body: bool) -> PrimFunc:
        @T.prim_func(s_tir=True)
        def step(values: T.handle, inverse: T.handle, packed: T.handle):
            V = T.match_buffer(values, (size,), "float32", offset_factor=1, scope="local")
            R = T.match_buffer(inverse, (one,), "float32", offset_factor=1, scope="local")
            P = T.match_buffer(packed, (half,), "uint8", offset_factor=1, scope="local")
            with T.sblock("root"):
                T.reads(V[0:size], R[0:one])
                T.writes(P[0:half])
                if body:
                    T.evaluate(
                        call(f"bs_codes_of<{count}>", P.access_ptr("w"), V.access_ptr("r"), R[0])
                    )
                else:
                    for j in range(half):
                        with T.sblock("pack"):
                            vj = T.axis.spatial(half, j)
                            P[vj] = pack_codes(
                                formats.e2m1_encode(V[vj * two] * R[0]),
                                formats.e2m1_encode(V[vj * two + one] * R[0]),
                            )

        return step

    return register(f"cuda_codes_of_x{count}", function(False), function(True))


@cache
def register_all() -> None:
    """Register every intrinsic of the fused ops, for `blockscale.tir.intrin.register_gpu`."""
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
