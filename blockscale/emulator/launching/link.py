"""One kernel made ready to run: calls inlined, variables placed, control flow cut into units.

A *unit* is a run of instructions that nothing can interrupt, and one tail: fall through, branch,
leave, or one instruction that may have to wait (a barrier, a fence between warps, ...).  A unit's
number is the program counter of the machine.  Divergent lanes meet again at the immediate
post-dominator of the branch, which is where hardware's convergence barriers are put too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from blockscale.emulator.errors import Place, PtxError
from blockscale.emulator.machine.memory import RESERVED
from blockscale.emulator.ops.core import may_wait
from blockscale.emulator.ptx.parser import MOST_BYTES, parse
from blockscale.emulator.ptx.program import Program, Unit, find_meeting_points
from blockscale.emulator.ptx.reader import MAX_NESTING, MAX_REGISTERS, SIZES
from blockscale.emulator.ptx.syntax import (
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

ATOMIC_STEPS = 64  # an atomic takes its lanes one by one: so much longer than other instructions
MAX_INSTRUCTIONS = 1 << 17  # of a kernel with the functions that it calls
IGNORED_CALLS = {"vprintf", "__assertfail"}


@lru_cache(maxsize=16)
def linked(ptx: str, entry: str | None) -> Program:
    """Return kernel `entry` of PTX text as a program, which launches share and do not change."""
    return link(parse(ptx), entry)


def link(module: Module, entry: str | None) -> Program:
    """Return kernel `entry` of `module` as a program."""
    kernel = module.entry(entry)
    flat = _Flat(module)
    body = flat.expand(kernel, "", {})
    places = dict(flat.places)
    params = [p for p in kernel.params if isinstance(p, Var)]
    offset, offsets = 0, []
    for param in params:
        offset = -(-offset // param.align) * param.align
        offsets.append(offset)
        places[param.name] = ("kernel param", offset)
        offset += param.size
    for space, size in (("param", offset), ("local", flat.local)):
        most, why = MOST_BYTES[space]
        if size > most:
            raise PtxError(f"{size} bytes of .{space} variables; {most} are all ({why})").at(
                Place(kernel=kernel.name)
            )
    static = place_shared(module, flat.shared, places)
    regs, counts = classes(flat.regs)
    units = cut(body, flat.tables, kernel.name)
    check_guards(units, regs, kernel.name)
    check_target(units, module.target, kernel.name)
    find_meeting_points(units)
    return Program(
        name=kernel.name,
        units=units,
        regs=regs,
        counts=counts,
        params=params,
        param_offsets=offsets,
        param_bytes=offset,
        places=places,
        static_shared=static,
        local_bytes=flat.local,
        module=module,
        directives=kernel.directives,
    )


TARGETS = (  # beginning of the opcode, part of it, families that have it, where that is said
    ("tcgen05", "", ("100", "101", "103", "110"), "9.7.16"),
    ("wgmma", "", ("90",), "9.7.15"),
    ("mma.", ".kind::", ("120", "121"), "9.7.14.5.14"),
)

HOPPER = (  # beginning of an opcode that no target before sm_90 has, part of it, where that is said
    ("cp.async.bulk", "", "9.7.9.25.4"),
    ("mbarrier.try_wait", "", "9.7.13.15.16"),
    ("barrier.cluster", "", "9.7.13.4"),
    ("griddepcontrol", "", "9.7.13.13"),
    ("mapa", "", "9.7.9.23"),
    ("elect", "", "9.7.13.15"),
    ("setmaxnreg", "", "9.7.19.5"),
    ("add.", "bf16", "9.7.4.1"),
    ("sub.", "bf16", "9.7.4.2"),
    ("mul.", "bf16", "9.7.4.3"),
)


def check_target(units: list[Unit], target: str, kernel: str) -> None:
    """Refuse instructions that the module's .target does not have."""
    if not target:
        raise PtxError(
            "the module has no .target (PTX ISA 11.1.2); write the architecture behind .version, "
            "e.g. .target sm_90a"
        ).at(Place(kernel=kernel))
    number = target.removeprefix("sm_")
    family, suffix = number.rstrip("af"), number[-1:] in ("a", "f")
    for ins in (i for u in units for i in u.everything):
        for start, part, section in HOPPER if int(family) < 90 else ():
            if ins.opcode.startswith(start) and part in ins.opcode:
                raise PtxError(
                    f"{ins.opcode} does not exist on .target {target} (PTX ISA {section}); compile "
                    "for sm_90 or newer, or do without it"
                ).at(Place(kernel=kernel, line=ins.line, opcode=ins.opcode))
        for start, part, families, section in TARGETS:
            if not ins.opcode.startswith(start) or part not in ins.opcode:
                continue
            if family not in families or not suffix:
                names = ", ".join(f"sm_{f}a" for f in families)
                raise PtxError(
                    f"{ins.opcode} does not exist on .target {target} (PTX ISA {section}); compile "
                    f"for {names}"
                ).at(Place(kernel=kernel, line=ins.line, opcode=ins.opcode))


def place_shared(module: Module, own: dict[str, Var], places: dict[str, tuple[str, int]]) -> int:
    """Place static shared variables in order of declaration, dynamic ones last; return the end."""
    offset = RESERVED
    shared = [*(v for v in module.variables.values() if v.space == "shared"), *own.values()]
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
    regs, counts = {}, {"p": 0, "1": 0, "2": 0, "4": 0, "8": 0}
    for name, kind in kinds.items():
        cls = "p" if kind == "pred" else str(SIZES[kind])
        home = "8" if cls == "16" else cls  # 128 bits: two rows of 64
        regs[name] = (cls, counts[home])
        counts[home] += 2 if cls == "16" else 1
    return regs, counts


class _Flat:
    """A function with every call expanded in place."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.regs: dict[str, str] = {}
        self.places: dict[str, tuple[str, int]] = {}
        self.shared: dict[str, Var] = {}
        self.tables: dict[str, list[str]] = {}
        self.local = 0
        self.calls = 0
        self.instructions = 0
        self.stack: list[str] = []

    def new_local(self, name: str, var: Var) -> None:
        """Place a variable in local memory, where the parameters of calls lie too."""
        align = max(var.align, 16)
        self.local = -(-self.local // align) * align
        self.places[name] = ("local", self.local)
        self.local += max(var.size, 1)

    def expand(self, fn: Function, tag: str, bound: dict[str, Operand]) -> list[Instr | Label]:
        """Return the body of `fn` with its names made unique by `tag` and its calls expanded.

        `bound` has the operands that stand for the function's parameters.
        """
        if fn.name in self.stack:
            raise PtxError(
                f"{fn.name} calls itself ({' -> '.join([*self.stack, fn.name])}); calls are "
                "expanded in place, so recursion is not modelled: write it as a loop"
            )
        self.stack.append(fn.name)
        self.instructions += len(fn.body)
        self.check_size(fn)
        names = {**bound, **self.declare(fn, tag)}
        body: list[Instr | Label] = []
        for item in fn.body:
            if isinstance(item, Label):
                body.append(Label(item.name + tag, item.line))
                continue
            operands = tuple(rename(o, names, tag) for o in item.operands)
            guard = None if item.guard is None else (Reg(item.guard[0].name + tag), item.guard[1])
            ins = Instr(item.opcode, operands, guard, item.line)
            if ins.base == "call":
                body += self.call(ins)
            elif ins.base == "ret" and tag:
                opcode = "bra" if guard else "bra.uni"
                body.append(Instr(opcode, (Sym(f"return{tag}"),), guard, ins.line))
            else:
                body.append(ins)
        self.stack.pop()
        return body

    def check_size(self, fn: Function) -> None:
        """Refuse calls that make a kernel of any size out of a short text."""
        for what, number, most in (
            ("calls that nest", len(self.stack), MAX_NESTING),
            ("instructions", self.instructions, MAX_INSTRUCTIONS),
            ("registers", len(self.regs) + len(fn.regs), MAX_REGISTERS),
        ):
            if number > most:
                raise PtxError(
                    f"{number} {what} where {fn.name} is expanded in place, more than the {most} "
                    "that the emulator takes; call fewer functions, or shorter ones"
                ).at(Place(kernel=self.stack[0], line=fn.line))

    def declare(self, fn: Function, tag: str) -> dict[str, Operand]:
        """Declare what `fn` declares, and return what its names stand for."""
        names: dict[str, Operand] = {}
        for reg, kind in fn.regs.items():
            self.regs[reg + tag] = kind
        for var in fn.variables.values():
            if var.space == "shared":
                unique = f"{fn.name}.{var.name}"
                names[var.name] = Sym(unique)
                self.shared.setdefault(unique, replace(var, name=unique))
            elif var.space in ("local", "param"):
                names[var.name] = Sym(var.name + tag)
                self.new_local(var.name + tag, var)
            else:
                unique = f"{fn.name}.{var.name}"
                names[var.name] = Sym(unique)
                self.module.variables[unique] = replace(var, name=unique)
        for item in fn.body:
            if isinstance(item, Label):
                names[item.name] = Sym(item.name + tag)
        for table, targets in fn.tables.items():
            names[table] = Sym(table + tag)
            self.tables[table + tag] = [t + tag for t in targets]
        return names

    def call(self, ins: Instr) -> list[Instr | Label]:
        """Expand ``call (results), function, (arguments);`` (PTX ISA 9.7.12.5)."""
        here = Place(line=ins.line)
        groups = [o.items for o in ins.operands if isinstance(o, Group)]
        results = groups.pop(0) if isinstance(ins.operands[0], Group) else ()
        arguments = groups.pop(0) if groups else ()
        target = next(o for o in ins.operands if not isinstance(o, Group))
        if not isinstance(target, Sym):
            raise PtxError("an indirect call is not modelled; compile so that calls are direct").at(
                here
            )
        if target.name in IGNORED_CALLS:
            return [Instr(target.name, (), ins.guard, ins.line)]
        fn = self.module.functions.get(target.name)
        if fn is None or not fn.body:
            raise PtxError(f"{target.name} is called but not defined in this module").at(here)
        if len(arguments) != len(fn.params) or len(results) != len(fn.returns):
            raise PtxError(
                f"{fn.name} takes {len(fn.params)} arguments and gives {len(fn.returns)} results; "
                f"the call has {len(arguments)} and {len(results)}"
            ).at(here)
        self.calls += 1
        tag = f"#{self.calls}"
        bound: dict[str, Operand] = {}

        def pairs(
            formals: list[Var | tuple[Reg, str]], actuals: tuple[Operand, ...], back: bool
        ) -> list[Instr]:
            """Bind .param variables; return the moves of registers."""
            moves = []
            for formal, actual in zip(formals, actuals, strict=True):
                if isinstance(formal, Var):
                    bound[formal.name] = actual
                    continue
                own = Reg(formal[0].name + tag)
                ends = (actual, own) if back else (own, actual)
                moves.append(Instr(f"mov.{formal[1]}", ends, None, ins.line))
            return moves

        begin, end = pairs(fn.params, arguments, False), pairs(fn.returns, results, True)
        skip: list[Instr | Label] = []
        if ins.guard is not None:
            other = (ins.guard[0], not ins.guard[1])
            skip = [Instr("bra", (Sym(f"skip{tag}"),), other, ins.line)]
        body = self.expand(fn, tag, bound)
        return [
            *skip,
            *begin,
            *body,
            Label(f"return{tag}", ins.line),
            *end,
            Label(f"skip{tag}", ins.line),
        ]


def rename(op: Operand, names: dict[str, Operand], tag: str) -> Operand:
    """Return `op` with a callee's names made unique and its parameters bound."""
    if isinstance(op, Reg):
        return Reg(op.name + tag) if tag else op
    if isinstance(op, Sym) and op.name in names:
        new = names[op.name]
        return Sym(new.name, new.offset + op.offset) if isinstance(new, Sym) else new
    if isinstance(op, Mem):
        rest = tuple(rename(item, names, tag) for item in op.rest)
        return Mem(rename(op.base, names, tag), op.offset, rest)
    if isinstance(op, Vec | Group):
        return type(op)(tuple(rename(item, names, tag) for item in op.items))
    if isinstance(op, Pair):
        return Pair(rename(op.first, names, tag), rename(op.second, names, tag))
    if isinstance(op, Not):
        return Not(rename(op.item, names, tag))
    return op


def check_guards(units: list[Unit], regs: dict[str, tuple[str, int]], kernel: str) -> None:
    """Refuse guards that are no predicates (PTX ISA 9.3): branches read them without asking."""
    for ins in (i for u in units for i in u.everything):
        if ins.guard is not None:
            name = ins.guard[0].name
            if regs.get(name, "?")[0] != "p":
                what = "is not a predicate" if name in regs else "is not declared"
                place = Place(kernel=kernel, line=ins.line, opcode=ins.opcode)
                raise PtxError(f"the guard {name} {what}").at(place)


def cut(body: list[Instr | Label], tables: dict[str, list[str]], kernel: str) -> list[Unit]:
    """Cut a function into units."""
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
        unit.weight = sum(ATOMIC_STEPS if i.base == "atom" else 1 for i in unit.instrs)
        if unit.tail in ("bra", "brx") and unit.instr is not None:
            unit.targets = find_targets(unit.instr, labels, tables, kernel)
    return units


def find_targets(
    ins: Instr, labels: dict[str, int], tables: dict[str, list[str]], kernel: str
) -> list[int]:
    """Return the units that a branch may go to (PTX ISA 9.7.12.2, .3)."""
    last = ins.operands[-1] if ins.operands else None
    names = [last.name] if isinstance(last, Sym) else ["?"]
    if ins.base == "brx":
        names = tables.get(names[0], [f"{names[0]} (.branchtargets)"])
    for name in names:
        if name not in labels:
            place = Place(kernel=kernel, line=ins.line, opcode=ins.opcode)
            raise PtxError(f"the branch names {name}, which is no label of {kernel}").at(place)
    return [labels[name] for name in names]
