"""Times of block-scaled GEMMs on NVIDIA B200 that others have published."""

from __future__ import annotations

from dataclasses import dataclass

from bench.tcgen05.kernels import pair
from blockscale.lower.gemm_plan import GemmPlan

TIRX = "github.com/mlc-ai/tirx-kernels, bench_suite/baseline.md of 2026-08-07"
DEEPGEMM = "github.com/deepseek-ai/DeepGEMM, pull request 348"
FLASHINFER = "github.com/flashinfer-ai/flashinfer, pull request 1979"


@dataclass(frozen=True)
class Point:
    """One published time of a whole kernel.

    Attributes:
        kernel: whose.
        us: microseconds, or those that follow from the published FLOP/s.
        plan: the plan nearest to the kernel's own; None where its tiles are not known, and the
            model's best plan stands for it.
        fitted: whether the model's fitted numbers saw it.
    """

    kernel: str
    fmt: str
    out_dtype: str
    m: int
    n: int
    k: int
    us: float
    source: str
    plan: GemmPlan | None = None
    fitted: bool = True

    @property
    def shape(self) -> str:
        """``M x N x K``."""
        same = self.m == self.n == self.k
        return f"{self.m}³" if same else f"{self.m} x {self.n} x {self.k}"


def tirx_plan(size: int, mma_n: int, stages: int, epi_cols: int, group: int) -> GemmPlan:
    """Return the plan nearest to tirx-kernels' NVFP4 GEMM for ``size`` cubed.

    A pair of CTAs, one accumulator, K 256 in a stage, a TMA store, no multicast.
    """
    return pair(size, mma_n, stages, 1, epi_cols, group)


_TIRX_PLANS = {
    1024: tirx_plan(1024, 128, 5, 32, 12),
    2048: tirx_plan(2048, 256, 5, 32, 4),
    4096: tirx_plan(4096, 256, 5, 32, 4),
    8192: tirx_plan(8192, 256, 4, 16, 1),
    16384: tirx_plan(16384, 256, 4, 16, 12),
}

_CUBES = {  # size: tirx-kernels, cuBLASLt, FlashInfer's choice
    1024: (5.43, 4.46, 4.52),
    2048: (8.53, 7.63, 7.58),
    4096: (29.6, 27.7, 28.9),
    8192: (186.0, 178.0, 178.0),
    16384: (1527.0, 1456.0, 1431.0),
}

_DEEPGEMM = {  # M, N, K: TFLOP/s of DeepGEMM, of cuBLASLt, float32 output
    (128, 2048, 7168): (328, 338),
    (128, 24576, 1536): (980, 745),
    (512, 2048, 7168): (1178, 1422),
    (512, 7168, 2048): (1439, 1190),
    (1024, 7168, 2048): (2056, 1399),
    (4096, 4096, 7168): (5332, 3939),
    (8192, 8192, 8192): (5702, 5239),
}


def points() -> list[Point]:
    """Return all points: those that the fit saw first, by kernel and size."""
    found = []
    for column, kernel in enumerate(("tirx-kernels", "cuBLASLt", "FlashInfer")):
        for size, times in _CUBES.items():
            plan = _TIRX_PLANS[size] if column == 0 else None
            shape = (size, size, size)
            found.append(Point(kernel, "nvfp4", "bfloat16", *shape, times[column], TIRX, plan))
    for (m, n, k), rates in _DEEPGEMM.items():
        us = 2e-6 * m * n * k / max(rates)
        kernel = "DeepGEMM" if rates[0] >= rates[1] else "cuBLASLt"
        found.append(Point(kernel, "mxfp4", "float32", m, n, k, us, DEEPGEMM, fitted=False))
    us = 2e-6 * 1024 * 7168 * 4608 / 3370
    found.append(
        Point("CUTLASS", "nvfp4", "bfloat16", 1024, 7168, 4608, us, FLASHINFER, fitted=False)
    )
    return found
