"""Put measured tables into pages of docs/: ``python -m bench.readme --bench FILE --demo FILE``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import click

from bench import emulator
from bench.cpu import report as cpu_report
from bench.cpu.report import FORMAT
from bench.ep import __main__ as ep
from bench.ep import scaling
from bench.gpu import host, linear, linear_fp8, linear_report
from bench.moe import fp8 as moe_fp8
from bench.moe import loose
from bench.report import (
    Results,
    fill_page,
    markdown_table,
    read,
    relative,
    render,
    schedules,
    us_text,
)
from blockscale.building.records import META
from blockscale.demo.tables import disturbed
from blockscale.demo.variants import LABELS

_BYTES = {"torch_f32": "fp32", "torch_bf16": "bf16", "ours_f32": "nvfp4", "ours_bf16": "nvfp4"}


def demo_section(result: Results, source: str = "") -> str:
    """Return one row for each way in which the demo ran the model, and the conditions."""
    busy = disturbed(result["latency"])
    return render("pages/demo.md.j2", r=result, labels=LABELS, weights=_BYTES, disturbed=busy)


def linear_fp8_section(result: Results, source: str = "") -> str:
    """Return a row for each weight and number of rows of a linear layer with FP8 rows."""
    wrong = sum(not row["right"] for row in result["rows"])
    facts = {"wrong": wrong, "schedules": schedules(result)}
    return render("pages/linear_fp8.md.j2", r=result, source=source, **facts)


def moe_fp8_section(result: Results, source: str = "") -> str:
    """Return a row for each layer and number of tokens of MoE layers with FP8 rows."""
    cases = [case | _beside(case["times"]) for case in result["cases"]]
    tokens = sorted({case["tokens"] for case in cases})
    means = []
    for fmt in dict.fromkeys(case["weights"] for case in cases):
        for what, above, below in MOE_FP8_MEANS:
            found = [
                _mean(
                    case["times"][above]["us"] / case["times"][below]["us"]
                    for case in cases
                    if (case["weights"], case["tokens"]) == (fmt, number)
                    and {above, below} <= case["times"].keys()
                )
                for number in tokens
            ]
            if any(found):
                means.append((fmt, what, found))
    facts = {"cases": cases, "tokens": tokens, "means": means, "schedules": schedules(result)}
    return render("pages/moe_fp8.md.j2", r=result, source=source, **facts)


EP_OTHERS = {
    "all_to_all": "`all_to_all_single`, `fused_moe`",
    "all_gather": "`all_gather`, `fused_moe`, `reduce_scatter`",
    "tensor parallel": "a share of each expert, `all_reduce`",
    "bf16, slots": "ours",
    "bf16, sums": 'ours, `combine="sums"`',
    "bf16, slots, in halves": "ours, two halves on two streams",
    "bf16, sums, in halves": "sums, two halves on two streams",
    "fp8, slots": 'ours, `dispatch="fp8"`',
}
"""What tables call the ways of a layer."""

EP_PEERS = {
    "low_latency": "UCCL-EP, low latency, rows of slots",
    "worst": "UCCL-EP, normal, captured, sums",
    "normal": "UCCL-EP, normal, with its host",
}
"""What tables call the parts of `bench.peers.ep`."""


def ep_section(result: Results, source: str = "") -> str:
    """Return rows there and back, whole layers, and, from two ranks, more of them on paper."""
    rows = result["exchange"]
    tokens = [row["tokens"] for row in rows]
    sizes = ep.LAYERS[ep.TIMED]
    exchange = [
        (name, [row.get(form, {}).get(key) for row in rows])
        for name, (form, key, _) in scaling.directions(sizes.hidden).items()
        if any(form in row for row in rows)
    ]
    exchange += [
        (f"NCCL, {size} an element", [row[f"nccl, {size}"] for row in rows])
        for size in ("2 bytes", "1 bytes")
    ]
    beside = result.get("beside") or {"parts": {}}
    for part, said in EP_PEERS.items():
        found = {row["tokens"]: row for row in beside["parts"].get(part, [])}
        exchange += [
            (f"{said}, {way}", [found.get(t, {}).get(way) for t in tokens])
            for way in ("dispatch", "combine")
            if found
        ]
    layers = [
        (key, said, [(row.get(name), row["all_to_all"]) for row in found])
        for key, found in result["layers"].items()
        for name, said in EP_OTHERS.items()
        if any(name in row for row in found)
    ]
    predicted = {}
    if result["ranks"] == 2:
        predicted = scaling.predicted(rows, sizes.experts, sizes.hidden, sizes.top_k)
    facts = {"tokens": tokens, "exchange": exchange, "layers": layers, "predicted": predicted}
    facts |= {"counts": scaling.COUNTS, "ranks": scaling.RANKS}
    return render("pages/ep.md.j2", r=result, source=source, **facts)


def moe_loose_section(result: Results, source: str = "") -> str:
    """Return GEMMs of a layer in turn and side by side, by layer and tokens."""
    tokens = sorted({case["tokens"] for case in result["cases"]})
    layers: dict[str, dict[int, Mapping[str, Any]]] = {}
    for case in result["cases"]:
        layers.setdefault(case["name"].rpartition(" ")[0], {})[case["tokens"]] = case
    return render("pages/moe_loose.md.j2", r=result, source=source, tokens=tokens, layers=layers)


BEST_PEER = "humming-kernels"
MOE_FP8_MEANS = (
    ("8 bits, to 16 bits", "16 bits, GEMMs", "fp8, GEMMs"),
    ("fast, to 16 bits", "16 bits, GEMMs", "fp8 fast, GEMMs"),
    ("8 bits, to humming-kernels", BEST_PEER, "fp8, GEMMs"),
    ("fast, to humming-kernels", BEST_PEER, "fp8 fast, GEMMs"),
    ("whole layer, 8 bits, to 16 bits", "16 bits", "fp8"),
    ("whole layer, fast, to 16 bits", "16 bits", "fp8 fast"),
)
"""What the table of means has, and the quotient of which times that is."""


def _mean(quotients: Iterable[float]) -> float:
    """Return the geometric mean; of nothing 0."""
    found = [*quotients]
    return geometric_mean(found) if found else 0.0


def _beside(times: Mapping[str, Any]) -> dict[str, Any]:
    """Return the times with that of the peer's faster kind, and how ours compare with it."""
    found = [row["us"] for name, row in times.items() if name.startswith(BEST_PEER)]
    if not found:
        return {"peer": None, "beside": []}
    ours = [times[f"{road}, GEMMs"]["us"] for road in ("fp8", "fp8 fast") if road in times]
    best = min(found)
    return {
        "peer": best,
        "beside": [f"{best / us:.2f}" for us in ours],
        "times": {**times, BEST_PEER: {"us": best}},
    }


TUNED_HEADINGS = (
    *("op", "tuned on", "workloads"),
    *("median speed-up", "largest", "of", "default, us", "tuned, us"),
)


def tuned_row(meta: dict[str, Any]) -> list[str]:
    """Return the cells of one op on one target."""
    entries, found = meta["workloads"], {}
    machines: dict[str, None] = {}
    for tag, entry in entries.items():
        unit = "modelled_us" if entry.get("modelled") else "us"
        machine = entry.get("gpu") or entry.get("cpu") or "the model of a B200"
        machines[f"{machine}, {entry['date']}"] = None
        if entry.get(f"default_{unit}"):
            found[tag] = entry[f"default_{unit}"], entry[f"best_{unit}"]
    first = [f"`{meta['op']}`", f"{meta['level']}: {'; '.join(machines)}", str(len(entries))]
    if not found:  # no default schedule was measured
        return first + [""] * 5
    gains = {tag: default / best for tag, (default, best) in found.items()}
    most = max(gains, key=lambda tag: gains[tag])
    speeds = [f"{median(gains.values()):.2f}", f"{gains[most]:.2f}"]
    return [*first, *speeds, f"`{most}`", *map(us_text, found[most])]


def tuned_section(logs: Path) -> str:
    """Return the default schedules against the tuned ones by the logs in a folder, as a table."""
    metas = [json.loads(path.read_text()) for path in sorted(logs.glob(f"*/*/{META}"))]
    return markdown_table(TUNED_HEADINGS, [tuned_row(meta) for meta in metas], left=2)


SECTIONS: dict[str, tuple[str, int, Callable[[Results, str], str]]] = {
    "bench": ("docs/cpu.md", FORMAT, cpu_report.section),
    "demo": ("docs/demo.md", 1, demo_section),
    "ep": ("docs/ep.md", ep.FORMAT, ep_section),
    "ep_four": ("docs/ep.md", ep.FORMAT, ep_section),
    "emulator": ("docs/emulator.md", emulator.FORMAT, emulator.section),
    "host": ("docs/gpu.md", host.FORMAT, host.section),
    "linear": ("docs/linear.md", linear.FORMAT, linear_report.section),
    "linear_fp8": ("docs/linear.md", linear_fp8.FORMAT, linear_fp8_section),
    "moe_loose": ("docs/mega_moe.md", loose.FORMAT, moe_loose_section),
    "moe_fp8": ("docs/moe.md", moe_fp8.FORMAT, moe_fp8_section),
}
"""By marker: page, the results' format, and what makes the text of them and of their path."""
TUNED = "docs/tuning.md"


def _results(option: str, about: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    path = click.Path(path_type=Path)
    return click.option(option, type=path, help=about)


@click.command()
@click.argument("page", required=False, type=click.Path(dir_okay=False, path_type=Path))
@_results("--bench", "Results of `python -m bench.cpu --out`; keep them in bench/results.")
@_results("--demo", "Figures of the demo, dist/minilm-nvfp4.json.")
@_results("--emulator", "Results of `python -m bench.emulator --out`; keep them in bench/results.")
@_results("--ep", "Results of `torchrun -m bench.ep` on two GPUs.")
@_results("--ep-four", "The same on four.")
@_results("--host", "Results of `python -m bench.gpu.host`.")
@_results("--linear", "Results of `python -m bench.gpu.linear`.")
@_results("--linear-fp8", "Results of `python -m bench.gpu.linear_fp8`, of INT4 weights.")
@_results("--moe-loose", "Results of `python -m bench.moe.loose`.")
@_results("--moe-fp8", "Results of `python -m bench.moe.fp8`, of INT4 weights.")
@_results("--tuned", "Folder of logs: tuning_logs.")
def main(page: Path | None, tuned: Path | None, **files: Path | None) -> None:
    """Replace the measured tables of PAGE (else of the pages of docs/) by those of result files.

    Example: python -m bench.readme --bench bench/results/cpu-amd-epyc-2026-11-20.json
    """
    given = {marker: path for marker, path in files.items() if path is not None}
    if not given and tuned is None:
        raise click.UsageError(
            "no results are given, neither of a bench nor --tuned: there is nothing to fill in"
        )
    try:
        contents: dict[Path, dict[str, str]] = {}
        for marker, path in given.items():
            own, version, make = SECTIONS[marker]
            target = page or Path(own)
            found = make(read(path, version), relative(path, target))
            contents.setdefault(target, {})[marker] = found
        if tuned is not None:
            contents.setdefault(page or Path(TUNED), {})["tuned"] = tuned_section(tuned)
        for target, sections in contents.items():
            fill_page(target, sections)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"filled in {', '.join(map(str, contents))}")


if __name__ == "__main__":
    main(prog_name="python -m bench.readme")
