"""Measure MoE layers on this machine's GPU beside others' kernels: ``python -m bench.moe``.

What is timed: gemm1 and gemm2 (routing metadata prepared before), and of ours also the whole layer,
in CUDA graphs of consecutive calls whose weights no cache holds.  `bench.moe_report` makes tables
and plots of the results.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import blockscale
from bench import gpu_timing, moe_cases, moe_data, moe_peers, moe_timing
from bench.gpu import about_library, machine, versions
from bench.gpu_timing import Captured
from bench.moe_cases import Case
from bench.moe_ours import Ours
from blockscale.demo.files import write_json

FORMAT = 1
GEMMS, LAYER = "ours", "ours, whole layer"


def default_name(results: Mapping[str, Any]) -> str:
    """Return ``moe-<model>-<date>.json``."""
    model = "".join(c if c.isalnum() else "-" for c in results["machine"]["gpu"].lower())
    return f"moe-{model}-{results['date'][:10]}.json"


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.moe", description=__doc__)
    parser.add_argument(
        "--library", type=Path, action="append", default=[], help="kernels for this GPU"
    )
    parser.add_argument("--out", type=Path, required=True, help="the results; a file or a folder")
    parser.add_argument("--only", action="append", help="cases whose name holds this text")
    parser.add_argument(
        "--peer",
        action="append",
        choices=[peer.name for peer in moe_peers.PEERS],
        help="of the others, this one alone; may be given several times",
    )
    parser.add_argument("--no-peers", action="store_true", help="leave the others out")
    parser.add_argument("--replays", type=int, default=21, help="of each graph (at least 3)")
    parser.add_argument("--trace", action="store_true", help="print tracebacks of failures")
    parser.add_argument(
        "--compile-only", action="store_true", help="run each call once, so that caches have it"
    )
    return parser.parse_args(given)


def peer_versions() -> dict[str, str]:
    """Return the versions of the others that are installed."""
    found = {}
    for package in ("humming-kernels",):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if importlib.util.find_spec("triton_kernels"):
        # It comes with Triton's sources and has no version of its own.
        found["triton_kernels"] = "as in vLLM 0.18.1"
    return found


class Bench:
    """All contenders on one layer after the other."""

    def __init__(self, given: argparse.Namespace, kernels: Mapping[str, Any]) -> None:
        self.given, self.kernels = given, kernels
        names = given.peer or [peer.name for peer in moe_peers.PEERS]
        self.peers = [peer for peer in moe_peers.PEERS if peer.name in names and not given.no_peers]

    def failure(self, error: Exception) -> str:
        """Return what goes into the results."""
        if self.given.trace:
            traceback.print_exception(error)
        torch.cuda.synchronize()  # a kernel that faulted ends the run here, not somewhere later
        return f"failed: {moe_peers.describe(error)}"

    def row(self, cases: Sequence[Case], each: Any) -> None:
        """Measure the cases of one model and format; call ``each`` with each result."""
        weights = moe_data.random_weights(cases[0].model, cases[0].fmt)
        contenders: dict[str, Any] = {}
        broken: dict[str, str] = {}
        if self.kernels:
            try:
                contenders[GEMMS] = Ours(weights, self.kernels)
            except Exception as error:  # the others are measured all the same
                broken[GEMMS] = self.failure(error)
        for peer in self.peers:
            try:
                if peer.takes(weights):
                    contenders[peer.name] = peer(weights)
            except Exception as error:
                broken[peer.name] = self.failure(error)
        for case in cases:
            each(self.case(case, contenders, dict(broken)))

    def case(
        self, case: Case, contenders: Mapping[str, Any], failed: dict[str, str]
    ) -> dict[str, Any]:
        """Return one result."""
        inputs = [moe_data.random_inputs(case, ids) for ids in moe_cases.routings(case)]
        count = moe_timing.calls_of(case, len(inputs))
        graphs: dict[str, Captured] = {}
        errors: dict[str, float] = {}
        for name, contender in contenders.items():
            variants = getattr(contender, "variants", ("",))
            for variant in variants:
                label = ", ".join(filter(None, (name, variant)))
                try:
                    made = self._graphs(case, contender, inputs, variant, count)
                    graphs |= {LAYER if key else label: graph for key, graph in made[0].items()}
                    errors[label] = made[1]
                except Exception as error:
                    failed[label] = self.failure(error)
        times = (
            {}
            if self.given.compile_only
            else gpu_timing.interleaved(graphs, max(3, self.given.replays))
        )
        return {
            **_about(case),
            "times": {name: timing.to_json() for name, timing in times.items()},
            "errors": errors,
            "failed": failed,
        }

    def _graphs(
        self, case: Case, contender: Any, inputs: Sequence[Any], variant: str, count: int
    ) -> tuple[dict[str, Captured], float]:
        """Return the graphs (of the whole layer too, by "layer") and the largest error."""
        if isinstance(contender, Ours):
            calls: Sequence[Any] = [contender.layer(case, each) for each in inputs]
        else:
            calls = [contender.pair(case, each, variant) for each in inputs]
        calls[-1].run()
        torch.cuda.synchronize()
        error = calls[-1].error()
        if error > moe_data.ROW_ERROR:
            raise ArithmeticError(f"relative error {error:.2e} of a row")
        if self.given.compile_only:
            return {}, error
        runs = [call.run for call in calls]
        if not isinstance(contender, Ours):
            return {"": moe_timing.capture(runs, count)}, error
        gemms = moe_timing.capture(runs, count, gemms=True)
        return {"": gemms, "layer": moe_timing.capture(runs, count)}, error


def _about(case: Case) -> dict[str, Any]:
    return {
        "name": case.name,
        "model": case.model.key,
        "fmt": case.fmt,
        "tokens": case.tokens,
        "experts hit": case.hit,
        "bytes": case.moved,
        "flop": case.flop,
        "bound": case.bound,
        "floor_us": case.floor_us,
        "best_peer_us": case.best_peer,
    }


def line(found: Mapping[str, Any]) -> str:
    """Return one line on a case for the console."""
    times = ", ".join(f"{name} {time['us']:.1f}" for name, time in found["times"].items())
    wrong = "".join(f"; {name} {reason}" for name, reason in found["failed"].items())
    worst = max(found["errors"].values(), default=0.0)
    return (
        f"{found['name']} (floor {found['floor_us']:.0f}, best peer {found['best_peer_us']}): "
        f"us {times}; error {worst:.1e}{wrong}"
    )


@torch.no_grad()
def run(given: argparse.Namespace) -> dict[str, Any]:
    """Return all results; they are written after each case, so that no session is lost."""
    start = time.perf_counter()
    libraries = [blockscale.load(path) for path in given.library]
    kernels = {name: f for library in libraries for name, f in library.functions.items()}
    results: dict[str, Any] = {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {**versions(), **peer_versions()},
        "libraries": [about_library(library) for library in libraries],
        "replays": max(3, given.replays),
        "cases": [],
    }
    out = given.out / default_name(results) if given.out.is_dir() else given.out
    cases = moe_cases.find(given.only)
    bench = Bench(given, kernels)
    if moe_peers.Humming in bench.peers:
        results["not compiled"] = moe_peers.compile_humming(cases)
        print(f"{time.perf_counter() - start:5.0f} s  compiled", results["not compiled"])
    gpu_timing.warm_up()

    def each(found: dict[str, Any]) -> None:
        results["cases"].append(found)
        print(f"{time.perf_counter() - start:5.0f} s  {line(found)}", flush=True)
        write_json(out, results)

    for model, fmt in moe_cases.rows():
        chosen = [case for case in cases if (case.model, case.fmt) == (model, fmt)]
        if chosen:
            bench.row(chosen, each)
            torch.cuda.empty_cache()
    results["seconds"] = round(time.perf_counter() - start, 1)
    write_json(out, results)
    return results


def main(given: Sequence[str] | None = None) -> int:
    """Measure; return 1 when ours failed or is wrong."""
    options = arguments(given)
    if not torch.cuda.is_available():
        print("bench.moe: torch sees no CUDA device; run it on the GPU machine", file=sys.stderr)
        return 2
    results = run(options)
    bad = [case["name"] for case in results["cases"] if GEMMS in case["failed"]]
    if bad:
        print(f"bench.moe: wrong or failed: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
