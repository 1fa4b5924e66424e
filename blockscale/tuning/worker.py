"""What runs inside a worker process: build one candidate, or run and time one on the CPU.

A candidate may crash, hang or exhaust memory; it does so here and not in the tuner.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import importlib
import math
import os
import pickle
import shutil
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from blockscale.base import files
from blockscale.base.errors import LoweringError
from blockscale.base.formats import E4M3, UE8M0
from blockscale.building.records import median_us, sentence
from blockscale.tuning.components.pool import Lost

_PR_SET_PDEATHSIG = 1
MAX_TURNED = 1e-3
"""Part of an output with ties that may differ from the default's: another order of sums turns them.

Such are codes, and the candidate that a sweep chose.  Other outputs may differ by rounding only."""
RTOL = 2e-2
"""Two steps of bfloat16."""
_SIGNED = ("x", "input", "residual", "bias", "a", "b")
"""Arguments of both signs; what scales others is positive."""
TILE_SCALES = {"nvfp4": "tiles64-nvfp4", "mxfp4": "tiles64-mxfp4", "int4": "tiles64-int4"}
"""Storage of the scales of a weight in layout "tiles64", by its format."""
SCALES = {
    E4M3.storage: (0x20, 0x48),
    UE8M0.storage: (122, 132),
    "s0e5m3": (96, 129),  # exponents of float16: 2^-3 to 2
    "tiles64-nvfp4": (80, 112),  # 2^-3 to 2
    "tiles64-mxfp4": (230, 238),  # 2^-7 to 1
    "tiles64-int4": (0x3C, 0x3F),  # two bytes: 0.011 to 0.19 as bfloat16, 1.06 to 1.56 as float16
}
"""Scales to draw, from and to (not included), by how they are stored."""
FLOOR = 2e-3
"""Difference that is always rounding, as a part of the row's largest value: sums cancel."""


@dataclass(frozen=True)
class Argument:
    """One argument of a candidate: what to allocate and what to fill it with."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    """None: a number passed by value, which is ``value``."""
    output: bool
    storage: str | None
    alias: str | None = None
    """The input that an output shares its memory with, where kernels may be called so."""
    value: float = 0.0
    """What every element of an integer tensor is."""

    @property
    def range(self) -> tuple[float, float]:
        """From and to (not included) what to draw, so that all intermediates are finite and normal.

        Denormals are slow, and codes that are no numbers would hide differences.
        """
        if self.dtype == "uint8":
            storage = (self.storage or "").split(" ")[0]
            return SCALES.get(storage, (0, 256))
        if "int" in self.dtype:
            return self.value, self.value + 1
        if self.name == "global_amax":
            return 1, 1.25  # not below the data, as a sweep's is
        return (-1 if self.name in _SIGNED else 0.25), 1

    @property
    def values(self) -> np.ndarray | None:
        """Contents that are not random: the candidates of a sweep, which kernels may know.

        And the ranges of rows of a grouped GEMM, which has ``value`` of them, or experts in turn.
        """
        if self.name == "topk_ids" and self.shape is not None:
            ids = np.arange(math.prod(self.shape)) % int(self.value)
            return ids.astype(self.dtype).reshape(self.shape)
        if self.name == "offsets" and self.shape is not None:
            return np.linspace(0, self.value, self.shape[0]).astype(self.dtype)
        if self.name != "candidates" or self.shape is None:
            return None
        found = np.resize(np.array(E4M3.values[1:127], np.float32) / np.float32(448), self.shape)
        return found.astype(np.float32)

    @property
    def compared(self) -> bool:
        """Whether it must be what the default schedule makes of it."""
        return self.output and self.name != "workspace"

    @property
    def has_ties(self) -> bool:
        """Whether rounding may turn an element of this output into quite another one."""
        copied = (self.storage or "").startswith("byte")
        return self.name == "best_amax" or (self.dtype == "uint8" and not copied)


@dataclass(frozen=True)
class Measurement:
    """What `measure` found: run times in seconds, or why there are none."""

    run_secs: tuple[float, ...]
    error: str | None = None
    broken: bool = False
    """The process cannot measure anything else: its GPU context is lost."""


@dataclass(frozen=True)
class Timing:
    """How a candidate is timed: in rounds of repeats, of which the faster half is kept.

    What makes the slower half slow is other processes.  Pausing between rounds lets the system
    place the threads anew.
    """

    rounds: int = 3
    repeats: int = 4
    min_repeat_ms: int = 4
    flush: bool = False
    """Flush every argument but the first out of the cache before each run: weights stream."""
    give_up_us: float = float("inf")
    """A candidate slower than this is not timed further."""
    again_us: float = 0.0
    """One faster than this is timed once more on a CPU: lucky, or really the best?"""


_PAUSE_S = 0.01
_AGAIN_S = 4.0
"""A candidate that took so long to time is not timed twice: it has 10 s, and little disturbs it."""


SPEC = "blockscale.spec"
"""Attribute of a candidate for a GPU: its spec as JSON, for the exporter."""


class Illegal(Exception):
    """A trace does not apply to what is built, or makes no kernel."""


def packed(module: Any) -> bytes:
    """Return ``module`` pickled and compressed, or it would fill the pipe of a starting worker."""
    return zlib.compress(pickle.dumps(module), 1)


@dataclass(frozen=True)
class Unscheduled:
    """A candidate that its builder schedules: that takes 0.1 s, and the search is one process.

    ``module`` (`packed`) is what records know, ``shipped`` what is built by the same trace instead:
    the function for any sizes, of the ``spec`` (JSON).
    """

    trace: list[Any]
    module: bytes
    shipped: bytes | None = None
    spec: str = ""

    def scheduled(self) -> tuple[Any, str]:
        """Return the module to build, and its trace as tvm_ffi's JSON.

        Raises:
            Illegal: TensorIR refuses to schedule it so.
        """
        from tvm_ffi.serialization import to_json_graph_str

        from blockscale.building.space import new_schedule, replay

        try:
            sch = replay(pickle.loads(zlib.decompress(self.module)), self.trace)
            mod = sch.mod
            if self.shipped is not None:
                made = new_schedule(pickle.loads(zlib.decompress(self.shipped)))
                sch.trace.apply_to_schedule(made, remove_postproc=False)
                mod = type(mod)({"main": made.mod["main"].with_attr(SPEC, self.spec)})
        except Exception as error:  # e.g. the design has another number of loops for the decisions
            raise Illegal(sentence(error)) from error
        return mod, to_json_graph_str(sch.trace)


def build(module: bytes, target: str, exporter: str, out: str) -> str | None:
    """Compile a pickled module into the shared library ``out``.

    One that has to be scheduled first returns its trace, and leaves a copy of the library for
    others that come out the same.
    """
    where, name = exporter.split(":")
    export, path = getattr(importlib.import_module(where), name), Path(out)
    made = pickle.loads(module)
    if not isinstance(made, Unscheduled):
        export(made, target, path)
        return None
    made, trace = made.scheduled()
    key = hashlib.sha256(f"{target} {exporter} ".encode() + pickle.dumps(made)).hexdigest()
    kept = path.with_name(f"{key[:24]}.kept")
    if kept.exists():
        shutil.copyfile(kept, path)
    else:
        try:
            export(made, target, path)
        except LoweringError as error:
            raise Illegal(sentence(error)) from error
        files.write(kept, path.read_bytes())
    return trace


def measure(library: str, arguments: list[Argument], timing: Timing, reference: str) -> Measurement:
    """Run ``main`` of ``library``, compare with ``main`` of the library ``reference``, time it."""
    import tvm

    if reference not in _wanted:
        _wanted.clear()
        _wanted[reference] = _run(tvm.runtime.load_module(reference), arguments)[0]
    module = tvm.runtime.load_module(library)
    outputs, tensors = _run(module, arguments)
    wrong = _differs(outputs, _wanted[reference], {a.name for a in arguments if a.has_ties})
    if wrong:
        return Measurement((), wrong)
    started = time.perf_counter()
    times = _times(module, tensors, timing)
    short = time.perf_counter() - started < _AGAIN_S
    if short and median_us(times) < timing.again_us:
        times += _times(module, tensors, timing)
    return Measurement(times)


_wanted: dict[str, dict[str, np.ndarray]] = {}
"""What the default schedule makes of the arguments, by its library."""


def _run(module: Any, arguments: list[Argument]) -> tuple[dict[str, np.ndarray], list[Any]]:
    """Call ``main`` once and return its outputs, and the arguments."""
    tensors = [_tensor(argument, seed) for seed, argument in enumerate(arguments)]
    module["main"](*tensors)
    pairs = zip(arguments, tensors, strict=True)
    return {a.name: tensor.numpy() for a, tensor in pairs if a.compared}, tensors


def _times(module: Any, tensors: list[Any], timing: Timing) -> tuple[float, ...]:
    """Return the faster half of the run times, in seconds."""
    import tvm

    def evaluate(repeat: int, min_repeat_ms: int, flush: bool = False) -> list[float]:
        f_preproc = "cache_flush_cpu_non_first_arg" if flush else ""
        evaluator = module.time_evaluator(
            "main",
            tvm.cpu(),
            number=1,
            repeat=repeat,
            min_repeat_ms=min_repeat_ms,
            f_preproc=f_preproc,
        )
        return list(map(float, evaluator(*tensors).results))

    run = module["main"]
    warm_until = time.perf_counter() + _warm_up_s.pop() if _warm_up_s else 0.0
    while time.perf_counter() < warm_until:
        run(*tensors)
    first: list[float] = []
    for _ in range(timing.rounds):
        first += evaluate(2, 1)
        if min(first) * 1e6 <= timing.give_up_us:
            break
        time.sleep(_PAUSE_S)
    else:
        return _faster_half(first)
    times: list[float] = []
    for _ in range(timing.rounds):
        if timing.flush:
            times += evaluate(2 * timing.repeats, 0, flush=True)
        else:
            times += evaluate(timing.repeats, timing.min_repeat_ms)
        time.sleep(_PAUSE_S)
    return _faster_half(times)


def _faster_half(times: list[float]) -> tuple[float, ...]:
    return tuple(sorted(times)[: max(1, len(times) // 2)])


_warm_up_s = [0.3]
"""Time for the system to spread a new process's threads over the cores; for the first run."""


def _values(argument: Argument, rng: np.random.Generator) -> np.ndarray:
    """Return random contents within `Argument.range`."""
    assert argument.shape is not None, "numbers are no arrays"
    if argument.values is not None:
        return argument.values
    low, high = argument.range
    if "int" in argument.dtype:
        return rng.integers(int(low), int(high), argument.shape, argument.dtype)
    return rng.uniform(low, high, argument.shape).astype(argument.dtype)


def _tensor(argument: Argument, seed: int) -> Any:
    import tvm

    if argument.shape is None:
        return int(argument.value) if "int" in argument.dtype else argument.value
    if argument.output:
        nothing = np.nan if "float" in argument.dtype else 0x25
        return tvm.runtime.tensor(np.full(argument.shape, nothing, argument.dtype))
    return tvm.runtime.tensor(_values(argument, np.random.default_rng(seed)))


def _differs(
    outputs: dict[str, np.ndarray], reference: Mapping[str, np.ndarray], ties: Collection[str]
) -> str | None:
    """Return a sentence when an output is not the reference's, up to rounding; see `verdict`."""
    for name, got in outputs.items():
        want = reference[name]
        if got.dtype.kind in "fV":  # V: bfloat16
            got, want = got.astype("float32"), want.astype("float32")  # float16 would overflow
            size = np.where(np.isfinite(want), np.abs(want), 0).max(
                axis=-1, keepdims=True, initial=0
            )
            same = np.isclose(got, want, rtol=RTOL, atol=FLOOR * size, equal_nan=True)
            broken = int(np.sum(~np.isfinite(got) & ~same))
        else:
            same, broken = got == want, 0
        found = verdict(int(np.sum(~same)), broken, same.size, name, name in ties)
        if found:
            return found
    return None


def verdict(wrong: int, broken: int, size: int, name: str, ties: bool) -> str | None:
    """Return a sentence when too many of the ``size`` elements of an output are not the default's.

    ``broken`` are NaN or infinite; a small part of the others may be wrong where there are ties.
    """
    if not broken and wrong <= (MAX_TURNED * size if ties else 0):
        return None
    return (
        f"wrong result: {wrong} of {size} elements of '{name}' differ from the default schedule's"
    )


def _die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when the tuner dies, by ``kill -9`` too."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main(pipe: int, parent: int, needs: str) -> None:
    """Serve ``(function, arguments)`` jobs until the tuner closes the pipe.

    ``needs`` is the module that the jobs use, "tvm" or "torch": importing it takes seconds, while
    the tuner prepares its search spaces.
    """
    _die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if needs != "torch":  # or tvm_ffi would import torch first, which takes 1.5 s
        sys.modules["torch"] = None  # type: ignore[assignment]
    gc.disable()  # or it takes a fifth of what follows, and of every build
    with suppress(ModuleNotFoundError):  # a job that needs it says so
        importlib.import_module(needs)
    gc.freeze()
    gc.enable()
    jobs = Connection(pipe)
    jobs.send(None)  # ready
    with suppress(EOFError):
        while True:
            jobs.send(_answer(jobs))


def _answer(jobs: Connection) -> dict[str, Any]:
    """Do the next job and return what `pool.Answer` says of it."""
    data = jobs.recv_bytes()
    try:
        function, arguments = pickle.loads(data)
        return {"value": function(*arguments)}
    except Lost as error:
        return {"value": None, "error": str(error), "lost": True}
    except Exception as error:
        traceback.print_exc()
        return {"value": None, "error": sentence(error)}
