"""The driver's functions that are not about code: the device, its context, memory and streams.

Methods are named like the functions of cuda.h that they answer, and get their arguments as 64-bit
numbers, pointers as addresses of this process.
"""
# ruff: noqa: D102 -- cuda.h documents the functions

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Sequence
from functools import partial

from blockscale.emulator.errors import EmulationError
from blockscale.emulator.host.devices import DRIVER_VERSION, Device
from blockscale.emulator.host.memory import Memory, view
from blockscale.emulator.host.results import Refusal, Result

CONTEXT = 0xC0DE0000
"""The handle of the device's only context."""

Answer = Callable[..., None]

_FIRST_HANDLE = 0xCAFE0000
_NOT_CAPTURING = 0
_ENTRY_POINT_FOUND, _ENTRY_POINT_NOT_FOUND = 0, 1

# All work is done when the call that asks for it returns: streams are idle and events are past.
_NOTHING_TO_DO = (
    "cuInit",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxSynchronize",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamQuery",
    "cuStreamWaitEvent",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
)
_MEMSETS = {f"cuMemsetD{8 * n}{kind}": n for n in (1, 2, 4) for kind in ("_v2", "Async")}
# Which ends are said to be on the device.
_COPIES = {"cuMemcpy": "", "cuMemcpyAsync": ""} | {
    f"cuMemcpy{way}{kind}": ends
    for way, ends in (("HtoD", "to"), ("DtoH", "from"), ("DtoD", "to from"))
    for kind in ("_v2", "Async_v2")
}


def store(address: int, value: int, bits: int = 64) -> None:
    """Store a result where the caller wants it.

    Raises:
        Refusal: the caller passed a null pointer.
    """
    if not address:
        raise Refusal(Result.CUDA_ERROR_INVALID_VALUE, "a pointer for a result is null; pass one")
    kind = ctypes.c_uint64 if bits == 64 else ctypes.c_uint32
    kind.from_address(address).value = value


def signed(value: int) -> int:
    """Return a C int that was widened to 64 bits."""
    return ctypes.c_int32(value & 0xFFFFFFFF).value


def text_at(address: int) -> str:
    """Return the C string at an address."""
    return ctypes.string_at(address).decode(errors="replace") if address else ""


class Driver:
    """The device that the stand-in plays for one loaded library, over several calls.

    Attributes:
        device: its limits.
        memory: its allocations.
        refusals: why calls failed, in order.
        error: the first exception of an answer; until `begin` every later call fails.
    """

    def __init__(self, device: Device, symbol: Callable[[str], int | None]) -> None:
        self.device = device
        self.memory = Memory()
        self.refusals: list[Refusal] = []
        self.error: BaseException | None = None
        self._symbol = symbol  # the address of a function of the stand-in by name
        self._kept: dict[str, ctypes.Array[ctypes.c_char]] = {}  # C strings that were returned
        self._contexts: list[int] = []
        self._handles = _FIRST_HANDLE
        self._answers = self._table()

    def _table(self) -> dict[str, tuple[Answer, int]]:
        """Return what answers each function, and its number of arguments."""
        table: dict[str, tuple[Answer, int]] = {}
        for name, method in inspect.getmembers(self, inspect.ismethod):
            if name.startswith("cu") and name[2].isupper():
                table[name] = method, len(inspect.signature(method).parameters)
        table |= {name: (lambda: None, 0) for name in _NOTHING_TO_DO}
        table |= {name: (partial(self._set, size), 3) for name, size in _MEMSETS.items()}
        table |= {name: (partial(self._copy, ends), 3) for name, ends in _COPIES.items()}
        return table

    def begin(self) -> None:
        """Forget the failures of the last call of the library."""
        self.refusals.clear()
        self.error = None

    def answer(self, name: str, args: Sequence[int]) -> int:
        """Answer one call; never raises."""
        if name in ("cuGetErrorName", "cuGetErrorString"):
            return self._error_text(name, signed(args[0]), args[1])
        if self.error is not None:
            return Result.CUDA_ERROR_LAUNCH_FAILED
        try:
            if name not in self._answers:
                raise Refusal(Result.CUDA_ERROR_NOT_SUPPORTED, f"{name} is not modelled; avoid it")
            method, count = self._answers[name]
            method(*(args[i] for i in range(count)))
        except Refusal as refusal:
            self.refusals.append(refusal)
            return refusal.result
        except BaseException as error:  # nothing may unwind into C, KeyboardInterrupt included
            self.error = error
            return Result.CUDA_ERROR_LAUNCH_FAILED
        return Result.CUDA_SUCCESS

    def failure(self, *, probes: bool) -> EmulationError | None:
        """Return why calls were refused, or None; ``probes`` counts questions among them."""
        for refusal in self.refusals:
            if probes or not refusal.probe:
                return EmulationError(refusal.sentence)
        return None

    def new_handle(self) -> int:
        """Return a handle that this driver has not returned before."""
        self._handles += 16
        return self._handles

    def _error_text(self, name: str, code: int, out: int) -> int:
        if code not in list(Result) or not out:
            return Result.CUDA_ERROR_INVALID_VALUE
        text = Result(code).name if name == "cuGetErrorName" else Result(code).text
        kept = self._kept.setdefault(text, ctypes.create_string_buffer(text.encode()))
        store(out, ctypes.addressof(kept))
        return Result.CUDA_SUCCESS

    # The driver itself ------------------------------------------------------------------------

    def cuDriverGetVersion(self, out: int) -> None:
        store(out, DRIVER_VERSION, 32)

    def cuGetProcAddress(self, name: int, out: int, version: int, flags: int) -> None:
        """Give the newest variant of a function, as the driver does for its own version."""
        symbol = text_at(name)
        found = [a for suffix in ("_v2", "") if (a := self._symbol(symbol + suffix)) is not None]
        store(out, found[0] if found else 0)
        if not found:
            raise Refusal(
                Result.CUDA_ERROR_NOT_FOUND,
                f"cuGetProcAddress: the emulator's stand-in for the driver has no {symbol}; do "
                "without it",
                probe=True,
            )

    def cuGetProcAddress_v2(self, name: int, out: int, version: int, flags: int, how: int) -> None:
        if how:
            store(how, _ENTRY_POINT_NOT_FOUND, 32)
        self.cuGetProcAddress(name, out, version, flags)
        if how:
            store(how, _ENTRY_POINT_FOUND, 32)

    def cuGetExportTable(self, out: int, identity: int) -> None:
        raise Refusal(
            Result.CUDA_ERROR_NOT_SUPPORTED,
            "cuGetExportTable: the library uses the CUDA runtime, whose private interface to the "
            "driver the emulator does not have; build it so that it calls the driver only",
        )

    # Device and context -----------------------------------------------------------------------

    def _check_device(self, ordinal: int) -> None:
        if signed(ordinal) != 0:
            raise Refusal(
                Result.CUDA_ERROR_INVALID_DEVICE,
                f"device {signed(ordinal)} was asked for, and the emulator plays one, number 0; "
                "use device 0",
            )

    def cuDeviceGet(self, out: int, ordinal: int) -> None:
        self._check_device(ordinal)
        store(out, 0, 32)

    def cuDeviceGetCount(self, out: int) -> None:
        store(out, 1, 32)

    def cuDeviceGetName(self, out: int, size: int, device: int) -> None:
        self._check_device(device)
        name = f"emulated {self.device.name}".encode()[: max(signed(size) - 1, 0)] + b"\0"
        ctypes.memmove(out, name, len(name))

    def cuDeviceGetUuid(self, out: int, device: int) -> None:
        self._check_device(device)
        ctypes.memmove(out, b"blockscale-emul8", 16)

    cuDeviceGetUuid_v2 = cuDeviceGetUuid

    def cuDeviceTotalMem_v2(self, out: int, device: int) -> None:
        self._check_device(device)
        store(out, self.device.memory_bytes)

    def cuDeviceGetAttribute(self, out: int, attribute: int, device: int) -> None:
        self._check_device(device)
        value = self.device.attribute(signed(attribute))
        if value is None:
            raise Refusal(
                Result.CUDA_ERROR_INVALID_VALUE,
                f"cuDeviceGetAttribute: attribute {signed(attribute)} is not modelled; do without "
                "it, or add it to blockscale.emulator.host.devices",
            )
        store(out, value, 32)

    def cuDevicePrimaryCtxRetain(self, out: int, device: int) -> None:
        self._check_device(device)
        store(out, CONTEXT)

    def cuDevicePrimaryCtxGetState(self, device: int, flags: int, active: int) -> None:
        self._check_device(device)
        store(flags, 0, 32)
        store(active, 1, 32)

    def cuCtxGetCurrent(self, out: int) -> None:
        store(out, self._contexts[-1] if self._contexts else 0)

    def cuCtxSetCurrent(self, context: int) -> None:
        self._contexts[-1:] = [self._known_context(context)]

    def cuCtxPushCurrent_v2(self, context: int) -> None:
        self._contexts.append(self._known_context(context))

    def cuCtxPopCurrent_v2(self, out: int) -> None:
        self.need_context("cuCtxPopCurrent")
        context = self._contexts.pop()
        if out:
            store(out, context)

    def cuCtxGetDevice(self, out: int) -> None:
        self.need_context("cuCtxGetDevice")
        store(out, 0, 32)

    def cuCtxGetId(self, context: int, out: int) -> None:
        store(out, 1)

    def _known_context(self, context: int) -> int:
        if context not in (0, CONTEXT):
            raise Refusal(
                Result.CUDA_ERROR_INVALID_CONTEXT,
                f"0x{context:x} is no context; use what cuDevicePrimaryCtxRetain returned",
            )
        return context

    def need_context(self, what: str) -> None:
        """Check that a context is current.

        Raises:
            Refusal: there is none.
        """
        if not self._contexts or not self._contexts[-1]:
            raise Refusal(
                Result.CUDA_ERROR_INVALID_CONTEXT,
                f"{what}: no context is current; retain the device's primary context and make it "
                "current first",
            )

    # Memory -----------------------------------------------------------------------------------

    def cuMemAlloc_v2(self, out: int, size: int) -> None:
        self.need_context("cuMemAlloc")
        if not size:
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE, "cuMemAlloc: 0 bytes; ask for some")
        store(out, self.memory.allocate(size).address)

    def cuMemAllocAsync(self, out: int, size: int, stream: int) -> None:
        self.cuMemAlloc_v2(out, size)

    def cuMemFree_v2(self, address: int) -> None:
        if address:
            self.memory.free(address)

    def cuMemFreeAsync(self, address: int, stream: int) -> None:
        self.cuMemFree_v2(address)

    def _set(self, size: int, address: int, value: int, count: int) -> None:
        name = f"cuMemsetD{8 * size}"
        self.need_context(name)
        if address % size:
            raise Refusal(
                Result.CUDA_ERROR_INVALID_VALUE,
                f"{name}: address 0x{address:x} is no multiple of {size}; align it",
            )
        if count:
            data = self.memory.bytes_at(address, count * size, name)
            data.reshape(count, size)[:] = list((value % 256**size).to_bytes(size, "little"))

    def _copy(self, on_device: str, to: int, source: int, size: int) -> None:
        """Copy; what is not said to be on the device may be there, or be memory of the host."""
        self.need_context("cuMemcpy")
        if not size:
            return
        ends = []
        for word, address in (("to", to), ("from", source)):
            if word in on_device or self.memory.find(address) is not None:
                ends.append(self.memory.bytes_at(address, size, f"cuMemcpy {word}"))
            else:
                ends.append(view(address, size))
        ends[0][:] = ends[1].copy()

    def cuPointerGetAttribute(self, out: int, attribute: int, address: int) -> None:
        region = self.memory.find(address)
        if region is None:
            raise Refusal(
                Result.CUDA_ERROR_INVALID_VALUE,
                f"cuPointerGetAttribute: 0x{address:x}: {self.memory.describe(address)}",
                probe=True,
            )
        # CONTEXT, MEMORY_TYPE (2: device), DEVICE_POINTER, IS_MANAGED, DEVICE_ORDINAL, RANGE
        values = {1: (CONTEXT, 64), 2: (2, 32), 3: (address, 64), 8: (0, 32), 9: (0, 32)}
        values |= {11: (region.address, 64), 12: (region.data.size, 64)}
        if signed(attribute) not in values:
            raise Refusal(
                Result.CUDA_ERROR_INVALID_VALUE,
                f"cuPointerGetAttribute: attribute {signed(attribute)} is not modelled; avoid it",
            )
        store(out, *values[signed(attribute)])

    # Streams and events -----------------------------------------------------------------------

    def cuStreamCreate(self, out: int, flags: int) -> None:
        self.need_context("cuStreamCreate")
        store(out, self.new_handle())

    def cuStreamIsCapturing(self, stream: int, out: int) -> None:
        store(out, _NOT_CAPTURING, 32)

    def cuStreamGetCtx(self, stream: int, out: int) -> None:
        store(out, CONTEXT)

    def cuStreamGetDevice(self, stream: int, out: int) -> None:
        store(out, 0, 32)

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> None:
        store(mode, 0, 32)

    def cuEventCreate(self, out: int, flags: int) -> None:
        store(out, self.new_handle())
