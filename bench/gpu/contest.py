"""One case on a GPU: every contender is checked, the fastest variants are timed in turns."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench import measure
from bench.gpu.cases import Case, bytes_of
from bench.measure import Captured, Data, bound, describe
from bench.peers.ops import TOLERATED, Peer, Run
from blockscale.runtime.function_cuda import PROGRAMMATIC


@dataclass
class Settings:
    """How to measure.

    Attributes:
        compile_s: what is left for torch.compile's slow modes.
        clock: captures calls and times them; a test, which has no device, gives another.
    """

    device: str = "cuda"
    cache_bytes: int = 60 << 20
    memory_bytes: int = 1 << 62
    replays: int = 21
    peers: bool = True
    compile_s: float = 150.0
    clock: Any = measure


OURS = ("ours", "early")
"""Our kernel, and the same launched as the functions do: before the one before it has ended."""


def right(found: Mapping[str, Any]) -> bool:
    """Whether our results of a case are right, in all of its launches that were compared."""
    return all(found["checks"].get(name, {"right": True})["right"] for name in OURS)


def ours(kernel: Any, **options: Any) -> Run:
    """Return the call of our kernel on one set of data, all outputs given."""

    def run(data: Data) -> Data:
        kernel(*bound(kernel, data), **options)
        return data

    return run


def checked(case: Case, run: Run, data: Data, tolerated: float) -> dict[str, Any]:
    """Return the verdict on ``run``, which gets a copy of the data."""
    after = {name: tensor.clone() for name, tensor in data.items()}
    after = {**after, **run(after)}
    verdict = case.judge(data, after)
    right = verdict["differ"] <= tolerated * verdict["of"]
    return {**verdict, "exact": verdict["differ"] == 0, "right": right}


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
        if "autotune" in label and settings.compile_s <= 0:
            about[label] = {"skipped": "no time left for it (--compile-seconds)"}
            continue
        start = time.perf_counter()
        try:
            run = make()
            verdict = checked(case, run, sets[0], TOLERATED)
            if not verdict["right"]:
                raise ArithmeticError(f"{verdict['differ']} of {verdict['of']} bytes differ")
            captured = settings.clock.capture([partial(run, data) for data in sets], launches)
            us = captured.median_us()
        except Exception as error:  # of another's compiler; ours is timed all the same
            about[label] = {"failed": describe(error)}
            continue
        finally:
            if peer.name == "torch.compile":
                settings.compile_s -= time.perf_counter() - start
        about[label] = {"us": us}
        if best is None or us < best.us:
            best = _Best(label, captured, us, verdict)
    return best, about


def measured(case: Case, kernels: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
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
    sets = measure.cold_sets(case.footprint, settings.cache_bytes)
    needed = bytes_of(case, sets)
    if needed > settings.memory_bytes:
        return {**found, "skipped": f"needs {needed / 2**30:.0f} GiB of device memory"}
    try:
        return {**found, **_in_turns(case, kernels[case.kernel], sets, settings)}
    except Exception as error:  # one broken kernel must not cost the session's other results
        return {**found, "failed": describe(error)}


def _in_turns(case: Case, kernel: Any, count: int, settings: Settings) -> dict[str, Any]:
    shared, clock = case.shared(), settings.clock
    rotating = measure.rotating(case.buffers, count, settings.device)
    sets = [{**data, **shared} for data in rotating]
    launches = measure.launches_of(measure.guess_us(case.moved), count)
    verdicts = {
        "ours": checked(case, ours(kernel), sets[0], case.tolerated),
        "early": checked(case, ours(kernel, flags=PROGRAMMATIC), sets[0], case.tolerated),
    }
    calls = [partial(kernel, *bound(kernel, data)) for data in sets]
    early = [partial(call, flags=PROGRAMMATIC) for call in calls]
    contenders = {
        "ours": clock.capture(calls, launches),
        "early": clock.capture(early, launches),
        **measure.copies_of(case.moved, count, launches, settings.device, clock.capture),
    }
    variants: dict[str, Any] = {}
    for peer in case.peers if settings.peers else ():
        best, variants[peer.name] = _peer(case, peer, sets, launches, settings)
        if best is not None:
            contenders[peer.name] = best.captured
            verdicts[peer.name] = {**best.verdict, "variant": best.label}
    timings = clock.interleaved(contenders, settings.replays)
    times = {name: timing.to_json() for name, timing in timings.items()}
    copy = min(measure.COPIES, key=lambda name: times[name]["us"])
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
