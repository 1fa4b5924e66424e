"""What the cost model sees of ops whose schedules are plans: decisions by name, and their room."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from blockscale.specs.plans import PREFIX
from blockscale.specs.plans.gemm import GemmPlan
from blockscale.specs.plans.moe import ATTRIBUTE, MoeGemm

_SIZES = ("fmt", "out_dtype", "n", "k", "experts")
"""Fields of a plan that are the workload's."""


def moe_gemm_of(mod: Any) -> MoeGemm | None:
    """Return the GEMM of an MoE layer that ``mod`` is; None if it is something else.

    It is a kernel and no function, and tuned for any sizes: they are arguments.
    """
    func = mod["main"]
    return MoeGemm.of(func) if ATTRIBUTE in (func.attrs or {}) else None


def facts_of(mod: Any) -> Callable[[Any], Mapping[str, float]] | None:
    """Return what tells the decisions of a schedule of ``mod``; None if only its trace does."""
    from blockscale.tir.gemm import tiles as gemm_tiles

    if moe_gemm_of(mod) is not None:
        return moe_facts
    return gemm_facts if gemm_tiles.PARAMS in (mod["main"].attrs or {}) else None


def gemm_facts(sch: Any) -> dict[str, float]:
    """Return the plan of a scheduled GEMM as numbers, under the keys of annotations."""
    from blockscale.lower.pipe.facts import plan

    return {f"{PREFIX}{name}": value for name, value in plan_facts(plan(sch.mod["main"])).items()}


def moe_facts(sch: Any) -> dict[str, float]:
    """Return the kernel of a scheduled GEMM of an MoE layer as numbers, likewise."""
    from blockscale.lower.warp.derive import derive

    kernel = derive(sch.mod["main"])
    names = ("rows_tile", "cols_tile", "slices", "stages", "blocks", "consumers", "stage_bytes")
    found = {name: float(getattr(kernel, name)) for name in names}
    found["wgmma"] = float(kernel.unit == "wgmma")
    return {f"{PREFIX}{name}": value for name, value in found.items()}


def plan_facts(plan: GemmPlan) -> dict[str, float]:
    """Return the decisions of ``plan`` as numbers, and what a tile of it takes."""
    decisions = {name: value for name, value in asdict(plan).items() if name not in _SIZES}
    decisions |= {"store": plan.store == "tma", "raster": plan.raster == "y"}
    room = {
        "tile_rows": plan.tile_rows,
        "tile_cols": plan.tile_cols,
        "stage_bytes": plan.stage_bytes,
        "scale_columns": plan.scale_columns,
    }
    return {name: float(value) for name, value in (decisions | room).items()}
