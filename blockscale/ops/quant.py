"""Torch functions on 4-bit block-scaled tensors: quantise, dequantise, lay scales out.

Each finds its kernel in a library loaded with `blockscale.load`, else builds it once and keeps it
on disk (`runtime.jit`).  Formats and rounding: `quant.quantize`, `.dequantize`,
`.swizzle`.  A call whose dtypes and options were seen before goes straight to its kernel, which
checks its arguments itself; what it refuses is checked again here.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from blockscale.base.formats import QUANTIZED
from blockscale.ops import checks, dispatch, torch_ops
from blockscale.ops.checks import SCALES, dtype_name, padded_shape
from blockscale.runtime import jit
from blockscale.specs import Dequantize, Quantize, Swizzle, Unswizzle

Tensor = torch.Tensor

LAYOUTS = ("linear", "128x4")
ROUNDINGS = ("ceil", "floor")

_REFUSED = (
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
)  # what the full checks find better words for
_BYTES = tuple(dict.fromkeys(dtype for pair in SCALES.values() for dtype in pair))


def quantize(
    x: Tensor,
    fmt: str = "nvfp4",
    global_scale: Tensor | None = None,
    scale_layout: str = "linear",
    block_amax: Tensor | None = None,
    scale_rounding: str = "ceil",
    *,
    packed: Tensor | None = None,
    block_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``(packed, block_scale)`` of ``x``.

    Args:
        x: [..., K] float32, bfloat16 or float16, contiguous, K a multiple of the block size.
        fmt: "nvfp4" (blocks of 16, E4M3 scales) or "mxfp4" (blocks of 32, E8M0 scales).
        global_scale: [1] float32 that divides x before it is quantised; None: 1.
        scale_layout: "linear", or "128x4", the padded layout of tcgen05 (padding is zero).
        block_amax: [blocks] float32 in place of each block's own maximum, e.g. from a sweep.
        scale_rounding: mxfp4 only: "ceil", or "floor", the rule of the OCP specification.
        packed, block_scale: outputs as below, or of another dtype with the same bytes; the latter
            also flat in the 128x4 layout; None: allocated.

    Returns:
        packed: [..., K / 2] uint8, the even element in the low nibble.
        block_scale: float8_e4m3fn (nvfp4) or uint8 (mxfp4); linear: [..., K / block]; 128x4:
            [ceil_to(rows, 128), ceil_to(K / block, 4)], leading dimensions flattened to rows.

    Raises:
        TypeError: an argument that is no tensor, or of another dtype.
        ValueError: an unknown option, shape, device or stride.
    """
    if dispatch.traced(x):
        made = torch_ops.operator("quantize")(
            x, fmt, global_scale, scale_layout, block_amax, scale_rounding
        )
        return torch_ops.copied(packed, made[0]), torch_ops.copied(block_scale, made[1])
    key = None
    try:
        cuda = x.is_cuda
        key = ("quantize", x.dtype, cuda, fmt, scale_layout, scale_rounding, block_amax is None)
        run = jit.recall(key)
        if run is not None and not (x.requires_grad and torch.is_grad_enabled()):
            codes, scale = _quantize_outputs(x, fmt, scale_layout, packed, block_scale)
            tail = (global_scale, codes, scale, *dispatch.launch_flags(cuda, None))
            if block_amax is None:
                run(x, *tail)
            else:
                run(x, block_amax, *tail)
            return codes, scale
    except _REFUSED:
        pass
    spec = _quantize_spec(x, fmt, scale_layout, block_amax, scale_rounding)
    codes, scale = _quantize_outputs(x, fmt, scale_layout, packed, block_scale)
    _check_quantize(spec, x, global_scale, block_amax, codes, scale)
    function = dispatch.kernel(spec, x.device)
    function(*_as_rows(spec, x, global_scale, block_amax, codes, scale))
    if key is not None:
        jit.remember(key, dispatch.direct(function))
    return codes, scale


def _as_rows(
    spec: Quantize,
    x: Tensor,
    global_scale: Tensor | None,
    block_amax: Tensor | None,
    packed: Tensor,
    block_scale: Tensor,
) -> tuple[Tensor | None, ...]:
    """Return the arguments of the kernel, with the dimensions that it has."""
    *lead, cols = x.shape
    rows, blocks = prod(lead), cols // spec.block
    shape = (rows, blocks) if spec.layout == "linear" else padded_shape(rows, blocks)
    return (
        x.view(rows, cols),
        *(() if block_amax is None else (block_amax.view(rows * blocks),)),
        None if global_scale is None else global_scale.reshape(1),
        packed.view(rows, cols // 2),
        block_scale.view(shape),
    )


def _quantize_spec(
    x: Tensor, fmt: str, scale_layout: str, block_amax: Tensor | None, scale_rounding: str
) -> Quantize:
    where = "quantize"
    checks.choice(where, "fmt", fmt, tuple(QUANTIZED))
    checks.choice(where, "scale_layout", scale_layout, LAYOUTS)
    checks.choice(where, "scale_rounding", scale_rounding, ROUNDINGS)
    checks.tensor(where, "x", x, checks.ACTIVATIONS)
    checks.block_multiple(where, "x", x.shape[-1], fmt)
    given = block_amax is not None
    return Quantize(fmt, dtype_name(x.dtype), scale_layout, given, scale_rounding)


def _quantize_outputs(
    x: Tensor, fmt: str, scale_layout: str, packed: Tensor | None, block_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    if packed is not None and block_scale is not None:
        return packed, block_scale
    *lead, cols = x.shape
    if packed is None:
        packed = torch.empty((*lead, cols // 2), dtype=torch.uint8, device=x.device)
    if block_scale is None:
        shape: tuple[int, ...] = (*lead, cols // QUANTIZED[fmt].block)
        if scale_layout != "linear":
            shape = padded_shape(prod(lead), shape[-1])
        block_scale = torch.empty(shape, dtype=SCALES[fmt][0], device=x.device)
    return packed, block_scale


def _check_quantize(
    spec: Quantize,
    x: Tensor,
    global_scale: Tensor | None,
    block_amax: Tensor | None,
    packed: Tensor,
    block_scale: Tensor,
) -> None:
    """Check all tensors but ``x``, outputs included."""
    where, lead, blocks = "quantize", x.shape[:-1], x.shape[-1] // spec.block
    checks.one_element(where, "global_scale", global_scale, "x", x)
    if block_amax is not None:
        checks.tensor(where, "block_amax", block_amax, (torch.float32,), dims=0)
        checks.same_device(where, "block_amax", block_amax, "x", x)
        if block_amax.numel() != prod(lead) * blocks:
            raise ValueError(
                f"{where}: block_amax has {block_amax.numel()} elements, but x has "
                f"{prod(lead) * blocks} blocks; pass one maximum per block"
            )
    checks.like(where, "packed", packed, checks.PACKED, "x", x, (*lead, x.shape[-1] // 2))
    padded = padded_shape(prod(lead), blocks)
    shapes = [(*lead, blocks)] if spec.layout == "linear" else [padded, (prod(padded),)]
    checks.like(where, "block_scale", block_scale, SCALES[spec.fmt], "x", x, *shapes)


def dequantize(
    packed: Tensor,
    block_scale: Tensor,
    fmt: str = "nvfp4",
    global_scale: Tensor | None = None,
    scale_layout: str = "linear",
    dtype: torch.dtype = torch.bfloat16,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``code * (block_scale * global_scale)`` [..., K], rounded once to ``dtype``.

    Args:
        packed: [..., K / 2] uint8 or float4_e2m1fn_x2.
        block_scale: as `quantize` returns it; uint8 bytes are accepted for both formats.
        fmt: "nvfp4" or "mxfp4".
        global_scale: [1] float32; None: 1.
        scale_layout: "linear" or "128x4".
        dtype: bfloat16, float16 or float32.
        out: output, [..., K] of ``dtype``; None: allocated.

    Raises:
        TypeError: an argument that is no tensor, or of another dtype.
        ValueError: an unknown option, shape, device or stride.
    """
    if dispatch.traced(packed):
        made = torch_ops.operator("dequantize")(
            packed, block_scale, fmt, global_scale, scale_layout, dtype
        )
        return torch_ops.copied(out, made)
    key = None
    try:
        cuda = packed.is_cuda
        key = ("dequantize", packed.dtype, block_scale.dtype, cuda, fmt, scale_layout, dtype)
        run = jit.recall(key)
        if run is not None:
            y = _dequantize_output(packed, dtype) if out is None else out
            run(packed, block_scale, global_scale, y, *dispatch.launch_flags(cuda, None))
            return y
    except _REFUSED:
        pass
    spec, scale = _check_dequantize(packed, block_scale, fmt, global_scale, scale_layout, dtype)
    y = _dequantize_output(packed, dtype) if out is None else out
    *lead, half = packed.shape
    checks.like("dequantize", "out", y, (dtype,), "packed", packed, (*lead, 2 * half))
    rows = prod(lead)
    g = None if global_scale is None else global_scale.reshape(1)
    function = dispatch.kernel(spec, packed.device)
    function(packed.view(torch.uint8).view(rows, half), scale, g, y.view(rows, 2 * half))
    if key is not None:
        jit.remember(key, dispatch.direct(function))
    return y


def _check_dequantize(
    packed: Tensor,
    block_scale: Tensor,
    fmt: str,
    global_scale: Tensor | None,
    scale_layout: str,
    dtype: torch.dtype,
) -> tuple[Dequantize, Tensor]:
    """Return the spec, and the scales as bytes [rows, blocks] or padded."""
    where = "dequantize"
    checks.choice(where, "fmt", fmt, tuple(QUANTIZED))
    checks.choice(where, "scale_layout", scale_layout, LAYOUTS)
    if dtype not in checks.ACTIVATIONS:
        allowed = ", ".join(dtype_name(known) for known in checks.ACTIVATIONS)
        raise TypeError(f"{where}: dtype={dtype} cannot be produced; choose one of {allowed}")
    *lead, half = checks.tensor(where, "packed", packed, checks.PACKED).shape
    checks.block_multiple(where, "packed", 2 * half, fmt)
    checks.one_element(where, "global_scale", global_scale, "packed", packed)
    blocks = 2 * half // QUANTIZED[fmt].block
    scale = checks.scales(where, block_scale, lead, blocks, fmt, scale_layout)
    checks.same_device(where, "block_scale", scale, "packed", packed)
    return Dequantize(fmt, dtype_name(dtype), scale_layout), scale


def _dequantize_output(packed: Tensor, dtype: torch.dtype) -> Tensor:
    *lead, half = packed.shape
    return torch.empty((*lead, 2 * half), dtype=dtype, device=packed.device)


def swizzle_scales(block_scale: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return scales in the 128x4 layout [ceil_to(rows, 128), ceil_to(cols, 4)], padding zero.

    Args:
        block_scale: [..., cols], one byte each (uint8, float8_e4m3fn, float8_e8m0fnu); leading
            dimensions are flattened to rows.  The dtype is kept.
        out: output, of any of these dtypes; None: allocated.

    Raises:
        TypeError: another dtype.
        ValueError: shape, device or stride.
    """
    if dispatch.traced(block_scale):
        return torch_ops.copied(out, torch_ops.operator("swizzle_scales")(block_scale))
    key = None
    try:
        cuda = block_scale.is_cuda
        key = ("swizzle_scales", cuda, block_scale.dim() > 1)
        run = jit.recall(key)
        if run is not None:
            made = _swizzled(block_scale) if out is None else out
            run(block_scale, made, *dispatch.launch_flags(cuda, None))
            return made
    except _REFUSED:
        pass
    where = "swizzle_scales"
    scale = checks.tensor(where, "block_scale", block_scale, _BYTES, dims=2)
    *lead, cols = scale.shape
    rows = prod(lead)
    padded = padded_shape(rows, cols)
    made = _swizzled(scale) if out is None else out
    checks.like(where, "out", made, _BYTES, "block_scale", scale, padded, (prod(padded),))
    function = dispatch.kernel(Swizzle(), scale.device)
    as_bytes = scale.view(torch.uint8).view(rows, cols)
    function(as_bytes, made.view(torch.uint8).view(padded))
    if key is not None:
        jit.remember(key, dispatch.direct(function))
    return made


def _swizzled(block_scale: Tensor) -> Tensor:
    *lead, cols = block_scale.shape
    shape = padded_shape(prod(lead), cols)
    return torch.empty(shape, dtype=block_scale.dtype, device=block_scale.device)


def unswizzle_scales(
    swizzled: Tensor, rows: int, cols: int, *, out: Tensor | None = None
) -> Tensor:
    """Return scales [rows, cols] from the 128x4 layout; the dtype is kept.

    Args:
        swizzled: [ceil_to(rows, 128), ceil_to(cols, 4)], or the same bytes flat.
        rows: rows without padding.
        cols: columns without padding.
        out: output [rows, cols], of any dtype that scales have; None: allocated.

    Raises:
        TypeError: another dtype.
        ValueError: sizes that do not fit, device or stride.
    """
    if dispatch.traced(swizzled):
        return torch_ops.copied(out, torch_ops.operator("unswizzle_scales")(swizzled, rows, cols))
    where = "unswizzle_scales"
    made = _unswizzled(swizzled, rows, cols, out)
    scale = swizzled.view(torch.uint8).view(padded_shape(rows, cols))
    checks.like(where, "out", made, _BYTES, "swizzled", swizzled, (rows, cols))
    dispatch.kernel(Unswizzle(), swizzled.device)(scale, made.view(torch.uint8).view(rows, cols))
    return made


def _unswizzled(swizzled: Tensor, rows: int, cols: int, out: Tensor | None = None) -> Tensor:
    """Return where the scales go, after the checks of the sizes."""
    where = "unswizzle_scales"
    checks.tensor(where, "swizzled", swizzled, _BYTES)
    for name, size in (("rows", rows), ("cols", cols)):
        if not isinstance(size, (int, torch.SymInt)) or size < 0:
            raise ValueError(f"{where}: {name}={size!r} is not a size; pass the unpadded {name}")
    padded = padded_shape(rows, cols)
    if list(swizzled.shape) not in (list(padded), [padded[0] * padded[1]]):
        raise ValueError(
            f"{where}: the scales have shape {list(swizzled.shape)}, but rows={rows} and "
            f"cols={cols} need {list(padded)}; pass the sizes that were swizzled"
        )
    if out is not None:
        return out
    return torch.empty((rows, cols), dtype=swizzled.dtype, device=swizzled.device)


def _quantize_op(
    x: Tensor,
    fmt: str = "nvfp4",
    global_scale: Tensor | None = None,
    scale_layout: str = "linear",
    block_amax: Tensor | None = None,
    scale_rounding: str = "ceil",
) -> tuple[Tensor, Tensor]:
    return quantize(x, fmt, global_scale, scale_layout, block_amax, scale_rounding)


def _fake_quantize(
    x: Tensor,
    fmt: str,
    global_scale: Tensor | None,
    scale_layout: str,
    block_amax: Tensor | None,
    scale_rounding: str,
) -> tuple[Tensor, Tensor]:
    spec = _quantize_spec(x, fmt, scale_layout, block_amax, scale_rounding)
    packed, scale = _quantize_outputs(x, fmt, scale_layout, None, None)
    _check_quantize(spec, x, global_scale, block_amax, packed, scale)
    return packed, scale


def _dequantize_op(
    packed: Tensor,
    block_scale: Tensor,
    fmt: str = "nvfp4",
    global_scale: Tensor | None = None,
    scale_layout: str = "linear",
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    return dequantize(packed, block_scale, fmt, global_scale, scale_layout, dtype)


def _fake_dequantize(packed: Tensor, *given: Any) -> Tensor:
    _check_dequantize(packed, *given)
    return _dequantize_output(packed, given[-1])


def _swizzle_op(block_scale: Tensor) -> Tensor:
    return swizzle_scales(block_scale)


def _fake_swizzle(block_scale: Tensor) -> Tensor:
    return _swizzled(checks.tensor("swizzle_scales", "block_scale", block_scale, _BYTES, dims=2))


def _unswizzle_op(swizzled: Tensor, rows: int, cols: int) -> Tensor:
    return unswizzle_scales(swizzled, rows, cols)


torch_ops.define("quantize", _quantize_op, _fake_quantize)
torch_ops.define("dequantize", _dequantize_op, _fake_dequantize)
torch_ops.define("swizzle_scales", _swizzle_op, _fake_swizzle)
torch_ops.define("unswizzle_scales", _unswizzle_op, _unswizzled)
