"""Kernel arguments: what a caller may pass, and the parameter block made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import EmulationError
from .memory import GlobalMemory
from .program import Program
from .tma import TensorMap


@dataclass(frozen=True, eq=False)
class Struct:
    """A by-value struct: `data` with the device addresses of arrays stored at byte offsets."""

    data: bytes
    pointers: Mapping[int, Any]


class Buffers:
    """The arrays among the arguments, each once, as global memory."""

    def __init__(self, memory: GlobalMemory) -> None:
        self.memory = memory
        self.known: dict[tuple[int, int], int] = {}
        self.copies: list[tuple[Any, np.ndarray]] = []

    def address(self, value: Any, name: str) -> int:
        """Return the device address of an array (NumPy, torch CPU, or anything with __array__)."""
        array = value if isinstance(value, np.ndarray) else as_numpy(value, name)
        if array.size == 0:
            return self.memory.add(0, name)
        if not array.flags.c_contiguous:
            flat = np.ascontiguousarray(array)
            self.copies.append((array, flat))
            array = flat
        data = array.reshape(-1).view(np.uint8)
        key = (array.__array_interface__["data"][0], data.size)
        if key not in self.known:
            self.known[key] = self.memory.add(data.size, name, data)
        return self.known[key]

    def write_back(self) -> None:
        """Give changed bytes back to arrays that were not contiguous."""
        for array, flat in self.copies:
            if array.flags.writeable:
                array[...] = flat


def as_numpy(value: Any, name: str) -> np.ndarray:
    """Return a view of a tensor's memory as bytes-compatible NumPy array."""
    if hasattr(value, "untyped_storage"):  # torch: any dtype, also those NumPy lacks
        import torch

        if value.device.type != "cpu":
            raise EmulationError(f"{name} is on {value.device}; the emulator takes tensors in host memory: .cpu()")
        if not value.is_contiguous():
            raise EmulationError(f"{name} is not contiguous; pass .contiguous() and copy the result back")
        return value.detach().view(torch.uint8).numpy() if value.element_size() else value.numpy()
    try:
        return np.asarray(value)
    except (TypeError, ValueError):
        raise EmulationError(
            f"{name} is a {type(value).__name__}; pass an array, an int, a float, None, bytes, "
            "emulator.TensorMap or emulator.Struct"
        ) from None


def pack(program: Program, args: Sequence[Any], buffers: Buffers) -> bytes:
    """Return the parameter block of `args` (PTX ISA 7.1: layout of parameters)."""
    if len(args) != len(program.params):
        raise EmulationError(
            f"{program.name} has {len(program.params)} parameters and got {len(args)} arguments"
        )
    block = bytearray(program.param_bytes)
    for i, (value, var, offset) in enumerate(
        zip(args, program.params, program.param_offsets, strict=True)
    ):
        data = argument(value, var.size, f"argument {i}", buffers)
        block[offset : offset + len(data)] = data
    return bytes(block)


def argument(value: Any, size: int, name: str, buffers: Buffers) -> bytes:
    """Return the bytes of one argument; `size` is the parameter's."""
    if value is None:
        return bytes(size)
    if isinstance(value, TensorMap):
        if value.address is None:
            return fit(value.encode(buffers.address(value.array, f"{name}'s array")), size, name)
        return fit(value.encode(), size, name)
    if isinstance(value, Struct):
        data = bytearray(value.data)
        for at, target in value.pointers.items():
            data[at : at + 8] = buffers.address(target, f"{name}'s array at {at}").to_bytes(8, "little")
        return fit(bytes(data), size, name)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return fit(bytes(value), size, name)
    if isinstance(value, np.generic):
        return fit(value.tobytes(), size, name, exact=False)
    if isinstance(value, (bool, int)):
        bits = 8 * size
        if not -(1 << (bits - 1)) <= value < (1 << bits):
            raise EmulationError(f"{name} is {value}, which does not fit the parameter's {bits} bits")
        return (int(value) & ((1 << bits) - 1)).to_bytes(size, "little")
    if isinstance(value, float):
        kinds = {2: np.float16, 4: np.float32, 8: np.float64}
        if size not in kinds:
            raise EmulationError(f"{name} is a float and the parameter has {size} bytes")
        return kinds[size](value).tobytes()
    return fit(buffers.address(value, name).to_bytes(8, "little"), size, name)


def fit(data: bytes, size: int, name: str, exact: bool = True) -> bytes:
    """Return `data`, which must have the parameter's size (scalars: at most)."""
    if len(data) == size or (not exact and len(data) < size):
        return data.ljust(size, b"\0")
    raise EmulationError(f"{name} has {len(data)} bytes and the parameter has {size}")
