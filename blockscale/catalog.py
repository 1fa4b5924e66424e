"""From a spec to TensorIR: a function's row buckets, their search spaces, the function exported.

A `Workload` is one static instance that MetaSchedule tunes: a spec at a row count.  An exported
function takes any number of rows; it holds one scheduled body per bucket and chooses by the row
count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace
from tvm.target import Target

from blockscale.schedules import cpu, cpu_elementwise
from blockscale.schedules._steps import Sketch, preferred, sampled
from blockscale.specs import (
    Dequantize,
    Linear,
    Quantize,
    ScaleSweep,
    Spec,
    Swizzle,
    Unswizzle,
)
from blockscale.tir.dequantize import dequantize
from blockscale.tir.layouts import BlockGrid
from blockscale.tir.linear import linear
from blockscale.tir.quantize import TILE, quantize
from blockscale.tir.scale_sweep import scale_sweep
from blockscale.tir.swizzle import swizzle, unswizzle

TARGETS: dict[str, dict[str, Any]] = {
    "avx512bf16": {"mcpu": "x86-64-v4", "mattr": ["+avx512bf16"]},
    "avx512": {"mcpu": "x86-64-v4"},
    "avx2": {"mcpu": "x86-64-v3"},
    "plain": {},
}
"""LLVM options by CPU level (`blockscale.host.level`)."""


def target(level: str) -> Target:
    """Return the TVM target of CPU ``level``; ValueError for an unknown level."""
    if level not in TARGETS:
        raise ValueError(
            f"target: level={level!r} is not one of {list(TARGETS)}; choose one of them"
        )
    return Target({"kind": "llvm", **TARGETS[level]})


@dataclass(frozen=True)
class Bucket:
    """A range of sizes that share a schedule.

    It ends at ``limit`` (None: no end), is computed in tiles of ``tile`` and tuned at ``rows``.
    The size is the number of rows (linear), or of blocks in a run (`layouts.BlockGrid`).
    """

    rows: int
    limit: int | None
    tile: int


LINEAR_BUCKETS = (Bucket(1, 1, 1), Bucket(4, 4, 4), Bucket(16, 48, 8), Bucket(128, None, 12))
"""Decode (one row), a few rows, small batches, prefill."""

BLOCK_BUCKETS = (Bucket(1, TILE - 1, 1), Bucket(512, None, TILE))
"""Runs too short for a tile of blocks, and all others."""

COPY_BUCKETS = (Bucket(512, None, 1),)
"""One schedule for every size."""

TUNED_COLS = 4096
"""Columns of the static instance on which an op with any number of columns is tuned."""


@dataclass(frozen=True)
class Workload:
    """One static instance of a spec: what is tuned, logged and looked up."""

    spec: Spec
    rows: int

    @property
    def op(self) -> str:
        """Name of the op, which is its log folder."""
        return self.spec.op

    @property
    def tag(self) -> str:
        """For example ``linear_nvfp4_n384_k384_f32_m16``."""
        return f"{self.spec.name}_m{self.rows}"

    @property
    def limit(self) -> int | None:
        """Largest size that the exported function gives to this schedule (see `Bucket`)."""
        return _bucket(self.spec, self.rows).limit

    def mod(self, level: str) -> tvm.IRModule:
        """Return the unscheduled function ``main`` with static shapes."""
        return _module(self.spec, self.rows, level, static=True)

    def space(self, level: str) -> Callable[[Schedule], list[Schedule]]:
        """Return the space function: one schedule per sketch, with sampled decisions."""

        def space(sch: Schedule) -> list[Schedule]:
            results = []
            for sketch in _sketches(self.spec, self.rows, level):
                candidate = sch.copy()
                sketch(candidate, sampled)
                results.append(candidate)
            return results

        return space

    def default(self, sch: Schedule, level: str) -> None:
        """Schedule ``sch`` without search: the first sketch with its preferred decisions."""
        _sketches(self.spec, self.rows, level)[0](sch, preferred)


def workloads(spec: Spec) -> list[Workload]:
    """Return the row buckets of ``spec``, smallest first."""
    return [Workload(spec, bucket.rows) for bucket in _buckets(spec)]


def exported(spec: Spec, level: str, traces: Mapping[str, Trace | None]) -> tvm.IRModule:
    """Return the module of the exported function ``spec.name``: any number of rows, every bucket.

    ``traces`` maps a workload's tag to the trace that won; None or absent: the default schedule.
    """
    bodies = []
    for bucket in _buckets(spec):
        workload = Workload(spec, bucket.rows)
        sch = Schedule(symbolic(spec, bucket.rows, level))
        trace = traces.get(workload.tag)
        if trace is None:
            workload.default(sch, level)
        else:
            trace.apply_to_schedule(sch, remove_postproc=False)
        bodies.append((bucket.limit, sch.mod["main"]))
    func = _dispatch(spec, bodies)
    return tvm.IRModule({spec.name: func.with_attr("global_symbol", spec.name)})


def symbolic(spec: Spec, rows: int, level: str) -> tvm.IRModule:
    """Return the unscheduled function ``main`` of the bucket tuned at ``rows``, for any sizes."""
    return _module(spec, rows, level, static=False)


def _buckets(spec: Spec) -> tuple[Bucket, ...]:
    if isinstance(spec, Linear):
        return LINEAR_BUCKETS
    return BLOCK_BUCKETS if isinstance(spec, Quantize | Dequantize) else COPY_BUCKETS


def _bucket(spec: Spec, rows: int) -> Bucket:
    for bucket in _buckets(spec):
        if bucket.rows == rows:
            return bucket
    known = [bucket.rows for bucket in _buckets(spec)]
    raise ValueError(f"Workload: rows={rows} is no bucket of {spec.name}; its buckets are {known}")


def _compute(spec: Linear, bucket: Bucket, level: str) -> str:
    """Bfloat16 products where the CPU has them, they are exact, and lanes run along n."""
    fits = spec.dtype == "bfloat16" and spec.fmt == "nvfp4" and level == "avx512bf16"
    return "bfloat16" if fits and cpu.uses_panels(spec, level, bucket.tile) else "float32"


def _module(spec: Spec, rows: int, level: str, static: bool) -> tvm.IRModule:
    bucket = _bucket(spec, rows)
    shape = (rows, _tuned_cols(spec, bucket)) if static else None
    if isinstance(spec, Linear):
        compute = _compute(spec, bucket, level)
        func = linear(spec, bucket.tile, compute, rows=rows if static else None)
    elif isinstance(spec, Quantize):
        func = quantize(spec, bucket.tile, shape)
    elif isinstance(spec, Dequantize):
        func = dequantize(spec, bucket.tile, shape)
    elif isinstance(spec, Swizzle):
        func = swizzle(spec, shape)
    elif isinstance(spec, Unswizzle):
        func = unswizzle(spec, shape)
    elif isinstance(spec, ScaleSweep):
        func = scale_sweep(spec, rows * TUNED_COLS // spec.block_size if static else None)
    else:
        raise TypeError(f"catalog: {type(spec).__name__} has no TensorIR; add its op to catalog.py")
    return tvm.IRModule({"main": func})


def _tuned_cols(spec: Spec, bucket: Bucket) -> int:
    """Columns of the static instance of a memory-bound op: its largest below the bucket's limit."""
    if bucket.limit is None or not isinstance(spec, Quantize | Dequantize):
        return TUNED_COLS
    return bucket.limit * spec.block


def _sketches(spec: Spec, rows: int, level: str) -> list[Sketch]:
    bucket = _bucket(spec, rows)
    if isinstance(spec, Linear):
        return cpu.linear_sketches(spec, level, bucket.tile, _compute(spec, bucket, level))
    if isinstance(spec, Quantize):
        return cpu_elementwise.quantize_sketches(spec, level, bucket.tile)
    if isinstance(spec, Dequantize):
        return cpu_elementwise.dequantize_sketches(spec, level, bucket.tile)
    if isinstance(spec, ScaleSweep):
        return cpu_elementwise.scale_sweep_sketches(spec, level)
    return cpu_elementwise.swizzle_sketches()


def _dispatch(spec: Spec, bodies: list[tuple[int | None, tirx.PrimFunc]]) -> tirx.PrimFunc:
    """Join functions of one signature: the first whose limit is not exceeded runs."""
    first = bodies[0][1]
    size = _size(spec, first)
    body = None
    for limit, func in reversed(bodies):
        same = _same_names(func, first)
        renamed = tvm_ffi.structural_map(func.body, (tirx.Var, lambda var, m=same: m.get(var, var)))
        body = renamed if body is None else tirx.IfThenElse(size <= limit, renamed, body)
    return first.with_body(body)


def _size(spec: Spec, func: tirx.PrimFunc) -> PrimExpr:
    """What the buckets of ``spec`` limit, in the symbols of ``func``."""
    shapes = {param.name: param.shape for param in func.params}
    if isinstance(spec, Quantize | Dequantize):
        rows, cols = shapes["x" if isinstance(spec, Quantize) else "out"]
        return BlockGrid(spec.block, TILE, spec.layout == "128x4").blocks(rows, cols)
    return func.params[0].shape[0]


def _same_names(func: tirx.PrimFunc, first: tirx.PrimFunc) -> dict[tirx.Var, Any]:
    """Parameters and shape symbols of ``func``, with what they are in ``first``."""
    mapping = dict(zip(func.params, first.params, strict=True))
    for old, new in zip(func.params, first.params, strict=True):
        for old_size, new_size in zip(old.shape, new.shape, strict=True):
            if isinstance(old_size, tirx.Var):
                mapping[old_size] = new_size
    return mapping
