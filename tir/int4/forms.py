"""How vectors of words lie in an INT4 weight: what its index map says of words side by side.

A word, 32 bits, has eight codes, a vector ``lanes`` words.  Either a word's codes are eight columns
of a row k (``along`` "n": the plain layout), or eight rows of a column ("k": all others).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blockscale.base.index_maps import TRTLLM, IndexMap

WORD = 8
"""Codes of a word."""

_E: tuple[str, tuple[int | None, ...]] = ("e", (None,))

MAPS = {
    "plain": IndexMap("plain", (_E, ("k", (None,)), ("n", (None,))), "e k n", 4),
    "rows": IndexMap("rows", (_E, ("k", (None,)), ("n", (None,))), "e n k", 4, 8),
    **{name: found for name, found in TRTLLM.items() if found.bits == 4},
}
"""Where code (e, k, n) lies, by layout; a flip of 8 makes codes 0 to 15 of numbers -8 to 7."""


@dataclass(frozen=True)
class Form:
    """A weight [K, N] as vectors: ``bands`` times ``steps`` times ``inner`` of them ("k").

    Attributes:
        along: axis of a word's codes.
        lanes: words of a vector.
        columns: of a vector.
        span: rows of a vector; vectors of a band follow each other along K in such steps.
        inner: vectors of further columns that come before K goes on.
        slot_k, lane_k: rows of codes in their word, and of words in their vector, from its first.
    """

    along: str
    lanes: int
    columns: int
    span: int
    inner: int
    slot_k: tuple[int, ...]
    lane_k: tuple[int, ...]

    @property
    def band(self) -> int:
        """Columns that K runs through together."""
        return self.columns * self.inner

    def rows(self, slot: Any, lane: Any) -> Any:
        """Row of a code from the first of its vector on; ``slot`` and ``lane`` are expressions."""
        return _weighted(self.slot_k, slot) + _weighted(self.lane_k, lane)


def _weighted(offsets: Sequence[int], index: Any) -> Any:
    """``offsets[index]``, which is linear in the binary digits of the index."""
    total: Any = 0
    bit = 1
    while bit < len(offsets):
        total = total + index // bit % 2 * offsets[bit]
        bit *= 2
    return total


def form_of(name: str, k: int, n: int, group: int, lanes: int) -> Form | None:
    """Return the vectors of a layout, of at most ``lanes`` words; None: they fill no group."""
    while lanes >= 4:
        found = _form(MAPS[name], k, n, lanes)
        if found is not None and group % found.span == 0 and k % group == 0:
            return found
        lanes //= 2
    return None


Piece = tuple[str, int, int]
"""Axis, how far apart on it, how many."""


def _form(layout: IndexMap, k: int, n: int, lanes: int) -> Form | None:
    pieces = _pieces(layout, k, n)
    slots = _cut(pieces, WORD) if pieces else None
    words = _cut(slots[0], lanes) if slots else None
    if slots is None or words is None:
        return None
    slot, lane, rest = slots[1], words[1], words[0]
    offsets = [_offsets(part, "k") for part in (slot, lane)]
    columns = _count(slot, "n") * _count(lane, "n")
    if all(axis == "n" for axis, _, _ in slot):
        whole = all(axis == "n" for axis, _, _ in lane)
        return Form("n", lanes, columns, 1, 1, *offsets) if whole else None
    span = _count(slot, "k") * _count(lane, "k")
    axes = "".join(axis for axis, _, count in rest if count > 1 or axis == "k")
    steps = [piece for piece in rest if piece[0] == "k"]
    if axes.lstrip("n").lstrip("k").strip("n") or [p[1] for p in steps[-1:]] not in ([], [span]):
        return None
    after = rest[max((i for i, p in enumerate(rest) if p[0] == "k"), default=-1) + 1 :]
    inner = _count(after, "n") if steps else 1
    return Form("k", lanes, columns, span, inner, *offsets)


def _pieces(layout: IndexMap, k: int, n: int) -> list[Piece] | None:
    """Digits of k and n in their order, the most significant first; None: sizes are not whole."""
    if any(size % step for size, step in zip((k, n), layout.multiples()[1:], strict=True)):
        return None
    extents = layout.extents((1, k, n))
    found = []
    for axis, i in layout.digits:
        digits = [extents[axis, j] for j in range(i + 1, len(dict(layout.axes)[axis]))]
        apart = 1
        for count in digits:
            apart *= count
        if axis != "e":
            found.append((axis, apart, extents[axis, i]))
    return found


def _cut(pieces: list[Piece], count: int) -> tuple[list[Piece], list[Piece]] | None:
    """Take the ``count`` innermost elements off; None if no digits make them up."""
    rest = list(pieces)
    taken: list[Piece] = []
    while count > 1:
        if not rest:
            return None
        axis, apart, have = rest.pop()
        if have > count:
            if have % count:
                return None
            rest.append((axis, apart * count, have // count))
            have = count
        elif count % have:
            return None
        taken.insert(0, (axis, apart, have))
        count //= have
    return rest, taken


def _count(pieces: list[Piece], axis: str) -> int:
    total = 1
    for of, _, count in pieces:
        total *= count if of == axis else 1
    return total


def _offsets(pieces: list[Piece], axis: str) -> tuple[int, ...]:
    """How far along ``axis`` each element of the pieces is."""
    found = [0]
    for of, apart, count in pieces:
        found = [at + (i * apart if of == axis else 0) for at in found for i in range(count)]
    return tuple(found)
