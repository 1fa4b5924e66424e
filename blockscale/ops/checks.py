"""Checks of the torch functions' arguments; errors say where, what, the rule and the remedy."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch.compiler import is_compiling

from blockscale.base import tensors
from blockscale.base.formats import E2M1, FLOAT, FUSED, NUMBERS, QUANTIZED, Format, Number
from blockscale.base.sizes import ceil_div, round_up
from blockscale.specs.spec import check_choice

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

SCALE_BYTES = tuple(dict.fromkeys(dtype for held in SCALES.values() for dtype in held))
"""Those of block scales of any format."""


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


choice = check_choice
"""ValueError unless an option is one of those that there are."""


def tensor(
    where: str,
    name: str,
    value: object,
    dtypes: Sequence[torch.dtype],
    dims: int = 1,
    *,
    output: bool = False,
) -> torch.Tensor:
    """Return ``value``: a contiguous tensor, dtype in ``dtypes``, ``dims`` or more axes."""
    allowed = " or ".join(dtype_name(dtype) for dtype in dtypes)
    if value is None:
        raise TypeError(f"{where}: {name} is missing (None); pass a torch tensor of {allowed}")
    if not isinstance(value, torch.Tensor):
        made = ", or leave it out" if output else _made_of(name, value, dtypes[0])
        raise TypeError(
            f"{where}: {name} is a {type(value).__name__}, not a torch tensor; "
            f"pass a tensor of {allowed}{made}"
        )
    if value.dtype not in dtypes:
        remedy = "allocate it with that dtype, or leave it out"
        raise TypeError(
            f"{where}: {name} has dtype {dtype_name(value.dtype)}, but must have {allowed}; "
            f"{remedy if output else _of_dtype(name, value.dtype, dtypes)}"
        )
    if value.is_meta and not _without_data.on:
        raise ValueError(
            f"{where}: {name} is on device meta, where tensors have no numbers, but kernels run on "
            f"cpu and cuda; load or make {name} on one of these"
        )
    if value.device.type not in DEVICES and not value.is_meta:
        raise ValueError(
            f"{where}: {name} is on device {value.device}, but kernels run on cpu and cuda; "
            f"pass {name}.cpu() or {name}.cuda()"
        )
    if value.dim() < dims:
        raise ValueError(
            f"{where}: {name} has shape {list(value.shape)}, but needs at least {dims} "
            f"dimension{'s' if dims > 1 else ''}; pass {name}.reshape({'1, ' * (dims - 1)}-1) if "
            "it is a single row"
        )
    if value.layout is not torch.strided:
        raise ValueError(
            f"{where}: {name} is {str(value.layout).removeprefix('torch.')}, but must be dense; "
            f"pass {name}.to_dense()"
        )
    if not value.is_contiguous():
        raise ValueError(
            f"{where}: {name} of shape {list(value.shape)} has strides {list(value.stride())}, "
            f"but must be contiguous; pass {name}.contiguous()"
        )
    if not is_compiling() and value.is_neg():
        what, remedy = tensors.NEGATIVE
        raise ValueError(f"{where}: {name} {what}; pass {remedy.format(name)}")
    return value


def _made_of(name: str, value: object, dtype: torch.dtype) -> str:
    """Return how a tensor is made of what is none; empty where that is not known."""
    made = ""
    if isinstance(value, torch.nn.Module):
        made = f"{name}.weight"
    elif hasattr(value, "__array__"):
        made = f"torch.from_numpy({name})"
    elif isinstance(value, (list, tuple)):
        stacked = value and isinstance(value[0], torch.Tensor)
        made = f"torch.stack({name})" if stacked else f"torch.tensor({name}, dtype={dtype})"
    elif isinstance(value, (int, float)) and dtype.itemsize > 1:
        made = f"torch.tensor([{value}], dtype={dtype})"
    return made and f", for example {made}"


def _of_dtype(name: str, got: torch.dtype, dtypes: Sequence[torch.dtype]) -> str:
    """Return what to do with a tensor of another dtype: to convert it is right for numbers only."""
    wanted = dtypes[0]
    if all(dtype.itemsize == 1 for dtype in dtypes):
        return _as_bytes(name, got, dtypes)
    if not wanted.is_floating_point:
        if got.is_floating_point:
            return f"pass whole numbers, as torch.{dtype_name(wanted)}"
    elif got in (torch.uint8, torch.int8, *PACKED):
        return (
            "bytes hold codes or scales of nvfp4 or mxfp4: pass values, as dequantize() returns "
            "them for codes"
        )
    return f"pass {name}.to(torch.{dtype_name(wanted)})"


def _as_bytes(name: str, got: torch.dtype, dtypes: Sequence[torch.dtype]) -> str:
    """Return what to do with a tensor that holds no such codes or scales."""
    if got == torch.int8 and torch.uint8 in dtypes:
        return f"pass the same bytes, {name}.view(torch.uint8)"
    if {torch.uint8, torch.int8}.issuperset(dtypes):
        return (
            "codes and zero points of int4 are bytes: blockscale.checkpoints reads those of AWQ "
            "and GPTQ, and quantize() makes nvfp4 and mxfp4 of values"
        )
    formats = [fmt for fmt, held in SCALES.items() if got in held and FP4 not in dtypes]
    if formats:
        return (
            f"such block scales are those of {' and '.join(formats)}: pass this as the format, or "
            "scales of the other"
        )
    if got.is_floating_point:
        return (
            "to convert values does not quantise them: pass the codes and block scales that "
            "quantize() returns for them"
        )
    return f"pass the codes or scales as bytes, of which {name} seems to hold several in a word"


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
    *,
    output: bool = False,
) -> torch.Tensor:
    """Return ``value``: a `tensor` on the device of ``first``, which is called ``of``."""
    checked = tensor(where, name, value, dtypes, dims, output=output)
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
            f"{' or '.join(map(str, wanted))}{transposed(name, value.shape, *wanted) or rest}"
        )


def transposed(name: str, got: Sequence[int], *allowed: Sequence[int]) -> str:
    """Return the end of an error for a tensor with its last axes exchanged; empty for others."""
    if len(got) < 2 or [*got[:-2], got[-1], got[-2]] not in [list(sizes) for sizes in allowed]:
        return ""
    turned = f"{name}.T" if len(got) == 2 else f"{name}.transpose(-2, -1)"
    return f"; it is transposed, so pass {turned}.contiguous()"


def activation(
    where: str,
    name: str,
    dtype: object,
    allowed: Sequence[torch.dtype] = ACTIVATIONS,
    why: str = "cannot be produced",
) -> None:
    """TypeError unless ``dtype`` is one that activations have, or one of ``allowed``."""
    if dtype in allowed:
        return
    named = getattr(torch, str(dtype).removeprefix("torch."), None)
    if named in allowed:
        raise TypeError(
            f"{where}: {name}={dtype!r} is a {type(dtype).__name__}, not a torch.dtype; pass "
            f"{named}"
        )
    listed = ", ".join(map(str, allowed))
    raise TypeError(f"{where}: {name}={dtype!r} {why}; choose one of {listed}")


def shape(
    where: str, name: str, value: torch.Tensor, *allowed: Sequence[int], output: bool = False
) -> None:
    """ValueError unless ``value`` has one of the shapes, leading dimensions flattened or not."""
    got = tuple(value.shape)
    for sizes in allowed:
        same_rows = got[-1:] == tuple(sizes[-1:]) and prod(got) == prod(sizes)
        if got == tuple(sizes) or (same_rows and len(sizes) > 1 and len(got) > 1):
            return
    listed = " or ".join(str(list(sizes)) for sizes in allowed)
    remedy = "; pass a tensor of this shape" + (
        ", or leave it out to have it allocated" if output else ""
    )
    raise ValueError(
        f"{where}: {name} has shape {list(got)}, but must have {listed}"
        f"{transposed(name, got, *allowed) or remedy}"
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
            f"{where}: {name} has shape {list(checked.shape)}, but must have one element, as there "
            "is one for the whole tensor; pass a tensor of shape [1]"
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
    where: str,
    scale: torch.Tensor,
    lead: Sequence[int],
    blocks: int,
    fmt: str,
    layout: str | None = None,
) -> torch.Tensor:
    """Return block scales as uint8, [rows, blocks] or padded.

    ``lead``: the rows' dimensions; ``layout`` None: linear, as the function has no choice.
    """
    checked = tensor(where, "block_scale", scale, SCALES[fmt]).view(torch.uint8)
    rows, cols = prod(lead), blocks * QUANTIZED[fmt].block

    def shapes(block: int, tiled: bool) -> list[list[int]]:
        padded = padded_shape(rows, cols // block)
        return [[*padded], [prod(padded)]] if tiled else [[*lead, cols // block]]

    got, tiled = list(scale.shape), layout == "128x4"
    wanted = shapes(QUANTIZED[fmt].block, tiled)
    if got not in wanted:
        remedy = transposed("block_scale", got, wanted[0])
        remedy = remedy or other_format(got, fmt, QUANTIZED, lambda block: shapes(block, tiled))
        if not remedy and not tiled and got in shapes(QUANTIZED[fmt].block, True):
            plain = f"unswizzle_scales(block_scale, {rows}, {blocks})"
            choice = f"scale_layout='128x4', or {plain}" if layout else plain
            remedy = f"; this is the size of the 128x4 layout, so pass {choice}"
        if not remedy:
            linear = f"; pass one scale per {QUANTIZED[fmt].block} elements of a row"
            remedy = "; make it with swizzle_scales()" if tiled else linear
        said = " in the 128x4 layout" if tiled else ""
        raise ValueError(
            f"{where}: block_scale has shape {got}, but must have {wanted[0]}{said}{remedy}"
        )
    return checked.reshape(wanted[0] if tiled else (rows, blocks))


def other_format(
    got: Sequence[int],
    fmt: str,
    known: Mapping[str, Format],
    shapes: Callable[[int], Sequence[Sequence[int]]],
) -> str:
    """Return the end of an error for scales of the size of another format; empty for others.

    ``shapes`` gives those that scales may have, by the elements of a block.
    """
    for row in known.values():
        other = row.block != known[fmt].block and row.scale is not FLOAT
        if other and list(got) in [list(sizes) for sizes in shapes(row.block)]:
            name = row.name
            return f"; this is the size for {name}, so pass fmt={name!r}, or scales of {fmt}"
    return ""


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
    if block_size not in tuple(SCALE_FORMAT):  # it need not be hashable
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


def number(where: str, name: str, value: object, least: float = -math.inf) -> float:
    """Return ``value`` as a float: TypeError unless it is one, ValueError if NaN or too small."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        kind = type(value).__name__
        raise TypeError(f"{where}: {name} is a {kind}, not a number; pass a float")
    if not value >= least:  # NaN is not
        rule = "be a number" if math.isinf(least) else f"be {least:g} or more"
        raise ValueError(f"{where}: {name}={value!r}, but must {rule}; pass another")
    return float(value)


def like(
    where: str,
    name: str,
    value: object,
    dtypes: Sequence[torch.dtype],
    of: str,
    first: torch.Tensor,
    *allowed: Sequence[int],
    output: bool = False,
) -> torch.Tensor:
    """Return ``value``: a `tensor` of one of the shapes, on the device of ``first``."""
    checked = beside(where, name, value, dtypes, of, first, output=output)
    shape(where, name, checked, *allowed, output=output)
    return checked
