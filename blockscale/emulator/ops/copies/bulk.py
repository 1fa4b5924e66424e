"""Bulk copies without a tensor map, and the groups of bulk operations (PTX ISA 9.7.9.25.4)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from blockscale.emulator.errors import IllegalOperation
from blockscale.emulator.machine.engine import Op
from blockscale.emulator.machine.gangs import Gang
from blockscale.emulator.machine.grid import LANES
from blockscale.emulator.machine.state import Fragment
from blockscale.emulator.ops.copies.issuer import (
    CYCLES_PER_BYTE,
    BulkOperands,
    Issuer,
    arena_base,
    begin_load,
    blame,
    finish_load,
    parsed,
    touch,
    touch_reduction,
    waited,
)
from blockscale.emulator.ops.core import register
from blockscale.emulator.ops.operands import Operands
from blockscale.emulator.ptx.syntax import Instr
from blockscale.emulator.tma import combine
from blockscale.emulator.tma.bulk import check_bulk, check_ignored, masked_offsets
from blockscale.emulator.tma.opcode import AsyncOp

SECTION = "9.7.9.25.4.1"


@register("cp.async.bulk", "cp.reduce.async.bulk")
def bulk_copy(c: Operands, ins: Instr) -> Callable[..., None]:
    """cp.async.bulk and cp.reduce.async.bulk of `size` bytes (9.7.9.25.4.1, .2)."""
    operands = BulkOperands(c, ins)
    op = operands.op
    dst, src = operands.address("dst"), operands.address("src")
    size, mbar = operands.value("size", "u4"), operands.address("mbar")
    mask, byte_mask = operands.value("cta_mask", "u2"), operands.value("byte_mask", "u2")
    left, right = operands.value("ignore_left", "u4"), operands.value("ignore_right", "u4")
    assert dst is not None
    assert src is not None
    assert size is not None

    def run(g: Gang, m: np.ndarray | None) -> None:
        for lane in g.lanes(m):
            with blame(int(lane)):
                who = Issuer(g, int(lane))
                to, source, count = int(dst(g)[lane]), int(src(g)[lane]), int(size(g)[lane])
                check_bulk(ins.opcode, to, source, count)
                if count > g.machine.shared.end:
                    raise IllegalOperation(
                        f"{ins.opcode} of {count} bytes: one side is shared memory, and a CTA's "
                        f"ends at {g.machine.shared.end:#x}; copy less"
                    )
                if not count:
                    continue
                if op.dst == "global":
                    bits = int(byte_mask(g)[lane]) if byte_mask is not None else 0xFFFF
                    bulk_store(who, op, to, source, count, masked_offsets(count, bits))
                    continue
                assert mbar is not None
                bar = int(mbar(g)[lane]) & 0xFFFFFFFF
                to &= 0xFFFFFFFF
                if op.src == "global":
                    ends = tuple(int(x(g)[lane]) if x is not None else 0 for x in (left, right))
                    check_ignored(ins.opcode, *ends)
                    ctas = int(mask(g)[lane]) if mask is not None else None
                    bulk_load(who, op, to, source, count, bar, ctas, ends)
                else:
                    between_ctas(who, op, to, source & 0xFFFFFFFF, count, bar)

    return run


def bulk_load(
    who: Issuer, op: AsyncOp, to: int, source: int, count: int, bar: int, mask: int | None,
    ignored: tuple[int, ...],
) -> None:  # fmt: skip
    """Put one copy from global memory in flight, into one CTA or into several.

    `ignored` bytes at both ends may be out of bounds and come out indeterminate (.ignore_oob).
    """
    machine = who.machine
    if op.dst == "shared::cta":
        who.own(to, "the destination", SECTION)
    targets = who.targets(mask, to)
    low = (to & 0xFFFFFF) + np.arange(count)
    machine.shared.check(low, 1)
    places = [low + cta.slot * machine.shared.stride for cta in targets]
    if mask is None and who.cta_of(bar) is not targets[0]:
        doubt(who, bar, to)
    barriers = [who.barrier(bar, cta if mask is not None else None) for cta in targets]
    first, last = source + ignored[0], source + count - ignored[1]
    base = arena_base(machine, first, last, f"a bulk copy of {count} bytes") if first < last else 0
    for place in places:
        begin_load(who, place)

    def happen(o: Op) -> None:
        data = np.full(count, 0xFF, np.uint8)
        if first < last:
            data[first - source : last - source] = machine.memory.arena[first - base : last - base]
        for place, b in zip(places, barriers, strict=True):
            machine.shared.bytes[place] = data
            touch(who, o, place, True, "a bulk copy")
            finish_load(who, o, b, count)

    o = in_flight(who, count, happen, "global", "shared")
    who.claim(o)
    who.start(o)


def between_ctas(who: Issuer, op: AsyncOp, to: int, source: int, count: int, bar: int) -> None:
    """Put one copy or reduction from this CTA's shared memory into the cluster's in flight."""
    machine = who.machine
    who.own(source, "the source", SECTION)
    src, place = who.span(source, count), who.span(to, count)
    target, b = who.cta_of(to), who.barrier(bar)
    if target is who.cta and not op.reduction:
        machine.hazards.add(
            "bulk copy into its own CTA", "warning",
            f"{who.ins.opcode}: the destination {to:#x} is in the executing CTA, and the copy is "
            f"for another CTA of the cluster (PTX ISA {SECTION}); use ld and st, or mapa",
            line=who.line, warp=who.warp.index,
        )  # fmt: skip
    if who.cta_of(bar) is not target:
        doubt(who, bar, to)
    who.look(src)
    if op.reduction:
        who.look(place)
    else:
        begin_load(who, place)

    def happen(o: Op) -> None:
        pool = machine.shared.bytes
        touch(who, o, src, False, "a bulk copy")
        data = pool[src]
        if op.reduction:
            pool[place] = combine(op.reduction, op.element, pool[place], data)
            touch_reduction(who, o, place, "a bulk reduction")
        else:
            pool[place] = data
            touch(who, o, place, True, "a bulk copy")
        finish_load(who, o, b, count)

    o = in_flight(who, count, happen, "shared", "shared")
    who.claim(o)
    who.start(o)


def doubt(who: Issuer, bar: int, to: int) -> None:
    """Warn of an mbarrier that is not where the data goes."""
    who.machine.hazards.add(
        "mbarrier in another CTA", "warning",
        f"{who.ins.opcode}: the mbarrier {bar:#x} and the destination {to:#x} are in different "
        f"CTAs (PTX ISA {SECTION}); signal the mbarrier of the CTA that gets the data",
        line=who.line, warp=who.warp.index,
    )  # fmt: skip


def bulk_store(
    who: Issuer, op: AsyncOp, to: int, source: int, count: int, picked: np.ndarray
) -> None:
    """Put one copy or reduction to global memory in flight; the `picked` bytes are written."""
    machine = who.machine
    who.own(source & 0xFFFFFFFF, "the source", SECTION)
    src = who.span(source, count)
    at = to - arena_base(machine, to, to + count, f"a bulk copy of {count} bytes")
    who.look(src)

    def happen(o: Op) -> None:
        touch(who, o, src, False, "a bulk copy")
        data = machine.shared.bytes[src]

        def write() -> None:
            target = machine.memory.arena[at : at + count]
            new = data
            if op.reduction:
                new = combine(op.reduction, op.element, target, data, ftz=op.element == "f32")
            target[picked] = new[picked]

        who.write_later(o, write)

    who.start_group(in_flight(who, count, happen, "shared", "global"))


def in_flight(
    who: Issuer, count: int, happen: Callable[[Op], None], source: str, target: str
) -> Op:
    """Return the operation of one bulk copy between two memories."""
    who.machine.report.moved(source, read=count)
    who.machine.report.moved(target, written=count)
    cost = count * CYCLES_PER_BYTE
    return Op("bulk", who.cta, who.line, happen, cost=cost, bytes=count, label="bulk copy")


@register("cp.async.bulk.prefetch.L2")
def prefetch(c: Operands, ins: Instr) -> Callable[..., None]:
    """cp.async.bulk.prefetch (9.7.9.25.4.3): a hint, and only its rules matter."""
    operands = BulkOperands(c, ins)
    src, size = operands.address("src"), operands.value("size", "u4")
    assert src is not None
    assert size is not None

    def run(g: Gang, m: np.ndarray | None) -> None:
        for lane in g.lanes(m):
            with blame(int(lane)):
                check_bulk(ins.opcode, None, int(src(g)[lane]), int(size(g)[lane]))

    return run


@register("cp.async.bulk.commit_group", operands=0)
def commit_group(c: Operands, ins: Instr) -> Callable[..., None]:
    """cp.async.bulk.commit_group (9.7.9.25.4.4): per thread."""

    def run(g: Gang, m: np.ndarray | None) -> None:
        for lane in g.lanes(m):
            warp = g.machine.warp(g.warps[lane // LANES])
            own = int(lane) % LANES
            warp.bulk_groups.setdefault(own, deque()).append(warp.bulk_open.pop(own, []))

    return run


def finished(op: Op, read: bool) -> bool:
    """Whether an operation has read its source and, unless `read`, written its target."""
    return op.done and (read or op.writes is None or op.writes.done)


@register("cp.async.bulk.wait_group", operands=1, waits=True)
def wait_group(c: Operands, ins: Instr) -> Callable[..., Any]:
    """cp.async.bulk.wait_group N (9.7.9.25.4.5).

    With .read the sources may be overwritten, and what was written need not be there yet.
    """
    read = parsed(ins).read
    left = int(getattr(ins.operands[0], "value", 0))

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        waiting = []
        for lane in g.lanes(m):
            warp = g.machine.warp(g.warps[lane // LANES])
            groups = warp.bulk_groups.get(int(lane) % LANES)
            if groups:
                due = list(groups)[: max(len(groups) - left, 0)]
                waiting.append((warp, groups, due))
        asked = (op for _, _, due in waiting for group in due for op in group)
        late = next((op for op in asked if not finished(op, read)), None)
        if late is not None:
            f.reason, f.until = "bulk copy groups", partial(finished, late, read)
            return False
        for warp, groups, due in waiting:
            for op in (op for group in due for op in group):
                waited(g, warp, op)
                g.flow = op.flow
            for group in due:  # in order: a later wait without .read looks at the rest again
                if not all(finished(op, False) for op in group):
                    break
                groups.popleft()
        return True

    return run
