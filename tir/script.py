"""TVMScript's parser without its three slow habits: kernels are built in half the time.

TVM 0.27 asks `inspect` for the whole stack, with a line of source of each frame, at every call of
an inlined function (each looks through all loaded modules), reads the text of a function anew for
every use, and compiles each step of an expression with Python's compiler.  What the parser makes is
the same: tests/tir/test_script.py compares.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import linecache
import sys
from types import FrameType, ModuleType
from typing import Any

from tvm.script.parser.core import diagnostics, doc, evaluator, parser
from tvm.tirx.script.builder import ir
from tvm.tirx.script.parser import entry

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


class _Unknown(Exception):
    """A step of an expression that `_value` leaves to TVM."""


def _value(node: Any, names: dict[str, Any]) -> Any:
    """Return the value of a step of an expression, whose parts have names or are constants."""
    kind = type(node)
    if kind is doc.Name:
        if node.id in names:
            return names[node.id]
        if hasattr(builtins, node.id):
            return getattr(builtins, node.id)
        raise NameError(f"name {node.id!r} is not defined")
    if kind is doc.Constant:
        return node.value
    if kind is doc.Attribute:
        return getattr(_value(node.value, names), node.attr)
    if kind is doc.Subscript:
        return _value(node.value, names)[_value(node.slice, names)]
    if kind is doc.Tuple or kind is doc.List:
        items = _items(node.elts, names)
        return tuple(items) if kind is doc.Tuple else items
    if kind is doc.Call:
        if any(keyword.arg is None for keyword in node.keywords):
            raise _Unknown
        function, items = _value(node.func, names), _items(node.args, names)
        given = {keyword.arg: _value(keyword.value, names) for keyword in node.keywords}
        # Inlined functions look for the parser among the globals of their callers.
        return eval(_CALL, names, {"function": function, "items": items, "given": given})
    raise _Unknown


def _items(nodes: list[Any], names: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    for node in nodes:
        if type(node) is doc.Starred:
            found += _value(node.value, names)
        else:
            found.append(_value(node, names))
    return found


def install() -> None:
    """Let TVM parse so from now on, in this process; again changes nothing."""
    if isinstance(entry.inspect, _Inspect):
        return
    quick = _Inspect("inspect")
    for module in (parser, ir, entry):
        module.inspect = quick
    tree = functools.cache(doc.parse)  # the parser makes nodes of its own and changes none
    diagnostics.Source.as_ast = lambda self: tree(self.source)
    evaluated = evaluator._eval_expr

    def step(node: Any, names: dict[str, Any] | None) -> Any:
        try:
            return _value(node, names or {})
        except _Unknown:
            return evaluated(node, names)

    evaluator._eval_expr = step
    definition = parser.ScriptMacro.get_macro_def

    def kept(self: Any) -> Any:
        if "_kept_definition" not in vars(self):
            self._kept_definition = definition(self)
        return self._kept_definition

    parser.ScriptMacro.get_macro_def = kept
