"""Tables and plots of MoE results: ``python -m bench.moe.report bench/results/moe-...json``.

Fills docs/moe.md between its moe comments, and draws docs/moe_speed.svg and docs/moe_floor.svg.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from bench.moe.cases import (
    BEST_PEER_DATE,
    BYTES_A_US,
    FLOP_A_US,
    FORMAT,
    FORMATS,
    GEMMS,
    LAYER,
    MODELS,
    TOKENS,
    Model,
    rows,
)
from bench.peers.moe import PEERS
from bench.report import markdown_table, measured_on, render, report_command, yes
from blockscale.demo.figures import FAINT

WORST = 1.25  # asked: no cell slower than so many times the best peer
LAYER_US, LAYER_PART = 10.0, 0.15  # asked of the whole layer beside its GEMMs: T = 1, T = 4096
TITLES = dict(zip(FORMATS, ("NVFP4", "MXFP4", "INT4 g128"), strict=True))
NAMES = [peer.name for peer in PEERS]
Results = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """One case in which ours has a time, ``us``."""

    case: Results
    us: float

    @property
    def tokens(self) -> int:
        """How many."""
        return self.case["tokens"]

    @property
    def title(self) -> str:
        """Model and format in words."""
        return f"{MODELS[self.case['model']].title}, {TITLES[self.case['fmt']]}"

    @property
    def known(self) -> float:
        """The best peer's time known before."""
        return self.case["best_peer_us"]

    @property
    def here(self) -> float | None:
        """The best peer's time in this run."""
        times = [us_of(self.case, name) for name in NAMES]
        return min((us for us in times if us is not None), default=None)

    @property
    def best(self) -> float:
        """The better of both."""
        return self.known if self.here is None else min(self.known, self.here)

    @property
    def ratio(self) -> float:
        """Our time relative to the best peer's."""
        return self.us / self.best

    @property
    def extra(self) -> float | None:
        """Microseconds that the whole layer takes beside its GEMMs."""
        layer = us_of(self.case, LAYER)
        return None if layer is None else layer - self.us

    @property
    def reached(self) -> tuple[float, float, float]:
        """Percent of the floor's speed, TB/s, TFLOP/s."""
        case, us = self.case, self.us
        return 100 * case["floor_us"] / us, case["bytes"] / us / 1e6, case["flop"] / us / 1e6


def us_of(case: Results, name: str) -> float | None:
    """Return a contender's time, of its fastest variant; None without one."""
    found = [
        time["us"]
        for label, time in case["times"].items()
        if label == name or (name in NAMES and label.startswith(f"{name}, "))
    ]
    return min(found, default=None)


def timed(results: Results) -> list[Cell]:
    """Return the cases in which ours has a time."""
    times = [(case, us_of(case, GEMMS)) for case in results["cases"]]
    return [Cell(case, us) for case, us in times if us is not None]


def _sizes(model: Model) -> str:
    return (
        f"{model.title} (E {model.experts}, top {model.top_k}, H {model.hidden}, "
        f"I {model.intermediate})"
    )


def _grid(results: Results) -> list[tuple[str, str, list[Cell | None]]]:
    """Return model, format and the cells by tokens, for each row of the table."""
    grid = {(c.case["model"], c.case["fmt"], c.tokens): c for c in timed(results)}
    lines = []
    for model, fmt in rows():
        found = [grid.get((model.key, fmt, tokens)) for tokens in TOKENS]
        if any(found):
            lines.append((_sizes(model), TITLES[fmt], found))
    return lines


def _range(values: Sequence[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def bucket_table(results: Results) -> str:
    """Return one row for each T: means, worst cell, what of bytes/s and FLOP/s is reached."""
    headings = ["T", "cells", "ours / best peer", "worst cell", "of the floor"]
    headings += ["TB/s", "TFLOP/s", "whole layer adds", "goal", "reached"]
    lines = []
    for tokens in TOKENS:
        cells = [cell for cell in timed(results) if cell.tokens == tokens]
        if not cells:
            continue
        worst = max(cells, key=lambda cell: cell.ratio)
        reached = zip(*(cell.reached for cell in cells), strict=True)
        lines.append(
            [
                f"{tokens:,}",
                str(len(cells)),
                f"{geometric_mean(cell.ratio for cell in cells):.2f}",
                f"{worst.ratio:.2f} ({worst.title})",
                *map(_range, reached, ("{:.0f} %", "{:.1f}", "{:.0f}")),
                *_layer_cells(tokens, cells),
            ]
        )
    return markdown_table(headings, lines)


def _layer_cells(tokens: int, cells: Sequence[Cell]) -> list[str]:
    added = [(cell.extra, cell.us) for cell in cells if cell.extra is not None]
    if not added:
        return ["", "", ""]
    us, part = [extra for extra, _ in added], [100 * extra / ours for extra, ours in added]
    text = f"{_range(us, '{:.1f}')} us, {_range(part, '{:.0f} %')}"
    if tokens == 1:
        return [text, f"{LAYER_US:g} us", yes(max(us) <= LAYER_US)]
    if tokens == TOKENS[-1]:
        return [text, f"{LAYER_PART:.0%}", yes(max(part) <= 100 * LAYER_PART)]
    return [text, "", ""]


def verdict(results: Results) -> dict[str, Any]:
    """Return what the verdict in words says: geometric means, the worst cell, what is asked."""

    def mean_and_worst(ratios: Sequence[float]) -> tuple[float, float] | None:
        return (geometric_mean(ratios), max(ratios)) if ratios else None

    cells = timed(results)
    ratios = [cell.ratio for cell in cells]
    return {
        "cells": cells,
        "mean": geometric_mean(ratios) if ratios else None,
        "worst": max(cells, key=lambda cell: cell.ratio, default=None),
        "slow": sum(ratio > WORST for ratio in ratios),
        "known": mean_and_worst([cell.us / cell.known for cell in cells]),
        "here": mean_and_worst([cell.us / cell.here for cell in cells if cell.here is not None]),
        "faster": _times_as_fast(cells),
        "limit": WORST,
        "date": BEST_PEER_DATE,
    }


def _times_as_fast(cells: Sequence[Cell]) -> Mapping[str, float]:
    """Return how many times as fast as the best peer of the run: of formats, then of tokens."""
    found: dict[str, list[float]] = {}
    beside = [(cell, cell.here / cell.us) for cell in cells if cell.here is not None]
    for fmt, title in TITLES.items():
        found[title] = [ratio for cell, ratio in beside if cell.case["fmt"] == fmt]
    for tokens in TOKENS:
        found[f"T = {tokens:,}"] = [ratio for cell, ratio in beside if cell.tokens == tokens]
    return {name: geometric_mean(ratios) for name, ratios in found.items() if ratios}


def conditions(results: Results) -> str:
    """Return one sentence: GPU, driver, versions, date, method."""
    return measured_on(results, " of consecutive calls")


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
    cells = {id(cell.case): cell for cell in timed(results)}
    layers = {}
    for model, fmt in rows():
        of = [c for c in results["cases"] if (c["model"], c["fmt"]) == (model.key, fmt)]
        of.sort(key=lambda case: TOKENS.index(case["tokens"]))
        if of:
            found = [(case, cells.get(id(case)), partial(us_of, case)) for case in of]
            layers[f"{_sizes(model)}, {TITLES[fmt]}"] = found
    return render(
        "moe/page.md.j2",
        conditions=conditions(results),
        verdict=verdict(results),
        grid=_grid(results),
        tokens=TOKENS,
        limit=WORST,
        date=BEST_PEER_DATE,
        peers=NAMES,
        errors=errors_text(results),
        source=source,
        bytes_a_us=BYTES_A_US,
        flop_a_us=FLOP_A_US,
        buckets=bucket_table(results),
        layers=layers,
        contenders=[GEMMS, LAYER],
        failures=[
            (case["name"], name, reason)
            for case in results["cases"]
            for name, reason in case["failed"].items()
        ],
    )


# ---- The plots: speed beside the best peer, and part of the floor's speed -----------------------

COLOURS = {"NVFP4": "#12548c", "MXFP4": "#1c7c54", "INT4 g128": "#b0562b"}
MARKERS = {"NVFP4": "o", "MXFP4": "s", "INT4 g128": "D"}


def _panels(results: Results) -> tuple[Figure, dict[str, Axes], dict[tuple[str, str], list[Cell]]]:
    """Return a figure with one panel for each model, and the cells by title and format."""
    lines: dict[tuple[str, str], list[Cell]] = {}
    for cell in timed(results):
        key = MODELS[cell.case["model"]].title, TITLES[cell.case["fmt"]]
        lines.setdefault(key, []).append(cell)
    models = list(dict.fromkeys(model for model, _ in lines))
    figure = Figure(figsize=(2.6 * max(1, len(models)) + 0.6, 3.1), layout="constrained")
    axes = figure.subplots(1, max(1, len(models)), sharey=True, squeeze=False)[0]
    ticks = sorted({cell.tokens for cells in lines.values() for cell in cells})
    for ax, model in zip(axes, models, strict=False):
        ax.set_title(model)
        ax.set_xscale("log")
        ax.set_xticks(ticks, labels=[str(tick) for tick in ticks])
        ax.minorticks_off()
        ax.set_xlabel("tokens")
        ax.grid(axis="y")
    figure.supxlabel(conditions(results).split(";")[0], fontsize=7, color=FAINT)
    return figure, dict(zip(models, axes, strict=False)), lines


def _plot(ax: Axes, fmt: str, cells: Sequence[Cell], y: Sequence[float], **style: Any) -> None:
    options = {"color": COLOURS[fmt], "markersize": 5, "linewidth": 1.3, "label": fmt, **style}
    ax.plot([cell.tokens for cell in cells], y, **options)


def _speed(results: Results) -> Figure:
    figure, axes, lines = _panels(results)
    for (model, fmt), cells in lines.items():
        speeds = [cell.best / cell.us for cell in cells]
        _plot(axes[model], fmt, cells, speeds, marker=MARKERS[fmt])
    for ax in axes.values():
        ax.axhline(1, color=FAINT, linewidth=0.8, linestyle="--")
        ax.axhline(0.8, color=FAINT, linewidth=0.8, linestyle=":")
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} x"))
        ax.legend(loc="lower right", fontsize=8)
    figure.suptitle("gemm1 + gemm2: best peer's time / ours; dotted: 1 / 1.25", x=0.01, ha="left")
    return figure


def _floor(results: Results) -> Figure:
    figure, axes, lines = _panels(results)
    for (model, fmt), cells in lines.items():
        ours = [cell.case["floor_us"] / cell.us for cell in cells]
        peer = [cell.case["floor_us"] / cell.best for cell in cells]
        _plot(axes[model], fmt, cells, ours, marker=MARKERS[fmt])
        _plot(axes[model], fmt, cells, peer, linestyle=":", linewidth=1, label=None)
    for ax in axes.values():
        ax.set_ylim(0, 1.05)
        ax.yaxis.set_major_formatter(PercentFormatter(1))
        ax.legend(loc="lower right", fontsize=8)
    figure.suptitle(
        "Floor / time: 100 % is 4.3 TB/s or 790 TFLOP/s; dotted: the best peer", x=0.01, ha="left"
    )
    return figure


main = report_command(
    "moe",
    FORMAT,
    page,
    None,
    lambda found: {"moe_speed.svg": _speed(found), "moe_floor.svg": _floor(found)},
    """Put the results of `python -m bench.moe` into docs/moe.md, and two plots.

    Example: python -m bench.moe.report bench/results/moe-nvidia-h200-2026-11-27.json
    """,
)


if __name__ == "__main__":
    main(prog_name="python -m bench.moe.report")
