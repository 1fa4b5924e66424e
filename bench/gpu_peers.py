"""The others: torch.compile of plain torch, and hand-written Triton kernels, several variants each.

Of each peer the fastest variant counts.  Variants are made when they are needed: compiling takes
seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import gpu_reference as reference
from bench.gpu_timing import Data

Run = Callable[[Data], Mapping[str, Tensor]]
"""Runs on one set of data; returns the outputs by the names of our kernels' parameters."""

MODES = ("default", "max-autotune-no-cudagraphs")
TOLERATED = 1e-3  # part of the bytes in which a peer may differ: other sums, other exp


@dataclass(frozen=True)
class Peer:
    """A contender with several ``variants``, each made by a call."""

    name: str
    variants: dict[str, Callable[[], Run]]


def _compiled(call: Callable[[Any, Data], Any], function: Callable[..., Any], mode: str) -> Run:
    """Return ``call`` with the compiled function.

    emulate_precision_casts: without it Inductor leaves out the rounding of the residual to 16 bits
    and fuses products with sums, and the results differ.
    """
    import torch._inductor.config as inductor

    inductor.emulate_precision_casts = True
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=False, mode=mode)
    return lambda data: call(compiled, data)


def _torch_compile(
    call: Callable[[Any, Data], Any], functions: Mapping[str, Callable[..., Any]]
) -> Peer:
    return Peer(
        "torch.compile",
        {
            f"{label} {mode}".strip(): partial(_compiled, call, function, mode)
            for mode in MODES
            for label, function in functions.items()
        },
    )


def _triton(
    kernel: str, variants: Mapping[str, tuple[int, ...]], call: Callable[[Any, Data], Any]
) -> Peer:
    """Return the Triton kernel of that name, with other block sizes and warps in each variant."""

    def make(arguments: tuple[int, ...]) -> Run:
        from bench import gpu_triton  # a machine without triton reads and checks the cases

        run = getattr(gpu_triton, kernel)(*arguments)
        return lambda data: call(run, data)

    return Peer("triton", {label: partial(make, given) for label, given in variants.items()})


def _both(result: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {"packed": result[0], "block_scale": result[1]}


def _blocks_and_warps(*pairs: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    return {f"{blocks} a program, {warps} warps": (blocks, warps) for blocks, warps in pairs}


def norm() -> tuple[Peer, ...]:
    """Return the peers of add_rmsnorm_fp4quant."""

    def compiled(run: Any, d: Data) -> dict[str, Tensor]:
        result = run(d["input"], d["residual"], d["weight"], d["global_scale"])
        return {**_both(result), "residual": d["residual"]}

    def triton(run: Any, d: Data) -> Data:
        names = ("input", "residual", "weight", "global_scale", "packed", "block_scale")
        run(*(d[name] for name in names))
        return d

    warps = {f"{warps} warps": (warps,) for warps in (4, 8, 16)}
    return (
        _torch_compile(compiled, {"": reference.add_rmsnorm_in_place}),
        _triton("add_rmsnorm", warps, triton),
    )


def dequantise() -> tuple[Peer, ...]:
    """Return the peers of dequantize."""

    def compiled(run: Any, d: Data) -> dict[str, Tensor]:
        return {"out": run(d["packed"], d["block_scale"], d["global_scale"])}

    def triton(run: Any, d: Data) -> Data:
        run(d["packed"], d["block_scale"], d["global_scale"], d["out"])
        return d

    variants = _blocks_and_warps((128, 4), (256, 4), (512, 4), (1024, 8))
    return (
        _torch_compile(compiled, {"": reference.dequantize}),
        _triton("dequantize", variants, triton),
    )


def quantise() -> tuple[Peer, ...]:
    """Return the peers of quantize with linear scales."""

    def compiled(run: Any, d: Data) -> dict[str, Tensor]:
        return _both(run(d["x"], d["global_scale"]))

    def triton(run: Any, d: Data) -> Data:
        run(d["x"], d["global_scale"], d["packed"], d["block_scale"])
        return d

    variants = _blocks_and_warps((64, 4), (128, 4), (256, 4), (256, 8))
    return (
        _torch_compile(compiled, {"": reference.quantize}),
        _triton("quantize", variants, triton),
    )


def silu() -> tuple[Peer, ...]:
    """Return the peers of silu_and_mul_fp4quant."""

    def compiled(run: Any, d: Data) -> dict[str, Tensor]:
        return _both(run(d["input"], d["global_scale"]))

    def triton(run: Any, d: Data) -> Data:
        run(d["input"], d["global_scale"], d["packed"], d["block_scale"])
        return d

    variants = _blocks_and_warps((64, 4), (128, 4), (128, 8), (256, 8))
    return (
        _torch_compile(compiled, {"": reference.silu_and_mul_float32}),
        _triton("silu_and_mul", variants, triton),
    )


def swizzle() -> tuple[Peer, ...]:
    """Return the peers of swizzle_scales: bytes, or four of them as one word."""

    def compiled(run: Any, d: Data) -> dict[str, Tensor]:
        return {"out": run(d["scale"])}

    def triton(run: Any, d: Data) -> Data:
        run(d["scale"], d["out"])
        return d

    variants = _blocks_and_warps((16, 4), (32, 4), (32, 8), (64, 8))
    functions = {"bytes": reference.swizzle, "words": reference.swizzle_words}
    return (_torch_compile(compiled, functions), _triton("swizzle", variants, triton))
