"""tcgen05.alloc, .dealloc and .relinquish_alloc_permit (PTX ISA 9.7.16.7).

With .cta_group::2 a warp of each CTA of a pair allocates (or frees) together: the first one to come
waits for the other (9.7.16.5, Table 46).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blockscale.emulator.errors import IllegalOperation, PtxError
from blockscale.emulator.machine.gangs import Gang, Machine
from blockscale.emulator.machine.grid import LANES, Cta, Freed, Meeting, Warp
from blockscale.emulator.machine.state import Fragment
from blockscale.emulator.ops.copies.issuer import aligned
from blockscale.emulator.ops.core import address, register, same_in_warp, shared_offsets, split_keys
from blockscale.emulator.ops.operands import Operands
from blockscale.emulator.ptx.syntax import Instr
from blockscale.emulator.tcgen05.layout import CELLS, COLUMNS
from blockscale.emulator.tcgen05.layout import LANES as TMEM_LANES
from blockscale.emulator.tcgen05.opcode import parse_opcode

SECTION = "9.7.16.7.1"


def one_group(c: Operands, ins: Instr, group: int) -> None:
    """Refuse a kernel that mixes .cta_group::1 and ::2 (9.7.16.12.1: one value in a kernel)."""
    for number, other in c.machine.traits.cta_groups.items():
        if group and number != group:
            raise PtxError(
                f"{ins.opcode} in a kernel whose line {other.line} has {other.opcode}: all tcgen05 "
                "instructions of a kernel must have the same .cta_group (PTX ISA 9.7.16.12.1)"
            )


def meeting(cta: Cta, what: str) -> Meeting:
    """Return the meeting of a CTA's pair."""
    return cta.cluster.meetings.setdefault((what, cta.rank & ~1), Meeting())


def pair_of(g: Gang, cta: Cta, group: int) -> list[Cta]:
    """Return the CTAs that take part: one, or the pair of cta_group::2."""
    if group == 1:
        return [cta]
    pair = cta.cluster.ctas[cta.rank & ~1 : (cta.rank & ~1) + 2]
    if len(pair) < 2:
        raise IllegalOperation(
            f"{g.ins.opcode} in a cluster of {len(cta.cluster.ctas)}: CTA rank {cta.rank} has no "
            "peer, and .cta_group::2 needs a pair of CTAs; launch clusters of an even size"
        )
    return pair


@register("tcgen05.alloc", operands=2, waits=True)
def alloc(c: Operands, ins: Instr) -> Callable[..., Any]:
    """tcgen05.alloc (9.7.16.7.1): blocks until the columns are free."""
    group = parse_opcode(ins.opcode).cta_group
    one_group(c, ins, group)
    to, count = address(c, ins.operands[0]), c.lanes_source(ins.operands[1], "u4")

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> Any:
        if not aligned(g, m, f):
            return False
        counts = dict(same_in_warp(g, m, count(g), "the number of columns"))
        lanes = np.array([w * LANES for w in counts])
        offsets = shared_offsets(g, lanes, to(g)[lanes], 4, own=True)
        for w, number in counts.items():
            ask(g, f, w, number, group)
        ready = [g.warps[w] in books(g, w).granted for w in counts]
        answer = split_keys(g, np.array(list(counts)), np.array(ready))
        if answer is True:
            for w, lane, offset in zip(counts, lanes, offsets, strict=True):
                column = books(g, w).granted.pop(int(g.warps[w]))
                where = np.array([offset])
                g.machine.hazards.shared(g, np.array([lane]), where, 4, True)
                g.machine.shared.views[4][where >> 2] = column
            g.machine.progress += 1
        return answer

    return run


def books(g: Gang, w: int) -> Meeting:
    """Return the allocation requests of a warp's pair of CTAs."""
    return meeting(g.machine.warp(g.warps[w]).cta, "tcgen05.alloc")


def ask(g: Gang, f: Fragment, w: int, number: int, group: int) -> None:
    """Ask for columns in the name of one warp; grant them if they are there and everybody is."""
    machine = g.machine
    warp = machine.warp(g.warps[w])
    cta, book = warp.cta, books(g, w)
    if warp.index in book.granted:
        return
    if number < 32 or number > COLUMNS or number & (number - 1):
        raise IllegalOperation(
            f"tcgen05.alloc of {number} columns: a power of two from 32 to 512 (PTX ISA "
            f"{SECTION}); round up",
            lane=w * LANES,
        )
    if cta.relinquished:
        raise IllegalOperation(
            f"tcgen05.alloc after tcgen05.relinquish_alloc_permit in this CTA (PTX ISA {SECTION}); "
            "relinquish after the last allocation",
            lane=w * LANES,
        )
    ctas = pair_of(g, cta, group)
    book.here.setdefault(cta.rank, (warp, number, 0))
    if book.here[cta.rank][0] is not warp:
        have = sum(cta.allocations.values())
        f.reason = f"its turn: another warp asks for TMEM columns (allocated: {have} of 512)"
        return
    if any(x.rank not in book.here for x in ctas):
        f.reason = f"a warp of the peer CTA: {g.ins.opcode} needs one of each CTA of the pair"
        return
    wanted = {book.here[x.rank][1] for x in ctas}
    if len(wanted) > 1:
        raise IllegalOperation(
            f"{g.ins.opcode}: the CTAs of the pair ask for {wanted} columns; both must ask for the "
            f"same number (PTX ISA {SECTION})",
            lane=w * LANES,
        )
    column = first_free(ctas, number)
    if column is None:
        have = max(sum(x.allocations.values()) for x in ctas)
        f.reason = f"{number} free TMEM columns (allocated: {have} of 512)"
        return
    for x in ctas:
        mate, _, _ = book.here.pop(x.rank)
        book.granted[mate.index] = column
        grant(g, mate, column, number)
    machine.progress += 1


def grant(g: Gang, warp: Warp, column: int, number: int) -> None:
    """Give columns to a warp's CTA."""
    machine, cta = g.machine, warp.cta
    cta.allocations[column] = number
    assert machine.tmem_shadow is not None  # what was there before counts as never written
    dirty = machine.tmem_shadow.dirty.reshape(-1, TMEM_LANES, COLUMNS)
    dirty[cta.slot, :, column : column + number] = False
    cta.freed = [
        x for x in cta.freed if x.column + x.number <= column or column + number <= x.column
    ]
    machine.tmem_lines[cta.slot, column] = g.ins.line
    report = machine.report
    report.tmem_columns_high_water = max(report.tmem_columns_high_water, column + number)
    before, cta.asked = cta.asked, number
    if number > before:
        machine.hazards.add(
            "growing TMEM allocation", "warning",
            f"tcgen05.alloc of {number} columns after one of {before}: the number should not "
            f"increase between two allocations of a CTA (PTX ISA {SECTION}); largest first",
            line=g.ins.line, warp=warp.index,
        )  # fmt: skip


def first_free(ctas: list[Cta], number: int) -> int | None:
    """Return the lowest column from which `number` columns are free in all CTAs."""
    taken = [item for cta in ctas for item in cta.allocations.items()]
    for column in range(0, COLUMNS - number + 1, 32):
        if all(column + number <= c or c + n <= column for c, n in taken):
            return column
    return None


@register("tcgen05.relinquish_alloc_permit", operands=0, waits=True)
def relinquish(c: Operands, ins: Instr) -> Callable[..., Any]:
    """tcgen05.relinquish_alloc_permit (9.7.16.7.1): no tcgen05.alloc comes after it."""
    one_group(c, ins, parse_opcode(ins.opcode).cta_group)

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        if not aligned(g, m, f):
            return False
        for w in g.active_warps(m):
            g.machine.warp(g.warps[w]).cta.relinquished = True
        return True

    return run


@register("tcgen05.dealloc", operands=2, waits=True)
def dealloc(c: Operands, ins: Instr) -> Callable[..., Any]:
    """tcgen05.dealloc (9.7.16.7.1)."""
    group = parse_opcode(ins.opcode).cta_group
    one_group(c, ins, group)
    at, count = c.lanes_source(ins.operands[0], "u4"), c.lanes_source(ins.operands[1], "u4")

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> Any:
        if not aligned(g, m, f):
            return False
        counts = dict(same_in_warp(g, m, count(g), "the number of columns"))
        done = []
        for w, taddr in same_in_warp(g, m, at(g), "the TMEM address"):
            give_back(g, f, w, taddr & 0xFFFF, counts[w], group)
            warp = g.machine.warp(g.warps[w])
            done.append(warp.index in meeting(warp.cta, "tcgen05.dealloc").granted)
        answer = split_keys(g, np.array(list(counts)), np.array(done))
        if answer is True:
            for w in counts:
                warp = g.machine.warp(g.warps[w])
                meeting(warp.cta, "tcgen05.dealloc").granted.pop(warp.index)
            g.machine.progress += 1
        return answer

    return run


def give_back(g: Gang, f: Fragment, w: int, column: int, number: int, group: int) -> None:
    """Free columns in the name of one warp, with the peer CTA's warp if there must be one."""
    machine = g.machine
    warp = machine.warp(g.warps[w])
    cta = warp.cta
    book = meeting(cta, "tcgen05.dealloc")
    if warp.index in book.granted:
        return
    if book.here.get(cta.rank, (None,))[0] is not warp:
        if cta.allocations.get(column) != number:
            have = ", ".join(f"{n} from {a}" for a, n in cta.allocations.items()) or "none"
            raise IllegalOperation(
                f"tcgen05.dealloc of {number} columns from {column}: that is no allocation of this "
                f"CTA (allocated: {have}; PTX ISA {SECTION}); free what tcgen05.alloc gave, once",
                lane=w * LANES,
            )
        drain(machine, cta)
        freeing(g, warp, column, number)
        del cta.allocations[column]
        clock = int(machine.clocks.know[cta.cluster.slot, warp.agent, warp.agent])
        cta.freed.append(Freed(column, number, g.ins.line, warp.agent, clock))
        book.here[cta.rank] = (warp, column, number)
    ctas = pair_of(g, cta, group)
    if any(x.rank not in book.here for x in ctas):
        f.reason = f"a warp of the peer CTA: {g.ins.opcode} needs one of each CTA of the pair"
        return
    given = {book.here[x.rank][1:] for x in ctas}
    if len(given) > 1:
        raise IllegalOperation(
            f"{g.ins.opcode}: the CTAs of the pair free different columns, (first, number) = "
            f"{given}; both must free the same allocation (PTX ISA {SECTION})",
            lane=w * LANES,
        )
    for x in ctas:
        book.granted[book.here.pop(x.rank)[0].index] = 1
    machine.progress += 1


def drain(machine: Machine, cta: Cta) -> None:
    """Let work on a CTA's tensor memory happen that is in flight: later it would find nothing."""
    engine = machine.engine
    for warp in cta.warps:
        for op in warp.st_pending:
            engine.finish(op, ("st", warp.index))
    for slot in {cta.slot, cta.cluster.ctas[cta.rank & ~1].slot}:
        while ("tensor", slot) in engine.streams:
            engine.run_from(("tensor", slot))


def freeing(g: Gang, warp: Warp, column: int, number: int) -> None:
    """Check that nobody may still be using columns that are freed, and forget them."""
    machine = g.machine
    shadow = machine.tmem_shadow
    assert shadow is not None
    rows = warp.cta.slot * CELLS + np.arange(TMEM_LANES)[:, None] * COLUMNS
    cells = (rows + np.arange(column, column + number)).reshape(-1)
    cells = cells[shadow.w_agent[cells] >= 0]  # nothing else was ever written
    if not len(cells):
        return
    know = machine.clocks.vector(warp.cta.cluster.slot, warp.agent)
    found = shadow.look(cells, know)
    if found is not None and found[2] != warp.agent:
        machine.hazards.conflict(
            found, "tcgen05.dealloc", "tensor memory", g.ins.line, warp.index, 0, "warning"
        )
    shadow.w_agent[cells] = -1
    shadow.w_clock[cells] = 0
    shadow.reads.reset(cells)


def check_columns(
    machine: Machine, cta: Cta, low: int, high: int, what: str, line: int, know: np.ndarray,
    columns: np.ndarray | None = None, lane: int | None = None,
) -> None:  # fmt: skip
    """Refuse TMEM columns `low` to `high` (those in `columns`) that the CTA has not allocated.

    A use that only races with the dealloc finds the old values: nothing else can take the columns
    while the CTA lives alone on its SM, and shipped kernels rely on it. That is a warning.
    """
    for column, number in cta.allocations.items():
        if column <= low and high < column + number:
            return
    have = np.zeros(COLUMNS + 1, bool)
    for column, number in cta.allocations.items():
        have[column : column + number] = True
    some = np.arange(low, high + 1) if columns is None else np.unique(columns)
    touched = np.clip(some, 0, COLUMNS)
    if have[touched].all():
        return
    bad = int(some[~have[touched]][0])
    for freed in reversed(cta.freed):
        if freed.column <= bad < freed.column + freed.number:
            after_free(machine, cta, freed, f"{what} uses TMEM column {bad}", line, know, lane)
            return
    owned = ", ".join(f"{c} to {c + n - 1}" for c, n in cta.allocations.items()) or "none"
    raise IllegalOperation(
        f"{what} uses TMEM column {bad}, which CTA {cta.coords} has not allocated (its columns: "
        f"{owned}; PTX ISA 9.7.16.7); allocate enough columns or correct the address",
        lane=lane,
    )


def after_free(
    machine: Machine, cta: Cta, freed: Freed, text: str, line: int, know: np.ndarray,
    lane: int | None,
) -> None:  # fmt: skip
    """Refuse a use that comes after the dealloc; warn of one that only may."""
    text = f"{text} after tcgen05.dealloc (line {freed.line}) freed it"
    if freed.agent < len(know) and know[freed.agent] >= freed.clock:
        raise IllegalOperation(
            f"{text} (PTX ISA {SECTION}); free the columns after their last use", lane=lane
        )
    machine.hazards.add(
        "use after dealloc", "warning",
        f"{text}, or would with other timing: no barrier orders the two; let every user of the "
        f"columns arrive at a barrier before tcgen05.dealloc (PTX ISA {SECTION})",
        line=line, warp=cta.warps[0].index, other_line=freed.line,
    )  # fmt: skip
