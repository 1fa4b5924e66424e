"""FlashInfer's norms that end in FP4 codes and block scales."""

from __future__ import annotations

import torch

from blockscale.compat.flashinfer.errors import public
from blockscale.compat.flashinfer.scales import contiguous
from blockscale.ops.fused.norm import NormOp

Tensor = torch.Tensor

_ADD = NormOp("flashinfer.add_rmsnorm_fp4quant", True, "flashinfer")
_NORM = NormOp("flashinfer.rmsnorm_fp4quant", False, "flashinfer")


@public
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
    linear, x = block_scale_unswizzled, contiguous(input)
    given = x, residual, weight, y_fp4, block_scale, linear, y_out, global_scale, eps
    return _ADD.run(options, given)


@public
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
    given = contiguous(input), None, weight, y_fp4, block_scale, None, None, global_scale, eps
    return _NORM.run(options, given)
