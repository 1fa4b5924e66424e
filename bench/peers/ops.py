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

from bench import reference
from bench.measure import Data

Run = Callable[[Data], Mapping[str, Tensor]]
"""Runs on one set of data; returns the outputs by the names of our kernels' parameters."""

MODES = ("default", "max-autotune-no-cudagraphs")
TOLERATED = 1e-3  # part of the bytes in which a peer may differ: other sums, other exp


@dataclass(frozen=True)
class Peer:
    """A contender with several ``variants``, each made by a call."""

    name: str
    variants: Mapping[str, Callable[[], Run]]


def _compiled(
    call: Callable[[Any, Data], Mapping[str, Tensor]], function: Callable[..., Any], mode: str
) -> Run:
    """Return ``call`` with the compiled function.

    emulate_precision_casts: without it Inductor leaves out the rounding of the residual to 16 bits
    and fuses products with sums, and the results differ.
    """
    import torch._inductor.config as inductor

    inductor.emulate_precision_casts = True
    torch._dynamo.reset()
    return partial(call, torch.compile(function, fullgraph=True, dynamic=False, mode=mode))


def _peers(
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    functions: Mapping[str, Callable[..., Any]],
    kernel: str,
    variants: Mapping[str, tuple[int, ...]],
    updated: tuple[str, ...] = (),
) -> tuple[Peer, ...]:
    """Return torch.compile of ``functions`` of the inputs, and the Triton kernel of that name.

    Args:
        inputs: names of the data, in the order of the functions' and the kernel's parameters.
        outputs: of what the functions return; the kernel takes them behind its inputs.
        functions: by what tells them apart.
        kernel: in `bench.peers.triton_ops`.
        variants: block sizes and warps of the kernel.
        updated: inputs that are outputs, too.
    """

    def compiled(run: Any, d: Data) -> dict[str, Tensor]:
        made = run(*(d[name] for name in inputs))
        results = made if isinstance(made, tuple) else (made,)
        kept = {name: d[name] for name in updated}
        return {**dict(zip(outputs, results, strict=True)), **kept}

    def triton(given: tuple[int, ...]) -> Run:
        from bench.peers import triton_ops  # a machine without triton reads and checks the cases

        run = getattr(triton_ops, kernel)(*given)

        def call(d: Data) -> Data:
            run(*(d[name] for name in (*inputs, *outputs)))
            return d

        return call

    modes = {
        f"{label} {mode}".strip(): partial(_compiled, compiled, function, mode)
        for mode in MODES
        for label, function in functions.items()
    }
    kernels = {label: partial(triton, given) for label, given in variants.items()}
    return Peer("torch.compile", modes), Peer("triton", kernels)


def _blocks_and_warps(*pairs: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    return {f"{blocks} a program, {warps} warps": (blocks, warps) for blocks, warps in pairs}


QUANTISED = ("packed", "block_scale")

PEERS = {
    "add_rmsnorm": _peers(
        ("input", "residual", "weight", "global_scale"),
        QUANTISED,
        {"": reference.add_rmsnorm_in_place},
        "add_rmsnorm",
        {f"{warps} warps": (warps,) for warps in (4, 8, 16)},
        updated=("residual",),
    ),
    "dequantize": _peers(
        ("packed", "block_scale", "global_scale"),
        ("out",),
        {"": reference.dequantize},
        "dequantize",
        _blocks_and_warps((128, 4), (256, 4), (512, 4), (1024, 8)),
    ),
    "quantize": _peers(
        ("x", "global_scale"),
        QUANTISED,
        {"": reference.quantize},
        "quantize",
        _blocks_and_warps((64, 4), (128, 4), (256, 4), (256, 8)),
    ),
    "silu_and_mul": _peers(
        ("input", "global_scale"),
        QUANTISED,
        {"": reference.silu_and_mul_float32},
        "silu_and_mul",
        _blocks_and_warps((64, 4), (128, 4), (128, 8), (256, 8)),
    ),
    "swizzle": _peers(
        ("scale",),
        ("out",),
        {"bytes": reference.swizzle, "words": reference.swizzle_words},
        "swizzle",
        _blocks_and_warps((16, 4), (32, 4), (32, 8), (64, 8)),
    ),
}
"""Of each op; scales are linear."""
