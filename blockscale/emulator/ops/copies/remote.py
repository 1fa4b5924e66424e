"""st.async and red.async, which complete at an mbarrier; st.bulk (PTX ISA 9.7.9.13, .14)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from blockscale.emulator.errors import IllegalOperation, PtxError
from blockscale.emulator.machine.engine import Op
from blockscale.emulator.machine.gangs import Gang
from blockscale.emulator.ops.copies.issuer import (
    Issuer,
    Scalar,
    begin_load,
    blame,
    finish_load,
    touch,
    touch_reduction,
)
from blockscale.emulator.ops.core import address, register, type_of, vector_of
from blockscale.emulator.ops.memory.atomic import OPS
from blockscale.emulator.ops.memory.loadstore import values_of
from blockscale.emulator.ops.operands import Operands
from blockscale.emulator.ptx.syntax import Imm, Instr
from blockscale.emulator.tma import combine

MOST_ZEROED = 1 << 24  # bytes of one st.bulk


@register("st.async", operands=(2, 3))
def st_async(c: Operands, ins: Instr) -> Callable[..., None]:
    """st.async (9.7.9.13): a store into the cluster that completes at an mbarrier."""
    return remote(c, ins, "")


@register("red.async", operands=(2, 3))
def red_async(c: Operands, ins: Instr) -> Callable[..., None]:
    """red.async (9.7.13.15): a reduction into the cluster that completes at an mbarrier."""
    return remote(c, ins, next(m for m in ins.mods if m in OPS))


def remote(c: Operands, ins: Instr, reduction: str) -> Callable[..., None]:
    """Return the handler of st.async or red.async."""
    dtype, size = type_of(ins)
    count = vector_of(ins)
    get = values_of(c, ins.operands[1], dtype, size)
    if len(get) != count:
        raise PtxError(f"{ins.opcode} wants {count} values and has {len(get)}; write them all")
    to = address(c, ins.operands[0])
    mbar = address(c, ins.operands[2]) if len(ins.operands) > 2 else None
    if mbar is None and "global" not in ins.mods:
        raise PtxError(f"{ins.opcode} has no mbarrier; only the .mmio.release.global form has none")
    put = Store(ins, reduction, size * count)

    def run(g: Gang, m: np.ndarray | None) -> None:
        for lane in g.lanes(m):
            with blame(int(lane)):
                who = Issuer(g, int(lane))
                data = np.concatenate([part(g)[lane : lane + 1].view(np.uint8) for part in get])
                at = int(to(g)[lane])
                if mbar is None:
                    put.to_global(who, at, data)
                else:
                    put.to_cluster(who, at & 0xFFFFFFFF, int(mbar(g)[lane]) & 0xFFFFFFFF, data)

    return run


class Store:
    """What one st.async or red.async does, whatever its lane."""

    def __init__(self, ins: Instr, reduction: str, size: int) -> None:
        self.ins, self.reduction, self.size = ins, reduction, size

    def new(self, old: np.ndarray, data: np.ndarray) -> np.ndarray:
        """Return the bytes that take the place of `old`."""
        return combine(self.reduction, self.ins.mods[-1], old, data) if self.reduction else data

    def op(self, who: Issuer, happen: Callable[[Op], None]) -> Op:
        """Return the operation in flight."""
        name = "red.async" if self.reduction else "st.async"
        return Op("bulk", who.cta, who.line, happen, cost=2.0, bytes=self.size, label=name)

    def to_cluster(self, who: Issuer, at: int, bar: int, data: np.ndarray) -> None:
        """Write to the shared memory of a CTA of the cluster, then complete_tx there."""
        place = int(who.absolute(at, self.size)[0]) + np.arange(self.size)
        b = who.barrier(bar)
        who.fenced = who.know  # not an access through the async proxy
        if self.reduction:
            who.look(place)
        else:
            begin_load(who, place)

        def happen(o: Op) -> None:
            pool = who.machine.shared.bytes
            pool[place] = self.new(pool[place], data)
            if self.reduction:
                touch_reduction(who, o, place, self.ins.opcode)
            else:
                touch(who, o, place, True, self.ins.opcode)
            finish_load(who, o, b, self.size)

        o = self.op(who, happen)
        who.claim(o)
        who.start(o)

    def to_global(self, who: Issuer, at: int, data: np.ndarray) -> None:
        """The .mmio.release form: write to global memory some time later; nothing tells when."""
        where = who.machine.memory.offsets(np.array([at], np.uint64), self.size, self.ins.opcode)
        start = int(where[0])

        def happen(_: Op) -> None:
            target = who.machine.memory.arena[start : start + self.size]
            target[:] = self.new(target.copy(), data)

        who.start(self.op(who, happen))


@register("st.bulk", operands=(2, 3))
def st_bulk(c: Operands, ins: Instr) -> Callable[..., None]:
    """st.bulk (9.7.9.14): zero a range of shared memory."""
    to, size = address(c, ins.operands[0]), c.lanes_source(ins.operands[1], "u8")
    value = ins.operands[2] if len(ins.operands) > 2 else None
    if value is not None and not (isinstance(value, Imm) and int(value.value) == 0):
        raise PtxError(f"{ins.opcode}: the initial value must be 0 (PTX ISA 9.7.9.14); write 0")

    def run(g: Gang, m: np.ndarray | None) -> None:
        for lane in g.lanes(m):
            with blame(int(lane)):
                zero(g, int(lane), to, int(size(g)[lane]))

    return run


def zero(g: Gang, lane: int, to: Scalar, count: int) -> None:
    """Zero `count` bytes for one lane."""
    if count % 8 or count > MOST_ZEROED:
        raise IllegalOperation(
            f"st.bulk of {count} bytes: a multiple of 8, at most {MOST_ZEROED} (PTX ISA 9.7.9.14); "
            "zero the rest with st"
        )
    if not count:
        return
    who = Issuer(g, lane)
    at = int(to(g)[lane]) & 0xFFFFFFFF
    who.absolute(at, 8)
    span = who.span(at, count)
    starts = span[::8]
    g.machine.hazards.shared(g, np.full(len(starts), lane), starts, 8, True)
    g.machine.shared.bytes[span] = 0
    g.machine.report.moved("shared", written=count)
    g.machine.progress += 1
