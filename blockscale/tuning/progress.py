"""What the user sees while tuning: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    from blockscale.tuning.task import Task

_PLAIN_EVERY_S = 5.0
_ROWS = 24
"""Workloads shown at once; the latest ones when there are more."""


class Display:
    """Shows the state of the tasks, drawn between trials so as not to disturb a measurement."""

    def __init__(self, seconds: float, quiet: bool = False) -> None:
        """``quiet``: show nothing but what the user must know (`say`)."""
        self._quiet = quiet
        self._console, self._live = (None, None) if quiet else _console()
        self._started = time.monotonic()
        self._seconds = seconds
        self._tasks: list[Task] = []
        self._recent: list[str] = []
        self._printed = 0.0

    def start(self, tasks: list[Task]) -> None:
        """Show ``tasks``, of which none has been tried yet; some may be added later."""
        self._tasks = tasks
        self._recent = [task.tag for task in tasks]
        if self._live:
            self._live.start()
            self._live.update(self._table(), refresh=True)

    def say(self, text: str) -> None:
        """Print one sentence above the table."""
        if self._console is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def trial(self, task: Task, line: dict[str, Any]) -> None:
        """Show the result of one trial."""
        self._recent = [task.tag, *(tag for tag in self._recent if tag != task.tag)]
        if self._live:
            self._live.update(self._table(), refresh=True)
        if self._live or self._quiet:
            return
        now = time.monotonic()
        news = line["failed"] or (line["us"] == line["best_us"] and line["trial"] > 0)
        if news or now - self._printed > _PLAIN_EVERY_S:
            self._printed = now
            unit = "us" if task.model is None else "us modelled"
            outcome = line["error"] or f"{_us(line['us'])} {unit} ({line['kind']})"
            self.say(
                f"[{self._elapsed()}] {task.tag} trial {line['trial']}: {outcome}; "
                f"best {_us(task.best_us)} us, failed {task.failed}"
            )

    def stop(self) -> None:
        """Leave the last table on the screen."""
        if self._live and self._live.is_started:
            self._live.update(self._table(), refresh=True)
            self._live.stop()

    def _elapsed(self) -> str:
        spent = time.monotonic() - self._started
        if math.isinf(self._seconds):
            return f"{spent:.0f} s"
        return f"{spent:.0f}/{self._seconds:.0f} s"

    def _table(self) -> Table:
        from rich.table import Table

        trials = sum(task.trials for task in self._tasks)
        table = Table(title=f"tuning: {self._elapsed()}, {trials} trials")
        table.add_column("workload", overflow="fold")
        unit = "modelled us" if any(task.model for task in self._tasks) else "us"
        for name in (f"default {unit}", f"best {unit}", "speed-up", "trials", "failed"):
            table.add_column(name, justify="right")
        shown = set(self._recent[:_ROWS])
        for task in self._tasks:
            if task.tag in shown:
                ratio = task.default_us / task.best_us if math.isfinite(task.best_us) else math.inf
                speed_up = f"{ratio:.2f}x" if math.isfinite(ratio) else "-"
                table.add_row(
                    task.tag,
                    _us(task.default_us),
                    _us(task.best_us),
                    speed_up,
                    str(task.trials),
                    str(task.failed) if task.failed else "",
                )
        return table


def _console() -> tuple[Console | None, Live | None]:
    """Return what to print with, and the live table on a terminal; plain print without rich."""
    try:
        from rich.console import Console
        from rich.live import Live
    except ModuleNotFoundError:  # a GPU machine need not have it
        return None, None
    console = Console(file=sys.stderr)
    live = Live(console=console, auto_refresh=False, transient=False)
    return console, live if console.is_terminal else None


def _us(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"
