"""NumPy reference of every operation: slow, obvious, sharing no code with blockscale or tir.

Two arithmetics appear.  Where the definition names float32 steps (quantise, dequantise, sweep),
each step is one NumPy float32 operation, which IEEE 754 rounds to nearest even.  Where it is a real
number (decoded values, the linear layer, the judge of the sweep), it is float64.

Words: a *code* is a 4-bit E2M1 number, a *packed* byte holds the code of element 2j in its low and
of element 2j + 1 in its high nibble; a *scale byte* is E4M3 (NVFP4: 16 elements a block) or UE8M0
(MXFP4: 32).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]

BLOCK = {"nvfp4": 16, "mxfp4": 32}
E2M1_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

f32 = np.float32


def _quiet() -> np.errstate:
    """Return a context in which overflow, 0/0 and NaN are results and no warnings."""
    return np.errstate(all="ignore")


# ---------------------------------------------------------------------------------------- numbers
def e2m1_decode(codes: Array) -> NDArray[np.float64]:
    """Return the value of each 4-bit code; bit 3 is the sign, so code 8 is -0.0."""
    codes = np.asarray(codes)
    value = E2M1_MAGNITUDES[codes & 7]
    return np.where(codes & 8, -value, value)


def e4m3_decode(byte: Array) -> NDArray[np.float64]:
    """Return the value of each E4M3 byte: bias 7, subnormals below 2^-6, 0x7F and 0xFF are NaN."""
    byte = np.asarray(byte).astype(np.int64)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    value = np.where(byte & 0x7F == 0x7F, np.nan, value)
    return np.where(byte & 0x80, -value, value)


def ue8m0_decode(byte: Array) -> NDArray[np.float64]:
    """Return 2^(byte - 127); byte 255 is NaN, byte 0 is 2^-127 (not zero)."""
    byte = np.asarray(byte).astype(np.int64)
    return np.where(byte == 255, np.nan, 2.0 ** (byte.astype(np.float64) - 127))


def _nearest_even(table: NDArray[np.float64], magnitude: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the index of the nearest table entry, ties to the even index, saturating.

    The entries of a float format, in ascending order, have their code as index, and a code is even
    exactly when its last mantissa bit is 0: "ties to even" is "ties to the even index".
    """
    magnitude = np.minimum(magnitude, table[-1])
    low = np.searchsorted(table, magnitude, side="right") - 1
    high = np.minimum(low + 1, len(table) - 1)
    below, above = magnitude - table[low], table[high] - magnitude
    up = (above < below) | ((above == below) & (high % 2 == 0))
    return np.where(up, high, low)


def e2m1_encode(value: Array) -> NDArray[np.uint8]:
    """Return the nearest code, ties to even, saturating at 6; NaN is 7, zero keeps its sign."""
    with _quiet():  # widening a signalling NaN
        value = np.asarray(value, dtype=np.float64)
    nan = np.isnan(value)
    code = _nearest_even(E2M1_MAGNITUDES, np.abs(np.where(nan, 0.0, value)))
    code = code + 8 * np.signbit(value)
    return np.where(nan, 7, code).astype(np.uint8)


def e4m3_encode(value: Array) -> NDArray[np.uint8]:
    """Return the nearest E4M3 byte, ties to even, saturating at 448; NaN of either sign is 0x7F."""
    with _quiet():  # widening a signalling NaN
        value = np.asarray(value, dtype=np.float64)
    nan = np.isnan(value)
    table = e4m3_decode(np.arange(0x7F))
    code = _nearest_even(table, np.abs(np.where(nan, 0.0, value))) + 0x80 * np.signbit(value)
    return np.where(nan, 0x7F, code).astype(np.uint8)


def _floor_log2(value: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return floor(log2 value) exactly: -inf for 0, +inf for inf, NaN for NaN."""
    _, exponent = np.frexp(value)  # value = mantissa * 2^exponent, mantissa in [0.5, 1)
    result = np.where(value == 0, -np.inf, exponent - 1.0)
    return np.where(np.isfinite(value), result, value)


def _ue8m0_byte(exponent: NDArray[np.float64]) -> NDArray[np.uint8]:
    byte = np.where(np.isnan(exponent), 255.0, np.clip(exponent, -127, 127) + 127)
    return byte.astype(np.uint8)


def ue8m0_encode_ceil(value: Array) -> NDArray[np.uint8]:
    """Return the smallest power of two >= value, clamped to 2^-127..2^127; NaN is 255, 0 is 0."""
    value = np.asarray(value, dtype=np.float64)
    with _quiet():
        floor = _floor_log2(value)
        exact = np.ldexp(1.0, np.clip(np.nan_to_num(floor), -999, 999).astype(np.int64)) == value
        return _ue8m0_byte(np.where(exact | ~np.isfinite(value) | (value == 0), floor, floor + 1))


def ue8m0_encode_floor(value: Array) -> NDArray[np.uint8]:
    """Return 2^(floor(log2 value) - 2) (the OCP MX rule), clamped; NaN is 255, 0 is 0."""
    with _quiet():
        return _ue8m0_byte(_floor_log2(np.asarray(value, dtype=np.float64)) - 2)


def bf16_bits(value: Array) -> NDArray[np.uint16]:
    """Return the bfloat16 bits nearest to float32 values, ties to even; NaN stays NaN."""
    value = np.asarray(value, dtype=f32)
    bits = value.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(value), 0x7FC0, rounded).astype(np.uint16)


def bf16_value(bits: Array) -> NDArray[np.float32]:
    """Return the float32 value of bfloat16 bits."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(f32)


def round_to(value: Array, dtype: str) -> NDArray[np.float32]:
    """Return float32 values rounded to the nearest "float32", "float16" or "bfloat16" number."""
    value = np.asarray(value, dtype=f32)
    with _quiet():
        if dtype == "bfloat16":
            return bf16_value(bf16_bits(value))
        return value.astype({"float32": np.float32, "float16": np.float16}[dtype]).astype(f32)


# -------------------------------------------------------------------------------- packing, layout
def pack(codes: Array) -> NDArray[np.uint8]:
    """Return codes [..., K] as bytes [..., K/2], even elements in the low nibble."""
    codes = np.asarray(codes, dtype=np.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Array) -> NDArray[np.uint8]:
    """Return bytes [..., K/2] as codes [..., K]."""
    packed = np.asarray(packed, dtype=np.uint8)
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    codes[..., 0::2], codes[..., 1::2] = packed & 15, packed >> 4
    return codes


def ceil_to(value: int, step: int) -> int:
    """Return value rounded up to a multiple of step."""
    return -(-value // step) * step


def swizzle_offset(rows: int, cols: int) -> NDArray[np.int64]:
    """Return [rows, cols]: the byte offset of scale (r, c) in the 128x4 layout."""
    r, c = np.arange(rows)[:, None], np.arange(cols)[None, :]
    tile = (r // 128) * (ceil_to(cols, 4) // 4) + c // 4
    return tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4


def swizzle(scale: Array) -> NDArray[np.uint8]:
    """Return scale bytes [rows, cols] in the 128x4 layout: the padded shape, padding zero."""
    scale = np.asarray(scale, dtype=np.uint8)
    rows, cols = scale.shape
    out = np.zeros((ceil_to(rows, 128), ceil_to(cols, 4)), np.uint8)
    out.reshape(-1)[swizzle_offset(rows, cols)] = scale
    return out


def unswizzle(swizzled: Array, rows: int, cols: int) -> NDArray[np.uint8]:
    """Return the scale bytes [rows, cols] that a 128x4 buffer holds."""
    flat = np.asarray(swizzled, dtype=np.uint8).reshape(-1)
    return flat[swizzle_offset(rows, cols)]


# ------------------------------------------------------------------------- quantise and dequantise
def scale_value(byte: Array, fmt: str) -> NDArray[np.float64]:
    """Return the value of scale bytes of a format."""
    return e4m3_decode(byte) if fmt == "nvfp4" else ue8m0_decode(byte)


def block_amax(x: Array, fmt: str) -> NDArray[np.float32]:
    """Return [..., K/block]: the largest magnitude of each block; a NaN in it makes it NaN."""
    x = np.asarray(x, dtype=f32)
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK[fmt], BLOCK[fmt])
    return np.max(np.abs(blocks), axis=-1)  # np.max propagates NaN


def quantize(
    x: Array,
    fmt: str,
    global_scale: float = 1.0,
    amax: Array | None = None,
    rounding: str = "ceil",
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return codes [..., K] and scale bytes [..., K/block] of float32 x [..., K].

    NVFP4: s = E4M3(amax / (6 g)).  MXFP4: s = amax / (6 g) rounded up to a power of two, or
    2^(floor(log2(amax / g)) - 2).  codes = E2M1(x / (s g)), and signed zeros where s is 0.
    A block of zeros has scale byte 0, whatever g is, and its 0 / 0 are zeros.
    """
    x, g = np.asarray(x, dtype=f32), f32(global_scale)
    own = block_amax(x, fmt)
    amax = own if amax is None else np.asarray(amax, dtype=f32).reshape(own.shape)
    with _quiet():
        if fmt == "nvfp4":
            byte = e4m3_encode(amax / (f32(6) * g))
        elif rounding == "ceil":
            byte = ue8m0_encode_ceil(amax / (f32(6) * g))
        else:
            byte = ue8m0_encode_floor(amax / g)
        byte = np.where(amax == 0, 0, byte).astype(np.uint8)
        s = np.repeat(scale_value(byte, fmt).astype(f32), BLOCK[fmt], axis=-1)
        code = e2m1_encode(x / (s * g))
        zero = (s == 0) | ((x == 0) & (s * g == 0))
        return np.where(zero, 8 * np.signbit(x), code).astype(np.uint8), byte


def dequantize(
    codes: Array, byte: Array, fmt: str, global_scale: float = 1.0, dtype: str = "float32"
) -> NDArray[np.float32]:
    """Return code * (scale * g) [..., K]: two float32 products, then one rounding to dtype."""
    with _quiet():
        scale = scale_value(byte, fmt).astype(f32) * f32(global_scale)
        value = e2m1_decode(codes).astype(f32) * np.repeat(scale, BLOCK[fmt], axis=-1)
    return round_to(value, dtype)


def weight(codes: Array, byte: Array, fmt: str, global_scale: float = 1.0) -> NDArray[np.float64]:
    """Return the weights [N, K] that codes and scales stand for, in float64, without rounding."""
    scale = scale_value(byte, fmt) * float(f32(global_scale))
    return e2m1_decode(codes) * np.repeat(scale, BLOCK[fmt], axis=-1)


E4M3_STEP = 2.0**-5
"""The least scale of a block of which kernels make weights rounded to E4M3 (`rounded_weight`)."""


def rounded_weight(codes: Array, byte: Array) -> NDArray[np.float64]:
    """Return NVFP4 weights [N, K] rounded to E4M3 times a power of two of their row, in float64.

    One is the largest with which six times the largest scale of the row's blocks that are not all
    zeros is at most 448.  Blocks whose scale is then less than 2^-5 have it doubled until it is
    not, and their codes halved as often, then rounded to the nearest ones.
    """
    scale, codes = scale_value(byte, "nvfp4"), np.asarray(codes)
    value = e2m1_decode(codes).reshape(*scale.shape, 16)
    live = (scale != 0) & (value != 0).any(-1)
    most = np.max(scale, axis=-1, keepdims=True, where=live, initial=0)
    power = np.floor(np.log2(448 / (6 * np.where(most > 0, most, 1))))
    one = np.where(live, scale * 2.0**power, 1)
    while (small := one < E4M3_STEP).any():
        one = np.where(small, 2 * one, one)
        value = np.where(small[..., None], value / 2, value)
    value = e2m1_decode(e2m1_encode(value)) * one[..., None]
    rounded = e4m3_decode(e4m3_encode(value)) * 2.0 ** -power[..., None]
    return np.where(live[..., None], rounded, 0).reshape(codes.shape)


def linear(x: Array, w: Array, bias: Array | None = None) -> NDArray[np.float64]:
    """Return x [..., K] times w [N, K] transposed, plus bias [N], in float64."""
    y = np.asarray(x, dtype=np.float64) @ np.asarray(w, dtype=np.float64).T
    return y if bias is None else y + np.asarray(bias, dtype=np.float64)


def row_error(y: Array, truth: Array) -> NDArray[np.float64]:
    """Return [rows]: |y - truth| / |truth|, Euclidean norms over a row; inf where y is not finite.

    A row whose truth is zero must be zero: its error is 0 or inf.
    """
    y, truth = np.asarray(y, dtype=np.float64), np.asarray(truth, dtype=np.float64)
    gap, size = np.linalg.norm(y - truth, axis=-1), np.linalg.norm(truth, axis=-1)
    with _quiet():
        error = np.where(gap == 0, 0.0, gap / size)
    return np.where(np.isfinite(y).all(axis=-1), error, np.inf)


# ------------------------------------------------------------------------------------------- GEMM
GEMM = {
    "nvfp4": ("e2m1", "e2m1", 16, "e4m3"),
    "mxfp4": ("e2m1", "e2m1", 32, "ue8m0"),
    "mxfp8xmxfp4": ("e4m3", "e2m1", 32, "ue8m0"),
    "mxfp8": ("e4m3", "e4m3", 32, "ue8m0"),
}
"""Formats of a GEMM: codes of a and of b, elements a scale, the scale's format."""


def operand(codes: Array, byte: Array, fmt: str, which: str) -> NDArray[np.float64]:
    """Return the elements [rows, K] of operand "a" or "b", in float64, without rounding.

    ``codes``: one a byte; ``byte``: the scales [rows, K / block], linear.
    """
    a_code, b_code, block, scale = GEMM[fmt]
    value = e2m1_decode if (a_code if which == "a" else b_code) == "e2m1" else e4m3_decode
    scales = e4m3_decode(byte) if scale == "e4m3" else ue8m0_decode(byte)
    return value(codes) * np.repeat(scales, block, axis=-1)


def mm(a: Array, b: Array, alpha: float = 1.0, bias: Array | None = None) -> NDArray[np.float64]:
    """Return alpha * a [M, K] times b [N, K] transposed, plus bias [N], in float64."""
    d = float(f32(alpha)) * (np.asarray(a, np.float64) @ np.asarray(b, np.float64).T)
    return d if bias is None else d + np.asarray(bias, np.float64)


def activation(name: str, x: Array) -> NDArray[np.float64]:
    """Return the activation of a GEMM's elements, in float64."""
    x = np.asarray(x, np.float64)
    if name == "relu2":
        return np.maximum(x, 0) ** 2
    inner = np.sqrt(8 / np.pi) * (x + 0.044715 * x**3) if name == "gelu_tanh" else x
    with np.errstate(over="ignore"):
        return x if name == "none" else x / (1 + np.exp(-inner))


def grouped_mm(a: Array, b: Array, offsets: Array, alpha: Array) -> NDArray[np.float64]:
    """Return [M, N]: the rows offsets[e]..offsets[e + 1] of a times b[e]; other rows are NaN."""
    d = np.full((len(a), b.shape[1]), np.nan)
    for e in range(len(b)):
        rows = slice(offsets[e], offsets[e + 1])
        d[rows] = mm(a[rows], b[e], float(alpha[e]))
    return d


def group_scales(byte: Array, offsets: Array) -> NDArray[np.uint8]:
    """Return the scales of a grouped GEMM's a: each expert's rows swizzled, one after the other."""
    parts = [np.asarray(byte)[start:end] for start, end in pairwise(offsets)]
    return np.concatenate([swizzle(part) for part in parts])


# ------------------------------------------------------------------------------------ scale sweep
def fp8_scale_candidates() -> NDArray[np.float32]:
    """Return [126]: the positive finite E4M3 values, ascending, divided by 448 in float32."""
    return e4m3_decode(np.arange(1, 0x7F)).astype(f32) / f32(448)


def sweep_scales(global_amax: float, candidates: Array) -> NDArray[np.float32]:
    """Return the block scale that each candidate stands for; a scale of 0 becomes 1."""
    with _quiet():
        scale = candidates.astype(f32) * f32(global_amax) / f32(6)
    return np.where(scale == 0, f32(1), scale).astype(f32)


def sweep_losses(
    blocks: Array, scales: Array, arithmetic: type[np.floating] = np.float32
) -> NDArray[np.floating]:
    """Return [candidates, blocks]: the squared error of each block [blocks, size] at each scale.

    float32 is the arithmetic of the definition, with NumPy's pairwise sum; float64 is the judge of
    near-ties.
    """
    magnitude = np.abs(np.asarray(blocks, dtype=f32)).astype(arithmetic)
    losses = np.empty((len(scales), len(magnitude)), arithmetic)
    with _quiet():
        for k, scale in enumerate(scales.astype(arithmetic)):
            q = E2M1_MAGNITUDES[e2m1_encode(magnitude / scale) & 7].astype(arithmetic)
            losses[k] = np.sum((magnitude - q * scale) ** 2, axis=-1)
    return losses


def first_smallest(losses: Array) -> NDArray[np.int64]:
    """Return [blocks]: the first index with the smallest loss; losses of NaN and inf never win."""
    losses = np.where(np.isnan(losses), np.inf, losses)
    return np.argmin(losses, axis=0)


def scale_sweep(
    x: Array, global_amax: float, block_size: int = 16, candidates: Array | None = None
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the best candidate index and amax, both [blocks], for x flattened into blocks."""
    table = fp8_scale_candidates() if candidates is None else np.asarray(candidates, dtype=f32)
    blocks = np.asarray(x, dtype=f32).reshape(-1, block_size)
    index = first_smallest(sweep_losses(blocks, sweep_scales(global_amax, table)))
    with _quiet():
        return index, table[index] * f32(global_amax)
