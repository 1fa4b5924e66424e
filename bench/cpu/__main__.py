"""Measure the CPU kernels against torch: ``python -m bench.cpu``, or ``make bench``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

import blockscale
from bench import measure
from bench.cpu import cases, report
from bench.cpu.report import FORMAT
from bench.report import chosen, deliver, measuring_options
from blockscale.base.errors import LibraryError, LinkError
from blockscale.base.host import level
from blockscale.demo import timing

QUIET_LOAD = 0.5  # runnable processes besides this one, above which times are not worth much


def machine() -> dict[str, Any]:
    """Return what the times depend on."""
    return {
        **timing.machine(),
        "level": level(),
        "last_cache_bytes": measure.last_cache_bytes(),
        "torch_threads": torch.get_num_threads(),
    }


def measured(name: str, case: cases.Case, repeats: int) -> dict[str, Any]:
    """Return the errors and times of one case; a wrong result leaves the times out.

    Times that other programs disturbed stay, but are not compared.
    """
    found: dict[str, Any] = {"name": name, **case.about, "kernels": case.tuned()}
    try:
        found["errors"] = case.check()
    except cases.WrongResultError as error:
        return {**found, "wrong": str(error)}
    times, watched = timing.interleaved(case.contenders, repeats)
    seconds = {contender: time.median for contender, time in times.items()}
    judged = [comparison.judge(seconds) for comparison in case.comparisons]
    if watched.disturbed():
        judged = [{**each, "ratio": None, "met": None} for each in judged]
    return {
        **found,
        "times": {contender: time.to_json() for contender, time in times.items()},
        "watched": watched.to_json(),
        "comparisons": judged,
    }


@torch.inference_mode()
def run(pattern: str | None, repeats: int, console: Console) -> dict[str, Any]:
    """Return the results of all chosen cases."""
    makers = cases.all_cases()
    names = chosen(makers, pattern, "case")
    packages = {"torch": "torch", "TVM": "apache-tvm", "tvm-ffi": "apache-tvm-ffi"}
    results: dict[str, Any] = {
        "format": FORMAT,
        "date": measure.now(),
        "machine": machine(),
        "versions": timing.versions(packages),
        "repeats": repeats,
        "cache_multiple": measure.CPU_CACHES,
        "cases": [],
    }
    if results["machine"]["load"] > QUIET_LOAD:
        console.print(
            f"[yellow]the machine is busy (load {results['machine']['load']}): wait until it is "
            "quiet before you keep these times[/yellow]"
        )
    for number, name in enumerate(names, 1):
        with console.status(f"{number} of {len(names)}: {name}"):
            results["cases"].append(measured(name, makers[name](), repeats))
    return results


@click.command()
@measuring_options("cpu", least=3, repeats=15)
@click.option(
    "--library",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Take kernels from this library where it has them.",
)
def main(
    as_json: bool, out: Path | None, repeats: int, only: str | None, library: Path | None
) -> None:
    """Measure the kernels of this machine's CPU level against torch, side by side.

    Results are checked before they are timed: a wrong kernel has no time, and exit code 1.

    Example: python -m bench.cpu --only "linear 4096" --repeats 7
    """
    console = Console(stderr=as_json)
    if said := timing.avoid_broken_amx():
        console.print(said)
    try:
        if library is not None:
            blockscale.load(library)
        results = run(only, repeats, console)
    except (LibraryError, LinkError, OSError) as error:
        raise click.ClickException(str(error)) from error
    deliver("cpu", results, as_json, out, report.section(results, str(out or "not written")))
    wrong = [case for case in results["cases"] if "wrong" in case]
    if wrong:
        raise click.ClickException("; ".join(f"{c['name']}: {c['wrong']}" for c in wrong))


if __name__ == "__main__":
    sys.exit(main(prog_name="python -m bench.cpu"))
