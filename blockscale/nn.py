"""Torch modules on 4-bit weights: a linear layer, and an MoE layer with its router.

Weights are buffers, not parameters: kernels have no backward, so call modules under
``torch.no_grad()`` or ``torch.inference_mode()``.  ``state_dict`` holds the prepared weights and,
as a tensor of bytes, what they are; a module loads whatever weights of its kind a state has, whose
sizes need not be those that it had.  ``module.to(dtype)`` moves weights, but keeps their dtypes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.compiler import is_compiling

from blockscale import checks, ops_moe, ops_route, ops_weights
from blockscale.moe_call import Options
from blockscale.moe_weights import TENSORS, MoeWeights
from blockscale.ops import quantize
from blockscale.specs_moe import GATED

Tensor = torch.Tensor

META = "meta"
"""Under which name a state has the description of its weights."""


class _Prepared(torch.nn.Module):
    """A module whose weights are buffers that keep their dtypes, and a description of them."""

    _names: tuple[str, ...] = ()
    _meta: dict[str, Any]

    def _hold(self, meta: Mapping[str, Any], tensors: Mapping[str, Tensor | None]) -> None:
        self._meta = dict(meta)
        for name in self._names:
            self.register_buffer(name, tensors.get(name))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers.get(name)
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        text = json.dumps(self._meta).encode()
        destination[prefix + META] = torch.tensor([*text], dtype=torch.uint8)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Take the weights over from ``state_dict``, on the device of those that are here."""
        *_, missing, _, errors = arguments
        bytes_ = state_dict.pop(prefix + META, None)
        if bytes_ is None:
            missing.append(prefix + META)
        else:
            try:
                self._take(json.loads(bytes(bytes_.tolist())), state_dict, prefix)
            except (KeyError, TypeError, ValueError) as error:
                errors.append(f"{prefix or type(self).__name__}: {error}")
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _take(self, meta: dict[str, Any], state: Mapping[str, Any], prefix: str) -> None:
        """Make buffers as large as those of the state, which are copied to them afterwards.

        Those that fit stay: captured CUDA graphs read them.
        """
        self._check_meta(meta)
        devices = {value.device for value in self.buffers(recurse=False)}
        device = devices.pop() if devices else None
        made: dict[str, Tensor | None] = {}
        for name in self._names:
            old, new = self._buffers.get(name), state.get(prefix + name)
            if old is not None and new is not None and _alike(old, new):
                made[name] = old
            else:
                made[name] = None if new is None else torch.empty_like(new, device=device)
        self._hold(meta, made)

    def _check_meta(self, meta: Mapping[str, Any]) -> None:
        """ValueError unless the module can run on such weights."""


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


class Linear(_Prepared):
    """``y = x @ w.T + bias`` on an NVFP4 or MXFP4 weight; see `blockscale.linear`."""

    _names = ("packed", "block_scale", "global_scale", "bias")
    packed: Tensor | None
    block_scale: Tensor | None
    global_scale: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        packed: Tensor | None = None,
        block_scale: Tensor | None = None,
        fmt: str = "nvfp4",
        global_scale: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """Take what `blockscale.quantize` makes.

        Args:
            packed: [N, K / 2]; None: to be loaded.
            block_scale: [N, K / block], linear layout.
            fmt: "nvfp4" or "mxfp4".
            global_scale: [1] float32; None: 1.
            bias: [N]; None: 0.
        """
        super().__init__()
        tensors = (packed, block_scale, global_scale, bias)
        kept = [None if value is None else value.detach() for value in tensors]
        self._hold({"fmt": fmt}, dict(zip(self._names, kept, strict=True)))

    @classmethod
    def from_float(cls, weight: Tensor | torch.nn.Linear, fmt: str = "nvfp4") -> Linear:
        """Return a layer whose weight [N, K] is the given one, or that of a layer, quantised."""
        bias: Tensor | None = None
        if isinstance(weight, torch.nn.Linear):
            bias, weight = weight.bias, weight.weight
        values = checks.tensor("Linear.from_float", "weight", weight, checks.ACTIVATIONS, dims=2)
        values = values.detach().contiguous()
        scale = None
        if fmt == "nvfp4":  # so that the largest block scale is the largest E4M3 value
            scale = (values.abs().amax().float() / (448 * 6)).clamp(min=1e-30).reshape(1)
        packed, block_scale = quantize(values, fmt, scale)
        return cls(packed, block_scale, fmt, scale, None if bias is None else bias.detach().float())

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., N] of x [..., K], in the dtype of x."""
        if self.packed is None or self.block_scale is None:
            raise ValueError("Linear: it has no weight yet; load a state_dict, or pass packed")
        fmt = self._meta["fmt"]
        return ops_weights.linear(
            x, self.packed, self.block_scale, fmt, self.global_scale, self.bias
        )

    def extra_repr(self) -> str:
        """Return sizes and format."""
        n, half = (0, 0) if self.packed is None else self.packed.shape
        return f"in_features={2 * half}, out_features={n}, fmt={self._meta['fmt']}"


class FusedMoE(_Prepared):
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
        self.register_buffer("correction_bias", correction_bias)
        self.register_buffer("a1_scale", a1_scale)
        self.register_buffer("a2_scale", a2_scale)
        self.router, self.shared = router, shared

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
        y = ops_moe.run_experts(rows, weights, topk_ids, topk_weights, options, None)
        if self.shared is not None:
            y = y + self.shared(rows)
        return y.reshape(hidden.shape)

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids and weights of logits [T, E], by the module's options."""
        return ops_route.moe_route(
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
