"""One kernel made ready to run: calls inlined, variables placed, control flow cut into units.

A *unit* is a run of instructions that nothing can interrupt, and one tail: fall through, branch,
leave, or one instruction that may have to wait (a barrier, a fence between warps, ...).  A unit's
number is the program counter of the machine.  Divergent lanes meet again at the immediate
post-dominator of the branch, which is where hardware's convergence barriers are put too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .errors import Place, PtxError
from .flow import Unit, find_meeting_points
from .syntax import (
    Function,
    Group,
    Instr,
    Label,
    Mem,
    Module,
    Not,
    Operand,
    Pair,
    Reg,
    Sym,
    Var,
    Vec,
)

RESERVED_SHARED = 1024  # bytes at the start of a CTA's shared window that the system keeps
IGNORED_CALLS = {"vprintf", "__assertfail"}


@dataclass
class Program:
    """A kernel: units, register classes and where its variables lie."""

    name: str
    units: list[Unit]
    regs: dict[str, tuple[str, int]]  # register -> (class, row); classes "p", 1, 2, 4, 8 bytes
    counts: dict[str, int]
    params: list[Var]
    param_offsets: list[int]
    param_bytes: int
    places: dict[
        str, tuple[str, int]
    ]  # variable -> (space, offset); global ones are added at launch
    static_shared: int
    local_bytes: int
    module: Module
    directives: dict[str, list[int]]


def link(module: Module, entry: str | None) -> Program:
    """Return kernel `entry` of `module` as a program."""
    kernel = module.entry(entry)
    flat = _Flat(module)
    body = flat.expand(kernel, "", {})
    places = dict(flat.places)
    offset, offsets = 0, []
    for param in kernel.params:
        assert isinstance(param, Var)
        offset = -(-offset // param.align) * param.align
        offsets.append(offset)
        places[param.name] = ("kernel param", offset)
        offset += param.size
    static = place_shared(module, flat.shared, places)
    regs, counts = classes(flat.regs)
    units = cut(body, flat.tables, kernel.name)
    find_meeting_points(units)
    return Program(
        kernel.name, units, regs, counts, [p for p in kernel.params if isinstance(p, Var)], offsets,
        offset, places, static, flat.local, module, kernel.directives,
    )  # fmt: skip


def place_shared(module: Module, own: list[Var], places: dict[str, tuple[str, int]]) -> int:
    """Place static shared variables in order of declaration, dynamic ones behind; return the end."""
    offset = RESERVED_SHARED
    shared = [v for v in module.variables.values() if v.space == "shared"] + own
    for var in shared:
        if not var.extern:
            offset = -(-offset // var.align) * var.align
            places[var.name] = ("shared", offset)
            offset += var.size
    dynamic = offset
    for var in shared:
        if var.extern:
            dynamic = max(dynamic, -(-offset // var.align) * var.align)
    for var in shared:
        if var.extern:
            places[var.name] = ("shared", dynamic)
    return dynamic


def classes(kinds: dict[str, str]) -> tuple[dict[str, tuple[str, int]], dict[str, int]]:
    """Return each register's (class, row) and the number of rows of each class."""
    from .reader import SIZES

    regs, counts = {}, {"p": 0, "1": 0, "2": 0, "4": 0, "8": 0}
    for name, kind in kinds.items():
        cls = "p" if kind == "pred" else str(SIZES[kind])
        rows = 1
        if cls == "16":
            cls, rows = "8", 2
            regs[name] = ("16", counts["8"])
        else:
            regs[name] = (cls, counts[cls])
        counts[cls] += rows
    return regs, counts


class _Flat:
    """A function with every call expanded in place."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.regs: dict[str, str] = {}
        self.places: dict[str, tuple[str, int]] = {}
        self.shared: list[Var] = []
        self.tables: dict[str, list[str]] = {}
        self.local = 0
        self.calls = 0
        self.stack: list[str] = []

    def new_local(self, name: str, var: Var) -> None:
        align = max(var.align, 16)
        self.local = -(-self.local // align) * align
        self.places[name] = ("local", self.local)
        self.local += max(var.size, 1)

    def expand(self, fn: Function, tag: str, bound: dict[str, Operand]) -> list[Instr | Label]:
        if fn.name in self.stack:
            raise PtxError(
                f"{fn.name} calls itself ({' -> '.join([*self.stack, fn.name])}); calls are expanded in "
                "place, so recursion is not modelled: write it as a loop"
            )
        self.stack.append(fn.name)
        names: dict[str, Operand] = dict(bound)
        for reg, kind in fn.regs.items():
            self.regs[reg + tag] = kind
        for var in fn.variables.values():
            if var.space == "shared":
                unique = f"{fn.name}.{var.name}"
                names[var.name] = Sym(unique)
                if unique not in [v.name for v in self.shared]:
                    self.shared.append(replace(var, name=unique))
            elif var.space in ("local", "param"):
                names[var.name] = Sym(var.name + tag)
                self.new_local(var.name + tag, var)
            else:
                self.module.variables[var.name] = var
        labels = {item.name for item in fn.body if isinstance(item, Label)}
        for label in labels:
            names[label] = Sym(label + tag)
        for table, targets in fn.tables.items():
            names[table] = Sym(table + tag)
            self.tables[table + tag] = [t + tag for t in targets]
        body: list[Instr | Label] = []
        for item in fn.body:
            if isinstance(item, Label):
                body.append(Label(item.name + tag, item.line))
                continue
            ins = Instr(
                item.opcode,
                tuple(rename(o, names, tag, fn.regs) for o in item.operands),
                None if item.guard is None else (Reg(item.guard[0].name + tag), item.guard[1]),
                item.line,
            )
            if ins.base == "call":
                body += self.call(ins)
            elif ins.base == "ret" and tag:
                body.append(
                    Instr(
                        "bra.uni" if not ins.guard else "bra",
                        (Sym(f"return{tag}"),),
                        ins.guard,
                        ins.line,
                    )
                )
            else:
                body.append(ins)
        self.stack.pop()
        return body

    def call(self, ins: Instr) -> list[Instr | Label]:
        """Expand ``call (results), function, (arguments);``."""
        rest = list(ins.operands)
        results = rest.pop(0).items if isinstance(rest[0], Group) else ()
        target = rest.pop(0)
        arguments = rest[0].items if rest and isinstance(rest[0], Group) else ()
        if not isinstance(target, Sym):
            raise PtxError("an indirect call is not modelled; compile so that calls are direct").at(
                Place(line=ins.line)
            )
        if target.name in IGNORED_CALLS:
            return [Instr(f"{target.name}", (), ins.guard, ins.line)]
        fn = self.module.functions.get(target.name)
        if fn is None or not fn.body:
            raise PtxError(f"{target.name} is called but not defined in this module").at(
                Place(line=ins.line)
            )
        self.calls += 1
        tag = f"#{self.calls}"
        bound: dict[str, Operand] = {}
        moves: list[Instr | Label] = []
        back: list[Instr | Label] = []
        for formal, actual in zip(fn.params, arguments, strict=True):
            if isinstance(formal, Var):
                bound[formal.name] = actual
            else:
                moves.append(
                    Instr(f"mov.{formal[1]}", (Reg(formal[0].name + tag), actual), None, ins.line)
                )
        for formal, actual in zip(fn.returns, results, strict=True):
            if isinstance(formal, Var):
                bound[formal.name] = actual
            else:
                back.append(
                    Instr(f"mov.{formal[1]}", (actual, Reg(formal[0].name + tag)), None, ins.line)
                )
        body: list[Instr | Label] = []
        if ins.guard is not None:
            body.append(
                Instr("bra", (Sym(f"skip{tag}"),), (ins.guard[0], not ins.guard[1]), ins.line)
            )
        body += moves
        body += self.expand(fn, tag, bound)
        body += [Label(f"return{tag}", ins.line), *back, Label(f"skip{tag}", ins.line)]
        return body


def rename(op: Operand, names: dict[str, Operand], tag: str, regs: dict[str, str]) -> Operand:
    """Return `op` with a callee's names made unique and its parameters bound."""

    def walk(item: Operand) -> Operand:
        if isinstance(item, Reg):
            return Reg(item.name + tag)
        if isinstance(item, Sym) and item.name in names:
            new = names[item.name]
            return Sym(new.name, new.offset + item.offset) if isinstance(new, Sym) else new
        if isinstance(item, Mem):
            base = walk(item.base)
            return Mem(base, item.offset, tuple(walk(r) for r in item.rest))
        if isinstance(item, Vec):
            return Vec(tuple(walk(i) for i in item.items))
        if isinstance(item, Group):
            return Group(tuple(walk(i) for i in item.items))
        if isinstance(item, Pair):
            return Pair(walk(item.first), walk(item.second))
        if isinstance(item, Not):
            return Not(walk(item.item))
        return item

    return walk(op)


def cut(body: list[Instr | Label], tables: dict[str, list[str]], kernel: str) -> list[Unit]:
    """Cut a function into units."""
    from .ops import may_wait

    units = [Unit(0)]
    labels: dict[str, int] = {}

    def fresh() -> None:
        units[-1].next = len(units)
        units.append(Unit(len(units)))

    for item in body:
        if isinstance(item, Label):
            if units[-1].instrs or units[-1].tail != "next":
                fresh()
            labels[item.name] = units[-1].index
            continue
        base = item.base
        if base in ("bra", "brx"):
            if base == "brx" and units[-1].instrs:  # alone: it is executed once per target
                fresh()
            units[-1].tail, units[-1].instr = base, item
            fresh()
        elif base in ("ret", "exit", "trap"):
            units[-1].tail, units[-1].instr = ("trap" if base == "trap" else "exit"), item
            fresh()
        elif may_wait(item):
            if units[-1].instrs:  # alone, so that it can be tried again
                fresh()
            units[-1].tail, units[-1].instr = "stop", item
            fresh()
        else:
            units[-1].instrs.append(item)
    units[-1].tail = "exit" if units[-1].tail == "next" else units[-1].tail
    for unit in units:
        if unit.tail in ("bra", "brx"):
            assert unit.instr is not None
            names = [o.name for o in unit.instr.operands[-1:] if isinstance(o, Sym)]
            if unit.tail == "brx":
                names = tables.get(names[0] if names else "", [])
            try:
                unit.targets = [labels[name] for name in names]
            except KeyError as error:
                raise PtxError(f"no label {error.args[0]!r} in {kernel}").at(
                    Place(kernel=kernel, line=unit.instr.line)
                ) from None
    return units
