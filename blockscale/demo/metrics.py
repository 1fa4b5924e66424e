"""How close two results are.

Accuracy is the relative error of each row, ||y - ref|| / ||ref|| in float64: one bad row shows in
the maximum.  Whether the embeddings still do their work is told by their nearest neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 16  # elements for each NVFP4 block scale


def row_errors(y: Tensor, ref: Tensor) -> Tensor:
    """Return ||y - ref|| / ||ref|| of every row as float64 [rows]; both are [rows, N]."""
    if y.shape != ref.shape:
        raise ValueError(
            f"row_errors: shapes {tuple(y.shape)} and {tuple(ref.shape)} differ; "
            "compare like with like"
        )
    ref64 = ref.double()
    return (y.double() - ref64).norm(dim=1) / ref64.norm(dim=1)


def spread(errors: Tensor) -> dict[str, float]:
    """Return the median and the maximum of `errors`; NaN anywhere makes both NaN."""
    if errors.isnan().any():
        return {"median": float("nan"), "max": float("nan")}
    return {"median": errors.median().item(), "max": errors.max().item()}


def decode_nvfp4(packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """Return the weights [N, K] float64 that NVFP4 bytes stand for, exactly.

    packed uint8 [N, K/2] (low nibble first), scale float8_e4m3fn [N, K/16], global_scale
    float32 [1].
    Shares no code with the kernels, so that it can judge them.
    """
    code = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).long()
    magnitude = torch.tensor(E2M1, dtype=torch.float64)[code & 7]
    value = torch.where(code >= 8, -magnitude, magnitude)
    return value * scale.double().repeat_interleave(BLOCK, dim=1) * global_scale.double()


def neighbours(embeddings: Tensor, count: int) -> Tensor:
    """Return the indices [rows, count] of each row's nearest other rows, nearest first."""
    if not 0 < count < len(embeddings):
        raise ValueError(
            f"neighbours: count={count} is not in 1..{len(embeddings) - 1}, the number of other "
            "rows; ask for fewer neighbours or give more embeddings"
        )
    distance = torch.cdist(embeddings.double(), embeddings.double())
    distance.fill_diagonal_(float("inf"))
    return distance.argsort(dim=1, stable=True)[:, :count]


def agreement(embeddings: Tensor, ref: Tensor, count: int = 5) -> dict[str, float]:
    """Return how far the neighbours agree with those of `ref`, both as fractions.

    "top1": rows whose nearest neighbour is the same; "top5": mean overlap of the `count` nearest.
    """
    ours, theirs = neighbours(embeddings, count), neighbours(ref, count)
    shared = (ours[:, :, None] == theirs[:, None, :]).any(2)
    return {
        "top1": (ours[:, 0] == theirs[:, 0]).double().mean().item(),
        f"top{count}": shared.double().mean().item(),
    }


def group_hits(embeddings: Tensor, groups: Sequence[int]) -> float:
    """Return the fraction of rows whose nearest neighbour is of the same group."""
    group = torch.tensor(groups)
    return (group[neighbours(embeddings, 1)[:, 0]] == group).double().mean().item()
