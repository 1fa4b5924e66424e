"""The same kernels in the emulator: PTX of the MMA's loop as it ran, bytes loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np

from bench.tcgen05 import loops
from bench.tcgen05.kernels import (
    ENTRY,
    TIRX_BLOCK_K,
    TIRX_CONFIGS,
    TIRX_CTA_M,
    TIRX_ENTRY,
    Geometry,
    derived,
    tirx,
)
from blockscale import emulator
from blockscale.emulator.launching import front_door
from blockscale.emulator.launching.execute import Execution
from blockscale.emulator.ptx.program import successors
from blockscale.emulator.report import Report
from blockscale.lower import nvcc
from blockscale.lower.pipe.emit import emit, pointers
from blockscale.lower.pipe.kernel import THREADS
from blockscale.lower.pipe.maps import MapPlan, tensor_maps
from blockscale.specs.plans.gemm import GemmPlan

MMA, COMMIT = "tcgen05.mma", "tcgen05.commit"
SWIZZLES = {32: "32B", 64: "64B", 128: "128B"}
SMALL_STAGES = 8
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True)
class Ran:
    """One launch: its report, and how often each straight piece of PTX ran, in warps."""

    report: Report
    opcodes: list[list[str]]
    followers: list[list[int]]
    hits: list[int]

    def figures(self, geometry: Geometry) -> dict[str, Any]:
        """Return what is compared."""
        report = self.report
        flops = report.engines["tensor core"]["operations"] * geometry.mma_flops
        return {
            "seed": report.seed,
            "first_error": report.errors[0].kind if report.errors else None,
            "mmas": report.engines["tensor core"]["operations"],
            "ptx_per_mma": self.ptx_per_mma(),
            "loaded_bytes": report.engines["tma.load"]["bytes"],
            "bytes_per_flop": report.engines["tma.load"]["bytes"] / flops,
            "virtual_cycles": round(report.cycles),
        }

    def ptx_per_mma(self) -> float | None:
        """Return warp-instructions per MMA of the loop that issues MMAs; None if there is none."""

        def of(name: str) -> set[int]:
            return {i for i, ops in enumerate(self.opcodes) if any(o.startswith(name) for o in ops)}

        mma, commit = of(MMA), of(COMMIT)
        found = loops.innermost(self.followers, lambda nodes: bool(nodes & mma and nodes & commit))
        issued = sum(self.hits[i] * len(self.opcodes[i]) for nodes in found for i in nodes)
        mmas = sum(
            self.hits[i] * sum(o.startswith(MMA) for o in self.opcodes[i])
            for nodes in found
            for i in nodes
        )
        return issued / mmas if mmas else None


def ran(launch: Callable[[], Report]) -> Ran:
    """Launch a kernel with its pieces counted."""
    kept: list[Execution] = []
    hits: list[int] = []

    class Counting(Execution):
        def count(self, seconds: float) -> None:
            kept.append(self)
            hits.extend(unit.hits for unit in self.units)  # which the report's totals take away
            super().count(seconds)

    with mock.patch.object(front_door, "Execution", Counting):
        report = launch()
    units = kept[-1].units
    opcodes = [[ins.opcode for ins in unit.everything] for unit in units]
    followers = [[n for n in successors(unit) if n >= 0] for unit in units]
    return Ran(report, opcodes, followers, hits)


def run_tirx(ptx: str, size: int) -> Ran:
    """Run the first cluster of tirx-kernels' kernel, and its tiles, on scales of one.

    The kernel has the number of its clusters built in, so the other clusters' tiles stay undone.
    """
    config, shape = TIRX_CONFIGS[size], tirx(size)
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 256, (size, size // 2), dtype=np.uint8) for _ in range(2))
    scales = np.full((size // 128, size // 64, 256), 0x3838, np.uint16)  # pairs of E4M3 ones
    d = np.zeros((size, size), np.uint16)
    row = TIRX_BLOCK_K // 2
    atoms = TIRX_BLOCK_K // 64
    maps = [
        _map(a, "UINT8", (row, TIRX_CTA_M), "128B"),
        _map(b, "UINT8", (row, config.cta_n), "128B"),
        _map(d, "BFLOAT16", (config.epilogue, TIRX_CTA_M), SWIZZLES[2 * config.epilogue]),
        _map(scales, "UINT16", (256, atoms, 1), "NONE"),
        _map(scales.copy(), "UINT16", (256, atoms, 1), "NONE"),
    ]
    return ran(
        lambda: emulator.launch(
            ptx,
            entry=TIRX_ENTRY,
            grid=shape.cluster,
            block=shape.threads,
            cluster=shape.cluster,
            dynamic_smem=shape.smem_bytes,
            args=[*maps, np.ones(1, np.float32)],
        )
    )


def _map(array: np.ndarray, dtype: str, box: tuple[int, ...], swizzle: str) -> emulator.TensorMap:
    return emulator.TensorMap(
        array,
        dtype=dtype,
        global_dim=array.shape[::-1],
        global_strides_bytes=array.strides[-2::-1],
        box_dim=box,
        swizzle=swizzle,
    )


def small(plan: GemmPlan) -> tuple[GemmPlan, int]:
    """Return the plan, and the rows of a, for two tiles that one cluster computes in turn."""
    cols = plan.tile_cols * (plan.cluster_x // plan.cta_group if plan.swap else plan.cluster_y)
    rows = plan.tile_rows * (plan.cluster_y if plan.swap else plan.cluster_x // plan.cta_group)
    return replace(plan, n=2 * cols, k=SMALL_STAGES * plan.block_k), rows


def run_ours(plan: GemmPlan, seed: int = 0) -> Ran:
    """Run our kernel on two tiles of an NVFP4 GEMM with scales of one; wrong results raise."""
    plan, m = small(plan)
    rng = np.random.default_rng(seed)
    codes = {"a": rng.integers(0, 16, (m, plan.k)), "b": rng.integers(0, 16, (plan.n, plan.k))}
    given: dict[str, np.ndarray] = {}
    for name, values in codes.items():
        given[name] = (values[:, ::2] | values[:, 1::2] << 4).astype(np.uint8)
        given[f"{name}_scale"] = np.full((-(-len(values) // 128), plan.k // 64, 512), 0x38, "u1")
    given["d"] = np.full((m, plan.n), 0x7FC0, np.uint16)
    kernel = derived(plan)
    maps = [_planned_map(p, given, m) for p in tensor_maps(kernel)]
    passed = given | {"alpha": np.ones(1, np.float32), "bias": None}
    ptx = nvcc.compile_cuda_source(emit(kernel, ENTRY), "sm_100a", ptx=True).image.decode()
    found = ran(
        lambda: emulator.launch(
            ptx,
            entry=ENTRY,
            grid=kernel.cluster,
            block=THREADS,
            cluster=kernel.cluster,
            dynamic_smem=kernel.smem_bytes,
            args=[*maps, *(passed[name] for name in pointers(kernel)), np.int32(m)],
            seed=seed,
        )
    )
    want = E2M1[codes["a"]] @ E2M1[codes["b"]].T
    got = (given["d"].astype(np.uint32) << 16).view(np.float32)
    if not np.allclose(got, want, rtol=2**-8, atol=0):
        raise ValueError(f"run_ours: {plan} is wrong in the emulator with seed {seed}")
    return found


def _planned_map(plan: MapPlan, given: dict[str, np.ndarray], m: int) -> emulator.TensorMap:
    return emulator.TensorMap(
        given[plan.tensor],
        dtype=plan.dtype,
        global_dim=plan.sizes(m, -(-m // 128)),
        global_strides_bytes=plan.strides,
        box_dim=plan.box,
        swizzle=f"{plan.swizzle}B" if plan.swizzle else "NONE",
    )
