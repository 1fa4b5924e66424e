"""mbarrier objects (PTX ISA 9.7.13.15): phases, arrivals, transactions, waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blockscale.emulator.errors import IllegalOperation, PtxError
from blockscale.emulator.machine.clocks import Vector, union
from blockscale.emulator.machine.gangs import Gang, Machine
from blockscale.emulator.machine.grid import LANES, MBarrier
from blockscale.emulator.machine.state import Fragment
from blockscale.emulator.ops.core import address, known_modifiers, register, shared_offsets
from blockscale.emulator.ops.operands import Operands
from blockscale.emulator.ptx.syntax import Instr, Mem, Sink

MOST = (1 << 20) - 1  # of the arrival count and of the transaction count
MODIFIERS = {
    "arrive", "arrive_drop", "expect_tx", "complete_tx", "noComplete", "test_wait", "try_wait",
    "parity", "release", "acquire", "relaxed", "cta", "cluster",
}  # fmt: skip


def find(machine: Machine, offset: int, what: str, lane: int | None = None) -> MBarrier:
    """Return the mbarrier object at an absolute offset."""
    found = machine.mbarriers.get(offset)
    if found is None or found.promised:
        at = offset % machine.shared.stride
        raise IllegalOperation(
            f"{what} at shared {at:#x}, where no mbarrier object is: mbarrier.init comes first "
            "(PTX ISA 9.7.13.15.1), with a barrier between it and the other warps",
            lane=lane,
        )
    return found


def promise(machine: Machine, offset: int) -> MBarrier:
    """Return the mbarrier at an absolute offset, or a stand-in that counts until its init.

    Another CTA's copy may come before this CTA's mbarrier.init where no cluster barrier orders the
    two; shipped kernels rely on the copy being the slower one.
    """
    return machine.mbarriers.setdefault(offset, MBarrier(offset, MOST, 0, MOST, promised=True))


def settle(machine: Machine, b: MBarrier) -> None:
    """Complete the phase when nothing is pending."""
    if b.pending == 0 and b.tx == 0:
        b.done[b.phase & 1] = (b.vector, b.time, b.flow)
        b.phase += 1
        b.expected, b.dropped = b.expected - b.dropped, 0
        b.pending, b.vector, b.time, b.flow = b.expected, None, 0.0, None
        machine.progress += 1


def arrive(machine: Machine, b: MBarrier, count: int, lane: int | None = None) -> None:
    """Take `count` off the pending arrivals."""
    if not 1 <= count <= MOST:
        raise IllegalOperation(
            f"mbarrier arrival with count {count}: 1 to 2^20 - 1 (PTX ISA 9.7.13.15.13)", lane=lane
        )
    if count > b.pending:
        raise IllegalOperation(
            f"mbarrier arrival count underflow: {count} arrivals at an mbarrier (shared "
            f"{b.offset % machine.shared.stride:#x}) that waits for {b.pending} of {b.expected} "
            "more in "
            "this phase (PTX ISA 9.7.13.15.2); wait for the phase before arriving again, or "
            "initialise it "
            "with the right count",
            lane=lane,
        )
    b.pending -= count


def expect(machine: Machine, b: MBarrier, count: int, lane: int | None = None) -> None:
    """Add to the transaction count."""
    if not 0 <= count <= MOST:
        raise IllegalOperation(
            f"an mbarrier expects {count} bytes: 0 to 2^20 - 1 (PTX ISA 9.7.13.15.3)", lane=lane
        )
    b.tx += count
    bounds(machine, b, lane)


def complete_tx(machine: Machine, b: MBarrier, count: int, lane: int | None = None) -> None:
    """Take off the transaction count (it may come before expect-tx)."""
    b.tx -= count
    bounds(machine, b, lane)
    settle(machine, b)


def bounds(machine: Machine, b: MBarrier, lane: int | None) -> None:
    """Refuse a transaction count that the object cannot hold."""
    if not -MOST <= b.tx <= MOST:
        word = "overflow" if b.tx > 0 else "underflow"
        raise IllegalOperation(
            f"mbarrier tx-count {word}: {b.tx} at shared {b.offset % machine.shared.stride:#x} "
            "is outside "
            f"-(2^20 - 1) .. 2^20 - 1 (PTX ISA 9.7.13.15.3)",
            lane=lane,
        )


def give(
    machine: Machine, b: MBarrier, vector: Vector | None, time: float, flow: int | None = None
) -> None:
    """Let whoever waits for the current phase know `vector`."""
    if vector is not None:
        b.vector = union(b.vector, vector)
    if flow is not None and time >= b.time:
        b.flow = flow
    b.time = max(b.time, time)


def per_lane(
    c: Operands, ins: Instr, index: int, own: bool = False
) -> Callable[[Gang, np.ndarray | None, str], list[tuple[int, MBarrier]]]:
    """Return a function that gives (lane, mbarrier) of the lanes that take part.

    `own`: the instruction reaches mbarriers of .shared::cta only.
    """
    at = address(c, ins.operands[index])

    def barriers(g: Gang, m: np.ndarray | None, what: str) -> list[tuple[int, MBarrier]]:
        lanes = g.lanes(m)
        offsets = shared_offsets(g, lanes, at(g)[lanes], 8, own)
        return [
            (int(i), find(g.machine, int(o), what, int(i)))
            for i, o in zip(lanes, offsets, strict=True)
        ]

    return barriers


@register("mbarrier.init", operands=2)
def init(c: Operands, ins: Instr) -> Callable[..., None]:
    """mbarrier.init (9.7.13.15.9)."""
    at, count = address(c, ins.operands[0]), c.lanes_source(ins.operands[1], "u4")

    def run(g: Gang, m: np.ndarray | None) -> None:
        machine, lanes = g.machine, g.lanes(m)
        offsets = shared_offsets(g, lanes, at(g)[lanes], 8, own=True)
        counts = count(g)
        for lane, offset in zip(lanes, offsets, strict=True):
            number = int(counts[lane])
            if not 1 <= number <= MOST:
                raise IllegalOperation(
                    f"mbarrier.init with count {number}: 1 to 2^20 - 1 (PTX ISA 9.7.13.15.9)",
                    lane=int(lane),
                )
            old = machine.mbarriers.get(int(offset))
            if old is not None and old.busy and not old.promised:
                raise IllegalOperation(
                    "mbarrier.init of an mbarrier in use (shared "
                    f"{int(offset) % machine.shared.stride:#x}, "
                    f"initialised at line {old.line}: {old.pending} of {old.expected} arrivals "
                    f"and {old.tx} bytes pending); mbarrier.inval comes first, when unused",
                    lane=int(lane),
                )
            new = MBarrier(int(offset), number, ins.line, pending=number)
            w = int(lane) // LANES
            new.agent = int(g.w_agent[w])
            new.clock = int(machine.clocks.know[g.w_cluster[w], new.agent, new.agent])
            if old is not None and old.promised:
                new.tx, new.vector, new.time, new.flow = old.tx, old.vector, old.time, old.flow
            machine.mbarriers[int(offset)] = new
            occupies(machine, int(offset), False)
            machine.hazards.shared(g, np.array([lane]), np.array([offset]), 8, True)
            occupies(machine, int(offset), True)
            machine.progress += 1

    return run


@register("mbarrier.inval", operands=1)
def inval(c: Operands, ins: Instr) -> Callable[..., None]:
    """mbarrier.inval (9.7.13.15.10)."""
    barriers = per_lane(c, ins, 0, own=True)

    def run(g: Gang, m: np.ndarray | None) -> None:
        for lane, b in barriers(g, m, "mbarrier.inval"):
            if b.busy:
                raise IllegalOperation(
                    f"mbarrier.inval of an mbarrier in use ({b.pending} of {b.expected} arrivals "
                    f"and {b.tx} bytes pending); wait for its phase first",
                    lane=lane,
                )
            g.machine.mbarriers.pop(b.offset, None)
            occupies(g.machine, b.offset, False)
            g.machine.ended[b.offset] = ins.line

    return run


def occupies(machine: Machine, offset: int, there: bool) -> None:
    """Note that an mbarrier object lies at an absolute offset, or does not any more."""
    shadow = machine.shared_shadow
    if shadow is not None:
        shadow.occupy(machine.shared.cells(np.array([offset]), 8), there)


def ordered(
    machine: Machine, b: MBarrier, warp: int, know: np.ndarray, ins: Instr, lane: int
) -> None:
    """Report a use of an mbarrier by a warp that no barrier orders after its init."""
    if b.agent < 0 or know[b.agent] >= b.clock:
        return
    before_init(machine, b.offset, ins, warp, lane)


def before_init(machine: Machine, offset: int, ins: Instr, warp: int, lane: int) -> None:
    """Report that an mbarrier is, or may be, used before its init; shipped kernels do it."""
    where = offset % machine.shared.stride
    machine.hazards.add(
        "mbarrier used before init", "warning",
        f"{ins.opcode} at shared {where:#x} comes, or may come, before its mbarrier.init: no "
        "barrier orders the two (PTX ISA 9.7.13.15.1); put one behind the init",
        line=ins.line, warp=warp, lane=lane % LANES,
    )  # fmt: skip


def known(g: Gang, lane: int) -> Vector | None:
    """Return what an arrival of a lane's warp tells; a relaxed one: what the last fence covers."""
    w = lane // LANES
    cluster, agent = int(g.w_cluster[w]), int(g.w_agent[w])
    if "relaxed" in g.ins.mods:
        return g.machine.clocks.told.get((cluster, agent))
    return g.machine.clocks.both(cluster, agent)


def new_epochs(g: Gang, lanes: list[int]) -> None:
    """Begin a new epoch of the warps of `lanes`."""
    for w in sorted({lane // LANES for lane in lanes}):
        g.machine.clocks.release(int(g.w_cluster[w]), int(g.w_agent[w]))


@register("mbarrier.arrive", "mbarrier.arrive_drop", operands=(1, 3))
def mbarrier_arrive(c: Operands, ins: Instr) -> Callable[..., None]:
    """mbarrier.arrive and .arrive_drop, with .expect_tx and .noComplete (9.7.13.15.13, .14)."""
    known_modifiers(ins, MODIFIERS)
    first = 0 if isinstance(ins.operands[0], Mem) else 1
    target = ins.operands[0] if first else Sink()
    put = c.dest(target, "u8")
    barriers = per_lane(c, ins, first, own=not isinstance(target, Sink))
    with_tx, partial = "expect_tx" in ins.mods, "noComplete" in ins.mods
    drop = ins.opcode.startswith("mbarrier.arrive_drop")
    counts = ins.operands[first + 1 :]
    number = c.lanes_source(counts[0], "u4") if counts else None
    if number is None and (with_tx or partial):
        raise PtxError(f"{ins.opcode}: the count is missing (PTX ISA 9.7.13.15.13)")

    def run(g: Gang, m: np.ndarray | None) -> None:
        machine = g.machine
        pairs = barriers(g, m, ins.opcode)
        values = number(g) if number is not None else None
        states = np.zeros(g.n, np.uint64)
        cache: dict[int, Vector | None] = {}
        for lane, b in pairs:
            w = lane // LANES
            know = machine.clocks.know[g.w_cluster[w], g.w_agent[w]]
            ordered(machine, b, int(g.warps[w]), know, ins, lane)
            count = 1
            if with_tx and values is not None:
                expect(machine, b, int(values[lane]), lane)
            elif values is not None:
                count = int(values[lane])
            states[lane] = np.uint64(state(b))
            w = lane // LANES
            if w not in cache:
                cache[w] = known(g, lane)
            give(machine, b, cache[w], g.time)
            if partial and count >= b.pending and b.tx == 0:
                raise IllegalOperation(
                    f"{ins.opcode} would complete the phase of an mbarrier {b.state_text()}; "
                    ".noComplete promises that it does not (PTX ISA 9.7.13.15.13)",
                    lane=lane,
                )
            arrive(machine, b, count, lane)
            if drop:
                b.dropped += count
            settle(machine, b)
        new_epochs(g, [lane for lane, _ in pairs])
        put(g, m, states)

    return run


def state(b: MBarrier) -> int:
    """Return the opaque state of an mbarrier: its phase and what is pending."""
    return (b.phase << 40) | (b.expected << 20) | b.pending


@register("mbarrier.expect_tx", "mbarrier.complete_tx", operands=2)
def mbarrier_tx(c: Operands, ins: Instr) -> Callable[..., None]:
    """mbarrier.expect_tx and .complete_tx (9.7.13.15.11, .12)."""
    known_modifiers(ins, MODIFIERS)
    barriers, number = per_lane(c, ins, 0), c.lanes_source(ins.operands[1], "u4")
    change = expect if ins.opcode.startswith("mbarrier.expect_tx") else complete_tx

    def run(g: Gang, m: np.ndarray | None) -> None:
        values = number(g)
        for lane, b in barriers(g, m, ins.opcode):
            change(g.machine, b, int(values[lane]), lane)

    return run


@register("mbarrier.pending_count", operands=2)
def pending_count(c: Operands, ins: Instr) -> Callable[..., None]:
    """mbarrier.pending_count (9.7.13.15.17)."""
    put, get = c.dest(ins.operands[0], "u4"), c.lanes_source(ins.operands[1], "u8")
    return lambda g, m: put(g, m, (get(g) & np.uint64(MOST)).astype(np.uint32))


def initialised(
    g: Gang, m: np.ndarray | None, f: Fragment, at: Callable[[Gang], np.ndarray]
) -> bool:
    """Return whether there are mbarriers to wait for; shipped kernels wait before a slow init."""
    machine, lanes = g.machine, g.lanes(m)
    for lane, offset in zip(lanes, shared_offsets(g, lanes, at(g)[lanes], 8), strict=True):
        there = machine.mbarriers.get(int(offset))
        if there is None or there.promised:
            where = int(offset) % machine.shared.stride
            f.reason = f"mbarrier.init at shared {where:#x}, where no mbarrier object is"
            if int(offset) in machine.ended:
                line = machine.ended[int(offset)]
                f.reason += f" any more: mbarrier.inval of line {line} came before this wait"
            warp = int(g.warps[lane // LANES])
            before_init(machine, int(offset), g.ins, warp, int(lane))
            return False
    return True


def changed(machine: Machine, barriers: list[MBarrier]) -> Callable[[], bool]:
    """Return a function that says whether one of the barriers has left its phase, or ended."""
    now = {b.offset: (b, b.phase) for b in barriers}

    def look() -> bool:
        return any(
            b.phase != phase or machine.mbarriers.get(offset) is not b
            for offset, (b, phase) in now.items()
        )

    return look


@register("mbarrier.test_wait", "mbarrier.try_wait", operands=(3, 4), waits=True)
def wait(c: Operands, ins: Instr) -> Callable[..., Any]:
    """mbarrier.test_wait and .try_wait, by state or by .parity (9.7.13.15.16)."""
    known_modifiers(ins, MODIFIERS)
    barriers, at = per_lane(c, ins, 1, own=True), address(c, ins.operands[1])
    put = c.dest(ins.operands[0], "?")
    parity = "parity" in ins.mods
    phase = c.lanes_source(ins.operands[2], "u4" if parity else "u8")
    blocking = ins.opcode.startswith("mbarrier.try_wait")

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> Any:
        machine = g.machine
        if not initialised(g, m, f, at):
            return False
        pairs = barriers(g, m, ins.opcode)
        wanted = phase(g)
        ready = np.zeros(g.n, bool)
        for lane, b in pairs:
            w = lane // LANES
            know = machine.clocks.know[g.w_cluster[w], g.w_agent[w]]
            ordered(machine, b, int(g.warps[w]), know, ins, lane)
            if parity:
                ready[lane] = (b.phase & 1) != int(wanted[lane]) & 1  # compilers pass -1, too
            else:
                before = int(wanted[lane]) >> 40
                ready[lane] = b.phase != before
        lanes = np.array([lane for lane, _ in pairs])
        some = ready[lanes]
        if blocking and not some.all():
            first, b = pairs[int((~some).argmax())]
            f.reason = f"mbarrier {b.offset % machine.shared.stride:#x}"
            if parity:
                f.reason += f" (the end of a phase of parity {int(wanted[first]) & 1})"
            if g.W > 1:
                keys = np.full(g.W, 2)
                for w in np.unique(lanes // LANES):
                    keys[w] = int(ready[lanes[lanes // LANES == w]].all())
                if len(np.unique(keys)) > 1:
                    return keys
            if not some.any() and not (
                machine.seed and machine.rng.random() < 0.02 and f.tried < 0
            ):
                f.until = changed(machine, [b for _, b in pairs])
                return False
        if not blocking and not some.any():
            # A loop of tests: nothing has happened since the last, and others come first.
            asked, f.asked = f.asked, (ins.line, machine.progress)
            if asked == f.asked and not f.polls:
                f.polls, f.until = True, changed(machine, [b for _, b in pairs])
                f.reason = f"mbarrier {pairs[0][1].offset % machine.shared.stride:#x}"
                return False
        f.polls = False
        learn = machine.clocks.owe if "relaxed" in ins.mods else machine.clocks.join
        seen: set[tuple[int, int]] = set()
        for lane, b in pairs:
            w = lane // LANES
            if ready[lane] and (w, id(b)) not in seen:
                seen.add((w, id(b)))
                vector, time, flow = b.done.get((b.phase - 1) & 1, (None, 0.0, None))
                if vector is not None:
                    learn(int(g.w_cluster[w]), int(g.w_agent[w]), vector)
                g.time = max(g.time, time)
                g.flow = flow
        put(g, m, ready)
        if not blocking and not some.all():
            g.time += 20
        return True

    return run
