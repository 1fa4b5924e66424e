"""The commands ``blockscale logs``: look after tuning logs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blockscale.cli.common import JSON, committed, counted, echo, escaped, print_json

if TYPE_CHECKING:
    from blockscale.building.commit import Change


@click.group()
def logs() -> None:
    """Look after tuning logs.

    Example: blockscale logs check tuning_logs
    """


@logs.command()
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path), metavar="[DIR]...")
@JSON
def check(folders: tuple[Path, ...], as_json: bool) -> None:
    """Check that every entry of the logs still fits its kernel; nothing is run.

    Works on any machine for the logs of every vector width. Exit code 1 when there is a problem;
    a folder without any entry is one.

    Example: blockscale logs check tuning_logs
    """
    from blockscale.building.logs import check as run
    from blockscale.building.logs import entries

    chosen = list(folders) or [committed()]
    problems, count = run(chosen), sum(map(entries, chosen))
    if as_json:
        found = [{"where": p.where, "what": p.what} for p in problems]
        print_json({"folders": [str(f) for f in chosen], "entries": count, "problems": found})
    else:
        for problem in problems:
            echo(str(problem))
        where = ", ".join(map(str, chosen))
        shown = counted(count, "entry", "entries")
        if problems:
            echo(f"{where}: {shown}, {counted(len(problems), 'problem')}")
        else:
            echo(f"{where}: {shown} {'fits' if count == 1 else 'fit'}")
    if problems:
        raise SystemExit(1)


@logs.command()
@click.argument(
    "folders",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR...",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    metavar="DIR",
    help="Log to write: new, or one that is merged into.",
)
@JSON
def merge(folders: tuple[Path, ...], output: Path, as_json: bool) -> None:
    """Merge what several machines have tuned: work folders, or logs.

    Of a workload the fastest record wins, and stays what is there if that is faster. Times of two
    GPUs of different names do not compare and are refused; of CPUs of one level, the line of a
    workload names both. Entries whose kernel has changed since are passed over.

    Example: blockscale logs merge host1/logs host2/logs -o logs
    """
    from blockscale.building.commit import merge as run

    changes, passed = run(folders, output)
    if as_json:
        unfit = [{"where": p.where, "what": p.what} for p in passed]
        print_json(
            {"output": str(output), "changed": list(map(_facts, changes)), "passed_over": unfit}
        )
        return
    for change in changes:
        was = "new" if change.old is None else f"was {_time(change.old)}"
        now = f"{change.place}: {escaped(change.tag)}: {_time(change.entry)}"
        echo(f"{now} from {change.source}; {was}")
    for problem in passed:
        echo(escaped(problem))
    left = f", {counted(len(passed), 'entry', 'entries')} passed over"
    echo(f"{output}: {counted(len(changes), 'workload')} changed{left if passed else ''}")


def _facts(change: Change) -> dict[str, Any]:
    where = {
        "folder": change.place,
        "workload": change.tag,
        "source": str(change.source),
    }
    return {**where, "now": _origin(change.entry), "was": change.old and _origin(change.old)}


def _origin(entry: dict[str, Any]) -> dict[str, Any]:
    """Return microseconds, and what they were measured on or which model says so, and when."""
    unit = "modelled_us" if entry.get("modelled") else "us"
    machine = entry.get("gpu") or entry.get("model") or entry.get("cpu")
    return {unit: entry.get(f"best_{unit}"), "machine": machine, "date": entry.get("date")}


def _time(entry: dict[str, Any]) -> str:
    us, machine, date = _origin(entry).values()
    unit = "modelled us" if entry.get("modelled") else "us"
    return f"{us:.2f} {unit} ({escaped(machine)}, {escaped(date)})"
