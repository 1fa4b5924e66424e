"""Between the lanes of a warp: shfl, vote, match, redux, elect (PTX ISA 9.7.9.6, 9.7.13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blockscale.emulator.errors import IllegalOperation, PtxError
from blockscale.emulator.machine.gangs import Gang
from blockscale.emulator.machine.grid import LANES
from blockscale.emulator.machine.state import Fragment
from blockscale.emulator.ops.core import converged, register
from blockscale.emulator.ops.operands import Operands
from blockscale.emulator.ptx.syntax import Imm, Instr, Operand, Pair, Sink

LANE = np.arange(LANES)
BIT = np.uint32(1) << LANE.astype(np.uint32)
EVERYBODY = 0xFFFFFFFF
NAN = np.uint32(0x7FFFFFFF)  # the canonical NaN
POISON = np.uint32(0xFFFFFFFF)  # what a lane gets from one that takes no part

# [W, 1, 32], or [W, 32, 32] where lanes of a warp name different groups: [w, i, j] is whether lane
# j takes part in what lane i gets.  None: the instruction has to wait.
Groups = np.ndarray


def bits(flags: np.ndarray) -> np.ndarray:
    """Return flags [..., 32] as words [...], lane 0 lowest."""
    return np.packbits(flags, axis=-1, bitorder="little").view(np.uint32)[..., 0]


class Members:
    """The member mask of an instruction: who has to come, and who takes part with whom."""

    def __init__(self, c: Operands, op: Operand | None) -> None:
        full = op is None or (isinstance(op, Imm) and int(op.value) & EVERYBODY == EVERYBODY)
        self.named = op is not None
        self.get = None if full or op is None else c.lanes_source(op, "u4")

    def meet(self, g: Gang, m: np.ndarray | None, f: Fragment) -> Groups | None:
        """Wait until all lanes that the masks name are here; return the groups, or None."""
        active = g.by_warp(m)
        if self.get is None:
            if m is not None and self.named and not converged(g, m, f):
                return None
            return (active & g.live.reshape(-1, LANES))[:, None, :]
        masks = self.get(g).reshape(g.W, LANES)
        outside = active & (masks & BIT == 0)
        if outside.any():
            lane = int(np.flatnonzero(outside)[0])
            raise IllegalOperation(
                f"lane {lane % LANES} is not in the member mask "
                f"{int(masks.reshape(-1)[lane]):#010x} that it gives; a lane that executes the "
                "instruction must be in its mask (PTX ISA "
                "9.7.13: membermask); build the mask of the lanes that come here",
                lane=lane,
            )
        union = np.bitwise_or.reduce(np.where(active, masks, 0), axis=1)
        need = (union[:, None] & BIT != 0).reshape(-1)
        if not converged(g, g.live if m is None else m, f, need):
            return None
        here = active & g.live.reshape(-1, LANES)
        if (~active | (masks == union[:, None])).all():
            return (here & (union[:, None] & BIT != 0))[:, None, :]
        return here[:, None, :] & (masks[:, :, None] & BIT != 0)


def spread(values: np.ndarray, g: Gang) -> np.ndarray:
    """Return [W, 1] or [W, 32] values per lane."""
    return np.broadcast_to(values, (g.W, LANES)).reshape(-1)


def mode_of(ins: Instr, *modes: str) -> str:
    """Return the modifier that is one of `modes`."""
    for mod in ins.mods:
        if mod in modes:
            return mod
    raise PtxError(f"{ins.opcode}: one of .{', .'.join(modes)} is missing")


def destinations(op: Operand) -> tuple[Operand, Operand]:
    """Return (register, predicate) of ``d|p`` or ``d``."""
    return (op.first, op.second) if isinstance(op, Pair) else (op, Sink())


def pattern(mode: str, b: Any, packed: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return (source lane, in range) of shfl for lanes [..., 32]; out of range: the own lane."""
    b, bound, segment = b & 31, packed & 31, (packed >> 8) & 31
    top = (LANE & segment) | (bound & ~segment)
    if mode == "up":
        source = LANE - b
        ok = source >= top
    elif mode == "down":
        source = LANE + b
        ok = source <= top
    elif mode == "bfly":
        source = LANE ^ b
        ok = source <= top
    else:
        source = (LANE & segment) | (b & ~segment)
        ok = source <= top
    return np.where(ok, source, LANE), ok


@register("shfl", operands=(4, 5), waits=True)
def shfl(c: Operands, ins: Instr) -> Callable[..., Any]:
    """shfl.sync (9.7.9.6); the value of a lane that takes no part is poison."""
    mode = mode_of(ins, "up", "down", "bfly", "idx")
    target, flag = destinations(ins.operands[0])
    get, lane, clamp = ins.operands[1:4]
    value = c.lanes_source(get, "u4")
    fixed = None
    if isinstance(lane, Imm) and isinstance(clamp, Imm):
        fixed = pattern(mode, np.int64(lane.value), np.int64(clamp.value))
    by, packed = c.lanes_source(lane, "u4"), c.lanes_source(clamp, "u4")
    members = Members(c, ins.operands[4] if len(ins.operands) > 4 else None)
    put = c.dest(target, "u4")
    put_flag = None if isinstance(flag, Sink) else c.dest(flag, "?")

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        groups = members.meet(g, m, f)
        if groups is None:
            return False
        values = value(g).reshape(g.W, LANES)
        if fixed is not None:
            source, ok = fixed
            result = values[:, source]
        else:
            b, bound = by(g).astype(np.int64), packed(g).astype(np.int64)
            source, ok = pattern(mode, b.reshape(g.W, LANES), bound.reshape(g.W, LANES))
            result = np.take_along_axis(values, source, axis=1)
        if not groups.all():
            at = np.broadcast_to(source, (g.W, LANES))
            table = np.broadcast_to(groups, (g.W, LANES, LANES))
            given = np.take_along_axis(table, at[:, :, None], axis=2)[:, :, 0]
            result = np.where(given, result, POISON)
        put(g, m, result.reshape(-1))
        if put_flag is not None:
            put_flag(g, m, spread(ok, g))
        return True

    return run


@register("vote", operands=(2, 3), waits=True)
def vote(c: Operands, ins: Instr) -> Callable[..., Any]:
    """vote.sync (9.7.13.8)."""
    mode = mode_of(ins, "all", "any", "uni", "ballot")
    flag = c.lanes_source(ins.operands[1], "?")
    members = Members(c, ins.operands[2] if len(ins.operands) > 2 else None)
    put = c.dest(ins.operands[0], "u4" if mode == "ballot" else "?")

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        groups = members.meet(g, m, f)
        if groups is None:
            return False
        p = flag(g).reshape(g.W, 1, LANES)
        if mode == "ballot":
            put(g, m, spread(bits(p & groups), g))
            return True
        every, some = (p | ~groups).all(2), (p & groups).any(2)
        result = {"all": every, "any": some, "uni": every | ~some}[mode]
        put(g, m, spread(result, g))
        return True

    return run


@register("match", operands=3, waits=True)
def match(c: Operands, ins: Instr) -> Callable[..., Any]:
    """match.sync (9.7.13.9)."""
    mode = mode_of(ins, "any", "all")
    target, flag = destinations(ins.operands[0])
    kind = "u8" if ins.mods[-1] == "b64" else "u4"
    value, members = c.lanes_source(ins.operands[1], kind), Members(c, ins.operands[2])
    put, put_flag = c.dest(target, "u4"), c.dest(flag, "?")

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        groups = members.meet(g, m, f)
        if groups is None:
            return False
        v = value(g).reshape(g.W, LANES)
        equal = v[:, :, None] == v[:, None, :]
        found = bits(equal & groups)
        if mode == "any":
            put(g, m, found.reshape(-1))
            return True
        everybody = (equal | ~groups).all(2)
        put(g, m, np.where(everybody, found, 0).astype(np.uint32).reshape(-1))
        put_flag(g, m, everybody.reshape(-1))
        return True

    return run


REDUCTIONS: dict[str, tuple[np.ufunc, Callable[[str], int]]] = {
    "add": (np.add, lambda kind: 0),
    "min": (np.minimum, lambda kind: np.iinfo(kind).max),
    "max": (np.maximum, lambda kind: np.iinfo(kind).min),
    "and": (np.bitwise_and, lambda kind: -1 if kind == "i4" else EVERYBODY),
    "or": (np.bitwise_or, lambda kind: 0),
    "xor": (np.bitwise_xor, lambda kind: 0),
}


def key(v: np.ndarray) -> np.ndarray:
    """Return int32 keys in the order of the float32 bits `v`, -0 below +0; its own inverse."""
    signed = v.view(np.int32)
    return signed ^ ((signed >> 31) & 0x7FFFFFFF)


@register("redux", operands=3, waits=True)
def redux(c: Operands, ins: Instr) -> Callable[..., Any]:
    """redux.sync (9.7.13.10): add, min, max, and, or, xor of integers; min and max of f32."""
    op = mode_of(ins, *REDUCTIONS)
    floating = ins.mods[-1] == "f32"
    if floating and op not in ("min", "max"):
        raise PtxError(f"{ins.opcode}: f32 has .min and .max only (PTX ISA 9.7.13.10)")
    kind = "u4" if ins.mods[-1] in ("u32", "b32") else "i4"
    value = c.lanes_source(ins.operands[1], "u4" if floating else kind)
    members, put = Members(c, ins.operands[2]), c.dest(ins.operands[0], "u4" if floating else kind)
    function, start_of = REDUCTIONS[op]
    start = np.dtype(kind).type(start_of(kind))
    absolute, nan = "abs" in ins.mods, "NaN" in ins.mods

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        groups = members.meet(g, m, f)
        if groups is None:
            return False
        v = value(g).reshape(g.W, 1, LANES)
        if not floating:
            put(g, m, spread(function.reduce(np.where(groups, v, start), axis=2, dtype=kind), g))
            return True
        v = v & np.uint32(0x7FFFFFFF) if absolute else v
        isnan = v & np.uint32(0x7FFFFFFF) > 0x7F800000
        best = key(function.reduce(np.where(groups & ~isnan, key(v), start), axis=2)).view(
            np.uint32
        )
        none = (groups & isnan).any(2) if nan else ~(groups & ~isnan).any(2)
        put(g, m, spread(np.where(none, NAN, best), g))
        return True

    return run


@register("elect", operands=2, waits=True)
def elect(c: Operands, ins: Instr) -> Callable[..., Any]:
    """elect.sync (9.7.13.11): the lowest lane of the member mask leads."""
    first = ins.operands[0]
    target, flag = destinations(first) if isinstance(first, Pair) else (Sink(), first)
    members = Members(c, ins.operands[1])
    put, put_flag = c.dest(target, "u4"), c.dest(flag, "?")

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        groups = members.meet(g, m, f)
        if groups is None:
            return False
        leader = spread(groups.argmax(2), g)
        put(g, m, leader.astype(np.uint32))
        put_flag(g, m, np.tile(LANE, g.W) == leader)
        return True

    return run


@register("bar.warp", operands=1, waits=True)
def bar_warp(c: Operands, ins: Instr) -> Callable[..., Any]:
    """bar.warp.sync (9.7.13.2)."""
    members = Members(c, ins.operands[0])
    return lambda g, m, f: members.meet(g, m, f) is not None


@register("activemask", operands=1, waits=True)
def activemask(c: Operands, ins: Instr) -> Callable[..., Any]:
    """activemask (9.7.13.12)."""
    put = c.dest(ins.operands[0], "u4")

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        put(g, m, np.repeat(bits(g.by_warp(m)), LANES))
        return True

    return run
