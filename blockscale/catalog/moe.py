"""MoE layers and their router; on a GPU a layer is two GEMMs, each a part with schedules.

An exported function of a GPU holds a pair of kernels for each of `MOE_BUCKETS` and chooses by its
number of tokens; where GEMMs multiply codes by codes, kernels of each GEMM for numbers of slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace
from tvm.tirx import PrimFunc

from blockscale.base.targets import BULK_COPIES, GPU_TARGETS, SCALED, WGMMA
from blockscale.catalog.gemm import by_warps, check_tiled, grouped_buckets, lowering, tile_facts
from blockscale.catalog.registry import (
    Body,
    Bucket,
    Road,
    Workload,
    register,
    scheduled,
    workloads,
)
from blockscale.lower.cuda import Source
from blockscale.lower.moe import codes, kernel
from blockscale.lower.pipe.maps import SPREAD_ALIGNMENT, spreads_codes
from blockscale.lower.warp import facts as warp_facts
from blockscale.lower.warp.derive import derive
from blockscale.lower.warp.kernel import Kernel
from blockscale.schedules.moe import codes as codes_schedules
from blockscale.schedules.moe import cpu, wgmma
from blockscale.schedules.moe.wgmma_tiles import expected_tokens
from blockscale.schedules.steps import Sketch
from blockscale.specs import FusedMoe, MoeRoute
from blockscale.specs.plans.moe import E4M3, MoeGemm, MoeTile
from blockscale.tir.moe.codes_tiles import moe_codes_tiles
from blockscale.tir.moe.fused_moe import ROW_TILES, fused_moe
from blockscale.tir.moe.route import moe_route
from blockscale.tir.moe.tiles import moe_tiles

_TUNED = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072)
MOE_BUCKETS = (*(Bucket(rows, rows + max(1, rows // 8)) for rows in _TUNED), Bucket(4096, None))
"""Tokens.  An expert whose tokens fill a second tile has its weights decoded twice, so widths of
tiles follow the tokens closely.  Equal kernels are one.

On an H200 128 tokens of Mixtral took 0.61 of the time that they had as the last of 64 to 160, 1024
of gpt-oss 0.64 of that among 512 to 1536.
"""

PARTS = (1, 2)
"""GEMM 1 and GEMM 2."""

WORKSPACE_ALIGNMENT = 16
"""Of the memory that a function divides: all its kernels load 16 bytes at a time."""


BYTE_TOKENS = {"mxfp4": 1.25, "nvfp4": 0.0, "int4": 20.0}
"""Tokens of an expert from which a layer that can multiplies in 8 bits, by format of the weights.

On an H200 8 bits of mxfp4 took, from 16 tokens of gpt-oss on (1.25 of an expert), 0.63 to 1.02 of
the time of 16 bits of the same layout; of int4, from 20 on, 0.78 to 1.0 of rows as they are, but
1.08 for 2048 tokens of Qwen3.  To decode eight rounded weights of nvfp4 to 16 bits takes nine
instructions more than eight exact ones: up to 1.8 times the time of 8 bits.
"""


def gemm_of(spec: FusedMoe, part: int | None, rows: int = 0, level: str = "sm_90a") -> MoeGemm:
    """Return GEMM ``part`` of a layer, in the bucket that is tuned at ``rows`` tokens."""
    first = part == 1
    gemm = MoeGemm(
        fmt=spec.fmt,
        group=spec.group,
        zeros=spec.zero,
        dtype=spec.dtype,
        activation=spec.activation if first else "none",
        experts=spec.experts,
        rows=spec.padded_rows if first else spec.padded_hidden,
        k=spec.padded_hidden if first else spec.padded_intermediate,
        top_k=spec.top_k,
        cols=0 if first else spec.hidden,
        bytewise=spec.layout == "tiles64e",
        sent=spec.sent and not first,
    )
    able = spec.by_bytes and rows > 0 and WGMMA in GPU_TARGETS[level].features
    if able and expected_tokens(gemm, rows) >= BYTE_TOKENS[spec.fmt]:
        return replace(gemm, operand=E4M3, fast=spec.fast_accum)
    return gemm


def bodies(spec: FusedMoe, level: str, traces: Mapping[str, Trace | None]) -> list[kernel.Pair]:
    """Return the scheduled GEMMs of the exported function, ascending; see `scheduled`."""
    found = scheduled(spec, level, traces)
    return [
        kernel.Pair(limit, first, second)
        for (limit, first), (_, second) in zip(found[::2], found[1::2], strict=True)
    ]


def _adopt(sch: Schedule, own: Workload, level: str, of: PrimFunc) -> None:
    """Schedule the GEMM as another one is."""
    made = derive(of)
    assert isinstance(own.spec, FusedMoe)
    wgmma.decided(sch, gemm_of(own.spec, own.part, own.rows, level), tile_of(made), made.stages)


def tile_of(made: Kernel) -> MoeTile:
    """Return the shape of a kernel's tile."""
    sizes = made.cols_tile, made.rows_tile, made.slices, made.blocks
    return MoeTile(made.unit, *sizes, partial=made.apart)


_SAME: dict[str, Any] = {"slots": False, "coded": False, "sent": False}
"""What layers may differ in that have the same GEMMs but for where results are stored."""


def _kin(spec: FusedMoe, part: int | None) -> list[FusedMoe]:
    """Return the layers whose kernels are as fast as its own.

    Those of bfloat16, which float16 differs from in a step of decoding; of the other gates; and
    those that add up their slots or quantise their rows, whose GEMMs are the same.
    """
    gates = ("swiglu", "swiglu_oai") if spec.gated else ()
    specs = [
        replace(spec, dtype="bfloat16", activation=activation, **_SAME)
        for activation in (spec.activation, *gates)
    ]
    same = spec.slots or spec.coded
    if same:
        specs.insert(0, replace(spec, **_SAME))
    own = gemm_of(spec, part)
    found = {gemm_of(spec, part): spec for spec in reversed(specs)}
    return [other for gemm, other in reversed(found.items()) if gemm != own or same]


def _cpu_buckets(spec: FusedMoe) -> tuple[Bucket, ...]:
    """Up to half a row an expert, on average: one by one; more: in pairs.

    More rows at a time want more registers than there are: 4 tokens of 8 experts, top 2, 1.46 ms in
    pairs, 1.83 ms alone; 128 tokens 37 ms, 49 ms, and by fours 53 ms (AMD EPYC, one free core).
    """
    one, two = ROW_TILES
    few = max(1, spec.experts // (2 * spec.top_k))
    return (Bucket(1, few, one), Bucket(16 * few, None, two))


def _layer(spec: FusedMoe, bucket: Bucket, level: str, rows: int | None) -> PrimFunc:
    """Return the unscheduled layer, for ``rows`` tokens or for any number of them."""
    if spec.layout != "linear":
        raise TypeError(
            f"catalog: {spec.name} has weights in layout {spec.layout}, that of CUDA kernels; take "
            "FusedMoe(layout='linear') for a CPU"
        )
    return fused_moe(spec, bucket.tile, cpu.lanes(spec, level), rows)


def _gemm_buckets(spec: FusedMoe) -> tuple[Bucket, ...]:
    check_tiled(spec)
    return tuple(replace(bucket, part=part) for bucket in MOE_BUCKETS for part in PARTS)


def _gemm_sketches(spec: FusedMoe, bucket: Bucket, level: str) -> list[Sketch]:
    return wgmma.moe_sketches(gemm_of(spec, bucket.part, bucket.rows, level), bucket.rows, level)


def _sources(spec: FusedMoe, arch: str, pairs: Sequence[kernel.Pair], name: str) -> Source:
    return kernel.sources(pairs, spec, arch)


def _codes_buckets(spec: FusedMoe) -> tuple[Bucket, ...]:
    """By slots, as a grouped GEMM has them."""
    return tuple(replace(b, part=part) for b in grouped_buckets(spec.experts) for part in PARTS)


def _codes_body(spec: FusedMoe, bucket: Bucket, level: str, slots: int | None) -> PrimFunc:
    assert bucket.part is not None
    return moe_codes_tiles(spec, bucket.part, slots)


def _codes_sketches(spec: FusedMoe, bucket: Bucket, level: str) -> list[Sketch]:
    assert bucket.part is not None
    return codes_schedules.sketches(spec, bucket.part, bucket.rows, by_warps(level))


def _codes_alignments(spec: FusedMoe) -> dict[str, int]:
    found = dict.fromkeys(("hidden", "workspace"), WORKSPACE_ALIGNMENT)
    for name, k in (("w13", spec.padded_hidden), ("w2", spec.padded_intermediate)):
        if spreads_codes(spec.product, k):
            found[name] = SPREAD_ALIGNMENT
    return found


def _codes_sources(spec: FusedMoe, arch: str, bodies: Sequence[Body], name: str) -> Source:
    parts = [workload.part for workload in workloads(spec, arch)]
    known = list(zip(parts, bodies, strict=True))
    first, second = ([body for own, body in known if own == part] for part in PARTS)
    return codes.sources(first, second, spec, arch, lowering(arch))


DECODING = Road(
    buckets=_gemm_buckets,
    body=lambda spec, bucket, level, rows: moe_tiles(
        gemm_of(spec, bucket.part, bucket.rows, level), rows
    ),
    sketches=_gemm_sketches,
    bodies=bodies,
    lower=_sources,
    facts=lambda level: warp_facts.decisions,
    needs=frozenset({BULK_COPIES}),
    alignments=lambda spec: {"workspace": WORKSPACE_ALIGNMENT},
    kin=_kin,
    adopt=_adopt,
)
"""GEMMs that decode weights to 16 bits."""

CODES = Road(
    buckets=_codes_buckets,
    body=_codes_body,
    sketches=_codes_sketches,
    lower=_codes_sources,
    facts=tile_facts,
    needs=frozenset({SCALED}),
    alignments=_codes_alignments,
)
"""GEMMs that multiply codes by codes."""

register(
    FusedMoe,
    cpu=Road(
        buckets=_cpu_buckets,
        body=_layer,
        sketches=lambda spec, bucket, level: cpu.moe_sketches(spec, level, bucket.tile),
    ),
    cuda=lambda spec: CODES if spec.layout == "128x4" else DECODING,
)
register(
    MoeRoute,
    cpu=Road(
        body=lambda spec, bucket, level, rows: moe_route(spec, rows),
        sketches=lambda spec, bucket, level: cpu.route_sketches(),
    ),
    cuda=Road(
        buckets=lambda spec: (),
        lower=lambda spec, arch, bodies, name: kernel.route_sources(spec, arch),
        needs=frozenset({BULK_COPIES}),
    ),
)
