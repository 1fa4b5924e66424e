"""The decode passes of Edge-LLM's MoE layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.tirx import PrimFunc

from blockscale.catalog.registry import Bucket, Road, register
from blockscale.schedules.edgellm import cpu, gpu
from blockscale.specs import EdgeDown, EdgeUp
from blockscale.tir.common import fix_shape
from blockscale.tir.edgellm.passes import edge_down, edge_up
from blockscale.tir.edgellm.passes_threads import down_rows, up_rows

TUNED = Bucket(16, None)
SLOTS, EXPERTS = 8, 128
"""Of the static instance that is tuned, with the tokens of `TUNED`: each expert has a slot."""


def _body(kernel: Callable[[Any], PrimFunc], spec: Any, tokens: int | None) -> PrimFunc:
    """Return the kernel for so many tokens; None: for any, and any slots and experts."""
    func = kernel(spec)
    if tokens is None:
        return func
    func = fix_shape(func, "payload", (EXPERTS, spec.rows, spec.columns // 2))
    sums = spec.columns if isinstance(spec, EdgeUp) else spec.rows
    return fix_shape(func, "z", (tokens, SLOTS, sums))


def _roads(cpu_body: Callable[[Any], Any], cuda_body: Callable[[Any], Any]) -> dict[str, Road]:
    return {
        "cpu": Road(
            buckets=lambda spec: (TUNED,),
            body=lambda spec, bucket, level, tokens: _body(cpu_body, spec, tokens),
            sketches=lambda spec, bucket, level: cpu.sketches(spec, level),
        ),
        "cuda": Road(
            buckets=lambda spec: (TUNED,),
            body=lambda spec, bucket, level, tokens: _body(cuda_body, spec, tokens),
            sketches=lambda spec, bucket, level: gpu.sketches(spec),
        ),
    }


register(EdgeUp, **_roads(edge_up, up_rows))
register(EdgeDown, **_roads(edge_down, down_rows))
