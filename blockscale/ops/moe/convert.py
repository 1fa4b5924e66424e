"""Weights of an MoE layer from layout "linear" to "tiles64" (`moe.tiles`), and back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from blockscale.ops.moe import tiles as moe_tiles

if TYPE_CHECKING:
    from blockscale.ops.moe.weights import MoeWeights

Tensor = torch.Tensor

E8M0_BIAS, E8M0_NAN = 127, 255


def to_tiles(where: str, plain: MoeWeights, dtype: torch.dtype) -> MoeWeights:
    """Return linear weights in layout "tiles64"."""
    _check_scales(where, plain, dtype)
    int4 = plain.fmt == "int4"
    device = plain.device
    order = moe_tiles.paired_order(plain.intermediate, plain.gated).to(device)
    natural = moe_tiles.natural_order(plain.hidden).to(device)
    scales = plain.w13_scale, plain.w2_scale
    tops = [_largest(scale) if plain.fmt == "mxfp4" else None for scale in scales]
    w13 = _matrices(plain, "w13", order, tops[0], dtype)
    w2 = _matrices(plain, "w2", natural, tops[1], dtype)
    return replace(
        plain,
        w13=w13[0],
        w13_scale=w13[1],
        w13_zero=None,
        w13_global=plain.w13_global * _powers(tops[0], device)[:, None],
        w13_bias=_ordered(plain.w13_bias, order),
        w2=w2[0],
        w2_scale=w2[1],
        w2_zero=None,
        w2_global=plain.w2_global * _powers(tops[1], device),
        w2_bias=_ordered(plain.w2_bias, natural),
        layout="tiles64",
        dtype=dtype if int4 else None,
    )


def _matrices(
    plain: MoeWeights, name: str, order: Tensor, tops: list[int] | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of all experts of one weight, converted one after the other."""
    codes, scale = getattr(plain, name), getattr(plain, f"{name}_scale")
    zero = getattr(plain, f"{name}_zero")
    outs: list[Tensor] = []
    for e in range(plain.experts):
        if plain.fmt == "int4":
            zeros = None if zero is None else zero[e].to(dtype)
            made = moe_tiles.pack_int4(codes[e], scale[e].to(dtype), zeros, order)
        else:
            top = None if tops is None else tops[e]
            made = moe_tiles.pack_fp4(codes[e], scale[e], top, order)
        if not outs:
            outs = [value.new_empty((plain.experts, *value.shape)) for value in made]
        for out, value in zip(outs, made, strict=True):
            out[e] = value
    return outs[0], outs[1]


def _largest(scale: Tensor) -> list[int]:
    """Return the largest scale byte of each expert."""
    values: list[int] = scale.view(torch.uint8).flatten(1).amax(1).tolist()
    return values


def _powers(tops: list[int] | None, device: torch.device) -> Tensor:
    """Return 2^(largest scale byte - 127) of each expert of mxfp4, else ones."""
    values = [1.0] if tops is None else [2.0 ** (top - E8M0_BIAS) for top in tops]
    return torch.tensor(values, dtype=torch.float32, device=device)


def with_biases(tiles: MoeWeights, w13_bias: Tensor | None, w2_bias: Tensor | None) -> MoeWeights:
    """Return tiled weights with biases [E, rows] and [E, H], gate rows first; None: 0."""
    e, device = tiles.experts, tiles.device
    w13 = torch.zeros((e, tiles.rows), device=device) if w13_bias is None else w13_bias.float()
    w2 = torch.zeros((e, tiles.hidden), device=device) if w2_bias is None else w2_bias.float()
    order = moe_tiles.paired_order(tiles.intermediate, tiles.gated).to(tiles.device)
    natural = moe_tiles.natural_order(tiles.hidden).to(tiles.device)
    return replace(tiles, w13_bias=_ordered(w13, order), w2_bias=_ordered(w2, natural))


def _ordered(bias: Tensor | None, order: Tensor) -> Tensor | None:
    """Return biases [E, rows] in the rows' order, those of padding 0."""
    if bias is None:
        return None
    return bias.index_select(1, order.clamp(min=0)).masked_fill_(order < 0, 0)


INT4_LARGEST = {torch.bfloat16: 2.0**15, torch.float16: 2.0**12}
"""Scales of int4 are below: kernels multiply them by 2^112 (bfloat16), or by 15 (float16)."""


def _check_int4_scales(where: str, plain: MoeWeights, dtype: torch.dtype) -> None:
    limit = INT4_LARGEST[dtype]
    for name in ("w13_scale", "w2_scale"):
        for expert, scale in enumerate(getattr(plain, name)):
            most = float(scale.abs().amax())
            if not most < limit:  # NaN is not
                kernels = f"kernels for {str(dtype).removeprefix('torch.')}"
                raise ValueError(
                    f"{where}: {name} of expert {expert} has a scale of magnitude {most:g}; "
                    f"{kernels} take those below {limit:g}, so scale the weight down and the "
                    "activations or the output up"
                )


def _check_scales(where: str, plain: MoeWeights, dtype: torch.dtype) -> None:
    """ValueError for scales that the kernels' decoding does not know."""
    if plain.fmt == "int4":
        _check_int4_scales(where, plain, dtype)
        return
    limit = moe_tiles.E4M3_LARGEST if plain.fmt == "nvfp4" else E8M0_NAN - 1
    for name in ("w13_scale", "w2_scale"):
        scale = getattr(plain, name)
        bad = int(scale.amax())
        if bad <= limit:
            continue
        expert = int((scale.flatten(1).amax(1) > limit).nonzero()[0])
        what = "NaN" if plain.fmt == "mxfp4" else "NaN or below zero"
        raise ValueError(
            f"{where}: {name} of expert {expert} has the byte {bad:#x}, which is {what}; block "
            "scales must be finite and not negative, so quantise the weight again"
        )


# ---- And back -----------------------------------------------------------------------------------


def to_linear(tiles: MoeWeights) -> MoeWeights:
    """Return tiled weights in layout "linear"."""
    order = moe_tiles.paired_order(tiles.intermediate, tiles.gated).to(tiles.device)
    w13 = _untiled(tiles, "w13", order, tiles.rows, tiles.hidden)
    natural = moe_tiles.natural_order(tiles.hidden).to(tiles.device)
    w2 = _untiled(tiles, "w2", natural, tiles.hidden, tiles.intermediate)
    return replace(
        tiles,
        w13=w13[0],
        w13_scale=w13[1],
        w13_zero=w13[2],
        w13_global=tiles.w13_global * w13[3][:, None],
        w13_bias=_unordered(tiles.w13_bias, order, tiles.rows),
        w2=w2[0],
        w2_scale=w2[1],
        w2_zero=w2[2],
        w2_global=tiles.w2_global * w2[3],
        w2_bias=_unordered(tiles.w2_bias, natural, tiles.hidden),
        layout="linear",
        dtype=None,
    )


def _untiled(
    tiles: MoeWeights, name: str, order: Tensor, rows: int, cols: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return codes, scales and zeros of all experts, and what their global scales gain."""
    outs: list[list[Tensor]] = [[], [], []]
    gains = []
    codes, scale = getattr(tiles, name), getattr(tiles, f"{name}_scale")
    blocks = cols // tiles.group
    for e in range(tiles.experts):
        kind = "int4" if tiles.fmt == "int4" else "e2m1"
        outs[0].append(_back(moe_tiles.unpack_codes(codes[e], kind), order, rows)[:, : cols // 2])
        byte, zero, gain = _unscaled(tiles, scale[e])
        gains.append(gain)
        for out, value in zip(outs[1:], (byte, zero), strict=True):
            if value is not None:
                out.append(_back(value, order, rows)[:, :blocks])
    factors = torch.tensor(gains, dtype=torch.float32, device=tiles.device)
    zeros = torch.stack(outs[2]) if outs[2] else None
    return torch.stack(outs[0]), torch.stack(outs[1]), zeros, factors


def _unscaled(tiles: MoeWeights, scale: Tensor) -> tuple[Tensor, Tensor | None, float]:
    """Return scales and zeros [rows, blocks] of one expert, and the gain of its global scale."""
    if tiles.fmt == "int4":
        assert tiles.dtype is not None, "int4 scales have a dtype"
        parts = 2 if tiles.zero else 1
        values = moe_tiles.unpack_scales(scale.contiguous().view(tiles.dtype), tiles.group, parts)
        zero = values[..., 1].to(torch.uint8) if tiles.zero else None
        return values[..., 0].float(), zero, 1.0
    byte = moe_tiles.unpack_scales(scale, tiles.group)[..., 0]
    if tiles.fmt == "nvfp4":
        return moe_tiles.e4m3_inverse().to(byte.device)[byte.long()], None, 1.0
    # b' stands for 2^(b' - 237), an E8M0 byte for 2^(byte - 127): small ones need a shift
    used = byte[byte > 0]
    apart = moe_tiles.E8M0_TOP - E8M0_BIAS
    shift = max(0, apart - int(used.min())) if used.numel() else 0
    plain = (byte.int() - apart + shift).clamp(0).to(torch.uint8)
    return plain, None, 2.0**-shift


def _back(value: Tensor, order: Tensor, rows: int) -> Tensor:
    """Return the rows of a matrix that lie in ``order``."""
    out = value.new_empty((rows, value.shape[1]))
    real = order >= 0
    out[order[real]] = value[real]
    return out


def _unordered(bias: Tensor | None, order: Tensor, rows: int) -> Tensor | None:
    return None if bias is None else _back(bias.T, order, rows).T.contiguous()
