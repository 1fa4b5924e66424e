"""`kernel.Kernel` -> `GemmPlan`: what the model of a B200 and the cost model see of a kernel."""

from __future__ import annotations

from dataclasses import asdict

from tvm.s_tir import Schedule
from tvm.tirx import PrimFunc

from blockscale.base.formats import GEMM
from blockscale.lower.pipe.check import checked
from blockscale.lower.pipe.derive import derive
from blockscale.lower.pipe.kernel import Kernel
from blockscale.specs.plans import PREFIX
from blockscale.specs.plans.gemm import RASTERS, GemmPlan
from blockscale.tir.intrin import tcgen05

_SIZES = ("fmt", "out_dtype", "n", "k", "experts")
"""Fields of a plan that are the workload's."""


def decisions(sch: Schedule) -> dict[str, float]:
    """Return the plan of a scheduled GEMM as numbers, under the keys of annotations."""
    return named(plan(sch.mod["main"]))


def named(plan: GemmPlan) -> dict[str, float]:
    """Return the decisions of ``plan`` as numbers, and what a tile of it takes, likewise."""
    found = {name: value for name, value in asdict(plan).items() if name not in _SIZES}
    found |= {"store": plan.store == "tma", "raster": plan.raster == "y"}
    found |= {name: getattr(plan, name) for name in ("tile_rows", "tile_cols")}
    found |= {name: getattr(plan, name) for name in ("stage_bytes", "scale_columns")}
    return {f"{PREFIX}{name}": float(value) for name, value in found.items()}


def plan(func: PrimFunc) -> GemmPlan:
    """Return the decisions of a scheduled `gemm_tiles`.

    Raises:
        LoweringError: it is no such schedule.
    """
    return facts(checked(derive(func)))


def facts(kernel: Kernel) -> GemmPlan:
    """Return a kernel's decisions."""
    epilogue, x, y = kernel.epilogue, kernel.mma.x_format, kernel.mma.y_format
    a, b = (y, x) if kernel.swap else (x, y)
    fmt = next(
        name
        for name, row in GEMM.items()
        if kernel.mma.function.endswith(f"_{row.kind}")
        and (tcgen05.element_format(row.kind, row.a), tcgen05.element_format(row.kind, row.b))
        == (a, b)
    )
    return GemmPlan(
        fmt=fmt,
        out_dtype=kernel.out.dtype,
        n=kernel.cols,
        k=(kernel.views["a"].dims[-1].extent or 0) * GEMM[fmt].a.per_byte,
        experts=kernel.experts,
        swap=kernel.swap,
        cta_group=kernel.group,
        mma_n=kernel.mma.n,
        block_k=kernel.stage_k,
        stages=kernel.stages,
        cluster_x=kernel.cluster_x,
        cluster_y=kernel.cluster_y,
        split_k=kernel.split,
        acc_stages=kernel.acc_stages,
        epi_cols=epilogue.columns,
        store="tma" if epilogue.stores else "direct",
        raster=RASTERS[not kernel.raster_x],
        group=kernel.band,
    )
