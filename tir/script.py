"""TVMScript's parser without its two slow habits: kernels are built in half the time.

TVM 0.27 asks `inspect` for the whole stack, with a line of source of each frame, at every call of
an inlined function (each looks through all loaded modules), and reads the text of a function anew
for every use.  What the parser makes is the same: tests/tir/test_script.py compares.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import sys
from types import FrameType, ModuleType
from typing import Any

from tvm.script.parser.core import diagnostics, doc, parser
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


def install() -> None:
    """Let TVM parse so from now on, in this process; again changes nothing."""
    if isinstance(entry.inspect, _Inspect):
        return
    quick = _Inspect("inspect")
    for module in (parser, ir, entry):
        module.inspect = quick
    tree = functools.cache(doc.parse)  # the parser makes nodes of its own and changes none
    diagnostics.Source.as_ast = lambda self: tree(self.source)
    definition = parser.ScriptMacro.get_macro_def

    def kept(self: Any) -> Any:
        if "_kept_definition" not in vars(self):
            self._kept_definition = definition(self)
        return self._kept_definition

    parser.ScriptMacro.get_macro_def = kept
