"""Measure the emulator: ``python -m bench.emulator``; needs nvcc for the kernels that it runs."""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

import blockscale
from blockscale.base import host
from blockscale.demo.files import write_json

FORMAT = 1
MEMORY_ASKED = 2 << 30  # bytes


@dataclass(frozen=True)
class Workload:
    """One launch: how to make its case, and the seconds that were asked for."""

    module: str
    maker: str
    options: dict[str, int]
    asked_s: float | None = None

    def case(self, seed: int) -> Any:
        """Return the case with its data."""
        module = importlib.import_module(f"tests.emulator.kernels.{self.module}")
        make: Callable[..., Any] = getattr(module, self.maker)
        return make(np.random.default_rng(seed), **self.options)


WORKLOADS = {
    "nvfp4 128x128x256, one CTA": Workload("gemm_cases", "nvfp4_tile", {}, 5.0),
    "nvfp4 256x256x256, two CTAs": Workload("gemm_cases", "nvfp4_pair", {}, 30.0),
    "nvfp4 512x512x2048, 16 CTAs": Workload(
        "gemm_cases", "nvfp4_tile", {"m": 512, "n": 512, "k": 2048}
    ),
    "chained f16 256x128x1024, two CTAs": Workload(
        "gemm_cases", "chained", {"m": 256, "length": 1024}
    ),
    "axpy of 1 M floats, 1024 CTAs": Workload(
        "scalar_cases", "axpy", {"ctas": 1024, "threads": 256}
    ),
}


def measure(name: str, repeats: int) -> dict[str, Any]:
    """Return times, instructions and peak memory of one workload; wrong numbers raise."""
    workload = WORKLOADS[name]
    seconds, report = [], None
    for seed in range(repeats):
        case = workload.case(seed)
        case.ptx()  # nvcc is not what is measured
        start = time.perf_counter()
        report = case.run(seed)
        seconds.append(time.perf_counter() - start)
        wrong = case.judge()
        if wrong:
            raise click.ClickException(f"{name}, seed {seed}: {wrong}")
    assert report is not None
    middle = median(seconds)
    return {
        "name": name,
        "seconds": {
            "median": middle,
            "first": seconds[0],
            "low": min(seconds),
            "high": max(seconds),
        },
        "asked_s": workload.asked_s,
        "warp_instructions": report.warp_instructions,
        "warp_instructions_per_s": report.warp_instructions / middle,
        "ptx_lines": case.ptx().count("\n"),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def in_child(name: str, repeats: int) -> dict[str, Any]:
    """Measure in a process of its own: peak memory is a process's, and never shrinks."""
    command = [sys.executable, "-m", "bench.emulator", "--child", name, "--repeats", str(repeats)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{name}: {done.stderr.strip() or done.returncode}")
    return json.loads(done.stdout)


def table(cases: list[dict[str, Any]]) -> Table:
    """Return one row a workload."""
    result = Table(
        "workload", "median", "first", "asked", "warp-instructions", "per second", "peak"
    )
    for case in cases:
        times, asked = case["seconds"], case["asked_s"]
        result.add_row(
            case["name"],
            f"{times['median']:.2f} s",
            f"{times['first']:.2f} s",
            f"< {asked:g} s" if asked else "",
            f"{case['warp_instructions']:,}",
            f"{case['warp_instructions_per_s']:,.0f}",
            f"{case['peak_bytes'] / 2**20:.0f} MiB",
            style="bold red" if missed(case) else "",
        )
    return result


def missed(case: dict[str, Any]) -> bool:
    """Whether the case took longer, or more memory, than was asked for."""
    asked = case["asked_s"]
    slow = asked is not None and case["seconds"]["high"] >= asked
    return slow or case["peak_bytes"] >= MEMORY_ASKED


def results(pattern: str | None, repeats: int, console: Console) -> dict[str, Any]:
    """Return the results of the workloads whose name holds ``pattern``."""
    names = [n for n in WORKLOADS if pattern is None or fnmatch(n, f"*{pattern}*")]
    if not names:
        raise click.ClickException(
            f"--only {pattern!r} matches no workload; they are: {'; '.join(WORKLOADS)}"
        )
    cases = []
    load = round(os.getloadavg()[0], 2)
    for name in names:
        with console.status(name):
            cases.append(in_child(name, repeats))
    return {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": host.cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "load": load,
        },
        "versions": {"blockscale": blockscale.__version__, "numpy": np.__version__},
        "repeats": repeats,
        "memory_asked_bytes": MEMORY_ASKED,
        "cases": cases,
    }


def default_name(found: dict[str, Any]) -> str:
    """Return ``emulator-<model>-<date>.json``."""
    model = re.sub(r"[^a-z0-9]+", "-", found["machine"]["cpu"].lower()).strip("-")
    return f"emulator-{model}-{found['date'][:10]}.json"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Write the results here; in a folder, as emulator-<model>-<date>.json.",
)
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--only", metavar="PATTERN", help="Workloads whose name holds this text (or glob).")
@click.option("--child", hidden=True, type=click.Choice(list(WORKLOADS)))
def main(
    as_json: bool, out: Path | None, repeats: int, only: str | None, child: str | None
) -> None:
    """Run our own kernels on the emulator: seconds, warp-instructions a second, peak memory.

    Outputs are checked; the first run of each process compiles the PTX to Python, too.

    Example: python -m bench.emulator --only "256x256" --repeats 3
    """
    if child is not None:
        click.echo(json.dumps(measure(child, repeats)))
        return
    console = Console(stderr=as_json)
    found = results(only, repeats, console)
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        wide = console if console.is_terminal else Console(width=130)
        wide.print(table(found["cases"]))
    if out is not None:
        path = out / default_name(found) if out.is_dir() or not out.suffix else out
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found)
        console.print(f"wrote {path}")
    late = [case["name"] for case in found["cases"] if missed(case)]
    if late:
        raise click.ClickException(f"slower or larger than asked: {'; '.join(late)}")


if __name__ == "__main__":
    sys.exit(main(prog_name="python -m bench.emulator"))
