"""MoE layers on a GPU: the two GEMMs of each size bucket, their search spaces, the plans that won.

A layer's `MoeWorkload` is one GEMM at a number of tokens.  An exported function holds a pair of
kernels for each of `MOE_BUCKETS` and chooses by its number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import tvm
from tvm.s_tir import Schedule, ScheduleError
from tvm.s_tir.schedule import Trace

from blockscale.catalog.bucket import Bucket
from blockscale.lower.moe.kernel import check_target
from blockscale.lower.moe.read import read
from blockscale.schedules.moe import wgmma as sm90
from blockscale.schedules.steps import Sketch, preferred, sampled
from blockscale.specs import FusedMoe
from blockscale.specs.plans.moe import MoeGemm, MoePlan
from blockscale.tir.moe.tiles import moe_tiles

MOE_BUCKETS = (Bucket(1, 2), Bucket(8, 24), Bucket(64, 160), Bucket(512, 1536), Bucket(4096, None))
"""Tokens: one expert each, several experts, tokens that meet in an expert, many."""

PARTS = (1, 2)
"""GEMM 1 and GEMM 2."""


class MoeBucket(NamedTuple):
    """The kernels for up to ``limit`` tokens; None: for any number."""

    limit: int | None
    gemm1: MoePlan
    gemm2: MoePlan


@dataclass(frozen=True)
class MoeWorkload:
    """GEMM ``part`` of a layer at ``rows`` tokens: what is tuned, logged and looked up."""

    spec: FusedMoe
    rows: int
    part: int

    @property
    def op(self) -> str:
        """Name of the op, which is its log folder."""
        return self.spec.op

    @property
    def tag(self) -> str:
        """The spec's name with the part and the number of tokens."""
        return f"{self.spec.name}_gemm{self.part}_m{self.rows}"

    @property
    def labels(self) -> dict[str, int]:
        """What a log says of it besides its spec and rows."""
        return {"part": self.part}

    @property
    def any_size(self) -> bool:
        """Whether `mod` serves any sizes: what is measured is what is shipped."""
        return True

    def measuring(self, library: str, timing: Any, reference: str) -> Any:
        """Return the job that measures a candidate, for the tuner."""
        from blockscale.tuning.moe import gpu as moe_gpu

        return moe_gpu.measure, (library, self.gemm, self.rows, timing, reference)

    @property
    def gemm(self) -> MoeGemm:
        """What is computed."""
        return gemm_of(self.spec, self.part)

    @property
    def kin(self) -> list[MoeWorkload]:
        """Workloads whose schedules serve this one where it has none: kernels as fast as its own.

        Those of bfloat16, which float16 differs from in a step of decoding; and of the other gates.
        """
        gates = ("swiglu", "swiglu_oai") if self.spec.gated else ()
        specs = [
            replace(self.spec, dtype="bfloat16", activation=activation)
            for activation in (self.spec.activation, *gates)
        ]
        found = {gemm_of(spec, self.part): spec for spec in reversed(specs)}
        others = [spec for gemm, spec in found.items() if gemm != self.gemm]
        return [replace(self, spec=spec) for spec in reversed(others)]

    def limit(self, level: str) -> int | None:
        """Return the most tokens that the exported function gives to this schedule."""
        return next(bucket.limit for bucket in MOE_BUCKETS if bucket.rows == self.rows)

    def mod(self, level: str) -> tvm.IRModule:
        """Return the unscheduled function ``main``, which names the number of tokens."""
        return tvm.IRModule({"main": moe_tiles(self.gemm, self.rows)})

    def symbolic(self, level: str) -> tvm.IRModule:
        """Return the unscheduled function ``main``: its sizes are symbols, too."""
        return tvm.IRModule({"main": moe_tiles(self.gemm)})

    def sketches(self, level: str) -> list[Sketch]:
        """Return the sketches, the one of the default schedule first."""
        return sm90.moe_sketches(self.gemm, self.rows, level)

    def space(self, level: str) -> Callable[[Schedule], list[Schedule]]:
        """Return the space function: one schedule per sketch, with sampled decisions."""
        sketches = self.sketches(level)

        def space(sch: Schedule) -> list[Schedule]:
            results = []
            for sketch in sketches:
                candidate = Schedule(
                    sch.mod,  # it shares no IfThenElse with others: there is none
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
        self.sketches(level)[0](sch, preferred)


def gemm_of(spec: FusedMoe, part: int) -> MoeGemm:
    """Return GEMM ``part`` of a layer."""
    first = part == 1
    return MoeGemm(
        fmt=spec.fmt,
        group=spec.group,
        zeros=spec.zero,
        dtype=spec.dtype,
        activation=spec.activation if first else "none",
        experts=spec.experts,
        rows=spec.padded_rows if first else spec.padded_hidden,
        k=spec.padded_hidden if first else spec.padded_intermediate,
        top_k=spec.top_k,
    )


def workloads(spec: FusedMoe, level: str) -> list[MoeWorkload]:
    """Return both GEMMs of all buckets, smallest first.

    Raises:
        TypeError: there is no such kernel for ``level``, or for the layout of the weights.
    """
    check_target(spec, level)
    return [MoeWorkload(spec, bucket.rows, part) for bucket in MOE_BUCKETS for part in PARTS]


def buckets(spec: FusedMoe, level: str, traces: Mapping[str, Trace | None]) -> list[MoeBucket]:
    """Return the kernels of the exported function, ascending; equal neighbours are one bucket.

    ``traces`` maps a workload's tag to the trace that won; None or absent: the default schedule.
    """
    plans = {(w.rows, w.part): _plan(w, level, traces.get(w.tag)) for w in workloads(spec, level)}
    found: list[MoeBucket] = []
    for bucket in MOE_BUCKETS:
        first, second = (plans[bucket.rows, part] for part in PARTS)
        if found and found[-1][1:] == (first, second):
            found.pop()
        found.append(MoeBucket(bucket.limit, first, second))
    return found


def _plan(workload: MoeWorkload, level: str, trace: Trace | None) -> MoePlan:
    """Return the plan of a trace (of the workload or one of its kin), or of the default."""
    if trace is None:
        sch = Schedule(workload.symbolic(level))
        workload.default(sch, level)
        return read(sch.mod["main"]).check()
    own = workload.gemm
    *others, last = (workload, *workload.kin)
    for candidate in others:
        with suppress(ScheduleError):
            return _replayed(candidate, level, trace, own)
    return _replayed(last, level, trace, own)


def _replayed(workload: MoeWorkload, level: str, trace: Trace, own: MoeGemm) -> MoePlan:
    """Return the plan of a workload's trace, for the GEMM ``own``."""
    sch = Schedule(workload.symbolic(level), debug_mask="none", error_render_level="fast")
    trace.apply_to_schedule(sch, remove_postproc=False)
    plan = read(sch.mod["main"])
    return replace(plan, dtype=own.dtype, activation=own.activation).check()
