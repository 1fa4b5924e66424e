"""Tables and plots of MoE results: ``python -m bench.moe_report bench/results/moe-...json``.

Fills docs/moe.md between its moe comments, draws docs/moe_speed.svg and docs/moe_floor.svg, and
with --readme puts the short form into README.md, between its moe comments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.moe import FORMAT, GEMMS, LAYER
from bench.moe_cases import (
    BEST_PEER_DATE,
    BYTES_A_US,
    FLOP_A_US,
    FORMATS,
    MODELS,
    TOKENS,
    Model,
    rows,
)
from bench.moe_peers import PEERS
from bench.moe_plot import draw
from bench.report_command import measured_on, report_command
from bench.tables import markdown_table, us_text

WORST = 1.25  # asked: no cell slower than so many times the best peer
LAYER_US, LAYER_PART = 10.0, 0.15  # asked of the whole layer beside its GEMMs: T = 1, T = 4096
TITLES = dict(zip(FORMATS, ("NVFP4", "MXFP4", "INT4 g128"), strict=True))
Results = Mapping[str, Any]


def us_of(case: Results, name: str) -> float | None:
    """Return a contender's time, of its fastest variant; None without one."""
    found = [
        time["us"]
        for label, time in case["times"].items()
        if label == name or (name not in (GEMMS, LAYER) and label.startswith(f"{name}, "))
    ]
    return min(found, default=None)


def best_peer(case: Results) -> float:
    """Return the least time of all others: in this run, or the best known before."""
    times = [us_of(case, peer.name) for peer in PEERS]
    return min([case["best_peer_us"], *(us for us in times if us is not None)])


def best_here(case: Results) -> float | None:
    """Return the least time of others in this run."""
    times = [us_of(case, peer.name) for peer in PEERS]
    return min((us for us in times if us is not None), default=None)


def ratio(case: Results) -> float | None:
    """Return our time relative to the best peer's."""
    ours = us_of(case, GEMMS)
    return None if ours is None else ours / best_peer(case)


def timed(results: Results) -> list[Results]:
    """Return the cases in which ours has a time."""
    return [case for case in results["cases"] if us_of(case, GEMMS) is not None]


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean; nan of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def row_title(case: Results) -> str:
    """Return model and format in words."""
    return f"{MODELS[case['model']].title}, {TITLES[case['fmt']]}"


def extra(case: Results) -> float | None:
    """Return microseconds that the whole layer takes beside its GEMMs."""
    ours, layer = us_of(case, GEMMS), us_of(case, LAYER)
    return None if ours is None or layer is None else layer - ours


def _grid(cases: Sequence[Results]) -> dict[tuple[str, str, int], Results]:
    return {(case["model"], case["fmt"], case["tokens"]): case for case in cases}


def _sizes(model: Model) -> str:
    return (
        f"{model.title} (E {model.experts}, top {model.top_k}, H {model.hidden}, "
        f"I {model.intermediate})"
    )


def grid_table(results: Results, *, sizes: bool = True) -> str:
    """Return model and format by tokens: our time, and in brackets the best peer's / ours."""
    grid = _grid(timed(results))
    cells = []
    for model, fmt in rows():
        found = [grid.get((model.key, fmt, tokens)) for tokens in TOKENS]
        if not any(found):
            continue
        title = _sizes(model) if sizes else model.title
        cells.append([title, TITLES[fmt], *(_cell(case) for case in found)])
    return markdown_table(["model", "weights", *(f"T = {t}" for t in TOKENS)], cells, left=2)


def _cell(case: Results | None) -> str:
    if case is None:
        return ""
    ours, part = us_of(case, GEMMS), ratio(case)
    assert part is not None
    text = f"{us_text(ours)} ({1 / part:.2f} x)"
    return f"**{text}**" if part > WORST else text


def case_table(cases: Sequence[Results]) -> str:
    """Return one row for each case: all times, and what ours reaches."""
    names = [peer.name for peer in PEERS]
    headings = ["T", "floor, us", "bound by", "ours, us", "whole layer, us", *names]
    headings += [f"best on {BEST_PEER_DATE}", "ours / best", "of the floor", "TB/s", "TFLOP/s"]
    lines = []
    for case in cases:
        ours = us_of(case, GEMMS)
        lines.append(
            [
                str(case["tokens"]),
                us_text(case["floor_us"]),
                case["bound"],
                us_text(ours),
                us_text(us_of(case, LAYER)),
                *(us_text(us_of(case, name)) for name in names),
                us_text(case["best_peer_us"]),
                *([f"{ratio(case):.2f}", *_reached(case, ours)] if ours else [""] * 4),
            ]
        )
    return markdown_table(headings, lines)


def _reached(case: Results, us: float) -> list[str]:
    return [
        f"{100 * case['floor_us'] / us:.0f} %",
        f"{case['bytes'] / us / 1e6:.2f}",
        f"{case['flop'] / us / 1e6:.0f}",
    ]


def _range(values: Sequence[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def bucket_table(results: Results) -> str:
    """Return one row for each T: means, worst cell, what of bytes/s and FLOP/s is reached."""
    headings = ["T", "cells", "ours / best peer", "worst cell", "of the floor"]
    headings += ["TB/s", "TFLOP/s", "whole layer adds", "asked of it", "met"]
    lines = []
    for tokens in TOKENS:
        cases = [case for case in timed(results) if case["tokens"] == tokens]
        if not cases:
            continue
        times = {id(case): us_of(case, GEMMS) or math.nan for case in cases}
        worst = max(cases, key=lambda case: ratio(case) or 0)
        lines.append(
            [
                f"{tokens:,}",
                str(len(cases)),
                f"{geometric_mean(ratio(case) or math.nan for case in cases):.2f}",
                f"{ratio(worst):.2f} ({row_title(worst)})",
                _range([100 * case["floor_us"] / times[id(case)] for case in cases], "{:.0f} %"),
                _range([case["bytes"] / times[id(case)] / 1e6 for case in cases], "{:.1f}"),
                _range([case["flop"] / times[id(case)] / 1e6 for case in cases], "{:.0f}"),
                *_layer_cells(tokens, cases),
            ]
        )
    return markdown_table(headings, lines)


def _layer_cells(tokens: int, cases: Sequence[Results]) -> list[str]:
    us = [(added, us_of(case, GEMMS) or 1) for case in cases if (added := extra(case)) is not None]
    if not us:
        return ["", "", ""]
    shown = _range([added for added, _ in us], "{:.1f}") + " us"
    part = [100 * added / ours for added, ours in us]
    text = f"{shown}, {_range(part, '{:.0f} %')}"
    if tokens == 1:
        return [text, f"{LAYER_US:g} us", _yes(max(added for added, _ in us) <= LAYER_US)]
    if tokens == TOKENS[-1]:
        return [text, f"{LAYER_PART:.0%}", _yes(max(part) <= 100 * LAYER_PART)]
    return [text, "", ""]


def _yes(met: bool) -> str:
    return "yes" if met else "**no**"


def verdict(results: Results) -> str:
    """Return in words: geometric mean, worst cell, what is asked."""
    cases = timed(results)
    if not cases:
        return "Ours has no time."
    mean = geometric_mean(ratio(case) or math.nan for case in cases)
    worst = max(cases, key=lambda case: ratio(case) or 0)
    worst_ratio = ratio(worst) or math.nan
    slow = sum((ratio(case) or 0) > WORST for case in cases)
    here = [
        (us_of(case, GEMMS) or math.nan) / best
        for case in cases
        if (best := best_here(case)) is not None
    ]
    parts = [
        f"Over {len(cases)} cells our gemm1 + gemm2 takes {mean:.2f} of the best peer's time "
        f"(geometric mean; asked: at most 1, met: {_yes(mean <= 1)})",
        f"the worst cell {worst_ratio:.2f} ({row_title(worst)}, T = {worst['tokens']:,}; asked: at "
        f"most {WORST:g}, met: {_yes(worst_ratio <= WORST)}"
        + (f"; above it: {slow})" if slow else ")"),
    ]
    known = [(us_of(case, GEMMS) or math.nan) / case["best_peer_us"] for case in cases]
    parts.append(
        f"of the best of {BEST_PEER_DATE} alone {geometric_mean(known):.2f} "
        f"(worst {max(known):.2f})"
    )
    if here:
        parts.append(
            f"of the best peer of this run alone {geometric_mean(here):.2f} (worst {max(here):.2f})"
        )
    return "; ".join(parts) + "."


def conditions(results: Results) -> str:
    """Return one sentence: GPU, driver, versions, date, method."""
    return measured_on(results, " of consecutive calls")


def failures(results: Results) -> str:
    """Return what has no time, and why; nothing if all have."""
    found = [
        f"* {case['name']}, {name}: {reason}"
        for case in results["cases"]
        for name, reason in case["failed"].items()
    ]
    return "\n".join(["Without a time:", "", *found]) if found else ""


def errors_text(results: Results) -> str:
    """Return the largest relative error of a checked row, by contender."""
    worst: dict[str, float] = {}
    for case in results["cases"]:
        for name, error in case["errors"].items():
            key = name.split(",")[0]
            worst[key] = max(worst.get(key, 0.0), error)
    named = ", ".join(f"{name} {error:.1e}" for name, error in worst.items())
    return f"Largest relative error of a checked row: {named}." if named else ""


def page(results: Results, source: str) -> str:
    """Return all tables."""
    parts = [
        conditions(results),
        verdict(results),
        "Microseconds of gemm1 + gemm2, in brackets the best peer's time / ours (above 1: ours is "
        f"faster). The best peer is the fastest of this run and of {BEST_PEER_DATE}:",
        grid_table(results),
        "![Best peer's time / ours, by tokens](moe_speed.svg)",
        f"By tokens (floor: bytes at {BYTES_A_US / 1e6:g} TB/s or FLOP at {FLOP_A_US / 1e6:g} "
        "TFLOP/s, whichever takes longer):",
        bucket_table(results),
        "![Part of the floor's speed that is reached, by tokens](moe_floor.svg)",
    ]
    grid = _grid(results["cases"])
    for model, fmt in rows():
        cases = [grid[key] for t in TOKENS if (key := (model.key, fmt, t)) in grid]
        if cases:
            parts += [f"{_sizes(model)}, {TITLES[fmt]}:", case_table(cases)]
    parts += [errors_text(results), failures(results), f"All figures: [{source}]({source})."]
    return "\n\n".join(part for part in parts if part)


def readme_section(results: Results, source: str) -> str:
    """Return the short form."""
    sentences = [
        verdict(results),
        "Beside ours ran "
        + " and ".join(peer.name for peer in PEERS)
        + f"; the best peer is the fastest of them and of those of {BEST_PEER_DATE} (vLLM's Marlin "
        "and others).",
        errors_text(results),
        f"Measured on {conditions(results)}",
        f"All tables: [docs/moe.md](docs/moe.md); figures: [{source}]({source}).",
    ]
    table = grid_table(results, sizes=False)
    return "\n\n".join([table, " ".join(filter(None, sentences))])


def _lines(results: Results) -> dict[tuple[str, str], list[dict[str, float]]]:
    """Return by title of model and of format the points of the plots."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for case in timed(results):
        ours, peer = us_of(case, GEMMS) or math.nan, best_peer(case)
        key = MODELS[case["model"]].title, TITLES[case["fmt"]]
        found.setdefault(key, []).append(
            {
                "tokens": case["tokens"],
                "speed": peer / ours,
                "ours": case["floor_us"] / ours,
                "peer": case["floor_us"] / peer,
            }
        )
    return found


main = report_command(
    "moe",
    FORMAT,
    page,
    readme_section,
    lambda found, docs: draw(_lines(found), docs, conditions(found)),
    """Put the results of `python -m bench.moe` into docs/moe.md, two plots, and the README.

    Example: python -m bench.moe_report bench/results/moe-nvidia-h200-2026-11-20.json
    """,
)


if __name__ == "__main__":
    main(prog_name="python -m bench.moe_report")
