"""The syntax tree of a PTX module, as the parser makes it (PTX ISA 4, 5 and 9.1)."""

from __future__ import annotations

from dataclasses import dataclass, field

from blockscale.emulator.errors import PtxError


@dataclass(frozen=True)
class Reg:
    """A register; the name is unique within its function."""

    name: str


@dataclass(frozen=True)
class Special:
    """A special register such as ``%tid.x``."""

    name: str


@dataclass(frozen=True)
class Imm:
    """An immediate: the bits of a float literal (``0f``, ``0d``), or an integer."""

    value: int | float
    kind: str = "int"  # "int", "f32" (value = bits), "f64" (value = bits), "dec" (a decimal float)


@dataclass(frozen=True)
class Sym:
    """The address of a variable, a label or a function, plus bytes."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Mem:
    """``[base + offset]``, or ``[map, {coordinates}, ...]``; `rest` is what follows the base."""

    base: Operand
    offset: int = 0
    rest: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Vec:
    """``{a, b, ...}``."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """``a|b``: two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Not:
    """``!p``."""

    item: Operand


@dataclass(frozen=True)
class Group:
    """``(a, b)``: results or arguments of a call."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Sink:
    """``_``: a result that nobody wants."""


Operand = Reg | Special | Imm | Sym | Mem | Vec | Pair | Not | Group | Sink


@dataclass
class Instr:
    """One instruction; `guard` is (predicate register, negated)."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: tuple[Reg, bool] | None
    line: int

    @property
    def base(self) -> str:
        """The opcode up to its first dot."""
        return self.opcode.partition(".")[0]

    @property
    def mods(self) -> list[str]:
        """The modifiers, in order."""
        return self.opcode.split(".")[1:]


@dataclass
class Label:
    """A place that branches name; unique within its function."""

    name: str
    line: int


@dataclass
class Var:
    """A variable: space is "param", "shared", "local", "global" or "const"."""

    name: str
    space: str
    size: int
    align: int
    init: bytes | bytearray | None = None
    extern: bool = False
    pointers: tuple[tuple[int, Sym], ...] = ()  # initial values that are addresses
    kind: str = ""  # the type of an element: "f32", "b64", ...


@dataclass
class Function:
    """A kernel or a device function; `regs` maps a register to its type ("b32", "pred", ...)."""

    name: str
    entry: bool
    params: list[Var | tuple[Reg, str]]
    returns: list[Var | tuple[Reg, str]]
    body: list[Instr | Label] = field(default_factory=list)
    regs: dict[str, str] = field(default_factory=dict)
    variables: dict[str, Var] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)  # .branchtargets
    directives: dict[str, list[int]] = field(default_factory=dict)  # .reqntid and the like
    line: int = 0


@dataclass
class Module:
    """A PTX file."""

    version: str = ""
    target: str = ""
    functions: dict[str, Function] = field(default_factory=dict)
    variables: dict[str, Var] = field(default_factory=dict)

    def entry(self, name: str | None = None) -> Function:
        """Return the kernel `name`, or the only one."""
        kernels = [f for f in self.functions.values() if f.entry]
        if name is None and len(kernels) == 1:
            return kernels[0]
        for kernel in kernels:
            if kernel.name == name:
                return kernel
        names = ", ".join(k.name for k in kernels) or "none"
        raise PtxError(
            f"the module has no kernel named {name!r}; its kernels: {names}; pass entry="
        )


def items_of(op: Operand) -> tuple[Operand, ...]:
    """Return the items of a vector operand, or the one operand."""
    return op.items if isinstance(op, Vec) else (op,)
