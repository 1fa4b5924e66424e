"""The default schedules against the tuned ones, by the committed logs, as a table.

    python -m bench.tuned docs/tuning.md

puts it between the tuned comments of the page.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import click

from bench.report import ROOT, fill_page, markdown_table, us_text
from blockscale.building.records import META

LOGS = ROOT / "tuning_logs"
HEADINGS = (
    *("op", "tuned on", "workloads"),
    *("median speed-up", "largest", "of", "default, us", "tuned, us"),
)


def row(meta: dict[str, Any]) -> list[str]:
    """Return the cells of one op on one target."""
    entries, found = meta["workloads"], {}
    machines: dict[str, None] = {}
    for tag, entry in entries.items():
        unit = "modelled_us" if entry.get("modelled") else "us"
        machine = entry.get("gpu") or entry.get("cpu") or "the model of a B200"
        machines[f"{machine}, {entry['date']}"] = None
        if entry.get(f"default_{unit}"):
            found[tag] = entry[f"default_{unit}"], entry[f"best_{unit}"]
    first = [f"`{meta['op']}`", f"{meta['level']}: {'; '.join(machines)}", str(len(entries))]
    if not found:  # no default schedule was measured
        return first + [""] * 5
    gains = {tag: default / best for tag, (default, best) in found.items()}
    most = max(gains, key=lambda tag: gains[tag])
    speeds = [f"{median(gains.values()):.2f}", f"{gains[most]:.2f}"]
    return [*first, *speeds, f"`{most}`", *map(us_text, found[most])]


def table(logs: Path = LOGS) -> str:
    """Return the table of all logs."""
    metas = [json.loads(path.read_text()) for path in sorted(logs.glob(f"*/*/{META}"))]
    return markdown_table(HEADINGS, [row(meta) for meta in metas], left=2)


@click.command(help=__doc__)
@click.argument("page", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(page: Path) -> None:
    """Fill the page."""
    fill_page(page, {"tuned": table()})


if __name__ == "__main__":
    main()
