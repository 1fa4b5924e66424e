"""atom and red (PTX ISA 9.7.13.13, .14): lanes one after the other, in the seed's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blockscale.emulator import alu
from blockscale.emulator.errors import IllegalOperation, PtxError
from blockscale.emulator.machine.gangs import Gang
from blockscale.emulator.machine.memory import misaligned
from blockscale.emulator.machine.watch import GPU
from blockscale.emulator.ops.core import (
    address,
    known_modifiers,
    pick,
    register,
    type_of,
    vector_of,
    window,
)
from blockscale.emulator.ops.memory.loadstore import SCOPES, Space, effective_space, rows, values_of
from blockscale.emulator.ops.memory.sync import acquire, release
from blockscale.emulator.ops.operands import Operands
from blockscale.emulator.ptx.reader import SIZES
from blockscale.emulator.ptx.syntax import Instr, Operand, Sink

OPS = {"add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas"}
MODIFIERS = OPS | SCOPES | {"relaxed", "acquire", "release", "acq_rel", "noftz"}
FLOATS = {"f16", "f16x2", "bf16", "bf16x2", "f32", "f64"}
Apply = Callable[[np.ndarray, np.ndarray, Any], np.ndarray]
# Where nobody asks for the old values and the order does not matter, or is kept by ufunc.at.
AT: dict[str, np.ufunc] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


def operation(ins: Instr) -> tuple[str, str]:
    """Return (operation, type modifier)."""
    op = next((m for m in ins.mods if m in OPS), None)
    if op is None:
        raise PtxError(f"{ins.opcode} has no atomic operation: one of .{', .'.join(sorted(OPS))}")
    kind = ins.mods[-1]
    if kind not in SIZES:
        raise PtxError(f"{ins.opcode} has no type")
    if op in ("inc", "dec") and kind != "u32":
        raise PtxError(f"{ins.opcode}: .{op} has type .u32 only (PTX ISA 9.7.13.13)")
    return op, kind


def function(op: str, kind: str, flush: bool = False) -> Apply:
    """Return f(old, b, c) on unsigned items of the type; `flush`: subnormals become zero."""
    size = SIZES[kind]
    raw = f"u{size}"
    if op == "exch":
        return lambda old, b, c: b
    if size == 16:
        return _wide(op)
    if op == "cas":
        return lambda old, b, c: np.where(old == b, c, old)
    one = np.dtype(raw).type(1)
    if op == "inc":
        return lambda old, b, c: np.where(old >= b, 0, old + one).astype(raw)
    if op == "dec":
        return lambda old, b, c: np.where((old == 0) | (old > b), b, old - one).astype(raw)
    opcode = f"{op}.{'b' + str(8 * size) if op in ('and', 'or', 'xor') else kind}"
    if op == "add" and kind in FLOATS:
        opcode = f"add.rn{'.ftz' if flush else ''}.{kind}"
    scalar = alu.lookup(opcode, 1)
    if scalar is None:
        raise PtxError(f"no atomic {op} of type .{kind}")
    ins, out = scalar.ins, scalar.outs[0]

    def run(old: np.ndarray, b: np.ndarray, c: Any) -> np.ndarray:
        return np.asarray(scalar.fn(old.view(ins[0]), b.view(ins[1]))).view(out).view(raw)

    return run


def _wide(op: str) -> Apply:
    if op != "cas":
        raise PtxError(f"no 128-bit atomic {op}: .exch and .cas only (PTX ISA 9.7.13.13)")

    def cas(old: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        pairs = old.view("u8").reshape(-1, 2)
        same = (pairs == b.view("u8").reshape(-1, 2)).all(1)
        return np.where(same[:, None], c.view("u8").reshape(-1, 2), pairs).reshape(-1).view("V16")

    return cas


def ranks(spot: np.ndarray) -> list[np.ndarray]:
    """Return index arrays: the first item of every address, the second of every address, ..."""
    order = np.argsort(spot, kind="stable")
    ordered = spot[order]
    fresh = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    if fresh.all():
        return [order]
    start = np.maximum.accumulate(np.where(fresh, np.arange(len(spot)), 0))
    rank = np.arange(len(spot)) - start
    by_rank = order[np.argsort(rank, kind="stable")]
    return np.split(by_rank, np.cumsum(np.bincount(rank))[:-1])


class Atomic:
    """One atomic operation of one type on one state space."""

    def __init__(self, c: Operands, ins: Instr, mem: Operand, wanted: bool) -> None:
        known_modifiers(ins, MODIFIERS)
        self.op, self.kind = operation(ins)
        dtype, self.size = type_of(ins)
        self.count = vector_of(ins)
        self.raw = "u" + dtype[1:] if self.size < 16 else "V16"
        space = effective_space(c, ins, mem)
        self.space = Space(c, space, self.size, sync=True)
        self.f = function(self.op, self.kind)
        self.flushing = self.f
        if self.op == "add" and self.kind == "f32":
            self.flushing = function(self.op, self.kind, flush=True)
        self.at: np.ufunc | None = None
        if not wanted and self.size in (4, 8) and self.kind[0] in "usb" and self.kind[1] != "f":
            self.at = AT.get(self.op)
        self.exact = f"{'i' if self.kind[0] == 's' else 'u'}{self.size}"

    def chosen(self, where: np.ndarray) -> Apply:
        """Return the function for the space: f32 sums in global memory flush subnormals."""
        if self.flushing is self.f:
            return self.f
        if self.space.space == "":
            return self.flushing if (window(where) == 0).all() else self.f
        return self.flushing if self.space.space == "global" else self.f

    def check(self, lanes: np.ndarray, where: np.ndarray) -> None:
        """Refuse what atomics do not reach, and vectors that are not aligned as a whole."""
        space, whole = self.space.space, self.size * self.count
        if space in ("local", "param", "const") or (space == "" and (window(where) > 1).any()):
            raise IllegalOperation(
                "an atomic on local, parameter or constant memory: they reach .global and .shared "
                "only (PTX ISA 9.7.13.13)",
                lane=int(lanes[0]),
            )
        if self.count > 1 and (where & np.uint64(whole - 1)).any():
            at = int(np.flatnonzero(where & np.uint64(whole - 1))[0])
            raise IllegalOperation(misaligned(int(where[at]), whole), lane=int(lanes[at]))

    def apply(
        self,
        g: Gang,
        lanes: np.ndarray,
        spot: np.ndarray,
        values: np.ndarray,
        more: np.ndarray | None,
    ) -> np.ndarray:
        """Apply all lanes, one after the other where addresses repeat; return the old values."""
        more = values if more is None else more
        cell = self.cells(g, lanes, spot)
        _, first, which = np.unique(cell, return_index=True, return_inverse=True)
        places = spot[first]
        cells = self.space.read(g, lanes[first], places)
        f, values = self.chosen(spot), np.ascontiguousarray(values)
        old = cells[which]
        rest = np.delete(np.arange(len(lanes)), first)
        self.space.note(g, lanes[rest], spot[rest], False)
        if len(places) == len(lanes):
            new = cells.copy()
            new[which] = f(old, values, more)
        elif self.at is not None:
            new = cells.copy()
            self.at.at(new.view(self.exact), which, values.view(self.exact))
        elif (f(old, values, more) == old).all():  # nobody changes anything: polling
            new = cells
        else:
            new = self.in_turn(g, cells, which, f, values, more, old)
        if (new != cells).any():  # a compare-and-swap that fails writes nothing
            self.space.write(g, lanes[first], places, new)
            self.space.note(g, lanes[rest], spot[rest], True)
        elif self.op != "cas":  # what changes nothing is written all the same
            self.space.note(g, lanes, spot, True)
        return old

    def cells(self, g: Gang, lanes: np.ndarray, spot: np.ndarray) -> np.ndarray:
        """Return a number per memory cell: a shared address means another one in every cluster."""
        if self.space.space == "global":
            return spot
        own = spot | (g.lane_slot0[lanes].astype(np.uint64) + np.uint64(1)) << np.uint64(48)
        return own if self.space.space else np.where(window(spot) == 1, own, spot)

    def in_turn(
        self,
        g: Gang,
        cells: np.ndarray,
        which: np.ndarray,
        f: Apply,
        values: np.ndarray,
        more: np.ndarray,
        old: np.ndarray,
    ) -> np.ndarray:
        """Return the cells after the lanes came one by one, as the seed says; fill `old`."""
        order = np.arange(len(which))
        if g.machine.seed:
            order = g.machine.rng.permutation(order)
        new = cells.copy()
        for part in ranks(which[order]):
            now = order[part]
            old[now] = new[which[now]]
            new[which[now]] = f(old[now], values[now], more[now])
        return new


def build(
    c: Operands, ins: Instr, target: Operand, rest: tuple[Operand, ...]
) -> Callable[..., None]:
    """Return the handler of an atomic with destination `target`."""
    wanted = not isinstance(target, Sink)
    if len(rest) < (3 if "cas" in ins.mods else 2):
        raise PtxError(f"{ins.opcode} has too few operands: an address and its values")
    atomic = Atomic(c, ins, rest[0], wanted)
    count, raw, size = atomic.count, atomic.raw, atomic.size
    at = address(c, rest[0])
    outs = rows(c, target, raw) if wanted else [None] * count
    b = values_of(c, rest[1], raw, size)
    third = values_of(c, rest[2], raw, size) if atomic.op == "cas" else None
    if len(b) != count or len(outs) != count:
        raise PtxError(f"{ins.opcode} wants {count} registers and has {len(b)} and {len(outs)}")

    def run(g: Gang, m: np.ndarray | None) -> None:
        lanes = g.lanes(m)
        where = pick(at(g), m, lanes)
        atomic.check(lanes, where)
        for i, put in enumerate(outs):
            spot = where + np.uint64(i * size) if count > 1 else where
            values = pick(b[i](g), m, lanes)
            more = pick(third[i](g), m, lanes) if third else None
            old = atomic.apply(g, lanes, spot, values, more)
            if put is not None:
                put(g, None if m is None else lanes, old)
        release(g, lanes, where)  # it tells of itself, too
        if g.machine.watch is not None:
            g.machine.watch.give(g, lanes, where, ins.mods, GPU)
        acquire(g, lanes, where)
        if g.machine.watch is not None:
            g.machine.watch.take(g, lanes, where, ins.mods, GPU)

    return run


@register("atom", operands=(3, 5))
def atom(c: Operands, ins: Instr) -> Callable[..., None]:
    """atom (9.7.13.13)."""
    return build(c, ins, ins.operands[0], ins.operands[1:])


@register("red", operands=(2, 4))
def red(c: Operands, ins: Instr) -> Callable[..., None]:
    """red (9.7.13.14); red.async: see `copies.remote`."""
    return build(c, ins, Sink(), ins.operands)


@register("multimem")
def multimem(c: Operands, ins: Instr) -> Callable[..., None]:
    """multimem.ld_reduce, .st, .red (9.7.9.16): memory of several devices; not modelled."""
    raise PtxError(
        f"{ins.opcode} works on memory of several devices (PTX ISA 9.7.9.16); the emulator has "
        "one: use ld, st or red"
    )
