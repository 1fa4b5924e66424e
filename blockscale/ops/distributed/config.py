"""What the ranks of a group agree upon: sizes, and which rank has which experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from blockscale.ops import checks
from blockscale.specs.exchange import (
    CHUNK_ELEMENTS,
    MAX_RANKS,
    MAX_TOKENS,
    OWNER_BITS,
    row_bytes,
)
from blockscale.specs.gemm import MAX_EXPERTS
from blockscale.specs.plans.coded import CODED_FORMATS, CodedRow
from blockscale.specs.plans.launches import MAX_TOP_K
from blockscale.specs.spec import check_multiple, check_positive

WHERE = "ExpertParallel"

DISPATCHES = ("bf16", *CODED_FORMATS)
"""What rows are sent as: "bf16", the 16 bits (on CPUs also 32) that they are; else codes and scales
(`CodedRow`), those that a layer with this ``act_fmt`` makes of them."""

COMBINES = ("slots", "sums")
"""What results come back as: "slots", that of each slot, which a token's rank adds up in the order
of one rank; "sums", of each rank the sum of what it has of a token, rounded: fewer bytes."""

LIMITS = {
    "experts": MAX_EXPERTS,
    "top_k": MAX_TOP_K,
    "max_tokens": MAX_TOKENS,
    "ranks": MAX_RANKS,
}
"""The most of each that kernels, cells and owner tables have room for."""

SHORTEST, LONGEST = 1e-3, 1e9
"""Seconds of a timeout: gloo counts milliseconds, the GPU's clock nanoseconds in 64 bits."""

Owners = tuple[tuple[int, ...], ...]
"""The experts of each rank, in the order of its weights."""


@dataclass(frozen=True)
class Config:
    """What has to be equal on all ranks."""

    ranks: int
    experts: int
    hidden: int
    top_k: int
    max_tokens: int
    dispatch: str
    dtype: str
    device: str
    owners: Owners
    combine: str = "slots"

    def __post_init__(self) -> None:
        for name in ("experts", "hidden", "top_k", "max_tokens"):
            check_positive(WHERE, name, getattr(self, name))
        checks.choice(WHERE, "dispatch", self.dispatch, DISPATCHES)
        checks.choice(WHERE, "combine", self.combine, COMBINES)
        what = "the elements that a thread moves"
        check_multiple(WHERE, "hidden", self.hidden, CHUNK_ELEMENTS, what, "pad rows to {}")
        if self.row is not None:
            self.row.check(WHERE)
        for name, most in LIMITS.items():
            if getattr(self, name) > most:
                raise ValueError(
                    f"{WHERE}: {name}={getattr(self, name)} is more than {most}; use fewer, or "
                    "several calls"
                )
        if self.top_k > self.experts:
            raise ValueError(
                f"{WHERE}: top_k={self.top_k} is more than experts={self.experts}; pass both of "
                "the layer"
            )
        self._check_owners()

    @property
    def act_fmt(self) -> str | None:
        """What rows are quantised to before they are sent, if to anything."""
        return None if self.dispatch == "bf16" else self.dispatch

    @property
    def row(self) -> CodedRow | None:
        """Where the bytes of a coded row are."""
        return None if self.act_fmt is None else CodedRow(self.act_fmt, self.hidden)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of 16 bits an element, or of a coded one, as it is sent on CUDA."""
        return row_bytes(self.hidden, self.act_fmt)

    @property
    def places(self) -> int:
        """Experts of all ranks, replicas counted."""
        return sum(map(len, self.owners))

    @property
    def sums(self) -> bool:
        """Whether each rank adds up what it has of a token."""
        return self.combine == "sums"

    @property
    def sizes(self) -> tuple[int, int, int, int, str | None, bool]:
        """What the parts of a symmetric buffer depend on."""
        return self.ranks, self.max_tokens, self.top_k, self.hidden, self.act_fmt, self.sums

    def _check_owners(self) -> None:
        if len(self.owners) != self.ranks:
            raise ValueError(
                f"{WHERE}: owners has {len(self.owners)} entries, but the group has {self.ranks} "
                "ranks; pass the experts of each rank"
            )
        for rank, own in enumerate(self.owners):
            wrong = [e for e in own if not 0 <= e < self.experts]
            if wrong or len(set(own)) != len(own) or not own:
                raise ValueError(
                    f"{WHERE}: owners[{rank}] is {list(own)}, but must be one or more different "
                    f"experts from 0 to {self.experts - 1}"
                )
        missing = set(range(self.experts)) - {e for own in self.owners for e in own}
        if missing:
            raise ValueError(
                f"{WHERE}: owners names no rank for the experts {sorted(missing)[:8]}; every "
                "expert lies on a rank"
            )

    def owner_table(self) -> torch.Tensor:
        """Return [experts, replicas] int32: ``rank << 16 | local expert``.

        An expert with fewer replicas than another is repeated, in turn.
        """
        found: list[list[int]] = [[] for _ in range(self.experts)]
        for rank, own in enumerate(self.owners):
            for local, expert in enumerate(own):
                found[expert].append(rank << OWNER_BITS | local)
        most = max(map(len, found))
        rows = [[places[i % len(places)] for i in range(most)] for places in found]
        return torch.tensor(rows, dtype=torch.int32)


def owners_of(ranks: int, experts: int, owners: Sequence[Sequence[int]] | None) -> Owners:
    """Return the experts of each rank; None: equal shares of neighbours."""
    if owners is not None:
        return tuple(tuple(map(int, own)) for own in owners)
    if experts % ranks:
        raise ValueError(
            f"{WHERE}: experts={experts} are not a multiple of the {ranks} ranks; pass owners, the "
            "experts of each rank"
        )
    each = experts // ranks
    return tuple(tuple(range(r * each, (r + 1) * each)) for r in range(ranks))


def checked_timeout(seconds: float) -> float:
    """Return a timeout; ValueError or TypeError unless ranks can wait for so long."""
    checks.number(WHERE, "timeout", seconds)
    if not SHORTEST <= seconds <= LONGEST:
        raise ValueError(
            f"{WHERE}: timeout={seconds!r} is not from {SHORTEST:g} to {LONGEST:g} seconds; pass "
            "the seconds that a rank waits for another"
        )
    return seconds


def agree(config: Config, group: Any) -> None:
    """ValueError on every rank, with rank and values, unless all ranks have the same ``config``."""
    found: list[dict[str, Any] | None] = [None] * config.ranks
    dist.all_gather_object(found, asdict(config), group=group)
    for rank, other in enumerate(found):
        assert other is not None
        assert found[0] is not None
        for name, value in found[0].items():
            if other[name] != value:
                raise ValueError(
                    f"{WHERE}: rank {rank} has {name}={other[name]!r}, but rank 0 has {value!r}; "
                    "construct it with the same arguments on all ranks"
                )
