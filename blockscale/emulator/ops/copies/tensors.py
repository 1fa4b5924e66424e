"""TMA copies and reductions of tensors, tensor maps in memory (PTX ISA 9.7.9.25.5, 9.7.9.26)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blockscale.emulator.errors import IllegalOperation, PtxError
from blockscale.emulator.machine.engine import Op
from blockscale.emulator.machine.gangs import Gang, Machine
from blockscale.emulator.machine.grid import LANES, Cta, MBarrier
from blockscale.emulator.machine.memory import PARAM_WINDOW, SHARED_WINDOW, WINDOW_SIZE
from blockscale.emulator.ops.copies.issuer import (
    CYCLES_PER_BYTE,
    BulkOperands,
    Issuer,
    arena_base,
    begin_load,
    blame,
    cells_of,
    finish_load,
    parsed,
    touch,
)
from blockscale.emulator.ops.core import address, register
from blockscale.emulator.ops.operands import Operands
from blockscale.emulator.ptx.syntax import Imm, Instr
from blockscale.emulator.tma import TensorMap, Transfer, plan, replace
from blockscale.emulator.tma.opcode import AsyncOp

SECTION = "9.7.9.25.5.2"
SWIZZLES = {0: 1, 1: 2, 2: 3, 3: 4, 4: 5}  # of cuda.h -> 1 + index into hazards.LAYOUTS
MAP_BYTES = 128


def map_bytes(machine: Machine, at: int, write: bytes | None = None, shared: Any = None) -> bytes:
    """Return (or replace) the 128 bytes of a tensor map at a generic address."""
    if at < 1 << 16:
        at += PARAM_WINDOW
    if at % 64:
        raise IllegalOperation(
            f"tensor map at {at:#x}: it must be aligned to 64 bytes (PTX ISA 5.5.8); align it"
        )
    part = at // WINDOW_SIZE
    if part == PARAM_WINDOW // WINDOW_SIZE:
        low = at - PARAM_WINDOW
        if write is not None or low + MAP_BYTES > len(machine.params):
            raise IllegalOperation(
                f"a tensor map at parameter offset {low}: parameters are read-only and take "
                f"{len(machine.params)} bytes; copy it to shared or global memory to change it"
            )
        return machine.params[low : low + MAP_BYTES]
    if part == SHARED_WINDOW // WINDOW_SIZE:
        memory = machine.shared.bytes
        offset = int(shared(np.array([at & 0xFFFFFFFF], np.uint64), 64)[0])
        shared(np.array([(at + 64) & 0xFFFFFFFF], np.uint64), 64)
    else:
        memory = machine.memory.arena
        ends = np.array([at, at + 64], np.uint64)
        offset = int(machine.memory.offsets(ends, 64, "a tensor map")[0])
    if write is not None:
        memory[offset : offset + MAP_BYTES] = np.frombuffer(write, np.uint8)
    return memory[offset : offset + MAP_BYTES].tobytes()


@register("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor")
def tensor_copy(c: Operands, ins: Instr) -> Callable[..., None]:
    """TMA copies and reductions between global and shared memory (9.7.9.25.5.2, .3)."""
    operands = BulkOperands(c, ins)
    op = operands.op
    map_at, coords = operands.tensor()
    shared = operands.address("dst" if op.is_load else "src")
    assert shared is not None
    mbar, mask = operands.address("mbar"), operands.value("cta_mask", "u2")

    def run(g: Gang, m: np.ndarray | None) -> None:
        for lane in g.lanes(m):
            with blame(int(lane)):
                who = Issuer(g, int(lane))
                data = map_bytes(g.machine, int(map_at(g)[lane]), shared=who.absolute)
                tensor = TensorMap.decode(data)
                where = [int(x(g)[lane]) for x in coords]
                at = int(shared(g)[lane]) & 0xFFFFFFFF
                if op.is_load:
                    assert mbar is not None
                    ctas = int(mask(g)[lane]) if mask is not None else None
                    bar = int(mbar(g)[lane]) & 0xFFFFFFFF
                    tensor_load(who, op, tensor, where, at, bar, ctas)
                else:
                    tensor_store(who, op, tensor, where, at)

    return run


def tensor_load(
    who: Issuer, op: AsyncOp, tensor: TensorMap, where: list[int], at: int, mbar: int,
    mask: int | None,
) -> None:  # fmt: skip
    """Put one tensor load in flight, into one CTA or into several."""
    machine = who.machine
    t = plan(tensor, where, at, load=True, mode=op.load_mode)
    if op.dst == "shared::cta":
        who.own(at, "the destination", SECTION)
    targets = who.targets(mask, at)
    low = t.shared_bytes() & 0xFFFFFF
    machine.shared.check(low, 1)
    stride = machine.shared.stride
    places = [low + cta.slot * stride for cta in targets]
    barriers = [load_barrier(who, op, mbar, cta, mask is not None) for cta in targets]
    base = reached(machine, t, "a tensor load")
    for place in places:
        begin_load(who, place)
    code = SWIZZLES.get(int(tensor.tiling.swizzle), 0)

    def happen(o: Op) -> None:
        data = t.read_global(machine.memory.arena, base)
        for cta, place, b in zip(targets, places, barriers, strict=True):
            t.write_shared(machine.shared.bytes[cta.slot * stride :], data)
            touch(who, o, place, True, "a TMA load")
            if machine.shared_shadow is not None:
                machine.shared_shadow.mark(cells_of(machine, place), code)
            finish_load(who, o, b, t.tx_bytes)

    o = in_flight(who, "tma.load", t, happen)
    who.claim(o)
    who.start(o)


def load_barrier(who: Issuer, op: AsyncOp, bar: int, cta: Cta, multicast: bool) -> MBarrier:
    """Return the mbarrier that the part of a load into `cta` completes at.

    With .cta_group::2 it may be in either CTA of the pair; a multicast then signals, for each
    destination, the CTA of its pair whose rank has the parity of the mbarrier's (9.7.9.25.5.2).
    """
    if op.cta_group == 2:
        home = who.cta_of(bar)
        if multicast:
            home = who.cluster.ctas[(cta.rank & ~1) | (home.rank & 1)]
        elif home.rank | 1 != cta.rank | 1:
            raise IllegalOperation(
                f"the mbarrier is in CTA rank {home.rank} and the destination in rank {cta.rank}: "
                f".cta_group::2 reaches the two CTAs of one pair only (PTX ISA {SECTION}); use an "
                "mbarrier of the destination's pair",
                lane=who.lane,
            )
        return who.barrier(bar, home)
    if multicast:
        return who.barrier(bar, cta)
    who.same_cta(bar, cta, SECTION)
    return who.barrier(bar)


def reached(machine: Machine, t: Transfer, what: str) -> int:
    """Return the virtual address of arena[0] for what a transfer touches of global memory."""
    inside = t.inside_addresses()
    if not len(inside):
        return 0
    return arena_base(machine, int(inside.min()), int(inside.max()) + t.global_unit, what)


def in_flight(who: Issuer, engine: str, t: Transfer, happen: Callable[[Op], None]) -> Op:
    """Return the operation of one tensor copy.

    `t.warnings` stay silent: a box that begins between 16-byte boundaries is what every halo needs.
    """
    label, report = "TMA load" if engine == "tma.load" else "TMA store", who.machine.report
    source, target = ("global", "shared") if engine == "tma.load" else ("shared", "global")
    report.moved(source, read=t.moved_bytes)
    report.moved(target, written=t.moved_bytes)
    cost = t.moved_bytes * CYCLES_PER_BYTE
    return Op(engine, who.cta, who.line, happen, cost=cost, bytes=t.moved_bytes, label=label)


def tensor_store(who: Issuer, op: AsyncOp, tensor: TensorMap, where: list[int], at: int) -> None:
    """Put one tensor store or reduction in flight."""
    machine = who.machine
    t = plan(tensor, where, at, load=False, mode=op.load_mode)
    who.own(at, "the source", SECTION)
    low = t.shared_bytes() & 0xFFFFFF
    machine.shared.check(low, 1)
    start = who.cta.slot * machine.shared.stride
    base = reached(machine, t, "a tensor store")
    who.look(low + start)

    def happen(o: Op) -> None:
        touch(who, o, low + start, False, "a TMA store")
        data = t.read_shared(machine.shared.bytes[start:])

        def write() -> None:
            if op.reduction:
                t.reduce_global(machine.memory.arena, base, data, op.reduction)
            else:
                t.write_global(machine.memory.arena, base, data)

        who.write_later(o, write)

    who.start_group(in_flight(who, "tma.reduce" if op.reduction else "tma.store", t, happen))


@register("cp.async.bulk.prefetch.tensor")
def prefetch_tensor(c: Operands, ins: Instr) -> Callable[..., None]:
    """cp.async.bulk.prefetch.tensor (9.7.9.25.5.4): a hint, and only its rules matter."""
    operands = BulkOperands(c, ins)
    op = operands.op
    map_at, coords = operands.tensor()

    def run(g: Gang, m: np.ndarray | None) -> None:
        for lane in g.lanes(m):
            with blame(int(lane)):
                who = Issuer(g, int(lane))
                data = map_bytes(g.machine, int(map_at(g)[lane]), shared=who.absolute)
                where = [int(x(g)[lane]) for x in coords]
                plan(TensorMap.decode(data), where, 0, load=True, mode=op.load_mode)

    return run


@register("prefetch.tensormap", "prefetch.param.tensormap", "prefetch.const.tensormap", operands=1)
def prefetch_map(c: Operands, ins: Instr) -> Callable[..., None]:
    """prefetch.tensormap (9.7.9.16): a hint; the address must be one of 128 readable bytes."""
    at = address(c, ins.operands[0])

    def run(g: Gang, m: np.ndarray | None) -> None:
        for lane in g.lanes(m):
            with blame(int(lane)):
                who = Issuer(g, int(lane))
                map_bytes(g.machine, int(at(g)[lane]), shared=who.absolute)

    return run


@register("tensormap.replace")
def tensormap_replace(c: Operands, ins: Instr) -> Callable[..., None]:
    """tensormap.replace (9.7.9.26): changes one field of a map in shared or global memory."""
    operands = BulkOperands(c, ins)
    op = operands.op
    at = operands.address("address")
    value = operands.value("value", "u8" if op.element == "b64" else "u4")
    ordinal = getattr(operands.by_role.get("ordinal"), "value", 0)
    assert at is not None
    assert value is not None

    def run(g: Gang, m: np.ndarray | None) -> None:
        for lane in g.lanes(m):
            with blame(int(lane)):
                who = Issuer(g, int(lane))
                where = int(at(g)[lane])
                if op.space.startswith("shared") and where < SHARED_WINDOW:
                    where += SHARED_WINDOW
                data = map_bytes(g.machine, where, shared=who.absolute)
                new = replace(data, op.field, int(value(g)[lane]), int(ordinal))
                map_bytes(g.machine, where, write=new, shared=who.absolute)
                used(who, where, True)
                g.machine.progress += 1

    return run


def used(who: Issuer, where: int, write: bool) -> None:
    """Record that a warp reads or writes a tensor map in shared memory."""
    if where // WINDOW_SIZE == SHARED_WINDOW // WINDOW_SIZE:
        first = int(who.absolute(where & 0xFFFFFFFF, 64)[0])
        offsets = first + np.arange(0, MAP_BYTES, 16)
        lanes = np.full(len(offsets), who.lane)
        who.machine.hazards.shared(who.g, lanes, offsets, 16, write)


@register("tensormap.cp_fenceproxy", operands=3)
def cp_fenceproxy(c: Operands, ins: Instr) -> Callable[..., None]:
    """tensormap.cp_fenceproxy (9.7.13.17): copies a tensor map to global memory and fences it."""
    parsed(ins)
    to, source, size = ins.operands
    if not (isinstance(size, Imm) and int(size.value) == MAP_BYTES):
        raise PtxError(f"{ins.opcode}: the size must be {MAP_BYTES} (PTX ISA 9.7.13.17)")
    put, get = address(c, to), address(c, source)

    def run(g: Gang, m: np.ndarray | None) -> None:
        for w in g.active_warps(m):  # the warp copies together
            lane = int(w) * LANES + int(g.by_warp(m)[w].argmax())
            with blame(lane):
                who = Issuer(g, lane)
                at = int(get(g)[lane])
                at = at + SHARED_WINDOW if at < SHARED_WINDOW else at
                data = map_bytes(g.machine, at, shared=who.absolute)
                used(who, at, False)
                map_bytes(g.machine, int(put(g)[lane]), write=data)
                g.machine.progress += 1

    return run
