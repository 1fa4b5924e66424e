"""Whether CUDA graphs and ``torch.compile(fullgraph=True)`` take the functions: same bytes?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import blockscale as bs

Function = Callable[..., Any]
"""Takes tensors, may update them; returns tensors."""

ROWS, COLS = 16, 4096


def functions(device: str) -> dict[str, tuple[Function, Callable[[], list[Tensor]]]]:
    """Return each function and what makes new inputs for it."""
    g = torch.tensor([0.0025], device=device)

    def normal(*shapes: tuple[int, ...]) -> Callable[[], list[Tensor]]:
        return lambda: [torch.randn(s, device=device).bfloat16() for s in shapes]

    def scales(rows: int, cols: int) -> Callable[[], list[Tensor]]:
        return lambda: [torch.randint(256, (rows, cols), dtype=torch.uint8, device=device)]

    def codes() -> list[Tensor]:
        scale = torch.randint(8, 0x48, (ROWS, COLS // 16), dtype=torch.uint8, device=device)
        return [*scales(ROWS, COLS // 2)(), scale]

    x, w = (ROWS, COLS), (COLS,)
    return {
        "add_rmsnorm_fp4quant": (
            lambda a, r, weight: bs.add_rmsnorm_fp4quant(a, r, weight, global_scale=g),
            normal(x, x, w),
        ),
        "silu_and_mul_fp4quant": (
            lambda a: bs.silu_and_mul_fp4quant(a, global_scale=g),
            normal((ROWS, 2 * COLS)),
        ),
        "quantize": (lambda a: bs.quantize(a, global_scale=g), normal(x)),
        "dequantize": (lambda p, s: bs.dequantize(p, s, global_scale=g), codes),
        "swizzle_scales": (bs.swizzle_scales, scales(200, 256)),
        "unswizzle_scales": (lambda s: bs.unswizzle_scales(s, 200, 256), scales(256, 256)),
        "nvfp4_fp8_scale_sweep": (
            lambda a: bs.nvfp4_fp8_scale_sweep(a, torch.full_like(g, 5.5)),
            normal(x),
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


def check(device: str = "cuda") -> dict[str, dict[str, Any]]:
    """Return for each function: "graph" and "compile" are true, false, or the error."""
    found: dict[str, dict[str, Any]] = {}
    for name, (function, make) in functions(device).items():
        entry: dict[str, Any] = {}
        for use, test in (("graph", in_graph), ("compile", compiled)):
            try:
                entry[use] = test(function, make)
            except Exception as error:
                entry[use] = f"{type(error).__name__}: {error}"[:300]
        found[name] = entry
    return found
