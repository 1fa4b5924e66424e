"""Why a case misses what is asked: ``python -m bench.gpu.counters --library X --out RESULTS``.

Runs NVIDIA's profiler (ncu) over one cold launch of each case of ``bench.gpu``'s results that is
below its part of the copy's bandwidth, and adds to the results the counters of what bounds it.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch

import blockscale
from bench import measure
from bench.gpu.cases import all_cases
from bench.gpu.host import data_of
from bench.measure import bound
from blockscale.demo.files import write_json

COUNTERS = {
    "us": "gpu__time_duration.sum",
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "sms": "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "waves": "launch__waves_per_multiprocessor",
    "registers": "launch__registers_per_thread",
    "memory": "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "barrier": "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    "queue": "smsp__average_warps_issue_stalled_lg_throttle_per_issue_active.ratio",
    "all": "smsp__average_warp_latency_per_inst_issued.ratio",
}
"""ncu's names.  Percent, but for "us", waves, registers, and the last four: warps that wait for
memory, at a barrier, for room among loads and stores, and all, for each instruction issued."""


def below(results: dict[str, Any]) -> list[str]:
    """Return the names of the cases that miss their part of the copy's bandwidth."""
    timed = (case for case in results["cases"] if "times" in case)
    return [case["name"] for case in timed if case["of_copy"] < case["asked"].get("of_copy", 0.0)]


def launch(kernels: Any, names: Sequence[str]) -> None:
    """Launch each case of ``names`` twice; a profiler sees the second one."""
    runtime = torch.cuda.cudart()
    for case in (case for case in all_cases() if case.name in names):
        kernel, data = kernels[case.kernel], data_of(case, "cuda")
        arguments = bound(kernel, data)
        kernel(*arguments)
        torch.cuda.synchronize()
        runtime.cudaProfilerStart()
        kernel(*arguments)
        torch.cuda.synchronize()
        runtime.cudaProfilerStop()


def counted(text: str) -> list[dict[str, float]]:
    """Return the counters of each launch in ncu's raw CSV ``text``."""
    rows = [*csv.DictReader(io.StringIO(text[text.index('"ID"') :]))]
    found = []
    for row in rows[1:]:  # the first has the units
        values = {key: float(row[name].replace(",", "")) for key, name in COUNTERS.items()}
        unit = {"ns": 1e-3, "us": 1.0, "usecond": 1.0, "nsecond": 1e-3}[rows[0][COUNTERS["us"]]]
        found.append({**values, "us": values["us"] * unit})
    return found


def profile(libraries: Sequence[str], names: Sequence[str]) -> list[dict[str, float]]:
    """Return the counters of each case of ``names``, in the order of ``all_cases``.

    Raises:
        RuntimeError: there is no ncu, or it failed; with the end of what it said.
    """
    tool = shutil.which("ncu")
    if tool is None:
        raise RuntimeError("bench.gpu.counters: no ncu on PATH; it comes with the CUDA toolkit")
    given = [part for library in libraries for part in ("--library", library)]
    options = ["--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw"]
    command = [tool, *options, "--metrics", ",".join(COUNTERS.values())]
    command += [sys.executable, "-m", "bench.gpu.counters", *given, "--launch", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or '"ID"' not in done.stdout:
        raise RuntimeError(f"bench.gpu.counters: ncu failed: {(done.stdout + done.stderr)[-800:]}")
    return counted(done.stdout)


def main(given: Sequence[str] | None = None) -> int:
    """Profile; with ``--launch`` be what is profiled."""
    parser = measure.parser("bench.gpu.counters", __doc__)
    parser.add_argument("--launch", nargs="+", default=[], help="cases to launch, no more")
    options = measure.parsed(parser, given, ("library",))
    libraries = [blockscale.load(path) for path in options.library]
    if options.launch:
        kernels = {n: f for library in libraries for n, f in library.functions.items()}
        launch(kernels, options.launch)
        return 0
    if not options.out or not options.out.is_file():
        parser.error(f"--out: name the file with bench.gpu's results, not {options.out}")
    results = json.loads(options.out.read_text())
    wanted = below(results)
    by_name = {case["name"]: case for case in results["cases"]}
    names = [case.name for case in all_cases() if case.name in wanted]
    results["counters"] = []
    for name, counters in zip(names, profile(options.library, names), strict=True):
        case = by_name[name]
        found = {"name": name, "asked": case["asked"]["of_copy"], "of_copy": case["of_copy"]}
        results["counters"].append({**found, "counters": counters})
        print(f"{name}: {counters}")
    write_json(options.out, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
