"""What a candidate of an MoE GEMM is measured on: random routing, its tables, sizes of operands.

Nothing here uses a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from blockscale.base.sizes import ceil_div, round_up
from blockscale.specs.plans.moe import ATTRIBUTE, MoeGemm

L2_TIMES = 3
"""Weights of a round of calls are at least so many times as large as the L2 cache."""

MAX_SETS = 16
MAX_BYTES = 12 << 30
"""Copies of the weights, and memory, that are taken for that."""

ROUTINGS, OTHERS = {1: 16, 8: 4, 64: 4}, 3
"""Random routings by tokens, and for other numbers.

More than one for many tokens, too: the fullest expert may just fit into a tile, or not.  With 512
tokens and 8 experts a GEMM took 190 us or 350 us.
"""


def moe_gemm_of(mod: Any) -> MoeGemm | None:
    """Return the GEMM of an MoE layer that ``mod`` is; None if it is something else.

    It is a kernel and no function, and tuned for any sizes: they are arguments.
    """
    func = mod["main"]
    return MoeGemm.of(func) if ATTRIBUTE in (func.attrs or {}) else None


@dataclass(frozen=True)
class Operands:
    """Shapes and sizes of one GEMM's operands for a number of tokens."""

    experts: int
    rows: int
    k: int
    slots: int
    x_rows: int
    columns: int
    """Of the output."""
    scale_blocks: int
    scale_count: int
    """Numbers of scales of a block of 64 rows."""
    scale_size: int
    """Bytes of one."""

    @staticmethod
    def of(gemm: MoeGemm, tokens: int) -> Operands:
        """Return those of ``gemm``."""
        slots = tokens * gemm.top_k
        return Operands(
            gemm.experts,
            gemm.rows,
            gemm.k,
            slots,
            x_rows=tokens if gemm.gather else slots,
            columns=gemm.columns,
            scale_blocks=ceil_div(gemm.k, max(64, gemm.group)),
            scale_count=4 * gemm.scales,
            scale_size=2 if gemm.fmt == "int4" else 1,
        )

    @property
    def expert_bytes(self) -> int:
        """Codes and scales of one expert."""
        blocks = self.rows // 64
        scales = blocks * self.scale_blocks * self.scale_count * self.scale_size
        return self.rows * self.k // 2 + scales


def routings(experts: int, top_k: int, tokens: int) -> list[np.ndarray]:
    """Return ids [tokens, top_k] of consecutive calls, uniform and distinct for each token.

    Calls with one token share no expert until every expert had its turn.
    """
    rng = np.random.default_rng(tokens)
    count = ROUTINGS.get(tokens, OTHERS)
    if tokens == 1:
        order = rng.permutation(experts)[: experts // top_k * top_k].reshape(-1, 1, top_k)
        return [ids.astype(np.int32) for ids in order[:count]]
    scores = rng.random((count, tokens, experts))
    return [ids.astype(np.int32) for ids in np.argsort(scores, axis=2)[:, :, :top_k]]


def set_count(operands: Operands, calls: list[np.ndarray], l2_bytes: int) -> int:
    """Return how many copies of the weights to go round over, so that no cache holds any."""
    touched = [np.unique(ids).size for ids in calls]
    round_bytes = (sum(touched) if len(calls[0]) == 1 else min(touched)) * operands.expert_bytes
    wanted = max(1, math.ceil(L2_TIMES * l2_bytes / round_bytes))
    room = MAX_BYTES // max(1, operands.experts * operands.expert_bytes)
    return max(1, min(wanted, room, MAX_SETS))


def sorted_slots(ids: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return flat slots by expert [slots] int32, and how many each expert has."""
    flat = ids.reshape(-1)
    order = np.argsort(flat, kind="stable").astype(np.int32)
    return order, np.bincount(flat, minlength=experts)


def blocks_of(counts: np.ndarray, tokens: int) -> np.ndarray:
    """Return the blocks of at most ``tokens`` sorted slots [blocks, 4] int32 of all experts.

    Of an expert they are as even as multiples of 8 are: (expert << 16 | rows, first slot, the
    expert's first block, its number of blocks), as native/moe_sort.cuh has them.
    """
    found: list[tuple[int, int, int, int]] = []
    first = 0
    for expert, count in enumerate(counts.tolist()):
        number = ceil_div(count, tokens)
        size = round_up(ceil_div(count, number), 8) if number else 0
        begin = len(found)
        for i in range(number):
            rows = min(size, count - i * size)
            found.append((expert << 16 | rows, first + i * size, begin, number))
        first += count
    return np.array(found, np.int32).reshape(-1, 4)
