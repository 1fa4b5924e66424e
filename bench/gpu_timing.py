"""Times on a CUDA device: graphs of many launches over data that no cache holds, in fair turns."""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

Data = dict[str, Tensor]
"""The tensors of one call, by name."""

Call = Callable[[Data], object]
"""One contender: runs on one set of data."""

CACHES = 3  # the sets of data that launches go through fill the L2 cache more than so often
MOST_LAUNCHES = 16384  # nodes of a graph: 1 x 2048 needs 14200 sets on an H200
GRAPH_US = 1000.0  # a replay takes at least so long: events and the start of a graph cost about 10
BYTES_A_US = 3.5e6  # for a first guess of a call's time
LEAST_US = 2.0
ALIGNMENT = 512  # of torch's allocator; slots of a pool have it too


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


def cold_sets(size: int, cache_bytes: int) -> int:
    """Return how many sets of ``size`` bytes fill the cache more than `CACHES` times."""
    return min(MOST_LAUNCHES, max(2, CACHES * cache_bytes // size + 1))


def launches_of(moved: int, sets: int) -> int:
    """Return a multiple of ``sets`` that takes about `GRAPH_US` or longer."""
    guess = max(LEAST_US, moved / BYTES_A_US)
    return sets * max(1, min(MOST_LAUNCHES // sets, math.ceil(GRAPH_US / guess / sets)))


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


@dataclass(frozen=True)
class Captured:
    """A CUDA graph of ``launches`` calls."""

    graph: Any
    launches: int
    sets: int
    held: object  # results of the last calls, which the graph writes

    def replay_us(self) -> float:
        """Return microseconds a launch of one replay."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return 1000 * start.elapsed_time(end) / self.launches


def capture(call: Call, sets: Sequence[Data], launches: int) -> Captured:
    """Return the graph of ``launches`` calls that go through the sets in turn, after one replay.

    Results are kept until each set has its own: a contender that allocates its outputs rotates
    through as much memory as one that writes into those of the set.
    """
    held: deque[object] = deque(maxlen=len(sets))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for number in range(3):
            call(sets[number % len(sets)])
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    gc.disable()  # torch.cuda.graph collects garbage before, which takes 0.1 s a graph
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for number in range(launches):
                held.append(call(sets[number % len(sets)]))
        finally:
            graph.capture_end()
            gc.enable()
    captured = Captured(graph, launches, len(sets), held)
    captured.replay_us()
    return captured


def quick_us(captured: Captured, replays: int = 5) -> float:
    """Return the median of a few replays, to choose among variants."""
    return median(captured.replay_us() for _ in range(replays))


def interleaved(contenders: Mapping[str, Captured], replays: int) -> dict[str, Timing]:
    """Return the times of all, measured A, B, C, A, B, C, ... ``replays`` times."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(replays):
        for name, captured in contenders.items():
            samples[name].append(captured.replay_us())
    return {
        name: _timing(values, contenders[name].launches, contenders[name].sets)
        for name, values in samples.items()
    }


def _timing(values: list[float], launches: int, sets: int) -> Timing:
    low, _, high = quantiles(values, n=4) if len(values) > 1 else values * 3
    return Timing(median(values), low, high, len(values), launches, sets)


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
