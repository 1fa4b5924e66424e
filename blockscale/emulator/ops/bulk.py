"""Bulk copies: cp.async.bulk, TMA tensor copies, reductions, st.async (PTX ISA 9.7.9.25.4, .5, 9.7.9.27)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine import Op
from ..errors import IllegalOperation, PtxError
from ..gang import LANES
from ..memory import PARAM_WINDOW, SHARED_WINDOW, WINDOW_SIZE
from ..syntax import Instr, Mem, Operand, Vec
from ..tma import TensorMap, combine, plan, replace
from ..tma.bulk import check_bulk, masked_offsets
from ..tma.opcode import AsyncOp, parse
from . import mbarrier
from .copy import done
from .core import address, bad_rank, register, shared_offsets, type_of, vector_of
from .loadstore import values_of

if TYPE_CHECKING:
    from ..compiler import Compiler
    from ..gang import Fragment, Gang
    from ..grid import Cta
    from ..machine import Machine

SWIZZLES = {0: 1, 1: 2, 2: 3, 3: 4, 4: 5}  # of cuda.h -> 1 + index into hazards.LAYOUTS
CYCLES_PER_BYTE = 1 / 64  # of a CTA's share of the copy engine
Scalar = Callable[["Gang"], Any]


class Issuer:
    """One lane that issues a bulk operation: who it is and what it knows."""

    def __init__(self, g: Gang, lane: int) -> None:
        self.g, self.lane, self.machine = g, lane, g.machine
        self.warp = g.machine.warps[g.warps[lane // LANES]]
        self.cta: Cta = self.warp.cta
        self.cluster = self.cta.cluster
        self.know, self.fenced = g.machine.clocks.both(self.cluster.slot, self.warp.agent)
        g.machine.clocks.release(self.cluster.slot, self.warp.agent)
        self.ins = g.ins
        self.line = g.ins.line

    def claim(self, op: Op) -> None:
        """Give the operation its agent."""
        op.agent, op.clock = self.machine.clocks.claim(self.cluster.slot, self.know)

    def claim_group(self, op: Op) -> None:
        """Give an operation of a bulk group its agent: groups of a thread are waited for in order."""
        clocks = self.machine.clocks
        op.agent = clocks.store + self.warp.agent
        know = clocks.know[self.cluster.slot, op.agent]
        know[op.agent] += 1
        op.clock = int(know[op.agent])

    def cta_of(self, shared: int) -> Cta:
        """Return the CTA of a shared address."""
        rank = (shared >> 24) & 0xFF
        if rank >= len(self.cluster.ctas):
            raise bad_rank(shared, len(self.cluster.ctas), self.lane)
        return self.cluster.ctas[rank]

    def absolute(self, shared: np.ndarray | int, size: int) -> np.ndarray:
        """Return checked absolute offsets of bytes at shared addresses."""
        at = np.atleast_1d(np.asarray(shared, np.uint64))
        lanes = np.full(len(at), self.lane)
        return shared_offsets(self.g, lanes, at, size)

    def barrier(self, shared: int, cta: Cta | None = None) -> mbarrier.MBarrier:
        """Return the mbarrier at a shared address (at the same offset in `cta`)."""
        if cta is not None:
            shared = (shared & 0xFFFFFF) | (cta.rank << 24)
        offset = int(self.absolute(shared & 0xFFFFFFFF, 8)[0])
        return mbarrier.find(self.machine, offset, f"{self.g.ins.opcode}: complete_tx", self.lane)


def touch(who: Issuer, op: Op, offsets: np.ndarray, write: bool, what: str) -> None:
    """Record that a bulk operation reads or writes bytes of shared memory (absolute offsets)."""
    machine = who.machine
    shadow = machine.shared_shadow
    if shadow is None or not len(offsets):
        return
    cells = np.unique(offsets >> machine.shared.shift)
    generic = machine.clocks.cp_async + machine.clocks.warps
    found = (shadow.write if write else shadow.read)(
        cells, op.agent, who.know, op.clock, who.line, fenced=who.fenced, generic=generic
    )
    if found is not None and write and found[0] == "proxy":
        written = machine.hazards.lines.get(abs(found[3]), "")
        if written.startswith(("tcgen05.alloc", "mbarrier")):
            found = None  # nobody reads those bytes through the generic proxy any more
    if found is not None:
        offset = int(cells[found[1]]) * machine.traits.granule % machine.shared.stride
        severity = "warning" if write and found[0] == "proxy" else "error"
        machine.hazards.conflict(found, what, "shared memory", who.line, who.warp.index, offset, severity)
    if not write and not shadow.dirty[cells].all():
        at = int(np.flatnonzero(~shadow.dirty[cells])[0])
        machine.hazards.uninitialised(who.ins, cells, at, who.warp.index)


def poison(who: Issuer, offsets: np.ndarray) -> None:
    """Some seeds destroy what a load will overwrite as soon as it is issued."""
    if who.machine.engine.poison and who.machine.engine.temper != "eager":
        who.machine.shared.bytes[offsets] = 0xFF


def finish_load(who: Issuer, op: Op, b: mbarrier.MBarrier, count: int) -> None:
    """complete_tx at an mbarrier, whose waiters then know of the operation."""
    mbarrier.give(who.machine, b, done(who.machine.clocks, who.know, who.fenced, op.agent, op.clock), op.end, op.flow)
    mbarrier.complete_tx(who.machine, b, count, who.lane)


class Operands:
    """The operands of a bulk instruction, by role."""

    def __init__(self, c: Compiler, ins: Instr, op: AsyncOp) -> None:
        self.c, self.ins = c, ins
        roles = [r for r in op.operands if not r.endswith("?")]
        if len(roles) != len(ins.operands):
            raise PtxError(f"{ins.opcode} takes {len(roles)} operands ({', '.join(roles)}) and has {len(ins.operands)}")
        self.by_role: dict[str, Operand] = dict(zip(roles, ins.operands, strict=True))

    def address(self, role: str) -> Scalar | None:
        """Return a getter of an address operand."""
        return address(self.c, self.by_role[role]) if role in self.by_role else None

    def value(self, role: str, dtype: str) -> Scalar | None:
        """Return a getter of a value operand."""
        return self.c.lanes_source(self.by_role[role], dtype) if role in self.by_role else None

    def tensor(self) -> tuple[Scalar, list[Scalar]]:
        """Return getters of the tensor map's address and of the coordinates."""
        mem = self.by_role["tensor"]
        assert isinstance(mem, Mem)
        coords = mem.rest[0]
        items = coords.items if isinstance(coords, Vec) else (coords,)
        return address(self.c, Mem(mem.base, mem.offset)), [self.c.lanes_source(i, "i4") for i in items]


def map_bytes(machine: Machine, at: int, lane: int, write: bytes | None = None, shared: Any = None) -> bytes:
    """Return (or replace) the 128 bytes of a tensor map at a generic address."""
    if at < 1 << 16:
        at += PARAM_WINDOW
    if at % 64:
        raise IllegalOperation(f"tensor map at {at:#x}: it must be aligned to 64 bytes (PTX ISA 5.5.8)", lane=lane)
    part = at // WINDOW_SIZE
    if part == PARAM_WINDOW // WINDOW_SIZE:
        low = at - PARAM_WINDOW
        return machine.params[low : low + 128]
    if part == SHARED_WINDOW // WINDOW_SIZE:
        offset = int(shared(np.array([at & 0xFFFFFFFF], np.uint64), 64)[0])
        if write is not None:
            machine.shared.bytes[offset : offset + 128] = np.frombuffer(write, np.uint8)
        return machine.shared.bytes[offset : offset + 128].tobytes()
    offset = int(machine.memory.offsets(np.array([at], np.uint64), 64, "a tensor map")[0])
    if write is not None:
        machine.memory.arena[offset : offset + 128] = np.frombuffer(write, np.uint8)
    return machine.memory.arena[offset : offset + 128].tobytes()


def arena_base(machine: Machine, low: int, high: int, lane: int, what: str) -> int:
    """Return the virtual address that arena[0] would have for an access of [low, high)."""
    try:
        first = machine.memory.offsets(np.array([low], np.uint64), 1, what)
        machine.memory.offsets(np.array([high - 1], np.uint64), 1, what)
    except IllegalOperation as error:
        error.lane = lane
        raise
    return low - int(first[0])


@register("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor")
def tensor_copy(c: Compiler, ins: Instr) -> Callable[..., None]:
    """TMA copies and reductions between global and shared memory (9.7.9.27.1)."""
    op = parse(ins.opcode)
    assert op is not None
    operands = Operands(c, ins, op)
    map_at, coords = operands.tensor()
    shared = operands.address("dst" if op.is_load else "src")
    assert shared is not None
    mbar, mask = operands.address("mbar"), operands.value("cta_mask", "u2")
    if len(coords) != op.coordinates:
        raise PtxError(f"{ins.opcode} takes {op.coordinates} coordinates and has {len(coords)}")

    def run(g: Gang, m: np.ndarray | None) -> None:
        for lane in g.lanes(m):
            who = Issuer(g, int(lane))
            data = map_bytes(g.machine, int(map_at(g)[lane]), who.lane, shared=who.absolute)
            tensor = TensorMap.decode(data)
            where = [int(x(g)[lane]) for x in coords]
            at = int(shared(g)[lane]) & 0xFFFFFFFF
            if op.is_load:
                assert mbar is not None
                ctas = int(mask(g)[lane]) if mask is not None else None
                tensor_load(who, op, tensor, where, at, int(mbar(g)[lane]) & 0xFFFFFFFF, ctas)
            else:
                tensor_store(who, op, tensor, where, at)

    return run


def tensor_load(
    who: Issuer, op: AsyncOp, tensor: TensorMap, where: list[int], at: int, mbar: int, mask: int | None
) -> None:
    """Put one tensor load in flight, into one CTA or into several."""
    machine = who.machine
    t = plan(tensor, where, at, load=True, mode=op.load_mode)
    if mask is None:
        targets = [who.cta_of(at)]
    else:
        targets = [cta for cta in who.cluster.ctas if mask >> cta.rank & 1]
        if mask >> len(who.cluster.ctas) or not mask:
            raise IllegalOperation(
                f"multicast mask {mask:#x} in a cluster of {len(who.cluster.ctas)} CTAs: it must name CTAs that exist",
                lane=who.lane,
            )
    low = t.shared_bytes() & 0xFFFFFF
    machine.shared.check(low, 1)
    places = [low + cta.slot * machine.shared.stride for cta in targets]
    barriers = []
    for cta in targets:
        home = cta if mask is not None else who.cta_of(mbar)
        if op.cta_group == 2 and mask is not None:
            home = who.cluster.ctas[(cta.rank & ~1) | ((mbar >> 24) & 1)]
        if op.cta_group == 1 and mask is None and home is not cta:
            raise IllegalOperation(
                f"the mbarrier is in CTA rank {home.rank} and the destination in rank {cta.rank}; they must be "
                "in one CTA unless .cta_group::2 is given (PTX ISA 9.7.9.27.1.2)",
                lane=who.lane,
            )
        barriers.append(who.barrier(mbar, home))
    inside = t.inside_addresses()
    base = 0
    if len(inside):
        base = arena_base(
            machine, int(inside.min()), int(inside.max()) + t.global_unit, who.lane, "a tensor load"
        )
    for place in places:
        poison(who, place)

    def happen(o: Op) -> None:
        data = t.read_global(machine.memory.arena, base)
        for cta, place, b in zip(targets, places, barriers, strict=True):
            own = machine.shared.bytes[cta.slot * machine.shared.stride :]
            t.write_shared(own, data)
            touch(who, o, place, True, "a TMA load")
            if machine.shared_shadow is not None:
                code = SWIZZLES.get(int(tensor.tiling.swizzle), 0)
                machine.shared_shadow.mark(np.unique(place >> machine.shared.shift), code)
            finish_load(who, o, b, t.tx_bytes)

    o = Op(
        "tma.load", who.cta, who.line, happen, cost=t.moved_bytes * CYCLES_PER_BYTE, bytes=t.moved_bytes,
        label="TMA load",
    )  # fmt: skip
    who.claim(o)
    machine.engine.issue(machine.engine.new_stream(), o, who.g.time)


def tensor_store(who: Issuer, op: AsyncOp, tensor: TensorMap, where: list[int], at: int) -> None:
    """Put one tensor store or reduction in flight."""
    machine = who.machine
    t = plan(tensor, where, at, load=False, mode=op.load_mode)
    if who.cta_of(at) is not who.cta:
        raise IllegalOperation("a TMA store reads the shared memory of its own CTA only", lane=who.lane)
    low = t.shared_bytes() & 0xFFFFFF
    machine.shared.check(low, 1)
    place = low + who.cta.slot * machine.shared.stride
    inside = t.inside_addresses()
    base = 0
    if len(inside):
        base = arena_base(
            machine, int(inside.min()), int(inside.max()) + t.global_unit, who.lane, "a tensor store"
        )

    def happen(o: Op) -> None:
        own = machine.shared.bytes[who.cta.slot * machine.shared.stride :]
        touch(who, o, place, False, "a TMA store")
        data = t.read_shared(own)
        if op.reduction:
            t.reduce_global(machine.memory.arena, base, data, op.reduction)
        else:
            t.write_global(machine.memory.arena, base, data)

    name = "tma.reduce" if op.reduction else "tma.store"
    o = Op(
        name, who.cta, who.line, happen, cost=t.moved_bytes * CYCLES_PER_BYTE, bytes=t.moved_bytes, label="TMA store"
    )
    who.claim_group(o)
    who.warp.bulk_open.setdefault(who.lane % LANES, []).append(o)
    machine.engine.issue(machine.engine.new_stream(), o, who.g.time)


@register("cp.async.bulk", "cp.reduce.async.bulk")
def bulk_copy(c: Compiler, ins: Instr) -> Callable[..., None]:
    """One-dimensional bulk copies and reductions (9.7.9.25.4)."""
    op = parse(ins.opcode)
    assert op is not None
    operands = Operands(c, ins, op)
    dst, src = operands.address("dst"), operands.address("src")
    size, mbar = operands.value("size", "u4"), operands.address("mbar")
    mask, byte_mask = operands.value("cta_mask", "u2"), operands.value("byte_mask", "u2")
    assert dst is not None and src is not None and size is not None

    def run(g: Gang, m: np.ndarray | None) -> None:
        for lane in g.lanes(m):
            who = Issuer(g, int(lane))
            to, source, count = int(dst(g)[lane]), int(src(g)[lane]), int(size(g)[lane])
            check_bulk(ins.opcode, to, source, count)
            bar = int(mbar(g)[lane]) & 0xFFFFFFFF if mbar is not None else None
            ctas = int(mask(g)[lane]) if mask is not None else None
            picked = masked_offsets(count, int(byte_mask(g)[lane])) if byte_mask is not None else np.arange(count)
            one_bulk(who, op, to, source, count, bar, ctas, picked)

    return run


def one_bulk(
    who: Issuer, op: AsyncOp, to: int, source: int, count: int, bar: int | None, mask: int | None, picked: np.ndarray
) -> None:  # fmt: skip
    """Put one 1-D bulk copy in flight."""
    machine = who.machine
    if count == 0:
        return
    stride = machine.shared.stride
    span = np.arange(count)
    memory = machine.memory.arena
    what = f"a bulk copy of {count} bytes"
    reads_shared = op.src.startswith("shared")
    if reads_shared:
        src = who.absolute(source & 0xFFFFFFFF, 1)[0] + span
        machine.shared.check(src % stride, 1)
    else:
        src = span + source - arena_base(machine, source, source + count, who.lane, what)
    if op.dst == "global":
        places = [span + to - arena_base(machine, to, to + count, who.lane, what)]
        barriers: list[mbarrier.MBarrier] = []
    else:
        to &= 0xFFFFFFFF
        targets = [who.cta_of(to)] if mask is None else [x for x in who.cluster.ctas if mask >> x.rank & 1]
        low = (to & 0xFFFFFF) + span
        machine.shared.check(low, 1)
        places = [low + cta.slot * stride for cta in targets]
        assert bar is not None
        barriers = [who.barrier(bar, cta if mask is not None else None) for cta in targets]
        for place in places:
            if not op.reduction:
                poison(who, place)

    def happen(o: Op) -> None:
        pool = machine.shared.bytes if reads_shared else memory
        if reads_shared:
            touch(who, o, src, False, "a bulk copy")
        data = pool[src]
        target = memory if op.dst == "global" else machine.shared.bytes
        for place in places:
            new = data
            if op.reduction:
                new = combine(op.reduction, op.element, target[place], data, ftz=op.element == "f32")
            target[place[picked]] = new[picked]
            if op.dst != "global":
                touch(who, o, place, True, "a bulk copy")
        for b in barriers:
            finish_load(who, o, b, count)

    o = Op(
        "bulk", who.cta, who.line, happen, cost=count * CYCLES_PER_BYTE, bytes=count, label="bulk copy"
    )
    if op.dst == "global":
        who.claim_group(o)
    else:
        who.claim(o)
    if op.dst == "global":
        who.warp.bulk_open.setdefault(who.lane % LANES, []).append(o)
    machine.engine.issue(machine.engine.new_stream(), o, who.g.time)


@register("cp.async.bulk.commit_group")
def commit_group(c: Compiler, ins: Instr) -> Callable[..., None]:
    """cp.async.bulk.commit_group (9.7.9.25.4.4): per thread."""

    def run(g: Gang, m: np.ndarray | None) -> None:
        from collections import deque

        for lane in g.lanes(m):
            warp = g.machine.warps[g.warps[lane // LANES]]
            own = int(lane) % LANES
            warp.bulk_groups.setdefault(own, deque()).append(warp.bulk_open.pop(own, []))

    return run


@register("cp.async.bulk.wait_group", waits=True)
def wait_group(c: Compiler, ins: Instr) -> Callable[..., Any]:
    """cp.async.bulk.wait_group(.read) N (9.7.9.25.4.5)."""
    left = int(getattr(ins.operands[0], "value", 0))

    def due(g: Gang, lane: int) -> list[Op]:
        warp = g.machine.warps[g.warps[lane // LANES]]
        groups = list(warp.bulk_groups.get(lane % LANES, ()))
        return [op for group in groups[: max(len(groups) - left, 0)] for op in group]

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        lanes = [int(i) for i in g.lanes(m)]
        busy = [i for i in lanes if g.machine.warps[g.warps[i // LANES]].bulk_groups.get(i % LANES)]
        if not all(op.done for lane in busy for op in due(g, lane)):
            f.reason = "bulk copy groups"
            return False
        for lane in busy:
            warp = g.machine.warps[g.warps[lane // LANES]]
            know = g.machine.clocks.know[warp.cta.cluster.slot, warp.agent]
            for op in due(g, lane):
                know[op.agent] = max(know[op.agent], op.clock)
                g.time = max(g.time, op.end)
                g.flow = op.flow
            groups = warp.bulk_groups[lane % LANES]
            while len(groups) > left:
                groups.popleft()
        return True

    return run


@register("prefetch.tensormap", "cp.async.bulk.prefetch.tensor")
def prefetch(c: Compiler, ins: Instr) -> Callable[..., None]:
    """Prefetches: no effect on values."""
    return lambda g, m: None


@register("tensormap.replace")
def tensormap_replace(c: Compiler, ins: Instr) -> Callable[..., None]:
    """tensormap.replace (9.7.9.28)."""
    op = parse(ins.opcode)
    assert op is not None
    operands = Operands(c, ins, op)
    at = operands.address("address")
    value = operands.value("value", "u8" if op.element == "b64" else "u4")
    ordinal = getattr(operands.by_role.get("ordinal"), "value", 0)
    assert at is not None and value is not None

    def run(g: Gang, m: np.ndarray | None) -> None:
        for lane in g.lanes(m):
            who = Issuer(g, int(lane))
            where = int(at(g)[lane])
            if op.space.startswith("shared") and where < SHARED_WINDOW:
                where += SHARED_WINDOW
            data = map_bytes(g.machine, where, who.lane, shared=who.absolute)
            new = replace(data, op.field, int(value(g)[lane]), int(ordinal))
            map_bytes(g.machine, where, who.lane, write=new, shared=who.absolute)
            mark(who, where)

    return run


def mark(who: Issuer, where: int) -> None:
    """A tensor map in shared memory counts as initialised."""
    if who.machine.shared_shadow is not None and where // WINDOW_SIZE == SHARED_WINDOW // WINDOW_SIZE:
        offset = int(who.absolute(where & 0xFFFFFFFF, 64)[0])
        shift = who.machine.shared.shift
        who.machine.shared_shadow.dirty[offset >> shift : (offset + 128) >> shift] = True


@register("tensormap.cp_fenceproxy")
def cp_fenceproxy(c: Compiler, ins: Instr) -> Callable[..., None]:
    """tensormap.cp_fenceproxy (9.7.13.7): copies a tensor map to global memory and fences it."""
    to, source = address(c, ins.operands[0]), address(c, ins.operands[1])

    def run(g: Gang, m: np.ndarray | None) -> None:
        for w in g.active_warps(m):  # the warp copies together
            lane = int(w) * LANES + int(g.by_warp(m)[w].argmax())
            who = Issuer(g, lane)
            at = int(source(g)[lane])
            at = at + SHARED_WINDOW if at < SHARED_WINDOW else at
            data = map_bytes(g.machine, at, who.lane, shared=who.absolute)
            map_bytes(g.machine, int(to(g)[lane]), who.lane, write=data)
            g.machine.progress += 1

    return run


def st_async(c: Compiler, ins: Instr) -> Callable[..., None]:
    """st.async (9.7.9.13): a store into the cluster that completes at an mbarrier."""
    return remote(c, ins, "")


def red_async(c: Compiler, ins: Instr) -> Callable[..., None]:
    """red.async (9.7.13.15): a reduction into the cluster that completes at an mbarrier."""
    from .atomic import OPS

    return remote(c, ins, next(m for m in ins.mods if m in OPS))


def remote(c: Compiler, ins: Instr, reduction: str) -> Callable[..., None]:
    """Return the handler of st.async or red.async."""
    dtype, size = type_of(ins)
    count = vector_of(ins)
    to, mbar = address(c, ins.operands[0]), address(c, ins.operands[2])
    get = values_of(c, ins.operands[1], dtype, size)

    def run(g: Gang, m: np.ndarray | None) -> None:
        for lane in g.lanes(m):
            who = Issuer(g, int(lane))
            place = int(who.absolute(int(to(g)[lane]) & 0xFFFFFFFF, size * count)[0]) + np.arange(size * count)
            b = who.barrier(int(mbar(g)[lane]) & 0xFFFFFFFF)
            data = np.concatenate([part(g)[lane : lane + 1].view(np.uint8) for part in get])

            def happen(
                o: Op, who: Issuer = who, place: np.ndarray = place, b: mbarrier.MBarrier = b, data: np.ndarray = data
            ) -> None:
                pool = who.machine.shared.bytes
                new = combine(reduction, ins.mods[-1], pool[place], data) if reduction else data
                pool[place] = new
                if not reduction:
                    who.fenced = who.know  # st.async is not an access through the async proxy
                    touch(who, o, place, True, ins.opcode)
                finish_load(who, o, b, size * count)

            o = Op("bulk", who.cta, ins.line, happen, cost=2.0, bytes=size * count, label="st.async")
            who.claim(o)
            g.machine.engine.issue(g.machine.engine.new_stream(), o, g.time)

    return run


def st_bulk(c: Compiler, ins: Instr) -> Callable[..., None]:
    """st.bulk (9.7.9.14): zero a range of shared memory."""
    to, size = address(c, ins.operands[0]), c.lanes_source(ins.operands[1], "u8")

    def run(g: Gang, m: np.ndarray | None) -> None:
        for lane in g.lanes(m):
            who = Issuer(g, int(lane))
            count = int(size(g)[lane])
            start = int(who.absolute(int(to(g)[lane]) & 0xFFFFFFFF, 8)[0])
            span = np.arange(start, start + count)
            g.machine.shared.check(span % g.machine.shared.stride, 1)
            g.machine.shared.bytes[span] = 0
            starts = span[:: 8]
            g.machine.hazards.shared(g, np.full(len(starts), lane), starts, 8, True)

    return run


@register("clusterlaunchcontrol.try_cancel")
def try_cancel(c: Compiler, ins: Instr) -> Callable[..., None]:
    """clusterlaunchcontrol.try_cancel (9.7.13.18): take over a cluster that has not begun."""
    to, mbar = address(c, ins.operands[0]), address(c, ins.operands[1])
    everybody = any(m.startswith("multicast") for m in ins.mods)

    def run(g: Gang, m: np.ndarray | None) -> None:
        for lane in g.lanes(m):
            who = Issuer(g, int(lane))
            place = int(to(g)[lane]) & 0xFFFFFF
            bar = int(mbar(g)[lane]) & 0xFFFFFFFF
            ctas = who.cluster.ctas if everybody else [who.cta]

            def happen(
                o: Op, who: Issuer = who, ctas: list[Cta] = ctas, place: int = place, bar: int = bar
            ) -> None:
                machine = who.machine
                answer = np.zeros(4, np.uint32)
                if machine.waiting:
                    number = machine.waiting.popleft()
                    sizes = [a // b for a, b in zip(machine.grid, machine.cluster, strict=True)]
                    first = (number % sizes[0], number // sizes[0] % sizes[1], number // (sizes[0] * sizes[1]))
                    answer[:3] = np.array(first) * machine.cluster
                    answer[3] = 1
                for cta in ctas:
                    span = cta.slot * machine.shared.stride + place + np.arange(16)
                    machine.shared.bytes[span] = answer.view(np.uint8)
                    touch(who, o, span, True, "clusterlaunchcontrol.try_cancel")
                    finish_load(who, o, who.barrier(bar, cta), 16)

            o = Op("bulk", who.cta, ins.line, happen, bytes=16, label="try_cancel")
            who.claim(o)
            g.machine.engine.issue(g.machine.engine.new_stream(), o, g.time)

    return run


@register("clusterlaunchcontrol.query_cancel")
def query_cancel(c: Compiler, ins: Instr) -> Callable[..., None]:
    """clusterlaunchcontrol.query_cancel (9.7.13.18): read an answer of try_cancel."""
    _, row = c.reg(ins.operands[1])
    if "is_canceled" in ins.opcode:
        put = c.dest(ins.operands[0], "?")
        return lambda g, m: put(g, m, (g.u8[row + 1] >> np.uint64(32)) != 0)
    items = ins.operands[0].items if isinstance(ins.operands[0], Vec) else (ins.operands[0],)
    first = 0
    for i, name in enumerate("xyz"):
        if f"get_first_ctaid::{name}" in ins.opcode:
            first = i
    puts = [c.dest(i, "u4") for i in items]

    def run(g: Gang, m: np.ndarray | None) -> None:
        words = [g.u8[row] & np.uint64(0xFFFFFFFF), g.u8[row] >> np.uint64(32)]
        words += [g.u8[row + 1] & np.uint64(0xFFFFFFFF), g.u8[row + 1] >> np.uint64(32)]
        for i, put in enumerate(puts):
            put(g, m, words[(first + i) % 4].astype(np.uint32))

    return run
