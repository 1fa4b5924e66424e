"""The commands ``blockscale logs``: look after tuning logs."""

from __future__ import annotations

from pathlib import Path

import click

from blockscale.cli.common import JSON, committed, counted, echo, print_json


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
        shown = "1 entry" if count == 1 else f"{count} entries"
        if problems:
            echo(f"{where}: {shown}, {counted(len(problems), 'problem')}")
        else:
            echo(f"{where}: {shown} {'fits' if count == 1 else 'fit'}")
    if problems:
        raise SystemExit(1)
