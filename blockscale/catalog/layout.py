"""Elements between layouts."""

from __future__ import annotations

from tvm.tirx import PrimFunc

from blockscale.base.targets import CPU_TARGETS
from blockscale.catalog.registry import CPU_COLS, CUDA_COLS, Bucket, Road, register
from blockscale.schedules.layout import cpu, gpu
from blockscale.schedules.steps import Sketch
from blockscale.specs import Relayout
from blockscale.tir.layout.plan import Plan, cpu_plans, gpu_plans
from blockscale.tir.layout.relayout import tiles


def relayout_shape(spec: Relayout, cols: int) -> tuple[int, ...]:
    """Shape of the static instance's plain tensor.

    Of ``cols`` columns: 16 MiB, of weights or of scales, on a CPU; on a GPU 64 MiB, more than an L2
    cache.
    """
    rows = cols // 2
    return (2 * rows, cols) if len(spec.symbols) == 2 else (2, rows, cols)


def _plans(spec: Relayout, level: str) -> list[Plan]:
    return cpu_plans(spec.map, CPU_TARGETS[level].lane_bits)


def _lanes(spec: Relayout, bucket: Bucket, level: str, shape: tuple[int, ...] | None) -> PrimFunc:
    return tiles(spec, _plans(spec, level), True, shape)


def _threads(spec: Relayout, bucket: Bucket, level: str, shape: tuple[int, ...] | None) -> PrimFunc:
    return tiles(spec, gpu_plans(spec.map), False, shape)


def _cpu_sketches(spec: Relayout, bucket: Bucket, level: str) -> list[Sketch]:
    return cpu.relayout_sketches(spec, _plans(spec, level))


register(
    Relayout,
    cpu=Road(
        body=_lanes,
        sketches=_cpu_sketches,
        tuned=lambda spec, bucket: relayout_shape(spec, CPU_COLS),
    ),
    cuda=Road(
        body=_threads,
        sketches=lambda spec, bucket, level: gpu.relayout_sketches(spec, gpu_plans(spec.map)),
        tuned=lambda spec, bucket: relayout_shape(spec, CUDA_COLS),
    ),
)
