"""The line that says how far a long launch is."""

from __future__ import annotations

import sys
import time

from blockscale.emulator.machine.state import State

PATIENCE = 5.0  # seconds until the first line
TERMINAL, FILE = 0.5, 10.0  # seconds from one line to the next


class Ticker:
    """Writes to stderr if it is a terminal, or if `wanted`; False: never."""

    def __init__(self, wanted: bool | None = None) -> None:
        self.terminal = sys.stderr is not None and sys.stderr.isatty()
        shown = self.terminal if wanted is None else wanted
        self.began = time.perf_counter()
        self.next = self.began + PATIENCE if shown else float("inf")
        self.width = 0

    def tick(self, m: State) -> None:
        """Write the line if it is time."""
        now = time.perf_counter()
        if now < self.next:
            return
        self.next = now + (TERMINAL if self.terminal else FILE)
        done = m.waiting.next - sum(c is not None for c in m.clusters)
        text = (
            f"{m.program.name}: {now - self.began:.0f} s, {m.executed:,} warp-instructions, "
            f"{done:,} of {m.total:,} clusters have left"
        )
        self.write(f"\r{text.ljust(self.width)}" if self.terminal else f"{text}\n")
        self.width = len(text)

    def end(self) -> None:
        """Take the line away from a terminal."""
        if self.width and self.terminal:
            self.write(f"\r{' ' * self.width}\r")

    def write(self, text: str) -> None:
        """Write at once."""
        sys.stderr.write(text)
        sys.stderr.flush()
