"""What asynchronous instructions share: who issued them, what they touch, how they complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from blockscale.emulator.errors import IllegalOperation, PtxError
from blockscale.emulator.machine.clocks import Access, Found, Shadow
from blockscale.emulator.machine.engine import Op
from blockscale.emulator.machine.gangs import Gang, Machine
from blockscale.emulator.machine.grid import LANES, Cta, MBarrier, Warp
from blockscale.emulator.machine.state import Fragment
from blockscale.emulator.ops.core import address, bad_rank, converged, shared_offsets
from blockscale.emulator.ops.operands import Operands
from blockscale.emulator.ops.threads import mbarrier
from blockscale.emulator.ptx.syntax import Instr, Mem, Operand, items_of
from blockscale.emulator.tma.opcode import AsyncOp, parse

CYCLES_PER_BYTE = 1 / 64  # of a CTA's share of the copy engine
REDUCTIONS = ("cp.reduce.async.bulk", "red.async")
Scalar = Callable[["Gang"], Any]


def aligned(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
    """Whether all threads of each warp are here; refuses those that a guard leaves out.

    For .sync.aligned instructions: the whole warp executes the same one (PTX ISA 9.7.9.6).
    """
    if not converged(g, m, f):
        return False
    if m is not None:
        here = g.by_warp(m)
        left = here.any(1) & (g.by_warp(g.live) & ~here).any(1)
        if left.any():
            w = int(left.argmax())
            raise IllegalOperation(
                f"{g.ins.opcode} is executed by {int(here[w].sum())} of the warp's "
                f"{int(g.by_warp(g.live)[w].sum())} threads: all must execute a .sync.aligned "
                "instruction; make its condition the same for the whole warp",
                lane=w * LANES,
            )
    return True


@contextmanager
def blame(lane: int) -> Iterator[None]:
    """Say in errors which of the gang's lanes issued the operation."""
    try:
        yield
    except IllegalOperation as error:
        error.lane = lane
        raise


class Issuer:
    """One lane that issues an asynchronous operation: who it is and what it knows."""

    def __init__(self, g: Gang, lane: int) -> None:
        self.g, self.lane, self.machine = g, lane, g.machine
        self.warp = g.machine.warp(g.warps[lane // LANES])
        self.cta: Cta = self.warp.cta
        self.cluster = self.cta.cluster
        self.know, self.fenced = g.machine.clocks.both(self.cluster.slot, self.warp.agent)
        g.machine.clocks.release(self.cluster.slot, self.warp.agent)
        self.ins: Instr = g.ins
        self.line = g.ins.line
        self.early: set[tuple[int, int]] = set()  # (agent, line) of accesses before the issue
        self.ordered: np.ndarray | None = None  # what its accesses of tensor memory build on
        clocks = g.machine.clocks
        pipes = np.arange(clocks.tensor, clocks.store)
        self.pipes = clocks.know[self.cluster.slot, pipes, pipes]  # what they had been given

    def orders(self, pipe: bool) -> None:
        """Note what accesses of tensor memory are ordered after; ``pipe``: of a tensor pipe."""
        clocks = self.machine.clocks
        self.ordered = clocks.ordered(self.cluster.slot, self.warp.agent, self.know, pipe)

    def asynchronous(self, agent: int) -> Access:
        """Return the access of an operation, as agent `agent`, through the async proxy."""
        generic = self.machine.clocks.cp_async + self.machine.clocks.warps
        return Access(agent, self.know, fenced=self.fenced, generic=generic)

    def claim(self, op: Op) -> None:
        """Give the operation its agent."""
        op.agent, op.clock = self.machine.clocks.claim(self.cluster.slot, self.know)

    def claim_group(self, op: Op) -> None:
        """Give an operation of a bulk group its agent: a thread waits for its groups in order."""
        clocks = self.machine.clocks
        op.agent = clocks.store + self.warp.agent
        know = clocks.know[self.cluster.slot, op.agent]
        know[op.agent] += 1
        op.clock = int(know[op.agent])

    def cta_of(self, shared: int) -> Cta:
        """Return the CTA of a shared address."""
        rank = (shared >> 24) & 0xFF
        if rank >= len(self.cluster.ctas):
            raise bad_rank(shared, len(self.cluster.ctas), self.lane)
        return self.cluster.ctas[rank]

    def own(self, shared: int, what: str, section: str) -> None:
        """Refuse an address in another CTA's shared memory."""
        cta = self.cta_of(shared)
        if cta is not self.cta:
            raise IllegalOperation(
                f"{what} {shared:#x} is in the shared memory of CTA rank {cta.rank}, and "
                f"{self.ins.opcode} wants the executing CTA's own (rank {self.cta.rank}; PTX ISA "
                f"{section}); pass an address of this CTA or use the .shared::cluster form",
                lane=self.lane,
            )

    def targets(self, mask: int | None, shared: int) -> list[Cta]:
        """Return the destination CTAs of a multicast mask, or the CTA of the address."""
        if mask is None:
            return [self.cta_of(shared)]
        ctas = self.cluster.ctas
        if not mask or mask >> len(ctas):
            raise IllegalOperation(
                f"{self.ins.opcode}: CTA mask {mask:#x} in a cluster of {len(ctas)} CTAs: each bit "
                "must name a rank that exists, and one must be set; make the mask of cluster ranks",
                lane=self.lane,
            )
        return [cta for cta in ctas if mask >> cta.rank & 1]

    def absolute(self, shared: np.ndarray | int, size: int) -> np.ndarray:
        """Return checked absolute offsets of items of `size` bytes at shared addresses."""
        at = np.atleast_1d(np.asarray(shared, np.uint64))
        lanes = np.full(len(at), self.lane)
        return shared_offsets(self.g, lanes, at, size)

    def span(self, shared: int, count: int) -> np.ndarray:
        """Return the checked absolute offsets of `count` bytes from a shared address."""
        offsets = int(self.absolute(shared & 0xFFFFFFFF, 1)[0]) + np.arange(count)
        self.machine.shared.check(offsets % self.machine.shared.stride, 1)
        return offsets

    def barrier(self, shared: int, cta: Cta | None = None) -> MBarrier:
        """Return the mbarrier at a shared address (at the same offset in `cta`)."""
        if cta is not None:
            shared = (shared & 0xFFFFFF) | (cta.rank << 24)
        offset = int(self.absolute(shared & 0xFFFFFFFF, 8)[0])
        there = self.machine.mbarriers.get(offset)
        if self.cta_of(shared) is not self.cta and (there is None or there.promised):
            self.machine.hazards.add(
                "mbarrier used before init", "warning",
                f"{self.ins.opcode} signals the mbarrier at shared {shared & 0xFFFFFF:#x} of CTA "
                f"rank {shared >> 24 & 0xFF}, which comes, or may come, before its mbarrier.init: "
                "no cluster barrier orders the two (PTX ISA 9.7.13.15.1); put one behind the init",
                line=self.line, warp=self.warp.index, lane=self.lane % LANES,
            )  # fmt: skip
            return mbarrier.promise(self.machine, offset)
        if there is not None:
            warp = self.warp.index
            mbarrier.ordered(self.machine, there, warp, self.know, self.ins, self.lane)
        return mbarrier.find(self.machine, offset, f"{self.ins.opcode}: its mbarrier", self.lane)

    def same_cta(self, bar: int, cta: Cta, section: str) -> None:
        """Refuse an mbarrier that is not in the destination's CTA."""
        home = self.cta_of(bar)
        if home is not cta:
            raise IllegalOperation(
                f"the mbarrier {bar:#x} is in CTA rank {home.rank} and the destination in rank "
                f"{cta.rank}; they must be in the shared memory of one CTA (PTX ISA {section}); "
                "pass the destination CTA's mbarrier (tensor loads: or use .cta_group::2)",
                lane=self.lane,
            )

    def look(self, offsets: np.ndarray) -> None:
        """Note at the issue which earlier accesses of shared memory are not ordered before it."""
        shadow = self.machine.shared_shadow
        if shadow is not None and len(offsets):
            self.look_at(shadow, cells_of(self.machine, offsets))

    def look_at(self, shadow: Shadow, cells: np.ndarray) -> None:
        """Note which earlier accesses of the cells of a memory are not ordered before the issue."""
        found = shadow.look(cells, self.know)
        if found is not None:
            self.early.add((found[2], found[3]))

    def before_tensor(self, found: Found, cell: int) -> bool:
        """Whether a conflict is with tensor work that had been issued before this."""
        clocks, shadow = self.machine.clocks, self.machine.shared_shadow
        kind, _, other, _ = found
        if shadow is None or not clocks.tensor <= other < clocks.store:
            return False
        if kind != "read-write":
            return True
        reads = shadow.reads
        return bool(reads.clock[reads.rows[other], cell] <= self.pipes[other - clocks.tensor])

    def start(self, op: Op) -> None:
        """Put an operation in flight by itself."""
        self.machine.engine.issue(self.machine.engine.new_stream(), op, self.g.time)

    def start_group(self, op: Op) -> None:
        """Put an operation in flight that the thread's next bulk group will hold."""
        self.claim_group(op)
        self.warp.bulk_open.setdefault(self.lane % LANES, []).append(op)
        self.start(op)

    def write_later(self, op: Op, write: Callable[[], None]) -> None:
        """`op` has read its source; its writes to global memory happen some time after that."""
        later = Op(op.engine, self.cta, self.line, lambda _: write(), cost=0.0)
        op.writes = later
        self.machine.engine.issue(self.machine.engine.new_stream(), later, op.end)


class Everything(set[tuple[int, int]]):
    """All accesses: what a synchronous instruction finds came before it."""

    def __contains__(self, item: object) -> bool:
        return True


EARLIER = Everything()


def cells_of(machine: Machine, offsets: np.ndarray) -> np.ndarray:
    """Return the shadow cells of bytes at absolute offsets, each once, ascending."""
    cells = offsets >> machine.shared.shift
    low = int(cells.min())
    seen = np.zeros(int(cells.max()) - low + 1, bool)
    seen[cells - low] = True
    return np.flatnonzero(seen) + low


def touch(who: Issuer, op: Op, offsets: np.ndarray, write: bool, what: str) -> None:
    """Record that a bulk operation reads or writes bytes of shared memory (absolute offsets)."""
    machine = who.machine
    shadow = machine.shared_shadow
    if shadow is None or not len(offsets):
        return
    cells = cells_of(machine, offsets)
    if write:
        machine.hazards.over_mbarriers(cells, what, who.line, who.warp.index)
    act = shadow.write if write else shadow.read
    found = act(cells, who.asynchronous(op.agent), op.clock, who.line)
    if found is not None and write and found[0] == "proxy":
        written = machine.hazards.lines.get(found[3], "")
        if written.startswith(("tcgen05.alloc", "mbarrier")):
            found = None  # nobody reads those bytes through the generic proxy any more
    if found is not None:
        severity = "warning" if write and found[0] == "proxy" else "error"
        tell(who, op.agent, cells, found, what, severity)
    if not write and not shadow.dirty[cells].all():
        at = int(np.flatnonzero(~shadow.dirty[cells])[0])
        machine.hazards.uninitialised(who.ins, cells, at, who.warp.index)


def tell(
    who: Issuer, agent: int, cells: np.ndarray, found: Found, what: str, severity: str
) -> None:
    """Report a conflict at one of `cells` of shared memory."""
    machine = who.machine
    offset = int(cells[found[1]]) * machine.traits.granule % machine.shared.stride
    if who.before_tensor(found, int(cells[found[1]])):
        who.early.add((found[2], found[3]))
    tell_at(who, agent, found, what, "shared memory", offset, severity)


def tell_at(
    who: Issuer, agent: int, found: Found, what: str, memory: str, offset: int, severity: str
) -> None:
    """Report a conflict of an operation (by `agent`) with an earlier access.

    A warp, or a tensor operation, that came in after the issue has not waited for this operation:
    the conflict is its own.
    """
    machine, clocks = who.machine, who.machine.clocks
    kind, at, other, line = found
    able = other < clocks.warps or clocks.tensor <= other < clocks.store
    if kind == "proxy" or not able or (other, line) in who.early:
        machine.hazards.conflict(found, what, memory, who.line, who.warp.index, offset, severity)
        return
    turned = {"write-read": "read-write", "read-write": "write-read"}.get(kind, kind)
    rank = other - clocks.tensor
    warp = who.cluster.warps[other] if rank < 0 else who.cluster.ctas[rank].warps[0]
    opcode = machine.hazards.lines.get(line, "an access")
    machine.hazards.conflict(
        (turned, at, agent, who.line), opcode, memory, line, warp.index, offset, severity
    )


def touch_reduction(who: Issuer, op: Op, offsets: np.ndarray, what: str) -> None:
    """Record a reduction into shared memory: several may be in flight at once, in any order.

    Each element is a relaxed atomic (PTX ISA 9.7.9.25.4.2), so it races with other accesses only.
    """
    machine = who.machine
    shadow = machine.shared_shadow
    if shadow is None or not len(offsets):
        return
    cells = cells_of(machine, offsets)
    machine.hazards.over_mbarriers(cells, what, who.line, who.warp.index)
    lines = [x for x, opcode in machine.hazards.lines.items() if opcode.startswith(REDUCTIONS)]
    others = cells[~np.isin(shadow.w_line[cells], lines)]
    if len(others):
        found = shadow.check_write(others, Access(op.agent, who.know), strong=True)
        if found is not None:
            tell(who, op.agent, others, found, what, "error")
    if not shadow.dirty[cells].all():
        at = int(np.flatnonzero(~shadow.dirty[cells])[0])
        machine.hazards.uninitialised(who.ins, cells, at, who.warp.index)
    shadow.record_write(cells, op.agent, op.clock, who.line)


def begin_load(who: Issuer, offsets: np.ndarray) -> None:
    """A load begins: look at what it overwrites, which some seeds destroy at once."""
    who.look(offsets)
    if who.machine.engine.poison and who.machine.engine.temper != "eager":
        who.machine.shared.bytes[offsets] = 0xFF


def waited(g: Gang, warp: Warp, op: Op) -> None:
    """A warp has waited for one of its operations: it knows that it is done."""
    g.machine.clocks.learn(warp.cta.cluster.slot, warp.agent, op.agent, op.clock)
    g.time = max(g.time, op.end)


def finish_load(who: Issuer, op: Op, b: MBarrier, count: int) -> None:
    """complete_tx at an mbarrier, whose waiters then know of the operation."""
    vector = who.machine.clocks.ended((who.know, who.fenced), op.agent, op.clock)
    b = who.machine.mbarriers.get(b.offset, b)  # it may have been promised, and initialised since
    mbarrier.give(who.machine, b, vector, op.end, op.flow)
    mbarrier.complete_tx(who.machine, b, count, who.lane)


def parsed(ins: Instr) -> AsyncOp:
    """Return the fields of an asynchronous copy's opcode."""
    op = parse(ins.opcode)
    assert op is not None, "it is registered, and no asynchronous copy"
    return op


class BulkOperands:
    """The operands of a bulk instruction, by role."""

    def __init__(self, c: Operands, ins: Instr) -> None:
        self.c, self.ins = c, ins
        self.op = op = parsed(ins)
        roles = [r for r in op.operands if not r.endswith("?")]
        if len(roles) != len(ins.operands):
            raise PtxError(
                f"{ins.opcode} takes {len(roles)} operands ({', '.join(roles)}) and has "
                f"{len(ins.operands)}; write them all"
            )
        self.by_role: dict[str, Operand] = dict(zip(roles, ins.operands, strict=True))

    def address(self, role: str) -> Scalar | None:
        """Return a getter of an address operand."""
        return address(self.c, self.by_role[role]) if role in self.by_role else None

    def value(self, role: str, dtype: str) -> Scalar | None:
        """Return a getter of a value operand."""
        return self.c.lanes_source(self.by_role[role], dtype) if role in self.by_role else None

    def tensor(self) -> tuple[Scalar, list[Scalar]]:
        """Return getters of the tensor map's address and of the coordinates."""
        mem = self.by_role["tensor"]
        assert isinstance(mem, Mem)
        coords = mem.rest[0]
        items = items_of(coords)
        if len(items) != self.op.coordinates:
            raise PtxError(
                f"{self.ins.opcode} takes {self.op.coordinates} coordinates and has {len(items)}; "
                "give all"
            )
        return (
            address(self.c, Mem(mem.base, mem.offset)),
            [self.c.lanes_source(i, "i4") for i in items],
        )


def arena_base(machine: Machine, low: int, high: int, what: str) -> int:
    """Return the virtual address that arena[0] would have for an access of [low, high)."""
    first = machine.memory.offsets(np.array([low], np.uint64), 1, what)
    last = machine.memory.offsets(np.array([high - 1], np.uint64), 1, what)
    if int(last[0]) - int(first[0]) != high - 1 - low:
        raise IllegalOperation(
            f"{what} from global address {low:#x} to {high - 1:#x} begins in one allocation and "
            "ends in another; copy within one buffer"
        )
    return low - int(first[0])
