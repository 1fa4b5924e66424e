"""From a spec to TensorIR: a function's size buckets, their search spaces, the function exported.

A `Workload` is one static instance that MetaSchedule tunes: a spec at a row count.  An exported
function takes any number of rows; it holds one scheduled body per bucket and chooses by the size.
What is special to a kind of target is in `catalog_cpu` and `catalog_gpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace
from tvm.target import Target
from tvm.tirx.buffer import BufferType

from blockscale.base.targets import is_gpu
from blockscale.catalog import cpu as catalog_cpu
from blockscale.catalog import gpu as catalog_gpu
from blockscale.catalog import moe as catalog_moe
from blockscale.catalog.bucket import Bucket
from blockscale.catalog.moe import MoeWorkload
from blockscale.lower import cuda
from blockscale.lower.gemm import kernel as gemm
from blockscale.lower.int4 import kernel as int4
from blockscale.lower.int4 import plan as int4_plan
from blockscale.lower.moe import kernel as moe
from blockscale.schedules.steps import preferred, sampled, unshared
from blockscale.specs import FusedMoe, Int4Mm, MoeRoute, Spec


def of(level: str) -> ModuleType:
    """Return the catalog of the kind of target that ``level`` is: a CPU level or a GPU's name."""
    return catalog_gpu if is_gpu(level) else catalog_cpu


def target(level: str) -> Target:
    """Return the TVM target of ``level``; ValueError for an unknown one."""
    return of(level).target(level)


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

    def bucket(self, level: str) -> Bucket:
        """Return the bucket that this is an instance of; ValueError if there is none."""
        buckets = of(level).buckets(self.spec)
        for bucket in buckets:
            if bucket.rows == self.rows:
                return bucket
        raise ValueError(
            f"Workload: rows={self.rows} is no bucket of {self.spec.name}; its buckets are "
            f"{[bucket.rows for bucket in buckets]}"
        )

    def limit(self, level: str) -> int | None:
        """Return the largest size that the exported function gives to this schedule."""
        return self.bucket(level).limit

    def mod(self, level: str) -> tvm.IRModule:
        """Return the unscheduled function ``main`` with static shapes."""
        return self._module(level, static=True)

    def symbolic(self, level: str) -> tvm.IRModule:
        """Return the unscheduled function ``main`` for any sizes."""
        return self._module(level, static=False)

    def _module(self, level: str, static: bool) -> tvm.IRModule:
        return of(level).module(self.spec, self.bucket(level), level, static)

    def space(self, level: str) -> Callable[[Schedule], list[Schedule]]:
        """Return the space function: one schedule per sketch, with sampled decisions."""
        sketches = of(level).sketches(self.spec, self.bucket(level), level)

        def space(sch: Schedule) -> list[Schedule]:
            results = []
            for sketch in sketches:
                candidate = Schedule(
                    unshared(sch.mod),
                    seed=sch.fork_seed(),
                    debug_mask="none",
                    error_render_level="fast",
                )
                sketch(candidate, sampled)
                results.append(candidate)
            return results

        return space

    def default(self, sch: Schedule, level: str) -> None:
        """Schedule ``sch`` without search: the first sketch with its preferred decisions."""
        of(level).sketches(self.spec, self.bucket(level), level)[0](sch, preferred)


def workloads(spec: Spec, level: str) -> Sequence[Workload | MoeWorkload]:
    """Return the size buckets of ``spec`` on ``level``, smallest first; of MoE both GEMMs."""
    if isinstance(spec, FusedMoe) and is_gpu(level):
        return catalog_moe.workloads(spec, level)
    return [Workload(spec, bucket.rows) for bucket in of(level).buckets(spec)]


def logged(entry: Mapping[str, Any]) -> Workload | MoeWorkload:
    """Return the workload that an entry of a log's meta.json describes."""
    spec = Spec.from_json(entry["spec"])
    if isinstance(spec, FusedMoe) and "part" in entry:
        return MoeWorkload(spec, entry["rows"], entry["part"])
    return Workload(spec, entry["rows"])


def exported(spec: Spec, level: str, traces: Mapping[str, Trace | None]) -> tvm.IRModule:
    """Return the module of the exported function ``spec.name``: any number of rows, every bucket.

    ``traces`` maps a workload's tag to the trace that won; None or absent: the default schedule.
    """
    func = _dispatch(spec, level, scheduled(spec, level, traces))
    return tvm.IRModule({spec.name: func.with_attr("global_symbol", spec.name)})


def scheduled(
    spec: Spec, level: str, traces: Mapping[str, Trace | None]
) -> list[tuple[int | None, tirx.PrimFunc]]:
    """Return the bucket's limits and functions for any number of rows; see `exported`."""
    bodies = []
    for workload in workloads(spec, level):
        sch = Schedule(workload.symbolic(level))
        trace = traces.get(workload.tag)
        if trace is None:
            workload.default(sch, level)
        else:
            trace.apply_to_schedule(sch, remove_postproc=False)
        bodies.append((workload.limit(level), sch.mod["main"]))
    return bodies


def cuda_source(spec: Spec, arch: str, traces: Mapping[str, Trace | None]) -> cuda.Source:
    """Return host and device code of the exported function ``spec.name``; see `exported`."""
    if catalog_gpu.has_tensor_memory(spec):
        bodies = scheduled(spec, arch, traces)
        return gemm.sources(bodies, spec.name, arch, [param.name for param in spec.params()])
    if isinstance(spec, FusedMoe):
        return moe.sources(catalog_moe.buckets(spec, arch, traces), spec, arch)
    if isinstance(spec, MoeRoute):
        return moe.route_sources(spec, arch)
    if isinstance(spec, Int4Mm):
        int4.check_target(spec, arch)
        return int4.sources(int4_plan.plans(spec, arch), spec, arch)
    return cuda.sources(exported(spec, arch, traces)[spec.name], spec.name, arch)


def _dispatch(
    spec: Spec, level: str, bodies: list[tuple[int | None, tirx.PrimFunc]]
) -> tirx.PrimFunc:
    """Join functions of one signature: the first whose limit is not exceeded runs."""
    first = bodies[0][1]
    size = of(level).size(spec, first)
    body = None
    for limit, func in reversed(bodies):
        same = _same_names(func, first)
        renamed = tvm_ffi.structural_map(func.body, (tirx.Var, lambda var, m=same: m.get(var, var)))
        body = renamed if body is None else tirx.IfThenElse(size <= limit, renamed, body)
    return first.with_body(body)


def _same_names(func: tirx.PrimFunc, first: tirx.PrimFunc) -> dict[tirx.Var, Any]:
    """Parameters and shape symbols of ``func``, with what they are in ``first``."""
    mapping = dict(zip(func.params, first.params, strict=True))
    tensors = [var for var in func.params if isinstance(var.ty, BufferType)]
    for old, new in zip(tensors, (mapping[var] for var in tensors), strict=True):
        for old_size, new_size in zip(old.shape, new.shape, strict=True):
            if isinstance(old_size, tirx.Var):
                mapping[old_size] = new_size
    return mapping
