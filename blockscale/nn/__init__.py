"""Torch modules on 4-bit weights: a linear layer, and an MoE layer with its router.

Weights are buffers, not parameters: kernels have no backward, so call modules under
``torch.no_grad()`` or ``torch.inference_mode()``.  ``state_dict`` holds the prepared weights and,
as a tensor of bytes, what they are; a module loads whatever weights of its kind a state has, whose
sizes need not be those that it had.  ``module.to(dtype)`` moves weights, but keeps their dtypes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling

from blockscale.nn.int4 import Int4Linear
from blockscale.nn.parts import META, Linear, Prepared, Router, SharedExpert
from blockscale.ops.moe import layer as ops_moe
from blockscale.ops.moe.layer import Options
from blockscale.ops.moe.weights import TENSORS, MoeWeights
from blockscale.specs.moe import GATED

if TYPE_CHECKING:
    from blockscale.checkpoints import Checkpoint

Tensor = torch.Tensor

__all__ = ["META", "FusedMoE", "Int4Linear", "Linear", "Router", "SharedExpert"]


class FusedMoE(Prepared):
    """The experts of an MoE layer, with what chooses them and what is added to them.

    The result is ``fused_moe(hidden, weights, *moe_route(logits, top_k))``, plus that of the shared
    expert where there is one.
    """

    _names = TENSORS
    _known: tuple[list[Tensor | None], MoeWeights | None]
    """The buffers of the last call as weights, which takes 9 us to make."""

    w13: Tensor | None
    correction_bias: Tensor | None
    a1_scale: Tensor | None
    a2_scale: Tensor | None

    def __init__(
        self,
        weights: MoeWeights | None,
        top_k: int,
        *,
        activation: str = "swiglu",
        alpha: float | None = None,
        limit: float | None = None,
        act_fmt: str | None = None,
        a1_scale: Tensor | None = None,
        a2_scale: Tensor | None = None,
        scoring: str = "softmax",
        renormalize: bool = True,
        correction_bias: Tensor | None = None,
        n_group: int | None = None,
        topk_group: int | None = None,
        scale: float = 1.0,
        router: torch.nn.Module | None = None,
        shared: torch.nn.Module | None = None,
        weight_on_input: bool = False,
    ) -> None:
        """Take prepared weights and the options of the functions.

        Args:
            weights: of `blockscale.prepare_moe_weights`; None: to be loaded.
            top_k: experts of a token.
            activation, alpha, limit, act_fmt, a1_scale, a2_scale: as in `blockscale.fused_moe`.
            scoring, renormalize, correction_bias, n_group, topk_group, scale: as in
                `blockscale.moe_route`.
            router: makes logits [T, E] of hidden; None: the caller passes logits, or ids and
                weights.
            shared: what is added for every token: a module from [T, H] to [T, H].
            weight_on_input: top_k=1 only: the weight multiplies the expert's input and not its
                result, as in Llama 4.
        """
        super().__init__()
        if weights is None:
            self._hold({"gated": activation in GATED}, {})
        else:
            self._hold(weights.meta(), dict(weights.tensors()))
        self.top_k = top_k
        self.activation, self.alpha, self.limit = activation, alpha, limit
        self.act_fmt, self.scoring, self.renormalize = act_fmt, scoring, renormalize
        self.n_group, self.topk_group, self.scale = n_group, topk_group, scale
        if weight_on_input and top_k != 1:
            raise ValueError(
                f"FusedMoE: weight_on_input=True with top_k={top_k}, but a token's input is the "
                "same for all its experts; pass top_k=1"
            )
        self.weight_on_input = weight_on_input
        self.register_buffer("correction_bias", correction_bias)
        self.register_buffer("a1_scale", a1_scale)
        self.register_buffer("a2_scale", a2_scale)
        self.router, self.shared = router, shared

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: str | Path | Checkpoint,
        name: str,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype = torch.bfloat16,
        fmt: str | None = None,
        layout: str | None = None,
        **options: Any,
    ) -> FusedMoE:
        """Return the MoE layer ``name`` of a checkpoint: experts, router and shared expert.

        How experts are chosen, and the activation, come from config.json.

        Args:
            checkpoint: a folder, a file, or what `blockscale.checkpoints.open` returned.
            name: of the module, e.g. "model.layers.0.mlp".
            device: where the weights go; None: the CPU.
            dtype: of the activations.
            fmt: "nvfp4" or "mxfp4": what experts of more bits are quantised to; None: 4-bit ones
                only, which are not rounded.
            layout: "linear" or "tiles64"; None: that of the device.
            options: of the constructor, in place of what config.json says; ``router`` and
                ``shared`` in place of the checkpoint's.

        Raises:
            CheckpointError: there are no experts of this name or they do not fit each other, or
                config.json does not say how they are chosen.
        """
        from blockscale.nn import checkpoint as nn_checkpoint

        ckpt = nn_checkpoint.opened(checkpoint)
        return nn_checkpoint.moe(ckpt, name, device, dtype, fmt, layout, options)

    def _hold(self, meta: Mapping[str, Any], tensors: Mapping[str, Tensor | None]) -> None:
        super()._hold(meta, tensors)
        self._known = [None] * len(TENSORS), None

    @property
    def weights(self) -> MoeWeights:
        """The prepared weights: the module's buffers."""
        if self.w13 is None:
            raise ValueError(
                "FusedMoE: it has no weights yet; load a state_dict, or pass prepared weights"
            )
        held = [self._buffers[name] for name in TENSORS]
        if is_compiling():
            return MoeWeights.of(self._meta, dict(zip(TENSORS, held, strict=True)))
        tensors, known = self._known
        if known is None or any(a is not b for a, b in zip(tensors, held, strict=True)):
            known = MoeWeights.of(self._meta, dict(zip(TENSORS, held, strict=True)))
            self._known = held, known
        return known

    def forward(
        self,
        hidden: Tensor,
        logits: Tensor | None = None,
        *,
        topk_ids: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> Tensor:
        """Return [..., H] of hidden [..., H].

        Args:
            hidden: rows of tokens.
            logits: [..., E]; None: the router makes them.
            topk_ids, topk_weights: [..., k], of a router of the caller's, in place of logits.
        """
        weights = self.weights  # first: that they are missing matters more than what a router says
        rows = hidden.reshape(-1, hidden.shape[-1])
        if topk_ids is None:
            logits = self._logits(rows) if logits is None else logits
            topk_ids, topk_weights = self.route(logits.reshape(-1, logits.shape[-1]))
        elif topk_weights is not None:
            topk_ids = topk_ids.reshape(-1, topk_ids.shape[-1])
            topk_weights = topk_weights.reshape(-1, topk_weights.shape[-1])
        options = Options(
            *(self.activation, self.alpha, self.limit, self.act_fmt),
            *(self.a1_scale, self.a2_scale),
        )
        inputs = rows
        if self.weight_on_input and topk_weights is not None:
            inputs = (rows.float() * topk_weights.float()).to(rows.dtype)
            topk_weights = torch.ones_like(topk_weights)
        y = ops_moe.run_experts(inputs, weights, topk_ids, topk_weights, options, None)
        if self.shared is not None:
            y = y + self.shared(rows)
        return y.reshape(hidden.shape)

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids and weights of logits [T, E], by the module's options."""
        return ops_moe.moe_route(
            logits,
            self.top_k,
            scoring=self.scoring,
            renormalize=self.renormalize,
            correction_bias=self.correction_bias,
            n_group=self.n_group,
            topk_group=self.topk_group,
            scale=self.scale,
        )

    def _logits(self, rows: Tensor) -> Tensor:
        if self.router is None:
            raise ValueError(
                "FusedMoE: neither logits nor topk_ids are given, and the module has no router; "
                "pass one of them, or a router to the constructor"
            )
        made: Tensor = self.router(rows)
        return made

    def _check_meta(self, meta: Mapping[str, Any]) -> None:
        if meta.get("gated") != self._meta["gated"]:
            raise ValueError(
                f"the state has gated={meta.get('gated')} experts, but the module's activation "
                f"is {self.activation!r}; load a state of the same activation"
            )

    def extra_repr(self) -> str:
        """Return sizes and formats."""
        names = ("experts", "hidden", "intermediate", "fmt", "layout")
        known = ", ".join(f"{name}={self._meta.get(name)}" for name in names)
        return f"{known}, top_k={self.top_k}, activation={self.activation}"
