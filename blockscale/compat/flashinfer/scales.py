"""Layouts of block scales, shuffled rows, and the way back to floats, by FlashInfer's names."""

from __future__ import annotations

from enum import IntEnum
from math import prod

import torch

from blockscale.compat.flashinfer.errors import public
from blockscale.ops import checks
from blockscale.ops import quant as ops

Tensor = torch.Tensor

_U8 = torch.uint8


class SfLayout(IntEnum):
    """Layouts of block scales."""

    layout_128x4 = 0
    layout_8x4 = 1
    layout_linear = 2


def float32(where: str, name: str, scale: Tensor | float, x: Tensor) -> Tensor:
    """Return a number, or numbers, as float32 [n] on the device of ``x``."""
    if isinstance(scale, Tensor):
        return scale.to(device=x.device, dtype=torch.float32).reshape(-1)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"{where}: {name} is a {type(scale).__name__}; pass a tensor or a number")
    return torch.full((1,), float(scale), dtype=torch.float32, device=x.device)


def _bytes(where: str, name: str, scale: Tensor) -> Tensor:
    """Return the bytes of scales of either format."""
    return checks.tensor(where, name, scale, checks.SCALE_BYTES).view(_U8)


def contiguous(x: Tensor) -> Tensor:
    """Return ``x``, or a contiguous copy."""
    return x.contiguous() if isinstance(x, Tensor) and not x.is_contiguous() else x


DTYPES = (*checks.SIXTEEN_BIT, torch.float8_e4m3fn)
"""Dtypes of what quantisers read."""


@public
def mxfp4_dequantize(
    a_fp4: Tensor, a_sf: Tensor, sfLayout: SfLayout = SfLayout.layout_128x4
) -> Tensor:
    """Return the float32 values [M, K] of MXFP4 codes and scales in ``sfLayout``."""
    linear, eight = sfLayout == SfLayout.layout_linear, sfLayout == SfLayout.layout_8x4
    return e2m1_and_ufp8sf_scale_to_float(a_fp4, a_sf, None, 32, 0, not linear, eight)


@public
def mxfp4_dequantize_host(weight: Tensor, scale: Tensor, group_size: int = 32) -> Tensor:
    """Return the float32 values [..., K] of MXFP4 codes and linear scales."""
    if group_size != 32:
        raise NotImplementedError(
            f"flashinfer.mxfp4_dequantize_host: group_size={group_size}; MXFP4 has 32"
        )
    bytes_ = _bytes("flashinfer.mxfp4_dequantize_host", "scale", scale)
    return ops.dequantize(weight, bytes_, "mxfp4", dtype=torch.float32)


@public
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
        sf_vec_size: elements per block scale, 16 or 32.
        ufp8_type: 1: E4M3, 0: UE8M0.
        is_sf_swizzled_layout: scales are in the 128x4 layout, else linear.
        is_sf_8x4_layout: scales are in the 8x4 layout.

    Raises:
        NotImplementedError: another sf_vec_size or ufp8_type.
        TypeError, ValueError: as `blockscale.dequantize`; sizes of the scales that do not fit.
    """
    where = "flashinfer.e2m1_and_ufp8sf_scale_to_float"
    if sf_vec_size not in (16, 32) or ufp8_type not in (0, 1):
        raise NotImplementedError(
            f"{where}: sf_vec_size={sf_vec_size} with ufp8_type={ufp8_type}; choose 16 or 32 "
            "elements, and 1 for E4M3 or 0 for UE8M0"
        )
    if ufp8_type == 1 and global_scale_tensor is None:
        raise ValueError(f"{where}: global_scale_tensor is missing; pass 1 / the encoding scale")
    codes = checks.tensor(where, "e2m1_tensor", e2m1_tensor, checks.PACKED, dims=2)
    g = None
    if ufp8_type == 1 and global_scale_tensor is not None:
        g = float32(where, "global_scale_tensor", global_scale_tensor, codes)
        checks.one_element(where, "global_scale_tensor", g, "e2m1_tensor", codes)
    scale = _bytes(where, "ufp8_scale_tensor", ufp8_scale_tensor)
    rows, blocks = prod(codes.shape[:-1]), 2 * codes.shape[-1] // sf_vec_size
    swizzled = is_sf_swizzled_layout and not is_sf_8x4_layout
    tile = 128 if swizzled else 8 if is_sf_swizzled_layout else 1
    padded = (rows, blocks) if tile == 1 else checks.padded_shape(rows, blocks, tile)
    if scale.numel() != prod(padded):
        raise ValueError(
            f"{where}: ufp8_scale_tensor has {scale.numel()} elements, but the layout of "
            f"{rows} x {blocks} scales has {prod(padded)}; pass the sizes that were quantised"
        )
    usual = (sf_vec_size, ufp8_type) in ((16, 1), (32, 0))
    fmt = "nvfp4" if ufp8_type == 1 else "mxfp4"
    if tile == 128 and usual:
        return ops.dequantize(codes, scale.reshape(padded), fmt, g, "128x4", torch.float32)
    if tile == 128:
        scale = ops.unswizzle_scales(scale.reshape(padded), rows, blocks)
    elif tile == 8:
        tiles = scale.reshape(padded[0] // 8, padded[1] // 4, 8, 4)
        scale = tiles.transpose(1, 2).reshape(padded)[:rows, :blocks].contiguous()
    scale = scale.reshape(*codes.shape[:-1], blocks)
    if usual:
        return ops.dequantize(codes, scale, fmt, g, "linear", torch.float32)
    if ufp8_type == 1:  # halves of a block have the same scale
        doubled = scale.repeat_interleave(2, dim=-1)
        return ops.dequantize(codes, doubled, fmt, g, "linear", torch.float32)
    halves = codes.view(_U8).reshape(rows * blocks, sf_vec_size // 2)
    filled = torch.cat((halves, torch.zeros_like(halves)), dim=-1)
    values = ops.dequantize(filled, scale.reshape(-1, 1), fmt, None, "linear", torch.float32)
    return values[:, :sf_vec_size].reshape(*codes.shape[:-1], 2 * codes.shape[-1])


@public
def block_scale_interleave(unswizzled_sf: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return elements [R, C] or [E, R, C] in the 128x4 layout, flat; padding is zero.

    Args:
        unswizzled_sf: uint8 or bfloat16; each of E matrices is padded by itself.
        out: output, contiguous and flat, of the same dtype; None: allocated.

    Raises:
        TypeError: another dtype.
        ValueError: other dimensions; an output that does not fit.
    """
    where = "flashinfer.block_scale_interleave"
    x = contiguous(unswizzled_sf)
    checks.tensor(where, "unswizzled_sf", x, (torch.uint8, torch.bfloat16), dims=2)
    if x.dim() > 3:
        raise ValueError(
            f"{where}: unswizzled_sf has shape {list(x.shape)}; pass 2 or 3 dimensions"
        )
    experts, (rows, cols) = prod(x.shape[:-2]), x.shape[-2:]
    high, wide = checks.padded_shape(rows, cols)
    if out is not None:
        size = (experts * high * wide,)
        checks.like(where, "out", out, (x.dtype,), "unswizzled_sf", x, size, output=True)
    if x.dim() == 2 and x.dtype == torch.uint8:
        return ops.swizzle_scales(x, out=out).reshape(-1)
    padded = torch.zeros((experts, high, wide), dtype=x.dtype, device=x.device)
    padded[:, :rows, :cols] = x
    tiles = padded.reshape(experts, high // 128, 4, 32, wide // 4, 4)
    flat = tiles.permute(0, 1, 4, 3, 2, 5).reshape(-1)
    return flat if out is None else out.copy_(flat)


nvfp4_block_scale_interleave = block_scale_interleave


@public
def shuffle_matrix_a(input_tensor: Tensor, epilogue_tile_m: int) -> Tensor:
    """Return a matrix [M, K] with its rows in the order of TRT-LLM's kernels.

    Of every S rows, row ``S / 8 * i + j`` (j < S / 8) goes to place ``8 * j + i``.  S is 32 where
    ``epilogue_tile_m`` is a multiple of 128, else 16, and must divide M.
    """
    where, size = "flashinfer.shuffle_matrix_a", 16 if epilogue_tile_m % 128 else 32
    if not isinstance(input_tensor, Tensor) or input_tensor.dim() != 2:
        raise TypeError(f"{where}: input_tensor is no matrix; pass a tensor [M, K]")
    rows, cols = input_tensor.shape
    if rows % size:
        raise ValueError(
            f"{where}: input_tensor has {rows} rows, but must have a multiple of {size}; pad it"
        )
    groups = input_tensor.reshape(rows // size, 8, size // 8, cols)
    return groups.transpose(1, 2).reshape(rows, cols)


@public
def shuffle_matrix_sf_a(
    input_tensor: Tensor, epilogue_tile_m: int, num_elts_per_sf: int = 16
) -> Tensor:
    """Return linear scales [M, C], M a multiple of 128, shuffled likewise, in the 128x4 layout.

    The result is flat; ``num_elts_per_sf`` is 16 or 32.
    """
    where = "flashinfer.shuffle_matrix_sf_a"
    if num_elts_per_sf not in (16, 32):
        raise ValueError(f"{where}: num_elts_per_sf={num_elts_per_sf}; choose 16 or 32")
    if input_tensor.dim() == 2 and input_tensor.shape[0] % 128:
        raise ValueError(
            f"{where}: input_tensor has {input_tensor.shape[0]} rows, but must have a multiple of "
            "128; pad it"
        )
    return block_scale_interleave(shuffle_matrix_a(input_tensor, epilogue_tile_m))
