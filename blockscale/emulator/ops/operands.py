"""Operands of instructions: how handlers and compiled units read and write them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import Any

import numpy as np

from blockscale.emulator.errors import PtxError
from blockscale.emulator.machine.gangs import Machine
from blockscale.emulator.machine.specials import special
from blockscale.emulator.ptx.program import Program
from blockscale.emulator.ptx.reader import literal_bits
from blockscale.emulator.ptx.syntax import (
    Imm,
    Not,
    Operand,
    Reg,
    Sink,
    Special,
    Sym,
)

Getter = Callable[[Any], Any]


@lru_cache(maxsize=1 << 14)
def code_of(text: str, name: str) -> CodeType:
    """Return the compiled ``text``, which tracebacks call ``name``."""
    return compile(text, name, "exec")


class Operands:
    """Gives what the operands of one program mean on one machine."""

    def __init__(self, program: Program, machine: Machine) -> None:
        self.program = program
        self.machine = machine
        self.names: dict[str, Any] = {}  # what the code that is being written calls by a name

    def reg(self, op: Operand) -> tuple[str, int]:
        """Return the (class, row) of a register operand."""
        if not isinstance(op, Reg):
            raise PtxError(f"{op} where the instruction wants a register")
        try:
            return self.program.regs[op.name]
        except KeyError:
            raise PtxError(f"register {op.name} is not declared") from None

    def made(self, write: Callable[[], str], name: str = "<operand>") -> Any:
        """Return the function ``made``, whose definition `write` returns.

        Its constants are numbered from the first on: other units and launches with the same text
        need not compile it again.
        """
        outer, self.names = self.names, {"special": special, "copyto": np.copyto}
        try:
            exec(code_of(write(), name), self.names)  # our own text
            return self.names.pop("made")
        finally:
            self.names = outer

    def constant(self, value: Any) -> str:
        """Return the name of a constant of the generated code."""
        name = f"k{len(self.names)}"
        self.names[name] = value
        return name

    def source_text(self, op: Operand, dtype: str) -> str:
        """Return an expression for operand `op` as NumPy `dtype`."""
        if isinstance(op, Not):
            return f"~{self.source_text(op.item, dtype)}"
        if isinstance(op, Imm):
            return self.constant(immediate(op, dtype))
        if isinstance(op, Reg):
            return self.register_text(op, dtype)
        if isinstance(op, Special):
            text = f"special(g, {self.constant(op.name)})"
            return f"{text}.astype(bool)" if dtype == "?" else words_as(text, dtype)
        if isinstance(op, Sym):
            space, offset = self.place(op)
            if dtype == "?":
                raise PtxError(f"{op.name} is an address, not a predicate")
            if space == "shared":
                offset &= 0xFFFFFFFF
                return words_as(f"(g.rank_bits + {self.constant(np.uint32(offset))})", dtype)
            bits = offset & ((1 << 8 * int(dtype[1])) - 1)
            return self.constant(np.dtype("u" + dtype[1]).type(bits).view(dtype))
        raise PtxError(f"operand {op} is not understood here")

    def register_text(self, op: Reg, dtype: str) -> str:
        """Return an expression for a source register; of a wider one the low bits (9.4.1)."""
        cls, row = self.reg(op)
        if cls == "16":
            raise PtxError(f"{op.name} is a 128-bit register, which this instruction does not take")
        if cls == "p" or dtype == "?":
            if cls != "p" or dtype != "?":
                raise PtxError(f"{op.name} is {'not ' if cls != 'p' else ''}a predicate")
            return f"g.p[{row}]"
        if int(dtype[1]) == int(cls):
            return f"g.{dtype}[{row}]"
        if int(dtype[1]) > int(cls):
            raise PtxError(f"{op.name} is narrower than the instruction's type")
        low = self.constant(np.dtype("u" + dtype[1]))
        return f"g.u{cls}[{row}].astype({low}).view({self.constant(np.dtype(dtype))})"

    def place(self, op: Sym) -> tuple[str, int]:
        """Return the space and the offset of a variable."""
        place = self.program.places.get(op.name) or self.machine.places.get(op.name)
        if place is None:
            raise PtxError(f"{op.name} is not a variable of this module")
        return place[0], place[1] + op.offset

    def source(self, op: Operand, dtype: str) -> Getter:
        """Return a function of the gang that gives operand `op` as `dtype` (array or scalar)."""
        return self.made(lambda: f"def made(g): return {self.source_text(op, dtype)}")

    def lanes_source(self, op: Operand, dtype: str) -> Getter:
        """Like `source`, but always an array over the lanes."""
        get = self.source(op, dtype)
        if isinstance(op, (Reg, Not)):
            return get

        def broadcast(g: Any) -> Any:
            value = np.asarray(get(g))
            return value if value.shape else np.broadcast_to(value, (g.n,))

        return broadcast

    def dest(self, op: Operand, dtype: str) -> Callable[[Any, Any, Any], None]:
        """Return a function (gang, mask or None, value) that writes register `op`."""
        if isinstance(op, Sink):
            return lambda g, m, value: None
        text = self.dest_text(op, dtype)
        both = f"copyto({text}, v) if m is None else copyto({text}, v, where=m)"
        return self.made(lambda: f"def made(g, m, v): {both}")

    def row(self, op: Operand, dtype: str) -> Getter:
        """Return a function of the gang that gives the row of a result; see `dest_text`."""
        return self.made(lambda: f"def made(g): return {self.dest_text(op, dtype)}")

    def dest_text(self, op: Operand, dtype: str) -> str:
        """Return an expression for the row that a result of `dtype` goes to; PTX widens it."""
        cls, row = self.reg(op)
        if dtype == "?" or cls == "p":
            if dtype != "?" or cls != "p":
                raise PtxError(f"{getattr(op, 'name', op)}: a predicate and a number do not mix")
            return f"g.p[{row}]"
        if cls == "16":
            raise PtxError("a 128-bit register where the instruction gives fewer bits")
        size = int(dtype[1])
        if size == int(cls):
            return f"g.{dtype}[{row}]"
        if size > int(cls):
            raise PtxError(f"{getattr(op, 'name', op)} is narrower than the result")
        kind = "i" if dtype[0] == "i" else "u"
        return f"g.{kind}{cls}[{row}]"


def words_as(text: str, dtype: str) -> str:
    """Return an expression for 32-bit words as `dtype`: as many bits, then that type's."""
    if dtype[1] != "4":
        text = f"{text}.astype('u{dtype[1]}')"
    return text if dtype[0] == "u" else f"{text}.view('{dtype}')"


def immediate(op: Imm, dtype: str) -> Any:
    """Return an immediate as a NumPy scalar of `dtype`."""
    if dtype == "?":
        return np.bool_(op.value != 0)
    size = int(dtype[1])
    kind = f"f{8 * size}" if dtype[0] == "f" and size > 2 else f"b{8 * size}"
    if op.kind == "int" and dtype[0] == "f":
        # An integer literal where a float is wanted is its value; nvcc prints 0f... instead.
        return np.dtype(dtype).type(op.value)
    bits = literal_bits(op, kind)
    return np.array(bits, f"u{size}").view(dtype)[()]
