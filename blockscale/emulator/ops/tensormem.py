"""Tensor memory: allocation, tcgen05.ld, .st and their waits (PTX ISA 9.7.16.7, .8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..engine import Op
from ..errors import IllegalOperation, PtxError
from ..gang import LANES
from ..syntax import Imm, Instr, Mem, Operand, Vec
from ..tcgen05.movement import check_ld_address, ld_cells, pack16, reduce_columns, unpack16
from ..tcgen05.opcode import parse_opcode
from .core import address, converged, register, same_in_warp, shared_offsets

if TYPE_CHECKING:
    from ..compiler import Compiler
    from ..gang import Fragment, Gang
    from ..grid import Cta
    from ..machine import Machine

COLUMNS = 512


class Freed(NamedTuple):
    """Columns that were freed, by whom and when."""

    column: int
    number: int
    line: int
    agent: int
    clock: int


@register("tcgen05.alloc", waits=True)
def alloc(c: Compiler, ins: Instr) -> Callable[..., Any]:
    """tcgen05.alloc (9.7.16.7.1): blocks until the columns are free."""
    parse_opcode(ins.opcode)
    to, count = address(c, ins.operands[0]), c.lanes_source(ins.operands[1], "u4")

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        if not converged(g, m, f):
            return False
        machine = g.machine
        counts = dict(same_in_warp(g, m, count(g), "the number of columns"))
        for w, number in list(counts.items()):
            cta = machine.warps[g.warps[w]].cta
            if number < 32 or number > COLUMNS or number & (number - 1):
                raise IllegalOperation(
                    f"tcgen05.alloc of {number} columns: a power of two from 32 to 512 (PTX ISA 9.7.16.7.1)",
                    lane=w * LANES,
                )
            if cta.relinquished:
                raise IllegalOperation(
                    "tcgen05.alloc after tcgen05.relinquish_alloc_permit in this CTA (PTX ISA 9.7.16.7.1)",
                    lane=w * LANES,
                )
            column = first_free(cta, number)
            if column is None:
                f.reason = f"{number} free TMEM columns (allocated: {sum(cta.allocations.values())} of 512)"
                return False
            cta.allocations[column] = number
            cta.freed = [x for x in cta.freed if x.column + x.number <= column or column + number <= x.column]
            machine.tmem_lines[cta.slot, column] = ins.line
            report = machine.report
            report.tmem_columns_high_water = max(report.tmem_columns_high_water, column + number)
            lane = np.array([w * LANES])
            offset = shared_offsets(g, lane, to(g)[lane], 4)
            machine.shared.views[4][offset >> 2] = column
            machine.hazards.shared(g, lane, offset, 4, True)
        machine.progress += 1
        return True

    return run


def first_free(cta: Cta, number: int) -> int | None:
    """Return the lowest column from which `number` columns are free."""
    for column in range(0, COLUMNS - number + 1, 32):
        if all(column + number <= c or c + n <= column for c, n in cta.allocations.items()):
            return column
    return None


@register("tcgen05.dealloc", "tcgen05.relinquish_alloc_permit", waits=True)
def dealloc(c: Compiler, ins: Instr) -> Callable[..., Any]:
    """tcgen05.dealloc and .relinquish_alloc_permit (9.7.16.7.1)."""
    op = parse_opcode(ins.opcode)
    if op.name == "relinquish_alloc_permit":

        def relinquish(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
            for w in g.active_warps(m):
                g.machine.warps[g.warps[w]].cta.relinquished = True
            return True

        return relinquish
    at, count = c.lanes_source(ins.operands[0], "u4"), c.lanes_source(ins.operands[1], "u4")

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        if not converged(g, m, f):
            return False
        machine = g.machine
        counts = dict(same_in_warp(g, m, count(g), "the number of columns"))
        for w, taddr in same_in_warp(g, m, at(g), "the TMEM address"):
            warp = machine.warps[g.warps[w]]
            column, number = taddr & 0xFFFF, counts[w]
            if warp.cta.allocations.get(column) != number:
                have = ", ".join(f"{n} from {a}" for a, n in warp.cta.allocations.items()) or "none"
                raise IllegalOperation(
                    f"tcgen05.dealloc of {number} columns from {column}: that is no allocation of this CTA "
                    f"(allocated: {have}; PTX ISA 9.7.16.7.1); free what tcgen05.alloc returned, once",
                    lane=w * LANES,
                )
            freeing(g, w, column, number)
            del warp.cta.allocations[column]
            cluster = warp.cta.cluster.slot
            clock = int(machine.clocks.know[cluster, warp.agent, warp.agent])
            warp.cta.freed.append(Freed(column, number, ins.line, warp.agent, clock))
        machine.progress += 1
        return True

    return run


def freeing(g: Gang, w: int, column: int, number: int) -> None:
    """Check that nobody may still be using columns that are freed."""
    machine = g.machine
    shadow = machine.tmem_shadow
    warp = machine.warps[g.warps[w]]
    lane, col = np.meshgrid(np.arange(128), np.arange(column, column + number), indexing="ij")
    cells = (warp.cta.slot * 65536 + lane * COLUMNS + col).reshape(-1)
    cluster = warp.cta.cluster.slot
    know = machine.clocks.vector(cluster, warp.agent)
    found = shadow.write(cells, warp.agent, know, int(know[warp.agent]), g.ins.line)
    if found is not None:
        machine.hazards.conflict(found, "tcgen05.dealloc", "tensor memory", g.ins.line, warp.index, 0, "warning")
    shadow.reset(slice(0, 0))
    shadow.dirty[cells] = False
    shadow.w_agent[cells] = -1
    shadow.w_clock[cells] = 0


def check_columns(
    machine: Machine, cta: Cta, columns: np.ndarray, what: str, line: int, know: np.ndarray, lane: int | None = None
) -> None:
    """Refuse TMEM columns that the CTA has not allocated.

    A use that only races with the dealloc finds the old values: nothing else can take the columns while
    the CTA lives alone on its SM, and shipped kernels rely on it. That is a warning.
    """
    low, high = int(columns.min()), int(columns.max())
    for column, number in cta.allocations.items():
        if column <= low and high < column + number:
            return
    have = np.zeros(COLUMNS + 1, bool)
    for column, number in cta.allocations.items():
        have[column : column + number] = True
    touched = np.unique(np.clip(columns, 0, COLUMNS))
    if have[touched].all():
        return
    bad = int(touched[~have[touched]][0])
    for freed in reversed(cta.freed):
        if freed.column <= bad < freed.column + freed.number:
            text = f"{what} uses TMEM column {bad} after tcgen05.dealloc (line {freed.line}) freed it"
            if freed.agent < len(know) and know[freed.agent] >= freed.clock:
                raise IllegalOperation(f"{text} (PTX ISA 9.7.16.7.1)", lane=lane)
            machine.hazards.add(
                "use after dealloc", "warning",
                f"{text}, or would with other timing: no barrier orders the two; let every user of the columns "
                "arrive at a barrier before tcgen05.dealloc (PTX ISA 9.7.16.7.1)",
                line=line, warp=cta.warps[0].index, other_line=freed.line,
            )  # fmt: skip
            return
    owned = ", ".join(f"{c} to {c + n - 1}" for c, n in cta.allocations.items()) or "none"
    raise IllegalOperation(
        f"{what} uses TMEM column {bad}, which CTA {cta.coords} has not allocated (its columns: {owned}; "
        "PTX ISA 9.7.16.7)",
        lane=lane,
    )


def cells_of(cta: Cta, lanes: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return shadow cells of TMEM (lane, column) pairs."""
    return cta.slot * 65536 + lanes.astype(np.int64) * COLUMNS + columns


def touch(
    machine: Machine, g_warp: Any, agent: int, clock: int, know: np.ndarray, cells: np.ndarray, write: bool,
    what: str, line: int, severity: str = "error",
) -> None:  # fmt: skip
    """Record an access of TMEM and report conflicts and reads of nothing."""
    shadow = machine.tmem_shadow
    flat = cells.reshape(-1)
    if not write and not shadow.dirty[flat].all() and ("tmem", line) not in machine.hazards.known:
        machine.hazards.known.add(("tmem", line))
        at = int(flat[np.flatnonzero(~shadow.dirty[flat])[0]]) % 65536
        machine.hazards.add(
            "uninitialised read", "warning",
            f"{what} reads TMEM lane {at // COLUMNS}, column {at % COLUMNS}, which nobody has written",
            line=line, warp=g_warp.index,
        )  # fmt: skip
    found = (shadow.write if write else shadow.read)(flat, agent, know, clock, line)
    if found is not None:
        machine.hazards.conflict(found, what, "tensor memory", line, g_warp.index, 0, severity)


def address_and_split(c: Compiler, ins: Instr, mem: Operand, shape: str, rest: list[Operand]) -> tuple[Any, int]:
    """Return a getter of the TMEM address (32 bits) and the immediate of .16x32bx2."""
    at = address(c, mem)
    split = 0
    if shape == "16x32bx2":
        if not rest or not isinstance(rest[0], Imm):
            raise PtxError(f"{ins.opcode} wants an immediate half-split offset")
        split = int(rest[0].value)
    return at, split


@register("tcgen05.ld", waits=True)
def ld(c: Compiler, ins: Instr) -> Callable[..., Any]:
    """tcgen05.ld (9.7.16.8.1): the registers are there at once, as the hardware's scoreboard guards them."""
    op = parse_opcode(ins.opcode)
    operands = list(ins.operands)
    target = operands.pop(0)
    red_target = operands.pop(0) if op.red else None
    at, split = address_and_split(c, ins, operands[0], op.shape, operands[1:])
    items = target.items if isinstance(target, Vec) else (target,)
    if len(items) != op.registers:
        raise PtxError(f"{ins.opcode} fills {op.registers} registers and has {len(items)}")
    puts = [c.dest(item, "u4") for item in items]
    put_red = c.dest(red_target.items[0] if isinstance(red_target, Vec) else red_target, "u4") if red_target else None
    cells = ld_cells(op.shape, op.num, op.packed, split)

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        if not converged(g, m, f):
            return False
        machine = g.machine
        values = np.zeros((g.W, LANES, len(items)), np.uint32)
        taddrs = at(g).astype(np.uint32)
        for w, taddr in same_in_warp(g, m, taddrs, "the TMEM address"):
            warp = machine.warps[g.warps[w]]
            lane0 = check_ld_address(op.shape, op.num, op.packed, split, taddr, warp.number)
            lanes = cells.lane + lane0
            columns = cells.column.astype(np.int64) + (taddr & 0xFFFF)
            know = machine.clocks.know[warp.cta.cluster.slot, warp.agent]
            check_columns(machine, warp.cta, columns, ins.opcode, ins.line, know, w * LANES)
            raw = machine.tmem[warp.cta.slot, lanes, columns]
            values[w] = pack16(raw) if op.packed else raw
            spot = cells_of(warp.cta, lanes, columns)
            touch(machine, warp, warp.agent, int(know[warp.agent]), know, spot, False, ins.opcode, ins.line)
            machine.report.operated("tcgen05.ld", 4 * raw.size)
            machine.report.bytes["tmem"]["read"] += 4 * raw.size
        flat = values.reshape(g.n, -1)
        for i, put in enumerate(puts):
            put(g, m, flat[:, i])
        if put_red is not None:
            put_red(g, m, reduce_columns(flat, op.red, op.red_type, op.red_abs, op.red_nan))
        g.time += max(len(items) // 4, 1)
        return True

    return run


@register("tcgen05.st", waits=True)
def st(c: Compiler, ins: Instr) -> Callable[..., Any]:
    """tcgen05.st (9.7.16.8.2): happens some time before tcgen05.wait::st."""
    op = parse_opcode(ins.opcode)
    operands = list(ins.operands)
    source = operands.pop()
    at, split = address_and_split(c, ins, operands[0], op.shape, operands[1:])
    items = source.items if isinstance(source, Vec) else (source,)
    if len(items) != op.registers:
        raise PtxError(f"{ins.opcode} takes {op.registers} registers and has {len(items)}")
    gets = [c.lanes_source(item, "u4") for item in items]
    cells = ld_cells(op.shape, op.num, op.packed, split)

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        if not converged(g, m, f):
            return False
        machine = g.machine
        taddrs = at(g).astype(np.uint32)
        values = np.empty((g.n, len(items)), np.uint32)
        for i, get in enumerate(gets):
            values[:, i] = get(g)
        for w, taddr in same_in_warp(g, m, taddrs, "the TMEM address"):
            warp = machine.warps[g.warps[w]]
            lane0 = check_ld_address(op.shape, op.num, op.packed, split, taddr, warp.number)
            lanes = cells.lane + lane0
            columns = cells.column.astype(np.int64) + (taddr & 0xFFFF)
            know = machine.clocks.know[warp.cta.cluster.slot, warp.agent]
            check_columns(machine, warp.cta, columns, ins.opcode, ins.line, know, w * LANES)
            mine = values[w * LANES : (w + 1) * LANES]
            data = unpack16(mine) if op.packed else mine
            start(machine, g, warp, lanes, columns, data, ins)
        return True

    return run


def start(
    machine: Machine, g: Gang, warp: Any, lanes: np.ndarray, columns: np.ndarray, data: np.ndarray, ins: Instr
) -> None:  # fmt: skip
    """Put one warp's store to TMEM in flight."""
    clocks, cluster = machine.clocks, warp.cta.cluster.slot
    agent = clocks.tcgen05_st + warp.agent
    warp.st_sequence += 1
    clock = warp.st_sequence + 1
    clocks.know[cluster, agent, agent] = clock
    know = clocks.vector(cluster, warp.agent)

    def happen(op: Op) -> None:
        machine.tmem[warp.cta.slot, lanes, columns] = data
        spot = cells_of(warp.cta, lanes, columns)
        touch(machine, warp, agent, clock, know, spot, True, ins.opcode, ins.line)

    op = Op("tcgen05.st", warp.cta, ins.line, happen, bytes=4 * data.size, label="tcgen05.st")
    op.agent, op.clock = agent, clock
    machine.report.bytes["tmem"]["written"] += 4 * data.size
    warp.st_pending.append(op)
    machine.engine.issue(("st", warp.index), op, g.time)


@register("tcgen05.wait", waits=True)
def wait(c: Compiler, ins: Instr) -> Callable[..., Any]:
    """tcgen05.wait::ld and ::st (9.7.16.8.3)."""
    op = parse_opcode(ins.opcode)

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        if not converged(g, m, f):
            return False
        if op.target == "ld":
            return True
        machine = g.machine
        warps = [machine.warps[g.warps[w]] for w in g.active_warps(m)]
        if not all(o.done for warp in warps for o in warp.st_pending):
            f.reason = "tcgen05.st"
            return False
        for warp in warps:
            for o in warp.st_pending:
                know = machine.clocks.know[warp.cta.cluster.slot, warp.agent]
                know[o.agent] = max(know[o.agent], o.clock)
                g.time = max(g.time, o.end)
            warp.st_pending = []
        return True

    return run


__all__ = ["Mem", "cells_of", "check_columns", "touch"]
