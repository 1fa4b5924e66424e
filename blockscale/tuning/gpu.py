"""What runs in the process that measures on the GPU: run a candidate, compare it, time it.

Launches are timed inside a CUDA graph, where the host does not count, and go round over sets of
arguments that together are larger than the L2 cache.  Outputs are compared on the GPU with those of
the default schedule, whose library stays on disk: a process that starts anew runs it again.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from blockscale.base.sizes import ceil_div, round_up
from blockscale.base.targets import runs_on
from blockscale.runtime.function_cuda import PROGRAMMATIC
from blockscale.tuning import worker
from blockscale.tuning.worker import POISON, Argument, Measurement, Timing

if TYPE_CHECKING:
    from torch import Tensor

DEVICE = "cuda"
L2_TIMES = 3
"""The sets of arguments together are at least so many times as large as the L2 cache."""
MAX_BYTES = 8 << 30
"""Memory that the sets of arguments may take."""
MAX_CALLS = 256
"""Before the first set comes again.  A call whose arguments are smaller than 0.7 MB finds them in
L2, as it does after the kernel that made them; more would make graphs of thousands of launches."""
KEPT = 0.6
"""Part of the GPU's memory up to which the arguments of earlier workloads stay there."""
REPLAY_US = 200.0
"""Least time of one replay: the resolution of events is about 0.5 us."""
MIN_LAUNCHES = 20
"""Launches per replay of kernels that take less than `GIVE_UP_US`."""
MIN_REPLAYS, MAX_REPLAYS = 5, 20
BUDGET_US = 50e3
"""Time for all replays of one candidate, after `WARM_US` of warm-up (clocks rise)."""
WARM_US = 3e3
MAX_WARM = 50
LEAST_US = 0.2
"""Less per launch means that the launches went elsewhere: no kernel is so fast."""
GIVE_UP_US = 30.0
"""What single launches tell of a faster kernel is the time of the host."""

_ALIGN = 256
"""Bytes; what the allocator of torch gives."""


def set_count(round_bytes: int, set_bytes: int, l2_bytes: int, calls: int = 1) -> int:
    """Return how many sets of arguments of ``set_bytes`` each to go round over.

    ``calls``: those of a round with one set, which reads or writes ``round_bytes`` of it.
    """
    wanted = max(ceil_div(2, calls), ceil_div(L2_TIMES * l2_bytes, max(1, round_bytes)))
    return max(1, min(wanted, MAX_CALLS // calls, MAX_BYTES // max(1, set_bytes)))


def launch_count(us: float, sets: int) -> int:
    """Return launches per replay of a kernel of about ``us``; every set comes equally often.

    ``us`` may be too long, as single launches are for small kernels: 20 of these at least.
    """
    least = max(math.ceil(REPLAY_US / us), MIN_LAUNCHES if us < GIVE_UP_US else 1)
    return sets * math.ceil(least / sets)


def replay_counts(replay_us: float) -> tuple[int, int]:
    """Return how many replays of ``replay_us`` warm up, and how many are timed."""
    timed = min(MAX_REPLAYS, max(MIN_REPLAYS, int(BUDGET_US / replay_us)))
    return max(1, min(MAX_WARM, math.ceil(WARM_US / replay_us))), timed


def describe(arch: str) -> dict[str, Any]:
    """Return the machine's GPU and versions; make the GPU ready.

    Raises:
        RuntimeError: torch is missing, or it finds no GPU that runs code for ``arch``.
    """
    try:
        import torch
    except ModuleNotFoundError:
        raise RuntimeError(
            "the measuring process needs torch with CUDA, which is missing; install it"
        ) from None
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"torch {torch.__version__} finds no CUDA GPU here; tune on a machine with a GPU"
        )
    properties = torch.cuda.get_device_properties(0)
    if not runs_on(arch, properties.major, properties.minor):
        raise RuntimeError(
            f"this machine's GPU is a {properties.name} of compute capability "
            f"{properties.major}.{properties.minor}, which does not run code for {arch}; tune for "
            f"sm_{properties.major}{properties.minor}{'a' if properties.major >= 9 else ''}"
        )
    torch.zeros(1, device="cuda").add_(1).item()
    return {
        "gpu": properties.name,
        "driver": _driver_version(),
        "cuda": torch.version.cuda,
        "torch": str(torch.__version__),  # its class would be torch's
        "l2_bytes": properties.L2_cache_size,
    }


def _driver_version() -> str:
    with suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(96)
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(text, 96) == 0:
            return text.value.decode()
    return "unknown"


def measure(library: str, arguments: list[Argument], timing: Timing, reference: str) -> Measurement:
    """Run ``main`` of ``library``, compare with ``main`` of the library ``reference``, time it."""
    return judged(partial(Held, arguments), library, timing, reference)


def judged(
    make: Callable[[str], worker.Held], library: str, timing: Timing, reference: str
) -> Measurement:
    """Do as `worker.judged`; after an error the process is not trusted.

    A capture may have been broken off, or memory have run out.
    """
    import torch

    try:
        if reference not in worker.held and crowded():
            worker.held.clear()
        return worker.judged(make, library, timing, reference)
    except Exception as error:
        worker.held.clear()
        why = error
        try:
            torch.cuda.synchronize()
        except Exception as lost:
            why = lost
        return Measurement((), f"run: {brief(why)}", broken=True)


def crowded() -> bool:
    """Return whether another workload's arguments do not fit beside those that are there.

    Those stay, as the tuner goes to and fro between workloads.
    """
    import torch

    memory = torch.cuda.get_device_properties(0).total_memory
    return torch.cuda.memory_allocated() > KEPT * memory


def brief(error: Exception) -> str:
    """Return what ``error`` says first."""
    return " ".join(str(error).split("\n")[0].split())[:200] or type(error).__name__


def times(function: Any, sets: Sequence[Sequence[Any]], timing: Timing) -> tuple[float, ...]:
    """Return the run times of replays, per launch, in seconds."""
    import torch

    with _on_stream():
        rough = min(_elapsed(lambda i=i: function(*sets[i % len(sets)])) for i in range(3))
        if rough > max(timing.give_up_us, GIVE_UP_US):
            return (rough / 1e6,)
        launches = launch_count(rough, len(sets))
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        for i in range(launches):
            function(*sets[i % len(sets)])
        graph.capture_end()
        graph.replay()  # the first one uploads the graph
        first = _elapsed(graph.replay)
        if first < LEAST_US * launches:
            raise RuntimeError(
                f"{launches} launches took {first:.1f} us: the graph has not got them"
            )
        if first / launches > timing.give_up_us:
            return (first / launches / 1e6,)
        warm, timed = replay_counts(first)
        for _ in range(warm):
            graph.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(timed + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
    spans = [a.elapsed_time(b) for a, b in pairwise(events)]
    return tuple(float(f"{ms / 1e3 / launches:.5g}") for ms in spans)


def _elapsed(run: Any) -> float:
    """Return microseconds of the GPU between before and after ``run``."""
    import torch

    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    run()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) * 1e3


@cache
def _stream() -> Any:
    import torch

    return torch.cuda.Stream()


@contextmanager
def _on_stream() -> Iterator[None]:
    """Make calls launch on a stream that a graph can capture; wait for them at the end."""
    import torch
    import tvm_ffi

    _stream().wait_stream(torch.cuda.default_stream())
    with tvm_ffi.use_torch_stream(torch.cuda.stream(_stream())):
        yield
    _stream().synchronize()


def l2_bytes() -> int:
    """Return the size of the GPU's L2 cache."""
    import torch

    return int(torch.cuda.get_device_properties(0).L2_cache_size)


class Held(worker.Held):
    """Arguments of one workload on the GPU.

    An output that may be the same tensor as an input is: so the shipped function is called.
    """

    def __init__(self, arguments: list[Argument], reference: str) -> None:
        import torch
        import tvm_ffi

        self.xp = torch
        size = sum(map(nbytes, arguments))
        count = set_count(size, size, l2_bytes())
        made = {a.name: filled(a, count, seed) for seed, a in enumerate(arguments)}
        rows = list(zip(*(made[a.alias or a.name] for a in arguments), strict=True))
        self.sets = [
            [tvm_ffi.from_dlpack(v) if isinstance(v, torch.Tensor) else v for v in row]
            for row in rows
        ]
        self._first = list(zip(arguments, rows[0], strict=True))
        self._overwritten = [(t, t.clone()) for a, t in self._first if a.alias is not None]
        super().__init__([a for a in arguments if a.compared], reference)

    def load(self, library: str) -> Any:
        """Return the library's function."""
        import tvm_ffi

        return tvm_ffi.load_module(library)["main"]

    def run(self, function: Any) -> list[Any]:
        """Return the outputs of the first set."""
        with _on_stream():
            for argument, tensor in self._first:
                if argument.output:
                    poison(tensor)
            for tensor, before in self._overwritten:
                tensor.copy_(before)
            function(*self.sets[0])
        return [tensor.clone() for argument, tensor in self._first if argument.compared]

    def times(self, function: Any, timing: Timing) -> tuple[float, ...]:
        """Return the run times of replays, per launch, in seconds; launches as shipped."""
        return times(lambda *given: function(*given, PROGRAMMATIC), self.sets, timing)


def nbytes(argument: Argument) -> int:
    """Return the bytes of an argument; none for one that has another's memory."""
    import torch

    if argument.shape is None or argument.alias is not None:
        return 0
    return math.prod(argument.shape) * int(getattr(torch, argument.dtype).itemsize)


def filled(argument: Argument, count: int, seed: int) -> list[Any]:
    """Return ``count`` tensors of random contents within the argument's range, or its number."""
    import torch

    if argument.shape is None:
        return [argument.number] * count
    if argument.alias is not None:
        return []
    if argument.values is not None:
        return [torch.from_numpy(argument.values).to(DEVICE)] * count
    dtype = getattr(torch, argument.dtype)
    size = math.prod(argument.shape)
    step = round_up(size * dtype.itemsize, _ALIGN) // dtype.itemsize
    data = torch.empty(max(1, count * step), dtype=dtype, device=DEVICE)
    low, high = argument.range
    generator = torch.Generator(DEVICE).manual_seed(seed)
    if argument.output:
        poison(data)
    elif "int" in argument.dtype:
        data.random_(int(low), int(high), generator=generator)
    else:
        data.uniform_(low, high, generator=generator)
    return [data[i * step : i * step + size].view(argument.shape) for i in range(count)]


def poison(tensor: Tensor) -> None:
    """Fill an output with what no kernel should leave there."""
    tensor.fill_(math.nan if tensor.is_floating_point() else POISON)
