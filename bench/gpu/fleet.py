"""One list of kernels tuned by fleets of 1 and of 2 servers: ``python -m bench.gpu.fleet``.

On a host with several GPUs: starts TVM's RPC tracker and a server for each GPU, tunes the kernels
of ``python -m bench.gpu --names`` until their spaces are exhausted, each time in a fresh process
and work folder, and compares wall times.  Needs torch, the packages of the extra ``build``, nvcc.
Results are written after each fleet; one that fails leaves its error there, and the others go on.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from bench import measure
from bench.gpu.cases import all_cases
from blockscale.base.targets import is_gpu
from blockscale.demo.files import write_json

FORMAT = 1
KEY = "fleet"
ASKED = {2: 0.55, 4: 0.3}
"""Largest part of one server's wall time, by servers."""
NOISE = 0.03
"""Two measurements of one schedule may differ so much."""
_START_S = 60.0
"""For a tracker and for servers, which import tvm."""
_LATE_S = 30.0
"""A session that takes so much longer than its limit hangs."""


# ---- The fleet ----------------------------------------------------------------------------------


@contextmanager
def _processes(commands: Sequence[tuple[list[str], Mapping[str, str]]]) -> Iterator[None]:
    """Run Python modules, each with its additions to the environment; end all they started."""
    import psutil

    made = [
        subprocess.Popen([sys.executable, "-m", *command], env={**os.environ, **more})
        for command, more in commands
    ]
    try:
        yield
    finally:
        for process in made:
            with suppress(psutil.NoSuchProcess):
                for each in psutil.Process(process.pid).children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        each.kill()
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tracker(port: int) -> tuple[list[str], Mapping[str, str]]:
    place = ["--host", "127.0.0.1", "--port", str(port), "--port-end", str(port + 1)]
    return ["tvm.exec.rpc_tracker", "--silent", *place], {}


def _server(tracker: int, gpu: int) -> tuple[list[str], Mapping[str, str]]:
    port = _free_port()
    told = ["--tracker", f"127.0.0.1:{tracker}", "--key", KEY, "--host", "127.0.0.1"]
    place = ["--port", str(port), "--port-end", str(port + 1), "--custom-addr", "127.0.0.1"]
    return ["blockscale.tuning.server", *told, *place], {"CUDA_VISIBLE_DEVICES": str(gpu)}


def _registered(port: int, count: int) -> None:
    """Wait until the tracker answers and knows so many free servers.

    Raises:
        RuntimeError: it does not in time.
    """
    from tvm import rpc

    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        with suppress(OSError, RuntimeError):
            with socket.create_connection(("127.0.0.1", port), 1):
                pass
            told = rpc.connect_tracker("127.0.0.1", port).summary()["queue_info"]
            if told.get(KEY, {}).get("free", 0) >= count:
                return
        time.sleep(0.1)
    raise RuntimeError(f"bench.gpu.fleet: {count} servers did not register in {_START_S:.0f} s")


# ---- One session --------------------------------------------------------------------------------


def _session(names: list[str], port: int, work_dir: Path, options: dict[str, Any]) -> Any:
    """Tune ``names`` with the servers of the tracker at ``port``; return what came of it.

    Runs in a process of its own: whose time counts, and which has imported nothing before.
    """
    started = time.monotonic()
    from blockscale.tuning.tuner import tune

    tracker = f"127.0.0.1:{port}"
    done = tune(names, work_dir=work_dir, tracker=tracker, key=KEY, progress=False, **options)
    builders = resource.getrusage(resource.RUSAGE_CHILDREN)
    times = [line["elapsed_s"] for line in done.history]
    errors = sorted({str(line["error"])[:200] for line in done.history if line["failed"]})
    return {
        "process_s": round(time.monotonic() - started, 2),
        "wall_s": round(done.elapsed_s, 2),
        "first_trial_s": times[0] if times else None,
        "trials": done.trials,
        "trials_per_minute": round(60 * done.trials / done.elapsed_s, 1),
        "client_cpu_s": round(time.process_time(), 1),
        "builders_cpu_s": round(builders.ru_utime + builders.ru_stime, 1),
        "exhausted": done.elapsed_s < options["seconds"],
        "failed": sum(done.failed.values()),
        "errors": errors[:8],
        "best_us": {k: us if math.isfinite(us) else None for k, us in done.best.items()},
        "default_us": {k: us if math.isfinite(us) else None for k, us in done.default.items()},
    }


def tuned(names: list[str], servers: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return what tuning ``names`` on so many servers took and found, or the error."""
    found: dict[str, Any] = {"servers": servers}
    own = multiprocessing.get_context("spawn")
    port = _free_port()
    try:
        with ExitStack() as stack:
            work_dir = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(_processes([_tracker(port)]))
            _registered(port, 0)
            stack.enter_context(_processes([_server(port, gpu) for gpu in range(servers)]))
            _registered(port, servers)
            process = stack.enter_context(ProcessPoolExecutor(1, own))
            job = process.submit(_session, names, port, Path(work_dir), options)
            try:
                found |= job.result(options["seconds"] + _START_S + _LATE_S)
            except TimeoutError:
                for each in list(process._processes.values()):
                    each.kill()
                raise
    except Exception as error:
        found["failed_with"] = measure.describe(error)
    return found


# ---- What is said of it -------------------------------------------------------------------------


def summary(results: Mapping[str, Any]) -> list[str]:
    """Return lines on every fleet, and what more servers gain over one."""
    lines = []
    runs = {run["servers"]: run for run in results["runs"]}
    for servers, run in runs.items():
        if "failed_with" in run:
            lines.append(f"{servers} server(s): FAILED: {run['failed_with']}")
            continue
        client = run["client_cpu_s"] / run["wall_s"]
        builders = run["builders_cpu_s"] / run["wall_s"] / results["cores"]
        lines.append(
            f"{servers} server(s): {run['wall_s']:.1f} s ({run['process_s']:.1f} s with imports), "
            f"{run['trials']} trials, {run['trials_per_minute']:.0f} a minute, {run['failed']} "
            f"failed, the first after {run['first_trial_s']} s; the client's process was busy for "
            f"{client:.0%}, builders for {builders:.0%} of {results['cores']} cores"
            + ("" if run["exhausted"] else "; ENDED BY TIME: trials differ")
        )
    one = runs.get(1, {})
    for servers, run in runs.items():
        if servers > 1 and "wall_s" in one and "wall_s" in run:
            lines.append(_gain(one, run))
    return lines


def _gain(one: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """Return what ``run``, with several servers, gains over ``one``."""
    part, servers = run["wall_s"] / one["wall_s"], run["servers"]
    asked = ASKED.get(servers)
    same = run["trials"] == one["trials"] and run["exhausted"] and one["exhausted"]
    met = "" if asked is None else f" (asked: {asked}, {'met' if part <= asked else 'MISSED'})"
    ratios = {
        tag: us / one["best_us"][tag]
        for tag, us in run["best_us"].items()
        if us and one["best_us"].get(tag)
    }
    worse = sorted((tag for tag in ratios if ratios[tag] > 1 + NOISE), key=lambda t: -ratios[t])
    mean = math.exp(sum(map(math.log, ratios.values())) / max(1, len(ratios)))
    told = ", ".join(f"{tag} {ratios[tag]:.3f}" for tag in worse[:5]) or "none"
    return (
        f"{servers} servers take {part:.2f} of one's wall time{met}; "
        f"{'the same' if same else 'NOT THE SAME'} number of trials; best times are {mean:.3f} of "
        f"one's in the mean of {len(ratios)} workloads, slower by more than {NOISE:.0%}: {told}"
    )


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    made = argparse.ArgumentParser(prog="python -m bench.gpu.fleet", description=__doc__)
    option = made.add_argument
    option("--out", type=Path, required=True, help="the results; in a folder, as fleet-...json")
    option("--target", default="sm_90a", help="architecture; or a CPU's level, to try this")
    option("--servers", type=int, nargs="+", default=[1, 2], help="sizes of fleets")
    option("--kernels", nargs="+", help="names; those of bench.gpu when left out")
    option("--seconds", type=float, default=235.0, help="most for one fleet")
    option("--trials-each", type=int, help="most measurements of a workload")
    option("--workers", type=int, help="builds at a time; one per core when left out")
    return made.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Tune with each fleet; return 1 where one failed."""
    told = arguments(given)
    if is_gpu(told.target) and measure.refused("bench.gpu.fleet"):
        return 2
    names = told.kernels or list(dict.fromkeys(case.kernel for case in all_cases("cpu")))
    options = {
        name: getattr(told, name) for name in ("target", "seconds", "trials_each", "workers")
    }
    results: dict[str, Any] = {
        "format": FORMAT,
        "date": measure.now(),
        "machine": measure.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": measure.gpu_versions(),
        "kernels": names,
        "options": options,
        "runs": [],
    }
    place = measure.place(told.out, "fleet", results["machine"]["gpu"], results["date"])
    for servers in told.servers:
        results["runs"].append(tuned(names, servers, options))
        results["summary"] = summary(results)
        write_json(place, results)
        print(results["summary"][-1], flush=True)
    print(f"\nwritten to {place}:", *results["summary"], sep="\n")
    return int(any("failed_with" in run for run in results["runs"]))


if __name__ == "__main__":
    sys.exit(main())
