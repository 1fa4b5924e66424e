"""The plot of `bench.gpu_report`: speed of each op relative to a copy of as many bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from blockscale.demo.figures import FAINT, STYLE
from blockscale.demo.files import write_atomically

Case = Mapping[str, Any]

LINES = {
    "dequantize": ("dequantize", "#12548c", "o"),
    "quantize": ("quantize", "#4c9bd6", "s"),
    "silu_and_mul": ("silu_and_mul_fp4quant", "#b0562b", "D"),
    "swizzle": ("swizzle_scales", "#7a5ea8", "^"),
    "unswizzle": ("unswizzle_scales", "#7a5ea8", "v"),
}
HIDDEN = {4096: "#1c7c54", 7168: "#73b98f"}  # the others are drawn faint
MIB = 2**20


def _series(cases: Sequence[Case]) -> Iterator[tuple[str, str, str, list[tuple[float, float]]]]:
    """Yield label, colour, marker and the points (MiB moved, part of the copy's speed)."""

    def points(chosen: Sequence[Case]) -> list[tuple[float, float]]:
        return sorted((case["bytes"] / MIB, case["of_copy"]) for case in chosen)

    norms = [c for c in cases if c["op"] == "add_rmsnorm" and c["name"].endswith(" nvfp4")]
    hidden = sorted({case["shape"]["hidden"] for case in norms}, key=lambda h: (h in HIDDEN, h))
    others = "add_rmsnorm_fp4quant, other hidden"
    for h in hidden:
        label = f"add_rmsnorm_fp4quant, hidden {h}" if h in HIDDEN else others
        own = points([case for case in norms if case["shape"]["hidden"] == h])
        yield label, HIDDEN.get(h, "#c8d3cc"), ".", own
        others = others if h in HIDDEN else "_"  # one entry in the legend
    for op, (label, colour, marker) in LINES.items():
        chosen = [c for c in cases if c["op"] == op and not c["name"].endswith("128x4")]
        if chosen:
            yield label, colour, marker, points(chosen)


def draw(cases: Sequence[Case], folder: Path, caption: str) -> None:
    """Write gpu_copy.svg and gpu_copy.png into ``folder``."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 4.6), layout="constrained")
        ax = figure.subplots()
        for label, colour, marker, points in _series(cases):
            x, y = zip(*points, strict=True)
            ax.plot(x, y, color=colour, marker=marker, markersize=5, linewidth=1.3, label=label)
        ax.axhline(1, color=FAINT, linewidth=0.8, linestyle="--")
        ax.axhline(0.9, color=FAINT, linewidth=0.8, linestyle=":")
        ax.axvline(16, color=FAINT, linewidth=0.8, linestyle=":")
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.yaxis.set_major_formatter(PercentFormatter(1))
        ax.set_ylim(bottom=0)
        ax.grid(axis="y")
        ax.set_xlabel("MiB read and written")
        ax.set_title(
            "Speed relative to a device copy of as many bytes; dotted: 90 % from 16 MiB on"
        )
        ax.legend(loc="lower right", fontsize=8)
        figure.supxlabel(caption.split(";")[0], fontsize=7, color=FAINT)
        for suffix, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
            write_atomically(
                folder / f"gpu_copy.{suffix}",
                lambda new, s=suffix, m=metadata: figure.savefig(  # type: ignore[misc]
                    new, format=s, dpi=150, metadata=m
                ),
            )
