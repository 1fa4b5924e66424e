"""What one call costs the host: ``python -m bench.gpu.host --library X --out bench/results``.

A norm, a linear layer and an MoE layer of one row, each called in every way that there is, in turns
on a stream that is never full.  `costs` takes the norm apart for `bench.gpu`.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

import blockscale as bs
from bench import measure
from bench.gpu import cases
from bench.gpu.cases import Case
from bench.measure import Call, Data, bound, describe, rotating
from bench.moe import data as moe_data
from bench.moe.cases import MODELS, spec_of
from blockscale.specs import Linear

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


def data_of(case: Case, device: str) -> Data:
    """Return tensors of one call."""
    [data] = rotating(case.buffers, 1, device)
    return {**data, **case.shared()}


def _without_rows(kernel: Any, values: Sequence[Any]) -> list[Any]:
    return [
        value[:0] if isinstance(value, Tensor) and param.dims[0].symbol else value
        for param, value in zip(kernel.params, values, strict=True)
    ]


def _empty(*args: object, **kwargs: object) -> None:
    pass


def our_calls(kernel: Any, device: str) -> dict[str, Call]:
    """Return the calls by which ours is taken apart, from the outside in."""
    d = data_of(cases.norm(1, HIDDEN, device), device)
    arguments = bound(kernel, d)
    compiled = kernel.direct
    no_rows = _without_rows(kernel, arguments)
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

    d = data_of(cases.norm(1, HIDDEN, device), device)
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


# ---- A table: three families, all ways of calling them -------------------------------------------

FORMAT = 1
ROUNDS, IN_A_ROW = 61, 100
"""How often each call is measured, and calls of each time: a stream's queue holds 1024 launches."""

ADD = "torch.add(out=)"
WAYS = {
    "operator": "the operator that torch.compile sees, `torch.ops.blockscale`",
    "function": "the function, outputs allocated",
    "function, out": "the function, outputs given",
    "kernel": 'the kernel object, `lib["..."]`',
    "compiled": "the compiled function, `kernel.direct`",
    "compiled, no launch": "the same without rows: checks of arguments alone",
    "launch": "what the launches cost: the difference of these two",
    "bound, rows": "a bound call, rows given anew",
    "bound": "a bound call",
    "graph": "the replay of a CUDA graph of one call",
}
"""Ways of calling a function, from the dearest on."""

LINEAR = Linear(4096, 4096, "nvfp4", "bfloat16", layout="tiles64")
MOE_MODEL = MODELS["qwen3"]


@dataclass
class Family:
    """What is called: a function with its arguments, with and without outputs, and its kernel.

    Attributes:
        rows: how many of the first arguments of the kernel have rows.
        operator: the same call of the function's operator.
    """

    name: str
    function: Callable[..., Any]
    given: tuple[Any, ...]
    options: dict[str, Any]
    outputs: dict[str, Tensor]
    kernel: Any
    arguments: list[Any]
    rows: int
    operator: Callable[[], object]
    kept: list[object] = field(default_factory=list)

    def calls(self) -> Iterator[tuple[str, Callable[[], Call]]]:
        """Yield ways of calling it, each with what makes the call."""
        function, given, options = self.function, self.given, self.options
        full, compiled, arguments = {**options, **self.outputs}, self.kernel.direct, self.arguments
        fresh = arguments[: self.rows]
        no_rows = _without_rows(self.kernel, arguments)
        yield "operator", lambda: self.operator
        yield "function", lambda: lambda: function(*given, **options)
        yield "function, out", lambda: lambda: function(*given, **full)
        yield "kernel", lambda: lambda: self.kernel(*arguments)
        yield "compiled", lambda: lambda: compiled(*arguments, 1)
        yield "compiled, no launch", lambda: lambda: compiled(*no_rows, 1)
        if hasattr(bs, "bind"):
            made = bs.bind(function, *given, **full)
            yield "bound, rows", lambda: lambda: made(*fresh)
            yield "bound", lambda: made
        yield "graph", lambda: self._replay(lambda: function(*given, **full))

    def _replay(self, call: Call) -> Call:
        captured = measure.capture([call], 1)
        self.kept.append(captured)
        return captured.graph.replay


def norm_family(kernels: Mapping[str, Any], device: str) -> Family:
    """Return add_rmsnorm_fp4quant."""
    d = data_of(cases.norm(1, HIDDEN, device), device)
    g = d["global_scale"]
    x = d["input"], d["residual"], d["weight"]
    codes, scale = bs.add_rmsnorm_fp4quant(*x, global_scale=g)[:2]
    operator = torch.ops.blockscale.add_rmsnorm_fp4quant
    return Family(
        f"norm, {HIDDEN}",
        bs.add_rmsnorm_fp4quant,
        x,
        {"global_scale": g},
        {"y_fp4": codes, "block_scale": scale},
        kernels[KERNEL],
        bound(kernels[KERNEL], d),
        2,
        lambda: operator(*x, codes, scale, None, None, g),
    )


def linear_family(kernels: Mapping[str, Any], device: str) -> Family:
    """Return linear."""
    n, k = LINEAR.n, LINEAR.k
    codes = torch.empty(n, k // 2, dtype=torch.uint8, device=device).random_(0, 256)
    scale = torch.randint(0x30, 0x40, (n, k // 16), device=device, dtype=torch.uint8)
    w = bs.prepare_linear_weights(codes, scale)
    x, y = (
        torch.randn(1, k, dtype=torch.bfloat16, device=device),
        torch.empty(1, n, dtype=torch.bfloat16, device=device),
    )
    kernel = kernels[LINEAR.name]
    data = {
        "x": x,
        "packed": w.packed,
        "block_scale": w.block_scale,
        "global_scale": w.global_scale,
        "y": y,
    }
    operator = torch.ops.blockscale.linear
    facts = w.facts
    more = facts.n, facts.k, facts.group, facts.zeros, facts.layout, facts.dtype
    weight = w.packed, w.block_scale, facts.fmt, w.global_scale
    return Family(
        f"linear, {n} x {k}",
        bs.linear,
        (x, w),
        {},
        {"out": y},
        kernel,
        bound(kernel, data),
        1,
        lambda: operator(x, *weight, None, None, "none", False, None, *more),
    )


def moe_family(kernels: Mapping[str, Any], device: str) -> Family:
    """Return fused_moe."""
    spec = spec_of(MOE_MODEL, "nvfp4")
    held = moe_data.random_weights(MOE_MODEL, "nvfp4", device)
    w = bs.prepare_moe_weights(
        *(held.w13, held.w2),
        w13_scale=held.w13_scale,
        w2_scale=held.w2_scale,
        w13_global_scale=held.w13_global,
        w2_global_scale=held.w2_global,
    )
    x = torch.randn(1, spec.hidden, dtype=torch.bfloat16, device=device)
    ids = torch.arange(spec.top_k, device=device, dtype=torch.int32).view(1, -1)
    factors = torch.full((1, spec.top_k), 1 / spec.top_k, device=device)
    out = torch.empty_like(x)
    kernel = kernels[spec.name]
    data = {
        **{name: getattr(w, name) for name in ("w13", "w13_scale", "w13_global")},
        **{name: getattr(w, name) for name in ("w2", "w2_scale", "w2_global")},
        "hidden": x,
        "topk_ids": ids,
        "topk_weights": factors,
        "out": out,
        "workspace": torch.empty(spec.workspace_bytes(1), dtype=torch.uint8, device=device),
    }
    operator = torch.ops.blockscale.fused_moe
    tensors = w.w13, w.w13_scale, None, w.w13_global, None, w.w2, w.w2_scale, None, w.w2_global
    sizes = w.group, w.experts, w.hidden, w.intermediate, w.gated, w.zero, w.layout, None
    how = "swiglu", None, None, None, False, None, None
    return Family(
        f"MoE, {MOE_MODEL.title}",
        bs.fused_moe,
        (x, w, ids, factors),
        {},
        {"out": out},
        kernel,
        bound(kernel, data),
        3,
        lambda: operator(x, ids, factors, *tensors, None, w.fmt, *sizes, *how, out),
    )


FAMILIES = norm_family, linear_family, moe_family

ASKED_US, ASKED_LINEAR_US = 4.5, 5.0
"""Of a call, and of a linear layer, on a machine with an H200."""


def cells(us: Mapping[str, Mapping[str, float]], way: str) -> tuple[float | None, float | None]:
    """Return median and least microseconds of a way of calling, or None: it was not measured."""
    if way == "launch":
        if not {"compiled", "compiled, no launch"} <= us.keys():
            return None, None
        return us["compiled"]["us"] - us["compiled, no launch"]["us"], None
    found = us.get(way, {})
    return found.get("us"), found.get("least")


def section(results: Mapping[str, Any], source: str = "") -> str:
    """Return the table of all ways of calling beside torch.add(out=), and if goals are met."""
    from bench.report import render

    families = results["families"]
    bound_us = {family["name"]: cells(family["us"], "bound")[0] for family in families[:2]}
    met = [
        us is not None and us <= asked
        for us, asked in zip(bound_us.values(), (ASKED_US, ASKED_LINEAR_US), strict=True)
    ]
    return render(
        "pages/host.md.j2",
        r=results,
        source=source,
        families=families,
        rows=[
            (label, [cells(family["us"], way) for family in families])
            for way, label in {ADD: ADD, **WAYS}.items()
        ],
        launches=4,
        asked=ASKED_US,
        asked_linear=ASKED_LINEAR_US,
        verdict="take less" if all(met) else "miss this",
    )


def timed(calls: Mapping[str, Call], synchronize: Call) -> dict[str, dict[str, float]]:
    """Return least and median microseconds of host time of each call, measured in turns."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for _ in range(ROUNDS):
            for name, call in calls.items():
                synchronize()
                start = time.perf_counter_ns()
                for _ in range(IN_A_ROW):
                    call()
                samples[name].append((time.perf_counter_ns() - start) / 1e3 / IN_A_ROW)
    finally:
        gc.enable()
    synchronize()
    return {
        name: {"us": round(median(times), 3), "least": round(min(times), 3)}
        for name, times in samples.items()
    }


def table(
    kernels: Mapping[str, Any], device: str, synchronize: Call, note: Callable[[str, Any], None]
) -> None:
    """Measure all families beside torch.add(out=); ``note`` gets each as a row."""
    x = torch.randn(1, HIDDEN, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(x)
    for make in FAMILIES:
        failed: dict[str, str] = {}
        calls: dict[str, Call] = {ADD: lambda: torch.add(x, x, out=out)}
        try:
            family = make(kernels, device)
        except Exception as error:
            note(make.__name__, {"us": {}, "failed": {"all": describe(error)}})
            continue
        for way, maker in family.calls():
            try:
                call = maker()
                call()
                calls[way] = call
            except Exception as error:
                failed[way] = describe(error)
        note(family.name, {"us": timed(calls, synchronize), "failed": failed})


@torch.no_grad()
def main(given: Sequence[str] | None = None) -> int:
    """Measure; return 1 when a call failed."""
    made = measure.parser("bench.gpu.host", __doc__)
    options = measure.parsed(made, given)
    if options.names:
        print(KERNEL, LINEAR.name, spec_of(MOE_MODEL, "nvfp4").name)
        return 0
    if measure.refused("bench.gpu.host"):
        return 2
    more = {"rounds": ROUNDS, "in_a_row": IN_A_ROW}
    session = measure.Session("host", options, FORMAT, "families", **more)
    measure.warm_up()

    def note(name: str, found: dict[str, Any]) -> None:
        told = ", ".join(
            f"{way} {us['us']:.2f} ({us['least']:.2f})" for way, us in found["us"].items()
        )
        session.add({"name": name, **found}, f"{name}: us {told}")

    table(session.kernels, "cuda", torch.cuda.synchronize, note)
    families = session.end()["families"]
    return measure.status("bench.gpu.host", [f["name"] for f in families if f["failed"]])


if __name__ == "__main__":
    sys.exit(main())
