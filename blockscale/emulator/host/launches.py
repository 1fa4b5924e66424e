"""Launches: what cuLaunchKernel and cuLaunchKernelEx were given, read, checked and packed."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from functools import cached_property

from blockscale.emulator.errors import EmulationError
from blockscale.emulator.host.devices import DEFAULT_SHARED, RESERVED_SHARED, Device
from blockscale.emulator.host.results import Refusal, Result
from blockscale.emulator.launching.link import linked
from blockscale.emulator.ptx.parser import parse
from blockscale.emulator.ptx.syntax import Function, Var

Dim3 = tuple[int, int, int]

PORTABLE_CLUSTER = 8
LARGEST_CLUSTER = 16
_COOPERATIVE, _CLUSTER_DIMENSION, _PROGRAMMATIC_SERIALIZATION = 2, 4, 6  # CUlaunchAttributeID
_HINTS = {0, 1, 3, 5, 7, 8, 9, 10, 11, 12, 14, 16}  # or without effect on one stream
_PARAMS_POINTER, _PARAMS_SIZE = 1, 2  # CU_LAUNCH_PARAM_BUFFER_POINTER, ..._SIZE


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute (cuda.h)."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint32 * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig (cuda.h)."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint32),
    )


@dataclass(frozen=True)
class Launch:
    """One launch, as the host asked for it.

    Attributes:
        kernel: the name of the PTX entry.
        grid: CTAs per dimension; `block`: threads; `cluster`: CTAs per cluster.
        dynamic_smem: bytes of dynamic shared memory.
        stream: the stream's handle; 0 is the default stream.
        programmatic: programmatic dependent launch was allowed.
        asks_for_clusters: it has the attribute, be they of one CTA.
    """

    kernel: str
    grid: Dim3
    block: Dim3
    cluster: Dim3 = (1, 1, 1)
    dynamic_smem: int = 0
    stream: int = 0
    cooperative: bool = False
    programmatic: bool = False
    asks_for_clusters: bool = False


@dataclass
class Kernel:
    """A kernel of a loaded library, with the attributes that the host set."""

    name: str
    ptx: str
    function: Function
    max_dynamic_smem: int = 0
    settings: dict[int, int] = field(default_factory=dict)
    """CUfunction_attribute -> value, of the others that can be set."""

    @property
    def params(self) -> list[tuple[int, int]]:
        """Offset and size of every parameter in the parameter block."""
        result, offset = [], 0
        for param in self.function.params:
            assert isinstance(param, Var), "the parameters of an entry are variables"
            offset = -(-offset // param.align) * param.align
            result.append((offset, param.size))
            offset += param.size
        return result

    @cached_property
    def static_smem(self) -> int:
        """Bytes of static shared memory."""
        return linked(self.ptx, self.name).static_shared - RESERVED_SHARED

    def directive(self, name: str) -> Dim3 | None:
        """Return the sizes of ``.reqntid``, ``.maxntid`` or ``.reqnctapercluster``."""
        sizes = self.function.directives.get(name)
        if not sizes:
            return None
        x, y, z = [*sizes, 1, 1][:3]
        return x, y, z


def kernels_of(ptx: str) -> dict[str, Kernel]:
    """Return the kernels of a PTX text by name."""
    functions = parse(ptx).functions.values()
    return {f.name: Kernel(f.name, ptx, f) for f in functions if f.entry}


def read_config(address: int, kernel: Kernel) -> Launch:
    """Return the launch that a CUlaunchConfig describes."""
    if not address:
        raise _refuse(kernel, "the launch's CUlaunchConfig is null; pass one")
    config = _Config.from_address(address)
    asked: Dim3 | None = None
    cooperative = programmatic = False
    for attribute in config.attributes[: config.count] if config.count else ():
        value = attribute.value
        if attribute.id == _CLUSTER_DIMENSION:
            asked = value[0], value[1], value[2]
        elif attribute.id == _COOPERATIVE:
            cooperative = value[0] != 0
        elif attribute.id == _PROGRAMMATIC_SERIALIZATION:
            programmatic = value[0] != 0
        elif attribute.id not in _HINTS:
            raise _refuse(kernel, f"launch attribute {attribute.id} is not known; leave it out")
    return Launch(
        kernel.name,
        (config.grid[0], config.grid[1], config.grid[2]),
        (config.block[0], config.block[1], config.block[2]),
        cluster_of(kernel, asked),
        config.shared,
        config.stream or 0,
        cooperative,
        programmatic,
        asked is not None,
    )


def cluster_of(kernel: Kernel, asked: Dim3 | None) -> Dim3:
    """Return the cluster of a launch that asks for ``asked`` (PTX ISA, .reqnctapercluster)."""
    compiled_for = kernel.directive(".reqnctapercluster")
    if asked is not None and compiled_for not in (None, asked):
        raise _refuse(
            kernel,
            f"the launch asks for clusters of {asked}, and the kernel was compiled for "
            f"{compiled_for} (.reqnctapercluster); ask for these, or for none",
        )
    cluster = asked or compiled_for
    if cluster is None and ".explicitcluster" in kernel.function.directives:
        raise _refuse(
            kernel,
            "the kernel needs clusters (.explicitcluster), and the launch asks for none; pass "
            "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION",
        )
    return cluster or (1, 1, 1)


def _refuse(kernel: Kernel, reason: str, result: Result | None = None) -> Refusal:
    return Refusal(result or Result.CUDA_ERROR_INVALID_VALUE, f"launch of {kernel.name}: {reason}")


def check(launch: Launch, kernel: Kernel, device: Device) -> None:
    """Check the rules for launch sizes.

    Raises:
        Refusal: one is broken; a device would refuse the launch.
    """
    for what, sizes, limits in (
        ("grid", launch.grid, (2**31 - 1, 65535, 65535)),
        ("block", launch.block, (1024, 1024, 64)),
    ):
        if not all(0 < size <= limit for size, limit in zip(sizes, limits, strict=True)):
            raise _refuse(
                kernel,
                f"{what} is {sizes}, and each number has to be from 1 to {limits}; skip the "
                "launch of an empty grid",
            )
    threads = math.prod(launch.block)
    if threads > 1024:
        raise _refuse(kernel, f"block {launch.block} has {threads} threads, and 1024 is the limit")
    required, most = kernel.directive(".reqntid"), kernel.directive(".maxntid")
    if required is not None and launch.block != required:
        raise _refuse(
            kernel,
            f"block is {launch.block}, and the kernel was compiled for {required} (.reqntid); "
            "launch these",
        )
    if most is not None and threads > math.prod(most):
        raise _refuse(
            kernel,
            f"block {launch.block} has {threads} threads, and the kernel was compiled for at most "
            f"{math.prod(most)} (.maxntid); launch fewer",
        )
    _check_cluster(launch, kernel, device)
    _check_shared(launch, kernel, device)


def _check_cluster(launch: Launch, kernel: Kernel, device: Device) -> None:
    size = math.prod(launch.cluster)
    if device.capability < (9, 0) and (launch.asks_for_clusters or size > 1):
        raise _refuse(kernel, f"{device.arch} has no clusters; build for sm_90a or newer")
    if launch.cluster == (1, 1, 1):
        return
    if size == 0 or any(g % c for g, c in zip(launch.grid, launch.cluster, strict=True)):
        raise _refuse(
            kernel,
            f"grid {launch.grid} is not a multiple of cluster {launch.cluster}; round it up",
        )
    non_portable = kernel.settings.get(14, 0)  # NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    limit = LARGEST_CLUSTER if non_portable else PORTABLE_CLUSTER
    if size > limit:
        raise _refuse(
            kernel,
            f"cluster {launch.cluster} has {size} CTAs, and {limit} is the limit; "
            + ("make it smaller" if non_portable else "allow a non-portable size, up to 16"),
        )


def _check_shared(launch: Launch, kernel: Kernel, device: Device) -> None:
    static = kernel.static_smem
    allowed = max(DEFAULT_SHARED - static, kernel.max_dynamic_smem)
    if launch.dynamic_smem > allowed:
        raise _refuse(
            kernel,
            f"{launch.dynamic_smem} bytes of dynamic shared memory, and {allowed} are allowed; set "
            "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES to what is needed",
        )
    if launch.dynamic_smem + static > device.shared_per_block:
        raise _refuse(
            kernel,
            f"{launch.dynamic_smem} + {static} bytes of shared memory, and {device.arch} has "
            f"{device.shared_per_block} per block; use less",
            Result.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
        )


def pack(kernel: Kernel, params: int, extra: int) -> bytes:
    """Return the parameter block of a launch.

    Args:
        kernel: says offset and size of each parameter.
        params: the address of as many pointers to values, or 0.
        extra: the address of an array with the block itself (CU_LAUNCH_PARAM_BUFFER_POINTER), or 0.

    Raises:
        Refusal: neither is given, or the block has another size.
    """
    layout = kernel.params
    size = layout[-1][0] + layout[-1][1] if layout else 0
    if extra and not params:
        return _packed_already(kernel, extra, size)
    block = bytearray(size)
    if not layout:
        return bytes(block)
    if not params:
        raise _refuse(kernel, f"no parameters were passed, and the kernel has {len(layout)}")
    pointers = (ctypes.c_uint64 * len(layout)).from_address(params)
    for i, (offset, length) in enumerate(layout):
        if not pointers[i]:
            raise _refuse(kernel, f"the pointer to parameter {i} is null; pass {len(layout)}")
        block[offset : offset + length] = ctypes.string_at(pointers[i], length)
    return bytes(block)


def _packed_already(kernel: Kernel, extra: int, size: int) -> bytes:
    words = (ctypes.c_uint64 * 5).from_address(extra)
    given = {int(words[i]): int(words[i + 1]) for i in (0, 2)}
    if given.keys() != {_PARAMS_POINTER, _PARAMS_SIZE}:
        raise _refuse(kernel, "extra holds no parameter buffer and size; pass both, then 0")
    length = ctypes.c_uint64.from_address(given[_PARAMS_SIZE]).value
    if length < size:
        raise _refuse(kernel, f"the parameter buffer has {length} bytes, and {size} are needed")
    return ctypes.string_at(given[_PARAMS_POINTER], size)


def active_blocks(kernel: Kernel, device: Device, threads: int, dynamic_smem: int) -> int:
    """Return how many blocks fit on a multiprocessor, by threads and shared memory.

    Registers are not counted: the PTX does not say how many the machine code uses.
    """
    if threads < 1:
        raise EmulationError(f"occupancy of {kernel.name}: {threads} threads; ask for at least 1")
    warps = -(-threads // 32)
    shared = -(-(kernel.static_smem + dynamic_smem) // 128) * 128 + RESERVED_SHARED
    return min(
        device.blocks_per_multiprocessor,
        device.threads_per_multiprocessor // (32 * warps),
        device.shared_per_multiprocessor // shared,
    )


def active_clusters(kernel: Kernel, device: Device, launch: Launch) -> int:
    """Return how many clusters of a launch fit on the device at once."""
    blocks = active_blocks(kernel, device, math.prod(launch.block), launch.dynamic_smem)
    return blocks * device.multiprocessors // math.prod(launch.cluster)
