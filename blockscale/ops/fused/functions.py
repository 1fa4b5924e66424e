"""Torch functions that end in FP4: RMS norm or activation and quantisation in one kernel.

Arithmetic: `fused.norm_quantize` and `.act_quantize`.  `compat.flashinfer` has
the same functions with FlashInfer's conventions.  What they share:

* Outputs that are given are written and returned; those left out are allocated.  Dimensions before
  the last may be flattened in any of them.
* y_fp4: [..., K / 2] float4_e2m1fn_x2 or uint8, the even element in the low nibble.  Allocated as
  float4_e2m1fn_x2 where torch has it, else uint8.
* block_scale: one byte per block: float8_e4m3fn or uint8 for E4M3, uint8 or float8_e8m0fnu for
  UE8M0, the first of them where it is allocated.  Linear: [..., K / block_size].  128x4, the layout
  of tcgen05: ceil_to(rows, 128) * ceil_to(K / block_size, 4) bytes, flat (as allocated) or with
  these two dimensions; padding is written as zero.
* global_scale: float32 that divides values before they are quantised; None: 1.
* block_size, scale_format: 16 and "e4m3" (NVFP4), 32 and "ue8m0" (MXFP4), or 32 and "e4m3"; a
  scale_format of None is the first for its block size.
* enable_pdl: True or None: the kernel may start before the one before it in the stream has ended
  (programmatic dependent launch), and touches no memory until then.  No meaning on the CPU.
* Errors: TypeError for an argument that is no tensor or of another dtype; ValueError for an unknown
  option, a shape, stride, device or alignment that does not fit, and tensors that overlap.
"""

from __future__ import annotations

import torch

from blockscale.ops.dispatch import traced
from blockscale.ops.fused.act import ActOp, act, define_act, traced_act
from blockscale.ops.fused.norm import NormOp, define_add, define_norm, norm, traced_norm

Tensor = torch.Tensor

_ADD = define_add(NormOp("add_rmsnorm_fp4quant", residual=True))
_NORM = define_norm(NormOp("rmsnorm_fp4quant", residual=False))
_SILU = define_act(ActOp("silu_and_mul_fp4quant", "silu"))
_GELU = define_act(ActOp("gelu_tanh_and_mul_fp4quant", "gelu_tanh"))
_SWIGLU = define_act(ActOp("swiglu_fp4quant", "swiglu"))
_GROUPED = define_act(ActOp("grouped_quantize", "none", grouped=True, codes=torch.uint8))
_GROUPED_SILU = define_act(ActOp("silu_and_mul_grouped_fp4quant", "silu", grouped=True))


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
    *,
    y_out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return FP4 codes and scales of ``rmsnorm(input + residual) * weight``; update residual.

    Args:
        input: [..., H] bfloat16 or float16, contiguous; H a multiple of block_size, 64 or more.
        residual: like input; input + residual is written to it, rounded to its dtype.
        weight: [H], dtype of input.
        y_fp4, block_scale, global_scale, block_size, scale_format, enable_pdl: see the module.
        eps: added to the mean of squares.
        is_sf_swizzled_layout: write block_scale in the 128x4 layout.
        output_both_sf_layouts: write it in the 128x4 layout and the linear scales as well.
        block_scale_unswizzled: output, the linear scales if both layouts are written.
        y_out: output, like input: the norm itself, rounded, e.g. for a router.

    Returns:
        ``(y_fp4, block_scale)``, and block_scale_unswizzled as third with both layouts.
    """
    run = traced_norm if traced(input) else norm
    return run(
        _ADD,
        input,
        residual,
        weight,
        y_fp4,
        block_scale,
        global_scale,
        eps,
        block_size,
        scale_format,
        is_sf_swizzled_layout,
        output_both_sf_layouts,
        block_scale_unswizzled,
        enable_pdl,
        y_out,
    )


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
    *,
    output_both_sf_layouts: bool = False,
    block_scale_unswizzled: Tensor | None = None,
    y_out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return FP4 codes and block scales of ``rmsnorm(input) * weight``.

    Arguments and results as in `add_rmsnorm_fp4quant`, without the residual.
    """
    run = traced_norm if traced(input) else norm
    return run(
        _NORM,
        input,
        None,
        weight,
        y_fp4,
        block_scale,
        global_scale,
        eps,
        block_size,
        scale_format,
        is_sf_swizzled_layout,
        output_both_sf_layouts,
        block_scale_unswizzled,
        enable_pdl,
        y_out,
    )


def silu_and_mul_fp4quant(
    input: Tensor,
    y_fp4: Tensor | None = None,
    block_scale: Tensor | None = None,
    global_scale: Tensor | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    is_sf_swizzled_layout: bool = False,
    enable_pdl: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Return FP4 codes and block scales of ``silu(gate) * up``, rounded once to input's dtype.

    Args:
        input: [..., 2 K] bfloat16 or float16, contiguous: gate, then up; K a multiple of
            block_size.
        y_fp4, block_scale, global_scale, block_size, scale_format, enable_pdl: see the module.
        is_sf_swizzled_layout: write block_scale in the 128x4 layout.
    """
    run = traced_act if traced(input) else act
    layout = "128x4" if is_sf_swizzled_layout else "linear"
    return run(
        *(_SILU, input, None, y_fp4, block_scale, global_scale, block_size, scale_format, layout),
        enable_pdl,
    )


def gelu_tanh_and_mul_fp4quant(
    input: Tensor,
    y_fp4: Tensor | None = None,
    block_scale: Tensor | None = None,
    global_scale: Tensor | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    is_sf_swizzled_layout: bool = False,
    enable_pdl: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Return FP4 codes and block scales of ``gelu(gate) * up``, GELU in its tanh form.

    Arguments and results as in `silu_and_mul_fp4quant`.
    """
    run = traced_act if traced(input) else act
    layout = "128x4" if is_sf_swizzled_layout else "linear"
    return run(
        *(_GELU, input, None, y_fp4, block_scale, global_scale, block_size, scale_format, layout),
        enable_pdl,
    )


def swiglu_fp4quant(
    input: Tensor,
    y_fp4: Tensor | None = None,
    block_scale: Tensor | None = None,
    global_scale: Tensor | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    is_sf_swizzled_layout: bool = False,
    enable_pdl: bool | None = None,
    *,
    alpha: float = 1.702,
    beta: float = 1.0,
    limit: float = 7.0,
) -> tuple[Tensor, Tensor]:
    """Return FP4 codes and block scales of gpt-oss's SwiGLU.

    That is ``g * sigmoid(alpha * g) * (u + beta)`` of ``g = min(gate, limit)`` and
    ``u = clamp(up, -limit, limit)``.  Arguments and results as in `silu_and_mul_fp4quant`.
    """
    run = traced_act if traced(input) else act
    layout = "128x4" if is_sf_swizzled_layout else "linear"
    return run(
        *(_SWIGLU, input, None, y_fp4, block_scale, global_scale, block_size, scale_format),
        *(layout, enable_pdl, (alpha, beta, limit)),
    )


def grouped_quantize(
    x: Tensor,
    mask: Tensor | None = None,
    global_scale: Tensor | None = None,
    packed: Tensor | None = None,
    block_scale: Tensor | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    enable_pdl: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Return FP4 codes and block scales of the rows of every expert that are in use.

    Args:
        x: [experts, rows, K] bfloat16 or float16, contiguous; K a multiple of block_size.
        mask: [experts] int32, how many rows of each expert are in use, 0 to rows; None: all (a
            mask made for this call, by a kernel of its own).
        global_scale: [experts] float32 that divide x before it is quantised; None: 1.
        packed: output, [experts, rows, K / 2], uint8 where it is allocated, as by `quantize`; rows
            that are not in use are not written.
        block_scale: output, [experts, ceil_to(rows, 128), ceil_to(K / block_size, 4)], the 128x4
            layout of each expert; scales of rows that are not in use are written as zero.
        block_size, scale_format, enable_pdl: see the module.
    """
    run = traced_act if traced(x) else act
    return run(
        *(_GROUPED, x, mask, packed, block_scale, global_scale, block_size, scale_format),
        *("128x4", enable_pdl),
    )


def silu_and_mul_grouped_fp4quant(
    input: Tensor,
    mask: Tensor | None = None,
    y_fp4: Tensor | None = None,
    block_scale: Tensor | None = None,
    global_scale: Tensor | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    enable_pdl: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Return FP4 codes and block scales of ``silu(gate) * up`` of every expert's rows in use.

    Args:
        input: [experts, rows, 2 K] bfloat16 or float16, contiguous: gate, then up.
        y_fp4: output, [experts, rows, K / 2]; rows that are not in use are not written.
        mask, block_scale, global_scale: as in `grouped_quantize`.
        block_size, scale_format, enable_pdl: see the module.
    """
    run = traced_act if traced(input) else act
    return run(
        *(_GROUPED_SILU, input, mask, y_fp4, block_scale, global_scale, block_size, scale_format),
        *("128x4", enable_pdl),
    )
