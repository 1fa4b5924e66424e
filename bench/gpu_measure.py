"""One case of `bench.gpu`: every contender is checked, the fastest variants are timed in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from bench import gpu_timing
from bench.gpu_cases import Case, bytes_of
from bench.gpu_peers import TOLERATED, Peer, Run
from bench.gpu_timing import Captured, Data

Kernel = Callable[..., Any]
"""A kernel of a loaded library (`blockscale.runtime.function.Function`)."""


class Clock(Protocol):
    """How calls become times; a test has no device."""

    def capture(self, call: gpu_timing.Call, sets: list[Data], launches: int) -> Captured:
        """Return the launches, ready to be repeated."""

    def times(self, contenders: Mapping[str, Captured], replays: int) -> dict[str, Any]:
        """Return the times as JSON, by contender."""


class GraphClock:
    """Times by CUDA graphs."""

    def capture(self, call: gpu_timing.Call, sets: list[Data], launches: int) -> Captured:
        """Return the graph."""
        return gpu_timing.capture(call, sets, launches)

    def times(self, contenders: Mapping[str, Captured], replays: int) -> dict[str, Any]:
        """Return interleaved times."""
        found = gpu_timing.interleaved(contenders, replays)
        return {name: timing.to_json() for name, timing in found.items()}


@dataclass
class Settings:
    """How to measure; ``compile_s`` is what is left for torch.compile's slow modes."""

    device: str = "cuda"
    cache_bytes: int = 60 << 20
    memory_bytes: int = 1 << 62
    replays: int = 21
    peers: bool = True
    compile_s: float = 150.0
    clock: Clock = field(default_factory=GraphClock)


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
            f"{unknown}; bring bench/gpu_cases.py in line with the spec"
        )
    return [data.get(name) for name in names]


def ours(kernel: Any) -> Run:
    """Return the call of our kernel on one set of data, all outputs given."""

    def run(data: Data) -> Data:
        kernel(*bound(kernel, data))
        return data

    return run


def _bound_once(kernel: Any, sets: list[Data]) -> gpu_timing.Call:
    """Return the call with the arguments looked up before: capturing thousands takes less."""
    arguments = {id(data): bound(kernel, data) for data in sets}
    return lambda data: kernel(*arguments[id(data)])


def checked(case: Case, run: Run, data: Data, tolerated: float) -> dict[str, Any]:
    """Return the verdict on ``run``, which gets a copy of the data."""
    after = {name: tensor.clone() for name, tensor in data.items()}
    after = {**after, **run(after)}
    verdict = case.judge(data, after)
    right = verdict["differ"] <= tolerated * verdict["of"]
    return {**verdict, "exact": verdict["differ"] == 0, "right": right}


def _failure(error: Exception) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0]}"[:300]


@dataclass
class _Best:
    """The fastest variant so far of a peer."""

    label: str
    captured: Captured
    us: float
    verdict: dict[str, Any]


def _peer(
    case: Case, peer: Peer, sets: list[Data], launches: int, settings: Settings
) -> tuple[_Best | None, dict[str, Any]]:
    """Return the fastest right variant, and what became of each."""
    best: _Best | None = None
    about: dict[str, Any] = {}
    for label, make in peer.variants.items():
        slow = "autotune" in label
        if slow and settings.compile_s <= 0:
            about[label] = {"skipped": "no time left for it (--compile-seconds)"}
            continue
        start = time.perf_counter()
        try:
            run = make()
            verdict = checked(case, run, sets[0], TOLERATED)
            if not verdict["right"]:
                raise ArithmeticError(f"{verdict['differ']} of {verdict['of']} bytes differ")
            captured = settings.clock.capture(run, sets, launches)
            us = gpu_timing.quick_us(captured)
        except Exception as error:  # of another's compiler; ours is timed all the same
            about[label] = {"failed": _failure(error)}
            continue
        finally:
            if peer.name == "torch.compile":
                settings.compile_s -= time.perf_counter() - start
        about[label] = {"us": us}
        if best is None or us < best.us:
            best = _Best(label, captured, us, verdict)
    return best, about


def measure(case: Case, kernels: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Return the result of one case; "skipped" or "failed" say why there is no time."""
    found: dict[str, Any] = {
        "name": case.name,
        "op": case.op,
        "shape": case.shape,
        "kernel": case.kernel,
        "bytes": case.moved,
        "asked": case.asked,
    }
    if case.kernel not in kernels:
        return {**found, "skipped": f"no given library has {case.kernel}"}
    sets = gpu_timing.cold_sets(case.footprint, settings.cache_bytes)
    needed = bytes_of(case, sets)
    if needed > settings.memory_bytes:
        return {**found, "skipped": f"needs {needed / 2**30:.0f} GiB of device memory"}
    try:
        return {**found, **_measured(case, kernels[case.kernel], sets, settings)}
    except Exception as error:  # one broken kernel must not cost the session's other results
        return {**found, "failed": _failure(error)}


def _measured(case: Case, kernel: Any, count: int, settings: Settings) -> dict[str, Any]:
    shared = case.shared()
    sets = [
        {**data, **shared} for data in gpu_timing.rotating(case.buffers, count, settings.device)
    ]
    launches = gpu_timing.launches_of(case.moved, count)
    verdicts = {"ours": checked(case, ours(kernel), sets[0], case.tolerated)}
    copies = gpu_timing.rotating(gpu_timing.copy_buffers(case.moved), count, settings.device)
    capture = settings.clock.capture
    contenders = {
        "ours": capture(_bound_once(kernel, sets), sets, launches),
        **{name: capture(copy, copies, launches) for name, copy in gpu_timing.COPIES.items()},
    }
    variants: dict[str, Any] = {}
    for peer in case.peers if settings.peers else ():
        best, variants[peer.name] = _peer(case, peer, sets, launches, settings)
        if best is not None:
            contenders[peer.name] = best.captured
            verdicts[peer.name] = {**best.verdict, "variant": best.label}
    times = settings.clock.times(contenders, settings.replays)
    copy = min(gpu_timing.COPIES, key=lambda name: times[name]["us"])
    times["copy"] = {**times[copy], "variant": copy}
    us = {name: time["us"] for name, time in times.items()}
    return {
        "tuned": kernel.tuned,
        "times": times,
        "checks": verdicts,
        "variants": variants,
        "gb_s": {name: case.moved / (1e3 * value) for name, value in us.items()},
        "of_copy": us["copy"] / us["ours"],
    }


def free_memory() -> int:
    """Return bytes of device memory that a case may take."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return int(0.9 * free)
