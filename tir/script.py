"""TVMScript's parser without its slow habits: TensorIR is there in a fifth of the time.

Four MoE layers for a CPU, parsed and scheduled: 3.9 s with TVM's own, 0.8 s with this (an AMD EPYC,
2026-11-28, medians of three).

TVM 0.27 asks `inspect` for the whole stack, with a line of source of each frame, at every call of
an inlined function (each looks through all loaded modules), reads the text of a function anew for
every use, names the value of each step of an expression, to compile the next step with Python's
compiler, and notes where each step is written, which nothing here reads.  But for those notes
(spans) what the parser makes is the same: tests/tir/test_script.py compares.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import functools
import inspect
import linecache
import sys
from collections.abc import Callable
from types import CodeType, FrameType, ModuleType
from typing import Any

from tvm.script.parser.core import diagnostics, doc, evaluator, parser
from tvm.tirx.script.builder import ir
from tvm.tirx.script.parser import entry
from tvm.tirx.script.parser import parser as statements

NEAR = 4
"""Frames of which the parser may look at the source: is the function a member of a class?"""


class _Inspect(ModuleType):
    """The module `inspect`, whose stacks have lines of source for the nearest frames alone."""

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    def stack(self, context: int = 1) -> list[inspect.FrameInfo]:
        """Return the frames of the caller's callers."""
        return self.getouterframes(sys._getframe(1), context)

    def getouterframes(self, frame: FrameType | None, context: int = 1) -> list[inspect.FrameInfo]:
        """Return ``frame`` and its callers."""
        found: list[inspect.FrameInfo] = []
        while frame is not None:
            code, line, lines = frame.f_code, frame.f_lineno, None
            if context and len(found) < NEAR:
                lines = linecache.getlines(code.co_filename)[line - 1 : line] or None
            found.append(inspect.FrameInfo(frame, code.co_filename, line, code.co_name, lines, 0))
            frame = frame.f_back
        return found


_CALL = compile("function(*items, **given)", "<ast>", "eval")


def _value(self: evaluator.ExprEvaluator, node: Any) -> Any:
    """Return the value of an expression, whose parts are worked out first, in their order."""
    kind = type(node)
    if kind is doc.Name:
        if node.id in self.value_table:
            return self.value_table[node.id]
        if hasattr(builtins, node.id):
            return getattr(builtins, node.id)
        raise evaluator.ParserError(node, f"Undefined variable: {node.id}")
    if kind is doc.Constant:
        return node.value
    parts = _parts(self, node, kind)
    if parts is None:
        found = _visited(self, node)
        return found.value if type(found) is doc.Constant else self.value_table[found.id]
    try:
        return _made(self, node, kind, parts)
    except Exception as error:  # any, as in TVM: it says where
        self.parser.report_error(node, error)


def _parts(self: evaluator.ExprEvaluator, node: Any, kind: type) -> list[Any] | None:
    """Return the values that a step needs; None if it is one that TVM has to work out."""
    if kind is doc.Attribute:
        return [_value(self, node.value)]
    if kind is doc.Subscript:
        return [_value(self, node.value), _value(self, node.slice)]
    if kind is doc.Slice:
        ends = (node.lower, node.upper, node.step)
        return [None if end is None else _value(self, end) for end in ends]
    if kind is doc.Tuple or kind is doc.List:
        return _items(self, node.elts)
    if kind is doc.Call and all(keyword.arg is not None for keyword in node.keywords):
        function, items = _value(self, node.func), _items(self, node.args)
        return [function, items, {k.arg: _value(self, k.value) for k in node.keywords}]
    if kind is doc.JoinedStr and all(map(_is_plain, node.values)):
        texts = (part if type(part) is doc.Constant else part.value for part in node.values)
        return [_value(self, text) for text in texts]
    if kind is doc.BinOp:
        operands = [node.left, node.right]
    elif kind is doc.UnaryOp:
        operands = [node.operand]
    elif kind is doc.Compare and len(node.ops) == 1:
        operands = [node.left, node.comparators[0]]
    else:
        return None
    return [_value(self, operand) for operand in operands]


def _is_plain(part: Any) -> bool:
    """Return whether a part of an f-string is text, or a value without format."""
    kind = type(part)
    return kind is doc.Constant or (part.conversion == -1 and part.format_spec is None)


def _items(self: evaluator.ExprEvaluator, nodes: list[Any]) -> list[Any]:
    found: list[Any] = []
    for node in nodes:
        if type(node) is doc.Starred:
            values = _value(self, node.value)
            try:
                found += values
            except TypeError as error:
                self.parser.report_error(node, error)
        else:
            found.append(_value(self, node))
    return found


def _made(self: evaluator.ExprEvaluator, node: Any, kind: type, parts: list[Any]) -> Any:
    """Return the value of a step whose parts are known."""
    if kind is doc.Attribute:
        return getattr(parts[0], node.attr)
    if kind is doc.Subscript:
        return parts[0][parts[1]]
    if kind is doc.Slice:
        return slice(*parts)
    if kind is doc.Tuple:
        return tuple(parts)
    if kind is doc.JoinedStr:
        return "".join(map(format, parts))
    if kind is doc.List:
        return parts
    if kind is doc.Call:
        # Inlined functions look for the parser among the globals of their callers.
        names = dict(zip(("function", "items", "given"), parts, strict=True))
        return eval(_CALL, self.value_table, names)
    return evaluator._eval_op(node.ops[0] if kind is doc.Compare else node.op, parts)


_visited = evaluator.ExprEvaluator._visit_node
_NODES = (doc.Name, doc.Constant, doc.Starred)
"""Expressions that stand for themselves."""


def _visit(self: evaluator.ExprEvaluator, node: Any) -> Any:
    """Do what TVM's `ExprEvaluator._visit` does: return a node that stands for the value."""
    if isinstance(node, list | tuple):
        return type(node)(_visit(self, part) for part in node)
    if isinstance(node, doc.expr | doc.Slice) and type(node) not in _NODES:
        return self._add_intermediate_result(_value(self, node))
    return _visited(self, node)


def _evaluated(parser: Any, value_table: dict[str, Any], node: Any) -> Any:
    """Do what TVM's `ExprEvaluator.eval` does."""
    return _value(evaluator.ExprEvaluator(parser, value_table), node)


def _computing(compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return TVM's `_eval_expr` that runs no Python program to look up a name."""

    def computed(node: Any, names: Any) -> Any:
        if type(node) is doc.Name and node.id in names:
            return names[node.id]
        return node.value if type(node) is doc.Constant else compute(node, names)

    return computed


def _reading(read: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Return TVM's `Source.__init__` that reads the text of a function once.

    Code is told apart by identity: equal code may have other annotations, in another file or after
    a module was loaded again.
    """
    found: dict[int, tuple[CodeType, dict[str, Any]]] = {}

    def source(self: Any, program: Any) -> None:
        code = getattr(program, "__code__", None)
        if code is None:
            read(self, program)
            return
        if id(code) not in found:
            read(self, program)
            found[id(code)] = code, dict(vars(self))  # the code stays, and so does its number
        vars(self).update(found[id(code)][1])

    return source


def _assigning(assign: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return TVM's `_eval_assign` that runs no Python program to give a name a value."""

    def assigned(target: Any, source: Any) -> Any:
        if type(target) is doc.Name:
            return {target.id: source}
        if type(target) is doc.Tuple and all(type(name) is doc.Name for name in target.elts):
            source = list(source)
            if len(source) == len(target.elts):
                return {name.id: value for name, value in zip(target.elts, source, strict=True)}
        return assign(target, source)

    return assigned


def _copied(node: Any) -> Any:
    """Return a copy, to change which context a name has, of all that may be changed in it."""
    return copy.copy(node) if type(node) is doc.Name else copy.deepcopy(node)


def install() -> None:
    """Let TVM parse so from now on, in this process; again changes nothing."""
    if isinstance(entry.inspect, _Inspect):
        return
    quick = _Inspect("inspect")
    for module in (parser, ir, entry):
        module.inspect = quick
    tree = functools.cache(doc.parse)  # the parser makes nodes of its own and changes none
    diagnostics.Source.__init__ = _reading(diagnostics.Source.__init__)
    diagnostics.Source.as_ast = lambda self: tree(self.source)
    parser.Parser.with_source_span = lambda self, node: contextlib.nullcontext()
    parser.Parser.annotate_current_source_span = lambda self, value: value
    evaluator.ExprEvaluator.eval = staticmethod(_evaluated)
    evaluator.ExprEvaluator._visit = _visit
    evaluator._eval_expr = _computing(evaluator._eval_expr)
    evaluator._eval_assign = _assigning(evaluator._eval_assign)
    statements.deepcopy = _copied
    definition = parser.ScriptMacro.get_macro_def

    def kept(self: Any) -> Any:
        if "_kept_definition" not in vars(self):
            self._kept_definition = definition(self)
        return self._kept_definition

    parser.ScriptMacro.get_macro_def = kept
