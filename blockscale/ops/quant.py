"""Torch functions on 4-bit block-scaled tensors: quantise, dequantise, lay scales out, choose them.

Each finds its kernel in a library loaded with `blockscale.load`, else builds it once and keeps it
on disk (`runtime.jit`).  Formats and rounding: `quant.quantize`, `.dequantize`,
`.swizzle`, `.scale_sweep`; how calls go: `ops.call`.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import torch

from blockscale.base.formats import QUANTIZED
from blockscale.ops import call, checks
from blockscale.ops.call import Checked
from blockscale.ops.checks import SCALE_BYTES, SCALES, dtype_name, padded_shape
from blockscale.specs import Dequantize, Quantize, ScaleSweep, Swizzle, Unswizzle
from blockscale.specs.quant import check_rounding

Tensor = torch.Tensor

LAYOUTS = ("linear", "128x4")
ROUNDINGS = ("ceil", "floor")


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
    options = fmt, scale_layout, scale_rounding, block_amax is None
    return _QUANTIZE.run(options, (x, global_scale, block_amax, packed, block_scale))


class _Quantize(call.Op[tuple[Tensor, Tensor]]):
    def recorded(self, options: Any, given: Any) -> tuple[Tensor, Tensor]:
        fmt, layout, rounding, _ = options
        x, global_scale, block_amax, packed, block_scale = given
        made = call.operator(self.name)(x, fmt, global_scale, layout, block_amax, rounding)
        return (
            call.copied(self.name, "packed", packed, made[0]),
            call.copied(self.name, "block_scale", block_scale, made[1], layout != "linear"),
        )

    def ready(self, spec: Any, options: Any, given: Any) -> call.Ready:
        x, global_scale, block_amax, packed, block_scale = given
        if packed is None or block_scale is None:
            packed, block_scale = _quantize_outputs(x, options[0], options[1], packed, block_scale)
        if block_amax is None:
            return (x, global_scale, packed, block_scale), (packed, block_scale)
        return (x, block_amax, global_scale, packed, block_scale), (packed, block_scale)

    def check(self, options: Any, given: Any) -> Checked:
        fmt, layout, rounding, _ = options
        x, global_scale, block_amax, *outputs = given
        spec = _quantize_spec(x, fmt, layout, block_amax, rounding)
        codes, scale = _quantize_outputs(x, fmt, layout, *outputs)
        _check_quantize(spec, x, global_scale, block_amax, codes, scale)
        *lead, cols = x.shape
        rows, blocks = prod(lead), cols // spec.block
        shape = (rows, blocks) if spec.layout == "linear" else padded_shape(rows, blocks)
        arguments = (
            x.view(rows, cols),
            *(() if block_amax is None else (block_amax.view(rows * blocks),)),
            None if global_scale is None else global_scale.reshape(1),
            codes.view(rows, cols // 2),
            scale.view(shape),
        )
        return Checked(spec, arguments, (codes, scale))


_QUANTIZE = _Quantize("quantize")


def _quantize_spec(
    x: Tensor, fmt: str, scale_layout: str, block_amax: Tensor | None, scale_rounding: str
) -> Quantize:
    where = "quantize"
    checks.choice(where, "fmt", fmt, tuple(QUANTIZED))
    checks.choice(where, "scale_layout", scale_layout, LAYOUTS)
    checks.choice(where, "scale_rounding", scale_rounding, ROUNDINGS)
    check_rounding(where, "scale_rounding", fmt, scale_rounding)
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
        packed = x.new_empty((*lead, cols // 2), dtype=torch.uint8)
    if block_scale is None:
        shape: tuple[int, ...] = (*lead, cols // QUANTIZED[fmt].block)
        if scale_layout != "linear":
            shape = padded_shape(prod(lead), shape[-1])
        block_scale = x.new_empty(shape, dtype=SCALES[fmt][0])
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
        checks.beside(where, "block_amax", block_amax, (torch.float32,), "x", x, dims=0)
        if block_amax.numel() != prod(lead) * blocks:
            raise ValueError(
                f"{where}: block_amax has {block_amax.numel()} elements, but x has "
                f"{prod(lead) * blocks} blocks; pass one maximum per block"
            )
    half = (*lead, x.shape[-1] // 2)
    checks.like(where, "packed", packed, checks.PACKED, "x", x, half, output=True)
    padded = padded_shape(prod(lead), blocks)
    shapes = [(*lead, blocks)] if spec.layout == "linear" else [padded, (prod(padded),)]
    dtypes = SCALES[spec.fmt]
    checks.like(where, "block_scale", block_scale, dtypes, "x", x, *shapes, output=True)


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
    given = packed, block_scale, global_scale, out
    return _DEQUANTIZE.run((fmt, scale_layout, dtype), given)


class _Dequantize(call.Op[Tensor]):
    def recorded(self, options: Any, given: Any) -> Tensor:
        fmt, layout, dtype = options
        packed, block_scale, global_scale, out = given
        made = call.operator(self.name)(packed, block_scale, fmt, global_scale, layout, dtype)
        return call.copied(self.name, "out", out, made)

    def ready(self, spec: Any, options: Any, given: Any) -> call.Ready:
        packed, _, _, out = given
        if out is not None:
            return given, out
        out = _dequantize_output(packed, options[2])
        return (*given[:3], out), out

    def check(self, options: Any, given: Any) -> Checked:
        fmt, layout, dtype = options
        packed, block_scale, global_scale, out = given
        spec, scale = _check_dequantize(packed, block_scale, fmt, global_scale, layout, dtype)
        y = _dequantize_output(packed, dtype) if out is None else out
        *lead, half = packed.shape
        wide = (*lead, 2 * half)
        checks.like(self.name, "out", y, (dtype,), "packed", packed, wide, output=True)
        rows = prod(lead)
        g = None if global_scale is None else global_scale.reshape(1)
        codes = packed.view(torch.uint8).view(rows, half)
        return Checked(spec, (codes, scale, g, y.view(rows, 2 * half)), y)


_DEQUANTIZE = _Dequantize("dequantize")


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
    checks.activation(where, "dtype", dtype)
    *lead, half = checks.tensor(where, "packed", packed, checks.PACKED).shape
    checks.block_multiple(where, "packed", 2 * half, fmt)
    checks.one_element(where, "global_scale", global_scale, "packed", packed)
    blocks = 2 * half // QUANTIZED[fmt].block
    scale = checks.scales(where, block_scale, lead, blocks, fmt, scale_layout)
    checks.same_device(where, "block_scale", scale, "packed", packed)
    return Dequantize(fmt, dtype_name(dtype), scale_layout), scale


def _dequantize_output(packed: Tensor, dtype: torch.dtype) -> Tensor:
    *lead, half = packed.shape
    return packed.new_empty((*lead, 2 * half), dtype=dtype)


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
    return _SWIZZLE.run((), (block_scale, out))


class _Swizzle(call.Op[Tensor]):
    def recorded(self, options: Any, given: Any) -> Tensor:
        made = call.operator(self.name)(given[0])
        return call.copied(self.name, "out", given[1], made, flat=True)

    def ready(self, spec: Any, options: Any, given: Any) -> call.Ready:
        block_scale, out = given
        if out is None:
            out = _swizzled(block_scale)
        return (block_scale, out), out

    def check(self, options: Any, given: Any) -> Checked:
        scale = checks.tensor(self.name, "block_scale", given[0], SCALE_BYTES, dims=2)
        *lead, cols = scale.shape
        rows = prod(lead)
        padded = padded_shape(rows, cols)
        made = _swizzled(scale) if given[1] is None else given[1]
        shapes = padded, (prod(padded),)
        checks.like(self.name, "out", made, SCALE_BYTES, "block_scale", scale, *shapes, output=True)
        as_bytes = scale.view(torch.uint8).view(rows, cols)
        return Checked(Swizzle(), (as_bytes, made.view(torch.uint8).view(padded)), made)


_SWIZZLE = _Swizzle("swizzle_scales")


def _swizzled(block_scale: Tensor) -> Tensor:
    *lead, cols = block_scale.shape
    shape = padded_shape(prod(lead), cols)
    return block_scale.new_empty(shape, dtype=block_scale.dtype)


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
    return _UNSWIZZLE.run((), (swizzled, rows, cols, out))


class _Unswizzle(call.Op[Tensor]):
    def recorded(self, options: Any, given: Any) -> Tensor:
        return call.copied(self.name, "out", given[3], call.operator(self.name)(*given[:3]))

    def ready(self, spec: Any, options: Any, given: Any) -> call.Ready:
        swizzled, rows, cols, out = given
        if type(rows) is not int or type(cols) is not int or rows < 0 or cols < 0:
            return None
        if out is None:
            out = swizzled.new_empty((rows, cols), dtype=swizzled.dtype)
        return ((swizzled, out), out) if getattr(out, "shape", None) == (rows, cols) else None

    def check(self, options: Any, given: Any) -> Checked:
        swizzled, rows, cols, _ = given
        made = _unswizzled(*given)
        shape = rows, cols
        checks.like(self.name, "out", made, SCALE_BYTES, "swizzled", swizzled, shape, output=True)
        scale = swizzled.view(torch.uint8).view(padded_shape(rows, cols))
        return Checked(Unswizzle(), (scale, made.view(torch.uint8).view(rows, cols)), made)


_UNSWIZZLE = _Unswizzle("unswizzle_scales")


def _unswizzled(swizzled: Tensor, rows: int, cols: int, out: Tensor | None = None) -> Tensor:
    """Return where the scales go, after the checks of the sizes."""
    where = "unswizzle_scales"
    checks.tensor(where, "swizzled", swizzled, SCALE_BYTES)
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
    return swizzled.new_empty((rows, cols), dtype=swizzled.dtype)


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


def _fake_dequantize(packed: Tensor, *given: Any) -> Tensor:
    _check_dequantize(packed, *given)
    return _dequantize_output(packed, given[-1])


def _fake_swizzle(block_scale: Tensor) -> Tensor:
    return _swizzled(
        checks.tensor("swizzle_scales", "block_scale", block_scale, SCALE_BYTES, dims=2)
    )


call.define(
    "quantize",
    "(Tensor x, str fmt='nvfp4', Tensor? global_scale=None, str scale_layout='linear', "
    "Tensor? block_amax=None, str scale_rounding='ceil') -> (Tensor, Tensor)",
    quantize,
    _fake_quantize,
)
call.define(
    "dequantize",
    "(Tensor packed, Tensor block_scale, str fmt='nvfp4', Tensor? global_scale=None, "
    "str scale_layout='linear', ScalarType dtype=bfloat16) -> Tensor",
    dequantize,
    _fake_dequantize,
)
call.define("swizzle_scales", "(Tensor block_scale) -> Tensor", swizzle_scales, _fake_swizzle)
call.define(
    "unswizzle_scales",
    "(Tensor swizzled, SymInt rows, SymInt cols) -> Tensor",
    unswizzle_scales,
    _unswizzled,
)


# ---- The search for block scales ---------------------------------------------------------------


def fp8_scale_candidates(device: str | torch.device = "cpu") -> Tensor:
    """Return the candidate scales [126] float32: positive finite E4M3 values / 448, ascending."""
    values = torch.arange(1, 127, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()
    return (values / 448.0).to(device)


@cache
def _candidates(device: torch.device) -> Tensor:
    """Return the candidates on a device, made once: a copy to a GPU would hold up the caller."""
    return fp8_scale_candidates(device)


def nvfp4_fp8_scale_sweep(
    x: Tensor,
    global_amax: Tensor,
    block_size: int = 16,
    candidates: Tensor | None = None,
) -> Tensor:
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
    return _SWEEP.run((block_size,), (x, global_amax, candidates))


class _Sweep(call.Op[Tensor]):
    def recorded(self, options: Any, given: Any) -> Tensor:
        x, global_amax, candidates = given
        made: Tensor = call.operator(self.name)(x, global_amax, *options, candidates)
        return made

    def check(self, options: Any, given: Any) -> Checked:
        (block_size,), (x, global_amax, candidates) = options, given
        blocks = _check_sweep(x, global_amax, block_size, candidates)
        if candidates is None:
            candidates = _candidates(x.device)
        best = x.new_empty(blocks, dtype=torch.float32)
        g = global_amax.detach().to(torch.float32).reshape(1)
        arguments = x.reshape(blocks, block_size), g, candidates, best
        return Checked(ScaleSweep(dtype_name(x.dtype), int(block_size)), arguments, best)


_SWEEP = _Sweep("nvfp4_fp8_scale_sweep")


def _check_sweep(x: Tensor, global_amax: Tensor, block_size: int, candidates: Tensor | None) -> int:
    """Return the number of blocks."""
    where = "nvfp4_fp8_scale_sweep"
    checks.tensor(where, "x", x, checks.ACTIVATIONS, dims=0)
    if not isinstance(block_size, int) or block_size < 1:
        raise ValueError(
            f"{where}: block_size={block_size!r} is not a positive integer; NVFP4 uses 16"
        )
    if x.numel() % block_size:
        raise ValueError(
            f"{where}: x has {x.numel()} elements, which is not divisible by "
            f"block_size={block_size}; pad the rows, or choose another block_size"
        )
    floats = (*checks.ACTIVATIONS, torch.float64)
    checks.tensor(where, "global_amax", global_amax, floats, dims=0)
    checks.one_element(where, "global_amax", global_amax.detach().to(torch.float32), "x", x)
    if candidates is not None:
        checks.beside(where, "candidates", candidates, (torch.float32,), "x", x, dims=0)
        if candidates.dim() != 1 or not candidates.numel():
            raise ValueError(
                f"{where}: candidates has shape {list(candidates.shape)}, but must be a vector of "
                "at least one scale; see fp8_scale_candidates()"
            )
    return x.numel() // int(block_size)


def _fake_sweep(x: Tensor, *given: Any) -> Tensor:
    return x.new_empty((_check_sweep(x, *given),), dtype=torch.float32)


call.define(
    "nvfp4_fp8_scale_sweep",
    "(Tensor x, Tensor global_amax, SymInt block_size=16, Tensor? candidates=None) -> Tensor",
    nvfp4_fp8_scale_sweep,
    _fake_sweep,
)
