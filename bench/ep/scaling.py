"""What more ranks would take, on paper: a line fitted to measured exchanges, and bytes counted.

An exchange takes ``start + bytes / bandwidth``: ``start`` is what few tokens take, ``bandwidth``
what the largest number of tokens tells.  Bytes are those that leave a rank: of a token's row once
for each other rank that has an expert of it, of its results a row for each slot that lies
elsewhere, or for each such rank.  Assumed: experts are chosen evenly, every rank has as many
tokens, links between any two ranks are those that were measured, and all of a rank's links are
shared by all it sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb
from typing import Any, NamedTuple

from blockscale.specs.exchange import row_bytes

RANKS = (4, 8, 32, 72)
COUNTS = (1, 128, 4096)


class Exchange(NamedTuple):
    """A direction: its name, bytes of a row, whether a row goes for each slot or for each rank."""

    name: str
    row: int
    by_slot: bool = False


class Line(NamedTuple):
    """What a direction takes: microseconds at least, and bytes a microsecond."""

    start: float
    bandwidth: float

    def us(self, size: float) -> float:
        """Return the time of so many bytes."""
        return self.start + size / self.bandwidth


def reached(ranks: int, experts: int, top_k: int) -> float:
    """Return how many other ranks have an expert of a token, on average."""
    share = experts // ranks
    return (ranks - 1) * (1 - comb(experts - share, top_k) / comb(experts, top_k))


def elsewhere(ranks: int, top_k: int) -> float:
    """Return how many of a token's slots lie on other ranks, on average."""
    return top_k * (ranks - 1) / ranks


def directions(hidden: int) -> dict[str, tuple[str, str, Exchange]]:
    """Return what is measured: form of the results, key of the time, and what goes."""
    full = row_bytes(hidden, None)
    found = {
        f"dispatch, {form}": (
            f"{form}, sums",
            "dispatch",
            Exchange("dispatch", row_bytes(hidden, None if form == "bf16" else form)),
        )
        for form in ("bf16", "fp8", "nvfp4")
    }
    found["combine, slots"] = "bf16, slots", "combine", Exchange("combine", full, by_slot=True)
    found["combine, sums"] = "bf16, sums", "combine", Exchange("combine", full)
    return found


def fitted(rows: Sequence[Mapping[str, Any]], form: str, key: str, goes: Exchange) -> Line | None:
    """Return the line through the fewest and the most tokens; None where they are not measured."""
    known = [row for row in rows if key in row.get(form, {})]
    if len(known) < 2:
        return None
    few, many = known[0], known[-1]
    sizes = [row["slots" if goes.by_slot else "rows"] * goes.row for row in (few, many)]
    times = [row[form][key] for row in (few, many)]
    bandwidth = (sizes[1] - sizes[0]) / (times[1] - times[0])
    return Line(times[0] - sizes[0] / bandwidth, bandwidth)


def predicted(
    rows: Sequence[Mapping[str, Any]], experts: int, hidden: int, top_k: int
) -> dict[str, dict[str, Any]]:
    """Return, by direction, its line and the times of `RANKS` ranks and `COUNTS` tokens of each."""
    found = {}
    for name, (form, key, goes) in directions(hidden).items():
        line = fitted(rows, form, key, goes)
        if line is None:
            continue
        times = {}
        for ranks in RANKS:
            if goes.by_slot:
                each = elsewhere(ranks, top_k)
            else:
                each = reached(ranks, experts, top_k) if experts % ranks == 0 else top_k
            times[ranks] = [line.us(tokens * each * goes.row) for tokens in COUNTS]
        found[name] = {"start": line.start, "gb_s": line.bandwidth / 1000, "times": times}
    return found
