"""The address spaces: global memory, the shared windows of clusters, parameters, local memory.

Generic addresses are split into windows of our own choice; only their low 32 bits mean something in
the shared window, as on hardware (PTX ISA 6.4.1: generic addressing).  A shared address holds the
offset in the CTA's window (bits 0-23; the first 1 KiB belongs to the system) and the CTA's rank in
its cluster (bits 24 and up): a CTA's own addresses carry its own rank, so that clearing bit 24
names the even CTA of a pair.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from blockscale.emulator.errors import IllegalOperation

SHARED_WINDOW = 0x6000_0000_0000
LOCAL_WINDOW = 0x6100_0000_0000
PARAM_WINDOW = 0x6200_0000_0000
WINDOW_SIZE = 0x100_0000_0000
GLOBAL_BASE = 0x1000_0000_0000
RESERVED = 1024  # bytes at the start of a CTA's shared window that the system keeps
ALIGN = 256
VIEWS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16", 32: "V32"}


@dataclass
class Region:
    """One allocation: `address` for the kernel, `offset` in the arena, whose bytes it holds."""

    address: int
    size: int
    offset: int
    name: str
    home: np.ndarray | None = None  # a flat byte view that gets the bytes back


def view(array: np.ndarray, size: int) -> np.ndarray:
    """Return a byte array as items of `size` bytes."""
    return array.view(VIEWS[size])


class GlobalMemory:
    """Allocations in one arena, found by address."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.size = ALIGN
        self.next = GLOBAL_BASE
        self.arena = np.zeros(0, np.uint8)
        self.views: dict[int, np.ndarray] = {}

    def add(
        self, size: int, name: str, home: np.ndarray | None = None, address: int | None = None
    ) -> int:
        """Add an allocation and return its address (256-byte aligned unless it is given)."""
        if address is None:
            address = self.next
            self.next += -(-size // ALIGN) * ALIGN + ALIGN
        offset = self.size + address % ALIGN
        self.regions.append(Region(address, size, offset, name, home))
        self.size = -(-(offset + size) // ALIGN) * ALIGN + ALIGN
        return address

    def alias(self, address: int, device: int) -> None:
        """Let the allocation at `device` be reached at `address`, too."""
        region = next(r for r in self.regions if r.address == device)
        self.regions.append(Region(address, region.size, region.offset, region.name))

    def commit(self) -> None:
        """Make the arena and fill it."""
        self.regions.sort(key=lambda r: r.address)
        self.arena = np.full(self.size, 0xFF, np.uint8)
        self.views = {size: view(self.arena, size) for size in VIEWS}
        for region in self.regions:
            if region.home is not None:
                self.arena[region.offset : region.offset + region.size] = region.home
        self.starts = np.array([r.address for r in self.regions], np.uint64)
        self.ends = np.array([r.address + r.size for r in self.regions], np.uint64)
        self.deltas = np.array([r.offset - r.address for r in self.regions], np.int64)
        self.last = 0

    def write_back(self) -> None:
        """Copy every region to its home; one that is read-only must not have changed."""
        refused = None
        for region in self.regions:
            if region.home is None:
                continue
            now = self.arena[region.offset : region.offset + region.size]
            if region.home.flags.writeable:
                region.home[:] = now
            elif (region.home != now).any():
                at = int(np.flatnonzero(region.home != now)[0])
                refused = IllegalOperation(
                    f"the kernel wrote to {region.name}, a read-only array (byte {at} of "
                    f"{region.size} has changed); pass an array that may be written"
                )
        if refused is not None and sys.exc_info()[0] is None:  # do not hide why the kernel ended
            raise refused

    def offsets(self, address: np.ndarray, size: int, what: str = "access") -> np.ndarray:
        """Return the arena offsets of accesses of `size` bytes at `address`, each checked."""
        if address.size == 0:
            return address.astype(np.int64)
        low = int(address[0])
        i = self.last
        if not (i < len(self.regions) and self.starts[i] <= low < self.ends[i]):
            i = max(int(np.searchsorted(self.starts, np.uint64(low), "right")) - 1, 0)
            self.last = i
        if self.regions and (
            address.min() >= self.starts[i] and int(address.max()) + size <= int(self.ends[i])
        ):
            result = address.view(np.int64) + self.deltas[i]
        else:
            which = np.searchsorted(self.starts, address, "right").astype(np.int64) - 1
            inside = which >= 0
            which = np.maximum(which, 0)
            if self.regions:
                inside &= address + np.uint64(size) <= self.ends[which]
            else:
                inside[:] = False
            if not inside.all():
                at = int(np.flatnonzero(~inside)[0])
                raise IllegalOperation(self.outside(int(address[at]), size, what), lane=at)
            result = address.view(np.int64) + self.deltas[which]
        if size > 1 and (address & np.uint64(size - 1)).any():
            at = int(np.flatnonzero(address & np.uint64(size - 1))[0])
            raise IllegalOperation(misaligned(int(address[at]), size), lane=at)
        return result

    def outside(self, address: int, size: int, what: str) -> str:
        """Return the sentence about an address in no allocation."""
        nearest = min(
            self.regions,
            key=lambda r: max(r.address - address, address - (r.address + r.size), 0),
            default=None,
        )
        where = "there are none"
        if nearest is not None:
            past = address + size - nearest.address - nearest.size
            side = (
                f"ends {past} bytes past the end"
                if address >= nearest.address
                else (f"begins {nearest.address - address} bytes before the start")
            )
            where = f"it {side} of {nearest.name} ({nearest.size} bytes)"
        return (
            f"{what} of {size} bytes at global address {address:#x} is in no allocation: {where}; "
            "pass the buffer, or mask the access"
        )


def misaligned(address: int, size: int) -> str:
    """Return the sentence about an access that is not naturally aligned (PTX ISA 6.4.1)."""
    return (
        f"an access of {size} bytes at address {address:#x} is misaligned: the address must be a "
        f"multiple of {size} (PTX ISA 6.4.1); align the buffer or split the access"
    )


class SharedMemory:
    """The shared windows of all resident CTAs, one slot of `stride` bytes each."""

    def __init__(self, slots: int, first: int, end: int, granule: int) -> None:
        self.first = first
        self.end = end  # one past the last byte a CTA owns
        self.stride = max(-(-end // 1024) * 1024, 2048)
        self.bytes = np.full(slots * self.stride, 0xFF, np.uint8)
        self.views = {size: view(self.bytes, size) for size in VIEWS}
        self.granule = granule
        self.shift = granule.bit_length() - 1
        self.high = 0

    def check(self, low: np.ndarray, size: int) -> None:
        """Refuse offsets outside the CTA's own variables, and misaligned ones."""
        if not low.size:
            return
        top = int(low.max())
        if int(low.min()) < self.first or top + size > self.end:
            bad = (low < self.first) | (low + size > self.end)
            at = int(np.flatnonzero(bad)[0])
            raise IllegalOperation(
                f"a shared access of {size} bytes at offset {int(low[at]):#x} is out of bounds: "
                f"the CTA's shared memory is {self.first:#x} to {self.end:#x} (the first 1024 "
                "bytes belong to the system); ask for more dynamic shared memory or mask the "
                "access",
                lane=at,
            )
        if size > 1 and (low & (size - 1)).any():
            at = int(np.flatnonzero(low & (size - 1))[0])
            raise IllegalOperation(misaligned(int(low[at]), size), lane=at)
        self.high = max(self.high, top + size)

    def cells(self, offsets: np.ndarray, size: int) -> np.ndarray:
        """Return the shadow cells of accesses of `size` bytes at `offsets`, [n * cells]."""
        if size <= self.granule:
            return offsets >> self.shift
        count = size >> self.shift
        return ((offsets >> self.shift)[:, None] + np.arange(count)).reshape(-1)
