"""The timeline: what is drawn, merged, stacked, joined; the same report gives the same bytes."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from blockscale.emulator import timeline
from blockscale.emulator.report import (
    COMPUTE,
    MMA,
    TRANSFER,
    WAIT_BARRIER,
    WAIT_MBARRIER,
    Event,
    Report,
    engine_track,
    warp_track,
)


class Pipeline:
    """Events of a warp-specialised GEMM: warp 0 loads, warp 1 issues MMAs, the others store."""

    def __init__(self, ctas=1, warps=4, steps=8, stages=3, load=420, mma=260):
        self.ctas, self.warps, self.steps, self.stages = ctas, warps, steps, stages
        self.load, self.mma = load, mma
        self.events: list[Event] = []
        self.flow = 0

    def new_flow(self) -> int:
        self.flow += 1
        return self.flow

    def warp(self, cta, warp, start, end, kind, label="", flow=None):
        if end > start:
            self.events.append(Event(warp_track(cta, warp), start, end, kind, label, 10, flow))

    def engine(self, cta, engine, start, end, kind, label, flow):
        self.events.append(Event(engine_track(cta, engine), start, end, kind, label, 20, flow))

    def report(self) -> Report:
        for cta in range(self.ctas):
            self.cta(cta)
        return Report(
            "gemm_3_stages", (self.ctas, 1, 1), (32 * self.warps, 1, 1), events=self.events
        )

    def cta(self, cta):
        begin = 40.0 + 15 * cta
        for warp in range(self.warps):
            self.warp(cta, warp, 0, 30 + warp, COMPUTE)
            self.warp(cta, warp, 30 + warp, begin, WAIT_BARRIER)
        full, empty = [], []
        t = begin  # producer
        engine_free = tensor_free = m = begin
        for step in range(self.steps):
            if step >= self.stages:
                end, flow = empty[step - self.stages]
                self.warp(cta, 0, t, max(t, end), WAIT_MBARRIER, flow=flow)
                t = max(t, end)
            self.warp(cta, 0, t, t + 18, COMPUTE)
            t += 18
            flow, done = self.new_flow(), max(t + self.load, engine_free + 90)
            self.engine(cta, "tma.load", t, done, TRANSFER, f"A,B k={step}", flow)
            engine_free = done
            full.append((done, flow))
            self.warp(cta, 1, m, max(m, done + 6), WAIT_MBARRIER, flow=flow)
            m = max(m, done + 6)
            for _ in range(4):
                self.warp(cta, 1, m, m + 5, COMPUTE)
                m += 6
            flow, start = self.new_flow(), max(m, tensor_free)
            tensor_free = start + self.mma
            self.engine(cta, "tensor core", start, tensor_free, MMA, f"k={step}", flow)
            empty.append((tensor_free + 5, flow))
        finish, flow = empty[-1]
        for warp in range(2, self.warps):
            self.warp(cta, warp, begin, finish + warp, WAIT_MBARRIER, flow=flow)
            at = finish + warp
            for _ in range(6):
                self.warp(cta, warp, at, at + 25, COMPUTE, "tcgen05.ld")
                self.warp(cta, warp, at + 25, at + 40, WAIT_BARRIER)
                at += 40
            if warp == 2:
                self.warp(cta, warp, at, at + 10, COMPUTE)
                store = self.new_flow()
                self.engine(cta, "tma.store", at + 10, at + 300, TRANSFER, "D", store)
                self.warp(cta, warp, at + 10, at + 304, timeline.WAIT_ASYNC, flow=store)


def texts(path) -> list[str]:
    """Return every text of an SVG."""
    found = ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(text.itertext()).strip() for text in found]


def lines(report) -> list[tuple[str, str]]:
    """Return (track of the work, track of the wait) of every line of the picture."""
    rows, _ = timeline.make_rows(report.events, 1.0)
    picture = timeline._Picture(report, rows, 0.0, 1e9, "")
    return [(work.track, wait.track) for work, _, wait, _ in picture.flows]


def test_a_pipeline_shows_rows_kinds_labels(tmp_path):
    path = timeline.draw(Pipeline().report(), tmp_path / "t.svg")
    shown = texts(path)
    rows = ["CTA 0", "warp 0", "warp 1", "warp 2", "warp 3", "TMA load", "TMA store", "tensor core"]
    for name in [*rows, COMPUTE, MMA, TRANSFER, WAIT_MBARRIER, WAIT_BARRIER, "virtual cycles"]:
        assert shown.count(name) == 1, name
    assert [shown.count(f"A,B k={step}") for step in range(8)] == [1] * 8
    assert "gemm_3_stages: grid 1×1×1, block 128×1×1, seed 0" in shown
    assert "66%" in shown  # of the tensor core: 8 x 260 of 3140 cycles


def test_lines_lead_from_work_to_the_waits_for_it():
    found = lines(Pipeline(steps=8, stages=3).report())
    loads = ("CTA 0 / tma.load", "CTA 0 / warp 1")
    slots = ("CTA 0 / tensor core", "CTA 0 / warp 0")
    assert found.count(loads) == 8
    assert found.count(slots) == 5  # the first three slots are empty from the start
    assert found.count(("CTA 0 / tensor core", "CTA 0 / warp 3")) == 1
    assert found.count(("CTA 0 / tma.store", "CTA 0 / warp 2")) == 1


def test_operations_under_way_together_lie_in_lanes_of_one_row():
    rows, _ = timeline.make_rows(Pipeline(stages=3).report().events, 1.0)
    load = next(row for row in rows if row.name == "TMA load")
    assert len(load.lanes) == 3
    for lane in load.lanes:
        assert all(a.end <= b.start for a, b in pairwise(lane))
    assert sum(map(len, load.lanes)) == 8


def test_more_operations_than_lanes_are_drawn_as_batches():
    starts = [*range(0, 64, 2), *range(600, 664, 2)]
    track = "CTA 0 / cp.async"
    events = [Event(track, t, t + 400, TRANSFER, "cp.async") for t in starts]
    rows, _ = timeline.make_rows(events, 1.0)
    bars = [(e.start, e.end, e.label) for lane in rows[0].lanes for e in lane]
    assert bars == [(0, 462, "32 × cp.async"), (600, 1062, "32 × cp.async")]


def test_no_line_to_a_wait_that_began_later():
    work = Event("CTA 0 / tma.load", 0, 50, TRANSFER, "A", flow=1)
    waits = [Event("CTA 0 / warp 0", t, t + 40, WAIT_MBARRIER, flow=1) for t in (20, 60)]
    assert lines(Report("k", events=[work, waits[0]])) == [("CTA 0 / tma.load", "CTA 0 / warp 0")]
    assert lines(Report("k", events=[work, waits[1]])) == []


def test_what_takes_no_time_has_a_line_but_no_bar():
    track = engine_track(0, "tensor core")
    work = [Event(track, 0, 50, MMA, "k=0", flow=1), Event(track, 50, 50, MMA, flow=2)]
    report = Report("k", events=[*work, Event("CTA 0 / warp 1", 10, 52, WAIT_MBARRIER, flow=2)])
    assert lines(report) == [(track, "CTA 0 / warp 1")]
    rows, _ = timeline.make_rows(report.events, 1.0)
    assert rows[1].lanes == [[work[0]]]


def test_many_tiny_events_merge_into_few_bars_that_cover_the_same_time():
    kinds = (COMPUTE, WAIT_BARRIER)
    events = [Event("CTA 0 / warp 0", t, t + 1, kinds[t % 7 == 0]) for t in range(20000)]
    rows, _ = timeline.make_rows(events, 20000 / 1400)
    (bars,) = rows[0].lanes
    assert len(bars) < 1500
    assert (bars[0].start, bars[-1].end) == (0, 20000)
    assert {bar.kind for bar in bars} == {COMPUTE}


def test_neighbours_of_one_kind_merge_and_a_long_bar_keeps_its_own_time():
    track = "CTA 0 / warp 0"
    events = [
        Event(track, 0, 100, COMPUTE, "add"),
        Event(track, 100, 200, COMPUTE, "add"),
        Event(track, 200, 300, WAIT_MBARRIER, flow=1),
        Event(track, 300, 400, WAIT_MBARRIER, flow=2),
    ]
    rows, _ = timeline.make_rows(events, 1.0)
    assert [(e.start, e.end, e.label) for e in rows[0].lanes[0]] == [
        (0, 200, "add"),
        (200, 300, ""),
        (300, 400, ""),
    ]


def test_warps_that_did_the_same_share_a_row_when_there_are_many(tmp_path):
    report = Pipeline(ctas=2, warps=16, steps=40, stages=4).report()
    shown = texts(timeline.draw(report, tmp_path / "t.svg"))
    assert {"CTA 0", "CTA 1"} <= set(shown)
    assert shown.count("warp 0") == 2
    together = [text for text in shown if text.startswith("warps ")]
    assert together
    assert all(text.endswith("–15") or text.startswith("warps 3–") for text in together)


def test_a_window_shows_only_what_is_in_it(tmp_path):
    path = timeline.draw(Pipeline().report(), tmp_path / "t.svg", "part", first=1100, last=1300)
    shown = texts(path)
    assert "part" in shown
    assert "A,B k=4" in shown
    assert "A,B k=0" not in shown
    assert "TMA store" not in shown


def test_too_many_ctas_are_counted_not_drawn(tmp_path):
    shown = texts(timeline.draw(Pipeline(ctas=40, steps=2).report(), tmp_path / "t.svg"))
    assert any(text.endswith("(25 more CTAs not drawn)") for text in shown)
    assert "CTA 14" in shown
    assert "CTA 15" not in shown


def test_a_long_run_still_gives_a_small_file(tmp_path):
    report = Pipeline(ctas=2, steps=1500).report()
    path = timeline.draw(report, tmp_path / "t.svg")
    assert path.stat().st_size < 4 << 20
    assert any("drawn in a narrower window" in text for text in texts(path))


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_the_same_report_gives_the_same_bytes(tmp_path, suffix):
    first = timeline.draw(Pipeline().report(), tmp_path / f"a{suffix}").read_bytes()
    second = timeline.draw(Pipeline().report(), tmp_path / f"b{suffix}").read_bytes()
    assert first == second
    assert first.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")


def test_unknown_tracks_and_kinds_are_drawn_too(tmp_path):
    report = Report("k", events=[Event("somewhere", 0, 10, "thinking", "x")])
    shown = texts(timeline.draw(report, tmp_path / "t.svg"))
    assert {"somewhere", "thinking"} <= set(shown)


def test_what_cannot_be_drawn_says_why(tmp_path):
    report = Pipeline().report()
    with pytest.raises(ValueError, match=r"'t.pdf' ends in '.pdf'; .* name it t.svg"):
        timeline.draw(report, tmp_path / "t.pdf")
    with pytest.raises(ValueError, match="the report of 'k' holds no events"):
        timeline.draw(Report("k"), tmp_path / "t.svg")
    with pytest.raises(ValueError, match="the window 50 to 20 is empty"):
        timeline.draw(report, tmp_path / "t.svg", first=50, last=20)
    with pytest.raises(ValueError, match="nothing happened from cycle 90000 to 90001"):
        timeline.draw(report, tmp_path / "t.svg", first=90000, last=90001)


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[demo\]'"):
        timeline.draw(Pipeline().report(), tmp_path / "t.svg")
