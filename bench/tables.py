"""Results as console tables and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

Results = Mapping[str, Any]

NOISE = 0.25  # quartiles further apart than this part of the median: the machine was not quiet


def time_text(seconds: float) -> str:
    """Return three digits and a unit: 0.000412 -> "412 us"."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        value = seconds * scale
        if value >= 1 or unit == "us":
            digits = 2 if value < 10 else 1 if value < 100 else 0
            return f"{value:.{digits}f} {unit}"
    raise AssertionError("the last unit takes everything")


def us_text(us: float | None) -> str:
    """Return three digits: 4.27, 43.1, 143, 2,100."""
    if us is None:
        return ""
    return f"{us:,.{2 if us < 10 else 1 if us < 100 else 0}f}"


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


def met_text(comparison: Mapping[str, Any]) -> str:
    """Return "yes", "no", or nothing where no bar is set."""
    return {None: "", True: "yes", False: "no"}[comparison["met"]]


def _cells(case: Results, comparison: Mapping[str, Any]) -> list[str]:
    times = case["times"]
    ours, other = comparison["ours"], comparison["other"]
    return [
        ours.removeprefix("ours").strip(),
        time_text(times[ours]["median"]),
        other or "",
        time_text(times[other]["median"]) if other else "",
        ratio_text(comparison),
        bar_text(comparison),
        met_text(comparison),
    ]


def _rows(cases: Sequence[Results]) -> Iterator[tuple[str, list[str]]]:
    for case in cases:
        if "wrong" in case:
            yield case["name"], ["", "WRONG", case["wrong"], "", "", "", "no"]
        for comparison in case.get("comparisons", []):
            yield case["name"], _cells(case, comparison)


HEADINGS = ("case", "x", "ours", "compared with", "its time", "ratio", "asked", "met")


def console_table(cases: Sequence[Results]) -> Table:
    """Return all cases as a table."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in HEADINGS:
        right = heading in ("ours", "its time", "ratio", "asked")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    before = ""
    for name, cells in _rows(cases):
        style = "bold red" if cells[-1] == "no" else ""
        table.add_row(name if name != before else "", *cells, style=style)
        before = name
    return table


def conditions(results: Results) -> str:
    """Return one sentence: machine, date, versions, how it was measured."""
    machine, versions = results["machine"], results["versions"]
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores, level {machine['level']}, "
        f"{machine['last_cache_bytes'] / 2**20:.0f} MiB last cache, torch on "
        f"{machine['torch_threads']} threads, load {machine['load']:.2f} at the start; "
        f"{results['date'][:10]}; {named}; medians of up to {results['repeats']} "
        "interleaved repeats"
    )


def noise(results: Results) -> str:
    """Return one sentence on how many times scatter, or nothing."""
    times = [time for case in results["cases"] for time in case.get("times", {}).values()]
    wide = [time for time in times if time["high"] - time["low"] > NOISE * time["median"]]
    if not wide:
        return ""
    return (
        f"Not quiet: for {len(wide)} of {len(times)} times the quartiles are more than "
        f"{NOISE:.0%} of the median apart."
    )


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a Markdown table whose first ``left`` columns are text, the others numbers."""
    marks = ["---"] * left + ["---:"] * (len(headings) - left)
    lines = [headings, marks, *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _asked_rows(cases: Sequence[Results]) -> Iterator[list[str]]:
    for case in cases:
        for comparison in case.get("comparisons", []):
            if comparison["bar"] is not None or "shape" not in case:
                kind, *cells = _cells(case, comparison)
                yield [f"{case['name']} {kind}".strip(), *cells]


def _linear_rows(cases: Sequence[Results]) -> Iterator[list[str]]:
    for case in cases:
        if "shape" in case and "times" in case:
            shape = case["shape"]
            row = [f"{shape['n']} x {shape['k']}", str(shape["rows"])]
            for dtype in ("fp32", "bf16"):
                ours, torch = (case["times"][f"{w} {dtype}"]["median"] for w in ("ours", "torch"))
                row += [time_text(ours), time_text(torch), f"{torch / ours:.2f} x"]
            yield row


def markdown(results: Results) -> str:
    """Return what the README shows: single ops and bars, all linear layers, the conditions."""
    asked = ("case", "ours", "compared with", "its time", "ratio", "asked", "met")
    linear = ("N x K", "rows", "ours fp32", "torch fp32", "", "ours bf16", "torch bf16", "")
    cases = results["cases"]
    parts = [
        markdown_table(asked, [*_asked_rows(cases)]),
        "Linear layers, NVFP4 weights against torch's dense weights of the same dtype as the "
        "activations (the last column of each three: how much faster):",
        markdown_table(linear, [*_linear_rows(cases)]),
        f"Measured on {conditions(results)}. Weights and inputs rotate over "
        f"{results['cache_multiple']} times the last cache, torch's as well as ours.",
    ]
    wrong = [case["name"] for case in cases if "wrong" in case]
    parts += filter(None, [noise(results)])
    if wrong:
        parts.append(f"Wrong results, not timed: {', '.join(wrong)}.")
    return "\n\n".join(parts)
