"""wgmma of Hopper: asynchronous warpgroup MMA (PTX ISA 9.7.15)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from blockscale.emulator.errors import IllegalOperation, PtxError
from blockscale.emulator.machine.engine import Op
from blockscale.emulator.machine.gangs import Gang
from blockscale.emulator.machine.grid import LANES
from blockscale.emulator.machine.state import Fragment
from blockscale.emulator.mma.wgmma import Wgmma, parse_wgmma
from blockscale.emulator.ops.copies.issuer import EARLIER, aligned, blame, waited
from blockscale.emulator.ops.core import register
from blockscale.emulator.ops.operands import Operands
from blockscale.emulator.ops.tensor.matrix import gather, put_all
from blockscale.emulator.ops.tensor.mma import predicate
from blockscale.emulator.ops.tensor.pipe import PipeIssuer
from blockscale.emulator.ptx.syntax import Imm, Instr, Operand, Vec, items_of


def constant(op: Operand) -> int:
    """Return an immediate operand."""
    if not isinstance(op, Imm):
        raise PtxError(f"{op} where wgmma wants an immediate")
    return int(op.value)


def groups(g: Gang, m: np.ndarray | None) -> list[np.ndarray]:
    """Return the positions of the warps of each active warpgroup; all four must be here."""
    found: dict[tuple[int, int], list[int]] = {}
    for w in g.active_warps(m):
        warp = g.machine.warp(g.warps[w])
        found.setdefault((warp.cta.slot, warp.number // 4), []).append(int(w))
    return [np.array(sorted(v, key=lambda w: int(g.warps[w]))) for v in found.values()]


@dataclass
class WgmmaOperands:
    """Getters of one wgmma.mma_async instruction's operands."""

    op: Wgmma
    puts: list[Any]
    olds: list[Any]
    a: list[Any]
    a_in_registers: bool
    b: Any
    scale_d: Any
    immediates: dict[str, int]

    @staticmethod
    def of(c: Operands, ins: Instr) -> WgmmaOperands:
        """Take the operands apart (9.7.15.5.2)."""
        op = parse_wgmma(ins.opcode)
        if op is None:
            raise PtxError(f"instruction {ins.opcode} is not modelled")
        d, a, b, scale, *rest = ins.operands
        d_items = items_of(d)
        if len(d_items) != op.d:
            raise PtxError(f"{ins.opcode} takes {op.d} registers of D and has {len(d_items)}")
        in_registers = isinstance(a, Vec)
        a_get = [c.lanes_source(i, "u4") for i in a.items] if isinstance(a, Vec) else []
        return WgmmaOperands(
            op,
            [c.dest(i, "u4") for i in d_items],
            [c.lanes_source(i, "u4") for i in d_items],
            a_get or [c.lanes_source(a, "u8")],
            in_registers,
            c.lanes_source(b, "u8"),
            predicate(c, scale),
            dict(zip(op.immediates(in_registers), [constant(o) for o in rest], strict=True)),
        )

    def multiply(self, g: Gang, warps: np.ndarray, who: PipeIssuer) -> np.ndarray:
        """Return the new accumulators [4 warps, 32 lanes, registers] of one warpgroup."""
        first = int(warps[0]) * LANES
        op, values = self.op, self.immediates
        b_off = op.b_offsets(int(self.b(g)[first]), bool(values.get("imm-trans-b", 0)))
        who.inside(b_off)
        b = who.reads_shared(who.cta, b_off, "operand B of wgmma")
        if self.a_in_registers:
            a = op.a_bytes(gather(g, self.a, warps))[0]
        else:
            a_off = op.a_offsets(int(self.a[0](g)[first]), bool(values.get("imm-trans-a", 0)))
            who.inside(a_off)
            a = who.reads_shared(who.cta, a_off, "operand A of wgmma")
        new = op.compute(
            gather(g, self.olds, warps),
            a[None],
            b[None],
            scale_d=bool(self.scale_d(g)[first]),
            scale_a=values.get("imm-scale-a", 1),
            scale_b=values.get("imm-scale-b", 1),
        )
        return new.reshape(len(warps), LANES, -1)


@register("wgmma.mma_async", operands=(4, 8), waits=True)
def wgmma(c: Operands, ins: Instr) -> Callable[..., Any]:
    """wgmma.mma_async (9.7.15.5): each warpgroup multiplies as one."""
    operands = WgmmaOperands.of(c, ins)

    def one(g: Gang, warps: np.ndarray) -> None:
        mask = np.repeat(np.isin(np.arange(g.W), warps), LANES)
        first = int(warps[0]) * LANES
        with blame(first):
            who = PipeIssuer(g, first, 1)
            who.early = EARLIER  # it reads its operands at once
            new = operands.multiply(g, warps, who)
        put_all(g, mask, operands.puts, warps, new)
        n = operands.op.n
        o = Op("tensor core", who.cta, ins.line, lambda _: None, cost=n / 8, label=f"wgmma 64x{n}")
        o.agent, o.clock = who.agent, who.clock
        for w in warps:
            g.machine.warp(g.warps[w]).wgmma_open.append(o)
        g.machine.engine.issue(who.stream, o, g.time)

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> Any:
        found = groups(g, m)
        if not aligned(g, m, f):
            return False
        if all(len(warps) == 4 for warps in found):
            for warps in found:
                one(g, warps)
            return True
        return together(g, f, ins)

    return run


def together(g: Gang, f: Fragment, ins: Instr) -> bool:
    """Bring the four warps of a warpgroup into one gang."""
    machine = g.machine
    f.parked = True
    f.reason = "the other warps of its warpgroup"
    if len(g.fragments) != 1 or not f.full:
        raise IllegalOperation(
            f"{ins.opcode}: all threads of the four warps must execute it (PTX ISA 9.7.15); "
            "make its condition the same for the warpgroup"
        )
    mates = [
        x for x in machine.gangs
        if x is not g and len(x.fragments) == 1 and x.fragments[0].parked
        and x.fragments[0].at == f.at and same_group(machine, x, g)
    ]  # fmt: skip
    if mates:
        machine.merge([g, *mates])
    return False


def same_group(machine: Any, a: Gang, b: Gang) -> bool:
    """Return whether two gangs hold warps of one warpgroup."""
    first, second = (
        {(warp.cta.slot, warp.number // 4) for warp in map(machine.warp, g.warps)} for g in (a, b)
    )
    return bool(first & second)


@register("wgmma.commit_group", operands=0)
def commit_group(c: Operands, ins: Instr) -> Callable[..., None]:
    """wgmma.commit_group (9.7.15.7)."""

    def run(g: Gang, m: np.ndarray | None) -> None:
        for w in g.active_warps(m):
            warp = g.machine.warp(g.warps[w])
            warp.wgmma_groups.append(warp.wgmma_open)
            warp.wgmma_open = []

    return run


@register("wgmma.wait_group", operands=1, waits=True)
def wait_group(c: Operands, ins: Instr) -> Callable[..., Any]:
    """wgmma.wait_group (9.7.15.7): the operands may be overwritten from here."""
    left = constant(ins.operands[0])

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        machine = g.machine
        for w in g.active_warps(m):
            warp = machine.warp(g.warps[w])
            due = list(warp.wgmma_groups)[: max(len(warp.wgmma_groups) - left, 0)]
            late = next((o for group in due for o in group if not o.done), None)
            if late is not None:
                f.reason, f.until = "wgmma groups", partial(getattr, late, "done")
                return False
        for w in g.active_warps(m):
            warp = machine.warp(g.warps[w])
            while len(warp.wgmma_groups) > left:
                for o in warp.wgmma_groups.popleft():
                    waited(g, warp, o)
        return True

    return run
