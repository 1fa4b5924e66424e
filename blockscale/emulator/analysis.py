"""What can be seen before a run: results of tcgen05.ld and of wgmma that are read too early.

For tcgen05.ld the hardware's scoreboard delays such a read, so the machine gives the right value
and the finding is a warning; the PTX ISA (9.7.16.8.3) asks for tcgen05.wait::ld first.
Accumulators of wgmma must not be touched before wgmma.wait_group (9.7.15.7): an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .flow import Unit, successors
from .syntax import Group, Instr, Mem, Not, Operand, Pair, Reg, Vec

ASYNC = ("tcgen05.ld", "wgmma.mma_async")
SIGNALS = ("mbarrier.arrive", "bar.sync", "bar.arrive", "barrier")


class EarlyRead(NamedTuple):
    """An instruction in `unit` that reads a result of line `load_line` before the wait for it.

    Without a register: one that signals other warps while that load may still read tensor memory.
    """

    unit: int
    instr: Instr
    register: str
    load_line: int


def registers(op: Operand) -> Iterator[str]:
    """Yield the names of the registers in an operand."""
    if isinstance(op, Reg):
        yield op.name
    elif isinstance(op, (Vec, Group)):
        for item in op.items:
            yield from registers(item)
    elif isinstance(op, Pair):
        yield from registers(op.first)
        yield from registers(op.second)
    elif isinstance(op, Not):
        yield from registers(op.item)
    elif isinstance(op, Mem):
        yield from registers(op.base)
        for item in op.rest:
            yield from registers(item)


STORES = ("st", "stmatrix", "red", "tcgen05.st", "cp", "mbarrier.arrive", "bra", "brx")


def sources(ins: Instr) -> Iterator[str]:
    """Yield the registers that an instruction reads."""
    reads_first = ins.opcode.startswith(STORES) or not ins.operands
    first = 0 if reads_first or isinstance(ins.operands[0], Mem) else 1
    for op in ins.operands[first:]:
        yield from registers(op)
    if ins.guard is not None:
        yield ins.guard[0].name


def forget(pending: dict[str, int], line: int) -> None:
    """Take the registers of the load at `line` out of `pending`."""
    for name in [n for n, at in pending.items() if at == line]:
        del pending[name]


def early_reads(units: list[Unit]) -> list[EarlyRead]:
    """Return the reads of results that some path reaches without the wait that belongs to them."""
    if not any(u.instr is not None and u.instr.opcode.startswith(ASYNC) for u in units):
        return []
    entry: list[dict[str, int]] = [{} for _ in units]
    found: dict[tuple[int, str], EarlyRead] = {}
    todo = list(range(len(units)))
    while todo:
        index = todo.pop()
        unit, pending = units[index], dict(entry[index])
        for ins in unit.everything:
            if ins.opcode.startswith(("tcgen05.wait::ld", "wgmma.wait_group")):
                pending.clear()
                continue
            wgmma = ins.opcode.startswith("wgmma")  # in order with each other
            for name in () if wgmma else sources(ins):
                if name in pending:
                    read = EarlyRead(index, ins, name, pending[name])
                    found.setdefault((ins.line, ins.opcode), read)
                    forget(pending, read.load_line)  # the scoreboard has waited for all of it
            if ins.opcode.startswith(SIGNALS):
                for line in sorted(set(pending.values())):
                    read = EarlyRead(index, ins, "", line)
                    found.setdefault((ins.line, ins.opcode), read)
            if ins.opcode.startswith(ASYNC):
                for name in registers(ins.operands[0]):
                    pending[name] = ins.line
        for following in successors(unit):
            if following >= 0 and not pending.keys() <= entry[following].keys():
                entry[following].update(pending)
                todo.append(following)
    return list(found.values())
