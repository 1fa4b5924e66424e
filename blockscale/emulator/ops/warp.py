"""Instructions between the lanes of a warp (PTX ISA 9.7.9.5 to .7, 9.7.13): shfl, vote, match, redux, elect."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import PtxError
from ..gang import LANES
from ..syntax import Imm, Instr, Operand, Pair, Sink
from .core import converged, register

if TYPE_CHECKING:
    from ..compiler import Compiler
    from ..gang import Fragment, Gang

LANE = np.arange(LANES)


def needed(c: Compiler, op: Operand) -> Callable[[Gang, np.ndarray | None], np.ndarray | None]:
    """Return a function that gives the lanes a member mask names (None: all)."""
    if isinstance(op, Imm) and int(op.value) & 0xFFFFFFFF == 0xFFFFFFFF:
        return lambda g, m: None if m is None else np.repeat(g.by_warp(m).any(1), LANES)
    get = c.lanes_source(op, "u4")

    def lanes(g: Gang, m: np.ndarray | None) -> np.ndarray | None:
        masks = get(g).reshape(g.W, LANES)
        active = g.by_warp(m)
        member = np.zeros((g.W, LANES), bool)
        for w in np.flatnonzero(active.any(1)):
            for value in np.unique(masks[w][active[w]]):
                member[w] |= ((int(value) >> LANE) & 1).astype(bool)
        return member.reshape(-1)

    return lanes


@register("shfl", waits=True)
def shfl(c: Compiler, ins: Instr) -> Callable[..., Any]:
    """shfl.sync (9.7.9.6)."""
    mode = next((m for m in ins.mods if m in ("up", "down", "bfly", "idx")), None)
    if mode is None:
        raise PtxError(f"{ins.opcode}: no mode (.up .down .bfly .idx)")
    first = ins.operands[0]
    target, flag = (first.first, first.second) if isinstance(first, Pair) else (first, Sink())
    value, lane = c.lanes_source(ins.operands[1], "u4"), c.lanes_source(ins.operands[2], "u4")
    clamp = c.lanes_source(ins.operands[3], "u4")
    member = needed(c, ins.operands[4]) if len(ins.operands) > 4 else None
    put, put_flag = c.dest(target, "u4"), c.dest(flag, "?")

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        if m is not None and not converged(g, m, f, member(g, m) if member else None):
            return False
        own = np.tile(LANE, g.W)
        b, packed = lane(g).astype(np.int64) & 31, clamp(g).astype(np.int64)
        bound, segment = packed & 31, (packed >> 8) & 31
        top = (own & segment) | (bound & ~segment)
        low = own & segment
        if mode == "up":
            source, ok = own - b, (own - b) >= top
        elif mode == "down":
            source, ok = own + b, (own + b) <= top
        elif mode == "bfly":
            source, ok = own ^ b, (own ^ b) <= top
        else:
            source = low | (b & ~segment)
            ok = source <= top
        source = np.where(ok, source, own)
        base = np.repeat(np.arange(g.W) * LANES, LANES)
        values = value(g)
        put(g, m, values[base + source])
        put_flag(g, m, ok)
        return True

    return run


@register("vote", waits=True)
def vote(c: Compiler, ins: Instr) -> Callable[..., Any]:
    """vote.sync (9.7.13.8)."""
    mode = next(m for m in ins.mods if m in ("all", "any", "uni", "ballot"))
    flag = c.lanes_source(ins.operands[1], "?")
    member = needed(c, ins.operands[2]) if len(ins.operands) > 2 else None
    put = c.dest(ins.operands[0], "u4" if mode == "ballot" else "?")

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        if m is not None and not converged(g, m, f, member(g, m) if member else None):
            return False
        active = g.by_warp(m) & g.live.reshape(-1, LANES)
        p = flag(g).reshape(g.W, LANES)
        if mode == "ballot":
            bits = ((p & active).astype(np.uint64) << LANE.astype(np.uint64)).sum(1).astype(np.uint32)
            put(g, m, np.repeat(bits, LANES))
            return True
        every, some = (p | ~active).all(1), (p & active).any(1)
        result = {"all": every, "any": some, "uni": every | ~some}[mode]
        put(g, m, np.repeat(result, LANES))
        return True

    return run


@register("match", waits=True)
def match(c: Compiler, ins: Instr) -> Callable[..., Any]:
    """match.sync (9.7.13.9)."""
    first = ins.operands[0]
    target, flag = (first.first, first.second) if isinstance(first, Pair) else (first, Sink())
    kind = "u8" if ins.mods[-1] == "b64" else "u4"
    value, member = c.lanes_source(ins.operands[1], kind), needed(c, ins.operands[2])
    put, put_flag = c.dest(target, "u4"), c.dest(flag, "?")

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        if m is not None and not converged(g, m, f, member(g, m)):
            return False
        active = g.by_warp(m) & g.live.reshape(-1, LANES)
        v = value(g).reshape(g.W, LANES)
        same = (v[:, :, None] == v[:, None, :]) & active[:, None, :]
        bits = (same.astype(np.uint64) << LANE.astype(np.uint64)).sum(2).astype(np.uint32)
        if "all" in ins.mods:
            everybody = (same | ~active[:, None, :]).all(2)
            put(g, m, np.where(everybody, bits, 0).astype(np.uint32).reshape(-1))
            put_flag(g, m, everybody.reshape(-1))
        else:
            put(g, m, bits.reshape(-1))
        return True

    return run


@register("redux", waits=True)
def redux(c: Compiler, ins: Instr) -> Callable[..., Any]:
    """redux.sync (9.7.13.10): add, min, max, and, or, xor of integers; min and max of f32."""
    op = ins.mods[1]
    kind = {"s32": "i4", "f32": "f4"}.get(ins.mods[-1], "u4")
    value, member = c.lanes_source(ins.operands[1], kind), needed(c, ins.operands[2])
    put = c.dest(ins.operands[0], kind)
    low, high = (np.iinfo(kind).min, np.iinfo(kind).max) if kind != "f4" else (np.nan, np.nan)
    start = {"add": 0, "min": high, "max": low, "and": 0xFFFFFFFF, "or": 0, "xor": 0}[op]
    if op == "and" and kind == "i4":
        start = -1
    function = {
        "add": np.add, "min": np.fmin, "max": np.fmax, "and": np.bitwise_and,
        "or": np.bitwise_or, "xor": np.bitwise_xor,
    }[op]  # fmt: skip
    absolute, nan = "abs" in ins.mods, "NaN" in ins.mods

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        if m is not None and not converged(g, m, f, member(g, m)):
            return False
        active = g.by_warp(m) & g.live.reshape(-1, LANES)
        v = value(g).reshape(g.W, LANES)
        if absolute:
            v = np.abs(v)
        result = function.reduce(np.where(active, v, np.dtype(kind).type(start)), axis=1, dtype=kind)
        if kind == "f4":
            bad = (np.isnan(v) & active).any(1) if nan else np.isnan(result)
            result.view("u4")[bad] = 0x7FFFFFFF
        put(g, m, np.repeat(result, LANES))
        return True

    return run


@register("elect", waits=True)
def elect(c: Compiler, ins: Instr) -> Callable[..., Any]:
    """elect.sync (9.7.13.11): the lowest lane of the member mask leads."""
    first = ins.operands[0]
    target, flag = (first.first, first.second) if isinstance(first, Pair) else (Sink(), first)
    member = needed(c, ins.operands[1])
    put, put_flag = c.dest(target, "u4"), c.dest(flag, "?")

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        need = member(g, m)
        if m is not None and not converged(g, m, f, need):
            return False
        active = g.by_warp(m) & g.live.reshape(-1, LANES)
        if need is not None:
            active = active & need.reshape(-1, LANES)
        leader = active.argmax(1)
        put(g, m, np.repeat(leader, LANES).astype(np.uint32))
        put_flag(g, m, np.tile(LANE, g.W) == np.repeat(leader, LANES))
        return True

    return run


@register("bar.warp", "activemask", waits=True)
def bar_warp(c: Compiler, ins: Instr) -> Callable[..., Any]:
    """bar.warp.sync (9.7.13.2); activemask (9.7.13.12)."""
    if ins.base == "activemask":
        put = c.dest(ins.operands[0], "u4")

        def mask(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
            active = g.by_warp(m).astype(np.uint64) << LANE.astype(np.uint64)
            put(g, m, np.repeat(active.sum(1).astype(np.uint32), LANES))
            return True

        return mask
    member = needed(c, ins.operands[0])

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        return m is None or converged(g, m, f, member(g, m))

    return run
