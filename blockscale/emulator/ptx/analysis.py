"""What can be seen before a run: a program's traits, and results that are read too early.

Those are results of tcgen05.ld and of wgmma.
For tcgen05.ld the hardware's scoreboard delays such a read, so the machine gives the right value
and the finding is a warning; the PTX ISA (9.7.16.8.3) asks for tcgen05.wait::ld first.
Accumulators of wgmma must not be touched before wgmma.wait_group (9.7.15.7): an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from blockscale.emulator.ptx.program import Program, Unit, successors
from blockscale.emulator.ptx.reader import SIZES
from blockscale.emulator.ptx.syntax import Group, Instr, Mem, Not, Operand, Pair, Reg, Vec

ASYNC = ("tcgen05.ld", "wgmma.mma_async")
SIGNALS = ("mbarrier.arrive", "bar.sync", "bar.arrive", "barrier")
ASYNCHRONOUS = ("cp.", "mbarrier", "tcgen05", "wgmma", "st.async")
ELSEWHERE = {"global", "local", "param", "const"}  # state spaces that are not shared memory


@dataclass(frozen=True)
class Traits:
    """What a program uses, found before it runs; `granule` is the bytes of a shadow cell."""

    shared: bool
    tcgen05: bool
    asynchronous: bool
    granule: int
    cta_groups: dict[int, Instr]  # .cta_group of tcgen05 -> the first instruction with it

    @staticmethod
    def of(program: Program) -> Traits:
        """Return the traits of a program."""
        instrs = [i for u in program.units for i in u.everything]
        opcodes = {i.opcode for i in instrs}
        shared = any(place[0] == "shared" for place in program.places.values())
        tcgen05 = any(o.startswith("tcgen05") for o in opcodes)
        asynchronous = any(o.startswith(ASYNCHRONOUS) for o in opcodes)
        granule = min([16, *map(access_size, instrs)])
        groups: dict[int, Instr] = {}
        for ins in (i for i in instrs if i.opcode.startswith("tcgen05")):
            for mod in ins.mods:
                if mod.startswith("cta_group"):
                    groups.setdefault(int(mod[-1]), ins)
        return Traits(shared, tcgen05, asynchronous, granule, groups)


def access_size(ins: Instr) -> int:
    """Return the bytes of shared memory that an instruction touches at a time (16: or more)."""
    mods = ins.mods
    if ins.base in ("ld", "st", "atom", "red") and not ELSEWHERE & set(mods):
        size = next((SIZES[m] for m in reversed(mods) if m in SIZES), 16)
        count = next((int(m[1:]) for m in mods if m in ("v2", "v4", "v8")), 1)
        return min(size * count, 16)
    if ins.opcode.startswith("cp.async") and "bulk" not in ins.opcode:
        return 4
    if ins.opcode.startswith("tcgen05.alloc"):
        return 4
    if ins.opcode.startswith(("mbarrier", "stmatrix", "st.async")):
        return 8
    return 16


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
