"""Measure the CPU kernels against torch: ``python -m bench.cpu``, or ``make bench``."""

from __future__ import annotations

import json
import os
import re
import sys
from datetime import UTC, datetime
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

import blockscale
from bench import cases, tables, timing
from blockscale.base import host
from blockscale.base.errors import LibraryError, LinkError
from blockscale.demo.files import write_json

FORMAT = 1
QUIET_LOAD = 0.5  # runnable processes besides this one, above which times are not worth much


def machine() -> dict[str, Any]:
    """Return what the times depend on."""
    return {
        "cpu": host.cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "level": host.level(),
        "last_cache_bytes": timing.last_cache_bytes(),
        "torch_threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Return the versions of what took part."""
    found = {"blockscale": blockscale.__version__}
    for name, package in (("torch", "torch"), ("TVM", "apache-tvm"), ("tvm-ffi", "apache-tvm-ffi")):
        try:
            found[name] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def default_name(results: tables.Results) -> str:
    """Return ``cpu-<model>-<date>.json``."""
    model = re.sub(r"[^a-z0-9]+", "-", results["machine"]["cpu"].lower()).strip("-")
    return f"cpu-{model}-{results['date'][:10]}.json"


def measure(name: str, case: cases.Case, repeats: int) -> dict[str, Any]:
    """Return the errors and times of one case; a wrong result leaves the times out."""
    found: dict[str, Any] = {"name": name, **case.about, "kernels": case.tuned()}
    try:
        found["errors"] = case.check()
    except cases.WrongResultError as error:
        return {**found, "wrong": str(error)}
    times = timing.interleaved(case.contenders, repeats)
    seconds = {contender: time.median for contender, time in times.items()}
    return {
        **found,
        "times": {contender: time.to_json() for contender, time in times.items()},
        "comparisons": [comparison.judge(seconds) for comparison in case.comparisons],
    }


def chosen(pattern: str | None) -> dict[str, Any]:
    """Return the makers of the cases whose name holds ``pattern``.

    Raises:
        ClickException: there is none.
    """
    makers = cases.all_cases()
    if pattern is None:
        return dict(makers)
    found = {name: make for name, make in makers.items() if fnmatch(name, f"*{pattern}*")}
    if not found:
        raise click.ClickException(
            f"--only {pattern!r} matches no case; the cases are {', '.join(makers)}"
        )
    return found


@torch.inference_mode()
def run(pattern: str | None, repeats: int, console: Console) -> dict[str, Any]:
    """Return the results of all chosen cases."""
    makers = chosen(pattern)
    results: dict[str, Any] = {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "repeats": repeats,
        "cache_multiple": timing.CACHES,
        "cases": [],
    }
    if results["machine"]["load"] > QUIET_LOAD:
        console.print(
            f"[yellow]the machine is busy (load {results['machine']['load']}): wait until it is "
            "quiet before you keep these times[/yellow]"
        )
    for number, (name, make) in enumerate(makers.items(), 1):
        with console.status(f"{number} of {len(makers)}: {name}"):
            results["cases"].append(measure(name, make(), repeats))
    return results


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Write the results here; in a folder, as cpu-<model>-<date>.json.",
)
@click.option("--repeats", type=click.IntRange(min=3), default=15, show_default=True)
@click.option("--only", metavar="PATTERN", help="Cases whose name holds this text (or glob).")
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
    try:
        if library is not None:
            blockscale.load(library)
        results = run(only, repeats, console)
    except (LibraryError, LinkError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(results, indent=1))
    else:
        wide = console if console.is_terminal else Console(width=130)
        wide.print(tables.console_table(results["cases"]))
        wide.print(tables.conditions(results), highlight=False)
        wide.print(f"[yellow]{tables.noise(results)}[/yellow]", highlight=False)
    if out is not None:
        path = out / default_name(results) if out.is_dir() or not out.suffix else out
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, results)
        console.print(f"wrote {path}")
    wrong = [case for case in results["cases"] if "wrong" in case]
    if wrong:
        raise click.ClickException("; ".join(f"{c['name']}: {c['wrong']}" for c in wrong))


if __name__ == "__main__":
    sys.exit(main(prog_name="python -m bench.cpu"))
