"""FlashInfer's FP4 functions on our kernels: change ``from flashinfer`` to this module.

Names, order and defaults of arguments, returned shapes and dtypes, and conventions are FlashInfer's
(0.6.18): ``global_scale`` *multiplies* values before they are quantised, and UE8M0 scales ignore
it.  Norms compute what its kernels with one CTA per row do, `rmsnorm_fp4quant` its other order;
quantisers compute its exact mode (FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1), which its tests
compare with.

What differs:

* padding of the 128x4 and 8x4 layouts is always zero, and so are scales of rows beyond a mask;
* a residual that is not contiguous is an error; its update is never lost;
* bad arguments are ValueError and TypeError with a reason, which are AssertionError and
  RuntimeError as well, as FlashInfer's checks in Python and in C++ raise them; more of them are
  found: overlaps, wrong shapes and devices, E8M0 scales of blocks of 16;
* a scale block that rounds to zero has codes of zero, never of infinity;
* everything runs on CPU tensors too, and results of dequantisation stay on the device;
* scale byte 0 of UE8M0 means 2^-127 in dequantisation, not 0;
* ``backend`` is accepted and has no meaning; ``enable_pdl=None`` is True;
* NotImplementedError: FP8 input, one global scale per row (``per_token_activation``),
  ``do_shuffle``, dequantisation of (16, UE8M0) and (32, E4M3).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import wraps
from math import prod
from typing import ParamSpec, TypeVar

import torch

from blockscale.ops import checks
from blockscale.ops import quant as ops
from blockscale.ops.fused.act import ActOp
from blockscale.ops.fused.norm import NormOp

Tensor = torch.Tensor

__all__ = [
    "SfLayout",
    "add_rmsnorm_fp4quant",
    "block_scale_interleave",
    "e2m1_and_ufp8sf_scale_to_float",
    "fp4_quantize",
    "mxfp4_dequantize",
    "mxfp4_dequantize_host",
    "mxfp4_quantize",
    "nvfp4_batched_quantize",
    "nvfp4_block_scale_interleave",
    "nvfp4_quantize",
    "rmsnorm_fp4quant",
    "scaled_fp4_grouped_quantize",
    "silu_and_mul_nvfp4_quantize",
    "silu_and_mul_scaled_nvfp4_experts_quantize",
]

_FI = "flashinfer"
_U8 = torch.uint8
_ADD = NormOp("flashinfer.add_rmsnorm_fp4quant", True, _FI)
_NORM = NormOp("flashinfer.rmsnorm_fp4quant", False, _FI)
_QUANTIZE = ActOp("flashinfer.fp4_quantize", "none", False, _FI, _U8, flat=False)
_SILU = ActOp("flashinfer.silu_and_mul_nvfp4_quantize", "silu", False, _FI, _U8, flat=False)
_BATCHED = ActOp("flashinfer.nvfp4_batched_quantize", "none", True, _FI, _U8)
_GROUPED = ActOp("flashinfer.scaled_fp4_grouped_quantize", "none", True, _FI, _U8)
_EXPERTS = ActOp("flashinfer.silu_and_mul_scaled_nvfp4_experts_quantize", "silu", True, _FI, _U8)
_PER_EXPERT = 16, None, "128x4", None
"""Options of what quantises per expert."""


class BadValueError(ValueError, AssertionError, RuntimeError):
    """A bad value of an argument, for those who catch our class and who catch FlashInfer's."""


class BadTypeError(TypeError, AssertionError, RuntimeError):
    """A bad type or dtype of an argument, likewise."""


P = ParamSpec("P")
R = TypeVar("R")


def _public(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function``, whose errors are also those that FlashInfer's callers catch."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except AssertionError:  # one of ours, from a function that this one calls
            raise
        except ValueError as error:
            raise BadValueError(str(error)) from error
        except TypeError as error:
            raise BadTypeError(str(error)) from error

    return call


class SfLayout(IntEnum):
    """Layouts of block scales."""

    layout_128x4 = 0
    layout_8x4 = 1
    layout_linear = 2


def _contiguous(x: Tensor) -> Tensor:
    """Return ``x``, or a contiguous copy."""
    return x.contiguous() if isinstance(x, Tensor) and not x.is_contiguous() else x


def _one_scale(where: str, global_scale: Tensor | float | None, x: Tensor) -> Tensor | None:
    """Return the one global scale [1] as float32 on the device of ``x``, or None."""
    if global_scale is None:
        return None
    if not isinstance(global_scale, Tensor):
        return torch.full((1,), float(global_scale), dtype=torch.float32, device=x.device)
    if global_scale.numel() != 1:
        raise NotImplementedError(
            f"{where}: global_scale has {global_scale.numel()} elements, one per row; only one for "
            "the whole tensor is implemented"
        )
    return global_scale.to(device=x.device, dtype=torch.float32).reshape(1)


@_public
def add_rmsnorm_fp4quant(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    y_fp4: Tensor | None = None,
    block_scale: Tensor | None = None,
    global_scale: Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    is_sf_swizzled_layout: bool = False,
    output_both_sf_layouts: bool = False,
    block_scale_unswizzled: Tensor | None = None,
    enable_pdl: bool | None = None,
    y_out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return FP4 codes and scales of ``rmsnorm(input + residual) * weight``; update residual.

    As `blockscale.add_rmsnorm_fp4quant`, but ``global_scale`` multiplies, and an input that is not
    contiguous is copied.
    """
    size = weight.numel() if isinstance(weight, Tensor) else None
    swizzled, both, plain = is_sf_swizzled_layout, output_both_sf_layouts, y_out is None
    options = block_size, scale_format, swizzled, both, enable_pdl, plain, size
    linear, x = block_scale_unswizzled, _contiguous(input)
    given = x, residual, weight, y_fp4, block_scale, linear, y_out, global_scale, eps
    return _ADD.run(options, given)


@_public
def rmsnorm_fp4quant(
    input: Tensor,
    weight: Tensor,
    y_fp4: Tensor | None = None,
    block_scale: Tensor | None = None,
    global_scale: Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    is_sf_swizzled_layout: bool = False,
    enable_pdl: bool | None = None,
) -> tuple[Tensor, ...]:
    """Return FP4 codes and block scales of ``rmsnorm(input) * weight``.

    Arguments and results as in `add_rmsnorm_fp4quant`.
    """
    size = weight.numel() if isinstance(weight, Tensor) else None
    options = block_size, scale_format, is_sf_swizzled_layout, False, enable_pdl, True, size
    given = _contiguous(input), None, weight, y_fp4, block_scale, None, None, global_scale, eps
    return _NORM.run(options, given)


@_public
def fp4_quantize(
    input: Tensor,
    global_scale: Tensor | None = None,
    sf_vec_size: int = 16,
    sf_use_ue8m0: bool = False,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    is_global_scale_inversed: bool = False,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
) -> tuple[Tensor, Tensor]:
    """Return FP4 codes [..., K / 2] and block scales of ``input * global_scale``, both uint8.

    Args:
        input: [..., K], two dimensions or more, bfloat16 or float16; a matrix that lies in memory
            column by column is quantised along its columns, and the results are transposed views.
        global_scale: one element; needed for E4M3 scales, ignored for UE8M0.
        sf_vec_size: elements per block scale, 16 or 32.
        sf_use_ue8m0: UE8M0 scales (with 32), else E4M3 (with 16).
        is_sf_swizzled_layout: scales [ceil_to(rows, 128), ceil_to(K / sf_vec_size, 4)] in the
            128x4 layout, else linear [rows, K / sf_vec_size].
        is_sf_8x4_layout: the 8x4 layout instead, rows padded to a multiple of 8.
        is_global_scale_inversed: use the reciprocal of ``global_scale``.
        enable_pdl: as in `blockscale.add_rmsnorm_fp4quant`.
        backend: accepted; there is one.

    Raises:
        NotImplementedError: another sf_vec_size or dtype, or several global scales.
        TypeError: an argument that is no tensor, or of another dtype.
        ValueError: (sf_vec_size, sf_use_ue8m0) is no pair; no global scale; shapes.
    """
    where = _QUANTIZE.name
    if sf_vec_size not in (16, 32):
        raise NotImplementedError(f"{where}: sf_vec_size={sf_vec_size}; choose 16 or 32")
    if (sf_vec_size == 32) != bool(sf_use_ue8m0):
        raise ValueError(
            f"{where}: sf_vec_size={sf_vec_size} does not go with sf_use_ue8m0={sf_use_ue8m0}; "
            "choose 16 and False (NVFP4), or 32 and True (MXFP4)"
        )
    if isinstance(input, Tensor) and input.dtype == torch.float8_e4m3fn:
        raise NotImplementedError(
            f"{where}: input of float8_e4m3fn is not implemented; pass bfloat16 or float16"
        )
    checks.tensor(where, "input", _contiguous(input), checks.SIXTEEN_BIT, dims=2)
    g = None if sf_use_ue8m0 else _one_scale(where, global_scale, input)
    if g is None and not sf_use_ue8m0:
        raise ValueError(
            f"{where}: global_scale is missing; pass one, for example 448 * 6 / input.abs().max()"
        )
    if g is not None and is_global_scale_inversed:
        g = 1.0 / g
    columns = input.stride(-2) == 1 and input.shape[-1] > 1 and not input.is_contiguous()
    x = _contiguous(input.transpose(-2, -1) if columns else input)
    layout = "8x4" if is_sf_8x4_layout else "128x4"
    layout = layout if is_sf_swizzled_layout else "linear"
    options = sf_vec_size, None, layout, enable_pdl
    packed, scale = _QUANTIZE.run(options, (x, None, None, None, g, ()))
    scale = scale.view(_U8)
    scale = scale.reshape(-1, scale.shape[-1])
    return (packed.transpose(-2, -1), scale.transpose(-2, -1)) if columns else (packed, scale)


@_public
def nvfp4_quantize(
    a: Tensor,
    a_global_sf: Tensor | float,
    sfLayout: SfLayout = SfLayout.layout_128x4,
    do_shuffle: bool = False,
    sf_vec_size: int = 16,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    per_token_activation: bool = False,
    expanded_idx_to_permuted_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return NVFP4 codes [M, K / 2] and scales (2-D, in ``sfLayout``) of ``a * a_global_sf``.

    Raises:
        NotImplementedError: do_shuffle, per_token_activation, expanded_idx_to_permuted_idx.
        ValueError, TypeError: as `fp4_quantize`.
    """
    _refuse("nvfp4_quantize", do_shuffle=do_shuffle, per_token_activation=per_token_activation)
    given = expanded_idx_to_permuted_idx is not None
    _refuse("nvfp4_quantize", expanded_idx_to_permuted_idx=given)
    return fp4_quantize(
        a,
        _one_scale("flashinfer.nvfp4_quantize", a_global_sf, a),
        sf_vec_size,
        sf_vec_size == 32,
        sfLayout != SfLayout.layout_linear,
        sfLayout == SfLayout.layout_8x4,
        enable_pdl=enable_pdl,
    )


def _refuse(where: str, **options: bool) -> None:
    for name, value in options.items():
        if value:
            raise NotImplementedError(
                f"flashinfer.{where}: {name} is not implemented; leave it out, or call FlashInfer"
            )


@_public
def mxfp4_quantize(
    a: Tensor,
    backend: str = "cuda",
    enable_pdl: bool | None = None,
    sfLayout: SfLayout = SfLayout.layout_128x4,
) -> tuple[Tensor, Tensor]:
    """Return MXFP4 codes [M, K / 2] and UE8M0 scales (2-D, in ``sfLayout``) of ``a``."""
    linear, eight = sfLayout == SfLayout.layout_linear, sfLayout == SfLayout.layout_8x4
    return fp4_quantize(a, None, 32, True, not linear, eight, enable_pdl=enable_pdl)


@_public
def silu_and_mul_nvfp4_quantize(
    input: Tensor,
    global_scale: Tensor,
    sf_vec_size: int = 16,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    enable_pdl: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Return NVFP4 codes [..., K / 2] and scales (2-D), both uint8, of ``silu(gate) * up``.

    ``input`` is [..., 2 K]: gate, then up; ``global_scale`` [1] multiplies; layouts as in
    `fp4_quantize`.
    """
    if sf_vec_size != 16:
        raise NotImplementedError(f"{_SILU.name}: sf_vec_size={sf_vec_size}; NVFP4 has 16")
    layout = "linear"
    if is_sf_swizzled_layout:
        layout = "8x4" if is_sf_8x4_layout else "128x4"
    g = _one_scale(_SILU.name, global_scale, input)
    options = 16, None, layout, enable_pdl
    packed, scale = _SILU.run(options, (input, None, None, None, g, ()))
    scale = scale.view(_U8)
    return packed, scale.reshape(-1, scale.shape[-1])


def _per_expert(where: str, global_scale: Tensor, x: Tensor) -> Tensor:
    """Return one global scale per expert, as float32 on the device of ``x``."""
    checks.tensor(where, "a", _contiguous(x), checks.SIXTEEN_BIT, dims=3)
    if global_scale.numel() not in (1, x.shape[0]):
        raise ValueError(
            f"{where}: a_global_sf has {global_scale.numel()} elements; pass one per expert, "
            f"{x.shape[0]}"
        )
    g = global_scale.to(device=x.device, dtype=torch.float32).reshape(-1)
    return g.expand(x.shape[0]).contiguous()


@_public
def nvfp4_batched_quantize(
    a: Tensor, a_global_sf: Tensor, sf_vec_size: int = 16
) -> tuple[Tensor, Tensor]:
    """Return NVFP4 codes [B, M, K / 2] and scales [B, padded size], both uint8, of ``a`` [B, M, K].

    The scales of each batch are in the 128x4 layout of their own; ``a_global_sf`` multiplies.
    """
    where = "flashinfer.nvfp4_batched_quantize"
    if sf_vec_size != 16:
        raise NotImplementedError(f"{where}: sf_vec_size={sf_vec_size}; NVFP4 has 16")
    g = _per_expert(where, a_global_sf, a)
    packed, scale = _BATCHED.run(_PER_EXPERT, (_contiguous(a), None, None, None, g, ()))
    return packed, scale.view(_U8).reshape(a.shape[0], -1)


def _logical(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the views of codes and scales that FlashInfer's grouped GEMM takes."""
    experts, high, wide = scale.shape
    tiles = scale.reshape(experts, high // 128, wide // 4, 32, 4, 4)
    return packed.permute(1, 2, 0), tiles.permute(3, 4, 1, 5, 2, 0)


@_public
def scaled_fp4_grouped_quantize(
    a: Tensor, mask: Tensor, a_global_sf: Tensor
) -> tuple[Tensor, Tensor]:
    """Return NVFP4 codes and scales of the first ``mask[e]`` rows of each expert.

    Args:
        a: [l, m, k] bfloat16 or float16.
        mask: [l] int32.
        a_global_sf: [l] float32, multiplies.

    Returns:
        Views: codes (m, k / 2, l) uint8, in memory [l, m, k / 2]; scales (32, 4, rm, 4, rk, l)
        float8_e4m3fn, in memory [l, rm, rk, 32, 4, 4], rm = ceil(m / 128), rk = ceil(k / 64).
    """
    g = _per_expert(_GROUPED.name, a_global_sf, a)
    return _logical(*_GROUPED.run(_PER_EXPERT, (_contiguous(a), mask, None, None, g, ())))


@_public
def silu_and_mul_scaled_nvfp4_experts_quantize(
    a: Tensor, mask: Tensor, a_global_sf: Tensor
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of ``silu(gate) * up`` as `scaled_fp4_grouped_quantize` does.

    ``a`` is [l, m, 2 k]: gate, then up.
    """
    g = _per_expert(_EXPERTS.name, a_global_sf, a)
    return _logical(*_EXPERTS.run(_PER_EXPERT, (_contiguous(a), mask, None, None, g, ())))


@_public
def mxfp4_dequantize(
    a_fp4: Tensor, a_sf: Tensor, sfLayout: SfLayout = SfLayout.layout_128x4
) -> Tensor:
    """Return the float32 values [M, K] of MXFP4 codes and scales in ``sfLayout``."""
    linear, eight = sfLayout == SfLayout.layout_linear, sfLayout == SfLayout.layout_8x4
    return e2m1_and_ufp8sf_scale_to_float(a_fp4, a_sf, None, 32, 0, not linear, eight)


@_public
def mxfp4_dequantize_host(weight: Tensor, scale: Tensor, group_size: int = 32) -> Tensor:
    """Return the float32 values [..., K] of MXFP4 codes and linear scales."""
    if group_size != 32:
        raise NotImplementedError(
            f"flashinfer.mxfp4_dequantize_host: group_size={group_size}; MXFP4 has 32"
        )
    return ops.dequantize(weight, scale.view(_U8), "mxfp4", dtype=torch.float32)


@_public
def e2m1_and_ufp8sf_scale_to_float(
    e2m1_tensor: Tensor,
    ufp8_scale_tensor: Tensor,
    global_scale_tensor: Tensor | None = None,
    sf_vec_size: int = 16,
    ufp8_type: int = 1,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
) -> Tensor:
    """Return ``code * (scale * global_scale)`` [M, K] float32.

    Args:
        e2m1_tensor: codes [M, K / 2], uint8 or float4_e2m1fn_x2.
        ufp8_scale_tensor: scale bytes of any shape.
        global_scale_tensor: one element, the factor that decodes (1 / the one that encoded);
            needed with E4M3 scales.
        sf_vec_size: elements per block scale.
        ufp8_type: 1: E4M3 (with 16), 0: UE8M0 (with 32).
        is_sf_swizzled_layout: scales are in the 128x4 layout, else linear.
        is_sf_8x4_layout: scales are in the 8x4 layout.

    Raises:
        NotImplementedError: another pair (sf_vec_size, ufp8_type).
        TypeError, ValueError: as `blockscale.dequantize`; sizes of the scales that do not fit.
    """
    where = "flashinfer.e2m1_and_ufp8sf_scale_to_float"
    fmt = {(16, 1): "nvfp4", (32, 0): "mxfp4"}.get((sf_vec_size, ufp8_type))
    if fmt is None:
        raise NotImplementedError(
            f"{where}: sf_vec_size={sf_vec_size} with ufp8_type={ufp8_type}; choose (16, 1) for "
            "NVFP4 or (32, 0) for MXFP4"
        )
    if ufp8_type == 1 and global_scale_tensor is None:
        raise ValueError(f"{where}: global_scale_tensor is missing; pass 1 / the encoding scale")
    codes = checks.tensor(where, "e2m1_tensor", e2m1_tensor, checks.PACKED, dims=2)
    g = _one_scale(where, None if ufp8_type == 0 else global_scale_tensor, codes)
    scale = ufp8_scale_tensor.view(_U8)
    rows, blocks = prod(codes.shape[:-1]), 2 * codes.shape[-1] // sf_vec_size
    swizzled = is_sf_swizzled_layout and not is_sf_8x4_layout
    tile = 128 if swizzled else 8 if is_sf_swizzled_layout else 1
    padded = (rows, blocks) if tile == 1 else checks.padded_shape(rows, blocks, tile)
    if scale.numel() != prod(padded):
        raise ValueError(
            f"{where}: ufp8_scale_tensor has {scale.numel()} elements, but the layout of "
            f"{rows} x {blocks} scales has {prod(padded)}; pass the sizes that were quantised"
        )
    if tile == 8:
        tiles = scale.reshape(padded[0] // 8, padded[1] // 4, 8, 4)
        scale = tiles.transpose(1, 2).reshape(padded)[:rows, :blocks].contiguous()
    scale = scale.reshape(padded if tile == 128 else (*codes.shape[:-1], blocks))
    layout = "128x4" if tile == 128 else "linear"
    return ops.dequantize(codes, scale, fmt, g, layout, torch.float32)


@_public
def block_scale_interleave(unswizzled_sf: Tensor) -> Tensor:
    """Return elements [R, C] or [E, R, C] in the 128x4 layout, flat; padding is zero.

    Args:
        unswizzled_sf: uint8 or bfloat16; each of E matrices is padded by itself.

    Raises:
        TypeError: another dtype.
        ValueError: other dimensions.
    """
    where = "flashinfer.block_scale_interleave"
    x = _contiguous(unswizzled_sf)
    checks.tensor(where, "unswizzled_sf", x, (torch.uint8, torch.bfloat16), dims=2)
    if x.dim() > 3:
        raise ValueError(
            f"{where}: unswizzled_sf has shape {list(x.shape)}; pass 2 or 3 dimensions"
        )
    if x.dim() == 2 and x.dtype == torch.uint8:
        return ops.swizzle_scales(x).reshape(-1)
    experts, (rows, cols) = prod(x.shape[:-2]), x.shape[-2:]
    high, wide = checks.padded_shape(rows, cols)
    padded = torch.zeros((experts, high, wide), dtype=x.dtype, device=x.device)
    padded[:, :rows, :cols] = x
    tiles = padded.reshape(experts, high // 128, 4, 32, wide // 4, 4)
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(-1)


nvfp4_block_scale_interleave = block_scale_interleave
