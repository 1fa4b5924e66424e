"""A kernel of a fused spec, compiled in this process and called by parameter name.

Arguments lie as in `kernels`: between bytes of 0xFF, aligned to their elements and no further.
"""

from functools import cache

import torch
from tvm.s_tir import Schedule

from blockscale import catalog
from blockscale.base import host, shapes
from blockscale.building.space import replay, trace_json
from tests.kit.helpers import DTYPES
from tests.kit.kernels import compiled, place, untouched


@cache
def kernel(spec, level):
    """Return the exported function of ``spec``, with default schedules."""
    return compiled(spec, level)


def drawn(spec, level, seed):
    """Return the exported function with decisions drawn from ``seed``, found as the tuner does."""
    traces = {}
    for workload in catalog.workloads(spec, level):
        schedules = workload.space(level)(Schedule(workload.mod(level), seed=seed))
        trace = trace_json(schedules[seed % len(schedules)].trace)
        traces[workload.tag] = replay(workload.mod(level), trace).trace
    return compiled(spec, level, traces)


def run(spec, level=None, in_place=True, function=None, **given):
    """Call ``function`` (None: the default) with these inputs; return the outputs by name.

    ``in_place``: outputs with an alias are that input's memory, which is then not compared.
    """
    placed, values, sizes = {}, [], sizes_of(spec, given)
    for param in spec.params():
        alias = param.alias if in_place else None
        if param.shape is None:
            values.append(given.get(param.name, param.default))
        elif alias is not None:
            placed[param.name] = placed[alias]
            values.append(placed[alias][1])
        else:
            placed[param.name] = place(_like(param, given.get(param.name), sizes))
            if not param.output:
                placed[param.name][1].copy_(_like(param, given.get(param.name), sizes))
            values.append(placed[param.name][1])
    (function or kernel(spec, level or host.level()))(*values)
    assert all(untouched(*pair) for pair in placed.values())
    aliased = {param.alias for param in spec.params() if in_place}
    for param in spec.params():
        if param.shape is not None and not param.output and param.name not in aliased:
            before = _like(param, given.get(param.name), sizes)
            assert torch.equal(_bytes(placed[param.name][1]), _bytes(before))
    return {param.name: placed[param.name][1] for param in spec.params() if param.output}


def sizes_of(spec, given):
    """Return the symbols' values that the input's shape implies."""
    *lead, width = given["input"].shape
    gated = getattr(spec, "gated", False)
    names = ("experts", "rows") if getattr(spec, "grouped", False) else ("rows",)
    return {**dict(zip(names, lead, strict=True)), "cols": width // 2 if gated else width}


def _like(param, value, sizes):
    shape = [shapes.parse(dim).evaluate(sizes) for dim in param.shape]
    if param.output:
        return torch.empty(shape, dtype=getattr(torch, param.dtype, None) or DTYPES[param.dtype])
    if value is None:
        return torch.full(shape, param.default, dtype=getattr(torch, param.dtype))
    assert list(value.shape) == shape
    return value


def _bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8)
