"""The device memory of one run: allocations of this process, each at its own address.

A device pointer is the address of the byte here, so kernels, host code and the caller mean the
same byte by the same number.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from blockscale.emulator.errors import EmulationError

ALIGNMENT = 256
"""What cudaMalloc aligns to."""

GUARD = 256
"""Bytes between allocations that belong to nobody, so that no overrun hits a neighbour."""

POISON = 0xFF
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Region:
    """An allocation: `data` lies at `address`."""

    address: int
    data: Bytes
    label: str

    @property
    def end(self) -> int:
        """The address behind its last byte."""
        return self.address + self.data.size


def address_of(array: npt.NDArray[Any]) -> int:
    """Return the address of an array's first element."""
    return int(array.__array_interface__["data"][0])


def view(address: int, size: int) -> Bytes:
    """Return the ``size`` bytes of this process at ``address``."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def aligned(size: int, offset: int = 0) -> Bytes:
    """Return poisoned bytes whose address is ``offset`` behind a multiple of `ALIGNMENT`."""
    raw = np.full(size + offset + ALIGNMENT + GUARD, POISON, np.uint8)
    start = -address_of(raw) % ALIGNMENT + offset
    return raw[start : start + size]


class Memory:
    """The allocations of a run."""

    def __init__(self) -> None:
        self._regions: dict[int, Region] = {}
        self._freed: dict[int, Region] = {}  # kept, so that no new allocation takes the address

    def add(self, data: Bytes, label: str) -> Region:
        """Add an allocation that exists already."""
        region = Region(address_of(data), data, label)
        self._regions[region.address] = region
        return region

    def allocate(self, size: int) -> Region:
        """Return a new allocation, filled with poison."""
        return self.add(aligned(size), f"allocation {len(self._regions) + len(self._freed)}")

    def free(self, address: int) -> None:
        """Free an allocation.

        Raises:
            EmulationError: there is none at this address, or it is the caller's tensor.
        """
        region = self._regions.get(address)
        if region is None or not region.label.startswith("allocation"):
            raise EmulationError(
                f"cuMemFree: no allocation begins at 0x{address:x}; {self.describe(address)}; free "
                "what cuMemAlloc returned, once"
            )
        self._freed[address] = self._regions.pop(address)

    def remove(self, region: Region) -> None:
        """Remove an allocation that `add` added."""
        del self._regions[region.address]

    @property
    def regions(self) -> list[Region]:
        """What a kernel may touch, by address."""
        return sorted(self._regions.values(), key=lambda region: region.address)

    def find(self, address: int) -> Region | None:
        """Return the allocation in which ``address`` lies."""
        for region in self._regions.values():
            if region.address <= address < region.end:
                return region
        return None

    def bytes_at(self, address: int, size: int, what: str) -> Bytes:
        """Return the bytes at ``address``.

        Raises:
            EmulationError: they do not all lie in one allocation.
        """
        region = self.find(address)
        if region is None or address + size > region.end:
            raise EmulationError(
                f"{what}: {size} bytes at 0x{address:x} do not lie in one allocation; "
                f"{self.describe(address)}; pass the tensor's own pointer and size"
            )
        return region.data[address - region.address :][:size]

    def describe(self, address: int) -> str:
        """Return what lies at an address, in words."""
        for regions, state in ((self._regions, ""), (self._freed, " (freed)")):
            for region in regions.values():
                if region.address <= address < region.end:
                    offset = address - region.address
                    return (
                        f"it is byte {offset} of {region.label}{state} ({region.data.size} bytes)"
                    )
        names = ", ".join(r.label for r in self.regions) or "none"
        return f"it lies in no allocation (there are: {names})"
