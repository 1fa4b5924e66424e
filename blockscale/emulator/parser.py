"""PTX text to the syntax tree: modules, variables, functions and nested scopes (PTX ISA 4, 5, 7, 11)."""

from __future__ import annotations

from functools import lru_cache

from .lexer import number
from .reader import SIZES, Reader, Scope, literal_bits
from .syntax import Function, Imm, Instr, Label, Module, Operand, Reg, Sym, Var

LINKING = {".visible", ".extern", ".weak", ".common"}
SPACES = {".global", ".const", ".shared", ".local", ".param"}
SKIPPED = {".pragma", ".alias", ".noreturn", ".callprototype"}


@lru_cache(maxsize=16)
def parse(text: str) -> Module:
    """Return the syntax tree of PTX `text`; a PtxError names the line that cannot be read."""
    return Parser(text).module()


class Parser(Reader):
    """Reads a module."""

    def module(self) -> Module:
        module = Module()
        while self.token.kind != "end":
            self.module_item(module)
        return module

    def module_item(self, module: Module) -> None:
        extern = False
        while self.token.text in LINKING:
            extern |= self.next().text == ".extern"
        word = self.token.text
        if word == ".version":
            self.next()
            module.version = self.next().text
        elif word == ".target":
            self.next()
            module.target = self.next().text
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
            raise self.fail(f"{word!r} is not a PTX module directive")

    def variables(self, extern: bool = False) -> list[Var]:
        """Parse ``.space [.align n] [.v4] .type name[dims] [= init], ...`` up to the end."""
        space = self.next().text[1:].partition("::")[0]
        align, vector, kind = 0, 1, None
        while self.token.kind == "directive":
            word = self.next().text[1:]
            if word == "align":
                align = int(self.next().text)
            elif word in ("v2", "v4", "v8"):
                vector = int(word[1:])
            elif word in SIZES:
                kind = word
            elif word == "attribute":
                self.expect("(")
                while not self.accept(")"):
                    self.next()
            elif word not in ("ptr", "global", "shared", "const", "local"):
                raise self.fail(f".{word} is not a type or attribute of a variable")
        if kind is None:
            raise self.fail("a variable without a type")
        result = [self.variable(space, kind, vector, align, extern)]
        while self.accept(","):
            result.append(self.variable(space, kind, vector, align, extern))
        return result

    def variable(self, space: str, kind: str, vector: int, align: int, extern: bool) -> Var:
        name, unit = self.name(), SIZES[kind] * vector
        count, unsized = 1, False
        while self.accept("["):
            if self.accept("]"):
                unsized = True
                continue
            count *= int(number(self.next().text)[0])
            self.expect("]")
        init, pointers = None, []
        if self.accept("="):
            values = list(self.initialiser())
            init, pointers = self.initial_bytes(values, kind)
            if unsized:
                count = len(values)
            init = init.ljust(unit * count, b"\0")
        size = 0 if unsized and init is None else unit * count
        return Var(name, space, size, max(align, unit), init, extern, tuple(pointers))

    def initialiser(self) -> list[Operand]:
        if self.accept("{"):
            values: list[Operand] = []
            while not self.accept("}"):
                values += self.initialiser()
                self.accept(",")
            return values
        if self.token.text == "generic":
            self.next()
            self.expect("(")
            item = self.simple_operand()
            self.expect(")")
            if self.accept("+") and isinstance(item, Sym):
                item = Sym(item.name, int(number(self.next().text)[0]))
            return [item]
        return [self.simple_operand()]

    def initial_bytes(
        self, values: list[Operand], kind: str
    ) -> tuple[bytes, list[tuple[int, Sym]]]:
        size, data, pointers = SIZES[kind], b"", []
        for value in values:
            if isinstance(value, Sym):
                pointers.append((len(data), value))
                bits = 0
            elif isinstance(value, Imm):
                bits = literal_bits(value, kind)
            else:
                raise self.fail("an initial value that is neither a number nor an address")
            data += bits.to_bytes(size, "little")
        return data, pointers

    def parse_function(self) -> Function:
        entry = self.next().text == ".entry"
        while self.token.kind == "directive" and self.token.text == ".attribute":
            self.next()
            self.expect("(")
            while not self.accept(")"):
                self.next()
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
                token = self.next()
                values.append(int(number(token.text)[0]) if token.kind == "number" else 0)
                self.accept(",")
            function.directives[word] = values
        if self.accept(";"):
            self.function = None
            return function
        self.expect("{")
        self.declare_labels()
        self.block()
        self.function = None
        return function

    def parameters(self) -> list[Var | tuple[Reg, str]]:
        self.expect("(")
        result: list[Var | tuple[Reg, str]] = []
        while not self.accept(")"):
            if self.token.text == ".reg":
                self.next()
                kind = self.next().text[1:]
                result.append((Reg(self.declare(self.name(), kind)), kind))
            else:
                result.append(self.one_parameter())
            self.accept(",")
        return result

    def one_parameter(self) -> Var:
        if self.token.text != ".param":
            raise self.fail(f"{self.token.text!r} where PTX wants .param")
        self.next()
        align, kind = 0, "b32"
        while self.token.kind == "directive":
            word = self.next().text[1:]
            if word == "align":
                align_of = int(self.next().text)
                align = align_of if kind == "b32" or align == 0 else align
            elif word == "ptr":
                while self.token.text in (".global", ".shared", ".const", ".local", ".align"):
                    if self.next().text == ".align":
                        self.next()
            elif word in SIZES:
                kind = word
                if kind != "b8":
                    align = SIZES[kind]
        return self.variable("param", kind, 1, align, False)

    def declare_labels(self) -> None:
        """Declare the labels of the scope that begins here, so that branches may come first."""
        at, depth = self.at, 0
        scope = self.scopes[-1]
        while True:
            token = self.tokens[at]
            if token.kind == "end":
                raise self.fail("the text ends inside a function")
            if token.text == "{":
                depth += 1
            elif token.text == "}":
                if depth == 0:
                    return
                depth -= 1
            elif (
                depth == 0
                and token.kind == "name"
                and self.tokens[at + 1].text == ":"
                and self.tokens[at - 1].text in (";", "{", "}", ":")
            ):
                scope.names[token.text] = token.text + scope.tag
            at += 1

    def block(self) -> None:
        """Parse statements up to the closing brace."""
        while not self.accept("}"):
            if self.accept("{"):
                self.count += 1
                self.scopes.append(Scope(f"@{self.count}"))
                self.declare_labels()
                self.block()
                self.scopes.pop()
            else:
                self.statement()

    def statement(self) -> None:
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
            raise self.fail(f"{token.text!r} where PTX wants a statement")

    def local_directive(self) -> None:
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

    def registers(self) -> None:
        vector, kind = 1, self.next().text[1:]
        if kind in ("v2", "v4"):
            vector, kind = int(kind[1:]), self.next().text[1:]
        if kind not in SIZES or vector != 1:
            raise self.fail(f"registers of type .{kind} (.v{vector}) are not modelled")
        while True:
            name = self.name()
            if self.accept("<"):
                for i in range(int(self.next().text)):
                    self.declare(f"{name}{i}", kind)
                self.expect(">")
            else:
                self.declare(name, kind)
            if not self.accept(","):
                break
        self.expect(";")

    def instruction(self) -> Instr:
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
