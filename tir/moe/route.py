"""Router of a MoE layer: the top_k experts of each token by the score of its logits.

score = softmax over all experts (float32, the largest logit subtracted) or 1 / (1 + exp(-logit));
choice = score + correction_bias.  With n_group > 1, groups of neighbouring experts: a group counts
the sum of its two largest choices if there is a bias, else its largest; experts outside of the
topk_group best groups are out.  The top_k largest choices are taken in descending order, and of
equal ones, groups too, the lower index.  A NaN logit is the lowest number.  weight = score, divided
by the sum of the token's scores if renormalised (float32, in that order, + 1e-20), times scale.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.specs import MoeRoute
from blockscale.tir.activations import exp
from blockscale.tir.common import fix_shape, i64, keep_params, widen

LOWEST = -3.4028234663852886e38
TINY = 1e-20
"""What the sum of scores is more than."""


def moe_route(spec: MoeRoute, rows: int | None = None) -> PrimFunc:
    """Return the kernel with the parameters of ``spec.params()``; ``rows`` None: symbolic."""
    E, k, groups = i64(spec.experts), i64(spec.top_k), i64(spec.n_group)
    score, choose, keep, pick = _score(spec), _choose(spec), _groups(spec), _pick(spec)

    @T.prim_func(s_tir=True)
    def main(
        logits_handle: T.handle,
        correction_bias: T.Buffer((E,), "float32"),
        scale: T.float32,
        topk_ids_handle: T.handle,
        topk_weights_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        rows = T.int64()
        logits = T.match_buffer(logits_handle, (rows, E), spec.dtype)
        topk_ids = T.match_buffer(topk_ids_handle, (rows, k), "int32")
        topk_weights = T.match_buffer(topk_weights_handle, (rows, k), "float32")
        for t in range(rows):
            with T.sblock("route"):
                vt = T.axis.spatial(rows, t)
                T.reads(logits[vt, 0:E])
                T.writes(topk_ids[vt, 0:k], topk_weights[vt, 0:k])
                scores = T.alloc_buffer((E,), "float32")
                choice = T.alloc_buffer((E,), "float32")
                strength = T.alloc_buffer((groups,), "float32")
                kept = T.alloc_buffer((groups,), "bool")
                numbers = T.alloc_buffer((i64(3),), "float32")
                best = T.alloc_buffer((i64(1),), "int32")
                score(logits, scores, numbers, vt)
                choose(scores, correction_bias, choice)
                keep(choice, strength, kept, numbers, best)
                pick(choice, scores, best, numbers, topk_ids, topk_weights, vt, scale)

    func = keep_params(main, [param.name for param in spec.params()])
    return func if rows is None else fix_shape(func, "logits", (rows, spec.experts))


def _f32(value: float) -> PrimExpr:
    return tirx.const(value, "float32")


def _score(spec: MoeRoute) -> Any:
    """Step from logits to scores; numbers[0]: the largest logit, numbers[1]: the sum."""
    E = i64(spec.experts)

    def finite(logit: PrimExpr) -> PrimExpr:
        value = widen(logit)
        lowest, highest = _f32(LOWEST), _f32(-LOWEST)
        return tirx.Select(value >= lowest, tirx.Select(value > highest, highest, value), lowest)

    @T.inline
    def softmax(logits, scores, numbers, row):
        numbers[0] = _f32(LOWEST)
        numbers[1] = _f32(0)
        for e in range(E):
            numbers[0] = T.max(numbers[0], finite(logits[row, e]))
        for e in range(E):
            scores[e] = exp(finite(logits[row, e]) - numbers[0])
            numbers[1] = numbers[1] + scores[e]
        for e in range(E):
            scores[e] = scores[e] / numbers[1]

    @T.inline
    def sigmoid(logits, scores, numbers, row):
        for e in range(E):
            scores[e] = _f32(1) / (_f32(1) + exp(-finite(logits[row, e])))

    return softmax if spec.scoring == "softmax" else sigmoid


def _choose(spec: MoeRoute) -> Any:
    """Step from scores to choices."""
    E = i64(spec.experts)

    def chosen(score: PrimExpr, bias: PrimExpr) -> PrimExpr:
        value = score + bias if spec.bias else score
        return tirx.Select(value >= _f32(LOWEST), value, _f32(LOWEST))

    @T.inline
    def step(scores, correction_bias, choice):
        for e in range(E):
            choice[e] = chosen(scores[e], correction_bias[e])

    return step


OUT = -float("inf")
"""The choice of an expert that cannot be taken (any more)."""


def _groups(spec: MoeRoute) -> Any:
    """Step that puts the experts of all but the best groups out."""
    groups, size = i64(spec.n_group), i64(spec.experts // spec.n_group)
    taken = i64(spec.topk_group)
    second = spec.bias and spec.experts > spec.n_group

    def strength_of(first: PrimExpr, next_best: PrimExpr) -> PrimExpr:
        return first + next_best if second else first

    @T.inline
    def step(choice, strength, kept, numbers, best):
        for g in range(groups):
            numbers[0] = _f32(OUT)
            numbers[1] = _f32(OUT)
            for i in range(size):
                numbers[1] = T.max(numbers[1], T.min(numbers[0], choice[g * size + i]))
                numbers[0] = T.max(numbers[0], choice[g * size + i])
            strength[g] = strength_of(numbers[0], numbers[1])
            kept[g] = T.bool(False)
        for _u in range(taken):
            best[0] = -1
            numbers[0] = _f32(OUT)
            for g in range(groups):
                if not kept[g] and (best[0] < 0 or strength[g] > numbers[0]):
                    best[0] = T.Cast("int32", g)
                    numbers[0] = strength[g]
            kept[best[0]] = T.bool(True)
        for g, i in T.grid(groups, size):
            if not kept[g]:
                choice[g * size + i] = _f32(OUT)

    @T.inline
    def nothing(choice, strength, kept, numbers, best):
        pass

    return step if spec.n_group > 1 else nothing


def _pick(spec: MoeRoute) -> Any:
    """Step from choices and scores to ids and weights."""
    E, k = i64(spec.experts), i64(spec.top_k)

    def weight(score: PrimExpr, total: PrimExpr, scale: PrimExpr) -> PrimExpr:
        return (score / (total + _f32(TINY)) if spec.renormalize else score) * scale

    @T.inline
    def step(choice, scores, best, numbers, topk_ids, topk_weights, row, scale):
        numbers[1] = _f32(0)
        for j in range(k):
            best[0] = 0
            numbers[0] = _f32(OUT)
            for e in range(E):
                if choice[e] > numbers[0]:
                    best[0] = T.Cast("int32", e)
                    numbers[0] = choice[e]
            topk_ids[row, j] = best[0]
            topk_weights[row, j] = scores[best[0]]
            numbers[1] = numbers[1] + scores[best[0]]
            choice[best[0]] = _f32(OUT)
        for j in range(k):
            topk_weights[row, j] = weight(topk_weights[row, j], numbers[1], scale)

    return step
