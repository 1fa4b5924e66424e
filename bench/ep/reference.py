"""A small layer whose experts lie on several ranks: random calls, and what has to come out.

Stand-ins for experts, exact in torch, tell whether each row went where it had to and came back in
its order; a real layer of the same sizes tells the rest.
"""

from __future__ import annotations

from typing import Any

import torch

import blockscale
from blockscale.ops.distributed import cpu
from blockscale.ops.moe.layer import Options
from blockscale.specs.plans.coded import CodedRow

Tensor = torch.Tensor

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 32, 1024, 512, 4

A1_SCALE = 0.013
"""Static scale of nvfp4 rows."""


class Form:
    """What rows are sent as, and what that makes of them."""

    def __init__(self, dispatch: str, device: Any = "cuda") -> None:
        self.dispatch, self.device = dispatch, device
        self.act_fmt = None if dispatch == "bf16" else dispatch
        self.scale = torch.full((1,), A1_SCALE, device=device) if dispatch == "nvfp4" else None
        self.options = Options(act_fmt=self.act_fmt, a1_scale=self.scale)
        # Nothing may be copied to the GPU while one rank's kernel waits for the other's.
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=device)
        self.values = torch.cat([values, -values])

    def bytes(self, x: Tensor) -> Tensor:
        """Return rows as the road of CPUs codes them."""
        if self.act_fmt is None:
            return x
        return cpu.coded(x, CodedRow(self.act_fmt, x.shape[1]), self.scale)

    def numbers(self, rows: Tensor) -> Tensor:
        """Return what came as numbers of 16 bits."""
        if self.act_fmt is None:
            return rows
        row = CodedRow(self.act_fmt, HIDDEN)
        codes = rows[:, : row.codes]
        scales = rows[:, row.codes : row.codes + row.scales].contiguous()
        if self.act_fmt == "fp8":
            made = codes.view(torch.float8_e4m3fn).float() * scales.view(torch.float32)
            return made.bfloat16()
        nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
        made = self.values[nibbles.long()]
        factor = scales.view(torch.float8_e4m3fn).float() * A1_SCALE
        return (made * factor.repeat_interleave(16, 1)).bfloat16()

    def reference(
        self, x: Tensor, ids: Tensor, weights: Tensor, to: Tensor | None = None, ranks: int = 1
    ) -> Tensor:
        """Return the sums of `simple` of what is sent of x.

        ``to`` [T, k]: the rank of each slot, if each of ``ranks`` rounds the sum of its own.
        """
        rows = self.numbers(self.bytes(x))
        if to is None:
            return reference(rows, ids, weights).bfloat16()
        total = torch.zeros_like(rows, dtype=torch.float32)
        for rank in range(ranks):
            own = torch.where(to == rank, ids, -1)
            total += reference(rows, own, weights).bfloat16().float()
        return total.bfloat16()


def routing(made: torch.Generator, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, ids (some dropped) and weights of a rank."""
    device = made.device
    x = torch.randn(count, HIDDEN, device=device, generator=made).bfloat16()
    scores = torch.rand(count, EXPERTS + 1, device=device, generator=made)
    ids = scores.topk(TOP_K, 1).indices.to(torch.int32)
    weights = torch.rand(count, TOP_K, device=device, generator=made)
    return x, torch.where(ids == EXPERTS, -1, ids), weights


def layer(shares: list[list[int]], device: Any = "cuda") -> list[blockscale.MoeWeights]:
    """Return weights of all experts, and of each of ``shares``."""
    made = torch.Generator().manual_seed(5)

    def numbers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=made)

    w13 = numbers(0, 256, EXPERTS, 2 * INTERMEDIATE, HIDDEN // 2)
    w2 = numbers(0, 256, EXPERTS, HIDDEN, INTERMEDIATE // 2)
    s13 = numbers(30, 50, EXPERTS, 2 * INTERMEDIATE, HIDDEN // 16)
    s2 = numbers(30, 50, EXPERTS, HIDDEN, INTERMEDIATE // 16)
    found = []
    for own in ([*range(EXPERTS)], *shares):
        weights = blockscale.prepare_moe_weights(
            w13[own], w2[own], fmt="nvfp4", w13_scale=s13[own], w2_scale=s2[own],
            w13_global_scale=torch.full((len(own), 2), 0.01),
            w2_global_scale=torch.full((len(own),), 0.01),
            layout="linear" if str(device) == "cpu" else "tiles64", dtype=torch.bfloat16,
        )  # fmt: skip
        found.append(weights.to(device))
    return found


def simple(e: Tensor, x: Tensor) -> Tensor:
    """Return what a stand-in for an expert makes of rows: exact in torch."""
    return ((e.float() + 1) * x.float()).bfloat16()


def stand_in(ids: Tensor, numbers: Tensor, own: Tensor) -> Tensor:
    """Return [n, k, H] of `simple` experts of a rank, whose experts are ``own``."""
    whole = torch.where(ids >= 0, own[ids.clamp(min=0).long()], -1)
    return simple(whole[..., None], numbers[:, None])


def reference(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return sums of `simple` in float32, each step rounded once, as a fused multiply-add."""
    total = torch.zeros(x.shape, device=x.device, dtype=torch.float32)
    for j in range(ids.shape[1]):
        z = simple(ids[:, j, None], x).double()
        added = (weights[:, j, None].double() * z + total.double()).float()
        total = torch.where(ids[:, j, None] >= 0, added, total)
    return total
