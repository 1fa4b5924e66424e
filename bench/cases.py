"""What is measured: the data, the contenders, the check of the results, and the bars.

Every case runs on more copies of its data than the last cache holds, ours and torch's alike.
Outputs of our memory-bound ops and of copies are allocated before, and rotate too; linear layers
and eager formulas allocate theirs, as they do in a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench import formulas
from bench.timing import Call, copies
from blockscale import fp8_scale_candidates
from blockscale.demo.metrics import decode_nvfp4, row_errors
from blockscale.runtime import jit
from blockscale.runtime.function import Function
from blockscale.specs import Dequantize, Linear, Quantize, ScaleSweep, Swizzle

SIZE = 4096
CHUNK_ROWS = 128  # of the chunked torch formula: 2 MB of float32 a step
MINILM = ((384, 384), (1536, 384), (384, 1536))
KERNEL_BOUND = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
TORCH_BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # its weights are rounded to bfloat16 too
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class WrongResultError(ArithmeticError):
    """A contender's result is wrong, so its time means nothing."""


@dataclass(frozen=True)
class Comparison:
    """What is asked of ``ours``: to be ``bar`` times as fast as ``other``, or to take no longer.

    kind "faster": time of other / time of ours >= bar; "within": ours / other <= bar; "seconds":
    ours <= bar, with no other.  bar None: nothing is asked, the ratio is reported.
    """

    ours: str
    other: str | None
    kind: str
    bar: float | None = None

    def judge(self, seconds: Mapping[str, float]) -> dict[str, Any]:
        """Return the fields, the ratio, and whether the bar is met, from the times of one run."""
        own = seconds[self.ours]
        if self.other is None:
            ratio = own
        else:
            other = seconds[self.other]
            ratio = other / own if self.kind == "faster" else own / other
        met = None
        if self.bar is not None:
            met = ratio >= self.bar if self.kind == "faster" else ratio <= self.bar
        return {**vars(self), "ratio": ratio, "met": met}


@dataclass(frozen=True)
class Case:
    """One set of contenders on the same task; ``check`` raises `WrongResultError`."""

    contenders: dict[str, Call]
    comparisons: tuple[Comparison, ...]
    check: Callable[[], dict[str, float]]
    kernels: tuple[Function, ...]
    about: dict[str, Any] = field(default_factory=dict)

    def tuned(self) -> dict[str, Any]:
        """Return for each kernel of ours which row buckets have a tuned schedule."""
        return {kernel.name: kernel.buckets for kernel in self.kernels}


def need(right: bool, sentence: str) -> None:
    """Raise `WrongResultError` with ``sentence`` unless ``right``."""
    if not right:
        raise WrongResultError(sentence)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def random_weight(rows: int, cols: int) -> Tensor:
    """Return a normal bfloat16 weight [rows, cols]."""
    return torch.randn(rows, cols, generator=_seeded()).bfloat16()


def random_packed(rows: int, cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random codes [rows, cols / 2], E4M3 scale bytes around 2^-3, a global scale [1]."""
    rng = _seeded()
    packed = torch.randint(256, (rows, cols // 2), dtype=torch.uint8, generator=rng)
    scale = torch.randint(0x08, 0x48, (rows, cols // 16), dtype=torch.uint8, generator=rng)
    return packed, scale, torch.tensor([0.0123])


def _rotate(function: Callable[..., object], *lists: list[Tensor]) -> Call:
    """Return a call that gives ``function`` the next element of every list."""
    sets = [
        tuple(items[i % len(items)] for items in lists) for i in range(math.lcm(*map(len, lists)))
    ]
    return lambda number: function(*sets[number % len(sets)])


def sweep(rows: int = SIZE, cols: int = SIZE) -> Case:
    """Return the scale sweep of a bfloat16 weight: 126 candidates for every block of 16."""
    kernel = jit.function(ScaleSweep("bfloat16"))
    weight = random_weight(rows, cols).view(-1, 16)
    amax = weight.abs().max().float().reshape(1)
    candidates = fp8_scale_candidates()
    best = torch.empty(len(weight))

    def check() -> dict[str, float]:
        kernel(weight, amax, candidates, best)
        some = torch.randperm(len(weight), generator=_seeded())[:1024]
        losses = formulas.sweep_losses(weight[some], amax, candidates)
        chosen = best[some, None] == candidates * amax
        need(bool((chosen.sum(1) == 1).all()), "the sweep returned an amax of no candidate")
        excess = (losses[chosen] / losses.min(1).values - 1).max().item()
        need(excess <= 1e-6, f"the sweep's loss is {excess:.1e} above the least, allowed 1e-06")
        return {"ours": excess}

    return Case(
        {"ours": lambda _: kernel(weight, amax, candidates, best)},
        (Comparison("ours", None, "seconds", 2.0),),
        check,
        (kernel,),
        {"error": "excess of the loss over the least of 126, 1024 blocks"},
    )


def dequantise(rows: int = SIZE, cols: int = SIZE) -> Case:
    """Return NVFP4 to bfloat16, against a copy of the output and one that moves as many bytes."""
    kernel = jit.function(Dequantize("nvfp4", "bfloat16"))
    packed, scale, g = random_packed(rows, cols)
    out = torch.empty(rows, cols, dtype=torch.bfloat16)
    written = 2 * out.numel()
    moved = packed.numel() + scale.numel() + written

    def copy(size: int) -> Call:
        source = torch.zeros(size // 2, dtype=torch.bfloat16)
        return _rotate(lambda a, b: b.copy_(a), copies(source), copies(source))

    def check() -> dict[str, float]:
        truth = formulas.dequantize_nvfp4(packed, scale, g).bfloat16()
        result = kernel(packed, scale, g, out)
        need(torch.equal(result, truth), "dequantise differs from the torch formula")
        return {"ours": 0.0}

    def call(packed: Tensor, scale: Tensor, out: Tensor) -> object:
        return kernel(packed, scale, g, out)

    inputs = copies(packed)
    sized, moving = f"copy of {written / 1e6:.1f} MB", f"copy of {moved / 2e6:.1f} MB"
    return Case(
        {
            "ours": _rotate(call, inputs, copies(scale, len(inputs)), copies(out)),
            sized: copy(written),
            moving: copy(moved // 2),
        },
        (Comparison("ours", sized, "within", 2.0), Comparison("ours", moving, "within", 2.0)),
        check,
        (kernel,),
        {
            "error": "0: every bit is that of the torch formula",
            "bytes_moved": {"ours": moved, sized: 2 * written, moving: moved},
        },
    )


def quantise(rows: int = SIZE, cols: int = SIZE) -> Case:
    """Return bfloat16 to NVFP4, against the formula in eager torch, whole and in chunks of rows."""
    kernel = jit.function(Quantize("nvfp4", "bfloat16"))
    x = random_weight(rows, cols)
    g = (x.abs().max().float() / (448 * 6)).reshape(1)
    packed = torch.empty(rows, cols // 2, dtype=torch.uint8)
    scale = torch.empty(rows, cols // 16, dtype=torch.uint8)

    def check() -> dict[str, float]:
        kernel(x, g, packed, scale)
        formula = formulas.quantize_nvfp4(x, g)
        chunked = formulas.quantize_nvfp4_chunked(x, g, CHUNK_ROWS)
        for codes, scales in (formula, chunked):
            need(torch.equal(packed, codes), "the codes of quantise differ from the torch formula")
            same = torch.equal(scale, scales.view(torch.uint8))
            need(same, "the scales of quantise differ from the torch formula")
        return {"ours": 0.0}

    inputs, outputs = copies(x), copies(packed)
    chunked = f"eager torch, {CHUNK_ROWS} rows at a time"
    return Case(
        {
            "ours": _rotate(
                lambda x, packed, scale: kernel(x, g, packed, scale),
                inputs,
                outputs,
                copies(scale, len(outputs)),
            ),
            "eager torch": _rotate(partial(formulas.quantize_nvfp4, global_scale=g), inputs),
            chunked: _rotate(lambda x: formulas.quantize_nvfp4_chunked(x, g, CHUNK_ROWS), inputs),
        },
        (
            Comparison("ours", "eager torch", "faster", 5.0),
            Comparison("ours", chunked, "faster", 5.0),
        ),
        check,
        (kernel,),
        {"error": "0: every bit is that of the torch formula"},
    )


def swizzle(rows: int = SIZE, cols: int = SIZE // 16) -> Case:
    """Return the scales of a 4096 x 4096 weight to the 128x4 layout, against permute in torch."""
    kernel = jit.function(Swizzle())
    scale = torch.randint(256, (rows, cols), dtype=torch.uint8, generator=_seeded())
    out = torch.empty_like(scale)

    def check() -> dict[str, float]:
        same = torch.equal(kernel(scale, out), formulas.swizzle_128x4(scale))
        need(same, "swizzle differs from the permuted tensor")
        return {"ours": 0.0}

    inputs = copies(scale)
    return Case(
        {
            "ours": _rotate(kernel, inputs, copies(out)),
            "torch permute": _rotate(formulas.swizzle_128x4, inputs),
        },
        (Comparison("ours", "torch permute", "faster"),),
        check,
        (kernel,),
        {"error": "0: every byte is that of the permuted tensor"},
    )


@dataclass(frozen=True)
class _Weight:
    """One weight in every form, each in as many copies as fill the last cache."""

    exact: Tensor
    packed: list[Tensor]
    scale: list[Tensor]
    global_scale: Tensor
    dense: dict[torch.dtype, list[Tensor]]


@lru_cache(maxsize=1)  # the cases of a shape follow each other
def _weight(n: int, k: int) -> _Weight:
    packed, scale, g = random_packed(n, k)
    exact = decode_nvfp4(packed, scale.view(torch.float8_e4m3fn), g)
    rotating = copies(packed)
    return _Weight(
        exact,
        rotating,
        copies(scale, len(rotating)),
        g,
        {dtype: copies(exact.to(dtype)) for dtype in KERNEL_BOUND},
    )


def linear(n: int, k: int, rows: int, bars: Mapping[torch.dtype, float | None]) -> Case:
    """Return x [rows, k] times an NVFP4 weight [n, k], against torch's dense weights."""
    weight = _weight(n, k)
    x = torch.randn(rows, k, generator=_seeded())
    contenders: dict[str, Call] = {}
    bounds: dict[str, float] = {}
    kernels = []
    for dtype, name in SHORT.items():
        kernel = jit.function(Linear(n, k, "nvfp4", str(dtype).removeprefix("torch.")))
        given = x.to(dtype)

        def ours(
            packed: Tensor, scale: Tensor, kernel: Function = kernel, given: Tensor = given
        ) -> object:
            return kernel(given, packed, scale, weight.global_scale)

        contenders[f"ours {name}"] = _rotate(ours, weight.packed, weight.scale)
        contenders[f"torch {name}"] = _rotate(
            partial(functional.linear, given), weight.dense[dtype]
        )
        bounds[f"ours {name}"], bounds[f"torch {name}"] = KERNEL_BOUND[dtype], TORCH_BOUND[dtype]
        kernels.append(kernel)

    def check() -> dict[str, float]:
        errors = {}
        for name, call in contenders.items():
            given = x.to(torch.bfloat16 if name.endswith("bf16") else torch.float32)
            truth = given.double() @ weight.exact.T
            errors[name] = row_errors(call(0), truth).max().item()  # type: ignore[arg-type]
            right = errors[name] <= bounds[name]  # NaN is wrong too
            need(right, f"{name} errs by {errors[name]:.1e}, allowed {bounds[name]:.0e}")
        return errors

    return Case(
        contenders,
        tuple(
            Comparison(f"ours {name}", f"torch {name}", "faster", bars.get(dtype))
            for dtype, name in SHORT.items()
        ),
        check,
        tuple(kernels),
        {
            "error": "largest relative error of a row against float64",
            "shape": {"n": n, "k": k, "rows": rows},
        },
    )


def all_cases() -> dict[str, Callable[[], Case]]:
    """Return the maker of every case, by name, in the order of measurement."""
    from bench.moe_cpu import moe_cases  # which has cases of this module's kind

    bars: dict[int, dict[torch.dtype, float | None]] = {
        1: {torch.float32: 3.0, torch.bfloat16: 1.2},
        16: {torch.float32: 1.5},
    }
    found: dict[str, Callable[[], Case]] = {
        f"sweep {SIZE}x{SIZE} bf16": sweep,
        f"dequantise {SIZE}x{SIZE} to bf16": dequantise,
        f"quantise {SIZE}x{SIZE} bf16": quantise,
        f"swizzle {SIZE}x{SIZE // 16}": swizzle,
    }
    for rows in (1, 4, 16, 128):
        name = f"linear {SIZE}x{SIZE} rows {rows}"
        found[name] = partial(linear, SIZE, SIZE, rows, bars.get(rows, {}))
    for n, k in MINILM:
        for rows in (1, 16, 128):
            found[f"linear {n}x{k} rows {rows}"] = partial(linear, n, k, rows, {})
    return found | moe_cases()
