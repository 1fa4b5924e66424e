"""TVMScript is parsed faster: most of the time that a test takes to make a kernel goes there.

TVM's parser asks for the whole stack with a line of source of each frame (pytest's is sixty deep)
and reads the text of a function anew for every use.  What it makes is the same:
tests/house/test_kit.py compares.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import sys
from types import FrameType, ModuleType
from typing import Any

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
            file, line = frame.f_code.co_filename, frame.f_lineno
            near = len(found) < NEAR  # not by `inspect`, which looks through all modules for each
            lines = linecache.getlines(file)[line - 1 : line] if near and context else None
            found.append(inspect.FrameInfo(frame, file, line, frame.f_code.co_name, lines, 0))
            frame = frame.f_back
        return found


def install() -> None:
    """Let the parser do so from now on, in this process."""
    from tvm.script.parser.core import diagnostics, doc, parser
    from tvm.tirx.script.builder import ir
    from tvm.tirx.script.parser import entry

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
