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

from bench import reference
from bench.measure import copies
from blockscale import fp8_scale_candidates, jit
from blockscale.demo.metrics import decode_nvfp4, row_errors
from blockscale.demo.timing import Call
from blockscale.function import Function
from blockscale.specs import Dequantize, FusedMoe, Linear, Quantize, ScaleSweep, Swizzle

SIZE = 4096
CHUNK_ROWS = 128  # of the chunked torch formula: 2 MB of float32 a step
MINILM = ((384, 384), (1536, 384), (384, 1536))
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 8, 2, 1024, 2816
H_SCALE = 0.05  # global scale of w2, a tenth of it w13's: gate, up and the result are of order 1
BOUNDS = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (4e-3, 1e-2)}
"""Largest errors of ours and of torch, whose weights are rounded to bfloat16 too."""

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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
        found = best[some]
        known = (found[:, None] == candidates * amax).any(1)
        need(bool(known.all()), "the sweep returned an amax of no candidate")
        _, least = reference.sweep(weight[some], amax, candidates)
        step = found[:, None] / torch.full_like(amax, 6)
        losses = reference.sweep_losses(weight[some].abs().double(), step)
        excess = (losses / least - 1).max().item()
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
        truth = reference.dequantize(packed, scale, g)
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
        formula = reference.quantize_eager(x, g)
        chunked = reference.quantize_chunked(x, g, CHUNK_ROWS)
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
            "eager torch": _rotate(partial(reference.quantize_eager, global_scale=g), inputs),
            chunked: _rotate(lambda x: reference.quantize_chunked(x, g, CHUNK_ROWS), inputs),
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
        same = torch.equal(kernel(scale, out).view(-1), reference.swizzle(scale))
        need(same, "swizzle differs from the permuted tensor")
        return {"ours": 0.0}

    inputs = copies(scale)
    return Case(
        {
            "ours": _rotate(kernel, inputs, copies(out)),
            "torch permute": _rotate(reference.swizzle, inputs),
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
        {dtype: copies(exact.to(dtype)) for dtype in SHORT},
    )


def _against_dense(
    calls: Mapping[torch.dtype, tuple[Function, Call, Call]],
    truth: Callable[[torch.dtype], Tensor],
    bars: Mapping[torch.dtype, float | None],
    shape: dict[str, int],
    bfloat16_bound: float | None = None,
) -> Case:
    """Return the case of a kernel on 4-bit weights against torch on dense ones.

    Args:
        calls: by the activations' dtype the kernel, ours, and torch's.
        truth: result in float64 for activations of a dtype.
        bars: what is asked, by dtype.
        shape: as it stands in the results.
        bfloat16_bound: error that bfloat16 may have, where it rounds more than the result.
    """
    contenders: dict[str, Call] = {}
    bounds: dict[str, tuple[torch.dtype, float]] = {}
    for dtype, (_, *pair) in calls.items():
        for who, call, bound in zip(("ours", "torch"), pair, BOUNDS[dtype], strict=True):
            name = f"{who} {SHORT[dtype]}"
            contenders[name] = call
            wide = dtype == torch.bfloat16 and bfloat16_bound is not None
            bounds[name] = dtype, bfloat16_bound if wide else bound

    def check() -> dict[str, float]:
        errors = {}
        for name, call in contenders.items():
            dtype, bound = bounds[name]
            errors[name] = row_errors(call(0), truth(dtype)).max().item()  # type: ignore[arg-type]
            right = errors[name] <= bound  # NaN is wrong too
            need(right, f"{name} errs by {errors[name]:.1e}, allowed {bound:.0e}")
        return errors

    return Case(
        contenders,
        tuple(
            Comparison(f"ours {name}", f"torch {name}", "faster", bars.get(dtype))
            for dtype, name in SHORT.items()
        ),
        check,
        tuple(kernel for kernel, *_ in calls.values()),
        {"error": "largest relative error of a row against float64", "shape": shape},
    )


def linear(n: int, k: int, rows: int, bars: Mapping[torch.dtype, float | None]) -> Case:
    """Return x [rows, k] times an NVFP4 weight [n, k], against torch's dense weights."""
    weight = _weight(n, k)
    x = torch.randn(rows, k, generator=_seeded())

    def calls(dtype: torch.dtype) -> tuple[Function, Call, Call]:
        kernel = jit.function(Linear(n, k, "nvfp4", _name(dtype)))
        given = x.to(dtype)

        def ours(packed: Tensor, scale: Tensor) -> object:
            return kernel(given, packed, scale, weight.global_scale)

        dense = partial(functional.linear, given)
        rotating = _rotate(ours, weight.packed, weight.scale)
        return kernel, rotating, _rotate(dense, weight.dense[dtype])

    return _against_dense(
        {dtype: calls(dtype) for dtype in SHORT},
        lambda dtype: x.to(dtype).double() @ weight.exact.T,
        bars,
        {"n": n, "k": k, "rows": rows},
    )


# ---- The MoE layer ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    """Weights w13 and w2 in every form, each in as many copies as fill the last cache."""

    exact: list[Tensor]
    stored: list[list[Tensor]]  # codes, scales of w13, codes, scales of w2
    factors: tuple[Tensor, Tensor]
    dense: dict[torch.dtype, list[list[Tensor]]]


@lru_cache(maxsize=1)
def _layer() -> _Layer:
    shapes = ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    factors = torch.full((EXPERTS, 2), H_SCALE / 10), torch.full((EXPERTS,), H_SCALE)
    parts: list[Tensor] = []
    exact: list[Tensor] = []
    for (rows, cols), factor in zip(shapes, factors, strict=True):
        packed, scale, _ = random_packed(EXPERTS * rows, cols)
        values = decode_nvfp4(packed, scale.view(torch.float8_e4m3fn), factor.view(-1)[:1])
        exact.append(values.view(EXPERTS, rows, cols))
        parts += [packed.view(EXPERTS, rows, -1), scale.view(EXPERTS, rows, -1)]
    stored = [copies(parts[0])]
    stored += [copies(part, len(stored[0])) for part in parts[1:]]
    dense = {}
    for dtype in SHORT:
        first = copies(exact[0].to(dtype))
        dense[dtype] = [first, copies(exact[1].to(dtype), len(first))]
    return _Layer(exact, stored, factors, dense)


def eager(
    hidden: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the layer in eager torch: the rows of one expert at a time."""
    out = torch.zeros(hidden.shape, dtype=torch.float32 if dtype != torch.float64 else dtype)
    for expert in ids.unique().tolist():
        token, slot = torch.where(ids == expert)
        gate, up = functional.linear(hidden[token], w13[expert]).chunk(2, dim=-1)
        result = functional.linear(functional.silu(gate) * up, w2[expert])
        out.index_add_(0, token, (result * weights[token, slot, None]).to(out.dtype))
    return out.to(dtype)


def _eager_one(
    hidden: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return `eager` of one token, without gathering and scattering: its fastest form."""
    out = torch.zeros(hidden.shape)
    for expert, weight in zip(ids[0].tolist(), weights[0].tolist(), strict=True):
        gate, up = functional.linear(hidden, w13[expert]).chunk(2, dim=-1)
        out += weight * functional.linear(functional.silu(gate) * up, w2[expert])
    return out.to(dtype)


def _routing(tokens: int, number: int) -> Tensor:
    """Return ids [tokens, TOP_K]: of one token the next pair in each call, else random ones."""
    if tokens == 1:
        return torch.tensor([[2 * number % EXPERTS, (2 * number + 1) % EXPERTS]]).int()
    rng = torch.Generator().manual_seed(number)
    return torch.rand(tokens, EXPERTS, generator=rng).topk(TOP_K).indices.int()


def moe(tokens: int) -> Case:
    """Return the NVFP4 layer of this file's sizes, against eager torch on dense weights."""
    layer = _layer()
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, HIDDEN, generator=rng)
    weights = torch.rand(tokens, TOP_K, generator=rng)
    routings = [_routing(tokens, number) for number in range(EXPERTS // 2)]
    form = _eager_one if tokens == 1 else eager

    def of_call(number: int, lists: list[list[Tensor]]) -> tuple[Tensor, list[Tensor]]:
        """Return the routing of a call, and its copies: all routings on one before the next."""
        turn, routing = divmod(number, len(routings))
        return routings[routing], [items[turn % len(items)] for items in lists]

    def calls(dtype: torch.dtype) -> tuple[Function, Call, Call]:
        spec = FusedMoe(EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, dtype=_name(dtype))
        kernel, given = jit.function(spec), x.to(dtype)
        factor13, factor2 = layer.factors

        def ours(number: int) -> object:
            ids, (w13, s13, w2, s2) = of_call(number, layer.stored)
            return kernel(given, ids, weights, w13, s13, factor13, w2, s2, factor2, 1.0, 1e38)

        def dense(number: int) -> object:
            ids, (w13, w2) = of_call(number, layer.dense[dtype])
            return form(given, w13, w2, ids, weights, dtype)

        return kernel, ours, dense

    def truth(dtype: torch.dtype) -> Tensor:
        given = x.to(dtype).double()
        return eager(given, *layer.exact, routings[0], weights.double(), torch.float64)

    return _against_dense(
        {dtype: calls(dtype) for dtype in SHORT},
        truth,
        {torch.float32: 3.0, torch.bfloat16: 1.2} if tokens == 1 else {},
        {"e": EXPERTS, "k": TOP_K, "h": HIDDEN, "i": INTERMEDIATE, "rows": tokens},
        bfloat16_bound=1e-2,  # h and each expert's row are rounded as well
    )


def all_cases() -> dict[str, Callable[[], Case]]:
    """Return the maker of every case, by name, in the order of measurement."""
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
    sizes = f"e{EXPERTS} top{TOP_K} {HIDDEN}x{INTERMEDIATE}"
    return found | {f"moe nvfp4 {sizes} tokens {t}": partial(moe, t) for t in (1, 16, 128)}
