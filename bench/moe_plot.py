"""The plots of `bench.moe_report`: speed beside the best peer, and part of the floor's speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from blockscale.demo.figures import FAINT, STYLE
from blockscale.demo.files import write_atomically

COLOURS = {"NVFP4": "#12548c", "MXFP4": "#1c7c54", "INT4 g128": "#b0562b"}
MARKERS = {"NVFP4": "o", "MXFP4": "s", "INT4 g128": "D"}
Lines = Mapping[tuple[str, str], Sequence[Mapping[str, float]]]


def _panels(lines: Lines, caption: str) -> tuple[Figure, dict[str, Any]]:
    """Return a figure with one panel for each model."""
    models = list(dict.fromkeys(model for model, _ in lines))
    figure = Figure(figsize=(2.6 * max(1, len(models)) + 0.6, 3.1), layout="constrained")
    axes = figure.subplots(1, max(1, len(models)), sharey=True, squeeze=False)[0]
    ticks = sorted({int(point["tokens"]) for points in lines.values() for point in points})
    for ax, model in zip(axes, models, strict=False):
        ax.set_title(model)
        ax.set_xscale("log")
        ax.set_xticks(ticks, labels=[str(tick) for tick in ticks])
        ax.minorticks_off()
        ax.set_xlabel("tokens")
        ax.grid(axis="y")
    figure.supxlabel(caption.split(";")[0], fontsize=7, color=FAINT)
    return figure, dict(zip(models, axes, strict=False))


def _plot(ax: Any, fmt: str, points: Sequence[Mapping[str, float]], key: str, **style: Any) -> None:
    x, y = [point["tokens"] for point in points], [point[key] for point in points]
    options = {"color": COLOURS[fmt], "markersize": 5, "linewidth": 1.3, "label": fmt, **style}
    ax.plot(x, y, **options)


def _speed(lines: Lines, caption: str) -> Figure:
    figure, axes = _panels(lines, caption)
    for (model, fmt), points in lines.items():
        _plot(axes[model], fmt, points, "speed", marker=MARKERS[fmt])
    for ax in axes.values():
        ax.axhline(1, color=FAINT, linewidth=0.8, linestyle="--")
        ax.axhline(0.8, color=FAINT, linewidth=0.8, linestyle=":")
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} x"))
        ax.legend(loc="lower right", fontsize=8)
    figure.suptitle("gemm1 + gemm2: best peer's time / ours; dotted: 1 / 1.25", x=0.01, ha="left")
    return figure


def _floor(lines: Lines, caption: str) -> Figure:
    figure, axes = _panels(lines, caption)
    for (model, fmt), points in lines.items():
        _plot(axes[model], fmt, points, "ours", marker=MARKERS[fmt])
        _plot(axes[model], fmt, points, "peer", linestyle=":", linewidth=1, label=None)
    for ax in axes.values():
        ax.set_ylim(0, 1.05)
        ax.yaxis.set_major_formatter(PercentFormatter(1))
        ax.legend(loc="lower right", fontsize=8)
    figure.suptitle(
        "Floor / time: 100 % is 4.3 TB/s or 790 TFLOP/s; dotted: the best peer", x=0.01, ha="left"
    )
    return figure


def draw(lines: Lines, folder: Path, caption: str) -> None:
    """Write moe_speed.svg and moe_floor.svg into ``folder``."""
    with matplotlib.rc_context(STYLE):
        for name, make in (("moe_speed", _speed), ("moe_floor", _floor)):
            figure = make(lines, caption)
            write_atomically(
                folder / f"{name}.svg",
                lambda new, f=figure: f.savefig(  # type: ignore[misc]
                    new, format="svg", metadata={"Date": None}
                ),
            )
