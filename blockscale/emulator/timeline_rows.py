"""The rows of the timeline: events sorted, stacked in lanes, merged where they are tiny."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from .report import ENGINES, WAITS, Event

ENGINE_NAMES = {
    "tma.load": "TMA load",
    "tma.store": "TMA store",
    "tma.reduce": "TMA reduce",
    "bulk": "bulk copy",
}
ROW, LANE = 0.24, 0.15  # inches: a row, each further lane of an engine's row
MAX_LANES = 4
MAX_ROWS = 110  # a kernel with more is drawn for its first CTAs
MANY_WARPS = 16  # of the picture; from here on neighbours that did the same share a row
ALIKE = 10  # so many times what is shortest may their bars differ


@dataclass
class Row:
    """One warp or engine: its bars in lanes, and where it lies."""

    cta: int
    name: str
    engine: bool
    events: list[Event]
    lanes: list[list[Event]] = field(default_factory=list)
    top: float = 0.0  # in inches from the top of the axes

    @property
    def first_warp(self) -> str:
        """The number of the (first) warp of the row."""
        return self.name.removeprefix("warps ").removeprefix("warp ").partition("–")[0]

    @property
    def height(self) -> float:
        """Inches, without the gap between CTAs."""
        return ROW + LANE * (len(self.lanes) - 1)


def clipped(event: Event, low: float, high: float) -> Event:
    """Return the part of an event inside the window; what ends after it releases nobody in it."""
    flow = event.flow if event.end <= high else None
    return event._replace(start=max(event.start, low), end=min(event.end, high), flow=flow)


def make_rows(events: Iterable[Event], shortest: float) -> tuple[list[Row], int]:
    """Return the rows in drawing order, and how many CTAs did not fit."""
    found: dict[str, list[Event]] = {}
    for event in events:
        found.setdefault(event.track, []).append(event)
    keyed = sorted((_track_key(track), track) for track in found)
    many = sum(not engine for (_, engine, _, _), _ in keyed) > MANY_WARPS
    rows: list[Row] = []
    left_out = 0
    for cta, tracks in groupby(keyed, key=lambda item: item[0][0]):
        group: list[Row] = []
        for (_, engine, _, name), track in tracks:
            row = Row(cta, name, engine > 0, sorted(found[track], key=_order))
            row.lanes = _lanes(row, shortest)
            if many and group and _alike(group[-1], row, ALIKE * shortest):
                group[-1].name = f"warps {group[-1].first_warp}–{name.removeprefix('warp ')}"
            else:
                group.append(row)
        if rows and len(rows) + len(group) > MAX_ROWS:
            left_out += 1
        else:
            rows += group
    return rows, left_out


def _alike(row: Row, other: Row, tolerance: float) -> bool:
    """Return whether two warps did the same, at nearly the same time."""
    if row.engine or other.engine or len(row.lanes[0]) != len(other.lanes[0]):
        return False
    return all(
        a.kind == b.kind and abs(a.start - b.start) <= tolerance and abs(a.end - b.end) <= tolerance
        for a, b in zip(row.lanes[0], other.lanes[0], strict=True)
    )


def _order(event: Event) -> tuple[float, float, str]:
    return event.start, event.end, event.kind


def _track_key(track: str) -> tuple[int, int, int, str]:
    """Return CTA, group (0: warp, 1: engine, 2: anything else), number in the group, shown name."""
    match = re.fullmatch(r"CTA (\d+) / (?:warp (\d+)|(.+))", track)
    if match is None:
        return 1 << 30, 2, 0, track
    cta = int(match[1])
    if match[2]:
        return cta, 0, int(match[2]), f"warp {match[2]}"
    engine = match[3]
    if engine in ENGINES:
        return cta, 1, ENGINES.index(engine), ENGINE_NAMES.get(engine, engine)
    return cta, 2, 0, engine


def _lanes(row: Row, shortest: float) -> list[list[Event]]:
    """Spread what was under way together over lanes; merge neighbours that nobody could tell.

    What took no time has no bar (tcgen05.commit: it only has a flow).
    """
    long = [event for event in row.events if event.end > event.start] or row.events[:1]
    if not row.engine:
        return [list(_merged(long, shortest, True))]
    events, within = long, shortest
    while (lanes := _stacked(events, shortest / 100)) is None:
        events = _batches(long, within)
        within *= 2
    return [list(_merged(lane, shortest, False)) for lane in lanes]


def _stacked(events: Sequence[Event], slack: float) -> list[list[Event]] | None:
    """Return events in lanes without overlaps; None where that takes too many lanes."""
    lanes: list[list[Event]] = []
    for event in events:
        free = next((lane for lane in lanes if lane[-1].end <= event.start + slack), None)
        if free is not None:
            free.append(event)
        elif len(lanes) == MAX_LANES:
            return None
        else:
            lanes.append([event])
    return lanes


def _batches(events: Sequence[Event], within: float) -> list[Event]:
    """Return one bar for all that began within so many cycles of each other: "32 × cp.async"."""
    found: list[list[Event]] = []
    last: dict[tuple[str, str], list[Event]] = {}
    for event in events:
        batch = last.get((event.kind, event.label))
        if batch is None or event.start > batch[-1].start + within:
            batch = last[event.kind, event.label] = []
            found.append(batch)
        batch.append(event)
    return [
        batch[0]._replace(
            end=max(event.end for event in batch),
            label=f"{len(batch)} × {batch[0].label}" if batch[0].label else "",
        )
        if len(batch) > 1
        else batch[0]
        for batch in found
    ]


def _merged(lane: Sequence[Event], shortest: float, long_too: bool) -> Iterator[Event]:
    """Merge neighbours of one kind (for engines only short ones) and runs of invisible bars.

    A run of invisible bars gets the kind that took most of its time.
    """
    current = lane[0]
    spent = {current.kind: current.end - current.start}
    for event in lane[1:]:
        near = event.start - current.end <= shortest
        short = max(event.end - event.start, current.end - current.start) < 2 * shortest
        same = event.kind == current.kind and (long_too or short)
        joined = event.flow is None or event.kind not in WAITS or short
        if near and (short or (same and joined)):
            label = current.label if same and current.label == event.label else ""
            spent[event.kind] = spent.get(event.kind, 0.0) + event.end - event.start
            kind = max(spent, key=lambda kind: spent[kind])
            end = max(current.end, event.end)
            current = current._replace(end=end, kind=kind, label=label, line=None)
        else:
            yield current
            current = event
            spent = {current.kind: current.end - current.start}
    yield current
