"""tcgen05.mma, .cp, .shift and .commit: the tensor pipe of a CTA (PTX ISA 9.7.16.9, .10, .12)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from blockscale.emulator.errors import PtxError
from blockscale.emulator.machine.engine import Op
from blockscale.emulator.machine.gangs import Gang
from blockscale.emulator.machine.grid import Cta, MBarrier
from blockscale.emulator.ops.copies.issuer import blame
from blockscale.emulator.ops.core import address, register
from blockscale.emulator.ops.operands import Operands
from blockscale.emulator.ops.tensor.allocation import one_group
from blockscale.emulator.ops.tensor.pipe import PipeIssuer, issuers
from blockscale.emulator.ops.threads import mbarrier
from blockscale.emulator.ptx.syntax import Imm, Instr, Mem, Operand, Vec
from blockscale.emulator.tcgen05.mma import check_zero_column_mask, plan_mma
from blockscale.emulator.tcgen05.movement import (
    check_cp_address,
    check_shift_address,
    cp_plan,
    shift_cells,
)
from blockscale.emulator.tcgen05.opcode import Opcode, parse_opcode

FP4_RATE = 16384  # multiply-adds a cycle of an SM with 4-bit operands (9 PFLOP/s, 148 SMs)


@dataclass
class MmaOperands:
    """Getters of one tcgen05.mma instruction's operands."""

    d: Any
    a: Any
    b: Any
    idesc: Any
    a_in_tmem: bool
    enable: Any = None
    sfa: Any = None
    sfb: Any = None
    lanes_off: list[Any] = field(default_factory=list)
    scale: int = 0
    zero_columns: Any = None


def mma_operands(c: Operands, ins: Instr, op: Opcode) -> MmaOperands:
    """Take the operands of tcgen05.mma apart (9.7.16.10.9)."""
    if op.sparse:
        raise PtxError(f"{ins.opcode}: sparse MMA is not modelled; use a dense kind")
    rest = list(ins.operands)
    d = address(c, rest.pop(0))
    a_op = rest.pop(0)
    in_tmem = isinstance(a_op, Mem)
    a = address(c, a_op) if in_tmem else c.lanes_source(a_op, "u8")
    b, idesc = c.lanes_source(rest.pop(0), "u8"), c.lanes_source(rest.pop(0), "u4")
    o = MmaOperands(d, a, b, idesc, in_tmem)
    if op.block_scale:
        o.sfa, o.sfb = address(c, rest.pop(0)), address(c, rest.pop(0))
    elif rest and isinstance(rest[0], Vec):
        vector = rest.pop(0)
        assert isinstance(vector, Vec)
        o.lanes_off = [c.lanes_source(i, "u4") for i in vector.items]
        if len(o.lanes_off) != 4 * op.cta_group:
            raise PtxError(
                f"{ins.opcode}: disable-output-lane has {len(o.lanes_off)} words and wants "
                f"{4 * op.cta_group} (PTX ISA 9.7.16.10.9.1); give one bit per lane"
            )
    o.enable = predicate(c, rest.pop(0))
    if op.ws:
        o.zero_columns = c.lanes_source(rest.pop(0), "u8") if rest else None
    elif rest and isinstance(rest[0], Imm):
        o.scale = int(rest[0].value)
        rest.pop(0)
    if rest:
        raise PtxError(f"{ins.opcode} has {len(rest)} operands too many: {rest}; leave them away")
    return o


def predicate(c: Operands, op: Operand) -> Any:
    """Return a getter of enable-input-d."""
    if isinstance(op, Imm):
        value = bool(op.value)
        return lambda g: np.full(g.n, value)
    return c.lanes_source(op, "?")


@register("tcgen05.mma", operands=(5, 9))
def mma(c: Operands, ins: Instr) -> Callable[..., None]:
    """tcgen05.mma of every dense kind (9.7.16.10.9)."""
    op = parse_opcode(ins.opcode)
    one_group(c, ins, op.cta_group)
    o = mma_operands(c, ins, op)

    def run(g: Gang, m: np.ndarray | None) -> None:
        for lane in issuers(g, m):
            with blame(lane):
                one = Mma(PipeIssuer(g, lane, op.cta_group), op, o)
                one.who.cta.uncommitted = ins.line
                one.start()

    return run


class Mma:
    """One tcgen05.mma of one thread: checked when made, in flight after `start`."""

    def __init__(self, who: PipeIssuer, op: Opcode, o: MmaOperands) -> None:
        g, lane = who.g, who.lane
        self.who, self.op = who, op
        self.scale = o.scale
        self.plan = plan = plan_mma(op, int(o.idesc(g)[lane]), o.a_in_tmem)
        d = int(o.d(g)[lane]) & 0xFFFFFFFF
        self.d_lane, d_column = plan.check_d_address(d)
        self.d_lanes = plan.d_cells.lane + self.d_lane
        self.d_columns = plan.d_cells.column.astype(np.int64) + d_column
        who.owns(self.d_columns, "the accumulator of " + op.text)
        who.looks(self.d_lanes, self.d_columns)
        self.a_value, self.b_value = int(o.a(g)[lane]), int(o.b(g)[lane])
        self.a_off = self.a_lanes = self.a_columns = None
        if o.a_in_tmem:
            a_lane, a_column = plan.check_a_address(self.a_value & 0xFFFFFFFF, d)
            assert plan.a_cells is not None
            self.a_lanes = plan.a_cells.lane + a_lane
            self.a_columns = plan.a_cells.column.astype(np.int64) + a_column
            who.owns(self.a_columns, "operand A of " + op.text)
            who.looks(self.a_lanes, self.a_columns)
        else:
            self.a_off = plan.a_offsets(self.a_value)
            who.inside(self.a_off, used_bytes(op.kind, plan.idesc.a_format))
        self.b_off = plan.b_offsets(self.b_value)
        who.inside(self.b_off, used_bytes(op.kind, plan.idesc.b_format))
        self.scales: list[tuple[str, np.ndarray, np.ndarray]] = []
        for name, get, cells in (("A", o.sfa, plan.sfa_cells), ("B", o.sfb, plan.sfb_cells)):
            if get is not None and cells is not None:
                at = plan.check_scale_address(name, int(get(g)[lane]) & 0xFFFFFFFF)
                columns = cells.column.astype(np.int64) + at[1]
                who.owns(columns, f"the scale factors of {name} of {op.text}")
                who.looks(cells.lane, columns)
                self.scales.append((name, cells.lane, columns))
        self.enable = bool(o.enable(g)[lane])
        self.off = tuple(int(x(g)[lane]) for x in o.lanes_off)
        if o.zero_columns is not None:
            check_zero_column_mask(int(o.zero_columns(g)[lane]))

    def start(self) -> None:
        """Put it in flight."""
        plan, op = self.plan, self.op
        bits = {"f16": 16, "tf32": 32, "f8f6f4": 8, "i8": 8, "mxf8f6f4": 8}.get(op.kind, 4)
        work = plan.m * plan.n * plan.k * bits / 4 / FP4_RATE / op.cta_group
        label = f"{op.kind} {plan.m}x{plan.n}x{plan.k}"
        own = self.b_off.size + (self.a_off.size if self.a_off is not None else 0)
        o = Op(
            "tensor core", self.who.cta, self.who.line, self.happen, cost=work,
            bytes=own * len(self.who.pair), label=label,
        )  # fmt: skip
        self.who.machine.engine.issue(self.who.stream, o, self.who.g.time)

    def happen(self, _: Op) -> None:
        """Multiply: read the operands of every CTA, write every CTA's accumulator."""
        who, plan = self.who, self.plan
        used = used_bytes(self.op.kind, plan.idesc.b_format)
        desc = self.b_value if plan.idesc.b_major == "K" else None
        parts = [
            who.reads_shared(x, self.b_off, "operand B of tcgen05.mma", used=used, descriptor=desc)
            for x in who.pair
        ]
        b = plan.decode_b(np.concatenate(parts))
        for rank, cta in enumerate(who.pair):
            a = plan.decode_a(self.operand_a(cta))
            sfa, sfb = self.factors(cta)
            old = None
            spot = (cta, self.d_lanes, self.d_columns)
            if self.enable:
                old = who.tmem(*spot, False, "the accumulator of tcgen05.mma")
            new = plan.multiply(old, a, b, sfa, sfb, self.scale)
            lanes, columns = self.d_lanes, self.d_columns
            if self.off:
                wanted = ~plan.keep_mask(self.off, rank, self.d_lane)
                lanes, columns, new = lanes[wanted], columns[wanted], new[wanted]
            if new.size:
                who.tmem(cta, lanes, columns, True, "tcgen05.mma")
                who.machine.tmem[cta.slot, lanes, columns] = new

    def operand_a(self, cta: Cta) -> np.ndarray:
        """Return the raw operand A of one CTA."""
        who, plan, what = self.who, self.plan, "operand A of tcgen05.mma"
        if self.a_off is None:
            assert self.a_lanes is not None
            assert self.a_columns is not None
            return who.tmem(cta, self.a_lanes, self.a_columns, False, what)
        used = used_bytes(self.op.kind, plan.idesc.a_format)
        desc = self.a_value if plan.idesc.a_major == "K" else None
        return who.reads_shared(cta, self.a_off, what, used=used, descriptor=desc)

    def factors(self, cta: Cta) -> list[Any]:
        """Return the scale factors of A and of B of one CTA, or two Nones."""
        found = []
        for name, lanes, columns in self.scales:
            what = f"the scale factors of {name} of tcgen05.mma"
            words = self.who.tmem(cta, lanes, columns, False, what)
            decode = self.plan.decode_sfa if name == "A" else self.plan.decode_sfb
            found.append(decode(words))
        return found or [None, None]


def used_bytes(kind: str, element: str) -> int:
    """Return how many of 16 bytes hold data: 4- and 6-bit elements of f8f6f4 kinds are padded."""
    if kind not in ("f8f6f4", "mxf8f6f4"):
        return 16
    return {"e2m1": 8, "e2m3": 12, "e3m2": 12}.get(element, 16)


@register("tcgen05.cp", operands=2)
def cp(c: Operands, ins: Instr) -> Callable[..., None]:
    """tcgen05.cp (9.7.16.9.1): shared memory to tensor memory, in order with the MMAs."""
    op = parse_opcode(ins.opcode)
    one_group(c, ins, op.cta_group)
    at, desc = address(c, ins.operands[0]), c.lanes_source(ins.operands[1], "u8")

    def run(g: Gang, m: np.ndarray | None) -> None:
        for lane in issuers(g, m):
            with blame(lane):
                who = PipeIssuer(g, lane, op.cta_group)
                start_cp(who, op, int(at(g)[lane]) & 0xFFFFFFFF, int(desc(g)[lane]))

    return run


def start_cp(who: PipeIssuer, op: Opcode, taddr: int, descriptor: int) -> None:
    """Check one tcgen05.cp and put it in flight."""
    machine = who.machine
    copy = cp_plan(op.shape, op.multicast, descriptor, op.source_format)
    lane0, column0 = check_cp_address(op.shape, taddr)
    lanes, columns = copy.lane + lane0, copy.column.astype(np.int64) + column0
    who.owns(columns, op.text)
    who.looks(lanes, columns)
    who.inside(copy.offsets)

    def happen(_: Op) -> None:
        for cta in who.pair:
            data = who.reads_shared(cta, copy.offsets, "tcgen05.cp", doubt=True)
            words = np.broadcast_to(copy.words(data), lanes.shape)
            who.tmem(cta, lanes, columns, True, "tcgen05.cp")
            machine.tmem[cta.slot, lanes, columns] = words

    size = int(copy.offsets.size) * len(who.pair)
    o = Op("tcgen05.cp", who.cta, who.line, happen, cost=4.0, bytes=size, label="tcgen05.cp")
    machine.engine.issue(who.stream, o, who.g.time)


@register("tcgen05.shift", operands=1)
def shift(c: Operands, ins: Instr) -> Callable[..., None]:
    """tcgen05.shift.down (9.7.16.9.2)."""
    op = parse_opcode(ins.opcode)
    one_group(c, ins, op.cta_group)
    at = address(c, ins.operands[0])

    def run(g: Gang, m: np.ndarray | None) -> None:
        for lane in issuers(g, m):
            with blame(lane):
                start_shift(PipeIssuer(g, lane, op.cta_group), int(at(g)[lane]) & 0xFFFFFFFF)

    return run


def start_shift(who: PipeIssuer, taddr: int) -> None:
    """Check one tcgen05.shift and put it in flight."""
    lane0, column0 = check_shift_address(taddr)
    source, target = ((x.lane + lane0, x.column + column0) for x in shift_cells())
    who.owns(np.concatenate([source[1], target[1]]), who.ins.opcode)

    def happen(_: Op) -> None:
        for cta in who.pair:
            words = who.tmem(cta, *source, False, "tcgen05.shift")
            who.tmem(cta, *target, True, "tcgen05.shift")
            who.machine.tmem[cta.slot, target[0], target[1]] = words

    o = Op("tensor core", who.cta, who.line, happen, cost=4.0, label="shift")
    who.machine.engine.issue(who.stream, o, who.g.time)


@register("tcgen05.commit", operands=(1, 2))
def commit(c: Operands, ins: Instr) -> Callable[..., None]:
    """tcgen05.commit (9.7.16.12.1): an mbarrier arrival when all earlier tensor work is done."""
    op = parse_opcode(ins.opcode)
    one_group(c, ins, op.cta_group)
    at = address(c, ins.operands[0])
    mask = c.lanes_source(ins.operands[1], "u2") if len(ins.operands) > 1 else None
    if (mask is None) == bool(op.multicast):
        raise PtxError(f"{ins.opcode}: a CTA mask goes with .multicast::cluster; give both or none")

    def run(g: Gang, m: np.ndarray | None) -> None:
        for lane in issuers(g, m):
            with blame(lane):
                who = PipeIssuer(g, lane, op.cta_group)
                where = int(at(g)[lane]) & 0xFFFFFFFF
                if mask is None:
                    start_commit(who, [who.barrier(where)])
                else:
                    ctas = who.targets(int(mask(g)[lane]), where)
                    start_commit(who, [who.barrier(where, cta) for cta in ctas])

    return run


def start_commit(who: PipeIssuer, barriers: list[MBarrier]) -> None:
    """Put the arrivals of one tcgen05.commit in flight, behind all that was issued before."""
    machine = who.machine

    def happen(o: Op) -> None:
        vector = machine.clocks.ended((who.know, who.fenced), who.agent, who.clock)
        for b in barriers:
            mbarrier.give(machine, b, vector, o.end, o.flow)
            mbarrier.arrive(machine, b, 1, who.lane)
            mbarrier.settle(machine, b)

    who.cta.uncommitted = None
    o = Op("tensor core", who.cta, who.line, happen, cost=0.0)
    machine.engine.issue(who.stream, o, who.g.time)
