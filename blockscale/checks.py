"""Checks of the torch functions' arguments; errors say where, what, the rule and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from blockscale.specs import BLOCK_SIZE

ACTIVATIONS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of activations."""

PACKED = tuple(
    getattr(torch, name) for name in ("uint8", "float4_e2m1fn_x2") if hasattr(torch, name)
)
"""Dtypes that hold two E2M1 codes a byte."""

SCALES = {
    "nvfp4": (torch.float8_e4m3fn, torch.uint8),
    "mxfp4": (
        torch.uint8,
        *([torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []),
    ),
}
"""Dtypes of block scales, the one that we return first."""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def choice(where: str, name: str, value: object, allowed: Sequence[str]) -> None:
    """ValueError unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        listed = ", ".join(repr(item) for item in allowed)
        raise ValueError(f"{where}: {name}={value!r} is not known; choose one of {listed}")


def tensor(
    where: str, name: str, value: object, dtypes: Sequence[torch.dtype], dims: int = 1
) -> torch.Tensor:
    """Return ``value``: a contiguous CPU tensor, dtype in ``dtypes``, ``dims`` or more axes."""
    allowed = " or ".join(_name(dtype) for dtype in dtypes)
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{where}: {name} is a {type(value).__name__}, not a torch tensor; "
            f"pass a tensor of {allowed}"
        )
    if value.dtype not in dtypes:
        raise TypeError(
            f"{where}: {name} has dtype {_name(value.dtype)}, but must have {allowed}; "
            "convert it first"
        )
    if value.device.type != "cpu":
        raise ValueError(
            f"{where}: {name} is on device {value.device}, but this kernel runs on the cpu; "
            f"pass {name}.cpu()"
        )
    if value.dim() < dims:
        raise ValueError(
            f"{where}: {name} has shape {list(value.shape)}, but needs at least {dims} "
            f"dimension{'s' if dims > 1 else ''}; the last one is the row that is cut into blocks"
        )
    if not value.is_contiguous():
        raise ValueError(
            f"{where}: {name} of shape {list(value.shape)} has strides {list(value.stride())}, "
            f"but must be contiguous; pass {name}.contiguous()"
        )
    return value


def one_element(where: str, name: str, value: torch.Tensor | None) -> torch.Tensor | None:
    """Return ``value`` [1] float32, or None."""
    if value is None:
        return None
    checked = tensor(where, name, value, (torch.float32,), dims=0)
    if checked.numel() != 1:
        raise ValueError(
            f"{where}: {name} has shape {list(checked.shape)}, but must have one element; a kernel "
            "call has one scale per tensor"
        )
    return checked.reshape(1)


def block_multiple(where: str, name: str, cols: int, fmt: str) -> None:
    """ValueError unless ``cols`` is a multiple of the block size of ``fmt``."""
    block = BLOCK_SIZE[fmt]
    if cols % block:
        raise ValueError(
            f"{where}: {name} has {cols} columns, which is not a multiple of {block}, "
            f"the block size of {fmt}; pad the rows to {-(-cols // block) * block}"
        )


def padded_shape(rows: int, cols: int) -> tuple[int, int]:
    """Shape of scales [rows, cols] in the 128x4 layout."""
    return -(-rows // 128) * 128, -(-cols // 4) * 4


def scales(
    where: str, scale: torch.Tensor, lead: Sequence[int], blocks: int, fmt: str, layout: str
) -> torch.Tensor:
    """Return block scales as uint8, [rows, blocks] or padded; ``lead``: the rows' dimensions."""
    checked = tensor(where, "block_scale", scale, SCALES[fmt]).view(torch.uint8)
    rows = prod(lead)
    padded = padded_shape(rows, blocks)
    got, wanted = list(scale.shape), [*lead, blocks]
    if layout == "linear":
        if got != wanted:
            swizzled = got == list(padded) or got == [padded[0] * padded[1]]
            remedy = (
                "this is the size of the 128x4 layout, pass scale_layout='128x4' or "
                "unswizzle_scales() it"
                if swizzled
                else f"pass one scale per {BLOCK_SIZE[fmt]} elements of a row"
            )
            raise ValueError(
                f"{where}: block_scale has shape {got}, but must have {wanted}; {remedy}"
            )
        return checked.reshape(rows, blocks)
    if got not in (list(padded), [padded[0] * padded[1]]):
        raise ValueError(
            f"{where}: block_scale has shape {got}, but must have {list(padded)} in the "
            "128x4 layout; make it with swizzle_scales()"
        )
    return checked.reshape(padded)
