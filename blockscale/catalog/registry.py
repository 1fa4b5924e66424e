"""From a spec to TensorIR and its code: the road that an op registers for a kind of target.

A `Workload` is one static instance that MetaSchedule tunes: a spec at a row count.  An exported
function takes any number of rows; it holds one scheduled body per bucket and chooses by the size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.s_tir import Schedule, ScheduleError
from tvm.s_tir.schedule import Trace
from tvm.target import Target
from tvm.tirx import PrimFunc
from tvm.tirx.buffer import BufferType

from blockscale.base.targets import gpu, having, is_gpu
from blockscale.lower import cpu as lower_cpu
from blockscale.lower import cuda as lower_cuda
from blockscale.schedules.steps import Drawing, Sketch, preferred, sampled, unshared
from blockscale.specs import Spec


@dataclass(frozen=True)
class Bucket:
    """A range of sizes that share a schedule.

    It ends at ``limit`` (None: no end), is computed in tiles of ``tile`` and tuned at ``rows``.
    The size is the number of rows, or of blocks in a run (`layouts.BlockGrid`), see `Road.size`.
    Where a function is several kernels, each is a ``part`` with buckets of its own.
    """

    rows: int
    limit: int | None
    tile: int = 1
    part: int | None = None


Body = tuple[int | None, PrimFunc]
"""A scheduled function, and the largest size that it is for; None: any."""

CPU_ROWS, CUDA_ROWS = 512, 8192
CPU_COLS, CUDA_COLS = 4096, 8192
"""Of the static instance on which an op for any number of them is tuned."""


def _nothing(*_: Any) -> Any:
    raise AssertionError("a road without buckets has nothing to schedule")


Facts = Callable[[Schedule], Mapping[str, float]]
"""What tells the decisions of a schedule by name."""


@dataclass(frozen=True, kw_only=True)
class Road:
    """How the kernels of an op come about on a kind of target.

    Attributes:
        buckets: spec -> its size buckets, smallest first, none where no search chooses anything;
            None: one for every size.
        body: spec, bucket, level, size of the static instance (None: any sizes) -> the unscheduled
            function.
        sketches: spec, bucket, level -> the sketches, the one of the default schedule first.
        tuned: spec, bucket -> size of the static instance, as ``body`` takes it.
        size: spec, function -> what the buckets limit, in the function's symbols.
        bodies: spec, level, traces by tag -> what ``lower`` takes: `Body`s, ascending.
        lower: spec, architecture, bodies, name -> host and device code; None: by TVM's passes.
        facts: level -> what tells the decisions of a schedule by name, where they are a plan; None:
            its trace does.
        sizes: spec, rows -> what symbols of its parameters' shapes are in the instance for so many
            rows; None: what they are in ``body``, which is not of whole tiles.
        needs: features of `base.targets` without which there is no such kernel.
        alignments: spec -> bytes of which a parameter's address is a multiple, if more than usual.
        kin: spec, part -> specs whose schedules serve this one where it has none.
        adopt: schedule, workload, level, a scheduled function of its kin -> nothing; schedules
            likewise.
    """

    buckets: Callable[[Any], Sequence[Bucket]] | None = None
    body: Callable[[Any, Bucket, str, Any], PrimFunc] = _nothing
    sketches: Callable[[Any, Bucket, str], list[Sketch]] = _nothing
    tuned: Callable[[Any, Bucket], Any] = lambda spec, bucket: bucket.rows
    size: Callable[[Any, PrimFunc], PrimExpr] = lambda spec, func: func.params[0].shape[0]
    bodies: Callable[[Any, str, Mapping[str, Trace | None]], Sequence[Any]] = (
        lambda spec, level, traces: scheduled(spec, level, traces)
    )
    lower: Callable[[Any, str, Sequence[Any], str], lower_cuda.Source] | None = None
    facts: Callable[[str], Facts | None] = lambda level: None
    sizes: Callable[[Any, int], Mapping[str, int]] | None = None
    needs: frozenset[str] = frozenset()
    alignments: Callable[[Any], dict[str, int]] = lambda spec: {}
    kin: Callable[[Any, int | None], Sequence[Spec]] = lambda spec, part: ()
    adopt: Callable[[Schedule, Workload, str, PrimFunc], None] = _nothing


Roads = Road | Callable[[Any], Road]
"""A road, or which one a spec takes."""

ROADS: dict[tuple[type[Spec], str], Roads] = {}
"""By spec and kind of target, "cpu" or "cuda"."""


def register(op: type[Spec], *, cpu: Roads | None = None, cuda: Roads | None = None) -> None:
    """Say how kernels of ``op`` come about."""
    for kind, own in (("cpu", cpu), ("cuda", cuda)):
        if own is not None:
            ROADS[op, kind] = own


def road(spec: Spec, level: str) -> Road:
    """Return the road of ``spec`` to ``level``, a CPU level or a GPU's architecture.

    Raises:
        TypeError: there is none, or ``level`` lacks what it needs.
    """
    found = ROADS.get((type(spec), "cuda" if is_gpu(level) else "cpu"))
    if found is None:
        if is_gpu(level):
            raise TypeError(
                f"{spec.name}: there is no GPU kernel of {spec.op} yet; build it for a CPU level"
            )
        raise TypeError(
            f"catalog: {type(spec).__name__} has no TensorIR; register its op in blockscale/catalog"
        )
    if not isinstance(found, Road):
        found = found(spec)
    for feature in found.needs:
        if feature not in gpu(level).features:
            raise TypeError(
                f"{spec.name}: there is no kernel of {spec.op} for {level}, which has no "
                f"{feature}; build it for {', '.join(having(feature))}, or for a CPU level"
            )
    return found


def buckets(spec: Spec, level: str) -> Sequence[Bucket]:
    """Return the size buckets of ``spec`` on ``level``, smallest first."""
    own = road(spec, level).buckets
    if own is None:
        return (Bucket(CUDA_ROWS if is_gpu(level) else CPU_ROWS, None),)
    return own(spec)


def target(level: str) -> Target:
    """Return the TVM target of ``level``; ValueError for an unknown one."""
    return lower_cuda.target(level) if is_gpu(level) else lower_cpu.target(level)


@dataclass(frozen=True)
class Workload:
    """One static instance of a spec, or of a part of it: what is tuned, logged and looked up."""

    spec: Spec
    rows: int
    part: int | None = None

    @property
    def op(self) -> str:
        """Name of the op, which is its log folder."""
        return self.spec.op

    @property
    def tag(self) -> str:
        """For example ``linear_nvfp4_n384_k384_f32_m16``; a part is a GEMM, as ``_gemm1_m16``."""
        part = "" if self.part is None else f"_gemm{self.part}"
        return f"{self.spec.name}{part}_m{self.rows}"

    def entry(self) -> dict[str, Any]:
        """Return what a log's meta.json says of it; `logged` reads it."""
        part = {} if self.part is None else {"part": self.part}
        return {"spec": self.spec.to_json(), "rows": self.rows, **part}

    def target(self, level: str) -> Target:
        """Return the TVM target of ``level``."""
        return target(level)

    def bucket(self, level: str) -> Bucket:
        """Return the bucket that this is an instance of; ValueError if there is none."""
        known = buckets(self.spec, level)
        for bucket in known:
            if (bucket.rows, bucket.part) == (self.rows, self.part):
                return bucket
        raise ValueError(
            f"Workload: rows={self.rows} is no bucket of {self.spec.name}; its buckets are "
            f"{[bucket.rows for bucket in known]}"
        )

    def limit(self, level: str) -> int | None:
        """Return the largest size that the exported function gives to this schedule."""
        return self.bucket(level).limit

    def kin(self, level: str) -> list[Workload]:
        """Return the workloads whose schedules serve this one where it has none."""
        return [
            replace(self, spec=spec) for spec in road(self.spec, level).kin(self.spec, self.part)
        ]

    def mod(self, level: str) -> tvm.IRModule:
        """Return the unscheduled function ``main`` with static shapes."""
        return self._module(level, static=True)

    def symbolic(self, level: str) -> tvm.IRModule:
        """Return the unscheduled function ``main`` for any sizes."""
        return self._module(level, static=False)

    def _module(self, level: str, static: bool) -> tvm.IRModule:
        own, bucket = road(self.spec, level), self.bucket(level)
        size = own.tuned(self.spec, bucket) if static else None
        return tvm.IRModule({"main": own.body(self.spec, bucket, level, size)})

    def sketches(self, level: str) -> list[Sketch]:
        """Return the sketches, the one of the default schedule first."""
        return road(self.spec, level).sketches(self.spec, self.bucket(level), level)

    def facts(self, level: str) -> Facts | None:
        """Return what tells the decisions of a schedule; None if only its trace does."""
        return road(self.spec, level).facts(level)

    def sizes(self, level: str, mod: tvm.IRModule) -> dict[str, int]:
        """Return what symbols of the parameters' shapes are in the static instance ``mod``.

        Raises:
            TypeError: some depend on more than the rows of one rank.
        """
        told = road(self.spec, level).sizes
        if told is not None:
            return dict(told(self.spec, self.rows))
        pairs = zip(self.spec.params(), mod["main"].params, strict=True)
        dims = [pair for p, v in pairs if p.dims for pair in zip(p.dims, v.shape, strict=True)]
        if any(isinstance(size, tirx.Var) for _, size in dims):
            raise TypeError(
                f"{self.spec.name}: its sizes depend on a group of ranks, so that it cannot be "
                "measured, or tuned, alone; it is built in its default schedule"
            )
        return dict(filter(None, (dim.solve(int(size)) for dim, size in dims)))

    def space(self, level: str) -> Callable[[Schedule], list[Schedule]]:
        """Return the space function: one schedule per sketch, with sampled decisions."""
        sketches = self.sketches(level)

        def space(sch: Schedule) -> list[Schedule]:
            results = []
            for sketch in sketches:
                candidate = Drawing(unshared(sch.mod), sch.fork_seed())
                sketch(candidate, sampled)
                results.append(candidate)
            return results

        return space

    def default(self, sch: Schedule, level: str) -> None:
        """Schedule ``sch`` without search: the first sketch with its preferred decisions."""
        self.sketches(level)[0](sch, preferred)


def workloads(spec: Spec, level: str) -> list[Workload]:
    """Return the workloads of ``spec`` on ``level``, smallest first.

    Raises:
        TypeError: see `road`; or the layout of its weights is not the one for ``level``.
    """
    return [Workload(spec, bucket.rows, bucket.part) for bucket in buckets(spec, level)]


def logged(entry: Mapping[str, Any]) -> Workload:
    """Return the workload that an entry of a log's meta.json describes."""
    return Workload(Spec.from_json(entry["spec"]), entry["rows"], entry.get("part"))


def exported(spec: Spec, level: str, traces: Mapping[str, Trace | None]) -> tvm.IRModule:
    """Return the module of the exported function ``spec.name``: any number of rows, every bucket.

    ``traces`` maps a workload's tag to the trace that won; None or absent: the default schedule.
    """
    func = _dispatch(spec, level, scheduled(spec, level, traces))
    return tvm.IRModule({spec.name: func.with_attr("global_symbol", spec.name)})


def scheduled(spec: Spec, level: str, traces: Mapping[str, Trace | None]) -> list[Body]:
    """Return the bucket's limits and functions for any number of rows; see `exported`."""
    found = workloads(spec, level)
    made: dict[Hashable, PrimFunc] = {}
    return [(work.limit(level), _body(work, level, traces.get(work.tag), made)) for work in found]


def _body(
    workload: Workload, level: str, trace: Trace | None, made: dict[Hashable, PrimFunc]
) -> PrimFunc:
    """Return the function in the schedule of a trace (the workload's or its kin's), or default.

    ``made``: functions in default schedules, of which several buckets may have the same.
    """
    if trace is None:
        mod, sketch = workload.symbolic(level), workload.sketches(level)[0]
        key = mod["main"], _decided(sketch)
        if key not in made:
            sch = Schedule(mod)
            sketch(sch, preferred)
            made[key] = sch.mod["main"]
        return made[key]
    *others, last = (workload, *workload.kin(level))
    for candidate in others:
        with suppress(ScheduleError):
            return _replayed(candidate, level, trace, workload)
    return _replayed(last, level, trace, workload)


def _decided(sketch: Sketch) -> Hashable:
    """Return what two sketches have in common that do the same."""
    if not isinstance(sketch, partial):
        return sketch
    return sketch.func, repr(sketch.args), repr(sorted(sketch.keywords.items()))


def _replayed(candidate: Workload, level: str, trace: Trace, own: Workload) -> PrimFunc:
    """Return the function of ``own`` in the schedule that a trace is of ``candidate``."""
    sch = Schedule(candidate.symbolic(level), debug_mask="none", error_render_level="fast")
    trace.apply_to_schedule(sch, remove_postproc=False)
    if candidate.spec == own.spec:
        return sch.mod["main"]
    adopted = Schedule(own.symbolic(level))
    road(own.spec, level).adopt(adopted, own, level, sch.mod["main"])
    return adopted.mod["main"]


def cuda_source(spec: Spec, arch: str, traces: Mapping[str, Trace | None]) -> lower_cuda.Source:
    """Return host and device code of the exported function ``spec.name``; see `exported`."""
    own = road(spec, arch)
    if own.lower is not None:
        return own.lower(spec, arch, own.bodies(spec, arch, traces), spec.name)
    return lower_cuda.sources(exported(spec, arch, traces)[spec.name], spec.name, arch)


def _dispatch(spec: Spec, level: str, bodies: list[Body]) -> PrimFunc:
    """Join functions of one signature: the first whose limit is not exceeded runs."""
    first = bodies[0][1]
    size = road(spec, level).size(spec, first)
    body = None
    for limit, func in reversed(bodies):
        same = _same_names(func, first)
        renamed = tvm_ffi.structural_map(func.body, (tirx.Var, lambda var, m=same: m.get(var, var)))
        body = renamed if body is None else tirx.IfThenElse(size <= limit, renamed, body)
    return first.with_body(body)


def _same_names(func: PrimFunc, first: PrimFunc) -> dict[tirx.Var, Any]:
    """Parameters and shape symbols of ``func``, with what they are in ``first``."""
    mapping = dict(zip(func.params, first.params, strict=True))
    tensors = [var for var in func.params if isinstance(var.ty, BufferType)]
    for old, new in zip(tensors, (mapping[var] for var in tensors), strict=True):
        for old_size, new_size in zip(old.shape, new.shape, strict=True):
            if isinstance(old_size, tirx.Var):
                mapping[old_size] = new_size
    return mapping
