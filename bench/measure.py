"""Measuring on a GPU, once for all benches; needs torch and what loads a library, no more.

Launches are captured in CUDA graphs that go through more data than the L2 cache holds, and graphs
are replayed in turns.  `blockscale.demo.timing` does as much on a CPU; `copies` is for it.
"""

from __future__ import annotations

import argparse
import gc
import math
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

import blockscale
from blockscale.demo.files import write_json
from blockscale.demo.timing import versions

Results = Mapping[str, Any]
"""What a results file holds."""

# ---- Data that no cache holds -------------------------------------------------------------------

Data = dict[str, Tensor]
"""The tensors of one call, by name."""

CACHES = 3  # the sets of data that launches go through fill the L2 cache more than so often
MOST_LAUNCHES = 16384  # nodes of a graph: 1 x 2048 needs 14200 sets on an H200
GRAPH_US = 1000.0  # a replay takes at least so long: events and the start of a graph cost about 10
BYTES_A_US = 3.5e6  # for a first guess of a call's time
LEAST_US = 2.0
ALIGNMENT = 512  # of torch's allocator; slots of a pool have it too
CPU_CACHES, MOST_COPIES = 4, 4096  # of a CPU: how often copies fill the last cache; at most


@dataclass(frozen=True)
class Buffer:
    """One tensor of a call; ``fill`` writes random data, None: an output."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: Callable[[Tensor], object] | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def cold_sets(size: int, cache_bytes: int) -> int:
    """Return how many sets of ``size`` bytes fill the cache more than `CACHES` times."""
    return min(MOST_LAUNCHES, max(2, CACHES * cache_bytes // size + 1))


def l2_bytes() -> int:
    """Return the size of the GPU's L2 cache."""
    return int(torch.cuda.get_device_properties(0).L2_cache_size)


def whole_turns(least: int, sets: int) -> int:
    """Return at least ``least`` launches in which each of ``sets`` has as many turns.

    Then no set has another turn, in a graph or from one replay to the next, before all the others.
    """
    return sets * math.ceil(max(1, least) / sets)


def launches_of(us: float, sets: int, graph_us: float = GRAPH_US, most: int = MOST_LAUNCHES) -> int:
    """Return a multiple of ``sets``: so many launches of ``us`` take about ``graph_us``."""
    return sets * max(1, min(most // sets, math.ceil(graph_us / us / sets)))


def guess_us(moved: int) -> float:
    """Return about how long a kernel takes that moves so many bytes."""
    return max(LEAST_US, moved / BYTES_A_US)


def rotating(buffers: Mapping[str, Buffer], sets: int, device: str) -> list[Data]:
    """Return ``sets`` sets of tensors, each aligned as torch's allocator aligns."""
    found: list[Data] = [{} for _ in range(sets)]
    for name, buffer in buffers.items():
        size = buffer.dtype.itemsize
        stride = -(-max(1, buffer.bytes) // ALIGNMENT) * ALIGNMENT // size
        pool = torch.empty(sets * stride, dtype=buffer.dtype, device=device)
        if buffer.fill is None:
            pool.view(torch.uint8).fill_(0xA5)  # an unwritten byte differs from the reference
        else:
            buffer.fill(pool)
        for number, data in enumerate(found):
            start = number * stride
            data[name] = pool[start : start + math.prod(buffer.shape)].view(buffer.shape)
    return found


def copy_by_memcpy(data: Data) -> object:
    """Copy ``source`` to ``target`` as torch does it, through the driver."""
    return data["target"].copy_(data["source"])


def copy_by_kernel(data: Data) -> object:
    """Read ``source`` and write ``target`` in an elementwise kernel (each bit inverted).

    The driver's copy is slow at some sizes, on an H200 2.7 instead of 4.3 TB/s above 180 MB.
    """
    return torch.bitwise_not(data["source"], out=data["target"])


COPIES = {"memcpy": copy_by_memcpy, "elementwise copy": copy_by_kernel}
"""What the bandwidth of every case is compared with: the faster one."""


def copy_buffers(moved: int) -> dict[str, Buffer]:
    """Return the buffers of a copy that reads and writes ``moved`` bytes together."""
    size = max(4, -(-moved // 8))
    return {
        "source": Buffer((size,), torch.int32, lambda pool: pool.random_(0, 1 << 30)),
        "target": Buffer((size,), torch.int32),
    }


def last_cache_bytes() -> int:
    """Return the size of this machine's largest cache; 32 MiB where the system does not tell."""
    sizes = [32 << 10]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]))
    return 1024 * max(sizes)


def copies_needed(size: int) -> int:
    """Return how many copies of so many bytes fill a CPU's last cache `CPU_CACHES` times.

    A contender that goes through them in turn finds none of them in a cache.
    """
    return min(MOST_COPIES, max(2, math.ceil(CPU_CACHES * last_cache_bytes() / size)))


def copies(tensor: Tensor, number: int | None = None) -> list[Tensor]:
    """Return ``number`` equal tensors, each with memory of its own; None: `copies_needed`."""
    if number is None:
        number = copies_needed(tensor.numel() * tensor.element_size())
    return list(tensor.repeat(number, *[1] * tensor.dim()).unbind())


# ---- Times --------------------------------------------------------------------------------------

Call = Callable[[], object]
"""One contender on one set of data."""

WARM_CALLS = 16  # of a graph's calls run before: whatever they compile or leave behind is there


@dataclass(frozen=True)
class Timing:
    """Microseconds a launch: median and quartiles of ``replays`` graphs of ``launches`` each."""

    us: float
    low: float
    high: float
    replays: int
    launches: int
    sets: int

    def to_json(self) -> dict[str, float]:
        """Return the fields."""
        return asdict(self)


@dataclass(frozen=True)
class Captured:
    """A CUDA graph of ``launches`` calls."""

    graph: Any
    launches: int
    sets: int
    held: object  # the calls and the results of the last ones, whose memory the graph uses

    def replay_us(self) -> float:
        """Return microseconds a launch of one replay."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return 1000 * start.elapsed_time(end) / self.launches

    def median_us(self, replays: int = 5) -> float:
        """Return the median of some replays; without turns, a few to choose among variants."""
        return median(self.replay_us() for _ in range(replays))


def capture(
    calls: Sequence[Call], launches: int, edit: Callable[[Any], object] | None = None
) -> Captured:
    """Return the graph of ``launches`` launches that go through the calls, after one replay.

    Results are kept until each call has its own: a contender that allocates its outputs rotates
    through as much memory as one that writes into those of its data.  ``edit`` may change the
    graph before it is instantiated.
    """
    held: deque[object] = deque(maxlen=len(calls))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for number in range(max(3, min(len(calls), WARM_CALLS))):
            calls[number % len(calls)]()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=edit is not None)
    gc.disable()  # torch.cuda.graph collects garbage before, which takes 0.1 s a graph
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for number in range(launches):
                held.append(calls[number % len(calls)]())
        finally:
            graph.capture_end()
            gc.enable()
    if edit is not None:
        edit(graph)
        graph.instantiate()
    captured = Captured(graph, launches, len(calls), (calls, held))
    captured.replay_us()
    return captured


def interleaved(contenders: Mapping[str, Captured], replays: int) -> dict[str, Timing]:
    """Return the times of all, measured A, B, C, A, B, C, ... ``replays`` times."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(replays):
        for name, captured in contenders.items():
            samples[name].append(captured.replay_us())
    return {name: _timing(values, contenders[name]) for name, values in samples.items()}


def _timing(values: list[float], of: Captured) -> Timing:
    low, _, high = quantiles(values, n=4) if len(values) > 1 else values * 3
    return Timing(median(values), low, high, len(values), of.launches, of.sets)


def copies_of(
    moved: int, sets: int, launches: int, device: str, capture: Callable[..., Captured] = capture
) -> dict[str, Captured]:
    """Return the graphs of `COPIES` that move as many bytes."""
    data = rotating(copy_buffers(moved), sets, device)
    return {
        name: capture([partial(copy, each) for each in data], launches)
        for name, copy in COPIES.items()
    }


def warm_up(seconds: float = 0.5) -> None:
    """Keep the device busy until its clocks have risen."""
    a = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    elapsed = 0.0
    while elapsed < 1000 * seconds:
        for _ in range(100):
            b.copy_(a)
        end.record()
        end.synchronize()
        elapsed = start.elapsed_time(end)


# ---- Errors -------------------------------------------------------------------------------------


def describe(error: BaseException) -> str:
    """Return the kind of an error and its first line."""
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0]}"[:300]


def row_error(found: Tensor, wanted: Tensor) -> float:
    """Return the largest relative error of a row (Euclidean); inf if anything is not finite."""
    found, wanted = found.double().reshape(-1, found.shape[-1]), wanted.double()
    wanted = wanted.reshape(found.shape)
    error = ((found - wanted).norm(dim=1) / wanted.norm(dim=1)).max().item()
    return error if math.isfinite(error) else math.inf


# ---- A run --------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Return what the times depend on; nothing where there is no GPU."""
    if not torch.cuda.is_available():
        return {"gpu": "none"}
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


def gpu_versions() -> dict[str, str]:
    """Return the versions of what takes part on a GPU."""
    packages = {"torch": "torch", "triton": "triton", "tvm-ffi": "apache-tvm-ffi"}
    found = {"torch": torch.__version__, **versions(packages)}
    return {"blockscale": found.pop("blockscale"), "CUDA": str(torch.version.cuda), **found}


def about_library(library: Any) -> dict[str, Any]:
    """Return what the library says about itself, but its functions."""
    told = ("blockscale", "target", "built", "meta", "abi")
    kept = {key: library.manifest[key] for key in told if key in library.manifest}
    tuned = sum(function.tuned for function in library.functions.values())
    buckets = [b["tuned"] for f in library.functions.values() for b in f.buckets or ()]
    counts = {"functions": len(library), "tuned": tuned}
    counts |= {"buckets": len(buckets), "tuned_buckets": sum(buckets)}
    return {"file": library.path.name, **counts, **kept}


def now() -> str:
    """Return the date and time as results have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def place(out: Path, kind: str, model: str, date: str) -> Path:
    """Return the file ``out``; in a folder, which has no suffix, ``<kind>-<model>-<date>.json``."""
    if out.suffix and not out.is_dir():
        return out
    words = "".join(c if c.isalnum() else " " for c in model.lower()).split()
    return out / f"{'-'.join([kind, *words])}-{date[:10]}.json"


def chosen(names: Iterable[str], patterns: Sequence[str] | None) -> list[str]:
    """Return the names that hold one of the patterns (texts or globs); all without patterns."""
    return [n for n in names if not patterns or any(fnmatch(n, f"*{p}*") for p in patterns)]


def bound(kernel: Any, data: Data) -> list[Any]:
    """Return the arguments of ``kernel`` in its order: data by name, None where it has a default.

    Raises:
        ValueError: the kernel has no parameter for some data.
    """
    names = [param.name for param in kernel.params]
    unknown = sorted(set(data) - set(names))
    if unknown:
        raise ValueError(
            f"bench: {kernel.name} has the parameters {names}, but the case has data for "
            f"{unknown}; bring the bench's cases in line with the spec"
        )
    return [data.get(name) for name in names]


def parser(name: str, about: str | None, replays: int = 21) -> argparse.ArgumentParser:
    """Return the command line that every bench on a GPU has; without click, which may be absent."""
    made = argparse.ArgumentParser(prog=f"python -m {name}", description=about)
    option = made.add_argument
    option("--library", type=Path, action="append", default=[], help="kernels; may be repeated")
    option("--out", type=Path, help="the results; in a folder, as <bench>-<model>-<date>.json")
    option("--only", action="append", help="cases whose name holds this text (or glob)")
    option("--replays", type=int, default=replays, help="of each graph (at least 3)")
    option("--names", action="store_true", help="print the kernels to build, no more")
    return made


def parsed(
    made: argparse.ArgumentParser,
    given: Sequence[str] | None,
    needed: Sequence[str] = ("library", "out"),
) -> argparse.Namespace:
    """Return the parsed command line; all of ``needed`` are there unless names are asked for."""
    options = made.parse_args(given)
    missing = [f"--{name} FILE" for name in needed if not getattr(options, name)]
    if missing and not options.names:
        made.error(f"name the kernels and the results: {' '.join(missing)}")
    options.replays = max(3, options.replays)
    return options


def refused(name: str) -> bool:
    """Say so and return true where there is no GPU."""
    if torch.cuda.is_available():
        return False
    print(f"{name}: torch sees no CUDA device; run it on the GPU machine", file=sys.stderr)
    return True


def status(name: str, bad: Sequence[str]) -> int:
    """Return the exit status of a run whose cases ``bad`` are wrong or failed, and name them."""
    if bad:
        print(f"{name}: wrong or failed: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


class Session:
    """One run on a GPU; the results are written after each case, so that no session is lost."""

    def __init__(
        self,
        kind: str,
        given: argparse.Namespace,
        form: int,
        rows: str = "cases",
        **more: Any,
    ) -> None:
        """Load the libraries; ``rows`` is the results' key for what `add` is given."""
        self._start = time.perf_counter()
        libraries = [blockscale.load(path) for path in given.library]
        self.kernels = {n: f for library in libraries for n, f in library.functions.items()}
        self.cases: list[dict[str, Any]] = []
        self.results: dict[str, Any] = {
            "format": form,
            "date": now(),
            "machine": machine(),
            "versions": gpu_versions(),
            "libraries": [about_library(library) for library in libraries],
            "replays": given.replays,
            rows: self.cases,
            **more,
        }
        gpu, date = self.results["machine"]["gpu"], self.results["date"]
        self._out = place(given.out, kind, gpu, date) if given.out else None

    def note(self, name: str, value: object) -> None:
        """Keep and print a result that is no case."""
        self.results[name] = value
        self._say(f"{name} {value}")

    def add(self, found: dict[str, Any], said: str) -> None:
        """Keep the result of a case; print a line on it."""
        self.cases.append(found)
        self._say(said)

    def _say(self, text: str) -> None:
        print(f"{time.perf_counter() - self._start:5.0f} s  {text}", flush=True)
        if self._out is not None:
            write_json(self._out, self.results)

    def end(self) -> dict[str, Any]:
        """Return the results, with the seconds that they took."""
        self.note("seconds", round(time.perf_counter() - self._start, 1))
        return self.results
