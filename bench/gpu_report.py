"""Tables and a plot of GPU results: ``python -m bench.gpu_report bench/results/gpu-...json``.

Fills docs/gpu.md (all figures), draws docs/gpu_copy.svg and .png, and with --readme puts the short
form into README.md, between its gpu comments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.gpu import FORMAT
from bench.gpu_plot import draw
from bench.report_command import measured_on, report_command
from bench.tables import markdown_table, us_text

HOST_US = 4.0  # asked of one call from torch, checks included
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


def _time(case: Results, contender: str) -> float | None:
    found = case["times"].get(contender)
    return None if found is None else found["us"]


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
            other = _time(case, contender)
            if other is not None:
                yield f"<= {bar:g} x {words}", ours <= bar * other


def _asked_cells(case: Results) -> list[str]:
    found = [*judged(case)]
    return ["; ".join(words for words, _ in found), _yes(all(met for _, met in found), bool(found))]


def _yes(met: bool, asked: bool = True) -> str:
    return ("yes" if met else "**no**") if asked else ""


def _exact(check: Results) -> str:
    if check["exact"]:
        return "all"
    mark = "" if check["right"] else "**"
    return f"{mark}all but {check['differ']:,} of {check['of']:,}{mark}"


def _size(case: Results) -> str:
    return f"{case['bytes'] / 2**20:,.1f}"


def op_table(cases: Sequence[Results]) -> str:
    """Return one row for each case: time, bandwidth, against the copy, what is asked."""
    headings = ["case", "MiB moved", "us", "TB/s", "copy, us", "of the copy", "bytes right"]
    rows = [
        [
            case["name"],
            _size(case),
            us_text(case["times"]["ours"]["us"]),
            f"{case['gb_s']['ours'] / 1e3:.2f}",
            us_text(case["times"]["copy"]["us"]),
            f"{100 * case['of_copy']:.1f} %",
            _exact(case["checks"]["ours"]),
            *_asked_cells(case),
        ]
        for case in cases
    ]
    return markdown_table([*headings, "asked", "met"], rows)


def _grid(results: Results) -> dict[tuple[int, int], Results]:
    return {
        (case["shape"]["rows"], case["shape"]["hidden"]): case
        for case in timed(results)
        if case["op"] == "add_rmsnorm" and case["name"].endswith(" nvfp4")
    }


def norm_table(results: Results) -> str:
    """Return rows by hidden: microseconds, and in brackets percent of the copy's bandwidth."""
    grid = _grid(results)
    rows = sorted({key[0] for key in grid})
    hidden = sorted({key[1] for key in grid})
    cells = [
        [
            f"{count:,}",
            *(
                f"{us_text(_time(grid[count, h], 'ours'))} ({100 * grid[count, h]['of_copy']:.0f})"
                if (count, h) in grid
                else ""
                for h in hidden
            ),
        ]
        for count in rows
    ]
    return markdown_table(["rows", *(f"hidden {h}" for h in hidden)], cells)


def _against(case: Results, contender: str) -> list[str]:
    other, check = _time(case, contender), case["checks"].get(contender)
    if other is None or check is None:
        return ["", "", ""]
    ratio = case["times"]["ours"]["us"] / other
    return [us_text(other), f"{ratio:.2f}", f"{check['differ'] / check['of']:.1e}"]


def peer_table(results: Results) -> str:
    """Return the cases with peers: times, ours relative to each, in how many bytes each differs."""
    headings = ["case", "ours, us"]
    for name in ("torch.compile", "Triton"):
        headings += [f"{name}, us", "ours / it", "its bytes that differ"]
    rows = [
        [
            case["name"],
            us_text(case["times"]["ours"]["us"]),
            *_against(case, "torch.compile"),
            *_against(case, "triton"),
            *_asked_cells(case),
        ]
        for case in timed(results)
        if {"torch.compile", "triton"} & case["times"].keys()
    ]
    return markdown_table([*headings, "asked", "met"], rows)


def host_table(results: Results) -> str:
    """Return host time a call, and where ours goes."""
    from bench.gpu_host import LABELS

    us = results["host"]["us"]
    rows = [[label, f"{us[name]:.2f}"] for name, label in LABELS.items() if name in us]
    table = markdown_table(["call", "us of host time"], rows)
    needed = ("function", "empty", "compiled", "compiled, no rows")
    if not all(name in us for name in needed):
        return table
    function, empty, compiled, no_rows = (us[name] for name in needed)
    return (
        f"{table}\n\nOf the {function:.2f} us (asked: at most {HOST_US:g}, "
        f"met: {_yes(function <= HOST_US)}): {empty:.2f} passing arguments to a Python function, "
        f"{function - empty - compiled:.2f} finding the kernel and checking the arguments, "
        f"{no_rows:.2f} the compiled function with its own checks, "
        f"{compiled - no_rows:.2f} the launch."
    )


def uses_table(results: Results) -> str:
    """Return which functions CUDA graphs and torch.compile take."""

    def cell(value: object) -> str:
        return value.replace("|", "/") if isinstance(value, str) else _yes(bool(value))

    rows = [[name, cell(e["graph"]), cell(e["compile"])] for name, e in results["uses"].items()]
    headings = ["function", "in a CUDA graph", "torch.compile(fullgraph=True)"]
    return markdown_table(headings, rows, left=3)


def conditions(results: Results) -> str:
    """Return one sentence: GPU, driver, versions, date, method."""
    return measured_on(
        results,
        f"; launches go through sets of data of more than {results['cache_multiple']} times the L2 "
        "cache",
    )


def untimed(results: Results) -> str:
    """Return which cases have no time, and why; nothing if all have."""
    found = [
        f"* {case['name']}: {case.get('failed') or case.get('skipped')}"
        for case in results["cases"]
        if "times" not in case
    ]
    return "\n".join(["Not timed:", "", *found]) if found else ""


def page(results: Results, source: str) -> str:
    """Return all tables."""
    cases = timed(results)
    plain = [case for case in cases if case["op"] != "add_rmsnorm"]
    other = [case for case in cases if case["op"] == "add_rmsnorm" and case not in _plain(results)]
    sweep = next((case["checks"]["ours"] for case in cases if case["op"] == "sweep"), None)
    parts = [
        conditions(results),
        "![Speed of each op relative to a copy, over the bytes moved](gpu_copy.svg)",
        op_table([*plain, *_large(results), *other]),
    ]
    if sweep is not None:
        parts.append(
            f"The sweep chose another candidate than float64 in {sweep['other_candidate']:.1e} of "
            f"the blocks; the largest excess of a loss is {sweep['excess']:.1e}."
        )
    parts += [
        "add_rmsnorm_fp4quant, bfloat16 to NVFP4, linear scales, microseconds (percent of the "
        "copy's bandwidth):",
        norm_table(results),
    ]
    if any({"torch.compile", "triton"} & case["times"].keys() for case in cases):
        parts += ["Against other compilers:", peer_table(results)]
    if "host" in results:
        parts += ["Host time:", host_table(results)]
    if "uses" in results:
        parts += ["Same bytes as an eager call:", uses_table(results)]
    parts += [untimed(results), f"All figures: [{source}]({source})."]
    return "\n\n".join(part for part in parts if part)


def _plain(results: Results) -> list[Results]:
    return [*_grid(results).values()]


def _large(results: Results) -> list[Results]:
    found = [case for case in _plain(results) if "of_copy" in case["asked"]]
    return sorted(found, key=lambda case: (case["shape"]["hidden"], case["shape"]["rows"]))


def readme_section(results: Results, source: str) -> str:
    """Return the short form: a few cases, the host's cost, the conditions."""
    by_name = {case["name"]: case for case in timed(results)}
    headings = ["op", "ours, us", "TB/s", "of the copy", "torch.compile, us", "Triton, us"]
    rows = [
        [
            name,
            us_text(case["times"]["ours"]["us"]),
            f"{case['gb_s']['ours'] / 1e3:.2f}",
            f"{100 * case['of_copy']:.0f} %" if case["op"] != "sweep" else "",  # it computes
            us_text(_time(case, "torch.compile")),
            us_text(_time(case, "triton")),
        ]
        for name in README_CASES
        if (case := by_name.get(name)) is not None
    ]
    verdicts = [met for case in by_name.values() for _, met in judged(case)]
    wrong = [name for name, case in by_name.items() if not case["checks"]["ours"]["right"]]
    host = results.get("host", {}).get("us", {}).get("function")
    sentences = [
        f"Met: {sum(verdicts)} of {len(verdicts)} bars in {len(by_name)} cases.",
        f"Wrong bytes: {', '.join(wrong)}." if wrong else "Every byte is checked.",
        "" if host is None else f"One call from torch costs the host {host:.2f} us.",
        f"Measured on {conditions(results)}",
        f"All tables: [docs/gpu.md](docs/gpu.md); figures: [{source}]({source}).",
    ]
    return "\n\n".join([markdown_table(headings, rows), " ".join(filter(None, sentences))])


main = report_command(
    "gpu",
    FORMAT,
    page,
    readme_section,
    lambda found, docs: draw(timed(found), docs, conditions(found)),
    """Put the results of `python -m bench.gpu` into docs/gpu.md, a plot, and the README.

    Example: python -m bench.gpu_report bench/results/gpu-nvidia-h200-2026-11-20.json
    """,
)


if __name__ == "__main__":
    main(prog_name="python -m bench.gpu_report")
