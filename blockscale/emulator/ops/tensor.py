"""tcgen05.mma, .cp, .shift and .commit: the tensor pipe of a CTA (PTX ISA 9.7.16.6, .9, .10)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine import Op
from ..errors import IllegalOperation, PtxError
from ..gang import LANES
from ..syntax import Imm, Instr, Mem, Operand, Vec
from ..tcgen05.descriptor import SmemDescriptor
from ..tcgen05.mma import plan_mma
from ..tcgen05.movement import check_cp_address, check_shift_address, cp_plan, shift_cells
from ..tcgen05.opcode import Opcode, parse_opcode
from . import mbarrier
from .bulk import Issuer
from .copy import done
from .core import address, register
from .tensormem import cells_of, check_columns, touch

if TYPE_CHECKING:
    from ..compiler import Compiler
    from ..gang import Gang
    from ..grid import Cta

FP4_RATE = 16384  # multiply-adds a cycle of an SM with 4-bit operands (9 PFLOP/s of a B200)


def issuers(g: Gang, m: np.ndarray | None) -> list[int]:
    """Return one lane per active warp: tensor instructions are issued once per warp."""
    lanes = []
    for w in g.active_warps(m):
        active = np.flatnonzero(g.by_warp(m)[w])
        lanes.append(int(w) * LANES + int(active[0]))
        if len(active) > 1:
            g.machine.hazards.add(
                "issued by several lanes", "warning",
                f"{g.ins.opcode} is executed by {len(active)} lanes of a warp; one thread should issue it "
                "(elect.sync; PTX ISA 9.7.16.5)",
                line=g.ins.line, warp=int(g.warps[w]),
            )  # fmt: skip
    return lanes


class PipeIssuer(Issuer):
    """The thread that issues tensor work, and the CTAs that take part."""

    def __init__(self, g: Gang, lane: int, group: int) -> None:
        super().__init__(g, lane)
        self.pair = [self.cta]
        if group == 2:
            if len(self.cluster.ctas) < 2:
                raise IllegalOperation(
                    f"{g.ins.opcode} in a cluster of one CTA: cta_group::2 needs a pair of CTAs", lane=lane
                )
            first = self.cta.rank & ~1
            self.pair = self.cluster.ctas[first : first + 2]
        clocks = self.machine.clocks
        first = self.pair[0]  # the pipes of a pair work as one, in order of issue
        self.agent = clocks.tensor + first.rank
        self.stream = ("tensor", first.slot)
        know = clocks.know[self.cluster.slot, self.agent]
        know[self.agent] += 1
        self.clock = int(know[self.agent])
        self.know[self.agent] = self.clock
        self.generic = clocks.cp_async + clocks.warps

    def reads_shared(
        self, cta: Cta, offsets: np.ndarray, what: str, doubt: bool = False, used: int = 16,
        descriptor: int | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Return bytes of a CTA's shared memory at CTA-local addresses [rows, bytes], and record the read.

        Of each 16 bytes only the first `used` matter (8 or 12 for padded 4- and 6-bit elements).  The
        `descriptor` of a K-major operand is compared with the tensor load that wrote it.
        """
        machine = self.machine
        low = offsets.astype(np.int64)
        machine.shared.check(low.reshape(-1), 1)
        place = low + cta.slot * machine.shared.stride
        shadow = machine.shared_shadow
        if shadow is not None:
            step = machine.traits.granule
            columns = np.arange(0, place.shape[1], step)
            cells = (place[:, columns[columns % 16 < used]] >> machine.shared.shift).reshape(-1)
            found = shadow.read(
                cells, self.agent, self.know, self.clock, self.line, fenced=self.fenced, generic=self.generic
            )
            if found is not None:
                offset = int(cells[found[1]]) * machine.traits.granule % machine.shared.stride
                # Shipped kernels copy scales without the fence, and let both CTAs of a pair copy them.
                doubtful = doubt and (found[0] == "proxy" or cta is not self.cta)
                severity = "warning" if doubtful else "error"
                machine.hazards.conflict(
                    found, what, "shared memory", self.line, self.warp.index, offset, severity
                )
            if descriptor is not None:
                d = SmemDescriptor.decode(descriptor)
                machine.hazards.layout(self.ins, cells, d.swizzle, d.stride, what, self.warp.index)
            if not shadow.dirty[cells].all():
                at = int(np.flatnonzero(~shadow.dirty[cells])[0])
                machine.hazards.uninitialised(self.ins, cells, at, self.warp.index)
        machine.report.bytes["shared"]["read"] += place.size
        return machine.shared.bytes[place]

    def owns(self, cta: Cta, columns: np.ndarray, what: str) -> None:
        """Refuse TMEM columns that a CTA has not allocated."""
        check_columns(self.machine, cta, columns, what, self.line, self.know, self.lane)

    def tmem(self, cta: Cta, lanes: np.ndarray, columns: np.ndarray, write: bool, what: str) -> np.ndarray:
        """Record an access of TMEM; return its words when it is a read."""
        spot = cells_of(cta, lanes, columns)
        touch(self.machine, self.warp, self.agent, self.clock, self.know, spot, write, what, self.line)
        return self.machine.tmem[cta.slot, lanes, columns]


@dataclass
class MmaOperands:
    """Getters of one tcgen05.mma instruction's operands."""

    d: Any
    a: Any
    b: Any
    idesc: Any
    sfa: Any
    sfb: Any
    lanes_off: list[Any]
    enable: Any
    scale: int
    a_in_tmem: bool


def mma_operands(c: Compiler, ins: Instr, op: Opcode) -> MmaOperands:
    """Take the operands of tcgen05.mma apart (9.7.16.10.9)."""
    rest = list(ins.operands)
    d = address(c, rest.pop(0))
    a_op = rest.pop(0)
    in_tmem = isinstance(a_op, Mem)
    a = address(c, a_op) if in_tmem else c.lanes_source(a_op, "u8")
    b, idesc = c.lanes_source(rest.pop(0), "u8"), c.lanes_source(rest.pop(0), "u4")
    if op.sparse:
        raise PtxError(f"{ins.opcode}: sparse MMA is not modelled")
    sfa = sfb = None
    off: list[Any] = []
    if op.block_scale:
        sfa, sfb = address(c, rest.pop(0)), address(c, rest.pop(0))
    elif rest and isinstance(rest[0], Vec):
        off = [c.lanes_source(i, "u4") for i in rest.pop(0).items]  # type: ignore[union-attr]
    enable_op: Operand = rest.pop(0)
    if isinstance(enable_op, Imm):
        value = bool(enable_op.value)
        enable: Any = lambda g: np.full(g.n, value)  # noqa: E731
    else:
        enable = c.lanes_source(enable_op, "?")
    scale = 0
    if rest and isinstance(rest[0], Imm):
        scale = int(rest.pop(0).value)  # type: ignore[union-attr]
    return MmaOperands(d, a, b, idesc, sfa, sfb, off, enable, scale, in_tmem)


@register("tcgen05.mma")
def mma(c: Compiler, ins: Instr) -> Callable[..., None]:
    """tcgen05.mma of every dense kind (9.7.16.10.9)."""
    op = parse_opcode(ins.opcode)
    o = mma_operands(c, ins, op)

    def run(g: Gang, m: np.ndarray | None) -> None:
        for lane in issuers(g, m):
            who = PipeIssuer(g, lane, op.cta_group)
            start_mma(who, op, o, g, lane)

    return run


def start_mma(who: PipeIssuer, op: Opcode, o: MmaOperands, g: Gang, lane: int) -> None:
    """Check one MMA and put it in flight."""
    machine = who.machine
    plan = plan_mma(op, int(o.idesc(g)[lane]), o.a_in_tmem)
    d_lane, d_column = plan.check_d_address(int(o.d(g)[lane]) & 0xFFFFFFFF)
    a_value, b_value = int(o.a(g)[lane]), int(o.b(g)[lane])
    a_place = None
    if o.a_in_tmem:
        a_place = plan.check_a_address(a_value & 0xFFFFFFFF, int(o.d(g)[lane]) & 0xFFFFFFFF)
    scales = []
    for name, get, cells in (("A", o.sfa, plan.sfa_cells), ("B", o.sfb, plan.sfb_cells)):
        if get is not None:
            scales.append((name, cells, plan.check_scale_address(name, int(get(g)[lane]) & 0xFFFFFFFF)[1]))
    enable = bool(o.enable(g)[lane])
    off = tuple(int(x(g)[lane]) for x in o.lanes_off)
    a_off = None if o.a_in_tmem else plan.a_offsets(a_value)
    b_off = plan.b_offsets(b_value)
    d_lanes, d_columns = plan.d_cells.lane + d_lane, plan.d_cells.column.astype(np.int64) + d_column
    for cta in who.pair:
        who.owns(cta, d_columns, "the accumulator of " + g.ins.opcode)
        for name, cells, column in scales:
            who.owns(cta, cells.column.astype(np.int64) + column, f"the scale factors of {name}")
        if a_place is not None:
            who.owns(cta, plan.a_cells.column.astype(np.int64) + a_place[1], "operand A")

    used_a, used_b = (used_bytes(op.kind, f) for f in (plan.idesc.a_format, plan.idesc.b_format))

    a_desc = a_value if plan.idesc.a_major == "K" else None
    b_desc = b_value if plan.idesc.b_major == "K" else None

    def happen(_: Op) -> None:
        b_raw = [who.reads_shared(x, b_off, "operand B of tcgen05.mma", used=used_b, descriptor=b_desc) for x in who.pair]
        b = plan.decode_b(np.concatenate(b_raw))
        for i, cta in enumerate(who.pair):
            if a_off is not None:
                raw = who.reads_shared(cta, a_off, "operand A of tcgen05.mma", used=used_a, descriptor=a_desc)
            else:
                assert a_place is not None
                lanes = plan.a_cells.lane + a_place[0]
                raw = who.tmem(cta, lanes, plan.a_cells.column.astype(np.int64) + a_place[1], False, "operand A of tcgen05.mma")
            decoded = []
            for name, cells, column in scales:
                what = f"the scale factors of {name} of tcgen05.mma"
                words = who.tmem(cta, cells.lane, cells.column.astype(np.int64) + column, False, what)
                decoded.append(plan.decode_sfa(words) if name == "A" else plan.decode_sfb(words))
            sfa, sfb = decoded if decoded else (None, None)
            old = None
            if enable:
                old = who.tmem(cta, d_lanes, d_columns, False, "the accumulator of tcgen05.mma")
            new = plan.multiply(old, plan.decode_a(raw), b, sfa, sfb, o.scale)
            before = machine.tmem[cta.slot, d_lanes, d_columns]
            if off:
                new = np.where(plan.keep_mask(off, i, d_lane), before, new)
            who.tmem(cta, d_lanes, d_columns, True, "tcgen05.mma")
            machine.tmem[cta.slot, d_lanes, d_columns] = new

    bits = {"f16": 16, "tf32": 32, "f8f6f4": 8, "i8": 8, "mxf8f6f4": 8}.get(op.kind, 4)
    work = plan.m * plan.n * plan.k * bits / 4 / FP4_RATE / op.cta_group
    label = f"{op.kind} {plan.m}x{plan.n}x{plan.k}"
    in_flight = Op("tensor core", who.cta, who.line, happen, cost=work, bytes=0, label=label)
    machine.engine.issue(who.stream, in_flight, g.time)


def used_bytes(kind: str, element: str) -> int:
    """Return how many bytes of 16 hold data: 4- and 6-bit elements of f8f6f4 kinds are padded."""
    if kind not in ("f8f6f4", "mxf8f6f4"):
        return 16
    return {"e2m1": 8, "e2m3": 12, "e3m2": 12}.get(element, 16)


@register("tcgen05.cp")
def cp(c: Compiler, ins: Instr) -> Callable[..., None]:
    """tcgen05.cp (9.7.16.9.1): shared memory to tensor memory, in order with the MMAs."""
    op = parse_opcode(ins.opcode)
    at, desc = address(c, ins.operands[0]), c.lanes_source(ins.operands[1], "u8")

    def run(g: Gang, m: np.ndarray | None) -> None:
        for lane in issuers(g, m):
            who = PipeIssuer(g, lane, op.cta_group)
            copy = cp_plan(op.shape, op.multicast, int(desc(g)[lane]), op.source_format)
            lane0, column0 = check_cp_address(op.shape, int(at(g)[lane]) & 0xFFFFFFFF)
            lanes, columns = copy.lane + lane0, copy.column.astype(np.int64) + column0
            for cta in who.pair:
                who.owns(cta, columns, ins.opcode)

            def happen(
                _: Op, who: PipeIssuer = who, copy: Any = copy, lanes: np.ndarray = lanes, columns: np.ndarray = columns
            ) -> None:
                for cta in who.pair:
                    data = who.reads_shared(cta, copy.offsets, "tcgen05.cp", doubt=True)
                    words = np.broadcast_to(copy.words(data), lanes.shape)
                    who.tmem(cta, lanes, columns, True, "tcgen05.cp")
                    who.machine.tmem[cta.slot, lanes, columns] = words

            o = Op(
                "tcgen05.cp", who.cta, ins.line, happen, cost=4.0,
                bytes=int(copy.offsets.size) * len(who.pair), label="tcgen05.cp",
            )  # fmt: skip
            g.machine.engine.issue(who.stream, o, g.time)

    return run


@register("tcgen05.shift")
def shift(c: Compiler, ins: Instr) -> Callable[..., None]:
    """tcgen05.shift.down (9.7.16.9.2)."""
    op = parse_opcode(ins.opcode)
    at = address(c, ins.operands[0])
    source, target = shift_cells()

    def run(g: Gang, m: np.ndarray | None) -> None:
        for lane in issuers(g, m):
            who = PipeIssuer(g, lane, op.cta_group)
            lane0, column0 = check_shift_address(int(at(g)[lane]) & 0xFFFFFFFF)

            def happen(_: Op, who: PipeIssuer = who, lane0: int = lane0, column0: int = column0) -> None:
                for cta in who.pair:
                    words = who.tmem(cta, source.lane + lane0, source.column + column0, False, "tcgen05.shift")
                    who.tmem(cta, target.lane + lane0, target.column + column0, True, "tcgen05.shift")
                    who.machine.tmem[cta.slot, target.lane + lane0, target.column + column0] = words

            o = Op("tensor core", who.cta, ins.line, happen, cost=4.0, label="shift")
            g.machine.engine.issue(who.stream, o, g.time)

    return run


@register("tcgen05.commit")
def commit(c: Compiler, ins: Instr) -> Callable[..., None]:
    """tcgen05.commit (9.7.16.10.…): an mbarrier arrival when all earlier tensor work is done."""
    op = parse_opcode(ins.opcode)
    at = address(c, ins.operands[0])
    mask = c.lanes_source(ins.operands[1], "u2") if len(ins.operands) > 1 else None

    def run(g: Gang, m: np.ndarray | None) -> None:
        machine = g.machine
        for lane in issuers(g, m):
            who = PipeIssuer(g, lane, op.cta_group)
            where = int(at(g)[lane]) & 0xFFFFFFFF
            barriers = [who.barrier(where)]
            if mask is not None:
                value = int(mask(g)[lane])
                barriers = [who.barrier(where, cta) for cta in who.cluster.ctas if value >> cta.rank & 1]

            def happen(o: Op, who: PipeIssuer = who, barriers: list[mbarrier.MBarrier] = barriers) -> None:
                for b in barriers:
                    vector = done(machine.clocks, who.know, who.fenced, who.agent, who.clock)
                    mbarrier.give(machine, b, vector, o.end, o.flow)
                    mbarrier.arrive(machine, b, 1, who.lane)
                    mbarrier.settle(machine, b)

            machine.engine.issue(who.stream, Op("tensor core", who.cta, ins.line, happen, cost=0.0), g.time)

    return run
