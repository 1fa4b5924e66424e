"""Layouts as index maps, and index maps as data: digits of a tensor's axes, in another order.

Every axis is split into digits, most significant first, like the hours, minutes and seconds of a
time; a layout is the order in which all digits of all axes make up an element's place.  With rows
r = (r0, r1 < 4, r2 < 32) and columns c = (c0, c1 < 4), the 128x4 layout of tcgen05 and cuBLAS is

    place(r, c) = ((((r0 * C0 + c0) * 32 + r2) * 4 + r1) * 4 + c1),  C0 = ceil(columns / 4)

so a map and its inverse are the same digits read in two ways.  Places count elements of ``bits``
bits, of which those of four lie two to a byte, the first in the low nibble, before and after.

The arithmetic is that of integers (``//``, ``%``, ``*``, ``+``): Python's, arrays', torch's, and
TensorIR expressions'.  This module imports nothing, so that a process that only calls kernels can
use it; `blockscale.tir.layout.relayout` makes kernels of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Digit = tuple[str, int]
"""Name of an axis and number of one of its digits, 0 the most significant."""


@dataclass(frozen=True)
class IndexMap:
    """A layout of a tensor with named axes.

    Attributes:
        name: of the layout.
        axes: of each axis its name and the sizes of its digits; None, once an axis: as many as the
            tensor needs.
        order: all digits, most significant first, as ``"e n.0 k.0 n.1 k.1"``; a name alone is
            digit 0 of an axis.
        bits: of an element.
        flip: what every element is XORed with on the way.
        pads: whether sizes that fill no whole digits are padded, with elements of zero; else they
            must be whole.
    """

    name: str
    axes: tuple[tuple[str, tuple[int | None, ...]], ...]
    order: str
    bits: int = 8
    flip: int = 0
    pads: bool = False

    def __post_init__(self) -> None:
        every = [(name, i) for name, sizes in self.axes for i in range(len(sizes))]
        assert sorted(self.digits) == sorted(every), f"{self.name}: not every digit, once"
        assert all(sizes.count(None) == 1 for _, sizes in self.axes), f"{self.name}: one is open"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes, the last one innermost in the plain tensor."""
        return tuple(name for name, _ in self.axes)

    @property
    def digits(self) -> tuple[Digit, ...]:
        """The digits in their order of the layout, most significant first."""
        pairs = (text.partition(".") for text in self.order.split())
        return tuple((name, int(digit or 0)) for name, _, digit in pairs)

    def multiples(self) -> tuple[int, ...]:
        """Of what number each axis' padded size is a multiple."""
        return tuple(_product(size for size in sizes if size is not None) for _, sizes in self.axes)

    def padded(self, sizes: Sequence[Any]) -> tuple[Any, ...]:
        """Sizes of the axes in the layout."""
        steps = zip(sizes, self.multiples(), strict=True)
        return tuple(
            size if step == 1 else (size + (step - 1)) // step * step for size, step in steps
        )

    def elements(self, sizes: Sequence[Any]) -> Any:
        """Number of elements of the layout, with padding."""
        return _product(self.padded(sizes))

    def extents(self, sizes: Sequence[Any]) -> dict[Digit, Any]:
        """Size of every digit, for a tensor of ``sizes``."""
        found: dict[Digit, Any] = {}
        for (name, digits), size, step in zip(self.axes, sizes, self.multiples(), strict=True):
            up = size + (step - 1) if self.pads and step > 1 else size
            for i, digit in enumerate(digits):
                found[name, i] = (up if step == 1 else up // step) if digit is None else digit
        return found

    def place(self, index: Sequence[Any], sizes: Sequence[Any]) -> Any:
        """Where element ``index`` of a tensor of ``sizes`` lies in the layout."""
        extents = self.extents(sizes)
        values: dict[Digit, Any] = {}
        for (name, digits), at in zip(self.axes, index, strict=True):
            values |= _split(name, at, [extents[name, i] for i in range(len(digits))])
        return _joined((extents[digit], values[digit]) for digit in self.digits)

    def index(self, place: Any, sizes: Sequence[Any]) -> tuple[Any, ...]:
        """Which element lies at ``place``; one past ``sizes`` is padding."""
        extents = self.extents(sizes)
        values: dict[Digit, Any] = {}
        for digit in reversed(self.digits[1:]):
            values[digit] = place % extents[digit]
            place = place // extents[digit]
        values[self.digits[0]] = place
        return tuple(
            _joined((extents[name, i], values[name, i]) for i in range(len(digits)))
            for name, digits in self.axes
        )


def _product(values: Iterable[Any]) -> Any:
    total: Any = None
    for value in values:
        total = value if total is None else total * value
    return 1 if total is None else total


def _split(name: str, value: Any, extents: Sequence[Any]) -> dict[Digit, Any]:
    """Digits of ``value``; the most significant one keeps what is left."""
    found: dict[Digit, Any] = {}
    for i in range(len(extents) - 1, 0, -1):
        found[name, i] = value % extents[i]
        value = value // extents[i]
    found[name, 0] = value
    return found


def _joined(digits: Iterable[tuple[Any, Any]]) -> Any:
    """The number that has these digits, each with its size, most significant first."""
    total: Any = None
    for extent, value in digits:
        total = value if total is None else total * extent + value
    return total


# ---- Block scales -------------------------------------------------------------------------------

_E: tuple[str, tuple[int | None, ...]] = ("e", (None,))
"""Experts, or a batch: every one begins anew, and is padded for itself."""

SCALES_128X4 = IndexMap(
    "128x4", (_E, ("r", (None, 4, 32)), ("c", (None, 4))), "e r.0 c.0 r.2 r.1 c.1", pads=True
)
"""tcgen05 and cuBLAS ("swizzled")."""

SCALES_8X4 = IndexMap(
    "8x4", (_E, ("r", (None, 8)), ("c", (None, 4))), "e r.0 c.0 r.1 c.1", pads=True
)
"""TensorRT-LLM's kernels for few rows."""

DEEPGEMM = IndexMap(
    "deepgemm", (_E, ("r", (None, 4)), ("c", (None, 4))), "e c.0 r.0 r.1 c.1", pads=True
)
"""DeepGEMM's int32 words, byte j of word w block 4w + j: rows innermost, multiples of four."""

DEEPGEMM_PERMUTED = IndexMap(
    "deepgemm_permuted", (_E, ("r", (None, 4, 32)), ("c", (None, 4))), "e c.0 r.0 r.2 r.1 c.1"
)
"""The same of its mega MoE: row r of every 128 first moves to 4 * (r % 32) + r // 32."""


def gate_up(granule: int) -> IndexMap:
    """Rows [gate | up] in turns of ``granule``, each row of bytes as it is."""
    rows = ("r", (2, None, granule))
    return IndexMap(f"gate_up_{granule}", (_E, rows, ("b", (None,))), "e r.1 r.0 r.2 b")


def marlin(order: str, bits: int) -> IndexMap:
    """Marlin's scales [G, N] of ``bits`` bits: of groups, of columns, or of one-byte E4M3.

    Marlin decodes four bytes in the order 0, 2, 1, 3; "e4m3" makes up for it.
    """
    columns, text = {
        "group": ((None, 8, 8), "g n.0 n.2 n.1"),
        "column": ((None, 4, 4, 2), "g n.0 n.2 n.1 n.3"),
        "e4m3": ((None, 2, 2, 2, 8), "g n.0 n.4 n.1 n.3 n.2"),
    }[order]
    return IndexMap(f"marlin_{order}", (("g", (None,)), ("n", columns)), text, bits)


def w4a8_scales(neighbours: int) -> IndexMap:
    """TensorRT-LLM's scales [E, G, N] for W4A8 on sm 90: so many blocks of a column in a row."""
    blocks = ("g", (None, neighbours))
    return IndexMap(f"w4a8_{neighbours}", (_E, blocks, ("n", (None,))), "e g.0 n g.1", 16)


# ---- INT4 and INT8 weights of TensorRT-LLM ------------------------------------------------------

_INT4_A16 = ("k", (None, 2, 4, 4, 2))
_INT4_A8 = ("k", (None, 4, 2, 4, 2, 2))
_INT8_A16 = ("k", (None, 4, 2, 4, 2))

TRTLLM = {
    # codes and activations, and whether columns are interleaved; 1024 bits of a column are a tile
    "int4_a16": IndexMap(
        *("int4_a16", (_E, _INT4_A16, ("n", (None, 4))), "e n.0 k.0 n.1 k.1 k.3 k.4 k.2"),
        *(4, 8),
    ),
    "int4_a8": IndexMap(
        *("int4_a8", (_E, _INT4_A8, ("n", (None, 2))), "e n.0 k.0 n.1 k.1 k.3 k.5 k.2 k.4"),
        *(4, 8),
    ),
    "int8_a16": IndexMap(
        *("int8_a16", (_E, _INT8_A16, ("n", (None, 2))), "e n.0 k.0 n.1 k.1 k.3 k.4 k.2"),
        *(8, 128),
    ),
    "int4_a16_columns": IndexMap(
        *("int4_a16_columns", (_E, ("k", (None, 4, 4, 2)), ("n", (None,))), "e n k.0 k.2 k.3 k.1"),
        *(4, 8),
    ),
    "int4_a8_columns": IndexMap(
        "int4_a8_columns",
        (_E, ("k", (None, 2, 4, 2, 2)), ("n", (None,))),
        "e n k.0 k.2 k.4 k.1 k.3",
        *(4, 8),
    ),
    "int8_a16_columns": IndexMap(
        *("int8_a16_columns", (_E, ("k", (None, 2, 4, 2)), ("n", (None,))), "e n k.0 k.2 k.3 k.1"),
        *(8, 128),
    ),
    "int4_transposed": IndexMap(
        *("int4_transposed", (_E, ("k", (None,)), ("n", (None,))), "e n k", 4),
    ),
    "int8_transposed": IndexMap(
        *("int8_transposed", (_E, ("k", (None,)), ("n", (None,))), "e n k", 8),
    ),
}
