"""The demo's figures as console tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, geometric_mean
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .variants import LABELS, REFERENCE

OTHERS = [variant for variant in LABELS if variant != REFERENCE]


def percent(value: float, digits: int = 2) -> str:
    """Return a fraction as a percentage: 0.0951 -> "9.51 %"."""
    return f"{100 * value:.{digits}f} %"


def mebibytes(value: float) -> str:
    """Return a number of bytes in MiB."""
    return f"{value / 2**20:.1f} MiB"


def _table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], note: str | None = None
) -> Table:
    """Return a table that fits 80 columns: text to the left, numbers to the right."""
    table = Table(
        title=f"[bold]{title}[/bold]",
        title_style="",
        title_justify="left",
        caption=note,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def quantised(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of weight errors by kind of Linear, and of what the sweep gained."""

    def cells(kind: str) -> list[str]:
        same = [row for row in rows if row["layer"].endswith(f".{kind}")]
        errors = ("weight_error_max", "weight_error", "sweep_gain")
        means = [fmean(row[key] for row in same) for key in errors]
        shape = f"{same[0]['n']} x {same[0]['k']}"
        return [kind, shape, *map(percent, means, (2, 2, 1))]

    return _table(
        "Relative error of the weights (mean over the layers)",
        ["Linear", "N x K", "own maximum", "swept scale", "MSE saved"],
        map(cells, dict.fromkeys(row["layer"].split(".")[1] for row in rows)),
    )


def _two_lines(variants: Iterable[str]) -> list[str]:
    return [LABELS[variant].replace(" ", "\n") for variant in variants]


def layers(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of errors, one row for each Linear."""

    def cells(row: Mapping[str, Any]) -> list[str]:
        ours = [row[variant] for variant in ("ours_f32", "ours_bf16")]
        return [
            row["layer"],
            f"{100 * row['weight_error']:.2f}",
            f"{100 * row['torch_bf16']['median']:.2f}",
            *(f"{100 * found['median']:.1f} ({100 * found['max']:.1f})" for found in ours),
            *(f"{row[f'kernel_ours_{dtype}']['max']:.1e}" for dtype in ("f32", "bf16")),
        ]

    return _table(
        "Error of each layer in %, relative per row: median (max) over the tokens",
        ["layer", "weights", *_two_lines(OTHERS), "kernel\nfp32", "kernel\nbf16"],
        map(cells, rows),
        "NVFP4 bf16: 4-bit weights, activations in bf16.  Outputs are compared with the fp32 layer "
        "on the same input; a large maximum is a token ([CLS]) on which that layer's output nearly "
        "vanishes.  kernel: largest error against float64 on the same 4-bit weights, as a "
        "fraction: rounding alone, without the loss of quantisation.",
    )


def end_to_end(found: Mapping[str, Mapping[str, float]]) -> Table:
    """Return the table of the sentence embeddings."""
    keys = {"median": 2, "max": 2, "top1": 1, "top5": 1, "group": 1}
    return _table(
        "Sentence embeddings against torch fp32",
        [
            "",
            "error,\nmedian",
            "error,\nmax",
            "same\nnearest",
            "overlap\nof 5",
            "nearest\nin group",
        ],
        (
            [LABELS[variant], *(percent(row[key], digits) for key, digits in keys.items())]
            for variant, row in found.items()
        ),
    )


def disturbed(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return in words what disturbed times of `rows`; nothing if nothing did."""
    words = [row.get("watched", {}).get("disturbed") for row in rows]
    found = list(filter(None, words))
    if not found:
        return ""
    return f"in {len(found)} of {len(rows)} measurements; in the first of them {found[0]}"


def warning(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what to say beside times of `rows` if they were disturbed."""
    words = disturbed(rows)
    return f"The machine was busy, so speed-ups mean nothing: {words}." if words else None


def speedups(row: Mapping[str, Any], unit: str) -> dict[str, float] | None:
    """Return torch's times over the time of our faster variant; None if they mean nothing."""
    if disturbed([row]):
        return None
    times = row[unit]
    best = min(times["ours_f32"], times["ours_bf16"])
    return {variant: times[variant] / best for variant in ("torch_f32", "torch_bf16")}


def _timed(row: Mapping[str, Any], unit: str, digits: int) -> list[str]:
    times, ratios = row[unit], speedups(row, unit)
    cells = {v: f"{times[v]:.{digits}f}" for v in LABELS}
    if ratios is None:
        return [*cells.values(), "busy", "busy"]
    fastest = min(times, key=lambda variant: times[variant])
    cells[fastest] = f"[bold]{cells[fastest]}[/bold]"
    return [*cells.values(), *(f"{ratio:.2f} x" for ratio in ratios.values())]


TIMES = [*_two_lines(LABELS), "fp32 /\nours", "bf16 /\nours"]


def ops(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of microseconds for one call."""
    return _table(
        "Time of one Linear, us (interleaved medians; last: torch / our faster)",
        ["N x K", "rows", *TIMES],
        ([f"{row['n']} x {row['k']}", str(row["rows"]), *_timed(row, "us", 1)] for row in rows),
        warning(rows),
    )


def latency(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of milliseconds for the whole model."""
    return _table(
        "Whole model, ms (interleaved medians; last: torch / our faster)",
        ["input", "tokens", *TIMES],
        (
            [row["input"], f"{row['sentences']} x {row['tokens']}", *_timed(row, "ms", 2)]
            for row in rows
        ),
        warning(rows),
    )


def sizes(found: Mapping[str, int]) -> Table:
    """Return the table of bytes."""
    labels = {"fp32": "fp32", "bf16": "bf16", "nvfp4": "NVFP4 with its scales"}
    return _table(
        "Bytes of the weights",
        ["", "encoder Linears", "bits a weight", "with embeddings (fp32)"],
        (
            [
                label,
                mebibytes(found[key]),
                f"{32 * found[key] / found['fp32']:.2f}",
                mebibytes(found[key] + found["rest"]),
            ]
            for key, label in labels.items()
        ),
    )


def _measured(us: float | None) -> bool:
    """Return whether a time was found: failures are infinite, and None in the JSON file."""
    return us is not None and math.isfinite(us)


def search(found: Mapping[str, Any]) -> str:
    """Return one sentence on what a search found; `found` is the "search" of the demo's figures."""
    pairs = [(found["default"].get(tag), us) for tag, us in found["best"].items()]
    gains = [old / us for old, us in pairs if _measured(old) and _measured(us)]
    gain = geometric_mean(gains) if gains else 1.0
    failed = sum(bool(event["failed"]) for event in found["history"])
    made = f"{len(found['history'])} candidates built and measured, {failed} failed"
    if found.get("disturbed"):
        return (
            f"{made}; what they gained is not known, for the machine was busy: {found['disturbed']}"
        )
    return (
        f"{made}; the best are {gain:.2f} x as fast as the default schedules (geometric mean of "
        f"{len(gains)} workloads)"
    )


def print_all(console: Console, result: Mapping[str, Any]) -> None:
    """Print every table of what `infer` measured."""
    console.print(layers(result["layers"]))
    console.print(end_to_end(result["end_to_end"]))
    console.print(ops(result["ops"]))
    console.print(latency(result["latency"]))
    console.print(sizes(result["bytes"]))
    console.print(f"tvm imported in this process: {'yes' if result['tvm_imported'] else 'no'}")


# ---- The language model -------------------------------------------------------------------------


def language(found: Mapping[str, Any]) -> Table:
    """Return the table of the language model: how good, how fast."""
    speed = found["speed"]
    names = {"fp32": "fp32", "bf16": "bf16", "nvfp4": "NVFP4"}
    sizes = ", ".join(f"{label} {mebibytes(found['bytes'][key])}" for key, label in names.items())
    note = (
        f"perplexity: of {found['tokens']} tokens of topics that were held out.  Times are medians "
        f"of interleaved runs.  Linear weights: {sizes}.  A model of "
        f"{found['bytes']['parameters'] / 1e6:.1f} million weights spends most of the time of a "
        "single token between kernels, in Python."
    )
    busy = warning(speed)
    return _table(
        "A language model through transformers",
        ["", "perplexity", "same next\ntoken", "reading,\ntokens/s", "writing,\ntokens/s"],
        (
            [
                label,
                f"{found['perplexity'][variant]:.2f}",
                percent(found["same_token"][variant], 1),
                *(f"{row['tokens_s'][variant]:.0f}" for row in speed),
            ]
            for variant, label in LABELS.items()
        ),
        f"{note}  {busy}" if busy else note,
    )


def print_language(console: Console, result: Mapping[str, Any]) -> None:
    """Print what the language model's process measured, and what the model writes."""
    console.print(language(result))
    for row in result["samples"]:
        for variant in (REFERENCE, "ours_bf16"):
            said = " ".join(row["texts"][variant].split())
            console.print(f"  {LABELS[variant]}: {row['prompt']} {said}", markup=False)
    console.print(f"tvm imported in this process: {'yes' if result['tvm_imported'] else 'no'}")
