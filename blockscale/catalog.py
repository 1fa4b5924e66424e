"""From a spec to TensorIR: which row buckets a function has, their search spaces, the function exported.

A `Workload` is one static instance that MetaSchedule tunes: a spec at a row count.  An exported
function takes any number of rows; it holds one scheduled body per bucket and chooses by the row count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
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
from blockscale.tir.linear import linear
from blockscale.tir.quantize import quantize
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
        raise ValueError(f"target: level={level!r} is not one of {list(TARGETS)}; choose one of them")
    return Target({"kind": "llvm", **TARGETS[level]})


@dataclass(frozen=True)
class Bucket:
    """A range of row counts that share a schedule: up to ``limit`` rows, tuned at ``rows``."""

    rows: int
    limit: int | None
    row_tile: int


LINEAR_BUCKETS = (Bucket(1, 1, 1), Bucket(4, 4, 4), Bucket(16, 48, 8), Bucket(128, None, 12))
"""Decode (one row), a few rows, small batches, prefill."""

MEMORY_BUCKET = Bucket(512, None, 1)
"""The memory-bound ops have one schedule, tuned on 512 rows of `TUNED_COLS` columns."""

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
    bodies: list[tuple[int | None, tirx.PrimFunc]] = []
    for bucket in _buckets(spec):
        workload = Workload(spec, bucket.rows)
        sch = Schedule(_module(spec, bucket.rows, level, static=False))
        trace = traces.get(workload.tag)
        if trace is None:
            workload.default(sch, level)
        else:
            trace.apply_to_schedule(sch, remove_postproc=False)
        bodies.append((bucket.limit, sch.mod["main"]))
    func = bodies[0][1] if len(bodies) == 1 else _dispatch(bodies)
    return tvm.IRModule({spec.name: func.with_attr("global_symbol", spec.name)})


def flops(workload: Workload) -> int:
    """Multiplications and additions of one call."""
    spec = workload.spec
    return 2 * workload.rows * spec.n * spec.k if isinstance(spec, Linear) else 0


def _buckets(spec: Spec) -> tuple[Bucket, ...]:
    return LINEAR_BUCKETS if isinstance(spec, Linear) else (MEMORY_BUCKET,)


def _bucket(spec: Spec, rows: int) -> Bucket:
    for bucket in _buckets(spec):
        if bucket.rows == rows:
            return bucket
    known = [bucket.rows for bucket in _buckets(spec)]
    raise ValueError(f"Workload: rows={rows} is no bucket of {spec.name}; its buckets are {known}")


def _compute(spec: Linear, bucket: Bucket, level: str) -> str:
    """Bfloat16 products where the CPU has them, they are exact, and lanes run along n."""
    fits = spec.dtype == "bfloat16" and spec.fmt == "nvfp4" and level == "avx512bf16"
    return "bfloat16" if fits and cpu.uses_panels(spec, level, bucket.row_tile) else "float32"


def _module(spec: Spec, rows: int, level: str, static: bool) -> tvm.IRModule:
    bucket = _bucket(spec, rows)
    cols = TUNED_COLS if static else None
    fixed = rows if static else None
    if isinstance(spec, Linear):
        func = linear(spec, bucket.row_tile, _compute(spec, bucket, level), rows=fixed)
    elif isinstance(spec, Quantize):
        func = quantize(spec, fixed, cols)
    elif isinstance(spec, Dequantize):
        func = dequantize(spec, fixed, cols)
    elif isinstance(spec, Swizzle):
        func = swizzle(spec, fixed, cols)
    elif isinstance(spec, Unswizzle):
        func = unswizzle(spec, fixed, cols)
    elif isinstance(spec, ScaleSweep):
        func = scale_sweep(spec, rows * TUNED_COLS // spec.block_size if static else None)
    else:
        raise TypeError(f"catalog: {type(spec).__name__} has no TensorIR; add its op to catalog.py")
    return tvm.IRModule({"main": func})


def _sketches(spec: Spec, rows: int, level: str) -> list[Sketch]:
    bucket = _bucket(spec, rows)
    if isinstance(spec, Linear):
        return cpu.linear_sketches(spec, level, bucket.row_tile, _compute(spec, bucket, level))
    if isinstance(spec, Quantize):
        return cpu_elementwise.quantize_sketches(spec, level)
    if isinstance(spec, Dequantize):
        return cpu_elementwise.dequantize_sketches(spec, level)
    if isinstance(spec, ScaleSweep):
        return cpu_elementwise.scale_sweep_sketches(spec, level)
    return cpu_elementwise.copy_sketches(spec.op)


def _dispatch(bodies: list[tuple[int | None, tirx.PrimFunc]]) -> tirx.PrimFunc:
    """Join functions of one signature: the first whose row limit fits runs."""
    first = bodies[0][1]
    rows = first.params[0].shape[0]
    body = None
    for limit, func in reversed(bodies):
        mapping = dict(zip(func.params, first.params, strict=True))
        mapping[func.params[0].shape[0]] = rows
        renamed = tvm_ffi.structural_map(
            func.body, (tirx.Var, lambda var, m=mapping: m.get(var, var))
        )
        body = renamed if body is None else tirx.IfThenElse(rows <= limit, renamed, body)
    return first.with_body(body)
