"""Random weights of an MoE layer as checkpoints hold them, and dense references of a few rows.

Codes are random bytes, written on the device; scales make outputs of size about 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench import reference
from bench.measure import row_error
from bench.moe.cases import GROUP, Case, Model

RMS = {"nvfp4": 2.93, "mxfp4": 2.93, "int4": 4.64}  # of uniformly random codes
SWIGLU_OAI = (1.702, 7.0)  # alpha, limit
ROW_ERROR = 1e-2  # relative, of a row: what is asked of every contender


@dataclass(frozen=True, eq=False)
class Weights:
    """One layer: w13 [E, 2I, H/2] (gate rows, then up rows), w2 [E, H, I/2], low nibble first.

    Scales are linear: E4M3 or E8M0 bytes, or bfloat16; nvfp4 has a float32 factor an expert.
    """

    model: Model
    fmt: str
    w13: Tensor
    w13_scale: Tensor
    w13_global: Tensor | None
    w2: Tensor
    w2_scale: Tensor
    w2_global: Tensor | None


@dataclass(frozen=True, eq=False)
class Inputs:
    """One call: x [T, H], ids and weights [T, k]."""

    x: Tensor
    ids: Tensor
    weights: Tensor


def _codes(shape: tuple[int, ...], device: str) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, device=device).random_(0, 256)


def _scales(fmt: str, shape: tuple[int, ...], k: int, device: str) -> tuple[Tensor, Tensor | None]:
    """Return scales, and the factors of nvfp4, that make a row of k weights of size 1."""
    size = 1 / (RMS[fmt] * math.sqrt(k))
    if fmt == "nvfp4":
        codes = torch.randint(0x30, 0x40, shape, device=device, dtype=torch.uint8)  # 0.5 to 1.875
        return codes, torch.full(shape[:1], size, dtype=torch.float32, device=device)
    if fmt == "mxfp4":
        middle = 127 + round(math.log2(size))
        return torch.randint(middle - 1, middle + 2, shape, device=device, dtype=torch.uint8), None
    scale = torch.rand(shape, device=device, dtype=torch.float32).add_(0.5).mul_(size)
    return scale.to(torch.bfloat16), None


def random_weights(model: Model, fmt: str, device: str = "cuda", seed: int = 0) -> Weights:
    """Return a layer."""
    torch.manual_seed(seed)
    rows, hidden, inner = 2 * model.intermediate, model.hidden, model.intermediate
    experts, group = model.experts, GROUP[fmt]
    s13, g13 = _scales(fmt, (experts, rows, hidden // group), hidden, device)
    s2, g2 = _scales(fmt, (experts, hidden, inner // group), inner, device)
    return Weights(
        model,
        fmt,
        _codes((experts, rows, hidden // 2), device),
        s13,
        g13,
        _codes((experts, hidden, inner // 2), device),
        s2,
        g2,
    )


def random_inputs(case: Case, ids: Tensor, device: str = "cuda") -> Inputs:
    """Return a call with these ids."""
    x = torch.randn(case.tokens, case.model.hidden, dtype=torch.bfloat16, device=device)
    weights = torch.rand(case.tokens, case.model.top_k, device=device).add_(0.1)
    return Inputs(x, ids.to(device), weights / weights.sum(1, keepdim=True))


def dequantised(weights: Weights, which: str, expert: int) -> Tensor:
    """Return w13 or w2 of one expert, float32 [rows, K]."""
    packed = getattr(weights, which)[expert]
    codes = reference.unpack(packed)
    scale = getattr(weights, f"{which}_scale")[expert]
    if weights.fmt == "int4":
        values, factors = codes.float() - 8, scale.float()
    else:
        values = reference.e2m1_values(codes.int())
        if weights.fmt == "nvfp4":
            factors = scale.view(torch.float8_e4m3fn).float()
        else:
            factors = torch.exp2(scale.float() - 127)
    values = values * factors.repeat_interleave(GROUP[weights.fmt], dim=-1)
    factor = getattr(weights, f"{which}_global")
    return values if factor is None else values * factor[expert]


def times(weights: Weights, which: str, expert: int, x: Tensor) -> Tensor:
    """Return x times w13 or w2 of one expert, float32 [rows of x, rows of the weights]."""
    # float64: TF32 or split sums must not blur what contenders are judged by.
    return (x.double() @ dequantised(weights, which, expert).double().T).float()


def swiglu_oai(y: Tensor) -> Tensor:
    """Return gpt-oss's activation of [.., 2I] (gate columns, then up columns), float32."""
    gate, up = y.float().chunk(2, dim=-1)
    alpha, limit = SWIGLU_OAI
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def activated(model: Model, y: Tensor) -> Tensor:
    """Return the model's activation of [.., 2I] (gate columns, then up columns), float32."""
    if model.activation == "swiglu_oai":
        return swiglu_oai(y)
    gate, up = y.float().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def layer_of(weights: Weights, inputs: Inputs, token: int) -> Tensor:
    """Return the whole layer's result for one token, float32 [H]."""
    result = torch.zeros(weights.model.hidden, device=inputs.x.device)
    for expert, factor in zip(
        inputs.ids[token].tolist(), inputs.weights[token].tolist(), strict=True
    ):
        y = times(weights, "w13", expert, inputs.x[token : token + 1])
        h = activated(weights.model, y).to(torch.bfloat16)
        result += factor * times(weights, "w2", expert, h)[0]
    return result


def some(count: int) -> list[int]:
    """Return the first, a middle and the last of so many: which rows are checked."""
    return sorted({0, count // 2, count - 1})


@dataclass(frozen=True, eq=False)
class Pair:
    """gemm1 and gemm2 of one call, ready to run; ``error`` checks them after a run."""

    run: Callable[[], object]
    error: Callable[[], float]


def gemm_error(
    weights: Weights,
    which: str,
    ids: Tensor,
    x: Callable[[int], Tensor],
    y: Callable[[int], Tensor],
    activation: Callable[[Tensor], Tensor] = lambda product: product,
) -> float:
    """Return the largest relative error of some rows: y(slot) against x(slot) times the weights."""
    flat = ids.reshape(-1).tolist()
    return max(
        row_error(y(slot), activation(times(weights, which, flat[slot], x(slot)[None])))
        for slot in some(len(flat))
    )


def row_scales(x: Tensor) -> Tensor:
    """Return the scales of "fp8", [rows, 1]; a quotient by a number would be a product on a GPU."""
    return x.float().abs().amax(-1, keepdim=True) / torch.full((1,), 448.0, device=x.device)
