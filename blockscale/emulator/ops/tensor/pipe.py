"""Who issues work to a CTA's tensor pipe, and what that work touches (PTX ISA 9.7.16.5)."""

from __future__ import annotations

import numpy as np

from blockscale.emulator.errors import IllegalOperation
from blockscale.emulator.machine.clocks import Access, Found, Shadow
from blockscale.emulator.machine.gangs import Gang
from blockscale.emulator.machine.grid import LANES, Cta
from blockscale.emulator.ops.copies.issuer import Issuer, tell
from blockscale.emulator.ops.tensor.allocation import check_columns, pair_of
from blockscale.emulator.ops.tensor.movement import cells_of, touch
from blockscale.emulator.tcgen05.descriptor import SmemDescriptor


def issuers(g: Gang, m: np.ndarray | None) -> list[int]:
    """Return one lane per active warp: tensor instructions are issued once per warp."""
    lanes = []
    for w in g.active_warps(m):
        active = np.flatnonzero(g.by_warp(m)[w])
        lanes.append(int(w) * LANES + int(active[0]))
        if len(active) > 1:
            g.machine.hazards.add(
                "issued by several lanes", "warning",
                f"{g.ins.opcode} is executed by {len(active)} lanes of a warp; one thread should "
                "issue it (elect.sync; PTX ISA 9.7.16.5)",
                line=g.ins.line, warp=int(g.warps[w]),
            )  # fmt: skip
    return lanes


class PipeIssuer(Issuer):
    """The thread that issues tensor work, and the CTAs that take part."""

    def __init__(self, g: Gang, lane: int, group: int) -> None:
        super().__init__(g, lane)
        self.pair = pair_of(g, self.cta, group)
        for cta in self.pair:
            if not cta.live:
                raise IllegalOperation(
                    f"{g.ins.opcode}: the peer CTA (rank {cta.rank}) has exited; it must be there "
                    "until the work is done (PTX ISA 9.7.16.5): end with a cluster barrier",
                    lane=lane,
                )
        clocks = self.machine.clocks
        first = self.pair[0]  # the pipes of a pair work as one, in order of issue
        self.agent = clocks.tensor + first.rank
        clocks.issues(first.cluster.slot, self.warp.agent, first.rank)
        self.orders(pipe=True)
        self.stream = ("tensor", first.slot)
        know = clocks.know[self.cluster.slot, self.agent]
        know[self.agent] += 1
        self.clock = int(know[self.agent])
        self.know[self.agent] = self.clock

    def reads_shared(
        self, cta: Cta, offsets: np.ndarray, what: str, doubt: bool = False, used: int = 16,
        descriptor: int | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Return bytes of a CTA's shared memory at CTA-local addresses [rows, bytes].

        The read is recorded. Of each 16 bytes only the first `used` matter (8 or 12 for padded 4-
        and 6-bit elements). The `descriptor` of a K-major operand is compared with the load that
        wrote it.
        """
        machine = self.machine
        place = offsets.astype(np.int64) + cta.slot * machine.shared.stride
        shadow = machine.shared_shadow
        if shadow is not None:
            cells = self.cells(cta, offsets, used)
            if doubt and cta is not self.cta:
                self.peer_reads(shadow, cells, what)
            else:
                by = self.asynchronous(self.agent)
                found = shadow.read(cells, by, self.clock, self.line)
                if found is not None:
                    tell(self, self.agent, cells, found, what, self.severity(found, doubt))
            if descriptor is not None:
                d = SmemDescriptor.decode(descriptor)
                machine.hazards.layout(self.ins, cells, d.swizzle, d.stride, what, self.warp.index)
            if not shadow.dirty[cells].all():
                at = int(np.flatnonzero(~shadow.dirty[cells])[0])
                machine.hazards.uninitialised(self.ins, cells, at, self.warp.index)
        return machine.shared.bytes[place]

    def cells(self, cta: Cta, offsets: np.ndarray, used: int) -> np.ndarray:
        """Return the shadow cells of an operand [rows, bytes], the first `used` of 16 bytes."""
        shared = self.machine.shared
        columns = np.arange(0, offsets.shape[1], self.machine.traits.granule)
        place = offsets[:, columns[columns % 16 < used]].astype(np.int64) + cta.slot * shared.stride
        return (place >> shared.shift).reshape(-1)

    def peer_reads(self, shadow: Shadow, cells: np.ndarray, what: str) -> None:
        """Record a read of the peer CTA's shared memory by tcgen05.cp.

        In shipped kernels both CTAs of a pair copy the scales of both, each when its own are there:
        what the peer has not written yet it will copy itself. That is a warning, and no read.
        """
        there = cells[shadow.dirty[cells]]
        found = shadow.look(there, self.know)
        if found is not None and found[0] == "write-write":  # the writer is not ordered before
            found = ("write-read", *found[1:])
            tell(self, self.agent, there, found, what, "warning")
        else:
            shadow.read(there, Access(self.agent, self.know), self.clock, self.line)

    def severity(self, found: Found, doubt: bool) -> str:
        """Return how bad a conflict of an operand is.

        Shipped kernels copy scales without the proxy fence (`doubt`): that is a warning.
        """
        return "warning" if found[0] == "proxy" and doubt else "error"

    def inside(self, offsets: np.ndarray, used: int = 16) -> None:
        """Refuse an operand outside the CTA's shared memory when it is issued; look at it."""
        machine = self.machine
        low = offsets.reshape(-1).astype(np.int64)
        if low.min() < machine.shared.first or low.max() >= machine.shared.end:
            raise IllegalOperation(
                f"an operand of {self.ins.opcode} reaches from shared {int(low.min()):#x} to "
                f"{int(low.max()):#x}, outside of the CTA's {machine.shared.first:#x} to "
                f"{machine.shared.end:#x}: look at its matrix descriptor (start address, leading "
                "and stride byte offset, swizzle) and at M and N of the instruction descriptor",
                lane=self.lane,
            )
        if machine.shared_shadow is not None:
            for cta in self.pair:
                self.look_at(machine.shared_shadow, self.cells(cta, offsets, used))

    def owns(self, columns: np.ndarray, what: str) -> None:
        """Refuse TMEM columns that one of the CTAs has not allocated."""
        low, high = int(columns.min()), int(columns.max())
        for cta in self.pair:
            check_columns(
                self.machine, cta, low, high, what, self.line, self.know, columns, self.lane
            )

    def looks(self, lanes: np.ndarray, columns: np.ndarray) -> None:
        """Look at TMEM when work on it is issued."""
        shadow = self.machine.tmem_shadow
        assert shadow is not None
        for cta in self.pair:
            self.look_at(shadow, cells_of(cta, lanes, columns).reshape(-1))

    def tmem(
        self, cta: Cta, lanes: np.ndarray, columns: np.ndarray, write: bool, what: str
    ) -> np.ndarray:
        """Record an access of TMEM; return its words when it is a read."""
        spot = cells_of(cta, lanes, columns)
        touch(self, self.agent, self.clock, spot, write, what)
        return self.machine.tmem[cta.slot, lanes, columns]
