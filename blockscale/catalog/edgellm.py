"""The decode passes of Edge-LLM's MoE layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blockscale.catalog.registry import Road, register
from blockscale.schedules.edgellm import cpu, gpu
from blockscale.specs import EdgeDown, EdgeUp
from blockscale.tir.edgellm.passes import edge_down, edge_up
from blockscale.tir.edgellm.passes_threads import down_rows, up_rows


def _roads(cpu_body: Callable[[Any], Any], cuda_body: Callable[[Any], Any]) -> dict[str, Road]:
    return {
        "cpu": Road(
            body=lambda spec, bucket, level, rows: cpu_body(spec),
            sketches=lambda spec, bucket, level: cpu.sketches(spec, level),
        ),
        "cuda": Road(
            body=lambda spec, bucket, level, rows: cuda_body(spec),
            sketches=lambda spec, bucket, level: gpu.sketches(spec),
        ),
    }


register(EdgeUp, **_roads(edge_up, up_rows))
register(EdgeDown, **_roads(edge_down, down_rows))
