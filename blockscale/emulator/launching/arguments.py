"""Kernel arguments: what a caller may pass, and the parameter block made of it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blockscale.emulator.errors import EmulationError
from blockscale.emulator.machine.memory import GlobalMemory
from blockscale.emulator.ptx.program import Program
from blockscale.emulator.tma import TensorMap


@dataclass(frozen=True, eq=False)
class Struct:
    """A by-value struct: `data` with the device addresses of arrays stored at byte offsets."""

    data: bytes
    pointers: Mapping[int, Any]


class Buffers:
    """The arrays among the arguments as global memory.

    Arrays that share memory (views of one array) share an allocation: collect all of them first
    (`hold`), then ask for addresses.
    """

    def __init__(self, memory: GlobalMemory) -> None:
        self.memory = memory
        self.held: dict[int, np.ndarray] = {}  # id of the argument -> its bytes
        self.names: list[tuple[int, int, str, np.ndarray]] = []  # first, end, name, bytes
        self.placed: list[tuple[int, int, int]] | None = None  # first, end, device address
        self.copies: list[tuple[Any, np.ndarray]] = []
        self.kept: list[Any] = []  # so that an id stays the argument's

    def hold(self, value: Any, name: str) -> None:
        """Take an array (NumPy, torch on the CPU, or what has a buffer) into global memory."""
        if id(value) in self.held:
            return
        array = value if isinstance(value, np.ndarray) else as_numpy(value, name)
        if array.dtype.hasobject:
            raise EmulationError(f"{name} is an array of Python objects; pass an array of numbers")
        if not array.flags.c_contiguous:
            flat = np.ascontiguousarray(array)
            self.copies.append((array, flat))
            array = flat
        data = array.reshape(-1).view(np.uint8)
        self.kept.append(value)
        self.held[id(value)] = data
        first = data.__array_interface__["data"][0]
        self.names.append((first, first + data.size, name, data))

    def place(self) -> None:
        """Give every run of memory that the arrays cover an allocation."""
        self.placed = []
        runs: list[list[tuple[int, int, str, np.ndarray]]] = []
        for item in sorted((i for i in self.names if i[0] < i[1]), key=lambda i: i[:2]):
            if runs and item[0] < max(i[1] for i in runs[-1]):
                runs[-1].append(item)
            else:
                runs.append([item])
        order = {id(item): i for i, item in enumerate(self.names)}
        for run in sorted(runs, key=lambda run: min(order[id(i)] for i in run)):
            first, end = run[0][0], max(i[1] for i in run)
            name = " and ".join(dict.fromkeys(i[2] for i in run))
            home = run[0][3] if len(run) == 1 else whole(first, end, [i[3] for i in run])
            self.placed.append((first, end, self.memory.add(end - first, name, home)))
            self.memory.alias(first, self.placed[-1][2])  # structs may hold array.ctypes.data

    def address(self, value: Any, name: str) -> int:
        """Return the device address of an array."""
        if id(value) not in self.held:
            self.hold(value, name)
            self.placed = None
        if self.placed is None:
            self.place()
        assert self.placed is not None
        data = self.held[id(value)]
        at = data.__array_interface__["data"][0]
        for first, end, address in self.placed:
            if first <= at < end and data.size:
                return address + at - first
        return self.memory.add(0, name)

    def write_back(self) -> None:
        """Give changed bytes back to arrays that were not contiguous."""
        for array, flat in self.copies:
            if array.flags.writeable:
                array[...] = flat


def whole(first: int, end: int, parts: list[np.ndarray]) -> np.ndarray:
    """Return the bytes from `first` to `end` of the process's memory, which `parts` cover."""
    raw = (ctypes.c_uint8 * (end - first)).from_address(first)
    result = np.ctypeslib.as_array(raw)
    result.flags.writeable = any(part.flags.writeable for part in parts)
    return result


def as_numpy(value: Any, name: str) -> np.ndarray:
    """Return a view of a tensor's memory as a NumPy array."""
    if hasattr(value, "untyped_storage"):  # torch: any dtype, also those NumPy lacks
        import torch

        if value.device.type != "cpu":
            raise EmulationError(
                f"{name} is on {value.device}; the emulator takes tensors in host memory: .cpu()"
            )
        if not value.is_contiguous():
            raise EmulationError(
                f"{name} is not contiguous; pass .contiguous() and copy the result back"
            )
        return value.detach().reshape(-1).view(torch.uint8).numpy()
    if hasattr(value, "__array_interface__") or hasattr(value, "__array__"):
        return np.asarray(value)
    try:
        return np.asarray(memoryview(value))
    except TypeError:
        raise EmulationError(
            f"{name} is a {type(value).__name__}; pass an array, an int, a float, None, bytes, "
            "emulator.TensorMap or emulator.Struct"
        ) from None


def arrays_of(value: Any, name: str) -> list[tuple[Any, str]]:
    """Return the arrays in an argument, with what to call them."""
    if isinstance(value, TensorMap):
        return [(value.array, f"{name}'s array")] if value.address is None else []
    if isinstance(value, Struct):
        return [(target, f"{name}'s array at {at}") for at, target in value.pointers.items()]
    plain = (bytes, bytearray, memoryview, np.generic, bool, int, float)
    return [] if value is None or isinstance(value, plain) else [(value, name)]


def pack(program: Program, args: Sequence[Any], buffers: Buffers) -> bytes:
    """Return the parameter block of `args` (PTX ISA 7.1: layout of parameters)."""
    if len(args) != len(program.params):
        raise EmulationError(
            f"{program.name} has {len(program.params)} parameters and got {len(args)} arguments; "
            "pass one argument per parameter, in the order of the PTX"
        )
    for i, value in enumerate(args):
        for array, name in arrays_of(value, f"argument {i}"):
            buffers.hold(array, name)
    block = bytearray(program.param_bytes)
    for i, (value, var, offset) in enumerate(
        zip(args, program.params, program.param_offsets, strict=True)
    ):
        data = argument(value, var.size, f"argument {i}", buffers, var.kind)
        block[offset : offset + len(data)] = data
    return bytes(block)


def argument(value: Any, size: int, name: str, buffers: Buffers, kind: str = "") -> bytes:
    """Return the bytes of one argument; `size` and `kind` (its PTX type) are the parameter's."""
    if value is None:
        return bytes(size)
    if isinstance(value, TensorMap):
        if value.address is None:
            return fit(value.encode(buffers.address(value.array, f"{name}'s array")), size, name)
        return fit(value.encode(), size, name)
    if isinstance(value, Struct):
        data = bytearray(value.data)
        for at, target in value.pointers.items():
            if not 0 <= at <= len(data) - 8:
                raise EmulationError(
                    f"{name}: a pointer at byte {at} of a struct of {len(data)} bytes"
                )
            where = buffers.address(target, f"{name}'s array at {at}")
            data[at : at + 8] = where.to_bytes(8, "little")
        return fit(bytes(data), size, name)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return fit(bytes(value), size, name)
    if type(value) is int and kind in ("f32", "f64"):
        value = float(value)
    if isinstance(value, (bool, int, np.integer, np.bool_)):
        return integer(int(value), size, name)
    if isinstance(value, np.generic):
        return fit(value.tobytes(), size, name)
    if isinstance(value, float):
        kinds = {2: "f2", 4: "f4", 8: "f8"}
        if size not in kinds:
            raise EmulationError(f"{name} is a float and the parameter has {size} bytes")
        return np.array(value, kinds[size]).tobytes()
    return fit(buffers.address(value, name).to_bytes(8, "little"), size, name)


def integer(value: int, size: int, name: str) -> bytes:
    """Return an integer argument, sign-extended to the parameter's size."""
    bits = 8 * size
    if not -(1 << (bits - 1)) <= value < (1 << bits):
        raise EmulationError(f"{name} is {value}, which does not fit the parameter's {bits} bits")
    return (value & ((1 << bits) - 1)).to_bytes(size, "little")


def fit(data: bytes, size: int, name: str) -> bytes:
    """Return `data`, which must have the parameter's size."""
    if len(data) == size:
        return data
    raise EmulationError(
        f"{name} has {len(data)} bytes and the parameter has {size}; pass what the PTX declares"
    )
