"""What one call costs the host, and whether CUDA graphs and torch.compile take the functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor

import blockscale as bs
from bench.gpu import cases
from bench.gpu.cases import Case
from bench.measure import Call, Data, bound, describe, rotating

CALLS, CHUNK = 10_000, 500  # calls between synchronisations: fewer than a stream's queue holds
HIDDEN = 4096
KERNEL = f"add_rmsnorm_nvfp4_h{HIDDEN}_bf16"


def host_us(call: Call, synchronize: Call) -> float:
    """Return microseconds of host time a call: the median of `CALLS` / `CHUNK` chunks."""
    samples = []
    for _ in range(CALLS // CHUNK + 1):
        synchronize()
        start = time.perf_counter_ns()
        for _ in range(CHUNK):
            call()
        samples.append((time.perf_counter_ns() - start) / 1e3 / CHUNK)
    synchronize()
    return median(samples[1:])  # the first warms up


def _data(case: Case, device: str) -> Data:
    [data] = rotating(case.buffers, 1, device)
    return {**data, **case.shared()}


def _without_rows(values: list[Any]) -> list[Any]:
    return [
        value[:0] if isinstance(value, Tensor) and value.dim() == 2 else value for value in values
    ]


def _empty(*args: object, **kwargs: object) -> None:
    pass


def our_calls(kernel: Any, device: str) -> dict[str, Call]:
    """Return the calls by which ours is taken apart, from the outside in."""
    d = _data(cases.norm(1, HIDDEN, device), device)
    arguments = bound(kernel, d)
    compiled = kernel.direct
    no_rows = _without_rows(arguments)
    g = d["global_scale"]
    # Outputs as the function itself returns them, whatever dtypes it has for codes and scales.
    function = bs.add_rmsnorm_fp4quant
    codes, scale = function(d["input"], d["residual"], d["weight"], global_scale=g)[:2]
    given = (d["input"], d["residual"], d["weight"], codes, scale)
    return {
        "function": lambda: function(*given, global_scale=g),
        "empty": lambda: _empty(*given, global_scale=g),
        "kernel": lambda: kernel(*arguments),
        "compiled": lambda: compiled(*arguments),
        "compiled, no rows": lambda: compiled(*no_rows),
    }


def other_calls(device: str) -> dict[str, Call]:
    """Return what other launches from Python cost: torch.add(out=), and Triton's for this op."""
    from bench.peers import triton_ops

    d = _data(cases.norm(1, HIDDEN, device), device)
    out = torch.empty_like(d["input"])
    run = triton_ops.add_rmsnorm(4)
    names = ("input", "residual", "weight", "global_scale", "packed", "block_scale")
    given = [d[name] for name in names]
    return {
        "torch.add(out=)": lambda: torch.add(d["input"], d["residual"], out=out),
        "triton": lambda: run(*given),
    }


LABELS = {
    "function": f"bs.add_rmsnorm_fp4quant, 1 x {HIDDEN}, all outputs given",
    "empty": "an empty Python function with the same arguments",
    "kernel": 'lib["..."], the kernel object',
    "compiled": "the compiled function called directly",
    "compiled, no rows": "the same without rows: no launch",
    "torch.add(out=)": f"torch.add(out=), 1 x {HIDDEN}",
    "triton": "the Triton kernel of the same op",
}


def costs(kernels: Mapping[str, Any], device: str = "cuda") -> dict[str, Any]:
    """Return microseconds by call, or why some could not be measured."""
    found: dict[str, Any] = {"us": {}, "failed": {}, "calls": CALLS}
    makers: list[Callable[[], dict[str, Call]]] = [lambda: other_calls(device)]
    if KERNEL in kernels:
        makers.insert(0, lambda: our_calls(kernels[KERNEL], device))
    for make in makers:
        try:
            calls = make()
        except Exception as error:
            found["failed"][str(len(found["failed"]))] = describe(error)
            continue
        for name, call in calls.items():
            try:
                found["us"][name] = host_us(call, torch.cuda.synchronize)
            except Exception as error:
                found["failed"][name] = describe(error)
    return found


# ---- CUDA graphs and torch.compile ------------------------------------------------------------

Function = Callable[..., Any]
"""Takes tensors, may update them; returns tensors."""

ROWS, COLS = 16, 4096


def functions(device: str) -> dict[str, tuple[Function, Callable[[], list[Tensor]]]]:
    """Return each function and what makes new inputs for it."""
    g = torch.tensor([0.0025], device=device)

    def inputs(case: Case) -> Callable[[], list[Tensor]]:
        given = [name for name, buffer in case.buffers.items() if buffer.fill is not None]
        return lambda: [_data(case, device)[name] for name in given]

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
