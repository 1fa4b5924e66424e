"""Units to Python: straight-line code over register rows, compiled once per unit and kept.

A unit becomes two functions of (gang, mask): one for the case that every lane takes part, which
writes straight into register rows, and one that writes under the mask.  Scalar instructions are
calls of NumPy functions (`alu`); everything else is a handler (`ops`), a closure over its
operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blockscale.emulator import alu, ops
from blockscale.emulator.errors import EmulationError, Place, PtxError
from blockscale.emulator.machine.grid import LANES
from blockscale.emulator.ops.core import count_operands
from blockscale.emulator.ops.operands import Operands
from blockscale.emulator.ptx.program import Unit
from blockscale.emulator.ptx.reader import SIZES, literal_bits
from blockscale.emulator.ptx.syntax import (
    Imm,
    Instr,
    Operand,
    Pair,
    Reg,
    Sink,
    Vec,
    items_of,
)

Getter = Callable[[Any], Any]


class Compiler(Operands):
    """Makes the functions of one program on one machine."""

    def compile(self, unit: Unit, full: bool) -> Callable[[Any, Any], None]:
        """Return the function of a unit's straight-line part."""

        def write() -> str:
            lines = []
            for ins in unit.instrs:
                try:
                    lines += self.lines(ins, full)
                except EmulationError as error:
                    raise error.at(
                        Place(kernel=self.program.name, line=ins.line, opcode=ins.opcode)
                    ) from None
            body = "\n ".join(lines) or "pass"
            return f"def made(g, m):\n {body}\n"

        return self.made(write, "<unit>")

    def lines(self, ins: Instr, full: bool) -> list[str]:
        """Return the statements of one instruction."""
        mask, before = ("None" if full else "m"), []
        if ins.guard is not None:
            cls, row = self.reg(ins.guard[0])
            if cls != "p":
                raise PtxError(f"the guard {ins.guard[0].name} is not a predicate")
            guard = f"{'~' if ins.guard[1] else ''}g.p[{row}]"
            before = [f"w = {guard if full else f'm & {guard}'}"]
            mask = "w"
        if ins.base == "mov" and not ins.opcode.startswith("movm"):
            return before + self.move(ins, mask)
        count = 2 if ins.operands and isinstance(ins.operands[0], Pair) else 1
        scalar = alu.lookup(ins.opcode, count, self.sources(ins))
        if scalar is not None:
            return before + self.scalar(ins, scalar, mask)
        handler = self.constant(self.handler(ins))
        line = self.constant(ins)
        before.append(f"g.ins = {line}")
        if ins.guard is not None:
            return [*before, f"if w.any(): {handler}(g, w)"]
        return [*before, f"{handler}(g, {mask})"]

    @staticmethod
    def sources(ins: Instr) -> int:
        """Return the number of source operands, the items of vectors one by one."""
        return sum(len(items_of(o)) for o in ins.operands[1:])

    def handler(self, ins: Instr) -> Callable[..., Any]:
        """Return the handler of an instruction that is not scalar."""
        build = ops.find(ins)
        if build is None:
            raise PtxError(
                f"instruction {ins.opcode} is not modelled; see blockscale/emulator/ops for those "
                "that are"
            )
        return build(self, ins)

    def scalar(self, ins: Instr, f: alu.Alu, mask: str) -> list[str]:
        """Return the statements of a scalar instruction."""
        count_operands(ins, 1 + bool(f.ins), 99)
        first = ins.operands[0]
        dests = [first.first, first.second] if isinstance(first, Pair) else [first]
        sources = [i for o in ins.operands[1:] for i in items_of(o)]
        if len(sources) != len(f.ins):
            raise PtxError(f"{ins.opcode} takes {len(f.ins)} source operands, not {len(sources)}")
        texts = [self.source_text(o, d) for o, d in zip(sources, f.ins, strict=True)]
        check = []
        if f.divides:
            check = [f"g.ins = {self.constant(ins)}"]
            check += [f"{self.constant(division_by_zero)}(g, {mask}, {texts[-1]})"]
        if f.reads_cc:
            texts.append("g.cc")
        call = f"{self.constant(f.fn)}({', '.join(texts)}"
        where = "" if mask == "None" else f", where={mask}"
        simple = len(dests) == 1 and not f.writes_cc and isinstance(dests[0], Reg)
        if simple and f.ufunc and len(f.outs) == 1:
            target = self.dest_text(dests[0], f.outs[0])
            if target.startswith(f"g.{'p' if f.outs[0] == '?' else f.outs[0]}["):
                return [f"{call}, out={target}{where})"]
        lines = [*check, f"r = {call})"]
        several = len(f.outs) > 1 or f.writes_cc
        values = [f"r[{i}]" for i in range(len(dests))] if several else ["r"]
        for item, kind, value in zip(dests, f.outs, values, strict=False):
            if isinstance(item, Sink):
                continue
            target = self.dest_text(item, kind)
            if kind[0] == "f" and not target.startswith(f"g.{kind}["):
                value = f"{value}.view('u{kind[1]}')"
            lines.append(f"copyto({target}, {value}{where})")
        if f.writes_cc:
            lines.append(f"copyto(g.cc, r[-1]{where})")
        return lines

    def move(self, ins: Instr, mask: str) -> list[str]:
        """Return the statements of ``mov``: copies, addresses, packing and unpacking (9.7.9.1)."""
        count_operands(ins, 2, 2)
        kind = ins.mods[-1] if ins.mods else ""
        if kind not in SIZES:
            raise PtxError(f"{ins.opcode} ends in no type; write e.g. mov.b32")
        target, value = ins.operands
        where = "" if mask == "None" else f", where={mask}"
        if kind == "pred":
            return [f"copyto({self.dest_text(target, '?')}, {self.source_text(value, '?')}{where})"]
        size = SIZES[kind]
        if isinstance(value, Vec):
            return self.pack(target, value, size, where)
        if isinstance(target, Vec):
            return self.unpack(target, value, size, where)
        if size == 16:
            (_, a), (_, b) = self.reg(target), self.reg(value)
            return [f"copyto(g.u8[{a + i}], g.u8[{b + i}]{where})" for i in range(2)]
        if isinstance(target, Sink):
            return ["pass"]
        dtype = f"u{size}"
        if isinstance(value, Imm):
            bits = literal_bits(value, kind if kind in ("f32", "f64") else f"b{8 * size}")
            text = self.constant(np.dtype(dtype).type(bits))
        else:
            text = self.source_text(value, dtype)
        return [f"copyto({self.dest_text(target, dtype)}, {text}{where})"]

    def parts(self, op: Operand, size: int, count: int) -> list[str]:
        """Return expressions for the `count` parts of a register of `size` bytes, low first."""
        check_parts(size, count)
        cls, row = self.reg(op)
        if cls == "16":
            per = count // 2
            part = 16 // count
            if part == 8:
                return [f"g.u8[{row}]", f"g.u8[{row + 1}]"]
            return [
                f"g.u8[{row + i // per}].view('u{part}')[{i % per}::{per}]" for i in range(count)
            ]
        if int(cls) != size:
            raise PtxError("a vector move between registers of other sizes")
        return [f"g.u{cls}[{row}].view('u{size // count}')[{i}::{count}]" for i in range(count)]

    def pack(self, target: Operand, value: Vec, size: int, where: str) -> list[str]:
        """Return the statements of ``mov.b64 d, {a, b}`` and the like."""
        count = len(value.items)
        places = self.parts(target, size, count)
        part = size // count
        lines = []
        items = [f"t{i}" for i in range(count)]
        for name, item in zip(items, value.items, strict=True):
            text = self.source_text(item, f"u{part}")
            lines.append(f"{name} = {text}")
        for name, place in zip(items, places, strict=True):
            lines.append(f"copyto({place}, {name}{where})")
        return lines

    def unpack(self, target: Vec, value: Operand, size: int, where: str) -> list[str]:
        """Return the statements of ``mov.b64 {a, b}, s`` and the like."""
        count = len(target.items)
        check_parts(size, count)
        part = f"u{size // count}"
        if not isinstance(value, Reg):
            lines = [f"t = {self.source_text(value, f'u{size}')}"]
            bits = 8 * size // count
            for i, item in enumerate(target.items):
                if not isinstance(item, Sink):
                    text = f"(t >> {i * bits}).astype('{part}')"
                    lines.append(f"copyto({self.dest_text(item, part)}, {text}{where})")
            return lines
        lines = []
        for item, place in zip(target.items, self.parts(value, size, count), strict=True):
            if not isinstance(item, Sink):
                lines.append(f"copyto({self.dest_text(item, part)}, {place}{where})")
        return lines


def check_parts(size: int, count: int) -> None:
    """Refuse vectors that ``mov`` does not pack into `size` bytes or unpack (9.7.9.1)."""
    if count not in (2, 4) or size < count:
        raise PtxError(f"mov of {8 * size} bits takes no vector of {count} (PTX ISA 9.7.9.1)")


def division_by_zero(g: Any, mask: np.ndarray | None, divisor: Any) -> None:
    """Say that a divisor is 0, where one is (PTX ISA 9.7.1: div)."""
    zero = np.broadcast_to(np.asarray(divisor) == 0, (g.n,))
    if mask is not None:
        zero = zero & mask
    if zero.any():
        lane = int(zero.argmax())
        g.machine.hazards.add(
            "division by zero", "warning",
            f"the divisor of {g.ins.opcode} is 0: the result is an unspecified value of the "
            "machine (PTX ISA 9.7.1.8); here all bits are 1, as the code of ptxas gives it; test "
            "the divisor, or see that nobody reads the result",
            line=g.ins.line, warp=int(g.warps[lane // LANES]), lane=lane % LANES,
        )  # fmt: skip
