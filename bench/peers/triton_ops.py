"""Hand-written Triton kernels of the same ops: what `bench.gpu` times ours against.

They are exact but for the order of the sum of squares and for `exp`; ``enable_fp_fusion=False``
keeps products and sums apart.  Codes are packed eight to an int32 word; scale bytes are made by
integer arithmetic, as in `bench.reference`.  With TRITON_INTERPRET=1 they run on a CPU.
"""
# Triton evaluates the annotations of kernels and knows no type but constexpr:
# ruff: noqa: ANN001, ANN202
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Callable

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

Run = Callable[..., None]
"""Launches a kernel on given inputs and outputs."""

EXACT = {"enable_fp_fusion": False}


@triton.jit
def _codes(q):
    """Codes of float32 q: see `reference.e2m1_codes`."""
    bits = q.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x1FFFFF + ((magnitude >> 22) & 1)) >> 22) - 252
    small = (magnitude.to(tl.float32, bitcast=True) + 4194304.0).to(tl.int32, bitcast=True)
    code = tl.where(magnitude < 0x3F800000, small - 0x4A800000, normal)
    return tl.minimum(code, 7) | ((bits >> 28) & 8)


@triton.jit
def _words(codes, BLOCKS: tl.constexpr):
    """Words [BLOCKS * 2] of codes [BLOCKS, 16]: disjoint bits, so that their sum joins them."""
    places = 4 * tl.arange(0, 8)
    return tl.sum(tl.reshape(codes, (BLOCKS * 2, 8)) << places[None, :], axis=1)


@triton.jit
def _e4m3(s):
    bits = s.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    small = (s + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(bits < 0x3C800000, small, normal)


@triton.jit
def _e4m3_value(byte):
    return (byte << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def _store(y, gs, words, scales, first, count, N: tl.constexpr):
    """Quantise y [N, 16] as the fused ops do; blocks from ``first`` on, below ``count``."""
    s = (gs * tl.max(tl.abs(y), axis=1)) * 0.16666667163372040
    byte = _e4m3(tl.minimum(s, 448.0))
    inverse = tl.where(byte == 0, 0.0, tl.div_rn(1.0, _e4m3_value(byte))) * gs
    block = first + tl.arange(0, N)
    tl.store(scales + block, byte.to(tl.uint8), mask=block < count)
    word = 2 * first + tl.arange(0, 2 * N)
    packed = _words(_codes(y * inverse[:, None]), N)
    tl.store(words + word, packed, mask=word < 2 * count)


@triton.jit
def _divide(values, g, words, scales, first, count, N: tl.constexpr):
    """Quantise [N, 16] by divisions, as `quantize` does; blocks from ``first`` on."""
    s = tl.div_rn(tl.max(tl.abs(values), axis=1), tl.zeros((N,), tl.float32) + 6.0 * g)
    byte = _e4m3(tl.minimum(s, 448.0))
    divisor = _e4m3_value(byte) * g
    divisor = tl.where(divisor == 0, float("inf"), divisor)
    q = tl.div_rn(values, tl.broadcast_to(divisor[:, None], (N, 16)))
    block = first + tl.arange(0, N)
    tl.store(scales + block, byte.to(tl.uint8), mask=block < count)
    word = 2 * first + tl.arange(0, 2 * N)
    tl.store(words + word, _words(_codes(q), N), mask=word < 2 * count)


@triton.jit
def _norm_kernel(
    x,
    residual,
    weight,
    global_scale,
    words,
    scales,
    eps,
    BLOCKS: tl.constexpr,
    N: tl.constexpr,
):
    """One program a row of BLOCKS blocks, N the next power of two."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, N)
    at = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = (block < BLOCKS)[:, None]
    start = row * BLOCKS * 16
    h = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32)
    h += tl.load(residual + start + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    h16 = h.to(x.dtype.element_ty)
    tl.store(residual + start + at, h16, mask=inside)
    mean = tl.div_rn(tl.sum(tl.sum(h * h, axis=1), axis=0), BLOCKS * 16.0)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    y = (h16.to(tl.float32) * rstd) * w
    gs = tl.div_rn(1.0, tl.load(global_scale))
    _store(y, gs, words + row * BLOCKS * 2, scales + row * BLOCKS, 0, BLOCKS, N)


@triton.jit
def _silu_kernel(x, global_scale, words, scales, blocks, N: tl.constexpr):
    """N blocks of one row a program; a row is ``blocks`` blocks of gate, then as many of up."""
    row, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * N
    block = first + tl.arange(0, N)
    at = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = (block < blocks)[:, None]
    start = x + row * blocks * 32
    gate = tl.load(start + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + blocks * 16 + at, mask=inside, other=0.0).to(tl.float32)
    a = tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up
    a = a.to(x.dtype.element_ty).to(tl.float32)
    row_words, row_scales = words + row * blocks * 2, scales + row * blocks
    _divide(a, tl.load(global_scale), row_words, row_scales, first, blocks, N)


@triton.jit
def _quantize_kernel(x, global_scale, words, scales, blocks, N: tl.constexpr):
    """N blocks of the flat tensor a program."""
    first = tl.program_id(0).to(tl.int64) * N
    block = first + tl.arange(0, N)
    at = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    values = tl.load(x + at, mask=(block < blocks)[:, None], other=0.0).to(tl.float32)
    _divide(values, tl.load(global_scale), words, scales, first, blocks, N)


@triton.jit
def _dequantize_kernel(words, scales, global_scale, out, count, N: tl.constexpr):
    """N words, of 8 codes each, a program."""
    word = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    inside = word < count
    packed = tl.load(words + word, mask=inside, other=0)
    byte = tl.load(scales + word // 2, mask=inside, other=0).to(tl.int32)
    step = _e4m3_value(byte) * tl.load(global_scale)
    element = tl.arange(0, 8)[None, :]
    code = packed[:, None] >> (4 * element)
    magnitude = ((code & 7) << 22) | ((code & 8) << 28)
    value = magnitude.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    value = (value * step[:, None]).to(out.dtype.element_ty)
    tl.store(out + word[:, None] * 8 + element, value, mask=inside[:, None])


@triton.jit
def _swizzle_kernel(words, out, cols, N: tl.constexpr):
    """128 rows of N words a program: word (r, c) goes to tile c, place 4 * (r % 32) + r // 32."""
    band, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * N
    col = first + tl.arange(0, N)
    row = band * 128 + tl.arange(0, 128)
    mask = (col < cols)[None, :]
    tile = tl.load(words + row[:, None] * cols + col[None, :], mask=mask, other=0)
    tile = tl.permute(tl.reshape(tile, (4, 32, N)), (2, 1, 0))
    place = (band * cols + first) * 128 + tl.arange(0, 128 * N)
    tl.store(out + place, tl.reshape(tile, (128 * N,)), mask=place < (band + 1) * cols * 128)


def _words_of(packed: Tensor) -> Tensor:
    return packed.view(torch.int32)


def add_rmsnorm(num_warps: int) -> Run:
    """Return the fused norm: x, residual (updated), weight, global_scale, packed, scales."""

    def run(x: Tensor, residual: Tensor, w: Tensor, g: Tensor, packed: Tensor, s: Tensor) -> None:
        blocks = x.shape[1] // 16
        given = (x, residual, w, g, _words_of(packed), s, 1e-6)
        sizes = {"BLOCKS": blocks, "N": triton.next_power_of_2(blocks)}
        _norm_kernel[(x.shape[0],)](*given, **sizes, num_warps=num_warps, **EXACT)

    return run


def silu_and_mul(blocks: int, num_warps: int) -> Run:
    """Return silu(gate) * up, quantised: x, global_scale, packed, scales."""

    def run(x: Tensor, g: Tensor, packed: Tensor, s: Tensor) -> None:
        grid = (triton.cdiv(s.shape[1], blocks), x.shape[0])
        given = (x, g, _words_of(packed), s, s.shape[1])
        _silu_kernel[grid](*given, N=blocks, num_warps=num_warps, **EXACT)

    return run


def quantize(blocks: int, num_warps: int) -> Run:
    """Return NVFP4 quantise, linear scales: x, global_scale, packed, scales."""

    def run(x: Tensor, g: Tensor, packed: Tensor, s: Tensor) -> None:
        given = (x, g, _words_of(packed), s, s.numel())
        grid = (triton.cdiv(s.numel(), blocks),)
        _quantize_kernel[grid](*given, N=blocks, num_warps=num_warps, **EXACT)

    return run


def dequantize(words: int, num_warps: int) -> Run:
    """Return NVFP4 dequantise, linear scales: packed, scales, global_scale, out."""

    def run(packed: Tensor, s: Tensor, g: Tensor, out: Tensor) -> None:
        count = packed.numel() // 4
        given = (_words_of(packed), s, g, out, count)
        _dequantize_kernel[(triton.cdiv(count, words),)](*given, N=words, num_warps=num_warps)

    return run


def swizzle(words: int, num_warps: int) -> Run:
    """Return the 128x4 layout of scales [R, C], multiples of 128 and 4: scales, out."""

    def run(scale: Tensor, out: Tensor) -> None:
        cols = scale.shape[1] // 4
        grid = (triton.cdiv(cols, words), scale.shape[0] // 128)
        _swizzle_kernel[grid](_words_of(scale), _words_of(out), cols, N=words, num_warps=num_warps)

    return run
