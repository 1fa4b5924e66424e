"""PTX tokens to operands: names in scopes, literals, addresses, vectors (PTX ISA 4.4, 6.4)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

from blockscale.emulator.errors import Place, PtxError
from blockscale.emulator.ptx.lexer import Token, number, tokens
from blockscale.emulator.ptx.syntax import (
    Function,
    Group,
    Imm,
    Mem,
    Not,
    Operand,
    Pair,
    Reg,
    Sink,
    Special,
    Sym,
    Vec,
)

SIZES = {"pred": 1, "b8": 1, "b16": 2, "b32": 4, "b64": 8, "b128": 16}
SIZES |= {f"{k}{n}": n // 8 for k in "us" for n in (8, 16, 32, 64)}
SIZES |= {"f16": 2, "bf16": 2, "f16x2": 4, "bf16x2": 4, "f32": 4, "f64": 8, "tf32": 4}
SPECIALS = {
    "%tid", "%ntid", "%ctaid", "%nctaid", "%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid",
    "%gridid", "%clusterid", "%nclusterid", "%cluster_ctaid", "%cluster_nctaid",
    "%cluster_ctarank", "%cluster_nctarank", "%is_explicit_cluster", "%lanemask_eq",
    "%lanemask_le", "%lanemask_lt", "%lanemask_ge", "%lanemask_gt", "%clock", "%clock_hi",
    "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi", "%dynamic_smem_size",
    "%total_smem_size", "%aggr_smem_size", "%reserved_smem_offset_begin",
    "%reserved_smem_offset_end", "%reserved_smem_offset_cap", "%reserved_smem_offset_0",
    "%reserved_smem_offset_1", "%current_graph_exec", "WARP_SZ",
}  # fmt: skip


MAX_NESTING = 64  # of braces, brackets and calls; compilers need a handful
MAX_REGISTERS = 1 << 18  # of a kernel with the functions that it calls


class Scope:
    """One level of braces: the names that it declares, by what they are called in the function."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.names: dict[str, str] = {}


class Reader:
    """Reads tokens, and operands in the scope of a function."""

    def __init__(self, text: str) -> None:
        self.tokens = tokens(text)
        self.at = 0
        self.scopes: list[Scope] = []
        self.count = 0
        self.depth = 0
        self.function: Function | None = None

    @property
    def token(self) -> Token:
        """The token that comes next."""
        return self.tokens[self.at]

    def fail(self, rule: str) -> PtxError:
        """Return an error that names the place."""
        error = PtxError(rule)
        error.at(Place(kernel=self.function.name if self.function else None, line=self.token.line))
        return error

    @contextmanager
    def deeper(self) -> Iterator[None]:
        """Read what lies in another pair of brackets; too many of them are refused."""
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise self.fail(
                f"brackets nest deeper than the {MAX_NESTING} levels that the emulator reads; "
                "write it flat"
            )
        yield
        self.depth -= 1

    def next(self) -> Token:
        """Take a token."""
        token = self.tokens[self.at]
        if token.kind == "end":
            raise self.fail("the text ends in the middle of a statement")
        self.at += 1
        return token

    def accept(self, text: str) -> bool:
        """Take the next token if it is `text`."""
        token = self.tokens[self.at]
        if token.text == text and token.kind != "string":
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        """Take the next token, which must be `text`."""
        if not self.accept(text):
            raise self.wanted(repr(text))

    def wanted(self, what: str) -> PtxError:
        """Return the error about a token that is not what the syntax wants."""
        found = "the text ends" if self.token.kind == "end" else repr(self.token.text)
        return self.fail(f"{found} where PTX wants {what}")

    def name(self) -> str:
        """Take a name."""
        token = self.tokens[self.at]
        if token.kind != "name":
            raise self.wanted("a name")
        self.at += 1
        return token.text

    def literal(self) -> tuple[int | float, str]:
        """Take a number; see `lexer.number`."""
        if self.token.kind != "number":
            raise self.wanted("a number")
        text = self.next().text
        try:
            return number(text)
        except ValueError as error:
            raise self.fail(f"{text[:40]} is no number of PTX ({str(error)[:60]})") from None

    def integer(self) -> int:
        """Take an integer."""
        value, kind = self.literal()
        if kind != "int":
            raise self.fail(f"{value} where PTX wants an integer")
        return int(value)

    def skip_braces(self) -> None:
        """Skip a balanced { ... }."""
        depth = 0
        while True:
            token = self.next()
            depth += (token.text == "{") - (token.text == "}")
            if depth == 0 and token.text == "}":
                return

    def skip_statement(self) -> None:
        """Skip up to the semicolon."""
        while not self.accept(";"):
            self.next()

    def skip_parentheses(self) -> None:
        """Skip ( ... )."""
        self.expect("(")
        while not self.accept(")"):
            self.next()

    def declare(self, name: str, kind: str) -> str:
        """Declare a register in the innermost scope; return its name in the function."""
        assert self.function is not None
        scope = self.scopes[-1]
        unique = name + scope.tag
        scope.names[name] = unique
        self.function.regs[unique] = kind
        if len(self.function.regs) > MAX_REGISTERS:
            raise self.fail(
                f"more than {MAX_REGISTERS} registers; declare those that the kernel uses"
            )
        return unique

    def resolve(self, name: str) -> str:
        """Return what a name is called in the function."""
        for scope in reversed(self.scopes):
            if name in scope.names:
                return scope.names[name]
        return name

    def operand(self) -> Operand:
        """Parse an operand."""
        item = self.simple_operand()
        if self.accept("|"):
            return Pair(item, self.simple_operand())
        return item

    def simple_operand(self) -> Operand:
        """Parse an operand that is no pair."""
        token = self.tokens[self.at]
        if token.kind == "name" and token.text != "_":
            return self.named()
        if token.text == "{":
            return Vec(self.items("{", "}"))
        if token.text == "(":
            return Group(self.items("(", ")"))
        if token.text == "[":
            return self.memory()
        if self.accept("!"):
            return Not(self.named())
        if token.text in ("-", "+", "~"):
            self.next()
            value, kind = self.literal()
            if token.text == "~":
                return Imm(~int(value), kind)
            if kind in ("f32", "f64"):
                return Imm(int(value) ^ (1 << (31 if kind == "f32" else 63)), kind)
            return Imm(-value if token.text == "-" else value, kind)
        if token.kind == "number":
            return Imm(*self.literal())
        if token.text == "_":
            self.next()
            return Sink()
        return self.named()

    def named(self) -> Operand:
        """Parse a register, or a symbol plus bytes."""
        name = self.name()
        if name.partition(".")[0] in SPECIALS or name.startswith(("%envreg", "%pm")):
            return Special(name)
        unique = self.resolve(name)
        if self.function is not None and unique in self.function.regs:
            return Reg(unique)
        offset = 0
        while self.token.text in ("+", "-") and self.tokens[self.at + 1].kind == "number":
            sign = 1 if self.next().text == "+" else -1
            offset += sign * self.integer()
        if self.token.text == "[":
            raise self.fail(f"{name}[...] is not modelled as an operand; write [{name} + bytes]")
        return Sym(unique, offset)

    def items(self, opening: str, closing: str) -> tuple[Operand, ...]:
        """Parse operands between brackets."""
        self.expect(opening)
        result: list[Operand] = []
        with self.deeper():
            while not self.accept(closing):
                result.append(self.operand())
                if not self.accept(","):
                    self.expect(closing)
                    break
        return tuple(result)

    def memory(self) -> Mem:
        """Parse ``[base + offset]`` or ``[map, {coordinates}, ...]``."""
        self.expect("[")
        with self.deeper():
            base, offset = self.simple_operand(), 0
        while self.token.text in ("+", "-"):
            sign = 1 if self.next().text == "+" else -1
            sign = -sign if self.accept("-") else sign
            offset += sign * self.integer()
        rest: list[Operand] = []
        while self.accept(","):
            rest.append(self.simple_operand())
        self.expect("]")
        return Mem(base, offset, tuple(rest))


def single_bits(value: float) -> int:
    """Return the bits of a number as .f32."""
    try:
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    except OverflowError:
        raise PtxError(f"{value} is beyond the range of .f32; write 0f7F800000") from None


def literal_bits(value: Imm, kind: str) -> int:
    """Return the bits of an immediate as PTX type `kind` ("f32", "b64", "s16", ...)."""
    size = SIZES[kind]
    mask = (1 << (8 * size)) - 1
    if value.kind == "f32" and size == 8:  # a float literal used as a double
        single = struct.unpack("<f", struct.pack("<I", int(value.value)))[0]
        return int(struct.unpack("<Q", struct.pack("<d", single))[0])
    if value.kind == "f64" and size == 4:
        double = struct.unpack("<d", struct.pack("<Q", int(value.value)))[0]
        return single_bits(double)
    if value.kind in ("f32", "f64"):
        return int(value.value) & mask
    if kind == "f32" or (value.kind == "dec" and size == 4):
        return single_bits(float(value.value))
    if kind == "f64" or (value.kind == "dec" and size == 8):
        return int(struct.unpack("<Q", struct.pack("<d", float(value.value)))[0])
    return int(value.value) & mask
