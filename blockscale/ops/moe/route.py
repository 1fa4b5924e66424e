"""The torch function that chooses the experts of each token.

What is computed, and how ties are broken: `blockscale.tir.moe.route`.
"""

from __future__ import annotations

from typing import Any

import torch

from blockscale.ops import call, checks
from blockscale.ops.call import Checked
from blockscale.ops.checks import dtype_name
from blockscale.specs import MoeRoute
from blockscale.specs.gemm import MAX_EXPERTS
from blockscale.specs.moe import MAX_TOP_K, SCORINGS

Tensor = torch.Tensor

_WHERE = "moe_route"


def moe_route(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    correction_bias: Tensor | None = None,
    n_group: int | None = None,
    topk_group: int | None = None,
    scale: float = 1.0,
    topk_ids: Tensor | None = None,
    topk_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``(topk_ids, topk_weights)``: the best experts of each token, the best one first.

    Args:
        logits: [T, E] float32, bfloat16 or float16; scores are float32.
        top_k: experts of a token.
        scoring: "softmax" over all experts, or "sigmoid".
        renormalize: divide a token's weights by their sum.
        correction_bias: [E] float32, added to the scores when experts are chosen, but not to the
            weights; None: 0.
        n_group: groups of neighbouring experts, of which the ``topk_group`` best are left to choose
            from, by the sum of their two best scores if there is a correction_bias, else by their
            best one; None: 1.
        topk_group: None: n_group.
        scale: factor of all weights, after they are renormalised.
        topk_ids, topk_weights: outputs as below; None: allocated.

    Returns:
        topk_ids: [T, top_k] int32; the lower id first where scores are equal.
        topk_weights: [T, top_k] float32.

    Raises:
        TypeError: an argument that is no tensor, or of another dtype.
        ValueError: an unknown option, shape, device or stride, more experts than there are.
    """
    groups = 1 if n_group is None else n_group
    kept = groups if topk_group is None else topk_group
    experts, plain = checks.last_size(logits), correction_bias is None
    options = top_k, scoring, renormalize, groups, kept, experts, plain
    given = logits, correction_bias, scale, topk_ids, topk_weights
    return _ROUTE.run(options, given)


class _Route(call.Op[tuple[Tensor, Tensor]]):
    def recorded(self, options: Any, given: Any) -> tuple[Tensor, Tensor]:
        logits, bias, scale, *outputs = given
        top_k, scoring, renormalize, groups, kept, *_ = options
        modes = top_k, scoring, renormalize, bias, groups, kept, scale
        ids, weights = call.operator(self.name)(logits, *modes)
        return call.copied(outputs[0], ids), call.copied(outputs[1], weights)

    def ready(self, spec: Any, options: Any, given: Any) -> call.Ready:
        logits, bias, scale, ids, weights = given
        factor = checks.number(self.name, "scale", scale)
        outputs = _outputs(logits, options[0], ids, weights)
        if bias is None:
            return (logits, factor, *outputs), outputs
        return (logits, bias, factor, *outputs), outputs

    def check(self, options: Any, given: Any) -> Checked:
        logits, bias, scale, *outputs = given
        top_k, scoring, renormalize, groups, kept, *_ = options
        spec = _check(logits, top_k, scoring, renormalize, bias, groups, kept, scale)
        ids, weights = _outputs(logits, top_k, *outputs)
        shape = len(logits), top_k
        checks.like(_WHERE, "topk_ids", ids, (torch.int32,), "logits", logits, shape)
        checks.like(_WHERE, "topk_weights", weights, (torch.float32,), "logits", logits, shape)
        given = () if bias is None else (bias,)
        arguments = logits, *given, float(scale), ids, weights
        return Checked(spec if len(logits) else None, arguments, (ids, weights))


_ROUTE = _Route(_WHERE)


def _outputs(
    logits: Tensor, top_k: int, ids: Tensor | None, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], top_k
    if ids is None:
        ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    if weights is None:
        weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    return ids, weights


def _check(
    logits: Tensor,
    top_k: int,
    scoring: str,
    renormalize: bool,
    correction_bias: Tensor | None,
    n_group: int,
    topk_group: int,
    scale: float,
) -> MoeRoute:
    """Return the spec of the kernel."""
    checks.choice(_WHERE, "scoring", scoring, SCORINGS)
    checks.tensor(_WHERE, "logits", logits, checks.ACTIVATIONS, dims=2)
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= MAX_EXPERTS:
        raise ValueError(
            f"{_WHERE}: logits has shape {list(logits.shape)}, but must have [T, E], E from 1 to "
            f"{MAX_EXPERTS}: a number for each expert"
        )
    experts = int(logits.shape[1])
    for name, value in (("top_k", top_k), ("n_group", n_group), ("topk_group", topk_group)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{_WHERE}: {name}={value!r} is not a positive integer; pass a count")
    if experts % n_group:
        raise ValueError(
            f"{_WHERE}: n_group={n_group} does not divide the {experts} experts of logits; choose "
            "a divisor, or None for one group"
        )
    if topk_group > n_group:
        raise ValueError(
            f"{_WHERE}: topk_group={topk_group} is more than n_group={n_group}; keep at most as "
            "many groups as there are"
        )
    left = experts // n_group * topk_group
    if top_k > min(left, MAX_TOP_K):
        raise ValueError(
            f"{_WHERE}: top_k={top_k} is more than {min(left, MAX_TOP_K)}, as {left} experts are "
            f"left to choose from, and a token has at most {MAX_TOP_K}; choose fewer"
        )
    if correction_bias is not None:
        checks.beside(
            _WHERE, "correction_bias", correction_bias, (torch.float32,), "logits", logits
        )
        rest = ": one number for each expert"
        checks.sized(_WHERE, "correction_bias", correction_bias, [[experts]], rest)
    checks.number(_WHERE, "scale", scale)
    given = correction_bias is not None
    modes = dtype_name(logits.dtype), scoring, bool(renormalize), given
    return MoeRoute(experts, top_k, *modes, n_group, topk_group)


def _route_op(
    logits: Tensor,
    top_k: int,
    scoring: str = "softmax",
    renormalize: bool = True,
    correction_bias: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    if not checks.has_data():
        _check(logits, top_k, scoring, renormalize, correction_bias, n_group, topk_group, scale)
        return _outputs(logits, top_k, None, None)
    options = top_k, scoring, renormalize, n_group, topk_group, logits.shape[-1]
    given = logits, correction_bias, scale, None, None
    return _ROUTE.run((*options, correction_bias is None), given)


call.define(
    _WHERE,
    "(Tensor logits, SymInt top_k, str scoring='softmax', bool renormalize=True, "
    "Tensor? correction_bias=None, SymInt n_group=1, SymInt topk_group=1, float scale=1.) "
    "-> (Tensor, Tensor)",
    _route_op,
)
