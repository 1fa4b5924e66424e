"""Number formats of 4-bit inference (`blockscale.base.formats`) as TensorIR expressions.

Every ``*_decode`` takes int32 codes and returns float32; every ``*_encode`` takes float32 and
returns int32 codes.  Expressions may be scalars or vectors.  Encoding rounds to nearest, ties to
even, and saturates, unless the name says otherwise.  Everything is integer arithmetic and single
IEEE float32 operations: CPU code generators know no FP4 or FP8.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr as PrimExpr

from blockscale.base.formats import Number

_INF_BITS = 0x7F800000
_NAN_BITS = 0x7FC00000
_ABS_MASK = 0x7FFFFFFF


def _lanes(expr: PrimExpr) -> int:
    return int(expr.ty.dtype.lanes)


def const(value: float, like: PrimExpr, dtype: str) -> PrimExpr:
    """Constant of element type ``dtype`` with as many lanes as ``like``."""
    scalar = tirx.const(value, dtype)
    return tirx.Broadcast(scalar, _lanes(like)) if _lanes(like) > 1 else scalar


def _i32(value: int, like: PrimExpr) -> PrimExpr:
    return const(value, like, "int32")


def _f32(value: float, like: PrimExpr) -> PrimExpr:
    return const(value, like, "float32")


def cast(expr: PrimExpr, dtype: str) -> PrimExpr:
    """Convert every lane of ``expr`` to element type ``dtype``."""
    lanes = _lanes(expr)
    return tirx.Cast(f"{dtype}x{lanes}" if lanes > 1 else dtype, expr)


def bits_of(x: PrimExpr) -> PrimExpr:
    """Return the bits of float32 ``x`` as int32."""
    lanes = _lanes(x)
    return tirx.reinterpret(f"int32x{lanes}" if lanes > 1 else "int32", x)


def from_bits(bits: PrimExpr) -> PrimExpr:
    """Return the float32 whose bits are int32 ``bits``."""
    lanes = _lanes(bits)
    return tirx.reinterpret(f"float32x{lanes}" if lanes > 1 else "float32", bits)


def abs_bits(x: PrimExpr) -> PrimExpr:
    """Bits of ``|x|``, ordered as the values are, NaN above infinity: an integer max is exact."""
    return bits_of(x) & _i32(_ABS_MASK, x)


def _is_nan_bits(absolute: PrimExpr) -> PrimExpr:
    return absolute > _i32(_INF_BITS, absolute)


def e2m1_decode(code: PrimExpr) -> PrimExpr:
    """Value of the E2M1 code in the low four bits of ``code``; higher bits are ignored."""
    magnitude = code & _i32(7, code)
    # Codes 2..7 are a float32 exponent and mantissa in miniature; 0 and 1 are subnormal.
    normal = (magnitude << _i32(22, code)) + _i32(126 << 23, code)
    subnormal = bits_of(cast(magnitude, "float32") * _f32(0.5, code))
    sign = (code & _i32(8, code)) << _i32(28, code)
    return from_bits(tirx.Select(magnitude < _i32(2, code), subnormal, normal) | sign)


def e2m1_encode(x: PrimExpr) -> PrimExpr:
    """E2M1 code of ``x``; beyond 6 saturates, NaN gives code 7, the sign of zero survives."""
    absolute = abs_bits(x)
    clamped = tirx.Min(absolute, _i32(0x40C00000, x))  # 6.0
    # Adding 2^22 leaves round(2 |x|) in the lowest bits: the unit there is 0.5.
    below_one = bits_of(from_bits(clamped) + _f32(2.0**22, x)) & _i32(7, x)
    odd = (clamped >> _i32(22, x)) & _i32(1, x)
    rounded = (clamped + _i32(0x1FFFFF, x) + odd) >> _i32(22, x)
    magnitude = tirx.Select(
        clamped < _i32(0x3F800000, x), below_one, rounded - _i32((127 << 1) - 2, x)
    )
    sign = (bits_of(x) >> _i32(28, x)) & _i32(8, x)
    return tirx.Select(_is_nan_bits(absolute), _i32(7, x), magnitude | sign)


def e2m1_round(x: PrimExpr) -> PrimExpr:
    """``x`` >= 0 rounded to an E2M1 value (float32); beyond 6, and for NaN, 6."""
    # Adding and subtracting 2^22, 2^23, 2^24 rounds to multiples of 0.5, 1 and 2, ties to even.
    above_two = tirx.Select(x < _f32(4.0, x), _f32(2.0**23, x), _f32(2.0**24, x))
    magic = tirx.Select(x < _f32(2.0, x), _f32(2.0**22, x), above_two)
    shifted = tirx.Select(x < _f32(6.0, x), x, _f32(6.0, x)) + magic
    # The way through the bits keeps TVM's simplifier from cancelling the two.
    return from_bits(bits_of(shifted)) - magic


def e4m3_decode(byte: PrimExpr) -> PrimExpr:
    """Value of an E4M3 byte (0..255 as int32); 0x7F and 0xFF are NaN."""
    magnitude = byte & _i32(0x7F, byte)
    normal = (magnitude << _i32(20, byte)) + _i32(120 << 23, byte)
    subnormal = bits_of(cast(magnitude, "float32") * _f32(2.0**-9, byte))
    sign = (byte & _i32(0x80, byte)) << _i32(24, byte)
    value = tirx.Select(magnitude < _i32(8, byte), subnormal, normal) | sign
    return from_bits(tirx.Select(magnitude < _i32(0x7F, byte), value, _i32(_NAN_BITS, byte)))


def e4m3_encode(x: PrimExpr) -> PrimExpr:
    """E4M3 byte of ``x``; beyond 448 saturates, NaN gives 0x7F."""
    absolute = abs_bits(x)
    clamped = tirx.Min(absolute, _i32(0x43E00000, x))  # 448.0
    # Adding 2^14 leaves round(|x| / 2^-9) in the lowest bits: the unit there is 2^-9.
    subnormal = bits_of(from_bits(clamped) + _f32(2.0**14, x)) & _i32(0xF, x)
    odd = (clamped >> _i32(20, x)) & _i32(1, x)
    normal = ((clamped + _i32(0x7FFFF, x) + odd) >> _i32(20, x)) - _i32(120 << 3, x)
    magnitude = tirx.Select(clamped < _i32(0x3C800000, x), subnormal, normal)  # 2^-6
    sign = (bits_of(x) >> _i32(24, x)) & _i32(0x80, x)
    return tirx.Select(_is_nan_bits(absolute), _i32(0x7F, x), magnitude | sign)


def ue8m0_decode(byte: PrimExpr) -> PrimExpr:
    """Value 2^(byte - 127) of an E8M0 byte (0..255 as int32); 255 is NaN."""
    value = tirx.Select(byte < _i32(1, byte), _i32(0x00400000, byte), byte << _i32(23, byte))
    return from_bits(tirx.Select(byte < _i32(255, byte), value, _i32(_NAN_BITS, byte)))


def ue8m0_encode_ceil(x: PrimExpr) -> PrimExpr:
    """E8M0 byte of the least power of two >= ``x`` >= 0, within 2^-127..2^127; NaN gives 255."""
    bits = abs_bits(x)
    # Any mantissa bit carries into the exponent; 2^-127 itself is the float32 subnormal 0x400000.
    up = (tirx.Min(bits, _i32(_INF_BITS, x)) + _i32(0x7FFFFF, x)) >> _i32(23, x)
    byte = tirx.Select(bits > _i32(0x00400000, x), up, _i32(0, x))
    capped = tirx.Select(bits < _i32(_INF_BITS, x), tirx.Min(byte, _i32(254, x)), _i32(254, x))
    return tirx.Select(_is_nan_bits(bits), _i32(255, x), capped)


def ue8m0_encode_floor(x: PrimExpr) -> PrimExpr:
    """E8M0 byte of 2^(floor(log2 x) - 2), the OCP rule for E2M1; NaN gives 255, infinity 254."""
    bits = abs_bits(x)
    byte = tirx.Max((bits >> _i32(23, x)) - _i32(2, x), _i32(0, x))
    finite = tirx.Select(bits < _i32(_INF_BITS, x), byte, _i32(254, x))
    return tirx.Select(_is_nan_bits(bits), _i32(255, x), finite)


def int4_decode(code: PrimExpr) -> PrimExpr:
    """Value of a symmetric INT4 code: ``code - 8``."""
    return cast((code & _i32(15, code)) - _i32(8, code), "float32")


def int4_encode(x: PrimExpr) -> PrimExpr:
    """Symmetric INT4 code of ``x``: rounded to -8 .. 7, plus 8; NaN gives the code of 0."""
    clamped = tirx.Max(tirx.Min(x, _f32(7.0, x)), _f32(-8.0, x))
    # 1.5 * 2^23 has unit 1: its bits plus the rounded value.
    rounded = bits_of(clamped + _f32(1.5 * 2.0**23, x)) - _i32(0x4B400000, x)
    return tirx.Select(_is_nan_bits(abs_bits(x)), _i32(8, x), rounded + _i32(8, x))


_DECODE = {"e2m1": e2m1_decode, "e4m3": e4m3_decode, "ue8m0": ue8m0_decode, "int4": int4_decode}


def decode(number: Number, code: PrimExpr) -> PrimExpr:
    """Value of a code of ``number``."""
    return _DECODE[number.name](code)


def decode_byte(number: Number, byte: PrimExpr) -> PrimExpr:
    """Value of a byte (uint8) that is one code of ``number``."""
    return decode(number, cast(byte, "int32"))


def element(number: Number, byte: PrimExpr, index: PrimExpr) -> PrimExpr:
    """Value of element ``index`` of its row, from the byte (uint8) that holds its code."""
    if number.per_byte == 1:
        return decode_byte(number, byte)
    return decode(number, nibble(cast(byte, "int32"), index))


def bf16_bits(x: PrimExpr) -> PrimExpr:
    """Bits (int32, low 16) of ``x`` rounded to bfloat16, nearest even; subnormals are kept."""
    bits = bits_of(x)
    odd = (bits >> _i32(16, x)) & _i32(1, x)
    rounded = (bits + _i32(0x7FFF, x) + odd) >> _i32(16, x)
    return tirx.Select(_is_nan_bits(abs_bits(x)), _i32(0x7FC0, x), rounded)


def round_to(dtype: str, x: PrimExpr) -> PrimExpr:
    """Float32 ``x`` rounded once to ``dtype`` ("float32", "bfloat16", "float16"), nearest even."""
    if dtype != "bfloat16":
        return cast(x, dtype)
    # The hardware conversion (VCVTNEPS2BF16) flushes subnormals, so round with integers.
    lanes = _lanes(x)
    word = cast(bf16_bits(x), "uint16")
    return tirx.reinterpret(f"bfloat16x{lanes}" if lanes > 1 else "bfloat16", word)


def nibble(byte: PrimExpr, index: PrimExpr) -> PrimExpr:
    """Code of element ``index`` of its row, from ``byte`` (int32): even low, odd high."""
    # index % 2 in the index type: what tensorize can simplify to the intrinsic's own index.
    return (byte >> (tirx.Cast("int32", index % 2) * 4)) & 15
