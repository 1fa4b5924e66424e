"""Times of several calls measured in turn, so that a slow moment of the machine hits all alike."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from statistics import median, quantiles

from torch import Tensor

Call = Callable[[int], object]
"""One contender: takes the number of the call, by which it chooses a copy of its data."""

LEAST_SAMPLE_S = 2e-3  # shorter calls are repeated within a sample: the clock costs 0.1 us
LONG_CALL_S = 50e-3  # no untimed call before each sample: waking a thread is nothing to it
CASE_S = 6.0  # rounds are left out beyond this, but never below LEAST_ROUNDS
LEAST_ROUNDS = 3
CACHES = 4  # copies of the data fill the last cache so often
MOST_COPIES = 4096


@dataclass(frozen=True)
class Timing:
    """Seconds a call: median and quartiles of ``samples``, each the mean of ``calls`` calls."""

    median: float
    low: float
    high: float
    samples: int
    calls: int

    def to_json(self) -> dict[str, float]:
        """Return the fields."""
        return asdict(self)


def interleaved(contenders: Mapping[str, Call], repeats: int) -> dict[str, Timing]:
    """Return the times of all contenders, measured A, B, C, A, B, C, ... ``repeats`` times.

    Before each sample of a short call one call goes untimed: the threads wake up, and what the
    others left in the near caches is gone.
    """
    numbers = {name: count() for name in contenders}
    with _no_garbage_collection():
        once = {name: _calibrate(call, numbers[name]) for name, call in contenders.items()}
        calls = {name: max(1, math.ceil(LEAST_SAMPLE_S / t)) for name, t in once.items()}
        round_s = sum(t * (calls[name] + (t < LONG_CALL_S)) for name, t in once.items())
        rounds = min(repeats, max(LEAST_ROUNDS, int(CASE_S / round_s)))
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, call in contenders.items():
                if once[name] < LONG_CALL_S:
                    call(next(numbers[name]))
                samples[name].append(_time(call, numbers[name], calls[name]))
    return {name: _timing(values, calls[name]) for name, values in samples.items()}


def _calibrate(call: Call, numbers: Iterator[int]) -> float:
    """Return about how long one call takes, without the first: it starts threads, makes plans."""
    first = _time(call, numbers, 1)
    return first if first > 1 else min(_time(call, numbers, 1) for _ in range(3))


def _time(call: Call, numbers: Iterator[int], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call(next(numbers))
    return (time.perf_counter() - start) / calls


def _timing(samples: list[float], calls: int) -> Timing:
    low, _, high = quantiles(samples, n=4) if len(samples) > 1 else samples * 3
    return Timing(median(samples), low, high, len(samples), calls)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def last_cache_bytes() -> int:
    """Return the size of this machine's largest cache; 32 MiB where the system does not tell."""
    sizes = [32 << 10]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]))
    return 1024 * max(sizes)


def copies(tensor: Tensor, number: int | None = None) -> list[Tensor]:
    """Return ``number`` equal tensors, each with memory of its own.

    None: as many as fill the last cache `CACHES` times; a contender that goes through them in turn
    finds none of them in a cache.
    """
    if number is None:
        size = tensor.numel() * tensor.element_size()
        number = min(MOST_COPIES, max(2, math.ceil(CACHES * last_cache_bytes() / size)))
    return list(tensor.repeat(number, *[1] * tensor.dim()).unbind())
