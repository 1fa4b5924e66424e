"""What the shadows find, told as hazards: who touched what, and which wait or fence is missing.

`clocks` knows that two accesses conflict; this module knows whose they were and finds the words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from blockscale.emulator.machine.clocks import Access, Found, Shadow
from blockscale.emulator.machine.grid import LANES
from blockscale.emulator.machine.state import State, Warps
from blockscale.emulator.ptx.analysis import EarlyRead, early_reads
from blockscale.emulator.ptx.syntax import Instr
from blockscale.emulator.report import Hazard

MBARRIER_BYTES = 8
LAYOUTS = ("none", "32B", "64B", "128B", "128B_base32B")  # codes 1 to 5
VERBS = {  # conflict -> what the second access does, what the first did
    "write-read": ("reads", "writes"),
    "write-write": ("overwrites", "writes"),
    "read-write": ("overwrites", "reads"),
}
WAITS = {  # class of the first agent -> kind of hazard, what is missing, remedy
    "warp": (
        "race",
        "no barrier or mbarrier orders the two",
        "synchronise the warps between them",
    ),
    "cp.async": (
        "unwaited cp.async",
        "its completion was not waited for",
        "wait with cp.async.wait_group (or its mbarrier), then a barrier",
    ),
    "tcgen05.st": (
        "unwaited tcgen05.st",
        "tcgen05.wait::st was not executed in between",
        "execute tcgen05.wait::st before signalling other warps",
    ),
    "tensor": (
        "unwaited tensor work",
        "its tcgen05.commit was not waited for",
        "wait for the mbarrier of a tcgen05.commit that follows it",
    ),
    "wgmma": (
        "unwaited tensor work",
        "its wgmma.commit_group was not waited for",
        "wait with wgmma.wait_group first",
    ),
    "bulk": (
        "unwaited bulk copy",
        "its completion was not waited for",
        "wait for its mbarrier (or cp.async.bulk.wait_group) first",
    ),
}


class Store(NamedTuple):
    """What lanes are about to store to shared memory: `size` bytes of `items` at `offsets`."""

    cells: np.ndarray
    agents: np.ndarray
    offsets: np.ndarray
    size: int
    items: np.ndarray

    def bytes(self) -> np.ndarray:
        """Return the items as bytes [n, size]."""
        return np.ascontiguousarray(self.items).view(np.uint8).reshape(len(self.items), -1)


class Hazards:
    """Checks accesses against the shadows and writes hazards into the report."""

    def __init__(self, machine: State) -> None:
        self.machine = machine
        self.lines: dict[int, str] = {}
        for unit in machine.program.units:
            for ins in unit.everything:
                self.lines[ins.line] = ins.opcode
        self.known: set[tuple[Any, ...]] = set()

    def flush(self) -> None:
        """Add what was found before the run, where the run came by."""
        units = self.machine.units
        loads: dict[int, EarlyRead] = {}
        for read in early_reads(units):
            if units[read.unit].hits:
                loads.setdefault(read.load_line, read)
        for line, read in loads.items():
            who = f"{read.instr.opcode} reads {read.register}"
            if self.lines[line].startswith("wgmma"):
                if not read.register:
                    continue
                kind, severity = "unwaited wgmma", "error"
                text = (
                    f"{who}, an accumulator of the wgmma of line {line}, before wgmma.wait_group "
                    "(PTX ISA 9.7.15.7); wait first"
                )
            elif not read.register:
                kind, severity = "unwaited tcgen05.ld", "warning"
                text = (
                    f"{read.instr.opcode} signals other warps while the tcgen05.ld of line {line} "
                    "may still read tensor memory: no tcgen05.wait::ld lies between (PTX ISA "
                    "9.7.16.8.3); wait before signalling"
                )
            else:
                kind, severity = "unwaited tcgen05.ld", "warning"
                text = (
                    f"{who}, which the tcgen05.ld of line {line} fills, and no tcgen05.wait::ld "
                    "lies between (PTX ISA 9.7.16.8.3); wait before the first use"
                )
            other = self.lines.get(line)
            self.add(kind, severity, text, line=read.instr.line, other=other, other_line=line)

    def add(
        self,
        kind: str,
        severity: str,
        message: str,
        *,
        line: int | None,
        warp: int | None = None,
        lane: int | None = None,
        other: str | None = None,
        other_line: int | None = None,
    ) -> None:
        """Report one hazard; `warp` is an index into the machine's warps."""
        machine = self.machine
        entry = machine.warps[warp] if warp is not None else None
        machine.report.add(
            Hazard(
                kind,
                "error" if severity == "error" else "warning",
                message,
                machine.program.name,
                line,
                self.lines.get(line or -1, ""),
                entry.cta.coords if entry else None,
                entry.number if entry else None,
                lane,
                other,
                other_line,
            )
        )

    def agent_name(self, agent: int, line: int) -> tuple[str, str]:
        """Return (class, words) of an agent that was at `line`; the classes are those of WAITS."""
        clocks, machine = self.machine.clocks, self.machine
        opcode = self.lines.get(line, "?")
        if agent >= clocks.store:
            return "bulk", f"{opcode} (line {line})"
        if agent >= clocks.tensor:
            cls = "wgmma" if opcode.startswith("wgmma") else "tensor"
            return cls, f"{opcode} (line {line}) of CTA rank {agent - clocks.tensor}"
        per = machine.cta_warps
        kind = ("warp", "cp.async", "tcgen05.st")[agent // clocks.warps]
        number = agent % clocks.warps
        where = f"warp {number % per}"
        if machine.cluster_ctas > 1:
            where += f" of CTA rank {number // per}"
        return kind, f"{opcode} (line {line}) by {where}"

    def conflict(
        self,
        found: Found,
        what: str,
        memory: str,
        line: int,
        warp: int | None,
        offset: int,
        severity: str = "error",
    ) -> None:
        """Report a conflict that a shadow found; `what` names the access that came second."""
        kind, _, agent, other = found
        key = (kind, line, other, agent >= self.machine.clocks.warps, severity)
        if key in self.known:
            return
        self.known.add(key)
        cls, words = self.agent_name(agent, other)
        at = f"{memory} {offset:#x}" if memory == "shared memory" else memory
        if kind == "proxy":
            name = "missing proxy fence"
            text = (
                f"{what} reads {at} through the async proxy; {words} wrote it through the generic "
                "proxy and no fence.proxy.async lies between (PTX ISA 9.7.13: fence.proxy); let "
                "the writer (or everybody after the barrier) execute fence.proxy.async.shared::cta "
                "before the barrier"
            )
        else:
            name, why, remedy = WAITS[cls]
            verb, did = VERBS[kind]
            text = f"{what} {verb} {at} that {words} {did}: {why} (PTX ISA 8.9); {remedy}"
            if severity == "warning" and name == "race":  # shipped kernels do it, hardware forgives
                name = "doubtful order"
        self.add(name, severity, text, line=line, warp=warp, other=words, other_line=other)

    def unordered(self, found: Found, what: str, memory: str, line: int, warp: int | None) -> None:
        """Report an access of tensor memory that waited for another thread's, but without fences.

        A warning: what Triton 3.9 makes has no such fence, and hardware forgives that.
        """
        kind, _, agent, other = found
        key = ("tcgen05.fence", kind, line)
        if key in self.known:
            return
        self.known.add(key)
        cls, words = self.agent_name(agent, other)
        verb, did = VERBS[kind]
        before = "" if cls == "tensor" else "tcgen05.fence::before_thread_sync behind that, and "
        self.add(
            "missing tcgen05 fence",
            "warning",
            f"{what} {verb} {memory} that {words} {did} in another thread, and waits for that, but "
            f"without a fence (PTX ISA 9.7.16.6); execute {before}"
            "tcgen05.fence::after_thread_sync behind the wait",
            line=line, warp=warp, other=words, other_line=other,
        )  # fmt: skip

    # generic accesses -------------------------------------------------------------------------
    def shared(
        self,
        g: Warps,
        lanes: np.ndarray,
        offsets: np.ndarray,
        size: int,
        write: bool,
        sync: bool = False,
        items: np.ndarray | None = None,
    ) -> None:
        """Check and record accesses of lanes to shared memory: `size` bytes at each offset.

        `items` is what a store is about to write: warps may write what is there already (compilers
        let every warp store replicated values).
        """
        machine = self.machine
        shadow = machine.shared_shadow
        if shadow is None:
            return
        cells = machine.shared.cells(offsets, size)
        rows = lanes // LANES
        if size > machine.traits.granule:
            rows = np.repeat(rows, size // machine.traits.granule)
        line = g.ins.line
        if write:
            self.over_mbarriers(cells, g.ins.opcode, line, g.warps[rows])
        clusters = g.w_cluster
        know = machine.clocks.know[clusters, g.w_agent]  # [W, A]
        agents = g.w_agent[rows]
        clock = know[rows, agents]
        one = g.W == 1
        by = Access(int(g.w_agent[0]), know[0]) if one else Access(agents, know, rows)
        when = int(clock[0]) if one else clock
        if sync:
            found = shadow.synchronise(cells, by, when, line, write)
        elif not write:
            found = shadow.read(cells, by, when, line)
        else:
            store = None if items is None else Store(cells, agents, offsets, size, items)
            found = shadow.check_write(cells, by)
            if found is not None and store is not None:
                found = self.changing(shadow, store, by)
            shadow.record_write(cells, by.agent, when, line)
            if found is None and not one and store is not None:
                found = self.together(shadow, store, line)
        if found is not None:
            at = found[1]
            row = int(rows[at])
            offset = int(cells[at]) * machine.traits.granule % machine.shared.stride
            self.conflict(found, g.ins.opcode, "shared memory", line, int(g.warps[row]), offset)
        if not write and not shadow.dirty[cells].all():
            at = int(np.flatnonzero(~shadow.dirty[cells])[0])
            self.uninitialised(g.ins, cells, at, int(g.warps[int(rows[at])]))

    def over_mbarriers(
        self, cells: np.ndarray, what: str, line: int, warps: np.ndarray | int
    ) -> None:
        """Report a write of `cells` that hits an mbarrier object; `warps`: whose, of each cell."""
        shadow, machine = self.machine.shared_shadow, self.machine
        if shadow is None or shadow.objects is None:
            return
        hit = shadow.objects[cells]
        key = ("over mbarrier", line)
        if not hit.any() or key in self.known:
            return
        self.known.add(key)
        at = int(hit.argmax())
        offset = int(cells[at]) * machine.traits.granule // MBARRIER_BYTES * MBARRIER_BYTES
        first = machine.mbarriers[offset].line
        self.add(
            "mbarrier overwritten",
            "error",
            f"{what} writes over the mbarrier at shared memory "
            f"{offset % machine.shared.stride:#x} that line {first} initialised (PTX ISA "
            "9.7.13.15.1); end it with mbarrier.inval first, or store elsewhere",
            line=line,
            warp=int(warps if np.ndim(warps) == 0 else np.asarray(warps)[at]),
            other=self.lines.get(first),
            other_line=first,
        )

    def changing(self, shadow: Shadow, store: Store, by: Access) -> Found | None:
        """Return the first conflict of the lanes whose store changes what is there."""
        cells, size = store.cells, store.size
        view = self.machine.shared.views[size][store.offsets >> (size.bit_length() - 1)]
        changed = (store.bytes() != view.view(np.uint8).reshape(-1, size)).any(1)
        if len(cells) != len(changed):
            changed = np.repeat(changed, len(cells) // len(changed))
        at = np.flatnonzero(changed)
        if not len(at):
            return None
        rows = None if by.rows is None else by.rows[at]
        found = shadow.check_write(cells[at], Access(store.agents[at], by.know, rows))
        return None if found is None else (found[0], int(at[found[1]]), found[2], found[3])

    @staticmethod
    def together(shadow: Shadow, store: Store, line: int) -> Found | None:
        """Return the conflict of two warps of one gang that write one cell in one instruction."""
        last = shadow.w_agent[store.cells]
        if (last == store.agents).all():
            return None
        order = np.argsort(store.offsets, kind="stable")
        offsets, data = store.offsets[order], store.bytes()[order]
        differs = (offsets[1:] == offsets[:-1]) & (data[1:] != data[:-1]).any(1)
        if not differs.any():
            return None
        where = np.repeat(store.offsets, len(store.cells) // len(store.offsets))
        several = (last != store.agents) & np.isin(where, offsets[1:][differs])
        if not several.any():
            return None  # lanes of one warp
        at = int(several.argmax())
        return "write-write", at, int(last[at]), line

    def layout(
        self, ins: Instr, cells: np.ndarray, swizzle: str, stride: int, what: str, warp: int
    ) -> None:
        """Report an operand descriptor that does not fit the tensor load that wrote the operand.

        K-major operands only: rows of one swizzle span, eight of them (the pattern) `stride` bytes
        apart.
        """
        shadow = self.machine.shared_shadow
        if shadow is None or shadow.swizzle is None or ("layout", ins.line, what) in self.known:
            return
        codes = shadow.swizzle[cells]
        codes = codes[codes > 0]
        if not len(codes):
            return
        wrote = LAYOUTS[int(codes[0]) - 1]
        line = int(shadow.w_line[cells[0]])
        span = {"32B": 32, "64B": 64}.get(swizzle, 128)
        kind = None
        if wrote != swizzle:
            kind = "descriptor swizzle"
            text = (
                f"descriptor says swizzle {swizzle}, the tensor load of line {line} wrote swizzle "
                f"{wrote}"
            )
        elif swizzle != "none" and stride != 8 * span and stride != 0:
            kind = "descriptor stride"
            text = (
                f"descriptor's stride byte offset is {stride}, eight rows of the tensor load of "
                f"line {line} take {8 * span} bytes"
            )
        if kind is not None:
            self.known.add(("layout", ins.line, what))
            text = f"{what}: the {text} (PTX ISA 9.7.16.4.1); make them agree"
            self.add(kind, "warning", text, line=ins.line, warp=warp, other_line=line)

    def uninitialised(self, ins: Instr, cells: np.ndarray, at: int, warp: int) -> None:
        """Report a read of shared memory that nobody wrote."""
        key = ("uninitialised", ins.line)
        if key in self.known:
            return
        self.known.add(key)
        offset = int(cells[at]) * self.machine.traits.granule % self.machine.shared.stride
        self.add(
            "uninitialised read",
            "warning",
            f"{ins.opcode} reads shared memory {offset:#x}, which nobody has written; "
            "initialise it or mask the read",
            line=ins.line,
            warp=warp,
        )
