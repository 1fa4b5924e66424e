"""Measuring the GEMMs of MoE layers on a GPU: random routings, weights that come from memory.

A candidate is one kernel, launched by the driver.  Calls in a CUDA graph go round over routings and
copies of the weights; the output of the first call is compared with that of the default schedule.
"""

from __future__ import annotations

import ctypes
import json
import math
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blockscale.base import formats
from blockscale.base.sizes import ceil_div, round_up
from blockscale.specs.plans.moe import ATTRIBUTE, MoeGemm
from blockscale.tuning import gpu, worker
from blockscale.tuning.worker import TILE_SCALES, Argument, Measurement, Timing

if TYPE_CHECKING:
    from torch import Tensor

KERNEL = "moe_gemm"
"""Name of the kernel in its machine code."""

FACTOR = 2.0**-6
"""Global scale: sums are about 1, so that activations are not linear."""

ROUTINGS, OTHERS = {1: 16, 8: 4, 64: 4}, 3
"""Random routings by tokens, and for other numbers.

More than one for many tokens, too: the fullest expert may just fit into a tile, or not.  With 512
tokens and 8 experts a GEMM took 190 us or 350 us.
"""

ALPHA_LIMIT = {"swiglu_oai": (1.702, 7.0)}
NO_LIMIT = (1.0, float.fromhex("0x1.fffffep+127"))

_MAX_DYNAMIC_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""


def gemm_of(mod: Any) -> MoeGemm | None:
    """Return the GEMM of an MoE layer that ``mod`` is; None if it is something else.

    It is a kernel and no function, and tuned for any sizes: they are arguments.
    """
    func = mod["main"]
    return MoeGemm.of(func) if ATTRIBUTE in (func.attrs or {}) else None


def measure(
    library: str, gemm: MoeGemm, tokens: int, timing: Timing, reference: str
) -> Measurement:
    """Run the kernel that ``library`` names, compare with that of ``reference``, time it."""
    return gpu.judged(partial(Held, gemm, tokens), library, timing, reference)


class Launch(NamedTuple):
    """What a launch needs: the tile, threads, dynamic shared memory in bytes."""

    rows: int
    tokens: int
    threads: int
    shared: int


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel and what its launch needs."""

    about: Launch
    function: ctypes.c_void_p
    resident: int
    """CTAs that the device holds."""

    @staticmethod
    @cache
    def of(library: str) -> Kernel:
        """Load the kernel that a candidate's file has."""
        import torch

        torch.cuda.current_stream()  # there is a context
        told, _, image = Path(library).read_bytes().partition(b"\n")
        about = Launch(**json.loads(told))
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


class Held(worker.Held):
    """Operands of one workload on the GPU, and random routings."""

    def __init__(self, gemm: MoeGemm, tokens: int, reference: str) -> None:
        import torch

        self.xp, self.gemm = torch, gemm
        self.ids = routings(gemm.experts, gemm.top_k, tokens)
        told = operands(gemm, tokens)
        touched, size = weight_bytes(gemm, told, self.ids)
        sets = gpu.set_count(touched, size, gpu.l2_bytes(), len(self.ids))
        counts = (1, sets, sets, *(1 for _ in told[3:]))
        made = map(gpu.filled, told, counts, range(len(told)))
        [self.x], codes, scales, [self.factor], [row_scale], [self.out] = made
        self.row_scale = row_scale if gemm.operand else None
        self.weights = list(zip(codes, scales, strict=True))
        sorted_ = [sorted_slots(ids, gemm.experts) for ids in self.ids]
        self.orders = [_put(order) for order, _ in sorted_]
        self._counts = [counts for _, counts in sorted_]
        self.tables: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        super().__init__(told[-1:], reference)

    def calls(self) -> list[tuple[int, int]]:
        """Return routing and copy of the weights of consecutive calls."""
        return [(i, j) for j in range(len(self.weights)) for i in range(len(self.ids))]

    def table(self, routing: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Return the blocks of a routing for tiles of some tokens, and their number."""
        key = routing, tokens
        if key not in self.tables:
            blocks = blocks_of(self._counts[routing], tokens)
            self.tables[key] = _put(blocks), _put(np.array([len(blocks)], np.int32))
        return self.tables[key]

    def load(self, library: str) -> Kernel:
        """Return the kernel that a candidate's file names."""
        return Kernel.of(library)

    def launch(self, kernel: Kernel, routing: int, copy: int) -> None:
        """Launch one call on torch's stream."""
        import torch

        blocks, count = self.table(routing, kernel.about.tokens)
        pointers = (
            *(self.x, *self.weights[copy], self.factor, None, self.row_scale),
            *(self.orders[routing], blocks, count, self.out),
        )
        numbers = ALPHA_LIMIT.get(self.gemm.activation, NO_LIMIT) if self.gemm.gather else ()
        arguments = [
            *(ctypes.c_void_p(None if t is None else t.data_ptr()) for t in pointers),
            *(ctypes.c_float(number) for number in numbers),
        ]
        tiles = len(blocks) * ceil_div(self.gemm.rows, kernel.about.rows)
        kernel.launch(arguments, tiles, torch.cuda.current_stream().cuda_stream)

    def run(self, function: Kernel) -> list[Any]:
        """Return the output of the first call."""
        import torch

        gpu.poison(self.out)
        self.launch(function, 0, 0)
        torch.cuda.synchronize()
        return [self.out.clone()]

    def times(self, function: Kernel, timing: Timing) -> tuple[float, ...]:
        """Return the run times of replays, per call, in seconds."""
        for routing in range(len(self.ids)):  # nothing may be copied while a graph is captured
            self.table(routing, function.about.tokens)
        return gpu.times(partial(self.launch, function), self.calls(), timing)


def _put(array: Any) -> Tensor:
    import torch

    return torch.from_numpy(array).to(gpu.DEVICE)


# ---- What it is measured on; nothing here uses a GPU


def operands(gemm: MoeGemm, tokens: int) -> list[Argument]:
    """Return x, codes, scales, global factors, scales of rows and the output of ``gemm``.

    GEMM 2 scatters to slots, GEMM 1 writes them sorted: as many rows.  Rows of E4M3 are bytes.
    """
    slots, blocks = tokens * gemm.top_k, (gemm.experts, gemm.rows // 64)
    rows = tokens if gemm.gather else slots
    groups = ceil_div(gemm.k, max(64, gemm.group))
    scales = 4 * gemm.scales * (2 if gemm.fmt == "int4" else 1)
    factors = (gemm.experts, 2) if gemm.gather else (gemm.experts,)
    if gemm.bytewise:
        factors = (gemm.experts, gemm.rows)
    x = ("uint8", formats.E4M3.storage) if gemm.operand else (gemm.dtype, None)
    return [
        Argument("x", x[0], (rows, gemm.k), False, x[1]),
        Argument("packed", "uint8", (*blocks, gemm.k // 64, 2048), False, None),
        Argument("block_scale", "uint8", (*blocks, groups, scales), False, TILE_SCALES[gemm.fmt]),
        Argument("factor", "float32", factors, False, None, value=FACTOR),
        Argument("row_scale", "float32", (rows,), False, None, value=1.0),
        Argument("out", gemm.dtype, (slots, gemm.columns), True, None),
    ]


def weight_bytes(gemm: MoeGemm, made: list[Argument], calls: list[np.ndarray]) -> tuple[int, int]:
    """Return bytes of codes and scales: what these calls read of them, and all.

    Calls with one token share no expert; of others one may read what another has read.
    """
    size = sum(math.prod(each.shape or ()) for each in made[1:3])
    touched = [np.unique(ids).size for ids in calls]
    experts = sum(touched) if len(calls[0]) == 1 else min(touched)
    return experts * size // gemm.experts, size


def routings(experts: int, top_k: int, tokens: int) -> list[np.ndarray]:
    """Return ids [tokens, top_k] of consecutive calls, uniform and distinct for each token.

    Calls with one token share no expert until every expert had its turn.
    """
    rng = np.random.default_rng(tokens)
    count = ROUTINGS.get(tokens, OTHERS)
    if tokens == 1:
        order = rng.permutation(experts)[: experts // top_k * top_k].reshape(-1, 1, top_k)
        return [ids.astype(np.int32) for ids in order[:count]]
    scores = rng.random((count, tokens, experts))
    return [ids.astype(np.int32) for ids in np.argsort(scores, axis=2)[:, :, :top_k]]


def sorted_slots(ids: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return flat slots by expert [slots] int32, and how many each expert has."""
    flat = ids.reshape(-1)
    order = np.argsort(flat, kind="stable").astype(np.int32)
    return order, np.bincount(flat, minlength=experts)


def blocks_of(counts: np.ndarray, tokens: int) -> np.ndarray:
    """Return the blocks of at most ``tokens`` sorted slots [blocks, 4] int32 of all experts.

    Of an expert they are as even as multiples of 8 are: (expert << 16 | rows, first slot, the
    expert's first block, its number of blocks), as native/moe_sort.cuh has them.
    """
    found: list[tuple[int, int, int, int]] = []
    first = 0
    for expert, count in enumerate(counts.tolist()):
        number = ceil_div(count, tokens)
        size = round_up(ceil_div(count, number), 8) if number else 0
        begin = len(found)
        for i in range(number):
            rows = min(size, count - i * size)
            found.append((expert << 16 | rows, first + i * size, begin, number))
        first += count
    return np.array(found, np.int32).reshape(-1, 4)
