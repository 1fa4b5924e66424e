"""Measure the kernels of a CUDA library on this machine's GPU: ``python -m bench.gpu --library X``.

Needs torch, Triton and what loads a library; not the compiler, and none of the command line's
packages: it runs where the GPU is.  `bench.gpu_report` makes tables and a plot of the results.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import blockscale
from bench import gpu_cases, gpu_host, gpu_measure, gpu_timing, gpu_uses
from blockscale.demo.files import write_json

FORMAT = 1


def machine() -> dict[str, Any]:
    """Return what the times depend on."""
    properties = torch.cuda.get_device_properties(0)
    query = "driver_version,clocks.max.sm,clocks.max.memory,power.limit"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"]
    try:
        answer = subprocess.run(command, text=True, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        answer = ""
    told = dict(zip(query.split(","), [part.strip() for part in answer.split(",")], strict=False))
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        **told,
    }


def versions() -> dict[str, str]:
    """Return the versions of what took part."""
    found = {"blockscale": blockscale.__version__, "CUDA": str(torch.version.cuda)}
    for name, package in (("torch", "torch"), ("triton", "triton"), ("tvm-ffi", "apache-tvm-ffi")):
        try:
            found[name] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found.setdefault("torch", torch.__version__)
    return found


def about_library(library: Any) -> dict[str, Any]:
    """Return what the library says about itself, but its functions."""
    contents = library.manifest
    kept = {
        key: contents[key]
        for key in ("blockscale", "target", "built", "meta", "abi")
        if key in contents
    }
    tuned = sum(function.tuned for function in library.functions.values())
    return {"file": library.path.name, "functions": len(library), "tuned": tuned, **kept}


def default_name(results: Mapping[str, Any]) -> str:
    """Return ``gpu-<model>-<date>.json``."""
    model = "".join(c if c.isalnum() else "-" for c in results["machine"]["gpu"].lower())
    return f"gpu-{model}-{results['date'][:10]}.json"


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description="Measure the kernels of a CUDA library against copies and other compilers.",
    )
    parser.add_argument(
        "--library",
        type=Path,
        action="append",
        required=True,
        help="kernels for this GPU; may be given several times",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="the results; in a folder, as gpu-<model>-<date>.json",
    )
    parser.add_argument("--only", help="cases whose name holds this text (or glob)")
    parser.add_argument("--replays", type=int, default=21, help="of each graph (at least 3)")
    parser.add_argument("--no-peers", action="store_true", help="leave others' kernels out")
    parser.add_argument("--no-host", action="store_true", help="leave host costs and uses out")
    parser.add_argument(
        "--compile-seconds",
        type=float,
        default=150.0,
        help="after this long torch.compile's autotuned modes are left out",
    )
    return parser.parse_args(given)


def line(found: Mapping[str, Any]) -> str:
    """Return one line on a case for the console."""
    if "times" not in found:
        return f"{found['name']}: {found.get('skipped') or found.get('failed')}"
    times = ", ".join(f"{name} {time['us']:.2f}" for name, time in found["times"].items())
    check = found["checks"]["ours"]
    told = "" if check["exact"] else f"; {check['differ']} of {check['of']} bytes differ"
    wrong = "" if check["right"] else "  WRONG"
    return f"{found['name']}: us {times}; {100 * found['of_copy']:.1f} % of the copy{told}{wrong}"


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
        "versions": versions(),
        "libraries": [about_library(library) for library in libraries],
        "replays": max(3, given.replays),
        "cache_multiple": gpu_timing.CACHES,
        "cases": [],
    }
    out = given.out / default_name(results) if given.out.is_dir() else given.out
    settings = gpu_measure.Settings(
        cache_bytes=results["machine"]["l2_bytes"],
        replays=results["replays"],
        peers=not given.no_peers,
        compile_s=given.compile_seconds,
    )
    gpu_timing.warm_up()
    if not given.no_host:
        results["host"] = gpu_host.host_costs(kernels)
        print("host us", results["host"], flush=True)
        write_json(out, results)
    for case in gpu_cases.all_cases():
        if given.only is None or fnmatch(case.name, f"*{given.only}*"):
            settings.memory_bytes = gpu_measure.free_memory()
            found = gpu_measure.measure(case, kernels, settings)
            results["cases"].append(found)
            print(f"{time.perf_counter() - start:5.0f} s  {line(found)}", flush=True)
            write_json(out, results)
    if not given.no_host:
        results["uses"] = gpu_uses.check()
        print("uses", results["uses"], flush=True)
    results["seconds"] = round(time.perf_counter() - start, 1)
    write_json(out, results)
    return results


def main(given: Sequence[str] | None = None) -> int:
    """Measure; return 1 when a result of ours is wrong or a kernel of ours failed."""
    options = arguments(given)
    if not torch.cuda.is_available():
        print("bench.gpu: torch sees no CUDA device; run it on the GPU machine", file=sys.stderr)
        return 2
    results = run(options)
    bad = [
        case["name"]
        for case in results["cases"]
        if "failed" in case or ("checks" in case and not case["checks"]["ours"]["right"])
    ]
    if bad:
        print(f"bench.gpu: wrong or failed: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
