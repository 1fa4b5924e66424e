"""Do the roles of a kernel wait for each other for ever?  Its barriers, stepped for few tiles.

Roles and rings are a Kahn network: whether it ends does not depend on who is faster, so that one
order of steps decides.  All pairs of a cluster behave alike; one CTA's loads, one pair's MMAs and
one CTA's stores are stepped, with barriers that count and flip as `mbarrier` does.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

from blockscale.lower.pipe.kernel import STORE_WARPS, Kernel
from blockscale.lower.pipe.share import share


@dataclass
class Barrier:
    """An mbarrier: its phase ends when ``count`` have arrived."""

    count: int
    left: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        """Begin the first phase."""
        self.left = self.count

    def arrive(self, many: int) -> None:
        """Let ``many`` arrive, of whom those beyond the phase's count begin the next one."""
        for _ in range(many):
            self.left -= 1
            if self.left == 0:
                self.left, self.phase = self.count, self.phase + 1

    def done(self, parity: int) -> bool:
        """Whether the phase of this parity has ended: `try_wait.parity`."""
        return self.phase % 2 != parity


Role = Generator[tuple[Barrier, int]]
"""Yields what it waits for: a barrier and a parity."""

Run = Callable[[Kernel, int, int], list[str]]
"""The roles of a kernel that do not end with so many tiles, of so many stages."""


def deadlock(kernel: Kernel, run: Run | None = None) -> str | None:
    """Return which role waits for ever, with how many tiles and stages; None if none does.

    ``run``: of a kernel, tiles and stages, the roles that do not end; None: those of tcgen05.
    """
    depth = kernel.stages
    for tiles in range(4):
        for k_stages in {1, depth - 1, depth, depth + 1, 2 * depth + 1} - {0}:
            stuck = (run or _run)(kernel, tiles, k_stages)
            if stuck:
                return f"with {tiles} tiles of {k_stages} stages {', '.join(stuck)} wait for ever"
    return None


def _run(kernel: Kernel, tiles: int, k_stages: int) -> list[str]:
    """Return the roles that do not end."""
    senders = kernel.senders
    full = [Barrier(1) for _ in range(kernel.stages)]
    empty = [Barrier(senders) for _ in range(kernel.stages)]
    done = [Barrier(1) for _ in range(kernel.acc_stages)]
    free = [Barrier(STORE_WARPS * kernel.group) for _ in range(kernel.frees)]
    pairs = {r // kernel.group for load in range(4) for r in _reached(kernel, load)} | {0}

    def load() -> Role:
        stage = parity = 0
        for _ in range(tiles * k_stages):
            yield empty[stage], parity ^ 1
            full[stage].arrive(1)
            stage, parity = next_place(stage, parity, kernel.stages)
        for _ in range(kernel.stages if kernel.cluster > 1 else 0):
            yield empty[stage], parity ^ 1
            stage, parity = next_place(stage, parity, kernel.stages)

    def multiply() -> Role:
        stage = parity = 0
        for number in range(tiles):
            yield free[number % kernel.frees], number // kernel.frees % 2 ^ 1
            for _ in range(k_stages):
                yield full[stage], parity
                empty[stage].arrive(len(pairs))
                stage, parity = next_place(stage, parity, kernel.stages)
            done[number % kernel.acc_stages].arrive(1)

    def store() -> Role:
        for number in range(tiles):
            yield done[number % kernel.acc_stages], number // kernel.acc_stages % 2
            free[number % kernel.frees].arrive(STORE_WARPS * kernel.group)

    return stepped({"loads": load(), "MMAs": multiply(), "stores": store()})


def _reached(kernel: Kernel, load: int) -> list[int]:
    """CTAs that use what CTA 0 loads."""
    return share(kernel, kernel.loads[load]).members(0)


def next_place(stage: int, parity: int, stages: int) -> tuple[int, int]:
    """Return the next stage of a ring of so many, and its parity."""
    return (0, parity ^ 1) if stage + 1 == stages else (stage + 1, parity)


def stepped(roles: dict[str, Role]) -> list[str]:
    """Run all roles as far as they get; return those that still wait."""
    waits = {name: next(role, None) for name, role in roles.items()}
    moved = True
    while moved:
        moved = False
        for name, role in roles.items():
            while (wait := waits[name]) is not None and wait[0].done(wait[1]):
                waits[name] = next(role, None)
                moved = True
    return [name for name, wait in waits.items() if wait is not None]
