"""FlashInfer's functions on scales and codes, and what all of its functions share."""

from __future__ import annotations

from enum import IntEnum
from math import prod

import torch

from blockscale.ops import checks
from blockscale.ops import quant as ops

Tensor = torch.Tensor

_U8 = torch.uint8


class SfLayout(IntEnum):
    """Layouts of block scales."""

    layout_128x4 = 0
    layout_8x4 = 1
    layout_linear = 2


def contiguous(x: Tensor) -> Tensor:
    """Return ``x``, or a contiguous copy."""
    return x.contiguous() if isinstance(x, Tensor) and not x.is_contiguous() else x


def one_scale(where: str, global_scale: Tensor | float | None, x: Tensor) -> Tensor | None:
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


def mxfp4_dequantize(
    a_fp4: Tensor, a_sf: Tensor, sfLayout: SfLayout = SfLayout.layout_128x4
) -> Tensor:
    """Return the float32 values [M, K] of MXFP4 codes and scales in ``sfLayout``."""
    linear, eight = sfLayout == SfLayout.layout_linear, sfLayout == SfLayout.layout_8x4
    return e2m1_and_ufp8sf_scale_to_float(a_fp4, a_sf, None, 32, 0, not linear, eight)


def mxfp4_dequantize_host(weight: Tensor, scale: Tensor, group_size: int = 32) -> Tensor:
    """Return the float32 values [..., K] of MXFP4 codes and linear scales."""
    if group_size != 32:
        raise NotImplementedError(
            f"flashinfer.mxfp4_dequantize_host: group_size={group_size}; MXFP4 has 32"
        )
    return ops.dequantize(weight, scale.view(_U8), "mxfp4", dtype=torch.float32)


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
    g = one_scale(where, None if ufp8_type == 0 else global_scale_tensor, codes)
    scale = ufp8_scale_tensor.view(_U8)
    rows, blocks = prod(codes.shape[:-1]), 2 * codes.shape[-1] // sf_vec_size
    swizzled = is_sf_swizzled_layout and not is_sf_8x4_layout
    tile = 128 if swizzled else 8 if is_sf_swizzled_layout else 1
    padded = (-(-rows // tile) * tile, blocks if tile == 1 else -(-blocks // 4) * 4)
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


def block_scale_interleave(unswizzled_sf: Tensor) -> Tensor:
    """Return elements [R, C] or [E, R, C] in the 128x4 layout, flat; padding is zero.

    Args:
        unswizzled_sf: uint8 or bfloat16; each of E matrices is padded by itself.

    Raises:
        TypeError: another dtype.
        ValueError: other dimensions.
    """
    where = "flashinfer.block_scale_interleave"
    x = contiguous(unswizzled_sf)
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
