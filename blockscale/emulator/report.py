"""What a launch leaves behind: counts, bytes, hazards, the events of the timeline.

The machine fills a `Report` while it runs, so every counter is a plain dict; nothing here computes
before somebody asks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from blockscale.emulator.errors import EmulationError

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

Severity = Literal["error", "warning"]

MEMORIES = ("global", "shared", "local", "tmem", "param", "const")
ENGINES = (
    "cp.async",
    "tma.load",
    "tma.store",
    "tma.reduce",
    "bulk",
    "tensor core",
    "tcgen05.cp",
    "tcgen05.ld",
    "tcgen05.st",
)

# Kinds of events.
COMPUTE = "compute"
MMA = "MMA"
TRANSFER = "async transfer"
WAIT_MBARRIER = "waiting on mbarrier"
WAIT_BARRIER = "waiting on bar.sync"
WAIT_ASYNC = "waiting for own async work"  # cp.async.wait_group, tcgen05.wait, griddepcontrol.wait
WAITS = (WAIT_MBARRIER, WAIT_BARRIER, WAIT_ASYNC)

SHOWN_OPCODES = 15
SHOWN_CONFLICTS = 8


class HazardError(EmulationError):
    """Raised by `Report.check`: the kernel ran to its end, but not only by right."""


class Event(NamedTuple):
    """One bar of the timeline, in virtual cycles.

    Events that share a `flow` belong together: the wait among them ended because the others did.
    """

    track: str
    start: float
    end: float
    kind: str
    label: str = ""
    line: int | None = None
    flow: int | None = None


def warp_track(cta: int, warp: int) -> str:
    """Return the name of the row of a warp."""
    return f"CTA {cta} / warp {warp}"


def engine_track(cta: int, engine: str) -> str:
    """Return the name of the row of an async engine of a CTA."""
    return f"CTA {cta} / {engine}"


@dataclass(frozen=True, slots=True)
class Hazard:
    """One broken rule at one place; what is only doubtful has the severity "warning"."""

    kind: str
    severity: Severity
    message: str
    kernel: str = ""
    line: int | None = None
    opcode: str = ""
    cta: int | tuple[int, int, int] | None = None
    warp: int | None = None
    lane: int | None = None
    other: str | None = None
    other_line: int | None = None

    @property
    def key(self) -> tuple[str, int | None, int | str | None]:
        """What two hazards share that are reported once."""
        other = self.other if self.other_line is None else self.other_line
        return self.kind, self.line, other

    @property
    def place(self) -> str:
        """Return where it happened: line, opcode, CTA, warp, lane."""
        line = "" if self.line is None else f"line {self.line}"
        words = [line, self.opcode]
        for name, number in (("CTA", self.cta), ("warp", self.warp), ("lane", self.lane)):
            words.append("" if number is None else f"{name} {number}")
        return ", ".join(filter(None, words)) or "no place"

    def __str__(self) -> str:
        other = f"; the other access: {self.other}" if self.other else ""
        return f"{self.kind} at {self.place}{other}: {self.message}"


def _memory_counters() -> dict[str, dict[str, int]]:
    return {name: {"read": 0, "written": 0} for name in MEMORIES}


def _engine_counters() -> dict[str, dict[str, int]]:
    return {name: {"operations": 0, "bytes": 0} for name in ENGINES}


@dataclass
class Report:
    """All that one launch tells about itself."""

    kernel: str = ""
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (1, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    seed: int = 0
    instructions: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Warp-instructions by opcode."""
    bytes: dict[str, dict[str, int]] = field(default_factory=_memory_counters)
    """Bytes 'read' and 'written' of each memory, by threads and by the copies that they issue."""
    engines: dict[str, dict[str, int]] = field(default_factory=_engine_counters)
    """'operations' and 'bytes' of each asynchronous engine."""
    tmem_columns_high_water: int = 0
    smem_bytes: int = 0
    """Shared memory touched in the CTA that touched most of it."""
    bank_conflicts: dict[int, dict[str, int]] = field(default_factory=dict)
    """PTX line -> 'accesses' (warp-instructions), 'wavefronts' they took, 'ideal' wavefronts."""
    hazards: list[Hazard] = field(default_factory=list)
    """The first hazard of each kind at each place; `count` says how often it came again."""
    cycles: float = 0.0
    wall_seconds: float = 0.0
    warp_instructions: int = 0
    events: list[Event] = field(default_factory=list)
    _counts: dict[tuple[Any, ...], int] = field(default_factory=dict, repr=False)

    def add(self, hazard: Hazard) -> bool:
        """Count a hazard; return whether it is the first of its kind at its place."""
        key = hazard.key
        seen = self._counts.get(key, 0)
        self._counts[key] = seen + 1
        if not seen:
            self.hazards.append(hazard)
        return not seen

    def count(self, hazard: Hazard) -> int:
        """Return how often a hazard happened."""
        return self._counts.get(hazard.key, 1)

    def moved(self, memory: str, *, read: int = 0, written: int = 0) -> None:
        """Count bytes that were moved to or from a memory."""
        row = self.bytes[memory]
        row["read"] += read
        row["written"] += written

    def operated(self, engine: str, nbytes: int, operations: int = 1) -> None:
        """Count what an asynchronous engine did."""
        row = self.engines[engine]
        row["operations"] += operations
        row["bytes"] += nbytes

    def banked(self, line: int, wavefronts: int, ideal: int, accesses: int = 1) -> None:
        """Count shared-memory accesses of a PTX line and the wavefronts that they took."""
        row = self.bank_conflicts.get(line)
        if row is None:
            row = self.bank_conflicts[line] = {"accesses": 0, "wavefronts": 0, "ideal": 0}
        row["accesses"] += accesses
        row["wavefronts"] += wavefronts
        row["ideal"] += ideal

    @property
    def errors(self) -> list[Hazard]:
        """The hazards that make a kernel wrong."""
        return [h for h in self.hazards if h.severity == "error"]

    @property
    def warnings(self) -> list[Hazard]:
        """The hazards that are only doubtful."""
        return [h for h in self.hazards if h.severity != "error"]

    @property
    def ok(self) -> bool:
        """Whether no hazard makes the kernel wrong."""
        return not self.errors

    def check(self) -> Report:
        """Return the report itself; raise HazardError, which names every error, if there is one."""
        errors = self.errors
        if errors:
            noun = "hazard" if len(errors) == 1 else "hazards"
            found = "\n".join(f"  {self._times(h)}{h}" for h in errors)
            raise HazardError(
                f"{self.kernel}: {len(errors)} {noun} with seed {self.seed}:\n{found}"
            )
        return self

    def _times(self, hazard: Hazard) -> str:
        count = self.count(hazard)
        return "" if count == 1 else f"{count} x "

    def to_json(self, *, events: bool = False) -> dict[str, Any]:
        """Return everything as JSON types; the timeline's events only when asked for."""
        hazards = [asdict(h) | {"count": self.count(h)} for h in self.hazards]
        data: dict[str, Any] = {
            "kernel": self.kernel,
            "grid": list(self.grid),
            "block": list(self.block),
            "cluster": list(self.cluster),
            "seed": int(self.seed),
            "ok": self.ok,
            "warp_instructions": int(self.warp_instructions),
            "instructions": {k: int(v) for k, v in _largest(self.instructions)},
            "bytes": {m: {k: int(v) for k, v in row.items()} for m, row in self.bytes.items()},
            "engines": {e: {k: int(v) for k, v in row.items()} for e, row in self.engines.items()},
            "tmem_columns_high_water": int(self.tmem_columns_high_water),
            "smem_bytes": int(self.smem_bytes),
            "bank_conflicts": [
                {"line": int(line), **{k: int(v) for k, v in row.items()}}
                for line, row in sorted(self.bank_conflicts.items())
            ],
            "hazards": [{k: _plain(v) for k, v in h.items()} for h in hazards],
            "cycles": float(self.cycles),
            "wall_seconds": round(float(self.wall_seconds), 4),
        }
        if events:
            data["events"] = [{k: _plain(v) for k, v in e._asdict().items()} for e in self.events]
        return data

    def table(self, opcodes: int = SHOWN_OPCODES) -> Group:
        """Return rich tables: instructions, bytes, engines, bank conflicts, hazards."""
        try:
            import rich.table  # noqa: F401
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(
                f"Report.table: the package {missing.name!r} is missing; install it, or use "
                "Report.to_json()",
                name=missing.name,
            ) from None
        return _tables(self, opcodes)

    def __str__(self) -> str:
        verdict = "no hazard"
        if self.hazards:
            verdict = f"{len(self.errors)} errors, {len(self.warnings)} warnings"
        return (
            f"{self.kernel}, seed {self.seed}: {self.warp_instructions:,} warp-instructions, "
            f"{self.cycles:,.0f} virtual cycles, {self.wall_seconds:.2f} s, {verdict}"
        )


def _largest(counts: dict[str, int]) -> Iterable[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _plain(value: Any) -> Any:
    """Return a NumPy scalar as the Python number that JSON knows."""
    return value.item() if hasattr(value, "item") else value


# tables for a terminal -------------------------------------------------------------------------
def _tables(report: Report, opcodes: int) -> Group:
    """Return all tables of a report, one under the other; what is empty is left out."""
    from rich.console import Group
    from rich.table import Table

    middle = Table.grid(padding=(0, 4))
    middle.add_row(_instructions(report, opcodes), Group(_memories(report), "", _engines(report)))
    parts: list[RenderableType] = [_head(report), "", middle]
    if any(row["wavefronts"] > row["ideal"] for row in report.bank_conflicts.values()):
        parts += ["", _conflicts(report)]
    parts += ["", _hazards(report)]
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    """Return a table whose first column is text and whose others are numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    return table


def _head(report: Report) -> Text:
    from rich.text import Text

    def shape(sizes: Iterable[int]) -> str:
        return " x ".join(map(str, sizes))

    rate = report.warp_instructions / report.wall_seconds if report.wall_seconds else 0.0
    return Text.assemble(
        (report.kernel, "bold"),
        f"  grid {shape(report.grid)}, block {shape(report.block)}, "
        f"cluster {shape(report.cluster)}, seed {report.seed}\n"
        f"{report.warp_instructions:,} warp-instructions in {report.wall_seconds:.2f} s "
        f"({rate:,.0f}/s), {report.cycles:,.0f} virtual cycles; shared memory "
        f"{report.smem_bytes:,} bytes, TMEM {report.tmem_columns_high_water} columns",
    )


def _instructions(report: Report, opcodes: int) -> Table:
    from rich.text import Text

    table = _table("instructions", "opcode", "warps", "share")
    ranked = sorted(report.instructions.items(), key=lambda item: (-item[1], item[0]))
    total = sum(report.instructions.values()) or 1
    for opcode, count in ranked[:opcodes]:
        table.add_row(Text(opcode), f"{count:,}", f"{count / total:.1%}")
    rest = sum(count for _, count in ranked[opcodes:])
    if rest:
        others = f"{len(ranked) - opcodes} other opcodes"
        table.add_row(others, f"{rest:,}", f"{rest / total:.1%}", style="dim")
    return table


def _memories(report: Report) -> Table:
    table = _table("memory", "memory", "bytes read", "bytes written")
    for name, row in report.bytes.items():
        if any(row.values()):
            table.add_row(name, f"{row['read']:,}", f"{row['written']:,}")
    return table


def _engines(report: Report) -> Table:
    table = _table("async engines", "engine", "operations", "bytes")
    for name, row in report.engines.items():
        if any(row.values()):
            table.add_row(name, f"{row['operations']:,}", f"{row['bytes']:,}")
    return table


def _conflicts(report: Report) -> Table:
    table = _table("shared-memory bank conflicts", "line", "accesses", "wavefronts", "ideal", "x")
    found = [(line, r) for line, r in report.bank_conflicts.items() if r["wavefronts"] > r["ideal"]]
    worst = sorted(found, key=lambda item: (item[1]["ideal"] - item[1]["wavefronts"], item[0]))
    for line, row in worst[:SHOWN_CONFLICTS]:
        numbers = (f"{row[name]:,}" for name in ("accesses", "wavefronts", "ideal"))
        table.add_row(str(line), *numbers, f"{row['wavefronts'] / max(row['ideal'], 1):.1f}")
    if len(worst) > SHOWN_CONFLICTS:
        table.add_row(f"{len(worst) - SHOWN_CONFLICTS} more lines", style="dim")
    return table


def _hazards(report: Report) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    if not report.hazards:
        return Text("no hazard", style="green")
    table = Table(title="hazards", title_justify="left", title_style="bold", show_lines=True)
    table.expand = True
    table.add_column("")
    table.add_column("where", overflow="fold", ratio=2)
    table.add_column("what", overflow="fold", ratio=3)
    for hazard in [*report.errors, *report.warnings]:
        style = "red" if hazard.severity == "error" else "yellow"
        count = report.count(hazard)
        times = "" if count == 1 else f"\n{count:,} times"
        where = hazard.place.replace(", ", "\n", 1)
        if hazard.other:
            where += f"\nother: {hazard.other}"
        what = Text.assemble((hazard.kind, "bold"), f"\n{hazard.message}")
        table.add_row(Text(f"{hazard.severity}{times}", style=style), Text(where), what)
    return table
