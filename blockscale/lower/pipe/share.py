"""Who loads what for whom in a cluster: a load that would bring the same to several CTAs.

One that moves rows of an operand is sliced along them, each CTA loads a slice and multicasts it;
one of scales is done by the first of those CTAs.
"""

from __future__ import annotations

from dataclasses import dataclass

from blockscale.lower.pipe.kernel import Kernel, Transfer


@dataclass(frozen=True)
class Share:
    """CTAs for which a load brings the same.

    CTA `rank` is at (rank % cluster_x, rank / cluster_x) along X and Y; neighbours along X are a
    pair.

    Attributes:
        first: ranks of those that share with CTA 0.
        along: "" alone, "y" those with the same x, "x" those with the same y, "half" those of them
            that are the same half of their pair, "pair" the other half alone.
    """

    along: str
    first: tuple[int, ...]
    cluster_x: int

    @property
    def many(self) -> int:
        """CTAs."""
        return len(self.first)

    @property
    def mask(self) -> int:
        """Of the CTAs that share with CTA 0."""
        return sum(1 << rank for rank in self.first)

    def shift(self, rank: int) -> int:
        """By how many bits the mask of another CTA is shifted."""
        x, row = rank % self.cluster_x, rank - rank % self.cluster_x
        return {"": rank, "y": x, "x": row, "half": row + x % 2, "pair": rank - rank % 2}[
            self.along
        ]

    def number(self, rank: int) -> int:
        """A CTA's number among those that it shares with."""
        return self.members(rank).index(rank)

    def members(self, rank: int) -> list[int]:
        """Those that share with a CTA, itself among them."""
        return [other + self.shift(rank) for other in self.first]

    def mask_text(self, rows: bool) -> str:
        """The mask in C; ``rows``: whether clusters are longer than one CTA along Y."""
        row = f"cta_y * {self.cluster_x}" if rows else "0"
        shift = {"y": "cta_x", "x": row, "half": f"{row} + cta", "pair": f"{row} + cta_x - cta"}
        return f"{self.mask}u << ({shift[self.along]})"

    @property
    def number_text(self) -> str:
        """The CTA's number among them in C."""
        return {"y": "cta_y", "x": "cta_x", "half": "(cta_x / 2)", "pair": "cta"}[self.along]


def share(kernel: Kernel, load: Transfer) -> Share:
    """Return who has the same use of a load."""
    wide = kernel.cluster_x
    if kernel.split > 1 or kernel.cluster == 1:
        return Share("", (0,), wide)
    if not load.along_y and kernel.cluster_y > 1:
        return Share("y", tuple(range(0, kernel.cluster, wide)), wide)
    if load.along_x:
        return Share("", (0,), wide) if load.along_pair else Share("pair", (0, 1), wide)
    step = kernel.group if load.along_pair else 1
    if wide == step:
        return Share("", (0,), wide)
    return Share("half" if step == 2 else "x", tuple(range(0, wide, step)), wide)


def slices(kernel: Kernel, load: Transfer) -> int:
    """Into how many boxes CTAs share a load's rows."""
    return share(kernel, load).many if load.wide else 1
