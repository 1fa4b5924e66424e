"""The driver's functions about code: libraries, kernels, tensor maps and launches."""
# ruff: noqa: D102 -- cuda.h documents the functions

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from blockscale.emulator.errors import EmulationError
from blockscale.emulator.host import fatbin, launches
from blockscale.emulator.host.devices import Device
from blockscale.emulator.host.driver import Answer, Driver, signed, store, text_at
from blockscale.emulator.host.launches import Kernel, Launch
from blockscale.emulator.host.results import Refusal, Result
from blockscale.emulator.launching import front_door
from blockscale.emulator.report import Hazard, Report
from blockscale.emulator.tma.tensormap import TensorMap

_ELF = b"\x7fELF"
_MAX_DYNAMIC_SHARED = 8  # CUfunction_attribute
_SETTABLE = {9: "carve-out", 10: "cluster must be set", 11: "cluster width", 12: "cluster height"}
_SETTABLE |= {13: "cluster depth", 14: "non-portable cluster", 15: "cluster scheduling"}
TENSOR_MAP_ALIGNMENT = 64
_NO_WAIT = (
    "the launch allows this kernel to begin before the one before it has ended "
    "(PROGRAMMATIC_STREAM_SERIALIZATION), and the kernel never executes griddepcontrol.wait (PTX "
    "ISA, griddepcontrol); execute it before the first access to memory that others write"
)


@dataclass
class Options:
    """How launches are run."""

    seed: int = 0
    max_instructions: int | None = None
    keep: Callable[[Kernel, Launch, bytes], None] | None = None
    """Takes launches, with their parameters, which are not run then."""


@dataclass
class _Library:
    """A loaded image: the PTX that was chosen, and its kernels."""

    arch: str
    kernels: dict[str, int]  # name -> handle


class EmulatedDriver(Driver):
    """A driver whose kernels run in the emulator, when they are launched.

    Attributes:
        launches: every launch of this call, in order.
        reports: what each left behind; shorter than `launches` if the last one failed.
    """

    def __init__(self, device: Device, symbol: Callable[[str], int | None]) -> None:
        super().__init__(device, symbol)
        self.options = Options()
        self.launches: list[Launch] = []
        self.reports: list[Report] = []
        self._libraries: dict[int, _Library] = {}
        self._kernels: dict[int, Kernel] = {}

    def _table(self) -> dict[str, tuple[Answer, int]]:
        return super()._table() | {"cuTensorMapEncodeTiled": (self.cuTensorMapEncodeTiled, 12)}

    def begin(self, options: Options | None = None) -> None:
        """Forget the launches and failures of the last call of the library."""
        super().begin()
        self.options = options or Options()
        self.launches, self.reports = [], []

    # Libraries and modules --------------------------------------------------------------------

    def _load(self, out: int, code: int, what: str) -> None:
        self.need_context(what)
        images = images_at(code)
        try:
            image = fatbin.choose(images, self.device.arch, what)
        except EmulationError as error:  # a library may try several
            raise Refusal(Result.CUDA_ERROR_NO_BINARY_FOR_GPU, str(error), probe=True) from error
        kernels = {}
        for name, kernel in launches.kernels_of(image.ptx).items():
            kernels[name] = self.new_handle()
            self._kernels[kernels[name]] = kernel
        handle = self.new_handle()
        self._libraries[handle] = _Library(image.arch, kernels)
        store(out, handle)

    def _library(self, handle: int) -> _Library:
        if handle not in self._libraries:
            raise Refusal(
                Result.CUDA_ERROR_INVALID_HANDLE,
                f"0x{handle:x} is no library or module that is loaded; load it first",
            )
        return self._libraries[handle]

    def _kernel(self, handle: int) -> Kernel:
        if handle not in self._kernels:
            raise Refusal(
                Result.CUDA_ERROR_INVALID_HANDLE,
                f"0x{handle:x} is no kernel or function; get it from its library first",
            )
        return self._kernels[handle]

    def cuLibraryLoadData(
        self, out: int, code: int, o: int, v: int, n: int, lo: int, lv: int, m: int
    ) -> None:
        self._load(out, code, "cuLibraryLoadData")

    def cuModuleLoadData(self, out: int, image: int) -> None:
        self._load(out, image, "cuModuleLoadData")

    def cuModuleLoadDataEx(self, out: int, image: int, n: int, o: int, v: int) -> None:
        self._load(out, image, "cuModuleLoadDataEx")

    def cuModuleLoadFatBinary(self, out: int, image: int) -> None:
        self._load(out, image, "cuModuleLoadFatBinary")

    def cuLibraryUnload(self, library: int) -> None:
        for handle in self._library(library).kernels.values():
            del self._kernels[handle]
        del self._libraries[library]

    cuModuleUnload = cuLibraryUnload

    def cuLibraryGetKernel(self, out: int, library: int, name: int) -> None:
        loaded, wanted = self._library(library), text_at(name)
        if wanted not in loaded.kernels:
            raise Refusal(
                Result.CUDA_ERROR_NOT_FOUND,
                f"the library has no kernel {wanted!r} for {loaded.arch}, but "
                f"{', '.join(loaded.kernels) or 'none'}; look for one of these",
                probe=True,
            )
        store(out, loaded.kernels[wanted])

    cuModuleGetFunction = cuLibraryGetKernel

    def cuLibraryGetModule(self, out: int, library: int) -> None:
        self._library(library)
        store(out, library)

    def cuKernelGetFunction(self, out: int, kernel: int) -> None:
        self._kernel(kernel)
        store(out, kernel)

    def _global(self, out: int, size: int, library: int, name: int) -> None:
        raise Refusal(
            Result.CUDA_ERROR_NOT_SUPPORTED,
            f"the library asks for the address of variable {text_at(name)!r}, and the emulator "
            "gives variables a place per launch; pass the data as an argument",
        )

    cuLibraryGetGlobal = _global
    cuModuleGetGlobal_v2 = _global

    # Attributes -------------------------------------------------------------------------------

    def cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> None:
        kernel, number, value = self._kernel(function), signed(attribute), signed(value)
        if number == _MAX_DYNAMIC_SHARED:
            limit = self.device.shared_per_block - kernel.static_smem
            if not 0 <= value <= limit:
                raise Refusal(
                    Result.CUDA_ERROR_INVALID_VALUE,
                    f"{kernel.name}: {value} bytes of dynamic shared memory are more than the "
                    f"{limit} that {self.device.arch} has left for it; use less",
                )
            kernel.max_dynamic_smem = value
        elif number in _SETTABLE:
            kernel.settings[number] = value
        else:
            raise Refusal(
                Result.CUDA_ERROR_INVALID_VALUE,
                f"{kernel.name}: function attribute {number} cannot be set; leave it out",
            )

    def cuKernelSetAttribute(self, attribute: int, value: int, kernel: int, device: int) -> None:
        self._check_device(device)
        self.cuFuncSetAttribute(kernel, attribute, value)

    def cuFuncGetAttribute(self, out: int, attribute: int, function: int) -> None:
        kernel, number = self._kernel(function), signed(attribute)
        most = kernel.directive(".reqntid") or kernel.directive(".maxntid") or (1024, 1, 1)
        major, minor = self.device.capability
        width, height, depth = kernel.directive(".reqnctapercluster") or (0, 0, 0)
        values = {
            0: most[0] * most[1] * most[2],  # MAX_THREADS_PER_BLOCK
            1: kernel.static_smem,
            2: 0,  # CONST_SIZE_BYTES
            3: 0,  # LOCAL_SIZE_BYTES
            5: major * 10 + minor,  # PTX_VERSION
            6: major * 10 + minor,  # BINARY_VERSION
            7: 0,  # CACHE_MODE_CA
            _MAX_DYNAMIC_SHARED: kernel.max_dynamic_smem,
            9: -1,  # PREFERRED_SHARED_MEMORY_CARVEOUT: the driver's choice
            10: int(".explicitcluster" in kernel.function.directives),
            11: width,
            12: height,
            13: depth,
            14: 0,  # NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            15: 0,  # CLUSTER_SCHEDULING_POLICY_PREFERENCE
        }
        if number not in values:
            raise Refusal(
                Result.CUDA_ERROR_INVALID_VALUE,
                f"{kernel.name}: function attribute {number} is unknown to the emulator, which "
                "runs PTX and not machine code (4 is the number of registers); do without it",
            )
        store(out, kernel.settings.get(number, values[number]), 32)

    def cuKernelGetAttribute(self, out: int, attribute: int, kernel: int, device: int) -> None:
        self._check_device(device)
        self.cuFuncGetAttribute(out, attribute, kernel)

    def cuFuncSetCacheConfig(self, function: int, config: int) -> None:
        self._kernel(function)

    def cuFuncLoad(self, function: int) -> None:
        self._kernel(function)

    # Tensor maps ------------------------------------------------------------------------------

    def cuTensorMapEncodeTiled(self, out: int, *arguments: int) -> None:
        """Write a map of the emulator's own; its rules are cuTensorMapEncodeTiled's."""
        if out % TENSOR_MAP_ALIGNMENT or not out:
            raise Refusal(
                Result.CUDA_ERROR_INVALID_VALUE,
                f"cuTensorMapEncodeTiled: the map's address 0x{out:x} is not a multiple of "
                f"{TENSOR_MAP_ALIGNMENT}; align it (alignas(64) CUtensorMap)",
            )
        try:
            map_bytes = _tensor_map(*arguments)
        except (ValueError, TypeError) as error:
            raise Refusal(
                Result.CUDA_ERROR_INVALID_VALUE, f"cuTensorMapEncodeTiled: {error}"
            ) from error
        ctypes.memmove(out, map_bytes, len(map_bytes))

    def cuTensorMapReplaceAddress(self, map_address: int, address: int) -> None:
        old = TensorMap.decode(ctypes.string_at(map_address, 128))
        ctypes.memmove(map_address, old.encode(address), 128)

    # Launches ---------------------------------------------------------------------------------

    def cuLaunchKernelEx(self, config: int, function: int, params: int, extra: int) -> None:
        kernel = self._kernel(function)
        self._launch(kernel, launches.read_config(config, kernel), params, extra)

    def _plain(self, sizes: tuple[int, ...], cooperative: bool) -> None:
        function, *dims, shared, stream, params, extra = sizes
        kernel = self._kernel(function)
        launch = Launch(
            kernel.name,
            (dims[0], dims[1], dims[2]),
            (dims[3], dims[4], dims[5]),
            launches.cluster_of(kernel, None),
            shared,
            stream,
            cooperative,
        )
        self._launch(kernel, launch, params, extra)

    def cuLaunchKernel(
        self, f: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int,
        shared: int, stream: int, params: int, extra: int,
    ) -> None:  # fmt: skip
        self._plain((f, gx, gy, gz, bx, by, bz, shared, stream, params, extra), False)

    def cuLaunchCooperativeKernel(
        self, f: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int,
        shared: int, stream: int, params: int,
    ) -> None:  # fmt: skip
        self._plain((f, gx, gy, gz, bx, by, bz, shared, stream, params, 0), True)

    def _launch(self, kernel: Kernel, launch: Launch, params: int, extra: int) -> None:
        self.need_context(f"launch of {kernel.name}")
        launches.check(launch, kernel, self.device)
        block = launches.pack(kernel, params, extra)
        self.launches.append(launch)
        if self.options.keep is not None:
            self.options.keep(kernel, launch, block)
            return
        try:
            report = self._run(kernel, launch, block)
        except EmulationError as error:
            error.add_note(f"launch {len(self.launches)} of this call: {launch}")
            raise
        self.reports.append(report)
        waited = any(opcode.startswith("griddepcontrol.wait") for opcode in report.instructions)
        if launch.programmatic and not waited:
            report.add(Hazard("programmatic launch", "warning", _NO_WAIT, kernel.name))

    def _run(self, kernel: Kernel, launch: Launch, params: bytes) -> Report:
        options: dict[str, Any] = {"seed": self.options.seed + len(self.reports)}
        if self.options.max_instructions is not None:
            options["max_instructions"] = self.options.max_instructions
        report: Report = front_door.run(
            kernel.ptx,
            kernel.name,
            grid=launch.grid,
            block=launch.block,
            cluster=launch.cluster,
            dynamic_smem=launch.dynamic_smem,
            params=params,
            regions=[(region.address, region.data) for region in self.memory.regions],
            **options,
        )
        return report

    # Occupancy --------------------------------------------------------------------------------

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(
        self, out: int, function: int, threads: int, shared: int
    ) -> None:
        kernel = self._kernel(function)
        count = launches.active_blocks(kernel, self.device, signed(threads), shared)
        store(out, count, 32)

    def cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        self, out: int, function: int, threads: int, shared: int, flags: int
    ) -> None:
        self.cuOccupancyMaxActiveBlocksPerMultiprocessor(out, function, threads, shared)

    def cuOccupancyMaxActiveClusters(self, out: int, function: int, config: int) -> None:
        kernel = self._kernel(function)
        launch = launches.read_config(config, kernel)
        store(out, launches.active_clusters(kernel, self.device, launch), 32)

    def cuOccupancyMaxPotentialClusterSize(self, out: int, function: int, config: int) -> None:
        non_portable = self._kernel(function).settings.get(14, 0)
        size = launches.LARGEST_CLUSTER if non_portable else launches.PORTABLE_CLUSTER
        store(out, size, 32)


def images_at(address: int) -> list[fatbin.Image]:
    """Return the images in what a library passes as code: a fat binary, its wrapper, PTX, a cubin.

    Raises:
        Refusal: it is none of these.
    """
    if not address:
        raise Refusal(Result.CUDA_ERROR_INVALID_VALUE, "the address of the code is null; pass it")
    head = ctypes.string_at(address, 4)
    if int.from_bytes(head, "little") == fatbin.WRAPPER_MAGIC:
        address = ctypes.c_uint64.from_address(address + 8).value
        head = ctypes.string_at(address, 4)
    if int.from_bytes(head, "little") == fatbin.MAGIC:
        size = fatbin.container_size(ctypes.string_at(address, fatbin.HEADER_BYTES))
        return fatbin.read(ctypes.string_at(address, size))
    if head == _ELF:
        flags = ctypes.c_uint32.from_address(address + 48).value  # e_flags
        return [fatbin.Image("cubin", f"sm_{flags >> 8 & 0xFF}", b"")]
    text = ctypes.string_at(address)
    target = re.search(rb"^\s*\.target\s+(sm_\d+[af]?)", text, re.MULTILINE)
    if target is None:
        raise Refusal(
            Result.CUDA_ERROR_INVALID_IMAGE,
            f"the code begins with {text[:16]!r}: neither a fat binary nor a cubin nor PTX with a "
            ".target; pass one of these",
        )
    return [fatbin.Image("ptx", target.group(1).decode(), text)]


def _tensor_map(
    dtype: int, rank: int, address: int, dims: int, strides: int, box: int, steps: int,
    interleave: int, swizzle: int, promotion: int, fill: int,
) -> bytes:  # fmt: skip
    """Return the 128 bytes of a map, from cuTensorMapEncodeTiled's arguments after the first."""
    if not 1 <= rank <= 5:
        raise ValueError(f"tensorRank is {rank}; a map has 1 to 5 dimensions")

    def numbers(where: int, count: int, kind: Any) -> list[int]:
        if count and not where:
            raise ValueError("one of the arrays is null; pass tensorRank numbers (strides: less 1)")
        return list((kind * count).from_address(where)) if count else []

    return TensorMap.at(
        address,
        dtype=signed(dtype),
        global_dim=numbers(dims, rank, ctypes.c_uint64),
        global_strides_bytes=numbers(strides, rank - 1, ctypes.c_uint64),
        box_dim=numbers(box, rank, ctypes.c_uint32),
        element_strides=numbers(steps, rank, ctypes.c_uint32),
        interleave=signed(interleave),
        swizzle=signed(swizzle),
        l2_promotion=signed(promotion),
        oob_fill=signed(fill),
    ).encode()
