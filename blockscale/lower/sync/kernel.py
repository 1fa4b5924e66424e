"""A kernel of block-scaled mma.sync: that of `pipe.kernel`, without tensor memory.

Five warps: 0 to 3 multiply, each 32 rows of X, and then store them; 4 loads.  Sums are in registers
of the warps, and go through shared memory, a part of a warp's columns at a time, to a row a thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from blockscale.base.targets import Gpu
from blockscale.lower.pipe.kernel import CONTROL_BYTES, EXPERT_BYTES, STORE_WARPS, Kernel
from blockscale.specs.plans.sync import PITCH_PAD, SM120, WARP_ROWS, WARPS

assert WARPS == STORE_WARPS, "those that multiply store"

THREADS = 32 * (WARPS + 1)

TILE_8, TILE_16 = 8, 16
"""Rows of Y and of X of an mma.sync."""


@dataclass(frozen=True, eq=False)
class SyncKernel(Kernel):
    """All of a kernel; columns of scales are words of a lane, one for 32 rows."""

    @property
    def gpu(self) -> Gpu:
        """The architecture with the least shared memory that runs it."""
        return SM120

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return THREADS

    @property
    def sums(self) -> int:
        """Of a thread."""
        return WARP_ROWS * self.mma.n // 32

    @property
    def pitch(self) -> int:
        """Bytes from a row of sums in shared memory to the next."""
        return 4 * (self.epilogue.width + PITCH_PAD)

    @property
    def used_columns(self) -> int:
        """Of tensor memory."""
        return 0

    @cached_property
    def places(self) -> dict[str, int]:
        """Bytes at which slots, staging, table and barriers begin."""
        x, y, sx, sy = self.loads
        sizes = {
            "x": self.stages * x.slot.bytes,
            "y": self.stages * y.slot.bytes,
            "out": self.staging,
            "sx": self.stages * sx.slot.bytes,
            "sy": self.stages * sy.slot.bytes,
            "sums": WARPS * WARP_ROWS * self.pitch,
            "table": EXPERT_BYTES * (self.experts + 1),
            "full": 8 * self.stages,
            "empty": 8 * self.stages,
            "packed": 8 * self.stages,
            "scan": 96,
        }
        found, at = {}, 0
        for name, size in sizes.items():
            found[name] = at
            at += size
        return found | {"end": at}

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self.places["table"] + EXPERT_BYTES * self.experts + CONTROL_BYTES

    @property
    def launch_bytes(self) -> int:
        """Dynamic shared memory of a CTA's launch."""
        return self.smem_bytes
