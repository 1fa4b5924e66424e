"""A block of 16-bit values as MXFP8: E4M3 codes over the power of two that keeps them within 448.

    byte = E8M0(max|a| / 448), rounded up;  codes[k] = E4M3(a[k] / 2^(byte - 127))

The quotient is exact, so that codes are rounded once; a NaN makes the block's scale NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T

from blockscale.base.formats import E4M3, GEMM
from blockscale.tir import formats
from blockscale.tir.common import i64, widen
from blockscale.tir.fused.act_quantize_threads import amax_step


@dataclass(frozen=True)
class MxFp8Rule:
    """How rows between two GEMMs become MXFP8; stands where an `ActQuantize` does.

    Attributes:
        dtype: of the values, "bfloat16" or "float16".
        block: values that share a scale.
        gated: False: the values are activated already.
    """

    dtype: str
    block: int = GEMM["mxfp8"].block
    gated: bool = False


def scale_byte(amax: PrimExpr) -> PrimExpr:
    """Scale byte (int32) of a block from its largest magnitude."""
    return formats.ue8m0_encode_ceil(amax / tirx.const(E4M3.max_value, "float32"))


def block_byte(amax_bits: PrimExpr) -> PrimExpr:
    """The same from the bits of the largest magnitude."""
    return scale_byte(formats.from_bits(amax_bits))


def divisor(byte: PrimExpr) -> PrimExpr:
    """What a block's values are divided by."""
    return formats.ue8m0_decode(byte)


def code(value: PrimExpr, by: PrimExpr) -> PrimExpr:
    """E4M3 code (uint8) of an element over its block's divisor."""
    return T.Cast("uint8", formats.e4m3_encode(widen(value) / by))


def encode_step(rule: MxFp8Rule) -> Any:
    """Step from a block of values to its scale byte and its codes, in the registers of a thread."""
    block, largest = i64(rule.block), amax_step(rule.block)

    @T.inline
    def encode(a, magnitude, amax, byte, factor, codes):
        largest(a, magnitude, amax)
        for i in range(i64(1)):
            with T.sblock("scale"):
                vi = T.axis.spatial(i64(1), i)
                byte[vi] = block_byte(amax[vi])
        for i in range(i64(1)):
            with T.sblock("factor"):
                vi = T.axis.spatial(i64(1), i)
                factor[vi] = divisor(byte[vi])
        for k in range(block):
            with T.sblock("pack"):
                vk = T.axis.spatial(block, k)
                codes[vk] = code(a[vk], factor[i64(0)])

    return encode
