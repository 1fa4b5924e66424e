"""What runs inside a worker process: build one candidate, or run and time one on the CPU.

A candidate may crash, hang or exhaust memory; it does so here and not in the tuner.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import math
import pickle
import shutil
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from blockscale.base import files
from blockscale.base.errors import LoweringError
from blockscale.base.formats import E4M3, UE8M0
from blockscale.building.records import median_us, sentence, trace_key

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
POISON = 0x25
"""What integers of an output are before a run; floats are NaN."""
_CHUNK = 1 << 26
"""Elements compared at a time."""


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
    """What every element of an integer tensor is; of a float one, unless it is 0."""

    @property
    def number(self) -> float:
        """What is passed by value."""
        return int(self.value) if "int" in self.dtype else self.value

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
        if self.value:
            return self.value, self.value
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


def unpacked(data: bytes) -> Any:
    """Return the module that `packed` made ``data`` of."""
    return pickle.loads(zlib.decompress(data))


class Applied(NamedTuple):
    """A trace as it was applied (TVM clips tiles), told by a worker: one costs the search 10 ms."""

    graph: str
    """As tvm_ffi's JSON."""
    key: str
    """`records.trace_key`."""

    @staticmethod
    def of(trace: Any) -> Applied:
        """Return what is to be known of a TVM trace."""
        from tvm_ffi.serialization import to_json_graph_str

        from blockscale.building.space import trace_json

        return Applied(to_json_graph_str(trace), trace_key(trace_json(trace)))

    @property
    def trace(self) -> Any:
        """The TVM trace."""
        from tvm_ffi.serialization import from_json_graph_str

        return from_json_graph_str(self.graph)


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

    def scheduled(self) -> tuple[Any, Applied]:
        """Return the module to build, and the trace that was applied.

        Raises:
            Illegal: TensorIR refuses to schedule it so.
        """
        from blockscale.building.space import new_schedule, replay

        try:
            sch = replay(unpacked(self.module), self.trace)
            mod = sch.mod
            if self.shipped is not None:
                made = new_schedule(unpacked(self.shipped))
                sch.trace.apply_to_schedule(made, remove_postproc=False)
                mod = type(mod)({"main": made.mod["main"].with_attr(SPEC, self.spec)})
        except Exception as error:  # e.g. the design has another number of loops for the decisions
            raise Illegal(sentence(error)) from error
        return mod, Applied.of(sch.trace)


def build(module: Any, target: str, exporter: str, out: str) -> Applied | None:
    """Compile a module into the shared library ``out``.

    One that is `Unscheduled` returns its trace, and leaves a copy of the library for others that
    come out the same.
    """
    where, name = exporter.split(":")
    export, path = getattr(importlib.import_module(where), name), Path(out)
    if not isinstance(module, Unscheduled):
        export(module, target, path)
        return None
    made, trace = module.scheduled()
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


class Held(ABC):
    """What candidates of a workload are run on, and what its default schedule makes of it.

    A subclass says how that is on one kind of machine, with arrays of the module ``xp``: numpy's or
    torch's.
    """

    xp: Any = np

    def __init__(self, outputs: Sequence[Argument], reference: str) -> None:
        """``outputs``: those that are compared; ``reference``: the default schedule's library."""
        self._outputs = outputs
        self._wanted = self.run(self.load(reference))

    @abstractmethod
    def load(self, library: str) -> Any:
        """Return what `run` and `times` take."""

    @abstractmethod
    def run(self, function: Any) -> list[Any]:
        """Return copies of the outputs, which were poisoned before."""

    @abstractmethod
    def times(self, function: Any, timing: Timing) -> tuple[float, ...]:
        """Return run times in seconds."""

    def differs(self, function: Any) -> str | None:
        """Return a sentence when ``function`` computes something else, up to rounding."""
        for output, *both in zip(self._outputs, self.run(function), self._wanted, strict=True):
            wrong, broken = count_wrong(self.xp, *both)
            size = math.prod(both[0].shape)
            if broken or wrong > (MAX_TURNED * size if output.has_ties else 0):
                return (
                    f"wrong result: {wrong} of {size} elements of '{output.name}' differ from the "
                    "default schedule's"
                )
        return None


held: dict[str, Held] = {}
"""By the library of the default schedule, which is run again by a process that starts anew."""


def judged(
    make: Callable[[str], Held], library: str, timing: Timing, reference: str
) -> Measurement:
    """Compare ``library`` with the library ``reference`` on what ``make`` holds, and time it."""
    if reference not in held:
        held[reference] = make(reference)
    function = held[reference].load(library)
    wrong = held[reference].differs(function)
    if wrong:  # or was it an earlier candidate that wrote where it must not?
        held.clear()
        held[reference] = make(reference)
        wrong = held[reference].differs(function)
    return Measurement(() if wrong else held[reference].times(function, timing), wrong)


def count_wrong(xp: Any, got: Any, wanted: Any) -> tuple[int, int]:
    """Return how many elements differ by more than rounding, and how many are not finite of these.

    Differences are measured by the largest of the row.  Arrays are those of the module ``xp``.
    """
    if "float" not in str(got.dtype):
        return int((got != wanted).sum()), 0
    wrong = broken = 0
    width = max(1, got.shape[-1] if got.ndim else 1)
    got, wanted, rows = got.reshape(-1, width), wanted.reshape(-1, width), max(1, _CHUNK // width)
    for part in (slice(at, at + rows) for at in range(0, len(got), rows)):
        is_, want = (xp.asarray(each[part], dtype=xp.float32) for each in (got, wanted))
        with np.errstate(invalid="ignore"):  # infinities of one sign are equal; they differ by NaN
            magnitude = xp.where(xp.isfinite(want), abs(want), 0)
            bound = RTOL * magnitude + FLOOR * xp.amax(magnitude, axis=-1, keepdims=True)
            same = (abs(is_ - want) <= bound) | (is_ == want) | (xp.isnan(is_) & xp.isnan(want))
        wrong += int((~same).sum())
        broken += int((~same & ~xp.isfinite(is_)).sum())
    return wrong, broken


def need_openmp() -> None:
    """Raise RuntimeError where kernels find no libgomp: they would run serially, silently."""
    try:
        ctypes.CDLL("libgomp.so.1")
    except OSError:
        why = "this machine has no libgomp.so.1, without which kernels run on one core"
        raise RuntimeError(f"{why}; install it (Debian: libgomp1)") from None


def measure(library: str, arguments: list[Argument], timing: Timing, reference: str) -> Measurement:
    """Run ``main`` of ``library``, compare with ``main`` of the library ``reference``, time it."""
    if reference not in held:  # another workload's
        held.clear()
    return judged(partial(_OnCpu, arguments), library, timing, reference)


class _OnCpu(Held):
    """Arguments of one workload in this machine's memory."""

    def __init__(self, arguments: list[Argument], reference: str) -> None:
        import tvm

        found = (_contents(argument, seed) for seed, argument in enumerate(arguments))
        self._given: list[Any] = [
            tvm.runtime.tensor(a) if isinstance(a, np.ndarray) else a for a in found
        ]
        pairs = zip(arguments, self._given, strict=True)
        self._written = [(argument, tensor) for argument, tensor in pairs if argument.output]
        super().__init__([a for a in arguments if a.compared], reference)

    def load(self, library: str) -> Any:
        """Return the module."""
        import tvm

        return tvm.runtime.load_module(library)

    def run(self, function: Any) -> list[Any]:
        """Return the outputs."""
        for argument, tensor in self._written:
            tensor.copyfrom(_contents(argument, 0))
        function["main"](*self._given)
        return [tensor.numpy() for argument, tensor in self._written if argument.compared]

    def times(self, function: Any, timing: Timing) -> tuple[float, ...]:
        """Return the faster half of the run times."""
        started = time.perf_counter()
        found = self._times(function, timing)
        short = time.perf_counter() - started < _AGAIN_S
        if short and median_us(found) < timing.again_us:
            found += self._times(function, timing)
        return found

    def _times(self, module: Any, timing: Timing) -> tuple[float, ...]:
        import tvm

        def evaluate(repeat: int, min_repeat_ms: int, flush: bool = False) -> list[float]:
            evaluator = module.time_evaluator(
                "main",
                tvm.cpu(),
                number=1,
                repeat=repeat,
                min_repeat_ms=min_repeat_ms,
                f_preproc="cache_flush_cpu_non_first_arg" if flush else "",
            )
            return list(map(float, evaluator(*self._given).results))

        warm_until = time.perf_counter() + _warm_up_s.pop() if _warm_up_s else 0.0
        while time.perf_counter() < warm_until:
            module["main"](*self._given)
        times: list[float] = []
        for _ in range(timing.rounds):
            times += evaluate(2, 1)
            if min(times) * 1e6 <= timing.give_up_us:
                break
            time.sleep(_PAUSE_S)
        else:
            return _faster_half(times)
        times = []
        for _ in range(timing.rounds):
            if timing.flush:
                times += evaluate(2 * timing.repeats, 0, flush=True)
            else:
                times += evaluate(timing.repeats, timing.min_repeat_ms)
            time.sleep(_PAUSE_S)
        return _faster_half(times)


_warm_up_s = [0.3]
"""Time for the system to spread a new process's threads over the cores; for the first run."""


def _faster_half(times: list[float]) -> tuple[float, ...]:
    return tuple(sorted(times)[: max(1, len(times) // 2)])


def _contents(argument: Argument, seed: int) -> np.ndarray | float:
    """Return what an argument is before a run: poison, or random within `Argument.range`."""
    if argument.shape is None:
        return argument.number
    if argument.output:
        nothing = np.nan if "float" in argument.dtype else POISON
        return np.full(argument.shape, nothing, argument.dtype)
    if argument.values is not None:
        return argument.values
    rng, (low, high) = np.random.default_rng(seed), argument.range
    if "int" in argument.dtype:
        return rng.integers(int(low), int(high), argument.shape, argument.dtype)
    return rng.uniform(low, high, argument.shape).astype(argument.dtype)
