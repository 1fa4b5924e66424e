"""CUDA intrinsics of quantise and dequantise: one thread on one block, in its registers.

Each is a *desc* in plain loops (the same expressions as the ops) and an *impl* that calls a device
function of ``blockscale/lower/native/fp4.cuh``.  Local buffers have scope "local".  Tensorize
compares what desc and block read one by one: a desc lists its reads in the order in which the op's
block first names the buffers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache, partial

from tvm.backend.cuda.op import cuda_func_call
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T

from blockscale.base.formats import E4M3, QUANTIZED
from blockscale.specs import Quantize
from blockscale.tir import formats
from blockscale.tir.common import i64, widen
from blockscale.tir.gemm.linear import weight_value
from blockscale.tir.intrin.operands import Body, Operand, copy, describe, intrinsic, nest
from blockscale.tir.quant.quantize import element_code, pack_codes, scale_byte

HEADER = '#include "fp4.cuh"\n'
"""What declares the device functions; nvcc looks for it in blockscale/native."""

STAGED = '#include "staged.cuh"\n'
"""What declares those of rows that a CTA stages in shared memory."""

CLASS = {"bfloat16": "BsBf16", "float16": "BsF16", "float32": "BsF32"}
"""Traits class of an element dtype in fp4.cuh."""

HINTS = ("BS_KEEP", "BS_STREAM")
"""Cache hints of loads and stores: default, and for what is touched once."""

BYTES = {"uint8": 1, "uint32": 4, "bfloat16": 2, "float16": 2, "float32": 4}


def call(name: str, *args: PrimExpr, dtype: str = "void", header: str = HEADER) -> PrimExpr:
    """Call of the device function ``name``, which ``header`` declares."""
    return cuda_func_call(name, *args, source_code=header, return_type=dtype)


local = partial(Operand, scope="local")
"""An operand in registers."""

ONE, TWO = i64(1), i64(2)


@intrinsic
def load(dtype: str, count: int, hint: str) -> str:
    """Register and name: copy ``count`` elements to registers, 16 bytes an instruction."""
    return _access("load", dtype, count, hint, ("global", "local"))


@intrinsic
def store(dtype: str, count: int, hint: str) -> str:
    """Register and name: copy ``count`` elements from registers, 16 bytes an instruction."""
    return _access("store", dtype, count, hint, ("local", "global"))


def _access(kind: str, dtype: str, count: int, hint: str, scopes: tuple[str, str]) -> str:
    function = f"bs_{kind}<{count * BYTES[dtype]}, {hint}>"
    name = f"cuda_{kind}_{dtype}x{count}_{hint}"
    return copy(name, (i64(count),), dtype, scopes, partial(moved, function))


def moved(function: str, target: T.Buffer, source: T.Buffer, header: str = HEADER) -> PrimExpr:
    """Call of the device function that copies ``source`` to ``target``."""
    return call(function, target.access_ptr("w"), source.access_ptr("r"), header=header)


@intrinsic
def amax(dtype: str, count: int) -> str:
    """Register and name: the largest magnitude of ``count`` elements, as float32 bits."""
    function = f"bs_amax<{CLASS[dtype]}, {count}>"
    return largest(
        f"cuda_amax_{dtype}x{count}",
        dtype,
        count,
        lambda value: formats.abs_bits(widen(value)),
        partial(call, function, dtype="int32"),
    )


def largest(
    name: str,
    dtype: str,
    count: int,
    magnitude: Callable[[PrimExpr], PrimExpr],
    function: Callable[..., PrimExpr],
) -> str:
    """Register and name: the maximum of ``magnitude`` of elements, and of what was there."""
    size = i64(count)

    @T.inline
    def desc(V, M):
        for i in range(size):
            with T.sblock("amax"):
                vi = T.axis.reduce(size, i)
                M[0] = T.max(M[0], magnitude(V[vi]))

    @T.inline
    def impl(V, M):
        M[0] = function(V.access_ptr("r"), M[0])

    operands = local("V", (size,), dtype), local("M", (ONE,), "int32", "rw")
    return describe(name, operands, desc, impl)


def scalar_step(
    name: str,
    given: Sequence[Operand],
    out: str,
    expression: Callable[..., PrimExpr],
    function: Callable[..., PrimExpr],
    block: str = "step",
) -> str:
    """Register a step ``out[0] = expression(a[0], ...)`` of numbers, which it reads in order."""

    def made(value: Callable[..., PrimExpr]) -> Body:
        def step(*buffers: T.Buffer) -> None:
            *numbers, result = buffers
            with nest(block, "S", ONE):
                T.reads(*(number[0:ONE] for number in numbers))
                T.writes(result[0:ONE])
                T.buffer_store(result, value(*(number[0] for number in numbers)), [0])

        return step

    operands = *given, local("B", (ONE,), out, "w")
    return describe(name, operands, made(expression), made(function))


def _step(
    name: str,
    out: str,
    expression: Callable[[PrimExpr, PrimExpr], PrimExpr],
    function: str,
    held: bool,
) -> str:
    """Register a step on one block: ``out[0] = expression(given[0], global_scale[0])``.

    ``held``: the global scale is in a register.
    """
    scale = local("G", (ONE,), "float32") if held else Operand("G", (ONE,), "float32")
    given = local("A", (ONE,), "int32"), scale
    name = f"{name}_held" if held else name
    return scalar_step(name, given, out, expression, partial(call, function, dtype=out))


@intrinsic
def scale_of(fmt: str, rounding: str, dtype: str, held: bool = False) -> str:
    """Register and name: `quantize.scale_byte`, of the maximum of elements of ``dtype``."""
    spec = Quantize(fmt, dtype, rounding=rounding)
    short = "false" if dtype == "float32" else "true"
    form = f"<{short}>" if spec.format.scale is E4M3 else f"_{rounding}"
    return _step(
        f"cuda_scale_{fmt}_{rounding}_{dtype}",
        "int32",
        lambda most, g: scale_byte(spec, most, g),
        f"bs_scale_{fmt}{form}",
        held,
    )


@intrinsic
def divisor_of(fmt: str, held: bool = False) -> str:
    """Register and name: a scale byte's value times the global scale."""
    row = QUANTIZED[fmt]
    return _step(
        f"cuda_divisor_{fmt}",
        "float32",
        lambda byte, g: formats.decode(row.scale, byte) * g,
        f"bs_divisor_{fmt}",
        held,
    )


@intrinsic
def encode(fmt: str, dtype: str, known: bool) -> str:
    """Register and name: E2M1 codes of a block's elements over a divisor.

    ``known``: the scale byte is that of the block's own maximum, which bounds the quotients.
    """
    spec = Quantize(fmt, dtype)
    # The power of two above amax / 6 bounds |x / d| by 6, the one below amax by 8.
    own = "BS_OWN" if spec.format.scale is E4M3 else "BS_CLAMP"
    limit = own if known else "BS_ANY"
    function = f"bs_encode<{CLASS[dtype]}, {spec.block}, BS_{fmt.upper()}, {limit}>"
    scaled = spec.format.scale is E4M3
    numbers = [local("D", (ONE,), "float32"), local("B", (ONE,), "int32")]
    byte = [] if scaled else [T.int32(1)]
    return codes_step(
        f"cuda_encode_{fmt}_{dtype}_{'own' if known else 'any'}",
        local("V", (i64(spec.block),), dtype),
        numbers if scaled else numbers[:1],
        lambda value, *given: element_code(spec, widen(value), *given, *byte),
        lambda *args: call(function, *args, *byte),
        "B V D" if scaled else None,
    )


def codes_step(
    name: str,
    values: Operand,
    numbers: Sequence[Operand],
    code: Callable[..., PrimExpr],
    function: Callable[..., PrimExpr],
    reads: str | None = None,
) -> str:
    """Register and name: ``code`` of each element and of ``numbers``, packed in pairs.

    ``function`` takes addresses of the codes and of the elements, and the numbers.
    """
    half = i64(int(values.shape[0]) // 2)

    def desc(V: T.Buffer, *others: T.Buffer) -> None:
        *given, P = others
        first = [number[0] for number in given]
        with nest("pack", "S", half) as (j,):
            even, odd = code(V[j * TWO], *first), code(V[j * TWO + ONE], *first)
            T.buffer_store(P, pack_codes(even, odd), [j])

    def impl(V: T.Buffer, *others: T.Buffer) -> PrimExpr:
        *given, P = others
        return function(P.access_ptr("w"), V.access_ptr("r"), *(number[0] for number in given))

    operands = values, *numbers, local("P", (half,), "uint8", "w")
    return describe(name, operands, desc, impl, reads)


@intrinsic
def decode(count: int) -> str:
    """Register and name: ``count`` E2M1 codes times their block scale, float32."""
    size, half = i64(count), i64(count // 2)

    @T.inline
    def desc(P, S, W):
        for k in range(size):
            with T.sblock("decode"):
                vk = T.axis.spatial(size, k)
                W[vk] = weight_value(P[vk // TWO], vk, S[0], "float32")

    def impl(P: T.Buffer, S: T.Buffer, W: T.Buffer) -> PrimExpr:
        return call(f"bs_decode<{count}>", W.access_ptr("w"), P.access_ptr("r"), S[0])

    operands = (
        local("P", (half,), "uint8"),
        local("S", (ONE,), "float32"),
        local("W", (size,), "float32", "w"),
    )
    return describe(f"cuda_decode_x{count}", operands, desc, impl)


@intrinsic
def store_rounded(dtype: str, count: int, hint: str) -> str:
    """Register and name: ``count`` float32 rounded to ``dtype`` and stored."""
    return _store_rounded("store_rounded", dtype, count, hint)


@intrinsic
def stage_rounded(dtype: str, count: int) -> str:
    """Register and name: the same to shared memory, from where `store_row` takes it."""
    return _store_rounded("stage_rounded", dtype, count)


def _store_rounded(kind: str, dtype: str, count: int, hint: str = "") -> str:
    """``hint``: of the cache; without one the elements go to shared memory."""
    template = ", ".join(filter(None, (CLASS[dtype], str(count), hint)))
    scope, header = ("global", HEADER) if hint else ("shared", STAGED)
    return mapped(
        "_".join(filter(None, (f"cuda_{kind}_{dtype}x{count}", hint))),
        "out",
        [local("V", (i64(count),), "float32")],
        Operand("D", (i64(count),), dtype, "w", scope),
        lambda value: formats.round_to(dtype, value),
        partial(call, f"bs_{kind}<{template}>", header=header),
    )


STORE_ROW = "bs_store_row"
"""The device function of `store_row`: a kernel that calls it has bulk copies to wait for."""

_OF_ROWS = "cuda_store_row_"
"""What names of `store_row` begin with; dtype and number of elements follow."""


@intrinsic
def store_row(dtype: str, count: int) -> str:
    """Register and name: what a CTA has staged, ``count`` elements (16 bytes or a multiple).

    After a barrier of the CTA thread 0 stores all of it in bulk; the lowering lets the kernel end
    when shared memory has been read.
    """

    def move(target: T.Buffer, source: T.Buffer) -> PrimExpr:
        T.evaluate(T.tvm_storage_sync("shared"))
        return moved(f"{STORE_ROW}<{count * BYTES[dtype]}>", target, source, STAGED)

    return copy(f"{_OF_ROWS}{dtype}x{count}", (i64(count),), dtype, ("shared", "global"), move)


def stored_rows() -> PrimExpr:
    """Call that returns when the thread's bulk copies have read shared memory."""
    return call("bs_bulk_wait_read<0>", header=STAGED)


def mapped(
    name: str,
    block: str,
    given: Sequence[Operand],
    result: Operand,
    expression: Callable[..., PrimExpr],
    function: Callable[..., PrimExpr],
    reads: str | None = None,
) -> str:
    """Register and name: ``expression`` of each element of ``given``.

    Of an operand of one element, every element meets that one.  ``function`` takes the address of
    the result and those of what it is made of, of one element the number itself.
    """
    (size,) = result.shape
    single = [int(operand.shape[0]) == 1 for operand in given]

    def desc(*buffers: T.Buffer) -> None:
        *made_of, out = buffers
        with nest(block, "S", size) as (i,):
            values = [b[0] if one else b[i] for one, b in zip(single, made_of, strict=True)]
            T.buffer_store(out, expression(*values), [i])

    def impl(*buffers: T.Buffer) -> PrimExpr:
        *made_of, out = buffers
        args = [b[0] if one else b.access_ptr("r") for one, b in zip(single, made_of, strict=True)]
        return function(out.access_ptr("w"), *args)

    return describe(name, [*given, result], desc, impl, reads)


@cache
def register_all() -> tuple[str, ...]:
    """Register every intrinsic of this module; return the names, sorted."""
    names = [decode(8)]
    for dtype in CLASS:
        if dtype != "float32":
            names += [stage_rounded(dtype, count) for count in (16, 32)]
        for hint in HINTS:
            names += [store_rounded(dtype, count, hint) for count in (8, 16, 32)]
        for hint in (*HINTS, "BS_INPLACE"):
            names += [load(dtype, count, hint) for count in (16, 32)]
        for fmt, row in QUANTIZED.items():
            names.append(amax(dtype, row.block))
            names += [encode(fmt, dtype, known) for known in (True, False)]
            roundings = ("ceil",) if row.scale is E4M3 else ("ceil", "floor")
            names += [scale_of(fmt, rounding, dtype) for rounding in roundings]
            names.append(scale_of(fmt, "ceil", dtype, held=True))
    for hint in HINTS:  # codes, and the words that swizzle and other layouts move
        names.append(load("uint8", 4, hint))
        names += [move("uint32", words, hint) for move in (load, store) for words in (1, 2, 4)]
        names += [store("uint8", count, hint) for count in (8, 16)]
    names += [divisor_of(fmt, held) for fmt in QUANTIZED for held in (False, True)]
    return tuple(sorted(names))


def register_rows(trace: str) -> None:
    """Register the intrinsics that ``trace`` names and that there are for rows of any length."""
    for dtype, count in re.findall(rf"\b{_OF_ROWS}([a-z0-9]+)x(\d+)\b", trace):
        store_row(dtype, int(count))
