"""PTX text to the syntax tree: modules, variables, functions, nested scopes (PTX ISA 4, 5, 7, 11).

Braces nest (inline assembly brings its own), and inner scopes may reuse outer names: every
register, variable and label gets a name that is unique in its function, ``name@k`` in the k-th
inner scope.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache

from blockscale.emulator.ptx.reader import MAX_NESTING, SIZES, Reader, Scope, literal_bits
from blockscale.emulator.ptx.syntax import (
    Function,
    Imm,
    Instr,
    Label,
    Module,
    Operand,
    Reg,
    Sym,
    Var,
)

LINKING = {".visible", ".extern", ".weak", ".common"}
SPACES = {".global", ".const", ".shared", ".local", ".param"}
TARGET = re.compile(r"sm_\d{2,3}[af]?")
MOST_BYTES = {  # of a variable, and where that is said
    "param": (32_764, "PTX ISA 5.1.6"),
    "const": (1 << 16, "PTX ISA 5.1.3"),
    "local": (1 << 19, "a GPU gives a thread no more"),
}
MAX_VARIABLES = 1 << 26  # bytes of all .global and .const variables, which are kept with the tree
MAX_ALIGN = 1 << 16
SKIPPED = {".pragma", ".alias", ".noreturn", ".callprototype"}


@lru_cache(maxsize=16)
def parse(text: str) -> Module:
    """Return the syntax tree of PTX `text`; a PtxError names the line that cannot be read."""
    return Parser(text).module()


class Parser(Reader):
    """Reads a module."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.bytes = 0  # of the module's variables
        self.labels: dict[int, list[str]] = {}  # opening brace -> the labels of its scope

    def module(self) -> Module:
        """Parse the whole text."""
        module = Module()
        while self.token.kind != "end":
            self.module_item(module)
        return module

    def module_item(self, module: Module) -> None:
        """Parse one directive, variable or function."""
        extern = False
        while self.token.text in LINKING:
            extern |= self.next().text == ".extern"
        word = self.token.text
        if word == ".version":
            self.next()
            module.version = self.next().text
        elif word == ".target":
            self.next()
            module.target = self.token.text
            if not TARGET.fullmatch(module.target):
                raise self.fail(
                    f".target {module.target} is no architecture (PTX ISA 11.1.2); write sm_ and "
                    "its number, e.g. .target sm_90a"
                )
            self.next()
            while self.accept(","):
                self.next()
        elif word == ".address_size":
            self.next()
            if self.next().text != "64":
                raise self.fail("only .address_size 64 is modelled; compile for 64 bits")
        elif word == ".section":
            self.next()
            self.next()
            self.skip_braces()
        elif word in SKIPPED:
            self.skip_statement()
        elif word in (".entry", ".func"):
            function = self.parse_function()
            if function.body or function.name not in module.functions:
                module.functions[function.name] = function
        elif word in SPACES:
            for var in self.variables(extern):
                known = module.variables.get(var.name)
                if known is None or known.extern:
                    module.variables[var.name] = var
            self.expect(";")
        elif word == ";":
            self.next()
        else:
            raise self.fail(f"{word!r} is not a directive of a PTX module")

    def variables(self, extern: bool = False) -> list[Var]:
        """Parse ``.space [.align n] [.v4] .type name[dims] [= init], ...`` up to the end."""
        space = self.next().text[1:].partition("::")[0]
        align, vector, kind = 0, 1, None
        while self.token.kind == "directive":
            word = self.next().text[1:]
            if word == "align":
                align = self.alignment()
            elif word in ("v2", "v4", "v8"):
                vector = int(word[1:])
            elif word in SIZES:
                kind = word
            elif word == "attribute":
                self.skip_parentheses()
            elif word not in ("ptr", "global", "shared", "const", "local"):
                raise self.fail(f".{word} is not a type or attribute of a variable")
        if kind is None:
            raise self.fail("a variable without a type")
        result = [self.variable(space, kind, vector, align, extern)]
        while self.accept(","):
            result.append(self.variable(space, kind, vector, align, extern))
        return result

    def alignment(self) -> int:
        """Take the bytes of an alignment."""
        align = self.integer()
        if align not in (1 << n for n in range(MAX_ALIGN.bit_length())):
            raise self.fail(f".align {align}: it is a power of two up to {MAX_ALIGN} (5.4.5)")
        return align

    def variable(self, space: str, kind: str, vector: int, align: int, extern: bool) -> Var:
        """Parse ``name[dims] = init``; without the first dimension its size is that of `init`."""
        name, unit = self.name(), SIZES[kind] * vector
        shape: list[int] = []
        while self.accept("["):
            if not shape and self.accept("]"):
                shape.append(0)
                continue
            shape.append(self.integer())
            self.expect("]")
            if len(shape) > MAX_NESTING:
                raise self.fail(f"{name} has more than {MAX_NESTING} dimensions; use one")
        if vector > 1:
            shape.append(vector)
        init: bytearray | None = None
        pointers: tuple[tuple[int, Sym], ...] = ()
        count = math.prod(shape)
        values: list[tuple[int, Operand]] | None = None
        if self.accept("="):
            if space not in ("global", "const"):
                raise self.fail(f"{name}: .{space} variables have no initial value (5.4.4)")
            values = []
            count = self.initialiser(shape, 0, values)
        size = SIZES[kind] * count
        self.check_size(name, space, size)
        if values is not None:
            init, pointers = self.initial_bytes(values, size, kind)
        return Var(name, space, size, max(align, unit), init, extern, pointers, kind)

    def check_size(self, name: str, space: str, size: int) -> None:
        """Refuse a variable that no GPU has room for, or this machine."""
        most, why = MOST_BYTES.get(space, (size, ""))
        if size > most:
            raise self.fail(f"{name} has {size} bytes; a .{space} variable has {most} ({why})")
        if space in ("global", "const"):
            self.bytes += size
        if self.bytes > MAX_VARIABLES:
            raise self.fail(
                f"{name} has {size} bytes, and the module's variables are {self.bytes} so far; the "
                f"emulator holds {MAX_VARIABLES}: pass large arrays as arguments"
            )

    def initialiser(self, shape: list[int], at: int, values: list[tuple[int, Operand]]) -> int:
        """Parse the value of an array of `shape` (innermost last, 0: unknown); return its elements.

        Its first element is number `at`; those that are given go into `values`, the others are 0.
        """
        if self.accept("{"):
            count, inner = 0, math.prod(shape[1:])
            with self.deeper():
                while not self.accept("}"):
                    count += self.initialiser(shape[1:], at + count, values)
                    if self.token.text != "}":
                        self.expect(",")
            if 0 in shape[1:] or (0 not in shape and count > math.prod(shape)):
                raise self.fail(f"{count} initial values for {math.prod(shape)} elements")
            return math.prod(shape) or -(-count // inner) * inner
        if self.token.text == "generic":
            self.next()
            self.expect("(")
            item = self.simple_operand()
            self.expect(")")
            if self.accept("+") and isinstance(item, Sym):
                item = Sym(item.name, item.offset + self.integer())
        else:
            item = self.simple_operand()
        values.append((at, item))
        return 1

    def initial_bytes(
        self, values: list[tuple[int, Operand]], size: int, kind: str
    ) -> tuple[bytearray, tuple[tuple[int, Sym], ...]]:
        """Return the `size` bytes of initial values, and where the addresses among them belong."""
        unit, data, pointers = SIZES[kind], bytearray(size), []
        for number, value in values:
            at = number * unit
            if isinstance(value, Sym):
                if unit != 8:
                    raise self.fail(f"{value.name}: an address has 64 bits, and .{kind} {8 * unit}")
                pointers.append((at, value))
            elif isinstance(value, Imm):
                data[at : at + unit] = literal_bits(value, kind).to_bytes(unit, "little")
            else:
                raise self.fail("an initial value that is neither a number nor an address")
        return data, tuple(pointers)

    def parse_function(self) -> Function:
        """Parse a kernel or device function, with or without a body."""
        entry = self.next().text == ".entry"
        while self.accept(".attribute"):
            self.skip_parentheses()
        self.count = 0
        function = Function("", entry, [], [], line=self.token.line)
        self.function = function
        self.scopes = [Scope("")]
        if self.token.text == "(":
            function.returns = self.parameters()
        function.name = self.name()
        if self.token.text == "(":
            function.params = self.parameters()
        while self.token.kind == "directive":
            word = self.next().text
            values = []
            while self.token.kind in ("number", "string"):
                if self.token.kind == "number":
                    values.append(self.integer())
                else:
                    values.append(0)
                    self.next()
                self.accept(",")
            function.directives[word] = values
        if self.accept(";"):
            self.function = None
            return function
        self.expect("{")
        self.find_labels()
        self.declare_labels()
        self.block()
        self.function = None
        return function

    def parameters(self) -> list[Var | tuple[Reg, str]]:
        """Parse the parameters or results of a function: variables, or registers with a type."""
        self.expect("(")
        result: list[Var | tuple[Reg, str]] = []
        while not self.accept(")"):
            if self.token.text == ".reg":
                self.next()
                kind = self.register_type()
                result.append((Reg(self.declare(self.name(), kind)), kind))
            else:
                result.append(self.one_parameter())
            if self.token.text != ")":
                self.expect(",")
        return result

    def one_parameter(self) -> Var:
        """Parse ``.param [.align n] .type [.ptr [.space] [.align n]] name[bytes]`` (5.1.6.1)."""
        self.expect(".param")
        align, kind, pointer = 0, None, False
        while self.token.kind == "directive":
            word = self.next().text[1:]
            if word == "align":  # behind .ptr it is about what is pointed to
                align = max(align, self.alignment() * (not pointer))
            elif word == "ptr":
                pointer = True
            elif word in SIZES:
                kind = word
            elif f".{word}" not in SPACES:
                raise self.fail(f".{word} is not a type or attribute of a parameter")
        if kind is None:
            raise self.fail("a parameter without a type")
        return self.variable("param", kind, 1, align, False)

    def find_labels(self) -> None:
        """Find the labels of a function's scopes, so that branches may come first."""
        at, open_braces = self.at, [self.at - 1]
        while open_braces:
            token = self.tokens[at]
            if token.kind == "end":
                raise self.fail("the text ends inside a function")
            if token.text == "{":
                open_braces.append(at)
            elif token.text == "}":
                open_braces.pop()
            elif (
                token.kind == "name"
                and self.tokens[at + 1].text == ":"
                and self.tokens[at - 1].text in (";", "{", "}", ":")
            ):
                self.labels.setdefault(open_braces[-1], []).append(token.text)
            at += 1

    def declare_labels(self) -> None:
        """Declare the labels of the scope whose brace was opened last."""
        scope = self.scopes[-1]
        for label in self.labels.get(self.at - 1, ()):
            scope.names[label] = label + scope.tag

    def block(self) -> None:
        """Parse statements up to the closing brace."""
        while not self.accept("}"):
            if self.accept("{"):
                self.count += 1
                self.scopes.append(Scope(f"@{self.count}"))
                self.declare_labels()
                with self.deeper():
                    self.block()
                self.scopes.pop()
            else:
                self.statement()

    def statement(self) -> None:
        """Parse a directive, a label or an instruction."""
        assert self.function is not None
        token = self.token
        if token.kind == "directive":
            self.local_directive()
        elif token.kind == "name" and self.tokens[self.at + 1].text == ":":
            self.at += 2
            name = self.resolve(token.text)
            if self.token.text == ".branchtargets":
                self.next()
                targets = [self.resolve(self.name())]
                while self.accept(","):
                    targets.append(self.resolve(self.name()))
                self.function.tables[name] = targets
                self.expect(";")
            elif self.token.text in (".callprototype", ".calltargets"):
                self.skip_statement()
            else:
                self.function.body.append(Label(name, token.line))
        elif token.kind == "name" or token.text == "@":
            self.function.body.append(self.instruction())
        elif not self.accept(";"):
            raise self.wanted("a statement")

    def local_directive(self) -> None:
        """Parse a directive inside a function."""
        assert self.function is not None
        word = self.token.text
        if word == ".reg":
            self.next()
            self.registers()
        elif word.partition("::")[0] in SPACES:
            for var in self.variables():
                unique = var.name + self.scopes[-1].tag
                self.scopes[-1].names[var.name] = unique
                var.name = unique
                self.function.variables[unique] = var
            self.expect(";")
        elif word in SKIPPED:
            self.skip_statement()
        else:
            raise self.fail(f"{word!r} is not a directive that a function may hold")

    def register_type(self) -> str:
        """Parse the type of registers."""
        kind = self.next().text[1:]
        if kind not in SIZES:
            raise self.fail(f"registers of type .{kind} are not modelled; use scalar registers")
        return kind

    def registers(self) -> None:
        """Parse the rest of ``.reg .type a, b<10>;``."""
        kind = self.register_type()
        while True:
            name = self.name()
            if self.accept("<"):
                for i in range(self.integer()):
                    self.declare(f"{name}{i}", kind)
                self.expect(">")
            else:
                self.declare(name, kind)
            if not self.accept(","):
                break
        self.expect(";")

    def instruction(self) -> Instr:
        """Parse ``@p opcode operands;``."""
        line, guard = self.token.line, None
        if self.accept("@"):
            negated = self.accept("!")
            guard = (Reg(self.resolve(self.name())), negated)
        opcode = self.name()
        operands: list[Operand] = []
        while not self.accept(";"):
            operands.append(self.operand())
            if not self.accept(","):
                self.expect(";")
                break
        return Instr(opcode, tuple(operands), guard, line)
