"""Our MoE layer in `bench.moe`: the whole layer, and its GEMMs alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bench import moe_data
from bench.gpu_measure import bound
from bench.moe_cases import GROUP, Case, spec_of
from bench.moe_data import Inputs, Weights


@dataclass(frozen=True, eq=False)
class Layer:
    """One call of the whole layer; ``error`` checks it after a run."""

    run: Callable[[], object]
    error: Callable[[], float]


class Ours:
    """Our function on one layer; ValueError if the libraries lack it."""

    def __init__(self, weights: Weights, kernels: Mapping[str, Any]) -> None:
        from blockscale import prepare_moe_weights

        model = weights.model
        self.weights = weights
        self.spec = spec_of(model, weights.fmt)
        if self.spec.name not in kernels:
            raise ValueError(f"no given library has {self.spec.name}")
        self.kernel = kernels[self.spec.name]
        self.prepared = prepare_moe_weights(
            *(weights.w13, weights.w2),
            fmt=weights.fmt,
            w13_scale=weights.w13_scale,
            w2_scale=weights.w2_scale,
            w13_global_scale=weights.w13_global,
            w2_global_scale=weights.w2_global,
            activation=model.activation,
            group_size=GROUP[weights.fmt],
            dtype=torch.bfloat16,
        )

    def layer(self, case: Case, inputs: Inputs) -> Layer:
        """Return a call with a workspace and a result of its own."""
        out = torch.full_like(inputs.x, float("nan"))
        size = self.spec.workspace_bytes(case.tokens)
        data = {
            "hidden": inputs.x,
            "topk_ids": inputs.ids.to(torch.int32),
            "topk_weights": inputs.weights,
            "out": out,
            "workspace": torch.zeros(size, dtype=torch.uint8, device=inputs.x.device),
        }
        names = {param.name for param in self.kernel.params}
        for name in ("w13", "w13_scale", "w13_global", "w2", "w2_scale", "w2_global"):
            if name in names:
                data[name] = getattr(self.prepared, name)
        given: list[Any] = bound(self.kernel, data)

        def error() -> float:
            return max(
                moe_data.error_of(out[token], moe_data.layer_of(self.weights, inputs, token))
                for token in moe_data.some_tokens(case.tokens)
            )

        return Layer(lambda: self.kernel(*given), error)
