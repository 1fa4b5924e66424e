"""Scales and codes of blocks by reciprocals, as the fused ops compute them.

In IEEE float32, with amax the largest magnitude of a block, NaNs ignored (NaN if it has nothing
else), gs a factor of the values (1 where it has no part), and 1/6 rounded to float32:

    E4M3:   s = min((gs * amax) * (1/6), 448), a NaN gives 448;  byte = E4M3(s)
            inverse = (1 / value of the byte) * gs, 0 where the value is 0
    UE8M0:  s = (gs * amax) * (1/6);  byte = least power of two >= s, 2^127 at most; 0 for s <= 0,
            127 for NaN
            inverse = 2^(127 - byte) * gs, 0 where the byte is 0
    code = E2M1(value * inverse)
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr as PrimExpr

from blockscale.tir import formats

SIXTH = 0.16666667163372040
"""1/6 rounded to float32 (0x3E2AAAAB)."""

_LARGEST = 3.4028234663852886e38

_MAX_E4M3 = 448.0
_INF_BITS = 0x7F800000
_UE8M0_ONE = 127


def rounded(dtype: str, x: PrimExpr) -> PrimExpr:
    """Return float32 ``x`` rounded to ``dtype`` ("float16", "bfloat16"), as float32."""
    if dtype == "bfloat16":
        return formats.from_bits(formats.bf16_bits(x) << formats.const(16, x, "int32"))
    return formats.cast(formats.cast(x, dtype), "float32")


def magnitude(x: PrimExpr) -> PrimExpr:
    """Bits of ``|x|`` for an integer maximum that ignores NaN: -1 (itself a NaN) for a NaN."""
    bits = formats.abs_bits(x)
    finite = bits <= formats.const(_INF_BITS, x, "int32")
    return tirx.Select(finite, bits, formats.const(-1, x, "int32"))


def sixth_of(amax_bits: PrimExpr, gs: PrimExpr | None) -> PrimExpr:
    """``(gs * amax) * (1/6)``; None: without the factor."""
    amax = formats.from_bits(amax_bits)
    scaled = amax if gs is None else gs * amax
    return scaled * formats.const(SIXTH, amax, "float32")


def scale_byte(scale_format: str, amax_bits: PrimExpr, gs: PrimExpr | None) -> PrimExpr:
    """Scale byte (int32) of a block from the maximum of its `magnitude`."""
    s = sixth_of(amax_bits, gs)
    if scale_format == "e4m3":
        top = formats.const(_MAX_E4M3, s, "float32")
        return formats.e4m3_encode(tirx.Select(s < top, s, top))
    zero, one = (formats.const(byte, s, "int32") for byte in (0, _UE8M0_ONE))
    limit = formats.const(0.0, s, "float32")
    rest = tirx.Select(s <= limit, zero, one)
    return tirx.Select(s > limit, formats.ue8m0_encode_ceil(s), rest)


def inverse_scale(scale_format: str, byte: PrimExpr, gs: PrimExpr | None) -> PrimExpr:
    """What a block's values are multiplied with before they are rounded to codes."""
    zero = formats.const(0.0, byte, "float32")
    if scale_format == "e4m3":
        value = formats.e4m3_decode(byte)
        one = formats.const(1.0, byte, "float32")
        inverse = tirx.Select(tirx.NE(value, zero), one / value, zero)
    else:
        # 2^(127 - byte) is the value of byte 254 - byte.
        power = formats.ue8m0_decode(formats.const(2 * _UE8M0_ONE, byte, "int32") - byte)
        inverse = tirx.Select(byte > formats.const(0, byte, "int32"), power, zero)
    return inverse if gs is None else inverse * gs


def reciprocal(x: PrimExpr) -> PrimExpr:
    """``1 / x``."""
    return formats.const(1.0, x, "float32") / x


def clipped(x: PrimExpr) -> PrimExpr:
    """Return ``x``, the largest number at most; a NaN stays."""
    largest = formats.const(_LARGEST, x, "float32")
    return tirx.Select(x > largest, largest, x)


def bounded(x: PrimExpr) -> PrimExpr:
    """``1 / x``, the largest number at most."""
    return clipped(reciprocal(x))
