"""A `Report` as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

try:
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"Report.table: the package {missing.name!r} is missing; pip install 'blockscale[build]', "
        "or use Report.to_json()",
        name=missing.name,
    ) from None

if TYPE_CHECKING:
    from .report import Report

SHOWN_CONFLICTS = 8


def tables(report: Report, opcodes: int) -> Group:
    """Return all tables of a report, one under the other; what is empty is left out."""
    middle = Table.grid(padding=(0, 4))
    middle.add_row(_instructions(report, opcodes), Group(_memories(report), "", _engines(report)))
    parts: list[RenderableType] = [_head(report), "", middle]
    if any(row["wavefronts"] > row["ideal"] for row in report.bank_conflicts.values()):
        parts += ["", _conflicts(report)]
    parts += ["", _hazards(report)]
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    """Return a table whose first column is text and whose others are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    return table


def _head(report: Report) -> Text:
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
