"""A parameter of a kernel as a manifest describes it, and what follows from that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tvm_ffi

from blockscale.base import shapes, tensors
from blockscale.specs import spec


@dataclass(frozen=True)
class Param(spec.Param):
    """One parameter, as spec and manifest describe it, with what the checks derive from that.

    ``align``: the bytes of which the data address must be a multiple; None: those of an element.
    """

    align: int | None = None

    @staticmethod
    def from_manifest(entry: Mapping[str, Any]) -> Param:
        """Return the parameter that a manifest describes."""
        shape = entry["shape"]
        return Param(**{**entry, "shape": None if shape is None else tuple(shape)})

    @property
    def scalar(self) -> bool:
        """Whether it is a number passed by value."""
        return self.shape is None

    @property
    def flattens(self) -> bool:
        """Whether leading dimensions beyond the declared ones are taken as one (on CUDA)."""
        return bool(self.dims) and self.dims[0].symbol is not None

    @property
    def alignment(self) -> int:
        """Bytes of which the data address must be a multiple."""
        return self.align or self.itemsize

    @cached_property
    def dims(self) -> tuple[shapes.Dim, ...]:
        """The shape, parsed; empty for a scalar."""
        return tuple(shapes.parse(dim) for dim in self.shape or ())

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return int(tvm_ffi.dtype(self.dtype).itemsize)

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """Dtypes that an argument may have: the declared one, and those with the same bytes."""
        words = (self.storage or "").split() if self.dtype == "uint8" else []
        found = (dtype for word in words for dtype in tensors.STORAGE_DTYPES.get(word, ()))
        return tuple(dict.fromkeys((self.dtype, *found)))

    @property
    def type(self) -> str:
        """For example ``float32[rows, 384]``, or ``float32`` for a scalar."""
        if self.shape is None:
            return self.dtype
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    def __str__(self) -> str:
        default = "" if self.default is None else f" = {self.default:g}"
        return f"{self.name}: {self.type}{default}"
