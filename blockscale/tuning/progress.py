"""What the user sees while tuning: a line for all that is news, and a bar on a terminal."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from blockscale.tuning.task import Task

_EVERY_S = 5.0
"""Without news a line comes as often."""


class Display:
    """Shows the trials, drawn between them so as not to disturb a measurement."""

    def __init__(self, seconds: float, quiet: bool = False) -> None:
        """``quiet``: show nothing but what the user must know (`say`)."""
        self._quiet = quiet
        console = Console(file=sys.stderr)
        columns = TextColumn("tuning"), BarColumn(), TimeElapsedColumn()
        hidden = quiet or not console.is_terminal
        self._bar = Progress(*columns, console=console, auto_refresh=False, disable=hidden)
        self._started, self._seconds, self._printed = time.monotonic(), seconds, 0.0

    def start(self) -> None:
        """Show the bar, which is the session's time."""
        limited = math.isfinite(self._seconds)
        self._time = self._bar.add_task("", total=self._seconds if limited else None)
        self._bar.start()

    def say(self, text: str) -> None:
        """Print one sentence above the bar."""
        self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def trial(self, task: Task, line: dict[str, Any]) -> None:
        """Show the result of one trial."""
        now = time.monotonic()
        self._bar.update(self._time, completed=now - self._started, refresh=True)
        news = line["failed"] or (line["us"] == line["best_us"] and line["trial"] > 0)
        if self._quiet or not (news or now - self._printed > _EVERY_S):
            return
        self._printed = now
        unit = "us" if task.model is None else "us modelled"
        outcome = line["error"] or f"{_us(line['us'])} {unit} ({line['kind']})"
        self.say(
            f"[{now - self._started:.0f}/{self._seconds:.0f} s] {task.tag} trial {line['trial']}: "
            f"{outcome}; best {_us(task.best_us)} us of {_us(task.default_us)}, "
            f"failed {task.failed}"
        )

    def stop(self) -> None:
        """Leave the last state on the screen."""
        self._bar.stop()


def _us(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"
