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

from bench import measure, reference
from bench.gpu import cases as ops
from bench.gpu.contest import checked, ours
from bench.measure import Data, copies
from bench.peers.ops import Run
from blockscale import fp8_scale_candidates
from blockscale.demo.metrics import decode_nvfp4, row_errors
from blockscale.demo.timing import Call
from blockscale.runtime import jit
from blockscale.runtime.function import Function
from blockscale.specs import FusedMoe, Linear, ScaleSweep, Spec

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
    weight = torch.randn(rows * cols // 16, 16, generator=_seeded()).bfloat16()
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


# ---- Ops that `bench.gpu` measures, too: same data, same judge ----------------------------------


def _op(
    case: ops.Case,
    formulas: Mapping[str, Run],
    others: Mapping[str, Call],
    comparisons: tuple[Comparison, ...],
    **about: Any,
) -> Case:
    """Return the case of an op against torch ``formulas``, which must be right, and ``others``."""
    kernel = jit.function(Spec.parse(case.kernel))
    torch.manual_seed(0)
    shared = case.shared()
    rotating = measure.rotating(case.buffers, measure.copies_needed(case.footprint), "cpu")
    sets = [{**data, **shared} for data in rotating]
    arguments = [measure.bound(kernel, data) for data in sets]

    def check() -> dict[str, float]:
        for name, run in {"ours": ours(kernel), **formulas}.items():
            verdict = checked(case, run, sets[0], tolerated=0)
            of = f"{verdict['differ']} of {verdict['of']} bytes"
            need(verdict["right"], f"{of} of {case.op}, {name}, differ from the reference")
        return {"ours": 0.0}

    def rotated(run: Run) -> Call:
        return lambda number: run(sets[number % len(sets)])

    return Case(
        {
            "ours": lambda number: kernel(*arguments[number % len(arguments)]),
            **{name: rotated(run) for name, run in formulas.items()},
            **others,
        },
        comparisons,
        check,
        (kernel,),
        {"error": "0: every bit is that of the torch formula", **about},
    )


def dequantise(rows: int = SIZE, cols: int = SIZE) -> Case:
    """Return NVFP4 to bfloat16, against a copy of the output and one that moves as many bytes."""
    case = ops.dequantise(rows, cols, "cpu")
    written, moved = case.buffers["out"].bytes, case.moved

    def copy(size: int) -> Call:
        source = torch.zeros(size // 2, dtype=torch.bfloat16)
        return _rotate(lambda a, b: b.copy_(a), copies(source), copies(source))

    sized, moving = f"copy of {written / 1e6:.1f} MB", f"copy of {moved / 2e6:.1f} MB"
    return _op(
        case,
        {},
        {sized: copy(written), moving: copy(moved // 2)},
        (Comparison("ours", sized, "within", 2.0), Comparison("ours", moving, "within", 2.0)),
        bytes_moved={"ours": moved, sized: 2 * written, moving: moved},
    )


def quantise(rows: int = SIZE, cols: int = SIZE) -> Case:
    """Return bfloat16 to NVFP4, against the formula in eager torch, whole and in chunks of rows."""

    def outputs(made: tuple[Tensor, Tensor]) -> Data:
        return {"packed": made[0], "block_scale": made[1].view(torch.uint8)}

    whole, chunked = "eager torch", f"eager torch, {CHUNK_ROWS} rows at a time"
    by_chunks = partial(reference.quantize_chunked, rows=CHUNK_ROWS)
    formulas: dict[str, Run] = {
        whole: lambda d: outputs(reference.quantize_eager(d["x"], d["global_scale"])),
        chunked: lambda d: outputs(by_chunks(d["x"], d["global_scale"])),
    }
    comparisons = tuple(Comparison("ours", name, "faster", 5.0) for name in formulas)
    return _op(ops.quantise(rows, cols, "cpu"), formulas, {}, comparisons)


def swizzle(rows: int = SIZE, cols: int = SIZE // 16) -> Case:
    """Return the scales of a 4096 x 4096 weight to the 128x4 layout, against permute in torch."""
    permute: Run = lambda d: {"out": reference.swizzle(d["scale"])}  # noqa: E731
    comparison = Comparison("ours", "torch permute", "faster")
    return _op(ops.swizzle(rows, cols, "cpu"), {"torch permute": permute}, {}, (comparison,))


# ---- Linear layers ------------------------------------------------------------------------------


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
            if dtype == torch.bfloat16 and bfloat16_bound is not None:
                bound = bfloat16_bound
            bounds[name] = dtype, bound

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
        w13, w2 = layer.exact
        return eager(given, w13, w2, routings[0], weights.double(), torch.float64)

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
