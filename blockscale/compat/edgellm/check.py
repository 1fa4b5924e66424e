"""Checks of what Edge-LLM's tensors are made of, and of coordinates of their tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from blockscale.base import edgellm_index as index

Tensor = torch.Tensor

_WHERE = "Nvfp4Tensor"

INTEGERS = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
)
"""Dtypes that may hold packed codes."""


def as_bytes(name: str, value: Any, dtypes: Sequence[torch.dtype], unit: int) -> Tensor:
    """Return the bytes [n] of a contiguous tensor, ``unit`` of which are one thing."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{_WHERE}: {name} is a {type(value).__name__}, not a torch tensor; pass a tensor of "
            "codes or words"
        )
    if value.dtype not in dtypes:
        raise TypeError(
            f"{_WHERE}: {name} has dtype {str(value.dtype).removeprefix('torch.')}, which is no "
            "storage of bytes or words; pass uint8 or int32"
        )
    if not value.is_contiguous():
        raise ValueError(
            f"{_WHERE}: {name} of shape {list(value.shape)} has strides {list(value.stride())}, "
            f"but must be contiguous; pass {name}.contiguous()"
        )
    size = value.numel() * value.element_size()
    if size % unit:
        raise ValueError(
            f"{_WHERE}: {name} has {size} bytes, which is not a multiple of {unit}; pass whole "
            f"{'vectors' if unit == index.VECTOR_BYTES else 'words'}"
        )
    return value.detach().reshape(-1).view(torch.uint8)


def is_integer(value: object) -> bool:
    """Return whether ``value`` is an integer, NumPy's included."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def size_of(name: str, value: Any) -> int:
    """Return ``value``; ValueError unless it is an integer >= 0."""
    if not is_integer(value) or value < 0:
        raise ValueError(f"{_WHERE}: {name}={value!r} is not an integer >= 0; pass a size")
    return int(value)


def three_sizes(name: str, values: Any) -> tuple[int, int, int]:
    """Return three sizes."""
    if not isinstance(values, Sequence) or len(values) != 3:
        raise ValueError(
            f"{_WHERE}: {name}={values!r} are not three numbers; pass one for each of x, y and z"
        )
    x, y, z = (size_of(name, value) for value in values)
    return x, y, z


def scale_dims(m_dim: Any, k_dim: Any) -> tuple[int, int]:
    """Return the components that are row and tile of the scales."""
    for name, value in (("scale_m_dim", m_dim), ("scale_k_dim", k_dim)):
        if not is_integer(value) or not 0 <= value <= 2:
            raise ValueError(f"{_WHERE}: {name}={value!r} is not 0, 1 or 2; choose x, y or z")
    if m_dim == k_dim:
        raise ValueError(
            f"{_WHERE}: scale_m_dim and scale_k_dim are both {m_dim}; choose two components"
        )
    return int(m_dim), int(k_dim)


def global_scales(value: Any, device: torch.device) -> Tensor | None:
    """Return global scales [n] float32, or None."""
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return torch.tensor([value], dtype=torch.float32, device=device)
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(
            f"{_WHERE}: global_scale is {kind}, not a number or float32; pass float32 [1] or [E]"
        )
    if value.dim() > 1 or not value.numel():
        raise ValueError(
            f"{_WHERE}: global_scale has shape {list(value.shape)}, but must have [1] or [E], a "
            "number for each expert"
        )
    return value.detach().reshape(-1)


def coordinate(c: Sequence[Any]) -> list[Any]:
    """Return x, y and z; integers must not be negative, expressions pass."""
    try:
        values = list(c)
    except TypeError:
        values = []
    if len(values) != 3:
        raise ValueError(
            f"{_WHERE}: the coordinate {c!r} has no three components; pass (x, y, z), z=0 for a "
            "matrix"
        )
    parts = [_component(axis, value) for axis, value in zip("xyz", values, strict=True)]
    if any(isinstance(part, Tensor) for part in parts):
        return [torch.from_numpy(p) if isinstance(p, np.ndarray) else p for p in parts]
    return parts


def _component(axis: str, value: Any) -> Any:
    if is_integer(value):
        value = int(value)
    elif isinstance(value, Tensor | np.ndarray):
        whole = (
            value.dtype in INTEGERS
            if isinstance(value, Tensor)
            else np.issubdtype(value.dtype, np.integer)
        )
        if not whole:
            raise TypeError(
                f"{_WHERE}: {axis} has dtype {value.dtype}, not an integer one; pass tile numbers"
            )
        value = value.to(torch.int64) if isinstance(value, Tensor) else value.astype(np.int64)
    elif isinstance(value, bool | float | str) or value is None:
        raise TypeError(
            f"{_WHERE}: {axis}={value!r} is not an integer; pass tile numbers or tensors of them"
        )
    else:
        return value  # an expression
    if extremes(value)[0] < 0:
        raise ValueError(
            f"{_WHERE}: {axis}={extremes(value)[0]} is negative; tiles are counted from 0"
        )
    return value


def extremes(value: Any) -> tuple[int, int]:
    """Least and greatest of an integer, array or tensor; none: nothing to object to."""
    if isinstance(value, int):
        return value, value
    size = value.numel() if isinstance(value, Tensor) else value.size
    return (int(value.min()), int(value.max())) if size else (0, -(2**62))
