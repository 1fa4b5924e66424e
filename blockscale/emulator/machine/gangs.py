"""Gangs, the fragments that divergence makes of them, and the machine that they run on.

Every register is an array over the gang's lanes.  A *fragment* is a set of lanes at one place;
lanes that part at a branch become two fragments that share a *token*, and meet again when all of
the token's lanes have come to its unit (or have left the kernel).  Fragments are scheduled
independently, so a lane may wait for another lane of its own warp (PTX ISA 3.1 and 9.7.13:
independent thread scheduling).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from blockscale.emulator.machine.engine import Engine
from blockscale.emulator.machine.grid import LANES, Launch, Warp
from blockscale.emulator.machine.hazards import Hazards
from blockscale.emulator.machine.memory import GlobalMemory, view
from blockscale.emulator.machine.state import Fragment, State, Token, Warps
from blockscale.emulator.ptx.program import Program

REGISTERS = ("p2", "r1", "r2", "r4", "r8")  # arrays [rows, lanes] of a gang, by class
# Lists of register rows, made when they are asked for: array of a gang, NumPy type.
ROWS = {"p": ("p2", "?")} | {
    f"{kind}{size}": (f"r{size}", f"{kind}{size}")
    for size, kinds in ((1, "ui"), (2, "uif"), (4, "uif"), (8, "uif"))
    for kind in kinds
}


class Gang(Warps):
    """Warps in lockstep: registers, local memory, fragments."""

    def __init__(self, machine: Machine, warps: np.ndarray) -> None:
        super().__init__(machine.warp_table, warps)
        self.machine = machine
        self.live = np.ones(self.n, bool)
        self.fragments: list[Fragment] = []
        self.ready = -1
        self.specials: dict[str, Any] = {}
        self.fragment: Fragment | None = None

    def make_registers(
        self, counts: dict[str, int], local_bytes: int, rng: np.random.Generator
    ) -> None:
        """Make registers of garbage: reading one that was never written should hurt."""
        n = self.n
        self.p2 = rng.integers(0, 2, (counts["p"], n)).astype(bool)
        self.r1 = np.full((counts["1"], n), 0xFF, np.uint8)
        self.r2 = np.full((counts["2"], n), 0xFFFF, np.uint16)
        self.r4 = np.full((counts["4"], n), 0xFFFFFFFF, np.uint32)
        self.r8 = np.full((counts["8"], n), 0xFFFFFFFFFFFFFFFF, np.uint64)
        self.local = np.full((n, -(-local_bytes // 32) * 32), 0xFF, np.uint8)
        self.cc = np.zeros(n, bool)
        self.rows()

    def rows(self) -> None:
        """Forget the lists of register rows, one per NumPy type: `__getattr__` makes them anew."""
        for name in ROWS:
            self.__dict__.pop(name, None)
        self.local_views: dict[int, np.ndarray] = {}

    def __getattr__(self, name: str) -> Any:
        """Return the rows of a class of registers as a NumPy type ("p", "u4", "f8", ...)."""
        if name not in ROWS:
            raise AttributeError(name)
        array, dtype = ROWS[name]
        rows = list(getattr(self, array).view(dtype))
        setattr(self, name, rows)
        return rows

    def select(self, which: np.ndarray) -> Gang:
        """Return a gang of some of this one's warps (indices into self.warps), state included."""
        new = Gang(self.machine, self.warps[which])
        lanes = (which[:, None] * LANES + np.arange(LANES)).reshape(-1)
        for name in REGISTERS:
            setattr(new, name, of_warps(getattr(self, name), which))
        new.local = self.local[lanes]
        new.cc = self.cc[lanes]
        new.live = self.live[lanes]
        new.rows()
        new.time = self.time
        tokens: dict[int, Token | None] = {id(None): None}

        def copy(token: Token | None) -> Token | None:
            if id(token) not in tokens:
                assert token is not None
                tokens[id(token)] = Token(
                    token.unit, token.pending[lanes], token.arrived[lanes], copy(token.parent)
                )
            return tokens[id(token)]

        for fragment in self.fragments:
            mask = fragment.mask[lanes]
            if mask.any():
                part = Fragment(fragment.at, mask, copy(fragment.token))
                part.began = fragment.began
                part.entered = fragment.entered
                part.wait, part.reason = fragment.wait, fragment.reason
                new.fragments.append(part)
        new.mend()
        return new

    def mend(self) -> None:
        """After a split: fragments and tokens that lost all their lanes."""
        for fragment in list(self.fragments):
            self.refresh(fragment)
        for token in {id(f.token): f.token for f in self.fragments}.values():
            while token is not None:
                self.settle(token)
                token = token.parent
        assert self.fragments or not self.live.any(), "everybody waits at tokens"

    def refresh(self, fragment: Fragment) -> None:
        """Recompute whether a fragment has all lanes."""
        fragment.full = bool(fragment.mask.all())

    # divergence -------------------------------------------------------------------------------
    def part(
        self, fragment: Fragment, taken: np.ndarray, there: int, here: int, meet: int | None
    ) -> None:
        """Split `fragment`: lanes `taken` go to unit `there`, the others to `here`."""
        token = fragment.token
        if meet is not None and not (token is not None and token.unit == meet):
            token = Token(meet, fragment.mask.copy(), np.zeros(self.n, bool), token)
        rest = fragment.mask & ~taken
        self.fragments.remove(fragment)
        for at, mask in ((there, taken), (here, rest)):
            new = Fragment(at, mask, token)
            self.fragments.append(new)
            self.arrive(new)

    def arrive(self, fragment: Fragment) -> None:
        """Let a fragment that has come to its token's unit wait there for the others."""
        while fragment.token is not None and fragment.at == fragment.token.unit:
            token = fragment.token
            token.pending &= ~fragment.mask
            token.arrived |= fragment.mask
            self.fragments.remove(fragment)
            if token.pending.any():
                return
            fragment = Fragment(token.unit, token.arrived, token.parent)
            self.refresh(fragment)
            self.fragments.append(fragment)

    def join(self, fragment: Fragment, other: Fragment) -> None:
        """Take `other`, which is at the same unit, into `fragment` for good.

        Tokens that only one of the two was bound for lose these lanes: they have met already.
        """
        chain = ancestors(fragment.token)
        common = next((t for t in ancestors(other.token) if t is None or t in chain), None)
        dropped = []
        for part in (fragment, other):
            token = part.token
            while token is not common and token is not None:
                token.pending &= ~part.mask
                dropped.append(token)
                token = token.parent
        fragment.mask = fragment.mask | other.mask
        fragment.token = common
        self.fragments.remove(other)
        self.refresh(fragment)
        for token in dropped:
            self.settle(token)

    def settle(self, token: Token) -> None:
        """Release a token that nobody is on the way to any more."""
        if token.pending.any():
            return
        if token.arrived.any():
            fragment = Fragment(token.unit, token.arrived.copy(), token.parent)
            token.arrived[:] = False
            self.refresh(fragment)
            self.fragments.append(fragment)
            self.arrive(fragment)

    def release(self, fragment: Fragment) -> None:
        """Let lanes go on that wait for `fragment` to meet them: it polls, maybe for them."""
        for token in ancestors(fragment.token):
            if token is not None and token.arrived.any():
                free = Fragment(token.unit, token.arrived.copy(), token.parent)
                token.arrived[:] = False
                self.fragments.append(free)
                self.arrive(free)

    def leave(self, fragment: Fragment, mask: np.ndarray) -> None:
        """Take `mask` lanes out of the kernel."""
        self.live &= ~mask
        rest = fragment.mask & ~mask
        token = fragment.token
        if rest.any():
            fragment.mask = rest
            self.refresh(fragment)
        else:
            self.fragments.remove(fragment)
        chain = []
        while token is not None:
            token.pending &= ~mask
            chain.append(token)
            token = token.parent
        for token in chain:
            self.settle(token)

    def local_view(self, size: int) -> np.ndarray:
        """Return local memory as [n * L / size] items."""
        if size not in self.local_views:
            self.local_views[size] = view(self.local.reshape(-1), size)
        return self.local_views[size]


def of_warps(rows: np.ndarray, which: np.ndarray) -> np.ndarray:
    """Return registers [rows, lanes] of some warps; faster than with an index for each lane."""
    by_warp = rows.reshape(len(rows), rows.shape[1] // LANES, LANES)
    return by_warp.take(which, axis=1).reshape(len(rows), LANES * len(which))


def ancestors(token: Token | None) -> list[Token | None]:
    """Return a token and those it is nested in, and at the end None."""
    chain: list[Token | None] = []
    while token is not None:
        chain.append(token)
        token = token.parent
    return [*chain, None]


class Machine(State):
    """One launch: its state, its gangs, the asynchronous work in flight, what is found wrong."""

    def __init__(
        self, program: Program, launch: Launch, memory: GlobalMemory, params: bytes
    ) -> None:
        super().__init__(program, launch, memory, params)
        self.hazards = Hazards(self)
        self.engine = Engine(self)
        self.gangs: list[Gang] = []

    def split(self, gang: Gang, keys: np.ndarray) -> None:
        """Replace a gang by one gang per key."""
        at = self.gangs.index(gang)
        values = np.unique(keys)
        self.gangs[at : at + 1] = [gang.select(np.flatnonzero(keys == key)) for key in values]

    def merge(self, gangs: list[Gang]) -> None:
        """Make one gang of several that are at the same place without divergence."""
        order = np.argsort(np.concatenate([g.warps for g in gangs]))
        first = gangs[0]
        new = Gang(self, np.concatenate([g.warps for g in gangs])[order])
        lanes = (order[:, None] * LANES + np.arange(LANES)).reshape(-1)
        for name in REGISTERS:
            parts = np.concatenate([getattr(g, name) for g in gangs], axis=1)
            setattr(new, name, of_warps(parts, order))
        new.local = np.concatenate([g.local for g in gangs])[lanes]
        new.cc = np.concatenate([g.cc for g in gangs])[lanes]
        new.live = np.concatenate([g.live for g in gangs])[lanes]
        new.rows()
        new.time = max(g.time for g in gangs)
        fragment = Fragment(first.fragments[0].at, np.ones(new.n, bool), None, full=True)
        new.fragments.append(fragment)
        for gang in gangs:
            self.gangs.remove(gang)
        self.gangs.append(new)
        self.progress += 1

    def live_lanes(self, warp: Warp) -> np.ndarray:
        """Return which lanes of a warp have not left the kernel."""
        for gang in self.gangs:
            at = np.flatnonzero(gang.warps == warp.index)
            if len(at):
                return gang.live[at[0] * LANES : (at[0] + 1) * LANES]
        return np.zeros(LANES, bool)
