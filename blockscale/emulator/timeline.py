"""The picture of a pipeline: warps and asynchronous engines over virtual time.

Every warp and every engine that did something has a row, grouped by CTA. Work is tall, waiting low
and pale. Operations of one engine that were under way together are stacked inside its row. A thin
line leads from the end of what somebody waited for to the end of the wait.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from blockscale.base import words
from blockscale.emulator.report import (
    COMPUTE,
    ENGINES,
    MMA,
    TRANSFER,
    WAIT_ASYNC,
    WAIT_BARRIER,
    WAIT_MBARRIER,
    WAITS,
    Event,
    Report,
)

FORMATS = (".svg", ".png")
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
COLOURS = {  # distinguishable without red-green vision; waits are pale
    COMPUTE: "#4c86c6",
    MMA: "#b5382a",
    TRANSFER: "#14806f",
    WAIT_MBARRIER: "#f3c869",
    WAIT_BARRIER: "#c7b3e5",
    WAIT_ASYNC: "#c9d1d9",
}
OTHER = "#7a8490"
INK, FAINT, GRID, BAND = "#1f2933", "#66717c", "#e4e8ec", "#f5f7f9"
WIDTH = 14.0  # inches, as all sizes here
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 1.55, 0.75, 0.85, 0.55
GAP = 0.16  # between CTAs
WORK_HEIGHT, WAIT_HEIGHT = 0.78, 0.4  # of the lane
CHARACTER = 0.051  # inches of one character of a label
MAX_FLOWS = 1500  # lines; more would hide the picture
STEPS = 1400  # what is shorter than this part of the axis is merged with its neighbours
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 8.5,
    "text.color": INK,
    "svg.hashsalt": "blockscale",
    "svg.fonttype": "none",
    "path.simplify": False,
}


def draw(
    report: Report,
    path: str | Path,
    title: str | None = None,
    first: float | None = None,
    last: float | None = None,
) -> Path:
    """Draw the events of a report into an .svg or .png file and return its path.

    `first` and `last` choose a window of virtual cycles. The same report gives the same bytes.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(
            f"timeline.draw: {path.name!r} ends in {path.suffix!r}; a timeline is an SVG or a PNG; "
            f"name it {path.stem}.svg"
        )
    events = [e for e in report.events if e.end > e.start or e.flow is not None]
    if not events:
        raise ValueError(
            f"timeline.draw: the report of {report.kernel!r} holds no events; draw the report of a "
            "launch that ran at least one instruction"
        )
    low = min(e.start for e in events) if first is None else first
    high = max(e.end for e in events) if last is None else last
    if not low < high:
        raise ValueError(
            f"timeline.draw: the window {low:g} to {high:g} is empty; first must be less than last"
        )
    events = [clipped(e, low, high) for e in events if e.end >= low and e.start <= high]
    rows, left_out = make_rows(events, (high - low) / STEPS)
    if not rows:
        raise ValueError(
            f"timeline.draw: nothing happened from cycle {low:g} to {high:g}; the events end at "
            f"{max(e.end for e in report.events):g}; choose first and last between them"
        )
    _render(_Picture(report, rows, low, high, _title(report, title, left_out)), path)
    return path


def _title(report: Report, title: str | None, left_out: int) -> str:
    def shape(sizes: Iterable[int]) -> str:
        return "×".join(map(str, sizes))

    note = f" ({left_out} more CTAs not drawn)" if left_out else ""
    if title is not None:
        return title + note
    cluster = f", cluster {shape(report.cluster)}" if max(report.cluster) > 1 else ""
    return (
        f"{report.kernel}: grid {shape(report.grid)}, block {shape(report.block)}{cluster}, "
        f"seed {report.seed}{note}"
    )


@dataclass
class _Picture:
    """All that is drawn; lengths in inches, y downwards."""

    report: Report
    rows: list[Row]
    low: float
    high: float
    title: str
    height: float = 0.0
    flows: list[tuple[Event, float, Event, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        y = 0.0
        for index, row in enumerate(self.rows):
            if index and row.cta != self.rows[index - 1].cta:
                y += GAP
            row.top = y
            y += row.height
        self.height = y
        self.flows = list(_flows(self.rows))

    @property
    def cycles_per_inch(self) -> float:
        return (self.high - self.low) / (WIDTH - MARGIN_LEFT - MARGIN_RIGHT)


def _render(picture: _Picture, path: Path) -> None:
    """Write the file; matplotlib is imported here alone."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"timeline.draw: the package {missing.name!r} is missing; {words.install('demo')}",
            name=missing.name,
        ) from None
    total = picture.height + MARGIN_TOP + MARGIN_BOTTOM
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, total), facecolor="white")
        axes = figure.add_axes(
            (
                MARGIN_LEFT / WIDTH,
                MARGIN_BOTTOM / total,
                1 - (MARGIN_LEFT + MARGIN_RIGHT) / WIDTH,
                picture.height / total,
            )
        )
        axes.set_xlim(picture.low, picture.high)
        axes.set_ylim(picture.height, 0)
        _frame(axes, picture)
        for row in picture.rows:
            _draw_row(axes, picture, row)
        _draw_flows(axes, picture)
        x = 0.12 / WIDTH
        figure.text(x, 1 - 0.24 / total, picture.title, fontsize=11, weight="bold", va="center")
        _legend(figure, picture, total)
        metadata = {"Date": None, "Creator": None}
        if path.suffix.lower() == ".png":
            metadata = {"Software": None}
        kind = path.suffix[1:].lower()
        figure.savefig(path, format=kind, dpi=110, metadata=metadata)


def _frame(axes: Any, picture: _Picture) -> None:
    """Axes, grid, the names of CTAs and rows, and how busy each row was."""
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c4ccd4")
    axes.set_yticks([])
    axes.tick_params(axis="x", colors=FAINT)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("virtual cycles", color=FAINT)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    margin = axes.get_yaxis_transform()  # x as a part of the axes, y in data
    right = 1 + 0.08 / (WIDTH - MARGIN_LEFT - MARGIN_RIGHT)
    axes.text(right, -0.1, "busy", transform=margin, fontsize=7.5, color=FAINT, va="center")
    names = (-0.08 / (WIDTH - MARGIN_LEFT - MARGIN_RIGHT), {"transform": margin, "va": "center"})
    for row in picture.rows:
        middle = row.top + row.height / 2
        if row.engine:
            axes.axhspan(row.top, row.top + row.height, color=BAND, linewidth=0, zorder=0)
        axes.text(names[0], middle, row.name, ha="right", **names[1])
        busy = f"{_busy(row, picture.low, picture.high):.0%}"
        axes.text(right, middle, busy, transform=margin, va="center", fontsize=7.5, color=FAINT)
    for cta, rows in groupby(picture.rows, key=lambda row: row.cta):
        top = next(rows).top
        name = f"CTA {cta}" if cta < 1 << 30 else ""
        x = (0.12 - MARGIN_LEFT) / (WIDTH - MARGIN_LEFT - MARGIN_RIGHT)
        axes.text(x, top + ROW / 2, name, weight="bold", **names[1])
        if top:
            axes.axhline(top - GAP / 2, color="#c4ccd4", linewidth=0.8, zorder=0)


def _busy(row: Row, low: float, high: float) -> float:
    """Return the part of the window in which a row did something other than wait."""
    total, reached = 0.0, low
    for event in row.events:
        if event.kind not in WAITS:
            total += max(0.0, event.end - max(event.start, reached))
            reached = max(reached, event.end)
    return total / (high - low)


def _lane_box(row: Row, index: int) -> tuple[float, float]:
    """Return the top and the height of a lane."""
    height = row.height * 0.94 / len(row.lanes)
    return row.top + row.height * 0.03 + index * height, height


def _draw_row(axes: Any, picture: _Picture, row: Row) -> None:
    for index, lane in enumerate(row.lanes):
        top, height = _lane_box(row, index)
        for kind in dict.fromkeys(event.kind for event in lane):
            part = WAIT_HEIGHT if kind in WAITS else WORK_HEIGHT
            # a hair wide at least, so that nothing disappears
            hair = picture.cycles_per_inch / 110
            spans = [(e.start, max(e.end - e.start, hair)) for e in lane if e.kind == kind]
            axes.broken_barh(
                spans,
                (top + height * (1 - part) / 2, height * part),
                facecolors=COLOURS.get(kind, OTHER),
                edgecolors="white",
                linewidth=0.35 if len(spans) < STEPS / 5 else 0,
                zorder=2,
            )
        for event in lane:
            _draw_label(axes, picture, event, top + height / 2)


def _draw_label(axes: Any, picture: _Picture, event: Event, y: float) -> None:
    """Write a bar's label into it when it fits; never into a wait, which is too low."""
    room = (event.end - event.start) / picture.cycles_per_inch
    if event.kind in WAITS or not event.label or room < CHARACTER * (len(event.label) + 1):
        return
    style = {"ha": "center", "va": "center_baseline", "fontsize": 6.5, "color": "white"}
    axes.text((event.start + event.end) / 2, y, event.label, zorder=4, clip_on=True, **style)


def _draw_flows(axes: Any, picture: _Picture) -> None:
    """Draw a line from the last operation of each flow to the end of each wait that it released."""
    from matplotlib.collections import LineCollection

    lines, colours, ends = [], [], []
    for source, start_y, wait, end_y in picture.flows:
        lines.append([(source.end, start_y), (wait.end, end_y)])
        colours.append(COLOURS.get(source.kind, OTHER))
        ends.append((wait.end, end_y))
    if not 0 < len(lines) <= MAX_FLOWS:
        return
    alpha = 0.75 if len(lines) < 150 else 0.4
    axes.add_collection(
        LineCollection(lines, colors=colours, linewidths=0.7, alpha=alpha, zorder=1.5),
        autolim=False,
    )
    xs, ys = zip(*ends, strict=True)
    axes.scatter(xs, ys, s=7, c=colours, linewidths=0, zorder=3.5)


def _flows(rows: Iterable[Row]) -> Iterator[tuple[Event, float, Event, float]]:
    """Yield what a wait was for, its height, the wait, its height."""
    sources: dict[int, tuple[Event, Row]] = {}
    waits: list[tuple[Event, float]] = []
    for row in rows:
        # row.events, not the lanes: merging loses flows
        for event in row.events:
            if event.flow is None:
                continue
            if event.kind in WAITS:
                waits.append((event, row.top + row.height / 2))
            elif event.flow not in sources or sources[event.flow][0].end < event.end:
                sources[event.flow] = (event, row)
    for wait, y in waits:
        found = None if wait.flow is None else sources.get(wait.flow)
        # what had ended before the wait began did not end it
        if found is not None and wait.start <= found[0].end <= wait.end:
            yield found[0], _height_of(found[1], found[0]), wait, y


def _height_of(row: Row, event: Event) -> float:
    """Return the middle of the lane that holds an event."""
    for index, lane in enumerate(row.lanes):
        if any(bar.start <= event.start and event.end <= bar.end for bar in lane):
            top, height = _lane_box(row, index)
            return top + height / 2
    return row.top + row.height / 2


def _legend(figure: Any, picture: _Picture, total: float) -> None:
    """One line under the title: the kinds that appear, and what the lines mean."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shown = {event.kind for row in picture.rows for event in row.events}
    handles: list[Any] = [
        Patch(color=colour, label=k) for k, colour in COLOURS.items() if k in shown
    ]
    if shown - COLOURS.keys():
        handles.append(Patch(color=OTHER, label=", ".join(sorted(shown - COLOURS.keys()))))
    if picture.flows:
        style: Any = {"color": FAINT, "linewidth": 0.8, "marker": "o", "markersize": 2.5}
        many = len(picture.flows) > MAX_FLOWS
        note = f" ({len(picture.flows):,}: drawn in a narrower window)" if many else ""
        label = f"end of the work → end of the wait for it{note}"
        handles.append(Line2D([], [], label=label, **style))
    figure.legend(
        handles=handles,
        loc="center left",
        bbox_to_anchor=(0.12 / WIDTH, 1 - 0.5 / total),
        ncols=len(handles),
        frameon=False,
        handlelength=1.2,
        columnspacing=1.4,
        borderaxespad=0,
        borderpad=0,
    )


# rows ------------------------------------------------------------------------------------------
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
