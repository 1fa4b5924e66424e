"""Whether CUDA graphs and torch.compile take the functions, and give the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import blockscale as bs
from bench.gpu import cases
from bench.gpu.cases import Case
from bench.gpu.host import data_of
from bench.measure import describe

Function = Callable[..., Any]
"""Takes tensors, may update them; returns tensors."""

ROWS, COLS = 16, 4096


def functions(device: str) -> dict[str, tuple[Function, Callable[[], list[Tensor]]]]:
    """Return each function and what makes new inputs for it."""
    g = torch.tensor([0.0025], device=device)

    def inputs(case: Case) -> Callable[[], list[Tensor]]:
        given = [name for name, buffer in case.buffers.items() if buffer.fill is not None]
        return lambda: [data_of(case, device)[name] for name in given]

    weight = inputs(cases.quantise(ROWS, COLS, device))
    return {
        "add_rmsnorm_fp4quant": (
            lambda a, r, weight: bs.add_rmsnorm_fp4quant(a, r, weight, global_scale=g),
            inputs(cases.norm(ROWS, COLS, device)),
        ),
        "silu_and_mul_fp4quant": (
            lambda a: bs.silu_and_mul_fp4quant(a, global_scale=g),
            inputs(cases.silu(ROWS, COLS, device)),
        ),
        "quantize": (lambda a: bs.quantize(a, global_scale=g), weight),
        "dequantize": (
            lambda p, s: bs.dequantize(p, s, global_scale=g),
            inputs(cases.dequantise(ROWS, COLS, device)),
        ),
        "swizzle_scales": (bs.swizzle_scales, inputs(cases.swizzle(200, 256, device))),
        "unswizzle_scales": (
            lambda s: bs.unswizzle_scales(s, 200, 256),
            inputs(cases.swizzle(256, 256, device)),
        ),
        "nvfp4_fp8_scale_sweep": (
            lambda a: bs.nvfp4_fp8_scale_sweep(a, torch.full_like(g, 5.5)),
            weight,
        ),
    }


def _bytes(result: Any) -> list[Tensor]:
    parts = result if isinstance(result, (tuple, list)) else [result]
    return [part.contiguous().reshape(-1).view(torch.uint8) for part in parts if part is not None]


def same(first: Any, second: Any) -> bool:
    """Return whether two results have the same bytes."""
    one, other = _bytes(first), _bytes(second)
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(bool(torch.equal(a, b)) for a, b in pairs)


def _eager(function: Function, inputs: list[Tensor]) -> tuple[Any, list[Tensor]]:
    copies = [tensor.clone() for tensor in inputs]
    return function(*copies), copies


def in_graph(function: Function, make: Callable[[], list[Tensor]]) -> bool:
    """Return whether a replay on new inputs gives what an eager call gives, inputs included."""
    static = make()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _eager(function, static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function(*static)
    inputs = make()
    for target, source in zip(static, inputs, strict=True):
        target.copy_(source)
    graph.replay()
    truth, updated = _eager(function, inputs)
    torch.cuda.synchronize()
    return same(result, truth) and same(static, updated)


def compiled(function: Function, make: Callable[[], list[Tensor]]) -> bool:
    """Return whether torch.compile keeps the function in one graph and gives the same bytes."""

    def around(*tensors: Tensor) -> Any:
        result = function(*tensors)
        parts = result if isinstance(result, (tuple, list)) else [result]
        return [part for part in parts if part is not None]

    torch._dynamo.reset()
    inputs = make()
    truth, updated = _eager(around, inputs)
    result, compiled_inputs = _eager(torch.compile(around, fullgraph=True, dynamic=False), inputs)
    return same(result, truth) and same(compiled_inputs, updated)


def uses(device: str = "cuda") -> dict[str, dict[str, Any]]:
    """Return for each function: "graph" and "compile" are true, false, or the error."""
    found: dict[str, dict[str, Any]] = {}
    for name, (function, make) in functions(device).items():
        entry: dict[str, Any] = {}
        for use, test in (("graph", in_graph), ("compile", compiled)):
            try:
                entry[use] = test(function, make)
            except Exception as error:
                entry[use] = describe(error)
        found[name] = entry
    return found
