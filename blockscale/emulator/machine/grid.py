"""What is launched, and the residents of the machine: clusters, CTAs, warps, their barriers."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from blockscale.emulator.machine.clocks import Vector
from blockscale.emulator.tcgen05.layout import COLUMNS

LANES = 32  # of a warp
SMS = 148  # a B200
Dim = tuple[int, int, int]


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched; x comes first in each dimension."""

    grid: Dim
    block: Dim
    cluster: Dim
    dynamic_smem: int
    seed: int
    max_instructions: int

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return math.prod(self.block)

    @property
    def cta_warps(self) -> int:
        """Warps of a CTA; the last one may be ragged."""
        return -(-self.threads // LANES)

    @property
    def cluster_ctas(self) -> int:
        """CTAs of a cluster."""
        return math.prod(self.cluster)

    @property
    def clusters(self) -> int:
        """Clusters of the grid."""
        return math.prod(self.grid) // self.cluster_ctas


def unravel(number: Any, sizes: Dim) -> tuple[Any, Any, Any]:
    """Return the coordinates of the `number`-th place (or places) of a box, x fastest (PTX 10)."""
    return number % sizes[0], number // sizes[0] % sizes[1], number // (sizes[0] * sizes[1])


class Waiting:
    """The clusters of a launch that have not begun, in order; a grid may have 2^31 of them."""

    def __init__(self, total: int) -> None:
        self.next, self.total = 0, total

    def __bool__(self) -> bool:
        return self.next < self.total

    def popleft(self) -> int:
        """Return the number of the next cluster."""
        self.next += 1
        return self.next - 1


@dataclass(eq=False)
class Barrier:
    """One named barrier of a CTA, or the barrier of a cluster (PTX ISA 9.7.13.1 to .4)."""

    generation: int = 0
    arrived: np.ndarray | None = None  # lanes, by thread of the CTA (of the cluster)
    vector: Vector | None = None
    done: Vector | None = None
    came: Vector | None = None  # what those who came relaxed had done
    all_came: Vector | None = None  # of the generation that has ended
    time: float = 0.0
    done_time: float = 0.0
    expected: int | None = None
    line: int = 0
    votes: list[bool] = field(default_factory=list)
    result: tuple[int, bool, bool] = (0, False, False)  # popc, and, or
    seen: np.ndarray | None = None  # of several devices: what those who came know (`watch`)
    told: np.ndarray | None = None


@dataclass(eq=False)
class MBarrier:
    """One mbarrier object: its current phase, and what completed phases gave to those who wait."""

    offset: int
    expected: int
    line: int
    pending: int = 0
    tx: int = 0
    phase: int = 0
    vector: Vector | None = None
    time: float = 0.0
    flow: int | None = None
    done: dict[int, tuple[Vector | None, float, int | None]] = field(default_factory=dict)
    dropped: int = 0  # arrivals that the next phase does not expect any more
    promised: bool = False  # not initialised yet: see `promise`
    agent: int = -1  # who initialised it, and at which of his clocks
    clock: int = 0

    def state_text(self) -> str:
        """Return in words what the current phase waits for."""
        text = f"(phase {self.phase}: waits for {self.pending} of {self.expected} arrivals"
        if self.tx > 0:
            text += f" and {self.tx} bytes that expect_tx announced"
        elif self.tx < 0:
            text += f"; {-self.tx} bytes more have come than expect_tx announced"
        return f"{text}; initialised at line {self.line})"

    @property
    def busy(self) -> bool:
        """Whether the current phase has begun."""
        return self.pending != self.expected or self.tx != 0


class Freed(NamedTuple):
    """TMEM columns that were freed, by whom and when."""

    column: int
    number: int
    line: int
    agent: int
    clock: int


@dataclass(eq=False)
class Meeting:
    """Where the warps of a pair of CTAs meet to allocate or to free TMEM columns."""

    here: dict[int, tuple[Warp, int, int]] = field(default_factory=dict)  # rank -> warp, 2 numbers
    granted: dict[int, int] = field(default_factory=dict)  # warp -> column


@dataclass(eq=False)
class Warp:
    """What one warp carries besides registers."""

    index: int
    number: int  # in its CTA
    cta: Cta
    agent: int
    exited: bool = False
    met: Vector | None = None  # what others had done before relaxed arrivals that it has waited for
    cp_sequence: int = 0  # cp.async operations issued
    cp_open: list[Any] = field(default_factory=list)  # operations not in a group yet
    cp_groups: deque[Any] = field(default_factory=deque)  # committed groups: lists of operations
    bulk_open: dict[int, list[Any]] = field(default_factory=dict)  # by lane
    bulk_groups: dict[int, deque[Any]] = field(default_factory=dict)
    st_sequence: int = 0
    st_pending: list[Any] = field(default_factory=list)
    wgmma_open: list[Any] = field(default_factory=list)
    wgmma_groups: deque[Any] = field(default_factory=deque)


@dataclass(eq=False)
class Cta:
    """One CTA: where it lies and what its threads share."""

    slot: int
    rank: int
    coords: Dim
    cluster: Cluster
    warps: list[Warp] = field(default_factory=list)
    barriers: dict[int, Barrier] = field(default_factory=dict)
    allocations: dict[int, int] = field(default_factory=dict)  # TMEM column -> columns
    asked: int = COLUMNS  # columns that the last tcgen05.alloc asked for; at first: all
    relinquished: bool = False
    uncommitted: int | None = None  # line of tensor work that no tcgen05.commit follows yet
    freed: list[Freed] = field(default_factory=list)

    @property
    def live(self) -> int:
        """Warps that have not left."""
        return sum(not w.exited for w in self.warps)


@dataclass(eq=False)
class Cluster:
    """One cluster of CTAs that run together."""

    slot: int
    number: int  # in launch order
    coords: Dim
    ctas: list[Cta] = field(default_factory=list)
    barrier: Barrier = field(default_factory=Barrier)
    meetings: dict[tuple[str, int], Meeting] = field(default_factory=dict)  # opcode, even rank

    @property
    def live(self) -> int:
        """Warps that have not left."""
        return sum(cta.live for cta in self.ctas)

    @property
    def warps(self) -> list[Warp]:
        """All warps, by agent."""
        return [w for cta in self.ctas for w in cta.warps]
