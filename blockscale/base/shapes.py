"""Symbolic shapes: ``("rows", "cols // 16")`` against the shapes that a caller passes.

A dimension is an integer, a symbol, or an expression of symbols with ``+ - * //``,
``ceil_to(a, b)`` (a rounded up to a multiple of b) and ``ceil_div(a, b)``.  ``//`` is exact: a
dimension that does not divide is an error, not a rounded-down tensor.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from math import lcm

from blockscale.base.sizes import ceil_div, round_up

MOST_CHARACTERS = 200
"""Of an expression: one of any length could nest so deeply that Python's parser gives up."""

Shape = tuple[int | str, ...]


class UnboundSymbolError(LookupError):
    """An expression holds a symbol whose value is not known; ``args[0]`` is its name."""


@dataclass(frozen=True)
class Dim:
    """One parsed dimension."""

    text: str
    node: ast.expr

    @cached_property
    def symbols(self) -> frozenset[str]:
        """Names of the symbols in the expression."""
        functions = {n.func for n in ast.walk(self.node) if isinstance(n, ast.Call)}
        names = [n for n in ast.walk(self.node) if isinstance(n, ast.Name) and n not in functions]
        return frozenset(name.id for name in names)

    @property
    def symbol(self) -> str | None:
        """The name, if the dimension is nothing but a symbol."""
        return self.node.id if isinstance(self.node, ast.Name) else None

    def multiple(self, exact: Mapping[str, int]) -> int:
        """Return what a size must be a multiple of, if each symbol is one of its ``exact``.

        1 for what is no symbol, nor a symbol times a number.
        """
        match self.node:
            case ast.Name(id=name):
                return exact.get(name, 1)
            case ast.BinOp(left=ast.Name(id=name), op=ast.Mult(), right=ast.Constant(int() as by)):
                return exact.get(name, 1) * by
            case ast.BinOp(left=ast.Constant(int() as by), op=ast.Mult(), right=ast.Name(id=name)):
                return exact.get(name, 1) * by
        return 1

    def evaluate(self, values: Mapping[str, int]) -> int:
        """Return the dimension's size.

        Raises:
            UnboundSymbolError: a symbol has no value.
            ValueError: an exact division leaves a remainder.
        """
        return _evaluate(self.node, values)

    def solve(self, size: int) -> tuple[str, int] | None:
        """Return (symbol, value) that makes the dimension ``size``; None if that is not unique."""
        node = self.node
        if isinstance(node, ast.Name):
            return node.id, size
        if not (isinstance(node, ast.BinOp) and isinstance(node.left, ast.Name)):
            return None
        if not isinstance(node.right, ast.Constant):
            return None
        factor = _evaluate(node.right, {})
        if isinstance(node.op, ast.FloorDiv):
            return node.left.id, size * factor
        if isinstance(node.op, ast.Mult) and factor and size % factor == 0:
            return node.left.id, size // factor
        return None


@cache
def parse(dim: int | str) -> Dim:
    """Return the parsed dimension.

    Raises:
        ValueError: it is not an expression of the kind that the module describes.
    """
    text = str(dim)
    try:
        if len(text) > MOST_CHARACTERS:
            raise ValueError(f"{len(text)} characters")
        node = ast.parse(text.strip(), mode="eval").body
        _check(node)
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"shapes: {text[:MOST_CHARACTERS]!r} is no dimension ({error}); write an "
            "integer, a symbol, or an expression with + - * //, ceil_to(a, b) and ceil_div(a, b)"
        ) from None
    return Dim(text, node)


def divisors(dims: Iterable[Dim]) -> dict[str, int]:
    """Return what each symbol must be a multiple of, so that every ``symbol // n`` is exact."""
    found: dict[str, int] = {}
    for node in (node for dim in dims for node in ast.walk(dim.node)):
        match node:
            case ast.BinOp(
                left=ast.Name(id=name), op=ast.FloorDiv(), right=ast.Constant(value=int() as by)
            ):
                found[name] = lcm(found.get(name, 1), by)
    return found


def _check(node: ast.expr) -> None:
    """Raise ValueError unless ``node`` is built from what `_evaluate` knows."""
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool) and value >= 0:
            return
        case ast.Name():
            return
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult(), right=right):
            _check(left)
            _check(right)
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=ast.Constant(value=int() as by)) if by:
            _check(left)
        case ast.Call(
            func=ast.Name(id="ceil_to" | "ceil_div"),
            args=[left, ast.Constant(value=int() as by)],
            keywords=[],
        ) if by:
            _check(left)
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is not understood")


def _evaluate(node: ast.expr, values: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.Name(id=name):
            if name not in values:
                raise UnboundSymbolError(name)
            return values[name]
        case ast.BinOp(left=left, op=op, right=right):
            return _binary(op, left, _evaluate(left, values), _evaluate(right, values))
        case ast.Call(func=ast.Name(id=function), args=[left, right]):
            size, by = _evaluate(left, values), _evaluate(right, values)
            return ceil_div(size, by) if function == "ceil_div" else round_up(size, by)
    raise AssertionError(f"shapes: {ast.dump(node)} passed _check")


def _binary(op: ast.operator, left: ast.expr, a: int, b: int) -> int:
    if isinstance(op, ast.Add):
        return a + b
    if isinstance(op, ast.Sub):
        return a - b
    if isinstance(op, ast.Mult):
        return a * b
    if a % b:
        raise ValueError(f"{ast.unparse(left)} = {a} is not a multiple of {b}")
    return a // b
