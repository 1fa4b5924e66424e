"""Results of `bench.cpu` as a table for the terminal and as docs/cpu.md shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.report import markdown_table, render, time_text

Results = Mapping[str, Any]

FORMAT = 1
NOISE = 0.25  # quartiles further apart than this part of the median: the machine was not quiet
BUSY = "not meaningful"
"""Stands for the ratio of times that other programs disturbed."""

HEADINGS = ("case", "ours", "compared with", "its time", "ratio", "goal", "reached")


def disturbed(case: Results) -> str:
    """Return in words what disturbed a case's times; nothing if nothing did."""
    return case.get("watched", {}).get("disturbed", "")


def ratio_text(comparison: Mapping[str, Any]) -> str:
    """Return the ratio in words: how much faster, or how much of the other's time."""
    if comparison["kind"] == "seconds":
        return ""
    words = "x faster" if comparison["kind"] == "faster" else "x its time"
    return f"{comparison['ratio']:.2f} {words}"


def bar_text(comparison: Mapping[str, Any]) -> str:
    """Return what is asked, or nothing."""
    bar = comparison["bar"]
    if bar is None:
        return ""
    words = {"faster": "at least {:g} x", "within": "at most {:g} x", "seconds": "at most {:g} s"}
    return words[comparison["kind"]].format(bar)


def _cells(case: Results, comparison: Mapping[str, Any]) -> list[str]:
    times = case["times"]
    ours, other = comparison["ours"], comparison["other"]
    met = {None: "", True: "yes", False: "no"}[comparison["met"]]
    return [
        f"{case['name']} {ours.removeprefix('ours').strip()}".strip(),
        time_text(times[ours]["median"]),
        other or "",
        time_text(times[other]["median"]) if other else "",
        BUSY if comparison["ratio"] is None else ratio_text(comparison),
        bar_text(comparison),
        met,
    ]


def _asked(cases: Sequence[Results]) -> Iterator[list[str]]:
    for case in cases:
        for comparison in case.get("comparisons", []):
            if comparison["bar"] is not None or "n" not in case.get("shape", {}):
                yield _cells(case, comparison)


def section(results: Results, source: str) -> str:
    """Return what docs/cpu.md shows: single ops and bars, all linear layers, the conditions."""
    cases = results["cases"]
    times = [time for case in cases for time in case.get("times", {}).values()]
    return render(
        "cpu/page.md.j2",
        r=results,
        asked=markdown_table(HEADINGS, [*_asked(cases)]),
        linears=[c for c in cases if "n" in c.get("shape", {}) and "times" in c],
        disturbed=disturbed,
        disturbed_cases=list(filter(disturbed, cases)),
        busy=BUSY,
        noise=f"{NOISE:.0%}",
        times=times,
        wide=[t for t in times if t["high"] - t["low"] > NOISE * t["median"]],
        wrong=[case["name"] for case in cases if "wrong" in case],
        source=source,
    )
