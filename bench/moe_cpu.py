"""The MoE layer on a CPU: NVFP4 experts against eager torch on their dense weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from bench.cases import KERNEL_BOUND, SHORT, TORCH_BOUND, Case, Comparison, need, random_packed
from bench.timing import Call, copies
from blockscale.demo.metrics import decode_nvfp4, row_errors
from blockscale.runtime import jit
from blockscale.runtime.function import Function
from blockscale.specs import FusedMoe

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 8, 2, 1024, 2816
BARS = {torch.float32: 3.0, torch.bfloat16: 1.2}
"""Asked of one token."""

H_SCALE = 0.05
"""Global scale of w2, and a tenth of that of w13: keeps gate, up and the result of the order 1."""


class _Weights(NamedTuple):
    """Stored weights, each in as many copies as fill the last cache; dense ones by dtype."""

    exact: tuple[Tensor, Tensor]
    stored: tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
    factors: tuple[Tensor, Tensor]
    dense: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]]


def _packed(rows: int, cols: int) -> tuple[Tensor, Tensor]:
    packed, scale, _ = random_packed(EXPERTS * rows, cols)
    return packed.view(EXPERTS, rows, -1), scale.view(EXPERTS, rows, -1)


@lru_cache(maxsize=1)
def _weights() -> _Weights:
    shapes = ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    factors = torch.full((EXPERTS, 2), H_SCALE / 10), torch.full((EXPERTS,), H_SCALE)
    stored, exact = [], []
    for (rows, cols), factor in zip(shapes, factors, strict=True):
        packed, scale = _packed(rows, cols)
        flat = packed.view(-1, cols // 2), scale.view(-1, cols // 16).view(torch.float8_e4m3fn)
        exact.append(decode_nvfp4(*flat, factor.view(-1)[:1]).view(EXPERTS, rows, cols))
        stored += [packed, scale]
    rotating = [copies(stored[0])]
    rotating += [copies(tensor, len(rotating[0])) for tensor in stored[1:]]
    dense = {dtype: (copies(exact[0].to(dtype)), copies(exact[1].to(dtype))) for dtype in SHORT}
    return _Weights(
        (exact[0], exact[1]),
        (rotating[0], rotating[1], rotating[2], rotating[3]),
        factors,
        {dtype: (first, second[: len(first)]) for dtype, (first, second) in dense.items()},
    )


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
    made = _weights()
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, HIDDEN, generator=rng)
    weights = torch.rand(tokens, TOP_K, generator=rng)
    routings = [_routing(tokens, number) for number in range(EXPERTS // 2)]
    form = _eager_one if tokens == 1 else eager
    contenders: dict[str, Call] = {}
    kernels: list[Function] = []
    for dtype, name in SHORT.items():
        spec = FusedMoe(
            EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, dtype=str(dtype).removeprefix("torch.")
        )
        kernels.append(jit.function(spec))
        given = x.to(dtype)

        def ours(number: int, kernel: Function = kernels[-1], given: Tensor = given) -> object:
            w13, s13, w2, s2 = (
                items[number // len(routings) % len(items)] for items in made.stored
            )
            factor13, factor2 = made.factors
            ids = routings[number % len(routings)]
            return kernel(given, ids, weights, w13, s13, factor13, w2, s2, factor2, 1.0, 1e38)

        def dense(number: int, given: Tensor = given, dtype: torch.dtype = dtype) -> object:
            w13, w2 = (items[number // len(routings) % len(items)] for items in made.dense[dtype])
            return form(given, w13, w2, routings[number % len(routings)], weights, dtype)

        contenders[f"ours {name}"], contenders[f"torch {name}"] = ours, dense
    bars = BARS if tokens == 1 else {}
    return Case(
        contenders,
        tuple(
            Comparison(f"ours {name}", f"torch {name}", "faster", bars.get(dtype))
            for dtype, name in SHORT.items()
        ),
        partial(_check, contenders, x, routings[0], weights),
        tuple(kernels),
        {
            "error": "largest relative error of a row against float64",
            "shape": {"e": EXPERTS, "k": TOP_K, "h": HIDDEN, "i": INTERMEDIATE, "rows": tokens},
        },
    )


def _check(
    contenders: dict[str, Call], x: Tensor, ids: Tensor, weights: Tensor
) -> dict[str, float]:
    """Return the errors of all contenders; bfloat16 rounds h, each expert's row and the result."""
    errors = {}
    for name, call in contenders.items():
        dtype = torch.bfloat16 if name.endswith("bf16") else torch.float32
        bounds = KERNEL_BOUND if name.startswith("ours") else TORCH_BOUND
        bound = 1e-2 if dtype == torch.bfloat16 else bounds[dtype]
        w13, w2 = _weights().exact
        truth = eager(x.to(dtype).double(), w13, w2, ids, weights.double(), torch.float64)
        errors[name] = row_errors(call(0), truth).max().item()  # type: ignore[arg-type]
        right = errors[name] <= bound  # NaN is wrong too
        need(right, f"{name} errs by {errors[name]:.1e}, allowed {bound:.0e}")
    return errors


def moe_cases() -> dict[str, Callable[[], Case]]:
    """Return the maker of every case, by name."""
    sizes = f"e{EXPERTS} top{TOP_K} {HIDDEN}x{INTERMEDIATE}"
    return {f"moe nvfp4 {sizes} tokens {t}": partial(moe, t) for t in (1, 16, 128)}
