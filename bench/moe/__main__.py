"""Measure MoE layers on this machine's GPU beside others' kernels: ``python -m bench.moe``.

What is timed: gemm1 and gemm2 (routing metadata prepared before), and of ours also the whole layer,
in CUDA graphs of consecutive calls whose weights no cache holds.  `bench.moe.report` makes tables
and plots of the results.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from bench import measure
from bench.measure import Captured
from bench.moe import cases, data
from bench.moe.cases import FORMAT, GEMMS, LAYER, Case
from bench.moe.ours import Ours, keep_gemms
from bench.peers.moe import PEERS, Humming, compile_humming
from blockscale.demo.timing import versions

GRAPH_US = 1500.0  # a replay takes at least about so long
MOST_CALLS = 256


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = measure.parser("bench.moe", __doc__)
    parser.add_argument(
        "--peer",
        action="append",
        choices=[peer.name for peer in PEERS],
        help="of the others, this one alone; may be given several times",
    )
    parser.add_argument("--no-peers", action="store_true", help="leave the others out")
    parser.add_argument("--trace", action="store_true", help="print tracebacks of failures")
    parser.add_argument(
        "--compile-only", action="store_true", help="run each call once, so that caches have it"
    )
    return measure.parsed(parser, given, needed=("out",))


def peer_versions() -> dict[str, str]:
    """Return the versions of the others that are installed."""
    found = versions({"humming-kernels": "humming-kernels"})
    if importlib.util.find_spec("triton_kernels"):
        # It comes with Triton's sources and has no version of its own.
        found["triton_kernels"] = "as in vLLM 0.18.1"
    return found


class Bench:
    """All contenders on one layer after the other."""

    def __init__(self, given: argparse.Namespace, kernels: Mapping[str, Any]) -> None:
        self.given, self.kernels = given, kernels
        names = given.peer or [peer.name for peer in PEERS]
        self.peers = [peer for peer in PEERS if peer.name in names and not given.no_peers]

    def failure(self, error: Exception) -> str:
        """Return what goes into the results."""
        if self.given.trace:
            traceback.print_exception(error)
        torch.cuda.synchronize()  # a kernel that faulted ends the run here, not somewhere later
        return f"failed: {measure.describe(error)}"

    def row(self, chosen: Sequence[Case], session: measure.Session) -> None:
        """Measure the cases of one model and format."""
        weights = data.random_weights(chosen[0].model, chosen[0].fmt)
        makers: dict[str, Any] = {GEMMS: partial(Ours, weights, self.kernels)}
        if not self.kernels:
            makers = {}
        makers |= {p.name: partial(p, weights) for p in self.peers if p.takes(weights)}
        contenders: dict[str, Any] = {}
        broken: dict[str, str] = {}
        for name, make in makers.items():
            try:
                contenders[name] = make()
            except Exception as error:  # the others are measured all the same
                broken[name] = self.failure(error)
        for case in chosen:
            found = self.case(case, contenders, dict(broken))
            session.add(found, line(found))

    def case(
        self, case: Case, contenders: Mapping[str, Any], failed: dict[str, str]
    ) -> dict[str, Any]:
        """Return one result."""
        inputs = [data.random_inputs(case, ids) for ids in cases.routings(case)]
        count = measure.launches_of(case.floor_us, len(inputs), GRAPH_US, MOST_CALLS)
        graphs: dict[str, Captured] = {}
        errors: dict[str, float] = {}
        for name, contender in contenders.items():
            for variant in contender.variants:
                label = ", ".join(filter(None, (name, variant)))
                try:
                    calls = [contender.pair(case, each, variant) for each in inputs]
                    errors[label] = self._error(calls[-1])
                    if not self.given.compile_only:
                        graphs |= self._graphs(label, [call.run for call in calls], count)
                except Exception as error:
                    errors.pop(label, None)
                    failed[label] = self.failure(error)
        times = measure.interleaved(graphs, self.given.replays)
        return {
            **about(case),
            "times": {name: timing.to_json() for name, timing in times.items()},
            "errors": errors,
            "failed": failed,
        }

    def _error(self, call: data.Pair) -> float:
        call.run()
        torch.cuda.synchronize()
        error = call.error()
        if error > data.ROW_ERROR:
            raise ArithmeticError(f"relative error {error:.2e} of a row")
        return error

    def _graphs(self, label: str, runs: Sequence[measure.Call], count: int) -> dict[str, Captured]:
        """Return the graph of the GEMMs; of ours the whole layer's, too."""
        if label != GEMMS:
            return {label: measure.capture(runs, count)}
        gemms = measure.capture(runs, count, edit=partial(keep_gemms, count=count))
        return {GEMMS: gemms, LAYER: measure.capture(runs, count)}


def about(case: Case) -> dict[str, Any]:
    """Return what a result says of its case."""
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
    """Return all results."""
    session = measure.Session("moe", given, FORMAT)
    session.results["versions"] |= peer_versions()
    chosen = cases.find(given.only)
    bench = Bench(given, session.kernels)
    if Humming in bench.peers:
        session.note("not compiled", compile_humming(chosen))
    measure.warm_up()
    for model, fmt in cases.rows():
        own = [case for case in chosen if (case.model, case.fmt) == (model, fmt)]
        if own:
            bench.row(own, session)
            torch.cuda.empty_cache()
    return session.end()


def main(given: Sequence[str] | None = None) -> int:
    """Measure; return 1 when ours failed or is wrong."""
    options = arguments(given)
    if options.names:
        print(*(cases.spec_of(model, fmt).name for model, fmt in cases.rows()))
        return 0
    if measure.refused("bench.moe"):
        return 2
    bad = [case["name"] for case in run(options)["cases"] if GEMMS in case["failed"]]
    return measure.status("bench.moe", bad)


if __name__ == "__main__":
    sys.exit(main())
