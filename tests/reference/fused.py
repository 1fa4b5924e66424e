"""NumPy reference of the fused ops, beside `reference`: slow, obvious, sharing no code with tir.

Every float32 step is one NumPy operation, which IEEE 754 rounds to nearest even; arrays are
[rows, hidden].  gs is FlashInfer's global scale: values are multiplied with it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.reference import core as ref

Array = NDArray[np.generic]

f32 = np.float32
SIXTH = np.array(0x3E2AAAAB, np.uint32).view(f32)


def square_sums(h: Array) -> NDArray[np.float32]:
    """Return [rows]: sums of squares, 16 neighbours in float32 in their order, then float64."""
    h = np.asarray(h, f32)
    squares = (h * h).reshape(len(h), h.shape[1] // 16, 2, 8)
    p = squares[:, :, 0] + squares[:, :, 1]
    even = (p[..., 0] + p[..., 4]) + (p[..., 2] + p[..., 6])
    odd = (p[..., 1] + p[..., 5]) + (p[..., 3] + p[..., 7])
    return (even + odd).astype(np.float64).sum(axis=1).astype(f32)


def norm(
    x: Array,
    residual: Array | None,
    weight: Array,
    eps: float,
    dtype: str,
    weight_first: bool = False,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return y and the rounded h of float32 arrays whose values ``dtype`` can hold."""
    with np.errstate(all="ignore"):
        h = x if residual is None else x + residual
        rounded = ref.round_to(h, dtype)
        mean = square_sums(h) / f32(x.shape[1])
        rstd = (f32(1) / np.sqrt(mean + f32(eps)))[:, None]
        if weight_first:
            y = ref.round_to(rounded * weight, dtype) * rstd
        else:
            y = (rounded * rstd) * weight
    assert y.dtype == rstd.dtype == f32
    return y, rounded


def encode(
    y: Array, block: int, scale_format: str, gs: float | None
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return codes [rows, hidden] and scale bytes [rows, hidden / block]; None: no factor."""
    blocks = np.abs(y.reshape(len(y), y.shape[1] // block, block))
    with np.errstate(all="ignore"):
        amax = np.fmax.reduce(blocks, axis=-1)  # ignores NaN
        factor = f32(1) if gs is None else f32(gs)
        s = (factor * amax) * SIXTH
        if scale_format == "e4m3":
            byte = ref.e4m3_encode(np.fmin(s, f32(448)))
            value = ref.e4m3_decode(byte).astype(f32)
            inverse = np.where(value == 0, f32(0), f32(1) / value)
        else:
            byte = ref.ue8m0_encode_ceil(s)
            byte = np.where(s <= 0, 0, np.where(np.isnan(s), 127, byte)).astype(np.uint8)
            power = np.ldexp(1.0, 127 - byte.astype(int)).astype(f32)
            inverse = np.where(byte == 0, f32(0), power)
        inverse = inverse * factor
        codes = ref.e2m1_encode(y * np.repeat(inverse, block, axis=-1))
    return codes, byte


def exact_mode(
    x: Array, block: int, scale_format: str, gs: float
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return codes and scale bytes of FlashInfer's exact quantiser; a NaN makes its block NaN."""
    blocks = x.reshape(len(x), x.shape[1] // block, block)
    with np.errstate(all="ignore"):
        amax = np.max(np.abs(blocks), axis=-1)
        if scale_format == "e4m3":
            byte = ref.e4m3_encode(amax * (f32(gs) * SIXTH))
            value = ref.e4m3_decode(byte).astype(f32)
            inverse = np.minimum(f32(1) / (value * (f32(1) / f32(gs))), np.finfo(f32).max)
            zero = amax == 0
        else:
            byte = ref.ue8m0_encode_ceil(amax * SIXTH)
            inverse = np.ldexp(1.0, 127 - byte.astype(int)).astype(f32)
            inverse = np.where(byte == 255, f32(np.nan), inverse)
            zero = byte == 0
        byte = np.where(amax == 0, 0, byte).astype(np.uint8)
        inverse = np.where(zero, f32(0), inverse)
        codes = ref.e2m1_encode(x * np.repeat(inverse, block, axis=-1))
    return codes, byte


def byte_mode(
    x: Array, block: int, scale_format: str, gs: Array | float
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return codes and scale bytes of E4M3 bytes [rows, cols] as FlashInfer takes them."""
    g = np.broadcast_to(np.asarray(gs, f32).reshape(-1, 1), (len(x), 1))
    with np.errstate(all="ignore"):
        a = (ref.e4m3_decode(x).astype(f32) * (f32(6) * (f32(1) / g))).astype(np.float16)
        a = a.astype(f32)
        amax = np.max(np.abs(a.reshape(len(a), a.shape[1] // block, block)), axis=-1)
        s = g * (amax * SIXTH)
        e4m3 = scale_format == "e4m3"
        byte = ref.e4m3_encode(s) if e4m3 else ref.ue8m0_encode_ceil(s)
        value = ref.e4m3_decode(byte).astype(f32)
        if not e4m3:
            value = np.where(byte == 255, np.nan, np.ldexp(1.0, byte.astype(int) - 127)).astype(f32)
        factor = np.where(byte == 0, f32(0), g * (f32(1) / value))
        codes = ref.e2m1_encode(a * np.repeat(factor, block, axis=-1))
    return codes, byte.astype(np.uint8)


def token_scales(x: Array, base: float) -> tuple[NDArray[np.float32], ...]:
    """Return per row: the factor of its values, what is stored, its largest magnitude (no NaN)."""
    with np.errstate(all="ignore"):
        top = np.fmax.reduce(np.abs(x), axis=-1, initial=f32(0))
        factor = np.minimum((f32(1) / f32(base)) / top, np.finfo(f32).max)
        factor = np.where(factor > 0, factor, f32(1))
        stored = np.where(top > 0, f32(1) / factor, f32(0))
    return factor, stored, top


def four_over_six(
    x: Array, gs: Array | float, search: str, span: float = 0.0, top: Array | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return codes and scale bytes of FlashInfer's search, in its exact mode; see the op.

    ``gs``: one number or one per row; ``top``: maxima of rows, for errors as "token" has them.
    """
    codes, byte = np.zeros(x.shape, np.uint8), np.zeros((len(x), x.shape[1] // 16), np.uint8)
    scales = np.broadcast_to(np.asarray(gs, f32), (len(x),))
    with np.errstate(all="ignore"):
        for r, row in enumerate(x.reshape(len(x), -1, 16)):
            g = scales[r]
            for b, values in enumerate(row):
                most = np.max(np.abs(values))
                if most == 0:
                    continue
                first = (most / f32(6)) * g
                tried = []
                for s in (first, first * f32(1.5)):
                    one = ref.e4m3_encode(s.reshape(1))
                    value = ref.e4m3_decode(one).astype(f32)[0]
                    factor = np.minimum(f32(1) / (value * (f32(1) / g)), np.finfo(f32).max)
                    own = ref.e2m1_encode(values * factor)
                    weighed = ref.e2m1_decode(own).astype(f32) * value
                    error = f32(0)
                    for w, v in zip(weighed, values, strict=True):
                        if search.endswith("_scaled"):
                            d = w - v * g
                        elif top is not None:
                            d = (w * top[r]) / f32(span) - v
                        else:
                            d = w * (f32(1) / g) - v
                        error = error + (d * d if search.startswith("mse") else abs(d))
                    tried.append((error, own, one[0]))
                _, codes[r, 16 * b : 16 * b + 16], byte[r, b] = tried[
                    int(tried[1][0] < tried[0][0])
                ]
    return codes, byte


def divide_mode(
    x: Array, block: int, scale_format: str, g: float
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return codes and scale bytes of `reference.quantize` for any size of blocks."""
    rows = len(x)
    fmt = "nvfp4" if scale_format == "e4m3" else "mxfp4"
    if block == ref.BLOCK[fmt]:
        return ref.quantize(x, fmt, g)
    # Blocks of 32 with E4M3 scales: both halves of a block are given its maximum.
    amax = np.max(np.abs(x.reshape(rows, x.shape[1] // block, block)), axis=-1)
    half = np.repeat(amax, block // ref.BLOCK[fmt], axis=-1)
    codes, byte = ref.quantize(x, fmt, g, half)
    return codes, byte[:, :: block // ref.BLOCK[fmt]]


def activation(
    name: str, gate: Array, up: Array, numbers: tuple[float, float, float] = (1.702, 1.0, 7.0)
) -> NDArray[np.float64]:
    """Return the gated activation of float32 arrays, in float64."""
    gate, up = np.asarray(gate, np.float64), np.asarray(up, np.float64)
    with np.errstate(all="ignore"):
        if name == "silu":
            return gate / (1 + np.exp(-gate)) * up
        if name == "gelu_tanh":
            inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
            return gate / (1 + np.exp(-2 * inner)) * up  # (1 + tanh) / 2, which would cancel
        alpha, beta, limit = numbers
        gate = np.minimum(gate, limit)
        return gate / (1 + np.exp(-alpha * gate)) * (np.clip(up, -limit, limit) + beta)


def swizzle_8x4(scale: Array) -> NDArray[np.uint8]:
    """Return scale bytes [rows, cols] in the 8x4 layout: the padded shape, padding zero."""
    scale = np.asarray(scale, dtype=np.uint8)
    rows, cols = scale.shape
    width = ref.ceil_to(cols, 4)
    out = np.zeros(ref.ceil_to(rows, 8) * width, np.uint8)
    for r in range(rows):
        for c in range(cols):
            out[(r // 8) * (width // 4) * 32 + (c // 4) * 32 + (r % 8) * 4 + c % 4] = scale[r, c]
    return out.reshape(-1, width)
