"""What one call costs the host, and whether CUDA graphs and torch.compile take the functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor

import blockscale
from bench.gpu_measure import bound

Call = Callable[[], object]

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


def _data(device: str) -> dict[str, Tensor]:
    def row() -> Tensor:
        return torch.randn(1, HIDDEN, dtype=torch.bfloat16, device=device)

    return {
        "input": row(),
        "residual": row(),
        "weight": row().reshape(HIDDEN),
        "global_scale": torch.tensor([0.0025], device=device),
        "packed": torch.empty(1, HIDDEN // 2, dtype=torch.uint8, device=device),
        "block_scale": torch.empty(1, HIDDEN // 16, dtype=torch.uint8, device=device),
    }


def _without_rows(values: list[Any]) -> list[Any]:
    return [
        value[:0] if isinstance(value, Tensor) and value.dim() == 2 else value for value in values
    ]


def _empty(*args: object, **kwargs: object) -> None:
    pass


def our_calls(kernel: Any, device: str) -> dict[str, Call]:
    """Return the calls by which ours is taken apart, from the outside in."""
    d = _data(device)
    arguments = bound(kernel, d)
    compiled = kernel.direct
    no_rows = _without_rows(arguments)
    g = d["global_scale"]
    # Outputs as the function itself returns them, whatever dtypes it has for codes and scales.
    function = blockscale.add_rmsnorm_fp4quant
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
    from bench import gpu_triton

    d = _data(device)
    out = torch.empty_like(d["input"])
    run = gpu_triton.add_rmsnorm(4)
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


def host_costs(kernels: Mapping[str, Any], device: str = "cuda") -> dict[str, Any]:
    """Return microseconds by call, or why some could not be measured."""
    found: dict[str, Any] = {"us": {}, "failed": {}, "calls": CALLS}
    makers: list[Callable[[], dict[str, Call]]] = [lambda: other_calls(device)]
    if KERNEL in kernels:
        makers.insert(0, lambda: our_calls(kernels[KERNEL], device))
    for make in makers:
        try:
            calls = make()
        except Exception as error:
            found["failed"][str(len(found["failed"]))] = repr(error)[:300]
            continue
        for name, call in calls.items():
            try:
                found["us"][name] = host_us(call, torch.cuda.synchronize)
            except Exception as error:
                found["failed"][name] = repr(error)[:300]
    return found
