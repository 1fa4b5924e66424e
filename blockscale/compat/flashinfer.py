"""FlashInfer's FP4 functions on our kernels: change ``from flashinfer`` to this module.

Names, order and defaults of arguments, returned shapes and dtypes, and conventions are FlashInfer's
(0.6.18): ``global_scale`` *multiplies* values before they are quantised, and UE8M0 scales ignore
it.  Norms compute what its kernels with one CTA per row do, `rmsnorm_fp4quant` its other order;
quantisers compute its exact mode (FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1), which its tests
compare with.

What differs:

* padding of the 128x4 and 8x4 layouts is always zero, and so are scales of rows beyond a mask;
* a residual that is not contiguous is an error; its update is never lost;
* bad arguments are ValueError and TypeError with a reason, not AssertionError, and more of them are
  found: overlaps, wrong shapes and devices, E8M0 scales of blocks of 16;
* a scale block that rounds to zero has codes of zero, never of infinity;
* everything runs on CPU tensors too, and results of dequantisation stay on the device;
* scale byte 0 of UE8M0 means 2^-127 in dequantisation, not 0;
* ``backend`` is accepted and has no meaning; ``enable_pdl=None`` is True;
* NotImplementedError: FP8 input, one global scale per row (``per_token_activation``),
  ``do_shuffle``, dequantisation of (16, UE8M0) and (32, E4M3).
"""

from __future__ import annotations

import torch

from blockscale.compat._flashinfer_experts import (
    nvfp4_batched_quantize,
    scaled_fp4_grouped_quantize,
    silu_and_mul_scaled_nvfp4_experts_quantize,
)
from blockscale.compat._flashinfer_scales import (
    SfLayout,
    block_scale_interleave,
    contiguous,
    e2m1_and_ufp8sf_scale_to_float,
    mxfp4_dequantize,
    mxfp4_dequantize_host,
    nvfp4_block_scale_interleave,
    one_scale,
)
from blockscale.ops import checks
from blockscale.ops.dispatch import traced
from blockscale.ops.fused.act import ActOp, act, define_act, traced_act
from blockscale.ops.fused.norm import NormOp, define_add, define_norm, norm, traced_norm

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
_ADD = define_add(NormOp("flashinfer.add_rmsnorm_fp4quant", True, _FI))
_NORM = define_norm(NormOp("flashinfer.rmsnorm_fp4quant", False, _FI))
_QUANTIZE = define_act(ActOp("flashinfer.fp4_quantize", "none", False, _FI, _U8, flat=False))
_SILU = define_act(
    ActOp("flashinfer.silu_and_mul_nvfp4_quantize", "silu", False, _FI, _U8, flat=False)
)


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
    run = traced_norm if traced(input) else norm
    return run(
        _ADD,
        contiguous(input),
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
) -> tuple[Tensor, ...]:
    """Return FP4 codes and block scales of ``rmsnorm(input) * weight``.

    Arguments and results as in `add_rmsnorm_fp4quant`.
    """
    run = traced_norm if traced(input) else norm
    return run(
        _NORM,
        contiguous(input),
        None,
        weight,
        y_fp4,
        block_scale,
        global_scale,
        eps,
        block_size,
        scale_format,
        is_sf_swizzled_layout,
        False,
        None,
        enable_pdl,
        None,
    )


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
    checks.tensor(where, "input", contiguous(input), checks.SIXTEEN_BIT, dims=2)
    g = None if sf_use_ue8m0 else one_scale(where, global_scale, input)
    if g is None and not sf_use_ue8m0:
        raise ValueError(
            f"{where}: global_scale is missing; pass one, for example 448 * 6 / input.abs().max()"
        )
    if g is not None and is_global_scale_inversed:
        g = 1.0 / g
    columns = input.stride(-2) == 1 and input.shape[-1] > 1 and not input.is_contiguous()
    x = contiguous(input.transpose(-2, -1) if columns else input)
    layout = "8x4" if is_sf_8x4_layout else "128x4"
    layout = layout if is_sf_swizzled_layout else "linear"
    run = traced_act if traced(x) else act
    packed, scale = run(_QUANTIZE, x, None, None, None, g, sf_vec_size, None, layout, enable_pdl)
    scale = scale.view(_U8)
    scale = scale.reshape(-1, scale.shape[-1])
    return (packed.transpose(-2, -1), scale.transpose(-2, -1)) if columns else (packed, scale)


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
        one_scale("flashinfer.nvfp4_quantize", a_global_sf, a),
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


def mxfp4_quantize(
    a: Tensor,
    backend: str = "cuda",
    enable_pdl: bool | None = None,
    sfLayout: SfLayout = SfLayout.layout_128x4,
) -> tuple[Tensor, Tensor]:
    """Return MXFP4 codes [M, K / 2] and UE8M0 scales (2-D, in ``sfLayout``) of ``a``."""
    linear, eight = sfLayout == SfLayout.layout_linear, sfLayout == SfLayout.layout_8x4
    return fp4_quantize(a, None, 32, True, not linear, eight, enable_pdl=enable_pdl)


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
    g = one_scale(_SILU.name, global_scale, input)
    run = traced_act if traced(input) else act
    packed, scale = run(_SILU, input, None, None, None, g, 16, None, layout, enable_pdl)
    scale = scale.view(_U8)
    return packed, scale.reshape(-1, scale.shape[-1])
