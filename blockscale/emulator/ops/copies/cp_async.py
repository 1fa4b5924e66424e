"""cp.async: copies by threads, in groups (PTX ISA 9.7.9.25.3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blockscale.emulator.errors import IllegalOperation
from blockscale.emulator.machine.clocks import Access
from blockscale.emulator.machine.engine import Op
from blockscale.emulator.machine.gangs import Gang
from blockscale.emulator.machine.grid import LANES, MBarrier, Warp
from blockscale.emulator.machine.memory import misaligned
from blockscale.emulator.machine.state import Fragment
from blockscale.emulator.ops.copies.issuer import Issuer, begin_load, parsed, tell, waited
from blockscale.emulator.ops.core import (
    address,
    count_operands,
    register,
    shared_offsets,
)
from blockscale.emulator.ops.operands import Operands
from blockscale.emulator.ops.threads import mbarrier
from blockscale.emulator.ptx.syntax import Imm, Instr, Reg


@register("cp.async")
def cp_async(c: Operands, ins: Instr) -> Callable[..., None]:
    """cp.async.ca and .cg with an optional source size or ignore-src predicate (9.7.9.25.3.1)."""
    op = parsed(ins)
    if op.kind == "cp.async.mbarrier.arrive":
        count_operands(ins, 1, 1)
        return arrive(c, ins, op.noinc)
    count_operands(ins, 3, 5)
    size = int(getattr(ins.operands[2], "value", 0))
    if size not in (4, 8, 16) or (op.cache == "cg" and size != 16):
        raise IllegalOperation(
            f"cp.async.{op.cache} of {size} bytes: .ca copies 4, 8 or 16, .cg 16 (PTX ISA "
            "9.7.9.25.3.1); split the copy"
        )
    to, source = address(c, ins.operands[0]), address(c, ins.operands[1])
    rest = list(ins.operands[3:])
    if op.cache_hint and rest:
        rest.pop()
    ignore = count = None
    if rest and isinstance(rest[0], Reg) and c.reg(rest[0])[0] == "p":
        ignore = c.lanes_source(rest[0], "?")
    elif rest and not (isinstance(rest[0], Imm) and int(rest[0].value) == size):
        count = c.lanes_source(rest[0], "u4")

    def run(g: Gang, m: np.ndarray | None) -> None:
        lanes = g.lanes(m)
        dst = shared_offsets(g, lanes, to(g)[lanes], size, own=True)
        src = source(g)[lanes].copy()
        sizes = np.full(len(lanes), size, np.int64)
        if ignore is not None:
            sizes[ignore(g)[lanes]] = 0
        elif count is not None:
            sizes = count(g)[lanes].astype(np.int64)
            if (sizes > size).any():
                at = int(np.flatnonzero(sizes > size)[0])
                raise IllegalOperation(
                    f"cp.async with source size {int(sizes[at])} of {size} bytes: at most {size} "
                    "(PTX ISA 9.7.9.25.3.1); clamp it, the rest is filled with zeros",
                    lane=int(lanes[at]),
                )
        for w in np.unique(lanes // LANES):
            mine = np.flatnonzero(lanes // LANES == w)
            issue(g, int(w), dst[mine], src[mine], sizes[mine], size, lanes[mine])

    return run


def issue(
    g: Gang,
    w: int,
    dst: np.ndarray,
    src: np.ndarray,
    sizes: np.ndarray,
    size: int,
    lanes: np.ndarray,
) -> None:
    """Put one warp's copies in flight."""
    machine = g.machine
    warp: Warp = machine.warp(g.warps[w])
    cluster, clocks = warp.cta.cluster.slot, machine.clocks
    agent = clocks.cp_async + warp.agent
    warp.cp_sequence += 1
    clock = warp.cp_sequence + 1
    who = Issuer(g, int(lanes[0]))
    clocks.know[cluster, agent, agent] = clock
    line = g.ins.line
    offsets = sources(g, src, sizes, size, lanes)
    into = dst[:, None] + np.arange(size)
    begin_load(who, into.reshape(-1))

    def happen(op: Op) -> None:
        data = np.zeros((len(dst), size), np.uint8)
        keep = np.arange(size) < sizes[:, None]
        data[keep] = machine.memory.views[1][(offsets[:, None] + np.arange(size))[keep]]
        machine.shared.bytes[into] = data
        shadow = machine.shared_shadow
        if shadow is not None:
            cells = machine.shared.cells(dst, size)
            machine.hazards.over_mbarriers(cells, "cp.async", line, warp.index)
            found = shadow.write(cells, Access(agent, who.know), clock, line)
            if found is not None:
                tell(who, agent, cells, found, "cp.async", "error")

    op = Op("cp.async", warp.cta, line, happen, cost=4.0, bytes=int(sizes.sum()), label="cp.async")
    op.agent, op.clock = agent, clock
    machine.report.moved("global", read=int(sizes.sum()))
    machine.report.moved("shared", written=size * len(dst))
    warp.cp_open.append(op)
    machine.engine.issue(("cp", warp.index), op, g.time)


def sources(
    g: Gang, src: np.ndarray, sizes: np.ndarray, size: int, lanes: np.ndarray
) -> np.ndarray:
    """Return the arena offsets of what one warp's copies read; nothing is read of empty ones."""
    memory = g.machine.memory
    offsets = np.zeros(len(src), np.int64)
    full = np.flatnonzero(sizes > 0)
    if not len(full):
        return offsets
    try:
        odd = np.flatnonzero(src[full] & np.uint64(size - 1))
        if len(odd):
            raise IllegalOperation(misaligned(int(src[full[odd[0]]]), size), lane=int(odd[0]))
        offsets[full] = memory.offsets(src[full], 1)
        memory.offsets(src[full] + sizes[full].astype(np.uint64) - np.uint64(1), 1)
    except IllegalOperation as error:
        error.lane = int(lanes[full[error.lane or 0]])
        raise
    return offsets


@register("cp.async.commit_group", operands=0)
def commit_group(c: Operands, ins: Instr) -> Callable[..., None]:
    """cp.async.commit_group (9.7.9.25.3.2)."""

    def run(g: Gang, m: np.ndarray | None) -> None:
        for w in g.active_warps(m):
            warp = g.machine.warp(g.warps[w])
            warp.cp_groups.append(warp.cp_open)
            warp.cp_open = []

    return run


@register("cp.async.wait_group", "cp.async.wait_all", waits=True)
def wait_group(c: Operands, ins: Instr) -> Callable[..., Any]:
    """cp.async.wait_group N and .wait_all (9.7.9.25.3.3)."""
    everything = ins.opcode.startswith("cp.async.wait_all")
    count_operands(ins, not everything, not everything)
    left = 0 if everything else int(getattr(ins.operands[0], "value", 0))

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        machine = g.machine
        for w in g.active_warps(m):
            warp = machine.warp(g.warps[w])
            groups = list(warp.cp_groups)
            due = [op for group in groups[: max(len(groups) - left, 0)] for op in group]
            if everything:
                due += warp.cp_open
            if not all(op.done for op in due):
                f.reason = "cp.async groups"
                return False
        for w in g.active_warps(m):
            warp = machine.warp(g.warps[w])
            due = []
            while len(warp.cp_groups) > left:
                due += warp.cp_groups.popleft()
            if everything:
                due += warp.cp_open
                warp.cp_open = []
            for op in due[-1:]:
                waited(g, warp, op)
                g.flow = op.flow
        return True

    return run


def arrive(c: Operands, ins: Instr, noinc: bool) -> Callable[..., None]:
    """cp.async.mbarrier.arrive (9.7.13.15.15): an arrival when the copies so far are done."""
    barriers = mbarrier.per_lane(c, ins, 0)

    def run(g: Gang, m: np.ndarray | None) -> None:
        machine = g.machine
        pairs = barriers(g, m, ins.opcode)
        for w in sorted({lane // LANES for lane, _ in pairs}):
            warp = machine.warp(g.warps[w])
            mine = [(lane, b) for lane, b in pairs if lane // LANES == w]
            if not noinc:
                for _, b in mine:
                    b.pending += 1
            agent = machine.clocks.cp_async + warp.agent
            cluster = warp.cta.cluster.slot
            both = machine.clocks.both(cluster, warp.agent)
            machine.clocks.release(cluster, warp.agent)
            vector = machine.clocks.ended(both, agent, warp.cp_sequence + 1)
            vector[1][agent] = both[1][agent]  # writes of the generic proxy, which no fence covers

            def happen(
                op: Op, mine: list[tuple[int, MBarrier]] = mine, vector: Any = vector
            ) -> None:
                for lane, b in mine:
                    mbarrier.give(machine, b, vector, op.end, op.flow)
                    mbarrier.arrive(machine, b, 1, lane)
                    mbarrier.settle(machine, b)

            machine.engine.issue(
                ("cp", warp.index), Op("cp.async", warp.cta, ins.line, happen), g.time
            )

    return run
