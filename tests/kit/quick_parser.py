"""TVMScript is parsed faster: most of the time that a test takes to make a kernel goes there.

TVM's parser asks for the whole stack with a line of source of each frame (pytest's is sixty deep)
and reads the definition of an inlined function anew for every use.  What it makes is the same:
tests/house/test_kit.py compares.
"""

from __future__ import annotations

import inspect
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
            if len(found) < NEAR:
                found.append(inspect.FrameInfo(frame, *inspect.getframeinfo(frame, context)))
            else:
                code = frame.f_code
                rest = (code.co_filename, frame.f_lineno, code.co_name, None, None)
                found.append(inspect.FrameInfo(frame, *rest))
            frame = frame.f_back
        return found


def install() -> None:
    """Let the parser do so from now on, in this process."""
    from tvm.script.parser.core import parser
    from tvm.tirx.script.builder import ir
    from tvm.tirx.script.parser import entry

    quick = _Inspect("inspect")
    for module in (parser, ir, entry):
        module.inspect = quick
    definition = parser.ScriptMacro.get_macro_def

    def kept(self: Any) -> Any:
        if "_kept_definition" not in vars(self):
            self._kept_definition = definition(self)
        return self._kept_definition

    parser.ScriptMacro.get_macro_def = kept
