"""What runs in the process that measures on the GPU, for the GEMMs of MoE layers.

A candidate is one kernel, launched by the driver.  Calls in a CUDA graph go round over random
routings and copies of the weights, so that weights come from memory; outputs of the first call are
compared with those of the default schedule.
"""

from __future__ import annotations

import ctypes
import json
import math
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from blockscale.base.sizes import ceil_div
from blockscale.tuning import gpu
from blockscale.tuning.moe import data as moe_data
from blockscale.tuning.moe.kernels import KERNEL, Launch
from blockscale.tuning.worker import SCALES, TILE_SCALES, Measurement, Timing, verdict

if TYPE_CHECKING:
    from torch import Tensor

    from blockscale.specs.plans.moe import MoeGemm

FACTOR = 2.0**-6
"""Global scale: sums are about 1, so that activations are not linear."""

ALPHA_LIMIT = {"swiglu_oai": (1.702, 7.0)}
NO_LIMIT = (1.0, float.fromhex("0x1.fffffep+127"))

_MAX_DYNAMIC_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""


def measure(
    library: str, gemm: MoeGemm, tokens: int, timing: Timing, reference: str
) -> Measurement:
    """Run the kernel that ``library`` names, compare with that of ``reference``, time it."""
    hold = partial(_hold, gemm, tokens, reference)
    return gpu.judged(hold, lambda: Kernel.of(library), timing, _drop)


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel and what its launch needs."""

    about: Launch
    function: ctypes.c_void_p
    resident: int
    """CTAs that the device holds."""

    @staticmethod
    def of(library: str) -> Kernel:
        """Load the kernel that a candidate's file names; once for each."""
        about, _, image = Path(library).read_bytes().partition(b"\n")
        return _load(Launch(**json.loads(about)), image)

    def launch(self, arguments: list[Any], grid: int, stream: int) -> None:
        """Launch ``grid`` CTAs, at most those that the device holds."""
        cells = (ctypes.c_void_p * len(arguments))(
            *(ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in arguments)
        )
        shape = (max(1, min(grid, self.resident)), 1, 1, self.about.threads, 1, 1)
        bytes_ = self.about.shared
        _call("cuLaunchKernel", self.function, *shape, bytes_, ctypes.c_void_p(stream), cells, None)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        raise RuntimeError(f"{name}: CUresult {code}")


@cache
def _load(about: Launch, image: bytes) -> Kernel:
    import torch

    torch.cuda.current_stream()  # there is a context
    module, function, count = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    _call("cuModuleLoadData", ctypes.byref(module), image)
    _call("cuModuleGetFunction", ctypes.byref(function), module, KERNEL.encode())
    _call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, about.shared)
    _call(
        "cuOccupancyMaxActiveBlocksPerMultiprocessor",
        *(ctypes.byref(count), function, about.threads, ctypes.c_size_t(about.shared)),
    )
    if not count.value:
        raise RuntimeError("an SM holds no CTA of the kernel")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    return Kernel(about, function, sms * count.value)


@dataclass
class _Tables:
    """Blocks of one routing for tiles of some tokens."""

    blocks: Tensor
    count: Tensor
    number: int


class _Held:
    """Operands of one workload on the GPU, and what its default schedule makes of the first."""

    def __init__(self, gemm: MoeGemm, tokens: int, reference: str) -> None:
        import torch

        self.gemm, self.size = gemm, moe_data.Operands.of(gemm, tokens)
        dtype = getattr(torch, gemm.dtype)
        self.ids = moe_data.routings(gemm.experts, gemm.top_k, tokens)
        sets = moe_data.set_count(self.size, self.ids, gpu.l2_bytes())
        self.weights = [_weights(gemm, seed) for seed in range(sets)]
        made = _generator(sets)
        shape = (self.size.x_rows, self.size.k)
        self.x = torch.empty(shape, dtype=dtype, device=gpu.DEVICE).normal_(generator=made)
        factors = (gemm.experts, 2) if gemm.gather else (gemm.experts,)
        self.factor = torch.full(factors, FACTOR, device=gpu.DEVICE)
        # GEMM 2 scatters to slots, GEMM 1 writes them sorted: as many rows.
        self.out = torch.empty((self.size.slots, self.size.columns), dtype=dtype, device=gpu.DEVICE)
        sorted_ = [moe_data.sorted_slots(ids, gemm.experts) for ids in self.ids]
        self.orders = [_put(order) for order, _ in sorted_]
        self.counts = [counts for _, counts in sorted_]
        self._tables: dict[tuple[int, int], _Tables] = {}
        self.wanted = self._run(Kernel.of(reference)).clone()

    def calls(self) -> list[tuple[int, int]]:
        """Return routing and copy of the weights of consecutive calls."""
        return [(i, j) for j in range(len(self.weights)) for i in range(len(self.ids))]

    def _table(self, routing: int, tokens: int) -> _Tables:
        key = routing, tokens
        if key not in self._tables:
            blocks = moe_data.blocks_of(self.counts[routing], tokens)
            count = _put(np.array([len(blocks)], np.int32))
            self._tables[key] = _Tables(_put(blocks), count, len(blocks))
        return self._tables[key]

    def launch(self, kernel: Kernel, routing: int, copy: int) -> None:
        """Launch one call on torch's stream."""
        import torch

        size, table = self.size, self._table(routing, kernel.about.tokens)
        codes, scales = self.weights[copy]
        pointers = (
            *(self.x, codes, scales, self.factor, None, None),
            *(self.orders[routing], table.blocks, table.count, self.out),
        )
        numbers = ALPHA_LIMIT.get(self.gemm.activation, NO_LIMIT) if self.gemm.gather else ()
        arguments = [
            *(ctypes.c_void_p(None if t is None else t.data_ptr()) for t in pointers),
            *(ctypes.c_float(number) for number in numbers),
        ]
        tiles = table.number * ceil_div(size.rows, kernel.about.rows)
        kernel.launch(arguments, tiles, torch.cuda.current_stream().cuda_stream)

    def _run(self, kernel: Kernel) -> Tensor:
        """Return the output of the first call, which was poisoned before."""
        import torch

        self.out.fill_(math.nan)
        self.launch(kernel, 0, 0)
        torch.cuda.synchronize()
        return self.out

    def differs(self, kernel: Kernel) -> str | None:
        """Return a sentence when ``kernel`` computes something else, up to rounding."""
        counts = gpu.count_wrong(self._run(kernel), self.wanted)
        return verdict(*counts, self.out.numel(), "out", ties=False)

    def times(self, kernel: Kernel, timing: Timing) -> tuple[float, ...]:
        """Return the run times of replays, per call, in seconds."""
        for routing in range(len(self.ids)):  # nothing may be copied while a graph is captured
            self._table(routing, kernel.about.tokens)
        return gpu.times(
            lambda routing, copy: self.launch(kernel, routing, copy), self.calls(), timing
        )


_held: dict[tuple[Any, int, str], _Held] = {}

KEPT = 0.6
"""Part of the GPU's memory up to which the operands of earlier workloads stay there."""


def _hold(gemm: MoeGemm, tokens: int, reference: str, anew: bool = False) -> _Held:
    """Return the operands of the workload whose default schedule is ``reference``.

    Those of earlier workloads are kept, for the tuner goes to and fro between them.
    """
    import torch

    key = gemm, tokens, reference
    memory = torch.cuda.get_device_properties(0).total_memory
    if anew or (key not in _held and torch.cuda.memory_allocated() > KEPT * memory):
        _drop()
    if key not in _held:
        _held[key] = _Held(gemm, tokens, reference)
    return _held[key]


def _drop() -> None:
    _held.clear()
    _weights.cache_clear()


def _generator(seed: int) -> Any:
    import torch

    return torch.Generator(gpu.DEVICE).manual_seed(seed)


def _put(array: Any) -> Tensor:
    import torch

    return torch.from_numpy(array).to(gpu.DEVICE)


@cache
def _weights(gemm: MoeGemm, seed: int) -> tuple[Tensor, Tensor]:
    """Return random codes and scales of all experts."""
    import torch

    size = moe_data.Operands.of(gemm, 1)
    made = _generator(seed)
    blocks = size.experts, size.rows // 64
    codes = torch.empty((*blocks, size.k // 64, 2048), dtype=torch.uint8, device=gpu.DEVICE)
    codes.random_(0, 256, generator=made)
    shape = (*blocks, size.scale_blocks, size.scale_count)
    if gemm.fmt != "int4":
        scales = torch.empty(shape, dtype=torch.uint8, device=gpu.DEVICE)
        return codes, scales.random_(*SCALES[TILE_SCALES[gemm.fmt]], generator=made)
    dtype = getattr(torch, gemm.dtype)
    scales = torch.empty(shape, dtype=dtype, device=gpu.DEVICE).uniform_(0.1, 0.5, generator=made)
    if gemm.zeros:
        scales.view(-1, 2)[:, 1].random_(0, 16, generator=made)
    return codes, scales
