"""atom and red (PTX ISA 9.7.13.13, .14): lanes one after the other, in an order within the rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import alu
from ..errors import PtxError
from ..syntax import Instr, Operand, Sink
from .core import address, pick, register, type_of, vector_of
from .loadstore import Space, effective_space, rows, values_of
from .sync import acquire, release

if TYPE_CHECKING:
    from ..compiler import Compiler
    from ..gang import Gang

OPS = {"add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas"}


def operation(ins: Instr) -> tuple[str, str]:
    """Return (operation, type modifier)."""
    op = next((m for m in ins.mods if m in OPS), None)
    if op is None:
        raise PtxError(f"{ins.opcode} has no atomic operation")
    return op, ins.mods[-1]


def function(op: str, kind: str) -> Callable[..., np.ndarray]:
    """Return f(old, b, c) on unsigned items of the type."""
    size = type_size(kind)
    raw = f"u{size}"
    if op == "exch":
        return lambda old, b, c: b
    if op == "cas":
        return lambda old, b, c: np.where(old == b, c, old)
    if op == "inc":
        return lambda old, b, c: np.where(old >= b, 0, old + np.dtype(raw).type(1)).astype(raw)
    if op == "dec":
        return lambda old, b, c: np.where((old == 0) | (old > b), b, old - np.dtype(raw).type(1)).astype(raw)
    opcode = f"{op}.{'b' + str(8 * size) if op in ('and', 'or', 'xor') else kind}"
    if op == "add" and kind in ("f16", "f16x2", "bf16", "bf16x2", "f32", "f64"):
        opcode = f"add.rn.{kind}"
    scalar = alu.lookup(opcode, 1)
    if scalar is None:
        raise PtxError(f"no atomic {op} of type .{kind}")
    ins, out = scalar.ins, scalar.outs[0]

    def run(old: np.ndarray, b: np.ndarray, c: np.ndarray | None) -> np.ndarray:
        return np.asarray(scalar.fn(old.view(ins[0]), b.view(ins[1]))).view(out).view(raw)

    return run


def type_size(kind: str) -> int:
    """Return the bytes of an atomic type."""
    from ..reader import SIZES

    return SIZES[kind]


def build(c: Compiler, ins: Instr, target: Operand, rest: tuple[Operand, ...]) -> Callable[..., None]:
    """Return the handler of an atomic with destination `target`."""
    op, kind = operation(ins)
    dtype, size = type_of(ins)
    count = vector_of(ins)
    raw = "u" + dtype[1:] if size < 16 else "V16"
    mem = rest[0]
    at = address(c, mem)
    outs = rows(c, target, raw) if not isinstance(target, Sink) else []
    b = values_of(c, rest[1], raw, size)
    third = values_of(c, rest[2], raw, size) if op == "cas" else None
    f = function(op, kind) if size < 16 else _wide(op)
    space = Space(c, effective_space(c, ins, mem), size * count, sync=True)
    one = Space(c, space.space, size, sync=True)

    def run(g: Gang, m: np.ndarray | None) -> None:
        lanes = g.lanes(m)
        where = pick(at(g), m, lanes)
        release(g, lanes, where)
        for i in range(count):
            spot = where + np.uint64(i * size) if count > 1 else where
            values = pick(b[i](g), m, lanes)
            more = pick(third[i](g), m, lanes) if third else None
            old = serial(g, one, lanes, spot, values, more)
            if outs and outs[i] is not None:
                outs[i](g, None if m is None else lanes, old)  # type: ignore[misc]
        acquire(g, lanes, where)
        g.machine.progress += 1

    def serial(
        g: Gang, one: Space, lanes: np.ndarray, spot: np.ndarray, values: np.ndarray, more: np.ndarray | None
    ) -> np.ndarray:
        """Apply lane by lane where addresses repeat, all at once where they do not."""
        old = np.empty(len(lanes), raw)
        left = np.arange(len(lanes))
        if g.machine.seed:
            left = g.machine.rng.permutation(left)
        while len(left):
            _, first = np.unique(spot[left], return_index=True)
            now = left[first]
            before = one.read(g, lanes[now], spot[now])
            old[now] = before
            new = f(before, np.ascontiguousarray(values[now]), None if more is None else more[now])
            one.write(g, lanes[now], spot[now], new)
            if len(first) == len(left):
                break
            keep = np.ones(len(left), bool)
            keep[first] = False
            left = left[keep]
        return old

    return run


def _wide(op: str) -> Callable[..., np.ndarray]:
    if op == "exch":
        return lambda old, b, c: b
    if op == "cas":

        def cas(old: np.ndarray, b: np.ndarray, c: Any) -> np.ndarray:
            pairs = old.view("u8").reshape(-1, 2)
            same = (pairs == b.view("u8").reshape(-1, 2)).all(1)
            return np.where(same[:, None], c.view("u8").reshape(-1, 2), pairs).reshape(-1).view("V16")

        return cas
    raise PtxError(f"no 128-bit atomic {op}")


@register("atom")
def atom(c: Compiler, ins: Instr) -> Callable[..., None]:
    """atom (9.7.13.13)."""
    return build(c, ins, ins.operands[0], ins.operands[1:])


@register("red")
def red(c: Compiler, ins: Instr) -> Callable[..., None]:
    """red (9.7.13.14), and red.async (9.7.13.15.…): see `bulk`."""
    if ins.mods[:1] == ["async"]:
        from .bulk import red_async

        return red_async(c, ins)
    return build(c, ins, Sink(), ins.operands)
