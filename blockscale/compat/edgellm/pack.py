"""Weights and activations as Edge-LLM's decode ops take them, and back.

A ModelOpt weight is [N, K / 2] codes with scales [N, K / 16] E4M3 along K.  Here a weight is
N-major: payload [K, N / 2], even column in the low nibble, and decode scales [K / 16, N], bytes
S0E5M3 (a float16 without its sign and its seven lowest bits), which hold every E4M3 number exactly.
Words of codes and of scales are decoded as Edge-LLM's device functions do it, in their order.
"""

from __future__ import annotations

import torch

from blockscale.base import edgellm_index as index
from blockscale.compat.edgellm.tensor import Nvfp4Tensor, byte_values, e2m1_values, scale_halfs

Tensor = torch.Tensor

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn)
_E4M3_MAX = 448.0

FORMS = ("half", "bfloat16", "e4m3_half", "e4m3_bfloat16")
"""What a scale byte may be read as, see `scale_word`."""

_BEYOND = 480.0
"""What the bits of E4M3's NaN would be, were they a number."""


def decode_scales(scales: Tensor) -> Tensor:
    """Return the bytes (uint8, same shape) of block scales: ``half_bits >> 7``.

    The scale is rounded to float16, then cut off to three bits of mantissa: exact for E4M3.

    Raises:
        TypeError: ``scales`` is no tensor of floats (raw bytes: view them as float8_e4m3fn first).
        ValueError: a negative scale, or one that is no finite float16.
    """
    if not isinstance(scales, Tensor) or scales.dtype not in _FLOATS:
        kind = str(scales.dtype) if isinstance(scales, Tensor) else type(scales).__name__
        raise TypeError(
            f"decode_scales: scales is {kind}, not a tensor of floats; pass bytes of E4M3 as "
            "scales.view(torch.float8_e4m3fn)"
        )
    half = scales.to(torch.float16)
    if not bool(((half >= 0) & torch.isfinite(half)).all()):
        raise ValueError(
            "decode_scales: a scale is negative, NaN or above 65504, which a byte without a sign "
            "cannot hold; see that these are block scales"
        )
    return index.decode_byte(half.view(torch.int16).to(torch.int32)).to(torch.uint8)


def scale_values(decode: Tensor) -> Tensor:
    """Return the values (float32, same shape) of decode scales: the inverse of `decode_scales`."""
    return scale_halfs(decode).float()


def pack_weight(packed: Tensor, block_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return payload [..., K, N / 2] and decode scales [..., K / 16, N] of a ModelOpt weight.

    Args:
        packed: [..., N, K / 2] uint8, even K in the low nibble.
        block_scale: [..., N, K / 16] float8_e4m3fn, or its bytes as uint8.

    Raises:
        TypeError: another dtype.
        ValueError: shapes that do not fit, or N or K no multiple of 64.
    """
    *_, n, half = _packed("pack_weight", "packed", packed)
    k = 2 * half
    scale = block_scale
    if isinstance(scale, Tensor) and scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e4m3fn)
    lead = list(packed.shape[:-2])
    if not isinstance(scale, Tensor) or list(scale.shape) != [*lead, n, k // index.BLOCK]:
        shape = list(scale.shape) if isinstance(scale, Tensor) else type(scale).__name__
        raise ValueError(
            f"pack_weight: block_scale has shape {shape}, but must have "
            f"{[*lead, n, k // index.BLOCK]}: one for {index.BLOCK} codes of packed"
        )
    return _transposed(packed), decode_scales(scale).transpose(-1, -2).contiguous()


def unpack_weight(payload: Tensor, decode: Tensor) -> tuple[Tensor, Tensor]:
    """Return packed [..., N, K / 2] and scales [..., N, K / 16] float8_e4m3fn of `pack_weight`.

    Raises:
        ValueError: a shape that does not fit, or a scale that E4M3 does not have.
    """
    _check_pair("unpack_weight", payload, decode)
    value = scale_values(decode)
    scale = value.clamp(max=_E4M3_MAX).to(torch.float8_e4m3fn)
    if not torch.equal(scale.float(), value):
        raise ValueError(
            "unpack_weight: a decode scale is no E4M3 number, so it has no place in a ModelOpt "
            "weight; use dequantize_weight"
        )
    return _transposed(payload), scale.transpose(-1, -2).contiguous()


def dequantize_weight(
    payload: Tensor, decode: Tensor, global_scale: Tensor | float | None = None
) -> Tensor:
    """Return the weight [..., K, N] float32: (e2m1 * scale) * global scale, the first exact.

    ``global_scale``: a number, or one for each of the first size (experts).
    """
    _check_pair("dequantize_weight", payload, decode)
    codes = byte_values(payload.view(torch.uint8))
    value = e2m1_values(codes) * scale_values(decode).repeat_interleave(index.BLOCK, -2)
    if global_scale is None:
        return value
    factor = torch.as_tensor(global_scale, dtype=torch.float32, device=value.device)
    if factor.numel() > 1:
        factor = factor.reshape(-1, *[1] * (value.dim() - 1))
    return value * factor.reshape(factor.shape if factor.numel() > 1 else ())


def quantize_activation(x: Tensor, global_scale: Tensor | float) -> Nvfp4Tensor:
    """Return activations [T, H] as codes with a word of scales a tile, for W4A4.

    For 16 values, in float32: scale = E4M3(amax / 6 / global_scale), codes = E2M1(x / (scale *
    global_scale)), ties to even; products with reciprocals where the original has them.  The words'
    bytes are S0E5M3, (s0, s2, s1, s3), as the linear reader takes them.

    Args:
        x: [T, H] float16, bfloat16 or float32, H a multiple of 64.
        global_scale: what a dequantised value is multiplied by; one number.
    """
    where = "quantize_activation"
    if not isinstance(x, Tensor) or x.dtype not in _FLOATS[:3]:
        kind = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{where}: x is {kind}; pass float16, bfloat16 or float32")
    if x.dim() != 2 or x.shape[1] % index.TILE:
        raise ValueError(
            f"{where}: x has shape {list(x.shape)}, but must have [T, H], H a multiple of "
            f"{index.TILE}; pad the rows"
        )
    g = torch.as_tensor(global_scale, dtype=torch.float32, device=x.device).reshape(-1)
    if g.numel() != 1 or not bool((g > 0) & torch.isfinite(g)):
        raise ValueError(f"{where}: global_scale must be one positive number, got {g.tolist()}")
    tokens, hidden = x.shape
    blocks = x.float().reshape(tokens, -1, index.BLOCK)
    amax = torch.where(blocks.isnan(), torch.zeros_like(blocks), blocks.abs()).amax(-1)
    forward = 1.0 / g
    want = forward * (amax * torch.tensor(1.0 / 6.0, device=x.device))
    scale = want.clamp(max=_E4M3_MAX).to(torch.float8_e4m3fn)
    divisor = scale.float() * (1.0 / forward)
    factor = torch.where(amax != 0, 1.0 / divisor, torch.zeros_like(divisor))
    codes = _codes(blocks * factor[..., None]).reshape(tokens, hidden)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    byte = decode_scales(scale).reshape(tokens, -1, index.LANES)
    order = [index.block_byte(at) for at in range(index.LANES)]  # its own inverse
    words = byte[..., order].contiguous().view(torch.int32).reshape(tokens, -1)
    return Nvfp4Tensor.activation(packed, words, g)


def _codes(x: Tensor) -> Tensor:
    """E2M1 codes (uint8) of float32 numbers, ties to even; the sign bit survives, NaN is 6."""
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for bound, with_tie in _BOUNDS:
        code += (magnitude >= bound) if with_tie else (magnitude > bound)
    sign = torch.signbit(x).to(torch.uint8) << 3
    return torch.where(x.isnan(), torch.full_like(code, 7), code | sign)


_BOUNDS = (
    *((0.25, False), (0.75, True), (1.25, False), (1.75, True)),
    *((2.5, False), (3.5, True), (5.0, False)),
)
"""From where the next code begins, and whether the tie belongs to it."""


def _packed(where: str, name: str, value: Tensor) -> tuple[int, ...]:
    """Shape of packed codes; both their sizes must be whole tiles."""
    if not isinstance(value, Tensor) or value.dtype not in (torch.uint8, torch.int8):
        kind = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{where}: {name} is {kind}; pass packed codes as uint8")
    if value.dim() < 2 or value.shape[-2] % index.TILE or value.shape[-1] % index.TILE_BYTES:
        raise ValueError(
            f"{where}: {name} has shape {list(value.shape)}, but its rows must be a multiple of "
            f"{index.TILE} and its bytes of {index.TILE_BYTES}; pad the weight to whole tiles"
        )
    return tuple(value.shape)


def _check_pair(where: str, payload: Tensor, decode: Tensor) -> None:
    *lead, k, half = _packed(where, "payload", payload)
    if not isinstance(decode, Tensor) or decode.dtype != torch.uint8:
        kind = str(decode.dtype) if isinstance(decode, Tensor) else type(decode).__name__
        raise TypeError(
            f"{where}: decode scales are {kind}; pass the uint8 bytes that decode_scales returns"
        )
    if list(decode.shape) != [*lead, k // index.BLOCK, 2 * half]:
        raise ValueError(
            f"{where}: decode scales have shape {list(decode.shape)}, but must have "
            f"{[*lead, k // index.BLOCK, 2 * half]}: one for {index.BLOCK} rows of payload"
        )


def _transposed(packed: Tensor) -> Tensor:
    """Codes [..., B, A / 2] of packed codes [..., A, B / 2]; matrix by matrix, to save memory."""
    matrices = packed.view(torch.uint8).reshape(-1, *packed.shape[-2:])
    rows, half = matrices.shape[1:]
    out = matrices.new_empty(len(matrices), 2 * half, rows // 2)
    for matrix, target in zip(matrices, out, strict=True):
        codes = byte_values(matrix).T
        torch.bitwise_or(codes[:, 0::2], codes[:, 1::2] << 4, out=target)
    return out.reshape(*packed.shape[:-2], 2 * half, rows // 2)


# ---- Words --------------------------------------------------------------------------------------


def code_word(words: Tensor) -> Tensor:
    """Return the 8 values [..., 8] float16 of words of codes, lowest bits first."""
    shifts = torch.arange(index.LANE_VALUES, device=words.device) * 4
    return e2m1_values((words.to(torch.int64)[..., None] >> shifts) & 15).half()


def scale_word(words: Tensor, form: str = "half") -> Tensor:
    """Return the 4 scales [..., 4] of words, in the order of bytes 0, 2, 1, 3.

    Args:
        words: any integer dtype.
        form: "half": releases 0.7 and 0.8, byte << 7 (S0E5M3); "bfloat16": its twin, the byte's
            highest bit << 14 and the others << 4, for scales times 2^7 of at least 1; "e4m3_half"
            and "e4m3_bfloat16": release 0.10, the E4M3 number times 2^7, NaN as 480.

    Raises:
        ValueError: an unknown form.
    """
    if form not in FORMS:
        raise ValueError(
            f"scale_word: form={form!r} is not known; choose one of {', '.join(FORMS)}"
        )
    order = [index.block_byte(at) for at in range(index.LANES)]
    wide = words.to(torch.int64)[..., None] >> 8 * torch.tensor(order, device=words.device)
    byte = (wide & 0xFF).to(torch.uint8)
    if form == "half":
        return scale_halfs(byte)
    if form == "bfloat16":
        bits = byte.to(torch.int16)
        return ((bits >> 7 << 14) | ((bits & 0x7F) << 4)).view(torch.bfloat16)
    value = byte.view(torch.float8_e4m3fn).float()
    sign = 1 - 2 * (byte >> 7).float()
    value = torch.where(value.isnan(), sign * _BEYOND, value) * 128
    return value.to(torch.float16 if form == "e4m3_half" else torch.bfloat16)
