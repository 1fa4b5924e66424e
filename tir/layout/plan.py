"""How a kernel walks a layout, derived from the digits of its map: bits of digits, divided up.

A digit of size 2^n is n bits, and so are the low parts of an open digit; both orders of a map, of
the plain tensor and of the layout, are orders of the same bits.  A tile is

    the bits of a 32-bit word of either side, and of the words that a load or store takes at once,
    which a thread holds in registers (the words' own bits are exchanged there),

and the bits of its lanes: neighbouring threads, or elements of a CPU's vector.  What is left of a
digit is counted by loops outside of the tile.  This module imports no tvm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from blockscale.base.index_maps import Digit, IndexMap

Bit = tuple[str, int, int]
"""Axis, number of the digit, significance within the digit."""

WORD_BITS = 32
SECTOR_BYTES, LINE_BYTES = 32, 128
"""What an NVIDIA GPU moves at least, and what its caches keep together."""

WARP_BITS = 5
MOST_WORDS, LEAST_WORDS = 16, 8
"""Registers of a GPU thread's tile: more leave too few threads, fewer too few bytes in flight."""

MOST_PAIRS = 32
"""The same where both sides then have vectors of two words, as nibbles do: 234 MB of them on an
H200, transposed 76 % of a copy's bandwidth instead of 51 %; of bytes, 32 words gave 28 to 90 %."""


@dataclass(frozen=True)
class Side:
    """One of the two orders of a tile's bits."""

    low: tuple[Bit, ...]
    """Bits of a word, then of a vector of words, least significant first."""
    regs: tuple[Bit, ...]
    """Bits that number the registers of a thread; the vector's come first."""


@dataclass(frozen=True)
class Plan:
    """A tile of a layout: `plain` and `laid` are its two sides."""

    layout: IndexMap
    plain: Side
    laid: Side
    lanes: tuple[Bit, ...]
    """Least significant first."""
    taken: dict[Digit, int]
    """Low bits of every digit that the tile has."""
    exact: tuple[int, int]
    """Low bits of either side in which sizes must be whole."""

    @property
    def word(self) -> int:
        """Bits that number the elements of a word."""
        return word_bits(self.layout)

    def vector(self, side: Side) -> int:
        """Words of a vector of this side, as a power of two."""
        return len(side.low) - self.word


def word_bits(layout: IndexMap) -> int:
    """Return how many bits number the elements of a 32-bit word."""
    return (WORD_BITS // layout.bits).bit_length() - 1


def sizes(layout: IndexMap) -> dict[Digit, int | None]:
    """Return the bits of every digit; None: any number."""
    found: dict[Digit, int | None] = {}
    for name, digits in layout.axes:
        for i, size in enumerate(digits):
            assert size is None or size & (size - 1) == 0, f"{layout.name}: {size} is no power of 2"
            found[name, i] = None if size is None else size.bit_length() - 1
    return found


def plain_order(layout: IndexMap) -> tuple[Digit, ...]:
    """Return the digits in their order of the plain tensor, most significant first."""
    return tuple((name, i) for name, digits in layout.axes for i in range(len(digits)))


def low_bits(layout: IndexMap, order: Sequence[Digit], count: int) -> tuple[Bit, ...]:
    """Return the lowest ``count`` bits of an order, fewer where it has no more."""
    known = sizes(layout)
    found: list[Bit] = []
    for name, i in reversed(order):
        size = known[name, i]
        for j in range(count - len(found) if size is None else size):
            if len(found) < count:
                found.append((name, i, j))
    return tuple(found)


def _after(bits: Iterable[Bit], *others: Iterable[Bit]) -> tuple[Bit, ...]:
    """Return those of ``bits`` that are in none of the others."""
    gone = {bit for other in others for bit in other}
    return tuple(bit for bit in bits if bit not in gone)


def _plan(
    layout: IndexMap,
    plain: tuple[Bit, ...],
    laid: tuple[Bit, ...],
    lanes: tuple[Bit, ...],
    more: tuple[Bit, ...],
    exact: tuple[int, int],
) -> Plan:
    """Put a plan together from the low bits of both sides, lanes, and more registers."""
    word = word_bits(layout)
    tile = (*plain, *_after(laid, plain), *more)

    def side(low: tuple[Bit, ...]) -> Side:
        return Side(low, (*low[word:], *_after(tile, low)))

    taken: dict[Digit, int] = {}
    for name, i, j in (*tile, *lanes):
        taken[name, i] = max(taken.get((name, i), 0), j + 1)
    count = sum(taken.values())
    assert count == len(tile) + len(lanes), f"{layout.name}: a tile with holes"
    return Plan(layout, side(plain), side(laid), lanes, taken, exact)


# ---- GPUs ---------------------------------------------------------------------------------------


def gpu_plans(layout: IndexMap) -> list[Plan]:
    """Return the tiles to choose from at run time, the widest first: the sizes must fit."""
    wide = _gpu_plan(layout, (0, 1, 2))
    if not wide.vector(wide.plain):
        return [wide]
    return [wide, _gpu_plan(layout, (0,))]


@cache
def _gpu_plan(layout: IndexMap, widths: tuple[int, ...]) -> Plan:
    """Return the tile whose accesses fill most sectors; then the one of the widest vectors.

    What an instruction of a warp touches is vectors and lanes: a register's bit among those of a
    sector halves what is used of it.
    """
    word = word_bits(layout)
    orders = plain_order(layout), layout.digits
    sectors = [low_bits(layout, order, word + 3) for order in orders]
    candidates = []
    for v in widths:
        for u in (0, 1, 2):
            plain, laid = (
                low_bits(layout, order, word + more)
                for order, more in zip(orders, (v, u), strict=True)
            )
            tile = {*plain, *laid}
            if 2 ** (len(tile) - word) <= (MOST_PAIRS if u == v == 1 else MOST_WORDS):
                split = [
                    len(tile.intersection(_after(sector, mine)))
                    for sector, mine in zip(sectors, (plain, laid), strict=True)
                ]
                # Where sectors are split, a narrow side leaves more threads: Marlin's 16-bit scales
                # got 61 % and 49 % of a copy's bandwidth with vectors of 8 and 16 bytes, 71 % and
                # 90 % with 16 and 4 (H200).
                narrow = v - u if max(split) else 0
                score = (-max(split), -sum(split), narrow, min(u, v), u + v, u)
                candidates.append((score, plain, laid))
    _, plain, laid = max(candidates)
    lanes = _grown(layout, (*plain, *laid), WARP_BITS)
    missing = (LEAST_WORDS.bit_length() - 1) - (len({*plain, *laid}) - word)
    more = _grown(layout, (*plain, *laid, *lanes), max(0, missing))
    return _plan(layout, plain, laid, lanes, more, (len(plain), len(laid)))


def streams(plan: Plan) -> bool:
    """Whether caches are better spared: words stay whole and both sides take 16 bytes at once.

    On an H200 the 128x4 layout back, 8x4 and DeepGEMM got 79 to 86 % of a copy's bandwidth so, and
    42 to 77 % with default caching; int4 and Marlin's layouts lost 5 to 15 % of theirs.
    """
    sides = plan.plain, plan.laid
    words = {side.low[: plan.word] for side in sides}
    return len(words) == 1 and all(4 * 2 ** plan.vector(side) == 16 for side in sides)


def _grown(layout: IndexMap, have: tuple[Bit, ...], count: int) -> tuple[Bit, ...]:
    """Return ``count`` bits to be touched next: whole sectors, whole lines, digits, then the rest.

    Lines are completed in turns of both sides; an open digit may be shorter than a line, so that
    the digits after it come before more of it.
    """
    word = word_bits(layout)
    plain, laid = plain_order(layout), layout.digits
    stages: list[Iterable[Bit]] = [
        low_bits(layout, order, word + (size // 4).bit_length() - 1)
        for size in (SECTOR_BYTES, LINE_BYTES)
        for order in (plain, laid)
    ]
    known = sizes(layout)
    fixed = [(n, i, j) for n, i in reversed(laid) for j in range(known[n, i] or 0)]
    stages += [fixed, low_bits(layout, plain, len(have) + len(fixed) + count)]
    found: list[Bit] = []
    for stage in stages:
        found += _after(stage, have, found)
    return tuple(found[:count])


# ---- CPUs ---------------------------------------------------------------------------------------

RUN = 2
"""Words next to each other in the layout that a tile has, at most, as a power of two."""

WIDEST_TILE = 8
"""Words of a tile, as a power of two: TVM does not keep more than 1024 bytes on the stack.

Vectors get shorter before runs do: columns of a layout are often a power of two apart, and few of
their lines stay in a cache.  235 MB of INT4 weights on two busy EPYC cores: vectors of 16 words and
runs of 2 took 141 ms (transposed 263 ms), 8 and 4 took 65 ms (89 ms).
"""


def cpu_plans(layout: IndexMap, lanes: int) -> list[Plan]:
    """Return the tiles to choose from: vectors of 2^``lanes`` words along the rows, then words."""
    return [_cpu_plan(layout, lanes), _cpu_plan(layout, 0)]


@cache
def _cpu_plan(layout: IndexMap, count: int) -> Plan:
    """Return a tile of vectors along plain rows; words of the layout are stored one by one."""
    word = word_bits(layout)
    order = plain_order(layout)
    plain, laid = low_bits(layout, order, word), low_bits(layout, layout.digits, word)
    row = low_bits(layout, order, 4 * word + count)
    lanes = _after(row, plain, laid)[:count]
    whole = max((row.index(bit) + 1 for bit in (*plain, *lanes)), default=0)
    run = low_bits(layout, layout.digits, word + (RUN if count else 0))
    kept = next((i for i, bit in enumerate(run) if bit in lanes), len(run))
    if len({*plain, *run[:kept]}) - word + len(lanes) > WIDEST_TILE:
        return _cpu_plan(layout, count - 1)
    laid = run[: max(kept, word)]
    follows = low_bits(layout, layout.digits, len(laid) + count) == (*laid, *lanes)
    exact = (whole, len(laid) + (count if follows else 0))
    return _plan(layout, plain, laid, lanes, (), exact)


def follow(plan: Plan, plain: bool) -> bool:
    """Whether lanes are words next to each other, on the plain side or in the layout."""
    side = plan.plain if plain else plan.laid
    order = plain_order(plan.layout) if plain else plan.layout.digits
    word = plan.word
    return low_bits(plan.layout, order, word + len(plan.lanes)) == (*side.low[:word], *plan.lanes)


# ---- Exchanges ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exchange:
    """Bit ``place`` of the place in a word changes with bit ``reg`` of a register's number.

    Or, within a word, with bit ``other`` of the place, a higher one.
    """

    place: int
    reg: int | None = None
    other: int | None = None


def exchanges(word: int, source: Side, target: Side) -> tuple[list[Bit], list[Exchange]]:
    """Return the bits of registers in the end, and the stages that bring words into order."""
    places, regs = list(source.low[:word]), list(source.regs)
    stages = []
    for p, wanted in enumerate(target.low[:word]):
        if places[p] == wanted:
            continue
        if wanted in places:
            q = places.index(wanted)
            stages.append(Exchange(p, other=q))
            places[p], places[q] = places[q], places[p]
        else:
            r = regs.index(wanted)
            stages.append(Exchange(p, reg=r))
            places[p], regs[r] = regs[r], places[p]
    return regs, stages
