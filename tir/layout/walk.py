"""Loops over what a tile leaves of a layout's digits, and places on both sides of an index map."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.tirx.script.builder import ir as T

from blockscale.base.index_maps import Digit, IndexMap
from blockscale.tir.common import i64
from blockscale.tir.layout.plan import WORD_BITS, Bit, plain_order
from blockscale.tir.layout.plan import sizes as digit_bits

OUTER = 4
"""Loops around a tile: three axes, the first of them 1 where the tensor has two; fixed digits."""

Values = dict[Digit, PrimExpr]


@dataclass(frozen=True)
class Tensors:
    """Parameters and sizes of the function, in elements."""

    layout: IndexMap
    plain: Any
    laid: Any
    sizes: tuple[PrimExpr, ...]
    inverse: bool

    @property
    def extents(self) -> Values:
        """Sizes of all digits."""
        return dict(self.layout.extents(self.sizes))

    def words(self, plain: bool, bits: int) -> Any:
        """A parameter as words of so many bits, one after the other."""
        sizes = self.sizes if plain else self.layout.padded(self.sizes)
        total = sizes[0]
        for size in sizes[1:]:
            total = total * size
        count = tirx.floordiv(total * i64(self.layout.bits), i64(bits))
        buffer = self.plain if plain else self.laid
        return T.decl_buffer((count,), f"uint{bits}", data=buffer.data)

    def offset(self, plain: bool, values: Values, skip: int = 0) -> PrimExpr:
        """Number of the element with these digits on one side, without its lowest ``skip`` bits."""
        if not plain:
            return _joined(self.shifted(self.layout.digits, values, skip))
        *names, last = self.layout.names
        index = [self.index(name, values) for name in names]
        digits = [(last, i) for i in range(len(dict(self.layout.axes)[last]))]
        sizes = (*self.sizes[:-1], tirx.floordiv(self.sizes[-1], i64(2**skip)))
        index.append(_joined(self.shifted(digits, values, skip)))
        return _joined(zip(sizes, index, strict=True))

    def shifted(
        self, digits: Sequence[Digit], values: Values, skip: int
    ) -> list[tuple[PrimExpr, PrimExpr]]:
        """Sizes and values of digits, most significant first, without the lowest ``skip`` bits."""
        known, found = digit_bits(self.layout), []
        for digit in reversed(digits):
            size = known[digit]
            gone = skip if size is None else min(skip, size)
            skip -= gone
            if not gone:
                found.append((self.extents[digit], values[digit]))
            elif gone != size:
                part = i64(2**gone)
                extent, value = self.extents[digit], values[digit]
                found.append((tirx.floordiv(extent, part), tirx.floordiv(value, part)))
        return found[::-1]

    def index(self, name: str, values: Values) -> PrimExpr:
        """Index on one axis of the plain tensor."""
        digits = dict(self.layout.axes)[name]
        return _joined((self.extents[name, i], values[name, i]) for i in range(len(digits)))


def _joined(digits: Any) -> PrimExpr:
    """The number with these digits, each with its size, most significant first."""
    total: Any = None
    for extent, value in digits:
        total = value if total is None else total * extent + value
    return total


# ---- Loops around tiles -------------------------------------------------------------------------


class Walk:
    """What is left of the digits when a tile has its bits: four loops, and the way back."""

    def __init__(self, tensors: Tensors, taken: dict[Digit, int]) -> None:
        self.tensors, self.taken = tensors, taken
        layout, extents = tensors.layout, tensors.extents
        self.bits = digit_bits(layout)
        self.open = [digit for digit in plain_order(layout) if self.bits[digit] is None]
        self.fixed = [
            (digit, (self.bits[digit] or 0) - taken.get(digit, 0))
            for digit in layout.digits
            if self.bits[digit] is not None and self.bits[digit] != taken.get(digit, 0)
        ]
        counts = [_up(extents[digit], 2 ** taken.get(digit, 0)) for digit in self.open]
        first = [i64(1)] * (OUTER - 1 - len(counts))
        fixed = i64(2 ** sum(bits for _, bits in self.fixed))
        self.extents: list[PrimExpr] = [*first, *counts, fixed]

    @contextmanager
    def loops(self, runs: PrimExpr | None) -> Iterator[list[Any]]:
        """The four loops; empty unless ``runs``."""
        first, *others = self.extents
        if runs is not None:
            # Of the outermost loop, whose extent is in no index: else TVM's passes simplify the
            # condition again at every access (a CPU kernel took 1.9 s to build, and 0.6 s so).
            first = tirx.Select(runs, first, i64(0))
        with T.grid(first, *others) as found:
            yield list(found)

    def axes(self, loops: Sequence[Any]) -> list[Any]:
        """Axes of a block for the four loops."""
        return [
            T.axis.spatial(extent, loop) for extent, loop in zip(self.extents, loops, strict=True)
        ]

    def values(
        self, outer: Sequence[PrimExpr], parts: Sequence[tuple[Sequence[Bit], PrimExpr]]
    ) -> Values:
        """All digits, of the loops' values and of numbers whose bits, lowest first, are given."""
        found: Values = {}
        for digit, value in zip(self.open, outer[OUTER - 1 - len(self.open) :], strict=False):
            found[digit] = value * i64(2 ** self.taken.get(digit, 0))
        rest = outer[OUTER - 1]
        for digit, bits in reversed(self.fixed):
            found[digit] = tirx.floormod(rest, i64(2**bits)) * i64(2 ** self.taken.get(digit, 0))
            rest = tirx.floordiv(rest, i64(2**bits))
        for order, number in parts:
            for (name, i), value in _spread(order, number):
                known = found.get((name, i))
                found[name, i] = value if known is None else known + value
        for digit in self.bits:
            found.setdefault(digit, i64(0))
        return found

    def within(self, values: Values, whole: Sequence[Digit]) -> PrimExpr | None:
        """Whether an element lies in the plain tensor, or, unless padded, in the layout.

        None: always.  ``whole``: digits and axes of which no tile has more than there are.
        """
        tensors, layout = self.tensors, self.tensors.layout
        tests = []
        for (name, digits), size, step in zip(
            layout.axes, tensors.sizes, layout.multiples(), strict=True
        ):
            opened = (name, digits.index(None))
            split = bool(self.taken.get(opened))
            if opened in whole or not (split or (layout.pads and step > 1)):
                continue
            if layout.pads:
                tests.append(tensors.index(name, values) < size)
            else:
                tests.append(values[opened] < tensors.extents[opened])
        return tirx.all(*tests) if tests else None

    def laid_within(self, values: Values, whole: Sequence[Digit]) -> PrimExpr | None:
        """Whether an element lies in the layout, padding included; None: always."""
        tests = [
            values[digit] < self.tensors.extents[digit]
            for digit in self.open
            if self.taken.get(digit) and digit not in whole
        ]
        return tirx.all(*tests) if tests else None


def _up(size: PrimExpr, step: int) -> PrimExpr:
    return size if step == 1 else tirx.floordiv(size + i64(step - 1), i64(step))


def _spread(bits: Sequence[Bit], number: PrimExpr) -> Iterator[tuple[Digit, PrimExpr]]:
    """The parts of ``number`` that belong to digits; neighbouring bits as one."""
    start = 0
    while start < len(bits):
        name, i, j = bits[start]
        end = start + 1
        while end < len(bits) and bits[end] == (name, i, j + end - start):
            end += 1
        value = number if start == 0 else tirx.floordiv(number, i64(2**start))
        if end < len(bits):
            value = tirx.floormod(value, i64(2 ** (end - start)))
        yield (name, i), value * i64(2**j) if j else value
        start = end


def word_of(element: int, bits: int) -> PrimExpr:
    """A word of equal elements."""
    return tirx.const(sum(element << at for at in range(0, WORD_BITS, bits)), "uint32")


def mask_of(bits: int, off: int, on: int | None = None) -> PrimExpr:
    """The elements of a word whose number has bit ``off`` clear, and bit ``on`` set."""
    found = 0
    for i in range(WORD_BITS // bits):
        if not i >> off & 1 and (on is None or i >> on & 1):
            found |= ((1 << bits) - 1) << i * bits
    return tirx.const(found, "uint32")


def permuted(number: PrimExpr, order: Sequence[Bit], wanted: Sequence[Bit]) -> PrimExpr:
    """``number``, whose bits are ``order``, with its bits in another order."""
    total: Any = None
    for at, bit in enumerate(wanted):
        value = tirx.floormod(tirx.floordiv(number, i64(2 ** order.index(bit))), i64(2))
        value = value * i64(2**at)
        total = value if total is None else total + value
    return i64(0) if total is None else total
