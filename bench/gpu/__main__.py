"""Measure the kernels of a CUDA library on this machine's GPU: ``python -m bench.gpu --library X``.

Needs torch, Triton and what loads a library; not the compiler, and none of the command line's
packages: it runs where the GPU is.  `bench.gpu.report` makes tables and a plot of the results.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bench import measure
from bench.gpu import host, uses
from bench.gpu.cases import FORMAT, all_cases
from bench.gpu.contest import Settings, measured, right


def free_memory() -> int:
    """Return bytes of device memory that a case may take."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return int(0.9 * free)


def line(found: Mapping[str, Any]) -> str:
    """Return one line on a case for the console."""
    if "times" not in found:
        return f"{found['name']}: {found.get('skipped') or found.get('failed')}"
    times = ", ".join(f"{name} {time['us']:.2f}" for name, time in found["times"].items())
    check = found["checks"]["ours"]
    told = "" if check["exact"] else f"; {check['differ']} of {check['of']} bytes differ"
    wrong = "" if right(found) else "  WRONG"
    return f"{found['name']}: us {times}; {100 * found['of_copy']:.1f} % of the copy{told}{wrong}"


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    about = "Measure the kernels of a CUDA library against copies and other compilers."
    parser = measure.parser("bench.gpu", about)
    parser.add_argument("--no-peers", action="store_true", help="leave others' kernels out")
    parser.add_argument("--no-host", action="store_true", help="leave host costs and uses out")
    parser.add_argument(
        "--compile-seconds",
        type=float,
        default=150.0,
        help="after this long torch.compile's autotuned modes are left out",
    )
    return measure.parsed(parser, given)


@torch.no_grad()
def run(given: argparse.Namespace) -> dict[str, Any]:
    """Return all results."""
    session = measure.Session("gpu", given, FORMAT, cache_multiple=measure.CACHES)
    settings = Settings(
        cache_bytes=session.results["machine"]["l2_bytes"],
        replays=session.results["replays"],
        peers=not given.no_peers,
        compile_s=given.compile_seconds,
    )
    measure.warm_up()
    if not given.no_host:
        session.note("host", host.costs(session.kernels))
    for case in all_cases():
        if measure.chosen([case.name], given.only):
            settings.memory_bytes = free_memory()
            found = measured(case, session.kernels, settings)
            session.add(found, line(found))
    if not given.no_host:
        session.note("uses", uses.uses())
    return session.end()


def main(given: Sequence[str] | None = None) -> int:
    """Measure; return 1 when a result of ours is wrong or a kernel of ours failed."""
    options = arguments(given)
    if options.names:
        print(*dict.fromkeys(case.kernel for case in all_cases("cpu")))
        return 0
    if measure.refused("bench.gpu"):
        return 2
    bad = [
        case["name"]
        for case in run(options)["cases"]
        if "failed" in case or ("checks" in case and not right(case))
    ]
    return measure.status("bench.gpu", bad)


if __name__ == "__main__":
    sys.exit(main())
