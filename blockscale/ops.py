"""Torch functions on 4-bit block-scaled tensors.

Each finds its kernel in a library loaded with `blockscale.load`, else builds it once and keeps it
on disk (`blockscale.jit`).  Formats and rounding: `blockscale.tir.quantize`, `.dequantize`,
`.linear`, `.scale_sweep`.
"""

from __future__ import annotations

from contextlib import suppress
from math import prod

import torch

from blockscale import checks, jit
from blockscale.function import Function
from blockscale.specs import (
    BLOCK_SIZE,
    Dequantize,
    Linear,
    Quantize,
    ScaleSweep,
    Swizzle,
    Unswizzle,
)

LAYOUTS = ("linear", "128x4")
FORMATS = tuple(BLOCK_SIZE)
ROUNDINGS = ("ceil", "floor")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def quantize(
    x: torch.Tensor,
    fmt: str = "nvfp4",
    global_scale: torch.Tensor | None = None,
    scale_layout: str = "linear",
    block_amax: torch.Tensor | None = None,
    scale_rounding: str = "ceil",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(packed, block_scale)`` of ``x``.

    Args:
        x: [..., K] float32, bfloat16 or float16, contiguous, K a multiple of the block size.
        fmt: "nvfp4" (blocks of 16, E4M3 scales) or "mxfp4" (blocks of 32, E8M0 scales).
        global_scale: [1] float32 that divides x before it is quantised; None: 1.
        scale_layout: "linear", or "128x4", the padded layout of tcgen05 (padding is zero).
        block_amax: [blocks] float32 in place of each block's own maximum, e.g. from a sweep.
        scale_rounding: mxfp4 only: "ceil", or "floor", the rule of the OCP specification.

    Returns:
        packed: [..., K / 2] uint8, the even element in the low nibble.
        block_scale: float8_e4m3fn (nvfp4) or uint8 (mxfp4); linear: [..., K / block]; 128x4:
            [ceil_to(rows, 128), ceil_to(K / block, 4)], leading dimensions flattened to rows.

    Raises:
        TypeError: an argument that is no tensor, or of another dtype.
        ValueError: an unknown option, shape, device or stride.
    """
    where = "quantize"
    checks.choice(where, "fmt", fmt, FORMATS)
    checks.choice(where, "scale_layout", scale_layout, LAYOUTS)
    checks.choice(where, "scale_rounding", scale_rounding, ROUNDINGS)
    checks.tensor(where, "x", x, checks.ACTIVATIONS)
    *lead, cols = x.shape
    checks.block_multiple(where, "x", cols, fmt)
    g = checks.one_element(where, "global_scale", global_scale)
    given = block_amax is not None
    spec = Quantize(fmt, _dtype_name(x.dtype), scale_layout, given, scale_rounding)
    blocks = cols // spec.block
    rows = prod(lead)
    packed = torch.empty((*lead, cols // 2), dtype=torch.uint8, device="cpu")
    shape = (*lead, blocks) if scale_layout == "linear" else checks.padded_shape(rows, blocks)
    scale = torch.empty(shape, dtype=torch.uint8, device="cpu")
    arguments = [x.reshape(rows, cols)]
    if block_amax is not None:
        arguments.append(_checked_amax(where, block_amax, rows * blocks))
    flat = scale.reshape(rows, blocks) if scale_layout == "linear" else scale
    jit.function(spec)(*arguments, g, packed.reshape(rows, cols // 2), flat)
    return packed, scale.view(checks.SCALES[fmt][0])


def _checked_amax(where: str, block_amax: torch.Tensor, blocks: int) -> torch.Tensor:
    checks.tensor(where, "block_amax", block_amax, (torch.float32,), dims=0)
    if block_amax.numel() != blocks:
        raise ValueError(
            f"{where}: block_amax has {block_amax.numel()} elements, but x has {blocks} blocks; "
            "pass one maximum per block"
        )
    return block_amax.reshape(blocks)


def dequantize(
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    fmt: str = "nvfp4",
    global_scale: torch.Tensor | None = None,
    scale_layout: str = "linear",
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Return ``code * (block_scale * global_scale)`` [..., K], rounded once to ``dtype``.

    Args:
        packed: [..., K / 2] uint8 or float4_e2m1fn_x2.
        block_scale: as `quantize` returns it; uint8 bytes are accepted for both formats.
        fmt: "nvfp4" or "mxfp4".
        global_scale: [1] float32; None: 1.
        scale_layout: "linear" or "128x4".
        dtype: bfloat16, float16 or float32.

    Raises:
        TypeError: an argument that is no tensor, or of another dtype.
        ValueError: an unknown option, shape, device or stride.
    """
    where = "dequantize"
    checks.choice(where, "fmt", fmt, FORMATS)
    checks.choice(where, "scale_layout", scale_layout, LAYOUTS)
    if dtype not in checks.ACTIVATIONS:
        allowed = ", ".join(_dtype_name(known) for known in checks.ACTIVATIONS)
        raise TypeError(f"{where}: dtype={dtype} cannot be produced; choose one of {allowed}")
    codes = checks.tensor(where, "packed", packed, checks.PACKED).view(torch.uint8)
    *lead, half = codes.shape
    cols = 2 * half
    checks.block_multiple(where, "packed", cols, fmt)
    g = checks.one_element(where, "global_scale", global_scale)
    spec = Dequantize(fmt, _dtype_name(dtype), scale_layout)
    scale = checks.scales(where, block_scale, lead, cols // spec.block, fmt, scale_layout)
    rows = prod(lead)
    out = torch.empty((*lead, cols), dtype=dtype, device="cpu")
    jit.function(spec)(codes.reshape(rows, half), scale, g, out.reshape(rows, cols))
    return out


_BYTES = tuple(dict.fromkeys(dtype for pair in checks.SCALES.values() for dtype in pair))


def swizzle_scales(block_scale: torch.Tensor) -> torch.Tensor:
    """Return scales in the 128x4 layout [ceil_to(rows, 128), ceil_to(cols, 4)], padding zero.

    Args:
        block_scale: [..., cols], one byte each (uint8, float8_e4m3fn, float8_e8m0fnu); leading
            dimensions are flattened to rows.  The dtype is kept.

    Raises:
        TypeError: another dtype.
        ValueError: shape, device or stride.
    """
    where = "swizzle_scales"
    scale = checks.tensor(where, "block_scale", block_scale, _BYTES, dims=2).view(torch.uint8)
    *lead, cols = scale.shape
    rows = prod(lead)
    out = torch.empty(checks.padded_shape(rows, cols), dtype=torch.uint8, device="cpu")
    jit.function(Swizzle())(scale.reshape(rows, cols), out)
    return out.view(block_scale.dtype)


def unswizzle_scales(swizzled: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Return scales [rows, cols] from the 128x4 layout; the dtype is kept.

    Args:
        swizzled: [ceil_to(rows, 128), ceil_to(cols, 4)], or the same bytes flat.
        rows: rows without padding.
        cols: columns without padding.

    Raises:
        TypeError: another dtype.
        ValueError: sizes that do not fit, device or stride.
    """
    where = "unswizzle_scales"
    scale = checks.tensor(where, "swizzled", swizzled, _BYTES).view(torch.uint8)
    for name, size in (("rows", rows), ("cols", cols)):
        if not isinstance(size, int) or size < 0:
            raise ValueError(f"{where}: {name}={size!r} is not a size; pass the unpadded {name}")
    padded = checks.padded_shape(rows, cols)
    if list(swizzled.shape) not in (list(padded), [padded[0] * padded[1]]):
        raise ValueError(
            f"{where}: the scales have shape {list(swizzled.shape)}, but rows={rows} and "
            f"cols={cols} need {list(padded)}; pass the sizes that were swizzled"
        )
    out = torch.empty((rows, cols), dtype=torch.uint8, device="cpu")
    jit.function(Unswizzle())(scale.reshape(padded), out)
    return out.view(swizzled.dtype)


def fp8_scale_candidates(device: str | torch.device = "cpu") -> torch.Tensor:
    """Return the candidate scales [126] float32: positive finite E4M3 values / 448, ascending."""
    values = torch.arange(1, 127, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()
    return (values / 448.0).to(device)


def nvfp4_fp8_scale_sweep(
    x: torch.Tensor,
    global_amax: torch.Tensor,
    block_size: int = 16,
    candidates: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return for each block the amax (float32 [n_blocks]) whose scale has the least squared error.

    Pass it to `quantize` as ``block_amax``, with ``global_scale = global_amax / (448 * 6)``.

    Args:
        x: any shape, float32, bfloat16 or float16, contiguous; blocks are consecutive elements.
        global_amax: one element, any float dtype.
        block_size: elements per block; the number of elements must be a multiple of it.
        candidates: [count] float32, tried in order, the first best wins; None:
            `fp8_scale_candidates`.

    Raises:
        TypeError: an argument that is no tensor, or of another dtype.
        ValueError: block_size, shape, device or stride.
    """
    where = "nvfp4_fp8_scale_sweep"
    checks.tensor(where, "x", x, checks.ACTIVATIONS, dims=0)
    if not isinstance(block_size, int) or block_size < 1:
        raise ValueError(
            f"{where}: block_size={block_size!r} is not a positive integer; NVFP4 uses 16"
        )
    block_size = int(block_size)
    if x.numel() % block_size:
        raise ValueError(
            f"{where}: x has {x.numel()} elements, which is not divisible by "
            f"block_size={block_size}; pad the rows, or choose another block_size"
        )
    floats = (*checks.ACTIVATIONS, torch.float64)
    amax = checks.tensor(where, "global_amax", global_amax, floats, dims=0)
    g = checks.one_element(where, "global_amax", amax.detach().to(torch.float32))
    if candidates is None:
        candidates = fp8_scale_candidates()
    checks.tensor(where, "candidates", candidates, (torch.float32,), dims=0)
    if candidates.dim() != 1 or not candidates.numel():
        raise ValueError(
            f"{where}: candidates has shape {list(candidates.shape)}, but must be a vector of at "
            "least one scale; see fp8_scale_candidates()"
        )
    blocks = x.numel() // block_size
    best = torch.empty(blocks, dtype=torch.float32, device="cpu")
    kernel = jit.function(ScaleSweep(_dtype_name(x.dtype), block_size))
    kernel(x.reshape(blocks, block_size), g, candidates, best)
    return best


def linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    fmt: str = "nvfp4",
    global_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``x @ w.T + bias`` [..., N] in the dtype of x, w the dequantised weight [N, K].

    The sum is accumulated in float32; global scale and bias are applied to it before the one
    rounding.

    Args:
        x: [..., K] float32, bfloat16 or float16.
        packed: [N, K / 2] uint8 or float4_e2m1fn_x2.
        block_scale: [N, K / block], linear layout.
        fmt: "nvfp4" or "mxfp4".
        global_scale: [1] float32; None: 1.
        bias: [N] float32, bfloat16 or float16; None: 0.

    Raises:
        TypeError: an argument that is no tensor, or of another dtype.
        ValueError: an unknown format, shape, device or stride.
    """
    known = _known_linear(x, packed, block_scale, fmt, global_scale, bias)
    if known is not None:
        with suppress(TypeError, ValueError):  # the full checks below say it in our words
            return known(x, packed, block_scale, global_scale, bias)
    where = "linear"
    checks.choice(where, "fmt", fmt, FORMATS)
    checks.tensor(where, "x", x, checks.ACTIVATIONS)
    codes = checks.tensor(where, "packed", packed, checks.PACKED, dims=2).view(torch.uint8)
    if codes.dim() != 2:
        raise ValueError(
            f"{where}: packed has shape {list(packed.shape)}, but a weight has 2 dimensions, "
            "[N, K / 2]"
        )
    n, k = codes.shape[0], 2 * codes.shape[1]
    if x.shape[-1] != k:
        raise ValueError(
            f"{where}: x has {x.shape[-1]} columns, but packed of shape {list(packed.shape)} holds "
            f"rows of {k}; pass activations with {k} features"
        )
    checks.block_multiple(where, "packed", k, fmt)
    scale = checks.scales(where, block_scale, [n], k // BLOCK_SIZE[fmt], fmt, "linear")
    g = checks.one_element(where, "global_scale", global_scale)
    if bias is not None:
        checks.tensor(where, "bias", bias, checks.ACTIVATIONS)
        if list(bias.shape) != [n]:
            raise ValueError(
                f"{where}: bias has shape {list(bias.shape)}, but must have [{n}], "
                "one per row of packed"
            )
        bias = bias.float()
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device="cpu")
    kernel = jit.function(Linear(n, k, fmt, _dtype_name(x.dtype)))
    kernel(x.reshape(-1, k), codes, scale, g, bias, out.reshape(-1, n))
    jit.remember(_linear_key(x, packed, block_scale, fmt), kernel)
    return out


def _linear_key(
    x: torch.Tensor, packed: torch.Tensor, block_scale: torch.Tensor, fmt: str
) -> tuple[object, ...]:
    scale = block_scale
    return fmt, x.dtype, packed.shape, packed.dtype, scale.shape, scale.dtype


def _known_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    fmt: str,
    global_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> Function | None:
    """Return the kernel if such a weight was checked before and the arguments are as it takes them.

    The kernel checks its arguments itself; this spares a call of a few microseconds the rest.
    """
    try:
        known = jit.recall(_linear_key(x, packed, block_scale, fmt))
        fits = (
            known is not None
            and x.dim() == 2
            and (global_scale is None or global_scale.dim() == 1)
            and (bias is None or bias.dtype == torch.float32)
        )
    except (AttributeError, TypeError):  # not tensors: the full checks name the argument
        return None
    return known if fits else None
