"""What a grouped GEMM of an MoE layer may be on Hopper: tiles for a number of tokens.

A tile is a `MoePlan` whose decisions of shape are made (they name tensor intrinsics, so each is a
sketch of its own); the depth of its ring is left to choose.  Which tiles make sense depends on the
tokens that an expert gets; `MoePlan.illegal` says what hardware and kernel forbid.  There are few
of them, some 40 for all numbers of tokens: each is a kernel that nvcc compiles for seconds.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import NamedTuple

from blockscale.lower.moe_plan import MoePlan
from blockscale.lower.moe_sizes import MoeGemm

SMS = 132
"""SMs of an H100 SXM or H200."""

CTA_SMEM_BYTES = 1024
"""Shared memory of an SM that the system keeps for each CTA."""


class Room(NamedTuple):
    """What an architecture has."""

    wgmma: bool
    sm_bytes: int
    """Shared memory of an SM."""


HOPPER, BLACKWELL, CONSUMER = Room(True, 228 << 10), Room(False, 228 << 10), Room(False, 100 << 10)

ROOM = {
    "sm_90a": HOPPER,
    **dict.fromkeys(("sm_100a", "sm_100f", "sm_103a"), BLACKWELL),
    **dict.fromkeys(("sm_120a", "sm_121a"), CONSUMER),
}
"""By architecture; those without wgmma multiply many tokens by mma.sync, too."""

MOST_STAGES = 16
"""Of the ring."""

MMA = {
    8: ((64, 4, 4), (64, 8, 8), (32, 8, 8), (32, 4, 4), (16, 8, 8), (128, 4, 4), (128, 2, 2)),
    16: ((64, 4, 4), (64, 8, 8), (32, 8, 8), (32, 4, 4), (128, 4, 4), (128, 2, 2)),
    32: ((64, 4, 4), (64, 2, 2), (32, 8, 8), (128, 2, 2)),
    64: ((64, 2, 2), (64, 4, 4), (128, 2, 2)),
}
"""Rows, slices and blocks of 64 k of a stage that are tried with mma.sync, by tokens of a tile."""

WGMMA = {
    16: ((64, 2), (128, 2)),
    32: ((64, 2), (128, 2), (256, 1)),
    64: ((64, 2), (128, 2), (256, 1)),
    96: ((128, 2), (256, 1)),
    128: ((128, 2), (256, 1)),
    160: ((256, 1),),
    192: ((128, 2),),
    256: ((128, 2),),
}
"""Rows and blocks of 64 k of a stage that are tried with wgmma, by tokens of a tile."""

TOKENS = (
    (6.0, ("mma", 8), ("mma", 16)),
    (12.0, ("mma", 16), ("mma", 8), ("wgmma", 16)),
    (24.0, ("mma", 32), ("mma", 16), ("wgmma", 16), ("wgmma", 32)),
    (48.0, ("wgmma", 64), ("mma", 32), ("mma", 64), ("wgmma", 32)),
    (100.0, ("wgmma", 96), ("wgmma", 64), ("wgmma", 128), ("mma", 64)),
    (200.0, ("wgmma", 128), ("wgmma", 160), ("wgmma", 96), ("wgmma", 192)),
    (float("inf"), ("wgmma", 160), ("wgmma", 128), ("wgmma", 192), ("wgmma", 256)),
)
"""Units and tokens of a tile that are tried up to so many tokens of an expert, the default first.

The number is the mean of the experts that have any, and its root: what most of them have.
"""


def busy_experts(gemm: MoeGemm, tokens: int) -> float:
    """Return how many experts ``tokens`` tokens are routed to if that is random."""
    share = gemm.top_k / gemm.experts
    return gemm.experts * (1 - (1 - share) ** tokens)


def expected_tokens(gemm: MoeGemm, tokens: int) -> float:
    """Return how many tokens most of the busy experts have at most."""
    mean = tokens * gemm.top_k / busy_experts(gemm, tokens)
    return mean + sqrt(mean) if mean > 1.5 else mean


def stages_in(plan: MoePlan, room: int) -> int:
    """Return the most stages with which a CTA takes at most ``room`` bytes."""
    one_less = plan.smem_bytes - plan.stages * plan.stage_bytes
    return min(MOST_STAGES, (room - one_less) // plan.stage_bytes)


def depths(tile: MoePlan, room: Room = HOPPER) -> tuple[int, ...]:
    """Return the depths of the ring that are tried, the preferred one first.

    As deep as lets two CTAs share an SM, whose epilogues and prologues then overlap, or three, or
    as one CTA alone can have.
    """
    shares = [room.sm_bytes // ctas - CTA_SMEM_BYTES for ctas in (2, 3, 1)]
    fitting = [stages_in(tile, share) for share in shares]
    if tile.unit == "wgmma" and tile.consumers == 8:
        fitting = fitting[2:]  # registers leave no room for a second one
    elif tile.tokens > 16 or tile.rows != 64:
        fitting = fitting[:1] if fitting[0] >= 3 else fitting[2:]
    return tuple(n for n in dict.fromkeys(fitting) if replace(tile, stages=n).illegal() is None)


def _base(gemm: MoeGemm, unit: str, tokens: int, rows: int, slices: int, blocks: int) -> MoePlan:
    return MoePlan(
        unit=unit,
        fmt=gemm.fmt,
        group=gemm.group,
        zeros=gemm.zeros,
        dtype=gemm.dtype,
        activation=gemm.activation,
        gather=gemm.gather,
        rows=rows,
        tokens=tokens,
        slices=slices,
        stages=2,
        blocks_k=blocks,
    )


def tiles(gemm: MoeGemm, tokens: int, room: Room = HOPPER) -> dict[MoePlan, str | None]:
    """Return the tiles for about ``tokens`` tokens, and why one is illegal; two stages each."""
    wanted = expected_tokens(gemm, tokens)
    pairs = next(pairs for limit, *pairs in TOKENS if wanted <= limit)
    found: dict[MoePlan, str | None] = {}
    if not room.wgmma:
        pairs = [pair for pair in pairs if pair[0] == "mma"] or [("mma", 64)]
    for unit, width in pairs:
        if unit == "mma":
            shapes = [(rows, slices, blocks) for rows, slices, blocks in MMA[width]]
        else:
            shapes = [(rows, 1, blocks) for rows, blocks in WGMMA[width]]
        for rows, slices, blocks in shapes:
            tile = _base(gemm, unit, width, rows, slices, blocks)
            found[tile] = tile.illegal() or (None if depths(tile, room) else "no ring of it fits")
    return found


def legal_tiles(gemm: MoeGemm, tokens: int, room: Room = HOPPER) -> list[MoePlan]:
    """Return the legal ones of `tiles`, the default's first."""
    legal = [tile for tile, reason in tiles(gemm, tokens, room).items() if reason is None]
    best = min(legal, key=lambda tile: (not _same_kind(tile, legal[0]), _waste(tile, gemm, tokens)))
    return [best, *(tile for tile in legal if tile != best)]


def _same_kind(tile: MoePlan, other: MoePlan) -> bool:
    return (tile.unit, tile.tokens) == (other.unit, other.tokens)


def _waste(tile: MoePlan, gemm: MoeGemm, tokens: int) -> float:
    """How much longer the busiest SM works than the mean one: tiles do not divide evenly.

    Higher tiles are better where they do: tokens are loaded less often.
    """
    busy = busy_experts(gemm, tokens)
    blocks = busy * -(-expected_tokens(gemm, tokens) // tile.tokens)
    count = blocks * -(-gemm.rows // tile.rows)
    ctas = SMS * (1 if tile.unit == "wgmma" and tile.consumers == 8 else 2)
    waves = -(-count // ctas)
    return waves * ctas / count * (1 + 16 / tile.rows)
