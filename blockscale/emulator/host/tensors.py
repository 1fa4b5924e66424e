"""Tensors of this machine that claim to be on a CUDA device: copies, and DLPack views of them.

Each tensor is copied to memory that is aligned as cudaMalloc aligns, and back after the call.  A
view keeps its place within its allocation, tensors that overlap still do, and between allocations
lies memory that belongs to nobody.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm_ffi

from blockscale.base import tensors
from blockscale.emulator.errors import EmulationError
from blockscale.emulator.host.memory import ALIGNMENT, Memory, Region, address_of, aligned

CPU, CUDA = 1, 2  # DLDeviceType
_FLOAT8 = {"float8_e4m3fn": 10, "float8_e5m2": 12, "float8_e8m0fnu": 14}
"""DLPack's codes of ml_dtypes that NumPy does not export itself."""


class _Dtype(ctypes.Structure):
    """DLDataType."""

    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", _Dtype),
        ("shape", ctypes.c_uint64),
        ("strides", ctypes.c_uint64),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_uint64),
        ("deleter", ctypes.c_uint64),
    )


_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
_FREE = ctypes.cast(_libc.free, ctypes.c_void_p).value
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p


@dataclass
class _Argument:
    """A tensor argument: where its bytes lie, and what DLPack says of it."""

    position: str
    cpu: tvm_ffi.Tensor  # keeps the bytes alive
    dtype: _Dtype
    shape: list[int]
    strides: list[int]
    address: int  # of the first element
    low: int  # the bytes that belong to it
    high: int
    base: int  # of the allocation that it is a view into
    writable: bool


def argument_of(value: Any, position: str) -> _Argument:
    """Return what DLPack says of a tensor on the CPU; ValueError if it is elsewhere."""
    described = tensors.describe(value)
    if described is not None and described.device != "cpu":
        raise ValueError(
            f"run_module: {position} is on {described.device}; the emulator runs on tensors of "
            "the CPU, which it passes as if they were on a GPU; move it there with .cpu()"
        )
    writable = described is None or described.writable
    torch = tensors.torch_module()
    base = bits8 = None
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach()
        base = value.untyped_storage().data_ptr()
        cpu = tvm_ffi.from_dlpack(value)
    elif isinstance(value, np.ndarray):
        owner = value
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        base = address_of(owner)
        bits8 = _FLOAT8.get(value.dtype.name)
        cpu = tensors.pass_numpy(value if bits8 is None else value.view(np.uint8))
    else:
        cpu = value if isinstance(value, tvm_ffi.Tensor) else tvm_ffi.from_dlpack(value)
    capsule = cpu.__dlpack__()
    tensor = _Managed.from_address(_pointer_of(capsule, b"dltensor")).tensor
    if tensor.device_type != CPU:
        raise ValueError(
            f"run_module: {position} is on a device (DLPack type {tensor.device_type}); the "
            "emulator runs on tensors of the CPU; copy it there"
        )
    if bits8 is not None:
        tensor.dtype.code = bits8
    return _measure(tensor, position, cpu, base, writable)


def _measure(
    tensor: _Tensor, position: str, cpu: tvm_ffi.Tensor, base: int | None, writable: bool
) -> _Argument:
    def numbers(address: int) -> list[int]:
        return list((ctypes.c_int64 * tensor.ndim).from_address(address)) if tensor.ndim else []

    shape = numbers(tensor.shape)
    if tensor.strides:
        strides = numbers(tensor.strides)
    else:
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    address, bits = tensor.data + tensor.byte_offset, tensor.dtype.bits * tensor.dtype.lanes
    low = high = address
    if math.prod(shape):
        steps = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]
        low = address + sum(step for step in steps if step < 0) * bits // 8
        high = address + -(-(sum(step for step in steps if step > 0) + 1) * bits // 8)
    dtype = _Dtype.from_buffer_copy(tensor.dtype)
    base = low if base is None else base
    return _Argument(position, cpu, dtype, shape, strides, address, low, high, base, writable)


@dataclass
class _Group:
    """Arguments whose bytes overlap, and their one copy."""

    members: list[_Argument]
    low: int
    high: int
    region: Region | None = None

    @property
    def label(self) -> str:
        return ", ".join(member.position for member in self.members)


class Arguments:
    """The arguments of one call: `values` is what the function gets.

    Use as a context: the copies are device memory inside, and are copied back at its end.
    """

    def __init__(self, values: Sequence[Any], memory: Memory) -> None:
        self._memory = memory
        self._found: list[_Argument] = []
        plan = [self._visit(value, f"argument {i}") for i, value in enumerate(values)]
        self._groups = _overlapping(self._found)
        for group in self._groups:
            data = aligned(group.high - group.low, (group.low - group.members[0].base) % ALIGNMENT)
            ctypes.memmove(address_of(data), group.low, data.size)
            group.region = memory.add(data, group.label)
        self.values = [self._claim(item) for item in plan]

    def _visit(self, value: Any, position: str) -> Any:
        if isinstance(value, list | tuple):
            return [self._visit(item, f"{position}[{i}]") for i, item in enumerate(value)]
        if isinstance(value, tvm_ffi.Tensor | np.ndarray) or hasattr(value, "__dlpack__"):
            self._found.append(argument_of(value, position))
            return self._found[-1]
        return value

    def _claim(self, item: Any) -> Any:
        if isinstance(item, list):
            return [self._claim(inner) for inner in item]
        if not isinstance(item, _Argument):
            return item
        for group in self._groups:
            if group.region is not None and item in group.members:
                return claim(item, item.address - group.low + group.region.address)
        return claim(item, 0)  # empty: a null pointer, as torch has it on a GPU

    def __enter__(self) -> Arguments:
        return self

    def __exit__(self, *_: object) -> None:
        changed = []
        for group in self._groups:
            region = group.region
            assert region is not None
            self._memory.remove(region)
            if all(member.writable for member in group.members):
                ctypes.memmove(group.low, region.address, region.data.size)
            elif ctypes.string_at(group.low, region.data.size) != region.data.tobytes():
                changed.append(group.label)
        if changed:
            raise EmulationError(
                f"run_module: the function wrote to {', '.join(changed)}, a read-only array; pass "
                "one that may be written"
            )


def _overlapping(arguments: Sequence[_Argument]) -> list[_Group]:
    groups: list[_Group] = []
    for argument in sorted(arguments, key=lambda a: a.low):
        if argument.low == argument.high:
            continue
        if groups and argument.low < groups[-1].high:
            groups[-1].members.append(argument)
            groups[-1].high = max(groups[-1].high, argument.high)
        else:
            groups.append(_Group([argument], argument.low, argument.high))
    return groups


def claim(argument: _Argument, address: int) -> tvm_ffi.Tensor:
    """Return a tensor like ``argument`` whose data lie at ``address`` of CUDA device 0."""
    count = len(argument.shape)
    block = _libc.malloc(ctypes.sizeof(_Managed) + 16 * max(count, 1))
    shape = block + ctypes.sizeof(_Managed)
    strides = shape + 8 * count
    numbers = (ctypes.c_int64 * (2 * count))(*argument.shape, *argument.strides)
    ctypes.memmove(shape, numbers, ctypes.sizeof(numbers))
    managed = _Managed.from_address(block)
    managed.tensor = _Tensor(address, CUDA, 0, count, argument.dtype, shape, strides, 0)
    managed.context, managed.deleter = 0, _FREE  # one block of memory, so free() deletes it all
    return tvm_ffi.from_dlpack(_new_capsule(block, b"dltensor", None))
