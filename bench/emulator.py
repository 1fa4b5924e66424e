"""Measure the emulator: ``python -m bench.emulator``; needs nvcc for the kernels that it runs."""

from __future__ import annotations

import importlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from bench import measure
from bench.report import Results, chosen, deliver, measuring_options, render
from blockscale.demo.timing import machine, versions

FORMAT = 1
KERNELS = Path(__file__).resolve().parent.parent / "tests" / "emulator"
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
        if str(KERNELS) not in sys.path:
            sys.path[:0] = [str(KERNELS), str(KERNELS.parent)]
        make: Callable[..., Any] = getattr(importlib.import_module(self.module), self.maker)
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


def measured(name: str, repeats: int) -> dict[str, Any]:
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


def missed(case: dict[str, Any]) -> bool:
    """Whether the case took longer, or more memory, than was asked for."""
    asked = case["asked_s"]
    slow = asked is not None and case["seconds"]["high"] >= asked
    return slow or case["peak_bytes"] >= MEMORY_ASKED


def section(results: Results, source: str) -> str:
    """Return what docs/emulator.md shows."""
    return render("pages/emulator.md.j2", r=results, source=source)


def run(pattern: str | None, repeats: int) -> dict[str, Any]:
    """Return the results of the workloads whose name holds ``pattern``."""
    return {
        "format": FORMAT,
        "date": measure.now(),
        "machine": machine(),
        "versions": versions({"numpy": "numpy"}),
        "repeats": repeats,
        "memory_asked_bytes": MEMORY_ASKED,
        "cases": [in_child(name, repeats) for name in chosen(WORKLOADS, pattern, "workload")],
    }


@click.command()
@measuring_options("emulator", least=1, repeats=5)
@click.option("--child", hidden=True, type=click.Choice(list(WORKLOADS)))
def main(
    as_json: bool, out: Path | None, repeats: int, only: str | None, child: str | None
) -> None:
    """Run our own kernels on the emulator: seconds, warp-instructions a second, peak memory.

    Outputs are checked; the first run of each process compiles the PTX to Python, too.

    Example: python -m bench.emulator --only "256x256" --repeats 3
    """
    if child is not None:
        click.echo(json.dumps(measured(child, repeats)))
        return
    found = run(only, repeats)
    deliver("emulator", found, as_json, out, section(found, str(out or "not written")))
    late = [f"{c['name']} (asked: {c['asked_s']} s)" for c in found["cases"] if missed(c)]
    if late:
        raise click.ClickException(f"slower or larger than asked: {'; '.join(late)}")


if __name__ == "__main__":
    sys.exit(main(prog_name="python -m bench.emulator"))
