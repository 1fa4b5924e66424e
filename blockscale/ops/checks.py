"""Checks of the torch functions' arguments; errors say where, what, the rule and the remedy."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch

from blockscale.base.formats import E2M1, FUSED, NUMBERS, QUANTIZED, Number
from blockscale.base.sizes import ceil_div, round_up

ACTIVATIONS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of activations."""

SIXTEEN_BIT = (torch.bfloat16, torch.float16)
"""Dtypes of what the fused ops read."""

DEVICES = ("cpu", "cuda")
"""Types of devices that kernels run on."""


def dtypes_of(number: Number) -> tuple[torch.dtype, ...]:
    """Return the dtypes of tensors that hold such codes, as far as torch has them."""
    return tuple(getattr(torch, name) for name in number.dtypes if hasattr(torch, name))


PACKED = dtypes_of(E2M1)
"""Dtypes that hold two E2M1 codes a byte."""

SCALES = {name: dtypes_of(row.scale) for name, row in QUANTIZED.items()}
"""Dtypes of block scales, the one that we return first."""


FP4: torch.dtype = getattr(torch, "float4_e2m1fn_x2", torch.uint8)
"""What the fused ops return codes as: torch's own dtype, or bytes where torch has none."""


SCALE_DTYPES = {scale: dtypes_of(NUMBERS[scale]) for _, scale in FUSED}
"""Dtypes of block scales by their number format, the one that is allocated first."""

SCALE_FORMAT = {row.block: row.scale.name for row in reversed(FUSED.values())}
"""The number format of block scales where none is named, by block size."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return for example "bfloat16"."""
    return str(dtype).removeprefix("torch.")


class _WithoutData(threading.local):
    on = False


_without_data = _WithoutData()


@contextmanager
def without_data() -> Iterator[None]:
    """Return a context in which meta tensors pass: nothing is going to read them."""
    _without_data.on = True
    try:
        yield
    finally:
        _without_data.on = False


def has_data() -> bool:
    """Return whether tensors are going to be read: false within `without_data`."""
    return not _without_data.on


def choice(where: str, name: str, value: object, allowed: Sequence[str]) -> None:
    """ValueError unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        listed = ", ".join(repr(item) for item in allowed)
        raise ValueError(f"{where}: {name}={value!r} is not known; choose one of {listed}")


def tensor(
    where: str, name: str, value: object, dtypes: Sequence[torch.dtype], dims: int = 1
) -> torch.Tensor:
    """Return ``value``: a contiguous tensor, dtype in ``dtypes``, ``dims`` or more axes."""
    allowed = " or ".join(dtype_name(dtype) for dtype in dtypes)
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{where}: {name} is a {type(value).__name__}, not a torch tensor; "
            f"pass a tensor of {allowed}"
        )
    if value.dtype not in dtypes:
        raise TypeError(
            f"{where}: {name} has dtype {dtype_name(value.dtype)}, but must have {allowed}; "
            "convert it first"
        )
    if value.device.type not in DEVICES and not (value.is_meta and _without_data.on):
        raise ValueError(
            f"{where}: {name} is on device {value.device}, but kernels run on cpu and cuda; "
            f"pass {name}.cpu() or {name}.cuda()"
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


def same_device(where: str, name: str, value: torch.Tensor, of: str, first: torch.Tensor) -> None:
    """ValueError unless ``value`` is on the device of the tensor ``first``, called ``of``."""
    if value.device != first.device:
        raise ValueError(
            f"{where}: {name} is on device {value.device}, but {of} is on {first.device}; pass all "
            f"tensors on one device, for example {name}.to({of}.device)"
        )


def beside(
    where: str,
    name: str,
    value: object,
    dtypes: Sequence[torch.dtype],
    of: str,
    first: torch.Tensor,
    dims: int = 1,
) -> torch.Tensor:
    """Return ``value``: a `tensor` on the device of ``first``, which is called ``of``."""
    checked = tensor(where, name, value, dtypes, dims)
    same_device(where, name, checked, of, first)
    return checked


def sized(
    where: str, name: str, value: torch.Tensor, allowed: Sequence[Sequence[int]], rest: str
) -> None:
    """ValueError that ends with ``rest`` unless ``value`` has just one of the shapes."""
    wanted = [list(sizes) for sizes in allowed]
    if list(value.shape) not in wanted:
        raise ValueError(
            f"{where}: {name} has shape {list(value.shape)}, but must have "
            f"{' or '.join(map(str, wanted))}{rest}"
        )


def activation(where: str, name: str, dtype: torch.dtype) -> None:
    """TypeError unless ``dtype`` is one that activations have."""
    if dtype not in ACTIVATIONS:
        allowed = ", ".join(dtype_name(known) for known in ACTIVATIONS)
        raise TypeError(f"{where}: {name}={dtype} cannot be produced; choose one of {allowed}")


def shape(where: str, name: str, value: torch.Tensor, *allowed: Sequence[int]) -> None:
    """ValueError unless ``value`` has one of the shapes, leading dimensions flattened or not."""
    got = tuple(value.shape)
    for sizes in allowed:
        same_rows = got[-1:] == tuple(sizes[-1:]) and prod(got) == prod(sizes)
        if got == tuple(sizes) or (same_rows and len(sizes) > 1 and len(got) > 1):
            return
    listed = " or ".join(str(list(sizes)) for sizes in allowed)
    raise ValueError(
        f"{where}: {name} has shape {list(got)}, but must have {listed}; pass a tensor of this "
        "shape, or leave an output out to have it allocated"
    )


def no_overlap(where: str, name: str, value: torch.Tensor, of: str, other: torch.Tensor) -> None:
    """ValueError if two contiguous tensors share memory."""
    start, end = value.data_ptr(), value.data_ptr() + value.nbytes
    if start < other.data_ptr() + other.nbytes and other.data_ptr() < end:
        raise ValueError(
            f"{where}: {name} overlaps {of} in memory, but is written while {of} is read; pass a "
            f"copy, {of}.clone()"
        )


def one_element(
    where: str,
    name: str,
    value: torch.Tensor | None,
    of: str = "",
    first: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Return ``value`` [1] float32, or None; on the device of ``first``, which is called ``of``."""
    if value is None:
        return None
    checked = tensor(where, name, value, (torch.float32,), dims=0)
    if first is not None:
        same_device(where, name, checked, of, first)
    if checked.numel() != 1:
        raise ValueError(
            f"{where}: {name} has shape {list(checked.shape)}, but must have one element; a kernel "
            "call has one scale per tensor"
        )
    return checked.reshape(1)


def block_multiple(where: str, name: str, cols: int, fmt: str) -> None:
    """ValueError unless ``cols`` is a multiple of the block size of ``fmt``."""
    block = QUANTIZED[fmt].block
    if cols % block:
        raise ValueError(
            f"{where}: {name} has {cols} columns, which is not a multiple of {block}, "
            f"the block size of {fmt}; pad the rows to {round_up(cols, block)}"
        )


def padded_shape(rows: int, cols: int, tile: int = 128) -> tuple[int, int]:
    """Shape of scales [rows, cols] in the 128x4 layout, or in that of tiles of other rows."""
    return ceil_div(rows, tile) * tile, ceil_div(cols, 4) * 4


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
                else f"pass one scale per {QUANTIZED[fmt].block} elements of a row"
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


def last_size(value: object) -> int | None:
    """Return the size of the last dimension; None for what has none."""
    return value.shape[-1] if isinstance(value, torch.Tensor) and value.dim() else None


def tiles(scale: Any, width: int) -> Any:
    """Return flat 128x4 scales as rows of ``width``; anything else as it is, for the checks."""
    flat = isinstance(scale, torch.Tensor) and scale.dim() == 1 and scale.layout is torch.strided
    return scale.view(-1, width) if flat and width > 0 and not scale.numel() % width else scale


def scale_format(where: str, block_size: int, chosen: str | None) -> str:
    """Return the scale format, the block size's own for None.

    Raises:
        ValueError: a block size or format that is not known, or E8M0 scales of 16 elements.
    """
    if block_size not in SCALE_FORMAT:
        raise ValueError(
            f"{where}: block_size={block_size!r} is not known; choose 16 (E4M3 scales: NVFP4) or "
            "32 (UE8M0 scales: MXFP4)"
        )
    chosen = chosen or SCALE_FORMAT[block_size]
    choice(where, "scale_format", chosen, tuple(SCALE_DTYPES))
    if (block_size, chosen) not in FUSED:
        raise ValueError(
            f"{where}: scale_format='ue8m0' does not go with block_size=16; choose block_size=32, "
            "or scale_format='e4m3'"
        )
    return chosen


def number(where: str, name: str, value: object) -> float:
    """Return ``value`` as a float; TypeError unless it is a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        kind = type(value).__name__
        raise TypeError(f"{where}: {name} is a {kind}, not a number; pass a float")
    return float(value)


def like(
    where: str,
    name: str,
    value: object,
    dtypes: Sequence[torch.dtype],
    of: str,
    first: torch.Tensor,
    *allowed: Sequence[int],
) -> torch.Tensor:
    """Return ``value``: a `tensor` of one of the shapes, on the device of ``first``."""
    checked = beside(where, name, value, dtypes, of, first)
    shape(where, name, checked, *allowed)
    return checked
