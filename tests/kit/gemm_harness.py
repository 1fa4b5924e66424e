"""Run the kernel of a `GemmPlan` or `SyncPlan` in the emulator, and judge it against float64.

Operands are random, scales of padded rows NaN, and memory behind the output is watched: a kernel
that lets either matter is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import tvm

from blockscale import emulator
from blockscale.building.space import new_schedule
from blockscale.lower.nvcc import compile_cuda_source
from blockscale.lower.pipe.emit import pointers
from blockscale.lower.pipe.host import TCGEN05, Lowering
from blockscale.lower.pipe.kernel import Kernel
from blockscale.lower.pipe.maps import MapPlan, tensor_maps
from blockscale.lower.sync.emit import SCALED_MMA
from blockscale.schedules.gemm import sync, tcgen05
from blockscale.specs.plans.gemm import OUT_BYTES, GemmPlan
from blockscale.specs.plans.sync import SyncPlan
from blockscale.tir.gemm.tiles import gemm_tiles
from tests.reference import core as ref

GUARD_ROWS = 3
SWIZZLE_NAMES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}
UNWRITTEN = {"float32": 0x7FC12345, "bfloat16": 0x7FC1, "float16": 0x7E01}
"""A NaN that no arithmetic makes."""

NAN_BYTE = {"e4m3": 0x7F, "ue8m0": 0xFF}


def plan(**changes: Any) -> GemmPlan:
    """Return a plan with these decisions; all others are plain ones."""
    base: dict[str, Any] = {
        "fmt": "nvfp4", "out_dtype": "float32", "n": 256, "k": 512, "experts": 0, "swap": False,
        "cta_group": 1, "mma_n": 128, "block_k": 128, "stages": 3, "cluster_x": 1, "cluster_y": 1,
        "split_k": 1, "acc_stages": 2, "epi_cols": 32, "store": "direct", "raster": "x", "group": 1,
    }  # fmt: skip
    base |= changes
    base["cluster_x"] = max(base["cluster_x"], base["cta_group"])
    return GemmPlan(**base).check()


def sync_plan(**changes: Any) -> SyncPlan:
    """Return a plan for mma.sync with these decisions; all others are plain ones."""
    base: dict[str, Any] = {
        "fmt": "nvfp4", "out_dtype": "float32", "n": 256, "k": 512, "experts": 0, "swap": False,
        "mma_n": 128, "block_k": 128, "stages": 2, "epi_cols": 32, "store": "direct",
        "raster": "x", "group": 1,
    }  # fmt: skip
    made = SyncPlan(**base | changes)
    assert made.illegal() is None, made.illegal()
    return made


Plan = GemmPlan | SyncPlan

_unscheduled = cache(gemm_tiles)


def way(of: Plan) -> tuple[Any, Lowering, str]:
    """Return the schedule of a plan, its lowering, and an architecture."""
    if isinstance(of, SyncPlan):
        return sync.decided, SCALED_MMA, "sm_120a"
    return tcgen05.decided, TCGEN05, "sm_100a"


@cache
def kernel(of: Plan) -> Kernel:
    """Return the kernel that is derived from the schedule of a plan."""
    func = _unscheduled(of.fmt, of.out_dtype, of.n, of.k, of.experts)
    sch = new_schedule(tvm.IRModule({"main": func}))
    decided, how, _ = way(of)
    decided(sch, of)
    return how.kernel(sch.mod["main"])


def text(of: Plan) -> str:
    """Return the CUDA text of a plan's kernel."""
    return way(of)[1].emit(kernel(of), "gemm")


@cache
def ptx(of: Plan) -> str:
    """Return the PTX of a plan's kernel; M is not in it."""
    return compile_cuda_source(text(of), way(of)[2], ptx=True).image.decode()


@dataclass(frozen=True)
class Operand:
    """Codes as they are stored, scales in the 128x4 layout, and the float64 values [rows, k]."""

    stored: np.ndarray
    scale: np.ndarray
    value: np.ndarray


def operand(
    rng: np.random.Generator, bits: int, scale: str, block: int, rows: Sequence[int], k: int
) -> Operand:
    """Return random rows in groups, of which each starts at a new 128x4 tile of scales."""
    count = sum(rows)
    if bits == 4:
        codes = rng.integers(0, 16, (count, k), dtype=np.uint8)
        stored, value = codes[:, 0::2] | codes[:, 1::2] << 4, ref.e2m1_decode(codes)
    else:
        stored = rng.integers(0, 256, (count, k), dtype=np.uint8)
        stored[stored & 0x7F == 0x7F] = 0x31
        value = ref.e4m3_decode(stored)
    low, high, decode = (
        (0x18, 0x50, ref.e4m3_decode) if scale == "e4m3" else (121, 134, ref.ue8m0_decode)
    )
    factor = rng.integers(low, high, (count, k // block)).astype(np.uint8)
    parts = np.split(factor, np.cumsum(rows)[:-1])
    laid_out = [atoms(part, NAN_BYTE[scale]) for part in parts]
    return Operand(stored, np.concatenate(laid_out), value * np.repeat(decode(factor), block, 1))


def atoms(scale: np.ndarray, padding: int) -> np.ndarray:
    """Return scales [rows, columns] as 128x4 tiles [row tiles, column tiles, 512].

    Padded rows hold ``padding``, padded columns 0.
    """
    rows, columns = scale.shape
    full = np.full((-(-rows // 128) * 128, -(-columns // 4) * 4), padding, np.uint8)
    full[:rows] = 0
    full[:rows, :columns] = scale
    parts = full.reshape(len(full) // 128, 4, 32, full.shape[1] // 4, 4)
    return np.ascontiguousarray(parts.transpose(0, 3, 2, 1, 4)).reshape(
        len(full) // 128, full.shape[1] // 4, 512
    )


def tensor_map(of: MapPlan, array: np.ndarray, m: int, row_atoms: int) -> Any:
    """Return the emulator's map of `array`."""
    return emulator.TensorMap(
        array,
        dtype=of.dtype,
        global_dim=of.sizes(m, row_atoms),
        global_strides_bytes=of.strides,
        box_dim=of.box,
        swizzle=SWIZZLE_NAMES[of.swizzle],
    )


@dataclass
class Outcome:
    """What a kernel wrote: float64 [m, n], what it should be, the bits behind, and the report."""

    got: np.ndarray
    want: np.ndarray
    behind: np.ndarray
    report: Any

    def row_errors(self) -> np.ndarray:
        """Return the relative error of each row; NaN where an element was not written."""
        length = np.sqrt((self.want**2).sum(1))
        return np.sqrt(((self.got - self.want) ** 2).sum(1)) / np.maximum(length, 1e-300)


def clusters_of(of: Plan, rows: Sequence[int]) -> int:
    """Return the number of tiles of the clusters of a plan."""
    along_x, along_y = (1, 1) if isinstance(of, SyncPlan) else (of.cluster_x, of.cluster_y)
    row_tile = of.mma_n * along_y if of.swap else 128 * along_x
    col_tile = 128 * along_x if of.swap else of.mma_n * along_y
    return sum(-(-count // row_tile) for count in rows) * -(-of.n // col_tile)


def decode(out: np.ndarray, dtype: str) -> np.ndarray:
    """Return stored bits as float64."""
    if dtype == "bfloat16":
        return (out.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return out.view({"float16": np.float16, "float32": np.float32}[dtype]).astype(np.float64)


def encoded(value: np.ndarray, dtype: str) -> np.ndarray:
    """Return the bits of values that ``dtype`` has."""
    if dtype == "bfloat16":
        return ref.bf16_bits(value.astype(np.float32))
    bits = {"float16": np.uint16, "float32": np.uint32}[dtype]
    return value.astype(dtype).view(bits)


def launch(
    of: Kernel, text: str, named: dict[str, Any], m: int, clusters: int, seed: int = 0
) -> Any:
    """Run the kernel ``of`` in PTX on arrays by parameter; return the emulator's report."""
    row_atoms = len(named["a_scale"])
    maps = [tensor_map(p, named[p.tensor], m, row_atoms) for p in tensor_maps(of)]
    given = [named[name] for name in pointers(of)] + ([named["offsets"]] if of.experts else [])
    given += [np.float32(named[str(var.name)]) for var in of.scalars]
    return emulator.launch(
        text, entry="gemm", grid=clusters * of.cluster, block=of.threads, cluster=of.cluster,
        dynamic_smem=of.smem_bytes, args=[*maps, *given, m], seed=seed,
    )  # fmt: skip


def run(
    of: Plan,
    rows: int | Sequence[int],
    *,
    seed: int = 0,
    bias: bool = False,
    alpha: bool = False,
    clusters: int = 2,
    spare: int = 0,
) -> Outcome:
    """Run the kernel on ``rows`` of a (of each expert), with at most ``clusters`` clusters.

    With experts, ``spare`` more rows of a belong to none of them; those of d are to stay as they
    are.
    """
    fmt, experts = of.format, max(1, of.experts)
    groups = [rows] if isinstance(rows, int) else list(rows)
    rng, used = np.random.default_rng(seed + sum(groups) + of.n), sum(groups)
    m = used + spare
    taken = [max(g, not of.experts) for g in groups]  # a map has no empty dimension
    a = operand(rng, fmt.a.bits, fmt.scale.name, fmt.block, [*taken, spare], of.k)
    b = operand(rng, fmt.b.bits, fmt.scale.name, fmt.block, [of.n] * experts, of.k)
    scales = rng.uniform(0.25, 4, experts).astype(np.float32) if alpha else None
    shift = rng.normal(0, 30, of.n).astype(np.float32) if bias else None
    starts = np.concatenate([[0], np.cumsum(groups)]).astype(np.int32)
    bits = np.uint32 if OUT_BYTES[of.out_dtype] == 4 else np.uint16
    out = np.full((m + GUARD_ROWS, of.n), UNWRITTEN[of.out_dtype], bits)
    named = {"a": a.stored, "b": b.stored, "a_scale": a.scale, "b_scale": b.scale}
    named |= {"d": out, "alpha": scales, "bias": shift, "offsets": starts}
    tiles = clusters_of(of, groups)
    limit = max(1, tiles if isinstance(of, GemmPlan) and of.split_k > 1 else min(tiles, clusters))
    report = launch(kernel(of), ptx(of), named, m, limit, seed)
    want = np.zeros((used, of.n))
    for e in range(experts):
        own = slice(starts[e], starts[e + 1])
        want[own] = a.value[own] @ b.value[e * of.n : (e + 1) * of.n].T
        want[own] *= 1 if scales is None else float(scales[e])
    want += 0 if shift is None else shift
    return Outcome(decode(out[:used], of.out_dtype), want, out[used:], report)


def judge(of: Plan, result: Outcome) -> None:
    """Fail unless the kernel is right and its run had no errors and no warnings."""
    result.report.check()
    assert not result.report.hazards, "\n".join(map(str, result.report.hazards))
    assert (result.behind == UNWRITTEN[of.out_dtype]).all(), "rows behind d were written"
    if of.out_dtype == "float32":
        error = result.row_errors()
        assert (error < 1e-5).all(), f"row {error.argmax()}: relative error {error.max()}"
        return
    # float32 sums differ from float64 by less than 1e-6 of the row: that much beside the middle of
    # two neighbours either is right
    slack = 1e-6 * np.sqrt((result.want**2).mean(1, keepdims=True))
    low, high = (rounded(result.want + s, of.out_dtype) for s in (-slack, slack))
    wrong = ~((result.got >= low) & (result.got <= high))
    assert not wrong.any(), f"{wrong.sum()} wrong, the first at {np.argwhere(wrong)[0]}"


def rounded(value: np.ndarray, dtype: str) -> np.ndarray:
    """Return the nearest values of ``dtype``."""
    with np.errstate(over="ignore"):  # to infinity, as the kernel does
        return decode(encoded(value, dtype), dtype)
