"""wgmma of Hopper: asynchronous warpgroup MMA (PTX ISA 9.7.15)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine import Op
from ..errors import IllegalOperation, PtxError
from ..gang import LANES
from ..mma.wgmma import parse_wgmma
from ..syntax import Imm, Instr, Operand, Vec
from .core import register
from .tensor import PipeIssuer

if TYPE_CHECKING:
    from ..compiler import Compiler
    from ..gang import Fragment, Gang


def constant(op: Operand) -> int:
    """Return an immediate operand."""
    if not isinstance(op, Imm):
        raise PtxError(f"{op} where wgmma wants an immediate")
    return int(op.value)


def groups(g: Gang, m: np.ndarray | None) -> list[np.ndarray]:
    """Return the positions of the warps of each active warpgroup; all four must be here."""
    found: dict[tuple[int, int], list[int]] = {}
    for w in g.active_warps(m):
        warp = g.machine.warps[g.warps[w]]
        found.setdefault((warp.cta.slot, warp.number // 4), []).append(int(w))
    return [np.array(sorted(v, key=lambda w: int(g.warps[w]))) for v in found.values()]


@register("wgmma.mma_async", waits=True)
def wgmma(c: Compiler, ins: Instr) -> Callable[..., Any]:
    """wgmma.mma_async (9.7.15.5): each warpgroup multiplies as one."""
    op = parse_wgmma(ins.opcode)
    if op is None:
        raise PtxError(f"instruction {ins.opcode} is not modelled")
    rest = list(ins.operands)
    d_items = rest.pop(0).items  # type: ignore[union-attr]
    a_op = rest.pop(0)
    in_registers = isinstance(a_op, Vec)
    kind = "u4"
    puts = [c.dest(i, kind) for i in d_items]
    olds = [c.lanes_source(i, kind) for i in d_items]
    a_get = [c.lanes_source(i, "u4") for i in a_op.items] if isinstance(a_op, Vec) else [c.lanes_source(a_op, "u8")]
    b_get = c.lanes_source(rest.pop(0), "u8")
    scale_op = rest.pop(0)
    scale_d = (lambda g: np.full(g.n, bool(scale_op.value))) if isinstance(scale_op, Imm) else c.lanes_source(scale_op, "?")
    values = dict(zip(op.immediates(in_registers), [constant(o) for o in rest], strict=True))
    sa, sb = values.get("imm-scale-a", 1), values.get("imm-scale-b", 1)
    ta, tb = values.get("imm-trans-a", 0), values.get("imm-trans-b", 0)

    def one(g: Gang, warps: np.ndarray) -> None:
        lanes = (warps[:, None] * LANES + np.arange(LANES)).reshape(-1)
        first = int(lanes[0])
        who = PipeIssuer(g, first, 1)
        b_off = op.b_offsets(int(b_get(g)[first]), bool(tb))
        a_off = None if in_registers else op.a_offsets(int(a_get[0](g)[first]), bool(ta))
        d = np.stack([x(g)[lanes] for x in olds], 1).reshape(4, LANES, -1)
        regs = np.stack([x(g)[lanes] for x in a_get], 1).reshape(4, LANES, -1) if in_registers else None
        b = who.reads_shared(who.cta, b_off, "operand B of wgmma")
        a = op.a_bytes(regs)[0] if regs is not None else who.reads_shared(who.cta, a_off, "operand A of wgmma")
        new = op.compute(
            d, a[None], b[None], scale_d=bool(scale_d(g)[first]), scale_a=sa, scale_b=sb
        ).reshape(4 * LANES, -1)
        mask = np.zeros(g.n, bool)
        mask[lanes] = True
        full = np.zeros(g.n, np.uint32)
        for i, put in enumerate(puts):
            full[lanes] = new[:, i]
            put(g, mask, full)
        o = Op("tensor core", who.cta, ins.line, lambda _: None, cost=op.n / 8, label=f"wgmma 64x{op.n}")
        o.agent, o.clock = who.agent, who.clock
        for w in warps:
            g.machine.warps[g.warps[w]].wgmma_open.append(o)
        g.machine.engine.issue(who.stream, o, g.time)

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> Any:
        found = groups(g, m)
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
        raise IllegalOperation(f"{ins.opcode}: all threads of the four warps must execute it together (PTX ISA 9.7.15)")
    mates = [
        x for x in machine.gangs
        if x is not g and len(x.fragments) == 1 and x.fragments[0].parked and x.fragments[0].at == f.at
        and same_group(machine, x, g)
    ]  # fmt: skip
    if mates:
        machine.merge([g, *mates])
    return False


def same_group(machine: Any, a: Gang, b: Gang) -> bool:
    """Return whether two gangs hold warps of one warpgroup."""
    keys = [{(machine.warps[w].cta.slot, machine.warps[w].number // 4) for w in g.warps} for g in (a, b)]
    return bool(keys[0] & keys[1])


@register("wgmma.commit_group")
def commit_group(c: Compiler, ins: Instr) -> Callable[..., None]:
    """wgmma.commit_group (9.7.15.7)."""

    def run(g: Gang, m: np.ndarray | None) -> None:
        for w in g.active_warps(m):
            warp = g.machine.warps[g.warps[w]]
            warp.wgmma_groups.append(warp.wgmma_open)
            warp.wgmma_open = []

    return run


@register("wgmma.wait_group", waits=True)
def wait_group(c: Compiler, ins: Instr) -> Callable[..., Any]:
    """wgmma.wait_group (9.7.15.7): the operands may be overwritten from here."""
    left = constant(ins.operands[0])

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        machine = g.machine
        for w in g.active_warps(m):
            warp = machine.warps[g.warps[w]]
            due = list(warp.wgmma_groups)[: max(len(warp.wgmma_groups) - left, 0)]
            if not all(o.done for group in due for o in group):
                f.reason = "wgmma groups"
                return False
        for w in g.active_warps(m):
            warp = machine.warps[g.warps[w]]
            while len(warp.wgmma_groups) > left:
                for o in warp.wgmma_groups.popleft():
                    know = machine.clocks.know[warp.cta.cluster.slot, warp.agent]
                    know[o.agent] = max(know[o.agent], o.clock)
                    g.time = max(g.time, o.end)
        return True

    return run
