"""A prepared INT4 weight to layout "tiles64" (`blockscale.ops.moe.tiles`), that of CUDA kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from blockscale.ops import checks
from blockscale.ops.checks import dtype_name
from blockscale.ops.int4.layout import unprocess_weights
from blockscale.ops.moe import tiles as moe_tiles
from blockscale.ops.moe.convert import INT4_LARGEST
from blockscale.specs.int4 import TILE_GROUPS, TILES

if TYPE_CHECKING:
    from blockscale.ops.int4.weight import Given, Int4Weight

Tensor = torch.Tensor

MOST_POINT = 16
"""Zero points of CUDA kernels are from 0 to this, which GPTQ's first format reaches."""


def to_tiles(where: str, given: Given, plain: Int4Weight, dtype: torch.dtype) -> Int4Weight:
    """Return a weight of `_plain` in layout "tiles64"."""
    group = _check_tiles(where, plain, dtype)
    fold = plain.group // group
    numbers = None
    if plain.zeros == "point":
        numbers = _points(where, given, plain)
    elif plain.zero is not None:
        numbers = plain.zero
    order = moe_tiles.natural_order(plain.n).to(plain.device)
    outs: list[tuple[Tensor, Tensor]] = []
    for e in range(plain.packed.shape[0]):
        codes = _in_mma_order(_row_codes(given, plain, e), group)
        scale = plain.scale[e].to(dtype).repeat_interleave(fold, 0).T.contiguous()
        zero = None
        if numbers is not None:
            zero = numbers[e].to(dtype).repeat_interleave(fold, 0).T.contiguous()
        outs.append(moe_tiles.pack_int4(codes, scale, zero, order))
    pre = plain.pre_quant_scale
    return replace(
        plain,
        packed=torch.stack([codes for codes, _ in outs]),
        scale=torch.stack([scale for _, scale in outs]),
        zero=None,
        pre_quant_scale=None if pre is None else pre.to(dtype).contiguous(),
        group=group,
        layout=TILES,
        dtype=dtype,
    )


def _check_tiles(where: str, plain: Int4Weight, dtype: torch.dtype) -> int:
    """Return the group of the kernels, after all checks."""
    if dtype not in checks.SIXTEEN_BIT:
        raise TypeError(
            f"{where}: dtype={dtype_name(dtype)} has no kernel on CUDA; choose bfloat16 or "
            "float16, which x must have"
        )
    group = next((g for g in TILE_GROUPS if plain.group % g == 0), 0)
    if not group or plain.k % plain.group:
        raise ValueError(
            f"{where}: group_size={plain.group} of K={plain.k} has no kernel on CUDA, where groups "
            "are multiples of 32 that divide K; quantise in such groups, or compute on the CPU"
        )
    most = float(plain.scale.abs().amax())
    if not most < INT4_LARGEST[dtype]:  # NaN is not
        raise ValueError(
            f"{where}: scale has a magnitude of {most:g}; kernels for {dtype_name(dtype)} take "
            f"those below {INT4_LARGEST[dtype]:g}, so scale the weight down and pass the factor as "
            "alpha"
        )
    return group


def _points(where: str, given: Given, plain: Int4Weight) -> Tensor:
    """Return zero points [E, G, N] of what was given."""
    shape = plain.scale.shape
    points = given.zero.detach()
    if given.layout == "rows":
        points = points.reshape(shape[0], shape[2], shape[1]).transpose(1, 2)
    points = points.reshape(shape)
    low, high = int(points.min()), int(points.max())
    if low < 0 or high > MOST_POINT:
        raise ValueError(
            f"{where}: zero has points from {low} to {high}, but kernels on CUDA take those from 0 "
            f"to {MOST_POINT}; pass points of unsigned codes"
        )
    return points


def _row_codes(given: Given, plain: Int4Weight, expert: int) -> Tensor:
    """Return codes 0 to 15 of an expert as [N, K / 2], the even k in the low nibble."""
    codes = plain.packed[expert]
    if given.layout == "rows":
        return codes
    if given.layout == "preprocessed":
        moe = plain.experts > 0 if given.moe is None else given.moe
        one = codes[None] if moe else codes
        codes = unprocess_weights(one, sm=given.sm, activation=given.activation, moe=moe)
        codes = codes.view(plain.k, plain.n // 2)
    codes = codes ^ 0x88
    # bytes of rows k and k + 1 hold codes of columns n and n + 1: two by two they change places
    even, odd = codes[0::2], codes[1::2]
    low = (even & 15) | odd << 4
    high = even >> 4 | (odd & 0xF0)
    return torch.stack((low.T, high.T), 1).reshape(plain.n, plain.k // 2).contiguous()


def _in_mma_order(codes: Tensor, group: int) -> Tensor:
    """Return codes [N, K / 2] so that x comes in its own order: each 64 of K permuted.

    Not in groups of 32, which the permutation would mix: there x is permuted.
    """
    if group == 32:
        return codes
    places = torch.tensor(moe_tiles.K_ORDER[0::2], device=codes.device) // 2
    out = torch.empty_like(codes).view(codes.shape[0], -1, moe_tiles.TILE // 2)
    out[:, :, places] = codes.view(out.shape)
    return out.view(codes.shape)
