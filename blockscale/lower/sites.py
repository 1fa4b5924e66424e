"""What a scheduled function says, for readers of plans: blocks, their loops, instructions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from blockscale.base.errors import LoweringError
from blockscale.specs.plans import PREFIX

_CALL = re.compile(r"bs_(?P<what>[a-z0-9_]+?)(?:<(?P<number>\d+)>)?$")


@dataclass(frozen=True)
class Site:
    """A block with the loops around it, outermost first, and the instruction that it calls."""

    block: Any
    loops: tuple[Any, ...]
    what: str = ""
    """For example "tcgen05_cp"; empty without a call."""
    number: int = 0
    """Template argument: the CTA group, or columns."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"block '{self.block.name_hint}'"

    def extents(self, outside: Any) -> list[int]:
        """Extents of the loops inside of the loop ``outside``."""
        depth = next(i for i, loop in enumerate(self.loops) if loop.same_as(outside))
        return [constant(loop.extent, self.name) for loop in self.loops[depth + 1 :]]

    def buffer(self, number: int) -> Any:
        """The buffer that the instruction's operand ``number`` is a part of."""
        return self.block.match_buffers[number].source.source

    def shape(self, number: int) -> tuple[int, ...]:
        """Shape of the instruction's operand ``number``."""
        return tuple(int(extent) for extent in self.block.match_buffers[number].buffer.shape)


def constant(extent: Any, where: str) -> int:
    """Return an extent as a number; LoweringError if it is none."""
    if not isinstance(extent, tirx.IntImm):
        raise LoweringError(f"{where}: a loop inside of a tile has the extent {extent}, no number")
    return int(extent)


def expect(where: str, what: str, found: Any, wanted: Any) -> None:
    """LoweringError unless the schedule says the same in both places."""
    if found != wanted:
        raise LoweringError(
            f"{where}: {what} is {found}, and the rest of the schedule implies {wanted}"
        )


def sites(stmt: Any, loops: tuple[Any, ...] = ()) -> Iterator[Site]:
    """Yield every block in ``stmt``."""
    kind = type(stmt).__name__
    if kind == "For":
        yield from sites(stmt.body, (*loops, stmt))
    elif kind == "SeqStmt":
        for part in stmt.seq:
            yield from sites(part, loops)
    elif kind == "SBlockRealize":
        call = called(stmt.block.body)
        yield Site(stmt.block, loops, *call)
        if not call[0]:
            yield from sites(stmt.block.body, loops)
    elif kind not in ("BufferStore", "Evaluate"):
        raise LoweringError(
            f"a {kind} inside of {len(loops)} loops: only loops, blocks and tensor intrinsics are "
            "lowered; schedule without it"
        )


def called(body: Any) -> tuple[str, int]:
    """Instruction and template argument of an intrinsic's body; ("", 0) if it is none."""
    name = function(body.value) if type(body).__name__ == "Evaluate" else ""
    found = _CALL.match(name)
    return (found["what"], int(found["number"] or 0)) if found else ("", 0)


def function(value: Any) -> str:
    """Name of the device function that ``value`` calls; "" if it is no such call."""
    is_call = getattr(getattr(value, "op", None), "name", "") == "tirx.cuda.func_call"
    return str(value.args[0].value) if is_call else ""


def one(among: list[Site], what: str, why: str) -> Site:
    """Return the only block that calls ``what``."""
    found = [site for site in among if site.what == what]
    if len(found) != 1:
        raise LoweringError(f"{len(found)} blocks call {what}, not one; {why}")
    return found[0]


def annotated(loop: Any, known: Mapping[str, int | None], name: str) -> dict[str, int]:
    """Return the decisions that are annotated on ``loop``, with the defaults of the others."""
    values: dict[str, int] = {key: default or 0 for key, default in known.items()}
    found = {str(key): value for key, value in loop.annotations.items()}
    for key, value in found.items():
        decision = key.removeprefix(PREFIX)
        if not key.startswith(PREFIX) or decision not in known:
            raise LoweringError(
                f"loop over {name}: annotation {key!r} is none of "
                f"{[PREFIX + decision for decision in known]}"
            )
        values[decision] = int(value)
    if "stages" in known and f"{PREFIX}stages" not in found:
        raise LoweringError(f"loop over {name}: annotation '{PREFIX}stages' is missing")
    return values
