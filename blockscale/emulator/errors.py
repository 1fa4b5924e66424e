"""What the emulator raises: each error says kernel, PTX line, warp, lane and the broken rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """Where in a running kernel something happened; unknown parts are None."""

    kernel: str | None = None
    line: int | None = None
    opcode: str | None = None
    cta: tuple[int, int, int] | None = None
    warp: int | None = None
    lane: int | None = None

    def __str__(self) -> str:
        parts = []
        if self.kernel is not None:
            parts.append(f"kernel {self.kernel}")
        if self.line is not None:
            parts.append(f"line {self.line}")
        if self.cta is not None:
            parts.append("CTA ({}, {}, {})".format(*self.cta))
        if self.warp is not None:
            parts.append(f"warp {self.warp}")
        if self.lane is not None:
            parts.append(f"lane {self.lane}")
        if self.opcode is not None:
            parts.append(self.opcode)
        return ", ".join(parts)


class EmulationError(RuntimeError):
    """A kernel cannot be run or broke a rule; `place` says where, `rule` is the sentence alone."""

    def __init__(self, rule: str, *, lane: int | None = None) -> None:
        super().__init__(rule)
        self.rule = rule
        self.lane = lane  # index into the gang's lanes, until the machine has made a place of it
        self.place: Place | None = None
        self.report: Any = None  # what had been counted until then

    def at(self, place: Place) -> EmulationError:
        """Return this error with its place (the innermost one wins)."""
        if self.place is None:
            self.place = place
            self.args = (f"{place}: {self.rule}",)
        return self


class PtxError(EmulationError):
    """PTX text that cannot be read: a syntax error, an unknown or malformed instruction."""


class IllegalOperation(EmulationError):
    """An executed instruction broke a rule of the PTX ISA."""


class InstructionLimit(EmulationError):
    """The kernel has run `max_instructions`: an endless loop, or one that is that long."""


class Deadlock(EmulationError):
    """No warp can go on and nothing asynchronous is pending; the message has every warp's place."""
