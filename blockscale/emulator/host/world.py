"""``emulator.LibraryWorld``: functions of an exported library on several devices at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from blockscale.emulator.host.kernels import Options
from blockscale.emulator.host.launches import Kernel, Launch
from blockscale.emulator.host.library import cause_of, find, opened
from blockscale.emulator.host.memory import address_of, aligned
from blockscale.emulator.host.tensors import argument_of, claim
from blockscale.emulator.launching.world import MAX_INSTRUCTIONS, World
from blockscale.emulator.report import Report


class LibraryWorld:
    """A stand-in for the driver of several devices, each with memory and a stream of its own.

    `tensor` gives a device memory.  `call` runs a function's host code on such tensors at once and
    keeps its launches; `run` then runs those of all devices side by side, as
    `blockscale.emulator.launching.world` says, and reports races.  An address of one device is
    valid on all of them, and `address` tells it.
    """

    def __init__(
        self,
        lib: Any,
        devices: int,
        *,
        target: str | None = None,
        seed: int = 0,
        multiprocessors: int | None = None,
    ) -> None:
        """Take a library, as `run_module` does, and the number of devices."""
        self.library = opened(lib, target, multiprocessors)
        self.devices, self.seed = devices, seed
        self._tensors: list[tuple[int, np.ndarray, str]] = []
        self._queued: list[tuple[int, Kernel, Launch, bytes]] = []

    def tensor(self, device: int, array: np.ndarray, name: str = "tensor") -> np.ndarray:
        """Return a copy of an array in the memory of a device; kernels change it in place."""
        data = aligned(array.nbytes)
        data[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._tensors.append((device, data, name))
        return data.view(array.dtype).reshape(array.shape)

    def adopt(self, device: int, array: np.ndarray, name: str = "tensor") -> None:
        """Let a contiguous array be memory of a device as it is; it must stay where it is."""
        self._tensors.append((device, array.reshape(-1).view(np.uint8), name))

    @staticmethod
    def address(array: np.ndarray) -> int:
        """Return the address of a tensor, on all devices."""
        return address_of(array)

    def call(self, device: int, function: str, *args: Any) -> None:
        """Run the host code of a function; its launches wait in the device's stream for `run`.

        Args:
            device: whose stream.
            function: as in `run_module`.
            args: tensors of `tensor`, or views of them; all else is passed as it is.
        """
        driver = self.library.driver

        def keep(kernel: Kernel, launch: Launch, params: bytes) -> None:
            self._queued.append((device, kernel, launch, params))

        with self.library.answering():
            compiled = find(self.library, function)
            driver.begin(Options(keep=keep))
            regions = [driver.memory.add(data, name) for _, data, name in self._tensors]
            try:
                compiled(*(_claimed(arg, i) for i, arg in enumerate(args)))
            except Exception as error:
                cause = cause_of(driver, error, f"{self.library.name}: {function}")
                if cause is error:
                    raise
                raise cause from error
            finally:
                for region in regions:
                    driver.memory.remove(region)
            failure = driver.error or driver.failure(probes=False)
            if failure is not None:
                raise failure

    def run(self, max_instructions: int = MAX_INSTRUCTIONS) -> list[list[Report]]:
        """Run what `call` has kept; return the reports of each device, in order."""
        world = World(self.devices, self.seed)
        self.seed += 1
        for device, data, name in self._tensors:
            world.add(device, data, name, address_of(data))
        queued, self._queued = self._queued, []
        for device, kernel, launch, params in queued:
            world.launch(
                device,
                kernel.ptx,
                entry=kernel.name,
                grid=launch.grid,
                block=launch.block,
                cluster=launch.cluster,
                dynamic_smem=launch.dynamic_smem,
                args=params,
            )
        return world.run(max_instructions)


def _claimed(value: Any, position: int) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    argument = argument_of(value, f"argument {position}")
    return claim(argument, argument.address if value.size else 0)
