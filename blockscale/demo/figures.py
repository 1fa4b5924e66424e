"""The report's figures, drawn with matplotlib from the demo's plain data; no global state."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase

from blockscale.specs import DTYPE_SUFFIX

from .variants import LABELS

COLOUR = {
    "torch_f32": "#a3acb5",
    "torch_bf16": "#66717c",
    "ours_f32": "#4c9bd6",
    "ours_bf16": "#12548c",
}
INK, FAINT, GRID = "#1f2933", "#66717c", "#e4e8ec"
SEQUENCE = ("#a6cee9", "#6fb0dc", "#3f8fc8", "#1d6ba8", "#124a7c", "#0a2f52")
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": FAINT,
    "axes.edgecolor": "#c4ccd4",
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "grid.color": GRID,
    "legend.frameon": False,
    "figure.constrained_layout.w_pad": 0.1,
    "svg.hashsalt": "blockscale",
}


def _bars(ax: Axes, times: Mapping[str, float], title: str, form: str) -> None:
    """Draw one bar for each variant, with its value at the end."""
    values = [times[v] for v in LABELS]
    bars = ax.barh(list(LABELS.values()), values, color=[COLOUR[v] for v in LABELS], height=0.7)
    ax.bar_label(bars, [form.format(value) for value in values], padding=3, color=INK)
    ax.set_title(title)
    ax.set_ylim(len(values) - 0.5, -0.5)  # first on top; inverting a shared axis toggles it
    ax.set_xlim(0, 1.25 * max(values))
    ax.xaxis.set_visible(False)
    ax.spines["bottom"].set_visible(False)
    ax.tick_params(axis="y", length=0)


def op_times(figure: FigureBase, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the time of one call: one panel for each shape (down) and number of rows (across)."""
    shapes = list(dict.fromkeys((row["n"], row["k"]) for row in rows))
    counts = list(dict.fromkeys(row["rows"] for row in rows))
    axes = figure.subplots(len(shapes), len(counts), squeeze=False, sharey=True)
    for row in rows:
        ax = axes[shapes.index((row["n"], row["k"]))][counts.index(row["rows"])]
        noun = "row" if row["rows"] == 1 else "rows"
        title = f"{row['n']} x {row['k']}, {row['rows']} {noun}"
        _bars(ax, row["us"], title, "{:.0f} us" if min(row["us"].values()) >= 100 else "{:.1f} us")


def latency(figure: FigureBase, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the time of the whole model: one panel for each input."""
    axes = figure.subplots(1, len(rows), squeeze=False, sharey=True)[0]
    for ax, row in zip(axes, rows, strict=True):
        _bars(
            ax,
            row["ms"],
            f"{row['input']} ({row['sentences']} x {row['tokens']} tokens)",
            "{:.1f} ms",
        )


def layer_errors(figure: FigureBase, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the errors of each layer on a logarithmic axis: median, and a line up to the maximum."""
    series = {
        "ours_f32": ("NVFP4 layer, against fp32", COLOUR["ours_f32"]),
        "torch_bf16": ("torch bf16 layer, against fp32", COLOUR["torch_bf16"]),
        "kernel_ours_bf16": ("our kernel alone, bf16", COLOUR["ours_bf16"]),
        "kernel_ours_f32": ("our kernel alone, fp32", "#d98324"),
    }
    ax = figure.subplots()
    at = range(len(rows))
    for key, (label, colour) in series.items():
        middle = [row[key]["median"] for row in rows]
        ax.vlines(at, middle, [row[key]["max"] for row in rows], color=colour, lw=1.6, alpha=0.55)
        ax.plot(at, middle, "o", color=colour, ms=4, label=label)
    ax.set_yscale("log")
    ax.set_ylabel("relative error of a token's output")
    ax.set_xticks(at, [row["layer"] for row in rows], rotation=90, fontsize=7)
    ax.set_xlim(-0.8, len(rows) - 0.2)
    ax.grid(axis="y")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)


def tuning_curve(figure: FigureBase, history: Sequence[Mapping[str, Any]]) -> None:
    """Draw the best time so far of every workload over the search: one panel for each kernel shape.

    Workload tags end in the activation dtype and the number of rows: `..._f32_m16`.  A workload of
    which every trial failed has no line.
    """
    good = [event for event in history if not event["failed"]]
    tags = list(dict.fromkeys(event["workload"] for event in good))
    parts = {tag: tag.rsplit("_", 2) for tag in tags}
    bases = list(dict.fromkeys(base for base, _, _ in parts.values()))
    buckets = sorted({int(rows[1:]) for _, _, rows in parts.values()})
    styles = dict(zip(DTYPE_SUFFIX.values(), ("-", "--", ":"), strict=True))
    end = max(event["elapsed_s"] for event in history)
    axes = figure.subplots(1, len(bases), squeeze=False, sharey=True)[0]
    for tag, (base, dtype, rows) in parts.items():
        events = [event for event in good if event["workload"] == tag]
        times = [*(event["elapsed_s"] for event in events), end]  # the line goes on to the end
        best = [event["best_us"] for event in events]
        place = buckets.index(int(rows[1:])) * (len(SEQUENCE) - 1) / max(1, len(buckets) - 1)
        axes[bases.index(base)].step(
            times,
            [*best, best[-1]],
            where="post",
            color=SEQUENCE[round(place)],
            linestyle=styles[dtype],
            label=f"{rows[1:]} row{'s' * (rows != 'm1')}, {dtype}",
        )
    handles: dict[str, Any] = {}
    for ax, base in zip(axes, bases, strict=True):
        ax.set(title=base, yscale="log", xlabel="seconds of search")
        ax.grid(axis="y")
        handles |= {
            label: line for line, label in zip(*ax.get_legend_handles_labels(), strict=True)
        }
    axes[0].set_ylabel("best time, us")
    order = sorted(handles, key=lambda label: (int(label.split()[0]), label))
    lines = [handles[label] for label in order]
    figure.legend(lines, order, loc="outside lower center", ncols=len(buckets))


def data_uri(draw: Any, data: Any, width: float, height: float) -> str:
    """Return the figure that `draw` makes of `data` as a data: URI of an SVG, for an <img>."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure, data)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def main_figure(result: Mapping[str, Any], path: Path) -> None:
    """Write one PNG with the errors of the layers, the latency and the time of each op."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 9.5), layout="constrained", facecolor="white")
        parts: Any = figure.subfigures(3, 1, height_ratios=(1.25, 0.55, 1.2))
        top, middle, bottom = parts
        for part, title, draw, data in (
            (top, "What 4 bits cost: error of each layer", layer_errors, result["layers"]),
            (middle, "Time of the whole model", latency, result["latency"]),
            (bottom, "Time of one Linear", op_times, result["ops"]),
        ):
            part.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
            draw(part, data)
        figure.savefig(path, format="png", dpi=110)
