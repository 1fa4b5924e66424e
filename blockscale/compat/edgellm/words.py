"""Words of codes and of scales as Edge-LLM's device functions decode them, in their order."""

from __future__ import annotations

import torch

from blockscale.base import edgellm_index as index
from blockscale.compat.edgellm.tensor import e2m1_values, scale_halfs

Tensor = torch.Tensor

FORMS = ("half", "bfloat16", "e4m3_half", "e4m3_bfloat16")
"""What a scale byte may be read as, see `scale_word`."""

_BEYOND = 480.0
"""What the bits of E4M3's NaN would be, were they a number."""


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
