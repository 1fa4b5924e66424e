"""Experts of transformers' models: what is between their GEMMs, and the module in their place.

The model's own router stays: experts are called with what it has chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from blockscale.base.errors import CheckpointError
from blockscale.nn import FusedMoE
from blockscale.ops.moe.weights import MoeWeights
from blockscale.specs.moe import ALPHA, LIMIT

Tensor = torch.Tensor

_MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
"""Attributes that `use_experts_implementation` of transformers gives to modules of experts."""
_NEAR = 1e-5
_ALPHAS, _LIMITS = ("alpha", "swiglu_alpha"), ("limit", "swiglu_limit")


@dataclass(frozen=True)
class Act:
    """What is between both GEMMs, as `blockscale.fused_moe` takes it."""

    activation: str
    alpha: float | None = None
    limit: float | None = None


def is_experts(module: torch.nn.Module) -> bool:
    """Return whether transformers calls the module as ``(hidden, top_k_index, top_k_weights)``."""
    return all(hasattr(module, name) for name in _MARKS)


def activation_of(name: str, module: Any) -> Act:
    """Return the activation of a module of experts, found by trying it on some numbers.

    Raises:
        CheckpointError: no kernel has it.
    """
    if getattr(module, "has_post_expert_norm", False):
        raise CheckpointError(
            f"{name} ({type(module).__name__}) normalises what each expert returns, which no "
            "kernel of blockscale does; load the model without blockscale"
        )
    with torch.no_grad(), torch.device("cpu"):  # the model is being made on the device "meta"
        rising = torch.linspace(-12, 12, 97, dtype=torch.float32)
        gate, up = rising, rising.flip(0).roll(31) * 0.75
        if module.has_gate:
            joined = torch.cat([gate, up]) if module.is_concatenated else _alternating(gate, up)
            found = module._apply_gate(joined[None])[0]
        else:
            found = module.act_fn(gate)
        for act, formula in _candidates(module):
            if torch.allclose(found, formula(gate, up), rtol=_NEAR, atol=_NEAR):
                return act
    raise CheckpointError(
        f"{name} ({type(module).__name__}) has an activation that no kernel of blockscale has; it "
        "must be silu(gate) * up, gelu_tanh(gate) * up, that of gpt-oss, or relu(x)^2 without "
        "gates; load the model without blockscale"
    )


def _alternating(gate: Tensor, up: Tensor) -> Tensor:
    return torch.stack([gate, up], -1).flatten()


def _candidates(module: Any) -> Iterator[tuple[Act, Callable[[Tensor, Tensor], Tensor]]]:
    """Yield activations of the kernels, and what each makes of gate and up."""
    if not module.has_gate:
        yield Act("relu2"), lambda g, u: g.relu().square()
        return

    def swish(alpha: float, limit: float, plus: float) -> Callable[[Tensor, Tensor], Tensor]:
        def formula(g: Tensor, u: Tensor) -> Tensor:
            g, u = g.clamp(max=limit), u.clamp(-limit, limit)
            return g * torch.sigmoid(alpha * g) * (u + plus)

        return formula

    endless = float("inf")
    yield Act("swiglu"), swish(1.0, endless, 0.0)
    yield (
        Act("gelu_tanh"),
        lambda g, u: torch.nn.functional.gelu(g, approximate="tanh") * u,
    )
    alphas = [*_numbers(module, _ALPHAS), ALPHA["swiglu_oai"], 1.0]
    limits = [*_numbers(module, _LIMITS), LIMIT["swiglu_oai"], endless]
    for alpha in alphas:
        for limit in limits:
            known = None if limit == endless else limit
            yield Act("swiglu_oai", alpha, limit), swish(alpha, limit, 1.0)
            yield Act("swiglu", alpha, known), swish(alpha, limit, 0.0)


def _numbers(module: Any, names: tuple[str, ...]) -> list[float]:
    found = [getattr(module, name, None) for name in names]
    return [float(value) for value in found if isinstance(value, int | float)]


class ModelExperts(torch.nn.Module):
    """`blockscale.nn.FusedMoE`, called as transformers calls experts."""

    def __init__(self, weights: MoeWeights, act: Act) -> None:
        """Take prepared weights, and what is between their GEMMs."""
        super().__init__()
        self.moe = FusedMoE(weights, 1, activation=act.activation, alpha=act.alpha, limit=act.limit)

    @property
    def num_experts(self) -> int:
        """Return how many there are."""
        return self.moe.weights.experts

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sums [T, H] of rows [T, H], by experts [T, k] and weights [T, k]."""
        made: Tensor = self.moe(
            hidden_states,
            topk_ids=top_k_index.to(torch.int32),
            topk_weights=top_k_weights.float(),
        )
        return made
