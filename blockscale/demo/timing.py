"""Times of calls on a CPU, measured in turns, and whether other programs disturbed them.

With other load on the cores, threads that wait for one another lose whole time slices: every call
then takes as long as a few of those, and no ratio of such times means anything.
"""

from __future__ import annotations

import gc
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import blockscale
from blockscale.base import host

Call = Callable[[int], object]
"""One contender: takes the number of the call, by which it may choose a copy of its data."""

LEAST_SAMPLE_S = 2e-3  # shorter calls are repeated within a sample: the clock costs 0.1 us
LONG_CALL_S = 50e-3  # no untimed call before each sample: waking a thread is nothing to it
CASE_S = 6.0  # rounds are left out beyond this, but never below LEAST_ROUNDS
LEAST_ROUNDS = 3

# A quiet machine of 2 cores (AMD EPYC, torch on both): others 0.01, 20 switches, stretch 1.05; with
# two busy loops beside it 0.5, 130 and 3.8.
MOST_OTHERS = 0.1
MOST_SWITCHES = 60.0  # a second and core; counts where the repeats are stretched, too
STRETCHED, MOST_STRETCH = 1.5, 2.0
LEAST_WATCHED_S = 0.25  # time of cores is counted in ticks of 10 ms


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


@dataclass(frozen=True)
class Watched:
    """What the machine did while calls were timed.

    Attributes:
        others: part of the cores' time that other programs took; None where nobody tells.
        switches: how often a second, on each core, a thread of ours had to leave it.
        stretch: the largest ratio of a contender's median to its fastest repeat.
        load: runnable threads of the last minute, ours among them.
    """

    others: float | None
    switches: float
    stretch: float
    load: float

    def disturbed(self) -> str:
        """Return in words why ratios of these times mean nothing; nothing if they do."""
        found = []
        if self.others is not None and self.others > MOST_OTHERS:
            found.append(f"other programs took {self.others:.0%} of the cores' time")
        if self.switches > MOST_SWITCHES and self.stretch > STRETCHED:
            found.append(f"threads had to leave a core {self.switches:.0f} times a second")
        if self.stretch > MOST_STRETCH:
            found.append(f"half of the repeats took over {self.stretch:.1f} times the fastest one")
        return ", ".join(found)

    def to_json(self) -> dict[str, Any]:
        """Return the fields, and the words as "disturbed" if there are any."""
        words = self.disturbed()
        return {**asdict(self), **({"disturbed": words} if words else {})}


def interleaved(
    contenders: Mapping[str, Call],
    repeats: int,
    seconds: float | None = None,
    least: int | None = None,
) -> tuple[dict[str, Timing], Watched]:
    """Return the times of all contenders, and what the machine did meanwhile.

    They are measured A, B, C, A, B, C, ... ``repeats`` times.  Before each
    sample of a short call one call goes untimed: the threads wake up, and what the others left in
    the near caches is gone.

    Args:
        contenders: calls by name.
        repeats: at most.
        seconds: in which the rounds shall end; `CASE_S`.
        least: rounds that are made however long they take; `LEAST_ROUNDS`.
    """
    numbers = {name: count() for name in contenders}
    with _no_garbage_collection():
        once = {name: _calibrate(call, numbers[name]) for name, call in contenders.items()}
        calls = {name: max(1, math.ceil(LEAST_SAMPLE_S / t)) for name, t in once.items()}
        round_s = sum(t * (calls[name] + (t < LONG_CALL_S)) for name, t in once.items())
        fitting = int((CASE_S if seconds is None else seconds) / round_s)
        rounds = min(repeats, max(LEAST_ROUNDS if least is None else least, fitting))
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        clock = Clock()
        for _ in range(rounds):
            for name, call in contenders.items():
                if once[name] < LONG_CALL_S:
                    call(next(numbers[name]))
                samples[name].append(_time(call, numbers[name], calls[name]))
        watched = clock.watched(samples.values())
    times = {name: _timing(values, calls[name]) for name, values in samples.items()}
    return times, watched


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


class Clock:
    """Counts, from when it is made, what the cores did and how often our threads had to wait."""

    def __init__(self) -> None:
        self._cores = len(os.sched_getaffinity(0))
        self._start, self._busy = time.perf_counter(), busy_seconds()
        self._used = resource.getrusage(resource.RUSAGE_SELF)

    def watched(self, samples: Iterable[Sequence[float]]) -> Watched:
        """Return what happened since, and how far ``samples`` lie above their fastest."""
        used, busy = resource.getrusage(resource.RUSAGE_SELF), busy_seconds()
        core_s = (time.perf_counter() - self._start) * self._cores
        own = used.ru_utime + used.ru_stime - self._used.ru_utime - self._used.ru_stime
        others = None
        if self._busy is not None and busy is not None and core_s > LEAST_WATCHED_S:
            others = min(1.0, max(0.0, (busy - self._busy - own) / core_s))
        return Watched(
            others,
            (used.ru_nivcsw - self._used.ru_nivcsw) / core_s,
            max((median(values) / min(values) for values in samples), default=1.0),
            os.getloadavg()[0],
        )


def idling(seconds: float = 0.5) -> Watched:
    """Return what others do to the cores while this process waits."""
    clock = Clock()
    time.sleep(seconds)
    return clock.watched(())


def busy_seconds(stat: Path = Path("/proc/stat")) -> float | None:
    """Return the seconds that the cores of this process have been busy; None if nobody tells."""
    try:
        lines = [line.split() for line in stat.read_text().splitlines()]
    except OSError:
        return None
    cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = [list(map(int, line[1:9])) for line in lines if line and line[0] in cores]
    if not ticks:
        return None
    busy = sum(sum(core) - core[3] - core[4] for core in ticks)  # without idle and iowait
    return busy / os.sysconf("SC_CLK_TCK")


def machine() -> dict[str, Any]:
    """Return the processor's name, the cores this process may use, and the load of a minute."""
    return {
        "cpu": host.cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
    }


def versions(packages: Mapping[str, str]) -> dict[str, str]:
    """Return the versions of what took part: blockscale's, and those of installed ``packages``."""
    found = {"blockscale": blockscale.__version__}
    for name, package in packages.items():
        try:
            found[name] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


ISA, BEFORE_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"
"""oneDNN's variable that limits its instructions, and the most that has no AMX."""

_PRODUCT = "import torch; a = torch.ones(96, 96, dtype=torch.bfloat16); a @ a"


def avoid_broken_amx() -> str:
    """Keep torch, here and in processes begun later, from AMX that does not run; say so, or "".

    A virtual machine may show these matrix units and not say what their tiles are: there oneDNN,
    which torch multiplies bfloat16 with, raises or ends the process by an illegal instruction (seen
    on an Intel Xeon of family 6, model 207, torch 2.13, 2026-11-24).
    """
    if "amx_bf16" not in host.features() or ISA in os.environ:
        return ""
    if not subprocess.run([sys.executable, "-c", _PRODUCT], capture_output=True).returncode:
        return ""
    os.environ[ISA] = BEFORE_AMX
    return (
        "torch cannot multiply bfloat16 on this machine's AMX, which is shown but does not run; "
        f"it does so without, by {ISA}={BEFORE_AMX}"
    )
