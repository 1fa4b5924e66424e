"""tcgen05.ld, .st and their waits: registers to and from tensor memory (PTX ISA 9.7.16.8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from blockscale.emulator.errors import PtxError
from blockscale.emulator.machine.clocks import Access
from blockscale.emulator.machine.engine import Op
from blockscale.emulator.machine.gangs import Gang
from blockscale.emulator.machine.grid import LANES, Cta, Warp
from blockscale.emulator.machine.state import Fragment
from blockscale.emulator.ops.copies.issuer import EARLIER, Issuer, aligned, blame, tell_at, waited
from blockscale.emulator.ops.core import address, register, same_in_warp
from blockscale.emulator.ops.operands import Operands
from blockscale.emulator.ops.tensor.allocation import check_columns
from blockscale.emulator.ptx.syntax import Imm, Instr, Operand, items_of
from blockscale.emulator.tcgen05.layout import CELLS, COLUMNS
from blockscale.emulator.tcgen05.movement import (
    check_ld_address,
    ld_cells,
    pack16,
    reduce_columns,
    unpack16,
)
from blockscale.emulator.tcgen05.opcode import Opcode, parse_opcode


def cells_of(cta: Cta, lanes: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return shadow cells of TMEM (lane, column) pairs."""
    return cta.slot * CELLS + lanes.astype(np.int64) * COLUMNS + columns


def touch(who: Issuer, agent: int, clock: int, cells: np.ndarray, write: bool, what: str) -> None:
    """Record an access of TMEM and report conflicts and reads of nothing."""
    machine, line = who.machine, who.line
    shadow = machine.tmem_shadow
    assert shadow is not None
    flat = cells.reshape(-1)
    key = ("tmem", line)
    if not write and key not in machine.hazards.known and not shadow.dirty[flat].all():
        machine.hazards.known.add(key)
        at = int(flat[np.flatnonzero(~shadow.dirty[flat])[0]]) % CELLS
        # What tcgen05.ld reads may be thrown away; what an MMA reads goes into the result.
        severity = "warning" if what.startswith("tcgen05.") else "error"
        machine.hazards.add(
            "uninitialised read", severity,
            f"{what} reads TMEM lane {at // COLUMNS}, column {at % COLUMNS}, which nobody has "
            "written; write all of it first, or correct the address",
            line=line, warp=who.warp.index,
        )  # fmt: skip
    unordered = None
    if who.ordered is not None:
        check = shadow.check_write if write else shadow.check_read
        unordered = check(flat, Access(agent, who.ordered))
    found = (shadow.write if write else shadow.read)(flat, Access(agent, who.know), clock, line)
    if found is None and unordered is None:
        return
    at = int(flat[(found or unordered)[1]]) % CELLS  # type: ignore[index]
    where = f"tensor memory lane {at // COLUMNS}, column {at % COLUMNS}"
    if found is not None:
        tell_at(who, agent, found, what, where, 0, "error")
    elif unordered is not None:
        machine.hazards.unordered(unordered, what, where, line, who.warp.index)


@dataclass
class Movement:
    """One tcgen05.ld or .st, taken apart: which cells of TMEM each register of each lane is."""

    ins: Instr
    op: Opcode
    at: Callable[[Gang], np.ndarray]
    split: int

    @staticmethod
    def of(c: Operands, ins: Instr, mem: Operand, rest: list[Operand]) -> Movement:
        """Return it, with its address operand and the immediate of .16x32bx2."""
        op = parse_opcode(ins.opcode)
        split = 0
        if op.shape == "16x32bx2":
            if not rest or not isinstance(rest[0], Imm):
                raise PtxError(f"{ins.opcode} wants an immediate half-split offset; write a number")
            split = int(rest[0].value)
        return Movement(ins, op, address(c, mem), split)

    def warps(
        self, g: Gang, m: np.ndarray | None
    ) -> Iterator[tuple[int, Warp, np.ndarray, np.ndarray]]:
        """Yield (position, warp, lanes, columns) of the active warps, checked."""
        op, cells = self.op, ld_cells(self.op.shape, self.op.num, self.op.packed, self.split)
        low, high = int(cells.column.min()), int(cells.column.max())
        taddrs = self.at(g).astype(np.uint32)
        for w, taddr in same_in_warp(g, m, taddrs, "the TMEM address"):
            with blame(w * LANES):
                warp = g.machine.warp(g.warps[w])
                lane0 = check_ld_address(
                    op.shape, op.num, op.packed, self.split, taddr, warp.number
                )
                column = taddr & 0xFFFF
                know = g.machine.clocks.know[warp.cta.cluster.slot, warp.agent]
                columns = cells.column.astype(np.int64) + column
                check_columns(
                    g.machine, warp.cta, low + column, high + column, self.ins.opcode,
                    self.ins.line, know, columns,
                )  # fmt: skip
                yield w, warp, cells.lane + lane0, columns


@register("tcgen05.ld", operands=(2, 4), waits=True)
def ld(c: Operands, ins: Instr) -> Callable[..., Any]:
    """tcgen05.ld (9.7.16.8.1): the registers are there at once: the scoreboard guards them."""
    operands = list(ins.operands)
    op = parse_opcode(ins.opcode)
    target = operands.pop(0)
    red = operands.pop(0) if op.red else None
    move = Movement.of(c, ins, operands[0], operands[1:])
    items = items_of(target)
    if len(items) != op.registers:
        raise PtxError(f"{ins.opcode} fills {op.registers} registers and has {len(items)}")
    puts = [c.dest(item, "u4") for item in items]
    put_red = None
    if red is not None:
        put_red = c.dest(items_of(red)[0], "u4")

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        if not aligned(g, m, f):
            return False
        machine = g.machine
        values = np.zeros((g.W, LANES, len(items)), np.uint32)
        for w, warp, lanes, columns in move.warps(g, m):
            raw = machine.tmem[warp.cta.slot, lanes, columns]
            values[w] = pack16(raw) if op.packed else raw
            spot = cells_of(warp.cta, lanes, columns)
            who = Issuer(g, w * LANES)
            who.early = EARLIER
            who.orders(pipe=False)
            touch(who, warp.agent, int(who.know[warp.agent]), spot, False, ins.opcode)
            machine.report.operated("tcgen05.ld", 4 * raw.size)
            machine.report.moved("tmem", read=4 * raw.size)
        flat = values.reshape(g.n, -1)
        for i, put in enumerate(puts):
            put(g, m, flat[:, i])
        if put_red is not None:
            put_red(g, m, reduce_columns(flat, op.red, op.red_type, op.red_abs, op.red_nan))
        g.time += max(len(items) // 4, 1)
        return True

    return run


@register("tcgen05.st", operands=(2, 3), waits=True)
def st(c: Operands, ins: Instr) -> Callable[..., Any]:
    """tcgen05.st (9.7.16.8.2): happens some time before tcgen05.wait::st."""
    operands = list(ins.operands)
    op = parse_opcode(ins.opcode)
    source = operands.pop()
    move = Movement.of(c, ins, operands[0], operands[1:])
    items = items_of(source)
    if len(items) != op.registers:
        raise PtxError(f"{ins.opcode} takes {op.registers} registers and has {len(items)}")
    gets = [c.lanes_source(item, "u4") for item in items]

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        if not aligned(g, m, f):
            return False
        values = np.empty((g.n, len(items)), np.uint32)
        for i, get in enumerate(gets):
            values[:, i] = get(g)
        for w, warp, lanes, columns in move.warps(g, m):
            mine = values[w * LANES : (w + 1) * LANES]
            start(g, warp, lanes, columns, unpack16(mine) if op.packed else mine, ins)
        return True

    return run


def start(
    g: Gang, warp: Warp, lanes: np.ndarray, columns: np.ndarray, data: np.ndarray, ins: Instr
) -> None:
    """Put one warp's store to TMEM in flight."""
    machine = g.machine
    clocks, cluster = machine.clocks, warp.cta.cluster.slot
    who = Issuer(g, int(np.flatnonzero(g.warps == warp.index)[0]) * LANES)
    agent = clocks.tcgen05_st + warp.agent
    warp.st_sequence += 1
    clock = warp.st_sequence + 1
    clocks.know[cluster, agent, agent] = clock
    spot = cells_of(warp.cta, lanes, columns)
    who.orders(pipe=False)
    assert machine.tmem_shadow is not None
    who.look_at(machine.tmem_shadow, spot.reshape(-1))

    def happen(op: Op) -> None:
        shadow = machine.tmem_shadow
        assert shadow is not None
        if (machine.tmem[warp.cta.slot, lanes, columns] == data).all():
            # Compilers let several warps store replicated values: nothing changes or races.
            shadow.record_write(spot.reshape(-1), agent, clock, ins.line)
            return
        machine.tmem[warp.cta.slot, lanes, columns] = data
        touch(who, agent, clock, spot, True, ins.opcode)

    op = Op("tcgen05.st", warp.cta, ins.line, happen, bytes=4 * data.size, label="tcgen05.st")
    op.agent, op.clock = agent, clock
    machine.report.moved("tmem", written=4 * data.size)
    warp.st_pending.append(op)
    machine.engine.issue(("st", warp.index), op, g.time)


@register("tcgen05.wait", operands=0, waits=True)
def wait(c: Operands, ins: Instr) -> Callable[..., Any]:
    """tcgen05.wait::ld and ::st (9.7.16.8.3)."""
    op = parse_opcode(ins.opcode)

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        if not aligned(g, m, f):
            return False
        if op.target == "ld":
            return True
        machine = g.machine
        warps = [machine.warp(g.warps[w]) for w in g.active_warps(m)]
        if not all(o.done for warp in warps for o in warp.st_pending):
            f.reason = "tcgen05.st"
            return False
        for warp in warps:
            for o in warp.st_pending:
                waited(g, warp, o)
            warp.st_pending = []
        return True

    return run
