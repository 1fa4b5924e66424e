"""Tables and a plot of GPU results: ``python -m bench.gpu.report bench/results/gpu-...json``.

Fills docs/gpu.md (all figures), draws docs/gpu_copy.svg and .png, and with --readme puts the short
form into README.md, between its gpu comments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from bench.gpu import contest
from bench.gpu.cases import FORMAT
from bench.gpu.host import LABELS
from bench.report import measured_on, render, report_command, us_text, yes
from blockscale.demo.figures import FAINT

HOST_US = 4.0  # asked of one call from torch, checks included
MIB = 2**20
Results = Mapping[str, Any]

WORDS = {
    "of_compile": ("torch.compile", "torch.compile's time"),
    "of_triton": ("triton", "Triton's"),
}
README_CASES = (
    "dequantize 8192x8192 nvfp4",
    "quantize 8192x8192 nvfp4 linear",
    "add_rmsnorm 4096x7168 nvfp4",
    "silu_and_mul 4096x14336 nvfp4",
    "swizzle 229376x256",
    "add_rmsnorm 64x7168 nvfp4",
    "add_rmsnorm 1x4096 nvfp4",
    "sweep 8192x4096",
)


def timed(results: Results) -> list[Results]:
    """Return the cases that have times."""
    return [case for case in results["cases"] if "times" in case]


def judged(case: Results) -> Iterator[tuple[str, bool]]:
    """Yield what is asked of a case in words with what came out, and whether it is met."""
    ours = case["times"]["ours"]["us"]
    for kind, bar in case["asked"].items():
        if kind == "of_copy":
            yield f">= {bar:.0%} of the copy", case["of_copy"] >= bar
        elif kind == "us":
            yield f"<= {us_text(bar)} us", ours <= bar
        else:
            contender, words = WORDS[kind]
            if contender in case["times"]:
                yield f"<= {bar:g} x {words}", ours <= bar * case["times"][contender]["us"]


def _asked(case: Results) -> str:
    """Return the cells "asked" and "met"."""
    found = [*judged(case)]
    met = yes(all(met for _, met in found)) if found else ""
    return f"{'; '.join(words for words, _ in found)} | {met}"


def _exact(check: Results) -> str:
    if check["exact"]:
        return "all"
    mark = "" if check["right"] else "**"
    return f"{mark}all but {check['differ']:,} of {check['of']:,}{mark}"


def untimed(results: Results) -> list[str]:
    """Return cases without a time, and of each why."""
    cases = [case for case in results["cases"] if "times" not in case]
    return [f"{case['name']}: {case.get('failed') or case['skipped']}" for case in cases]


def blank(cases: Sequence[Results]) -> list[str]:
    """Return the others that a case has no time of, and why: what became of their variants."""
    found = []
    for case in cases:
        for name, variants in case["variants"].items():
            if name not in case["times"]:
                whys = (each.get("failed") or each["skipped"] for each in variants.values())
                why = "; ".join(
                    dict.fromkeys(why.removeprefix("ArithmeticError: ") for why in whys)
                )
                found.append(f"{case['name']}, {name}: {why}")
    return found


def _norms(cases: Sequence[Results]) -> list[Results]:
    """Return the cases of add_rmsnorm to NVFP4 with linear scales."""
    return [c for c in cases if c["op"] == "add_rmsnorm" and c["name"].endswith(" nvfp4")]


def _shown(results: Results) -> list[Results]:
    """Return the cases of the first table: of the norms those of which something is asked."""
    cases = timed(results)
    norms = _norms(cases)
    large = [case for case in norms if "of_copy" in case["asked"]]
    large.sort(key=lambda case: (case["shape"]["hidden"], case["shape"]["rows"]))
    plain = [case for case in cases if case["op"] != "add_rmsnorm"]
    other = [case for case in cases if case["op"] == "add_rmsnorm" and case not in norms]
    return [*plain, *large, *other]


def conditions(results: Results) -> str:
    """Return one sentence: GPU, driver, versions, date, method."""
    times = results["cache_multiple"]
    data = f"; launches go through sets of data of more than {times} times the L2 cache"
    return measured_on(results, data)


def page(results: Results, source: str) -> str:
    """Return all tables."""
    cases = timed(results)
    grid = {(c["shape"]["rows"], c["shape"]["hidden"]): c for c in _norms(cases)}
    return render(
        "gpu/page.md.j2",
        r={"host": None, "uses": None, **results},
        counters=results.get("counters", []),
        conditions=conditions(results),
        source=source,
        cases=_shown(results),
        exact=_exact,
        asked=_asked,
        sweep=next((case["checks"]["ours"] for case in cases if case["op"] == "sweep"), None),
        grid=grid,
        rows=sorted({rows for rows, _ in grid}),
        hidden=sorted({hidden for _, hidden in grid}),
        peers=[case for case in cases if {"torch.compile", "triton"} & case["times"].keys()],
        us=results.get("host", {}).get("us", {}),
        labels=LABELS,
        host_us=HOST_US,
        untimed=untimed(results),
        blank=blank(cases),
        wrong=[case["name"] for case in cases if not contest.right(case)],
    )


def readme_section(results: Results, source: str) -> str:
    """Return the short form: a few cases, the host's cost, the conditions."""
    by_name = {case["name"]: case for case in timed(results)}
    shown = [by_name[name] for name in README_CASES if name in by_name]
    return render(
        "gpu/readme.md.j2",
        conditions=conditions(results),
        source=source,
        cases=by_name,
        us_of=lambda case, name: case["times"].get(name, {}).get("us"),
        shown=shown,
        blank=blank(shown),
        untimed=untimed(results),
        verdicts=[met for case in by_name.values() for _, met in judged(case)],
        wrong=[name for name, case in by_name.items() if not contest.right(case)],
        us=results.get("host", {}).get("us", {}),
    )


# ---- The plot: speed of each op relative to a copy of as many bytes -----------------------------

LINES = {
    "dequantize": ("dequantize", "#12548c", "o"),
    "quantize": ("quantize", "#4c9bd6", "s"),
    "silu_and_mul": ("silu_and_mul_fp4quant", "#b0562b", "D"),
    "swizzle": ("swizzle_scales", "#7a5ea8", "^"),
    "unswizzle": ("unswizzle_scales", "#7a5ea8", "v"),
}
HIDDEN = {4096: "#1c7c54", 7168: "#73b98f"}  # the others are drawn faint


def _series(cases: Sequence[Results]) -> Iterator[tuple[str, str, str, list[tuple[float, float]]]]:
    """Yield label, colour, marker and the points (MiB moved, part of the copy's speed)."""

    def points(chosen: Sequence[Results]) -> list[tuple[float, float]]:
        return sorted((case["bytes"] / MIB, case["of_copy"]) for case in chosen)

    norms = _norms(cases)
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


def _draw(results: Results) -> Figure:
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    ax = figure.subplots()
    for label, colour, marker, points in _series(timed(results)):
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
    ax.set_title("Speed relative to a device copy of as many bytes; dotted: 90 % from 16 MiB on")
    ax.legend(loc="lower right", fontsize=8)
    figure.supxlabel(conditions(results).split(";")[0], fontsize=7, color=FAINT)
    return figure


def _plots(results: Results) -> dict[str, Figure]:
    figure = _draw(results)
    return {"gpu_copy.svg": figure, "gpu_copy.png": figure}


main = report_command(
    "gpu",
    FORMAT,
    page,
    readme_section,
    _plots,
    """Put the results of `python -m bench.gpu` into docs/gpu.md, a plot, and the README.

    Example: python -m bench.gpu.report bench/results/gpu-nvidia-h200-2026-11-26.json
    """,
)


if __name__ == "__main__":
    main(prog_name="python -m bench.gpu.report")
