"""CUDA intrinsics of quantise and dequantise: one thread on one block, in its registers.

Each is a *desc* in plain loops (the same expressions as the ops) and an *impl* that calls a device
function of ``blockscale/lower/native/fp4.cuh``.  Local buffers have scope "local".  Tensorize
compares what desc and block read one by one: a desc lists its reads in the order in which the op's
block first names the buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from tvm.backend.cuda.op import cuda_func_call
from tvm.ir import Expr as PrimExpr
from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.base.formats import E4M3, QUANTIZED
from blockscale.specs import Quantize
from blockscale.tir import formats
from blockscale.tir.common import i64, widen
from blockscale.tir.gemm.linear import weight_value
from blockscale.tir.quant.quantize import element_code, pack_codes, scale_byte

HEADER = '#include "fp4.cuh"\n'
"""What declares the device functions; nvcc looks for it in blockscale/native."""

CLASS = {"bfloat16": "BsBf16", "float16": "BsF16", "float32": "BsF32"}
"""Traits class of an element dtype in fp4.cuh."""

HINTS = ("BS_KEEP", "BS_STREAM")
"""Cache hints of loads and stores: default, and for what is touched once."""

BYTES = {"uint8": 1, "uint32": 4, "bfloat16": 2, "float16": 2, "float32": 4}


def call(name: str, *args: PrimExpr, dtype: str = "void", header: str = HEADER) -> PrimExpr:
    """Call of the device function ``name``, which ``header`` declares."""
    return cuda_func_call(name, *args, source_code=header, return_type=dtype)


def register(name: str, desc: PrimFunc, impl: PrimFunc) -> str:
    """Register a tensor intrinsic and return its name, for `Schedule.tensorize`."""
    TensorIntrin.register(name, desc, impl)
    return name


def _copy(dtype: str, count: int, function: str | None, scopes: tuple[str, str]) -> PrimFunc:
    """Copy of ``count`` elements between buffers of these scopes, by a loop or by ``function``."""
    size = i64(count)

    @T.prim_func(s_tir=True)
    def copy(source: T.handle, target: T.handle):
        S = T.match_buffer(source, (size,), dtype, offset_factor=1, scope=scopes[0])
        D = T.match_buffer(target, (size,), dtype, offset_factor=1, scope=scopes[1])
        with T.sblock("root"):
            T.reads(S[0:size])
            T.writes(D[0:size])
            if function is None and count == 1:  # what blockize leaves has no axis
                for _ in range(size):
                    with T.sblock("copy"):
                        T.reads(S[0:size])
                        T.writes(D[0:size])
                        D[0] = S[0]
            elif function is None:
                for i in range(size):
                    with T.sblock("copy"):
                        vi = T.axis.spatial(size, i)
                        D[vi] = S[vi]
            else:
                T.evaluate(call(function, D.access_ptr("w"), S.access_ptr("r")))

    return copy


@cache
def load(dtype: str, count: int, hint: str) -> str:
    """Register and name: copy ``count`` elements to registers, 16 bytes an instruction."""
    function, scopes = f"bs_load<{count * BYTES[dtype]}, {hint}>", ("global", "local")
    desc, impl = (_copy(dtype, count, name, scopes) for name in (None, function))
    return register(f"cuda_load_{dtype}x{count}_{hint}", desc, impl)


@cache
def store(dtype: str, count: int, hint: str) -> str:
    """Register and name: copy ``count`` elements from registers, 16 bytes an instruction."""
    function, scopes = f"bs_store<{count * BYTES[dtype]}, {hint}>", ("local", "global")
    desc, impl = (_copy(dtype, count, name, scopes) for name in (None, function))
    return register(f"cuda_store_{dtype}x{count}_{hint}", desc, impl)


@cache
def amax(dtype: str, count: int) -> str:
    """Register and name: the largest magnitude of ``count`` elements, as float32 bits."""
    size, one = i64(count), i64(1)

    def function(body: bool) -> PrimFunc:
        @T.prim_func(s_tir=True)
        def largest(values: T.handle, most: T.handle):
            V = T.match_buffer(values, (size,), dtype, offset_factor=1, scope="local")
            M = T.match_buffer(most, (one,), "int32", offset_factor=1, scope="local")
            with T.sblock("root"):
                T.reads(M[0:one], V[0:size])
                T.writes(M[0:one])
                if body:
                    M[0] = call(
                        f"bs_amax<{CLASS[dtype]}, {count}>", V.access_ptr("r"), M[0], dtype="int32"
                    )
                else:
                    for i in range(size):
                        with T.sblock("amax"):
                            vi = T.axis.reduce(size, i)
                            M[0] = T.max(M[0], formats.abs_bits(widen(V[vi])))

        return largest

    return register(f"cuda_amax_{dtype}x{count}", function(False), function(True))


def _step(
    name: str, out: str, expression: Callable[[PrimExpr, PrimExpr], PrimExpr], function: str
) -> str:
    """Register a step on one block: ``out[0] = expression(given[0], global_scale[0])``."""
    one = i64(1)

    def step(body: bool) -> PrimFunc:
        @T.prim_func(s_tir=True)
        def scalar(given: T.handle, factor: T.handle, made: T.handle):
            A = T.match_buffer(given, (one,), "int32", offset_factor=1, scope="local")
            G = T.match_buffer(factor, (one,), "float32", offset_factor=1)
            B = T.match_buffer(made, (one,), out, offset_factor=1, scope="local")
            with T.sblock("root"):
                T.reads(A[0:one], G[0:one])
                T.writes(B[0:one])
                for _ in range(one):
                    with T.sblock("step"):
                        T.reads(A[0:one], G[0:one])
                        T.writes(B[0:one])
                        B[0] = (
                            call(function, A[0], G[0], dtype=out)
                            if body
                            else expression(A[0], G[0])
                        )

        return scalar

    return register(name, step(False), step(True))


@cache
def scale_of(fmt: str, rounding: str, dtype: str) -> str:
    """Register and name: `quantize.scale_byte`, of the maximum of elements of ``dtype``."""
    spec = Quantize(fmt, dtype, rounding=rounding)
    short = "false" if dtype == "float32" else "true"
    form = f"<{short}>" if spec.format.scale is E4M3 else f"_{rounding}"
    return _step(
        f"cuda_scale_{fmt}_{rounding}_{dtype}",
        "int32",
        lambda most, g: scale_byte(spec, most, g),
        f"bs_scale_{fmt}{form}",
    )


@cache
def divisor_of(fmt: str) -> str:
    """Register and name: a scale byte's value times the global scale."""
    row = QUANTIZED[fmt]
    return _step(
        f"cuda_divisor_{fmt}",
        "float32",
        lambda byte, g: formats.decode(row.scale, byte) * g,
        f"bs_divisor_{fmt}",
    )


@cache
def encode(fmt: str, dtype: str, known: bool) -> str:
    """Register and name: E2M1 codes of a block's elements over a divisor.

    ``known``: the scale byte is that of the block's own maximum, which bounds the quotients.
    """
    spec = Quantize(fmt, dtype)
    size, half, one, two = i64(spec.block), i64(spec.block // 2), i64(1), i64(2)
    # The power of two above amax / 6 bounds |x / d| by 6, the one below amax by 8.
    own = "BS_OWN" if spec.format.scale is E4M3 else "BS_CLAMP"
    limit = own if known else "BS_ANY"
    function = f"bs_encode<{CLASS[dtype]}, {spec.block}, BS_{fmt.upper()}, {limit}>"

    def with_byte(body: bool) -> PrimFunc:
        @T.prim_func(s_tir=True)
        def codes(values: T.handle, divisor: T.handle, byte: T.handle, packed: T.handle):
            V = T.match_buffer(values, (size,), dtype, offset_factor=1, scope="local")
            D = T.match_buffer(divisor, (one,), "float32", offset_factor=1, scope="local")
            B = T.match_buffer(byte, (one,), "int32", offset_factor=1, scope="local")
            P = T.match_buffer(packed, (half,), "uint8", offset_factor=1, scope="local")
            with T.sblock("root"):
                T.reads(B[0:one], V[0:size], D[0:one])
                T.writes(P[0:half])
                if body:
                    T.evaluate(call(function, P.access_ptr("w"), V.access_ptr("r"), D[0], B[0]))
                else:
                    for j in range(half):
                        with T.sblock("pack"):
                            vj = T.axis.spatial(half, j)
                            P[vj] = pack_codes(
                                element_code(spec, widen(V[vj * two]), D[0], B[0]),
                                element_code(spec, widen(V[vj * two + one]), D[0], B[0]),
                            )

        return codes

    def without_byte(body: bool) -> PrimFunc:
        @T.prim_func(s_tir=True)
        def codes(values: T.handle, divisor: T.handle, packed: T.handle):
            V = T.match_buffer(values, (size,), dtype, offset_factor=1, scope="local")
            D = T.match_buffer(divisor, (one,), "float32", offset_factor=1, scope="local")
            P = T.match_buffer(packed, (half,), "uint8", offset_factor=1, scope="local")
            with T.sblock("root"):
                T.reads(V[0:size], D[0:one])
                T.writes(P[0:half])
                if body:
                    T.evaluate(
                        call(function, P.access_ptr("w"), V.access_ptr("r"), D[0], T.int32(1))
                    )
                else:
                    for j in range(half):
                        with T.sblock("pack"):
                            vj = T.axis.spatial(half, j)
                            P[vj] = pack_codes(
                                element_code(spec, widen(V[vj * two]), D[0], T.int32(1)),
                                element_code(spec, widen(V[vj * two + one]), D[0], T.int32(1)),
                            )

        return codes

    made = with_byte if spec.format.scale is E4M3 else without_byte
    bound = "own" if known else "any"
    return register(f"cuda_encode_{fmt}_{dtype}_{bound}", made(False), made(True))


@cache
def decode(count: int) -> str:
    """Register and name: ``count`` E2M1 codes times their block scale, float32."""
    size, half, one, two = i64(count), i64(count // 2), i64(1), i64(2)

    def function(body: bool) -> PrimFunc:
        @T.prim_func(s_tir=True)
        def values(packed: T.handle, scale: T.handle, value: T.handle):
            P = T.match_buffer(packed, (half,), "uint8", offset_factor=1, scope="local")
            S = T.match_buffer(scale, (one,), "float32", offset_factor=1, scope="local")
            W = T.match_buffer(value, (size,), "float32", offset_factor=1, scope="local")
            with T.sblock("root"):
                T.reads(P[0:half], S[0:one])
                T.writes(W[0:size])
                if body:
                    T.evaluate(
                        call(f"bs_decode<{count}>", W.access_ptr("w"), P.access_ptr("r"), S[0])
                    )
                else:
                    for k in range(size):
                        with T.sblock("decode"):
                            vk = T.axis.spatial(size, k)
                            W[vk] = weight_value(P[vk // two], vk, S[0], "float32")

        return values

    return register(f"cuda_decode_x{count}", function(False), function(True))


@cache
def store_rounded(dtype: str, count: int, hint: str) -> str:
    """Register and name: ``count`` float32 rounded to ``dtype`` and stored."""
    size = i64(count)
    device = f"bs_store_rounded<{CLASS[dtype]}, {count}, {hint}>"

    def function(body: bool) -> PrimFunc:
        @T.prim_func(s_tir=True)
        def rounded(value: T.handle, out: T.handle):
            V = T.match_buffer(value, (size,), "float32", offset_factor=1, scope="local")
            D = T.match_buffer(out, (size,), dtype, offset_factor=1)
            with T.sblock("root"):
                T.reads(V[0:size])
                T.writes(D[0:size])
                if body:
                    T.evaluate(call(device, D.access_ptr("w"), V.access_ptr("r")))
                else:
                    for i in range(size):
                        with T.sblock("out"):
                            vi = T.axis.spatial(size, i)
                            D[vi] = formats.round_to(dtype, V[vi])

        return rounded

    return register(f"cuda_store_rounded_{dtype}x{count}_{hint}", function(False), function(True))


@cache
def register_all() -> tuple[str, ...]:
    """Register every intrinsic of this module; return the names, sorted."""
    names = [decode(8)]
    for dtype in CLASS:
        for hint in HINTS:
            names += [store_rounded(dtype, count, hint) for count in (8, 16, 32)]
        for hint in (*HINTS, "BS_INPLACE"):
            names += [load(dtype, count, hint) for count in (16, 32)]
        for fmt, row in QUANTIZED.items():
            names.append(amax(dtype, row.block))
            names += [encode(fmt, dtype, known) for known in (True, False)]
            roundings = ("ceil",) if row.scale is E4M3 else ("ceil", "floor")
            names += [scale_of(fmt, rounding, dtype) for rounding in roundings]
    for hint in HINTS:  # codes, and the words that swizzle moves
        names += [load("uint8", 4, hint), load("uint32", 4, hint), store("uint32", 4, hint)]
        names += [store("uint8", count, hint) for count in (8, 16)]
    names += [divisor_of(fmt) for fmt in QUANTIZED]
    return tuple(sorted(names))
